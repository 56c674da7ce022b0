// Sparse matrices by their columns, and how far the rows of C C^T reach.
#pragma once

#include "factormax/vector_ops.hpp"

namespace factormax {

// A matrix by its columns, each the part of a variable in some rows.
template <class T>
struct Columns {
  Span<std::int32_t> var, ptr, row;  // entries ptr[f] to ptr[f + 1] are those of variable var[f]
  Span<T> coef;
  int count = 0;

  T dot(int f, Span<const T> t) const {
    T sum = 0;
    for (int k = ptr[f]; k < ptr[f + 1]; ++k) sum += coef[k] * t[row[k]];
    return sum;
  }
  void add(int f, T value, Span<T> out) const {
    for (int k = ptr[f]; k < ptr[f + 1]; ++k) out[row[k]] += coef[k] * value;
  }
};

// The same matrix by its rows: entries ptr[i] to ptr[i + 1] are those of row i.
template <class T>
struct Rows {
  Span<std::int32_t> ptr, column;
  Span<T> coef;

  void allocate(int rows, int entries, Workspace& ws) {
    ptr = ws.take<std::int32_t>(rows + 1);
    column = ws.take<std::int32_t>(entries);
    coef = ws.take<T>(entries);
  }

  // The entries of a row stand in the order of their columns.
  void list(const Columns<T>& c, int rows, bool with_coef) {
    fill(ptr.first(rows + 1), 0);
    for (int k = 0; k < c.ptr[c.count]; ++k) ++ptr[c.row[k]];
    for (int i = 0; i < rows; ++i) ptr[i + 1] += ptr[i];
    for (int f = c.count - 1; f >= 0; --f) {
      for (int k = c.ptr[f]; k < c.ptr[f + 1]; ++k) {
        const std::int32_t at = --ptr[c.row[k]];
        column[at] = f;
        if (with_coef) coef[at] = c.coef[k];
      }
    }
  }
};

// What lies between the first entry of each row of C C^T and the diagonal.
struct Envelope {
  std::int64_t size = 0;  // entries, the diagonal included
  double work = 0;        // multiplications that its factors take, about
};

}  // namespace factormax
