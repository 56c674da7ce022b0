// The best binary sequence with at most `budget` on, where neighbours that are both on earn eta_v.
//
// eta_u: (L,), -inf where a variable must be off. eta_v: one number for all neighbours, or
// (L - 1,); finite. The empty structure is always allowed.
//
// Ties: where two best structures differ last, the one that is off there wins.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>

#include "factormax/oracle/max_plus.hpp"

namespace factormax::oracle {

template <class T>
class SequenceBudget {
 public:
  // `most`: no budget will be larger. The scratch grows with it.
  void allocate(int length, bool per_step, int most, Workspace& ws) {
    length_ = length;
    per_step_ = per_step;
    most_ = std::max(0, std::min(most, length));
    gain_ = ws.take<T>(length);
    on_ = ws.take<T>(std::int64_t(length) * (most_ + 1));
    best_ = ws.take<T>(std::int64_t(length + 2) * (most_ + 1));
  }

  int num_vars() const { return length_; }
  int num_scores() const { return per_step_ ? length_ - 1 : 1; }
  int slots() const { return length_; }
  int feature_slots() const { return length_ - 1; }

  bool prepare(const T* eta_u, int budget) {
    int allowed = 0;
    for (int t = 0; t < length_; ++t) allowed += eta_u[t] != -kInf;
    budget_ = std::max(0, std::min({budget, most_, allowed}));
    return true;
  }

  FACTORMAX_VECTOR bool map(const T* eta_u, const T* eta_v, std::int32_t* on,
                            std::int32_t* features) {
    T* gain = gain_.data;
    gain[0] = -kInf;
    if (per_step_) {
#pragma omp simd
      for (int t = 1; t < length_; ++t) gain[t] = eta_u[t] + eta_v[t - 1];
    } else if (length_ > 1) {
      const T coupling = eta_v[0];
#pragma omp simd
      for (int t = 1; t < length_; ++t) gain[t] = eta_u[t] + coupling;
    }
    // First without the budget: that costs little, and is the answer where the budget has slack.
    forward_free(eta_u);
    if (backward<false>(eta_u, on, features) <= budget_) return true;
    forward_counted(eta_u);
    backward<true>(eta_u, on, features);
    return true;
  }

 private:
  static constexpr T kInf = std::numeric_limits<T>::infinity();

  // on[t, c]: the best of variables 0..t with t on and at most c on. best[t, c]: t on or off.
  //   on[t, c] = max(best[t - 2, c - 1] + eta_u[t], on[t - 1, c - 1] + gain[t]),
  //   best[t, c] = max(best[t - 1, c], on[t, c]),    gain[t] = eta_u[t] + eta_v[t - 1].
  // Two rows of zeros stand before best[0].
  FACTORMAX_INLINE void forward_counted(const T* eta_u) {
    const int width = budget_ + 1;
    T *on = on_.data, *best = best_.data + 2 * width;
    for (int c = 0; c < 2 * width; ++c) best_.data[c] = 0;
    for (int t = 0; t < length_; ++t, on += width, best += width) {
      const T eta = eta_u[t], gain = gain_.data[t];
      const T *before = best - width, *apart = before - width;
      const T* joined = t > 0 ? on - width : apart;  // gain[0] is -inf
      on[0] = -kInf;
      best[0] = 0;
#pragma omp simd
      for (int c = 1; c < width; ++c) {
        const T value = larger(apart[c - 1] + eta, joined[c - 1] + gain);
        on[c] = value;
        best[c] = larger(before[c], value);
      }
    }
  }

  // The same with one column, for any count.
  FACTORMAX_INLINE void forward_free(const T* eta_u) {
    T *on = on_.data, *best = best_.data;
    T value = -kInf, apart = 0, before = 0;  // on[t - 1], best[t - 2], best[t - 1]
    best[0] = best[1] = 0;
    for (int t = 0; t < length_; ++t) {
      value = larger(apart + eta_u[t], value + gain_.data[t]);
      apart = before;
      before = larger(before, value);
      on[t] = value;
      best[t + 2] = before;
    }
  }

  // Finds the choices again, by the sums that made them. Returns how many are on.
  template <bool counted>
  FACTORMAX_INLINE int backward(const T* eta_u, std::int32_t* on, std::int32_t* features) const {
    const std::int64_t width = counted ? budget_ + 1 : 1;
    int count = 0;
    enum { kFree, kOn, kOff } now = kFree;  // what t + 1 says about t
    for (int t = length_ - 1; t >= 0; --t) {
      const int c = counted ? budget_ - count : 0;
      const T *value = on_.data + t * width + c, *best = best_.data + (t + 2) * width + c;
      const bool taken = now == kOn || (now == kFree && *value > best[-width]);
      now = kFree;
      on[t] = taken ? t : -1;
      if (t > 0) features[t - 1] = -1;
      if (!taken) continue;
      ++count;
      if (t == 0) break;
      const int step = counted ? 1 : 0;  // one less remains for those before
      const T apart = best[-2 * width - step] + eta_u[t];
      now = value[-width - step] + gain_.data[t] > apart ? kOn : kOff;
      if (now == kOn) features[t - 1] = per_step_ ? t - 1 : 0;
    }
    return count;
  }

  int length_ = 0, most_ = 0, budget_ = 0;
  bool per_step_ = false;
  Span<T> gain_;  // (L,)
  Span<T> on_;    // (L, budget + 1)
  Span<T> best_;  // (L + 2, budget + 1)
};

}  // namespace factormax::oracle
