// L D L^T of the matrix
//
//   [ D   A^T ]
//   [ A   -E  ],   D > 0, E > 0 diagonal,
//
// over the variables and rows of an instance. Such a matrix has these factors in any order, so the
// order is chosen for the zeros: always the unknown that is tied to the fewest others. That
// eliminates a pair before its variables, and a variable of few rows before those.
#pragma once

#include <bitset>

#include "factormax/instance.hpp"

namespace factormax {

template <class T>
class SparseLdl {
 public:
  static constexpr int kLargest = 8192;                               // unknowns
  static constexpr std::int64_t kEntries = std::int64_t(400) * 1000;  // of L

  void allocate(const Problem<T>& p, Workspace& ws) {
    const int size = p.num_vars + p.num_dual();
    capacity_ = 0;
    if (size > kLargest) return;  // masks may leave fewer, but that is rare
    capacity_ = std::min(kEntries, std::int64_t(size) * (size - 1) / 2);
    words_ = (size + 63) / 64;
    near_ = ws.take<std::uint64_t>(std::int64_t(size) * words_);
    entry_ = ws.take<std::int32_t>(capacity_);
    value_ = ws.take<T>(capacity_);
    ptr_ = ws.take<std::int32_t>(size + 1);
    for (auto* s : {&order_, &place_, &degree_, &head_, &link_, &next_}) {
      *s = ws.take<std::int32_t>(size);
    }
    diagonal_ = ws.take<T>(size);
    work_ = ws.take<T>(size);
  }

  // Finds the order and where L is not 0; false if that is too much.
  FACTORMAX_VECTOR bool analyse(const Instance<T>& p) {
    p_ = &p;
    n_ = p.n;
    size_ = p.n + p.m;
    if (size_ > kLargest || capacity_ == 0) return false;
    words_ = (size_ + 63) / 64;
    std::fill(near_.data, near_.data + std::int64_t(size_) * words_, std::uint64_t(0));
    for (int r = 0; r < p.m; ++r) {
      for (int k = p.ptr[r]; k < p.ptr[r + 1]; ++k) {
        set(neighbours(p.col[k]), n_ + r);
        set(neighbours(n_ + r), p.col[k]);
      }
    }
    for (int v = 0; v < size_; ++v) {
      degree_[v] = count(neighbours(v));
      order_[v] = v;  // those that are left, from the i-th on
    }
    std::int64_t entries = 0;
    multiplications_ = 0;
    int least = 0;
    dense_ = 0;
    for (int i = 0; i < size_; ++i) {
      int best = i;
      // Each step takes one neighbour from an unknown at most.
      for (int a = i; a < size_ && degree_[order_[best]] > least; ++a) {
        if (degree_[order_[a]] < degree_[order_[best]]) best = a;
      }
      std::swap(order_[i], order_[best]);
      const int v = order_[i], d = degree_[v];
      least = std::max(d - 1, 0);
      if (d < size_ - i - 1) dense_ = i + 1;
      place_[v] = i;
      ptr_[i] = static_cast<std::int32_t>(entries);
      if (entries + d > capacity_) return false;
      multiplications_ += double(d) * d / 2;
      each(neighbours(v), [&](int u) { entry_[entries++] = u; });
      eliminate(v, Span<std::int32_t>{entry_.data + ptr_[i], d});
    }
    ptr_[size_] = static_cast<std::int32_t>(entries);
    for (std::int64_t e = 0; e < entries; ++e) entry_[e] = place_[entry_[e]];
    for (int i = 0; i < size_; ++i) std::sort(entry_.data + ptr_[i], entry_.data + ptr_[i + 1]);
    return true;
  }

  // Of a factorisation.
  double multiplications() const { return multiplications_; }

  // variables: (n,) D; rows: (m,) E. Rows are scaled by 1 / ||a||.
  void factorise(Span<const T> variables, Span<const T> rows) {
    variables_ = variables;
    rows_ = rows;
    std::fill(head_.data, head_.data + size_, -1);  // columns whose next entry is in this row
    for (int i = 0; i < dense_; ++i) {
      gather(i);
      finish(i);
      file(i, ptr_[i]);
    }
    for (int i = dense_; i < size_; i += kBlock) factorise_block(i, std::min(i + kBlock, size_));
  }

  // Solves in place: a over the variables, b over the rows.
  FACTORMAX_VECTOR void solve(Span<T> a, Span<T> b) {
    T* x = work_.data;
    const std::int32_t* entry = entry_.data;
    for (int i = 0; i < size_; ++i) {
      const int v = order_.data[i];
      x[i] = v < n_ ? a.data[v] : b.data[v - n_];
    }
    for (int i = 0; i < size_; ++i) {
      for (int e = ptr_.data[i]; e < ptr_.data[i + 1]; ++e) x[entry[e]] -= value_.data[e] * x[i];
    }
    for (int i = size_ - 1; i >= 0; --i) {
      T sum = x[i] / diagonal_.data[i];
      for (int e = ptr_.data[i]; e < ptr_.data[i + 1]; ++e) sum -= value_.data[e] * x[entry[e]];
      x[i] = sum;
    }
    for (int i = 0; i < size_; ++i) {
      const int v = order_.data[i];
      (v < n_ ? a.data[v] : b.data[v - n_]) = x[i];
    }
  }

 private:
  std::uint64_t* neighbours(int v) const { return near_.data + std::int64_t(v) * words_; }
  static void set(std::uint64_t* of, int u) { of[u / 64] |= std::uint64_t(1) << (u % 64); }
  static void clear(std::uint64_t* of, int u) { of[u / 64] &= ~(std::uint64_t(1) << (u % 64)); }

  static FACTORMAX_INLINE int bits(std::uint64_t word) {
    return static_cast<int>(std::bitset<64>(word).count());
  }

  FACTORMAX_INLINE int count(const std::uint64_t* of) const {
    int sum = 0;
    for (int w = 0; w < words_; ++w) sum += bits(of[w]);
    return sum;
  }

  template <class Visit>
  FACTORMAX_INLINE void each(const std::uint64_t* of, const Visit& visit) const {
    for (int w = 0; w < words_; ++w) {
      for (std::uint64_t rest = of[w]; rest != 0; rest &= rest - 1) {
        visit(64 * w + bits(~rest & (rest - 1)));  // as many as there are below the lowest
      }
    }
  }

  // The neighbours of v become neighbours of one another.
  FACTORMAX_VECTOR void eliminate(int v, Span<const std::int32_t> near) {
    const std::uint64_t* of_v = neighbours(v);
    for (const std::int32_t u : near) {
      std::uint64_t* of_u = neighbours(u);
      for (int w = 0; w < words_; ++w) of_u[w] |= of_v[w];
      clear(of_u, u);
      clear(of_u, v);
      degree_.data[u] = count(of_u);
    }
  }

  // Column i of the matrix, less what the sparse columns before it take away, as far as it is below
  // the diagonal; all of it unscaled.
  FACTORMAX_VECTOR void gather(int i) {
    const Instance<T>& p = *p_;
    T* work = work_.data;
    const std::int32_t* entry = entry_.data;
    const int begin = ptr_.data[i], end = ptr_.data[i + 1], v = order_.data[i];
    for (int e = begin; e < end; ++e) work[entry[e]] = 0;
    work[i] = v < n_ ? variables_.data[v] : -rows_.data[v - n_];
    if (v < n_) {
      for (int k = p.var_ptr[v]; k < p.var_ptr[v + 1]; ++k) {
        add(n_ + p.var_row[k], p.coef[p.var_entry[k]] * p.scale[p.var_row[k]], i);
      }
    } else {
      for (int k = p.ptr[v - n_]; k < p.ptr[v - n_ + 1]; ++k) {
        add(p.col[k], p.coef[k] * p.scale[v - n_], i);
      }
    }
    for (int k = head_.data[i]; k >= 0;) {
      const int following = link_.data[k], first = next_.data[k], last = ptr_.data[k + 1];
      const T factor = value_.data[first] * diagonal_.data[k];
      for (int e = first; e < last; ++e) work[entry[e]] -= factor * value_.data[e];
      file(k, first + 1);
      k = following;
    }
    diagonal_.data[i] = work[i];
    for (int e = begin; e < end; ++e) value_.data[e] = work[entry[e]];
  }

  // Scales a column that nothing more is taken from.
  FACTORMAX_VECTOR void finish(int i) {
    // The sign is known; rounding must not turn it.
    const T least = std::numeric_limits<T>::epsilon();
    T& pivot = diagonal_.data[i];
    pivot = order_.data[i] < n_ ? std::max(pivot, least) : std::min(pivot, -least);
    const T inverse = 1 / pivot;
    for (int e = ptr_.data[i]; e < ptr_.data[i + 1]; ++e) value_.data[e] *= inverse;
  }

  // Columns of the dense end, several at a time, for all of them read those before.
  FACTORMAX_VECTOR void factorise_block(int begin, int end) {
    for (int t = begin; t < end; ++t) gather(t);
    for (int k = dense_; k < begin; ++k) {
      const T* source = below(k);
      T factor[kBlock] = {};
      for (int t = begin; t < end; ++t) {
        factor[t - begin] = source[t] * diagonal_.data[k];
        take(factor[t - begin], source, t, end);
      }
      if (end - begin < kBlock) continue;  // nothing comes after
      T *c0 = below(begin), *c1 = below(begin + 1), *c2 = below(begin + 2), *c3 = below(begin + 3);
      const T f0 = factor[0], f1 = factor[1], f2 = factor[2], f3 = factor[3];
#pragma omp simd
      for (int r = end; r < size_; ++r) {
        const T value = source[r];
        c0[r] -= f0 * value;
        c1[r] -= f1 * value;
        c2[r] -= f2 * value;
        c3[r] -= f3 * value;
      }
    }
    for (int t = begin; t < end; ++t) {
      finish(t);
      for (int later = t + 1; later < end; ++later) {
        take(below(t)[later] * diagonal_.data[t], below(t), later, size_);
      }
    }
  }

  // Column t -= factor * source, from the diagonal up to row `end`.
  FACTORMAX_INLINE void take(T factor, const T* source, int t, int end) {
    diagonal_.data[t] -= factor * source[t];
    T* column = below(t);
#pragma omp simd
    for (int r = t + 1; r < end; ++r) column[r] -= factor * source[r];
  }

  // Entry (r, i) of L in the dense end is below(i)[r].
  T* below(int i) const { return value_.data + (ptr_.data[i] - i - 1); }

  // An entry of the matrix, in column i, if it is below the diagonal.
  void add(int node, T value, int i) {
    if (place_.data[node] > i) work_.data[place_.data[node]] += value;
  }

  // The next row that column k has an entry in is that of entry e.
  void file(int k, int e) {
    if (e >= ptr_.data[k + 1]) return;
    next_.data[k] = e;
    link_.data[k] = head_.data[entry_.data[e]];
    head_.data[entry_.data[e]] = k;
  }

  const Instance<T>* p_ = nullptr;
  static constexpr int kBlock = 4;

  int n_ = 0, size_ = 0, words_ = 0;
  int dense_ = 0;  // from here on all are neighbours
  Span<const T> variables_, rows_;
  std::int64_t capacity_ = 0;
  double multiplications_ = 0;
  Span<std::uint64_t> near_;   // (size, words) who is a neighbour of whom, as bits
  Span<std::int32_t> order_;   // (size,) unknowns: variables, then rows
  Span<std::int32_t> place_;   // their places in the order
  Span<std::int32_t> degree_;  // number of neighbours
  Span<std::int32_t> ptr_;     // (size + 1,) where a column of L begins among
  Span<std::int32_t> entry_;   // the rows of its entries, ascending, and
  Span<T> value_;              // what they are
  Span<T> diagonal_, work_;    // (size,) D; a column
  Span<std::int32_t> head_, link_,
      next_;  // while factorising: lists of columns by their next entry
};

}  // namespace factormax
