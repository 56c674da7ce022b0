// SparseMAP of one structured factor from nothing but its MAP oracle, docs/math.md (48)-(53):
//
//   max_p  x . Mp + eta_v . Np - 1/2 sum_j w_j (Mp)_j^2,   p in the simplex.
//
// The active set holds the structures that p may use, affinely independent, with the Cholesky
// factor L of G + 11^T, G = M^T W M, which is appended to, and downdated by Givens rotations. It
// lives on from one x to the next: only a few structures change.
//
// Everything here is double, whatever the precision of the scores: Gram matrices of 0/1 vectors are
// badly conditioned, and the gradient needs what float would lose.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>

#include "factormax/structured/oracle.hpp"
#include "factormax/vector_ops.hpp"

namespace factormax {

enum class ActiveSetResult {
  solved,
  no_structure,  // the oracle found none
  no_room,       // more structures than there is memory for
  limit,         // too many oracle calls
  stopped,       // from outside, or the oracle failed
};

class ActiveSet {
 public:
  struct Shape {
    int vars = 0;           // d
    int slots = 0;          // entries of a structure's list of variables
    int feature_slots = 0;  // entries of its list of features
    int dense_scores = 0;   // length of its dense features, if it has those instead
    int capacity = 0;       // structures
  };

  void allocate(const Shape& shape, Workspace& ws) {
    shape_ = shape;
    const int room = shape.capacity + 1;  // one for the candidate
    on_ = ws.take<std::int32_t>(std::int64_t(room) * shape.slots);
    features_ = ws.take<std::int32_t>(std::int64_t(room) * shape.feature_slots);
    dense_ = ws.take<double>(std::int64_t(room) * shape.dense_scores);
    factor_ = ws.take<double>(std::int64_t(room) * (room + 1) / 2);
    for (Span<double>* s :
         {&p, &theta_, &y_, &ones_, &target_, &work_, &inverse_, &cosine_, &sine_})
      *s = ws.take<double>(room);
    residual_ = ws.take<double>(shape.vars);
    probe_ = ws.take<double>(shape.vars);
    direction_ = ws.take<double>(shape.vars);
    count = 0;
  }

  int count = 0;   // structures at hand
  Span<double> p;  // (count,) their probabilities
  std::int64_t calls = 0;

  const Shape& shape() const { return shape_; }
  std::int32_t* on(int i) const { return on_.data + std::int64_t(i) * shape_.slots; }
  std::int32_t* features(int i) const {
    return features_.data + std::int64_t(i) * shape_.feature_slots;
  }
  double* dense(int i) const { return dense_.data + std::int64_t(i) * shape_.dense_scores; }

  // w: (d,) weights of the quadratic; all the same if `uniform`.
  void begin(const double* w, bool uniform) {
    w_ = w;
    uniform_ = uniform;
    count = 0;
    calls = 0;
  }

  // Other weights for the structures at hand.
  void reweigh(const double* w, bool uniform) {
    w_ = w;
    uniform_ = uniform;
    refactor();
  }

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
      if (idle > 64 + count) return ActiveSetResult::solved;  // as far as this precision goes
      if (calls - begin >= most_calls) return ActiveSetResult::limit;
      if (calls % 16 == 15 && control.stopped(may_poll)) return ActiveSetResult::stopped;
      const ActiveSetResult asked = ask(oracle, residual_.data, eta_v);
      if (asked != ActiveSetResult::solved) return asked;
      const double reduced = score(count, residual_.data, eta_v);
      const double gap = reduced - tau();
      const double size = 1 + std::fabs(shift_);
      if (gap <= kGap * size) return ActiveSetResult::solved;
      if (gap <= 1e-9 * size) {
        // So close that the error of p itself may be what is left.
        if (gap <= 2 * spread(eta_v)) {
          if (!refactored_) {
            refactor();
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
      } else if (gap <= 1e-9 * size) {
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

  // Adds structures, with probability 0, until those at hand span the optimal face: the derivative
  // needs that, the solution does not. After `solve` with the same arguments. docs/math.md (53).
  // error: of x; a smaller probability may be its doing, and such structures go first.
  ActiveSetResult complete(const double* x, const double* eta_v, Oracle& oracle, double error,
                           double* v) {
    prune(2 * error, v);
    if (count == 1) return ActiveSetResult::solved;  // a vertex
    const double size = 1 + std::fabs(shift_);
    const double on_face = std::max(kFace * size, 4 * error);
    bool near_by = false;  // a probe found a structure that is not of the face
    reduce(x, v);
    std::uint64_t state = 0x9E3779B97F4A7C15u;
    for (bool found = true; found && count <= shape_.vars;) {
      // r = r0 - W M Q M^T r0 has the same product with all structures at hand.
      for (int j = 0; j < shape_.vars; ++j) {
        state = state * 6364136223846793005u + 1442695040888963407u;
        direction_[j] = static_cast<double>(state >> 11) * 0x1p-52 - 1;
      }
      gather(direction_.data, work_);
      project(work_);
      for (int i = 0; i < count; ++i) {
        for (int s = 0; s < shape_.slots; ++s) {
          const std::int32_t j = on(i)[s];
          if (j >= 0) direction_[j] -= w_[j] * work_[i];
        }
      }
      found = false;
      for (const double step : {1e-6, -1e-6, 1e-8, -1e-8}) {
        for (int j = 0; j < shape_.vars; ++j) {
          probe_[j] = residual_[j] + step * size * direction_[j];
        }
        const ActiveSetResult asked = ask(oracle, probe_.data, eta_v);
        if (asked != ActiveSetResult::solved) return asked;
        const double gap = tau() - score(count, residual_.data, eta_v);
        near_by |= gap > on_face;
        if (gap > on_face) continue;
        if (is_full()) return ActiveSetResult::no_room;
        theta_[count] = score(count, x, eta_v) - shift_;
        found = append(theta_[count]);
        if (found) break;
        // Both far probes stayed on the face, so nothing hides in its neighbourhood.
        if (step == -1e-6 && !near_by) break;
      }
      if (found) p[count - 1] = 0;
    }
    return ActiveSetResult::solved;
  }

  // Holds the best structure for x alone.
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

  // The structure that is this 0/1 assignment, -1 if none at hand is.
  int find(const double* assignment) const {
    double size = 0;
    for (int j = 0; j < shape_.vars; ++j) size += assignment[j];
    for (int i = 0; i < count; ++i) {
      int on_here = 0;
      for (int s = 0; s < shape_.slots; ++s) on_here += on(i)[s] >= 0;
      if (on_here == size && sum_on(i, assignment) == size) return i;
    }
    return -1;
  }

  void keep_only(int i, double* v) {
    std::copy(on(i), on(i) + shape_.slots, on(0));
    std::copy(features(i), features(i) + shape_.feature_slots, features(0));
    std::copy(dense(i), dense(i) + shape_.dense_scores, dense(0));
    count = 0;
    theta_[0] = 0;
    append(0);
    p[0] = 1;
    average(v);
  }

  // The score of the best structure for these scores; false if the oracle fails.
  bool best_score(const double* scores, const double* eta_v, Oracle& oracle, double& best) {
    if (ask(oracle, scores, eta_v) != ActiveSetResult::solved) return false;
    best = score(count, scores, eta_v);
    return true;
  }

  // Takes over structures found earlier, one after the other: write the lists of structure `count`,
  // then call this.
  void adopt(double probability) {
    theta_[count] = 0;
    p[count] = probability;
    append(0, true);
  }

  // c_i = v . m_i
  void gather(const double* v, Span<double> c) const {
    for (int i = 0; i < count; ++i) c[i] = sum_on(i, v);
  }

  // v = sum_i c_i m_i
  void scatter(const double* c, double* v) const {
    std::fill(v, v + shape_.vars, 0.0);
    for (int i = 0; i < count; ++i) {
      if (c[i] == 0) continue;
      const std::int32_t* list = on(i);
      for (int s = 0; s < shape_.slots; ++s) {
        if (list[s] >= 0) v[list[s]] += c[i];
      }
    }
  }

  // out += sum_i c_i n_i
  void scatter_features(const double* c, double* out) const {
    for (int i = 0; i < count; ++i) {
      if (c[i] == 0) continue;
      for (int s = 0; s < shape_.feature_slots; ++s) {
        const std::int32_t k = features(i)[s];
        if (k >= 0) out[k] += c[i];
      }
      for (int k = 0; k < shape_.dense_scores; ++k) out[k] += c[i] * dense(i)[k];
    }
  }

  // c_i += v . n_i
  void gather_features(const double* v, Span<double> c) const {
    for (int i = 0; i < count; ++i) {
      for (int s = 0; s < shape_.feature_slots; ++s) {
        const std::int32_t k = features(i)[s];
        if (k >= 0) c[i] += v[k];
      }
      for (int k = 0; k < shape_.dense_scores; ++k) c[i] += v[k] * dense(i)[k];
    }
  }

  // c <- Q c,  Q = Z - Z11^TZ / (1^TZ1),  Z = (LL^T)^-1
  FACTORMAX_VECTOR void project(Span<double> c) const {
    if (is_vertex()) {
      fill(c.first(count), 0.0);
      return;
    }
    half_project(c);
    back_substitute(c.data);
  }

  // c <- (I - ee^T) L^-1 c, e = L^-1 1 normalised: c' Q c = ||that||^2. docs/math.md (52).
  FACTORMAX_VECTOR void half_project(Span<double> c) const {
    double along = 0, norm = 0;
    forward_substitute(c.data, count);
    for (int i = 0; i < count; ++i) {
      along += c[i] * ones_[i];
      norm += ones_[i] * ones_[i];
    }
    for (int i = 0; i < count; ++i) c[i] -= ones_[i] * (along / norm);
  }

  // M has one column, or all columns are the same: nothing moves.
  bool is_vertex() const { return count <= 1; }

  // sum of the factor's own scores of p
  double feature_value(const double* eta_v) const {
    double sum = 0;
    for (int i = 0; i < count; ++i) {
      if (p[i] != 0) sum += p[i] * feature_score(i, eta_v);
    }
    return sum;
  }

 private:
  static constexpr double kGap = 1e-13;
  static constexpr double kDependent = 1e-10;
  static constexpr double kFace = 1e-10;
  static constexpr double kRounding = 1e-15;

  // Whether one more would need more memory; of d + 1 structures no other is independent.
  bool is_full() const { return count == shape_.capacity && count <= shape_.vars; }

  double* row(int i) const { return factor_.data + std::int64_t(i) * (i + 1) / 2; }

  // What all structures at hand score, less the quadratic: the multiplier of 1^T p = 1.
  double tau() const {
    double along = 0, norm = 0;
    for (int i = 0; i < count; ++i) {
      along += ones_[i] * y_[i];
      norm += ones_[i] * ones_[i];
    }
    return shift_ + 1 - (1 - along) / norm;
  }

  // The best structure goes to place `count`.
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

  double sum_on(int i, const double* v) const {
    const std::int32_t* list = on(i);
    double sum = 0;
    for (int s = 0; s < shape_.slots; ++s) {
      if (list[s] >= 0) sum += v[list[s]];
    }
    return sum;
  }

  double feature_score(int i, const double* eta_v) const {
    double sum = 0;
    for (int s = 0; s < shape_.feature_slots; ++s) {
      if (features(i)[s] >= 0) sum += eta_v[features(i)[s]];
    }
    for (int k = 0; k < shape_.dense_scores; ++k) {
      if (dense(i)[k] != 0) sum += dense(i)[k] * eta_v[k];
    }
    return sum;
  }

  double score(int i, const double* x, const double* eta_v) const {
    return sum_on(i, x) + feature_score(i, eta_v);
  }

  // m_a W m_b
  FACTORMAX_INLINE double overlap(int a, int b) const {
    const std::int32_t *first = on(a), *second = on(b);
    if (uniform_) {
      std::int32_t same = 0;
#pragma omp simd reduction(+ : same)
      for (int s = 0; s < shape_.slots; ++s) same += (first[s] == second[s]) & (first[s] >= 0);
      return same * w_[0];
    }
    double sum = 0;
    for (int s = 0; s < shape_.slots; ++s) {
      if (first[s] == second[s] && first[s] >= 0) sum += w_[first[s]];
    }
    return sum;
  }

  // b <- L^-1 b for the first `rows` rows; four at a time share the loads of b.
  FACTORMAX_INLINE void forward_substitute(double* b, int rows) const {
    int i = 0;
    for (; i + 4 <= rows; i += 4) {
      const double *r0 = row(i), *r1 = row(i + 1), *r2 = row(i + 2), *r3 = row(i + 3);
      double s0 = 0, s1 = 0, s2 = 0, s3 = 0;
#pragma omp simd reduction(+ : s0, s1, s2, s3)
      for (int k = 0; k < i; ++k) {
        const double value = b[k];
        s0 += r0[k] * value;
        s1 += r1[k] * value;
        s2 += r2[k] * value;
        s3 += r3[k] * value;
      }
      const double* inverse = inverse_.data + i;
      b[i] = (b[i] - s0) * inverse[0];
      b[i + 1] = (b[i + 1] - s1 - r1[i] * b[i]) * inverse[1];
      b[i + 2] = (b[i + 2] - s2 - r2[i] * b[i] - r2[i + 1] * b[i + 1]) * inverse[2];
      b[i + 3] =
          (b[i + 3] - s3 - r3[i] * b[i] - r3[i + 1] * b[i + 1] - r3[i + 2] * b[i + 2]) * inverse[3];
    }
    for (; i < rows; ++i) {
      const double* r = row(i);
      double sum = 0;
#pragma omp simd reduction(+ : sum)
      for (int k = 0; k < i; ++k) sum += r[k] * b[k];
      b[i] = (b[i] - sum) * inverse_.data[i];
    }
  }

  // b <- L^-T b
  FACTORMAX_INLINE void back_substitute(double* b) const {
    int end = count;
    for (; end % 4 != 0; --end) {
      const double *r = row(end - 1), value = b[end - 1] *= inverse_.data[end - 1];
#pragma omp simd
      for (int k = 0; k < end - 1; ++k) b[k] -= value * r[k];
    }
    for (int i = end - 4; i >= 0; i -= 4) {
      const double *r0 = row(i), *r1 = row(i + 1), *r2 = row(i + 2), *r3 = row(i + 3);
      const double* inverse = inverse_.data + i;
      const double v3 = b[i + 3] *= inverse[3];
      const double v2 = b[i + 2] = (b[i + 2] - v3 * r3[i + 2]) * inverse[2];
      const double v1 = b[i + 1] = (b[i + 1] - v3 * r3[i + 1] - v2 * r2[i + 1]) * inverse[1];
      const double v0 = b[i] = (b[i] - v3 * r3[i] - v2 * r2[i] - v1 * r1[i]) * inverse[0];
#pragma omp simd
      for (int k = 0; k < i; ++k) b[k] -= v0 * r0[k] + v1 * r1[k] + v2 * r2[k] + v3 * r3[k];
    }
  }

  // Takes in the structure at place `count`; false if it is affinely dependent on the others.
  FACTORMAX_VECTOR bool append(double theta, bool force = false) {
    const int k = count;
    double* r = row(k);
    for (int i = 0; i < k; ++i) r[i] = 1 + overlap(i, k);
    const double own = 1 + overlap(k, k);
    forward_substitute(r, k);
    double squares = 0, along = 0, value = 0;
    for (int i = 0; i < k; ++i) {
      squares += r[i] * r[i];
      along += r[i] * ones_[i];
      value += r[i] * y_[i];
    }
    const double rest = own - squares;
    const bool dependent = rest <= kDependent * own || k > shape_.vars;
    if (dependent && !force) return false;
    r[k] = std::sqrt(std::max(rest, kDependent * own));
    inverse_[k] = 1 / r[k];
    ones_[k] = (1 - along) * inverse_[k];
    y_[k] = (theta - value) * inverse_[k];
    ++count;
    return true;
  }

  // Takes out structure i: the rows below move up and lose a column to Givens rotations.
  void remove(int i) {
    const int last = count - 1;
    for (int r = i; r < last; ++r) {
      std::copy(on(r + 1), on(r + 1) + shape_.slots, on(r));
      std::copy(features(r + 1), features(r + 1) + shape_.feature_slots, features(r));
      std::copy(dense(r + 1), dense(r + 1) + shape_.dense_scores, dense(r));
      p[r] = p[r + 1];
      theta_[r] = theta_[r + 1];
      const double* from = row(r + 1);
      double* to = row(r);
      std::copy(from, from + i, to);
      double carried = from[i];
      for (int c = i; c < r; ++c) {
        to[c] = cosine_[c] * carried + sine_[c] * from[c + 1];
        carried = cosine_[c] * from[c + 1] - sine_[c] * carried;
      }
      const double edge = from[r + 1], length = std::hypot(carried, edge);
      cosine_[r] = carried / length;
      sine_[r] = edge / length;
      to[r] = length;
      inverse_[r] = 1 / length;
    }
    for (Span<double>* s : {&y_, &ones_}) {
      double carried = (*s)[i];
      for (int c = i; c < last; ++c) {
        const double next = (*s)[c + 1];
        (*s)[c] = cosine_[c] * carried + sine_[c] * next;
        carried = cosine_[c] * next - sine_[c] * carried;
      }
    }
    count = last;
  }

  // New scores for the structures at hand.
  FACTORMAX_VECTOR void set_scores(const double* x, const double* eta_v) {
    shift_ = score(0, x, eta_v);
    for (int i = 0; i < count; ++i) y_[i] = theta_[i] = score(i, x, eta_v) - shift_;
    forward_substitute(y_.data, count);
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

  void average(double* v) const { scatter(p.data, v); }

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

  // L anew: updates have left their errors in it.
  void refactor() {
    const int all = count;
    count = 0;
    for (int i = 0; i < all; ++i) append(theta_[i], true);
    refactored_ = true;
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
      if (work_[i] > 1e-9 && p[i] / work_[i] < most) {
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

  Shape shape_;
  const double* w_ = nullptr;
  bool uniform_ = true, refactored_ = false;
  Span<std::int32_t> on_, features_;
  Span<double> dense_;
  Span<double> factor_;  // L, row after row
  double shift_ = 0;     // p does not depend on what all scores have in common:
  Span<double> theta_;   // scores of the structures, less this
  Span<double> y_;       // L^-1 theta
  Span<double> ones_;    // L^-1 1
  Span<double> target_, work_, inverse_, cosine_, sine_;
  Span<double> residual_, probe_, direction_;  // (d,)
};

}  // namespace factormax
