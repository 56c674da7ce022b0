// The reduced system  (A_I J A_I^T) t = r  that both the exact finish and the backward pass solve:
// I are the rows whose multiplier is strictly inside its bounds, J keeps the free variables.
// Dense Cholesky when I is small, Jacobi-preconditioned conjugate gradients above.
#pragma once

#include "factormax/instance.hpp"

namespace factormax {

template <class T>
class ReducedSystem {
 public:
  static constexpr int kDense = 256;

  void allocate(const Problem<T>& p, Workspace& ws) {
    const int rows = p.num_dual(), entries = p.num_entries + 2 * p.num_pairs;
    const int dense = std::min(rows, kDense);
    active = ws.take<std::int32_t>(rows);
    free = ws.take<std::uint8_t>(p.num_vars);
    solution = ws.take<T>(rows);
    var_values = ws.take<T>(p.num_vars);
    residual_ = ws.take<T>(rows);
    direction_ = ws.take<T>(rows);
    product_ = ws.take<T>(rows);
    best_ = ws.take<T>(rows);
    diagonal_ = ws.take<T>(rows);
    matrix_ = ws.take<T>(static_cast<std::int64_t>(dense) * dense);
    var_ptr_ = ws.take<std::int32_t>(p.num_vars + 1);
    entry_row_ = ws.take<std::int32_t>(entries);
    entry_coef_ = ws.take<T>(entries);
    first_ = ws.take<std::int32_t>(dense);
  }

  // The caller fills `free` (per variable) and the first `count` of `active`, then calls `build`,
  // which drops the rows without a free variable, for they say nothing.
  Span<std::int32_t> active;
  Span<std::uint8_t> free;
  Span<T> solution;    // (count,), written by `solve`
  Span<T> var_values;  // (n,), scratch of `apply`, free for the caller between calls
  int count = 0;

  void build(const Instance<T>& p) {
    p_ = &p;
    int kept = 0;
    for (int i = 0; i < count; ++i) {
      const int r = active[i];
      T squares = 0;
      for (int k = p.ptr[r]; k < p.ptr[r + 1]; ++k) {
        if (free[p.col[k]]) squares += p.coef[k] * p.coef[k];
      }
      if (squares == 0) continue;
      diagonal_[kept] = squares * p.scale[r] * p.scale[r];
      active[kept++] = r;
    }
    count = kept;
    dense_ = count <= kDense;
    if (dense_) factorise();
  }

  // Solves for the right-hand side `rhs` (count,) into `solution`, to a residual of `wanted` relative
  // to the largest entry of rhs; returns the residual reached, absolute.
  T solve(Span<const T> rhs, T wanted) {
    if (count == 0) return 0;
    const T goal = wanted * max_abs(rhs.first(count));
    if (dense_) {
      const T residual = solve_dense(rhs, goal);
      if (residual <= goal) return residual;
    } else {
      fill(solution.first(count), T(0));
    }
    return solve_cg(rhs, goal);
  }

  // out = A_I J A_I^T t
  void apply(Span<const T> t, Span<T> out) {
    const Instance<T>& p = *p_;
    fill(var_values.first(p.n), T(0));
    scatter(t, var_values);
    for (int i = 0; i < count; ++i) out[i] = free_product(active[i], var_values.data);
  }

  // v += A_I^T t, on all variables of the active rows
  void scatter(Span<const T> t, Span<T> v) const {
    const Instance<T>& p = *p_;
    for (int i = 0; i < count; ++i) {
      const int r = active[i];
      const T value = t[i] * p.scale[r];
      if (value == 0) continue;
      for (int k = p.ptr[r]; k < p.ptr[r + 1]; ++k) v.data[p.col[k]] += p.coef[k] * value;
    }
  }

  // Row r of A, times J v
  T free_product(int r, const T* v) const {
    const Instance<T>& p = *p_;
    T sum = 0;
    for (int k = p.ptr[r]; k < p.ptr[r + 1]; ++k) {
      if (free[p.col[k]]) sum += p.coef[k] * v[p.col[k]];
    }
    return sum * p.scale[r];
  }

 private:
  static constexpr bool kDouble = std::numeric_limits<T>::digits > 24;
  static constexpr T ridge() { return kDouble ? T(1e-9) : T(1e-6); }

  void factorise() {
    const Instance<T>& p = *p_;
    const int size = count;
    // The free variables' columns of A_I.
    fill(var_ptr_.first(p.n + 1), 0);
    for (int i = 0; i < size; ++i) {
      const int r = active[i];
      for (int k = p.ptr[r]; k < p.ptr[r + 1]; ++k) var_ptr_[p.col[k] + 1] += free[p.col[k]];
    }
    for (int j = 0; j < p.n; ++j) var_ptr_[j + 1] += var_ptr_[j];
    for (int i = 0; i < size; ++i) {
      const int r = active[i];
      for (int k = p.ptr[r]; k < p.ptr[r + 1]; ++k) {
        const int j = p.col[k];
        if (!free[j]) continue;
        const int e = var_ptr_[j]++;
        entry_row_[e] = i;
        entry_coef_[e] = p.coef[k] * p.scale[r];
      }
    }
    // var_ptr_[j] now ends column j; it began where column j - 1 ends. Rows ascend in a column.
    T* matrix = matrix_.data;
    std::fill(matrix, matrix + static_cast<std::int64_t>(size) * size, T(0));
    for (int j = 0, begin = 0; j < p.n; begin = var_ptr_[j++]) {
      for (int a = begin; a < var_ptr_[j]; ++a) {
        T* row = matrix + static_cast<std::int64_t>(entry_row_[a]) * size;
        for (int b = begin; b <= a; ++b) row[entry_row_[b]] += entry_coef_[a] * entry_coef_[b];
      }
    }
    T trace = 0;
    for (int i = 0; i < size; ++i) trace += diagonal_[i];
    const T shift = ridge() * trace / std::max(size, 1);
    // Cholesky of the lower triangle, in place, row by row, inside the envelope of each row.
    for (int i = 0; i < size; ++i) {
      T* row_i = matrix + static_cast<std::int64_t>(i) * size;
      row_i[i] += shift;
      int first = 0;
      while (first < i && row_i[first] == 0) ++first;
      first_[i] = first;
      for (int j = first; j <= i; ++j) {
        const T* row_j = matrix + static_cast<std::int64_t>(j) * size;
        T sum = 0;
#pragma omp simd reduction(+ : sum)
        for (int k = std::max(first, first_[j]); k < j; ++k) sum += row_i[k] * row_j[k];
        if (j < i) {
          row_i[j] = (row_i[j] - sum) / row_j[j];
        } else {
          row_i[i] = std::sqrt(std::max(row_i[i] - sum, shift / 2));
        }
      }
    }
  }

  void cholesky_solve(Span<T> b) const {
    const int size = count;
    for (int i = 0; i < size; ++i) {
      const T* row = matrix_.data + static_cast<std::int64_t>(i) * size;
      T sum = 0;
#pragma omp simd reduction(+ : sum)
      for (int k = first_[i]; k < i; ++k) sum += row[k] * b.data[k];
      b[i] = (b[i] - sum) / row[i];
    }
    for (int i = size - 1; i >= 0; --i) {
      const T* row = matrix_.data + static_cast<std::int64_t>(i) * size;
      b[i] /= row[i];
      const int first = first_[i];
      axpy(-b[i], Span<const T>{row + first, i - first}, Span<T>{b.data + first, i - first});
    }
  }

  T solve_dense(Span<const T> rhs, T goal) {
    const Span<T> residual = residual_.first(count);
    copy(rhs.first(count), residual);
    fill(solution.first(count), T(0));
    T size = 0;
    for (int refinement = 0; refinement < 3; ++refinement) {
      cholesky_solve(residual);
      axpy(T(1), Span<const T>(residual), solution.first(count));
      apply(solution.first(count), product_.first(count));
      for (int i = 0; i < count; ++i) residual[i] = rhs[i] - product_[i];
      size = max_abs(Span<const T>(residual));
      if (size <= goal) break;
    }
    return size;
  }

  // Improves `solution`. On a singular system the iterates can run away once the residual is down
  // to rounding, so the best one is kept.
  T solve_cg(Span<const T> rhs, T goal) {
    const Span<T> r = residual_.first(count), d = direction_.first(count),
                  q = product_.first(count), t = solution.first(count), best = best_.first(count);
    apply(t, q);
    T rho = 0;
    for (int i = 0; i < count; ++i) {
      r[i] = rhs[i] - q[i];
      d[i] = r[i] / diagonal_[i];
      rho += r[i] * d[i];
    }
    copy(t, best);
    T least = max_abs(Span<const T>(r));
    const int limit = 2 * count + 50, patience = 25 + count / 4;
    for (int step = 0, since = 0; step < limit && since < patience && least > goal; ++step) {
      apply(d, q);
      const T curvature = dot(d, q);
      if (!(curvature > 0)) break;
      const T alpha = rho / curvature;
      axpy(alpha, Span<const T>(d), t);
      axpy(-alpha, Span<const T>(q), r);
      T next = 0;
#pragma omp simd reduction(+ : next)
      for (int i = 0; i < count; ++i) next += r.data[i] * r.data[i] / diagonal_.data[i];
      const T beta = next / rho;
      rho = next;
      for (int i = 0; i < count; ++i) d[i] = r[i] / diagonal_[i] + beta * d[i];
      const T size = max_abs(Span<const T>(r));
      ++since;
      if (size < least) {
        least = size;
        since = 0;
        copy(t, best);
      }
    }
    copy(best, t);
    apply(t, q);
    for (int i = 0; i < count; ++i) r[i] = rhs[i] - q[i];
    return max_abs(Span<const T>(r));
  }

  const Instance<T>* p_ = nullptr;
  bool dense_ = true;
  Span<T> residual_, direction_, product_, best_, diagonal_, matrix_, entry_coef_;
  Span<std::int32_t> var_ptr_, entry_row_, first_;
};

}  // namespace factormax
