// Projected L-BFGS on the compact dual, with an exact finish. docs/math.md (compact dual).
#pragma once

#include "factormax/dual.hpp"
#include "factormax/farkas.hpp"
#include "factormax/lbfgs.hpp"
#include "factormax/local/box_row.hpp"
#include "factormax/local/or_out.hpp"
#include "factormax/reduced.hpp"

namespace factormax {

template <class T>
class CompactSolver {
 public:
  void allocate(const Problem<T>& p, Workspace& ws) {
    const int rows = p.num_dual(), vars = p.num_vars;
    now_.allocate(rows, vars, ws);
    next_.allocate(rows, vars, ws);
    lbfgs_.allocate(rows, ws);
    system_.allocate(p, ws);
    direction_ = ws.take<T>(rows);
    step_ = ws.take<T>(rows);
    free_rows_ = ws.take<T>(rows);
    mark_ = ws.take<T>(rows);
    pattern_ = ws.take<std::int8_t>(rows + vars);
    const int links = std::max(rows, vars) + 2;
    for (Span<T>* s : {&y_, &w_, &h_, &v_, &t_, &delta_}) *s = ws.take<T>(links);
    order_ = ws.take<std::int32_t>(links);
  }

  const DualPoint<T>& point() const { return now_; }
  ReducedSystem<T>& system() { return system_; }

  // warm: unscaled multipliers of the Problem's rows, or null.
  Result solve(const Problem<T>& problem, const Instance<T>& p, const T* warm, const Options& options,
               Control& control, bool may_poll) {
    p_ = &p;
    now_.resize(p.m, p.n);
    next_.resize(p.m, p.n);
    direction_.size = step_.size = free_rows_.size = mark_.size = p.m;
    lbfgs_.reset(p.m);
    if (!p.consistent) return {Status::infeasible, 0, std::numeric_limits<double>::infinity(), 0};
    start(problem, warm);
    evaluate(p, now_);

    Result result;
    result.iterations = 1;
    const T tol = std::max(T(options.tol), resolution());
    int patience = 2, next_check = 8;
    fill(pattern_, std::int8_t(-1));
    record_pattern();
    if (warm != nullptr) stable_ = patience;  // a warm start tries the finish at once
    copy(Span<const T>(now_.x), mark_);
    for (;;) {
      const T residual = this->residual(now_);
      result.primal_residual = result.dual_residual = residual;
      if (residual <= tol) {
        result.status = Status::converged;
        return result;
      }
      if (result.iterations >= options.max_iter) break;
      if (control.stopped(may_poll)) {
        result.status = Status::interrupted;
        return result;
      }
      if (result.iterations >= next_check) {
        if (infeasible()) {
          result.status = Status::infeasible;
          return result;
        }
        next_check = result.iterations + std::min(result.iterations, 64);
      }
      if (options.finish && stable_ >= patience) {
        stable_ = 0;
        if (newton_step(residual, tol)) {
          ++result.iterations;
          record_pattern();
          stable_ = patience = 1;
          continue;
        }
        result.iterations += attempted_;
        patience *= 2;
      }
      const int passes = descend(options.max_iter - result.iterations);
      if (passes < 0) break;
      result.iterations += passes;
      record_pattern();
    }
    if (infeasible()) result.status = Status::infeasible;
    return result;
  }

 private:
  // tau = 0, half the bound on soft rows; blocks that share no variable are solved on the spot.
  void start(const Problem<T>& problem, const T* warm) {
    const Instance<T>& p = *p_;
    for (int r = 0; r < p.m; ++r) {
      if (warm != nullptr) {
        now_.x[r] = clip(warm[p.row[r]] / p.scale[r], p.lo[r], p.hi[r]);
      } else {
        now_.x[r] = p.is_soft(r) ? p.hi[r] / 2 : T(0);
      }
    }
    for (int f = 0; f < p.num_blocks; ++f) {
      if (problem.block_isolated[p.block[f].source]) solve_alone(p.block[f]);
    }
  }

  void solve_alone(const Block& block) {
    const Instance<T>& p = *p_;
    const int last = block.first + block.count - 1;
    const int begin = p.ptr[last], d = p.length(last);
    const Span<T> y = y_.first(d), w = w_.first(d), h = h_.first(d), v = v_.first(d),
                  t = t_.first(d), delta = delta_.first(d);
    if (block.kind == BlockKind::row) {
      for (int k = 0; k < d; ++k) {
        y[k] = p.eta[p.col[begin + k]];
        w[k] = p.coef[begin + k];
        h[k] = 1;
      }
      const T s = p.scale[last];
      const T lo = p.lo[last] * s, hi = p.hi[last] * s;
      now_.x[last] = local::box_row(local::BoxRow<T>{y, w, h, p.rhs[last]}, lo, hi) / s;
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
    for (int k = 0; k < d; ++k) now_.x[block.first + k] = t[k] / p.scale[block.first + k];
  }

  // Below this the projected gradient is rounding.
  T resolution() const {
    const T eps = std::numeric_limits<T>::epsilon();
    return 4 * eps * (1 + max_abs(Span<const T>(now_.z)));
  }

  // max_r ||a_r|| |x_r - clip(x_r - g_r)|: how far the rows are from holding.
  T residual(const DualPoint<T>& at) const {
    const Instance<T>& p = *p_;
    T largest = 0;
    for (int r = 0; r < p.m; ++r) {
      const T moved = clip(at.x[r] - at.g[r], p.lo[r], p.hi[r]);
      largest = std::max(largest, std::fabs(at.x[r] - moved) / p.scale[r]);
    }
    return largest;
  }

  // One quasi-Newton step along the projected arc. Returns the passes it took, or -1 if no descent
  // is left within the resolution.
  int descend(int budget) {
    const Instance<T>& p = *p_;
    bool all_free = true;
    for (int r = 0; r < p.m; ++r) {
      const bool frozen =
          (now_.x[r] <= p.lo[r] && now_.g[r] > 0) || (now_.x[r] >= p.hi[r] && now_.g[r] < 0);
      free_rows_[r] = frozen ? T(0) : T(1);
      all_free &= !frozen;
    }
    lbfgs_.direction(Span<const T>(now_.g), Span<const T>(free_rows_), all_free, direction_);
    T slope = move(T(1));
    if (!(slope < 0)) {
      if (lbfgs_.empty()) return -1;
      lbfgs_.reset(p.m);
      return 0;
    }
    int passes = 0;
    T alpha = 1, good = 0;
    while (true) {
      evaluate(p, next_);
      ++passes;
      const T end_slope = dot(next_.g, step_);
      if (end_slope > T(0.9) * std::fabs(slope)) {
        // Too far: the secant of the slope, unless a shorter step is already good.
        if (good > 0) {
          alpha = good;
          move(alpha);
          evaluate(p, next_);
          ++passes;
          break;
        }
        if (passes > 25 || passes >= budget) {
          if (lbfgs_.empty()) return -1;
          lbfgs_.reset(p.m);
          return passes;
        }
        alpha *= clip(slope / (slope - end_slope), T(0.1), T(0.7));
      } else if (end_slope < T(0.9) * slope && alpha < T(1e8) && passes < budget) {
        // Hardly any curvature seen: go on.
        good = alpha;
        alpha *= 4;
      } else {
        break;
      }
      const T before = slope;
      slope = move(alpha);
      if (good > 0 && slope >= before) break;  // the whole arc is at its bounds
      if (!(slope < 0)) return -1;
    }
    lbfgs_.push(Span<const T>(now_.x), Span<const T>(now_.g), Span<const T>(next_.x),
                Span<const T>(next_.g));
    std::swap(now_, next_);
    return passes;
  }

  // next.x = clip(x + alpha d), step = next.x - x; returns g . step
  T move(T alpha) {
    const Instance<T>& p = *p_;
    T slope = 0;
    const T *x = now_.x.data, *g = now_.g.data, *d = direction_.data;
#pragma omp simd reduction(+ : slope)
    for (int r = 0; r < p.m; ++r) {
      const T target = x[r] + alpha * d[r];
      const T above = target < p.lo.data[r] ? p.lo.data[r] : target;
      const T moved = above > p.hi.data[r] ? p.hi.data[r] : above;
      next_.x.data[r] = moved;
      step_.data[r] = moved - x[r];
      slope += g[r] * step_.data[r];
    }
    return slope;
  }

  // The exact finish: guess the active set from x - g, put the other multipliers on their bounds,
  // and solve for the rest, docs/math.md (exact finish).
  bool newton_step(T residual, T tol) {
    const Instance<T>& p = *p_;
    attempted_ = 0;
    for (int j = 0; j < p.n; ++j) system_.free[j] = now_.z[j] > 0 && now_.z[j] < 1;
    int count = 0;
    T largest = 0;
    bool others_move = false;
    for (int r = 0; r < p.m; ++r) {
      const T target = now_.x[r] - now_.g[r];
      largest = std::max(largest, std::fabs(now_.x[r]));
      if (target > p.lo[r] && target < p.hi[r]) {
        system_.active[count++] = r;
        next_.x[r] = now_.x[r];
      } else {
        next_.x[r] = target <= p.lo[r] ? p.lo[r] : p.hi[r];
        others_move |= next_.x[r] != now_.x[r];
      }
      step_[r] = next_.x[r] - now_.x[r];
    }
    system_.count = count;
    system_.build(p);
    if (system_.count == 0 && !others_move) return false;
    // r = -g_I - (A_I J A_O^T) step_O
    Span<T> moved = next_.z;
    if (others_move) {
      fill(moved, T(0));
      for (int r = 0; r < p.m; ++r) {
        const T tau = step_[r] * p.scale[r];
        if (tau == 0) continue;
        for (int k = p.ptr[r]; k < p.ptr[r + 1]; ++k) moved[p.col[k]] += p.coef[k] * tau;
      }
    }
    for (int i = 0; i < system_.count; ++i) {
      const int r = system_.active[i];
      direction_[i] = -now_.g[r];
      if (others_move) direction_[i] -= system_.free_product(r, moved.data);
    }
    system_.solve(Span<const T>(direction_));
    for (int i = 0; i < system_.count; ++i) {
      const int r = system_.active[i];
      const T delta = system_.solution[i];
      // On a singular system a huge step reads as optimal where everything is clipped.
      if (!(std::fabs(delta) <= 10 * (1 + largest))) return false;
      next_.x[r] = clip(now_.x[r] + delta, p.lo[r], p.hi[r]);
    }
    evaluate(p, next_);
    attempted_ = 1;
    const T reached = this->residual(next_);
    if (!(reached <= tol || reached <= T(1e-3) * residual)) return false;
    std::swap(now_, next_);
    return true;
  }

  // Counts for how many steps the sides of variables and rows have stood still.
  void record_pattern() {
    const Instance<T>& p = *p_;
    std::int8_t* side = pattern_.data;
    const T* z = now_.z.data;
    int changes = 0;
#pragma omp simd reduction(+ : changes)
    for (int j = 0; j < p.n; ++j) {
      const std::int8_t now = static_cast<std::int8_t>((z[j] > 0) + (z[j] >= 1));
      changes += now != side[j];
      side[j] = now;
    }
    side += p.n;
    for (int r = 0; r < p.m; ++r) {
      const T target = now_.x[r] - now_.g[r];
      const std::int8_t now = static_cast<std::int8_t>((target > p.lo[r]) + (target >= p.hi[r]));
      changes += now != side[r];
      side[r] = now;
    }
    stable_ = changes == 0 ? stable_ + 1 : 0;
  }

  // Tries the multipliers themselves, and their change since the last try, which tends to the ray.
  bool infeasible() {
    const Instance<T>& p = *p_;
    if (p.hard == 0) return false;
    const Span<T> y = step_;
    for (int r = 0; r < p.hard; ++r) y[r] = now_.x[r] * p.scale[r];
    if (certifies_infeasible(p, y, next_.z)) return true;
    for (int r = 0; r < p.hard; ++r) y[r] = (now_.x[r] - mark_[r]) * p.scale[r];
    copy(Span<const T>(now_.x), mark_);
    return certifies_infeasible(p, y, next_.z);
  }

  const Instance<T>* p_ = nullptr;
  DualPoint<T> now_, next_;
  Lbfgs<T> lbfgs_;
  ReducedSystem<T> system_;
  Span<T> direction_, step_, free_rows_, mark_;
  Span<std::int8_t> pattern_;
  Span<T> y_, w_, h_, v_, t_, delta_;
  Span<std::int32_t> order_;
  int stable_ = 0, attempted_ = 0;
};

}  // namespace factormax
