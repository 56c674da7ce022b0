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

// What lies between the first entry of each row of C C^T and the diagonal.
struct Envelope {
  std::int64_t size = 0;  // entries, the diagonal included
  double work = 0;        // multiplications that its factors take, about
};

}  // namespace factormax
