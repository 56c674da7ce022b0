// The best projective dependency tree, no arcs crossing: Eisner's algorithm, in O(n^3).
//
// eta_u as in Arborescence: (n, n), [m, h]: the head of word m is h; [m, m]: m hangs from the root,
// which stands left of the first word. Absent words (rows all -inf) are as if not in the sentence.
//
// Over positions 0 .. n, 0 the root, the best of the half-trees that span i .. j:
//
//   link[i, j]     = max_{i <= s < j} right[i, s] + left[s + 1, j]
//   to_right[i, j] = link[i, j] + score(the head of j is i)
//   to_left[i, j]  = link[i, j] + score(the head of i is j)
//   right[i, j]    = max_{i < s <= j} to_right[i, s] + right[s, j]     (i heads the others)
//   left[i, j]     = max_{i <= s < j} left[i, s] + to_left[s, j]       (j heads the others)
//
// For one i, from the last down, each s is pushed to all the j after it as soon as its own terms
// are known: one loop over contiguous rows for all three maxima. The splits are found again on the
// way back, for the spans of the best tree alone.
//
// Ties: of every span the first best split s wins, the whole sentence first, then its parts.
#pragma once

#include <cstdint>
#include <limits>

#include "factormax/oracle/arborescence.hpp"

namespace factormax::oracle {

template <class T>
class ProjectiveTree {
 public:
  static bool fits(Shape shape, std::int64_t vars, std::int64_t scores) {
    return Arborescence<T>::fits(shape, vars, scores);
  }

  void allocate(Shape shape, Workspace& ws) {
    const int words = words_ = shape[0];
    single_root_ = shape[1] != 0;
    stride_ = (words + 1 + kBlock) / kBlock * kBlock;  // at least words + 2
    const std::int64_t table = std::int64_t(words + 1) * stride_;
    present_.word = ws.take<std::int32_t>(words);
    right_ = ws.take<T>(table);
    left_ = ws.take<T>(table);
    to_right_ = ws.take<T>(table);
    to_left_ = ws.take<T>(table);
    link_ = ws.take<T>(stride_);
    head_ = ws.take<std::int32_t>(words + 1);
    todo_ = ws.take<Item>(words + 1);
  }

  int slots() const { return words_; }
  int feature_slots() const { return 0; }

  bool prepare(const T* eta_u, const InstanceInputs& = {}) {
    present_.find(eta_u, words_);
    return present_.count == 0 || present_.every_arc || (present_.every_root && !single_root_) ||
           fill_tables(eta_u) >= 0;
  }

  bool map(const T* eta_u, const T* /*eta_v*/, std::int32_t* on, std::int32_t* /*features*/) {
    const int n = words_;
    for (int m = 0; m < n; ++m) on[m] = -1;
    if (present_.count == 0) return true;
    const int only_root = fill_tables(eta_u);
    if (only_root < 0) return false;
    trace(only_root);
    for (int j = 1; j <= present_.count; ++j) {
      const int m = present_.word[j - 1];
      on[m] = m * n + (head_[j] == 0 ? m : present_.word[head_[j] - 1]);
    }
    return true;
  }

 private:
  enum Kind : std::int32_t { kRight, kLeft, kLink };
  struct Item {
    Kind kind;
    std::int32_t i, j;
  };

  // With a single root, returns the position that hangs from it, otherwise 0; -1 if there is no
  // tree.
  FACTORMAX_VECTOR int fill_tables(const T* eta_u) {
    const int n = present_.count;
    for (int i = n; i > 0; --i) fill_row(eta_u, i);
    if (!single_root_) {
      fill_row(eta_u, 0);
      return right_[n] == -kInf ? -1 : 0;
    }
    int only_root = -1;
    T most = -kInf;
    for (int j = 1; j <= n; ++j) {
      const T value = at(left_, 1, j) + score(eta_u, j, 0) + at(right_, j, n);
      if (value > most) {
        most = value;
        only_root = j;
      }
    }
    return only_root;
  }

  FACTORMAX_INLINE void fill_row(const T* eta_u, int i) {
    const int n = present_.count;
    T* link = link_.data;
    T *right = row(right_, i), *left = row(left_, i);
    T *to_right = row(to_right_, i), *to_left = row(to_left_, i);
    // Whole blocks: before the diagonal and after the last word all is -inf, and adds nothing.
    const int end = (n + 1 + kBlock) / kBlock * kBlock;
    for (int j = i / kBlock * kBlock; j < end; ++j) {
      link[j] = right[j] = left[j] = to_right[j] = to_left[j] = -kInf;
    }
    right[i] = left[i] = to_left[i] = 0;
    // Column s is carried in registers, a step ahead of the loop that stores it: to wait for it to
    // come back from memory would take longer than the loop.
    T before = 0, link_s = -kInf, right_s = -kInf, left_s = -kInf;
    for (int s = i + 1; s <= n; ++s) {
      const T *rights = row(right_, s), *lefts = row(left_, s), *to_lefts = row(to_left_, s);
      link_s = larger(link_s, before);
      const T right_arc = link_s + score(eta_u, s, i);
      const T left_arc = i > 0 ? link_s + score(eta_u, i, s) : -kInf;
      const T whole = larger(left_s, left_arc), from = before;
      to_right[s] = right_arc;
      to_left[s] = left_arc;
      before = larger(right_s, right_arc);
      link_s = larger(link[s + 1], from + lefts[s + 1]);
      right_s = larger(right[s + 1], right_arc + rights[s + 1]);
      left_s = larger(left[s + 1], whole + to_lefts[s + 1]);
      for (int j = s / kBlock * kBlock; j < end; j += kBlock) {
#pragma omp simd
        for (int k = j; k < j + kBlock; ++k) {
          link[k] = larger(link[k], from + lefts[k]);
          right[k] = larger(right[k], right_arc + rights[k]);
          left[k] = larger(left[k], whole + to_lefts[k]);
        }
      }
    }
  }

  FACTORMAX_INLINE static T larger(T a, T b) { return a > b ? a : b; }

  // No two spans on the stack share a step from word to word, so there are at most n.
  void trace(int only_root) {
    const int n = present_.count;
    int depth = 0;
    const auto push = [&](Kind kind, int i, int j) {
      if (i < j) todo_[depth++] = {kind, i, j};
    };
    if (only_root > 0) {
      head_[only_root] = 0;
      push(kLeft, 1, only_root);
      push(kRight, only_root, n);
    } else {
      push(kRight, 0, n);
    }
    while (depth > 0) {
      const Item item = todo_[--depth];
      const Kind kind = item.kind;
      const int i = item.i, j = item.j;
      if (kind == kRight) {
        const int s = 1 + split(i, j, at(right_, i, j), [&](int k) {
                        return at(to_right_, i, k + 1) + at(right_, k + 1, j);
                      });
        head_[s] = i;
        push(kLink, i, s);
        push(kRight, s, j);
      } else if (kind == kLeft) {
        const int s = split(i, j, at(left_, i, j),
                            [&](int k) { return at(left_, i, k) + at(to_left_, k, j); });
        head_[s] = j;
        push(kLink, s, j);
        push(kLeft, i, s);
      } else {
        const int s =
            split(i, j, kInf, [&](int k) { return at(right_, i, k) + at(left_, k + 1, j); });
        push(kRight, i, s);
        push(kLeft, s + 1, j);
      }
    }
  }

  // The first best split of i .. j - 1, looked for until one is as good as the target.
  template <class F>
  FACTORMAX_INLINE static int split(int i, int j, T target, F value) {
    int best = i;
    T most = value(i);
    for (int k = i + 1; k < j && most < target; ++k) {
      const T other = value(k);
      if (other > most) {
        most = other;
        best = k;
      }
    }
    return best;
  }

  // The score of i as the head of position j.
  FACTORMAX_INLINE T score(const T* eta_u, int j, int i) const {
    const int m = present_.word[j - 1];
    return eta_u[m * words_ + (i == 0 ? m : present_.word[i - 1])];
  }
  FACTORMAX_INLINE T* row(Span<T> table, int i) const { return table.data + i * stride_; }
  FACTORMAX_INLINE T& at(Span<T> table, int i, int j) const { return row(table, i)[j]; }

  static constexpr int kBlock = 8;
  static constexpr T kInf = std::numeric_limits<T>::infinity();

  int words_ = 0, stride_ = 0;
  bool single_root_ = false;
  PresentWords<T> present_;
  Span<T> right_, left_, to_right_, to_left_;  // (n + 1, stride) each
  Span<T> link_;                               // row i
  Span<std::int32_t> head_;                    // by position
  Span<Item> todo_;
};

}  // namespace factormax::oracle
