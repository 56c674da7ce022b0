// A face of the polytope of flows through a trellis, docs/math.md (62)-(66), and pivots from one
// face to the next.
//
// Layer t of a trellis holds the edges into step t: from the states of step t - 1, or from a single
// source before step 0. A face is a set of edges that may carry flow. All that bears on mu is which
// states of a layer its edges connect: flows on them exist, if of either sign, for exactly the
// marginals whose sums on the left and on the right of every component agree. So mu is the solution
// of a network with a node for every component, and the flows follow on a spanning forest.
#pragma once

#include <limits>

#include "factormax/oracle/max_plus.hpp"
#include "factormax/oracle/sequence.hpp"
#include "factormax/problem.hpp"

namespace factormax {

class FlowFace {
 public:
  void allocate(const oracle::SequenceShape& shape, Workspace& ws) {
    shape_ = shape;
    const int S = shape.states, L = shape.length;
    const std::int64_t edges = std::int64_t(L) * S * S;
    inside = ws.take<std::uint8_t>(edges);
    flow = ws.take<double>(edges);
    prior_ = ws.take<double>(edges);
    list_ = ws.take<std::int32_t>(edges);
    listed_ = ws.take<std::int32_t>(L);
    is_forest_ = ws.take<std::uint8_t>(L);
    state_ = ws.take<std::int32_t>(L * S);
    states_ = ws.take<std::int32_t>(L);
    num_clean_ = -1;
    for (Span<double>* a :
         {&mu, &delta_, &base_, &left_, &right_, &node_, &reduced_, &best_, &give_, &inverse_}) {
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
    for (Span<std::int32_t>* a : {&root_, &head_, &stack_, &up_}) *a = ws.take<std::int32_t>(2 * S);
    next_ = ws.take<std::int32_t>(4 * S);
    target_ = ws.take<std::int32_t>(4 * S);
    need_ = ws.take<double>(2 * S);
    zeros_ = ws.take<double>(S);
    path_ = ws.take<std::int32_t>(L);
  }

  // From here on with the first so many states alone, as if there were no others; no edges.
  void set_states(int states) {
    begin_empty(0);  // before the numbers of edges change
    shape_.states = states;
  }

  // Steps that are there, and the weights of the quadratic.
  void begin(int steps, const double* w) {
    steps_ = steps;
    for (int k = 0; k < steps * shape_.states; ++k) give_[k] = 1 / w[k];
    fill(zeros_, 0.0);
  }

  // No edges, no flows.
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

  Span<std::uint8_t> inside;  // (L, S, S) whether an edge is one of the face
  Span<double> flow;          // (L, S, S)
  Span<double> mu;            // (L, S)

  // visit(e, flow): the edges with a flow
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
  // visit(a): each end of layer t that a path of the face passes, the source and the states on the
  // left by their numbers, those on the right by S more.
  template <class Visit>
  void each_end(int t, const Visit& visit) const {
    if (t == 0) visit(0);
    for (const std::int32_t s : states(t - 1)) visit(s);
    for (const std::int32_t s : states(t)) visit(shape_.states + s);
  }
  int steps() const { return steps_; }
  const oracle::SequenceShape& shape() const { return shape_; }

  // Pivots from the face and the flows at hand until they are optimal for x (centred, with the
  // scores of the ends) and the scores eta_v of size `size`; `most` rounds at most. docs/math.md
  // (64).
  enum class Pivots { optimal, open, stopped };
  enum class Holds { all, changed, stuck };  // what stands beside the flows
  // beside: see `NothingBeside`.
  template <class Beside>
  Pivots pivot(const double* x, const double* eta_v, double size, int most, std::int64_t& rounds,
               Control& control, bool may_poll, Beside&& beside) {
    const double least = kNegative * std::max(1.0, size);
    const double near = 1e-14 * (8 + steps_) * size, close = kGap * size;
    keep_flows();
    for (int round = 1;; ++round) {
      ++rounds;
      if (!grow_forests(eta_v, kCycle * size)) return Pivots::open;
      beside.settle(*this);
      solve(x, eta_v);
      const Holds holds = beside.hold(*this);
      const bool held = holds == Holds::all;
      spread(1, [&](int e, double value) { flow[e] = value; });
      const double gap = price(x, eta_v) - level();
      if (!std::isfinite(gap)) return Pivots::open;
      trace(eta_v, 1e-13 * size);
      const bool better = gap > near && !holds_path();
      const bool dropped = drop_negative(least);
      if (!better && held && !dropped) return Pivots::optimal;
      if (!better && !dropped && holds == Holds::stuck) return Pivots::open;
      if (round == most) return gap <= close && held && !dropped ? Pivots::optimal : Pivots::open;
      if (control.stopped(may_poll)) return Pivots::stopped;
      keep_flows();
      if (better) enter_path();
    }
  }

  // What may stand beside the flows: it changes x so that it holds on the face, and tells whether
  // it does for mu. Nothing, here.
  struct NothingBeside {
    void settle(FlowFace&) const {}
    Holds hold(const FlowFace&) const { return Holds::all; }
  };

  // mu on the face at hand.
  void solve(const double* x, const double* eta_v) {
    respond(x, [&](int t, int i, int j) { return scores(eta_v, t, i)[j]; }, 1);
  }

  // Whether visit(place) is true of a state in use; all are asked.
  template <class Visit>
  bool any_state(const Visit& visit) const {
    bool any = false;
    for (int t = 0; t < steps_; ++t) {
      for (const std::int32_t s : states(t)) any |= visit(t * shape_.states + s);
    }
    return any;
  }

  // Without the edges of these states.
  void drop_states(const std::uint8_t* dropped) {
    const int S = shape_.states;
    for (int t = 0; t < steps_; ++t) {
      for (const std::int32_t e : layer(t)) {
        if (dropped[t * S + e % S] || (t > 0 && dropped[e / S - S])) inside[e] = 0;
      }
    }
  }

  // The best path, from nothing.
  bool begin_at_best(const double* x, const double* eta_v) {
    begin_empty(steps_);
    std::copy(x, x + steps_ * shape_.states, reduced_.data);
    if (!(forward(eta_v) > -std::numeric_limits<double>::infinity())) return false;
    trace(eta_v, 0);
    for (int t = 0, from = 0; t < steps_; from = path_[t++]) add(edge(t, from, path_[t]), 1);
    return true;
  }

  // The edges between states with some of mu, and flows on them that have about these marginals:
  // the edges with the best scores carry as much as they can.
  void begin_at(const double* marginals, const double* eta_v) {
    const int S = shape_.states;
    begin_empty(steps_);
    for (int t = 0; t < steps_; ++t) {
      if (t == 0) {
        for (int s = 0; s < S; ++s) {
          if (marginals[s] > 0) add(s, marginals[s]);
        }
        continue;
      }
      const double *left = marginals + (t - 1) * S, *right = marginals + t * S;
      std::copy(left, left + S, need_.data);
      std::copy(right, right + S, need_.data + S);
      int count = 0, ends = 0;
      for (int j = 0; j < S; ++j) {
        stack_[ends] = j;
        ends += right[j] > 0;
      }
      for (int i = 0; i < S; ++i) {
        if (!(left[i] > 0)) continue;
        const double* score = scores(eta_v, t, i);
        for (const std::int32_t j : stack_.first(ends)) {
          if (score[j] > -std::numeric_limits<double>::infinity()) {
            ranked_[count++] = {score[j], edge(t, i, j)};
          }
        }
      }
      std::sort(ranked_.data, ranked_.data + count);
      for (const Ranked& ranked : ranked_.first(count)) {
        double &from = need_[ranked.edge / S - t * S], &to = need_[S + ranked.edge % S];
        const double amount = std::min(from, to);
        add(ranked.edge, amount);
        from -= amount;
        to -= amount;
      }
    }
  }

  // After `pivot`: the face of all paths whose reduced score is within `tolerance` of the best, by
  // way of states whose marginal is above `least`, or the one path if there is no other; flows that
  // no cycle of edges can change. docs/math.md (65).
  void complete(const double* x, const double* eta_v, double tolerance, double least) {
    solve(x, eta_v);
    price(x, eta_v);
    if (!is_path(least)) {
      // best_ has the best way to a state, left_ the best from there on; a state that no path
      // within the tolerance passes has no edge.
      backward(eta_v, level() - tolerance);
      const int S = shape_.states;
      for (int t = 0; t < steps_; ++t) {
        for (const std::int32_t e : layer(t)) inside[e] = flow[e] > least;
        compact(t);
        const int lefts = t == 0 ? 1 : states_[t - 1];
        for (int k = 0; k < lefts; ++k) {
          const int i = t == 0 ? 0 : state_[(t - 1) * S + k];
          const double* score = scores(eta_v, t, i);
          const double before = t == 0 ? 0 : best_[(t - 1) * S + i];
          if (t > 0 && !(mu[(t - 1) * S + i] > least)) continue;
          for (int l = 0; l < states_[t]; ++l) {
            const int j = state_[t * S + l];
            const double through = before + score[j] + left_[t * S + j];
            if (mu[t * S + j] > least && through >= level() - tolerance) enter(edge(t, i, j));
          }
        }
      }
    }
    cancel_cycles();
    keep_flows();
    grow_forests(eta_v, std::numeric_limits<double>::infinity());
  }

  // Which edges are those of the forests; after `complete`.
  template <class Visit>
  void each_forest_edge(const Visit& visit) const {
    for (int t = 0; t < steps_; ++t) {
      for (int k = 0; k < tree_size_[t]; ++k) visit(forest_edge(t, k));
    }
  }

  // Forests from their edges alone, for the derivative; false if they are of no face.
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
  // The same for a change of a few of x alone, at places that are in use.
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
  // Then put(e, value) has that of the flows, on the forests.
  template <class Put>
  void differentiate_flows(const Put& put) {
    spread(0, put);
  }

  // A path along the largest flows, and how much can be taken along it; takes that away. 0 if
  // nothing is left but rounding.
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

 private:
  static constexpr double kNegative = 1e-12;  // flows below are not 0
  static constexpr double kGap = 1e-11;       // relative to the scores
  static constexpr double kCycle = 1e-10;     // potentials of edges on one face agree to this

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

  double level() const { return node_[0]; }

  // Ends of a forest's edge: numbers below S are on the left, the others on the right.
  int forest_edge(int t, int k) const {
    const int S = shape_.states, a = child_[2 * t * S + k], b = parent_[2 * t * S + k];
    return a < S ? edge(t, a, b - S) : edge(t, b, a - S);
  }

  // The edges of a layer, and such as were dropped since the last `compact`.
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

  void keep_flows() {
    for (int t = 0; t < steps_; ++t) {
      compact(t);
      for (const std::int32_t e : layer(t)) prior_[e] = std::max(flow[e], 0.0);
    }
  }

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

  // A spanning forest of each layer, of the edges with the most prior flow, and its components.
  // Edges that disagree with the potentials of their component by more than `tolerance` leave the
  // face. False if the face has no path.
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

  // Links the ends of the first edges in `ranked_` that are of layer t, but for those that close a
  // cycle; returns how many it linked.
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

  int find(int a) const {
    while (root_[a] != a) a = root_[a] = root_[root_[a]];
    return a;
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

  // The flows with these marginals: those on cycles stay as they were (none, if total is 0), the
  // forest carries the rest, from the leaves inwards. put(e, value): each edge with a flow.
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

  // The reduced scores x - W mu, up to a constant a step; the best path's, which is `level` at the
  // optimum.
  double price(const double* x, const double* eta_v) {
    const int S = shape_.states;
    for (int t = 0; t < steps_; ++t) {
      const double even = 1 / share_[t];
      for (int k = t * S; k < (t + 1) * S; ++k) reduced_[k] = x[k] + even;
      for (const std::int32_t s : states(t)) reduced_[t * S + s] = x[t * S + s] - delta_[t * S + s];
    }
    return forward(eta_v);
  }

  // best_: the best way to each state; returns the best of all.
  FACTORMAX_VECTOR double forward(const double* eta_v) {
    const int S = shape_.states;
    double* best = best_.data;
    std::copy(reduced_.data, reduced_.data + S, best);
    for (int t = 1; t < steps_; ++t) {
      double* next = best + t * S;
      const double* here = reduced_.data + t * S;
      oracle::max_plus(next - S, eta_v + shape_.transition_at(t, 0), S, S, next);
#pragma omp simd
      for (int s = 0; s < S; ++s) next[s] += here[s];
    }
    double most = -std::numeric_limits<double>::infinity();
    for (int s = 0; s < S; ++s) most = std::max(most, best[(steps_ - 1) * S + s]);
    return most;
  }

  // left_: the best way on from each state, with its own reduced score; states: those that a path
  // passes which reaches `least`.
  FACTORMAX_VECTOR void backward(const double* eta_v, double least) {
    const int S = shape_.states;
    std::fill_n(left_.data + (steps_ - 1) * S, S, 0.0);
    for (int t = steps_ - 1; t >= 0; --t) {
      const double* on = left_.data + t * S;
      states_[t] = 0;
      for (int s = 0; s < S; ++s) {
        state_[t * S + states_[t]] = s;
        states_[t] += best_[t * S + s] + on[s] >= least;
      }
      // Into the place of `reduced`: what a path has from here on.
      double* here = reduced_.data + t * S;
#pragma omp simd
      for (int s = 0; s < S; ++s) here[s] += on[s];
      if (t == 0) break;
      for (int i = 0; i < S; ++i) {
        const double* score = eta_v + shape_.transition_at(t, i);
        double most = -std::numeric_limits<double>::infinity();
#pragma omp simd reduction(max : most)
        for (int j = 0; j < S; ++j) {
          const double value = score[j] + here[j];
          most = value > most ? value : most;
        }
        left_.data[(t - 1) * S + i] = most;
      }
    }
    std::copy(reduced_.data, reduced_.data + steps_ * S, left_.data);
  }

  // The best path, last step first; edges of the face win where they are within `tie` of the best.
  void trace(const double* eta_v, double tie) {
    const int S = shape_.states;
    const double* last = best_.data + (steps_ - 1) * S;
    int state = 0;
    for (int s = 1; s < S; ++s) {
      if (last[s] > last[state]) state = s;
    }
    for (int t = steps_ - 1;; --t) {
      path_[t] = state;
      if (t == 0) return;
      double most = -std::numeric_limits<double>::infinity();
      int from = 0;
      for (int i = 0; i < S; ++i) {
        const double bonus = inside[edge(t, i, state)] ? tie : 0.0;
        const double value = best_[(t - 1) * S + i] + scores(eta_v, t, i)[state] + bonus;
        if (value > most) {
          most = value;
          from = i;
        }
      }
      state = from;
    }
  }

  bool holds_path() const {
    for (int t = 0, from = 0; t < steps_; from = path_[t++]) {
      if (!inside[edge(t, from, path_[t])]) return false;
    }
    return true;
  }

  // Drops edges with a negative flow, unless edges form cycles, and flows that are not negative can
  // be found; false if none had to be.
  bool drop_negative(double least) {
    const int S = shape_.states;
    bool dropped = false;
    for (int t = 0; t < steps_; ++t) {
      bool negative = false, reversed = false;
      int count = 0;
      for (const std::int32_t e : layer(t)) {
        count += inside[e];
        negative |= inside[e] && flow[e] < -least;
        reversed |= mu[e % S + t * S] < -least || (t > 0 && mu[e / S - S] < -least);
      }
      if (!negative) continue;
      if (!reversed && count > tree_size_[t]) {
        dropped |= !route(t, least);
        continue;
      }
      dropped = true;
      for (const std::int32_t e : layer(t)) inside[e] &= flow[e] >= -least;
    }
    return dropped;
  }

  // Flows of layer t that are not negative, by augmenting paths from those that are not. If there
  // are none, what can't flow on is stuck at states whose other ways out are full: the edges by
  // which others flow there leave the face, for they carry nothing. Then returns false.
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

  // The edges of the best path join the face. One within a component closes a cycle: flow moves
  // along it until an edge is empty, which leaves the face.
  void enter_path() {
    const int S = shape_.states;
    for (int t = 0, from = 0; t < steps_; from = path_[t++]) {
      const int to = path_[t], e = edge(t, from, to);
      if (inside[e]) continue;
      const bool both = (t == 0 || uses((t - 1) * S + from)) && uses(t * S + to);
      const bool cycle = both && left_part_[t * S + from] == right_part_[t * S + to];
      const double amount = cycle ? shift(t, from, S + to) : 1e-3 / S;
      enter(e);
      prior_[e] = amount + std::numeric_limits<double>::min();
    }
  }

  // Every other edge between the ends of a new edge loses what the new one gains.
  double shift(int t, int from, int to) {
    const int S = shape_.states;
    for (int k = 0; k < 2 * S; ++k) up_[k] = head_[k] = -1;
    for (int k = 0; k < tree_size_[t]; ++k) {
      up_[child_[2 * t * S + k]] = parent_[2 * t * S + k];
    }
    // stack_: the way from `from` up; head_: places on it.
    int length = 0;
    for (int a = from; a >= 0; a = up_[a]) {
      head_[a] = length;
      stack_[length++] = a;
    }
    int other = to, more = 0;
    while (head_[other] < 0) {
      root_[more++] = other;
      other = up_[other];
    }
    length = head_[other] + 1;
    while (more > 0) stack_[length++] = root_[--more];
    const auto at = [&](int k) {
      const int a = stack_[k], b = stack_[k + 1];
      return a < S ? edge(t, a, b - S) : edge(t, b, a - S);
    };
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

  // Whether one path carries all that flows.
  bool is_path(double least) {
    const int S = shape_.states;
    for (int t = 0; t < steps_; ++t) {
      int count = 0;
      for (int s = 0; s < S; ++s) count += mu[t * S + s] > least;
      if (count > 1) return false;
    }
    for (int t = 0, from = 0; t < steps_; ++t) {
      int to = 0;
      for (int s = 1; s < S; ++s) {
        if (mu[t * S + s] > mu[t * S + to]) to = s;
      }
      const int e = edge(t, from, to);
      const double value = flow[e];
      clear_layer(t);
      add(e, value);
      from = to;
    }
    return true;
  }

  // Moves flow along cycles of edges that carry some until there are none.
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
        // A tree so far: join, or take the cycle that closes apart.
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
  // edge of the tree gives its own up for it.
  void cancel(int t, int e, int i, int j) {
    const int S = shape_.states;
    for (int k = 0; k < 2 * S; ++k) head_[k] = -1;
    int length = 0;
    for (int a = i; a >= 0; a = up_[a]) {
      head_[a] = length;
      stack_[length++] = a;
    }
    int other = j, more = 0;
    while (head_[other] < 0) {
      next_[more++] = other;
      other = up_[other];
    }
    length = head_[other] + 1;
    while (more > 0) stack_[length++] = next_[--more];
    const auto at = [&](int k) {
      const int a = stack_[k], b = stack_[k + 1];
      return a < S ? edge(t, a, b - S) : edge(t, b, a - S);
    };
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

  oracle::SequenceShape shape_;
  int steps_ = 0;
  int num_clean_ = -1;                         // edges of which none is inside but the listed
  Span<std::int32_t> list_, listed_;           // (L, S S), (L,) edges of a layer
  Span<std::uint8_t> is_forest_;               // (L,) known to have no cycles, its forest is all
  Span<std::int32_t> state_, states_;          // (L, S), (L,) states in use
  Span<double> prior_;                         // (L, S, S) flows that the forests prefer
  Span<double> delta_;                         // (L, S) W mu less its mean over the states in use
  Span<double> base_, reduced_, best_;         // (L, S)
  Span<double> give_;                          // (L, S) 1 / w
  Span<double> share_;                         // (L,) sum of `give` over the states in use
  Span<std::uint8_t> used_;                    // (L, S) states that a path of the face passes
  Span<double> left_, right_;                  // (L, S) potentials of a layer's ends
  Span<std::int32_t> left_part_, right_part_;  // (L, S) their components
  Span<std::int32_t> parts_, tree_size_;       // (L,) components, edges of the forest
  Span<std::int32_t> child_, parent_;          // (L, 2S) its edges, parents first
  Span<double> node_, inverse_;                // (L, S) potentials of components; 1 / pivots
  Span<double> network_, wide_;                // rows of the eliminated network
  Span<Ranked> ranked_;                        // (S S,)
  mutable Span<std::int32_t> root_;            // (2S,) scratch from here on
  Span<std::int32_t> head_, stack_, up_, next_, target_;
  Span<double> need_, zeros_;
  Span<std::int32_t> path_;  // (L,) the best path
};

}  // namespace factormax
