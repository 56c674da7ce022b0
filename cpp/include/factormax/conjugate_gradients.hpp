// Conjugate gradients with a diagonal preconditioner, also for systems that are singular.
#pragma once

#include "factormax/chunks.hpp"

namespace factormax {

template <class T>
struct CgMemory {
  Span<T> residual, direction, product, best;

  void allocate(int rows, Workspace& ws) {
    for (Span<T>* s : {&residual, &direction, &product, &best}) *s = ws.take<T>(rows);
  }
};

struct CgLimits {
  int steps, patience;  // so many in all, and without a gain
  double least_gain;    // of the squared error, relative to all of it, where no residual is smaller
};

template <class T>
struct Curvature {
  T curvature, most;

  void operator+=(const Curvature& other) {
    curvature += other.curvature;
    most += other.most;
  }
};

template <class T>
struct Residual {
  T square, largest;  // r . diagonal^-1 r, and the largest entry

  void operator+=(const Residual& other) {
    square += other.square;
    largest = std::max(largest, other.largest);
  }
};

// d . q and d . diagonal d
template <class T>
FACTORMAX_INLINE Curvature<T> curvature_along(const T* d, const T* q, const T* diagonal, int begin,
                                              int end) {
  T curvature = 0, most = 0;
#pragma omp simd reduction(+ : curvature, most)
  for (int i = begin; i < end; ++i) {
    curvature += d[i] * q[i];
    most += d[i] * d[i] * diagonal[i];
  }
  return {curvature, most};
}

// t += alpha d, r -= alpha q; returns r . diagonal^-1 r.
template <class T>
FACTORMAX_INLINE T step_along(T alpha, const T* d, const T* q, const T* diagonal, int begin,
                              int end, T* t, T* r) {
  T sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int i = begin; i < end; ++i) {
    t[i] += alpha * d[i];
    r[i] -= alpha * q[i];
    sum += r[i] * r[i] / diagonal[i];
  }
  return sum;
}

// Improves `t`. On a singular system the iterates can run away once the residual is down to
// rounding, so the best one is kept. apply(t, out): the matrix; stop(step): whether to end.
// Returns the residual.
template <class T, class Apply, class Stop>
T conjugate_gradients(const Apply& apply, Span<const T> diagonal, Span<const T> rhs, T goal,
                      const CgLimits& limits, const Stop& stop, const CgMemory<T>& memory,
                      Span<T> t) {
  const int count = t.size;
  const Span<T> r = memory.residual.first(count), d = memory.direction.first(count),
                q = memory.product.first(count), best = memory.best.first(count);
  apply(t, q);
  T rho = 0, gained = 0;  // by what t has to begin with
  for (int i = 0; i < count; ++i) {
    r[i] = rhs[i] - q[i];
    d[i] = r[i] / diagonal[i];
    rho += r[i] * d[i];
    gained += t[i] * (rhs[i] + r[i]);
  }
  copy(Span<const T>(t), best);
  const T null = 4 * std::numeric_limits<T>::epsilon();  // less curvature is that of the null space
  T least = max_abs(Span<const T>(r));
  for (int step = 0, since = 0; step < limits.steps && since < limits.patience && least > goal;
       ++step) {
    if (stop(step)) break;
    apply(d, q);
    const auto along = sum_of_chunks<Curvature<T>>(count, [=](int begin, int end) FACTORMAX_BODY {
      return curvature_along(d.data, q.data, diagonal.data, begin, end);
    });
    if (!(along.curvature > null * along.most)) break;
    const T alpha = rho / along.curvature;
    const auto left = sum_of_chunks<Residual<T>>(count, [=](int begin, int end) FACTORMAX_BODY {
      const T square = step_along(alpha, d.data, q.data, diagonal.data, begin, end, t.data, r.data);
      return Residual<T>{square, max_abs(Span<const T>{r.data + begin, end - begin})};
    });
    const T gain = alpha * rho;
    gained += gain;
    const T beta = left.square / rho;
    rho = left.square;
    in_chunks(count, [=](int begin, int end) FACTORMAX_BODY {
      const T times = beta;
#pragma omp simd
      for (int i = begin; i < end; ++i) {
        d.data[i] = r.data[i] / diagonal.data[i] + times * d.data[i];
      }
    });
    since = gain > T(limits.least_gain) * gained ? 0 : since + 1;
    if (left.largest < least) {
      least = left.largest;
      since = 0;
      copy(Span<const T>(t), best);
    }
  }
  copy(Span<const T>(best), t);
  apply(t, q);
  for (int i = 0; i < count; ++i) r[i] = rhs[i] - q[i];
  return max_abs(Span<const T>(r));
}

}  // namespace factormax
