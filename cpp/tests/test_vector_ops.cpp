// Largest and smallest values, also where they are infinite: a compiler that starts a reduction at
// the largest finite number gets these wrong.
#include <cstdint>
#include <limits>
#include <vector>

#include "check.hpp"
#include "factormax/oracle/arborescence.hpp"
#include "factormax/oracle/assignment.hpp"
#include "factormax/vector_ops.hpp"

namespace {

using namespace factormax;

template <class T>
void check_largest() {
  const T inf = std::numeric_limits<T>::infinity(), nan = std::numeric_limits<T>::quiet_NaN();
  for (int n = 0; n < 70; ++n) {
    std::vector<T> x(static_cast<std::size_t>(n), -inf);
    const auto at = [&](int i) { return x[static_cast<std::size_t>(i)]; };
    CHECK(largest_of(n, -inf, at) == -inf);
    CHECK(largest_of(n, T(0), at) == 0);
    if (n > 0) CHECK(oracle::first_largest(x.data(), n) == 0);
    for (int i = 0; i < n; ++i) {
      T& here = x[static_cast<std::size_t>(i)];
      here = T(i) - 100;
      CHECK(largest_of(n, -inf, at) == here && oracle::first_largest(x.data(), n) == i);
      here = nan;
      CHECK(largest_of(n, -inf, at) == -inf);
      here = -inf;
    }
  }
}

template <class T>
void check_words() {
  const T inf = std::numeric_limits<T>::infinity();
  const int n = 20;
  std::vector<T> eta(n * n, 1);
  for (int h = 0; h < n; ++h) eta[3 * n + h] = -inf;  // word 3 is absent
  std::int32_t words[n];
  oracle::PresentWords<T> present;
  present.word = {words, n};
  present.find(eta.data(), n);
  CHECK(present.count == n - 1 && words[3] == 4 && present.every_arc && present.every_root);
}

// A row with only one allowed column has no second best to raise the price by.
template <class T>
void check_assignment() {
  const T inf = std::numeric_limits<T>::infinity();
  const int n = 20;
  std::vector<T> eta(n * n, -inf);
  for (int i = 0; i < n; ++i) eta[static_cast<std::size_t>(i * n + (i + 7) % n)] = T(i);
  const std::int32_t shape[]{n, n};
  oracle::Assignment<T> matching;
  Workspace counter;
  matching.allocate({shape, 2}, counter);
  Workspace ws(counter.used());
  matching.allocate({shape, 2}, ws);
  CHECK(matching.prepare(eta.data()));
  for (int call = 0; call < 3; ++call) {
    std::int32_t on[n];
    CHECK(matching.map(eta.data(), nullptr, on, nullptr));
    for (int i = 0; i < n; ++i) CHECK(on[i] == i * n + (i + 7) % n);
  }
}

}  // namespace

int main() {
  check_largest<double>();
  check_largest<float>();
  check_words<double>();
  check_words<float>();
  check_assignment<double>();
  check_assignment<float>();
  return factormax::test::finish();
}
