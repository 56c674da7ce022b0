// Sets of words that lack a head outside, found fast: guesses that spare most of the flows.
#pragma once

#include <algorithm>

#include "factormax/vector_ops.hpp"

namespace factormax {

// By docs/math.md (60) a set S has |S| - 1 less what its words have of one another to spare. A word
// counts by what it has of the others and they of it. Large sets are what is left when the words
// that count least are taken away one by one; small ones grow from a word, each time by the one
// that counts most. All in float: a set that lacks little is left to flows.
class TreeGuesses {
 public:
  void allocate(int words, Workspace& ws) {
    n_ = words;
    stride_ = (words + 7) / 8 * 8;
    weight_ = ws.take<float>(std::int64_t(words) * stride_);
    for (Span<float>* a : {&degree_, &heaviest_, &reach_}) *a = ws.take<float>(stride_);
    order_ = ws.take<std::int32_t>(words);
    for (Span<std::uint8_t>* a : {&member, &done_}) *a = ws.take<std::uint8_t>(words);
  }

  static constexpr float kLeast = 1e-3f;  // a set that lacks less is not looked for

  Span<std::uint8_t> member;  // (n,) of the set that was found

  // heads(m, visit), present(m): as for TreeCuts. report(): called for each set that is found;
  // returns whether it is new.
  template <class Heads, class Present, class Report>
  void find(const Heads& heads, const Present& present, const Report& report) {
    fill(weight_, 0.0f);
    for (int m = 0; m < n_; ++m) {
      done_[m] = !present(m);
      heads(m, [&](int h, double value) {
        if (h == m) return;
        row(m)[h] += static_cast<float>(value);
        row(h)[m] += static_cast<float>(value);
      });
    }
    if (const int size = shrink()) keep(size, report);
    for (int m = 0; m < n_; ++m) {
      if (done_[m] || degree_[m] <= 1 || heaviest_[m] < 1 - kGiveUp) continue;
      const int size = grow(m);
      const bool is_new = size > 0 && keep(size, report);
      // Its first partner would hardly come to anything else.
      const int done = is_new ? size : size == 0 ? std::min(grown_, 2) : 0;
      for (int k = 0; k < done; ++k) done_[order_[k]] = 1;
    }
  }

 private:
  static constexpr float kFar = 1e9f;
  static constexpr float kGiveUp = 0.35f;  // a set that has more to spare comes to nothing
  static constexpr int kLarge = 5;         // words: sets beyond are found by shrinking

  float* row(int m) const { return weight_.data + std::int64_t(m) * stride_; }

  template <class Report>
  bool keep(int size, const Report& report) {
    fill(member, std::uint8_t(0));
    for (int k = 0; k < size; ++k) member[order_[k]] = 1;
    return report();
  }

  // Where `value` is in a row.
  FACTORMAX_INLINE int place(const float* row, float value) const {
    int at = 0;
#pragma omp simd reduction(max : at)
    for (int h = 0; h < stride_; ++h) at = row[h] == value && h > at ? h : at;
    return at;
  }

  // How many of order_ lack the most, 0 if none lack any. Also what each word counts in all.
  FACTORMAX_VECTOR int shrink() {
    float* left = reach_.data;
    float total = 0;
    int size = 0;
    fill(degree_, kFar);
    for (int m = 0; m < n_; ++m) {
      if (done_[m]) continue;
      const float* w = row(m);
      float sum = 0, most = 0;
      FACTORMAX_EXTREMES(reduction(+ : sum) reduction(max : most))
      for (int h = 0; h < stride_; ++h) {
        sum += w[h];
        most = w[h] > most ? w[h] : most;
      }
      degree_[m] = sum;
      heaviest_[m] = most;
      total += sum;
      ++size;
    }
    std::copy_n(degree_.data, stride_, left);
    float spare = float(size - 1) - total / 2, least = -kLeast;
    int best = spare < least ? size : 0;
    if (best > 0) least = spare;
    while (size > 0 && spare <= kGiveUp) {
      float low = kFar;
      FACTORMAX_EXTREMES(reduction(min : low))
      for (int h = 0; h < stride_; ++h) low = left[h] < low ? left[h] : low;
      const int gone = place(left, low);
      order_[--size] = gone;
      left[gone] = kFar;
      spare += low - 1;
      const float* w = row(gone);
#pragma omp simd
      for (int h = 0; h < stride_; ++h) left[h] -= w[h];
      if (size > 1 && spare < least - 0.1f * kLeast) {
        least = spare;
        best = size;
      }
    }
    for (int m = 0; m < n_ && size > 0; ++m) {
      if (left[m] < kFar / 2) order_[--size] = m;
    }
    return best;
  }

  // The same, of those that grow from word m.
  FACTORMAX_VECTOR int grow(int m) {
    float* reach = reach_.data;
    std::copy_n(row(m), stride_, reach);
    reach[m] = -kFar;
    float spare = 0, least = -kLeast;
    int best = 0, size = 0;
    order_[size++] = m;
    while (size < std::min(n_, kLarge)) {
      float high = -kFar;
      FACTORMAX_EXTREMES(reduction(max : high))
      for (int h = 0; h < stride_; ++h) high = reach[h] > high ? reach[h] : high;
      if (best > 0 && high < 1) break;
      spare += 1 - high;
      if (spare > kGiveUp) break;
      const int next = place(reach, high);
      order_[size++] = next;
      reach[next] = -kFar;
      const float* w = row(next);
#pragma omp simd
      for (int h = 0; h < stride_; ++h) reach[h] += w[h];
      if (spare < least) {
        least = spare;
        best = size;
      }
    }
    grown_ = size;
    return best;
  }

  int n_ = 0, stride_ = 0;
  int grown_ = 0;                  // how many of order_ the last set came to
  Span<float> weight_;             // (n, stride) what two words have of one another
  Span<float> degree_, heaviest_;  // (stride,) sums and largest of the rows
  Span<float> reach_;              // (stride,)
  Span<std::int32_t> order_;       // (n,)
  Span<std::uint8_t> done_;        // (n,) absent, or in a set that was found
};

}  // namespace factormax
