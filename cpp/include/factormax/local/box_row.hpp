// One linear constraint in a box: the local problem of every factor that is a single row.
//
//   min 1/2 ||v - y||^2   s.t.  w . v (= or <=) b,  0 <= v <= h
//
// has v(t) = clip(y - w t, 0, h), where the multiplier t in [lo, hi] is the root of the decreasing
// piecewise linear  g(t) = w . v(t) - b,  or the bound nearest to it. lo = -inf for an equality, lo
// = 0 for an inequality, and hi is finite for a row whose violation costs hi per unit (a pair).
#pragma once

#include <limits>

#include "factormax/vector_ops.hpp"

namespace factormax::local {

template <class T>
struct BoxRow {
  Span<const T> y, w, h;
  T b;

  struct Point {
    T g;
    T slope;  // -dg/dt
  };

  FACTORMAX_INLINE Point at(T t) const {
    T value = 0, slope = 0;
    const T *py = y.data, *pw = w.data, *ph = h.data;
#pragma omp simd reduction(+ : value, slope)
    for (int k = 0; k < y.size; ++k) {
      const T z = py[k] - pw[k] * t;
      const T below = z < ph[k] ? z : ph[k];
      const T v = below > 0 ? below : T(0);
      value += pw[k] * v;
      slope += (z > 0 && z < ph[k]) ? pw[k] * pw[k] : T(0);
    }
    return {value - b, slope};
  }

  // Outside of these multipliers nothing moves.
  void breakpoints(T& first, T& last) const {
    first = std::numeric_limits<T>::max();
    last = -first;
    for (int k = 0; k < y.size; ++k) {
      if (w[k] == 0) continue;
      const T a = y[k] / w[k], c = (y[k] - h[k]) / w[k];
      first = std::min(first, std::min(a, c));
      last = std::max(last, std::max(a, c));
    }
  }
};

// Newton inside a strict bracket, bisection where Newton leaves it.
template <class T>
FACTORMAX_VECTOR T box_row(const BoxRow<T>& row, T lo, T hi) {
  const T eps = std::numeric_limits<T>::epsilon();
  if (lo > -std::numeric_limits<T>::max() && row.at(lo).g <= 0) return lo;
  if (hi < std::numeric_limits<T>::max() && row.at(hi).g >= 0) return hi;

  T wy = 0, ww = 0, magnitude = 1, smallest = 1;
  for (int k = 0; k < row.y.size; ++k) {
    wy += row.w[k] * row.y[k];
    ww += row.w[k] * row.w[k];
    if (row.w[k] != 0) smallest = std::min(smallest, std::fabs(row.w[k]));
    magnitude = std::max(magnitude, std::fabs(row.w[k]) * std::min(std::fabs(row.y[k]), row.h[k]));
  }
  if (ww == 0) return clip(T(0), lo, hi);
  const T tolerance = 8 * eps * std::max(magnitude, std::fabs(row.b));
  // What is left of g moves the free entries, or the next one to be free: far, if weights are
  // small.
  const auto close = [&](T g, T slope) {
    if (!(std::fabs(g) <= tolerance)) return false;
    return g == 0 || std::fabs(g) <= tolerance * (slope > 0 ? std::sqrt(slope) : smallest) ||
           slope >= 1;
  };

  T left = lo, right = hi;
  bool bracketed = false;
  T t = clip((wy - row.b) / ww, lo, hi);
  for (int step = 0; step < 200; ++step) {
    const auto [g, slope] = row.at(t);
    if (close(g, slope)) return t;
    (g > 0 ? left : right) = t;
    T next = slope > 0 ? t + g / slope : t;
    if (!(next > left && next < right)) {
      if (!bracketed) {
        T first, last;
        row.breakpoints(first, last);
        left = std::max(left, first);
        right = std::min(right, last);
        bracketed = true;
      }
      next = left + (right - left) / 2;
      if (!(next > left && next < right)) return clip(next, lo, hi);  // resolution, or no root
    }
    t = next;
  }
  return t;
}

// The same for  lower <= w . v <= row.b : the multiplier of the upper bound, or minus that of the
// lower one. Only one of them binds, the one that v(0) breaks.
template <class T>
T box_band(const BoxRow<T>& row, T lower) {
  const T inf = std::numeric_limits<T>::infinity();
  const T t = box_row(row, T(0), inf);
  return t > 0 ? t : box_row(BoxRow<T>{row.y, row.w, row.h, lower}, -inf, T(0));
}

}  // namespace factormax::local
