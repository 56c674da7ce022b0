// SparseMAP of a sequence by the flows on its transitions, docs/math.md (62)-(69). An active set of
// paths walks over many of them where scores are close to one another; the flows do not mind.
//
// States that are masked in every step, the padding of a batch, are left out: the flows number the
// others from 0 on, and scores, weights and marginals are packed and unpacked here.
#pragma once

#include "factormax/structured/flow_face.hpp"
#include "factormax/structured/flow_interior.hpp"
#include "factormax/structured/flow_rows.hpp"
#include "factormax/structured/structure_set.hpp"

namespace factormax {

class SequenceFlow {
 public:
  // Whether there is room for the flows of all edges.
  static bool fits(const oracle::SequenceShape& s) {
    return std::int64_t(s.length) * s.states * s.states <= std::int64_t(1) << 22;
  }

  void allocate(const oracle::SequenceShape& shape, Workspace& ws) {
    shape_ = shape;
    face_.allocate(shape, ws);
    interior_.allocate(shape, ws);
    state_ = ws.take<std::int32_t>(shape.states);
    number_ = ws.take<std::int32_t>(shape.states);
    theta_ = ws.take<double>(shape.initial_at());
    w_ = ws.take<double>(shape.length * shape.states);
    x_ = ws.take<double>(shape.length * shape.states);
    path_ = ws.take<std::int32_t>(shape.length);
    level_ = ws.take<double>(shape.length);
    mu_ = ws.take<double>(shape.length * shape.states);
    raised_ = ws.take<std::uint8_t>(shape.length * shape.states);
  }

  // Oracle calls before flows are worth it: few structures are found after a call or two per step.
  int few() const { return 64 + shape_.length; }

  // Starts anew: nothing is known of the solution. x: -inf where masked. A sequence has no
  // parameter.
  void begin(const double* x, double /*param*/ = 0) {
    const int S = shape_.states;
    fill(number_, -1);
    const auto any = [&](const double* here) {
      bool found = false;
      for (int s = 0; s < S; ++s) {
        if (here[s] == -std::numeric_limits<double>::infinity()) continue;
        found = true;
        number_[s] = 0;
      }
      return found;
    };
    for (steps_ = 0; steps_ < shape_.length && any(x + steps_ * S);) ++steps_;
    states_ = 0;
    for (int s = 0; s < S; ++s) {
      if (number_[s] < 0) continue;
      state_[states_] = s;
      number_[s] = states_++;
    }
    face_.set_states(states_);
    interior_.set_states(states_);
    start_ = Start::none;
  }

  // The place in the flows of a variable of the sequence that is present.
  int place(int k) const {
    const int S = shape_.states;
    return k / S * states_ + number_[k % S];
  }

  // Starts at the flows of a mixture of paths.
  void begin_at(const StructureSet& set) {
    face_.begin_empty(steps_);
    for (int k = 0; k < set.count; ++k) {
      for (int t = 0, from = 0; t < steps_; ++t) {
        const int to = number_[set.on(k)[t] - t * shape_.states];
        face_.add(face_.edge(t, from, to), set.p[k]);
        from = to;
      }
    }
    start_ = Start::paths;
  }

  enum class End { solved, no_structure, failed, stopped };

  // Maximises at x, from the flows at hand; then v = mu. Counts rounds, each of which looks for the
  // best path, in `calls`.
  End solve(const double* x, const double* eta_v, const double* w, Control& control, bool may_poll,
            std::int64_t& calls, double* v) {
    load(x, eta_v);
    const double* theta = transitions(eta_v);
    w = weights(w);
    face_.begin(steps_, w);
    // Rows have changed the scores since `solve_beside`, but not by much.
    if (start_ != Start::beside) size_ = interior_.screen(x_.data, theta, steps_, w);
    ++calls;
    if (size_ == 0) return End::no_structure;
    const End end = find(theta, w, control, may_poll, calls);
    start_ = end == End::solved ? Start::solution : Start::none;
    if (end != End::solved) return end;
    take_mu(v);
    for (int k = 0; k < steps_ * shape_.states; ++k) v[k] = std::max(v[k], 0.0);
    return end;
  }

  // Finds the solution beside rows, from nothing, docs/math.md (70)-(72): the rows then have its
  // multipliers, and `solve` begins there. Returns false if it is not found.
  bool solve_beside(FlowRows& rows, const double* x, const double* eta_v, const double* w,
                    Control& control, bool may_poll, std::int64_t& calls) {
    start_ = Start::none;
    load(x, eta_v);
    const double* theta = transitions(eta_v);
    w = weights(w);
    face_.begin(steps_, w);
    size_ = steps_ < 2 ? 0 : interior_.screen(x_.data, theta, steps_, w);
    ++calls;
    if (size_ <= kLarge || interior_.size_of_edges() > kWeak * size_) return false;
    double* mu = face_.mu.data;
    if (!rows.approach(x_.data, mu, level_.data, steps_, states_, w)) return false;
    face_.begin_at(mu, theta);
    const auto pivot = [&] {
      return face_.pivot(x_.data, theta, size_, kBeside, calls, control, may_poll,
                         Beside{rows, theta, x_.data}) == FlowFace::Pivots::optimal;
    };
    if (!pivot()) return false;
    // Where multipliers are not unique, those found may be at the edge of their set, where a state
    // that carries nothing looks as if it could. If it can't, then nothing but the multipliers
    // changes when its score rises a little: they move away from the edge.
    const int places = steps_ * states_;
    std::copy(mu, mu + places, mu_.data);
    rows.keep();
    fill(raised_.first(places), std::uint8_t(0));
    const auto raise = [&](int k) {
      const bool empty = !raised_[k] && mu[k] <= kEmpty;
      if (empty) x_[k] += kRise * std::min(1.0, size_);
      raised_[k] |= empty;
      return empty;
    };
    const auto same = [](double a, double b) { return std::fabs(a - b) <= kEmpty; };
    for (int tries = 0; tries < kRises && face_.any_state(raise); ++tries) {
      if (pivot() && std::equal(mu, mu + places, mu_.data, same)) continue;
      load(x, eta_v);
      rows.restore(x_.data);
      if (!pivot()) return false;
      fill(raised_.first(places), std::uint8_t(0));
      break;
    }
    face_.drop_states(raised_.data);
    start_ = Start::beside;
    return true;
  }

  // After `solve`, with the same scores: completes the face, for the derivative. error: of x.
  void complete(const double* x, const double* eta_v, double error) {
    load(x, eta_v);
    face_.complete(x_.data, transitions(eta_v), std::max(kFace * size_, 4 * error),
                   std::max(2 * error, kFace * std::min(size_, 1.0)));
  }

  bool is_vertex() const { return face_.is_vertex(); }

  // y <- J y
  void apply(double* y) {
    pack(y, y);
    face_.differentiate(y, [](int, int, int) { return 0.0; });
    take_mu(y);
  }

  // The response to changes of the scores: y, (L, S), and d_v, of the factor's own; both are
  // overwritten. The map is symmetric, so it serves the backward pass as well. docs/math.md (66).
  void respond(double* y, double* d_v) {
    for_ends([&](int k, int score) { y[k] += d_v[score]; });
    pack(y, y);
    face_.differentiate(
        y, [&](int t, int i, int j) { return t > 0 ? d_v[transition(t, i, j)] : 0.0; });
    take_mu(y);
    std::fill(d_v, d_v + shape_.num_scores(), 0.0);
    face_.differentiate_flows([&](int e, double value) {
      if (e >= states_ * states_) d_v[transition(e)] += value;
    });
    for_ends([&](int k, int score) { d_v[score] = y[k]; });
  }

  // Calls visit(score, flow) for the features, with a score as often as steps share it. v: what
  // `solve` found.
  template <class Visit>
  void each_feature(const double* v, const Visit& visit) const {
    face_.each_flow([&](int e, double flow) {
      if (e >= states_ * states_) visit(transition(e), flow);
    });
    for_ends([&](int k, int score) {
      if (v[k] > 0) visit(score, v[k]);
    });
  }

  // What the backward pass needs: the forests of the face, a bit per edge between states that are
  // present.
  static int num_flags(const oracle::SequenceShape& s) {
    return (s.length * s.states * s.states + 7) / 8;
  }
  int num_flags() const { return num_flags(shape_); }
  void write_flags(std::uint8_t* flags) const {
    std::fill_n(flags, num_flags(), std::uint8_t(0));
    face_.each_forest_edge(
        [&](int e) { flags[e / 8] = static_cast<std::uint8_t>(flags[e / 8] | 1 << e % 8); });
  }
  // After `begin`. Returns false if no face has these edges.
  bool adopt(const std::uint8_t* flags, const double* w) {
    face_.begin(steps_, weights(w));
    face_.begin_empty(steps_);
    const int edges = steps_ * states_ * states_;
    for (int byte = 0; 8 * byte < edges; ++byte) {
      if (flags[byte] == 0) continue;
      for (int e = 8 * byte; e < std::min(8 * byte + 8, edges); ++e) {
        if (flags[byte] >> e % 8 & 1) face_.add(e, 0);
      }
    }
    return steps_ > 0 && face_.adopt_forests();
  }

  // Turns the flows into paths, which `set` takes over, each with what flows along it; the flows
  // are then gone. The paths are independent: flows on forests follow from mu, and each path
  // empties an edge that no later one uses. Returns false if there is no room.
  bool list_paths(StructureSet& set) {
    start_ = Start::none;
    for (int edges = steps_ * states_ * states_; edges > 0; --edges) {
      const double amount = face_.peel(path_.data);
      if (amount == 0 || set.count > set.shape().vars) break;
      if (amount < 1e-15) continue;  // the rounding of an edge
      if (set.is_full()) return false;
      for (int t = 0; t < steps_; ++t) path_[t] = state_[path_[t]];
      write_path(set.on(set.count), set.features(set.count));
      set.adopt(amount);
    }
    return true;
  }

  // Writes the path that is this 0/1 assignment; false if it is no path.
  bool write_structure(const double* assignment, const double* eta_v, std::int32_t* on,
                       std::int32_t* features) {
    const oracle::SequenceShape& s = shape_;
    double allowed = 0;  // or -inf
    for (int t = 0; t < steps_; ++t) {
      int count = 0;
      for (int k = 0; k < s.states; ++k) {
        if (assignment[t * s.states + k] == 0) continue;
        path_[t] = k;
        ++count;
      }
      if (count != 1) return false;
      if (t > 0) allowed += eta_v[s.transition_at(t, path_[t - 1]) + path_[t]];
    }
    for_ends([&](int k, int score) {
      if (assignment[k] != 0) allowed += eta_v[score];
    });
    if (!(allowed > -std::numeric_limits<double>::infinity())) return false;
    write_path(on, features);
    return true;
  }

 private:
  static constexpr double kFace = 1e-9;
  static constexpr double kLarge = 0.2;  // larger scores leave few enough edges to pivot to
  static constexpr int kFromPaths = 48;  // most rounds from the paths of an active set
  static constexpr double kWeak = 0.1;   // edge scores, relative, that a start beside rows ignores
  static constexpr int kBeside = 40;     // most rounds beside rows
  static constexpr int kRises = 4;       // how often the scores of empty states may then rise,
  static constexpr double kRise = 1e-4;  // by how much, relative to the scores
  static constexpr double kHolds = 1e-9;
  static constexpr double kEmpty = 1e-9;  // a state with no more than this is empty
  static constexpr int kWarm = 30;        // most rounds from the last solution
  static constexpr int kLast = 600;       // most rounds from the best path, if nothing else helps
  static constexpr int kPolish = 2;       // most rounds from a point of the interior method,
  static constexpr double kTry = 1e-6;    // tried once its gap is this small,
  static constexpr int kInterior = 50;    // and its most iterations

  // The rows, for the pivots of the face.
  struct Beside {
    FlowRows& rows;
    const double* theta;
    double* x;
    void settle(FlowFace& face) const { rows.settle(face, theta, x); }
    FlowFace::Holds hold(const FlowFace& face) const { return rows.hold(face.mu.data, kHolds, x); }
  };

  // The structure whose states are path_.
  void write_path(std::int32_t* on, std::int32_t* features) const {
    const oracle::SequenceShape& s = shape_;
    const std::int32_t* state = path_.data;
    for (int t = 0; t < s.length; ++t) on[t] = t < steps_ ? t * s.states + state[t] : -1;
    for (int t = 0; t <= s.length; ++t) features[t] = -1;
    for (int t = 1; t < steps_; ++t) {
      features[t - 1] = s.transition_at(t, state[t - 1]) + state[t];
    }
    if (s.has_initial) features[s.length - 1] = s.initial_at() + state[0];
    if (s.has_final) features[s.length] = s.final_at() + state[steps_ - 1];
  }

  void take_mu(double* v) const {
    const double* mu = face_.mu.data;
    std::fill_n(v, shape_.length * shape_.states, 0.0);
    for (int t = 0; t < steps_; ++t) {
      for (int k = 0; k < states_; ++k) v[t * shape_.states + state_[k]] = mu[t * states_ + k];
    }
  }

  // Packs (L, S) into (L, states that are present); both may begin at the same place.
  void pack(const double* all, double* out) const {
    for (int t = 0; t < steps_; ++t) {
      for (int k = 0; k < states_; ++k) out[t * states_ + k] = all[t * shape_.states + state_[k]];
    }
  }

  // The weights and the transitions as the flows number states: the ones given, if none is left
  // out.
  const double* weights(const double* w) {
    if (states_ == shape_.states) return w;
    pack(w, w_.data);
    return w_.data;
  }
  const double* transitions(const double* eta_v) {
    if (states_ == shape_.states) return eta_v;
    double* to = theta_.data;
    const int layers = shape_.per_step ? steps_ - 1 : 1;
    for (int t = 1; t <= layers; ++t) {
      for (int i = 0; i < states_; ++i) {
        const double* from = eta_v + shape_.transition_at(t, state_[i]);
        for (int j = 0; j < states_; ++j) *to++ = from[state_[j]];
      }
    }
    return theta_.data;
  }

  // Where the score of an edge is; edges into the first step have none.
  int transition(int t, int i, int j) const {
    return shape_.transition_at(t, state_[i]) + state_[j];
  }
  int transition(int e) const {
    return transition(e / (states_ * states_), e / states_ % states_, e % states_);
  }

  // Calls visit(variable, score) for the scores of the first and the last state.
  template <class Visit>
  void for_ends(const Visit& visit) const {
    const oracle::SequenceShape& s = shape_;
    for (int k = 0; s.has_initial && k < s.states; ++k) visit(k, s.initial_at() + k);
    for (int k = 0; s.has_final && k < s.states; ++k) {
      visit((steps_ - 1) * s.states + k, s.final_at() + k);
    }
  }

  // Takes x with the scores of the ends, less the largest of each step: mu does not depend on it.
  void load(const double* x, const double* eta_v) {
    const double inf = std::numeric_limits<double>::infinity();
    pack(x, x_.data);
    for_ends([&](int k, int score) {
      if (number_[k % shape_.states] >= 0) x_[place(k)] += eta_v[score];
    });
    for (int t = 0; t < steps_; ++t) {
      double *here = x_.data + t * states_, most = -inf;
      for (int s = 0; s < states_; ++s) most = std::max(most, here[s]);
      if (most == -inf) continue;
      for (int s = 0; s < states_; ++s) here[s] -= most;
    }
  }

  End find(const double* theta, const double* w, Control& control, bool may_poll,
           std::int64_t& calls) {
    using Pivots = FlowFace::Pivots;
    const auto pivot = [&](int most) {
      return face_.pivot(x_.data, theta, size_, most, calls, control, may_poll,
                         FlowFace::NothingBeside());
    };
    Pivots result = Pivots::open;
    if (start_ == Start::solution) {
      result = pivot(kWarm);
    } else if (start_ == Start::beside) {
      result = pivot(kWarm);
      if (result == Pivots::open) size_ = interior_.screen(x_.data, theta, steps_, w);
    } else if (start_ == Start::paths && size_ > kLarge) {
      result = pivot(kFromPaths);
    } else if (size_ > 1 || steps_ == 1) {
      if (!face_.begin_at_best(x_.data, theta)) return End::no_structure;
      result = pivot(steps_ == 1 ? 4 * states_ + kWarm : kWarm);
    }
    if (result == Pivots::open && steps_ > 1) {
      interior_.begin(x_.data, theta, w, size_);
      for (int iteration = 0; result == Pivots::open && iteration < kInterior; ++iteration) {
        if (control.stopped(may_poll)) return End::stopped;
        if (!interior_.iterate()) break;
        if (interior_.gap() > kTry) continue;
        face_.begin_empty(steps_);
        interior_.visit(
            [&](int t, int i, int j, double flow) { face_.add(face_.edge(t, i, j), flow); },
            [&](int s, double flow) { face_.add(face_.edge(0, 0, s), flow); });
        result = pivot(kPolish);
      }
    }
    if (result == Pivots::open) {
      if (!face_.begin_at_best(x_.data, theta)) return End::no_structure;
      result = pivot(kLast);
    }
    if (result == Pivots::optimal) return End::solved;
    return result == Pivots::stopped ? End::stopped : End::failed;
  }

  oracle::SequenceShape shape_;
  FlowFace face_;
  FlowInterior interior_;
  int steps_ = 0, states_ = 0;                                              // those present
  enum class Start { none, paths, solution, beside } start_ = Start::none;  // what `face_` holds
  double size_ = 1;                                                         // of the scores
  Span<std::int32_t> state_;                                                // (states,)
  Span<std::int32_t> number_;                                               // (S,) number, or -1
  Span<double> theta_, w_;                                                  // packed
  Span<double> x_;                                                          // (L, S)
  Span<std::int32_t> path_;                                                 // (L,)
  Span<double> level_;                                                      // (L,)
  Span<double> mu_;                                                         // (L, S)
  Span<std::uint8_t> raised_;  // (L, S) whether a score rose
};

}  // namespace factormax
