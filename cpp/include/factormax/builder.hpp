// A factor graph in C++: add variables and factors, solve, read the values, differentiate.
//
//   factormax::FactorGraph<double> fg;
//   const factormax::Variables u = fg.add_variables({0.3, 1.2, 0.8});
//   fg.add_xor({u[0], u[1], ~u[2]});
//   const auto solution = fg.solve();
//   solution.values;                     // (3,)
//   solution.vjp({1.0, 0.0, 0.0}).scores;  // the gradient of values[0]
//
// What makes no sense throws std::invalid_argument when it is added. What only the solver can find
// out (constraints that exclude each other, say) is the status of the solution.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <memory>
#include <new>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "factormax/batch.hpp"
#include "factormax/graph_arrays.hpp"
#include "factormax/precision.hpp"

namespace factormax {

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
  // `count` of them, the first at `begin`, the others each `step` further on. In a matrix of n
  // columns, slice(i * n, n) is row i, and slice(j, rows, n) is column j.
  std::vector<Literal> slice(int begin, int count, int step = 1) const {
    std::vector<Literal> literals;
    for (int k = 0; k < count; ++k) literals.push_back((*this)[begin + k * step]);
    return literals;
  }
  std::vector<Literal> all() const { return slice(0, size); }
};

template <class T>
class FactorGraph {
 public:
  using Literals = std::vector<Literal>;

  // Where the scores of a factor are, see `Solution::offset`.
  struct Scores {
    bool of_pair = false;
    int first = 0, size = 0;
  };

  struct Gradient {
    std::vector<T> scores;         // (batch, variables)
    std::vector<T> factor_scores;  // (batch, factor scores)
    double residual = 0;           // the largest of the linear systems', relative: how exact it is
  };

  class Solution;

  // ---- Variables

  // A score of -inf keeps a variable off.
  Variables add_variables(const std::vector<T>& scores) {
    require_scores("add_variables", scores, true);
    const Variables added{num_variables(), static_cast<int>(scores.size())};
    require_size("add_variables", scores_.size() + scores.size());
    scores_.insert(scores_.end(), scores.begin(), scores.end());
    edit().resize(scores_.size());
    return added;
  }
  Literal add_variable(T score) { return add_variables({score})[0]; }

  int num_variables() const { return static_cast<int>(scores_.size()); }

  // ---- Factors of rows

  // Exactly one is on.
  void add_xor(const Literals& u) { add_row("add_xor", u, T(1), T(1), RowKind::equality); }
  void add_at_most_one(const Literals& u) {
    add_row("add_at_most_one", u, T(1), T(1), RowKind::inequality);
  }
  // At least one is on.
  void add_or(const Literals& u) { add_row("add_or", u, T(-1), T(-1), RowKind::inequality); }
  // All but the last on: then the last on.
  void add_imply(const Literals& u) {
    std::vector<T> coefs(u.size(), T(1));
    if (!coefs.empty()) coefs.back() = T(-1);
    add_row("add_imply", u, coefs, static_cast<T>(u.size()) - 2, RowKind::inequality);
  }
  // At most, at least, exactly so many are on.
  void add_budget(const Literals& u, int budget) {
    require_count("add_budget", budget);
    add_row("add_budget", u, T(1), static_cast<T>(budget), RowKind::inequality);
  }
  void add_at_least(const Literals& u, int count) {
    require_count("add_at_least", count);
    add_row("add_at_least", u, T(-1), static_cast<T>(-count), RowKind::inequality);
  }
  void add_exactly(const Literals& u, int count) {
    require_count("add_exactly", count);
    add_row("add_exactly", u, T(1), static_cast<T>(count), RowKind::equality);
  }

  // lower <= coefs . u <= upper. An infinite bound is none; equal bounds are an equation.
  void add_linear(const Literals& u, const std::vector<T>& coefs, T lower, T upper) {
    const char* name = "add_linear";
    require_literals(name, u);
    if (coefs.size() != u.size()) {
      fail(name, "expected as many coefficients as literals, " + std::to_string(u.size()) +
                     ", got " + std::to_string(coefs.size()) + ".");
    }
    T largest = 0;
    for (const T c : coefs) {
      if (!std::isfinite(c)) fail(name, "the coefficients must be finite.");
      largest = std::max(largest, std::fabs(c));
    }
    const T inf = std::numeric_limits<T>::infinity();
    if (!(lower <= upper) || lower == inf || upper == -inf) {
      fail(name, "expected lower <= upper, got " + std::to_string(lower) + " and " +
                     std::to_string(upper) + ".");
    }
    // Tolerances are in units of variables; a bound beyond all reason never binds.
    const T scale = largest > 0 ? largest : T(1), most = T(1e30);
    std::vector<T> up(coefs), down(coefs);
    for (std::size_t k = 0; k < up.size(); ++k) down[k] = -(up[k] /= scale);
    Arrays& a = edit();
    a.row(u, down, std::min(-lower / scale, most), RowKind::inequality);
    a.row(u, up, std::min(upper / scale, most), RowKind::inequality);
    a.end_block(BlockKind::band, u);
  }

  // The last literal is the or of the others.
  void add_or_out(const Literals& u) {
    require_literals("add_or_out", u);
    if (u.size() < 2) fail("add_or_out", "expected at least 2 literals, got 1.");
    Arrays& a = edit();
    std::vector<T> coefs(u.size(), T(-1));
    coefs.back() = T(1);
    for (std::size_t k = 0; k + 1 < u.size(); ++k) {
      a.row({u[k], u.back()}, {T(1), T(-1)}, T(0), RowKind::inequality);
    }
    a.row(u, coefs, T(0), RowKind::inequality);
    a.end_block(BlockKind::or_out, u);
  }

  // Adds `score` where both are on.
  Scores add_pair(Literal first, Literal second, T score) {
    require_literals("add_pair", {first, second});
    require_scores("add_pair", {score}, false);
    require_size("add_pair", 2 * (pair_scores_.size() + 1));
    const int index = static_cast<int>(pair_scores_.size());
    edit().pair(first, second);
    pair_scores_.push_back(score);
    return {true, index, 1};
  }

  // ---- Structured factors

  // u: (rows, columns). The shorter side is matched completely, none of the longer side twice.
  void add_matching(const Literals& u, int rows, int columns) {
    require_shape("add_matching", u, {rows, columns});
    Literals wide(u);
    for (int i = 0; rows > columns && i < rows; ++i) {
      for (int j = 0; j < columns; ++j) wide[j * rows + i] = u[i * columns + j];
    }
    edit().structured(OracleKind::matching, wide,
                      {std::min(rows, columns), std::max(rows, columns)}, 0);
  }

  // u: (words, words). u[m, h]: the head of m is h; u[m, m]: m hangs from the root.
  void add_dep_tree(const Literals& u, int words, bool projective = false,
                    bool single_root = false) {
    require_shape("add_dep_tree", u, {words, words});
    edit().structured(projective ? OracleKind::projective_tree : OracleKind::tree, u,
                      {words, single_root ? 1 : 0}, 0);
  }

  // u: (length, states), one state per step. transitions: (states, states), from-to, or
  // (length - 1, states, states). Steps that are off altogether must come last.
  Scores add_sequence(const Literals& u, int length, int states, const std::vector<T>& transitions,
                      const std::vector<T>& initial = {}, const std::vector<T>& final = {}) {
    const char* name = "add_sequence";
    require_shape(name, u, {length, states});
    const std::size_t square = std::size_t(states) * states;
    const bool shared = transitions.size() == square;
    if (!shared && transitions.size() != square * (length - 1)) {
      fail(name, "expected " + std::to_string(square) + " transitions, or as many per step, got " +
                     std::to_string(transitions.size()) + ".");
    }
    std::vector<T> own(transitions);
    for (const std::vector<T>* end : {&initial, &final}) {
      if (!end->empty() && end->size() != static_cast<std::size_t>(states)) {
        fail(name, "expected an initial and a final score per state, or none, got " +
                       std::to_string(end->size()) + ".");
      }
      own.insert(own.end(), end->begin(), end->end());
    }
    require_scores(name, own, true);
    require_size(name, oracle_scores_.size() + own.size());
    const Scores added{false, static_cast<int>(oracle_scores_.size()),
                       static_cast<int>(own.size())};
    edit().structured(
        OracleKind::sequence, u,
        {length, states, shared ? 0 : 1, initial.empty() ? 0 : 1, final.empty() ? 0 : 1},
        added.size);
    oracle_scores_.insert(oracle_scores_.end(), own.begin(), own.end());
    return added;
  }

  // ---- Solve

  // Method::compact is LP-SparseMAP; Method::proximal the linear program, LP-MAP.
  Solution solve(const Options& options = {}, Method method = Method::compact) const {
    return solve(scores_, {}, options, method);
  }

  // A batch, on all threads. scores: (batch, variables); factor_scores: (batch, factor scores), or
  // (factor scores,) for all instances, those of pairs first; without, those that were added.
  Solution solve(std::vector<T> scores, std::vector<T> factor_scores, const Options& options = {},
                 Method method = Method::compact) const {
    const std::size_t n = scores_.size(), own = pair_scores_.size() + oracle_scores_.size();
    if (n == 0) fail("solve", "the graph has no variables: add some.");
    if (scores.empty() || scores.size() % n != 0) {
      fail("solve", "expected " + std::to_string(n) + " scores per instance, got " +
                        std::to_string(scores.size()) + ".");
    }
    if (factor_scores.empty()) {
      factor_scores = pair_scores_;
      factor_scores.insert(factor_scores.end(), oracle_scores_.begin(), oracle_scores_.end());
    }
    const std::size_t batch = scores.size() / n;
    if (factor_scores.size() != own && factor_scores.size() != batch * own) {
      fail("solve", "expected " + std::to_string(own) + " factor scores, or as many per instance," +
                        " got " + std::to_string(factor_scores.size()) + ".");
    }
    require_scores("solve", scores, true);
    require_scores("solve", factor_scores, true);
    for (std::size_t i = 0; i < factor_scores.size(); i += own) {  // a pair can't forbid
      const auto pairs = factor_scores.begin() + i;
      require_scores("solve", {pairs, pairs + pair_scores_.size()}, false);
    }
    require_options(options);
    const bool linear = method == Method::proximal || method == Method::ad3;
    if (linear && !Precision<T>::solves_linear_programs) {
      fail("solve", "float can't resolve the bound of a linear program: use FactorGraph<double>.");
    }
    require_steps_last(scores);
    return Solution(arrays_, std::move(scores), std::move(factor_scores), options, method);
  }

 private:
  using Arrays = GraphArrays<T>;

  [[noreturn]] static void fail(const char* where, const std::string& what) {
    throw std::invalid_argument(std::string("FactorGraph::") + where + ": " + what);
  }
  static void require_scores(const char* where, const std::vector<T>& scores, bool may_be_off) {
    for (const T s : scores) {
      const bool off = may_be_off && s == -std::numeric_limits<T>::infinity();
      if (!std::isfinite(s) && !off) {
        fail(where, std::string("scores must be finite") + (may_be_off ? " or -inf" : "") +
                        ", got " + std::to_string(s) + ".");
      }
    }
  }
  static void require_count(const char* where, int count) {
    if (count < 0) {
      fail(where, "the count must be at least 0, got " + std::to_string(count) + ".");
    }
  }
  static void require_options(const Options& o) {
    if (!(o.tol > 0) || !(o.step_size > 0) || o.max_iter < 0 || o.max_inner_iter < 1) {
      fail("solve", "expected tol > 0, step_size > 0, max_iter >= 0 and max_inner_iter >= 1.");
    }
  }
  // The core indexes with 32 bits.
  static void require_size(const char* where, std::size_t size) {
    if (size >= std::size_t(1) << 30) fail(where, "the graph is too large.");
  }
  void require_literals(const char* where, const Literals& u) const {
    if (u.empty()) fail(where, "expected at least one literal, got none.");
    require_size(where, arrays_->col.size() + arrays_->var.size() + 3 * u.size());
    std::vector<int> vars;
    for (const Literal l : u) {
      if (l.var < 0 || l.var >= num_variables()) {
        fail(where, "there is no variable " + std::to_string(l.var) + ": the graph has " +
                        std::to_string(num_variables()) + ".");
      }
      vars.push_back(l.var);
    }
    std::sort(vars.begin(), vars.end());
    const auto twice = std::adjacent_find(vars.begin(), vars.end());
    if (twice != vars.end()) fail(where, "variable " + std::to_string(*twice) + " is in it twice.");
  }
  void require_shape(const char* where, const Literals& u, std::pair<int, int> shape) const {
    require_literals(where, u);
    if (shape.first < 1 || shape.second < 1 ||
        std::int64_t(shape.first) * shape.second != static_cast<std::int64_t>(u.size())) {
      fail(where, "expected " + std::to_string(shape.first) + " x " + std::to_string(shape.second) +
                      " variables, got " + std::to_string(u.size()) + ".");
    }
    if (std::any_of(u.begin(), u.end(), [](Literal l) { return l.negated; })) {
      fail(where, "a structured factor takes variables, not their negations.");
    }
  }

  void require_steps_last(const std::vector<T>& scores) const {
    const Arrays& a = *arrays_;
    for (std::size_t f = 0; f < a.oracle_kind.size(); ++f) {
      if (a.oracle_kind[f] != static_cast<std::int8_t>(OracleKind::sequence)) continue;
      const int states = a.shape[a.shape_ptr[f] + 1];
      for (std::size_t i = 0; i < scores.size(); i += scores_.size()) {
        const auto is_off = [&](int j) {
          return scores[i + j] == -std::numeric_limits<T>::infinity();
        };
        bool ended = false;
        for (std::int32_t k = a.var_ptr[f]; k < a.var_ptr[f + 1]; k += states) {
          const auto step = a.var.begin() + k;
          const bool off = std::all_of(step, step + states, is_off);
          if (ended && !off) fail("add_sequence", "steps that are off must come last.");
          ended = off;
        }
      }
    }
  }

  void add_row(const char* where, const Literals& u, const std::vector<T>& coefs, T bound,
               RowKind kind) {
    require_literals(where, u);
    Arrays& a = edit();
    a.row(u, coefs, bound, kind);
    a.end_block(BlockKind::row, u);
  }
  void add_row(const char* where, const Literals& u, T coef, T bound, RowKind kind) {
    add_row(where, u, std::vector<T>(u.size(), coef), bound, kind);
  }

  // Solutions keep the arrays that they were found with.
  Arrays& edit() {
    if (arrays_.use_count() != 1) arrays_ = std::make_shared<Arrays>(*arrays_);
    return *arrays_;
  }

  std::shared_ptr<Arrays> arrays_ = std::make_shared<Arrays>();
  std::vector<T> scores_, pair_scores_, oracle_scores_;
};

// The solution of a batch. Arrays have the batch in front; `solve` without scores is a batch of
// one.
template <class T>
class FactorGraph<T>::Solution {
 public:
  std::vector<T> values;         // (batch, variables)
  std::vector<T> factor_values;  // (batch, factor scores): how much of each score counts
  std::vector<double> objective;
  std::vector<double> primal_residual, dual_residual;
  std::vector<std::int32_t> iterations;
  std::vector<double> upper_bound;     // of linear programs: no structure scores more
  std::vector<std::uint8_t> integral;  // of linear programs: the values are a best structure

  int batch() const { return static_cast<int>(objective.size()); }
  Status status(int instance = 0) const { return static_cast<Status>(status_[instance]); }
  bool converged(int instance = 0) const { return status(instance) == Status::converged; }
  T value(Literal l, int instance = 0) const {
    const T v = values[std::size_t(instance) * arrays_->num_vars() + l.var];
    return l.negated ? 1 - v : v;
  }
  // Where a factor's part of `factor_values`, and of the gradient's `factor_scores`, begins.
  std::size_t offset(Scores scores, int instance = 0) const {
    return std::size_t(instance) * arrays_->num_scores() +
           (scores.of_pair ? scores.first : arrays_->num_pairs() + scores.first);
  }

  // The gradient with respect to all scores of a function with these gradients with respect to
  // `values` and `factor_values`; one that is left out is 0.
  Gradient vjp(const std::vector<T>& grad_values, std::vector<T> grad_factor_values = {}) const {
    if (linear_) {
      throw std::invalid_argument(
          "Solution::vjp: the solution of a linear program is piecewise constant in the scores. "
          "Solve with Method::compact or Method::admm.");
    }
    if (grad_factor_values.empty()) grad_factor_values.resize(factor_values.size());
    if (grad_values.size() != values.size() || grad_factor_values.size() != factor_values.size()) {
      throw std::invalid_argument("Solution::vjp: expected gradients of " +
                                  std::to_string(values.size()) + " values and " +
                                  std::to_string(factor_values.size()) + " factor values, got " +
                                  std::to_string(grad_values.size()) + " and " +
                                  std::to_string(grad_factor_values.size()) + ".");
    }
    const Problem<T> p = problem();
    Gradient out{std::vector<T>(values.size()), std::vector<T>(factor_values.size())};
    std::vector<double> residual(objective.size());
    BatchGradients<T> g;
    g.grad_mu = {grad_values.data(), p.num_vars};
    g.grad_mu_v = {grad_factor_values.data(), p.num_scores()};
    g.var_side = {var_side_.data(), p.num_vars};
    g.row_side = {row_side_.data(), p.num_dual()};
    g.status = status_.data();
    g.grad_eta_u = {out.scores.data(), p.num_vars};
    g.grad_eta_v = {out.factor_scores.data(), p.num_scores()};
    g.residual = residual.data();
    g.count = found_.count.data();
    g.prob = found_.prob.data();
    g.on = found_.on.data();
    g.features = found_.features.data();
    g.dense = found_.dense.data();
    g.num_cuts = found_.num_cuts.data();
    g.cuts = found_.cuts.data();
    Control control;
    vjp_batch<T>(p, batch(), g, control);
    if (control.out_of_memory) throw std::bad_alloc();
    out.residual = *std::max_element(residual.begin(), residual.end());
    return out;
  }

 private:
  friend class FactorGraph<T>;

  Solution(std::shared_ptr<const Arrays> arrays, std::vector<T> scores,
           std::vector<T> factor_scores, const Options& options, Method method)
      : linear_(method == Method::proximal || method == Method::ad3),
        arrays_(std::move(arrays)),
        isolated_(arrays_->isolated()),
        scores_(std::move(scores)),
        factor_scores_(std::move(factor_scores)) {
    const std::size_t b = scores_.size() / arrays_->num_vars();
    objective.resize(b);  // `batch` is its size
    const Problem<T> p = problem();
    values.resize(b * p.num_vars);
    factor_values.resize(b * p.num_scores());
    var_side_.resize(b * p.num_vars);
    row_side_.resize(b * p.num_dual());
    std::vector<T> tau(b * p.num_dual());
    std::vector<std::int32_t> calls(b);
    for (auto* numbers : {&primal_residual, &dual_residual, &upper_bound}) numbers->resize(b);
    for (auto* counts : {&iterations, &status_}) counts->resize(b);
    integral.resize(b);
    const Outputs<T> out{{values.data(), p.num_vars},
                         {factor_values.data(), p.num_scores()},
                         {tau.data(), p.num_dual()},
                         {var_side_.data(), p.num_vars},
                         {row_side_.data(), p.num_dual()},
                         objective.data(),
                         primal_residual.data(),
                         dual_residual.data(),
                         iterations.data(),
                         status_.data(),
                         calls.data(),
                         upper_bound.data(),
                         integral.data()};
    Control control;
    solve_batch<T>(p, batch(), method, options, {}, out, found_, control);
    if (control.out_of_memory) throw std::bad_alloc();
  }

  Problem<T> problem() const {
    Problem<T> p = arrays_->problem();
    p.block_isolated = isolated_.data();
    p.eta_u = {scores_.data(), p.num_vars};
    const bool shared = factor_scores_.size() == static_cast<std::size_t>(p.num_scores());
    p.eta_v = {factor_scores_.data(), shared ? 0 : p.num_scores()};
    return p;
  }

  bool linear_;
  std::shared_ptr<const Arrays> arrays_;
  std::vector<std::uint8_t> isolated_;
  std::vector<T> scores_, factor_scores_;
  std::vector<std::int8_t> var_side_, row_side_;
  std::vector<std::int32_t> status_;
  FoundStructures found_;
};

}  // namespace factormax
