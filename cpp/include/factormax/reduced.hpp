// The reduced system  (A_I J A_I^T + J_links) t = r  that both the exact finish and the backward
// pass solve: I are the rows whose multiplier is strictly inside its bounds; J keeps the free
// variables of the box, and is M Q M^T on a structured factor, docs/math.md (46).
// Factorised inside the envelope where that is small (few rows, or rows that overlap like a chain
// or in small clusters, in an order that keeps these together), or by way of the free variables if
// those are few, docs/math.md (42a); Jacobi-preconditioned conjugate gradients otherwise. Rows are
// scaled by 1 / ||a|| throughout.
#pragma once

#include "factormax/conjugate_gradients.hpp"
#include "factormax/envelope_ldl.hpp"
#include "factormax/hub_rows.hpp"
#include "factormax/row_order.hpp"

namespace factormax {

template <class T>
class ReducedSystem {
 public:
  Control* control = nullptr;  // asked now and then, if set
  bool may_poll = false;
  static constexpr int kAllItTakes = std::numeric_limits<int>::max();
  int most_steps = kAllItTakes;  // of conjugate gradients
  T shift = 0;                   // added to the diagonal: to be set before `build`
  // Multiplications of a factorisation beyond which there is none, nor anything to solve with.
  static constexpr double kAnyWork = std::numeric_limits<double>::infinity();
  double most_work = kAnyWork;

  // structured: of the same problem, or null if it has none.
  void allocate(const Problem<T>& p, StructuredFactors<T>* structured, Workspace& ws) {
    const int rows = p.num_dual(), entries = p.num_incidences();
    active = ws.take<std::int32_t>(rows);
    solution = ws.take<T>(rows);
    position_ = ws.take<std::int32_t>(rows);
    free_.var = ws.take<std::int32_t>(p.num_vars);
    free_.ptr = ws.take<std::int32_t>(p.num_vars + 1);
    free_.row = ws.take<std::int32_t>(entries);
    free_.coef = ws.take<T>(entries);
    place_ = ws.take<std::int32_t>(p.num_vars);
    memory_.allocate(rows, ws);
    diagonal_ = ws.take<T>(rows);
    matrix_.allocate(rows, entries, ws);
    order_.allocate(rows, p.num_vars, ws);
    by_row_.allocate(rows, entries, ws);
    products_ = ws.take<T>(p.num_vars);
    hubs_.allocate(p, structured, ws);
    if (structured != nullptr) root_ = ws.take<T>(p.num_vars);
  }

  // The caller fills the first `count` of `active`, then calls `build` with a predicate that tells
  // which variables are free. Rows without a free variable are dropped, for they say nothing.
  Span<std::int32_t> active;  // ascending; then in the order of the system
  Span<T> solution;           // (count,), written by `solve`
  int count = 0;

  // Returns false if that takes more than `most_work`.
  template <class Free>
  bool build(const Instance<T>& p, const Free& free) {
    weighted_ = p.weighted();
    scale_ = p.scale;
    for (int r = 0; r < p.m; ++r) position_[r] = -1;
    for (int i = 0; i < count; ++i) position_[active[i]] = 0;
    find_free(p, free);
    if (hubs_.any()) hubs_.find(p, rows());
    drop_unmoved();
    find_diagonal();
    if (hubs_.any()) {
      direct_ = matrix_.fit_full(count);
      if (!direct_) hubs_.guess_diagonal(count, diagonal_);
    } else {
      direct_ = (count <= kSmall || count <= 2 * free_.count) && fit();
    }
    if (most_work < kAnyWork && !(direct_ && matrix_.work() <= most_work)) return false;
    if (direct_) {
      assemble();
      matrix_.factorise(free_);
    }
    by_variables_ =
        !direct_ && !hubs_.any() && free_.count < count && matrix_.fit_full(free_.count);
    if (by_variables_) {
      assemble_by_variables(p);
      matrix_.factorise(free_);
    }
    return true;
  }

  // Solves for the right-hand side `rhs` (count,) into `solution`, to a residual of `wanted`
  // relative to the largest entry of rhs, but no less than `rounding`, which it may be made of;
  // returns the residual reached, absolute.
  T solve(Span<const T> rhs, T wanted, T rounding = 0) {
    if (count == 0) return 0;
    const T goal = std::max(wanted * max_abs(rhs.first(count)), rounding);
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
    if (hubs_.any()) hubs_.multiply(v, count, out);
  }

  // The same over the variables of the box alone.
  void multiply_box(const T* v, Span<T> out) const {
    fill(out.first(count), T(0));
    for (int f = 0; f < free_.count; ++f) {
      const T value = v[free_.var[f]];
      free_.add(f, weighted_ ? value * root_[f] : value, out);
    }
  }

  Span<T> scratch() const { return hubs_.scratch(); }  // (n,)

  // out += A_I y over the variables of hubs
  void add_hub_products(const T* y, Span<T> out) const { hubs_.add_products(y, count, out); }

  // v -= A_I^T t, on the free variables and those of hubs
  void subtract_transpose(Span<const T> t, T* v) const {
    for (int f = 0; f < free_.count; ++f) {
      const T sum = free_.dot(f, t);
      v[free_.var[f]] -= weighted_ ? sum / root_[f] : sum;
    }
    if (hubs_.any()) hubs_.subtract_transpose(t, count, v);
  }

  // Where row r stands among the active ones, -1 if it does not.
  int position(int r) const { return position_[r]; }

 private:
  static constexpr int kSmall = 64;  // rows of a matrix that is cheap to factorise, singular or not
  // Multiplications per entry for which another order is looked for: that takes about 50.
  static constexpr double kWorthwhile = 256;

  ActiveRows<T> rows() const { return {active, position_, scale_, count}; }

  // A_I J, column by column; position_ is 1 where a row has a free variable.
  template <class Free>
  void find_free(const Instance<T>& p, const Free& free) {
    int e = 0, found = 0;
    for (int j = 0; j < p.n; ++j) {  // no branch, here and below: it would be hard to foresee
      free_.var[found] = j;
      found += free(j);
    }
    free_.count = 0;
    free_.ptr[0] = 0;
    for (int f = 0; f < found; ++f) {
      const int j = free_.var[f];
      if (hubs_.any() && p.in_hub[j]) continue;
      const T root = weighted_ ? std::sqrt(p.give(j)) : T(1);
      for (int k = p.var_ptr[j]; k < p.var_ptr[j + 1]; ++k) {
        const int r = p.var_row[k];
        const bool is_active = position_[r] >= 0;
        position_[r] |= is_active;
        free_.row[e] = r;
        free_.coef[e] = p.coef[p.var_entry[k]] * p.scale[r] * root;
        e += is_active;
      }
      if (e == free_.ptr[free_.count]) continue;
      if (weighted_) root_[free_.count] = root;
      free_.var[free_.count++] = j;
      free_.ptr[free_.count] = e;
    }
  }

  // Drops the rows that nothing moves; the others get their positions.
  void drop_unmoved() {
    int kept = 0;
    for (int i = 0; i < count; ++i) {
      const int r = active[i];
      const bool moves = position_[r] != 0;
      position_[r] = moves ? kept : -1;
      if (!moves) continue;
      if (hubs_.any()) hubs_.move(i, kept);
      active[kept++] = r;
    }
    count = kept;
  }

  // The diagonal of A_I J A_I^T + shift, as far as it is of the box; free_.row become positions.
  void find_diagonal() {
    fill(diagonal_.first(count), shift);
    for (int k = 0; k < free_.ptr[free_.count]; ++k) {
      const std::int32_t i = free_.row[k] = position_[free_.row[k]];
      diagonal_[i] += free_.coef[k] * free_.coef[k];
    }
  }

  // Whether the envelope fits, in the order of the rows or in a better one.
  bool fit() {
    const bool fits = matrix_.fit(free_, count);
    if (fits && matrix_.work() <= kWorthwhile * free_.ptr[free_.count]) return true;
    by_row_.list(free_, count, false);
    const Envelope other = order_.find(free_, by_row_, count);
    if (!matrix_.holds(other.size) || (fits && matrix_.work() <= other.work)) return fits;
    reorder();
    return matrix_.fit(free_, count);
  }

  void reorder() {
    order_.permute(diagonal_.first(count), memory_.residual);
    order_.permute(active.first(count), order_.scratch());
    for (int i = 0; i < count; ++i) position_[active[i]] = i;
    for (int f = 0; f < free_.count; ++f) {
      for (int k = free_.ptr[f]; k < free_.ptr[f + 1]; ++k) {  // entries stay sorted by row
        const std::int32_t row = order_.place(free_.row[k]);
        const T coef = free_.coef[k];
        int at = k;
        for (; at > free_.ptr[f] && free_.row[at - 1] > row; --at) {
          free_.row[at] = free_.row[at - 1];
          free_.coef[at] = free_.coef[at - 1];
        }
        free_.row[at] = row;
        free_.coef[at] = coef;
      }
    }
  }

  // out = (A_I J A_I^T + J_links + shift) t
  void apply(Span<const T> t, Span<T> out) const {
    apply_by_columns(t, out);
    if (hubs_.any()) hubs_.apply(rows(), t, out);
  }

  // The same, to the last bit, on several threads: the rows gather what the columns would scatter.
  // `by_row_` must be listed.
  void apply_by_rows(Span<const T> t, Span<T> out) const {
    in_chunks(free_.count, [this, t](int begin, int end) { dot_columns(t, begin, end); });
    in_chunks(count, [this, t, out](int begin, int end) { add_columns(t, begin, end, out); });
    if (hubs_.any()) hubs_.apply(rows(), t, out);
  }

  // Each product is rounded before it is added, or the two ways above could differ. The loops are
  // written out because gcc inlines nothing that was compiled to fuse them.
  FACTORMAX_ROUNDED void apply_by_columns(Span<const T> t, Span<T> out) const {
    const std::int32_t* row = free_.row.data;
    const T* coef = free_.coef.data;
    for (int i = 0; i < count; ++i) out[i] = shift * t[i];
    for (int f = 0; f < free_.count; ++f) {
      T sum = 0;
      for (int k = free_.ptr[f]; k < free_.ptr[f + 1]; ++k) sum += coef[k] * t[row[k]];
      for (int k = free_.ptr[f]; k < free_.ptr[f + 1]; ++k) out[row[k]] += coef[k] * sum;
    }
  }
  FACTORMAX_ROUNDED void dot_columns(Span<const T> t, int begin, int end) const {
    const std::int32_t* row = free_.row.data;
    const T* coef = free_.coef.data;
    for (int f = begin; f < end; ++f) {
      T sum = 0;
      for (int k = free_.ptr[f]; k < free_.ptr[f + 1]; ++k) sum += coef[k] * t[row[k]];
      products_[f] = sum;
    }
  }
  FACTORMAX_ROUNDED void add_columns(Span<const T> t, int begin, int end, Span<T> out) const {
    const std::int32_t* column = by_row_.column.data;
    const T *coef = by_row_.coef.data, *product = products_.data;
    for (int i = begin; i < end; ++i) {
      T sum = shift * t[i];
      for (int k = by_row_.ptr[i]; k < by_row_.ptr[i + 1]; ++k) sum += coef[k] * product[column[k]];
      out[i] = sum;
    }
  }

  void assemble() {
    for (int i = 0; i < count; ++i) matrix_.row(i)[i] = diagonal_[i];
    for (int f = 0; f < free_.count; ++f) {
      for (int a = free_.ptr[f] + 1; a < free_.ptr[f + 1]; ++a) {
        T* row = matrix_.row(free_.row[a]);
        for (int b = free_.ptr[f]; b < a; ++b) row[free_.row[b]] += free_.coef[a] * free_.coef[b];
      }
    }
    if (!hubs_.any()) return;
    hubs_.add_matrix(rows(), matrix_);
    for (int i = 0; i < count; ++i) diagonal_[i] = matrix_.row(i)[i];
    drop_rigid();
  }

  // With many more rows than free variables, C = A_I J is tall: C C^T is large and singular, and
  // what it is solved by is C^T C, docs/math.md (42a).
  void assemble_by_variables(const Instance<T>& p) {
    fill(place_.first(p.n), -1);
    for (int f = 0; f < free_.count; ++f) {
      place_[free_.var[f]] = f;
      matrix_.row(f)[f] = shift;
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
          matrix_.row(std::max(here, there))[std::min(here, there)] += product;
        }
      }
    }
  }

  // b = (C C^T)^+ b, or (C C^T + shift)^-1 b = (b - C (C^T C + shift)^-1 C^T b) / shift
  void solve_by_variables(Span<T> b) {
    const Span<T> w = memory_.direction.first(free_.count);
    for (int f = 0; f < free_.count; ++f) w[f] = free_.dot(f, b);
    matrix_.solve(w);
    if (shift == 0) {
      matrix_.solve(w);
      fill(b, T(0));
    }
    for (int f = 0; f < free_.count; ++f) free_.add(f, shift == 0 ? w[f] : -w[f], b);
    for (int i = 0; shift > 0 && i < count; ++i) b[i] /= shift;
  }

  T solve_dense(Span<const T> rhs, T goal) {
    const Span<T> residual = memory_.residual.first(count);
    copy(rhs.first(count), residual);
    fill(solution.first(count), T(0));
    T size = 0;
    for (int refinement = 0; refinement < 3; ++refinement) {
      if (by_variables_) {
        solve_by_variables(residual);
      } else {
        matrix_.solve(residual);
      }
      axpy(T(1), Span<const T>(residual), solution.first(count));
      apply(solution.first(count), memory_.product.first(count));
      T sum = 0;
      for (int i = 0; i < count; ++i) {
        residual[i] = rhs[i] - memory_.product[i];
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

  // Improves `solution`.
  T solve_cg(Span<const T> rhs, T goal) {
    const int rank = hubs_.any() ? count : std::min(count, free_.count);
    // On the way to a small residual it may stand still, while the error becomes smaller.
    constexpr double none = std::numeric_limits<double>::infinity();
    const double least_gain = most_steps == kAllItTakes ? std::numeric_limits<T>::epsilon() : none;
    const CgLimits limits = {std::min(2 * rank + 50, most_steps), 25 + count / 4, least_gain};
    const bool shared = count >= kWorthSharing && get_num_threads() > 1;
    if (shared) by_row_.list(free_, count, true);
    const auto matrix = [=](Span<const T> t, Span<T> out) {
      shared ? apply_by_rows(t, out) : apply(t, out);
    };
    const auto stop = [this](int step) {
      return control != nullptr && step % 8 == 0 && (control->late() || control->stopped(may_poll));
    };
    return conjugate_gradients(matrix, Span<const T>(diagonal_), rhs, goal, limits, stop, memory_,
                               solution.first(count));
  }

  // A row that no structure of the face tells apart says nothing, like one without a free variable.
  void drop_rigid() {
    T largest = 0;
    for (int i = 0; i < count; ++i) largest = std::max(largest, diagonal_[i]);
    // Where all rows are rigid, the largest is what rounding left of 0.
    const T rigid = Precision<T>::rigid, least = std::max(largest * rigid, rigid * rigid);
    const Span<std::int32_t> place = hubs_.marks();
    fill(place.first(count), 0);
    for (int k = 0; k < free_.ptr[free_.count]; ++k)
      place[free_.row[k]] = 1;  // moved by the box, if only little
    int kept = 0;
    for (int i = 0; i < count; ++i) {
      const bool rigid = place[i] == 0 && diagonal_[i] <= least;
      place[i] = rigid ? -1 : kept;
      position_[active[i]] = place[i];
      if (rigid) continue;
      diagonal_[kept] = diagonal_[i];
      active[kept] = active[i];
      hubs_.move(i, kept);
      T* to = matrix_.row(kept);
      const T* from = matrix_.row(i);
      for (int j = 0; j <= i; ++j) {
        if (place[j] >= 0) to[place[j]] = from[j];
      }
      ++kept;
    }
    if (kept == count) return;
    count = kept;
    matrix_.fit_full(count, true);
    for (int k = 0; k < free_.ptr[free_.count]; ++k) free_.row[k] = place[free_.row[k]];
  }

  HubRows<T> hubs_;
  Columns<T> free_;   // A_I J: the free variables of the box,
  Rows<T> by_row_;    // and the same by rows, once listed
  Span<T> products_;  // of the columns
  Span<T> root_;      // of 1 / weight, for those
  bool weighted_ = false;
  Span<T> scale_;                // of the rows
  Span<std::int32_t> position_;  // of a row among the active ones, -1: not active
  Span<std::int32_t> place_;     // of a variable among the free ones, if solved by those
  Span<T> diagonal_;
  bool direct_ = true, by_variables_ = false;
  EnvelopeLdl<T> matrix_;
  RowOrder<T> order_;
  CgMemory<T> memory_;
};

}  // namespace factormax
