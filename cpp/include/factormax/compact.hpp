// The compact solver: where the minimisation of the dual starts, in which stages the scores grow,
// and what it leaves behind. docs/math.md (19)-(22).
#pragma once

#include "factormax/minimiser.hpp"

namespace factormax {

template <class T>
class CompactSolver {
 public:
  // structured: of the same problem, or null if it has none.
  void allocate(const Problem<T>& p, StructuredFactors<T>* structured, Workspace& ws) {
    minimiser_.allocate(p, structured, ws);
  }

  DualPoint<T>& point() { return minimiser_.walk.now; }
  Result& result() { return minimiser_.result; }
  // What proves that nothing is feasible, unscaled, where a row alone or an oracle does not: (m,),
  // empty without.
  Span<const T> certificate() const { return minimiser_.certificate(); }

  // warm: unscaled multipliers of the Problem's rows, or null. The scores of p are scaled while the
  // solution is approached, and restored exactly. may_give_up: there is another way to go, so that
  // descent that makes no headway is given up after kStuck passes, or more if the scores are small,
  // unless the interior point method is of use; then `gave_up`.
  Result solve(Instance<T>& p, const T* warm, const Options& options, Control& control,
               bool may_poll, bool may_give_up = false) {
    if (!begin(p, options, control, may_poll)) return result();
    const int stuck = relevant_score() > kDirect ? kStuck : kSmallStuck;
    if (may_give_up && options.max_iter >= 2 * stuck) minimiser_.give_up_at = stuck;
    start(warm);
    const bool near = warm != nullptr || solve_beside_rows();
    if (near || approach()) minimise(T(options.tol), options.max_iter, near);
    if (!gave_up()) settle(true);
    return result();
  }
  bool gave_up() const { return minimiser_.gave_up; }

  // The parts of a solve, for those who solve several that differ in their scores. Returns false if
  // some constraint alone can't hold.
  bool begin(Instance<T>& p, const Options& options, Control& control, bool may_poll) {
    minimiser_.begin(p, options, control, may_poll);
    if (!p.consistent) {
      result().status = Status::infeasible;
      result().primal_residual = std::numeric_limits<double>::infinity();
    }
    return p.consistent;
  }

  // Whether every factor has a closed form of its own.
  bool all_isolated() const { return minimiser_.isolated.are_all(instance()); }

  // The scores of p have been changed, about by this ratio.
  void follow_scores(T ratio) {
    scale_multipliers(ratio);
    minimiser_.isolated.solve(instance(), point().x);
  }

  void scale_multipliers(T ratio) {
    for (T& x : point().x) x *= ratio;
  }

  // tau = 0, half the bound on soft rows; factors that share no variable are solved on the spot.
  void start(const T* warm) {
    const Instance<T>& p = instance();
    const Span<T> x = point().x;
    for (int r = 0; r < p.m; ++r) {
      if (warm != nullptr) {
        x[r] = clip(warm[p.row[r]] / p.scale[r], p.lo[r], p.hi[r]);
      } else {
        x[r] = p.is_soft(r) ? p.hi[r] / 2 : T(0);
        if (p.is_link(r)) x[r] = p.eta[p.col[p.ptr[r]]] * p.weight[p.col[p.ptr[r]]] * p.norm[r];
      }
    }
    minimiser_.isolated.solve(p, x);
  }

  // Minimises phi from there until the residual is at most `wanted`.
  void minimise(T wanted, int max_iter, bool warm) { minimiser_.run(wanted, max_iter, warm); }

  // What the structured factors leave behind must be the solution's, with whole faces if those are
  // asked for; and what went wrong with them goes into the status.
  void settle(bool faces) {
    DualWalk<T>& walk = minimiser_.walk;
    StructuredFactors<T>* const structured = walk.structured;
    if (structured == nullptr) return;
    Status& status = result().status;
    if (faces && !walk.in_trouble() && status != Status::infeasible &&
        status != Status::interrupted) {
      walk.stand();
      structured->complete(result().primal_residual, *walk.options, *walk.control, walk.may_poll);
    }
    switch (structured->trouble()) {
      case ActiveSetResult::solved:
        break;
      case ActiveSetResult::no_structure:
        status = Status::infeasible;
        break;
      case ActiveSetResult::limit:
        status = Status::max_iter;
        break;
      default:
        status = Status::interrupted;
    }
    result().oracle_calls = structured->oracle_calls();
  }

 private:
  static constexpr T kDirect = 32;  // scores up to this size are solved at once
  static constexpr T kFirst = 16;   // larger ones are first scaled down to this,
  static constexpr T kStage = 4;    // then up by this, a power of two, until they are whole again

  static constexpr int kStuck = 200;       // passes after which large scores want another way,
  static constexpr int kSmallStuck = 600;  // and small ones, which hardly ever take so many

  // With large scores the dual is nearly piecewise linear, and descent from afar is slow. The
  // solution changes little when the scores grow by a factor: follow it from small scores.
  // Returns false if that already shows that there is no solution.
  bool approach() {
    int stages = 0;
    for (T size = relevant_score(); size > (stages == 0 ? kDirect : kFirst); size /= kStage) {
      ++stages;
    }
    if (stages == 0 || all_isolated()) return true;
    rescale(std::pow(kStage, T(-stages)));
    const Result& now = result();
    for (; stages > 0; --stages) {
      // One pass is left for the scores as they are.
      const int most = minimiser_.walk.options->max_iter - 1;
      for (int half = 0; half < 2; ++half) {
        if (now.iterations >= most) break;
        minimise(T(0.1), std::min(most, now.iterations + minimiser_.kStagePasses), false);
        if (now.status == Status::infeasible || now.status == Status::interrupted) return false;
        if (now.status != Status::max_iter || gave_up()) break;
        if (minimiser_.lose_patience()) break;
      }
      if (minimiser_.impatient() || gave_up() || now.iterations >= most) break;
      rescale(kStage);
    }
    if (stages > 0) rescale(std::pow(kStage, T(stages)));
    return !gave_up();
  }

  // Scores far below all others only keep their variables out.
  T relevant_score() const {
    return std::min(instance().largest_score, 4 * std::max(T(8), instance().top_score));
  }

  void rescale(T ratio) {
    Instance<T>& p = *minimiser_.walk.p;
    if (minimiser_.walk.structured != nullptr) minimiser_.walk.structured->rescale(ratio);
    for (int j = 0; j < p.n; ++j) p.eta[j] *= ratio;
    for (int j = 0; p.wide && j < p.n; ++j) p.eta_low[j] *= ratio;
    for (int r = p.hard; r < p.m; ++r) p.hi[r] *= ratio;
    follow_scores(ratio);
  }

  bool solve_beside_rows() {
    DualWalk<T>& walk = minimiser_.walk;
    return walk.structured != nullptr &&
           walk.structured->solve_beside_rows(*walk.p, walk.now, *walk.options, *walk.control,
                                              walk.may_poll);
  }

  const Instance<T>& instance() const { return *minimiser_.walk.p; }

  Minimiser<T> minimiser_;
};

}  // namespace factormax
