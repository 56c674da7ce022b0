// What a linear program over the graph needs besides the dual: the value of a point, a bound from
// multipliers, what counts as equal, and rounding. docs/math.md (56)-(58).
#pragma once

#include "factormax/structured/structured.hpp"

namespace factormax {

// The linear program of an instance. Its scores are those of the instance times `scale`.
template <class T>
class LinearProgram {
 public:
  void allocate(const Problem<T>& p, Workspace& ws) {
    sizes_ = ws.take<double>(p.num_vars + p.num_scores());
    rounded_ = ws.take<T>(p.num_vars);
  }

  // The scores that p has now are the program's own.
  void begin(const Instance<T>& p, StructuredFactors<T>* structured) {
    p_ = &p;
    structured_ = structured;
    size_ = typical_magnitude();
  }

  // The typical size of a score, 1 if there is none: the unit of all that is compared with 0.
  double size() const { return size_; }

  // Whether a gap between two values can be overlooked.
  bool negligible(double gap, double value, double tol) const {
    return gap <= tol * (size_ + std::fabs(value));
  }

  // eta . mu + the scores of pairs and structured factors. eta: (n,) with the linear part of the
  // pairs; hi: (m,) bounds of the multipliers; scale: the factor in the structured factors' scores.
  double value(const T* mu, const T* eta, const T* hi, double scale) const {
    const double features = structured_ == nullptr ? 0.0 : structured_->feature_value();
    return value_of_rows(mu, eta, hi) + features / scale;
  }

  // No assignment scores more than this, for any multipliers x in their bounds. z: (n,) the scores
  // less what the multipliers take, all times `scale`. taken: (n,) what links have taken from their
  // variables in z besides x, or null.
  double bound(const T* z, const T* x, double scale, const T* taken = nullptr) const {
    const Instance<T>& p = *p_;
    double sum = 0;
    for (int j = 0; j < p.n; ++j) {
      if (structured_ == nullptr || !p.in_hub[j]) sum += std::max(0.0, double(z[j]));
    }
    for (int r = 0; r < p.links; ++r) sum += double(p.rhs[r]) * p.scale[r] * x[r];
    if (structured_ != nullptr) sum += structured_->best_value(p, z, x, taken);
    return sum / scale + p.constant;
  }

  // Rounds mu to 0/1 if that is all it lacks to be a structure that no other beats: the rounded
  // point meets all constraints, and its value is the bound. Returns whether it did.
  bool round(Span<T> mu, const T* eta, const T* hi, double scale, double bound, double tol) {
    const Instance<T>& p = *p_;
    const Span<T> rounded = rounded_.first(p.n);
    for (int j = 0; j < p.n; ++j) {
      rounded[j] = mu[j] > T(0.5) ? T(1) : T(0);
      if (!(std::fabs(mu[j] - rounded[j]) <= kNearVertex)) return false;
    }
    for (int r = 0; r < p.hard; ++r) {
      if (!holds(r, rounded)) return false;
    }
    const double rows = value_of_rows(rounded.data, eta, hi);
    const auto is_best = [&](double features) {
      const double value = rows + features / scale;
      return negligible(bound - value, value, tol);
    };
    if (structured_ == nullptr ? !is_best(0) : !structured_->settle_on(rounded.data, is_best)) {
      return false;
    }
    copy(rounded, mu);
    return true;
  }

 private:
  // Further from 0 and 1 it is no rounded structure; nearer, the checks decide.
  static constexpr T kNearVertex = T(1e-3);

  double value_of_rows(const T* mu, const T* eta, const T* hi) const {
    const Instance<T>& p = *p_;
    double sum = p.constant;
    for (int j = 0; j < p.n; ++j) sum += double(eta[j]) * mu[j];
    for (int r = p.hard, k = p.ptr[p.hard]; r < p.links; ++r, k += 2) {
      const double product =
          double(p.coef[k]) * mu[p.col[k]] + double(p.coef[k + 1]) * mu[p.col[k + 1]];
      const double excess = product - p.rhs[r];
      if (excess > 0) sum -= double(hi[r]) * p.scale[r] * excess;
    }
    return sum;
  }

  // Whether row r holds, up to the rounding of its sum, which is relative to the terms.
  bool holds(int r, Span<const T> x) const {
    const Instance<T>& p = *p_;
    double product = 0, size = std::fabs(double(p.rhs[r]));
    for (int k = p.ptr[r]; k < p.ptr[r + 1]; ++k) {
      const double term = double(p.coef[k]) * x[p.col[k]];
      product += term;
      size += std::fabs(term);
    }
    const double excess = product - p.rhs[r];
    const double slack = (16 + p.length(r)) * double(p.row_eps) * size;
    return (p.lo[r] == 0 ? excess : std::fabs(excess)) <= slack;
  }

  // The median magnitude of the nonzero scores. A few huge ones that keep their variables off do
  // not change it.
  double typical_magnitude() {
    const Instance<T>& p = *p_;
    const double rounding = std::numeric_limits<T>::epsilon() * double(p.largest_score);
    int count = 0;
    const auto take = [&](double score) {
      const double size = std::fabs(score);
      sizes_[count] = size;
      count += size > rounding && std::isfinite(size);
    };
    for (int j = 0; j < p.n; ++j) take(p.eta[j]);
    for (int r = p.hard; r < p.links; ++r) take(double(p.hi[r]) * p.scale[r]);
    if (structured_ != nullptr) {
      for (const StructuredFactor& f : structured_->all()) {
        if (!f.present) continue;
        for (const double score : f.eta_v) take(score);
      }
    }
    if (count == 0) return 1;
    double* middle = sizes_.data + (count - 1) / 2;
    std::nth_element(sizes_.data, middle, sizes_.data + count);
    return *middle;
  }

  const Instance<T>* p_ = nullptr;
  StructuredFactors<T>* structured_ = nullptr;
  double size_ = 1;
  Span<double> sizes_;
  Span<T> rounded_;
};

}  // namespace factormax
