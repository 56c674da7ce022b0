#include "group_checks.hpp"

#include <algorithm>
#include <tuple>
#include <vector>

namespace factormax {

namespace {

bool are_same(const Row& a, const Row& b) {
  return std::tie(a.literals, a.coefs, a.bound, a.kind, a.coef_param, a.bound_param) ==
         std::tie(b.literals, b.coefs, b.bound, b.kind, b.coef_param, b.bound_param);
}

bool is_band(const std::vector<Row>& rows) {
  if (rows.size() != 2) return false;
  Row below = rows[1];
  for (double& coef : below.coefs) coef = -coef;
  below.bound = rows[0].bound;
  below.bound_param = rows[0].bound_param;
  return below.kind == RowKind::inequality && are_same(rows[0], below);
}

// Whether these are the rows of an or, or of an or of negated literals, which is an and. A single
// row needs no kernel, and may be anything.
bool is_or_out(const std::vector<Row>& rows, int size) {
  if (rows.size() == 1) return true;
  if (rows.size() != static_cast<std::size_t>(size) || rows[0].coefs.empty()) return false;
  const int last = size - 1;
  const double sign = rows[0].coefs[0] < 0 ? -1 : 1;
  Row sum{{}, {}, sign < 0 ? size - 2.0 : 0.0, RowKind::inequality, -1, -1};
  for (int k = 0; k < size; ++k) {
    sum.literals.push_back(k);
    sum.coefs.push_back(k < last ? -sign : sign);
    const Row one{{k, last}, {sign, -sign}, 0, RowKind::inequality, -1, -1};
    if (!are_same(rows[k], k < last ? one : sum)) return false;
  }
  return true;
}

// What is wrong with the parameter that a row uses as `word`; empty if nothing is.
std::string check_param(const Rule& rule, const char* word, int param, bool per_literal) {
  if (param == -1) return "";
  const std::string use = std::string(word) + "=" + std::to_string(param);
  if (param < 0 || param >= rule.num_params()) {
    return use + ", but it has " + std::to_string(rule.num_params()) + " parameters";
  }
  if ((rule.per_literal[param] != 0) == per_literal) return "";
  const auto place = static_cast<std::size_t>(param);
  const std::string name =
      place < rule.param_names.size() ? " (" + rule.param_names[place] + ")" : "";
  const char* words[] = {"factor", "literal"};
  return use + name + " has one number per " + words[!per_literal] + ", but must have one per " +
         words[per_literal];
}

// Likewise with a row. `seen`: the last row that each literal was in.
std::string check_row(const Rule& rule, const Row& row, std::vector<const Row*>& seen) {
  if (row.literals.size() != row.coefs.size()) {
    return std::to_string(row.coefs.size()) + " coefficients for " +
           std::to_string(row.literals.size()) + " literals";
  }
  for (const std::int32_t l : row.literals) {
    if (l < 0 || l >= rule.size) {
      return "literal " + std::to_string(l) + ", but there are " + std::to_string(rule.size);
    }
    if (seen[l] == &row) return "literal " + std::to_string(l) + " is in it twice";
    seen[l] = &row;
  }
  const std::string error = check_param(rule, "coef_param", row.coef_param, true);
  return error.empty() ? check_param(rule, "bound_param", row.bound_param, false) : error;
}

std::string listed(const std::vector<std::int32_t>& shape) {
  std::string text;
  for (const std::int32_t s : shape) text += (text.empty() ? "" : ", ") + std::to_string(s);
  return "(" + text + ")";
}

}  // namespace

bool are_same(const Rule& a, const Rule& b) {
  return std::tie(a.name, a.block, a.size, a.per_literal) ==
             std::tie(b.name, b.block, b.size, b.per_literal) &&
         std::equal(a.rows.begin(), a.rows.end(), b.rows.begin(), b.rows.end(),
                    [](const Row& r, const Row& s) { return are_same(r, s); });
}

std::string check_rule(const Rule& rule, std::int64_t size) {
  if (rule.size != size || size < 0) {
    return "its rows are for " + std::to_string(rule.size) + " literals, but it has " +
           std::to_string(size);
  }
  if (rule.rows.empty()) return "it has no rows";
  std::vector<const Row*> seen(static_cast<std::size_t>(size));
  for (std::size_t r = 0; r < rule.rows.size(); ++r) {
    const std::string error = check_row(rule, rule.rows[r], seen);
    if (!error.empty()) return "row " + std::to_string(r) + ": " + error;
  }
  const bool is_block = rule.block == BlockKind::band     ? is_band(rule.rows)
                        : rule.block == BlockKind::or_out ? is_or_out(rule.rows, rule.size)
                                                          : true;
  return is_block ? "" : "its rows are not those of its block kind";
}

int slots_of(OracleKind kind, const std::vector<std::int32_t>& shape) {
  Oracle oracle;
  Workspace counter;
  oracle.allocate(kind, {shape.data(), static_cast<int>(shape.size())}, counter);
  return oracle.slots();
}

std::string check_oracle(const Group& group, std::int64_t vars) {
  const oracle::Shape shape{group.shape.data(), static_cast<int>(group.shape.size())};
  if (!fits(group.oracle, shape, vars, group.num_scores)) {
    return "its oracle has no shape " + listed(group.shape) + " with " + std::to_string(vars) +
           " variables and " + std::to_string(group.num_scores) + " scores";
  }
  const int slots = slots_of(group.oracle, group.shape);
  if (group.slots >= 0 && group.slots != slots) {
    return "slots is " + std::to_string(group.slots) + ", but must be " + std::to_string(slots) +
           ", as slots() of its oracle says";
  }
  return "";
}

}  // namespace factormax
