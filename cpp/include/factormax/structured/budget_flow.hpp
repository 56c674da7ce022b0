// SparseMAP of a binary sequence with a budget, by flows, docs/math.md (73)-(78): the solution with
// the budget as a row beside the flows of a sequence of two states, off and on, provided that it is
// a mixture of sequences that keep the budget, which has to be proved.
#pragma once

#include "factormax/structured/count_mixture.hpp"
#include "factormax/structured/sequence_flow.hpp"

namespace factormax {

class BudgetFlow {
 public:
  using End = SequenceFlow::End;

  static bool fits(int length) { return SequenceFlow::fits(shape_of(length)); }

  void allocate(int length, bool per_step, Workspace& ws) {
    length_ = length;
    per_step_ = per_step;
    flow_.allocate(shape_of(length), ws);
    mixture_.allocate(length, ws);
    for (Span<double>* a : {&x_, &w_, &v_, &y_}) *a = ws.take<double>(2 * length);
    theta_ = ws.take<double>(4 * (length - 1));
    row_ = ws.take<double>(length);
    row_v_ = ws.take<double>(length);
  }

  // Oracle calls before flows are worth it: each looks at every number that may be on.
  int few() const { return 128 + length_ / 16; }

  // Starts anew: nothing is known of the solution. x: -inf where masked; it is read later.
  void begin(const double* x, double budget) {
    masked_ = x;
    param_ = budget;
    begun_ = false;
  }

  // Maximises at x, from the flows at hand; then v = mu. Fails if the flows are not proved to be a
  // mixture.
  End solve(const double* x, const double* eta_v, const double* w, Control& control, bool may_poll,
            std::int64_t& calls, double* v) {
    start();
    load(eta_v, theta_.data);
    set_weights(w, size_of(x, eta_v, w));
    const End end = find_tau(x, w, control, may_poll, calls);
    if (end != End::solved) return end;
    for (int t = 0; t < length_; ++t) v[t] = v_[2 * t + 1];
    if (budget_ >= allowed_) return end;
    list_edges();
    const bool proved = mixture_.proves(length_, budget_, binds_, control, may_poll);
    return proved ? end : control.stopped(may_poll) ? End::stopped : End::failed;
  }

  // After `solve`, with the same scores: completes the face, for the derivative. error: of x.
  void complete(const double*, const double*, double error) {
    flow_.complete(x_.data, theta_.data, error);
    has_row_ = false;
  }

  bool is_vertex() const { return flow_.is_vertex(); }

  // y <- J y
  void apply(double* y) {
    find_row();
    double along = 0;
    for (int t = 0; t < length_; ++t) along += row_[t] * y[t];
    apply_freely(y);
    for (int t = 0; t < length_; ++t) y[t] -= along * share_ * row_[t];
  }

  // The response to changes of the scores: y, (L,), and d_v, of the factor's own; both are
  // overwritten. docs/math.md (78).
  void respond(double* y, double* d_v) {
    find_row();
    const int scores = num_scores();
    double along = 0;
    for (int t = 0; t < length_; ++t) along += row_[t] * y[t];
    for (int k = 0; k < scores; ++k) along += row_v_[k] * d_v[k];
    respond_freely(y, d_v);
    for (int t = 0; t < length_; ++t) y[t] -= along * share_ * row_[t];
    for (int k = 0; k < scores; ++k) d_v[k] -= along * share_ * row_v_[k];
  }

  // Calls visit(score, flow) for neighbours that are both on.
  template <class Visit>
  void each_feature(const double*, const Visit& visit) const {
    flow_.each_feature(v_.data, [&](int k, double flow) {
      if (k % 4 == 3) visit(per_step_ ? k / 4 : 0, flow);
    });
  }

  // What the backward pass needs: the flags of the flows, and whether the budget binds.
  static int num_flags(int length) { return SequenceFlow::num_flags(shape_of(length)) + 1; }
  int num_flags() const { return num_flags(length_); }
  void write_flags(std::uint8_t* flags) const {
    flow_.write_flags(flags);
    flags[num_flags() - 1] = binds_;
  }
  // After `begin`. Returns false if no face has these edges.
  bool adopt(const std::uint8_t* flags, const double* w) {
    start();
    set_weights(w, 0.5);
    binds_ = flags[num_flags() - 1] != 0;
    return flow_.adopt(flags, w_.data);
  }

  // Writes the sequence that is this 0/1 assignment; false if it is over the budget.
  bool write_structure(const double* assignment, const double*, std::int32_t* on,
                       std::int32_t* features) const {
    int count = 0;
    for (int t = 0; t < length_; ++t) {
      const bool here = assignment[t] != 0, joined = t > 0 && here && assignment[t - 1] != 0;
      on[t] = here ? t : -1;
      if (t > 0) features[t - 1] = joined ? (per_step_ ? t - 1 : 0) : -1;
      count += here;
    }
    return count <= budget_;
  }

 private:
  static constexpr int kSteps = 60;        // most steps for the multiplier; half a dozen are usual
  static constexpr double kHolds = 1e-13;  // what the budget may lack, relative to the length
  static constexpr double kLeastPart = 1e-6;  // of the weights; the network has them side by side
  static constexpr double kMoves = 1e-9;      // a smaller response to all scores is rounding

  // Transitions per step, whatever those of the factor, as flows are asked for by step.
  static oracle::SequenceShape shape_of(int length) {
    oracle::SequenceShape shape;
    shape.length = length;
    shape.states = 2;
    shape.per_step = true;
    return shape;
  }
  int num_scores() const { return per_step_ ? length_ - 1 : 1; }

  // What `begin` has put off: most factors never come here.
  void start() {
    has_row_ = false;
    if (begun_) return;
    begun_ = true;
    tau_ = 0;
    allowed_ = 0;
    for (int t = 0; t < length_; ++t) {
      allowed_ += masked_[t] != -std::numeric_limits<double>::infinity();
      x_[2 * t] = 0;
      x_[2 * t + 1] = masked_[t];
    }
    budget_ = static_cast<int>(clip(param_, 0.0, double(length_)));
    flow_.begin(x_.data);
    fill(theta_, 0.0);
  }

  // Of the scores, relative to the weights.
  double size_of(const double* x, const double* eta_v, const double* w) const {
    double size = 0;
    for (int t = 0; t < length_; ++t) {
      if (std::isfinite(x[t])) size = std::max(size, std::fabs(x[t]) / w[t]);
    }
    for (int k = 0; k < num_scores(); ++k) size = std::max(size, std::fabs(eta_v[k]) / w[0]);
    return size;
  }

  // Gives off a part of the weights, docs/math.md (73). What flows round to is relative to that
  // part, so it is no more than the size of the scores.
  void set_weights(const double* w, double size) {
    part_ = clip(size, kLeastPart, 0.5);
    for (int t = 0; t < length_; ++t) {
      w_[2 * t] = part_ * w[t];
      w_[2 * t + 1] = (1 - part_) * w[t];
    }
  }

  // The scores of neighbours, as those of transitions from on to on.
  void load(const double* eta_v, double* theta) const {
    for (int t = 1; t < length_; ++t) theta[4 * t - 1] = eta_v[per_step_ ? t - 1 : 0];
  }

  // y_ <- y for on, nothing for off
  void widen(const double* y) {
    for (int t = 0; t < length_; ++t) {
      y_[2 * t] = 0;
      y_[2 * t + 1] = y[t];
    }
  }

  // The flows at multiplier tau_, docs/math.md (73), and by how much they exceed the budget.
  End solve_at_tau(const double* x, Control& control, bool may_poll, std::int64_t& calls,
                   double& excess) {
    has_row_ = false;
    for (int t = 0; t < length_; ++t) x_[2 * t + 1] = x[t] - w_[2 * t] - tau_;
    const End end = flow_.solve(x_.data, theta_.data, w_.data, control, may_poll, calls, v_.data);
    excess = -budget_;
    for (int t = 0; t < length_; ++t) excess += v_[2 * t + 1];
    return end;
  }

  // Newton's method, kept between bounds: what is on decreases with tau, piecewise linearly.
  // docs/math.md (74).
  End find_tau(const double* x, const double* w, Control& control, bool may_poll,
               std::int64_t& calls) {
    const double inf = std::numeric_limits<double>::infinity();
    double low = -1, high = inf;  // nothing is known of tau = 0 yet
    const double close = kHolds * (length_ + 8);
    for (int step = 0; step < kSteps; ++step) {
      double excess = 0;
      const End end = solve_at_tau(x, control, may_poll, calls, excess);
      if (end != End::solved) return end;
      binds_ = tau_ > 0;
      if (std::fabs(excess) <= close || (excess < 0 && tau_ == 0)) return end;
      (excess > 0 ? low : high) = tau_;
      // The step that is right as long as the face stays.
      const double slope = response();
      const double way = slope * w[0] > kMoves ? excess / slope : excess > 0 ? inf : -inf;
      double next = std::max(tau_ + way, 0.0);
      if (!(next > low && next < high)) next = high < inf ? (low + high) / 2 : 2 * tau_ + w[0] / 8;
      if (next == tau_) return end;
      tau_ = next;
    }
    return End::failed;
  }

  // How much of what is on a change of all scores moves.
  double response() {
    fill(row_, 1.0);
    apply_freely(row_.data);
    double sum = 0;
    for (const double value : row_) sum += value;
    return sum;
  }

  void apply_freely(double* y) {
    widen(y);
    flow_.apply(y_.data);
    for (int t = 0; t < length_; ++t) y[t] = y_[2 * t + 1];
  }

  // The same as `respond`, as if there were no budget.
  void respond_freely(double* y, double* d_v) {
    double* d_theta = mixture_.edge.data;  // scratch by now
    std::fill_n(d_theta, 4 * (length_ - 1), 0.0);
    load(d_v, d_theta);
    widen(y);
    flow_.respond(y_.data, d_theta);
    std::fill_n(d_v, num_scores(), 0.0);
    for (int t = 0; t < length_; ++t) {
      y[t] = y_[2 * t + 1];
      if (t > 0) d_v[per_step_ ? t - 1 : 0] += d_theta[4 * t - 1];
    }
  }

  // row_, row_v_: the response to a change of all scores, along which the budget keeps the solution
  // from moving; share_: 1 over its sum, or 0 if the budget does not bind.
  void find_row() {
    if (has_row_) return;
    has_row_ = true;
    share_ = 0;
    fill(row_, 0.0);
    fill(row_v_, 0.0);
    if (!binds_) return;
    fill(row_, 1.0);
    respond_freely(row_.data, row_v_.data);
    double sum = 0;
    for (const double value : row_) sum += value;
    if (sum * (w_[0] + w_[1]) > kMoves) share_ = 1 / sum;
  }

  void list_edges() {
    double* edge = mixture_.edge.data;
    std::fill_n(edge, 4 * length_, 0.0);
    edge[0] = v_[0];
    edge[1] = v_[1];
    flow_.each_feature(v_.data, [&](int k, double flow) { edge[4 + k] += flow; });
  }

  SequenceFlow flow_;
  CountMixture mixture_;
  int length_ = 0, budget_ = 0, allowed_ = 0;
  bool per_step_ = false, begun_ = false;
  bool binds_ = false;    // the budget holds with equality
  bool has_row_ = false;  // row_ is that of the face at hand
  double param_ = 0, part_ = 0.5, tau_ = 0, share_ = 0;
  const double* masked_ = nullptr;
  Span<double> x_, w_, v_, y_;  // (L, 2) scores, weights, marginals, scratch
  Span<double> theta_;          // (L - 1, 2, 2)
  Span<double> row_, row_v_;    // (L,)
};

}  // namespace factormax
