// What descent on the compact dual falls back to, the interior point method, and when.
#pragma once

#include "factormax/dual_walk.hpp"
#include "factormax/farkas.hpp"
#include "factormax/interior.hpp"

namespace factormax {

// Multiplications that take as long as a pass, about.
template <class T>
double pass_work(const Instance<T>& p) {
  return 4.0 * p.ptr[p.m] + 40.0 * p.m;
}

template <class T>
class Fallback {
 public:
  static constexpr int kNever = std::numeric_limits<int>::max();
  static constexpr int kPatience = 120, kMostPatience = 600;  // passes before it is tried,
  static constexpr int kSpare = 20;  // less this many for those of a stage on the way

  void allocate(const Problem<T>& p, Workspace& ws) { interior_.allocate(p, ws); }
  void begin() { patience_ = 0; }

  bool fits(const DualWalk<T>& walk) {
    if (patience_ == 0) {
      patience_ = kNever;
      if (walk.structured == nullptr && interior_.fits(*walk.p)) {
        const double passes =
            clip(interior_.work() / pass_work(*walk.p), double(kPatience), double(kMostPatience));
        patience_ = static_cast<int>(passes);
      }
    }
    return patience_ != kNever;
  }

  // Passes that take about as long as the interior point method, which is then worth a try. To find
  // out whether it fits takes a while, too: until then, passes that take as long as that.
  int patience(const DualWalk<T>& walk, int iterations) {
    const int look = clip((walk.p->n + walk.p->m) / kPerPass, kPatience, kMostPatience);
    if (patience_ == 0 && iterations < look - kSpare) return look;
    return fits(walk) ? patience_ : kNever;
  }

  struct Outcome {
    int passes;  // that it took
    bool moved;  // whether it ended nearer to the solution, which is `now` then
  };

  // Goes on from the multipliers of an interior point method, close to the solution. Without a
  // solution they grow along a ray that proves it: then `proof` has been found.
  Outcome attempt(DualWalk<T>& walk, InfeasibilityProof<T>& proof, int budget) {
    const Instance<T>& p = *walk.p;
    const Span<T> x = walk.next.x;
    const auto is_proof = [&] { return proof.look_within_bounds(p, x, walk.next.z); };
    const int passes = interior_.solve(p, budget, x, is_proof);
    if (proof.found() || is_proof()) return {passes, false};
    for (int r = 0; r < p.m; ++r) {
      x[r] = clip(x[r], p.lo[r], p.hi[r]);
      if (!std::isfinite(x[r])) return {passes, false};
    }
    walk.evaluate(walk.next);
    const bool better = residual_at(p, walk.next) < residual_at(p, walk.now);
    if (better) std::swap(walk.now, walk.next);
    return {passes + 1, better};
  }

 private:
  static constexpr int kPerPass = 8;  // unknowns that are looked through in the time of a pass

  InteriorPoint<T> interior_;
  int patience_ = 0;  // 0: not known yet
};

}  // namespace factormax
