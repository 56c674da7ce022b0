// A factor graph without its numbers: groups of factors over strided views of the variables, laid
// out as the index arrays that the solvers work on. It is made once, checked, and never changed.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "factormax/problem.hpp"

namespace factormax {

// One row of a factor over d literals, s . l <= b or s . l = b. A literal is a variable or its
// negation.
struct Row {
  std::vector<std::int32_t> literals;  // those in the row, from 0 to d - 1
  std::vector<double> coefs;           // s, one per literal
  double bound = 0;                    // b
  RowKind kind = RowKind::inequality;
  int coef_param = -1;   // the parameter, one number per literal, that multiplies s; -1: none
  int bound_param = -1;  // the parameter, one number per factor, that multiplies b; -1: none
};

// How a kind of factor over d literals becomes rows.
struct Rule {
  std::string name;
  BlockKind block = BlockKind::row;
  int size = 0;  // d
  std::vector<std::uint8_t>
      per_literal;  // per parameter: a number per literal, else one per factor
  std::vector<Row> rows;
  std::vector<std::string> param_names{};  // for messages; may be left out

  int num_params() const { return static_cast<int>(per_literal.size()); }
};

// The literals that each of k factors takes from one tensor of variables. The variable at (i, j) is
// `offset` + i . outer_strides + j . inner_strides, for i in the outer shape (one per factor, k in
// all) and j in the inner one (the literals of a factor).
struct Part {
  bool negated = false;
  std::int64_t offset = 0;
  std::vector<std::int64_t> outer, outer_strides, inner, inner_strides;
  // If not empty, the literals themselves, (k, d): 2 * variable, plus 1 if negated.
  std::vector<std::int64_t> literals;
};

// Factors of one kind, k of them over d literals each.
struct Group {
  std::shared_ptr<const Rule> rule;  // null: pairs, or structured factors
  bool structured = false;
  // For structured factors only:
  std::string name;
  OracleKind oracle{};
  std::vector<std::int32_t> shape;
  std::int32_t num_scores = 0;  // own scores per factor
  int slots = -1;               // slots() of its oracle, to be compared; -1: as that says
  // Which of them are linked, that is, tied by multipliers to the structured factors before them:
  // those that share a variable with one and, if 1, all but the first of the group, if 2, all.
  int link = 0;
  bool has_param = false;
  std::vector<Part> parts;
};

// A parameter of a group: (instances, factors) or (instances, factors * literals); a stride of 0
// repeats one number.
struct Param {
  const double* data = nullptr;
  std::int64_t instance_stride = 0, stride = 0;

  double at(std::int64_t i, std::int64_t j) const { return data[i * instance_stride + j * stride]; }
};

// What a model says about one structured factor.
struct StructuredView {
  std::string name;
  int group = 0, number = 0;  // which factor of which group it is
  OracleKind kind{};
  bool linked = false;
  std::vector<std::int32_t> shape, variables;
  int score_begin = 0, num_scores = 0;  // its scores in eta_v
  int slots = 0;                        // of its oracle
};

class Model {
 public:
  // Null, with `error` set, if the groups make no sense.
  static std::shared_ptr<const Model> make(std::int64_t num_vars, const std::vector<Group>& groups,
                                           std::string& error);

  // The same model with one more row per variable, which holds it at 0, at 1, or not at all. Made
  // once.
  std::shared_ptr<const Model> bounded() const;

  // Null if the graph is connected. Found once.
  const Components* components() const;
  // Null unless all factors are lone rows. Found once.
  const LoneRows* lone_rows() const;

  // The index arrays; the numbers are still missing.
  template <class T>
  Problem<T> problem() const;

  int num_vars() const { return num_vars_; }
  int num_rows() const { return static_cast<int>(row_kind_.size()); }
  int num_entries() const { return static_cast<int>(col_.size()); }
  int num_pairs() const { return static_cast<int>(pair_var_.size() / 2); }
  int num_blocks() const { return static_cast<int>(block_kind_.size()); }
  int num_structured() const { return static_cast<int>(oracle_kind_.size()); }
  int num_scores() const { return num_pairs() + oracle_score_ptr_.back(); }
  int num_dual() const { return num_rows() + num_pairs() + num_links_; }

  // How many numbers each parameter has per instance, group by group.
  const std::vector<std::int64_t>& param_sizes() const { return param_sizes_; }
  // Whether the coefficients depend on parameters. `has_row_params`: whether they or the bounds do.
  bool has_coef_params() const { return has_coef_params_; }
  // The coefficients that all instances share, in a model without such parameters.
  template <class T>
  const T* constant_coefs() const;
  bool has_row_params() const { return has_row_params_; }

  // The rows of an instance. `held`, for a bounded model: 0 or 1 where the variable is held there,
  // another number where it is not held.
  template <class T>
  void write_coefs(const std::vector<Param>& params, std::int64_t instance, const std::int8_t* held,
                   T* coef) const;
  template <class T>
  void write_bounds(const std::vector<Param>& params, std::int64_t instance,
                    const std::int8_t* held, T* rhs) const;
  // The parameter of each structured factor; 0 where it has none.
  void write_oracle_params(const std::vector<Param>& params, std::int64_t instance,
                           double* out) const;

  // The group that a block of rows belongs to, and which of its factors the block is.
  void place_of_block(int block, int& group, int& number) const;
  StructuredView structured(int f) const;

  const std::vector<std::int32_t>& row_ptr() const { return row_ptr_; }
  const std::vector<std::int32_t>& col() const { return col_; }
  const std::vector<std::int8_t>& row_kind() const { return row_kind_; }
  const std::vector<std::int32_t>& pair_var() const { return pair_var_; }
  const std::vector<std::uint8_t>& pair_negated() const { return pair_negated_; }
  const std::vector<std::int32_t>& block_ptr() const { return block_ptr_; }
  const std::vector<std::int8_t>& block_kind() const { return block_kind_; }

 private:
  // All factors of one rule, laid out together. The order of rows must not depend on whether
  // parameters are shared: otherwise an instance alone would differ by rounding from the same one
  // in a batch.
  struct Bundle {
    std::shared_ptr<const Rule> rule;
    std::vector<int> groups;
    int first_row = 0, first_entry = 0, first_block = 0;
  };
  struct Literals;
  class Repeats;

  std::shared_ptr<const Model> make_bounded() const;
  std::string lay_out(std::int64_t num_vars, const std::vector<Group>& groups);
  std::string place_group(int g, const Literals& own);
  std::string lay_out_structured(const std::vector<Group>& groups,
                                 const std::vector<Literals>& literals);
  void lay_out_bundle(Bundle& bundle, const std::vector<Literals>& literals);
  void mark_isolated(const std::vector<Literals>& literals);
  Layout layout() const;
  template <class Visit>
  void visit_rows(Visit visit) const;

  mutable std::once_flag bounded_once_;
  mutable std::shared_ptr<const Model> bounded_;
  mutable std::once_flag components_once_, lone_rows_once_, narrow_once_;
  mutable std::shared_ptr<const Components> components_;
  mutable std::shared_ptr<const LoneRows> lone_rows_;
  int num_vars_ = 0, num_links_ = 0;
  bool has_coef_params_ = false, has_row_params_ = false;
  std::vector<Group> groups_;
  std::vector<std::int64_t> group_count_;  // k of each group
  std::vector<int> first_param_;           // first parameter of each group
  std::vector<std::int64_t> param_sizes_;
  std::vector<Bundle> bundles_;
  std::vector<std::int32_t> row_ptr_{0}, col_, pair_var_, block_ptr_{0};
  std::vector<std::int8_t> row_kind_, block_kind_;
  std::vector<std::uint8_t> entry_negated_, pair_negated_, block_isolated_;
  std::vector<double> coef_, rhs_;          // before parameters are applied
  mutable std::vector<float> narrow_coef_;  // coef_ in float, made on first use
  std::vector<int> oracle_group_, oracle_number_;
  std::vector<std::int8_t> oracle_kind_;
  std::vector<std::uint8_t> oracle_linked_;
  std::vector<std::int32_t> oracle_var_ptr_{0}, oracle_var_, oracle_shape_ptr_{0}, oracle_shape_,
      oracle_score_ptr_{0};
};

template <>
const double* Model::constant_coefs<double>() const;
template <>
const float* Model::constant_coefs<float>() const;

}  // namespace factormax
