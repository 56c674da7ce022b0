// The best sequence of states, one a step: Viterbi.
//
// eta_u: (L, S). eta_v: transitions, (S, S) from-to or (L - 1, S, S), then initial (S,) and final
// (S,), where the factor has them. Steps whose states are all -inf are absent, and come last.
//
// Ties: the lowest last state wins, then the lowest state before it, and so on to the first.
#pragma once

#include <cstdint>
#include <limits>

#include "factormax/oracle/max_plus.hpp"

namespace factormax::oracle {

template <class T>
class Sequence {
 public:
  void allocate(int length, int states, bool per_step, bool has_initial, bool has_final,
                Workspace& ws) {
    length_ = length;
    states_ = states;
    per_step_ = per_step;
    has_initial_ = has_initial;
    has_final_ = has_final;
    best_ = ws.take<T>(std::int64_t(length) * states);
  }

  int num_vars() const { return length_ * states_; }
  int num_scores() const { return final_at() + (has_final_ ? states_ : 0); }
  int slots() const { return length_; }
  int feature_slots() const { return length_ + 1; }  // transitions, then initial, then final

  bool prepare(const T* eta_u) {
    present_ = 0;
    while (present_ < length_ && any_allowed(eta_u + present_ * states_)) ++present_;
    return true;  // only eta_v can forbid every sequence
  }

  FACTORMAX_VECTOR bool map(const T* eta_u, const T* eta_v, std::int32_t* on,
                            std::int32_t* features) {
    for (int t = 0; t < length_; ++t) on[t] = -1;
    for (int t = 0; t <= length_; ++t) features[t] = -1;
    if (present_ == 0) return true;

    // best[t, s]: of the sequences that end in state s at step t
    const int S = states_, block = per_step_ ? S * S : 0;
    T* best = best_.data;
    const T* initial = eta_v + initial_at();
#pragma omp simd
    for (int s = 0; s < S; ++s) best[s] = has_initial_ ? initial[s] + eta_u[s] : eta_u[s];
    for (int t = 1; t < present_; ++t) {
      T* next = best + t * S;
      const T* eta = eta_u + t * S;
      max_plus(next - S, eta_v + (t - 1) * block, S, S, next);
#pragma omp simd
      for (int s = 0; s < S; ++s) next[s] += eta[s];
    }

    const T* last = best + (present_ - 1) * S;
    const T* final = eta_v + final_at();
    T most = -std::numeric_limits<T>::infinity();
    int state = -1;
    for (int s = 0; s < S; ++s) {
      const T value = has_final_ ? last[s] + final[s] : last[s];
      if (value > most) {
        most = value;
        state = s;
      }
    }
    if (state < 0) return false;

    if (has_final_) features[length_] = final_at() + state;
    for (int t = present_ - 1; t > 0; --t) {
      on[t] = t * S + state;
      const int from = previous(best + (t - 1) * S, eta_v + (t - 1) * block + state,
                                eta_u[t * S + state], best[t * S + state]);
      features[t - 1] = (t - 1) * block + from * S + state;
      state = from;
    }
    on[0] = state;
    if (has_initial_) features[length_ - 1] = initial_at() + state;
    return true;
  }

 private:
  int initial_at() const { return (per_step_ ? length_ - 1 : 1) * states_ * states_; }
  int final_at() const { return initial_at() + (has_initial_ ? states_ : 0); }

  bool any_allowed(const T* eta) const {
    for (int s = 0; s < states_; ++s) {
      if (eta[s] != -std::numeric_limits<T>::infinity()) return true;
    }
    return false;
  }

  // The state before: the first that reaches `target`, by the sums that made it.
  FACTORMAX_INLINE int previous(const T* best, const T* into, T eta, T target) const {
    int from = 0;
    while (from + 1 < states_ && best[from] + into[from * states_] + eta != target) ++from;
    return from;
  }

  int length_ = 0, states_ = 0, present_ = 0;
  bool per_step_ = false, has_initial_ = false, has_final_ = false;
  Span<T> best_;  // (L, S)
};

}  // namespace factormax::oracle
