// The structured factors of one instance: their oracles, their active sets, and how they join the
// compact dual, docs/math.md (17)-(18). A hub, which takes the place of the box, turns the reduced
// scores of its variables into their marginals; a linked factor turns the multipliers of its links
// into marginals of its own, which its rows compare with mu.
#pragma once

#include <new>

#include "factormax/dual.hpp"
#include "factormax/parallel.hpp"
#include "factormax/structured/structured_factor.hpp"

namespace factormax {

template <class T>
class StructuredFactors {
 public:
  // Room for `growth` times the usual number of structures.
  void allocate(const Problem<T>& problem, int growth, Workspace& ws) {
    const Structured& s = problem.structured;
    factors_ = ws.take<StructuredFactor>(s.count);
    hub_of = ws.take<std::int32_t>(problem.num_vars);
    local = ws.take<std::int32_t>(problem.num_vars);
    most_structures = 0;
    int all_vars = 0;
    bool own_functions = false;
    for (int f = 0; f < s.count; ++f) {
      StructuredFactor made;
      const int vars = s.vars(f).size;
      all_vars += vars;
      own_functions |= s.kind[f] == static_cast<std::int8_t>(OracleKind::callback);
      made.oracle.allocate(static_cast<OracleKind>(s.kind[f]), s.shapes(f), ws);
      ActiveSet::Shape shape;
      shape.vars = vars;
      shape.slots = made.oracle.slots();
      shape.feature_slots = made.oracle.feature_slots();
      shape.dense_scores = made.oracle.is_dense() ? s.scores(f) : 0;
      shape.capacity = capacity(vars, shape.slots, growth);
      most_structures = std::max(most_structures, shape.capacity);
      made.set.allocate(shape, ws);
      if (s.kind[f] == static_cast<std::int8_t>(OracleKind::sequence)) {
        const oracle::SequenceShape sequence(s.shapes(f));
        made.has_flow = SequenceFlow::fits(sequence);
        if (made.has_flow) made.flow.allocate(sequence, ws);
      }
      made.has_budget = s.kind[f] == static_cast<std::int8_t>(OracleKind::sequence_budget);
      if (made.has_budget) {
        made.has_flow = BudgetFlow::fits(vars);
        if (made.has_flow) made.budget_flow.allocate(vars, s.shapes(f)[1] != 0, ws);
      }
      made.var = ws.take<std::int32_t>(vars);
      for (Span<double>* a : {&made.x, &made.v, &made.w, &made.y}) *a = ws.take<double>(vars);
      made.eta_v = ws.take<double>(s.scores(f));
      made.barrier = ws.take<double>(s.scores(f));
      made.c = ws.take<double>(shape.capacity + 1);
      made.linked = s.linked[f] != 0;
      if (factors_.data != nullptr) new (&factors_[f]) StructuredFactor(made);
      has_rows_ = s.count == 1 && made.has_flow && !made.has_budget && problem.num_rows > 0 &&
                  problem.num_pairs == 0;
    }
    shared_ = s.count > 1 && all_vars >= kManyVars && !own_functions;
    if (has_rows_) rows_.allocate(problem.num_rows, problem.num_entries, problem.num_vars, ws);
  }

  // If the instance is one sequence and rows over its variables, solves both at once, docs/math.md
  // (70)-(72): the point then has the multipliers of the solution. Returns false if it is not
  // found.
  bool solve_beside_rows(const Instance<T>& p, DualPoint<T>& at, const Options& options,
                         Control& control, bool may_poll) {
    const bool possible = has_rows_ && p.m > 0 && p.m <= FlowRows::kMost;
    if (!possible || options.by_rows == ByRows::never) return false;
    StructuredFactor& f = factors_[0];
    int vars = 0;
    f.each([&](int k, int) {
      f.x[k] = double(p.eta[f.var[k]]);
      ++vars;
    });
    if (vars != p.n || !f.may_flow) return false;
    rows_.begin(p, [&](std::int32_t j) { return f.flow.place(local[j]); });
    f.by_flow = f.flow.solve_beside(rows_, f.x.data, f.eta_v.data, f.w.data, control, may_poll,
                                    f.set.calls);
    for (int r = 0; f.by_flow && r < p.m; ++r) at.x[r] = T(rows_.tau[r] / p.scale[r]);
    return f.by_flow;
  }

  // There are at most d + 1 affinely independent 0/1 vectors of d variables, but a sparse solution
  // needs only a few more than its structures have parts.
  static int capacity(int vars, int slots, int growth) {
    const int affordable = (1 << 20) / std::max(slots, 1);  // the lists of all of them
    const std::int64_t usual = std::max(64, std::min({4 * slots, 1024, affordable}));
    return static_cast<int>(std::min<std::int64_t>(vars + 1, usual * growth));
  }

  int most_structures = 0;
  Span<std::int32_t> hub_of, local;  // (n,) the hub of a variable, or -1, and its place in it

  Span<StructuredFactor> all() const { return factors_; }
  bool any() const { return factors_.size > 0; }

  // After Instance::prepare. Returns false if one of them has no structure at all. The backward
  // pass needs no oracles: it reads the structures of the forward pass.
  bool prepare(const Problem<T>& problem, const Instance<T>& p, std::int64_t i, bool oracles) {
    const Structured& s = problem.structured;
    const double* param = s.param.at(i);
    const T* eta_v = problem.eta_v.at(i);
    int link = p.links;
    problem_ = ActiveSetResult::solved;
    bool possible = true;
    fill(hub_of.first(p.n), -1);
    for (int f = 0; f < s.count; ++f) {
      StructuredFactor& factor = factors_[f];
      const Span<const std::int32_t> vars = s.vars(f);
      factor.present = factor.impossible = false;
      factor.result = ActiveSetResult::solved;
      factor.first_link = link;
      for (int k = 0; k < vars.size; ++k) {
        const std::int32_t j = factor.var[k] = p.new_var[vars[k]];
        factor.v[k] = 0;
        factor.x[k] = j >= 0 ? 0 : -std::numeric_limits<double>::infinity();
        if (j < 0) continue;
        factor.present = true;
        if (factor.linked) {
          ++link;
        } else {
          hub_of[j] = f;
          local[j] = k;
        }
      }
      for (int k = 0; k < s.scores(f); ++k) {
        factor.eta_v[k] = double(eta_v[problem.num_pairs + s.score_ptr[f] + k]);
        const bool forbidden = factor.eta_v[k] == -std::numeric_limits<double>::infinity();
        factor.barrier[k] = forbidden ? factor.eta_v[k] : 0.0;
      }
      const bool uniform = set_weights(factor, [&](int j) { return double(p.weight[j]); });
      factor.param = param == nullptr ? 0.0 : param[f];
      factor.begin(uniform);
      if (!factor.present || !oracles) continue;
      const CallbackFunction* function = s.callback == nullptr ? nullptr : s.callback + f;
      factor.impossible =
          !factor.oracle.prepare(factor.x.data, {factor.param, function, s.first + i});
      possible &= !factor.impossible;
    }
    return possible;
  }

  // The largest of the factors' own scores, in magnitude.
  double largest_score() const {
    double largest = 0;
    for (const StructuredFactor& f : factors_) {
      for (const double score : f.eta_v) {
        if (std::isfinite(score)) largest = std::max(largest, std::fabs(score));
      }
    }
    return largest;
  }

  // Multiplies the factors' own scores by `ratio`.
  void rescale(double ratio) {
    for (StructuredFactor& f : factors_) {
      for (double& score : f.eta_v) score *= ratio;
    }
  }

  // The marginals of hubs and links at `at`; the gradient of the links' rows is then complete.
  void evaluate(const Instance<T>& p, DualPoint<T>& at, const Options& options, Control& control,
                bool may_poll) {
    evaluate_box(p, at);
    at.stamp = stamp_ = ++counter_;
    double extra = 0;
    solve_each(control, may_poll, [&](StructuredFactor& f, bool polls) {
      load(p, at, f);
      return f.solve(options, control, polls);
    });
    for (StructuredFactor& f : factors_) {
      if (!f.present) continue;
      extra += collect(f, at);
      if (f.result != ActiveSetResult::solved) break;
    }
    conclude(p, at, extra);
  }

  // Sets f.w from the weight of each variable; returns whether all are the same.
  template <class Weight>
  static bool set_weights(StructuredFactor& f, const Weight& weight) {
    double least = std::numeric_limits<double>::infinity(), most = 0;
    for (int k = 0; k < f.var.size; ++k) {
      f.w[k] = f.var[k] >= 0 ? weight(f.var[k]) : 1;
      if (f.var[k] < 0) continue;
      least = std::min(least, f.w[k]);
      most = std::max(most, f.w[k]);
    }
    if (least == most) fill(f.w, most);
    return least == most;
  }

  // The marginals of hubs and links at z and x of `at`, after the active sets were used with other
  // weights.
  void return_to(const Instance<T>& p, DualPoint<T>& at, const Options& options, Control& control,
                 bool may_poll) {
    for (StructuredFactor& f : factors_) {
      if (!f.present || problem_ != ActiveSetResult::solved) continue;
      const bool uniform = set_weights(f, [&](int j) { return double(p.weight[j]); });
      f.reweigh(uniform);
      load(p, at, f);
      solve_alone(f, options, control, may_poll);
      if (!f.linked) f.each([&](int k, int) { at.mu[f.var[k]] = T(f.v[k]); });
    }
  }

  // SparseMAP of one factor at f.x, into f.v.
  void solve_alone(StructuredFactor& f, const Options& options, Control& control, bool may_poll) {
    problem_ = f.solve(options, control, may_poll);
    f.impossible = problem_ == ActiveSetResult::no_structure;
  }

  // Whether the active sets are those of this point.
  bool stand_at(const DualPoint<T>& at) const { return at.stamp == stamp_; }

  // At the solution: completes the faces there, for the derivative. error: of the solution.
  void complete(double error, const Options& options, Control& control, bool may_poll) {
    solve_each(control, may_poll, [&](StructuredFactor& f, bool polls) {
      return f.complete(error, options, control, polls);
    });
  }

  // The same, and finds the marginals again: on whole faces they are more accurate.
  void sharpen(const Instance<T>& p, DualPoint<T>& at, double error, const Options& options,
               Control& control, bool may_poll) {
    complete(error, options, control, may_poll);
    if (problem_ != ActiveSetResult::solved) return;
    double extra = 0;
    for (StructuredFactor& f : factors_) extra += f.present ? collect(f, at) : 0;
    conclude(p, at, extra);
  }

  // Turns flows into structures, with those that complete their faces if `faces`.
  void list_structures(bool faces, double error) {
    for (StructuredFactor& f : factors_) {
      if (!f.present || problem_ != ActiveSetResult::solved) continue;
      problem_ = f.list_structures(faces, error);
    }
  }

  // y = J v on the variables of the hubs; v, y: (n,), which may be the same.
  void apply_hubs(const T* v, T* y) {
    for (StructuredFactor& f : factors_) {
      if (!f.present || f.linked) continue;
      fill(f.y, 0.0);
      f.each([&](int k, int) { f.y[k] = double(v[f.var[k]]); });
      f.apply();
      f.each([&](int k, int) { y[f.var[k]] = T(f.y[k]); });
    }
  }

  // eta_v . Np, summed over all factors.
  double feature_value() const {
    double sum = 0;
    for (const StructuredFactor& f : factors_) {
      if (f.present) sum += f.feature_value();
    }
    return sum;
  }

  // The scores of the best structures: at z for hubs, at the multipliers x for links. +inf if an
  // oracle fails.
  double best_value(const Instance<T>& p, const T* z, const T* x, const T* taken) {
    double sum = 0;
    for (StructuredFactor& f : factors_) {
      if (!f.present) continue;
      fill(f.y, -std::numeric_limits<double>::infinity());
      f.each([&](int k, int r) {
        f.y[k] = f.linked ? double(x[r]) * p.scale[r] : double(z[f.var[k]]);
        if (f.linked && taken != nullptr) f.y[k] += double(taken[f.var[k]]);
      });
      double best = 0;
      if (!f.set.best_score(f.y.data, f.eta_v.data, f.oracle, best)) {
        return std::numeric_limits<double>::infinity();
      }
      sum += best;
    }
    return sum;
  }

  // Gives each hub its best structure for the scores of p, with probability 1; returns the sum of
  // their scores.
  double take_best(const Instance<T>& p, DualPoint<T>& at) {
    double sum = 0;
    for (StructuredFactor& f : factors_) {
      if (!f.present || problem_ != ActiveSetResult::solved) continue;
      f.each([&](int k, int) { f.x[k] = double(p.eta[f.var[k]]); });
      double best = 0;
      problem_ = f.set.take_best(f.x.data, f.eta_v.data, f.oracle, f.v.data, best);
      f.impossible = problem_ == ActiveSetResult::no_structure;
      sum += best;
      f.each([&](int k, int) { at.mu[f.var[k]] = T(f.v[k]); });
    }
    return sum;
  }

  // Whether every factor holds a structure that is exactly this 0/1 assignment, and accept(the
  // score of their features) is true; then it keeps only that.
  template <class Accept>
  bool settle_on(const T* assignment, const Accept& accept) {
    double value = 0;
    for (int pass = 0; pass < 2; ++pass) {
      if (pass == 1 && !accept(value)) return false;
      for (StructuredFactor& f : factors_) {
        if (!f.present) continue;
        fill(f.y, 0.0);
        f.each([&](int k, int) { f.y[k] = double(assignment[f.var[k]]); });
        if (!f.holds(pass == 1, value)) return false;
      }
    }
    return true;
  }

  ActiveSetResult trouble() const { return problem_; }
  // What a factor has found within its limit of calls will do.
  void go_on() { problem_ = ActiveSetResult::solved; }

  std::int64_t oracle_calls() const {
    std::int64_t calls = 0;
    for (const StructuredFactor& f : factors_) calls += f.present ? f.set.calls : 0;
    return calls;
  }

  // The most that the hubs and links can contribute to `-v` and `y`, which certifies that nothing
  // is feasible, docs/math.md (23). v: (n,), y: (m,). Returns +inf if an oracle fails.
  double support(const T* v, const T* y) {
    double sum = 0;
    for (StructuredFactor& f : factors_) {
      if (!f.present) continue;
      fill(f.y, -std::numeric_limits<double>::infinity());
      f.each([&](int k, int r) { f.y[k] = f.linked ? double(y[r]) : -double(v[f.var[k]]); });
      double best = 0;
      if (!f.set.best_score(f.y.data, f.barrier.data, f.oracle, best)) {
        return std::numeric_limits<double>::infinity();
      }
      sum += best;
    }
    return sum;
  }

 private:
  static constexpr int kManyVars = 1024;  // fewer are done before another thread has woken up

  // solve(f, may_poll) for each factor, on all threads if that pays; `trouble` is that of the first
  // one that has any. Functions of the user's own are called one after the other, until one fails.
  template <class Solve>
  void solve_each(Control& control, bool may_poll, const Solve& solve) {
    if (problem_ != ActiveSetResult::solved) return;
    const auto at = [&](std::int64_t i, bool is_caller) {
      StructuredFactor& f = factors_[static_cast<int>(i)];
      if (f.present) f.result = solve(f, is_caller && may_poll);
    };
    if (shared_) {
      const std::function<Worker()> make_worker = [&]() -> Worker { return std::cref(at); };
      parallel_for(factors_.size, make_worker, [&] { control.stopped(may_poll); });
    }
    for (int i = 0; i < factors_.size && problem_ == ActiveSetResult::solved; ++i) {
      if (!factors_[i].present) continue;
      if (!shared_) at(i, true);
      problem_ = factors_[i].result;
      factors_[i].impossible = problem_ == ActiveSetResult::no_structure;
    }
  }

  // Writes what the factor found to `at`; returns what it adds to the dual.
  double collect(StructuredFactor& f, DualPoint<T>& at) {
    double extra = f.feature_value();
    f.each([&](int k, int) {
      if (f.linked) {
        extra += f.v[k] * (f.x[k] - 0.5 * f.w[k] * f.v[k]);
      } else {
        at.mu[f.var[k]] = T(f.v[k]);
      }
    });
    return extra;
  }

  void conclude(const Instance<T>& p, DualPoint<T>& at, double extra) {
    at.extra = T(extra);
    evaluate_rows(p, at);
    for (const StructuredFactor& f : factors_) {
      if (!f.present || !f.linked) continue;
      f.each([&](int k, int r) { at.g[r] += p.scale[r] * T(f.v[k]); });
    }
  }

  void load(const Instance<T>& p, const DualPoint<T>& at, StructuredFactor& f) const {
    f.each([&](int k, int r) {
      f.x[k] = f.linked ? double(at.x[r]) * p.scale[r] : double(at.z[f.var[k]]);
    });
  }

  Span<StructuredFactor> factors_;
  FlowRows rows_;  // beside the only factor, a sequence
  bool has_rows_ = false;
  bool shared_ = false;  // among threads
  ActiveSetResult problem_ = ActiveSetResult::solved;
  std::int64_t counter_ = 0, stamp_ = 0;
};

}  // namespace factormax
