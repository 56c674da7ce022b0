// The local problem of OrOut (and of AndOut, through negation): "the last = or of the others".
//
//   min 1/2 ||v - y||^2  s.t.  0 <= v <= 1/delta,   l_i <= l_d (A1),   l_d <= sum_i l_i (A2),
//
// with l = delta * v. One of three holds: the box alone suffices; the box and A1 do; A2 is tight,
// and then implies A1. The branches and their multipliers: docs/math.md (28)-(32).
#pragma once

#include <algorithm>
#include <cstdint>

#include "factormax/local/box_row.hpp"

namespace factormax::local {

// y, delta, v, t: (d,), the output last. t[i], i < d - 1: multiplier of l_i <= l_d; t[d - 1]: of
// A2. w, h: (d,) and order: (d,) are scratch.
template <class T>
void or_out(Span<const T> y, Span<const T> delta, Span<T> v, Span<T> t, Span<T> w, Span<T> h,
            Span<std::int32_t> order) {
  const int out = y.size - 1;
  const auto box = [&](int k, T value) { return clip(value, T(0), 1 / delta[k]); };
  fill(t, T(0));

  // The box.
  T sum = 0, largest = 0;
  for (int k = 0; k <= out; ++k) v[k] = box(k, y[k]);
  for (int k = 0; k < out; ++k) {
    sum += delta[k] * v[k];
    largest = std::max(largest, delta[k] * v[k]);
  }
  const T l_out = delta[out] * v[out];
  if (largest <= l_out && l_out <= sum) return;

  // The box and A1: pool the output with the largest inputs until the next one is below the pool.
  for (int k = 0; k < out; ++k) order[k] = k;
  std::sort(order.begin(), order.begin() + out,
            [&](std::int32_t a, std::int32_t c) { return delta[a] * y[a] > delta[c] * y[c]; });
  T numerator = y[out] / delta[out], denominator = 1 / (delta[out] * delta[out]);
  int pooled = 0;
  while (pooled < out) {
    const int k = order[pooled];
    if (numerator / denominator >= delta[k] * y[k]) break;
    numerator += y[k] / delta[k];
    denominator += 1 / (delta[k] * delta[k]);
    ++pooled;
  }
  const T level = numerator / denominator;
  for (int i = 0; i < pooled; ++i) {
    const int k = order[i];
    t[k] = (y[k] - level / delta[k]) / delta[k];
    v[k] = box(k, level / delta[k]);
  }
  v[out] = box(out, level / delta[out]);
  sum = 0;
  for (int k = 0; k < out; ++k) sum += delta[k] * v[k];
  // Pooled with one input alone, the two sides are equal but for rounding.
  const T rounding = 16 * std::numeric_limits<T>::epsilon() * (1 + sum);
  if (delta[out] * v[out] <= sum + rounding) return;

  // A2 tight: one linear row, l_d - sum_i l_i = 0.
  fill(t, T(0));
  for (int k = 0; k <= out; ++k) {
    w[k] = k == out ? delta[k] : -delta[k];
    h[k] = 1 / delta[k];
  }
  const T inf = std::numeric_limits<T>::infinity();
  t[out] = std::max(T(0), box_row(BoxRow<T>{y, w, h, T(0)}, -inf, inf));
  for (int k = 0; k <= out; ++k) v[k] = box(k, y[k] - w[k] * t[out]);
}

}  // namespace factormax::local
