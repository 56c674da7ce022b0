// LP-MAP by the proximal point method, docs/math.md (56): each step is an LP-SparseMAP with the
// scores t eta + mu_k, started from the last multipliers; t doubles while that helps. Linear
// programs end after finitely many steps, and the multipliers give a bound at any time. Hard
// LP-SparseMAPs are solved by such steps too, docs/math.md (22a).
#pragma once

#include "factormax/compact.hpp"
#include "factormax/linear.hpp"

namespace factormax {

template <class T>
class ProximalSolver {
 public:
  void allocate(const Problem<T>& p, StructuredFactors<T>* structured, Workspace& ws) {
    structured_ = structured;
    compact_.allocate(p, structured, ws);
    eta_ = ws.take<T>(p.num_vars);
    center_ = ws.take<T>(p.num_vars);
    work_ = ws.take<T>(p.num_vars);
    taken_ = ws.take<T>(p.num_vars);
    program_.allocate(p, ws);
    hi_ = ws.take<T>(p.num_dual());
  }

  DualPoint<T>& point() { return compact_.point(); }
  const LinearProgram<T>& program() const { return program_; }
  double bound() const { return bound_; }
  Span<const T> certificate() const { return compact_.certificate(); }
  bool integral() const { return integral_; }
  bool gave_up() const { return compact_.gave_up(); }

  // LP-SparseMAP itself. With large scores it is nearly a linear program: where descent makes no
  // headway, for that or another reason, proximal steps solve it. float is too coarse for them, and
  // stalls instead. warm: as for the compact solver. has_rows: the caller knows a better way, so
  // that `gave_up` is the answer.
  Result solve_quadratic(Instance<T>& p, const T* warm, const Options& options, Control& control,
                         bool may_poll, bool has_rows) {
    Result first = compact_.solve(p, warm, options, control, may_poll, true);
    if (!compact_.gave_up() || has_rows) return first;
    if (!Precision<T>::solves_linear_programs) {
      first.status = Status::stalled;
      return first;
    }
    compact_.begin(p, options, control, may_poll);
    program_.begin(p, structured_);
    begin(p, true, nullptr);
    Result& result = compact_.result();
    result.iterations = first.iterations;
    for (bool going = false;; going = true) {
      const bool whole = t_ == 1;
      const int most = whole ? options.max_iter : options.max_iter - 1;  // one for the last step
      const bool cut = step(whole ? T(options.tol) : wanted_, most, going);
      const Status status = result.status;
      if (status == Status::infeasible || status == Status::interrupted || in_trouble()) break;
      const bool last = result.iterations >= most || control.late();
      if (whole && (!cut || last)) break;
      if (last) {
        scale_by(p, 1 / t_);
      } else {
        advance(p, cut, T(2), T(2), T(options.tol));
      }
    }
    end(p);
    compact_.settle(true);
    return result;
  }

  // warm: multipliers of an earlier solution of the linear program, or null.
  Result solve(Instance<T>& p, const T* warm, const Options& options, Control& control,
               bool may_poll) {
    integral_ = false;
    bound_ = std::numeric_limits<double>::infinity();
    if (!compact_.begin(p, options, control, may_poll)) return compact_.result();
    program_.begin(p, structured_);
    if (p.m == 0) return solve_at_once(p);
    begin(p, false, warm);
    const double tol = std::max(options.tol, 16.0 * std::numeric_limits<T>::epsilon());
    const bool at_once = compact_.all_isolated();
    if (at_once) wanted_ = T(tol);
    double least = std::numeric_limits<double>::infinity();
    Result& result = compact_.result();
    for (int steps = 0;; ++steps) {
      const bool cut = step(wanted_, options.max_iter, steps > 0 || warm != nullptr);
      const Status status = result.status;
      if (status == Status::infeasible || status == Status::interrupted || in_trouble()) break;
      if (!better_bound(p)) result.status = Status::stalled;
      const DualPoint<T>& at = compact_.point();
      const double value = program_.value(at.mu.data, eta_.data, hi_.data, double(t_));
      const double gap = bound_ - value;
      const bool feasible = result.primal_residual <= tol;
      result.dual_residual = std::max(gap, 0.0);
      // Closed forms cost nothing: the gap may be closed to the last digit that t leaves.
      const bool to_the_last = at_once && std::fabs(gap) < least;
      const double close = to_the_last ? 64 * std::numeric_limits<T>::epsilon() : tol;
      if (feasible && program_.negligible(gap, value, close)) {
        result.status = Status::converged;
        break;
      }
      result.status = Status::max_iter;
      if (result.iterations >= options.max_iter || steps == kMostSteps || control.late()) break;
      // A gap that does not close means that the steps end too far from their goals: the next ones
      // start from a bad place, all the more so with a larger t.
      const bool closes = at_once || std::fabs(gap) <= least / 2;
      if (closes) least = std::fabs(gap);
      const bool slow = result.iterations >= kMostPasses;
      advance(p, cut, closes ? T(slow ? 2 : 1) : T(4),
              closes || loosest_ <= T(4 * tol) ? T(2) : T(1), T(tol / 10));
    }
    compact_.settle(false);
    if (result.status != Status::infeasible && !in_trouble()) {
      integral_ = program_.round(compact_.point().mu, eta_.data, hi_.data, double(t_), bound_, tol);
    }
    end(p);
    return result;
  }

 private:
  static constexpr int kMostSteps = 200;
  static constexpr int kMostPasses = 100;  // per step; beyond, a smaller t is better
  static constexpr T kLoosest = T(0.1);    // residual of a step; a fifth of its length is enough

  bool in_trouble() const {
    return structured_ != nullptr && structured_->trouble() != ActiveSetResult::solved;
  }

  // Starts from mu_0 = 0 and a t that makes the scores about 1. For the quadratic program t is a
  // power of two, so that it reaches 1, and the scores are restored exactly.
  void begin(Instance<T>& p, bool quadratic, const T* warm) {
    quadratic_ = quadratic;
    wanted_ = loosest_ = kLoosest;
    passes_ = kMostPasses;
    copy(p.eta.first(p.n), eta_);
    copy(p.hi.first(p.m), hi_);
    wide_ = p.wide;
    fill(center_.first(p.n), T(0));
    t_ = 1 / typical_score(p);
    if (quadratic) t_ = std::min(std::exp2(std::round(std::log2(t_))), T(1));
    scale_scores(p);
    if (structured_ != nullptr) structured_->rescale(t_);
    compact_.start(warm);
    if (warm != nullptr) compact_.scale_multipliers(t_);
  }

  // Returns whether it was cut short, with passes left.
  bool step(T wanted, int max_iter, bool warm) {
    const Result& result = compact_.result();
    compact_.minimise(wanted, std::min(max_iter, result.iterations + passes_), warm);
    return result.status == Status::max_iter && result.iterations < max_iter;
  }

  // The errors of the steps must have a finite sum, or the centres wander: the next step is more
  // exact by a factor of `tighter`. A step that was cut short gives no centre: it is repeated with
  // a smaller t and with more passes, since some steps are long whatever t is.
  void advance(Instance<T>& p, bool cut, T tighter, T ratio, T finest) {
    if (cut) {
      passes_ *= 2;
      return scale_by(p, T(0.25));
    }
    passes_ = kMostPasses;
    T change = 0;
    const Span<T> mu = compact_.point().mu;
    for (int j = 0; j < p.n; ++j) {
      change = std::max(change, std::fabs(mu[j] - center_[j]));
      center_[j] = mu[j];
    }
    loosest_ = std::max(loosest_ / tighter, finest);
    wanted_ = clip(change / 5, finest, loosest_);
    scale_by(p, quadratic_ ? std::min(ratio, 1 / t_) : ratio);
  }

  void scale_by(Instance<T>& p, T ratio) {
    t_ *= ratio;
    scale_scores(p);
    if (structured_ != nullptr) structured_->rescale(ratio);
    compact_.follow_scores(ratio);
  }

  // Restores the scores.
  void end(Instance<T>& p) {
    copy(eta_.first(p.n), p.eta);
    copy(hi_.first(p.m), p.hi);
    p.wide = wide_;
    if (structured_ != nullptr) structured_->rescale(1 / double(t_));
    compact_.scale_multipliers(1 / t_);
  }

  // Nothing but structured factors that share no variable: the best structure of each.
  Result solve_at_once(Instance<T>& p) {
    Result& result = compact_.result();
    DualPoint<T>& at = compact_.point();
    double value = 0;
    for (int j = 0; j < p.n; ++j) {
      at.mu[j] = p.eta[j] > 0 ? T(1) : T(0);
      if (structured_ == nullptr || !p.in_hub[j]) value += double(at.mu[j]) * p.eta[j];
    }
    if (structured_ != nullptr) value += structured_->take_best(p, at);
    result.iterations = 1;
    result.status = Status::converged;
    compact_.settle(false);
    bound_ = value;
    integral_ = result.status == Status::converged;
    return result;
  }

  // The standard deviation of the scores, or their size if they are all alike.
  T typical_score(const Instance<T>& p) const {
    double sum = 0, squares = 0;
    for (int j = 0; j < p.n; ++j) {
      sum += p.eta[j];
      squares += double(p.eta[j]) * p.eta[j];
    }
    const double count = std::max(p.n, 1);
    const double variance = squares / count - (sum / count) * (sum / count);
    const double size = std::sqrt(variance > 1e-8 * squares / count ? variance : squares / count);
    return T(size > 0 && std::isfinite(size) ? size : program_.size());
  }

  // t eta + mu_k; for the quadratic program t eta + (1 - t) mu_k, docs/math.md (22a).
  void scale_scores(Instance<T>& p) const {
    const T share = quadratic_ ? 1 - t_ : T(1);
    for (int j = 0; j < p.n; ++j) p.eta[j] = t_ * eta_[j] + share * center_[j];
    p.wide = false;  // the scores are rounded themselves
    for (int r = p.hard; r < p.links; ++r) p.hi[r] = t_ * hi_[r];
  }

  // A variable shares the quadratic with its links, and so the centre too: then the bound at the
  // solution is its value.
  bool better_bound(const Instance<T>& p) {
    const DualPoint<T>& at = compact_.point();
    for (int j = 0; j < p.n; ++j) {
      const T share = p.weighted() ? p.weight[j] * center_[j] : center_[j];
      work_[j] = at.z[j] - share;
      taken_[j] = -share;
    }
    const double bound = program_.bound(work_.data, at.x.data, double(t_), taken_.data);
    if (!std::isfinite(bound)) return false;
    bound_ = std::min(bound_, bound);
    return true;
  }

  CompactSolver<T> compact_;
  LinearProgram<T> program_;
  StructuredFactors<T>* structured_ = nullptr;
  Span<T> eta_, hi_, center_, work_, taken_;
  T t_ = 1, wanted_ = 0, loosest_ = 0;
  int passes_ = kMostPasses;  // limit for the next step
  bool quadratic_ = false, wide_ = false;
  double bound_ = 0;
  bool integral_ = false;
};

}  // namespace factormax
