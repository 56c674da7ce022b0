// From the point where a solver ended to the arrays that the caller gets: marginals, multipliers,
// sides, the objective, and how it ended.
#pragma once

#include "factormax/backward.hpp"
#include "factormax/dual.hpp"
#include "factormax/structured/structured.hpp"

namespace factormax {

template <class T>
FACTORMAX_VECTOR double objective(const Problem<T>& p, std::int64_t i, const T* mu, const T* mu_v,
                                  double quadratic) {
  const T *eta_u = p.eta_u.at(i), *eta_v = p.eta_v.at(i);
  double sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int j = 0; j < p.num_vars; ++j) {
    const double term = double(mu[j]) * (double(eta_u[j]) - 0.5 * quadratic * double(mu[j]));
    sum += mu[j] != 0 ? term : 0.0;  // the score may be -inf
  }
  for (int q = 0; q < p.num_scores(); ++q) {
    if (mu_v[q] != 0) sum += double(eta_v[q]) * double(mu_v[q]);
  }
  return sum;
}

// The multipliers are then those that prove infeasibility, docs/math.md (23); soft rows get 0.
// certificate: unscaled, (m,), or empty if a single row or structured factor can't hold.
template <class T>
void write_infeasible(const Problem<T>& p, const Instance<T>& instance, Span<const T> certificate,
                      std::int64_t i, const Outputs<T>& out) {
  const T nan = std::numeric_limits<T>::quiet_NaN();
  const auto absent = static_cast<std::int8_t>(Side::absent);
  std::fill_n(out.mu.at(i), p.num_vars, nan);
  for (int j = 0; j < p.num_vars; ++j) {
    if (instance.new_var[j] < 0) out.mu.at(i)[j] = 0;  // masked
  }
  std::fill_n(out.mu_v.at(i), p.num_scores(), nan);
  T* tau = out.tau.at(i);
  std::fill_n(tau, p.num_dual(), T(0));
  for (int r = 0; r < certificate.size; ++r) {
    if (!instance.is_soft(r)) tau[instance.row[r]] = certificate[r];
  }
  if (instance.refuted >= 0) tau[instance.refuted] = instance.refuting;
  std::fill_n(out.var_side.at(i), p.num_vars, absent);
  std::fill_n(out.row_side.at(i), p.num_dual(), absent);
  out.objective[i] = -std::numeric_limits<double>::infinity();
}

// The marginals of the structured factors' scores.
template <class T>
void write_features(const Problem<T>& p, const StructuredFactors<T>& structured, T* mu_v) {
  std::fill_n(mu_v + p.num_pairs, p.structured.num_scores, T(0));
  for (int f = 0; f < structured.all().size; ++f) {
    StructuredFactor& factor = structured.all()[f];
    if (!factor.present) continue;
    factor.write_features(factor.eta_v.data);  // the marginals, from here on
    T* own = mu_v + p.num_pairs + p.structured.score_ptr[f];
    for (int k = 0; k < factor.eta_v.size; ++k) own[k] = T(factor.eta_v[k]);
  }
}

// The marginals of the pairs. One that was left out has its multiplier at the upper bound if its
// first variable was the first to be found 0, else at 0: then it does not touch the other variable.
template <class T>
void write_pairs(const Problem<T>& p, const Instance<T>& instance, std::int64_t i,
                 const Outputs<T>& out) {
  const T *mu = out.mu.at(i), *score = p.eta_v.at(i);
  T *mu_v = out.mu_v.at(i), *tau = out.tau.at(i) + p.num_rows;
  std::int8_t* side = out.row_side.at(i) + p.num_rows;
  for (int q = 0; q < p.num_pairs; ++q) {
    const std::int32_t j1 = instance.new_var[p.pair_var[2 * q]];
    const std::int32_t j2 = instance.new_var[p.pair_var[2 * q + 1]];
    if (j1 < 0 && j2 < 0) {
      mu_v[q] = 0;
    } else if (instance.any_at_zero && j1 >= 0 && j2 >= 0 &&
               (instance.is_at_zero(j1) || instance.is_at_zero(j2))) {
      const bool first = !instance.is_at_zero(j2) ||
                         (instance.is_at_zero(j1) && instance.at_zero[j1] <= instance.at_zero[j2]);
      const bool upper = score[q] >= 0 && first;
      mu_v[q] = 0;
      tau[q] = upper ? score[q] : T(0);
      side[q] = static_cast<std::int8_t>(upper ? Side::upper : Side::lower);
    } else {
      mu_v[q] = PairView<T>(p, q).value(mu, score[q]);
    }
  }
}

template <class T>
void write_solution(const Problem<T>& p, const Instance<T>& instance,
                    const StructuredFactors<T>& structured, const DualPoint<T>& at, T error,
                    Span<T> scratch, std::int64_t i, const Outputs<T>& out) {
  T *mu = out.mu.at(i), *mu_v = out.mu_v.at(i), *tau = out.tau.at(i);
  classify(p, instance, at, error, scratch, mu, out.var_side.at(i), out.row_side.at(i));
  write_features(p, structured, mu_v);
  for (const StructuredFactor& factor : structured.all()) {
    if (!factor.present || factor.linked) continue;
    factor.each([&](int k, int) {
      // A variable that is on in all structures is on, whatever the sum of their rounded p.
      T& value = mu[instance.var[factor.var[k]]];
      value = T(factor.v[k]);
      if (value > 1 - 16 * std::numeric_limits<T>::epsilon()) value = 1;
    });
  }
  std::fill_n(tau, p.num_dual(), T(0));
  for (int r = 0; r < instance.m; ++r) tau[instance.row[r]] = at.x[r] * instance.scale[r];
  write_pairs(p, instance, i, out);
  out.objective[i] = objective(p, i, mu, mu_v, 1.0);
}

// The answer of a linear program: there is nothing to differentiate.
template <class T>
void write_vertex(const Problem<T>& p, const Instance<T>& instance,
                  const StructuredFactors<T>& structured, const DualPoint<T>& at, std::int64_t i,
                  const Outputs<T>& out) {
  T *mu = out.mu.at(i), *mu_v = out.mu_v.at(i), *tau = out.tau.at(i);
  std::fill_n(mu, p.num_vars, T(0));
  std::fill_n(tau, p.num_dual(), T(0));
  std::fill_n(out.var_side.at(i), p.num_vars, static_cast<std::int8_t>(Side::absent));
  std::fill_n(out.row_side.at(i), p.num_dual(), static_cast<std::int8_t>(Side::absent));
  for (int j = 0; j < instance.n; ++j) {
    mu[instance.var[j]] = clip(at.mu[j], T(0), T(1));
    out.var_side.at(i)[instance.var[j]] = static_cast<std::int8_t>(Side::lower);
  }
  for (int r = 0; r < instance.m; ++r) tau[instance.row[r]] = at.x[r] * instance.scale[r];
  write_features(p, structured, mu_v);
  write_pairs(p, instance, i, out);
  out.objective[i] = objective(p, i, mu, mu_v, 0.0);
}

// How far the answer itself, with its exact zeros and ones, is from meeting the constraints: it
// goes into the residual, and nothing that is far off is called converged.
template <class T>
void check_rows(const Instance<T>& instance, const T* mu, Result& result) {
  const T eps = std::numeric_limits<T>::epsilon();
  const double limit = Precision<T>::unresolved;
  if (4 * eps * (1 + instance.largest_score) * instance.longest_row < limit) return;
  double worst = 0;
  for (int r = 0; r < instance.hard; ++r) {
    double product = 0;
    for (int k = instance.ptr[r]; k < instance.ptr[r + 1]; ++k) {
      product += double(instance.coef[k]) * mu[instance.var[instance.col[k]]];
    }
    const double excess = product - instance.rhs[r];
    worst = std::max(worst, instance.lo[r] == 0 ? excess : std::fabs(excess));
  }
  if (worst <= limit) return;
  result.primal_residual = std::max(result.primal_residual, worst);
  if (result.status == Status::converged) result.status = Status::stalled;
}

}  // namespace factormax
