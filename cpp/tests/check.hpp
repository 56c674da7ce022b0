// What the tests are written with: CHECK and CHECK_NEAR print the place and the values when they
// fail, and go on; `main` ends with `return factormax::test::finish()`.
#pragma once

#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <string>

namespace factormax::test {

inline std::atomic<int> failures{0};
inline std::string current_case;  // printed with a failure; set it before the checks of a case

inline void fail(const char* file, int line, const std::string& what) {
  const int count = ++failures;
  if (count > 20) return;
  std::fprintf(stderr, "%s:%d: %s  [%s]\n", file, line, what.c_str(), current_case.c_str());
}

inline void check(bool holds, const char* text, const char* file, int line) {
  if (!holds) fail(file, line, text);
}

inline void check_near(long double actual, long double expected, long double tolerance,
                       const char* text, const char* file, int line) {
  if (actual == expected || std::fabs(actual - expected) <= tolerance) return;  // NaN fails
  char values[160];
  std::snprintf(values, sizeof values, " is %.17Lg, expected %.17Lg, off by %.3Lg > %.3Lg", actual,
                expected, std::fabs(actual - expected), tolerance);
  fail(file, line, text + std::string(values));
}

// How many of a test's random cases to run. Sanitizers are slow, and look at memory, not at
// numbers: they run a quarter of what the build without them does.
inline int times(int count) {
#ifdef FACTORMAX_SANITIZED
  return (count + 3) / 4;
#else
  return count;
#endif
}

inline int finish() {
  const int count = failures.load();
  if (count > 0) std::fprintf(stderr, "%d checks failed\n", count);
  return count > 0 ? 1 : 0;
}

// The same numbers on every platform, which the distributions of <random> do not promise.
class Random {
 public:
  explicit Random(std::uint64_t seed) : engine_(seed) {}

  double uniform(double lo = 0, double hi = 1) {
    return lo + (hi - lo) * static_cast<double>(engine_() >> 11) * 0x1p-53;
  }
  int integer(int lo, int hi) {  // both included
    return lo + static_cast<int>(engine_() % static_cast<std::uint64_t>(hi - lo + 1));
  }
  bool flip() { return integer(0, 1) == 1; }
  double normal() {
    const double radius = std::sqrt(-2 * std::log(1 - uniform()));
    return radius * std::cos(6.283185307179586 * uniform());
  }

 private:
  std::mt19937_64 engine_;
};

// The first argument of a test is another seed, to look for rare failures.
inline std::uint64_t seed_from(int argc, char** argv) {
  return argc > 1 ? std::strtoull(argv[1], nullptr, 10) : 1;
}

}  // namespace factormax::test

#define CHECK(condition) factormax::test::check((condition), #condition, __FILE__, __LINE__)
#define CHECK_NEAR(actual, expected, tolerance) \
  factormax::test::check_near((actual), (expected), (tolerance), #actual, __FILE__, __LINE__)
