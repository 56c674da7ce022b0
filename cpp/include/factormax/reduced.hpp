// The reduced system  (A_I J A_I^T + J_links) t = r  that both the exact finish and the backward
// pass solve: I are the rows whose multiplier is strictly inside its bounds; J keeps the free
// variables of the box, and is M Q M^T on a structured factor, docs/math.md (46).
// Factorised inside the envelope where that is small (few rows, or rows that overlap like a chain),
// or by way of the free variables if those are few, docs/math.md (42a); Jacobi-preconditioned
// conjugate gradients otherwise. Rows are scaled by 1 / ||a|| throughout.
#pragma once

#include "factormax/structured/structured.hpp"

namespace factormax {

template <class T>
class ReducedSystem {
 public:
  static constexpr int kDense = 256;  // rows of a matrix that always fits: half a megabyte

  Control* control = nullptr;  // asked now and then, if set
  bool may_poll = false;
  int most_steps = std::numeric_limits<int>::max();  // of conjugate gradients
  T shift = 0;  // added to the diagonal: to be set before `build`

  // structured: of the same problem, or null if it has none.
  void allocate(const Problem<T>& p, StructuredFactors<T>* structured, Workspace& ws) {
    structured_ = structured;
    const int rows = p.num_dual(), entries = p.num_incidences();
    const std::int64_t dense = std::min(rows, kDense);
    active = ws.take<std::int32_t>(rows);
    solution = ws.take<T>(rows);
    position_ = ws.take<std::int32_t>(rows);
    var_ = ws.take<std::int32_t>(p.num_vars);
    place_ = ws.take<std::int32_t>(p.num_vars);
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
    lead_ptr_ = ws.take<std::int32_t>(rows + 1);
    touched_ = ws.take<std::int32_t>(entries);
    column_ = ws.take<T>(rows);
    next_column_ = ws.take<T>(rows);
    if (structured == nullptr) return;
    root_ = ws.take<T>(p.num_vars);
    hub_ptr_ = ws.take<std::int32_t>(rows + 1);
    hub_var_ = ws.take<std::int32_t>(entries);
    hub_coef_ = ws.take<T>(entries);
    moved_ = ws.take<T>(p.num_vars);
    touching_ = ws.take<std::int32_t>(rows);
    half_ = ws.take<double>(dense * structured->most_structures);
  }

  // The caller fills the first `count` of `active`, then calls `build` with a predicate that tells
  // which variables are free. Rows without a free variable are dropped, for they say nothing.
  Span<std::int32_t> active;  // ascending
  Span<T> solution;           // (count,), written by `solve`
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
    const bool hubs = structured_ != nullptr;
    weighted_ = p.weighted();
    scale_ = p.scale;
    for (int f = 0; f < found; ++f) {
      const int j = var_[f];
      if (hubs && p.in_hub[j]) continue;
      const T root = weighted_ ? std::sqrt(p.give(j)) : T(1);
      for (int k = p.var_ptr[j]; k < p.var_ptr[j + 1]; ++k) {
        const int r = p.var_row[k];
        if (position_[r] < 0) continue;
        position_[r] = 1;  // has a free variable
        row_[e] = r;
        coef_[e] = p.coef[p.var_entry[k]] * p.scale[r] * root;
        ++e;
      }
      if (e == ptr_[num_free_]) continue;
      if (weighted_) root_[num_free_] = root;
      var_[num_free_++] = j;
      ptr_[num_free_] = e;
    }
    if (hubs) find_hub_entries(p);
    int kept = 0;
    for (int i = 0; i < count; ++i) {
      const int r = active[i];
      if (position_[r] == 0) continue;
      position_[r] = kept;
      if (hubs) move_hub_entries(i, kept);
      active[kept++] = r;
    }
    count = kept;
    fill(diagonal_.first(count), shift);
    for (int k = 0; k < e; ++k) {
      row_[k] = position_[row_[k]];
      diagonal_[row_[k]] += coef_[k] * coef_[k];
    }
    if (hubs) {
      direct_ = full_envelope(count);
      if (!direct_) guess_diagonal();
    } else {
      direct_ = (count <= kSmall || count <= 2 * num_free_) && find_envelope();
    }
    if (direct_) {
      assemble();
      if (hubs) add_structured();
      factorise();
    }
    by_variables_ = !direct_ && !hubs && num_free_ < count && full_envelope(num_free_);
    if (by_variables_) {
      assemble_by_variables(p);
      factorise();
    }
  }

  // Solves for the right-hand side `rhs` (count,) into `solution`, to a residual of `wanted`
  // relative to the largest entry of rhs; returns the residual reached, absolute.
  T solve(Span<const T> rhs, T wanted) {
    if (count == 0) return 0;
    const T goal = wanted * max_abs(rhs.first(count));
    if (direct_ || by_variables_) {
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
    multiply_box(v, out);
    if (structured_ == nullptr) return;
    structured_->apply_hubs(v, moved_.data);
    add_hub_products(moved_.data, out);
  }

  // The same over the variables of the box alone.
  void multiply_box(const T* v, Span<T> out) const {
    fill(out.first(count), T(0));
    for (int f = 0; f < num_free_; ++f) {
      const T value = weighted_ ? v[var_[f]] * root_[f] : v[var_[f]];
      for (int k = ptr_[f]; k < ptr_[f + 1]; ++k) out[row_[k]] += coef_[k] * value;
    }
  }

  Span<T> scratch() const { return moved_; }  // (n,)

  // out += A_I y over the variables of hubs
  void add_hub_products(const T* y, Span<T> out) const {
    for (int i = 0; i < count; ++i) {
      for (int e = hub_ptr_[i]; e < hub_ptr_[i + 1]; ++e) out[i] += hub_coef_[e] * y[hub_var_[e]];
    }
  }

  // v -= A_I^T t, on the free variables and those of hubs
  void subtract_transpose(Span<const T> t, T* v) const {
    for (int f = 0; f < num_free_; ++f) {
      T sum = 0;
      for (int k = ptr_[f]; k < ptr_[f + 1]; ++k) sum += coef_[k] * t[row_[k]];
      v[var_[f]] -= weighted_ ? sum / root_[f] : sum;
    }
    if (structured_ == nullptr) return;
    for (int i = 0; i < count; ++i) {
      for (int e = hub_ptr_[i]; e < hub_ptr_[i + 1]; ++e) v[hub_var_[e]] -= hub_coef_[e] * t[i];
    }
  }

  // Where row r stands among the active ones, -1 if it does not.
  int position(int r) const { return position_[r]; }

 private:
  static constexpr int kSmall = 64;  // rows of a matrix that is cheap to factorise, singular or not

  static constexpr T ridge() { return Precision<T>::ridge; }

  // Entry j of row i, first_[i] <= j <= i, is matrix_row(i)[j].
  T* matrix_row(int i) const { return matrix_.data + offset_.data[i]; }

  // Where each row of the matrix begins; whether they all fit.
  bool find_envelope() {
    for (int i = 0; i < count; ++i) first_[i] = last_[i] = i;
    for (int f = 0; f < num_free_; ++f) {
      const std::int32_t least = row_[ptr_[f]];
      for (int k = ptr_[f] + 1; k < ptr_[f + 1]; ++k)
        first_[row_[k]] = std::min(first_[row_[k]], least);
    }
    std::int64_t size = 0;
    for (int i = 0; i < count; ++i) {
      offset_[i] = static_cast<std::int32_t>(size) - first_[i];
      size += i - first_[i] + 1;
      if (size > matrix_.size) return false;
    }
    size_ = static_cast<int>(size);
    order_ = count;
    lead_ = 0;
    while (lead_ < count && first_[lead_] == lead_) ++lead_;
    for (int i = 0; i < count; ++i) last_[first_[i]] = i;
    for (int i = 1; i < count; ++i) last_[i] = std::max(last_[i], last_[i - 1]);
    return true;
  }

  // The same without zeros to count on.
  bool full_envelope(int order) {
    if (std::int64_t(order) * (order + 1) / 2 > matrix_.size || order > kDense) return false;
    for (int i = 0; i < order; ++i) {
      first_[i] = 0;
      offset_[i] = i * (i + 1) / 2;
      last_[i] = order - 1;
    }
    order_ = order;
    lead_ = 0;
    size_ = order * (order + 1) / 2;
    return true;
  }

  // out = (A_I J A_I^T + shift) t
  void apply(Span<const T> t, Span<T> out) const {
    for (int i = 0; i < count; ++i) out[i] = shift * t[i];
    for (int f = 0; f < num_free_; ++f) {
      T sum = 0;
      for (int k = ptr_[f]; k < ptr_[f + 1]; ++k) sum += coef_[k] * t[row_[k]];
      for (int k = ptr_[f]; k < ptr_[f + 1]; ++k) out[row_[k]] += coef_[k] * sum;
    }
    if (structured_ != nullptr) apply_structured(t, out);
  }

  void assemble() {
    fill(matrix_.first(size_), T(0));
    for (int i = 0; i < count; ++i) matrix_row(i)[i] = diagonal_[i];
    for (int f = 0; f < num_free_; ++f) {
      for (int a = ptr_[f] + 1; a < ptr_[f + 1]; ++a) {
        T* row = matrix_row(row_[a]);
        for (int b = ptr_[f]; b < a; ++b) row[row_[b]] += coef_[a] * coef_[b];
      }
    }
  }

  // With many more rows than free variables, C = A_I J is tall: C C^T is large and singular, and
  // what it is solved by is C^T C, docs/math.md (42a).
  void assemble_by_variables(const Instance<T>& p) {
    fill(matrix_.first(size_), T(0));
    fill(place_.first(p.n), -1);
    for (int f = 0; f < num_free_; ++f) {
      place_[var_[f]] = f;
      matrix_row(f)[f] = shift;
    }
    for (int i = 0; i < count; ++i) {
      const int r = active[i];
      const T square = p.scale[r] * p.scale[r];
      for (int a = p.ptr[r]; a < p.ptr[r + 1]; ++a) {
        const std::int32_t here = place_[p.col[a]];
        if (here < 0) continue;
        for (int b = p.ptr[r]; b <= a; ++b) {
          const std::int32_t there = place_[p.col[b]];
          if (there < 0) continue;
          const T product = p.coef[a] * p.coef[b] * square;
          matrix_row(std::max(here, there))[std::min(here, there)] += product;
        }
      }
    }
  }

  // b = (C C^T)^+ b, or (C C^T + shift)^-1 b = (b - C (C^T C + shift)^-1 C^T b) / shift
  void solve_by_variables(Span<T> b) {
    const Span<T> w = direction_.first(num_free_);
    for (int f = 0; f < num_free_; ++f) {
      T sum = 0;
      for (int k = ptr_[f]; k < ptr_[f + 1]; ++k) sum += coef_[k] * b[row_[k]];
      w[f] = sum;
    }
    ldl_solve(w);
    if (shift == 0) {
      ldl_solve(w);
      fill(b, T(0));
    }
    for (int f = 0; f < num_free_; ++f) {
      const T part = shift == 0 ? w[f] : -w[f];
      for (int k = ptr_[f]; k < ptr_[f + 1]; ++k) b[row_[k]] += coef_[k] * part;
    }
    for (int i = 0; shift > 0 && i < count; ++i) b[i] /= shift;
  }

  // The factors L D L^T of the lower triangle, in place, column by column. What the leading rows,
  // which share nothing, take from the rest is sparse, like the rows of a matching from its
  // columns. On and above the diagonal L is not stored; D is in inverse_.
  FACTORMAX_VECTOR void factorise() {
    const int order = order_;
    T trace = 0;
    for (int i = 0; i < order; ++i) trace += matrix_row(i)[i];
    const T average = trace / std::max(order, 1);
    const std::int32_t *first = first_.data, *last = last_.data;
    T* column = column_.data;          // of a leading row: 0 but for the rows that it touches
    for (int i = 0; i < order; ++i) {  // a row of small coefficients has a small entry
      inverse_.data[i] = ridge() * std::min(average, matrix_row(i)[i]);
      matrix_row(i)[i] += inverse_.data[i];
      column[i] = 0;
    }
    const auto invert = [&](int i) {  // no pivot is below half of what was added to it
      return inverse_.data[i] = 1 / std::max(matrix_row(i)[i], inverse_.data[i] / 2);
    };
    find_touched();
    for (int j = 0; j < lead_; ++j) {
      const T inverse = invert(j);
      Span<std::int32_t> touched = {touched_.data + lead_ptr_.data[j], 0};
      int begin = order;
      for (int e = lead_ptr_.data[j]; e < lead_ptr_.data[j + 1]; ++e) {
        const std::int32_t i = touched_.data[e];
        const T entry = matrix_row(i)[j];
        if (entry == 0 || column[i] != 0) continue;  // two variables may share two rows
        column[i] = entry * inverse;
        touched.data[touched.size++] = i;
        begin = std::min(begin, static_cast<int>(i));
      }
      for (const std::int32_t i : touched) {
        T* row = matrix_row(i);
        const T entry = row[j];
        row[j] = column[i];
#pragma omp simd
        for (int k = begin; k <= i; ++k) row[k] -= entry * column[k];
      }
      for (const std::int32_t i : touched) column[i] = 0;
    }
    // The others, two columns at a time, for both change the same rows.
    T* second = next_column_.data;
    int j = lead_;
    for (; j + 1 < order; j += 2) {
      const T inverse = invert(j);
      const int end = std::max(last[j], last[j + 1]);
      for (int i = j + 1; i <= end; ++i) {
        column[i] = first[i] <= j ? matrix_row(i)[j] * inverse : T(0);
      }
      const T across = column[j + 1];
      if (across != 0) {  // the first changes the second, the diagonal with it
        for (int i = j + 1; i <= end; ++i) {
          if (first[i] <= j) matrix_row(i)[j + 1] -= matrix_row(i)[j] * across;
        }
        matrix_row(j + 1)[j] = across;
      }
      const T other = invert(j + 1);
      for (int i = j + 2; i <= end; ++i) {
        second[i] = first[i] <= j + 1 ? matrix_row(i)[j + 1] * other : T(0);
      }
      for (int i = j + 2; i <= end; ++i) {
        if (first[i] > j + 1) continue;
        T* row = matrix_row(i);
        const T entry = first[i] <= j ? row[j] : T(0), entry2 = row[j + 1];
        if (first[i] <= j) row[j] = column[i];
        row[j + 1] = second[i];
#pragma omp simd
        for (int k = j + 2; k <= i; ++k) row[k] -= entry * column[k] + entry2 * second[k];
      }
    }
    if (j < order) invert(j);
  }

  // The rows after the leading ones that each of those shares a variable with, in no order.
  void find_touched() {
    fill(lead_ptr_.first(lead_ + 1), 0);
    if (lead_ == 0) return;
    const auto each = [&](const auto& visit) {
      for (int f = 0; f < num_free_; ++f) {
        const std::int32_t j = row_[ptr_[f]];  // of its rows only the first can be a leading one
        if (j >= lead_) continue;
        for (int k = ptr_[f] + 1; k < ptr_[f + 1]; ++k) visit(j, row_[k]);
      }
    };
    each([&](int j, int) { ++lead_ptr_[j + 1]; });
    for (int j = 0; j < lead_; ++j) lead_ptr_[j + 1] += lead_ptr_[j];
    each([&](int j, std::int32_t i) { touched_[lead_ptr_[j]++] = i; });
    for (int j = lead_; j > 0; --j) lead_ptr_[j] = lead_ptr_[j - 1];
    lead_ptr_[0] = 0;
  }

  FACTORMAX_VECTOR void ldl_solve(Span<T> b) const {
    const int order = order_;
    for (int i = lead_; i < order; ++i) {
      const T* row = matrix_row(i);
      T sum = 0;
#pragma omp simd reduction(+ : sum)
      for (int k = first_[i]; k < i; ++k) sum += row[k] * b.data[k];
      b[i] -= sum;
    }
    for (int i = 0; i < order; ++i) b[i] *= inverse_[i];
    for (int i = order - 1; i >= lead_; --i) {
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
      if (by_variables_) {
        solve_by_variables(residual);
      } else {
        ldl_solve(residual);
      }
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
    const int rank = structured_ == nullptr ? std::min(count, num_free_) : count;
    const int limit = std::min(2 * rank + 50, most_steps), patience = 25 + count / 4;
    for (int step = 0, since = 0; step < limit && since < patience && least > goal; ++step) {
      if (control != nullptr && step % 8 == 0 && (control->late() || control->stopped(may_poll))) {
        break;
      }
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

  // ---- Structured factors ----

  // The entries of the active rows in hubs that can move; a row with one is kept.
  void find_hub_entries(const Instance<T>& p) {
    const Span<StructuredFactor> all = structured_->all();
    int e = 0;
    hub_ptr_[0] = 0;
    for (int i = 0; i < count; ++i) {
      const int r = active[i];
      for (int k = p.ptr[r]; k < p.ptr[r + 1]; ++k) {
        const std::int32_t j = p.col[k];
        if (!p.in_hub[j] || all[structured_->hub_of[j]].is_vertex()) continue;
        hub_var_[e] = j;
        hub_coef_[e] = p.coef[k] * p.scale[r];
        ++e;
        position_[r] = 1;
      }
      hub_ptr_[i + 1] = e;
    }
    for (const StructuredFactor& f : all) {
      if (!f.present || !f.linked || f.is_vertex()) continue;
      f.each([&](int, int r) {
        if (position_[r] == 0) position_[r] = 1;
      });
    }
  }

  // out += (A_I J_hubs A_I^T + J_links) t
  void apply_structured(Span<const T> t, Span<T> out) const {
    fill(moved_, T(0));
    for (int i = 0; i < count; ++i) {
      for (int e = hub_ptr_[i]; e < hub_ptr_[i + 1]; ++e) {
        moved_[hub_var_[e]] += hub_coef_[e] * t[i];
      }
    }
    structured_->apply_hubs(moved_.data, moved_.data);
    add_hub_products(moved_.data, out);
    for (StructuredFactor& f : structured_->all()) {
      if (!f.present || !f.linked || f.is_vertex()) continue;
      fill(f.y, 0.0);
      f.each([&](int k, int r) {
        if (position_[r] >= 0) f.y[k] = double(t[position_[r]]) * scale_[r];
      });
      f.apply();
      f.each([&](int k, int r) {
        if (position_[r] >= 0) out[position_[r]] += T(f.y[k]) * scale_[r];
      });
    }
  }

  // The diagonal is only a preconditioner where the matrix is not formed.
  void guess_diagonal() {
    for (int i = 0; i < count; ++i) {
      for (int e = hub_ptr_[i]; e < hub_ptr_[i + 1]; ++e) {
        diagonal_[i] += hub_coef_[e] * hub_coef_[e] / 2;
      }
      diagonal_[i] = std::max(diagonal_[i], T(0.5));
    }
  }

  // The matrix of the structured factors, docs/math.md (52): B^T B, B = (I - ee^T) L^-1 M^T A_I^T.
  void add_structured() {
    for (int f = 0; f < structured_->all().size; ++f) {
      StructuredFactor& factor = structured_->all()[f];
      if (!factor.present || factor.is_vertex()) continue;
      if (factor.by_flow) {
        add_flow(f, factor);
        continue;
      }
      const int k = factor.set.count;
      int rows = 0;
      const auto take = [&](int i) {  // row i, whose entries are in factor.y
        const Span<double> c{half_.data + std::int64_t(rows) * k, k};
        factor.set.gather(factor.y.data, c);
        factor.set.half_project(c);
        touching_[rows++] = i;
      };
      if (factor.linked) {
        factor.each([&](int local, int r) {
          if (position_[r] < 0) return;
          fill(factor.y, 0.0);
          factor.y[local] = double(scale_[r]);
          take(position_[r]);
        });
      } else {
        fill(factor.y, 0.0);
        for (int i = 0; i < count; ++i) {
          bool touches = false;
          for (int e = hub_ptr_[i]; e < hub_ptr_[i + 1]; ++e) {
            if (structured_->hub_of[hub_var_[e]] != f) continue;
            factor.y[structured_->local[hub_var_[e]]] = double(hub_coef_[e]);
            touches = true;
          }
          if (!touches) continue;
          take(i);
          for (int e = hub_ptr_[i]; e < hub_ptr_[i + 1]; ++e) {
            if (structured_->hub_of[hub_var_[e]] == f)
              factor.y[structured_->local[hub_var_[e]]] = 0;
          }
        }
      }
      add_products(rows, k);
    }
    for (int i = 0; i < count; ++i) diagonal_[i] = matrix_row(i)[i];
    drop_rigid();
  }

  // The same of flows, which have no B: a product with J for each row.
  void add_flow(int f, StructuredFactor& factor) {
    if (factor.linked) {
      factor.each([&](int local, int r) {
        if (position_[r] < 0) return;
        fill(factor.y, 0.0);
        factor.y[local] = double(scale_[r]);
        factor.apply();
        factor.each([&](int other, int q) {
          if (position_[q] < 0 || q > r) return;
          matrix_row(position_[r])[position_[q]] += T(factor.y[other]) * scale_[q];
        });
      });
      return;
    }
    // visit(place in the factor, coefficient): the entries of a row that are of this factor
    const auto each = [&](int i, const auto& visit) {
      bool any = false;
      for (int e = hub_ptr_[i]; e < hub_ptr_[i + 1]; ++e) {
        if (structured_->hub_of[hub_var_[e]] != f) continue;
        visit(structured_->local[hub_var_[e]], double(hub_coef_[e]));
        any = true;
      }
      return any;
    };
    for (int i = 0; i < count; ++i) {
      fill(factor.y, 0.0);
      if (!each(i, [&](int k, double coef) { factor.y[k] = coef; })) continue;
      factor.apply();
      for (int j = 0; j <= i; ++j) {
        double sum = 0;
        each(j, [&](int k, double coef) { sum += coef * factor.y[k]; });
        matrix_row(i)[j] += T(sum);
      }
    }
  }

  FACTORMAX_VECTOR void add_products(int rows, int k) {
    for (int a = 0; a < rows; ++a) {
      const double* first = half_.data + std::int64_t(a) * k;
      for (int b = 0; b <= a; ++b) {
        const double* second = half_.data + std::int64_t(b) * k;
        double sum = 0;
#pragma omp simd reduction(+ : sum)
        for (int i = 0; i < k; ++i) sum += first[i] * second[i];
        const int i = std::max(touching_[a], touching_[b]),
                  j = std::min(touching_[a], touching_[b]);
        matrix_row(i)[j] += T(sum);
      }
    }
  }

  // A row that no structure of the face tells apart says nothing, like one without a free variable.
  void drop_rigid() {
    T largest = 0;
    for (int i = 0; i < count; ++i) largest = std::max(largest, diagonal_[i]);
    // Where all rows are rigid, the largest is what rounding left of 0.
    const T rigid = Precision<T>::rigid, least = std::max(largest * rigid, rigid * rigid);
    const Span<std::int32_t> place = touching_;
    fill(place.first(count), 0);
    for (int k = 0; k < ptr_[num_free_]; ++k)
      place[row_[k]] = 1;  // moved by the box, if only little
    int kept = 0;
    for (int i = 0; i < count; ++i) {
      const bool rigid = place[i] == 0 && diagonal_[i] <= least;
      place[i] = rigid ? -1 : kept;
      position_[active[i]] = place[i];
      if (rigid) continue;
      diagonal_[kept] = diagonal_[i];
      active[kept] = active[i];
      move_hub_entries(i, kept);
      T* to = matrix_.data + std::int64_t(kept) * (kept + 1) / 2;
      const T* from = matrix_row(i);
      for (int j = 0; j <= i; ++j) {
        if (place[j] >= 0) to[place[j]] = from[j];
      }
      ++kept;
    }
    if (kept == count) return;
    count = kept;
    full_envelope(count);
    for (int k = 0; k < ptr_[num_free_]; ++k) row_[k] = place[row_[k]];
  }

  // The entries in hubs of the i-th active row, when it becomes the `to`-th.
  void move_hub_entries(int i, int to) {
    const int begin = hub_ptr_[i], end = hub_ptr_[i + 1];
    std::copy(hub_var_.data + begin, hub_var_.data + end, hub_var_.data + hub_ptr_[to]);
    std::copy(hub_coef_.data + begin, hub_coef_.data + end, hub_coef_.data + hub_ptr_[to]);
    hub_ptr_[to + 1] = hub_ptr_[to] + end - begin;
  }

  StructuredFactors<T>* structured_ = nullptr;
  bool weighted_ = false;
  Span<T> scale_;                         // of the rows
  Span<T> root_;                          // of 1 / weight, for the free variables
  Span<std::int32_t> hub_ptr_, hub_var_;  // entries of the active rows in hubs
  Span<T> hub_coef_, moved_;
  Span<std::int32_t> touching_;
  Span<double> half_;

  bool direct_ = true, by_variables_ = false;
  int num_free_ = 0;
  Span<std::int32_t> position_;         // of a row among the active ones, -1: not active
  Span<std::int32_t> var_, ptr_, row_;  // A_I J by columns: free variables, their entries
  Span<std::int32_t> place_;            // of a variable among the free ones, if solved by those
  Span<T> coef_;
  Span<T> residual_, direction_, product_, best_, diagonal_, matrix_, inverse_;
  Span<std::int32_t> first_, last_;  // the envelope: where a row begins, and a column ends
  Span<std::int32_t> offset_;        // of a row's column 0 in matrix_, were it there
  int order_ = 0, size_ = 0;         // of the matrix: its rows, its entries
  int lead_ = 0;                     // so many rows in front share no variable
  Span<std::int32_t> lead_ptr_;      // while factorising: where each leading row's begin among
  Span<std::int32_t> touched_;       // the rows that it shares a variable with
  Span<T> column_, next_column_;     // columns of L
};

}  // namespace factormax
