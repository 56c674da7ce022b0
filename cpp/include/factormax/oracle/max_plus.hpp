// The product of a vector and a matrix in which + is max and * is +: what Sequence and Table do.
#pragma once

#include "factormax/vector_ops.hpp"

namespace factormax::oracle {

template <class T>
FACTORMAX_INLINE T larger(T a, T b) {
  return a > b ? a : b;
}

// out[j] = max_i (a[i] + m[i, j]), with m (rows, cols) row-major and rows >= 1. No argmax is kept:
// callers that need it find it again, along the best path only, by the same sum, which is then
// equal.
template <class T>
FACTORMAX_INLINE void max_plus(const T* a, const T* m, int rows, int cols, T* out) {
  // Four rows at a time, so that `out` is loaded and stored once for four sums.
  int i = rows % 4;
  if (i == 0) {
    i = 4;
    const T a0 = a[0], a1 = a[1], a2 = a[2], a3 = a[3];
    const T *m1 = m + cols, *m2 = m1 + cols, *m3 = m2 + cols;
#pragma omp simd
    for (int j = 0; j < cols; ++j) {
      out[j] = larger(larger(a0 + m[j], a1 + m1[j]), larger(a2 + m2[j], a3 + m3[j]));
    }
  } else {
    const T a0 = a[0], a1 = a[i / 2], a2 = a[i - 1];  // a row may come twice
    const T *m1 = m + i / 2 * cols, *m2 = m + (i - 1) * cols;
#pragma omp simd
    for (int j = 0; j < cols; ++j) {
      out[j] = larger(larger(a0 + m[j], a1 + m1[j]), a2 + m2[j]);
    }
  }
  for (; i < rows; i += 4) {
    const T a0 = a[i], a1 = a[i + 1], a2 = a[i + 2], a3 = a[i + 3];
    const T *m0 = m + i * cols, *m1 = m0 + cols, *m2 = m1 + cols, *m3 = m2 + cols;
#pragma omp simd
    for (int j = 0; j < cols; ++j) {
      const T four = larger(larger(a0 + m0[j], a1 + m1[j]), larger(a2 + m2[j], a3 + m3[j]));
      out[j] = larger(out[j], four);
    }
  }
}

}  // namespace factormax::oracle
