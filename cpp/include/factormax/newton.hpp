// Newton's method on the compact dual, by the reduced system of the rows whose multipliers are
// inside their bounds: the exact finish, and directions where L-BFGS is slow. docs/math.md (21).
#pragma once

#include "factormax/dual_walk.hpp"
#include "factormax/reduced.hpp"

namespace factormax {

template <class T>
class Newton {
 public:
  // A finish that shrinks the residual by this was right.
  static constexpr T kJump = T(1e-3);

  void allocate(const Problem<T>& p, StructuredFactors<T>* structured, Workspace& ws) {
    system_.allocate(p, structured, ws);
  }

  void begin(Control& control, bool may_poll) {
    system_.control = &control;
    system_.may_poll = may_poll;
    system_.most_steps = kFinishSteps;
    shift_ = kShift;
  }

  struct Finish {
    bool done;   // whether it moved there
    int passes;  // that it took
  };

  // The exact finish: guess the active set from x - g, put the other multipliers on their bounds,
  // and solve for the rest.
  Finish finish(DualWalk<T>& walk, T residual, T tol) {
    const Instance<T>& p = *walk.p;
    DualPoint<T>&now = walk.now, &next = walk.next;
    const bool others_move = build_system(walk, T(0), system_.kAnyWork);
    if (system_.count == 0 && !others_move) return {false, 0};
    solve_system(walk, others_move, T(Precision<T>::finish));
    T largest = 0;
    for (int r = 0; r < p.m; ++r) {
      largest = std::max(largest, std::fabs(now.x[r]));
      next.x[r] = walk.step[r] < 0 ? p.lo[r] : walk.step[r] > 0 ? p.hi[r] : now.x[r];
    }
    for (int i = 0; i < system_.count; ++i) {
      const int r = system_.active[i];
      const T delta = system_.solution[i];
      // On a singular system a huge step reads as optimal where everything is clipped.
      if (!(std::fabs(delta) <= kSane * (1 + largest))) return {false, 0};
      next.x[r] = clip(now.x[r] + delta, p.lo[r], p.hi[r]);
    }
    walk.evaluate(next);
    const T reached = residual_at(p, next);
    if (!(reached <= tol || reached <= kJump * residual)) {
      // Not the end, but it may well be nearer to it: descend from there.
      if (!(reached <= kNearer * residual)) return {false, 1};
      if (!(dual_value(p, next) < dual_value(p, now))) return {false, 1};
    }
    std::swap(now, next);
    return {true, 1};
  }

  // The direction of Newton's method with a shifted matrix: far from the solution a row need not
  // have a free variable, and then it has no curvature. Returns false if it takes more than
  // `most_work` multiplications.
  bool find_direction(DualWalk<T>& walk, double most_work, Span<T> direction) {
    const bool others_move = build_system(walk, shift_, most_work);
    if (!built_) return false;
    for (int r = 0; r < walk.p->m; ++r) {  // without a branch: what is inside is hard to foresee
      const T against = -walk.now.g[r] / shift_;
      direction[r] = inside(walk, r) ? against : walk.step[r];
    }
    solve_system(walk, others_move, T(0.01));
    for (int i = 0; i < system_.count; ++i) direction[system_.active[i]] = system_.solution[i];
    return true;
  }

  // After a step of length `reach` along the direction. flat: multipliers have far to go.
  void adapt_shift(T reach, bool flat) {
    // What was too far is past a kink, where the matrix is another one.
    shift_ = clip(reach < 1 ? 4 * shift_ : shift_ / 4, flat ? kFlatShift : kLeastShift, T(1));
  }

 private:
  static constexpr int kFinishSteps = 500;  // of conjugate gradients: the finish is an attempt
  static constexpr T kNearer = T(0.9);  // a finish that shrinks the residual by this is a better
                                        // place to descend from
  static constexpr T kSane = 10;  // times the multipliers: a longer step is of a singular system
  static constexpr T kShift = T(0.01);  // of the matrix, to begin with
  static constexpr T kLeastShift = T(1e-4);
  static constexpr T kFlatShift = T(1e-8);  // in a flat valley a larger shift keeps steps short

  // Whether a step against the gradient leaves a multiplier inside its bounds.
  static bool inside(const DualWalk<T>& walk, int r) {
    const DualPoint<T>& at = walk.now;
    const bool above = at.g[r] < at.x[r] - walk.p->lo[r];
    const bool below = at.g[r] > at.x[r] - walk.p->hi[r];
    return above & below;
  }

  // The system of the multipliers inside their bounds; the step takes the others to theirs. Returns
  // whether that moves any.
  bool build_system(DualWalk<T>& walk, T shift, double most_work) {
    const Instance<T>& p = *walk.p;
    const DualPoint<T>& now = walk.now;
    const T* step = walk.step.data;
    system_.count = list_in_chunks(p.m, system_.active.data, [&](int r) FACTORMAX_BODY {
      const bool active = inside(walk, r);
      const T bound = now.g[r] >= now.x[r] - p.lo[r] ? p.lo[r] : p.hi[r];
      walk.step[r] = active ? T(0) : bound - now.x[r];
      return active;
    });
    const bool others_move = max_abs_in_chunks(Span<const T>{step, p.m}) > 0;
    walk.stand();
    system_.shift = shift;
    system_.most_work = most_work;
    const T* z = now.z.data;
    if (p.weighted()) {
      built_ = system_.build(p, [&](int j) { return z[j] > 0 && z[j] * p.give(j) < 1; });
    } else {
      built_ = system_.build(p, [z](int j) { return z[j] > 0 && z[j] < 1; });
    }
    return others_move;
  }

  // For the right-hand side -g_I - (A_I J A_O^T) step_O.
  void solve_system(DualWalk<T>& walk, bool others_move, T wanted) {
    const Span<T> rhs = walk.next.g;
    if (others_move) {
      const Span<T> moved = walk.next.z;
      fill(moved, T(0));
      add_rows(*walk.p, T(1), walk.step.data, moved.data, walk.next.g.data);
      system_.multiply(moved.data, rhs);
    } else {
      fill(rhs, T(0));
    }
    for (int i = 0; i < system_.count; ++i) rhs[i] = -walk.now.g[system_.active[i]] - rhs[i];
    system_.solve(Span<const T>(rhs), wanted);
  }

  ReducedSystem<T> system_;
  T shift_ = kShift;    // smaller after a whole step, else larger
  bool built_ = false;  // whether there is a system to solve
};

}  // namespace factormax
