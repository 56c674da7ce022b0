// The bound of a row whose negated literals have been written out.
#pragma once

#include <cmath>
#include <limits>

namespace factormax {

// b less the terms; 0 where only rounding is left, for a bound that the negated literals meet
// exactly must not become one that nothing meets.
inline double difference(double bound, double terms, double size) {
  const double total = bound - terms;
  if (!std::isfinite(bound)) return total;
  const double rounding = 8 * std::numeric_limits<double>::epsilon() * (std::fabs(bound) + size);
  return std::fabs(total) <= rounding ? 0.0 : total;
}

}  // namespace factormax
