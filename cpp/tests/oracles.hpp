// What the tests of oracles share: memory for one, and scores of every kind.
#pragma once

#include <cstdint>
#include <limits>
#include <vector>

#include "check.hpp"
#include "factormax/span.hpp"

namespace factormax::test {

template <class Oracle>
struct Allocated {
  Oracle oracle;
  Workspace ws;

  explicit Allocated(const std::vector<std::int32_t>& numbers) {
    const Span<const std::int32_t> shape{numbers.data(), static_cast<int>(numbers.size())};
    Workspace counter;
    oracle.allocate(shape, counter);
    ws = Workspace(counter.used());
    oracle.allocate(shape, ws);
    CHECK(ws.used() == counter.used());
  }
};

constexpr int kPoison = -77;
inline const char* const kKinds[] = {"normal", "tied", "zero", "huge", "mixed"};

// What scores can look like. "tied" and "zero" are summed without rounding.
inline double draw(Random& random, int kind) {
  switch (kind) {
    case 0:
      return random.normal();
    case 1:
      return random.integer(-1, 1);
    case 2:
      return 0;
    case 3:
      return 1e9 * random.normal();
    default: {
      const double scale[] = {1e9, 1, 1e-30};
      return scale[random.integer(0, 2)] * random.integer(-3, 3);
    }
  }
}

template <class T>
std::vector<T> scores(Random& random, int kind, int size, double forbidden) {
  std::vector<T> out(size);
  for (T& value : out) {
    const bool drop = forbidden > 0 && random.uniform() < forbidden;
    value = drop ? -std::numeric_limits<T>::infinity() : static_cast<T>(draw(random, kind));
  }
  return out;
}

}  // namespace factormax::test
