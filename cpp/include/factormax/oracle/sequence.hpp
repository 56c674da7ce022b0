// The best sequence of states, one per step: Viterbi.
//
// eta_u: (L, S). eta_v: transitions, (S, S) from-to or (L - 1, S, S), then initial (S,) and final
// (S,), where the factor has them. Steps whose states are all -inf are absent, and come last.
//
// Ties: the lowest last state wins, then the lowest state before it, and so on to the first.
#pragma once

#include <cstdint>
#include <limits>

#include "factormax/oracle/inputs.hpp"
#include "factormax/oracle/max_plus.hpp"

namespace factormax::oracle {

// Where the scores of a sequence are in eta_v.
struct SequenceShape {
  int length = 0, states = 0;
  bool per_step = false, has_initial = false, has_final = false;

  SequenceShape() = default;
  // length, states, whether there are transitions per step, initial scores, final scores.
  explicit SequenceShape(Shape shape)
      : length(shape[0]),
        states(shape[1]),
        per_step(shape[2] != 0),
        has_initial(shape[3] != 0),
        has_final(shape[4] != 0) {}

  // Where the transitions from a state into step t begin.
  int transition_at(int t, int from) const {
    return ((per_step ? (t - 1) * states : 0) + from) * states;
  }
  int initial_at() const { return (per_step ? length - 1 : 1) * states * states; }
  int final_at() const { return initial_at() + (has_initial ? states : 0); }
  int num_scores() const { return final_at() + (has_final ? states : 0); }
};

template <class T>
class Sequence {
 public:
  // shape: see SequenceShape.
  static bool fits(Shape shape, std::int64_t vars, std::int64_t scores) {
    if (!is_shape(shape, 5) || shape[0] < 1 || shape[1] < 1) return false;
    const std::int64_t length = shape[0], states = shape[1];
    const std::int64_t steps = shape[2] != 0 ? length - 1 : 1;
    const std::int64_t ends = (shape[3] != 0) + (shape[4] != 0);
    return vars == length * states && scores == steps * states * states + ends * states;
  }

  void allocate(Shape shape, Workspace& ws) {
    shape_ = SequenceShape(shape);
    length_ = shape_.length;
    states_ = shape_.states;
    best_ = ws.take<T>(std::int64_t(length_) * states_);
  }

  int slots() const { return length_; }
  int feature_slots() const { return length_ + 1; }  // transitions, then initial, then final

  bool prepare(const T* eta_u, const InstanceInputs& = {}) {
    present_ = 0;
    while (present_ < length_ && any_allowed(eta_u + present_ * states_)) ++present_;
    return true;  // only eta_v can forbid every sequence
  }

  FACTORMAX_VECTOR bool map(const T* eta_u, const T* eta_v, std::int32_t* on,
                            std::int32_t* features) {
    for (int t = 0; t < length_; ++t) on[t] = -1;
    for (int t = 0; t <= length_; ++t) features[t] = -1;
    if (present_ == 0) return true;

    // best[t, s]: the best score of a sequence that ends in state s at step t
    const int S = states_;
    const bool has_initial = shape_.has_initial, has_final = shape_.has_final;
    T* best = best_.data;
    const T* initial = eta_v + shape_.initial_at();
#pragma omp simd
    for (int s = 0; s < S; ++s) best[s] = has_initial ? initial[s] + eta_u[s] : eta_u[s];
    for (int t = 1; t < present_; ++t) {
      T* next = best + t * S;
      const T* eta = eta_u + t * S;
      max_plus(next - S, eta_v + shape_.transition_at(t, 0), S, S, next);
#pragma omp simd
      for (int s = 0; s < S; ++s) next[s] += eta[s];
    }

    const T* last = best + (present_ - 1) * S;
    const T* final = eta_v + shape_.final_at();
    T most = -std::numeric_limits<T>::infinity();
    int state = -1;
    for (int s = 0; s < S; ++s) {
      const T value = has_final ? last[s] + final[s] : last[s];
      if (value > most) {
        most = value;
        state = s;
      }
    }
    if (state < 0) return false;

    if (has_final) features[length_] = shape_.final_at() + state;
    for (int t = present_ - 1; t > 0; --t) {
      on[t] = t * S + state;
      const int from = previous(best + (t - 1) * S, eta_v + shape_.transition_at(t, 0) + state,
                                eta_u[t * S + state], best[t * S + state]);
      features[t - 1] = shape_.transition_at(t, from) + state;
      state = from;
    }
    on[0] = state;
    if (has_initial) features[length_ - 1] = shape_.initial_at() + state;
    return true;
  }

 private:
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

  SequenceShape shape_;
  int length_ = 0, states_ = 0, present_ = 0;
  Span<T> best_;  // (L, S)
};

}  // namespace factormax::oracle
