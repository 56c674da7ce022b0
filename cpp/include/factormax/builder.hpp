// A factor graph in C++: add variables and factors, solve, read the values, differentiate.
//
//   factormax::FactorGraph<double> fg;
//   const factormax::Variables u = fg.add_variables({0.3, 1.2, 0.8});
//   fg.add_xor({u[0], u[1], ~u[2]});
//   const auto solution = fg.solve();
//   solution.values;                     // (3,)
//   solution.vjp({1.0, 0.0, 0.0}).scores;  // the gradient of values[0]
//
// What makes no sense throws std::invalid_argument as it is added. What only the solver can find
// out (say, constraints that exclude each other) is reported by the status of the solution.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "factormax/batch.hpp"
#include "factormax/model.hpp"

namespace factormax {

// A binary variable, or its negation.
struct Literal {
  int var = 0;
  bool negated = false;

  Literal operator~() const { return {var, !negated}; }
};

// Variables that were added together.
struct Variables {
  int first = 0, size = 0;

  Literal operator[](int k) const {
    if (k < 0 || k >= size) {
      throw std::invalid_argument("Variables: index " + std::to_string(k) + " is not in 0 to " +
                                  std::to_string(size - 1) + ".");
    }
    return {first + k};
  }
  // `count` literals: the first at `begin`, each of the others `step` after the one before. In a
  // matrix of n columns, slice(i * n, n) is row i, and slice(j, rows, n) is column j.
  std::vector<Literal> slice(int begin, int count, int step = 1) const {
    std::vector<Literal> literals;
    for (int k = 0; k < count; ++k) literals.push_back((*this)[begin + k * step]);
    return literals;
  }
  std::vector<Literal> all() const { return slice(0, size); }
};

// T is float or double.
template <class T>
class FactorGraph {
 public:
  using Literals = std::vector<Literal>;

  // Where a factor's own scores are; see `Solution::offset`.
  struct Scores {
    bool of_pair = false;
    int first = 0, size = 0;
  };

  struct Gradient {
    std::vector<T> scores;         // (batch, variables)
    std::vector<T> factor_scores;  // (batch, factor scores)
    double residual = 0;           // largest relative residual of the linear systems
  };

  class Solution;

  FactorGraph();

  // ---- Variables

  // A score of -inf keeps a variable off.
  Variables add_variables(const std::vector<T>& scores);
  Literal add_variable(T score) { return add_variables({score})[0]; }
  int num_variables() const { return static_cast<int>(scores_.size()); }

  // ---- Factors of rows

  // Exactly one is on.
  void add_xor(const Literals& u) { add_sum("add_xor", u, 1, RowKind::equality); }
  void add_at_most_one(const Literals& u) { add_sum("add_at_most_one", u, 1, RowKind::inequality); }
  // At least one is on.
  void add_or(const Literals& u) { add_sum("add_or", u, -1, RowKind::inequality); }
  // If all but the last are on, so is the last.
  void add_imply(const Literals& u);
  // At most, at least or exactly this many are on.
  void add_budget(const Literals& u, int budget) {
    add_count("add_budget", u, 1, RowKind::inequality, budget);
  }
  void add_at_least(const Literals& u, int count) {
    add_count("add_at_least", u, -1, RowKind::inequality, count);
  }
  void add_exactly(const Literals& u, int count) {
    add_count("add_exactly", u, 1, RowKind::equality, count);
  }
  // lower <= coefs . u <= upper. An infinite bound means none; equal bounds make an equation.
  void add_linear(const Literals& u, const std::vector<T>& coefs, T lower, T upper);
  // The last literal is the or of the others.
  void add_or_out(const Literals& u);
  // Adds `score` where both are on.
  Scores add_pair(Literal first, Literal second, T score);

  // ---- Structured factors

  // u: (rows, columns). The shorter side is matched completely, none of the longer side twice.
  void add_matching(const Literals& u, int rows, int columns);
  // u: (words, words). u[m, h]: the head of m is h; u[m, m]: m hangs from the root.
  void add_dep_tree(const Literals& u, int words, bool projective = false,
                    bool single_root = false);
  // u: (length, states), one state per step. transitions: (states, states), from-to, or
  // (length - 1, states, states). Steps that are off altogether must come last.
  Scores add_sequence(const Literals& u, int length, int states, const std::vector<T>& transitions,
                      const std::vector<T>& initial = {}, const std::vector<T>& final = {});

  // ---- Solve

  // Method::compact is LP-SparseMAP; Method::proximal the linear program, LP-MAP.
  Solution solve(const Options& options = {}, Method method = Method::compact) const {
    return solve(scores_, {}, options, method);
  }
  // Solves a batch on all threads. scores: (batch, variables); factor_scores: (batch, factor
  // scores), or (factor scores,) for all instances, those of pairs first; if empty, those that were
  // added with the factors.
  Solution solve(std::vector<T> scores, std::vector<T> factor_scores, const Options& options = {},
                 Method method = Method::compact) const;

 private:
  using Numbers = std::vector<double>;
  struct Compiled;

  void require_literals(const char* where, const Literals& u) const;
  void require_shape(const char* where, const Literals& u, std::pair<int, int> shape) const;
  void require_steps_last(const std::vector<T>& scores) const;
  void add_sum(const char* where, const Literals& u, double sign, RowKind kind);
  void add_count(const char* where, const Literals& u, double sign, RowKind kind, int count);
  void add_rows(const char* where, BlockKind block, std::vector<Row> rows, const Literals& u,
                std::vector<std::uint8_t> per_literal = {},
                const std::vector<Numbers>& params = {});
  void add_structured(const char* where, OracleKind oracle, const Literals& u,
                      std::vector<std::int32_t> shape, int num_scores = 0);
  void add(const char* where, Group group, const Literals& u,
           const std::vector<Numbers>& params = {});
  std::shared_ptr<const Compiled> compiled() const;

  struct Place {
    std::size_t group, first_param;
  };
  std::vector<Group> groups_;
  std::vector<Numbers> params_;                                  // group by group
  std::map<std::pair<std::string, std::size_t>, Place> places_;  // by kind and size
  std::shared_ptr<Compiled> compiled_;
  std::vector<T> scores_, pair_scores_, oracle_scores_;
};

// The solution of a batch. Arrays have the batch in front; `solve` without scores is a batch of
// one.
template <class T>
class FactorGraph<T>::Solution {
 public:
  std::vector<T> values;         // (batch, variables)
  std::vector<T> factor_values;  // (batch, factor scores): how much each score counts
  std::vector<double> objective;
  std::vector<double> primal_residual, dual_residual;
  std::vector<std::int32_t> iterations;
  std::vector<double> upper_bound;     // linear programs only: no structure scores more
  std::vector<std::uint8_t> integral;  // linear programs only: the values are a best structure

  int batch() const { return static_cast<int>(objective.size()); }
  Status status(int instance = 0) const { return static_cast<Status>(status_[instance]); }
  bool converged(int instance = 0) const { return status(instance) == Status::converged; }
  T value(Literal l, int instance = 0) const;
  // Where a factor's part of `factor_values`, and of the gradient's `factor_scores`, begins.
  std::size_t offset(Scores scores, int instance = 0) const;

  // The gradient with respect to all scores of a function whose gradients with respect to `values`
  // and `factor_values` are given; one that is left out is 0.
  Gradient vjp(const std::vector<T>& grad_values, std::vector<T> grad_factor_values = {}) const;

 private:
  friend class FactorGraph<T>;

  Solution(std::shared_ptr<const Compiled> compiled, std::vector<T> scores,
           std::vector<T> factor_scores, const Options& options, Method method);
  Problem<T> problem() const;

  bool linear_;
  std::shared_ptr<const Compiled> compiled_;
  std::vector<T> scores_, factor_scores_;
  std::vector<std::int8_t> var_side_, row_side_;
  std::vector<std::int32_t> status_;
  FoundStructures found_;
};

}  // namespace factormax
