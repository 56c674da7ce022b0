// The structured factors of one instance: their oracles, their active sets, and how they join the
// compact dual, docs/math.md (17)-(18). A hub turns the reduced scores of its variables into their
// marginals; a link turns its multipliers into marginals of its own, which its rows compare with
// mu.
#pragma once

#include <new>

#include "factormax/dual.hpp"
#include "factormax/structured/active_set.hpp"

namespace factormax {

// One of them.
struct StructuredFactor {
  Oracle oracle;
  ActiveSet set;
  bool present = false;  // some of its variables are
  bool linked = false;
  bool impossible = false;  // the oracle found no structure
  int first_link = 0;       // row of its first variable that is present
  Span<std::int32_t> var;   // (d,) of the Instance, -1 where masked
  Span<double> x, v, w, y;  // (d,) scores, marginals, weights, scratch
  Span<double> eta_v;       // (s,)
  Span<double> barrier;     // (s,) 0, or -inf where eta_v is
  Span<double> c;           // (capacity,) scratch

  // visit(k, r): each variable that is present, and its row if the factor is linked.
  template <class Visit>
  void each(const Visit& visit) const {
    int r = first_link;
    for (int k = 0; k < var.size; ++k) {
      if (var[k] >= 0) visit(k, r++);
    }
  }
};

template <class T>
class StructuredFactors {
 public:
  // Room for `growth` times the usual number of structures.
  void allocate(const Problem<T>& problem, int growth, Workspace& ws) {
    const Structured<T>& s = problem.structured;
    factors_ = ws.take<StructuredFactor>(s.count);
    hub_of = ws.take<std::int32_t>(problem.num_vars);
    local = ws.take<std::int32_t>(problem.num_vars);
    most_structures = 0;
    for (int f = 0; f < s.count; ++f) {
      StructuredFactor made;
      const int vars = s.vars(f).size;
      made.oracle.allocate(static_cast<OracleKind>(s.kind[f]), s.shapes(f), vars, ws);
      ActiveSet::Shape shape;
      shape.vars = vars;
      shape.slots = made.oracle.slots();
      shape.feature_slots = made.oracle.feature_slots();
      shape.dense_scores = made.oracle.is_dense() ? s.scores(f) : 0;
      shape.capacity = capacity(vars, shape.slots, growth);
      most_structures = std::max(most_structures, shape.capacity);
      made.set.allocate(shape, ws);
      made.var = ws.take<std::int32_t>(vars);
      for (Span<double>* a : {&made.x, &made.v, &made.w, &made.y}) *a = ws.take<double>(vars);
      made.eta_v = ws.take<double>(s.scores(f));
      made.barrier = ws.take<double>(s.scores(f));
      made.c = ws.take<double>(shape.capacity + 1);
      made.linked = s.linked[f] != 0;
      if (factors_.data != nullptr) new (&factors_[f]) StructuredFactor(made);
    }
  }

  // Affinely independent 0/1 vectors of d variables are at most d + 1, but a sparse solution needs
  // only so many more than its structures have parts.
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
    const Structured<T>& s = problem.structured;
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
      factor.set.begin(factor.w.data, uniform);
      if (!factor.present || !oracles) continue;
      const CallbackFunction* function = s.callback == nullptr ? nullptr : s.callback + f;
      const double number = param == nullptr ? 0.0 : param[f];
      factor.impossible = !factor.oracle.prepare(factor.x.data, number, function, i);
      possible &= !factor.impossible;
    }
    return possible;
  }

  // The scores of the factors times `ratio`.
  void rescale(double ratio) {
    for (StructuredFactor& f : factors_) {
      for (double& score : f.eta_v) score *= ratio;
    }
  }

  // The marginals of hubs and links at `at`; the gradient of the links' rows is then complete.
  // After the first failure nothing is asked any more.
  void evaluate(const Instance<T>& p, DualPoint<T>& at, const Options& options, Control& control,
                bool may_poll) {
    evaluate_box(p, at);
    at.stamp = stamp_ = ++counter_;
    double extra = 0;
    for (StructuredFactor& f : factors_) {
      if (!f.present || problem_ != ActiveSetResult::solved) continue;
      load(p, at, f);
      solve_alone(f, options, control, may_poll);
      extra += f.set.feature_value(f.eta_v.data);
      f.each([&](int k, int) {
        if (f.linked) {
          extra += f.v[k] * (f.x[k] - 0.5 * f.w[k] * f.v[k]);
        } else {
          at.mu[f.var[k]] = T(f.v[k]);
        }
      });
    }
    at.extra = T(extra);
    evaluate_rows(p, at);
    for (const StructuredFactor& f : factors_) {
      if (!f.present || !f.linked) continue;
      f.each([&](int k, int r) { at.g[r] += p.scale[r] * T(f.v[k]); });
    }
  }

  // f.w from the weight of each variable; whether all are the same.
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

  // The marginals of hubs and links at z and x of `at`, after another use of the active sets with
  // weights of its own.
  void return_to(const Instance<T>& p, DualPoint<T>& at, const Options& options, Control& control,
                 bool may_poll) {
    for (StructuredFactor& f : factors_) {
      if (!f.present || problem_ != ActiveSetResult::solved) continue;
      const bool uniform = set_weights(f, [&](int j) { return double(p.weight[j]); });
      f.set.reweigh(f.w.data, uniform);
      load(p, at, f);
      solve_alone(f, options, control, may_poll);
      if (!f.linked) f.each([&](int k, int) { at.mu[f.var[k]] = T(f.v[k]); });
    }
  }

  // SparseMAP of one factor at f.x, into f.v.
  void solve_alone(StructuredFactor& f, const Options& options, Control& control, bool may_poll) {
    problem_ = f.set.solve(f.x.data, f.eta_v.data, f.oracle, options.max_inner_iter, control,
                           may_poll, f.v.data);
    f.impossible = problem_ == ActiveSetResult::no_structure;
  }

  // Whether the active sets are those of this point.
  bool stand_at(const DualPoint<T>& at) const { return at.stamp == stamp_; }

  // At the solution: the faces, for the derivative, where the factors stand. error: of the
  // solution.
  void complete(double error) {
    for (StructuredFactor& f : factors_) {
      if (!f.present || problem_ != ActiveSetResult::solved) continue;
      problem_ = f.set.complete(f.x.data, f.eta_v.data, f.oracle, error, f.v.data);
    }
  }

  // y = J v on the variables of the hubs; v, y: (n,), one may be the other.
  void apply_hubs(const T* v, T* y) {
    for (StructuredFactor& f : factors_) {
      if (!f.present || f.linked) continue;
      fill(f.y, 0.0);
      f.each([&](int k, int) { f.y[k] = double(v[f.var[k]]); });
      apply(f);
      f.each([&](int k, int) { y[f.var[k]] = T(f.y[k]); });
    }
  }

  // f.y <- J f.y,  J = M Q M^T
  static void apply(StructuredFactor& f) {
    if (f.set.is_vertex()) {
      fill(f.y, 0.0);
      return;
    }
    f.set.gather(f.y.data, f.c);
    f.set.project(f.c);
    f.set.scatter(f.c.data, f.y.data);
  }

  // eta_v . Np of all.
  double feature_value() const {
    double sum = 0;
    for (const StructuredFactor& f : factors_) {
      if (f.present) sum += f.set.feature_value(f.eta_v.data);
    }
    return sum;
  }

  // What the best structures score: at z on hubs, at the multipliers x on links. +inf if an oracle
  // fails.
  double best_value(const Instance<T>& p, const T* z, const T* x) {
    double sum = 0;
    for (StructuredFactor& f : factors_) {
      if (!f.present) continue;
      fill(f.y, -std::numeric_limits<double>::infinity());
      f.each([&](int k, int r) {
        f.y[k] = f.linked ? double(x[r]) * p.scale[r] : double(z[f.var[k]]);
      });
      double best = 0;
      if (!f.set.best_score(f.y.data, f.eta_v.data, f.oracle, best)) {
        return std::numeric_limits<double>::infinity();
      }
      sum += best;
    }
    return sum;
  }

  // The best structure of each hub for the scores of p, with probability 1; returns their scores.
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

  // Whether every factor holds a structure that is just this 0/1 assignment, and accept(what their
  // features score) is true; then that is all they hold.
  template <class Accept>
  bool settle_on(const T* assignment, const Accept& accept) {
    double value = 0;
    for (int pass = 0; pass < 2; ++pass) {
      if (pass == 1 && !accept(value)) return false;
      for (StructuredFactor& f : factors_) {
        if (!f.present) continue;
        fill(f.y, 0.0);
        f.each([&](int k, int) { f.y[k] = double(assignment[f.var[k]]); });
        const int found = f.set.find(f.y.data);
        if (found < 0) return false;
        if (pass == 0) {
          value += f.set.feature_score(found, f.eta_v.data);
        } else {
          f.set.keep_only(found, f.v.data);
        }
      }
    }
    return true;
  }

  ActiveSetResult trouble() const { return problem_; }
  // What a factor has found within its limit of calls is to do.
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
  void load(const Instance<T>& p, const DualPoint<T>& at, StructuredFactor& f) const {
    f.each([&](int k, int r) {
      f.x[k] = f.linked ? double(at.x[r]) * p.scale[r] : double(at.z[f.var[k]]);
    });
  }

  Span<StructuredFactor> factors_;
  ActiveSetResult problem_ = ActiveSetResult::solved;
  std::int64_t counter_ = 0, stamp_ = 0;
};

}  // namespace factormax
