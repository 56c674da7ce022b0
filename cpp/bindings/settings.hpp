// How to solve.
#pragma once

#include <limits>

#include "factormax/batch.hpp"

namespace factormax::python {

struct Settings {
  Method method = Method::compact;
  Options options;
  double seconds = std::numeric_limits<double>::infinity();
};

}  // namespace factormax::python
