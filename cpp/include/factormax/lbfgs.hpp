// Limited-memory BFGS restricted to a face: where some unknowns are frozen at their bounds, the
// remembered steps are first cut down to the free ones.
#pragma once

#include "factormax/chunks.hpp"

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
    T *s = whole_[head_].s.data, *y = whole_[head_].y.data;
    const Products all = sum_of_chunks<Products>(rows_, [=](int begin, int end) FACTORMAX_BODY {
      return subtract(x0.data, g0.data, x1.data, g1.data, begin, end, s, y);
    });
    if (!(all.sy > std::numeric_limits<T>::epsilon() * std::sqrt(all.ss * all.yy))) {
      count_ = std::min(count_, memory_ - 1);  // the oldest is overwritten
      return;
    }
    whole_[head_].sy = all.sy;
    whole_[head_].yy = all.yy;
    is_cut_[head_] = false;
    head_ = (head_ + 1) % memory_;
    count_ = std::min(count_ + 1, memory_);
  }

  // d = -H g on the free unknowns, whose indices are given, and 0 elsewhere.
  void direction(Span<const T> g, Span<const std::int32_t> free, Span<T> d) {
    if (free.size == rows_) {
      in_chunks(rows_, [=](int begin, int end) FACTORMAX_BODY {
        for (int i = begin; i < end; ++i) d.data[i] = -g.data[i];
      });
      two_loop(whole_, d);
      return;
    }
    const Span<T> cut = cut_d_.first(free.size);
    in_chunks(free.size, [=](int begin, int end) FACTORMAX_BODY {
      for (int k = begin; k < end; ++k) cut.data[k] = -g.data[free.data[k]];
    });
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
    in_chunks(free.size, [=](int begin, int end) FACTORMAX_BODY {
      for (int k = begin; k < end; ++k) d.data[free.data[k]] = cut.data[k];
    });
  }

 private:
  struct Step {
    Span<T> s, y;      // of the unknowns, of the gradient
    T sy = 0, yy = 0;  // products of the two
  };

  struct Products {
    T sy, ss, yy;
    void operator+=(const Products& other) {
      sy += other.sy;
      ss += other.ss;
      yy += other.yy;
    }
  };

  // s = x1 - x0, y = g1 - g0
  FACTORMAX_INLINE static Products subtract(const T* x0, const T* g0, const T* x1, const T* g1,
                                            int begin, int end, T* s, T* y) {
    T sy = 0, ss = 0, yy = 0;
#pragma omp simd reduction(+ : sy, ss, yy)
    for (int i = begin; i < end; ++i) {
      s[i] = x1[i] - x0[i];
      y[i] = g1[i] - g0[i];
      sy += s[i] * y[i];
      ss += s[i] * s[i];
      yy += y[i] * y[i];
    }
    return {sy, ss, yy};
  }

  FACTORMAX_INLINE static Products gather(const T* s, const T* y, const std::int32_t* free,
                                          int begin, int end, T* cut_s, T* cut_y) {
    T sy = 0, yy = 0;
#pragma omp simd reduction(+ : sy, yy)
    for (int k = begin; k < end; ++k) {
      const T s_k = s[free[k]], y_k = y[free[k]];
      cut_s[k] = s_k;
      cut_y[k] = y_k;
      sy += s_k * y_k;
      yy += y_k * y_k;
    }
    return {sy, 0, yy};
  }

  int recent(int age) const { return (head_ - 1 - age + 2 * memory_) % memory_; }

  FACTORMAX_VECTOR static void cut_down(const Step& whole, Span<const std::int32_t> free,
                                        Step& cut) {
    const T *s = whole.s.data, *y = whole.y.data;
    T *cut_s = cut.s.data, *cut_y = cut.y.data;
    const Products all = sum_of_chunks<Products>(free.size, [=](int begin, int end) FACTORMAX_BODY {
      return gather(s, y, free.data, begin, end, cut_s, cut_y);
    });
    cut.sy = all.sy;
    cut.yy = all.yy;
  }

  // q += alpha v, and then q . next, in one sweep over q.
  FACTORMAX_INLINE static T add_then_dot(T alpha, Span<T> v, Span<T> next, Span<T> q) {
    return sum_of_chunks<T>(q.size, [=](int begin, int end) FACTORMAX_BODY {
      return add_then_dot(alpha, v.data, next.data, begin, end, q.data);
    });
  }

  FACTORMAX_INLINE static T add_then_dot(T alpha, const T* v, const T* next, int begin, int end,
                                         T* q) {
    T sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int k = begin; k < end; ++k) {
      q[k] += alpha * v[k];
      sum += next[k] * q[k];
    }
    return sum;
  }

  FACTORMAX_INLINE static void add(T alpha, Span<T> v, Span<T> q) {
    in_chunks(q.size, [=](int begin, int end) FACTORMAX_BODY {
      axpy(alpha, Span<const T>{v.data + begin, end - begin}, Span<T>{q.data + begin, end - begin});
    });
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
    T product = dot_in_chunks<T>(used[0]->s.first(q.size), q);
    for (int a = 0; a < last; ++a) {
      alpha[a] = rho[a] * product;
      product = add_then_dot(-alpha[a], used[a]->y, used[a + 1]->s, q);
    }
    alpha[last] = rho[last] * product;
    add(-alpha[last], used[last]->y, q);
    const T gamma = used[0]->sy / used[0]->yy;
    in_chunks(q.size, [=](int begin, int end) FACTORMAX_BODY {
      const T times = gamma;
#pragma omp simd
      for (int k = begin; k < end; ++k) q.data[k] *= times;
    });
    product = dot_in_chunks<T>(used[last]->y.first(q.size), q);
    for (int a = last; a > 0; --a) {
      product = add_then_dot(alpha[a] - rho[a] * product, used[a]->s, used[a - 1]->y, q);
    }
    add(alpha[0] - rho[0] * product, used[0]->s, q);
  }

  Step whole_[kMost], cut_[kMost];  // over all rows, over the free ones
  Span<T> cut_d_;
  Span<std::int32_t> cut_to_;  // the free unknowns they are cut down to,
  bool is_cut_[kMost] = {};    // those that are
  int count_ = 0, head_ = 0, rows_ = 0, memory_ = 0;
};

}  // namespace factormax
