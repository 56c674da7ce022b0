// The descent of the solver: where it begins, its passes, and when it ends, docs/math.md (15)-(22).
#pragma once

#include "answer.cuh"
#include "dual.cuh"
#include "finish.cuh"
#include "instance.cuh"
#include "steps.cuh"

namespace factormax {

template <class V>
FM_DEVICE void Solver<V>::begin() {
  const T size = least(largest_score_, 4 * most(T(8), top_score_));
  T ratio = 1;
#pragma unroll 1
  for (T s = size; !a_.all_isolated && s > (stages_ == 0 ? kDirect : kFirst); s /= kStage) {
    ++stages_;
    ratio /= kStage;
  }
  rescale(ratio);
  T widest = 1;
  graph_.for_rows([&](int r) {
    if (graph_.is_soft(r)) widest = most(widest, hi_[r] * scale_[r]);
    T start = graph_.is_soft(r) ? hi_[r] / 2 : T(0);
    if (a_.warm != nullptr) {
      const T given = T(a_.warm[graph_.instance * graph_.num_rows() + r]) * ratio;
      start = scale_[r] > 0 ? clip(given / scale_[r], lo_[r], hi_[r]) : T(0);
    }
    next_x_[r] = x_[r] = mark_[r] = start;
    g_[r] = 0;
  });
  promise_ = V::kPairs ? least(kPromising * team_.max(widest) / 2, kMostPromising) : kPromising;
  if constexpr (V::kHubs) promise_ = kOraclePromising;
  team_.sync();
}

template <class V>
FM_DEVICE void Solver<V>::rescale(T ratio) const {
  if (ratio == 1) return;
  T* eta = graph_.eta();
  graph_.for_vars([&](int j) { eta[j] *= ratio; });
  graph_.for_pairs([&](int p) { hi_[a_.hard + p] *= ratio; });
  if constexpr (V::kHubs) hubs_.rescale(ratio);
  team_.sync();
}

template <class V>
FM_DEVICE void Solver<V>::minimise() {
  Phase phase = Phase::start;
  T value = 0, slope = 0, alpha = 1, good = 0;
  T residual = 0, best = 0, promising = 0, resolution = 0, largest = 0;
  int tries = 0, last_gain = 0, next_check = kFirstCheck, stage_end = kStagePasses;
  bool ray = false, newton = false;  // newton: the search is along a finish that failed
  T cut_below = kCutBelow;
  status_ = kMaxIter;
#pragma unroll 1
  for (;;) {
    if (phase == Phase::start && a_.num_isolated > 0 && rows_may_be_alone()) solve_isolated();
    const Seen seen = evaluate();
    ++passes_;
    if constexpr (V::kHubs) {
      at_x_ = false;
      if (hubs_.failed()) return give_up();
    }
    bool accepted = true, mu_is_of_x = true;
    if (phase == Phase::finish) {
      const bool done =
          seen.residual <= most(T(a_.tol), resolution) || seen.residual <= kJump * residual;
      accepted = done || (seen.residual <= kNearer * residual && seen.value < value);
      if constexpr (V::kTrees) {  // it may still be the right direction
        if (!accepted) slope = toward_next();
        if (!accepted && slope < 0) {
          accepted = newton = true;
          alpha = 1;
          good = 0;
          tries = 0;
          phase = Phase::search;
        }
      }
    }
    if (phase == Phase::search) {
      const T end = seen.slope;
      const T noise = 64 * kEps * (1 + magnitude(value));
      const bool rises = end > 0 && !(seen.value <= value + kArmijo * slope + noise);
      ++tries;
      if (end > -kSteep * slope || rises) {  // too far
        accepted = false;
        if (good > 0) {
          slope = move(good);
          phase = Phase::back;
          continue;
        }
        alpha *= clip(slope / (slope - end), T(0.1), T(0.7));
        if (tries <= kTries) {
          slope = move(alpha);
          if (slope < 0) continue;
        }
      } else if (end < kSteep * slope && alpha < kLongest && tries < kTries) {
        // Hardly any curvature seen: go on, unless the whole arc is at its bounds.
        const T longer = move(kLonger * alpha);
        if (longer < slope) {
          good = alpha;
          alpha *= kLonger;
          slope = longer;
          ray |= alpha > kRay;
          continue;
        }
        move(alpha);
      }
    }
    if (accepted) {
      const bool stepped = phase == Phase::search || phase == Phase::back;
      const T bend = seen.slope - slope;
      const bool curved = stepped && bend > kEps * sqrt(seen.squares * seen.bends);
      if (phase == Phase::start) {
        best = seen.residual;
        bool near = a_.warm != nullptr && stages_ == 0;
        if constexpr (V::kTrees) near |= *graph_.cut_count() > 0;
        promising = near ? seen.residual : promise_;
        last_gain = passes_;
        forget();
      }
      if (phase == Phase::finish) promising = seen.residual;
      accept(curved);
      if constexpr (V::kHubs) at_x_ = true;
      residual = seen.residual;
      value = seen.value;
      largest = seen.largest;
      resolution = 4 * kEps * (1 + largest);
    } else {
      mu_is_of_x = false;
      if (phase == Phase::search && empty_ && !newton) {
        finish_at(residual, resolution);
        break;
      }
      if (phase == Phase::search && !newton) forget();
    }
    const bool finish_failed = !accepted && (phase == Phase::finish || newton);
    newton = false;

    // Is this the end, or the end of a stage?
    if (residual < T(0.5) * best) {
      best = residual;
      last_gain = passes_;
    }
    const T wanted = stages_ > 0 ? kStageTolerance : T(a_.tol);
    T tol = wanted, rounding = wanted;
    if (residual <= kNear) {
      tol = most(wanted, resolution);
      rounding = most(wanted, least(2 * resolution * T(a_.longest), kNear));
    }
    const bool idle = a_.all_isolated || passes_ - last_gain > kStall;
    const bool there = residual <= tol || (residual <= rounding && idle) || a_.all_isolated;
    if (there && stages_ == 0) {
      finish_at(residual, resolution);
      if constexpr (V::kTrees) {
        if (!mu_is_of_x) {
          graph_.for_rows([&](int r) { next_x_[r] = x_[r]; });
          phase = Phase::start;
          continue;
        }
      }
    }
    if constexpr (V::kTrees) {  // cuts that are violated by far show before the solution is exact
      const bool now = there ? status_ == kConverged : mu_is_of_x && residual <= cut_below;
      if (stages_ == 0 && now) {
        cut_below = kSooner * residual;
        if (add_cuts(residual)) {
          cut_below = kCutBelow;
          status_ = kMaxIter;
          phase = Phase::start;
          continue;
        }
      }
    }
    if (there && stages_ == 0) {
      // Beside multipliers that have run off, nothing is resolved.
      if (!a_.all_isolated && largest > kFar * most(T(1), largest_score_)) status_ = kStalled;
      break;
    }
    if (stages_ > 0 && (there || passes_ >= stage_end)) {
      --stages_;
      stage_end = passes_ + kStagePasses;
      enlarge();
      phase = Phase::start;
      continue;
    }
    if (passes_ >= a_.max_iter) break;
    if (passes_ >= next_check || ray) {
      ray = false;
      next_check = passes_ + least(passes_, kCheckEvery);
      if (infeasible()) return;  // leaves mu alone
    }
    if (residual <= promising && mu_is_of_x && !finish_failed) {
      promising = residual / 2;
      if (guess()) {
        phase = Phase::finish;
        continue;
      }
    }
    // If it leads nowhere, what is remembered may be to blame; if nothing is, this is the end.
#pragma unroll 1
    while (slope = direction(), !(slope < 0) && !empty_) forget();
    if (!(slope < 0)) {
      finish_at(residual, resolution);
      break;
    }
    alpha = 1;
    good = 0;
    tries = 0;
    phase = Phase::search;
  }
  residual_ = residual;
  if (status_ != kConverged) infeasible();
  if constexpr (V::kHubs) finish_hubs();
}

// Makes sure that the hubs are solved at x, with their whole faces, which the gradient needs.
template <class V>
FM_DEVICE void Solver<V>::finish_hubs() {
  if (status_ == kInfeasible) return;
  if (!at_x_) {
    graph_.for_rows([&](int r) { next_x_[r] = x_[r]; });
    evaluate();
  }
  if (!hubs_.failed()) hubs_.complete(residual_);
  if (hubs_.failed()) give_up();
}

// A hub has too many structures, or none: left to the CPU, from the beginning.
template <class V>
FM_DEVICE void Solver<V>::give_up() {
  status_ = kStalled;
  residual_ = infinity<T>();
}

// The rows of the words of trees are not alone, but solved as if they were, they give a good start.
template <class V>
FM_DEVICE bool Solver<V>::rows_may_be_alone() const {
  if constexpr (V::kTrees) return passes_ == 0 && a_.warm == nullptr;
  return true;
}

// Looks for cuts at the multipliers at hand. Returns whether there are new ones.
template <class V>
FM_DEVICE bool Solver<V>::add_cuts(T residual) {
  using Added = typename Cuts<V>::Added;
  const Cuts<V> cuts(graph_);
  const int before = *graph_.cut_count();
  const T least_gap = Constants<T>::kDouble ? T(1e-11) : T(64) * kEps;
  const Added added = cuts.add_violated(4 * residual + least_gap);
  if (added == Added::kNoRoom) status_ = kStalled;
  if (added != Added::kSome) return false;
  cuts.scale_rows(
      before, [&](int j) { return graph_.present(j); },
      [&](int c, T scale) {
        const int r = a_.first_cut + c;
        set_row(r, scale, graph_.by_outside(c) ? T(-1) : T(graph_.cut_size()[c] - 1), false);
        x_[r] = g_[r] = mark_[r] = 0;
      });
  team_.sync();
  graph_.for_rows([&](int r) { next_x_[r] = x_[r]; });
  team_.sync();
  return true;
}

template <class V>
FM_DEVICE void Solver<V>::finish_at(T residual, T resolution) {
  const T tol = T(a_.tol);
  T enough = tol;
  if (residual <= kNear) {
    // In float, what is not resolved is left to double.
    enough = Constants<T>::kDouble ? most(tol, least(2 * resolution * T(a_.longest), kNear))
                                   : most(tol, resolution);
  }
  status_ = residual <= enough ? kConverged : kStalled;
}

// The next stage begins where this one ended, with scores and multipliers that are larger.
template <class V>
FM_DEVICE void Solver<V>::enlarge() const {
  rescale(kStage);
  graph_.for_rows([&](int r) { next_x_[r] = clip(kStage * x_[r], lo_[r], hi_[r]); });
  team_.sync();
}

}  // namespace factormax
