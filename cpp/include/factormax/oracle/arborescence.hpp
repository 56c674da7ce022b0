// The best dependency tree, crossing arcs allowed: the maximum arborescence, in O(n^2).
//
// eta_u: (n, n), [m, h]: the head of word m is h; [m, m]: m hangs from the root. A word whose row
// is all -inf is absent, and no word's head.
//
// Edmonds' algorithm, grown along a path (Gabow, Galil, Spencer, Tarjan 1986): from the last word
// of the path step to its best head, until the root or a finished word ends the path; a step back
// into the path closes a cycle, which becomes one node whose arcs are scored by what they gain over
// the arc of the cycle they replace. Without cycles this is one argmax for each word.
//
// With a single root, an arc from the root counts as worse than any other, whatever the scores. No
// cycle holds such an arc, so this order needs no penalty: the root is taken where nothing else is
// left, and a second time only if there is no tree.
//
// Ties: a word, and a cycle, takes its first best head in the order of the words, where the root
// stands at the word's own place, for a cycle at the end. Where an arc can enter a cycle at several
// places, the one nearest to the start of the path wins; paths start at the first unfinished word.
// With `single_root` the same tree wins if it has one root.
#pragma once

#include <cstdint>
#include <limits>

#include "factormax/oracle/inputs.hpp"
#include "factormax/vector_ops.hpp"

namespace factormax::oracle {

// The first of the largest entries, n >= 1.
template <class X>
FACTORMAX_INLINE int first_largest(const X* x, int n) {
  X most = x[0];
  FACTORMAX_EXTREMES(reduction(max : most))
  for (int i = 0; i < n; ++i) most = x[i] > most ? x[i] : most;
  // Whole blocks first: the exit is then tested once per eight.
  int i = 0;
  for (; i + 8 < n; i += 8) {
    int found = 0;
#pragma omp simd reduction(+ : found)
    for (int k = 0; k < 8; ++k) found += x[i + k] == most;
    if (found > 0) break;
  }
  while (i + 1 < n && x[i] != most) ++i;
  return i;
}

// The words of a sentence whose rows are not all -inf.
template <class T>
struct PresentWords {
  Span<std::int32_t> word;
  int count = 0;
  bool every_arc = false;   // no arc between two of them is -inf
  bool every_root = false;  // no arc from the root is

  FACTORMAX_VECTOR void find(const T* eta_u, int n) {
    const T inf = std::numeric_limits<T>::infinity();
    T least = inf;  // lowest score of the present rows
    count = 0;
    for (int m = 0; m < n; ++m) {
      const T* row = eta_u + m * n;
      T most = -inf, lowest = inf;
      FACTORMAX_EXTREMES(reduction(max : most) reduction(min : lowest))
      for (int h = 0; h < n; ++h) {
        most = row[h] > most ? row[h] : most;
        lowest = row[h] < lowest ? row[h] : lowest;
      }
      if (most == -inf) continue;
      word[count++] = m;
      least = lowest < least ? lowest : least;
    }
    every_arc = every_root = true;
    if (least != -inf) return;
    for (int i = 0; i < count; ++i) {
      const T* row = eta_u + word[i] * n;
      every_root = every_root && row[word[i]] != -inf;
      for (int j = 0; j < count && every_arc; ++j) every_arc = row[word[j]] != -inf;
    }
  }
};

template <class T>
class Arborescence {
 public:
  // shape: words, and whether there is a single root.
  static bool fits(Shape shape, std::int64_t vars, std::int64_t scores) {
    return is_shape(shape, 2) && shape[0] > 0 && vars == std::int64_t(shape[0]) * shape[0] &&
           scores == 0;
  }

  void allocate(Shape shape, Workspace& ws) {
    const int words = words_ = shape[0];
    single_root_ = shape[1] != 0;
    stride_ = (words + 8) / 8 * 8;  // at least words + 1
    present_.word = ws.take<std::int32_t>(words);
    gathered_ = ws.take<T>(std::int64_t(words) * words);
    merged_ = ws.take<double>(std::int64_t(words) * stride_);
    score_ = ws.take<double>(2 * words);
    head_ = ws.take<std::int32_t>(2 * words);
    part_ = ws.take<std::int32_t>(2 * words);
    part_begin_ = ws.take<std::int32_t>(words + 1);
    path_ = ws.take<std::int32_t>(words);
    path_begin_ = ws.take<std::int32_t>(words);
    path_words_ = ws.take<std::int32_t>(words);
    place_ = ws.take<std::int32_t>(words);
  }

  int slots() const { return words_; }
  int feature_slots() const { return 0; }

  bool prepare(const T* eta_u, const InstanceInputs& = {}) {
    present_.find(eta_u, words_);
    return present_.every_arc || (present_.every_root && !single_root_) || solve(eta_u);
  }

  bool map(const T* eta_u, const T* /*eta_v*/, std::int32_t* on, std::int32_t* /*features*/) {
    const int n = words_;
    for (int m = 0; m < n; ++m) on[m] = -1;
    if (!solve(eta_u)) return false;
    for (int i = 0; i < present_.count; ++i) {
      const int m = present_.word[i];
      on[m] = m * n + (head_[i] == present_.count ? m : present_.word[head_[i]]);
    }
    return true;
  }

 private:
  enum Place { kUnseen = -1, kDone = -2 };

  // Leaves the heads of the present words in `head_`, numbered as in `present_`, the root last.
  bool solve(const T* eta_u) {
    if (present_.count == 0) return true;
    const T* scores = present_.count == words_ ? eta_u : gather(eta_u);
    // Most often the best tree has one root anyway.
    const int roots = grow(scores, false);
    return single_root_ && roots > 1 ? grow(scores, true) == 1 : roots > 0;
  }

  const T* gather(const T* eta_u) {
    const int n = present_.count;
    const std::int32_t* word = present_.word.data;
    for (int i = 0; i < n; ++i) {
      for (int j = 0; j < n; ++j) gathered_[i * n + j] = eta_u[word[i] * words_ + word[j]];
    }
    return gathered_.data;
  }

  // Nodes 0 .. n - 1 are words, those after them cycles. Returns how many words hang from the root,
  // 0 if there is no tree; stops at the second if only one may.
  FACTORMAX_VECTOR int grow(const T* scores, bool root_last) {
    const int n = present_.count;
    nodes_ = n;
    part_begin_[0] = 0;
    for (int m = 0; m < n; ++m) place_[m] = kUnseen;
    int roots = 0;
    for (int start = 0; start < n; ++start) {
      if (place_[start] != kUnseen) continue;
      int last = -1, length = 0;  // last node of the path, and its length in words
      for (int next = start;;) {
        path_[++last] = next;
        path_begin_[last] = length;
        path_words_[length++] = next;
        place_[next] = last;
        enter_word(scores, next, root_last);
        int head = head_[next];
        while (head != n && place_[head] >= 0) {
          const int first = place_[head];
          head = contract(scores, first, last, length, root_last);
          last = first;
        }
        if (score_[path_[last]] == -kInf) return 0;
        if (head == n && ++roots > 1 && single_root_) return roots;
        if (head == n || place_[head] == kDone) break;
        next = head;
      }
      for (int i = 0; i < length; ++i) place_[path_words_[i]] = kDone;
    }
    expand(scores);
    return roots;
  }

  // The best arc into word m.
  FACTORMAX_INLINE void enter_word(const T* scores, int m, bool root_last) {
    const int n = present_.count;
    const T* row = scores + m * n;
    int head = first_largest(row, n);
    if (head == m && root_last && n > 1) {
      const int before = m > 0 ? first_largest(row, m) : m + 1;
      const int after = m + 1 < n ? m + 1 + first_largest(row + m + 1, n - m - 1) : before;
      const int other = row[before] >= row[after] ? before : after;
      if (row[other] != -kInf) head = other;
    }
    score_[m] = row[head];
    head_[m] = head == m || row[head] == -kInf ? n : head;  // no arc enters it: no way on
  }

  // The nodes first .. last of the path are a cycle: make them one node, at `first`, and find the
  // best arc into it. Returns the head.
  FACTORMAX_INLINE int contract(const T* scores, int first, int last, int length, bool root_last) {
    const int n = present_.count, node = nodes_++;
    double* row = merged(node);
    int part = part_begin_[node - n];
    for (int p = first; p <= last; ++p) {
      const int c = path_[p];
      part_[part++] = c;
      // In the row of a word c the arc from the root stands at c, which is closed below.
      if (c < n) {
        gain(scores + c * n, score_[c], n, row, p == first);
      } else {
        gain(merged(c), score_[c], n, row, p == first);
      }
      const double from_root = score_into(scores, c, n) - score_[c];
      if (p == first || from_root > row[n]) row[n] = from_root;
    }
    part_begin_[node - n + 1] = part;
    for (int i = path_begin_[first]; i < length; ++i) {
      const int w = path_words_[i];
      place_[w] = first;
      row[w] = -kInf;
    }
    path_[first] = node;
    const int most = first_largest(row, n);
    const int head = row[most] < row[n] && (!root_last || row[most] == -kInf) ? n : most;
    score_[node] = row[head];
    head_[node] = score_[node] == -kInf ? n : head;
    return head_[node];
  }

  template <class X>
  FACTORMAX_INLINE static void gain(const X* from, double replaced, int n, double* row,
                                    bool is_first) {
    if (is_first) {
#pragma omp simd
      for (int h = 0; h < n; ++h) row[h] = from[h] - replaced;
    } else {
#pragma omp simd
      for (int h = 0; h < n; ++h) {
        const double value = from[h] - replaced;
        row[h] = value > row[h] ? value : row[h];
      }
    }
  }

  // The arc into a cycle replaces the arc of the part it enters at. A cycle is numbered after its
  // parts, so that going down opens the outermost first.
  FACTORMAX_INLINE void expand(const T* scores) {
    const int n = present_.count;
    for (int node = nodes_ - 1; node >= n; --node) {
      const int head = head_[node];
      int entered = -1;
      double most = -kInf;
      for (int i = part_begin_[node - n]; i < part_begin_[node - n + 1]; ++i) {
        const double value = score_into(scores, part_[i], head) - score_[part_[i]];
        if (entered < 0 || value > most) {
          most = value;
          entered = part_[i];
        }
      }
      head_[entered] = head;
    }
  }

  FACTORMAX_INLINE double score_into(const T* scores, int node, int head) {
    const int n = present_.count;
    if (node >= n) return merged(node)[head];
    return scores[node * n + (head == n ? node : head)];
  }

  FACTORMAX_INLINE double* merged(int node) {
    return merged_.data + (node - present_.count) * stride_;
  }

  static constexpr double kInf = std::numeric_limits<double>::infinity();

  int words_ = 0, stride_ = 0, nodes_ = 0;
  bool single_root_ = false;
  PresentWords<T> present_;
  Span<T> gathered_;         // (n, n): the scores of the present words, where some are absent
  Span<double> merged_;      // (n, stride): the arcs into each cycle, by head, the root last
  Span<double> score_;       // of each node: the score of the best arc into it,
  Span<std::int32_t> head_;  // and the head of that arc
  Span<std::int32_t> part_, part_begin_;               // the nodes of each cycle
  Span<std::int32_t> path_, path_begin_, path_words_;  // nodes, and the words in them, in order
  Span<std::int32_t> place_;  // per word: the place of its node in the path, or a Place
};

}  // namespace factormax::oracle
