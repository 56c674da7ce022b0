// The compact dual, docs/math.md (compact dual):
//
//   phi(tau) = sum_j h(z_j) + b . tau,   z = eta - A^T tau,   mu = clip(z, 0, 1),
//   grad phi = b - A mu,
//
// in the scaled unknowns x = ||a|| tau. A structured factor (a hub) will replace the box on its
// variables: its place is between `gather_scores` and `row_residuals`.
#pragma once

#include "factormax/instance.hpp"

namespace factormax {

// A point of the dual with all that belongs to it.
template <class T>
struct DualPoint {
  Span<T> x, g;   // (m,) scaled multipliers, gradient
  Span<T> z, mu;  // (n,) reduced scores, marginals
  T phi = 0;

  void allocate(int rows, int vars, Workspace& ws) {
    x = ws.take<T>(rows);
    g = ws.take<T>(rows);
    z = ws.take<T>(vars);
    mu = ws.take<T>(vars);
  }
  void resize(int rows, int vars) {
    x.size = g.size = rows;
    z.size = mu.size = vars;
  }
};

// z = eta - A^T tau
template <class T>
inline void gather_scores(const Instance<T>& p, Span<const T> x, Span<T> z) {
  std::copy(p.eta.data, p.eta.data + p.n, z.data);
  const std::int32_t* ptr = p.ptr.data;
  const std::int32_t* col = p.col.data;
  const T* coef = p.coef.data;
  for (int r = 0; r < p.m; ++r) {
    const T tau = x[r] * p.scale[r];
    if (tau == 0) continue;
    for (int k = ptr[r]; k < ptr[r + 1]; ++k) z.data[col[k]] -= coef[k] * tau;
  }
}

// mu = clip(z, 0, 1); returns sum_j h(z_j), h(z) = mu z - mu^2 / 2
template <class T>
inline T project_box(Span<const T> z, Span<T> mu) {
  T sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int j = 0; j < z.size; ++j) {
    const T below = z.data[j] < 1 ? z.data[j] : T(1);
    const T u = below > 0 ? below : T(0);
    mu.data[j] = u;
    sum += u * (z.data[j] - T(0.5) * u);
  }
  return sum;
}

// sum of coef * v[col] over row r
template <class T>
inline T row_product(const Instance<T>& p, int r, const T* v) {
  const std::int32_t* col = p.col.data;
  const T* coef = p.coef.data;
  int k = p.ptr[r];
  const int end = p.ptr[r + 1];
  T s0 = 0, s1 = 0, s2 = 0, s3 = 0;
  for (; k + 4 <= end; k += 4) {
    s0 += coef[k] * v[col[k]];
    s1 += coef[k + 1] * v[col[k + 1]];
    s2 += coef[k + 2] * v[col[k + 2]];
    s3 += coef[k + 3] * v[col[k + 3]];
  }
  for (; k < end; ++k) s0 += coef[k] * v[col[k]];
  return (s0 + s1) + (s2 + s3);
}

template <class T>
inline void evaluate(const Instance<T>& p, DualPoint<T>& at) {
  gather_scores(p, Span<const T>(at.x), at.z);
  at.phi = project_box(Span<const T>(at.z), at.mu);
  for (int r = 0; r < p.m; ++r) {
    at.g[r] = p.scale[r] * (p.rhs[r] - row_product(p, r, at.mu.data));
    at.phi += p.rhs[r] * p.scale[r] * at.x[r];
  }
}

}  // namespace factormax
