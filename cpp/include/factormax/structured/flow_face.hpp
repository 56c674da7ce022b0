// A face of the polytope of flows through a trellis, docs/math.md (62)-(66), and pivots from one
// face to the next.
#pragma once

#include <limits>

#include "factormax/oracle/max_plus.hpp"
#include "factormax/problem.hpp"
#include "factormax/structured/flow_routing.hpp"

namespace factormax {

class FlowFace : public FlowRouting {
 public:
  void allocate(const oracle::SequenceShape& shape, Workspace& ws) {
    FlowRouting::allocate(shape, ws);
    for (Span<double>* a : {&reduced_, &best_}) *a = ws.take<double>(shape.length * shape.states);
    path_ = ws.take<std::int32_t>(shape.length);
  }

  // Pivots from the face and the flows at hand until they are optimal for x (centred, with the
  // scores of the ends) and the scores eta_v of size `size`, for at most `most` rounds.
  // docs/math.md (64).
  enum class Pivots { optimal, open, stopped };
  enum class Holds { all, changed, stuck };  // what is beside the flows
  // beside: see `NothingBeside`.
  template <class Beside>
  Pivots pivot(const double* x, const double* eta_v, double size, int most, std::int64_t& rounds,
               Control& control, bool may_poll, Beside&& beside) {
    const double least = kNegative * std::max(1.0, size);
    const double near = 1e-14 * (8 + steps_) * size, close = kGap * size;
    keep_flows();
    for (int round = 1;; ++round) {
      ++rounds;
      if (!grow_forests(eta_v, kCycle * size)) return Pivots::open;
      beside.settle(*this);
      solve(x, eta_v);
      const Holds holds = beside.hold(*this);
      const bool held = holds == Holds::all;
      spread(1, [&](int e, double value) { flow[e] = value; });
      const double gap = price(x, eta_v) - level();
      if (!std::isfinite(gap)) return Pivots::open;
      trace(eta_v, 1e-13 * size);
      const bool better = gap > near && !holds_path();
      const bool dropped = drop_negative(least);
      if (!better && held && !dropped) return Pivots::optimal;
      if (!better && !dropped && holds == Holds::stuck) return Pivots::open;
      if (round == most) return gap <= close && held && !dropped ? Pivots::optimal : Pivots::open;
      if (control.stopped(may_poll)) return Pivots::stopped;
      keep_flows();
      if (better) enter_path();
    }
  }

  // What may be beside the flows: `settle` changes x so that it holds on the face, `hold` tells
  // whether it does for mu. Here, nothing is.
  struct NothingBeside {
    void settle(FlowFace&) const {}
    Holds hold(const FlowFace&) const { return Holds::all; }
  };

  // Starts at the best path; false if there is none.
  bool begin_at_best(const double* x, const double* eta_v) {
    begin_empty(steps_);
    std::copy(x, x + steps_ * shape_.states, reduced_.data);
    if (!(forward(eta_v) > -std::numeric_limits<double>::infinity())) return false;
    trace(eta_v, 0);
    for (int t = 0, from = 0; t < steps_; from = path_[t++]) add(edge(t, from, path_[t]), 1);
    return true;
  }

  // Starts with the edges between states with a positive marginal, and with flows on them that have
  // about these marginals: the edges with the best scores carry as much as they can.
  void begin_at(const double* marginals, const double* eta_v) {
    const int S = shape_.states;
    begin_empty(steps_);
    for (int t = 0; t < steps_; ++t) {
      if (t == 0) {
        for (int s = 0; s < S; ++s) {
          if (marginals[s] > 0) add(s, marginals[s]);
        }
        continue;
      }
      const double *left = marginals + (t - 1) * S, *right = marginals + t * S;
      std::copy(left, left + S, need_.data);
      std::copy(right, right + S, need_.data + S);
      int count = 0, ends = 0;
      for (int j = 0; j < S; ++j) {
        stack_[ends] = j;
        ends += right[j] > 0;
      }
      for (int i = 0; i < S; ++i) {
        if (!(left[i] > 0)) continue;
        const double* score = scores(eta_v, t, i);
        for (const std::int32_t j : stack_.first(ends)) {
          if (score[j] > -std::numeric_limits<double>::infinity()) {
            ranked_[count++] = {score[j], edge(t, i, j)};
          }
        }
      }
      std::sort(ranked_.data, ranked_.data + count);
      for (const Ranked& ranked : ranked_.first(count)) {
        double &from = need_[ranked.edge / S - t * S], &to = need_[S + ranked.edge % S];
        const double amount = std::min(from, to);
        add(ranked.edge, amount);
        from -= amount;
        to -= amount;
      }
    }
  }

  // After `pivot`: finds the face of all paths whose reduced score is within `tolerance` of the
  // best, through states whose marginal is above `least`, or the one path if there is no other; and
  // flows that no cycle of edges can change. docs/math.md (65).
  void complete(const double* x, const double* eta_v, double tolerance, double least) {
    solve(x, eta_v);
    price(x, eta_v);
    if (!is_path(least)) {
      // best_ has the best way to a state, left_ the best from there on; a state that no path
      // within the tolerance passes has no edge.
      backward(eta_v, level() - tolerance);
      const int S = shape_.states;
      for (int t = 0; t < steps_; ++t) {
        for (const std::int32_t e : layer(t)) inside[e] = flow[e] > least;
        compact(t);
        const int lefts = t == 0 ? 1 : states_[t - 1];
        for (int k = 0; k < lefts; ++k) {
          const int i = t == 0 ? 0 : state_[(t - 1) * S + k];
          const double* score = scores(eta_v, t, i);
          const double before = t == 0 ? 0 : best_[(t - 1) * S + i];
          if (t > 0 && !(mu[(t - 1) * S + i] > least)) continue;
          for (int l = 0; l < states_[t]; ++l) {
            const int j = state_[t * S + l];
            const double through = before + score[j] + left_[t * S + j];
            if (mu[t * S + j] > least && through >= level() - tolerance) enter(edge(t, i, j));
          }
        }
      }
    }
    cancel_cycles();
    keep_flows();
    grow_forests(eta_v, std::numeric_limits<double>::infinity());
  }

 private:
  static constexpr double kNegative = 1e-12;  // a flow below minus this is negative
  static constexpr double kGap = 1e-11;       // at the optimum, relative to the scores
  static constexpr double kCycle = 1e-10;     // potentials of edges on one face agree to this

  // Finds the reduced scores x - W mu, up to a constant per step; returns that of the best path,
  // which is `level` at the optimum.
  double price(const double* x, const double* eta_v) {
    const int S = shape_.states;
    for (int t = 0; t < steps_; ++t) {
      const double even = 1 / share_[t];
      for (int k = t * S; k < (t + 1) * S; ++k) reduced_[k] = x[k] + even;
      for (const std::int32_t s : states(t)) reduced_[t * S + s] = x[t * S + s] - delta_[t * S + s];
    }
    return forward(eta_v);
  }

  // best_: the score of the best way to each state; returns the best of all.
  FACTORMAX_VECTOR double forward(const double* eta_v) {
    const int S = shape_.states;
    double* best = best_.data;
    std::copy(reduced_.data, reduced_.data + S, best);
    for (int t = 1; t < steps_; ++t) {
      double* next = best + t * S;
      const double* here = reduced_.data + t * S;
      oracle::max_plus(next - S, eta_v + shape_.transition_at(t, 0), S, S, next);
#pragma omp simd
      for (int s = 0; s < S; ++s) next[s] += here[s];
    }
    double most = -std::numeric_limits<double>::infinity();
    for (int s = 0; s < S; ++s) most = std::max(most, best[(steps_ - 1) * S + s]);
    return most;
  }

  // left_: the score of the best way on from each state, with its own reduced score; states: those
  // on a path that scores at least `least`.
  FACTORMAX_VECTOR void backward(const double* eta_v, double least) {
    const int S = shape_.states;
    std::fill_n(left_.data + (steps_ - 1) * S, S, 0.0);
    for (int t = steps_ - 1; t >= 0; --t) {
      const double* on = left_.data + t * S;
      states_[t] = 0;
      for (int s = 0; s < S; ++s) {
        state_[t * S + states_[t]] = s;
        states_[t] += best_[t * S + s] + on[s] >= least;
      }
      // Into the place of `reduced`: what a path has from here on.
      double* here = reduced_.data + t * S;
#pragma omp simd
      for (int s = 0; s < S; ++s) here[s] += on[s];
      if (t == 0) break;
      for (int i = 0; i < S; ++i) {
        const double* score = eta_v + shape_.transition_at(t, i);
        left_.data[(t - 1) * S + i] = largest_of(S, -std::numeric_limits<double>::infinity(),
                                                 [=](int j) { return score[j] + here[j]; });
      }
    }
    std::copy(reduced_.data, reduced_.data + steps_ * S, left_.data);
  }

  // The best path, last step first; edges of the face win where they are within `tie` of the best.
  void trace(const double* eta_v, double tie) {
    const int S = shape_.states;
    const double* last = best_.data + (steps_ - 1) * S;
    int state = 0;
    for (int s = 1; s < S; ++s) {
      if (last[s] > last[state]) state = s;
    }
    for (int t = steps_ - 1;; --t) {
      path_[t] = state;
      if (t == 0) return;
      double most = -std::numeric_limits<double>::infinity();
      int from = 0;
      for (int i = 0; i < S; ++i) {
        const double bonus = inside[edge(t, i, state)] ? tie : 0.0;
        const double value = best_[(t - 1) * S + i] + scores(eta_v, t, i)[state] + bonus;
        if (value > most) {
          most = value;
          from = i;
        }
      }
      state = from;
    }
  }

  bool holds_path() const {
    for (int t = 0, from = 0; t < steps_; from = path_[t++]) {
      if (!inside[edge(t, from, path_[t])]) return false;
    }
    return true;
  }

  // Drops edges with a negative flow, unless the edges form cycles and flows that are not negative
  // can be found; returns false if none had to be dropped.
  bool drop_negative(double least) {
    const int S = shape_.states;
    bool dropped = false;
    for (int t = 0; t < steps_; ++t) {
      bool negative = false, reversed = false;
      int count = 0;
      for (const std::int32_t e : layer(t)) {
        count += inside[e];
        negative |= inside[e] && flow[e] < -least;
        reversed |= mu[e % S + t * S] < -least || (t > 0 && mu[e / S - S] < -least);
      }
      if (!negative) continue;
      if (!reversed && count > tree_size_[t]) {
        dropped |= !route(t, least);
        continue;
      }
      dropped = true;
      for (const std::int32_t e : layer(t)) inside[e] &= flow[e] >= -least;
    }
    return dropped;
  }

  // The edges of the best path join the face. One within a component closes a cycle: flow moves
  // along it until an edge is empty, which leaves the face.
  void enter_path() {
    const int S = shape_.states;
    for (int t = 0, from = 0; t < steps_; from = path_[t++]) {
      const int to = path_[t], e = edge(t, from, to);
      if (inside[e]) continue;
      const bool both = (t == 0 || uses((t - 1) * S + from)) && uses(t * S + to);
      const bool cycle = both && left_part_[t * S + from] == right_part_[t * S + to];
      const double amount = cycle ? shift(t, from, S + to) : 1e-3 / S;
      enter(e);
      prior_[e] = amount + std::numeric_limits<double>::min();
    }
  }

  // Whether one path carries all that flows.
  bool is_path(double least) {
    const int S = shape_.states;
    for (int t = 0; t < steps_; ++t) {
      int count = 0;
      for (int s = 0; s < S; ++s) count += mu[t * S + s] > least;
      if (count > 1) return false;
    }
    for (int t = 0, from = 0; t < steps_; ++t) {
      int to = 0;
      for (int s = 1; s < S; ++s) {
        if (mu[t * S + s] > mu[t * S + to]) to = s;
      }
      const int e = edge(t, from, to);
      const double value = flow[e];
      clear_layer(t);
      add(e, value);
      from = to;
    }
    return true;
  }

  Span<double> reduced_, best_;  // (L, S) reduced scores; the best way to each state
  Span<std::int32_t> path_;      // (L,) the best path
};

}  // namespace factormax
