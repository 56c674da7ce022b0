// How the solver reads an instance: its scores, rows and pairs, and what is certain beforehand.
#pragma once

#include "solver.cuh"

namespace factormax {

template <class V>
FM_DEVICE bool Solver<V>::take_scores() {
  const Io* scores = a_.eta_u + graph_.instance * a_.n;
  const u8* mask = a_.mask == nullptr ? nullptr : a_.mask + graph_.instance * a_.mask_stride;
  T* eta = graph_.eta();
  bool bad = false, whole = true;
  T size = 0, top = 0;
  graph_.for_vars([&](int j) {
    T score = scores[j];
    if (mask != nullptr && mask[j] == 0) score = -infinity<T>();
    if (score > -infinity<T>()) {
      size = most(size, magnitude(score));
      top = most(top, score);
      bad |= !(score < infinity<T>());
    } else if (score == -infinity<T>()) {
      whole = false;
    } else {
      bad = true;  // NaN
    }
    eta[j] = T(score);
  });
  graph_.for_pairs([&](int p) {
    const T score = magnitude(T(graph_.score[p]));
    bad |= !(score < infinity<T>());
    size = most(size, score);
    top = most(top, score);
  });
  if constexpr (V::kHubs) {
#pragma unroll 1
    for (int k = a_.pairs + team_.rank; k < graph_.num_scores(); k += V::kTeam) {
      bad |= !(T(graph_.score[k]) < infinity<T>());  // -inf forbids what it is the score of
    }
  }
  graph_.set_dummies();
  T both[2] = {size, top};
  team_.reduce(both, Max());
  largest_score_ = both[0];
  top_score_ = both[1];
  complete_ = !team_.any(!whole);
  if (!team_.any(bad)) return true;
  status_ = kBadNumber;
  return false;
}

// Takes out what trees do not allow. Returns false if that would leave a factor without variables
// that the user did not mask: the CPU can handle that, where trees are solved by structures.
template <class V>
FM_DEVICE bool Solver<V>::leave_out() {
  if constexpr (V::kTrees) {
    if (complete_ || !Cuts<V>(graph_).leave_out()) return true;
    bool hidden = false;
    const auto given = given_by_user();
    const auto hides = [&](int r) {
      bool present = false, had = false;
      graph_.each_entry(r, [&](int j, T) {
        present |= graph_.present(j);
        had |= given(j);
      });
      return had && !present;
    };
    const T* rhs = a_.rhs + graph_.instance * a_.rhs_stride;
    graph_.for_hard_rows([&](int r) {
      const bool holds = a_.kind[r] == kEquality ? rhs[r] == 0 : rhs[r] >= 0;  // if all are off
      hidden |= r < a_.model_rows && !holds && hides(r);
    });
    graph_.for_pairs([&](int p) { hidden |= hides(a_.hard + p); });
    if (!team_.any(hidden)) return true;
    give_up();
    return false;
  }
  return true;
}

// The bounds, scales and right-hand sides of the hard rows. Returns false if one can't hold.
template <class V>
FM_DEVICE bool Solver<V>::take_rows() {
  const T* rhs = a_.rhs + graph_.instance * a_.rhs_stride;
  if (a_.scale != nullptr && complete_) {
    graph_.for_hard_rows([&](int r) { set_row(r, a_.scale[r], rhs[r], a_.kind[r] == kEquality); });
    team_.sync();
    return true;
  }
  team_.sync();
  bool holds = true;
  struct AddAll {
    FM_DEVICE Several<T, 3> operator()(Several<T, 3> p, Several<T, 3> q) const {
      return {{p.at[0] + q.at[0], p.at[1] + q.at[1], p.at[2] + q.at[2]}};
    }
  };
  graph_.by_hard_row(
      Several<T, 3>{{0, 0, 0}}, AddAll(),
      [&](u32 code, int place) {
        const T c = graph_.present(graph_.index_of(code)) ? graph_.row_coef(code, place) : T(0);
        return Several<T, 3>{{c * c, least(c, T(0)), most(c, T(0))}};
      },
      [&](int r, Several<T, 3> sum) { holds &= take_row(r, rhs, sum); });
  team_.sync();
  if (!team_.any(!holds)) return true;
  status_ = kInfeasible;
  return false;
}

// sum: the sum of squares, and the least and the most that a . mu can be.
template <class V>
FM_DEVICE bool Solver<V>::take_row(int r, const T* rhs, Several<T, 3> sum) const {
  const u8 flags = a_.flags[r];
  const int first = a_.block[2 * r], last = a_.block[2 * r + 1] - 1;
  const bool equal = (flags & (kBandLower | kBandUpper)) != 0 && rhs[first] == -rhs[last];
  const bool equality = a_.kind[r] == kEquality || equal;
  const T b = rhs[r], low = sum.at[1], high = sum.at[2];
  const bool gone = a_.kind[r] == kAbsent || (equal && (flags & kBandLower) != 0) ||
                    ((flags & kOfFactor) != 0 && !complete_ && all_masked(first, last));
  // Parameters computed in float may miss their own sum.
  const T slack = most(T(1e-7), 16 * kEps) * (high - low + magnitude(b));
  const bool too_much = low > b + slack, too_little = equality && high < b - slack;
  const bool says_nothing = sum.at[0] == 0 || (!equality && high <= b);
  next_x_[r] = 0;  // the certificate
  if (!gone && (too_much || too_little)) next_x_[r] = too_much ? T(1) : T(-1);
  set_row(r, gone || says_nothing ? T(0) : 1 / sqrt(sum.at[0]), b, equality);
  return gone || !(too_much || too_little);
}

// A row without a scale is absent: its multiplier stays 0.
template <class V>
FM_DEVICE void Solver<V>::set_row(int r, T scale, T b, bool equality) const {
  scale_[r] = scale;
  norm_[r] = scale > 0 ? 1 / scale : T(0);
  rhs_[r] = scale > 0 ? b : T(0);
  lo_[r] = equality && scale > 0 ? -infinity<T>() : T(0);
  hi_[r] = scale > 0 ? infinity<T>() : T(0);
}

template <class V>
FM_DEVICE bool Solver<V>::all_masked(int first, int last) const {
#pragma unroll 1
  for (int k = a_.row_ptr[first]; k < a_.row_ptr[last + 1]; ++k) {
    if (graph_.present(a_.row_entry[k] >> 1)) return false;
  }
  return true;
}

// A pair is a linear term, here added to the scores, and a soft row; with one end masked it is a
// linear term at most.
template <class V>
FM_DEVICE void Solver<V>::take_pairs() {
  if constexpr (V::kPairs) {
    const bool zeros = a_.zeros != 0 && find_zeros();
    const auto given = given_by_user();
    T* eta = graph_.eta();
    graph_.by_variable(
        T(0), Add(),
        [&](u32 code, int) {
          const int p = graph_.index_of(code) - a_.hard;
          if (p < 0 || p >= a_.pairs) return T(0);
          const bool second = graph_.is_second(code), negated = graph_.is_negated(code) == second;
          const int other = a_.pair[2 * p + (second ? 0 : 1)];
          const T score = graph_.score[p], own = negated ? -score : score;
          if (!given(other >> 1)) return T((other & 1) != 0 ? own : T(0));
          const bool zero = zeros && (is_zero(other >> 1) || is_zero(a_.pair[2 * p + second] >> 1));
          return T(second && score >= 0 && !zero ? own : T(0));
        },
        [&](int j, T sum) { eta[j] += sum; });
    team_.sync();
    graph_.for_pairs([&](int p) {
      const int first = a_.pair[2 * p], second = a_.pair[2 * p + 1], r = a_.hard + p;
      const T score = graph_.score[p], n1 = T(first & 1), n2 = T(second & 1);
      const bool here = graph_.present(first >> 1) && graph_.present(second >> 1) &&
                        !(zeros && (is_zero(first >> 1) || is_zero(second >> 1)));
      scale_[r] = here ? Constants<T>::kHalfRoot2 : T(0);
      norm_[r] = here ? Constants<T>::kRoot2 : T(0);
      rhs_[r] = !here ? T(0) : score >= 0 ? n1 - n2 : 1 - n1 - n2;
      lo_[r] = 0;
      hi_[r] = here ? magnitude(score) * Constants<T>::kRoot2 : T(0);
    });
    team_.sync();
  }
}

// A variable that is in pairs only, and earns nothing even if all its partners with a positive
// score are on, is 0, docs/math.md (11a). zero() tells the round that showed it.
template <class V>
FM_DEVICE bool Solver<V>::find_zeros() const {
  u8* zero = graph_.zero();
  T* gain = graph_.v();
  graph_.for_vars([&](int j) { zero[j] = in_hard_row(j) ? kHeld : 0; });
  if (team_.rank == 0) zero[a_.n] = 0;
  team_.sync();
  int zeros = 0;
#pragma unroll 1
  for (u8 round = 1; round <= kZeroRounds; ++round) {
    graph_.by_variable(
        T(0), Add(),
        [&](u32 code, int) {
          const int p = graph_.index_of(code) - a_.hard;
          if (p < 0 || p >= a_.pairs || !(graph_.score[p] > 0)) return T(0);
          const int other = a_.pair[2 * p + (graph_.is_second(code) ? 0 : 1)] >> 1;
          return graph_.present(other) && !is_zero(other) ? T(graph_.score[p]) : T(0);
        },
        [&](int j, T sum) { gain[j] = T(graph_.eta()[j]) + sum; });
    team_.sync();
    int fresh = 0;
    graph_.for_vars([&](int j) {
      if (zero[j] != 0 || gain[j] > 0 || !graph_.present(j)) return;
      zero[j] = round;
      ++fresh;
    });
    fresh = team_.sum(fresh);
    team_.sync();
    zeros += fresh;
    if (fresh <= a_.n / kFewZeros || zeros == a_.n) break;
  }
  return zeros > 0;
}

template <class V>
FM_DEVICE bool Solver<V>::in_hard_row(int j) const {  // they come first
  const int first = a_.var_ptr[j];
  return first < a_.var_ptr[j + 1] && (a_.var_entry[first] >> 2) < a_.hard;
}

}  // namespace factormax
