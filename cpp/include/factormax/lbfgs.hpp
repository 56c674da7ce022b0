// Limited-memory BFGS restricted to a face: where some unknowns are frozen at their bounds, the
// remembered steps are first cut down to the free ones.
#pragma once

#include "factormax/vector_ops.hpp"

namespace factormax {

template <class T>
class Lbfgs {
 public:
  static constexpr int kMost = 10;

  // memory: steps remembered, at most kMost.
  void allocate(int rows, int memory, Workspace& ws) {
    memory_ = memory;
    for (Step* steps : {whole_, cut_}) {
      for (int i = 0; i < memory_; ++i) {
        steps[i].s = ws.take<T>(rows);
        steps[i].y = ws.take<T>(rows);
      }
    }
    cut_d_ = ws.take<T>(rows);
    cut_to_ = ws.take<std::int32_t>(rows);
    cut_to_.size = 0;
  }

  void reset(int rows) {
    count_ = head_ = 0;
    rows_ = rows;
    std::fill(is_cut_, is_cut_ + memory_, false);
  }
  bool empty() const { return count_ == 0; }

  // Remembers the step from (x0, g0) to (x1, g1).
  FACTORMAX_VECTOR void push(Span<const T> x0, Span<const T> g0, Span<const T> x1,
                             Span<const T> g1) {
    T sy = 0, ss = 0, yy = 0;
    T *s = whole_[head_].s.data, *y = whole_[head_].y.data;
#pragma omp simd reduction(+ : sy, ss, yy)
    for (int i = 0; i < rows_; ++i) {
      s[i] = x1.data[i] - x0.data[i];
      y[i] = g1.data[i] - g0.data[i];
      sy += s[i] * y[i];
      ss += s[i] * s[i];
      yy += y[i] * y[i];
    }
    if (!(sy > std::numeric_limits<T>::epsilon() * std::sqrt(ss * yy))) {
      count_ = std::min(count_, memory_ - 1);  // the oldest is overwritten
      return;
    }
    whole_[head_].sy = sy;
    whole_[head_].yy = yy;
    is_cut_[head_] = false;
    head_ = (head_ + 1) % memory_;
    count_ = std::min(count_ + 1, memory_);
  }

  // d = -H g on the free unknowns, whose indices are given, and 0 elsewhere.
  void direction(Span<const T> g, Span<const std::int32_t> free, Span<T> d) {
    if (free.size == rows_) {
      for (int i = 0; i < rows_; ++i) d[i] = -g[i];
      two_loop(whole_, d);
      return;
    }
    const Span<T> cut = cut_d_.first(free.size);
    for (int k = 0; k < free.size; ++k) cut[k] = -g[free[k]];
    if (!std::equal(free.begin(), free.end(), cut_to_.begin(), cut_to_.end())) {
      std::fill(is_cut_, is_cut_ + memory_, false);
      cut_to_.size = free.size;
      copy(free, cut_to_);
    }
    for (int a = 0; a < count_; ++a) {
      const int i = recent(a);
      if (is_cut_[i]) continue;
      is_cut_[i] = true;
      cut_down(whole_[i], free, cut_[i]);
    }
    two_loop(cut_, cut);
    fill(d, T(0));
    for (int k = 0; k < free.size; ++k) d[free[k]] = cut[k];
  }

 private:
  struct Step {
    Span<T> s, y;      // of the unknowns, of the gradient
    T sy = 0, yy = 0;  // products of the two
  };

  int recent(int age) const { return (head_ - 1 - age + 2 * memory_) % memory_; }

  FACTORMAX_VECTOR static void cut_down(const Step& whole, Span<const std::int32_t> free,
                                        Step& cut) {
    const T *s = whole.s.data, *y = whole.y.data;
    T sy = 0, yy = 0;
#pragma omp simd reduction(+ : sy, yy)
    for (int k = 0; k < free.size; ++k) {
      const T s_k = s[free.data[k]], y_k = y[free.data[k]];
      cut.s.data[k] = s_k;
      cut.y.data[k] = y_k;
      sy += s_k * y_k;
      yy += y_k * y_k;
    }
    cut.sy = sy;
    cut.yy = yy;
  }

  // q += alpha v, and then q . next, in one sweep over q.
  FACTORMAX_INLINE static T add_then_dot(T alpha, Span<T> v, Span<T> next, Span<T> q) {
    T sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int k = 0; k < q.size; ++k) {
      q.data[k] += alpha * v.data[k];
      sum += next.data[k] * q.data[k];
    }
    return sum;
  }

  FACTORMAX_VECTOR void two_loop(const Step* steps, Span<T> q) const {
    const Step* used[kMost];  // newest first
    T alpha[kMost], rho[kMost];
    int count = 0;
    for (int a = 0; a < count_; ++a) {
      const Step& step = steps[recent(a)];
      if (!(step.sy > std::numeric_limits<T>::epsilon() * step.yy)) continue;
      rho[count] = 1 / step.sy;
      used[count++] = &step;
    }
    if (count == 0) return;
    const int last = count - 1;
    T product = dot(used[0]->s.first(q.size), q);
    for (int a = 0; a < last; ++a) {
      alpha[a] = rho[a] * product;
      product = add_then_dot(-alpha[a], used[a]->y, used[a + 1]->s, q);
    }
    alpha[last] = rho[last] * product;
    axpy(-alpha[last], Span<const T>{used[last]->y.data, q.size}, q);
    const T gamma = used[0]->sy / used[0]->yy;
#pragma omp simd
    for (int k = 0; k < q.size; ++k) q.data[k] *= gamma;
    product = dot(used[last]->y.first(q.size), q);
    for (int a = last; a > 0; --a) {
      product = add_then_dot(alpha[a] - rho[a] * product, used[a]->s, used[a - 1]->y, q);
    }
    axpy(alpha[0] - rho[0] * product, Span<const T>{used[0]->s.data, q.size}, q);
  }

  Step whole_[kMost], cut_[kMost];  // over all rows, over the free ones
  Span<T> cut_d_;
  Span<std::int32_t> cut_to_;  // the free unknowns they are cut down to,
  bool is_cut_[kMost] = {};    // those that are
  int count_ = 0, head_ = 0, rows_ = 0, memory_ = 0;
};

}  // namespace factormax
