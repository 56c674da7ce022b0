// LP-MAP by the proximal point method, docs/math.md (56): each step is an LP-SparseMAP with the
// scores t eta + mu_k, from the multipliers of the last; t doubles while that helps. Linear
// programs end after finitely many steps, and the multipliers give a bound at any time.
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
    warm_ = ws.take<T>(p.num_dual());
  }

  DualPoint<T>& point() { return compact_.point(); }
  const LinearProgram<T>& program() const { return program_; }
  double bound() const { return bound_; }
  Span<const T> certificate() const { return compact_.certificate(); }
  bool integral() const { return integral_; }

  // LP-SparseMAP itself. With large scores it is nearly a linear program: where descent makes no
  // headway, it begins again from the multipliers of that. float is too coarse for linear programs,
  // and stalls there. warm: as of the compact solver.
  Result solve_quadratic(const Problem<T>& problem, Instance<T>& p, const T* warm,
                         const Options& options, Control& control, bool may_poll) {
    Result first = compact_.solve(problem, p, warm, options, control, may_poll, true);
    if (!compact_.gave_up()) return first;
    if (!Precision<T>::solves_linear_programs) {
      first.status = Status::stalled;
      return first;
    }
    Options rest = options;
    rest.tol = 1e-6;
    rest.max_iter = (options.max_iter - first.iterations) / 4 * 3;
    const bool wide = p.wide;
    on_the_way_ = true;
    Result linear = solve(problem, p, nullptr, rest, control, may_poll);
    on_the_way_ = false;
    p.wide = wide;
    const int spent = first.iterations + linear.iterations;
    if (linear.status == Status::infeasible || linear.status == Status::interrupted ||
        in_trouble()) {
      linear.iterations = spent;
      return linear;
    }
    const DualPoint<T>& at = compact_.point();
    for (int r = 0; r < p.m; ++r) warm_[p.row[r]] = at.x[r] * p.scale[r];
    rest.tol = options.tol;
    rest.max_iter = std::max(options.max_iter - spent, 1);
    Result last = compact_.solve(problem, p, warm_.data, rest, control, may_poll);
    last.iterations += spent;
    return last;
  }

  // warm: multipliers of an earlier solution of the linear program, or null.
  Result solve(const Problem<T>& problem, Instance<T>& p, const T* warm, const Options& options,
               Control& control, bool may_poll) {
    integral_ = false;
    bound_ = std::numeric_limits<double>::infinity();
    if (!compact_.begin(problem, p, options, control, may_poll)) return compact_.result();
    program_.begin(p, structured_);
    if (p.m == 0) return solve_at_once(p);
    copy(p.eta.first(p.n), eta_);
    copy(p.hi.first(p.m), hi_);
    fill(center_.first(p.n), T(0));
    T t = 1 / typical_score(p);
    if (on_the_way_) t = std::exp2(std::round(std::log2(t)));  // to restore the scores exactly
    scale_scores(p, t);
    if (structured_ != nullptr) structured_->rescale(t);
    compact_.start(warm);
    if (warm != nullptr) compact_.scale_multipliers(t);

    const double tol = std::max(options.tol, 16.0 * std::numeric_limits<T>::epsilon());
    const bool at_once = compact_.all_isolated();
    T loosest = kLoosest, wanted = at_once ? T(tol) : loosest;
    double least = std::numeric_limits<double>::infinity();
    Result& result = compact_.result();
    for (int step = 0;; ++step) {
      compact_.minimise(wanted, options.max_iter, step > 0 || warm != nullptr);
      const Status status = result.status;
      if (status == Status::infeasible || status == Status::interrupted || in_trouble()) break;
      if (!better_bound(p, t)) result.status = Status::stalled;
      const DualPoint<T>& at = compact_.point();
      const double value = program_.value(at.mu.data, eta_.data, hi_.data, double(t));
      const double gap = bound_ - value;
      const bool feasible = result.primal_residual <= tol;
      result.dual_residual = std::max(gap, 0.0);
      // Closed forms cost nothing: the gap may be closed to the last digit.
      const double close = at_once ? 64 * std::numeric_limits<T>::epsilon() : tol;
      if (feasible && program_.negligible(gap, value, close)) {
        result.status = Status::converged;
        break;
      }
      result.status = Status::max_iter;
      if (result.iterations >= options.max_iter || step == kMostSteps || control.late()) break;
      T change = 0;
      for (int j = 0; j < p.n; ++j) {
        change = std::max(change, std::fabs(at.mu[j] - center_[j]));
        center_[j] = at.mu[j];
      }
      // A gap that does not close means that the steps end too far from where they lead: the next
      // begin from nowhere, and all the more so with a larger t.
      const bool closes = at_once || std::fabs(gap) <= least / 2;
      if (closes) {
        least = std::fabs(gap);
      } else {
        loosest = std::max(loosest / 4, T(tol / 10));
      }
      wanted = clip(change / 5, T(tol / 10), loosest);
      const T ratio = closes || loosest <= T(tol) ? T(2) : T(1);
      t *= ratio;
      scale_scores(p, t);
      if (structured_ != nullptr) structured_->rescale(ratio);
      compact_.follow_scores(ratio);
    }
    compact_.settle(false);
    if (result.status != Status::infeasible && !in_trouble() && !on_the_way_) {
      integral_ = program_.round(compact_.point().mu, eta_.data, hi_.data, double(t), bound_, tol);
    }
    copy(eta_.first(p.n), p.eta);
    copy(hi_.first(p.m), p.hi);
    if (structured_ != nullptr) structured_->rescale(1 / double(t));
    compact_.scale_multipliers(1 / t);
    return result;
  }

 private:
  static constexpr int kMostSteps = 200;  // t doubles in most of them
  static constexpr T kLoosest = T(0.1);   // residual of a step; a fifth of its length is enough

  bool in_trouble() const {
    return structured_ != nullptr && structured_->trouble() != ActiveSetResult::solved;
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

  void scale_scores(Instance<T>& p, T t) const {
    for (int j = 0; j < p.n; ++j) p.eta[j] = t * eta_[j] + center_[j];
    p.wide = false;  // that is rounded itself
    for (int r = p.hard; r < p.links; ++r) p.hi[r] = t * hi_[r];
  }

  // The quadratic is shared by a variable and its links, and so is the centre: then the bound of
  // the solution is its value.
  bool better_bound(const Instance<T>& p, T t) {
    const DualPoint<T>& at = compact_.point();
    for (int j = 0; j < p.n; ++j) {
      const T share = p.weighted() ? p.weight[j] * center_[j] : center_[j];
      work_[j] = at.z[j] - share;
      taken_[j] = -share;
    }
    const double bound = program_.bound(work_.data, at.x.data, double(t), taken_.data);
    if (!std::isfinite(bound)) return false;
    bound_ = std::min(bound_, bound);
    return true;
  }

  CompactSolver<T> compact_;
  LinearProgram<T> program_;
  StructuredFactors<T>* structured_ = nullptr;
  Span<T> eta_, hi_, center_, work_, taken_, warm_;
  double bound_ = 0;
  bool integral_ = false;
  bool on_the_way_ = false;  // to the solution of the quadratic program
};

}  // namespace factormax
