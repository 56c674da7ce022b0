#include "factormax/builder.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <mutex>
#include <new>
#include <numeric>

#include "factormax/precision.hpp"
#include "factormax/structured/oracle.hpp"

namespace factormax {

namespace {

[[noreturn]] void fail(const char* where, const std::string& what) {
  throw std::invalid_argument(std::string("FactorGraph::") + where + ": " + what);
}

template <class T>
void require_scores(const char* where, const std::vector<T>& scores, bool may_be_off) {
  for (const T s : scores) {
    const bool off = may_be_off && s == -std::numeric_limits<T>::infinity();
    if (!std::isfinite(s) && !off) {
      fail(where, std::string("scores must be finite") + (may_be_off ? " or -inf" : "") + ", got " +
                      std::to_string(s) + ".");
    }
  }
}

void require_options(const Options& o) {
  if (!(o.tol > 0) || !(o.step_size > 0) || o.max_iter < 0 || o.max_inner_iter < 1) {
    fail("solve", "expected tol > 0, step_size > 0, max_iter >= 0 and max_inner_iter >= 1.");
  }
}

// The core indexes with 32 bits.
void require_size(const char* where, std::size_t size) {
  if (size >= std::size_t(1) << 30) fail(where, "the graph is too large.");
}

// coef times the sum of all literals (= or <=) bound.
Row row_over(const std::vector<Literal>& u, double coef, double bound, RowKind kind) {
  Row row;
  row.literals.resize(u.size());
  row.coefs.assign(u.size(), coef);
  row.bound = bound;
  row.kind = kind;
  std::iota(row.literals.begin(), row.literals.end(), 0);
  return row;
}

}  // namespace

// The graph laid out, by the first solve after a change. Solutions keep it.
template <class T>
struct FactorGraph<T>::Compiled {
  std::once_flag once;
  std::shared_ptr<const Model> model;
  std::vector<T> coef, rhs;
  Numbers oracle_params;
};

template <class T>
FactorGraph<T>::FactorGraph() : compiled_(std::make_shared<Compiled>()) {}

template <class T>
Variables FactorGraph<T>::add_variables(const std::vector<T>& scores) {
  require_scores("add_variables", scores, true);
  const Variables added{num_variables(), static_cast<int>(scores.size())};
  require_size("add_variables", scores_.size() + scores.size());
  scores_.insert(scores_.end(), scores.begin(), scores.end());
  compiled_ = std::make_shared<Compiled>();
  return added;
}

template <class T>
void FactorGraph<T>::add_imply(const Literals& u) {
  Row row = row_over(u, 1, static_cast<double>(u.size()) - 2, RowKind::inequality);
  if (!u.empty()) row.coefs.back() = -1;
  add_rows("add_imply", BlockKind::row, {row}, u);
}

template <class T>
void FactorGraph<T>::add_linear(const Literals& u, const std::vector<T>& coefs, T lower, T upper) {
  const char* name = "add_linear";
  require_literals(name, u);
  if (coefs.size() != u.size()) {
    fail(name, "expected as many coefficients as literals, " + std::to_string(u.size()) + ", got " +
                   std::to_string(coefs.size()) + ".");
  }
  for (const T c : coefs) {
    if (!std::isfinite(c)) fail(name, "the coefficients must be finite.");
  }
  const T inf = std::numeric_limits<T>::infinity();
  if (!(lower <= upper) || lower == inf || upper == -inf) {
    fail(name, "expected lower <= upper, got " + std::to_string(lower) + " and " +
                   std::to_string(upper) + ".");
  }
  Row below = row_over(u, -1, -1, RowKind::inequality);
  Row above = row_over(u, 1, 1, RowKind::inequality);
  below.coef_param = above.coef_param = 0;
  below.bound_param = 1;
  above.bound_param = 2;
  add_rows(name, BlockKind::band, {below, above}, u, {1, 0, 0},
           {{coefs.begin(), coefs.end()}, {double(lower)}, {double(upper)}});
}

template <class T>
void FactorGraph<T>::add_or_out(const Literals& u) {
  require_literals("add_or_out", u);
  if (u.size() < 2) fail("add_or_out", "expected at least 2 literals, got 1.");
  const auto last = static_cast<std::int32_t>(u.size() - 1);
  std::vector<Row> rows;  // one other literal alone equals the last
  for (std::int32_t k = 0; k < last && last > 1; ++k) {
    rows.push_back({{k, last}, {1, -1}, 0, RowKind::inequality, -1, -1});
  }
  rows.push_back(row_over(u, -1, 0, last > 1 ? RowKind::inequality : RowKind::equality));
  rows.back().coefs.back() = 1;
  add_rows("add_or_out", BlockKind::or_out, std::move(rows), u);
}

template <class T>
auto FactorGraph<T>::add_pair(Literal first, Literal second, T score) -> Scores {
  require_literals("add_pair", {first, second});
  require_scores<T>("add_pair", {score}, false);
  require_size("add_pair", 2 * (pair_scores_.size() + 1));
  const int index = static_cast<int>(pair_scores_.size());
  add("add_pair", Group(), {first, second});
  pair_scores_.push_back(score);
  return {true, index, 1};
}

template <class T>
void FactorGraph<T>::add_matching(const Literals& u, int rows, int columns) {
  require_shape("add_matching", u, {rows, columns});
  Literals wide(u);
  for (int i = 0; rows > columns && i < rows; ++i) {
    for (int j = 0; j < columns; ++j) wide[j * rows + i] = u[i * columns + j];
  }
  add_structured("add_matching", OracleKind::matching, wide,
                 {std::min(rows, columns), std::max(rows, columns)});
}

template <class T>
void FactorGraph<T>::add_dep_tree(const Literals& u, int words, bool projective, bool single_root) {
  require_shape("add_dep_tree", u, {words, words});
  add_structured("add_dep_tree", projective ? OracleKind::projective_tree : OracleKind::tree, u,
                 {words, single_root ? 1 : 0});
}

template <class T>
auto FactorGraph<T>::add_sequence(const Literals& u, int length, int states,
                                  const std::vector<T>& transitions, const std::vector<T>& initial,
                                  const std::vector<T>& final) -> Scores {
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
  const Scores added{false, static_cast<int>(oracle_scores_.size()), static_cast<int>(own.size())};
  add_structured(name, OracleKind::sequence, u,
                 {length, states, shared ? 0 : 1, initial.empty() ? 0 : 1, final.empty() ? 0 : 1},
                 added.size);
  oracle_scores_.insert(oracle_scores_.end(), own.begin(), own.end());
  return added;
}

template <class T>
auto FactorGraph<T>::solve(std::vector<T> scores, std::vector<T> factor_scores,
                           const Options& options, Method method) const -> Solution {
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
    require_scores<T>("solve", {pairs, pairs + pair_scores_.size()}, false);
  }
  require_options(options);
  const bool linear = method == Method::proximal || method == Method::ad3;
  if (linear && !Precision<T>::solves_linear_programs) {
    fail("solve", "float can't resolve the bound of a linear program: use FactorGraph<double>.");
  }
  require_steps_last(scores);
  return Solution(compiled(), std::move(scores), std::move(factor_scores), options, method);
}

template <class T>
void FactorGraph<T>::require_literals(const char* where, const Literals& u) const {
  if (u.empty()) fail(where, "expected at least one literal, got none.");
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

template <class T>
void FactorGraph<T>::require_shape(const char* where, const Literals& u,
                                   std::pair<int, int> shape) const {
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

template <class T>
void FactorGraph<T>::require_steps_last(const std::vector<T>& scores) const {
  for (const Group& group : groups_) {
    if (!group.structured || group.oracle != OracleKind::sequence) continue;
    const std::vector<std::int64_t>& literals = group.parts[0].literals;
    for (std::size_t i = 0; i < scores.size(); i += scores_.size()) {
      const auto is_off = [&](std::int64_t literal) {
        return scores[i + literal / 2] == -std::numeric_limits<T>::infinity();
      };
      bool ended = false;
      for (auto step = literals.begin(); step != literals.end(); step += group.shape[1]) {
        const bool off = std::all_of(step, step + group.shape[1], is_off);
        if (ended && !off) fail("add_sequence", "steps that are off must come last.");
        ended = off;
      }
    }
  }
}

template <class T>
void FactorGraph<T>::add_sum(const char* where, const Literals& u, double sign, RowKind kind) {
  add_rows(where, BlockKind::row, {row_over(u, sign, sign, kind)}, u);
}

template <class T>
void FactorGraph<T>::add_count(const char* where, const Literals& u, double sign, RowKind kind,
                               int count) {
  if (count < 0) {
    fail(where, "the count must be at least 0, got " + std::to_string(count) + ".");
  }
  Row row = row_over(u, sign, sign, kind);
  row.bound_param = 0;
  add_rows(where, BlockKind::row, {row}, u, {0}, {{double(count)}});
}

template <class T>
void FactorGraph<T>::add_rows(const char* where, BlockKind block, std::vector<Row> rows,
                              const Literals& u, std::vector<std::uint8_t> per_literal,
                              const std::vector<Numbers>& params) {
  require_literals(where, u);
  Group group;
  group.rule = std::make_shared<const Rule>(
      Rule{where, block, static_cast<int>(u.size()), std::move(per_literal), std::move(rows)});
  add(where, std::move(group), u, params);
}

template <class T>
void FactorGraph<T>::add_structured(const char* where, OracleKind oracle, const Literals& u,
                                    std::vector<std::int32_t> shape, int num_scores) {
  const Span<const std::int32_t> sizes{shape.data(), static_cast<int>(shape.size())};
  if (!fits(oracle, sizes, static_cast<std::int64_t>(u.size()), num_scores)) {
    fail(where, "the factor is too large.");
  }
  Group group;
  group.structured = true;
  group.name = where;
  group.oracle = oracle;
  group.shape = std::move(shape);
  group.num_scores = num_scores;
  add(where, std::move(group), u);
}

// Factors of rows or pairs of one kind and size are one group; each structured factor is its own.
template <class T>
void FactorGraph<T>::add(const char* where, Group group, const Literals& u,
                         const std::vector<Numbers>& params) {
  Place place{groups_.size(), params_.size()};
  if (!group.structured) place = places_.insert({{where, u.size()}, place}).first->second;
  if (place.group == groups_.size()) {
    group.parts.push_back({false, 0, {0}, {0}, {static_cast<std::int64_t>(u.size())}, {0}, {}});
    groups_.push_back(std::move(group));
    params_.resize(params_.size() + params.size());
  }
  Part& part = groups_[place.group].parts[0];
  ++part.outer[0];
  for (const Literal l : u) part.literals.push_back(2 * std::int64_t(l.var) + l.negated);
  for (std::size_t k = 0; k < params.size(); ++k) {
    Numbers& all = params_[place.first_param + k];
    all.insert(all.end(), params[k].begin(), params[k].end());
  }
  compiled_ = std::make_shared<Compiled>();
}

template <class T>
auto FactorGraph<T>::compiled() const -> std::shared_ptr<const Compiled> {
  std::call_once(compiled_->once, [this] {
    std::string error;
    Compiled& c = *compiled_;
    c.model = Model::make(num_variables(), groups_, error);
    if (c.model == nullptr) fail("solve", error + ".");
    std::vector<Param> params;
    for (const Numbers& numbers : params_) params.push_back({numbers.data(), 0, 1});
    c.coef.resize(c.model->num_entries());
    c.rhs.resize(c.model->num_rows());
    c.oracle_params.resize(c.model->num_structured());
    c.model->write_coefs(params, 0, nullptr, c.coef.data());
    c.model->write_bounds(params, 0, nullptr, c.rhs.data());
    c.model->write_oracle_params(params, 0, c.oracle_params.data());
  });
  return compiled_;
}

template <class T>
T FactorGraph<T>::Solution::value(Literal l, int instance) const {
  const T v = values[std::size_t(instance) * compiled_->model->num_vars() + l.var];
  return l.negated ? 1 - v : v;
}

template <class T>
std::size_t FactorGraph<T>::Solution::offset(Scores scores, int instance) const {
  return std::size_t(instance) * compiled_->model->num_scores() +
         (scores.of_pair ? scores.first : compiled_->model->num_pairs() + scores.first);
}

template <class T>
auto FactorGraph<T>::Solution::vjp(const std::vector<T>& grad_values,
                                   std::vector<T> grad_factor_values) const -> Gradient {
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
  g.take(found_);
  Control control;
  vjp_batch<T>(p, batch(), g, control);
  if (control.out_of_memory) throw std::bad_alloc();
  out.residual = *std::max_element(residual.begin(), residual.end());
  return out;
}

template <class T>
FactorGraph<T>::Solution::Solution(std::shared_ptr<const Compiled> compiled, std::vector<T> scores,
                                   std::vector<T> factor_scores, const Options& options,
                                   Method method)
    : linear_(method == Method::proximal || method == Method::ad3),
      compiled_(std::move(compiled)),
      scores_(std::move(scores)),
      factor_scores_(std::move(factor_scores)) {
  const Problem<T> p = problem();
  const std::int64_t batch = static_cast<std::int64_t>(scores_.size()) / p.num_vars;
  BatchOutputs<T> out(p, batch);
  Control control;
  solve_batch<T>(p, batch, method, options, {}, out.outputs(), found_, control);
  if (control.out_of_memory) throw std::bad_alloc();
  values = std::move(out.mu);
  factor_values = std::move(out.mu_v);
  objective = std::move(out.objective);
  primal_residual = std::move(out.primal_residual);
  dual_residual = std::move(out.dual_residual);
  iterations = std::move(out.iterations);
  upper_bound = std::move(out.upper_bound);
  integral = std::move(out.integral);
  var_side_ = std::move(out.var_side);
  row_side_ = std::move(out.row_side);
  status_ = std::move(out.status);
}

template <class T>
Problem<T> FactorGraph<T>::Solution::problem() const {
  Problem<T> p = compiled_->model->template problem<T>();
  p.coef = {compiled_->coef.data(), 0};
  p.rhs = {compiled_->rhs.data(), 0};
  p.structured.param = {compiled_->oracle_params.data(), 0};
  p.eta_u = {scores_.data(), p.num_vars};
  const bool shared = factor_scores_.size() == static_cast<std::size_t>(p.num_scores());
  p.eta_v = {factor_scores_.data(), shared ? 0 : p.num_scores()};
  return p;
}

template class FactorGraph<float>;
template class FactorGraph<double>;

}  // namespace factormax
