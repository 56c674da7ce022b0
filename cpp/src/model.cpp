#include "factormax/model.hpp"

#include <algorithm>
#include <cmath>

#include "factormax/components.hpp"
#include "factormax/lone_rows.hpp"
#include "group_checks.hpp"
#include "row_bound.hpp"

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

template Problem<float> Model::problem<float>() const;
template Problem<double> Model::problem<double>() const;

}  // namespace factormax
