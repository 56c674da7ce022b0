// The paper's Algorithm 1 with its errata corrected, docs/math.md (34)-(38). Every factor keeps its
// own scaled copy v of its variables, and solves its local problem in closed form.
#pragma once

#include "factormax/dual.hpp"
#include "factormax/farkas.hpp"
#include "factormax/local/box_row.hpp"
#include "factormax/local/or_out.hpp"

namespace factormax {

template <class T>
class AdmmSolver {
 public:
  // structured: the problem's structured factors, or null if it has none.
  void allocate(const Problem<T>& p, StructuredFactors<T>* structured, Workspace& ws) {
    structured_ = structured;
    const int rows = p.num_dual(), vars = p.num_vars;
    const int own = structured == nullptr ? 0 : p.structured.var_ptr[p.structured.count];
    const int entries = p.num_incidences() + own;
    point_.allocate(rows, vars, ws);
    lam_ = ws.take<T>(entries);
    copy_ = ws.take<T>(entries);
    delta_ = ws.take<T>(vars);
    base_ = ws.take<T>(vars);
    average_ = ws.take<T>(vars);
    proof_.allocate(p, structured, ws);
    for (Span<T>* s : {&y_, &w_, &h_, &v_, &t_, &d_}) *s = ws.take<T>(vars + 2);
    order_ = ws.take<std::int32_t>(vars + 2);
  }

  DualPoint<T>& point() { return point_; }
  Span<const T> certificate() const { return proof_.certificate(); }

  // unit: what the step size is multiplied by: the size of the scores, where there is no quadratic
  // term to compare them with.
  Result solve(const Instance<T>& p, const T* warm, const Options& options, double unit,
               Control& control, bool may_poll) {
    p_ = &p;
    proof_.begin(p.m);
    unit_ = T(unit);
    gamma_ = T(options.step_size * unit);
    quadratic_ = options.linear ? T(0) : T(1);
    point_.resize(p.m, p.n);
    if (!p.consistent) {
      return {Status::infeasible, 0, 0, std::numeric_limits<double>::infinity(), 0};
    }
    start(warm);

    Result result;
    int next_check = 64;
    const T tol = std::max(T(options.tol), 8 * std::numeric_limits<T>::epsilon());
    for (int iteration = 1;; ++iteration) {
      cut_short_ = false;
      for (int f = 0; f < p.num_blocks; ++f) solve_block(p.block[f]);
      for_structured([&](StructuredFactor& f, int begin) {
        solve_structured(f, begin, options, control, may_poll);
      });
      if (trouble() != ActiveSetResult::solved) break;
      average(result);
      result.iterations = iteration;
      if (result.primal_residual <= tol && result.dual_residual <= tol && !cut_short_) {
        result.status = Status::converged;
        break;
      }
      if (iteration >= options.max_iter) break;
      if (control.stopped(may_poll)) {
        result.status = Status::interrupted;
        break;
      }
      if (iteration >= next_check) {
        if (infeasible()) {
          result.status = Status::infeasible;
          break;
        }
        next_check += std::min(iteration, 256);
      }
    }
    if (trouble() == ActiveSetResult::no_structure) result.status = Status::infeasible;
    if (trouble() == ActiveSetResult::stopped) result.status = Status::interrupted;
    if (result.status == Status::max_iter && infeasible()) result.status = Status::infeasible;
    for_structured([&](StructuredFactor& f, int) { set_link_multipliers(f); });
    reduced_scores(p, Span<const T>(point_.x), point_.z, point_.g);
    if (structured_ != nullptr) {
      if (!options.linear && result.status != Status::infeasible &&
          trouble() == ActiveSetResult::solved) {
        structured_->return_to(p, point_, options, control, may_poll);
        if (trouble() == ActiveSetResult::limit) {
          structured_->go_on();
          if (result.status == Status::converged) result.status = Status::max_iter;
        } else {
          structured_->complete(std::max(result.primal_residual, result.dual_residual), options,
                                control, may_poll);
        }
      }
      result.oracle_calls = structured_->oracle_calls();
    }
    row_products(p, point_.mu.data, point_.g.data);
    for (int r = 0; r < p.m; ++r) point_.g[r] = p.scale[r] * (p.rhs[r] - point_.g[r]);
    return result;
  }

 private:
  // A link here is a factor's copy of a variable. The links of a block are the entries of its last
  // row.
  int links_begin(const Block& block) const { return p_->ptr[block.first + block.count - 1]; }
  int links_end(const Block& block) const { return p_->ptr[block.first + block.count]; }

  void start(const T* warm) {
    const Instance<T>& p = *p_;
    for (int r = 0; r < p.m; ++r)
      point_.x[r] = warm == nullptr ? T(0) : warm[p.row[r]] / p.scale[r];
    proof_.mark(point_.x);
    fill(delta_.first(p.n), T(0));
    fill(lam_, T(0));
    copy(p.eta.first(p.n), base_);
    for (int f = 0; f < p.num_blocks; ++f) {
      const Block& block = p.block[f];
      for (int k = links_begin(block); k < links_end(block); ++k) delta_[p.col[k]] += 1;
      if (p.is_soft(block.first)) {  // a pair keeps its linear part to itself
        base_[p.col[links_begin(block) + 1]] -= p.pair_shift[block.first - p.hard];
      }
    }
    for_structured([&](StructuredFactor& f, int) {
      for (const std::int32_t j : f.var) {
        if (j >= 0) delta_[j] += 1;
      }
    });
    for (int j = 0; j < p.n; ++j) {
      const T alone = (quadratic_ == 0) ? T(p.eta[j] > 0) : clip(p.eta[j], T(0), T(1));
      point_.mu[j] = delta_[j] == 0 ? alone : 1 / delta_[j];
      delta_[j] = std::sqrt(delta_[j]);
    }
    for_structured([&](StructuredFactor& f, int) {
      const bool uniform = StructuredFactors<T>::set_weights(
          f, [&](int j) { return (gamma_ + quadratic_) / double(delta_[j] * delta_[j]); });
      f.begin(uniform);
    });
  }

  // Calls visit(factor, where its links begin).
  template <class Visit>
  void for_structured(const Visit& visit) {
    if (structured_ == nullptr) return;
    int begin = p_->ptr[p_->links];
    for (StructuredFactor& f : structured_->all()) {
      if (f.present) visit(f, begin);
      begin += f.var.size;
    }
  }

  ActiveSetResult trouble() const {
    return structured_ == nullptr ? ActiveSetResult::solved : structured_->trouble();
  }

  // max_p  x . Mp + eta_v . Np - (gamma + 1) / 2 ||D^-1 Mp||^2; AD3 has gamma / 2 there
  void solve_structured(StructuredFactor& f, int begin, const Options& options, Control& control,
                        bool may_poll) {
    if (trouble() != ActiveSetResult::solved) return;
    for (int k = 0; k < f.var.size; ++k) {
      const int j = f.var[k];
      if (j < 0) continue;
      f.x[k] = (base_[j] / delta_[j] + lam_[begin + k] + gamma_ * point_.mu[j] / delta_[j]) /
               double(delta_[j]);
    }
    structured_->solve_alone(f, options, control, may_poll);
    if (trouble() == ActiveSetResult::limit) {  // the next pass goes on from its structures
      structured_->go_on();
      cut_short_ = true;
    }
    for (int k = 0; k < f.var.size; ++k) {
      if (f.var[k] >= 0) copy_[begin + k] = T(f.v[k]) / delta_[f.var[k]];
    }
  }

  // The multipliers that the links of the compact dual would have, docs/math.md (55).
  void set_link_multipliers(const StructuredFactor& f) {
    if (!f.linked) return;
    f.each([&](int k, int r) {
      const double own = quadratic_ * p_->weight[f.var[k]];
      point_.x[r] = T(f.x[k] - (f.w[k] - own) * f.v[k]) * p_->norm[r];
    });
  }

  void solve_block(const Block& block) {
    const Instance<T>& p = *p_;
    const int begin = links_begin(block), d = links_end(block) - begin;
    const int last = block.first + block.count - 1;
    const T step = 1 / (gamma_ + quadratic_);
    for (int k = 0; k < d; ++k) {
      const int j = p.col[begin + k];
      const T score = base_[j] / delta_[j] + lam_[begin + k] + gamma_ * point_.mu[j] / delta_[j];
      y_[k] = step * score;
      h_[k] = 1 / delta_[j];
      d_[k] = delta_[j];
    }
    if (block.kind != BlockKind::or_out) {
      if (p.is_soft(last)) y_[1] += step * d_[1] * p.pair_shift[last - p.hard];
      for (int k = 0; k < d; ++k) w_[k] = p.coef[begin + k] * d_[k];
      const T s = p.scale[last] * step;
      const local::BoxRow<T> row{y_.first(d), w_.first(d), h_.first(d), p.rhs[last]};
      const bool band = block.kind == BlockKind::band;
      const T t = band ? local::box_band(row, -p.rhs[block.first])
                       : local::box_row(row, p.lo[last] * s, p.hi[last] * s);
      for (int k = 0; k < d; ++k) copy_[begin + k] = clip(y_[k] - w_[k] * t, T(0), h_[k]);
      point_.x[last] = (band ? std::max(t, T(0)) : t) / s;
      if (band) point_.x[block.first] = std::max(-t, T(0)) / (p.scale[block.first] * step);
      return;
    }
    const auto negated = [&](int k) { return (p.coef[begin + k] > 0) != (k == d - 1); };
    for (int k = 0; k < d; ++k) {
      if (negated(k)) y_[k] = h_[k] - y_[k];
    }
    local::or_out<T>(y_.first(d), d_.first(d), v_.first(d), t_.first(d), w_.first(d), h_.first(d),
                     order_.first(d));
    for (int k = 0; k < d; ++k) {
      copy_[begin + k] = negated(k) ? 1 / d_[k] - v_[k] : v_[k];
      if (k < block.count) point_.x[block.first + k] = t_[k] / (step * p.scale[block.first + k]);
    }
  }

  // mu = C~^T v, lam += gamma (C~ mu - v), and the residuals of both.
  void average(Result& result) {
    const Instance<T>& p = *p_;
    fill(average_.first(p.n), T(0));
    for (int f = 0; f < p.num_blocks; ++f) {
      for (int k = links_begin(p.block[f]); k < links_end(p.block[f]); ++k) {
        average_[p.col[k]] += copy_[k] / delta_[p.col[k]];
      }
    }
    for_structured([&](StructuredFactor& f, int begin) {
      for (int k = 0; k < f.var.size; ++k) {
        if (f.var[k] >= 0) average_[f.var[k]] += copy_[begin + k] / delta_[f.var[k]];
      }
    });
    T moved = 0, apart = 0;
    for (int j = 0; j < p.n; ++j) {
      if (delta_[j] == 0) continue;
      moved += (average_[j] - point_.mu[j]) * (average_[j] - point_.mu[j]);
      point_.mu[j] = average_[j];
    }
    for (int f = 0; f < p.num_blocks; ++f) {
      for (int k = links_begin(p.block[f]); k < links_end(p.block[f]); ++k) {
        apart += update_multiplier(k, p.col[k]);
      }
    }
    for_structured([&](StructuredFactor& f, int begin) {
      for (int k = 0; k < f.var.size; ++k) {
        if (f.var[k] >= 0) apart += update_multiplier(begin + k, f.var[k]);
      }
    });
    result.primal_residual = std::sqrt(apart);
    result.dual_residual = gamma_ / unit_ * std::sqrt(moved);
  }

  // Returns the squared distance of the copy from mu.
  T update_multiplier(int link, int j) {
    const T gap = point_.mu[j] / delta_[j] - copy_[link];
    lam_[link] += gamma_ * gap;
    return gap * gap;
  }

  bool infeasible() {
    for_structured([&](StructuredFactor& f, int) { set_link_multipliers(f); });
    return proof_.look(*p_, point_.x, average_);
  }

  const Instance<T>* p_ = nullptr;
  bool cut_short_ = false;  // a structured factor ran into its limit in this pass
  StructuredFactors<T>* structured_ = nullptr;
  T gamma_ = 1, quadratic_ = 1, unit_ = 1;
  DualPoint<T> point_;
  Span<T> lam_, copy_;              // per link
  Span<T> delta_, base_, average_;  // per variable
  InfeasibilityProof<T> proof_;
  Span<T> y_, w_, h_, v_, t_, d_;  // one block
  Span<std::int32_t> order_;
};

}  // namespace factormax
