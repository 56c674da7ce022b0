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

}  // namespace factormax
