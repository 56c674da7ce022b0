// What structured factors add to the reduced system, docs/math.md (46), (52): the entries of its
// rows in hubs (structured factors in place of the box), and links (ties of the other structured
// factors to their variables).
#pragma once

#include "factormax/envelope_ldl.hpp"
#include "factormax/structured/structured.hpp"

namespace factormax {

// The rows of a reduced system.
template <class T>
struct ActiveRows {
  Span<std::int32_t> active;    // rows of the Instance, ascending
  Span<std::int32_t> position;  // place of a row of the Instance among them; -1: not active
  Span<T> scale;                // one per row of the Instance
  int count = 0;
};

template <class T>
class HubRows {
 public:
  // structured: the problem's structured factors, or null if it has none.
  void allocate(const Problem<T>& p, StructuredFactors<T>* structured, Workspace& ws) {
    structured_ = structured;
    if (structured == nullptr) return;
    const int rows = p.num_dual(), entries = p.num_incidences();
    ptr_ = ws.take<std::int32_t>(rows + 1);
    var_ = ws.take<std::int32_t>(entries);
    coef_ = ws.take<T>(entries);
    moved_ = ws.take<T>(p.num_vars);
    touching_ = ws.take<std::int32_t>(rows);
    half_ = ws.take<double>(std::int64_t(std::min(rows, EnvelopeLdl<T>::kDense)) *
                            structured->most_structures);
  }

  bool any() const { return structured_ != nullptr; }
  Span<T> scratch() const { return moved_; }              // (n,)
  Span<std::int32_t> marks() const { return touching_; }  // scratch, one per row

  // Finds the entries of the active rows in hubs that can move; a row with one is kept.
  void find(const Instance<T>& p, const ActiveRows<T>& rows) {
    const Span<StructuredFactor> all = structured_->all();
    int e = 0;
    ptr_[0] = 0;
    for (int i = 0; i < rows.count; ++i) {
      const int r = rows.active[i];
      for (int k = p.ptr[r]; k < p.ptr[r + 1]; ++k) {
        const std::int32_t j = p.col[k];
        if (!p.in_hub[j] || all[structured_->hub_of[j]].is_vertex()) continue;
        var_[e] = j;
        coef_[e] = p.coef[k] * p.scale[r];
        ++e;
        rows.position[r] = 1;
      }
      ptr_[i + 1] = e;
    }
    for (const StructuredFactor& f : all) {
      if (!f.present || !f.linked || f.is_vertex()) continue;
      f.each([&](int, int r) {
        if (rows.position[r] == 0) rows.position[r] = 1;
      });
    }
  }

  // Moves the hub entries of the i-th active row, which becomes the `to`-th.
  void move(int i, int to) {
    const int begin = ptr_[i], end = ptr_[i + 1];
    std::copy(var_.data + begin, var_.data + end, var_.data + ptr_[to]);
    std::copy(coef_.data + begin, coef_.data + end, coef_.data + ptr_[to]);
    ptr_[to + 1] = ptr_[to] + end - begin;
  }

  // out += A_I J v over the variables of hubs
  void multiply(const T* v, int count, Span<T> out) const {
    structured_->apply_hubs(v, moved_.data);
    add_products(moved_.data, count, out);
  }

  // out += A_I y over the variables of hubs
  void add_products(const T* y, int count, Span<T> out) const {
    for (int i = 0; i < count; ++i) {
      for (int e = ptr_[i]; e < ptr_[i + 1]; ++e) out[i] += coef_[e] * y[var_[e]];
    }
  }

  // v -= A_I^T t over the variables of hubs
  void subtract_transpose(Span<const T> t, int count, T* v) const {
    for (int i = 0; i < count; ++i) {
      for (int e = ptr_[i]; e < ptr_[i + 1]; ++e) v[var_[e]] -= coef_[e] * t[i];
    }
  }

  // out += (A_I J_hubs A_I^T + J_links) t
  void apply(const ActiveRows<T>& rows, Span<const T> t, Span<T> out) const {
    fill(moved_, T(0));
    for (int i = 0; i < rows.count; ++i) {
      for (int e = ptr_[i]; e < ptr_[i + 1]; ++e) {
        moved_[var_[e]] += coef_[e] * t[i];
      }
    }
    structured_->apply_hubs(moved_.data, moved_.data);
    add_products(moved_.data, rows.count, out);
    for (StructuredFactor& f : structured_->all()) {
      if (!f.present || !f.linked || f.is_vertex()) continue;
      fill(f.y, 0.0);
      f.each([&](int k, int r) {
        if (rows.position[r] >= 0) f.y[k] = double(t[rows.position[r]]) * rows.scale[r];
      });
      f.apply();
      f.each([&](int k, int r) {
        if (rows.position[r] >= 0) out[rows.position[r]] += T(f.y[k]) * rows.scale[r];
      });
    }
  }

  // A guess at the diagonal: where the matrix is not formed, it is only a preconditioner.
  void guess_diagonal(int count, Span<T> diagonal) const {
    for (int i = 0; i < count; ++i) {
      for (int e = ptr_[i]; e < ptr_[i + 1]; ++e) {
        diagonal[i] += coef_[e] * coef_[e] / 2;
      }
      diagonal[i] = std::max(diagonal[i], T(0.5));
    }
  }

  // Adds the structured factors' matrix, docs/math.md (52): B^T B, B = (I - ee^T) L^-1 M^T A_I^T.
  void add_matrix(const ActiveRows<T>& rows, EnvelopeLdl<T>& matrix) {
    for (int f = 0; f < structured_->all().size; ++f) {
      StructuredFactor& factor = structured_->all()[f];
      if (!factor.present || factor.is_vertex()) continue;
      if (factor.by_flow && factor.linked) {
        add_linked_flow(factor, rows, matrix);
      } else if (factor.by_flow) {
        add_flow(f, factor, rows, matrix);
      } else {
        const int taken = factor.linked ? take_links(factor, rows) : take_rows(f, factor, rows);
        add_halves(taken, factor.set.count, matrix);
      }
    }
  }

 private:
  // Calls visit(place in the factor, coefficient) for the entries of row i in factor f. Returns
  // whether there are any.
  template <class Visit>
  bool each(int i, int f, const Visit& visit) const {
    bool any = false;
    for (int e = ptr_[i]; e < ptr_[i + 1]; ++e) {
      if (structured_->hub_of[var_[e]] != f) continue;
      visit(structured_->local[var_[e]], double(coef_[e]));
      any = true;
    }
    return any;
  }

  // Stores the column of B for row i, whose entries are in factor.y, as the `taken`-th.
  void take(StructuredFactor& factor, int i, int taken) {
    const int k = factor.set.count;
    const Span<double> c{half_.data + std::int64_t(taken) * k, k};
    factor.set.gather(factor.y.data, c);
    factor.set.half_project(c);
    touching_[taken] = i;
  }

  int take_links(StructuredFactor& factor, const ActiveRows<T>& rows) {
    int taken = 0;
    factor.each([&](int local, int r) {
      if (rows.position[r] < 0) return;
      fill(factor.y, 0.0);
      factor.y[local] = double(rows.scale[r]);
      take(factor, rows.position[r], taken++);
    });
    return taken;
  }

  int take_rows(int f, StructuredFactor& factor, const ActiveRows<T>& rows) {
    int taken = 0;
    fill(factor.y, 0.0);
    for (int i = 0; i < rows.count; ++i) {
      if (!each(i, f, [&](int k, double coef) { factor.y[k] = coef; })) continue;
      take(factor, i, taken++);
      each(i, f, [&](int k, double) { factor.y[k] = 0; });
    }
    return taken;
  }

  FACTORMAX_VECTOR void add_halves(int taken, int k, EnvelopeLdl<T>& matrix) const {
    for (int a = 0; a < taken; ++a) {
      const double* first = half_.data + std::int64_t(a) * k;
      for (int b = 0; b <= a; ++b) {
        const double* second = half_.data + std::int64_t(b) * k;
        double sum = 0;
#pragma omp simd reduction(+ : sum)
        for (int i = 0; i < k; ++i) sum += first[i] * second[i];
        const int i = std::max(touching_[a], touching_[b]),
                  j = std::min(touching_[a], touching_[b]);
        matrix.row(i)[j] += T(sum);
      }
    }
  }

  // Flows have no B: each row takes a product with J.
  void add_linked_flow(StructuredFactor& factor, const ActiveRows<T>& rows,
                       EnvelopeLdl<T>& matrix) {
    factor.each([&](int local, int r) {
      if (rows.position[r] < 0) return;
      fill(factor.y, 0.0);
      factor.y[local] = double(rows.scale[r]);
      factor.apply();
      factor.each([&](int other, int q) {
        if (rows.position[q] < 0 || q > r) return;
        matrix.row(rows.position[r])[rows.position[q]] += T(factor.y[other]) * rows.scale[q];
      });
    });
  }

  void add_flow(int f, StructuredFactor& factor, const ActiveRows<T>& rows,
                EnvelopeLdl<T>& matrix) {
    for (int i = 0; i < rows.count; ++i) {
      fill(factor.y, 0.0);
      if (!each(i, f, [&](int k, double coef) { factor.y[k] = coef; })) continue;
      factor.apply();
      for (int j = 0; j <= i; ++j) {
        double sum = 0;
        each(j, f, [&](int k, double coef) { sum += coef * factor.y[k]; });
        matrix.row(i)[j] += T(sum);
      }
    }
  }

  StructuredFactors<T>* structured_ = nullptr;
  Span<std::int32_t> ptr_, var_;  // entries of the active rows in hubs
  Span<T> coef_, moved_;
  Span<std::int32_t> touching_;  // rows that a factor touches
  Span<double> half_;            // their columns of B
};

}  // namespace factormax
