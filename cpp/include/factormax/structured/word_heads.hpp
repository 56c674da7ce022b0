// The heads of each word: a sparsemax of its scores, docs/math.md (61a).
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>

#include "factormax/vector_ops.hpp"

namespace factormax {

// All in double, whatever the scores. Rows are padded, with scores of -inf.
class WordHeads {
 public:
  static constexpr double kInf = std::numeric_limits<double>::infinity();

  static int padded(int count) { return (count + 7) / 8 * 8; }

  void allocate(int words, Workspace& ws) {
    n = words;
    stride = padded(words);
    scores_ = ws.take<double>(std::int64_t(words) * stride);
    raised = ws.take<double>(stride);
    tau = ws.take<double>(words);
    head_ = ws.take<std::int32_t>(std::int64_t(words) * words);
    value_ = ws.take<double>(std::int64_t(words) * words);
    count = ws.take<std::int32_t>(words);
    present = ws.take<std::uint8_t>(words);
  }

  int n = 0, stride = 0;
  bool any_absent = false;
  double largest = 0;          // of the scores, in size
  Span<double> raised;         // (stride,) scores of one word, with what its sets add
  Span<double> tau;            // (n,) the level of each word
  Span<std::int32_t> count;    // (n,) how many heads are free
  Span<std::uint8_t> present;  // (n,)

  double* scores(int m) const { return scores_.data + std::int64_t(m) * stride; }
  // The heads of word m that are free, m itself for the root, and their marginals, or a vector like
  // those.
  std::int32_t* head(int m) const { return head_.data + std::int64_t(m) * n; }
  double* value(int m) const { return value_.data + std::int64_t(m) * n; }

  // eta, mask: (n, n), or null.
  template <class T>
  FACTORMAX_VECTOR void load(const T* eta, const std::uint8_t* mask) {
    any_absent = false;
    largest = 0;
    for (int m = 0; m < n; ++m) {
      const T* from = eta + std::int64_t(m) * n;
      double* to = scores(m);
      double top = -kInf, bottom = kInf;
      FACTORMAX_EXTREMES(reduction(max : top) reduction(min : bottom))
      for (int h = 0; h < n; ++h) {
        to[h] = from[h];
        top = to[h] > top ? to[h] : top;
        bottom = to[h] < bottom ? to[h] : bottom;
      }
      for (int h = n; h < stride; ++h) to[h] = -kInf;
      if (mask != nullptr || bottom == -kInf) {
        any_absent = true;
        top = -kInf;
        bottom = kInf;
        for (int h = 0; h < n; ++h) {
          if (mask != nullptr && mask[std::int64_t(m) * n + h] == 0) to[h] = -kInf;
          top = std::max(top, to[h]);
          if (to[h] != -kInf) bottom = std::min(bottom, to[h]);
        }
      }
      present[m] = top != -kInf;
      if (present[m]) largest = std::max({largest, top, -bottom});
    }
    for (int h = 0; any_absent && h < n; ++h) {  // an absent word is no head
      for (int m = 0; !present[h] && m < n; ++m) scores(m)[h] = -kInf;
    }
  }

  // From the scores alone. Returns whether every word has a head.
  FACTORMAX_VECTOR bool project_all() {
    bool all = true;
    for (int m = 0; m < n; ++m) {
      if (present[m]) {
        const double* x = scores(m);
        double most = -kInf;
        FACTORMAX_EXTREMES(reduction(max : most))
        for (int h = 0; h < stride; ++h) most = x[h] > most ? x[h] : most;
        project(m, x, most - 1);
        all = all && count[m] > 0;
      } else {
        count[m] = 0;
      }
    }
    return all;
  }

  // The same for other scores, where the support is likely to be the one at hand. If it is not, its
  // level is still below the one sought, as that of any set of heads.
  FACTORMAX_INLINE void follow(int m, const double* x) {
    const std::int32_t* heads = head(m);
    double* values = value(m);
    const int free = count[m];
    double sum = -1, least = kInf, many = 0;
    for (int k = 0; k < free; ++k) {
      values[k] = x[heads[k]];
      sum += values[k];
      least = std::min(least, values[k]);
    }
    const double level = sum / free;
#pragma omp simd reduction(+ : many)
    for (int h = 0; h < stride; ++h) many += x[h] > level ? 1.0 : 0.0;
    if (static_cast<int>(many) != free || !(least > level)) return project(m, x, level);
    tau[m] = level;
    for (int k = 0; k < free; ++k) values[k] -= level;
  }

 private:
  // The sparsemax of the scores x of word m: its level and its support, which is above `bottom`.
  // What is below the level of the others goes, until none is. Sums are over the support alone, in
  // its order, so that words that are absent leave no trace.
  FACTORMAX_INLINE void project(int m, const double* x, double bottom) {
    std::int32_t* heads = head(m);
    double* values = value(m);
    int left = 0;
    for (int h = 0; h < n; ++h) {  // without a branch: which are above is hard to foresee
      heads[left] = h;
      values[left] = x[h];
      left += x[h] > bottom;
    }
    double level = 0;
    for (int before = 0; before != left;) {
      before = left;
      double sum = -1;
      for (int k = 0; k < before; ++k) sum += values[k];
      level = sum / before;
      left = 0;
      for (int k = 0; k < before; ++k) {
        heads[left] = heads[k];
        values[left] = values[k];
        left += values[k] > level;
      }
      left = std::max(left, 1);
    }
    for (int k = 0; k < left; ++k) values[k] -= level;
    tau[m] = level;
    count[m] = left;
  }

  Span<double> scores_;      // (n, stride)
  Span<std::int32_t> head_;  // (n, n)
  Span<double> value_;       // (n, n)
};

}  // namespace factormax
