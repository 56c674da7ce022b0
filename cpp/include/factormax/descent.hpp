// Steps of descent on the compact dual: a search along a projected arc, and the directions of
// L-BFGS. docs/math.md (19)-(20).
#pragma once

#include "factormax/dual_walk.hpp"
#include "factormax/lbfgs.hpp"

namespace factormax {

template <class T>
class Descent {
 public:
  Span<T> direction;  // (m,)
  T reach = 0;        // how far along it the last step went; 0: nowhere
  bool far = false;   // whether one went as far as along a ray of an infeasible problem

  void allocate(const Problem<T>& p, Workspace& ws) {
    const int rows = p.num_dual();
    lbfgs_.allocate(rows, p.structured.num_links > 0 ? kLongMemory : kMemory, ws);
    direction = ws.take<T>(rows);
    free_rows_ = ws.take<std::int32_t>(rows);
  }

  // Forgets all earlier steps; to be called before the first one of m rows.
  void reset(int rows) {
    direction.size = rows;
    lbfgs_.reset(rows);
  }

  // One step in the direction of L-BFGS. Returns the passes it took, at most `budget`, or -1 if no
  // descent is left within the resolution.
  int step(DualWalk<T>& walk, int budget) {
    const Instance<T>& p = *walk.p;
    const DualPoint<T>& now = walk.now;
    const T *x = now.x.data, *g = now.g.data, *lo = p.lo.data, *hi = p.hi.data;
    const int free = list_in_chunks(p.m, free_rows_.data, [=](int r) FACTORMAX_BODY {
      const bool low = x[r] <= lo[r], high = x[r] >= hi[r];
      return !((low & (g[r] > 0)) | (high & (g[r] < 0)));
    });
    lbfgs_.direction(Span<const T>(now.g), free_rows_.first(free), direction);
    const int passes = search(walk, budget);
    if (reach > 0 || passes >= budget) return passes;
    // What is remembered may be to blame; if nothing is, we are at the end.
    if (lbfgs_.empty()) return -1;
    lbfgs_.reset(p.m);
    return passes;
  }

  // Looks for a step along `direction` and takes it; `reach` is its length then, or 0. Returns the
  // passes it took, at most `budget`.
  int search(DualWalk<T>& walk, int budget) {
    reach = 0;
    shorten(walk);
    T slope = move(walk, T(1));
    int passes = 0;
    T alpha = 1, good = 0;
    while (true) {
      if (!(slope < 0)) return passes;
      walk.evaluate(walk.next);
      ++passes;
      const T end_slope = dot_in_chunks<T>(walk.next.g, walk.step);
      if (end_slope > kSteep * std::fabs(slope) || !descends(walk, end_slope, slope)) {  // too far
        if (good > 0) {
          move(walk, good);
          walk.evaluate(walk.next);
          ++passes;
          break;
        }
        if (passes >= budget || passes > kTries) return passes;
        alpha *= clip(slope / (slope - end_slope), T(0.1), T(0.7));  // the secant, within reason
        slope = move(walk, alpha);
      } else if (end_slope < kSteep * slope && alpha < kLongest && passes + 2 <= budget) {
        // Hardly any curvature seen: go on, unless the whole arc is at its bounds.
        good = alpha;
        alpha *= kLonger;
        far |= alpha > kRay;  // a ray? see whether it proves that nothing is feasible
        const T longer = move(walk, alpha);
        if (longer >= slope) {
          move(walk, good);
          break;
        }
        slope = longer;
      } else {
        break;
      }
    }
    reach = good > 0 ? good : alpha;
    lbfgs_.push(Span<const T>(walk.now.x), Span<const T>(walk.now.g), Span<const T>(walk.next.x),
                Span<const T>(walk.next.g));
    std::swap(walk.now, walk.next);
    return passes;
  }

 private:
  // Steps of L-BFGS that are remembered; more with links, whose passes cost calls of oracles.
  static constexpr int kMemory = 5, kLongMemory = 10;
  static constexpr T kSteep = T(0.9);  // of the slope: a step that ends with more has overshot, or,
                                       // downwards, has seen hardly any curvature
  static constexpr T kLonger = 4;      // by which it then grows,
  static constexpr T kRay = 1000;      // which may be along a ray of an infeasible problem,
  static constexpr T kLongest = T(1e8);     // and not for ever
  static constexpr int kTries = 25;         // halvings, or so, that end below the rounding
  static constexpr T kArmijo = T(1e-4);     // the usual share of the slope
  static constexpr T kFarDirection = 1000;  // times the scores: no direction is longer

  // Steps along which hardly any curvature was seen make a direction as long as rounding would have
  // it, out to where nothing is left of the scores, and every slope is 0.
  void shorten(const DualWalk<T>& walk) {
    const Instance<T>& p = *walk.p;
    const T longest = max_abs(Span<const T>(direction));
    if (!(longest > kFarDirection * (1 + p.largest_score))) return;
    const T most = kFarDirection * (1 + p.largest_score + max_abs(Span<const T>(walk.now.x)));
    if (!(longest > most)) return;
    for (int r = 0; r < p.m; ++r) direction[r] *= most / longest;
  }

  // By convexity phi falls where the slope at the end is not positive. Elsewhere compare values, if
  // they can be told apart.
  static bool descends(DualWalk<T>& walk, T end_slope, T slope) {
    if (end_slope <= 0) return true;
    const T before = dual_value(*walk.p, walk.now), after = dual_value(*walk.p, walk.next);
    const T noise = 64 * std::numeric_limits<T>::epsilon() * (1 + std::fabs(before));
    return after <= before + kArmijo * slope + noise;
  }

  // next.x = clip(x + alpha d), step = next.x - x; returns g . step
  FACTORMAX_VECTOR T move(DualWalk<T>& walk, T alpha) const {
    const Instance<T>& p = *walk.p;
    const T *x = walk.now.x.data, *g = walk.now.g.data, *d = direction.data;
    const T *lo = p.lo.data, *hi = p.hi.data;
    T *to = walk.next.x.data, *step = walk.step.data;
    return sum_of_chunks<T>(p.m, [=](int begin, int end) FACTORMAX_BODY {
      return move(x, g, d, lo, hi, alpha, begin, end, to, step);
    });
  }

  FACTORMAX_INLINE static T move(const T* x, const T* g, const T* d, const T* lo, const T* hi,
                                 T alpha, int begin, int end, T* to, T* step) {
    T slope = 0;
#pragma omp simd reduction(+ : slope)
    for (int r = begin; r < end; ++r) {
      const T target = x[r] + alpha * d[r];
      const T above = target < lo[r] ? lo[r] : target;
      const T moved = target > hi[r] ? hi[r] : above;
      to[r] = moved;
      step[r] = moved - x[r];
      slope += g[r] * step[r];
    }
    return slope;
  }

  Lbfgs<T> lbfgs_;
  Span<std::int32_t> free_rows_;
};

}  // namespace factormax
