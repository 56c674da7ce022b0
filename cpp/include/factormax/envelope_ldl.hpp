// L D L^T of a symmetric positive matrix inside its envelope: what lies between the first entry of
// a row and the diagonal. Few rows fit whatever their entries, and any number that overlap like a
// chain.
#pragma once

#include "factormax/columns.hpp"
#include "factormax/precision.hpp"

namespace factormax {

template <class T>
class EnvelopeLdl {
 public:
  void allocate(int rows, int entries, Workspace& ws) {
    const std::int64_t dense = std::min(rows, kDense);
    matrix_ = ws.take<T>(std::max(dense * dense, std::int64_t(4) * rows));
    inverse_ = ws.take<T>(rows);
    first_ = ws.take<std::int32_t>(rows);
    offset_ = ws.take<std::int32_t>(rows);
    last_ = ws.take<std::int32_t>(rows);
    lead_ptr_ = ws.take<std::int32_t>(rows + 1);
    touched_ = ws.take<std::int32_t>(entries);
    column_ = ws.take<T>(rows);
    next_column_ = ws.take<T>(rows);
  }

  // Rows of a matrix that always fits: half a megabyte.
  static constexpr int kDense = 256;

  // Makes room for a matrix C C^T of so many rows; whether they all fit. Then the matrix is 0.
  bool fit(const Columns<T>& c, int rows) {
    for (int i = 0; i < rows; ++i) first_[i] = last_[i] = i;
    for (int f = 0; f < c.count; ++f) {
      const std::int32_t least = c.row[c.ptr[f]];
      for (int k = c.ptr[f] + 1; k < c.ptr[f + 1]; ++k)
        first_[c.row[k]] = std::min(first_[c.row[k]], least);
    }
    std::int64_t size = 0;
    for (int i = 0; i < rows; ++i) {
      offset_[i] = static_cast<std::int32_t>(size) - first_[i];
      size += i - first_[i] + 1;
      if (!holds(size)) return false;
    }
    order_ = rows;
    lead_ = 0;
    while (lead_ < rows && first_[lead_] == lead_) ++lead_;
    for (int i = 0; i < rows; ++i) last_[first_[i]] = i;
    for (int i = 1; i < rows; ++i) last_[i] = std::max(last_[i], last_[i - 1]);
    fill(matrix_.first(static_cast<int>(size)), T(0));
    return true;
  }

  bool holds(std::int64_t entries) const { return entries <= matrix_.size; }

  // Multiplications of the factors, after `fit`, about: leading rows take hardly any.
  double work() const {
    double sum = 0;
    for (int i = lead_; i < order_; ++i) {
      const double width = i - std::max<int>(first_[i], lead_);
      sum += width * width;
    }
    return sum;
  }

  // The same without zeros to count on. keep: the matrix stays what it is.
  bool fit_full(int order, bool keep = false) {
    if (std::int64_t(order) * (order + 1) / 2 > matrix_.size || order > kDense) return false;
    for (int i = 0; i < order; ++i) {
      first_[i] = 0;
      offset_[i] = i * (i + 1) / 2;
      last_[i] = order - 1;
    }
    order_ = order;
    lead_ = 0;
    if (!keep) fill(matrix_.first(order * (order + 1) / 2), T(0));
    return true;
  }

  // Entry j of row i, which is inside the envelope, j <= i, is row(i)[j].
  T* row(int i) const { return matrix_.data + offset_.data[i]; }

  // The factors of the lower triangle, in place, column by column. What the leading rows, which
  // share nothing, take from the rest is sparse, like the rows of a matching from its columns. On
  // and above the diagonal L is not stored; D is in inverse_. c: as of `fit`.
  FACTORMAX_VECTOR void factorise(const Columns<T>& c) {
    regularise();
    find_touched(c);
    for (int j = 0; j < lead_; ++j) eliminate_leading(j);
    int j = lead_;
    for (; j + 1 < order_; j += 2) eliminate_two(j);
    if (j < order_) invert(j);
  }

  // b = (L D L^T)^-1 b
  FACTORMAX_VECTOR void solve(Span<T> b) const {
    const int order = order_;
    for (int i = lead_; i < order; ++i) {
      const T* entry = row(i);
      T sum = 0;
#pragma omp simd reduction(+ : sum)
      for (int k = first_[i]; k < i; ++k) sum += entry[k] * b.data[k];
      b[i] -= sum;
    }
    for (int i = 0; i < order; ++i) b[i] *= inverse_[i];
    for (int i = order - 1; i >= lead_; --i) {
      const T* entry = row(i);
      const int first = first_[i];
      axpy(-b[i], Span<const T>{entry + first, i - first}, Span<T>{b.data + first, i - first});
    }
  }

 private:
  static constexpr T ridge() { return Precision<T>::ridge; }

  // Adds to the diagonal; inverse_ keeps how much.
  FACTORMAX_INLINE void regularise() {
    T trace = 0;
    for (int i = 0; i < order_; ++i) trace += row(i)[i];
    const T average = trace / std::max(order_, 1);
    for (int i = 0; i < order_; ++i) {  // a row of small coefficients has a small entry
      inverse_.data[i] = ridge() * std::min(average, row(i)[i]);
      row(i)[i] += inverse_.data[i];
      column_.data[i] = 0;
    }
  }

  FACTORMAX_INLINE T invert(int i) {  // no pivot is below half of what was added to it
    return inverse_.data[i] = 1 / std::max(row(i)[i], inverse_.data[i] / 2);
  }

  FACTORMAX_INLINE void eliminate_leading(int j) {
    T* column = column_.data;  // 0 but for the rows that it touches
    const T inverse = invert(j);
    Span<std::int32_t> touched = {touched_.data + lead_ptr_.data[j], 0};
    int begin = order_;
    for (int e = lead_ptr_.data[j]; e < lead_ptr_.data[j + 1]; ++e) {
      const std::int32_t i = touched_.data[e];
      const T entry = row(i)[j];
      if (entry == 0 || column[i] != 0) continue;  // two variables may share two rows
      column[i] = entry * inverse;
      touched.data[touched.size++] = i;
      begin = std::min(begin, static_cast<int>(i));
    }
    for (const std::int32_t i : touched) {
      T* changed = row(i);
      const T entry = changed[j];
      changed[j] = column[i];
#pragma omp simd
      for (int k = begin; k <= i; ++k) changed[k] -= entry * column[k];
    }
    for (const std::int32_t i : touched) column[i] = 0;
  }

  // Two columns at a time, for both change the same rows.
  FACTORMAX_INLINE void eliminate_two(int j) {
    const std::int32_t *first = first_.data, *last = last_.data;
    T *column = column_.data, *second = next_column_.data;
    const T inverse = invert(j);
    const int end = std::max(last[j], last[j + 1]);
    for (int i = j + 1; i <= end; ++i) {
      column[i] = first[i] <= j ? row(i)[j] * inverse : T(0);
    }
    const T across = column[j + 1];
    if (across != 0) {  // the first changes the second, the diagonal with it
      for (int i = j + 1; i <= end; ++i) {
        if (first[i] <= j) row(i)[j + 1] -= row(i)[j] * across;
      }
      row(j + 1)[j] = across;
    }
    const T other = invert(j + 1);
    for (int i = j + 2; i <= end; ++i) {
      second[i] = first[i] <= j + 1 ? row(i)[j + 1] * other : T(0);
    }
    for (int i = j + 2; i <= end; ++i) {
      if (first[i] > j + 1) continue;
      T* changed = row(i);
      const T entry = first[i] <= j ? changed[j] : T(0), entry2 = changed[j + 1];
      if (first[i] <= j) changed[j] = column[i];
      changed[j + 1] = second[i];
#pragma omp simd
      for (int k = j + 2; k <= i; ++k) changed[k] -= entry * column[k] + entry2 * second[k];
    }
  }

  // The rows after the leading ones that each of those shares a variable with, in no order.
  void find_touched(const Columns<T>& c) {
    fill(lead_ptr_.first(lead_ + 1), 0);
    if (lead_ == 0) return;
    const auto each = [&](const auto& visit) {
      for (int f = 0; f < c.count; ++f) {
        const std::int32_t j = c.row[c.ptr[f]];  // only the first can be a leading one
        if (j >= lead_) continue;
        for (int k = c.ptr[f] + 1; k < c.ptr[f + 1]; ++k) visit(j, c.row[k]);
      }
    };
    each([&](int j, int) { ++lead_ptr_[j + 1]; });
    for (int j = 0; j < lead_; ++j) lead_ptr_[j + 1] += lead_ptr_[j];
    each([&](int j, std::int32_t i) { touched_[lead_ptr_[j]++] = i; });
    for (int j = lead_; j > 0; --j) lead_ptr_[j] = lead_ptr_[j - 1];
    lead_ptr_[0] = 0;
  }

  Span<T> matrix_, inverse_;
  Span<std::int32_t> first_, last_;  // the envelope: where a row begins, and a column ends
  Span<std::int32_t> offset_;        // of a row's column 0 in matrix_, were it there
  int order_ = 0;                    // rows of the matrix
  int lead_ = 0;                     // so many rows in front share no variable
  Span<std::int32_t> lead_ptr_;      // while factorising: where each leading row's begin among
  Span<std::int32_t> touched_;       // the rows that it shares a variable with
  Span<T> column_, next_column_;     // columns of L
};

}  // namespace factormax
