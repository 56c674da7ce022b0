// The steps of projected L-BFGS, docs/math.md (15)-(20).
#pragma once

#include "solver.cuh"

namespace factormax {

// x and g become next_x and next_g; their change is remembered if that is of use.
template <class V>
FM_DEVICE void Solver<V>::accept(bool remember) {
  if (remember && !kShifted) head_ = head_ == 0 ? kMemory - 1 : head_ - 1;
  empty_ = empty_ && !remember;
  graph_.for_rows([&](int r) {
    const T x = next_x_[r], g = next_g_[r];
    if (remember) {
#pragma unroll
      for (int k = kMemory - 1; kShifted && k > 0; --k) {
        step(k)[r] = step(k - 1)[r];
        bend(k)[r] = bend(k - 1)[r];
      }
      step(0)[r] = x - x_[r];
      bend(0)[r] = g - g_[r];
    }
    x_[r] = x;
    g_[r] = g;
  });
}

template <class V>
FM_DEVICE void Solver<V>::forget() {
  if (empty_) return;
  empty_ = true;
  graph_.for_rows([&](int r) {
#pragma unroll
    for (int k = 0; k < kMemory; ++k) step(k)[r] = bend(k)[r] = 0;
  });
}

template <class V>
FM_DEVICE int Solver<V>::slot(int age) const {
  const int s = kShifted ? age : head_ + age;
  return s >= kMemory ? s - kMemory : s;
}

// next_x = clip(x + by d); returns g . (next_x - x)
template <class V>
FM_DEVICE typename V::T Solver<V>::move(T by) const {
  T slope = 0;
  graph_.for_rows([&](int r) {
    next_x_[r] = clip(x_[r] + by * d_[r], lo_[r], hi_[r]);
    slope += g_[r] * (next_x_[r] - x_[r]);
  });
  return team_.sum(slope);
}

// d = next_x - x; returns g . d
template <class V>
FM_DEVICE typename V::T Solver<V>::toward_next() const {
  T slope = 0;
  graph_.for_rows([&](int r) {
    d_[r] = next_x_[r] - x_[r];
    slope += g_[r] * d_[r];
  });
  return team_.sum(slope);
}

template <class V>
FM_DEVICE bool Solver<V>::frozen(int r) const {
  return (x_[r] <= lo_[r] && g_[r] > 0) || (x_[r] >= hi_[r] && g_[r] < 0);
}

// d = -H g on the rows that are not held by their bounds, and the first point along it. The
// recursion needs 40 inner products; they are found at once.
template <class V>
FM_DEVICE typename V::T Solver<V>::direction() const {
  T of_step[kMemory] = {}, of_bend[kMemory] = {}, gamma = 1;
  if (!empty_) {
    T own[40] = {};
    graph_.for_rows([&](int r) {
      const T g = frozen(r) ? T(0) : g_[r], here = frozen(r) ? T(0) : T(1);
      T s[kMemory], y[kMemory];
#pragma unroll
      for (int k = 0; k < kMemory; ++k) {
        s[k] = step(k)[r];
        y[k] = bend(k)[r] * here;
      }
#pragma unroll
      for (int i = 0; i < kMemory; ++i) {
#pragma unroll
        for (int j = 0; j <= i; ++j) {
          own[pair_of(i, j)] += s[i] * y[j];
          own[15 + pair_of(i, j)] += y[i] * y[j];
        }
        own[30 + i] += s[i] * g;
        own[35 + i] += y[i] * g;
      }
    });
    team_.sum_all(own, graph_.sums());
    recursion(of_step, of_bend, gamma);
  }
  T slope = 0;
  graph_.for_rows([&](int r) {
    const T g = g_[r], x = x_[r];
    T q = -g, e = 0;
#pragma unroll
    for (int k = 0; k < kMemory; ++k) {
      q -= of_bend[k] * bend(k)[r];
      e += of_step[k] * step(k)[r];
    }
    const T d = frozen(r) ? T(0) : gamma * q + e;
    const T next = clip(x + d, lo_[r], hi_[r]);
    d_[r] = d;
    next_x_[r] = next;
    slope += g * (next - x);
  });
  return team_.sum(slope);
}

// The two loops of L-BFGS on inner products: d = gamma (-g - sum of_bend y) + sum of_step s.
template <class V>
FM_DEVICE void Solver<V>::recursion(T (&of_step)[kMemory], T (&of_bend)[kMemory], T& gamma) const {
  T sums[40];
#pragma unroll
  for (int k = 0; k < 40; ++k) sums[k] = graph_.sums()[k];
  T rho[kMemory];
  bool scaled = false;
#pragma unroll
  for (int i = 0; i < kMemory; ++i) {  // newest first
    const T sy = sums[pair_of(i, i)], yy = sums[15 + pair_of(i, i)];
    const bool use = sy > kEps * yy;
    rho[i] = use ? 1 / sy : T(0);
    if (use && !scaled) gamma = sy / yy;
    scaled = scaled || use;
    T sq = -sums[30 + i];
#pragma unroll
    for (int j = 0; j < i; ++j) sq -= of_bend[j] * sums[pair_of(i, j)];
    of_bend[i] = rho[i] * sq;
  }
#pragma unroll
  for (int i = kMemory - 1; i >= 0; --i) {  // oldest first
    T yq = -sums[35 + i];
#pragma unroll
    for (int j = 0; j < kMemory; ++j) {
      yq -= of_bend[j] * sums[15 + (i > j ? pair_of(i, j) : pair_of(j, i))];
    }
    yq *= gamma;
#pragma unroll
    for (int j = i + 1; j < kMemory; ++j) yq += of_step[j] * sums[pair_of(j, i)];
    of_step[i] = of_bend[i] - rho[i] * yq;
  }
}

}  // namespace factormax
