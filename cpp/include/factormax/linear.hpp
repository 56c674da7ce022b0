// What a linear program over the graph needs besides the dual: the value of a point, a bound from
// multipliers, and rounding. docs/math.md (56)-(58).
#pragma once

#include "factormax/structured/structured.hpp"

namespace factormax {

// eta . mu + the scores of pairs and structured factors. eta: (n,) with the linear part of the
// pairs; cost: (m,) what a unit of violation of a soft row costs; both are multiplied by `scale`,
// and so are the scores of the structured factors.
template <class T>
double linear_value(const Instance<T>& p, const DualPoint<T>& at, const T* eta, const T* hi,
                    double scale, const StructuredFactors<T>* structured) {
  double sum = 0;
  for (int j = 0; j < p.n; ++j) sum += double(eta[j]) * at.mu[j];
  for (int r = p.hard; r < p.links; ++r) {
    const double excess = -double(at.g[r]) * p.norm[r];  // a . mu - b
    if (excess > 0) sum -= double(hi[r]) * p.scale[r] * excess;
  }
  // The active sets hold scaled scores.
  return sum + (structured == nullptr ? 0.0 : structured->feature_value() / scale);
}

// No assignment scores more than this, for any multipliers x in their bounds. z: (n,) the scores
// less what the multipliers take.
template <class T>
double linear_bound(const Instance<T>& p, const T* z, const T* x,
                    StructuredFactors<T>* structured) {
  double sum = 0;
  for (int j = 0; j < p.n; ++j) {
    if (structured == nullptr || !p.in_hub[j]) sum += std::max(0.0, double(z[j]));
  }
  for (int r = 0; r < p.links; ++r) sum += double(p.rhs[r]) * p.scale[r] * x[r];
  return structured == nullptr ? sum : sum + structured->best_value(p, z, x);
}

// Rounds mu to 0/1 if it is that but for its error, and meets all constraints then.
template <class T>
bool round_to_structure(const Instance<T>& p, Span<T> mu, Span<T> rounded,
                        StructuredFactors<T>* structured) {
  for (int j = 0; j < p.n; ++j) {
    rounded[j] = mu[j] > T(0.5) ? T(1) : T(0);
    if (!(std::fabs(mu[j] - rounded[j]) <= T(1e-3))) return false;
  }
  const double slack = std::numeric_limits<T>::digits > 24 ? 1e-9 : 1e-5;
  for (int r = 0; r < p.hard; ++r) {
    double product = 0, size = std::fabs(double(p.rhs[r]));
    for (int k = p.ptr[r]; k < p.ptr[r + 1]; ++k) {
      product += double(p.coef[k]) * rounded[p.col[k]];
      size = std::max(size, std::fabs(double(p.coef[k])));
    }
    const double excess = product - p.rhs[r];
    if ((p.lo[r] == 0 ? excess : std::fabs(excess)) > slack * (1 + size)) return false;
  }
  if (structured != nullptr && !structured->settle_on(rounded.data)) return false;
  copy(rounded.first(p.n), mu);
  return true;
}

}  // namespace factormax
