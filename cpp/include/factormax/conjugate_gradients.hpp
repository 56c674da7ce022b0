// Conjugate gradients with a diagonal preconditioner, also for systems that are singular.
#pragma once

#include "factormax/vector_ops.hpp"

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
    T curvature = 0, most = 0;
#pragma omp simd reduction(+ : curvature, most)
    for (int i = 0; i < count; ++i) {
      curvature += d.data[i] * q.data[i];
      most += d.data[i] * d.data[i] * diagonal.data[i];
    }
    if (!(curvature > null * most)) break;
    const T alpha = rho / curvature;
    axpy(alpha, Span<const T>(d), t);
    axpy(-alpha, Span<const T>(q), r);
    const T gain = alpha * rho;
    gained += gain;
    T next = 0;
#pragma omp simd reduction(+ : next)
    for (int i = 0; i < count; ++i) next += r.data[i] * r.data[i] / diagonal.data[i];
    const T beta = next / rho;
    rho = next;
    for (int i = 0; i < count; ++i) d[i] = r[i] / diagonal[i] + beta * d[i];
    const T size = max_abs(Span<const T>(r));
    since = gain > T(limits.least_gain) * gained ? 0 : since + 1;
    if (size < least) {
      least = size;
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
