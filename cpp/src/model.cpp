#include "factormax/model.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <tuple>

#include "factormax/components.hpp"
#include "factormax/lone_rows.hpp"
#include "factormax/structured/oracle.hpp"

namespace factormax {

namespace {

constexpr std::int64_t kLimit = std::int64_t(1) << 30;  // the core indexes with 32 bits
constexpr const char* kTooLarge = "the graph is too large: the core indexes with 32 bits";

// The product, or a number that is too large.
std::int64_t product(const std::vector<std::int64_t>& shape) {
  std::int64_t total = 1;
  for (const std::int64_t s : shape) {
    if (s < 0) return kLimit;
    total *= s;
    if (total == 0) return 0;
    if (total >= kLimit) return kLimit;
  }
  return total;
}

// Calls visit(number, offset) for each place of a strided shape, in C order.
template <class Visit>
void walk(const std::vector<std::int64_t>& shape, const std::vector<std::int64_t>& strides,
          std::int64_t offset, Visit visit) {
  const std::int64_t count = product(shape);
  std::vector<std::int64_t> at(shape.size(), 0);
  for (std::int64_t number = 0; number < count; ++number) {
    visit(number, offset);
    for (std::size_t axis = shape.size(); axis-- > 0;) {
      offset += strides[axis];
      if (++at[axis] < shape[axis]) break;
      offset -= strides[axis] * shape[axis];
      at[axis] = 0;
    }
  }
}

bool is_sound(const Part& part) {
  return part.outer.size() == part.outer_strides.size() &&
         part.inner.size() == part.inner_strides.size() && product(part.outer) < kLimit &&
         product(part.inner) < kLimit;
}

bool are_same(const Row& a, const Row& b) {
  return std::tie(a.literals, a.coefs, a.bound, a.kind, a.coef_param, a.bound_param) ==
         std::tie(b.literals, b.coefs, b.bound, b.kind, b.coef_param, b.bound_param);
}

bool are_same(const Rule& a, const Rule& b) {
  return std::tie(a.name, a.block, a.size, a.per_literal) ==
             std::tie(b.name, b.block, b.size, b.per_literal) &&
         std::equal(a.rows.begin(), a.rows.end(), b.rows.begin(), b.rows.end(),
                    [](const Row& r, const Row& s) { return are_same(r, s); });
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

// Likewise with the rows of factors over `size` variables.
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

std::string listed(const std::vector<std::int32_t>& shape) {
  std::string text;
  for (const std::int32_t s : shape) text += (text.empty() ? "" : ", ") + std::to_string(s);
  return "(" + text + ")";
}

// How long the lists of variables are that an oracle makes. The shape must fit.
int slots_of(OracleKind kind, const std::vector<std::int32_t>& shape) {
  Oracle oracle;
  Workspace counter;
  oracle.allocate(kind, {shape.data(), static_cast<int>(shape.size())}, counter);
  return oracle.slots();
}

// What is wrong with structured factors over `vars` variables each; empty if nothing is.
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

// Totals over all groups so far.
struct Totals {
  std::int64_t incidences = 0, entries = 0, rows = 0;

  // False if it is too much.
  bool add(const Group& group, std::int64_t count, std::int64_t size) {
    if (size >= kLimit) return false;
    incidences += count * size;
    if (group.rule != nullptr) {
      rows += count * static_cast<std::int64_t>(group.rule->rows.size());
      for (const Row& row : group.rule->rows) {
        entries += count * static_cast<std::int64_t>(row.literals.size());
      }
    }
    return incidences < kLimit && entries < kLimit && rows < kLimit;
  }
};

// b less the terms; 0 where only rounding is left, for a bound that the negated literals meet
// exactly must not become one that nothing meets.
double difference(double bound, double terms, double size) {
  const double total = bound - terms;
  if (!std::isfinite(bound)) return total;
  const double rounding = 8 * std::numeric_limits<double>::epsilon() * (std::fabs(bound) + size);
  return std::fabs(total) <= rounding ? 0.0 : total;
}

// A bound beyond all reason never binds, and must not become infinite.
double within_reason(double bound) { return std::min(std::max(bound, -1e30), 1e30); }

std::shared_ptr<const Rule> held_rule() {
  static const std::shared_ptr<const Rule> rule = [] {
    auto made = std::make_shared<Rule>();
    made->name = "a held variable";  // no factor has this name
    made->size = 1;
    made->rows.push_back({{0}, {1.0}, 1.0, RowKind::inequality, -1, -1});
    return made;
  }();
  return rule;
}

}  // namespace

// The literals of a group, (k, d).
struct Model::Literals {
  std::int64_t count = 0, size = 0;
  std::vector<std::int32_t> var;
  std::vector<std::uint8_t> negated;

  std::int32_t at(std::int64_t i, std::int64_t j) const { return var[i * size + j]; }

  // How many there are.
  std::string measure(const Group& group) {
    if (group.parts.empty()) return "a factor has no variables";
    for (const Part& part : group.parts) {
      if (!is_sound(part)) return kTooLarge;
      const std::int64_t k = product(part.outer);
      if (&part != &group.parts.front() && k != count) return "parts of different numbers";
      count = k;
      size += product(part.inner);
    }
    return "";
  }

  // Which ones they are.
  std::string fill(const Group& group, std::int64_t num_vars) {
    var.resize(count * size);
    negated.resize(var.size());
    std::int64_t first = 0;
    bool in_range = true;
    for (const Part& part : group.parts) {
      const std::int64_t inner = product(part.inner);
      const auto put = [&](std::int64_t i, std::int64_t j, std::int64_t variable, bool is_negated) {
        in_range = in_range && variable >= 0 && variable < num_vars;
        var[i * size + first + j] = static_cast<std::int32_t>(variable);
        negated[i * size + first + j] = is_negated;
      };
      if (part.literals.empty()) {
        walk(part.outer, part.outer_strides, part.offset, [&](std::int64_t i, std::int64_t begin) {
          walk(part.inner, part.inner_strides, begin,
               [&](std::int64_t j, std::int64_t variable) { put(i, j, variable, part.negated); });
        });
      } else if (part.literals.size() == static_cast<std::size_t>(count * inner)) {
        for (std::int64_t i = 0; i < count; ++i) {
          for (std::int64_t j = 0; j < inner; ++j) {
            const std::int64_t literal = part.literals[i * inner + j];
            put(i, j, literal >> 1, (literal & 1) != 0);
          }
        }
      } else {
        return "a list of literals has the wrong size";
      }
      first += inner;
    }
    return in_range ? "" : "an index is out of range";
  }
};

// Finds variables that are in a factor twice.
class Model::Repeats {
 public:
  explicit Repeats(std::int64_t num_vars) : last_(static_cast<std::size_t>(num_vars), -1) {}

  std::string find(const Group& group, const Literals& literals) {
    for (std::int64_t i = 0; i < literals.count; ++i, ++factors_) {
      for (std::int64_t j = 0; j < literals.size; ++j) {
        std::int64_t& last = last_[literals.at(i, j)];
        if (last == factors_) {
          const std::string name = group.rule != nullptr ? group.rule->name
                                   : group.structured    ? group.name
                                                         : "Pair";
          return name + ": variable " + std::to_string(literals.at(i, j)) + " is in it twice.";
        }
        last = factors_;
      }
    }
    return "";
  }

 private:
  std::vector<std::int64_t> last_;  // the factor that a variable was last in
  std::int64_t factors_ = 0;
};

std::shared_ptr<const Model> Model::make(std::int64_t num_vars, const std::vector<Group>& groups,
                                         std::string& error) {
  auto model = std::make_shared<Model>();
  error = model->lay_out(num_vars, groups);
  return error.empty() ? model : nullptr;
}

std::shared_ptr<const Model> Model::bounded() const {
  std::call_once(bounded_once_, [this] { bounded_ = make_bounded(); });
  return bounded_;
}

std::shared_ptr<const Model> Model::make_bounded() const {
  std::vector<Group> groups = groups_;
  Group held;
  held.rule = held_rule();
  Part all;
  all.outer = {num_vars_};
  all.outer_strides = {1};
  held.parts.push_back(all);
  groups.push_back(held);
  auto model = std::make_shared<Model>();
  model->lay_out(num_vars_, groups);
  model->has_coef_params_ = true;  // they depend on what is held
  return model;
}

std::string Model::lay_out(std::int64_t num_vars, const std::vector<Group>& groups) {
  if (num_vars < 0 || num_vars >= kLimit) return "the graph has too many variables";
  num_vars_ = static_cast<int>(num_vars);
  groups_ = groups;
  std::vector<Literals> literals(groups.size());
  Totals totals;
  Repeats repeats(num_vars);
  for (std::size_t g = 0; g < groups.size(); ++g) {
    Literals& own = literals[g];
    std::string error = own.measure(groups[g]);
    if (error.empty() && !totals.add(groups[g], own.count, own.size)) error = kTooLarge;
    if (error.empty()) error = own.fill(groups[g], num_vars);
    if (error.empty()) error = repeats.find(groups[g], own);
    if (!error.empty()) return error;
  }
  for (std::size_t g = 0; g < groups.size(); ++g) {
    const std::string error = place_group(static_cast<int>(g), literals[g]);
    if (!error.empty()) return error;
  }
  for (Bundle& bundle : bundles_) lay_out_bundle(bundle, literals);
  mark_isolated(literals);
  return lay_out_structured(groups, literals);
}

// Notes where its parameters are, and adds its pairs, or the group to the bundle of its rule.
std::string Model::place_group(int g, const Literals& own) {
  const Group& group = groups_[g];
  group_count_.push_back(own.count);
  first_param_.push_back(static_cast<int>(param_sizes_.size()));
  if (group.structured) {
    if (group.has_param) param_sizes_.push_back(own.count);
    return "";
  }
  if (group.rule == nullptr) {
    if (own.size != 2 && own.count > 0) return "a pair has two variables";
    pair_var_.insert(pair_var_.end(), own.var.begin(), own.var.end());
    pair_negated_.insert(pair_negated_.end(), own.negated.begin(), own.negated.end());
    return "";
  }
  const Rule& rule = *group.rule;
  const std::string error = check_rule(rule, own.count > 0 ? own.size : rule.size);
  if (!error.empty()) return rule.name + ": " + error;
  for (const std::uint8_t per_literal : rule.per_literal) {
    param_sizes_.push_back(own.count * (per_literal != 0 ? own.size : 1));
  }
  if (own.count == 0) return "";
  const auto same = [&](const Bundle& b) { return are_same(*b.rule, rule); };
  auto bundle = std::find_if(bundles_.begin(), bundles_.end(), same);
  if (bundle == bundles_.end()) bundle = bundles_.insert(bundle, Bundle{group.rule, {}, 0, 0, 0});
  bundle->groups.push_back(g);
  return "";
}

void Model::lay_out_bundle(Bundle& bundle, const std::vector<Literals>& literals) {
  const Rule& rule = *bundle.rule;
  bundle.first_row = num_rows();
  bundle.first_entry = num_entries();
  bundle.first_block = num_blocks();
  for (const Row& row : rule.rows) {
    has_coef_params_ = has_coef_params_ || row.coef_param >= 0;
    has_row_params_ = has_row_params_ || row.coef_param >= 0 || row.bound_param >= 0;
  }
  for (const int g : bundle.groups) {
    const Literals& own = literals[g];
    for (std::int64_t i = 0; i < own.count; ++i) {
      for (const Row& row : rule.rows) {
        double terms = 0, size = 0;
        for (std::size_t e = 0; e < row.literals.size(); ++e) {
          const std::int64_t at = i * own.size + row.literals[e];
          const bool negated = own.negated[at] != 0;
          col_.push_back(own.var[at]);
          entry_negated_.push_back(negated);
          coef_.push_back(negated ? -row.coefs[e] : row.coefs[e]);
          if (!negated) continue;
          terms += row.coefs[e];
          size += std::fabs(row.coefs[e]);
        }
        rhs_.push_back(difference(row.bound, terms, size));
        row_kind_.push_back(static_cast<std::int8_t>(row.kind));
        row_ptr_.push_back(num_entries());
      }
      block_kind_.push_back(static_cast<std::int8_t>(rule.block));
      block_ptr_.push_back(num_rows());
    }
  }
}

void Model::mark_isolated(const std::vector<Literals>& literals) {
  std::vector<std::int32_t> degree(static_cast<std::size_t>(num_vars_), 0);
  for (const Literals& own : literals) {
    for (const std::int32_t j : own.var) ++degree[j];
  }
  const auto alone = [&](const std::int32_t* begin, const std::int32_t* end) {
    return std::all_of(begin, end, [&](std::int32_t j) { return degree[j] == 1; });
  };
  for (const Bundle& bundle : bundles_) {
    for (const int g : bundle.groups) {
      const Literals& own = literals[g];
      for (std::int64_t i = 0; i < own.count; ++i) {
        const std::int32_t* begin = own.var.data() + i * own.size;
        block_isolated_.push_back(alone(begin, begin + own.size));
      }
    }
  }
  for (int q = 0; q < num_pairs(); ++q) {
    const std::int32_t* begin = pair_var_.data() + 2 * q;
    block_isolated_.push_back(alone(begin, begin + 2));
  }
}

std::string Model::lay_out_structured(const std::vector<Group>& groups,
                                      const std::vector<Literals>& literals) {
  std::vector<int> first(static_cast<std::size_t>(num_vars_), -1);  // the first that has it
  for (std::size_t g = 0; g < groups.size(); ++g) {
    const Group& group = groups[g];
    const Literals& own = literals[g];
    if (!group.structured) continue;
    if (own.count > 0) {
      const std::string error = check_oracle(group, own.size);
      if (!error.empty()) return group.name + ": " + error;
    }
    if (std::any_of(own.negated.begin(), own.negated.end(), [](int n) { return n != 0; })) {
      return group.name + ": a structured factor takes no negated variables";
    }
    for (std::int64_t i = 0; i < own.count; ++i) {
      const int f = num_structured();
      bool linked = group.link == 2 || (group.link == 1 && i > 0);
      for (std::int64_t j = 0; j < own.size; ++j) {
        int& owner = first[own.at(i, j)];
        if (owner >= 0) linked = true;
        if (owner < 0) owner = f;
      }
      if (linked) num_links_ += static_cast<int>(own.size);
      oracle_group_.push_back(static_cast<int>(g));
      oracle_number_.push_back(static_cast<int>(i));
      oracle_kind_.push_back(static_cast<std::int8_t>(group.oracle));
      oracle_linked_.push_back(linked);
      const auto begin = own.var.begin() + i * own.size;
      oracle_var_.insert(oracle_var_.end(), begin, begin + own.size);
      oracle_var_ptr_.push_back(static_cast<std::int32_t>(oracle_var_.size()));
      oracle_shape_.insert(oracle_shape_.end(), group.shape.begin(), group.shape.end());
      oracle_shape_ptr_.push_back(static_cast<std::int32_t>(oracle_shape_.size()));
      if (std::int64_t(oracle_score_ptr_.back()) + group.num_scores >= kLimit) {
        return kTooLarge;
      }
      oracle_score_ptr_.push_back(oracle_score_ptr_.back() + group.num_scores);
    }
  }
  return "";
}

Layout Model::layout() const {
  Layout p;
  p.num_vars = num_vars_;
  p.num_rows = num_rows();
  p.num_entries = num_entries();
  p.num_pairs = num_pairs();
  p.num_blocks = num_blocks();
  p.num_factors = num_blocks();
  p.row_ptr = row_ptr_.data();
  p.col = col_.data();
  p.kind = row_kind_.data();
  p.pair_var = pair_var_.data();
  p.pair_negated = pair_negated_.data();
  p.block_ptr = block_ptr_.data();
  p.block_kind = block_kind_.data();
  p.block_isolated = block_isolated_.data();
  p.structured.count = num_structured();
  p.structured.num_links = num_links_;
  p.structured.num_scores = oracle_score_ptr_.back();
  p.structured.kind = oracle_kind_.data();
  p.structured.linked = oracle_linked_.data();
  p.structured.var_ptr = oracle_var_ptr_.data();
  p.structured.var = oracle_var_.data();
  p.structured.shape_ptr = oracle_shape_ptr_.data();
  p.structured.shape = oracle_shape_.data();
  p.structured.score_ptr = oracle_score_ptr_.data();
  return p;
}

const Components* Model::components() const {
  std::call_once(components_once_,
                 [this] { components_ = Components::of(layout(), coef_.data()); });
  return components_.get();
}

const LoneRows* Model::lone_rows() const {
  std::call_once(lone_rows_once_, [this] {
    if (!has_coef_params_) lone_rows_ = LoneRows::of(layout(), coef_.data());
  });
  return lone_rows_.get();
}

template <class T>
Problem<T> Model::problem() const {
  Problem<T> p;
  static_cast<Layout&>(p) = layout();
  p.components = components();
  p.lone_rows = lone_rows();
  return p;
}

namespace {

// What a row with a parameter for its coefficients is divided by, so that it is in units of
// variables.
double row_scale(const Row& row, const Param& param, std::int64_t i, std::int64_t first) {
  double largest = 0;
  for (std::size_t e = 0; e < row.literals.size(); ++e) {
    largest = std::max(largest, std::fabs(row.coefs[e] * param.at(i, first + row.literals[e])));
  }
  return largest > 0 ? largest : 1.0;
}

}  // namespace

// Calls visit(row of the rule, first parameter of the group, k times the literals of a factor, k,
// row, entry) for the rows of factor k of every group whose rule has parameters.
template <class Visit>
void Model::visit_rows(Visit visit) const {
  for (const Bundle& bundle : bundles_) {
    if (bundle.rule->num_params() == 0) continue;
    int r = bundle.first_row, entry = bundle.first_entry;
    for (const int g : bundle.groups) {
      for (std::int64_t k = 0; k < group_count_[g]; ++k) {
        for (const Row& row : bundle.rule->rows) {
          visit(row, first_param_[g], k * bundle.rule->size, k, r, entry);
          ++r;
          entry += static_cast<int>(row.literals.size());
        }
      }
    }
  }
}

template <>
const double* Model::constant_coefs<double>() const {
  return coef_.data();
}

template <>
const float* Model::constant_coefs<float>() const {
  std::call_once(narrow_once_, [this] {
    narrow_coef_.resize(coef_.size());
    write_coefs<float>({}, 0, nullptr, narrow_coef_.data());
  });
  return narrow_coef_.data();
}

template <class T>
void Model::write_coefs(const std::vector<Param>& params, std::int64_t instance,
                        const std::int8_t* held, T* coef) const {
  std::transform(coef_.begin(), coef_.end(), coef, [](double a) { return static_cast<T>(a); });
  visit_rows([&](const Row& row, int slots, std::int64_t literal, std::int64_t, int, int entry) {
    if (row.coef_param < 0) return;
    const Param& param = params[slots + row.coef_param];
    const double scale = row_scale(row, param, instance, literal);
    for (std::size_t e = 0; e < row.literals.size(); ++e) {
      const double a = row.coefs[e] * param.at(instance, literal + row.literals[e]) / scale;
      coef[entry + e] = static_cast<T>(entry_negated_[entry + e] != 0 ? -a : a);
    }
  });
  if (held == nullptr) return;
  // x <= 0, -x <= -1, or x <= 1, which says nothing.
  T* own = coef + num_entries() - num_vars_;
  for (int j = 0; j < num_vars_; ++j) own[j] = held[j] == 1 ? T(-1) : T(1);
}

template <class T>
void Model::write_bounds(const std::vector<Param>& params, std::int64_t instance,
                         const std::int8_t* held, T* rhs) const {
  std::transform(rhs_.begin(), rhs_.end(), rhs, [](double b) { return static_cast<T>(b); });
  visit_rows(
      [&](const Row& row, int slots, std::int64_t literal, std::int64_t k, int r, int entry) {
        double scale = 1, terms = 0, size = 0;
        if (row.coef_param >= 0)
          scale = row_scale(row, params[slots + row.coef_param], instance, literal);
        for (std::size_t e = 0; e < row.literals.size(); ++e) {
          if (entry_negated_[entry + e] == 0) continue;
          double a = row.coefs[e];
          if (row.coef_param >= 0) {
            a *= params[slots + row.coef_param].at(instance, literal + row.literals[e]) / scale;
          }
          terms += a;
          size += std::fabs(a);
        }
        double bound = row.bound;
        if (row.bound_param >= 0) bound *= params[slots + row.bound_param].at(instance, k);
        rhs[r] = static_cast<T>(within_reason(difference(bound / scale, terms, size)));
      });
  if (held == nullptr) return;
  T* own = rhs + num_rows() - num_vars_;
  for (int j = 0; j < num_vars_; ++j) own[j] = held[j] == 0 ? T(0) : held[j] == 1 ? T(-1) : T(1);
}

void Model::write_oracle_params(const std::vector<Param>& params, std::int64_t instance,
                                double* out) const {
  for (int f = 0; f < num_structured(); ++f) {
    const int g = oracle_group_[f];
    out[f] = groups_[g].has_param ? params[first_param_[g]].at(instance, oracle_number_[f]) : 0.0;
  }
}

void Model::place_of_block(int block, int& group, int& number) const {
  for (const Bundle& bundle : bundles_) {
    std::int64_t at = block - bundle.first_block;
    for (const int g : bundle.groups) {
      if (at >= 0 && at < group_count_[g]) {
        group = g;
        number = static_cast<int>(at);
        return;
      }
      at -= group_count_[g];
    }
  }
  group = number = -1;
}

StructuredView Model::structured(int f) const {
  StructuredView view;
  view.group = oracle_group_[f];
  view.number = oracle_number_[f];
  view.name = groups_[view.group].name;
  view.kind = static_cast<OracleKind>(oracle_kind_[f]);
  view.linked = oracle_linked_[f] != 0;
  view.shape = groups_[view.group].shape;
  view.variables.assign(oracle_var_.begin() + oracle_var_ptr_[f],
                        oracle_var_.begin() + oracle_var_ptr_[f + 1]);
  view.score_begin = num_pairs() + oracle_score_ptr_[f];
  view.slots = slots_of(view.kind, view.shape);
  view.num_scores = oracle_score_ptr_[f + 1] - oracle_score_ptr_[f];
  return view;
}

#define FACTORMAX_INSTANTIATE(T)                                                                   \
  template Problem<T> Model::problem<T>() const;                                                   \
  template void Model::write_coefs<T>(const std::vector<Param>&, std::int64_t, const std::int8_t*, \
                                      T*) const;                                                   \
  template void Model::write_bounds<T>(const std::vector<Param>&, std::int64_t,                    \
                                       const std::int8_t*, T*) const;

FACTORMAX_INSTANTIATE(float)
FACTORMAX_INSTANTIATE(double)

}  // namespace factormax
