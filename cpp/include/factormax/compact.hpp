// Projected L-BFGS on the compact dual, with an exact finish. docs/math.md (19)-(22).
#pragma once

#include "factormax/dual.hpp"
#include "factormax/farkas.hpp"
#include "factormax/interior.hpp"
#include "factormax/lbfgs.hpp"
#include "factormax/local/box_row.hpp"
#include "factormax/local/or_out.hpp"
#include "factormax/reduced.hpp"

namespace factormax {

template <class T>
class CompactSolver {
 public:
  // structured: of the same problem, or null if it has none.
  void allocate(const Problem<T>& p, StructuredFactors<T>* structured, Workspace& ws) {
    structured_ = structured;
    const int rows = p.num_dual(), vars = p.num_vars;
    now_.allocate(rows, vars, ws);
    next_.allocate(rows, vars, ws);
    lbfgs_.allocate(rows, p.structured.num_links > 0 ? kLongMemory : kMemory, ws);
    system_.allocate(p, structured, ws);
    interior_.allocate(p, ws);
    direction_ = ws.take<T>(rows);
    step_ = ws.take<T>(rows);
    free_rows_ = ws.take<std::int32_t>(rows);
    mark_ = ws.take<T>(rows);
    kept_ = ws.take<T>(rows);
    const int links = std::max(rows, vars) + 2;
    for (Span<T>* s : {&y_, &w_, &h_, &v_, &t_, &delta_}) *s = ws.take<T>(links);
    order_ = ws.take<std::int32_t>(links);
  }

  DualPoint<T>& point() { return now_; }
  Result& result() { return result_; }
  // What proves that nothing is feasible, unscaled, where a row alone or an oracle does not: (m,),
  // empty without.
  Span<const T> certificate() const { return Span<const T>(step_).first(certified_ ? p_->m : 0); }

  // warm: unscaled multipliers of the Problem's rows, or null. The scores of p are scaled while the
  // solution is approached, and restored exactly. may_give_up: there is another way to go, so that
  // descent that makes no headway is given up after kStuck passes, or more if the scores are small,
  // unless the interior point method is of use; then `gave_up`.
  Result solve(const Problem<T>& problem, Instance<T>& p, const T* warm, const Options& options,
               Control& control, bool may_poll, bool may_give_up = false) {
    if (!begin(problem, p, options, control, may_poll)) return result_;
    const int stuck = relevant_score() > kDirect ? kStuck : kSmallStuck;
    if (may_give_up && options.max_iter >= 2 * stuck) give_up_at_ = stuck;
    start(warm);
    const bool near = warm != nullptr || solve_beside_rows();
    if (near || approach()) minimise(T(options.tol), options.max_iter, near);
    if (!gave_up_) settle(true);
    return result_;
  }
  bool gave_up() const { return gave_up_; }

  // The parts of a solve, for those who solve several that differ in their scores. Returns false if
  // some constraint alone can't hold.
  bool begin(const Problem<T>& problem, Instance<T>& p, const Options& options, Control& control,
             bool may_poll) {
    p_ = &p;
    problem_ = &problem;
    options_ = &options;
    control_ = &control;
    may_poll_ = may_poll;
    system_.control = &control;
    system_.may_poll = may_poll;
    system_.most_steps = kFinishSteps;
    result_ = Result{};
    impatient_ = certified_ = gave_up_ = false;
    shift_ = kShift;
    give_up_at_ = kNever;
    interior_patience_ = 0;
    now_.resize(p.m, p.n);
    next_.resize(p.m, p.n);
    direction_.size = step_.size = mark_.size = kept_.size = p.m;
    if (!p.consistent) {
      result_.status = Status::infeasible;
      result_.primal_residual = std::numeric_limits<double>::infinity();
    }
    return p.consistent;
  }

  // Whether every factor has a closed form of its own.
  bool all_isolated() const {
    if (p_->weighted()) return false;
    const Span<Block> blocks = p_->block.first(p_->num_blocks);
    return std::all_of(blocks.begin(), blocks.end(), [](const Block& b) { return b.isolated; });
  }

  // The scores of p have been changed, about by this ratio.
  void follow_scores(T ratio) {
    scale_multipliers(ratio);
    solve_isolated();
  }

  void scale_multipliers(T ratio) {
    for (int r = 0; r < p_->m; ++r) now_.x[r] *= ratio;
  }

  // tau = 0, half the bound on soft rows; blocks that share no variable are solved on the spot.
  void start(const T* warm) {
    const Instance<T>& p = *p_;
    for (int r = 0; r < p.m; ++r) {
      if (warm != nullptr) {
        now_.x[r] = clip(warm[p.row[r]] / p.scale[r], p.lo[r], p.hi[r]);
      } else {
        now_.x[r] = p.is_soft(r) ? p.hi[r] / 2 : T(0);
        if (p.is_link(r))
          now_.x[r] = p.eta[p.col[p.ptr[r]]] * p.weight[p.col[p.ptr[r]]] * p.norm[r];
      }
    }
    solve_isolated();
  }

  // Minimises phi from now_.x until the residual is at most `wanted`.
  void minimise(T wanted, int max_iter, bool warm) {
    const Instance<T>& p = *p_;
    Result& result = result_;
    lbfgs_.reset(p.m);
    evaluate_at(now_);
    ++result.iterations;
    T residual = this->residual(now_);
    T promising = warm ? residual : first_promising();  // where the finish is tried next
    T best = residual;
    int last_gain = result.iterations, next_check = result.iterations + kFirstCheck;
    const int begin = result.iterations;
    int fall_back_at = begin + (impatient_ ? 0 : kPatience);
    const bool alone = all_isolated();
    // Stages on the way to the whole scores need no polish, and float has no digits for it.
    const bool final = Precision<T>::finest && options_->finish && wanted == T(options_->tol);
    bool descended = false;  // by the last step, which was no finish
    bool blunt = final;
    int returns = 0, settled_by = kNever;
    far_ = false;
    // Multipliers of pairs can't run off: they have bounds.
    newton_at_ = structured_ == nullptr && p.hard == 0 ? begin + kSoon : kNever;
    copy(Span<const T>(now_.x), mark_);
    result.status = Status::max_iter;
    for (;;) {
      result.primal_residual = result.dual_residual = residual;
      if (structured_ != nullptr && structured_->trouble() != ActiveSetResult::solved) return;
      if (residual < T(0.5) * best) {
        best = residual;
        last_gain = result.iterations;
      }
      if (result.iterations >= settled_by) {  // multipliers belong where they were
        settled_by = kNever;
        returns = kReturns;
        copy(Span<const T>(kept_), now_.x);
        evaluate_at(now_);
        lbfgs_.reset(p.m);
        best = residual = promising = this->residual(now_);
        last_gain = ++result.iterations - kStall - 1;
        result.primal_residual = result.dual_residual = residual;
      }
      T tol = wanted, rounding = wanted;
      if (residual <= kNear) {
        const T resolved = resolution();
        tol = std::max(wanted, std::min(resolved, unresolved()));
        // A multiplier moves all the free variables of its row at once.
        rounding = std::max(wanted, std::min(2 * resolved * p.longest_row, kNear));
      }
      const T enough =
          Precision<T>::finest ? rounding : tol;  // float leaves what it can't resolve to double
      const bool idle = alone || result.iterations - last_gain > kStall;
      const bool at_rest = residual <= rounding && idle;
      if (residual <= tol || at_rest) {
        // Descent ends wherever `tol` is met, which leaves the variables of many rows further off
        // than that; the finish ends at the solution.
        if (std::exchange(descended, false) && final && p.m > kManyRows &&
            residual > kJump * wanted && result.iterations < max_iter) {
          const bool done = newton_step(residual, T(0));
          result.iterations += attempted_;
          if (done) {
            residual = promising = this->residual(now_);
            continue;
          }
        }
        const bool blurred = rounding > std::max(wanted, kBlurred);
        if (!alone && blurred && returns < kReturns && result.iterations < max_iter &&
            bring_back()) {
          ++returns;
          last_gain = ++result.iterations;
          settled_by = std::min(result.iterations + kSettle, std::max(max_iter - 1, last_gain + 1));
          best = residual = promising = this->residual(now_);
          continue;
        }
        result.status = residual <= enough ? Status::converged : Status::stalled;
        return;
      }
      if (alone) {  // the closed forms are all that this precision has
        result.status = Status::stalled;
        break;
      }
      if (result.iterations >= max_iter || control_->late()) break;
      if (control_->stopped(may_poll_)) {
        result.status = Status::interrupted;
        return;
      }
      if (result.iterations >= next_check || far_) {
        far_ = false;
        if (infeasible()) {
          result.status = Status::infeasible;
          return;
        }
        next_check = result.iterations + std::min(result.iterations, kCheckEvery);
      }
      if (options_->finish && residual <= promising) {
        promising = residual / 2;
        const bool done = newton_step(residual, tol);
        result.iterations += attempted_;
        if (done) {
          residual = promising = this->residual(now_);
          descended = false;
          continue;
        }
        if (result.iterations >= max_iter) break;
      }
      if (result.iterations >= give_up_at_ && !interior_fits()) {
        gave_up_ = true;
        break;
      }
      // It takes a step at least, and an evaluation of what it found.
      if (result.iterations >= fall_back_at && result.iterations + 2 <= max_iter) {
        const int patience = std::min(interior_patience(), (max_iter - begin) / 2);
        if (!impatient_ && result.iterations - begin < patience) {
          fall_back_at = begin + patience;
          continue;
        }
        fall_back_at = kNever;
        if (!interior_fits()) continue;
        if (fall_back(max_iter - result.iterations - 1)) {
          result.status = Status::infeasible;
          return;
        }
        residual = promising = this->residual(now_);
        continue;
      }
      // In float the directions of near-singular systems end further from the solution.
      const bool slow = Precision<T>::resolves_flat_systems && result.iterations >= kSlow &&
                        result.iterations - begin >= kWarmUp;
      system_.most_work = slow ? system_.kAnyWork : pass_work();
      const bool newton = options_->finish && (slow || result.iterations >= newton_at_);
      least_shift_ = result.iterations - begin < kFlat ? kLeastShift : kFlatShift;
      const int passes = descend(max_iter - result.iterations, newton);
      if (passes < 0) {
        // What is left may be the error of the structured factors.
        if (structured_ != nullptr && residual <= kSharp && std::exchange(blunt, false)) {
          if (!structured_->stand_at(now_)) evaluate_at(now_);
          structured_->sharpen(p, now_, residual, *options_, *control_, may_poll_);
          residual = this->residual(now_);
          continue;
        }
        result.status = residual <= enough ? Status::converged : Status::stalled;
        break;
      }
      result.iterations += passes;
      residual = this->residual(now_);
      descended = true;
    }
    if (result.status != Status::converged && infeasible()) {
      result.status = Status::infeasible;
      gave_up_ = false;
    }
  }

  // What the structured factors leave behind must be the solution's, with whole faces if those are
  // asked for; and what went wrong with them goes into the status.
  void settle(bool faces) {
    if (structured_ == nullptr) return;
    if (faces && structured_->trouble() == ActiveSetResult::solved &&
        result_.status != Status::infeasible && result_.status != Status::interrupted) {
      if (!structured_->stand_at(now_)) evaluate_at(now_);
      structured_->complete(result_.primal_residual, *options_, *control_, may_poll_);
    }
    switch (structured_->trouble()) {
      case ActiveSetResult::solved:
        break;
      case ActiveSetResult::no_structure:
        result_.status = Status::infeasible;
        break;
      case ActiveSetResult::limit:
        result_.status = Status::max_iter;
        break;
      default:
        result_.status = Status::interrupted;
    }
    result_.oracle_calls = structured_->oracle_calls();
  }

 private:
  static constexpr T kDirect = 32;  // scores up to this size are solved at once
  static constexpr T kFirst = 16;   // larger ones are first scaled down to this,
  static constexpr T kStage = 4;    // then up by this, a power of two, until they are whole again

  // Steps of L-BFGS that are remembered; more with links, whose passes cost calls of oracles.
  static constexpr int kMemory = 5, kLongMemory = 10;
  static constexpr int kFinishSteps = 500;  // of conjugate gradients: the finish is an attempt
  // Passes until the first look for a certificate, and at most between two: one costs a pass.
  static constexpr int kFirstCheck = 24, kCheckEvery = 64;

  static constexpr T kPromising = T(0.015);      // residual at which the finish is first tried,
  static constexpr T kOraclePromising = T(0.1);  // with oracles, whose passes cost more than it,
  static constexpr T kMostPromising = T(0.25);   // and with pairs of large scores, at most
  static constexpr T kNear = T(Precision<double>::unresolved);  // below, rounding is thought of
  static constexpr T kSharp = T(1e-6);       // residual that structured factors may leave
  static constexpr int kManyRows = 128;      // whose errors add up
  static constexpr T kLargeMultiplier = 16;  // times the largest score
  static constexpr T kFar = 1000;       // times the scores: no direction is longer, and multipliers
                                        // beyond it are brought back,
  static constexpr int kReturns = 2;    // this often, for they may belong there,
  static constexpr int kSettle = 1000;  // and after so many passes do,
  static constexpr T kBlurred = T(1e-6);  // and if they leave more than this unresolved
  static constexpr int kStall = 12;       // passes without gain that mean rounding, near the end
  static constexpr int kPatience = 120,
                       kMostPatience = 600;  // passes before the fallback is tried,
  static constexpr int kSpare = 20;          // less this many for those of a stage on the way
  static constexpr int kPerPass = 8;       // unknowns that are looked through in the time of a pass
  static constexpr int kStuck = 200;       // passes after which large scores want another way,
  static constexpr int kSmallStuck = 600;  // and small ones, which hardly ever take so many
  static constexpr int kSoon = 20;    // passes after which pairs try Newton's directions, if cheap
  static constexpr int kSlow = 120;   // passes after which directions are Newton's,
  static constexpr int kWarmUp = 10;  // but for the first so many after the scores have changed
  static constexpr T kShift = T(0.01);  // of their matrix, to begin with
  static constexpr T kLeastShift = T(1e-4);
  static constexpr int kFlat = 1500;  // passes after which multipliers have far to go along a flat
  static constexpr T kFlatShift = T(1e-8);  // valley, where a larger shift keeps steps short
  static constexpr int kNever = std::numeric_limits<int>::max();

  static constexpr T kSteep = T(0.9);  // of the slope: a step that ends with more has overshot, or,
                                       // downwards, has seen hardly any curvature
  static constexpr T kLonger = 4;      // by which it then grows,
  static constexpr T kRay = 1000;      // which may be along a ray of an infeasible problem,
  static constexpr T kLongest = T(1e8);  // and not for ever
  static constexpr int kTries = 25;      // halvings, or so, that end below the rounding
  static constexpr T kArmijo = T(1e-4);  // the usual share of the slope
  static constexpr T kJump = T(1e-3);    // a finish that shrinks the residual by this was right;
  static constexpr T kNearer = T(0.9);   // by this, it is at least a better place to descend from
  static constexpr T kSane = 10;  // times the multipliers: a longer step is of a singular system

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
    for (; stages > 0; --stages) {
      // One pass is left for the scores as they are.
      const int most = options_->max_iter - 1;
      for (int half = 0; half < 2; ++half) {
        if (result_.iterations >= most) break;
        minimise(T(0.1), std::min(most, result_.iterations + kPatience - kSpare), false);
        if (result_.status == Status::infeasible || result_.status == Status::interrupted) {
          return false;
        }
        if (result_.status != Status::max_iter || gave_up_) break;
        impatient_ = result_.iterations >= interior_patience() - kSpare;
        if (impatient_) break;
      }
      if (impatient_ || gave_up_ || result_.iterations >= most) break;
      rescale(kStage);
    }
    if (stages > 0) rescale(std::pow(kStage, T(stages)));
    return !gave_up_;
  }

  // Scores far below all others only keep their variables out.
  T relevant_score() const {
    return std::min(p_->largest_score, 4 * std::max(T(8), p_->top_score));
  }

  bool solve_beside_rows() {
    return structured_ != nullptr &&
           structured_->solve_beside_rows(*p_, now_, *options_, *control_, may_poll_);
  }

  // Multiplications that take as long as a pass, about.
  double pass_work() const { return 4.0 * p_->ptr[p_->m] + 40.0 * p_->m; }

  bool interior_fits() {
    if (interior_patience_ == 0) {
      interior_patience_ = kNever;
      if (structured_ == nullptr && interior_.fits(*p_)) {
        const double passes =
            clip(interior_.work() / pass_work(), double(kPatience), double(kMostPatience));
        interior_patience_ = static_cast<int>(passes);
      }
    }
    return interior_patience_ != kNever;
  }

  // Passes that take about as long as the interior point method, which is then worth a try. To find
  // out whether it fits takes a while, too: until then, passes that take as long as that.
  int interior_patience() {
    const int look = clip((p_->n + p_->m) / kPerPass, kPatience, kMostPatience);
    if (interior_patience_ == 0 && result_.iterations < look - kSpare) return look;
    return interior_fits() ? interior_patience_ : kNever;
  }

  void evaluate_at(DualPoint<T>& at) {
    if (structured_ == nullptr) {
      evaluate(*p_, at);
    } else {
      structured_->evaluate(*p_, at, *options_, *control_, may_poll_);
    }
  }

  void rescale(T ratio) {
    Instance<T>& p = *p_;
    if (structured_ != nullptr) structured_->rescale(ratio);
    for (int j = 0; j < p.n; ++j) p.eta[j] *= ratio;
    for (int j = 0; p.wide && j < p.n; ++j) p.eta_low[j] *= ratio;
    for (int r = p.hard; r < p.m; ++r) p.hi[r] *= ratio;
    follow_scores(ratio);
  }

  // Multipliers of soft rows begin at half their bounds: beside large ones, a large residual is
  // small. Pairs are many, though, which makes the finish expensive.
  T first_promising() const {
    if (structured_ != nullptr) return kOraclePromising;
    if (p_->m == p_->hard) return kPromising;
    T largest = 1;
    for (int r = p_->hard; r < p_->m; ++r) largest = std::max(largest, p_->hi[r] * p_->scale[r]);
    return std::min(kPromising * largest / 2, kMostPromising);
  }

  void solve_isolated() {
    for (const Block& block : p_->block.first(p_->num_blocks)) {
      if (block.isolated) solve_alone(block);
    }
  }

  void solve_alone(const Block& block) {
    const Instance<T>& p = *p_;
    const int last = block.first + block.count - 1;
    const int begin = p.ptr[last], d = p.length(last);
    const Span<T> y = y_.first(d), w = w_.first(d), h = h_.first(d), v = v_.first(d),
                  t = t_.first(d), delta = delta_.first(d);
    if (block.kind != BlockKind::or_out) {
      for (int k = 0; k < d; ++k) {
        y[k] = p.eta[p.col[begin + k]];
        w[k] = p.coef[begin + k];
        h[k] = 1;
      }
      const T s = p.scale[last];
      const local::BoxRow<T> row{y, w, h, p.rhs[last]};
      if (block.kind == BlockKind::band) {
        const T both = local::box_band(row, -p.rhs[block.first]);
        now_.x[last] = std::max(both, T(0)) / s;
        now_.x[block.first] = std::max(-both, T(0)) / p.scale[block.first];
        return;
      }
      now_.x[last] = local::box_row(row, p.lo[last] * s, p.hi[last] * s) / s;
      return;
    }
    // The row l_out - sum l_i <= 0 has coefficient -sign on the inputs, +sign on the output.
    for (int k = 0; k < d; ++k) {
      const bool negated = (p.coef[begin + k] > 0) != (k == d - 1);
      const T eta = p.eta[p.col[begin + k]];
      y[k] = negated ? 1 - eta : eta;
      delta[k] = 1;
    }
    local::or_out<T>(y, delta, v, t, w, h, order_.first(d));
    for (int k = 0; k < std::min(d, block.count); ++k) {
      now_.x[block.first + k] = t[k] / p.scale[block.first + k];
    }
  }

  // Below this the projected gradient is rounding. Free variables are differences of a score and
  // of multipliers of the same size; a score that clips its variable from afar does not matter.
  FACTORMAX_VECTOR T resolution() const {
    const T eps = std::numeric_limits<T>::epsilon();
    const T *x = now_.x.data, *scale = p_->scale.data;
    T largest = largest_of(p_->m, T(0), [=](int r) { return std::fabs(x[r]) * scale[r]; });
    if (p_->num_uneven > 0) {
      largest = 0;
      for (int r = 0; r < p_->m; ++r) {
        const T size = std::fabs(x[r]) * scale[r];  // units are at most 1
        if (size > largest) largest = std::max(largest, size * row_unit(*p_, now_, r));
      }
    }
    return 4 * eps * (1 + largest);
  }

  // The most that may be put down to rounding. What multipliers much larger than the scores hide is
  // resolved in double, where smaller ones are found.
  T unresolved() const {
    const T most = T(Precision<T>::unresolved);
    if (Precision<T>::finest) return most;
    const T eps = std::numeric_limits<T>::epsilon();
    return std::min(most, 4 * eps * (1 + kLargeMultiplier * p_->largest_score));
  }

  // max_r ||a_r|| |x_r - clip(x_r - g_r)|: how far the rows are from holding, in units of
  // variables.
  FACTORMAX_VECTOR T residual(const DualPoint<T>& at) const {
    const Instance<T>& p = *p_;
    const T *x = at.x.data, *g = at.g.data, *lo = p.lo.data, *hi = p.hi.data, *norm = p.norm.data;
    T largest = largest_of(p.m, T(0), [=](int r) {
      // Never form x - g: far out it would round to x.
      const T down = x[r] - lo[r], up = x[r] - hi[r];
      const T least = g[r] < down ? g[r] : down;
      const T step = least > up ? least : up;
      return std::fabs(step) * norm[r];
    });
    if (p.num_uneven > 0) {
      for_uneven([&](int r) { largest = std::max(largest, row_lack(p, at, r)); });
    }
    return largest;
  }

  template <class Visit>
  void for_uneven(const Visit& visit) const {
    for (int i = 0; i < p_->num_loose; ++i) {
      if (p_->uneven[p_->loose[i]]) visit(p_->loose[i]);
    }
  }

  // One step along the projected arc, in the direction of Newton's method if that is asked for, and
  // of a quasi-Newton method otherwise, or where that leads nowhere. Returns the passes it took, at
  // most `budget`, or -1 if no descent is left within the resolution.
  int descend(int budget, bool newton) {
    const Instance<T>& p = *p_;
    int spent = 0;
    if (newton && newton_direction()) {
      spent = search(budget);
      // What was too far is past a kink, where the matrix is another one.
      shift_ = clip(reach_ < 1 ? 4 * shift_ : shift_ / 4, least_shift_, T(1));
      if (reach_ > 0 || spent >= budget) return spent;
    }
    int free = 0;
    for (int r = 0; r < p.m; ++r) {
      const bool frozen =
          (now_.x[r] <= p.lo[r] && now_.g[r] > 0) || (now_.x[r] >= p.hi[r] && now_.g[r] < 0);
      free_rows_[free] = r;
      free += !frozen;
    }
    lbfgs_.direction(Span<const T>(now_.g), free_rows_.first(free), direction_);
    const int passes = spent + search(budget - spent);
    return reach_ > 0 || passes >= budget ? passes : forget(passes);
  }

  // Looks for a step along direction_ and takes it; `reach_` is its length then, or 0. Returns the
  // passes it took, at most `budget`.
  int search(int budget) {
    reach_ = 0;
    shorten();
    T slope = move(T(1));
    int passes = 0;
    T alpha = 1, good = 0;
    while (true) {
      if (!(slope < 0)) return passes;
      evaluate_at(next_);
      ++passes;
      const T end_slope = dot(next_.g, step_);
      if (end_slope > kSteep * std::fabs(slope) || !descends(end_slope, slope)) {  // too far
        if (good > 0) {
          move(good);
          evaluate_at(next_);
          ++passes;
          break;
        }
        if (passes >= budget || passes > kTries) return passes;
        alpha *= clip(slope / (slope - end_slope), T(0.1), T(0.7));  // the secant, within reason
        slope = move(alpha);
      } else if (end_slope < kSteep * slope && alpha < kLongest && passes + 2 <= budget) {
        // Hardly any curvature seen: go on, unless the whole arc is at its bounds.
        good = alpha;
        alpha *= kLonger;
        far_ |= alpha > kRay;  // a ray? see whether it proves that nothing is feasible
        const T longer = move(alpha);
        if (longer >= slope) {
          move(good);
          break;
        }
        slope = longer;
      } else {
        break;
      }
    }
    reach_ = good > 0 ? good : alpha;
    lbfgs_.push(Span<const T>(now_.x), Span<const T>(now_.g), Span<const T>(next_.x),
                Span<const T>(next_.g));
    std::swap(now_, next_);
    return passes;
  }

  // Steps along which hardly any curvature was seen make a direction as long as rounding would have
  // it, out to where nothing is left of the scores, and every slope is 0.
  void shorten() {
    const T longest = max_abs(Span<const T>(direction_));
    if (!(longest > kFar * (1 + p_->largest_score))) return;
    const T most = kFar * (1 + p_->largest_score + max_abs(Span<const T>(now_.x)));
    if (!(longest > most)) return;
    for (int r = 0; r < p_->m; ++r) direction_[r] *= most / longest;
  }

  // By convexity phi falls where the slope at the end is not positive. Elsewhere compare values, if
  // they can be told apart.
  bool descends(T end_slope, T slope) {
    if (end_slope <= 0) return true;
    const T before = dual_value(*p_, now_), after = dual_value(*p_, next_);
    const T noise = 64 * std::numeric_limits<T>::epsilon() * (1 + std::fabs(before));
    return after <= before + kArmijo * slope + noise;
  }

  // Gives up the direction. What is remembered may be to blame; if nothing is, we are at the end.
  int forget(int passes) {
    if (lbfgs_.empty()) return -1;
    lbfgs_.reset(p_->m);
    return passes;
  }

  // next.x = clip(x + alpha d), step = next.x - x; returns g . step
  FACTORMAX_VECTOR T move(T alpha) {
    const Instance<T>& p = *p_;
    T slope = 0;
    const T *x = now_.x.data, *g = now_.g.data, *d = direction_.data;
#pragma omp simd reduction(+ : slope)
    for (int r = 0; r < p.m; ++r) {
      const T target = x[r] + alpha * d[r];
      const T above = target < p.lo.data[r] ? p.lo.data[r] : target;
      const T moved = target > p.hi.data[r] ? p.hi.data[r] : above;
      next_.x.data[r] = moved;
      step_.data[r] = moved - x[r];
      slope += g[r] * step_.data[r];
    }
    return slope;
  }

  // A multiplier that changes nothing any more, such as that of a row which keeps a variable at its
  // bound, may have run off, and next to it nothing else is resolved: the point only looks like the
  // solution. Brings such multipliers back; returns whether there were any.
  bool bring_back() {
    const Instance<T>& p = *p_;
    const T largest = max_abs(Span<const T>(now_.x));
    T size = 1;
    if (largest <= kFar * size) return false;
    for (int j = 0; j < p.n; ++j) size = std::max(size, std::fabs(p.eta[j]));
    for (int r = p.hard; r < p.links; ++r) size = std::max(size, p.hi[r]);
    if (structured_ != nullptr) size = std::max(size, T(structured_->largest_score()));
    if (largest <= kFar * size) return false;
    bool any = false;
    copy(Span<const T>(now_.x), kept_);
    for (int r = 0; r < p.m; ++r) {
      T least = p.norm[r];  // how far a unit moves the variable that it moves least
      for (int k = p.ptr[r]; k < p.ptr[r + 1]; ++k) least = std::min(least, std::fabs(p.coef[k]));
      const T limit = kFar * size * p.norm[r] / least;
      any |= std::fabs(now_.x[r]) > limit;
      now_.x[r] = clip(now_.x[r], -limit, limit);
    }
    if (!any) return false;
    solve_isolated();
    evaluate_at(now_);
    lbfgs_.reset(p.m);
    return true;
  }

  // Starts again from the multipliers of an interior point method, close to the solution. Without a
  // solution they grow along a ray that proves it: then returns true.
  bool fall_back(int budget) {
    const Instance<T>& p = *p_;
    const auto is_proof = [&] {
      for (int r = 0; r < p.m; ++r) step_[r] = clip(next_.x[r], p.lo[r], p.hi[r]) * p.scale[r];
      certified_ = p.hard > 0 && certifies_infeasible(p, step_, next_.z, structured_);
      return certified_;
    };
    result_.iterations += interior_.solve(p, budget, next_.x, is_proof);
    if (certified_ || is_proof()) return true;
    for (int r = 0; r < p.m; ++r) {
      next_.x[r] = clip(next_.x[r], p.lo[r], p.hi[r]);
      if (!std::isfinite(next_.x[r])) return false;
    }
    evaluate_at(next_);
    ++result_.iterations;
    if (!(residual(next_) < residual(now_))) return false;
    std::swap(now_, next_);
    lbfgs_.reset(p.m);
    return false;
  }

  // The exact finish: guess the active set from x - g, put the other multipliers on their bounds,
  // and solve for the rest, docs/math.md (21).
  bool newton_step(T residual, T tol) {
    const Instance<T>& p = *p_;
    attempted_ = 0;
    system_.most_work = system_.kAnyWork;
    const bool others_move = build_system(T(0));
    if (system_.count == 0 && !others_move) return false;
    solve_system(others_move, T(Precision<T>::finish));
    T largest = 0;
    for (int r = 0; r < p.m; ++r) {
      largest = std::max(largest, std::fabs(now_.x[r]));
      next_.x[r] = step_[r] < 0 ? p.lo[r] : step_[r] > 0 ? p.hi[r] : now_.x[r];
    }
    for (int i = 0; i < system_.count; ++i) {
      const int r = system_.active[i];
      const T delta = system_.solution[i];
      // On a singular system a huge step reads as optimal where everything is clipped.
      if (!(std::fabs(delta) <= kSane * (1 + largest))) return false;
      next_.x[r] = clip(now_.x[r] + delta, p.lo[r], p.hi[r]);
    }
    evaluate_at(next_);
    attempted_ = 1;
    const T reached = this->residual(next_);
    if (!(reached <= tol || reached <= kJump * residual)) {
      // Not the end, but it may well be nearer to it: descend from there.
      if (!(reached <= kNearer * residual)) return false;
      if (!(dual_value(p, next_) < dual_value(p, now_))) return false;
    }
    std::swap(now_, next_);
    return true;
  }

  // direction_ = that of Newton's method with a shifted matrix: far from the solution a row need
  // not have a free variable, and then it has no curvature. Returns false if it takes more than
  // `most_work` of the system.
  bool newton_direction() {
    const Instance<T>& p = *p_;
    const bool others_move = build_system(shift_);
    if (!built_) {
      newton_at_ = 2 * result_.iterations;
      return false;
    }
    for (int r = 0; r < p.m; ++r) {
      direction_[r] = inside(r) ? -now_.g[r] / shift_ : step_[r];
    }
    solve_system(others_move, T(0.01));
    for (int i = 0; i < system_.count; ++i) direction_[system_.active[i]] = system_.solution[i];
    return true;
  }

  // Whether a step against the gradient leaves a multiplier inside its bounds.
  bool inside(int r) const {
    return now_.g[r] < now_.x[r] - p_->lo[r] && now_.g[r] > now_.x[r] - p_->hi[r];
  }

  // The system of the multipliers inside their bounds; step_ takes the others to theirs. Returns
  // whether that moves any.
  bool build_system(T shift) {
    const Instance<T>& p = *p_;
    int count = 0;
    bool others_move = false;
    for (int r = 0; r < p.m; ++r) {
      step_[r] = 0;
      if (inside(r)) {
        system_.active[count++] = r;
      } else {
        step_[r] = (now_.g[r] >= now_.x[r] - p.lo[r] ? p.lo[r] : p.hi[r]) - now_.x[r];
        others_move |= step_[r] != 0;
      }
    }
    if (structured_ != nullptr && !structured_->stand_at(now_)) evaluate_at(now_);
    system_.count = count;
    system_.shift = shift;
    const T* z = now_.z.data;
    if (p.weighted()) {
      built_ = system_.build(p, [&](int j) { return z[j] > 0 && z[j] * p.give(j) < 1; });
    } else {
      built_ = system_.build(p, [z](int j) { return z[j] > 0 && z[j] < 1; });
    }
    return others_move;
  }

  // For the right-hand side -g_I - (A_I J A_O^T) step_O.
  void solve_system(bool others_move, T wanted) {
    const Span<T> rhs = next_.g;
    if (others_move) {
      const Span<T> moved = next_.z;
      fill(moved, T(0));
      add_rows(*p_, T(1), step_.data, moved.data, next_.g.data);
      system_.multiply(moved.data, rhs);
    } else {
      fill(rhs, T(0));
    }
    for (int i = 0; i < system_.count; ++i) rhs[i] = -now_.g[system_.active[i]] - rhs[i];
    system_.solve(Span<const T>(rhs), wanted);
  }

  // Tries the multipliers themselves, and their change since the last try, which tends to the ray.
  bool infeasible() {
    const Instance<T>& p = *p_;
    if (p.hard == 0 && !p.weighted()) return false;
    const Span<T> y = step_;
    for (int r = 0; r < p.m; ++r) y[r] = now_.x[r] * p.scale[r];
    certified_ = certifies_infeasible(p, y, next_.z, structured_);
    if (certified_) return true;
    for (int r = 0; r < p.m; ++r) y[r] = (now_.x[r] - mark_[r]) * p.scale[r];
    copy(Span<const T>(now_.x), mark_);
    certified_ = certifies_infeasible(p, y, next_.z, structured_);
    return certified_;
  }

  Instance<T>* p_ = nullptr;
  const Problem<T>* problem_ = nullptr;
  const Options* options_ = nullptr;
  Control* control_ = nullptr;
  bool may_poll_ = false;
  Result result_;
  DualPoint<T> now_, next_;
  Lbfgs<T> lbfgs_;
  ReducedSystem<T> system_;
  Span<T> direction_, step_, mark_;
  Span<T> kept_;  // multipliers before some were brought back
  Span<std::int32_t> free_rows_;
  Span<T> y_, w_, h_, v_, t_, delta_;
  Span<std::int32_t> order_;
  int attempted_ = 0;
  int newton_at_ = 0;            // the pass at which Newton's direction is looked at next
  bool built_ = false;           // whether there is a system to solve
  T shift_ = kShift;             // of Newton's matrix: smaller after a whole step, else larger
  T least_shift_ = kLeastShift;  // which it is at least
  T reach_ = 0;                  // how far along its direction the last step went
  int interior_patience_ = 0;    // 0: not known yet
  int give_up_at_ = kNever;      // after this many passes
  bool far_ = false, impatient_ = false, certified_ = false, gave_up_ = false;
  InteriorPoint<T> interior_;
  StructuredFactors<T>* structured_ = nullptr;
};

}  // namespace factormax
