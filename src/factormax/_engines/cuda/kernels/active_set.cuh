// The active set: which structures the solution uses, and with which probabilities, docs/math.md
// (48)-(53).
#pragma once

#include "structure_factor.cuh"

namespace factormax {

template <class V>
FM_FUNCTION Found StructureSet<V>::solve() {
  if (count == 0) {
    if (!ask(x_)) return leave(Found::kNone);
    shift_ = candidate_scores(x_, x_).at[0];
    append(0, false);
    if (team_.rank == 0) p_[0] = 1;
    team_.sync();
  } else {
    set_scores();
  }
  bool fresh = false;  // the last structure was just added
  bool refactored = false;
  T best = 0;
  int idle = -1;  // steps without gain: a few in a row are usual at ties
  const int most_calls = calls_ + kMostCalls;
#pragma unroll 1
  for (;;) {
    const bool goes_on = settle(fresh);
    average();
    if (!goes_on) break;  // what the oracle offered was no better, but for rounding
    const T squares = reduce();
    const T value = level_ + squares / 2;
    const bool gained = idle < 0 || value > best + 4 * Constants<T>::kEps * magnitude(best);
    if (gained) best = value;
    idle = gained ? 0 : idle + 1;
    if (idle > kIdle + count) break;  // as far as this precision goes
    if (calls_ >= most_calls) return leave(Found::kLimit);
    if (!ask(rest_)) return leave(Found::kNone);
    const Several<T, 2> score = candidate_scores(rest_, x_);
    const T gap = score.at[0] - level_, size = 1 + magnitude(shift_);
    if (gap <= kGap * size) break;
    if (gap <= kNearGap * size && gap <= 2 * spread()) {
      // So close that the error of p itself may be what is left.
      if (refactored) break;
      refactor();
      refactored = true;
      fresh = false;
      continue;
    }
    if (is_full()) return leave(Found::kFull);
    if (!append(score.at[1] - shift_, false)) {
      if (gap <= kNearGap * size) break;
      if (!swap_dependent(score.at[1] - shift_)) {
        settle(false);
        average();
        break;
      }
    } else if (team_.rank == 0) {
      p_[count - 1] = 0;
    }
    team_.sync();
    fresh = true;
    refactored = false;
  }
  return leave(Found::kSolved);
}

template <class V>
FM_FUNCTION Found StructureSet<V>::complete(T error) {
  const T size = 1 + magnitude(shift_), least_p = most(2 * error, kGap * size);
  prune(least_p);
  if (count <= 1) return leave(Found::kSolved);
  T *direction = graph_.hub_more(), *probe = direction + hub_.vars;
  const T on_face = most(kFace * size, 4 * error);
  bool near_by = false;  // a probe found a structure off the face
  reduce();
  // The scores of variables at 0 are lowered, so that structures with them lose; those of variables
  // at 1 are raised.
  const auto at_one = [&](int k) { return v_[k] > 1 - least_p / 2; };
  int ones = 0;
#pragma unroll 1
  for (int k = team_.rank; k < hub_.vars; k += V::kTeam) {
    if (v_[k] < least_p / 2) rest_[k] -= size;
    ones += at_one(k);
  }
  ones = team_.sum(ones);
  team_.sync();
  bool found = true;
#pragma unroll 1
  for (u32 turn = 0; found && count <= hub_.vars; ++turn) {
    // r = r0 - M Q M^T r0 has the same product with all structures at hand.
#pragma unroll 1
    for (int k = team_.rank; k < hub_.vars; k += V::kTeam) direction[k] = random(turn, u32(k));
    team_.sync();
    gather(direction, work_);
    project(work_);
    scatter(work_, probe);
#pragma unroll 1
    for (int k = team_.rank; k < hub_.vars; k += V::kTeam) direction[k] -= probe[k];
    found = false;
#pragma unroll 1
    for (int way = 0; way < 4; ++way) {
      const T far = way < 2 ? kFarProbe : kNearProbe, step = way % 2 == 0 ? far : -far;
#pragma unroll 1
      for (int k = team_.rank; k < hub_.vars; k += V::kTeam) {
        probe[k] = rest_[k] + size * (at_one(k) ? 8 * far : step * direction[k]);
      }
      team_.sync();
      if (!ask(probe)) return leave(Found::kNone);
      const Several<T, 2> score = candidate_scores(rest_, x_);
      int held = 0;
#pragma unroll 1
      for (int s = team_.rank; s < hub_.slots; s += V::kTeam) {
        held += on(count)[s] != kOff && at_one(on(count)[s]);
      }
      if (level_ - score.at[0] > on_face || team_.sum(held) != ones) {
        near_by = true;
        continue;
      }
      if (is_full()) return leave(Found::kFull);
      found = append(score.at[1] - shift_, false);
      if (found) break;
      // Both far probes stayed on the face, so nothing hides in its neighbourhood.
      if (way == 1 && !near_by) break;
    }
    if (found && team_.rank == 0) p_[count - 1] = 0;
    team_.sync();
  }
  return leave(Found::kSolved);
}

// New scores for the structures at hand.
template <class V>
FM_FUNCTION void StructureSet<V>::set_scores() {
#pragma unroll 1
  for (int i = team_.rank; i < count; i += V::kTeam) {
    theta_[i] = sum_on(i, x_) + feature_score(i);
  }
  team_.sync();
  shift_ = theta_[0];
  team_.sync();
#pragma unroll 1
  for (int i = team_.rank; i < count; i += V::kTeam) y_[i] = theta_[i] -= shift_;
  team_.sync();
  forward_substitute(y_, count);
}

// rest = x - v; returns v . v
template <class V>
FM_DEVICE typename V::T StructureSet<V>::reduce() const {
  T squares = 0;
#pragma unroll 1
  for (int k = team_.rank; k < hub_.vars; k += V::kTeam) {
    rest_[k] = x_[k] - v_[k];
    squares += v_[k] * v_[k];
  }
  team_.sync();
  return team_.sum(squares);
}

// How much the reduced scores of the structures at hand, all equal in theory, differ.
template <class V>
FM_DEVICE typename V::T StructureSet<V>::spread() const {
  T largest = 0;
#pragma unroll 1
  for (int i = team_.rank; i < count; i += V::kTeam) {
    largest = most(largest, magnitude(sum_on(i, rest_) + feature_score(i) - level_));
  }
  return team_.max(largest);
}

// target = Z (theta + c 1), with c such that it sums to 1: the optimum without p >= 0.
template <class V>
FM_DEVICE void StructureSet<V>::aim() {
  T sums[2] = {0, 0};
#pragma unroll 1
  for (int i = team_.rank; i < count; i += V::kTeam) {
    sums[0] += ones_[i] * y_[i];
    sums[1] += ones_[i] * ones_[i];
  }
  team_.reduce(sums, Add());
  const T c = (1 - sums[0]) / sums[1];
  level_ = shift_ + 1 - c;
#pragma unroll 1
  for (int i = team_.rank; i < count; i += V::kTeam) target_[i] = y_[i] + c * ones_[i];
  team_.sync();
  back_substitute(target_);
}

// Moves p to the best point of the face at hand, dropping structures whose probability reaches 0.
// Returns false if the structure just added is dropped at once.
template <class V>
FM_FUNCTION bool StructureSet<V>::settle(bool fresh) {
#pragma unroll 1
  for (;;) {
    aim();
    Several<T, 2> first[1] = {{{infinity<T>(), T(count)}}};
#pragma unroll 1
    for (int i = team_.rank; i < count; i += V::kTeam) {
      if (target_[i] >= -kRounding) continue;
      first[0] = Sooner()(first[0], {{p_[i] / (p_[i] - target_[i]), T(i)}});
    }
    team_.reduce(first, Sooner());
    const int drop = int(first[0].at[1]);
    if (drop == count) {
      accept();
      return true;
    }
    const T step = least(first[0].at[0], T(1));
#pragma unroll 1
    for (int i = team_.rank; i < count; i += V::kTeam) {
      p_[i] = most(p_[i] + step * (target_[i] - p_[i]), T(0));
    }
    const bool newest = drop == count - 1;
    remove(drop);
    if (fresh && newest && step == 0) {
      aim();
      accept();
      return false;
    }
    fresh = fresh && !newest && step == 0;
  }
}

// p = target, but for its rounding.
template <class V>
FM_DEVICE void StructureSet<V>::accept() const {
  T sum = 0;
#pragma unroll 1
  for (int i = team_.rank; i < count; i += V::kTeam) sum += most(target_[i], T(0));
  sum = team_.sum(sum);
#pragma unroll 1
  for (int i = team_.rank; i < count; i += V::kTeam) p_[i] = most(target_[i], T(0)) / sum;
  team_.sync();
}

template <class V>
FM_DEVICE void StructureSet<V>::prune(T least_p) {
  bool pruned = false;
#pragma unroll 1
  for (int i = count - 1; i >= 0 && count > 1; --i) {
    if (p_[i] >= least_p) continue;
    remove(i);
    pruned = true;
  }
  if (!pruned) return;
  settle(false);
  average();
}

// The candidate is m = sum_i beta_i m_i, sum beta = 1, yet scores better (its features differ):
// shift mass to it until the first p_i is 0, and let it take that place.
template <class V>
FM_FUNCTION bool StructureSet<V>::swap_dependent(T theta) {
  const int k = count;
  const T* row = factor_row(k);
#pragma unroll 1
  for (int i = team_.rank; i < k; i += V::kTeam) work_[i] = row[i];
  team_.sync();
  back_substitute(work_);  // beta
  Several<T, 2> first[1] = {{{infinity<T>(), T(k)}}};
#pragma unroll 1
  for (int i = team_.rank; i < k; i += V::kTeam) {
    if (work_[i] > kPositive) first[0] = Sooner()(first[0], {{p_[i] / work_[i], T(i)}});
  }
  team_.reduce(first, Sooner());
  const int out = int(first[0].at[1]);
  if (out == k) return false;
  const T share = first[0].at[0];
#pragma unroll 1
  for (int i = team_.rank; i < k; i += V::kTeam) p_[i] = most(p_[i] - share * work_[i], T(0));
  remove(out);
#pragma unroll 1
  for (int s = team_.rank; s < hub_.slots; s += V::kTeam) on(k - 1)[s] = on(k)[s];
  team_.sync();
  if (!append(theta, false)) return false;
  if (team_.rank == 0) p_[count - 1] = share;
  team_.sync();
  return true;
}

}  // namespace factormax
