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

#include "factormax/oracle/inputs.hpp"
#include "factormax/oracle/max_plus.hpp"

namespace factormax::oracle {

template <class T>
class SequenceBudget {
 public:
  // shape: length, whether there is a transition per step, and the most that a budget may be; the
  // budget itself is the parameter. The scratch grows with the most.
  static bool fits(Shape shape, std::int64_t vars, std::int64_t scores) {
    return is_shape(shape, 3) && shape[0] > 0 && vars == shape[0] &&
           scores == (shape[1] != 0 ? shape[0] - 1 : 1);
  }

  void allocate(Shape shape, Workspace& ws) {
    const int length = length_ = shape[0];
    per_step_ = shape[1] != 0;
    most_ = std::max(0, std::min(shape[2], length));
    gain_ = ws.take<T>(length);
    on_ = ws.take<T>(2 * (most_ + 1));
    best_ = ws.take<T>(3 * (most_ + 1));
    choice_ = ws.take<std::uint8_t>(std::int64_t(length) * (most_ + 1));
  }

  int slots() const { return length_; }
  int feature_slots() const { return length_ - 1; }

  bool prepare(const T* eta_u, const InstanceInputs& inputs) {
    const int budget = static_cast<int>(inputs.param);
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
    if (backward<false>(on, features) <= budget_) return true;
    forward_counted(eta_u);
    backward<true>(on, features);
    return true;
  }

 private:
  static constexpr T kInf = std::numeric_limits<T>::infinity();

  // on[t, c]: the best of variables 0..t with t on and at most c on. best[t, c]: t on or off.
  //   on[t, c] = max(best[t - 2, c - 1] + eta_u[t], on[t - 1, c - 1] + gain[t]),
  //   best[t, c] = max(best[t - 1, c], on[t, c]),    gain[t] = eta_u[t] + eta_v[t - 1].
  // Of these, only what the next steps need is kept; of the choices all are, a byte each. Beyond c
  // = t + 1 nothing changes, and a c below budget - (L - 1 - t) is never needed: the budget is out
  // of reach from there.
  enum : std::uint8_t { kTaken = 1, kJoined = 2 };

  FACTORMAX_INLINE void forward_counted(const T* eta_u) {
    const int width = budget_ + 1;
    T *on = on_.data, *previous = on + width;
    T *best = best_.data, *before = best + width, *apart = before + width;
    std::fill_n(on, 2 * width, -kInf);
    std::fill_n(best, 3 * width, T(0));  // no variables: nothing is on
    for (int t = 0; t < length_; ++t) {
      const T eta = eta_u[t], gain = gain_.data[t];
      std::uint8_t* choice = choice_.data + std::int64_t(t) * width;
      on[0] = -kInf;
      best[0] = 0;
      choice[0] = 0;
      const int last = std::min(t + 1, budget_);
#pragma omp simd
      for (int c = std::max(1, budget_ - (length_ - 1 - t)); c <= last; ++c) {
        const T alone = apart[c - 1] + eta, joined = previous[c - 1] + gain;
        const T value = larger(alone, joined);
        on[c] = value;
        best[c] = larger(before[c], value);
        choice[c] = static_cast<std::uint8_t>((value > before[c] ? kTaken : 0) |
                                              (joined > alone ? kJoined : 0));
      }
      if (last < budget_) {
        on[last + 1] = on[last];
        best[last + 1] = best[last];
      }
      std::swap(on, previous);
      std::swap(best, apart);    // the row that is no longer needed
      std::swap(apart, before);  // best is now `before`
    }
  }

  // The same with one column, for any count.
  FACTORMAX_INLINE void forward_free(const T* eta_u) {
    T on = -kInf, apart = 0, before = 0;  // on[t - 1], best[t - 2], best[t - 1]
    for (int t = 0; t < length_; ++t) {
      const T alone = apart + eta_u[t], joined = on + gain_.data[t];
      on = larger(alone, joined);
      choice_.data[t] =
          static_cast<std::uint8_t>((on > before ? kTaken : 0) | (joined > alone ? kJoined : 0));
      apart = before;
      before = larger(before, on);
    }
  }

  // Follows the choices from the last variable on. Returns how many are on.
  template <bool counted>
  FACTORMAX_INLINE int backward(std::int32_t* on, std::int32_t* features) const {
    const std::int64_t width = counted ? budget_ + 1 : 1;
    int count = 0;
    enum { kFree, kOn, kOff } now = kFree;  // what t + 1 says about t
    for (int t = length_ - 1; t >= 0; --t) {
      const std::uint8_t choice =
          choice_.data[t * width + (counted ? std::min(budget_ - count, t + 1) : 0)];
      const bool taken = now == kOn || (now == kFree && (choice & kTaken) != 0);
      now = kFree;
      on[t] = taken ? t : -1;
      if (t > 0) features[t - 1] = -1;
      if (!taken) continue;
      ++count;
      if (t == 0) break;
      now = (choice & kJoined) != 0 ? kOn : kOff;
      if (now == kOn) features[t - 1] = per_step_ ? t - 1 : 0;
    }
    return count;
  }

  int length_ = 0, most_ = 0, budget_ = 0;
  bool per_step_ = false;
  Span<T> gain_;               // (L,)
  Span<T> on_;                 // (2, budget + 1)
  Span<T> best_;               // (3, budget + 1)
  Span<std::uint8_t> choice_;  // (L, budget + 1)
};

}  // namespace factormax::oracle
