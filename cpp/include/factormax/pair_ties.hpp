// The backward pass of a graph of pairs alone. A pair that holds tightly makes its two variables
// move together, or against each other: so the variables fall into clusters that move as one, and
// the projector (41) of docs/math.md is a mean per cluster. No system is solved.
#pragma once

#include "factormax/instance.hpp"

namespace factormax {

template <class T>
class PairTies {
 public:
  static bool apply_to(const Layout& p) { return p.num_rows == 0 && p.structured.count == 0; }

  void allocate(const Layout& p, Workspace& ws) {
    parent_ = ws.take<std::int32_t>(p.num_vars);
    sign_ = ws.take<std::int8_t>(p.num_vars);
    is_fixed_ = ws.take<std::uint8_t>(p.num_vars);
    size_ = ws.take<std::int32_t>(p.num_vars);
    sum_ = ws.take<double>(p.num_vars);
  }

  // d = J P d, docs/math.md (42b). is_free(j), is_tight(r): the sides of variables and rows.
  template <class Free, class Tight>
  void project(const Instance<T>& p, const Free& is_free, const Tight& is_tight, Span<T> d) {
    for (int j = 0; j < p.n; ++j) {
      parent_[j] = j;
      sign_[j] = 1;
      is_fixed_[j] = !is_free(j);
      size_[j] = 1;
      sum_[j] = 0;
    }
    for (int r = 0, k = 0; r < p.m; ++r, k += 2) {
      if (is_tight(r)) tie(p.col[k], p.col[k + 1], p.coef[k] * p.coef[k + 1] < 0 ? 1 : -1);
    }
    for (int j = 0; j < p.n; ++j) {
      const std::int32_t root = find_root(j);
      sum_[root] += sign_[j] * double(d[j]);
    }
    for (int j = 0; j < p.n; ++j) {
      const std::int32_t root = parent_[j];
      d[j] = is_fixed_[root] ? T(0) : T(sign_[j] * sum_[root] / size_[root]);
    }
  }

 private:
  // a moves as b does, times `sign`. What is tied to a clipped variable does not move, and neither
  // does what would have to move against itself.
  void tie(std::int32_t a, std::int32_t b, int sign) {
    std::int32_t first = find_root(a), second = find_root(b);
    const int apart = sign_[a] * sign_[b] * sign;
    if (first == second) {
      is_fixed_[first] |= apart < 0;
      return;
    }
    if (size_[first] < size_[second]) std::swap(first, second);
    parent_[second] = first;
    sign_[second] = static_cast<std::int8_t>(apart);
    size_[first] += size_[second];
    is_fixed_[first] |= is_fixed_[second];
  }

  // The variable that stands for the cluster of j, which is the parent of j from now on.
  std::int32_t find_root(std::int32_t j) {
    std::int32_t root = j;
    int sign = 1;
    for (; parent_[root] != root; root = parent_[root]) sign *= sign_[root];
    while (parent_[j] != root && j != root) {
      const std::int32_t next = parent_[j];
      const int own = sign_[j];
      parent_[j] = root;
      sign_[j] = static_cast<std::int8_t>(sign);
      sign *= own;
      j = next;
    }
    return root;
  }

  Span<std::int32_t> parent_;    // towards the variable that stands for the cluster
  Span<std::int8_t> sign_;       // whether a variable moves with its parent or against it
  Span<std::uint8_t> is_fixed_;  // of a cluster: whether none of it moves
  Span<std::int32_t> size_;      // of a cluster
  Span<double> sum_;             // over a cluster, of what its variables are to move by
};

}  // namespace factormax
