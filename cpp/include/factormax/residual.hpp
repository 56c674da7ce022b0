// How far a point of the compact dual is from the solution, and how much of that is rounding.
#pragma once

#include "factormax/dual.hpp"

namespace factormax {

template <class T>
FACTORMAX_INLINE T largest_lack(const T* x, const T* g, const T* lo, const T* hi, const T* norm,
                                int begin, int end) {
  return largest_of(end - begin, T(0), [=](int k) {
    const int r = begin + k;
    // Never form x - g: far out it would round to x.
    const T down = x[r] - lo[r], up = x[r] - hi[r];
    const T least = g[r] < down ? g[r] : down;
    const T step = least > up ? least : up;
    return std::fabs(step) * norm[r];
  });
}

// max_r ||a_r|| |x_r - clip(x_r - g_r)|: how far the rows are from holding, in units of variables.
template <class T>
FACTORMAX_VECTOR T residual_at(const Instance<T>& p, const DualPoint<T>& at) {
  const T *x = at.x.data, *g = at.g.data, *lo = p.lo.data, *hi = p.hi.data, *norm = p.norm.data;
  T largest = largest_of_chunks<T>(p.m, [=](int begin, int end) FACTORMAX_BODY {
    return largest_lack(x, g, lo, hi, norm, begin, end);
  });
  if (p.num_uneven > 0) {
    for (int i = 0; i < p.num_loose; ++i) {
      const int r = p.loose[i];
      if (p.uneven[r]) largest = std::max(largest, row_lack(p, at, r));
    }
  }
  return largest;
}

// Below this the residual is rounding. Free variables are differences of a score and of
// multipliers of the same size; a score that clips its variable from afar does not matter.
template <class T>
FACTORMAX_VECTOR T resolution_at(const Instance<T>& p, const DualPoint<T>& at) {
  const T eps = std::numeric_limits<T>::epsilon();
  const T *x = at.x.data, *scale = p.scale.data;
  T largest = largest_of(p.m, T(0), [=](int r) { return std::fabs(x[r]) * scale[r]; });
  if (p.num_uneven > 0) {
    largest = 0;
    for (int r = 0; r < p.m; ++r) {
      const T size = std::fabs(x[r]) * scale[r];  // units are at most 1
      if (size > largest) largest = std::max(largest, size * row_unit(p, at, r));
    }
  }
  return 4 * eps * (1 + largest);
}

// The most that may be put down to rounding. What multipliers much larger than the scores hide is
// resolved in double, where smaller ones are found.
template <class T>
T most_unresolved(const Instance<T>& p) {
  constexpr T kLargeMultiplier = 16;  // times the largest score
  const T most = T(Precision<T>::unresolved);
  if (Precision<T>::finest) return most;
  const T eps = std::numeric_limits<T>::epsilon();
  return std::min(most, 4 * eps * (1 + kLargeMultiplier * p.largest_score));
}

}  // namespace factormax
