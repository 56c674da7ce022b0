// What an oracle is told besides scores: the shape of its factor, and a little about each instance.
#pragma once

#include <algorithm>
#include <cstdint>

#include "factormax/span.hpp"

namespace factormax {

struct CallbackFunction;

namespace oracle {

// A few whole numbers. Each oracle says which ones.
using Shape = Span<const std::int32_t>;

// Whether it has `size` numbers, small enough that the product of any two fits.
inline bool is_shape(Shape shape, int size) {
  return shape.size == size &&
         std::all_of(shape.begin(), shape.end(), [](int s) { return s >= 0 && s < (1 << 20); });
}

struct InstanceInputs {
  double param = 0;                            // the factor's, if it has one
  const CallbackFunction* function = nullptr;  // the oracle of a factor of the user's own
  std::int64_t instance = 0;                   // which instance of the batch it is
};

}  // namespace oracle
}  // namespace factormax
