// The structures of a factor that p may use, affinely independent: lists of the variables that are
// on and of the features that count, probabilities, and the Cholesky factor L of G + 11^T,
// G = M^T W M, which is appended to, and downdated by Givens rotations. docs/math.md (49)-(52).
//
// Everything here is double, whatever the precision of the scores: Gram matrices of 0/1 vectors are
// badly conditioned, and the gradient needs what float would lose.
#pragma once

#include <cmath>
#include <cstdint>

#include "factormax/vector_ops.hpp"

namespace factormax {

class StructureSet {
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
    for (Span<double>* s : {&p, &theta_, &y_, &ones_, &inverse_, &cosine_, &sine_}) {
      *s = ws.take<double>(room);
    }
    count = 0;
  }

  int count = 0;   // structures at hand
  Span<double> p;  // (count,) their probabilities
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
  }

  // Other weights for the structures at hand.
  void reweigh(const double* w, bool uniform) {
    w_ = w;
    uniform_ = uniform;
    refactor();
  }

  // The structure at hand that is this 0/1 assignment, or -1.
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

  // Takes over structures found earlier, one after the other: write the lists of structure `count`,
  // then call this.
  void adopt(double probability) {
    theta_[count] = 0;
    p[count] = probability;
    append(0, true);
  }

  // Whether one more would need more memory; beyond d + 1 structures none is independent.
  bool is_full() const { return count == shape_.capacity && count <= shape_.vars; }

  // c_i = v . m_i
  FACTORMAX_VECTOR void gather(const double* v, Span<double> c) const {
    for (int i = 0; i < count; ++i) c[i] = sum_on(i, v);
  }

  // v = sum_i c_i m_i
  FACTORMAX_VECTOR void scatter(const double* c, double* v) const {
    std::fill(v, v + shape_.vars, 0.0);
    for (int i = 0; i < count; ++i) {
      if (c[i] != 0) add_on(i, c[i], v);
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

  // The factor's own scores, weighted by p.
  double feature_value(const double* eta_v) const {
    double sum = 0;
    for (int i = 0; i < count; ++i) {
      if (p[i] != 0) sum += p[i] * feature_score(i, eta_v);
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

 protected:
  static constexpr double kDependent = 1e-10;  // share of its squared length that may be rounding

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

  // As many slots as variables: slot j is variable j, or empty. Which are empty is hard to predict,
  // so the loops over them have no branch.
  bool in_place() const { return shape_.slots == shape_.vars; }

  FACTORMAX_INLINE double sum_on(int i, const double* v) const {
    const std::int32_t* list = on(i);
    double sum = 0;
    if (in_place()) {
#pragma omp simd reduction(+ : sum)
      for (int j = 0; j < shape_.slots; ++j) sum += list[j] < 0 ? 0.0 : v[j];
      return sum;
    }
    for (int s = 0; s < shape_.slots; ++s) {
      if (list[s] >= 0) sum += v[list[s]];
    }
    return sum;
  }

  // v += c m_i
  FACTORMAX_INLINE void add_on(int i, double c, double* v) const {
    const std::int32_t* list = on(i);
    if (in_place()) {
#pragma omp simd
      for (int j = 0; j < shape_.slots; ++j) v[j] += list[j] < 0 ? 0.0 : c;
      return;
    }
    for (int s = 0; s < shape_.slots; ++s) {
      if (list[s] >= 0) v[list[s]] += c;
    }
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

  void average(double* v) const { scatter(p.data, v); }

  // Computes L anew: updates have left their errors in it.
  void refactor() {
    const int all = count;
    count = 0;
    for (int i = 0; i < all; ++i) append(theta_[i], true);
  }

  Shape shape_;
  const double* w_ = nullptr;
  bool uniform_ = true;
  Span<std::int32_t> on_, features_;
  Span<double> dense_;
  Span<double> factor_;  // L, row after row
  double shift_ = 0;     // what all scores have in common, on which p does not depend
  Span<double> theta_;   // scores of the structures, less shift_
  Span<double> y_;       // L^-1 theta
  Span<double> ones_;    // L^-1 1
  Span<double> inverse_, cosine_, sine_;
};

}  // namespace factormax
