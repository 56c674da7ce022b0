// One structured factor of an instance: SparseMAP of it by structures or by flows, and the
// derivative of whichever solution is at hand.
#pragma once

#include <algorithm>
#include <limits>

#include "factormax/structured/active_set.hpp"
#include "factormax/structured/budget_flow.hpp"

namespace factormax {

// A structured factor. Its solution is a mixture of structures, or, for a sequence with many of
// them, flows.
struct StructuredFactor {
  Oracle oracle;
  ActiveSet set;
  SequenceFlow flow;
  BudgetFlow budget_flow;  // in its place, for a sequence with a budget
  bool has_budget = false;
  bool present = false;  // some of its variables are present
  bool linked = false;
  bool impossible = false;  // the oracle found no structure
  bool has_flow = false;    // it is a sequence, and its flows have room
  bool may_flow = false;    // and they have not failed yet
  bool by_flow = false;     // the solution at hand is `flow`, not `set`
  // How it was last solved.
  ActiveSetResult result = ActiveSetResult::solved;
  double param = 0;         // the parameter of the oracle
  int first_link = 0;       // row of its first variable that is present
  Span<std::int32_t> var;   // (d,) variable of the Instance, -1 where masked
  Span<double> x, v, w, y;  // (d,) scores, marginals, weights, scratch
  Span<double> eta_v;       // (s,)
  Span<double> barrier;     // (s,) 0, or -inf where eta_v is
  Span<double> c;           // (capacity,) scratch

  // Calls visit(k, r) for each variable that is present, and its row if the factor is linked.
  template <class Visit>
  void each(const Visit& visit) const {
    int r = first_link;
    for (int k = 0; k < var.size; ++k) {
      if (var[k] >= 0) visit(k, r++);
    }
  }

  // Returns use(the flows): those with a budget, or without.
  template <class Use>
  decltype(auto) with_flow(const Use& use) {
    return has_budget ? use(budget_flow) : use(flow);
  }
  template <class Use>
  decltype(auto) with_flow(const Use& use) const {
    return has_budget ? use(budget_flow) : use(flow);
  }

  // Starts anew: nothing is known of the solution. uniform: all weights w are the same.
  void begin(bool uniform) {
    set.begin(w.data, uniform);
    by_flow = false;
    may_flow = has_flow;
    if (has_flow) with_flow([&](auto& own) { own.begin(x.data, param); });
  }

  // Other weights; the next solve begins at the solution at hand.
  void reweigh(bool uniform) {
    if (!by_flow) set.reweigh(w.data, uniform);
  }

  // SparseMAP at x, into v.
  ActiveSetResult solve(const Options& options, Control& control, bool may_poll) {
    const bool can = can_flow(options);
    if (!by_flow && !(can && options.by_rows == ByRows::always)) {
      const int most = can ? std::min(few(), options.max_inner_iter) : options.max_inner_iter;
      if (!can || set.count <= most) {
        const ActiveSetResult result = by_structures(most, control, may_poll);
        const bool many = result == ActiveSetResult::limit || result == ActiveSetResult::no_room;
        if (!can || !many) return result;
      }
    }
    return by_flows(options, control, may_poll);
  }

  // Completes the face of the solution, for the derivative. error: of x.
  ActiveSetResult complete(double error, const Options& options, Control& control, bool may_poll) {
    if (!by_flow) {
      const bool can = can_flow(options);
      const int most = can ? few() : std::numeric_limits<int>::max();
      ActiveSetResult result = set.complete(x.data, eta_v.data, oracle, error, most, v.data);
      if (result != ActiveSetResult::limit) return result;
      result = by_flows(options, control, may_poll);
      if (!by_flow || result != ActiveSetResult::solved) return result;
    }
    with_flow([&](auto& own) { own.complete(x.data, eta_v.data, error); });
    return ActiveSetResult::solved;
  }

  // Turns flows into structures, with their whole face if asked for.
  ActiveSetResult list_structures(bool face, double error) {
    if (!by_flow) return ActiveSetResult::solved;
    by_flow = false;
    if (!flow.list_paths(set)) return ActiveSetResult::no_room;
    return set.settle_at(x.data, eta_v.data, oracle, face, error, v.data);
  }

  // Whether some structure at hand is exactly y, a 0/1 assignment; then its features add to
  // `value`, and `keep` makes it the only one.
  bool holds(bool keep, double& value) {
    int found = 0;
    if (by_flow) {
      const bool exists = with_flow([&](auto& own) {
        return own.write_structure(y.data, eta_v.data, set.on(0), set.features(0));
      });
      if (!exists) return false;
    } else {
      found = set.find(y.data);
      if (found < 0) return false;
    }
    value += set.feature_score(found, eta_v.data);
    if (keep) {
      by_flow = false;
      set.keep_only(found, v.data);
    }
    return true;
  }

  double feature_value() const {
    if (!by_flow) return set.feature_value(eta_v.data);
    double sum = 0;
    with_flow([&](const auto& own) {
      own.each_feature(v.data, [&](int k, double value) { sum += value * eta_v[k]; });
    });
    return sum;
  }

  // out: (s,) the marginals of the scores.
  void write_features(double* out) const {
    std::fill_n(out, eta_v.size, 0.0);
    if (by_flow) {
      with_flow([&](const auto& own) {
        own.each_feature(v.data, [&](int k, double value) { out[k] += value; });
      });
    } else {
      set.scatter_features(set.p.data, out);
    }
  }

  // Nothing moves.
  bool is_vertex() const {
    if (!by_flow) return set.is_vertex();
    return with_flow([](const auto& own) { return own.is_vertex(); });
  }

  // y <- J y, docs/math.md (52), (66)
  void apply() {
    if (is_vertex()) {
      fill(y, 0.0);
    } else if (by_flow) {
      with_flow([&](auto& own) { own.apply(y.data); });
    } else {
      set.gather(y.data, c);
      set.project(c);
      set.scatter(c.data, y.data);
    }
  }

  // y, eta_v <- M Q c, N Q c with c = M^T y + N^T eta_v + d_p, docs/math.md (54). d_p: (count,) or
  // null.
  void pull_back(const double* d_p) {
    if (by_flow) return with_flow([&](auto& own) { own.respond(y.data, eta_v.data); });
    set.gather(y.data, c);
    set.gather_features(eta_v.data, c);
    for (int k = 0; d_p != nullptr && k < set.count; ++k) c[k] += d_p[k];
    set.project(c);
    set.scatter(c.data, y.data);
    fill(eta_v, 0.0);
    set.scatter_features(c.data, eta_v.data);
  }

 private:
  // Flows with a budget can't be taken apart into structures.
  bool can_flow(const Options& options) const {
    const bool listed = has_budget && options.by_rows == ByRows::listed;
    return may_flow && options.by_rows != ByRows::never && !listed;
  }

  int few() const {
    return with_flow([](const auto& own) { return own.few(); });
  }

  ActiveSetResult by_structures(int most_calls, Control& control, bool may_poll) {
    return set.solve(x.data, eta_v.data, oracle, most_calls, control, may_poll, v.data);
  }

  ActiveSetResult by_flows(const Options& options, Control& control, bool may_poll) {
    if (set.count > 0 && !has_budget) flow.begin_at(set);
    by_flow = true;
    const SequenceFlow::End end = with_flow([&](auto& own) {
      return own.solve(x.data, eta_v.data, w.data, control, may_poll, set.calls, v.data);
    });
    switch (end) {
      case SequenceFlow::End::solved:
        set.count = 0;
        return ActiveSetResult::solved;
      case SequenceFlow::End::no_structure:
        return ActiveSetResult::no_structure;
      case SequenceFlow::End::stopped:
        return ActiveSetResult::stopped;
      default:  // no flows from now on; the structures at hand are as good as before
        by_flow = may_flow = false;
        return by_structures(options.max_inner_iter, control, may_poll);
    }
  }
};

}  // namespace factormax
