// The root of one row in a box, against bisection in long double.
#include <vector>

#include "check.hpp"
#include "factormax/local/box_row.hpp"

namespace {

using factormax::Span;
using factormax::test::Random;

template <class T>
struct Row {
  std::vector<T> y, w, h;
  T b = 0;
  T lo = 0, hi = 0;

  int size() const { return static_cast<int>(y.size()); }

  // Exact enough to be called the truth.
  long double value(int k, long double t) const {
    const long double z = y[k] - static_cast<long double>(w[k]) * t;
    return z < 0 ? 0.0L : (z > h[k] ? static_cast<long double>(h[k]) : z);
  }
  long double g(long double t) const {
    long double sum = -static_cast<long double>(b);
    for (int k = 0; k < size(); ++k) sum += w[k] * value(k, t);
    return sum;
  }

  // Where the decreasing g crosses 0 in [lo, hi], or the nearest bound if it does not.
  struct Bracket {
    long double left, right;
  };
  Bracket bisect() const {
    long double left = 0, right = 0;
    for (int k = 0; k < size(); ++k) {
      if (w[k] == 0) continue;
      for (const long double z : {static_cast<long double>(y[k]), y[k] - (long double)h[k]}) {
        left = std::min(left, z / w[k] - 1);
        right = std::max(right, z / w[k] + 1);
      }
    }
    left = std::max<long double>(left, lo);
    right = std::min<long double>(right, hi);
    if (g(left) <= 0) return {left, left};
    if (g(right) >= 0) return {right, right};
    for (int step = 0; step < 400; ++step) {
      const long double middle = left + (right - left) / 2;
      if (middle <= left || middle >= right) break;
      (g(middle) > 0 ? left : right) = middle;
    }
    return {left, right};
  }

  // How large g can be at the representable t next to the root, and how inexact its sum is.
  long double rounding(T t) const {
    const long double eps = std::numeric_limits<T>::epsilon();
    long double terms = std::fabs(b) + 1, moving = 0;
    for (int k = 0; k < size(); ++k) {
      const long double z = y[k] - static_cast<long double>(w[k]) * t;
      const long double blur = 2 * eps * (std::fabs(y[k]) + std::fabs((long double)w[k] * t));
      terms += std::fabs(w[k] * value(k, t));
      terms = std::max(terms,
                       static_cast<long double>(std::fabs(w[k]) * std::min(std::fabs(y[k]), h[k])));
      if (z > -blur && z < h[k] + blur) moving += std::fabs(w[k]) * blur;
    }
    return (16 + size() / 16) * eps * terms + 2 * moving;
  }
};

template <class T>
void check_root(const Row<T>& row) {
  const factormax::local::BoxRow<T> problem{
      {row.y.data(), row.size()}, {row.w.data(), row.size()}, {row.h.data(), row.size()}, row.b};
  const T t = factormax::local::box_row(problem, row.lo, row.hi);
  const auto [left, right] = row.bisect();
  const long double allowed = row.rounding(t);
  const auto check_between = [&](long double value, long double low, long double high) {
    CHECK_NEAR(value, std::min(std::max(value, low), high), allowed);
  };
  CHECK(t >= row.lo && t <= row.hi && std::isfinite(t));
  check_between(row.g(t), row.g(right), row.g(left));
  // All the terms of g decrease, so none is further off than their sum.
  for (int k = 0; k < row.size(); ++k) {
    const T w = row.w[k];
    check_between(w * row.value(k, t), w * row.value(k, right), w * row.value(k, left));
  }
}

template <class T>
Row<T> random_row(Random& random, int d, double score) {
  Row<T> row;
  const int weights = random.integer(0, 3), scores = random.integer(0, 2);
  const bool unit_box = random.flip();
  for (int k = 0; k < d; ++k) {
    T w = 1;
    if (weights == 1) w = random.flip() ? 1 : -1;
    if (weights == 2) w = static_cast<T>(random.normal());
    if (weights == 3)
      w = static_cast<T>(random.integer(-2, 2) * std::pow(10, random.uniform(-3, 3)));
    T y = static_cast<T>(score * random.normal());
    if (scores == 1) y = static_cast<T>(score * random.integer(-1, 1));  // ties
    if (scores == 2) y = static_cast<T>(random.flip() ? score * random.normal() : random.uniform());
    row.y.push_back(y);
    row.w.push_back(w);
    row.h.push_back(unit_box ? T(1) : static_cast<T>(1 / std::sqrt(random.integer(1, 9))));
  }
  double least = 0, most = 0;
  for (int k = 0; k < d; ++k) (row.w[k] < 0 ? least : most) += double(row.w[k]) * row.h[k];
  switch (random.integer(0, 4)) {
    case 0:
      row.b = static_cast<T>(least);
      break;  // only one point is left
    case 1:
      row.b = static_cast<T>(most);
      break;
    case 2:
      row.b = static_cast<T>(std::floor(random.uniform(least, most + 1)));
      break;
    default:
      row.b = static_cast<T>(random.uniform(least, most));
  }
  const T inf = std::numeric_limits<T>::infinity();
  row.lo = random.flip() ? -inf : T(0);
  row.hi = random.flip() ? inf : static_cast<T>(score * random.uniform(0, 2));
  return row;
}

template <class T>
void test_random(std::uint64_t seed) {
  Random random(seed);
  for (const int d : {1, 2, 3, 5, 8, 20, 100, 1000}) {
    for (const double score : {1e-3, 0.3, 1.0, 10.0, 1e4, 1e9}) {
      for (int repeat = 0; repeat < (d == 1000 ? 5 : 60); ++repeat) {
        factormax::test::current_case = "d " + std::to_string(d) + ", scores " +
                                        std::to_string(score) + ", repeat " +
                                        std::to_string(repeat);
        check_root(random_row<T>(random, d, score));
      }
    }
  }
}

// Sparsemax of (0.5, 0.2, -1): the threshold is 0.5 + 0.2 - 1 over 2.
template <class T>
void test_by_hand() {
  factormax::test::current_case = "by hand";
  const T inf = std::numeric_limits<T>::infinity(), eps = std::numeric_limits<T>::epsilon();
  const std::vector<T> y{T(0.5), T(0.2), T(-1)}, ones(3, T(1)), zeros(3, T(0));
  const auto solve = [&](const std::vector<T>& w, T b, T lo, T hi) {
    return factormax::local::box_row(
        factormax::local::BoxRow<T>{{y.data(), 3}, {w.data(), 3}, {ones.data(), 3}, b}, lo, hi);
  };
  CHECK_NEAR(solve(ones, 1, -inf, inf), -0.15, 4 * eps);
  CHECK_NEAR(solve(ones, 1, 0, inf), 0, 0);  // 0.7 <= 1 holds already
  CHECK_NEAR(solve(ones, T(0.5), 0, inf), 0.1, 4 * eps);
  CHECK_NEAR(solve(ones, T(0.5), 0, T(0.05)), T(0.05), 0);  // cheaper to violate it
  CHECK_NEAR(solve(zeros, 0, -inf, inf), 0, 0);             // nothing to move
}

// A band binds at the bound that the point breaks, or at none.
template <class T>
void test_band() {
  factormax::test::current_case = "band";
  const T eps = std::numeric_limits<T>::epsilon();
  const std::vector<T> y{T(0.5), T(0.25), T(-1)}, ones(3, T(1));
  const auto solve = [&](T lower, T upper) {
    const factormax::local::BoxRow<T> row{{y.data(), 3}, {ones.data(), 3}, {ones.data(), 3}, upper};
    return factormax::local::box_band(row, lower);
  };
  CHECK_NEAR(solve(T(0.5), T(1)), 0, 0);  // the sum is 0.75
  CHECK_NEAR(solve(T(0), T(0.25)), 0.25, 4 * eps);
  CHECK_NEAR(solve(T(1), T(2)), -0.125, 4 * eps);
  CHECK_NEAR(solve(T(2.5), T(3)), -1.5, 8 * eps);  // 1, 1, 0.5
}

// With an empty feasible set it must still end, anywhere.
template <class T>
void test_no_root() {
  factormax::test::current_case = "no root";
  const T inf = std::numeric_limits<T>::infinity();
  const std::vector<T> y{T(0.5), T(-3), T(1e6)}, ones(3, T(1));
  for (const T b : {T(-1), T(4)}) {
    const factormax::local::BoxRow<T> row{{y.data(), 3}, {ones.data(), 3}, {ones.data(), 3}, b};
    CHECK(!std::isnan(factormax::local::box_row(row, -inf, inf)));
  }
}

}  // namespace

int main(int argc, char** argv) {
  const std::uint64_t seed = factormax::test::seed_from(argc, argv);
  test_by_hand<double>();
  test_by_hand<float>();
  test_band<double>();
  test_band<float>();
  test_no_root<double>();
  test_no_root<float>();
  test_random<double>(seed);
  test_random<float>(seed);
  return factormax::test::finish();
}
