// A certificate that no point of the box meets the hard rows, docs/math.md (23): multipliers y
// (y >= 0 on inequalities) with   b . y + sum_j max(0, -(A^T y)_j) < 0. Structured factors, whether
// hubs (in place of the box) or linked, add what their best structures reach.
#pragma once

#include "factormax/structured/structured.hpp"

namespace factormax {

// y: (m,) unscaled multipliers, projected here onto their cone; those of soft rows are ignored.
// v: (n,) scratch; structured: null if there are no structured factors.
template <class T>
bool certifies_infeasible(const Instance<T>& p, Span<T> y, Span<T> v,
                          StructuredFactors<T>* structured) {
  fill(v.first(p.n), T(0));
  double value = 0, magnitude = 0;
  for (int r = 0; r < p.m; ++r) {
    if (p.is_soft(r)) continue;
    if (p.lo[r] == 0) y[r] = std::max(y[r], T(0));
    if (!std::isfinite(y[r])) return false;
    if (y[r] == 0) continue;
    value += double(p.rhs[r]) * y[r];
    magnitude += std::fabs(double(p.rhs[r]) * y[r]);
    for (int k = p.ptr[r]; k < p.ptr[r + 1]; ++k) {
      v.data[p.col[k]] += p.coef[k] * y[r];
      magnitude += std::fabs(double(p.coef[k]) * y[r]);
    }
  }
  for (int j = 0; j < p.n; ++j) {
    if (structured == nullptr || !p.in_hub[j]) value += std::max(0.0, -double(v[j]));
  }
  if (structured != nullptr && magnitude > 0) value += structured->support(v.data, y.data);
  // A problem in double may have rows that were computed in float.
  const double resolution =
      p.row_eps < T(1e-10) ? Precision<double>::certificate : Precision<float>::certificate;
  return value < -resolution * magnitude;
}

// Looks for a certificate in the multipliers of a solver.
template <class T>
class InfeasibilityProof {
 public:
  void allocate(const Problem<T>& p, StructuredFactors<T>* structured, Workspace& ws) {
    structured_ = structured;
    mark_ = ws.take<T>(p.num_dual());
    ray_ = ws.take<T>(p.num_dual());
  }

  void begin(int rows) {
    mark_.size = ray_.size = rows;
    found_ = false;
  }

  bool found() const { return found_; }
  // Unscaled multipliers: (m,), empty if none has been found.
  Span<const T> certificate() const { return Span<const T>(ray_).first(found_ ? ray_.size : 0); }

  void mark(Span<const T> x) { copy(x, mark_); }

  // Tries the multipliers themselves, and their change since the last try, which tends to the ray.
  // v: (n,) scratch.
  bool look(const Instance<T>& p, Span<const T> x, Span<T> v) {
    if (p.hard == 0 && !p.weighted()) return false;
    for (int r = 0; r < p.m; ++r) ray_[r] = x[r] * p.scale[r];
    if (try_ray(p, v)) return true;
    for (int r = 0; r < p.m; ++r) ray_[r] = (x[r] - mark_[r]) * p.scale[r];
    mark(x);
    return try_ray(p, v);
  }

  // Tries multipliers that may be out of their bounds.
  bool look_within_bounds(const Instance<T>& p, Span<const T> x, Span<T> v) {
    if (p.hard == 0) return false;
    for (int r = 0; r < p.m; ++r) ray_[r] = clip(x[r], p.lo[r], p.hi[r]) * p.scale[r];
    return try_ray(p, v);
  }

 private:
  bool try_ray(const Instance<T>& p, Span<T> v) {
    found_ = certifies_infeasible(p, ray_, v, structured_);
    return found_;
  }

  StructuredFactors<T>* structured_ = nullptr;
  Span<T> mark_, ray_;  // the multipliers of the last try, and what was tried
  bool found_ = false;
};

}  // namespace factormax
