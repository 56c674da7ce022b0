// The edges of a face of the polytope of flows through a trellis, layer by layer, and the flows on
// them.
//
// Layer t of a trellis holds the edges into step t: from the states of step t - 1, or from a single
// source before step 0. A face is a set of edges that may carry flow.
#pragma once

#include <algorithm>
#include <limits>

#include "factormax/oracle/sequence.hpp"

namespace factormax {

class FlowEdges {
 public:
  void allocate(const oracle::SequenceShape& shape, Workspace& ws) {
    shape_ = shape;
    const int S = shape.states, L = shape.length;
    const std::int64_t edges = std::int64_t(L) * S * S;
    inside = ws.take<std::uint8_t>(edges);
    flow = ws.take<double>(edges);
    list_ = ws.take<std::int32_t>(edges);
    listed_ = ws.take<std::int32_t>(L);
    is_forest_ = ws.take<std::uint8_t>(L);
    state_ = ws.take<std::int32_t>(L * S);
    states_ = ws.take<std::int32_t>(L);
    num_clean_ = -1;
  }

  // Keeps only the first `states` states from here on, as if there were no others; no edges.
  void set_states(int states) {
    begin_empty(0);  // before the numbers of edges change
    shape_.states = states;
  }

  // Starts with no edges and no flows.
  void begin_empty(int steps) {
    if (num_clean_ < 0) {
      fill(listed_, 0);
      num_clean_ = 0;
    }
    for (int t = 0; t < shape_.length; ++t) clear_layer(t);
    steps_ = steps;
    const int edges = steps * shape_.states * shape_.states;
    if (edges <= num_clean_) return;
    std::fill(inside.data + num_clean_, inside.data + edges, std::uint8_t(0));
    std::fill(flow.data + num_clean_, flow.data + edges, 0.0);
    num_clean_ = edges;
  }

  // Adds to the flow of an edge, which joins the face.
  void add(int e, double amount) {
    enter(e);
    flow[e] += amount;
  }

  Span<std::uint8_t> inside;  // (L, S, S) whether an edge is in the face
  Span<double> flow;          // (L, S, S)

  // Calls visit(e, flow) for the edges with a flow.
  template <class Visit>
  void each_flow(const Visit& visit) const {
    for (int t = 0; t < steps_; ++t) {
      for (const std::int32_t e : layer(t)) {
        if (flow[e] > 0) visit(e, flow[e]);
      }
    }
  }

  // The states of step t that a path of the face passes; none before the first step.
  Span<std::int32_t> states(int t) const {
    return {state_.data + t * shape_.states, t < 0 ? 0 : states_[t]};
  }

  int edge(int t, int i, int j) const { return (t * shape_.states + i) * shape_.states + j; }
  int sources(int t) const { return t == 0 ? 1 : shape_.states; }
  // Calls visit(a) for each end of layer t that a path of the face passes: the source and the
  // states on the left by their numbers, those on the right by S more.
  template <class Visit>
  void each_end(int t, const Visit& visit) const {
    if (t == 0) visit(0);
    for (const std::int32_t s : states(t - 1)) visit(s);
    for (const std::int32_t s : states(t)) visit(shape_.states + s);
  }
  int steps() const { return steps_; }
  const oracle::SequenceShape& shape() const { return shape_; }

  // Whether visit(place) is true of any state in use; all are visited.
  template <class Visit>
  bool any_state(const Visit& visit) const {
    bool any = false;
    for (int t = 0; t < steps_; ++t) {
      for (const std::int32_t s : states(t)) any |= visit(t * shape_.states + s);
    }
    return any;
  }

  // Drops the edges of these states.
  void drop_states(const std::uint8_t* dropped) {
    const int S = shape_.states;
    for (int t = 0; t < steps_; ++t) {
      for (const std::int32_t e : layer(t)) {
        if (dropped[t * S + e % S] || (t > 0 && dropped[e / S - S])) inside[e] = 0;
      }
    }
  }

  // Finds a path along the largest flows, and takes away as much as can flow along it. Returns how
  // much, 0 if nothing is left but rounding.
  double peel(std::int32_t* state) {
    double least = std::numeric_limits<double>::infinity();
    const int S = shape_.states;
    for (int t = 0, from = 0; t < steps_; ++t) {
      const double* out = flow.data + edge(t, from, 0);
      int to = 0;
      for (int j = 1; j < S; ++j) {
        if (out[j] > out[to]) to = j;
      }
      if (t == 0 && out[to] <= 1e-14) return 0;
      least = std::min(least, out[to]);
      state[t] = from = to;
    }
    for (int t = 0, from = 0; t < steps_; from = state[t++]) {
      double& value = flow[edge(t, from, state[t])];
      value = value == least ? 0 : value - least;
    }
    return least;
  }

 protected:
  // The edges of a layer, and those that were dropped since the last `compact`.
  Span<std::int32_t> layer(int t) const {
    return {list_.data + t * shape_.states * shape_.states, listed_[t]};
  }
  void enter(int e) {
    if (inside[e]) return;
    const int area = shape_.states * shape_.states, t = e / area;
    inside[e] = 1;
    is_forest_[t] = 0;
    list_[t * area + listed_[t]++] = e;
  }
  void clear_layer(int t) {
    for (const std::int32_t e : layer(t)) {
      inside[e] = 0;
      flow[e] = 0;
    }
    listed_[t] = 0;
    is_forest_[t] = 0;
  }
  void compact(int t) {
    const Span<std::int32_t> here = layer(t);
    int kept = 0;
    for (const std::int32_t e : here) {
      here[kept] = e;
      kept += inside[e];
      if (!inside[e]) flow[e] = 0;
    }
    if (kept < listed_[t]) is_forest_[t] = 0;
    listed_[t] = kept;
  }

  oracle::SequenceShape shape_;
  int steps_ = 0;
  Span<std::uint8_t> is_forest_;       // (L,) the layer is known to have no cycles
  Span<std::int32_t> state_, states_;  // (L, S), (L,) states in use

 private:
  int num_clean_ = -1;                // of this many edges only listed ones are inside
  Span<std::int32_t> list_, listed_;  // (L, S S), (L,) edges of a layer
};

}  // namespace factormax
