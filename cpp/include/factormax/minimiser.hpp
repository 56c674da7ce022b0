// Minimises the compact dual: descent, the exact finish, and what to do where neither gets on.
// docs/math.md (19)-(22).
#pragma once

#include "factormax/descent.hpp"
#include "factormax/fallback.hpp"
#include "factormax/isolated.hpp"
#include "factormax/newton.hpp"

namespace factormax {

template <class T>
class Minimiser {
 public:
  static constexpr int kStagePasses = Fallback<T>::kPatience - Fallback<T>::kSpare;
  static constexpr int kNever = Fallback<T>::kNever;

  DualWalk<T> walk;
  Result result;
  IsolatedFactors<T> isolated;
  int give_up_at = kNever;  // passes after which there is another way to go,
  bool gave_up = false;     // and whether that was the end

  // structured: of the same problem, or null if it has none.
  void allocate(const Problem<T>& p, StructuredFactors<T>* structured, Workspace& ws) {
    walk.allocate(p, structured, ws);
    isolated.allocate(p, ws);
    descent_.allocate(p, ws);
    newton_.allocate(p, structured, ws);
    fallback_.allocate(p, ws);
    proof_.allocate(p, structured, ws);
    kept_ = ws.take<T>(p.num_dual());
  }

  void begin(Instance<T>& p, const Options& options, Control& control, bool may_poll) {
    walk.begin(p, options, control, may_poll);
    newton_.begin(control, may_poll);
    fallback_.begin();
    proof_.begin(p.m);
    kept_.size = p.m;
    result = Result{};
    give_up_at = kNever;
    gave_up = impatient_ = false;
  }

  // What proves that nothing is feasible, unscaled: (m,), empty without.
  Span<const T> certificate() const { return proof_.certificate(); }

  // Minimises phi from walk.now.x until the residual is at most `wanted`.
  void run(T wanted, int max_iter, bool warm) {
    begin_course(wanted, max_iter, warm);
    Next next = Next::again;
    while (next == Next::again) {
      next = judge();
      if (next == Next::on) next = finish();
      if (next == Next::on) next = change_method();
      if (next == Next::on) next = descend();
    }
    if (next == Next::open && result.status != Status::converged && is_infeasible()) {
      result.status = Status::infeasible;
      gave_up = false;
    }
  }

  // A stage on the way to the whole scores has taken its passes. Returns whether the next run is to
  // fall back at once.
  bool lose_patience() {
    impatient_ =
        result.iterations >= fallback_.patience(walk, result.iterations) - fallback_.kSpare;
    return impatient_;
  }
  bool impatient() const { return impatient_; }

 private:
  // Passes until the first look for a certificate, and at most between two: one costs a pass.
  static constexpr int kFirstCheck = 24, kCheckEvery = 64;

  static constexpr T kPromising = T(0.015);      // residual at which the finish is first tried,
  static constexpr T kOraclePromising = T(0.1);  // with oracles, whose passes cost more than it,
  static constexpr T kMostPromising = T(0.25);   // and with pairs of large scores, at most
  static constexpr T kNear = T(Precision<double>::unresolved);  // below, rounding is thought of
  static constexpr T kSharp = T(1e-6);    // residual that structured factors may leave
  static constexpr int kManyRows = 128;   // whose errors add up
  static constexpr T kFar = 1000;         // times the scores: multipliers beyond are brought back,
  static constexpr int kReturns = 2;      // this often, for they may belong there,
  static constexpr int kSettle = 1000;    // and after so many passes do,
  static constexpr T kBlurred = T(1e-6);  // and if they leave more than this unresolved
  static constexpr int kStall = 12;       // passes without gain that mean rounding, near the end
  static constexpr int kSoon = 20;    // passes after which pairs try Newton's directions, if cheap
  static constexpr int kSlow = 120;   // passes after which directions are Newton's,
  static constexpr int kWarmUp = 10;  // but for the first so many after the scores have changed
  static constexpr int kFlat = 1500;  // passes after which multipliers have far to go along a flat
                                      // valley

  // What a run keeps from pass to pass.
  struct Course {
    T wanted = 0;
    int begin = 0, max_iter = 0;  // the passes where it began, and where it has to end
    T residual = 0;
    T best = 0;               // the residual when it last was halved,
    int last_gain = 0;        // and the pass at which that was
    T tol = 0, rounding = 0;  // what is enough, and what is put down to rounding if it stays
    T promising = 0;          // residual at which the finish is tried next
    int next_check = 0;       // pass of the next look for a certificate,
    int fall_back_at = 0;     // of the fallback,
    int newton_at = 0;        // and of the next look at Newton's direction
    int returns = 0;          // how often multipliers have been brought back,
    int settled_by = kNever;  // and the pass by which that must have helped
    bool alone = false;       // closed forms are all there is
    bool final = false;       // no stage on the way to the whole scores
    bool blunt = false;       // structured factors have not been sharpened
    bool descended = false;   // by the last step, which was no finish
  };

  enum class Next {
    on,     // with this pass
    again,  // with another one
    end,    // as the status says
    open,   // unless nothing is feasible
  };

  Next end_with(Status status, Next next = Next::end) {
    result.status = status;
    return next;
  }

  void begin_course(T wanted, int max_iter, bool warm) {
    descent_.reset(walk.p->m);
    descent_.far = false;
    walk.evaluate(walk.now);
    Course& c = course_;
    c = Course{};
    c.wanted = wanted;
    c.max_iter = max_iter;
    c.begin = ++result.iterations;
    c.residual = c.best = walk.residual();
    c.promising = warm ? c.residual : first_promising();
    c.last_gain = c.begin;
    c.next_check = c.begin + kFirstCheck;
    c.fall_back_at = c.begin + (impatient_ ? 0 : fallback_.kPatience);
    c.alone = isolated.are_all(*walk.p);
    // Stages on the way to the whole scores need no polish, and float has no digits for it.
    c.final = Precision<T>::finest && walk.options->finish && wanted == T(walk.options->tol);
    c.blunt = c.final;
    // Multipliers of pairs can't run off: they have bounds.
    c.newton_at = walk.structured == nullptr && walk.p->hard == 0 ? c.begin + kSoon : kNever;
    proof_.mark(walk.now.x);
    result.status = Status::max_iter;
  }

  // Whether this is the end.
  Next judge() {
    Course& c = course_;
    result.primal_residual = result.dual_residual = c.residual;
    if (walk.in_trouble()) return Next::end;
    if (c.residual < T(0.5) * c.best) {
      c.best = c.residual;
      c.last_gain = result.iterations;
    }
    if (result.iterations >= c.settled_by) leave_alone();
    c.tol = c.rounding = c.wanted;
    if (c.residual <= kNear) {
      const T resolved = resolution_at(*walk.p, walk.now);
      c.tol = std::max(c.wanted, std::min(resolved, most_unresolved(*walk.p)));
      // A multiplier moves all the free variables of its row at once.
      c.rounding = std::max(c.wanted, std::min(2 * resolved * walk.p->longest_row, kNear));
    }
    const bool idle = c.alone || result.iterations - c.last_gain > kStall;
    if (c.residual <= c.tol || (c.residual <= c.rounding && idle)) return at_goal();
    // The closed forms are all that this precision has.
    if (c.alone) return end_with(Status::stalled, Next::open);
    if (result.iterations >= c.max_iter || walk.control->late()) return Next::open;
    if (walk.control->stopped(walk.may_poll)) return end_with(Status::interrupted);
    if (result.iterations >= c.next_check || descent_.far) {
      descent_.far = false;
      if (is_infeasible()) return end_with(Status::infeasible);
      c.next_check = result.iterations + std::min(result.iterations, kCheckEvery);
    }
    return Next::on;
  }

  // The residual is small enough, which need not mean that the point is.
  Next at_goal() {
    Course& c = course_;
    // Descent ends wherever `tol` is met, which leaves the variables of many rows further off
    // than that; the finish ends at the solution.
    if (std::exchange(c.descended, false) && c.final && walk.p->m > kManyRows &&
        c.residual > newton_.kJump * c.wanted && result.iterations < c.max_iter &&
        try_finish(T(0))) {
      return Next::again;
    }
    const bool blurred = c.rounding > std::max(c.wanted, kBlurred);
    if (!c.alone && blurred && c.returns < kReturns && result.iterations < c.max_iter &&
        bring_back()) {
      ++c.returns;
      c.last_gain = ++result.iterations;
      c.settled_by =
          std::min(result.iterations + kSettle, std::max(c.max_iter - 1, c.last_gain + 1));
      c.best = c.residual = c.promising = walk.residual();
      return Next::again;
    }
    return end_with(reached());
  }

  // How it ends where it stands. What float can't resolve it leaves to double.
  Status reached() const {
    const T enough = Precision<T>::finest ? course_.rounding : course_.tol;
    return course_.residual <= enough ? Status::converged : Status::stalled;
  }

  // Tries the exact finish if the residual has become small enough for it.
  Next finish() {
    Course& c = course_;
    if (!walk.options->finish || !(c.residual <= c.promising)) return Next::on;
    c.promising = c.residual / 2;
    if (try_finish(c.tol)) {
      c.descended = false;
      return Next::again;
    }
    return result.iterations >= c.max_iter ? Next::open : Next::on;
  }

  bool is_infeasible() { return proof_.look(*walk.p, walk.now.x, walk.next.z); }

  bool try_finish(T tol) {
    Course& c = course_;
    const auto [done, passes] = newton_.finish(walk, c.residual, tol);
    result.iterations += passes;
    if (done) c.residual = c.promising = walk.residual();
    return done;
  }

  // Gives up, or falls back to the interior point method, where descent takes too long.
  Next change_method() {
    Course& c = course_;
    const int passes = result.iterations;
    if (passes >= give_up_at && !fallback_.fits(walk)) {
      gave_up = true;
      return Next::open;
    }
    // It takes a step at least, and an evaluation of what it found.
    if (passes < c.fall_back_at || passes + 2 > c.max_iter) return Next::on;
    const int patience = std::min(fallback_.patience(walk, passes), (c.max_iter - c.begin) / 2);
    if (!impatient_ && passes - c.begin < patience) {
      c.fall_back_at = c.begin + patience;
      return Next::again;
    }
    c.fall_back_at = kNever;
    if (!fallback_.fits(walk)) return Next::again;
    const auto outcome = fallback_.attempt(walk, proof_, c.max_iter - passes - 1);
    result.iterations += outcome.passes;
    if (proof_.found()) return end_with(Status::infeasible);
    if (outcome.moved) descent_.reset(walk.p->m);
    c.residual = c.promising = walk.residual();
    return Next::again;
  }

  Next descend() {
    Course& c = course_;
    // In float the directions of near-singular systems end further from the solution.
    const bool slow = Precision<T>::resolves_flat_systems && result.iterations >= kSlow &&
                      result.iterations - c.begin >= kWarmUp;
    const bool newton = walk.options->finish && (slow || result.iterations >= c.newton_at);
    const double most_work = slow ? ReducedSystem<T>::kAnyWork : pass_work(*walk.p);
    const int passes = step(c.max_iter - result.iterations, newton, most_work);
    if (passes >= 0) {
      result.iterations += passes;
      c.descended = true;
    } else if (walk.structured != nullptr && c.residual <= kSharp &&
               std::exchange(c.blunt, false)) {
      // What is left may be the error of the structured factors.
      walk.stand();
      walk.structured->sharpen(*walk.p, walk.now, c.residual, *walk.options, *walk.control,
                               walk.may_poll);
    } else {
      return end_with(reached(), Next::open);
    }
    c.residual = walk.residual();
    return Next::again;
  }

  // One step along the projected arc, in the direction of Newton's method if that is asked for and
  // takes no more than `most_work`, and of a quasi-Newton method otherwise, or where that leads
  // nowhere. Returns the passes it took, at most `budget`, or -1 if no descent is left within the
  // resolution.
  int step(int budget, bool newton, double most_work) {
    int spent = 0;
    if (newton && newton_.find_direction(walk, most_work, descent_.direction)) {
      spent = descent_.search(walk, budget);
      newton_.adapt_shift(descent_.reach, result.iterations - course_.begin >= kFlat);
      if (descent_.reach > 0 || spent >= budget) return spent;
    } else if (newton) {
      course_.newton_at = 2 * result.iterations;
    }
    const int passes = descent_.step(walk, budget - spent);
    return passes < 0 ? passes : spent + passes;
  }

  // A multiplier that changes nothing any more, such as that of a row which keeps a variable at its
  // bound, may have run off, and next to it nothing else is resolved: the point only looks like the
  // solution. Brings such multipliers back; returns whether there were any.
  bool bring_back() {
    const Instance<T>& p = *walk.p;
    const Span<T> x = walk.now.x;
    const T largest = max_abs(Span<const T>(x));
    T size = 1;
    if (largest <= kFar * size) return false;
    for (int j = 0; j < p.n; ++j) size = std::max(size, std::fabs(p.eta[j]));
    for (int r = p.hard; r < p.links; ++r) size = std::max(size, p.hi[r]);
    if (walk.structured != nullptr) size = std::max(size, T(walk.structured->largest_score()));
    if (largest <= kFar * size) return false;
    bool any = false;
    copy(Span<const T>(x), kept_);
    for (int r = 0; r < p.m; ++r) {
      T least = p.norm[r];  // how far a unit moves the variable that it moves least
      for (int k = p.ptr[r]; k < p.ptr[r + 1]; ++k) least = std::min(least, std::fabs(p.coef[k]));
      const T limit = kFar * size * p.norm[r] / least;
      any |= std::fabs(x[r]) > limit;
      x[r] = clip(x[r], -limit, limit);
    }
    if (!any) return false;
    isolated.solve(p, x);
    walk.evaluate(walk.now);
    descent_.reset(p.m);
    return true;
  }

  // Multipliers that were brought back belong where they were.
  void leave_alone() {
    Course& c = course_;
    c.settled_by = kNever;
    c.returns = kReturns;
    copy(Span<const T>(kept_), walk.now.x);
    walk.evaluate(walk.now);
    descent_.reset(walk.p->m);
    c.best = c.residual = c.promising = walk.residual();
    c.last_gain = ++result.iterations - kStall - 1;
    result.primal_residual = result.dual_residual = c.residual;
  }

  // Multipliers of soft rows begin at half their bounds: beside large ones, a large residual is
  // small. Pairs are many, though, which makes the finish expensive.
  T first_promising() const {
    const Instance<T>& p = *walk.p;
    if (walk.structured != nullptr) return kOraclePromising;
    if (p.m == p.hard) return kPromising;
    T largest = 1;
    for (int r = p.hard; r < p.m; ++r) largest = std::max(largest, p.hi[r] * p.scale[r]);
    return std::min(kPromising * largest / 2, kMostPromising);
  }

  Descent<T> descent_;
  Newton<T> newton_;
  Fallback<T> fallback_;
  InfeasibilityProof<T> proof_;
  Course course_;
  Span<T> kept_;  // multipliers before some were brought back
  bool impatient_ = false;
};

}  // namespace factormax
