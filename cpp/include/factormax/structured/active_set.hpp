// SparseMAP of one structured factor from nothing but its MAP oracle, docs/math.md (48)-(53):
//
//   max_p  x . Mp + eta_v . Np - 1/2 sum_j w_j (Mp)_j^2,   p in the simplex.
//
// The active set is kept from one x to the next: only a few structures change.
#pragma once

#include <limits>

#include "factormax/structured/oracle.hpp"
#include "factormax/structured/structure_set.hpp"

namespace factormax {

enum class ActiveSetResult {
  solved,
  no_structure,  // the oracle found none
  no_room,       // more structures than there is memory for
  limit,         // too many oracle calls
  stopped,       // from outside, or the oracle failed
};

class ActiveSet : public StructureSet {
 public:
  void allocate(const Shape& shape, Workspace& ws) {
    StructureSet::allocate(shape, ws);
    target_ = ws.take<double>(shape.capacity + 1);
    work_ = ws.take<double>(shape.capacity + 1);
    residual_ = ws.take<double>(shape.vars);
    probe_ = ws.take<double>(shape.vars);
    direction_ = ws.take<double>(shape.vars);
  }

  void begin(const double* w, bool uniform) {
    StructureSet::begin(w, uniform);
    calls = 0;
  }

  std::int64_t calls = 0;

  // Maximises at x, from the structures at hand; then v = Mp. Asks `control` now and then.
  ActiveSetResult solve(const double* x, const double* eta_v, Oracle& oracle, int most_calls,
                        Control& control, bool may_poll, double* v) {
    if (count == 0) {
      const ActiveSetResult first = ask(oracle, x, eta_v);
      if (first != ActiveSetResult::solved) return first;
      shift_ = score(0, x, eta_v);
      theta_[0] = 0;
      append(0);
      p[0] = 1;
    } else {
      set_scores(x, eta_v);
    }
    bool fresh = false;  // the last structure was just added
    double best = 0;
    int idle = -1;  // steps without gain: a few in a row are usual at ties
    for (std::int64_t begin = calls;;) {
      if (!settle(fresh)) {
        average(v);
        return ActiveSetResult::solved;  // what the oracle offered was no better, but for rounding
      }
      average(v);
      const double squares = reduce(x, v);
      const double value = tau() + squares / 2;
      const bool gained =
          idle < 0 || value > best + 4 * std::numeric_limits<double>::epsilon() * std::fabs(best);
      if (gained) best = value;
      idle = gained ? 0 : idle + 1;
      if (idle > kIdle + count) return ActiveSetResult::solved;  // as far as this precision goes
      if (calls - begin >= most_calls) return ActiveSetResult::limit;
      if (calls % 16 == 15 && control.stopped(may_poll)) return ActiveSetResult::stopped;
      const ActiveSetResult asked = ask(oracle, residual_.data, eta_v);
      if (asked != ActiveSetResult::solved) return asked;
      const double reduced = score(count, residual_.data, eta_v);
      const double gap = reduced - tau();
      const double size = 1 + std::fabs(shift_);
      if (gap <= kGap * size) return ActiveSetResult::solved;
      if (gap <= kNearGap * size) {
        // So close that the error of p itself may be what is left.
        if (gap <= 2 * spread(eta_v)) {
          if (!refactored_) {
            refactor();
            refactored_ = true;
            fresh = false;
            continue;
          }
          return ActiveSetResult::solved;
        }
      }
      if (is_full()) return ActiveSetResult::no_room;
      theta_[count] = score(count, x, eta_v) - shift_;
      if (append(theta_[count])) {
        p[count - 1] = 0;
      } else if (gap <= kNearGap * size) {
        return ActiveSetResult::solved;
      } else if (!swap_dependent()) {
        settle(false);
        average(v);
        return ActiveSetResult::solved;
      }
      fresh = true;
      refactored_ = false;
    }
  }

  // Adds structures, with probability 0, until those at hand span the optimal face: the structures
  // that tie for the best, as far as variables that are 0 or 1 stay so. The derivative needs that,
  // the solution does not. To be called after `solve` with the same arguments. docs/math.md (53).
  // error: of x. A smaller probability may be due to it, or to the gap left open: such structures
  // are removed first. Holds no more than `most`.
  ActiveSetResult complete(const double* x, const double* eta_v, Oracle& oracle, double error,
                           int most, double* v) {
    const double size = 1 + std::fabs(shift_), least = std::max(2 * error, kGap * size);
    prune(least, v);
    if (count == 1) return ActiveSetResult::solved;  // a vertex
    const double on_face = std::max(kFace * size, 4 * error);
    bool near_by = false;  // a probe found a structure off the face
    reduce(x, v);
    // The scores of variables at 0 are lowered, so that structures with them lose. Those of
    // variables at 1 are raised only a little: an oracle may not take every score.
    const auto at_one = [&](int j) { return v[j] > 1 - least / 2; };
    int ones = 0;
    for (int j = 0; j < shape_.vars; ++j) {
      if (v[j] < least / 2) residual_[j] -= size;
      ones += at_one(j);
    }
    const auto has_ones = [&](const std::int32_t* structure) {
      int found = 0;
      for (int k = 0; k < shape_.slots; ++k) found += structure[k] >= 0 && at_one(structure[k]);
      return found == ones;
    };
    std::uint64_t state = 0x9E3779B97F4A7C15u;
    for (bool found = true; found && count <= shape_.vars;) {
      // r = r0 - W M Q M^T r0 has the same product with all structures at hand.
      for (int j = 0; j < shape_.vars; ++j) {
        state = state * 6364136223846793005u + 1442695040888963407u;
        direction_[j] = static_cast<double>(state >> 11) * 0x1p-52 - 1;
      }
      gather(direction_.data, work_);
      project(work_);
      scatter(work_.data, probe_.data);
      for (int j = 0; j < shape_.vars; ++j) direction_[j] -= w_[j] * probe_[j];
      found = false;
      for (const double step : {kFarProbe, -kFarProbe, kNearProbe, -kNearProbe}) {
        for (int j = 0; j < shape_.vars; ++j) {
          const double way = at_one(j) ? 8 * std::fabs(step) : step * direction_[j];
          probe_[j] = residual_[j] + size * way;
        }
        const ActiveSetResult asked = ask(oracle, probe_.data, eta_v);
        if (asked != ActiveSetResult::solved) return asked;
        const double gap = tau() - score(count, residual_.data, eta_v);
        if (gap > on_face || !has_ones(on(count))) {
          near_by = true;
          continue;
        }
        if (count >= most) return ActiveSetResult::limit;
        if (is_full()) return ActiveSetResult::no_room;
        theta_[count] = score(count, x, eta_v) - shift_;
        found = append(theta_[count]);
        if (found) break;
        // Both far probes stayed on the face, so nothing hides in its neighbourhood.
        if (step == -kFarProbe && !near_by) break;
      }
      if (found) p[count - 1] = 0;
    }
    return ActiveSetResult::solved;
  }

  // After adopting structures that make up the solution at x: finds v, and their face if asked for.
  ActiveSetResult settle_at(const double* x, const double* eta_v, Oracle& oracle, bool face,
                            double error, double* v) {
    set_scores(x, eta_v);
    average(v);
    if (!face) return ActiveSetResult::solved;
    return complete(x, eta_v, oracle, error, std::numeric_limits<int>::max(), v);
  }

  // Keeps only the best structure for x.
  ActiveSetResult take_best(const double* x, const double* eta_v, Oracle& oracle, double* v,
                            double& best) {
    count = 0;
    const ActiveSetResult asked = ask(oracle, x, eta_v);
    if (asked != ActiveSetResult::solved) return asked;
    best = score(0, x, eta_v);
    shift_ = best;
    theta_[0] = 0;
    append(0);
    p[0] = 1;
    average(v);
    return ActiveSetResult::solved;
  }

  // The score of the best structure for these scores; false if the oracle fails.
  bool best_score(const double* scores, const double* eta_v, Oracle& oracle, double& best) {
    if (ask(oracle, scores, eta_v) != ActiveSetResult::solved) return false;
    best = score(count, scores, eta_v);
    return true;
  }

 private:
  // Gaps are relative to 1 + the score of the first structure. They are squared distances: where
  // 1e-9 would do for the marginals, their derivative still lacks structures.
  static constexpr double kGap = 1e-13;
  static constexpr double kNearGap = 1e-9;    // below, what is left may be the error of p
  static constexpr double kFace = 1e-10;      // reduced scores on one face agree to this
  static constexpr double kFarProbe = 1e-6;   // step of a probe: beyond rounding, within the face
  static constexpr double kNearProbe = 1e-8;  // the same, where another face is near
  static constexpr double kRounding = 1e-15;  // rounding of a probability
  static constexpr double kPositive = 1e-9;   // a smaller share of a combination is rounding
  static constexpr int kIdle = 64;            // more steps in a row without gain are not just ties

  // Asks for the best structure, which goes to place `count`.
  ActiveSetResult ask(Oracle& oracle, const double* scores, const double* eta_v) {
    ++calls;
    switch (oracle.map(scores, eta_v, on(count), features(count), dense(count))) {
      case OracleAnswer::found:
        return ActiveSetResult::solved;
      case OracleAnswer::none:
        return ActiveSetResult::no_structure;
      default:
        return ActiveSetResult::stopped;
    }
  }

  // Moves p to the best point of the face at hand, dropping structures whose probability reaches 0.
  // Returns false if the structure just added is dropped at once.
  bool settle(bool fresh) {
    for (;;) {
      aim();
      double step = 1;
      int drop = -1;
      for (int i = 0; i < count; ++i) {
        if (target_[i] >= -kRounding) continue;
        const double ratio = p[i] / (p[i] - target_[i]);
        if (ratio < step || drop < 0) {
          step = std::min(ratio, 1.0);
          drop = i;
        }
      }
      if (drop < 0) {
        accept();
        return true;
      }
      for (int i = 0; i < count; ++i) p[i] = std::max(p[i] + step * (target_[i] - p[i]), 0.0);
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
  void accept() {
    double sum = 0;
    for (int i = 0; i < count; ++i) sum += p[i] = std::max(target_[i], 0.0);
    for (int i = 0; i < count; ++i) p[i] /= sum;
  }

  void prune(double least, double* v) {
    bool pruned = false;
    for (int i = count - 1; i >= 0 && count > 1; --i) {
      if (p[i] >= least) continue;
      remove(i);
      pruned = true;
    }
    if (!pruned) return;
    settle(false);
    average(v);
  }

  // target = Z (theta + c 1), with c such that it sums to 1: the optimum without p >= 0.
  FACTORMAX_VECTOR void aim() {
    double along = 0, norm = 0;
#pragma omp simd reduction(+ : along, norm)
    for (int i = 0; i < count; ++i) {
      along += ones_.data[i] * y_.data[i];
      norm += ones_.data[i] * ones_.data[i];
    }
    const double c = (1 - along) / norm;
#pragma omp simd
    for (int i = 0; i < count; ++i) target_.data[i] = y_.data[i] + c * ones_.data[i];
    back_substitute(target_.data);
  }

  // residual = x - Wv; returns vWv.
  FACTORMAX_VECTOR double reduce(const double* x, const double* v) {
    double* out = residual_.data;
    const double* w = w_;
    double squares = 0;
#pragma omp simd reduction(+ : squares)
    for (int j = 0; j < shape_.vars; ++j) {
      const double pull = w[j] * v[j];
      out[j] = x[j] - pull;
      squares += pull * v[j];
    }
    return squares;
  }

  // How much the reduced scores of the structures at hand, all equal in theory, differ.
  double spread(const double* eta_v) const {
    const double level = tau();
    double largest = 0;
    for (int i = 0; i < count; ++i) {
      largest = std::max(largest, std::fabs(score(i, residual_.data, eta_v) - level));
    }
    return largest;
  }

  // The candidate is m = sum_i beta_i m_i, sum beta = 1, yet scores better (its features differ):
  // shift mass to it until the first p_i is 0, and let it take that place.
  bool swap_dependent() {
    const int k = count;
    std::copy(row(k), row(k) + k, work_.data);
    back_substitute(work_.data);  // beta
    double most = std::numeric_limits<double>::infinity();
    int out = -1;
    for (int i = 0; i < k; ++i) {
      if (work_[i] > kPositive && p[i] / work_[i] < most) {
        most = p[i] / work_[i];
        out = i;
      }
    }
    if (out < 0) return false;
    for (int i = 0; i < k; ++i) p[i] = std::max(p[i] - most * work_[i], 0.0);
    // `remove` moves structures up to `count` only: take the candidate along by hand.
    const double theta = theta_[k];
    remove(out);
    std::copy(on(k), on(k) + shape_.slots, on(k - 1));
    std::copy(features(k), features(k) + shape_.feature_slots, features(k - 1));
    std::copy(dense(k), dense(k) + shape_.dense_scores, dense(k - 1));
    theta_[k - 1] = theta;
    if (!append(theta)) return false;
    p[count - 1] = most;
    return true;
  }

  bool refactored_ = false;
  Span<double> target_, work_;                 // (capacity,)
  Span<double> residual_, probe_, direction_;  // (d,)
};

}  // namespace factormax
