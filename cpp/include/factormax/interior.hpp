// A primal-dual interior point method (Mehrotra's predictor and corrector) for the same problem,
//
//   min 1/2 ||mu - eta||^2 + hi . xi   s.t.  A mu + s - xi = b,  0 <= mu <= 1,  s, xi >= 0,
//
// with s = xi = 0 for equalities and xi = 0 for inequalities. It takes twenty or so
// factorisations whatever the scores, so it is what the compact solver falls back to
// where descent makes no headway: nearly linear programs with hardly any free variable.
// Its multipliers are then made exact by the usual finish.
#pragma once

#include "factormax/dual.hpp"
#include "factormax/sparse_ldl.hpp"

namespace factormax {

template <class T>
class InteriorPoint {
 public:
  void allocate(const Problem<T>& p, Workspace& ws) {
    const int rows = p.num_dual(), vars = p.num_vars;
    for (Span<T>* v : {&mu_, &alpha_, &beta_, &d_mu_, &d_alpha_, &d_beta_, &rho_, &weight_}) {
      *v = ws.take<T>(vars);
    }
    for (Span<T>* v :
         {&s_, &xi_, &d_x_, &d_s_, &d_xi_, &pi_, &primal_, &work_, &c_s_, &c_xi_, &elasticity_}) {
      *v = ws.take<T>(rows);
    }
    c_alpha_ = ws.take<T>(vars);
    c_beta_ = ws.take<T>(vars);
    dual_ = ws.take<T>(vars);
    r_mu_ = ws.take<T>(vars);
    r_x_ = ws.take<T>(rows);
    system_.allocate(p, ws);
  }

  // Whether its matrix can be factorised: to be asked before the first `solve` of an instance.
  bool fits(const Instance<T>& p) { return system_.analyse(p); }

  // Multiplications of all steps, about.
  double work() const { return 20 * system_.multiplications(); }

  // Writes the scaled multipliers into x; returns the number of passes, at most `budget`. Without a
  // solution they grow along a ray until rounding has hidden it: `is_proof()` is asked on the way
  // whether x proves that there is none, and then they stay.
  template <class Proof>
  int solve(const Instance<T>& p, int budget, Span<T> x, const Proof& is_proof) {
    p_ = &p;
    x_ = x;
    start();
    T far = kFar * max_abs(Span<const T>(x_.first(p.m)));
    int step = 0;
    for (; step < std::min(budget, kMostSteps); ++step) {
      residuals();
      const T gap = complementarity();
      if (!(gap > tolerance_) &&
          max_abs(Span<const T>(primal_.first(p.m))) <= Precision<T>::feasible) {
        break;
      }
      if (max_abs(Span<const T>(x_.first(p.m))) > far) {
        if (is_proof()) break;
        far *= kFar;
      }
      factorise();
      // Predictor: straight for complementarity 0.
      for (int j = 0; j < p.n; ++j) {
        c_alpha_[j] = -mu_[j] * alpha_[j];
        c_beta_[j] = -(1 - mu_[j]) * beta_[j];
      }
      for (int r = 0; r < p.m; ++r) {
        c_s_[r] = has_slack(r) ? -s_[r] * below(r) : T(0);
        c_xi_[r] = has_excess(r) ? -xi_[r] * above(r) : T(0);
      }
      direction();
      const T reach = longest_step();
      const T ahead = complementarity(reach);
      const T centre = std::pow(ahead / gap, T(3)) * gap;  // the power is Mehrotra's
      // Corrector: towards the centre, with the second-order terms of the predictor.
      for (int j = 0; j < p.n; ++j) {
        c_alpha_[j] += centre - d_mu_[j] * d_alpha_[j];
        c_beta_[j] += centre + d_mu_[j] * d_beta_[j];
      }
      for (int r = 0; r < p.m; ++r) {
        if (has_slack(r)) c_s_[r] += centre - d_s_[r] * d_x_[r];
        if (has_excess(r)) c_xi_[r] += centre + d_xi_[r] * d_x_[r];
      }
      direction();
      const T length = std::min(T(1), kShort * longest_step());
      if (!(length > 0) || !finite()) break;  // rounding has the better of it: keep the last point
      advance(length);
    }
    return step;
  }

 private:
  static constexpr int kMostSteps = 60;   // twenty are usual: beyond, rounding is in the way
  static constexpr T kShort = T(0.995);   // of the longest step: nothing may reach 0
  static constexpr T kInterior = T(0.1);  // the least slack to begin with
  static constexpr T kFar = 100;  // times as large as before: multipliers may be on their way out

  // A pair without a score costs nothing: its multiplier stays 0.
  bool fixed(int r) const { return p_->hi[r] == 0; }
  bool has_slack(int r) const { return p_->lo[r] == 0 && !fixed(r); }
  bool has_excess(int r) const { return p_->is_soft(r) && !fixed(r); }
  T below(int r) const { return x_[r]; }              // distance of the multiplier from 0
  T above(int r) const { return p_->hi[r] - x_[r]; }  // and from its upper bound

  void start() {
    const Instance<T>& p = *p_;
    T size = 1;
    for (int j = 0; j < p.n; ++j) size = std::max(size, std::fabs(p.eta[j]));
    tolerance_ = 16 * std::numeric_limits<T>::epsilon() * size;
    for (int j = 0; j < p.n; ++j) {
      mu_[j] = T(0.5);
      alpha_[j] = beta_[j] = size;
    }
    row_products(p, mu_.data, work_.data);
    for (int r = 0; r < p.m; ++r) {
      const T slack = p.scale[r] * (p.rhs[r] - work_[r]);
      s_[r] = has_slack(r) ? std::max(slack, kInterior) : T(0);
      xi_[r] = has_excess(r) ? std::max(-slack, kInterior) : T(0);
      x_[r] = has_excess(r) ? p.hi[r] / 2 : has_slack(r) ? size : T(0);
    }
  }

  // primal_ = b - A mu - s + xi;  dual_ = eta - mu - A^T tau + alpha - beta
  void residuals() {
    const Instance<T>& p = *p_;
    row_products(p, mu_.data, primal_.data);
    for (int r = 0; r < p.m; ++r) {
      primal_[r] = fixed(r) ? T(0) : p.scale[r] * (p.rhs[r] - primal_[r]) - s_[r] + xi_[r];
    }
    for (int j = 0; j < p.n; ++j) dual_[j] = p.eta[j] - mu_[j] + alpha_[j] - beta_[j];
    add_rows(p, T(-1), x_.data, dual_.data, work_.data);
  }

  // The mean of the products, after a step of length t.
  T complementarity(T t = 0) const {
    const Instance<T>& p = *p_;
    T sum = 0;
    int count = 0;
    for (int j = 0; j < p.n; ++j) {
      const T mu = mu_[j] + (t > 0 ? t * d_mu_[j] : T(0));
      sum += mu * (alpha_[j] + (t > 0 ? t * d_alpha_[j] : T(0)));
      sum += (1 - mu) * (beta_[j] + (t > 0 ? t * d_beta_[j] : T(0)));
      count += 2;
    }
    for (int r = 0; r < p.m; ++r) {
      const T move = t > 0 ? t * d_x_[r] : T(0);
      if (has_slack(r)) sum += (s_[r] + (t > 0 ? t * d_s_[r] : T(0))) * (below(r) + move);
      if (has_excess(r)) sum += (xi_[r] + (t > 0 ? t * d_xi_[r] : T(0))) * (above(r) - move);
      count += has_slack(r) + has_excess(r);
    }
    return sum / std::max(count, 1);
  }

  // weight = 1 + alpha / mu + beta / (1 - mu), and the factors of [weight A^T; A -elasticity].
  void factorise() {
    const Instance<T>& p = *p_;
    for (int j = 0; j < p.n; ++j) {
      weight_[j] = 1 + alpha_[j] / mu_[j] + beta_[j] / (1 - mu_[j]);
    }
    for (int r = 0; r < p.m; ++r) {
      elasticity_[r] = elasticity(r);
      work_[r] = std::max(elasticity_[r], least_elasticity(r));
    }
    system_.factorise(Span<const T>(weight_), Span<const T>(work_));
  }

  // A row without any would stand between its variables. Small beside what those give way by, which
  // is little where large scores hold them at their bounds.
  T least_elasticity(int r) const {
    const Instance<T>& p = *p_;
    T give = 0;
    for (int k = p.ptr[r]; k < p.ptr[r + 1]; ++k) {
      const T a = p.coef[k] * p.scale[r];
      give += a * a / weight_[p.col[k]];
    }
    return std::max(T(Precision<T>::elasticity) * give, tiny());
  }

  T elasticity(int r) const {
    T e = fixed(r) ? T(1e30) : T(0);
    if (has_slack(r)) e += s_[r] / std::max(below(r), tiny());
    if (has_excess(r)) e += xi_[r] / std::max(above(r), tiny());
    return e;
  }

  static T tiny() { return std::numeric_limits<T>::min() * 1e10f; }

  void direction() {
    const Instance<T>& p = *p_;
    for (int j = 0; j < p.n; ++j) {
      rho_[j] = dual_[j] + c_alpha_[j] / mu_[j] - c_beta_[j] / (1 - mu_[j]);
      d_mu_[j] = 0;
    }
    for (int r = 0; r < p.m; ++r) {
      pi_[r] = primal_[r];
      if (has_slack(r)) pi_[r] -= c_s_[r] / std::max(below(r), tiny());
      if (has_excess(r)) pi_[r] += c_xi_[r] / std::max(above(r), tiny());
      d_x_[r] = 0;
    }
    // The first solution is that of a matrix with more elastic rows; the others make up for it.
    for (int refinement = 0; refinement < 3; ++refinement) {
      row_products(p, d_mu_.data, r_x_.data);
      for (int r = 0; r < p.m; ++r) {
        const T stretch = d_x_[r] == 0 ? T(0) : elasticity_[r] * d_x_[r];
        r_x_[r] = pi_[r] - p.scale[r] * r_x_[r] + stretch;
      }
      for (int j = 0; j < p.n; ++j) r_mu_[j] = rho_[j] - weight_[j] * d_mu_[j];
      add_rows(p, T(-1), d_x_.data, r_mu_.data, work_.data);
      system_.solve(r_mu_, r_x_);
      axpy(T(1), Span<const T>(r_mu_.first(p.n)), d_mu_.first(p.n));
      axpy(T(1), Span<const T>(r_x_.first(p.m)), d_x_.first(p.m));
    }
    for (int j = 0; j < p.n; ++j) {
      d_alpha_[j] = (c_alpha_[j] - alpha_[j] * d_mu_[j]) / mu_[j];
      d_beta_[j] = (c_beta_[j] + beta_[j] * d_mu_[j]) / (1 - mu_[j]);
    }
    for (int r = 0; r < p.m; ++r) {
      d_s_[r] = has_slack(r) ? (c_s_[r] - s_[r] * d_x_[r]) / std::max(below(r), tiny()) : T(0);
      d_xi_[r] = has_excess(r) ? (c_xi_[r] + xi_[r] * d_x_[r]) / std::max(above(r), tiny()) : T(0);
    }
  }

  // The longest step, at most 1, that keeps everything non-negative.
  T longest_step() const {
    const Instance<T>& p = *p_;
    T t = 1;
    const auto limit = [&t](T value, T change) {
      if (change < 0 && -t * change > value) t = -value / change;
    };
    for (int j = 0; j < p.n; ++j) {
      limit(mu_[j], d_mu_[j]);
      limit(1 - mu_[j], -d_mu_[j]);
      limit(alpha_[j], d_alpha_[j]);
      limit(beta_[j], d_beta_[j]);
    }
    for (int r = 0; r < p.m; ++r) {
      if (has_slack(r)) {
        limit(s_[r], d_s_[r]);
        limit(below(r), d_x_[r]);
      }
      if (has_excess(r)) {
        limit(xi_[r], d_xi_[r]);
        limit(above(r), -d_x_[r]);
      }
    }
    return t;
  }

  bool finite() const {
    T sum = 0;
    for (int r = 0; r < p_->m; ++r)
      sum += std::fabs(d_x_[r]) + std::fabs(d_s_[r]) + std::fabs(d_xi_[r]);
    for (int j = 0; j < p_->n; ++j) sum += std::fabs(d_mu_[j]);
    return std::isfinite(sum);
  }

  void advance(T t) {
    const Instance<T>& p = *p_;
    const Span<T> vars[] = {mu_, alpha_, beta_};
    const Span<T> d_vars[] = {d_mu_, d_alpha_, d_beta_};
    for (int k = 0; k < 3; ++k) axpy(t, Span<const T>(d_vars[k].first(p.n)), vars[k].first(p.n));
    const Span<T> rows[] = {x_, s_, xi_};
    const Span<T> d_rows[] = {d_x_, d_s_, d_xi_};
    for (int k = 0; k < 3; ++k) axpy(t, Span<const T>(d_rows[k].first(p.m)), rows[k].first(p.m));
  }

  const Instance<T>* p_ = nullptr;
  Span<T> x_;
  T tolerance_ = 0;
  Span<T> mu_, alpha_, beta_, s_, xi_;                  // the point
  Span<T> d_mu_, d_alpha_, d_beta_, d_x_, d_s_, d_xi_;  // its direction
  Span<T> c_alpha_, c_beta_, c_s_, c_xi_;               // wanted changes of the products
  Span<T> primal_, dual_, rho_, pi_, r_mu_, r_x_, weight_, elasticity_, work_;
  SparseLdl<T> system_;
};

}  // namespace factormax
