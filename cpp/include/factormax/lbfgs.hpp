// Limited-memory BFGS restricted to a face: inner products run over the free unknowns only.
#pragma once

#include "factormax/vector_ops.hpp"

namespace factormax {

template <class T>
class Lbfgs {
 public:
  static constexpr int kMemory = 5;

  void allocate(int rows, Workspace& ws) {
    for (int i = 0; i < kMemory; ++i) {
      s_[i] = ws.take<T>(rows);
      y_[i] = ws.take<T>(rows);
    }
  }

  void reset(int rows) {
    count_ = head_ = 0;
    rows_ = rows;
  }
  bool empty() const { return count_ == 0; }

  // Remembers the step from (x0, g0) to (x1, g1).
  void push(Span<const T> x0, Span<const T> g0, Span<const T> x1, Span<const T> g1) {
    T sy = 0, ss = 0, yy = 0;
    T *s = s_[head_].data, *y = y_[head_].data;
#pragma omp simd reduction(+ : sy, ss, yy)
    for (int i = 0; i < rows_; ++i) {
      s[i] = x1.data[i] - x0.data[i];
      y[i] = g1.data[i] - g0.data[i];
      sy += s[i] * y[i];
      ss += s[i] * s[i];
      yy += y[i] * y[i];
    }
    if (!(sy > std::numeric_limits<T>::epsilon() * std::sqrt(ss * yy))) return;
    sy_[head_] = sy;
    yy_[head_] = yy;
    head_ = (head_ + 1) % kMemory;
    count_ = std::min(count_ + 1, kMemory);
  }

  // d = -H g on the free unknowns (`free` holds 1 or 0), 0 elsewhere.
  void direction(Span<const T> g, Span<const T> free, bool all_free, Span<T> d) const {
    T* q = d.data;
#pragma omp simd
    for (int i = 0; i < rows_; ++i) q[i] = -g.data[i] * free.data[i];
    T alpha[kMemory], rho[kMemory];
    T gamma = 1;
    bool scaled = false;
    for (int a = 0; a < count_; ++a) {  // newest first
      const int i = (head_ - 1 - a + 2 * kMemory) % kMemory;
      const T *s = s_[i].data, *y = y_[i].data;
      T sy = sy_[i], yy = yy_[i], sq = 0;
      if (all_free) {
        sq = dot(s_[i].first(rows_), d);
      } else {
        sy = yy = 0;
#pragma omp simd reduction(+ : sy, yy, sq)
        for (int k = 0; k < rows_; ++k) {
          const T yf = y[k] * free.data[k];
          sy += s[k] * yf;
          yy += y[k] * yf;
          sq += s[k] * q[k];
        }
      }
      rho[i] = sy > std::numeric_limits<T>::epsilon() * yy ? 1 / sy : T(0);
      if (rho[i] == 0) continue;
      if (!scaled) gamma = sy / yy;
      scaled = true;
      alpha[i] = rho[i] * sq;
#pragma omp simd
      for (int k = 0; k < rows_; ++k) q[k] -= alpha[i] * y[k] * free.data[k];
    }
#pragma omp simd
    for (int k = 0; k < rows_; ++k) q[k] *= gamma;
    for (int a = count_ - 1; a >= 0; --a) {  // oldest first
      const int i = (head_ - 1 - a + 2 * kMemory) % kMemory;
      if (rho[i] == 0) continue;
      const T *s = s_[i].data, *y = y_[i].data;
      T yq = 0;
#pragma omp simd reduction(+ : yq)
      for (int k = 0; k < rows_; ++k) yq += y[k] * q[k];
      const T step = alpha[i] - rho[i] * yq;
#pragma omp simd
      for (int k = 0; k < rows_; ++k) q[k] += step * s[k] * free.data[k];
    }
  }

 private:
  Span<T> s_[kMemory], y_[kMemory];
  T sy_[kMemory], yy_[kMemory];
  int count_ = 0, head_ = 0, rows_ = 0;
};

}  // namespace factormax
