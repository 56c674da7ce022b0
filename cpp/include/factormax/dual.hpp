// The compact dual, docs/math.md (12)-(14):
//
//   phi(tau) = sum_j h(z_j) + b . tau,   z = eta - A^T tau,   mu = clip(z, 0, 1),
//   grad phi = b - A mu,
//
// in the scaled unknowns x = ||a|| tau. Structured factors join it in structured/structured.hpp: a
// hub takes the place of the box on its variables, a link is a row of its own.
#pragma once

#include "factormax/chunks.hpp"
#include "factormax/instance.hpp"

namespace factormax {

// A point of the dual with all that belongs to it.
template <class T>
struct DualPoint {
  Span<T> x, g;            // (m,) scaled multipliers, gradient
  Span<T> z, mu;           // (n,) reduced scores, marginals
  T value = 0;             // phi, NaN until `dual_value` is asked for it
  T extra = 0;             // of phi: the scores of the structured factors, and the links
  std::int64_t stamp = 0;  // tells apart the evaluations of structured factors

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

// v += alpha A^T (scale * x). `work` holds (m,).
template <class T>
FACTORMAX_INLINE void add_rows(const Instance<T>& p, T alpha, const T* x, T* v, T* work) {
  const T* scale = p.scale.data;
  in_chunks(p.m, [=](int begin, int end) FACTORMAX_BODY {
    const T times = alpha;
    for (int r = begin; r < end; ++r) work[r] = times * x[r] * scale[r];
  });
  for (const Tile<T>& tile : p.tile.first(p.num_tiles)) {
    T* base = v + tile.base;
    if (tile.by_row()) {
      for (int i = 0; i < tile.rows; ++i, base += tile.row_stride) {
        const T t = tile.coef * work[tile.first + i];
#pragma omp simd
        for (int k = 0; k < tile.length; ++k) base[k] += t;
      }
    } else {
      const T* t = work + tile.first;
      for (int k = 0; k < tile.length; ++k, base += tile.col_stride) {
#pragma omp simd
        for (int i = 0; i < tile.rows; ++i) base[i] += tile.coef * t[i];
      }
    }
  }
  const std::int32_t* col = p.col.data;
  const T* coef = p.coef.data;
  for (int i = 0; i < p.num_loose; ++i) {
    const int r = p.loose[i];
    const T t = work[r];
    if (t == 0) continue;
    for (int k = p.ptr[r]; k < p.ptr[r + 1]; ++k) v[col[k]] += coef[k] * t;
  }
  // Pairs often come sorted by their first variable: its sum stays in a register.
  for (int r = p.links; r < p.m; ++r) v[col[p.ptr[r]]] += work[r];
  if (p.links == p.hard) return;
  int k = p.ptr[p.hard];
  std::int32_t first = col[k];
  T sum = 0;
  for (int r = p.hard; r < p.links; ++r, k += 2) {
    if (col[k] != first) {
      v[first] += sum;
      first = col[k];
      sum = 0;
    }
    sum += coef[k] * work[r];
    v[col[k + 1]] += coef[k + 1] * work[r];
  }
  v[first] += sum;
}

// out = A v (unscaled)
template <class T>
FACTORMAX_INLINE void row_products(const Instance<T>& p, const T* v, T* out) {
  for (const Tile<T>& tile : p.tile.first(p.num_tiles)) {
    const T* base = v + tile.base;
    if (tile.by_row()) {
      for (int i = 0; i < tile.rows; ++i, base += tile.row_stride) {
        T sum = 0;
#pragma omp simd reduction(+ : sum)
        for (int k = 0; k < tile.length; ++k) sum += base[k];
        out[tile.first + i] = tile.coef * sum;
      }
    } else {
      T* sums = out + tile.first;
      for (int i = 0; i < tile.rows; ++i) sums[i] = 0;
      int k = 0;
      for (; k + 3 < tile.length; k += 4, base += 4 * tile.col_stride) {
        const T *b1 = base + tile.col_stride, *b2 = b1 + tile.col_stride,
                *b3 = b2 + tile.col_stride;
#pragma omp simd
        for (int i = 0; i < tile.rows; ++i) sums[i] += (base[i] + b1[i]) + (b2[i] + b3[i]);
      }
      for (; k < tile.length; ++k, base += tile.col_stride) {
#pragma omp simd
        for (int i = 0; i < tile.rows; ++i) sums[i] += base[i];
      }
#pragma omp simd
      for (int i = 0; i < tile.rows; ++i) sums[i] *= tile.coef;
    }
  }
  const std::int32_t* col = p.col.data;
  const T* coef = p.coef.data;
  for (int i = 0; i < p.num_loose; ++i) {
    const int r = p.loose[i];
    T even = 0, odd = 0;
    int k = p.ptr[r];
    for (; k + 1 < p.ptr[r + 1]; k += 2) {
      even += coef[k] * v[col[k]];
      odd += coef[k + 1] * v[col[k + 1]];
    }
    if (k < p.ptr[r + 1]) even += coef[k] * v[col[k]];
    out[r] = even + odd;
  }
  for (int r = p.links; r < p.m; ++r) out[r] = v[col[p.ptr[r]]];
  const int pairs = p.ptr[p.hard];
  T* of_pair = out + p.hard;
  in_chunks(p.links - p.hard, [=](int begin, int end) FACTORMAX_BODY {
    for (int q = begin, k = pairs + 2 * begin; q < end; ++q, k += 2) {
      of_pair[q] = coef[k] * v[col[k]] + coef[k + 1] * v[col[k + 1]];
    }
  });
}

// The same as below, added up in double.
template <class T>
void wide_reduced_scores(const Instance<T>& p, Span<const T> x, Span<T> z, Span<T> work) {
  double* sum = p.wide_sum.data;
  const std::int32_t* col = p.col.data;
  const T* coef = p.coef.data;
  for (int j = 0; j < p.n; ++j) sum[j] = double(p.eta.data[j]) + double(p.eta_low.data[j]);
  for (int r = 0; r < p.m; ++r) work.data[r] = x.data[r] * p.scale.data[r];
  for (int r = 0; r < p.hard; ++r) {
    const double t = work.data[r];
    for (int k = p.ptr.data[r]; k < p.ptr.data[r + 1]; ++k) sum[col[k]] -= coef[k] * t;
  }
  for (int r = p.hard, k = p.ptr.data[p.hard]; r < p.links; ++r, k += 2) {
    const double t = work.data[r];
    sum[col[k]] -= coef[k] * t;
    sum[col[k + 1]] -= coef[k + 1] * t;
  }
  for (int r = p.links; r < p.m; ++r) sum[col[p.ptr.data[r]]] -= double(work.data[r]);
  for (int j = 0; j < p.n; ++j) z.data[j] = T(sum[j]);
}

// z = eta - A^T tau
template <class T>
FACTORMAX_INLINE void reduced_scores(const Instance<T>& p, Span<const T> x, Span<T> z,
                                     Span<T> work) {
  if (p.wide) return wide_reduced_scores(p, x, z, work);
  std::copy(p.eta.data, p.eta.data + p.n, z.data);
  add_rows(p, T(-1), x.data, z.data, work.data);
}

template <class T>
FACTORMAX_INLINE T clip_to_unit(T value) {
  // Both comparisons are of the value itself: compilers make less of a chain.
  const T above = value > 0 ? value : T(0);
  return value < 1 ? above : T(1);
}

// mu = clip(z, 0, 1)
template <class T>
FACTORMAX_INLINE void project_box(Span<const T> z, Span<T> mu) {
  in_chunks(z.size, [=](int begin, int end) FACTORMAX_BODY {
#pragma omp simd
    for (int j = begin; j < end; ++j) mu.data[j] = clip_to_unit(z.data[j]);
  });
}

// g = b - A mu, from A mu in its place
template <class T>
FACTORMAX_INLINE void subtract_from_rhs(const Instance<T>& p, DualPoint<T>& at) {
  T* g = at.g.data;
  const T *scale = p.scale.data, *rhs = p.rhs.data;
  in_chunks(p.m, [=](int begin, int end) FACTORMAX_BODY {
#pragma omp simd
    for (int r = begin; r < end; ++r) g[r] = scale[r] * (rhs[r] - g[r]);
  });
  at.value = std::numeric_limits<T>::quiet_NaN();
}

// g = b - A mu
template <class T>
FACTORMAX_INLINE void row_gradients(const Instance<T>& p, DualPoint<T>& at) {
  row_products(p, at.mu.data, at.g.data);
  subtract_from_rhs(p, at);
}

// All of `evaluate` in one sweep over the grid, for a matching.
template <class T>
FACTORMAX_INLINE void evaluate_cross(const Instance<T>& p, DualPoint<T>& at) {
  const Tile<T>&rows = p.tile[0], &columns = p.tile[1];
  const int length = rows.length;
  T *row_sum = at.g.data + rows.first, *column_sum = at.g.data + columns.first;
  // The multipliers of the columns wait where the last row of mu will be.
  T* across = at.mu.data + (rows.rows - 1) * length;
  const T *x = at.x.data, *scale = p.scale.data;
#pragma omp simd
  for (int k = 0; k < length; ++k) {
    across[k] = columns.coef * x[columns.first + k] * scale[columns.first + k];
    column_sum[k] = 0;
  }
  const auto multiplier = [&](int i) {
    return rows.coef * x[rows.first + i] * scale[rows.first + i];
  };
  int i = 0;
  for (; i + 1 < rows.rows; i += 2) {  // two at a time, for both read the columns
    const T t0 = multiplier(i), t1 = multiplier(i + 1);
    const T *eta0 = p.eta.data + i * length, *eta1 = eta0 + length;
    T *z0 = at.z.data + i * length, *z1 = z0 + length;
    T *mu0 = at.mu.data + i * length, *mu1 = mu0 + length;
    T sum0 = 0, sum1 = 0;
#pragma omp simd reduction(+ : sum0, sum1)
    for (int k = 0; k < length; ++k) {
      const T c = across[k];
      const T value0 = eta0[k] - t0 - c, value1 = eta1[k] - t1 - c;
      const T m0 = clip_to_unit(value0), m1 = clip_to_unit(value1);
      z0[k] = value0;
      z1[k] = value1;
      mu0[k] = m0;
      mu1[k] = m1;
      sum0 += m0;
      sum1 += m1;
      column_sum[k] += m0 + m1;
    }
    row_sum[i] = rows.coef * sum0;
    row_sum[i + 1] = rows.coef * sum1;
  }
  if (i < rows.rows) {
    const T t = multiplier(i);
    const T* eta = p.eta.data + i * length;
    T *z = at.z.data + i * length, *mu = at.mu.data + i * length;
    T sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int k = 0; k < length; ++k) {
      z[k] = eta[k] - t - across[k];
      mu[k] = clip_to_unit(z[k]);
      sum += mu[k];
      column_sum[k] += mu[k];
    }
    row_sum[i] = rows.coef * sum;
  }
  for (int k = 0; k < length; ++k) column_sum[k] *= columns.coef;
  subtract_from_rhs(p, at);
}

template <class T>
FACTORMAX_VECTOR void evaluate(const Instance<T>& p, DualPoint<T>& at) {
  if (p.crossed && p.m == p.hard) return evaluate_cross(p, at);
  reduced_scores(p, Span<const T>(at.x), at.z, at.g);
  project_box(Span<const T>(at.z), at.mu);
  row_gradients(p, at);
}

// The two halves of `evaluate`, for what comes between them with structured factors.
template <class T>
FACTORMAX_VECTOR void evaluate_box(const Instance<T>& p, DualPoint<T>& at) {
  reduced_scores(p, Span<const T>(at.x), at.z, at.g);
  if (!p.weighted()) {
    project_box(Span<const T>(at.z), at.mu);
  } else {
    for (int j = 0; j < p.n; ++j) at.mu[j] = clip(at.z[j] * p.give(j), T(0), T(1));
  }
}

template <class T>
FACTORMAX_VECTOR void evaluate_rows(const Instance<T>& p, DualPoint<T>& at) {
  row_gradients(p, at);
}

// A row of coefficients that differ. What it lacks moves its free variables, together by as much;
// where none is free, the next one to become so, which may be the one with the smallest
// coefficient.
template <class T>
struct UnevenRow {
  T unit;  // how far a . mu moves when a variable moves by 1, at most 1
  T size;  // of the terms of a . mu - b, which says how that is rounded
};

template <class T>
FACTORMAX_VECTOR UnevenRow<T> measure_uneven(const Instance<T>& p, const DualPoint<T>& at, int r) {
  const int begin = p.ptr[r], d = p.length(r);
  const T *coef = p.coef.data + begin, *mu = at.mu.data;
  const std::int32_t* col = p.col.data + begin;
  T squares = 0, size = 0;
#pragma omp simd reduction(+ : squares, size)
  for (int k = 0; k < d; ++k) {
    const T a = coef[k], m = mu[col[k]], square = a * a;
    squares += m > 0 && m < 1 ? square : T(0);
    size += std::fabs(a) * m;
  }
  size += std::fabs(p.rhs[r]);
  if (squares > 0) return {std::min(std::sqrt(squares), T(1)), size};
  const T to = at.g[r] > 0 ? T(1) : T(-1);  // a . mu is too small, or too large
  const T smallest = -largest_of(d, T(-1), [=](int k) {
    return (mu[col[k]] <= 0) == (to * coef[k] > 0) ? -std::fabs(coef[k]) : T(-1);
  });
  return {smallest, size};
}

// How far a row moves when a variable moves by 1.
template <class T>
FACTORMAX_INLINE T row_unit(const Instance<T>& p, const DualPoint<T>& at, int r) {
  return p.uneven.data[r] ? measure_uneven(p, at, r).unit : T(1);
}

template <class T>
T uneven_row_lack(const Instance<T>& p, const DualPoint<T>& at, int r) {
  const UnevenRow<T> row = measure_uneven(p, at, r);
  const T rounding = 4 * p.row_eps * row.size;
  const T moved = std::max(std::fabs(at.g[r]) * p.norm[r] - rounding, T(0)) / row.unit;
  return std::min(moved, at.g[r] > 0 ? at.x[r] - p.lo[r] : p.hi[r] - at.x[r]);
}

// What a row lacks to be optimal: what it is violated by or, if it has slack, that or its
// multiplier, whichever is smaller. In units of variables.
template <class T>
FACTORMAX_INLINE T row_lack(const Instance<T>& p, const DualPoint<T>& at, int r) {
  // Never form x - g: far out it would round to x.
  const T g = at.g[r], down = at.x[r] - p.lo[r], up = at.x[r] - p.hi[r];
  const T lack = std::fabs(std::max(std::min(g, down), up)) * p.norm[r];
  return p.uneven.data[r] && lack > 0 ? std::max(uneven_row_lack(p, at, r), lack) : lack;
}

template <class T>
FACTORMAX_INLINE T value_of_box(const T* z, const T* mu, int begin, int end) {
  T sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int j = begin; j < end; ++j) sum += mu[j] * (z[j] - T(0.5) * mu[j]);
  return sum;
}

template <class T>
FACTORMAX_INLINE T value_of_rows(const T* rhs, const T* scale, const T* x, int begin, int end) {
  T sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int r = begin; r < end; ++r) sum += rhs[r] * scale[r] * x[r];
  return sum;
}

// phi at an evaluated point; h(z) = mu z - w mu^2 / 2
template <class T>
FACTORMAX_VECTOR T dual_value(const Instance<T>& p, DualPoint<T>& at) {
  if (!std::isnan(at.value)) return at.value;
  T sum = at.extra;
  const T *z = at.z.data, *mu = at.mu.data;
  if (p.weighted()) {
    for (int j = 0; j < p.n; ++j) sum += mu[j] * (z[j] - T(0.5) * p.weight[j] * mu[j]);
  } else {
    sum += sum_of_chunks<T>(
        p.n, [=](int begin, int end) FACTORMAX_BODY { return value_of_box(z, mu, begin, end); });
  }
  const T *rhs = p.rhs.data, *scale = p.scale.data, *x = at.x.data;
  sum += sum_of_chunks<T>(p.m, [=](int begin, int end) FACTORMAX_BODY {
    return value_of_rows(rhs, scale, x, begin, end);
  });
  at.value = sum;
  return sum;
}

}  // namespace factormax
