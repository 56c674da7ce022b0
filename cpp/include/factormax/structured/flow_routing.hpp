// Flow that moves within a layer of a face: along augmenting paths, so that none is negative, and
// along cycles, until one of their edges is empty.
#pragma once

#include <algorithm>
#include <limits>

#include "factormax/structured/flow_network.hpp"

namespace factormax {

class FlowRouting : public FlowNetwork {
 public:
  void allocate(const oracle::SequenceShape& shape, Workspace& ws) {
    FlowNetwork::allocate(shape, ws);
    up_ = ws.take<std::int32_t>(2 * shape.states);
  }

 protected:
  // Finds flows of layer t that are not negative, by augmenting paths from those that are not. If
  // there are none, what can't flow on is stuck at states whose other ways out are full: the edges
  // by which others flow there leave the face, for they carry nothing. Then returns false.
  bool route(int t, double least) {
    const int S = shape_.states;
    for (int i = 0; i < sources(t); ++i) need_[i] = t == 0 ? 1.0 : mu[(t - 1) * S + i];
    for (int j = 0; j < S; ++j) need_[S + j] = mu[t * S + j];
    for (const std::int32_t e : layer(t)) {
      double& to = need_[S + e % S];
      double& from = need_[e / S - t * S];
      const double most = std::min(flow[e], std::min(from, to));
      flow[e] = inside[e] ? std::max(most, 0.0) : 0.0;
      from -= flow[e];
      to -= flow[e];
    }
    for (int tries = 0;; ++tries) {
      double missing = 0;
      int end_of_queue = 0, found = -1;
      for (int k = 0; k < 2 * S; ++k) up_[k] = -2;
      for (int i = 0; i < sources(t); ++i) {
        missing += std::max(need_[i], 0.0);
        if (need_[i] <= least / S) continue;
        up_[i] = -1;
        stack_[end_of_queue++] = i;
      }
      if (missing <= least) return true;
      if (tries == 20 * S) end_of_queue = 0;  // rounding goes around in circles
      for (int begin_of_queue = 0; begin_of_queue < end_of_queue && found < 0; ++begin_of_queue) {
        const int at = stack_[begin_of_queue];
        if (at < S) {
          for (int j = 0; j < S && found < 0; ++j) {
            if (!inside[edge(t, at, j)] || up_[S + j] != -2) continue;
            up_[S + j] = at;
            if (need_[S + j] > 0) found = S + j;
            stack_[end_of_queue++] = S + j;
          }
        } else {
          for (int i = 0; i < sources(t); ++i) {
            if (up_[i] != -2 || !(flow[edge(t, i, at - S)] > 0)) continue;
            up_[i] = at;
            stack_[end_of_queue++] = i;
          }
        }
      }
      if (found < 0) break;
      double amount = need_[found];
      int at = found;
      for (; up_[at] >= 0; at = up_[at]) {
        if (at < S) amount = std::min(amount, flow[edge(t, at, up_[at] - S)]);
      }
      amount = std::min(amount, need_[at]);
      need_[at] -= amount;
      need_[found] -= amount;
      for (at = found; up_[at] >= 0; at = up_[at]) {
        if (at < S) {
          flow[edge(t, at, up_[at] - S)] -= amount;
        } else {
          flow[edge(t, up_[at], at - S)] += amount;
        }
      }
    }
    for (const std::int32_t e : layer(t)) {
      if (up_[e / S - t * S] == -2 && up_[S + e % S] != -2) inside[e] = 0;
    }
    return false;
  }

  // On the way between the ends of a new edge, every other edge loses what the new one gains.
  double shift(int t, int from, int to) {
    const int S = shape_.states;
    for (int k = 0; k < 2 * S; ++k) up_[k] = -1;
    for (int k = 0; k < tree_size_[t]; ++k) {
      up_[child_[2 * t * S + k]] = parent_[2 * t * S + k];
    }
    const int length = find_way(from, to);
    const auto at = [&](int k) { return way_edge(t, k); };
    double amount = std::numeric_limits<double>::infinity();
    int out = -1;
    for (int k = 0; k + 1 < length; k += 2) {
      const int e = at(k);
      const double value = inside[e] ? prior_[e] : 0.0;
      if (value < amount) {
        amount = value;
        out = e;
      }
    }
    for (int k = 0; k + 1 < length; ++k) {
      double& value = prior_[at(k)];
      value = std::max(value + (k % 2 == 0 ? -amount : amount), 0.0);
    }
    inside[out] = 0;
    prior_[out] = 0;
    return amount;
  }

  // Moves flow along cycles of edges that carry some, until there are no such cycles.
  void cancel_cycles() {
    const int S = shape_.states;
    for (int t = 1; t < steps_; ++t) {
      for (int k = 0; k < 2 * S; ++k) root_[k] = k;
      int positive = 0;
      for (const std::int32_t e : layer(t)) {
        if (!inside[e] || flow[e] < 0) flow[e] = 0;
        if (flow[e] > 0) ranked_[positive++] = {flow[e], e};
      }
      std::sort(ranked_.data, ranked_.data + positive);
      for (int k = 0; k < 2 * S; ++k) up_[k] = -1;
      for (int k = 0; k < positive; ++k) {
        // A forest so far: join two trees, or break the cycle that the edge would close.
        const int e = ranked_[k].edge, i = e / S - t * S, j = S + e % S;
        const int a = find(i), b = find(j);
        if (a != b) {
          root_[a] = b;
          hang(i, j);
          continue;
        }
        cancel(t, e, i, j);
      }
    }
    for (int j = 0; j < S; ++j) {
      double& value = flow[edge(0, 0, j)];
      if (!inside[edge(0, 0, j)] || value < 0) value = 0;
    }
  }

 private:
  // Puts the ends on the way from one to the other along the tree in stack_; returns how many.
  int find_way(int from, int to) {
    for (int k = 0; k < 2 * shape_.states; ++k) head_[k] = -1;  // places on the way
    int length = 0;
    for (int a = from; a >= 0; a = up_[a]) {
      head_[a] = length;
      stack_[length++] = a;
    }
    int other = to, more = 0;
    while (head_[other] < 0) {
      next_[more++] = other;
      other = up_[other];
    }
    length = head_[other] + 1;
    while (more > 0) stack_[length++] = next_[--more];
    return length;
  }

  // The edge of layer t between ends k and k + 1 of that way.
  int way_edge(int t, int k) const {
    const int S = shape_.states, a = stack_[k], b = stack_[k + 1];
    return a < S ? edge(t, a, b - S) : edge(t, b, a - S);
  }

  // Makes j the parent of i: i becomes the root of its tree first.
  void hang(int i, int j) {
    int parent = j;
    for (int at = i; at >= 0;) {
      const int next = up_[at];
      up_[at] = parent;
      parent = at;
      at = next;
    }
  }

  // The flow of edge e from i to j, which the tree connects already, moves onto the tree, or an
  // edge of the tree gives up its own.
  void cancel(int t, int e, int i, int j) {
    const int length = find_way(i, j);
    const auto at = [&](int k) { return way_edge(t, k); };
    // Raising e lowers edges 0, 2, ... of the way and raises the others; lowering it, the reverse.
    double lower = flow[e];
    int out = -1;
    for (int k = 1; k + 1 < length; k += 2) {
      if (flow[at(k)] < lower) {
        lower = flow[at(k)];
        out = k;
      }
    }
    for (int k = 0; k + 1 < length; ++k) {
      double& value = flow[at(k)];
      value = std::max(value + (k % 2 == 0 ? lower : -lower), 0.0);
    }
    flow[e] = std::max(flow[e] - lower, 0.0);
    if (out < 0) {
      flow[e] = 0;
      return;
    }
    // The edge that ran dry leaves the tree, and e takes its place.
    const int dry = at(out);
    flow[dry] = 0;
    const int a = stack_[out], b = stack_[out + 1];
    const int lower_end = up_[a] == b ? a : b;  // the child of the two
    up_[lower_end] = -1;
    // e connects the two halves: hang the half without the old root below the other.
    int top = i;
    while (up_[top] >= 0) top = up_[top];
    if (top == lower_end) {
      hang(i, j);
    } else {
      hang(j, i);
    }
  }

  Span<std::int32_t> up_;  // (2S,) the previous end on a way, or the parent in a tree
};

}  // namespace factormax
