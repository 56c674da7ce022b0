// The marginals on a face, docs/math.md (62), (63) and (66).
//
// All that matters for mu is which states of a layer the edges of the face connect: flows on them,
// of either sign, exist for exactly the marginals whose sums on the left and on the right of every
// component agree. So mu is the solution of a network with a node for every component, and the
// flows follow on a spanning forest.
#pragma once

#include <algorithm>
#include <cmath>

#include "factormax/structured/flow_edges.hpp"

namespace factormax {

class FlowNetwork : public FlowEdges {
 public:
  void allocate(const oracle::SequenceShape& shape, Workspace& ws) {
    FlowEdges::allocate(shape, ws);
    const int S = shape.states, L = shape.length;
    prior_ = ws.take<double>(std::int64_t(L) * S * S);
    for (Span<double>* a : {&mu, &delta_, &base_, &left_, &right_, &node_, &give_, &inverse_}) {
      *a = ws.take<double>(L * S);
    }
    share_ = ws.take<double>(L);
    used_ = ws.take<std::uint8_t>(L * S);
    left_part_ = ws.take<std::int32_t>(L * S);
    right_part_ = ws.take<std::int32_t>(L * S);
    parts_ = ws.take<std::int32_t>(L);
    tree_size_ = ws.take<std::int32_t>(L);
    child_ = ws.take<std::int32_t>(2 * L * S);
    parent_ = ws.take<std::int32_t>(2 * L * S);
    network_ = ws.take<double>(std::int64_t(L) * S * (2 * S + 1));
    wide_ = ws.take<double>(std::int64_t(2) * S * (2 * S + 1));
    ranked_ = ws.take<Ranked>(S * S);
    for (Span<std::int32_t>* a : {&root_, &head_, &stack_}) *a = ws.take<std::int32_t>(2 * S);
    next_ = ws.take<std::int32_t>(4 * S);
    target_ = ws.take<std::int32_t>(4 * S);
    need_ = ws.take<double>(2 * S);
    zeros_ = ws.take<double>(S);
  }

  // steps: how many are present; w: the weights of the quadratic.
  void begin(int steps, const double* w) {
    steps_ = steps;
    for (int k = 0; k < steps * shape_.states; ++k) give_[k] = 1 / w[k];
    fill(zeros_, 0.0);
  }

  Span<double> mu;  // (L, S)

  // Finds mu on the face at hand.
  void solve(const double* x, const double* eta_v) {
    respond(x, [&](int t, int i, int j) { return scores(eta_v, t, i)[j]; }, 1);
  }

  // Calls visit(edge) for the edges of the forests; after `complete`.
  template <class Visit>
  void each_forest_edge(const Visit& visit) const {
    for (int t = 0; t < steps_; ++t) {
      for (int k = 0; k < tree_size_[t]; ++k) visit(forest_edge(t, k));
    }
  }

  // Grows the forests from their edges alone, for the derivative; false if no face has them.
  bool adopt_forests() {
    keep_flows();
    return grow_forests(nullptr, std::numeric_limits<double>::infinity());
  }

  bool is_vertex() const {
    for (int t = 0; t < steps_; ++t) {
      if (tree_size_[t] > 1) return false;
    }
    return true;
  }

  // mu <- the response of the marginals to a change of the scores: x, (L, S), and those of the
  // edges, score(t, i, j). docs/math.md (66).
  template <class Score>
  void differentiate(const double* x, const Score& score) {
    respond(x, score, 0);
  }
  // The same for a change of only a few of x, at places in use.
  void differentiate(const std::int32_t* place, const double* value, int count) {
    const int S = shape_.states, last = (steps_ - 1) * S;
    for (int t = 0; t < steps_; ++t) std::fill_n(node_.data + t * S, parts_[t], 0.0);
    for (int e = 0; e < count; ++e) {
      const int k = place[e];
      const double drive = give_[k] * value[e];
      node_[k / S * S + right_part_[k]] += drive;
      if (k < last) node_[(k / S + 1) * S + left_part_[k + S]] -= drive;
    }
    substitute();
    for (int t = 0; t < steps_; ++t) {
      for (const std::int32_t s : states(t)) {
        const int k = t * S + s;
        const double after = k < last ? node_[(t + 1) * S + left_part_[k + S]] : 0.0;
        mu[k] = give_[k] * (after - node_[t * S + right_part_[k]]);
      }
    }
    for (int e = 0; e < count; ++e) mu[place[e]] += give_[place[e]] * value[e];
  }
  bool uses(int place) const { return used_[place] != 0; }
  // Then calls put(e, value) with the response of the flows, on the forests.
  template <class Put>
  void differentiate_flows(const Put& put) {
    spread(0, put);
  }

 protected:
  struct Ranked {
    double flow;
    std::int32_t edge;
    bool operator<(const Ranked& other) const {
      return flow != other.flow ? flow > other.flow : edge < other.edge;
    }
  };

  const double* scores(const double* eta_v, int t, int i) const {
    return t > 0 ? eta_v + shape_.transition_at(t, i) : zeros_.data;
  }

  // Ends of a forest's edge: numbers below S are on the left, the others on the right.
  int forest_edge(int t, int k) const {
    const int S = shape_.states, a = child_[2 * t * S + k], b = parent_[2 * t * S + k];
    return a < S ? edge(t, a, b - S) : edge(t, b, a - S);
  }

  void keep_flows() {
    for (int t = 0; t < steps_; ++t) {
      compact(t);
      for (const std::int32_t e : layer(t)) prior_[e] = std::max(flow[e], 0.0);
    }
  }

  // Grows a spanning forest of each layer from the edges with the most prior flow, and finds its
  // components. Edges that disagree with the potentials of their component by more than `tolerance`
  // leave the face. False if the face has no path.
  bool grow_forests(const double* eta_v, double tolerance) {
    if (!prune()) return false;
    const int S = shape_.states;
    for (int t = 0; t < steps_; ++t) {
      if (is_forest_[t]) continue;
      int count = 0;
      for (const std::int32_t e : layer(t)) ranked_[count++] = {prior_[e], e};
      // Which edges come first matters only if there are cycles.
      is_forest_[t] = count < sources(t) + S && span(t, count) == count;
      if (!is_forest_[t]) {
        std::sort(ranked_.data, ranked_.data + count);
        span(t, count);
      }
      number_parts(t);
      if (is_forest_[t] || eta_v == nullptr) continue;
      set_potentials(t, [&](int i, int j) { return scores(eta_v, t, i)[j]; });
      for (int k = 0; k < count; ++k) {
        const int i = ranked_[k].edge / S - t * S, j = ranked_[k].edge % S;
        const double off = left_[t * S + i] - right_[t * S + j] - scores(eta_v, t, i)[j];
        if (std::fabs(off) > tolerance) inside[ranked_[k].edge] = 0;
      }
    }
    factorise();
    return true;
  }

  int find(int a) const {
    while (root_[a] != a) a = root_[a] = root_[root_[a]];
    return a;
  }

  // Finds the flows with these marginals: those on cycles stay as they were (none, if total is 0),
  // the forest carries the rest, from the leaves inwards. Calls put(e, value) for each edge with a
  // flow.
  template <class Put>
  void spread(double total, const Put& put) {
    const int S = shape_.states;
    const bool whole = total != 0;
    for (int t = 0; t < steps_; ++t) {
      if (t == 0) need_[0] = total;
      for (const std::int32_t s : states(t - 1)) need_[s] = mu[(t - 1) * S + s];
      for (const std::int32_t s : states(t)) need_[S + s] = mu[t * S + s];
      if (whole) {
        for (int k = 0; k < tree_size_[t]; ++k) prior_[forest_edge(t, k)] = 0;
        for (const std::int32_t e : layer(t)) {
          const double kept = inside[e] ? prior_[e] : 0.0;
          put(e, kept);
          if (kept == 0) continue;
          need_[e / S - t * S] -= kept;
          need_[S + e % S] -= kept;
        }
      }
      for (int k = tree_size_[t] - 1; k >= 0; --k) {
        const double value = need_[child_[2 * t * S + k]];
        need_[parent_[2 * t * S + k]] -= value;
        put(forest_edge(t, k), value);
      }
    }
  }

  double level() const { return node_[0]; }

  Span<double> prior_;                         // (L, S, S) flows that the forests prefer
  Span<double> delta_;                         // (L, S) W mu less its mean over the states in use
  Span<double> share_;                         // (L,) sum of `give` over the states in use
  Span<double> left_, right_;                  // (L, S) potentials of a layer's ends
  Span<std::int32_t> left_part_, right_part_;  // (L, S) their components
  Span<std::int32_t> parts_, tree_size_;       // (L,) components, edges of the forest
  Span<std::int32_t> child_, parent_;          // (L, 2S) its edges, parents first
  Span<Ranked> ranked_;                        // (S S,)
  mutable Span<std::int32_t> root_;            // (2S,) scratch from here on
  Span<std::int32_t> head_, stack_, next_;
  Span<double> need_;

 private:
  // Drops edges that no path of the face uses; false if there is no path.
  bool prune() {
    const int S = shape_.states;
    std::fill_n(used_.data, steps_ * S, std::uint8_t(0));
    for (int t = 0; t < steps_; ++t) {
      std::uint8_t* reached = used_.data + t * S;
      for (const std::int32_t e : layer(t)) {
        inside[e] = inside[e] && (t == 0 || used_[e / S - S]);
        reached[e % S] |= inside[e];
      }
    }
    for (int t = steps_ - 1; t >= 0; --t) {
      std::uint8_t *open = used_.data + t * S, *leads = open - S;
      states_[t] = 0;
      for (int s = 0; s < S; ++s) {
        state_[t * S + states_[t]] = s;
        states_[t] += open[s];
      }
      if (t > 0) std::fill_n(leads, S, std::uint8_t(0));
      for (const std::int32_t e : layer(t)) {
        inside[e] &= open[e % S];
        if (t > 0) used_[e / S - S] |= inside[e];
      }
      compact(t);
    }
    return states_[steps_ - 1] > 0;
  }

  // Joins the ends of the first `count` edges in `ranked_`, which are of layer t, except where that
  // closes a cycle; returns how many it joined.
  int span(int t, int count) {
    const int S = shape_.states;
    each_end(t, [&](int a) {
      root_[a] = a;
      head_[a] = -1;
    });
    int links = 0;
    for (const Ranked& ranked : ranked_.first(count)) {
      const int i = ranked.edge / S - t * S, j = S + ranked.edge % S;
      const int a = find(i), b = find(j);
      if (a == b) continue;
      root_[a] = b;
      link(i, j, links++);
      link(j, i, links++);
    }
    return links / 2;
  }

  void link(int from, int to, int place) {
    target_[place] = to;
    next_[place] = head_[from];
    head_[from] = place;
  }

  // Walks every tree from a state on the left: the components' numbers, and the edges in an order
  // in which children come after their parents.
  void number_parts(int t) {
    const int S = shape_.states;
    int parts = 0, size = 0;
    std::int32_t *child = child_.data + 2 * t * S, *parent = parent_.data + 2 * t * S;
    const auto part = [&](int a) -> std::int32_t& {
      return a < S ? left_part_[t * S + a] : right_part_[t * S + a - S];
    };
    each_end(t, [&](int a) { part(a) = -1; });
    each_end(t, [&](int root) {
      if (part(root) >= 0) return;
      int top = 0;
      stack_[top++] = root;
      part(root) = parts;
      while (top > 0) {
        const int at = stack_[--top];
        for (int k = head_[at]; k >= 0; k = next_[k]) {
          const int to = target_[k];
          if (part(to) >= 0) continue;
          part(to) = parts;
          child[size] = to;
          parent[size++] = at;
          stack_[top++] = to;
        }
      }
      ++parts;
    });
    parts_[t] = parts;
    tree_size_[t] = size;
  }

  // left - right = score on the edges of the forest
  template <class Score>
  void set_potentials(int t, const Score& score) {
    const int S = shape_.states;
    double *left = left_.data + t * S, *right = right_.data + t * S;
    left[0] = 0;
    for (const std::int32_t s : states(t - 1)) left[s] = 0;
    const std::int32_t *child = child_.data + 2 * t * S, *parent = parent_.data + 2 * t * S;
    for (int k = 0; k < tree_size_[t]; ++k) {
      const int a = child[k], b = parent[k];
      if (a < S) {
        left[a] = right[b - S] + score(a, b - S);
      } else {
        right[a - S] = left[b] - score(b, a - S);
      }
    }
  }

  // The network of components, last layer first: pivots are sums of what is left, so that nothing
  // is subtracted. docs/math.md (63).
  FACTORMAX_VECTOR void factorise() {
    const int S = shape_.states;
    double* X = wide_.data;
    int before = 1;  // width of what the last layer left in the upper left corner of X
    for (int t = 0; t < steps_; ++t) {
      double sum = 0;
      for (const std::int32_t s : states(t)) sum += give_[t * S + s];
      share_[t] = sum;
    }
    for (int t = steps_ - 1; t >= 0; --t) {
      const int own = parts_[t], others = t > 0 ? parts_[t - 1] : 0;
      const int n = own + others, width = n + 1;  // the last column is the ground
      if (t == steps_ - 1) {
        std::fill_n(X, std::int64_t(n) * width, 0.0);
        for (const std::int32_t s : states(t)) {
          X[right_part_[t * S + s] * width + n] += give_[t * S + s];
        }
      } else {
        widen(X, own, before, n, width);
      }
      for (const std::int32_t s : states(t - 1)) {
        const int k = (t - 1) * S + s;
        X[left_part_[t * S + s] * width + own + right_part_[k]] += give_[k];
      }
      for (int k = 0; k < own; ++k) {
        const double* row = X + std::int64_t(k) * width;
        double* norm = network_row(t, k);
        double sum = 0;
#pragma omp simd reduction(+ : sum)
        for (int j = k + 1; j < width; ++j) sum += row[j];
        const double inverse = inverse_[t * S + k] = 1 / sum;
#pragma omp simd
        for (int j = k + 1; j < width; ++j) norm[j] = row[j] * inverse;
        for (int i = k + 1; i < n; ++i) {
          const double part = norm[i];
          if (part == 0) continue;
          double* other = X + std::int64_t(i) * width;
#pragma omp simd
          for (int j = i + 1; j < width; ++j) other[j] += part * row[j];
        }
      }
      // What is left among the components of the layer before moves to the corner.
      before = others + 1;
      for (int i = 0; i < others; ++i) {
        const double* from = X + std::int64_t(own + i) * width + own;
        double* to = X + std::int64_t(i) * before;
        for (int j = i + 1; j < before; ++j) to[j] = from[j];
      }
    }
  }

  // From `own` rows of `before` numbers to `n` rows of `width`, the ground last.
  FACTORMAX_INLINE void widen(double* X, int own, int before, int n, int width) const {
    for (int i = own; i < n; ++i) std::fill_n(X + std::int64_t(i) * width, width, 0.0);
    for (int i = own - 1; i >= 0; --i) {
      const double* from = X + std::int64_t(i) * before;
      double* to = X + std::int64_t(i) * width;
      const double ground = from[before - 1];
      for (int j = own - 1; j > i; --j) to[j] = from[j];
      for (int j = own; j < n; ++j) to[j] = 0;
      to[n] = ground;
    }
  }

  double* network_row(int t, int k) const {
    const int S = shape_.states;
    return network_.data + (std::int64_t(t) * S + k) * (2 * S + 1);
  }

  // mu for the scores x and those of the edges, with `total` flowing through the trellis; 0 where
  // no edge leads.
  template <class Score>
  void respond(const double* x, const Score& score, double total) {
    const int S = shape_.states;
    for (int t = 0; t < steps_; ++t) {
      std::fill_n(node_.data + t * S, parts_[t], 0.0);
      set_potentials(t, [&](int i, int j) { return score(t, i, j); });
    }
    for (int t = 0; t < steps_; ++t) {
      const double even = total / share_[t];
      const bool last = t == steps_ - 1;
      for (const std::int32_t s : states(t)) {
        const int k = t * S + s;
        base_[k] = x[k] - right_[k] + (last ? 0.0 : left_[k + S]);
        const double drive = give_[k] * (base_[k] + even);
        // All that flows comes from the source: `even` is there already.
        node_[t * S + right_part_[k]] += t == 0 ? give_[k] * base_[k] : drive;
        if (!last) node_[(t + 1) * S + left_part_[k + S]] -= drive;
      }
    }
    substitute();
    fill(mu.first(steps_ * S), 0.0);
    for (int t = 0; t < steps_; ++t) {
      const double even = total / share_[t];
      for (const std::int32_t s : states(t)) {
        const int k = t * S + s;
        const double after = t + 1 < steps_ ? node_[(t + 1) * S + left_part_[k + S]] : 0.0;
        delta_[k] = base_[k] + after - node_[t * S + right_part_[k]];
        mu[k] = give_[k] * (even + delta_[k]);
      }
    }
  }

  FACTORMAX_VECTOR void substitute() {
    const int S = shape_.states;
    for (int t = steps_ - 1; t >= 0; --t) {
      const int own = parts_[t], others = t > 0 ? parts_[t - 1] : 0;
      double *p = node_.data + t * S, *q = p - S;
      for (int k = 0; k < own; ++k) {
        const double *norm = network_row(t, k), value = p[k];
        for (int j = k + 1; j < own; ++j) p[j] += norm[j] * value;
        for (int j = 0; j < others; ++j) q[j] += norm[own + j] * value;
      }
    }
    for (int t = 0; t < steps_; ++t) {
      const int own = parts_[t], others = t > 0 ? parts_[t - 1] : 0;
      double *p = node_.data + t * S, *q = p - S;
      for (int k = own - 1; k >= 0; --k) {
        const double* norm = network_row(t, k);
        double value = p[k] * inverse_[t * S + k];
        for (int j = k + 1; j < own; ++j) value += norm[j] * p[j];
        for (int j = 0; j < others; ++j) value += norm[own + j] * q[j];
        p[k] = value;
      }
    }
  }

  Span<double> give_;            // (L, S) 1 / w
  Span<std::uint8_t> used_;      // (L, S) states that a path of the face passes
  Span<double> base_;            // (L, S)
  Span<double> node_, inverse_;  // (L, S) potentials of components; 1 / pivots
  Span<double> network_, wide_;  // rows of the eliminated network
  Span<std::int32_t> target_;    // scratch
  Span<double> zeros_;
};

}  // namespace factormax
