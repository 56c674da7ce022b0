// Looks for a certificate that nothing is feasible in the multipliers of a solver.
#pragma once

#include "factormax/dual_walk.hpp"
#include "factormax/farkas.hpp"

namespace factormax {

template <class T>
class InfeasibilityProof {
 public:
  void allocate(const Problem<T>& p, Workspace& ws) { mark_ = ws.take<T>(p.num_dual()); }

  void begin(int rows) {
    mark_.size = rows;
    found_ = false;
  }

  // Whether there is one: the unscaled multipliers are in the step of the walk then.
  bool found() const { return found_; }

  void mark(const DualWalk<T>& walk) { copy(Span<const T>(walk.now.x), mark_); }

  // Tries the multipliers themselves, and their change since the last try, which tends to the ray.
  bool look(DualWalk<T>& walk) {
    const Instance<T>& p = *walk.p;
    if (p.hard == 0 && !p.weighted()) return false;
    for (int r = 0; r < p.m; ++r) walk.step[r] = walk.now.x[r] * p.scale[r];
    if (try_step(walk)) return true;
    for (int r = 0; r < p.m; ++r) walk.step[r] = (walk.now.x[r] - mark_[r]) * p.scale[r];
    mark(walk);
    return try_step(walk);
  }

  // Tries the multipliers of the next point.
  bool look_ahead(DualWalk<T>& walk) {
    const Instance<T>& p = *walk.p;
    for (int r = 0; r < p.m; ++r) {
      walk.step[r] = clip(walk.next.x[r], p.lo[r], p.hi[r]) * p.scale[r];
    }
    return p.hard > 0 && try_step(walk);
  }

 private:
  bool try_step(DualWalk<T>& walk) {
    found_ = certifies_infeasible(*walk.p, walk.step, walk.next.z, walk.structured);
    return found_;
  }

  Span<T> mark_;  // multipliers of the last try
  bool found_ = false;
};

}  // namespace factormax
