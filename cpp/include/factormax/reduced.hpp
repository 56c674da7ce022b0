// The reduced system  (A_I J A_I^T) t = r  that both the exact finish and the backward pass solve:
// I are the rows whose multiplier is strictly inside its bounds, J keeps the free variables.
// Factorised inside the envelope where that is small (few rows, or rows that overlap like a chain),
// Jacobi-preconditioned conjugate gradients otherwise. Rows are scaled by 1 / ||a|| throughout.
#pragma once

#include "factormax/instance.hpp"

namespace factormax {

template <class T>
class ReducedSystem {
 public:
  static constexpr int kDense = 256;  // so many rows always fit

  Control* control = nullptr;  // asked now and then, if set
  bool may_poll = false;
  int most_steps = std::numeric_limits<int>::max();  // of conjugate gradients

  void allocate(const Problem<T>& p, Workspace& ws) {
    const int rows = p.num_dual(), entries = p.num_entries + 2 * p.num_pairs;
    const std::int64_t dense = std::min(rows, kDense);
    active = ws.take<std::int32_t>(rows);
    solution = ws.take<T>(rows);
    position_ = ws.take<std::int32_t>(rows);
    var_ = ws.take<std::int32_t>(p.num_vars);
    ptr_ = ws.take<std::int32_t>(p.num_vars + 1);
    row_ = ws.take<std::int32_t>(entries);
    coef_ = ws.take<T>(entries);
    residual_ = ws.take<T>(rows);
    direction_ = ws.take<T>(rows);
    product_ = ws.take<T>(rows);
    best_ = ws.take<T>(rows);
    diagonal_ = ws.take<T>(rows);
    matrix_ = ws.take<T>(std::max(dense * dense, std::int64_t(4) * rows));
    inverse_ = ws.take<T>(rows);
    first_ = ws.take<std::int32_t>(rows);
    offset_ = ws.take<std::int32_t>(rows);
    last_ = ws.take<std::int32_t>(rows);
    touched_ = ws.take<std::int32_t>(rows + 1);
    column_ = ws.take<T>(rows);
  }

  // The caller fills the first `count` of `active`, then calls `build` with a predicate that tells
  // which variables are free. Rows without a free variable are dropped, for they say nothing.
  Span<std::int32_t> active;
  Span<T> solution;  // (count,), written by `solve`
  int count = 0;

  template <class Free>
  void build(const Instance<T>& p, const Free& free) {
    for (int r = 0; r < p.m; ++r) position_[r] = -1;
    for (int i = 0; i < count; ++i) position_[active[i]] = 0;
    // A_I J, column by column.
    num_free_ = 0;
    ptr_[0] = 0;
    int e = 0, found = 0;
    for (int j = 0; j < p.n; ++j) {  // without a branch: which are free is hard to foresee
      var_[found] = j;
      found += free(j);
    }
    for (int f = 0; f < found; ++f) {
      const int j = var_[f];
      for (int k = p.var_ptr[j]; k < p.var_ptr[j + 1]; ++k) {
        const int r = p.var_row[k];
        if (position_[r] < 0) continue;
        position_[r] = 1;  // has a free variable
        row_[e] = r;
        coef_[e] = p.coef[p.var_entry[k]] * p.scale[r];
        ++e;
      }
      if (e == ptr_[num_free_]) continue;
      var_[num_free_++] = j;
      ptr_[num_free_] = e;
    }
    int kept = 0;
    for (int i = 0; i < count; ++i) {
      const int r = active[i];
      if (position_[r] == 0) continue;
      position_[r] = kept;
      active[kept++] = r;
    }
    count = kept;
    fill(diagonal_.first(count), T(0));
    for (int k = 0; k < e; ++k) {
      row_[k] = position_[row_[k]];
      diagonal_[row_[k]] += coef_[k] * coef_[k];
    }
    // With many more rows than free variables the matrix is singular, and conjugate gradients end
    // after as many steps as there are variables.
    direct_ = (count <= kSmall || count <= 2 * num_free_) && find_envelope();
    if (direct_) {
      assemble();
      factorise();
    }
  }

  // Solves for the right-hand side `rhs` (count,) into `solution`, to a residual of `wanted`
  // relative to the largest entry of rhs; returns the residual reached, absolute.
  T solve(Span<const T> rhs, T wanted) {
    if (count == 0) return 0;
    const T goal = wanted * max_abs(rhs.first(count));
    if (direct_) {
      const T residual = solve_dense(rhs, goal);
      if (residual <= goal) return residual;
      // A direct solution no better than 0 has only run off along the null space.
      if (!(residual < max_abs(rhs.first(count)) / 2)) fill(solution.first(count), T(0));
    } else {
      fill(solution.first(count), T(0));
    }
    return solve_cg(rhs, goal);
  }

  // out = A_I J v
  void multiply(const T* v, Span<T> out) const {
    fill(out.first(count), T(0));
    for (int f = 0; f < num_free_; ++f) {
      const T value = v[var_[f]];
      for (int k = ptr_[f]; k < ptr_[f + 1]; ++k) out[row_[k]] += coef_[k] * value;
    }
  }

  // v -= A_I^T t, on the free variables
  void subtract_transpose(Span<const T> t, T* v) const {
    for (int f = 0; f < num_free_; ++f) {
      T sum = 0;
      for (int k = ptr_[f]; k < ptr_[f + 1]; ++k) sum += coef_[k] * t[row_[k]];
      v[var_[f]] -= sum;
    }
  }

 private:
  static constexpr int kSmall = 64;  // rows of a matrix that is cheap to factorise, singular or not

  static constexpr T ridge() { return std::numeric_limits<T>::digits > 24 ? T(1e-9) : T(1e-6); }

  // Entry j of row i, first_[i] <= j <= i, is matrix_row(i)[j].
  T* matrix_row(int i) const { return matrix_.data + offset_.data[i]; }

  // Where each row of the matrix begins; whether they all fit.
  bool find_envelope() {
    for (int i = 0; i < count; ++i) first_[i] = last_[i] = i;
    for (int f = 0; f < num_free_; ++f) {
      std::int32_t least = count;
      for (int k = ptr_[f]; k < ptr_[f + 1]; ++k) least = std::min(least, row_[k]);
      for (int k = ptr_[f]; k < ptr_[f + 1]; ++k)
        first_[row_[k]] = std::min(first_[row_[k]], least);
    }
    std::int64_t size = 0;
    for (int i = 0; i < count; ++i) {
      offset_[i] = static_cast<std::int32_t>(size) - first_[i];
      size += i - first_[i] + 1;
      if (size > matrix_.size) return false;
    }
    size_ = static_cast<int>(size);
    lead_ = 0;
    while (lead_ < count && first_[lead_] == lead_) ++lead_;
    for (int i = 0; i < count; ++i) last_[first_[i]] = i;
    for (int i = 1; i < count; ++i) last_[i] = std::max(last_[i], last_[i - 1]);
    return true;
  }

  // out = A_I J A_I^T t
  void apply(Span<const T> t, Span<T> out) const {
    fill(out.first(count), T(0));
    for (int f = 0; f < num_free_; ++f) {
      T sum = 0;
      for (int k = ptr_[f]; k < ptr_[f + 1]; ++k) sum += coef_[k] * t[row_[k]];
      for (int k = ptr_[f]; k < ptr_[f + 1]; ++k) out[row_[k]] += coef_[k] * sum;
    }
  }

  void assemble() {
    fill(matrix_.first(size_), T(0));
    for (int f = 0; f < num_free_; ++f) {
      for (int a = ptr_[f]; a < ptr_[f + 1]; ++a) {
        for (int b = ptr_[f]; b < ptr_[f + 1]; ++b) {
          if (row_[b] <= row_[a]) matrix_row(row_[a])[row_[b]] += coef_[a] * coef_[b];
        }
      }
    }
  }

  // The factors L D L^T of the lower triangle, in place, column by column: what a column takes from
  // the rest is sparse to begin with, like all that the rows of a matching take from its columns.
  // On and above the diagonal L is not stored; D is in inverse_.
  FACTORMAX_VECTOR void factorise() {
    T trace = 0;
    for (int i = 0; i < count; ++i) trace += diagonal_[i];
    const T shift = ridge() * trace / std::max(count, 1);
    const std::int32_t *first = first_.data, *last = last_.data;
    std::int32_t* touched = touched_.data;  // rows of the column that are not 0
    T* column = column_.data;               // its entries there, 0 elsewhere
    for (int i = 0; i < count; ++i) {
      matrix_row(i)[i] += shift;
      column[i] = 0;
    }
    for (int j = 0; j < count; ++j) {
      const T inverse = 1 / std::max(matrix_row(j)[j], shift / 2);
      inverse_.data[j] = inverse;
      int size = 0;
      for (int i = std::max(j + 1, lead_); i <= last[j]; ++i) {
        touched[size] = i;
        // Left of its first entry a row reads as the one before: no harm, and no branch.
        size += (first[i] <= j) & (matrix_row(i)[j] != 0);
      }
      for (int a = 0; a < size; ++a) column[touched[a]] = matrix_row(touched[a])[j] * inverse;
      const int begin = touched[0];
      for (int a = 0; a < size; ++a) {
        const int i = touched[a];
        T* row = matrix_row(i);
        const T entry = row[j];
        row[j] = column[i];
#pragma omp simd
        for (int k = begin; k <= i; ++k) row[k] -= entry * column[k];
      }
      for (int a = 0; a < size; ++a) column[touched[a]] = 0;
    }
  }

  FACTORMAX_VECTOR void ldl_solve(Span<T> b) const {
    for (int i = lead_; i < count; ++i) {
      const T* row = matrix_row(i);
      T sum = 0;
#pragma omp simd reduction(+ : sum)
      for (int k = first_[i]; k < i; ++k) sum += row[k] * b.data[k];
      b[i] -= sum;
    }
    for (int i = 0; i < count; ++i) b[i] *= inverse_[i];
    for (int i = count - 1; i >= lead_; --i) {
      const T* row = matrix_row(i);
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
      ldl_solve(residual);
      axpy(T(1), Span<const T>(residual), solution.first(count));
      apply(solution.first(count), product_.first(count));
      T sum = 0;
      for (int i = 0; i < count; ++i) {
        residual[i] = rhs[i] - product_[i];
        sum += std::fabs(residual[i]);
      }
      if (!std::isfinite(sum)) {  // a matrix too singular for the precision
        fill(solution.first(count), T(0));
        return std::numeric_limits<T>::infinity();
      }
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
    const int rank = std::min(count, num_free_);
    const int limit = std::min(2 * rank + 50, most_steps), patience = 25 + count / 4;
    for (int step = 0, since = 0; step < limit && since < patience && least > goal; ++step) {
      if (control != nullptr && step % 8 == 0 && control->stopped(may_poll)) break;
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

  bool direct_ = true;
  int num_free_ = 0;
  Span<std::int32_t> position_;         // of a row among the active ones, -1: not active
  Span<std::int32_t> var_, ptr_, row_;  // A_I J by columns: free variables, their entries
  Span<T> coef_;
  Span<T> residual_, direction_, product_, best_, diagonal_, matrix_, inverse_;
  Span<std::int32_t> first_, last_;  // the envelope: where a row begins, and a column ends
  Span<std::int32_t> offset_;        // of a row's column 0 in matrix_, were it there
  int size_ = 0, lead_ = 0;          // entries of it; so many rows in front share no variable
  Span<std::int32_t> touched_;       // while factorising: the rows of a column that are not 0,
  Span<T> column_;                   // and the column
};

}  // namespace factormax
