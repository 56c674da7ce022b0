// The local problem of OrOut: its optimality conditions, and that no feasible point is nearer.
#include <vector>

#include "check.hpp"
#include "factormax/local/or_out.hpp"

namespace {

using factormax::Span;
using factormax::test::Random;

template <class T>
struct Solved {
  std::vector<T> v, t;
};

template <class T>
Solved<T> solve(const std::vector<T>& y, const std::vector<T>& delta) {
  const int d = static_cast<int>(y.size());
  const T nan = std::numeric_limits<T>::quiet_NaN();
  Solved<T> out{std::vector<T>(d, nan), std::vector<T>(d, nan)};
  std::vector<T> w(d, nan), h(d, nan);
  std::vector<std::int32_t> order(d, -1);
  factormax::local::or_out<T>({y.data(), d}, {delta.data(), d}, {out.v.data(), d},
                              {out.t.data(), d}, {w.data(), d}, {h.data(), d}, {order.data(), d});
  return out;
}

// A random point with  l_i <= l_out <= sum l_i,  l = delta v.
std::vector<long double> feasible_point(Random& random, int d) {
  std::vector<long double> l(d);
  long double largest = 0, sum = 0;
  const double sparsity = random.uniform();
  for (int k = 0; k + 1 < d; ++k) {
    l[k] = random.uniform() < sparsity ? 0 : random.flip() ? 1 : random.uniform();
    largest = std::max(largest, l[k]);
    sum += l[k];
  }
  const long double most = std::min(sum, 1.0L);
  l[d - 1] = random.flip() ? largest : largest + (most - largest) * random.uniform();
  return l;
}

template <class T>
void check_solution(const std::vector<T>& y, const std::vector<T>& delta, Random& random) {
  const Solved<T> s = solve(y, delta);
  const int d = static_cast<int>(y.size()), out = d - 1;
  long double size = 1;
  for (int k = 0; k < d; ++k) {
    size = std::max<long double>(size, std::fabs(y[k]) * std::max<T>(1, delta[k]));
  }
  const long double tol = 32 * std::numeric_limits<T>::epsilon() * size * (1 + 0.1L * d);

  long double sum = 0, of_inputs = 0;
  std::vector<long double> l(d);
  for (int k = 0; k < d; ++k) {
    l[k] = static_cast<long double>(delta[k]) * s.v[k];
    CHECK(s.v[k] >= 0 && s.v[k] <= 1 / delta[k]);
    CHECK(s.t[k] >= -tol);
    if (k < out) {
      sum += l[k];
      of_inputs += s.t[k];
    }
  }
  CHECK(l[out] <= sum + tol);
  CHECK_NEAR(std::min<long double>(s.t[out], sum - l[out]), 0, tol);
  for (int k = 0; k < out; ++k) {
    CHECK(l[k] <= l[out] + tol);
    CHECK_NEAR(std::min<long double>(s.t[k], l[out] - l[k]), 0, tol);
  }
  for (int k = 0; k < d; ++k) {
    const long double pull = k == out ? s.t[out] - of_inputs : s.t[k] - s.t[out];
    const long double z = y[k] - delta[k] * pull, most = 1.0L / delta[k];
    CHECK_NEAR(s.v[k], z < 0 ? 0.0L : (z > most ? most : z), tol);
  }
  for (int repeat = 0; repeat < 20; ++repeat) {
    const std::vector<long double> other = feasible_point(random, d);
    long double product = 0;  // (y - v) . (u - v) <= 0 for every feasible u
    for (int k = 0; k < d; ++k) product += (y[k] - s.v[k]) * (other[k] / delta[k] - s.v[k]);
    CHECK(product <= tol * size);
  }
}

template <class T>
void test_random(std::uint64_t seed) {
  Random random(seed);
  for (const int d : {1, 2, 3, 4, 6, 15, 60, 300}) {
    for (const double score : {0.3, 1.0, 5.0, 1e4, 1e9}) {
      for (int repeat = 0; repeat < (d > 50 ? 10 : 60); ++repeat) {
        factormax::test::current_case = "d " + std::to_string(d) + ", scores " +
                                        std::to_string(score) + ", repeat " +
                                        std::to_string(repeat);
        const bool ties = random.integer(0, 3) == 0, scaled = random.flip();
        const double shift = score * random.uniform(-1, 1);  // all inputs low, or all high
        std::vector<T> y, delta;
        for (int k = 0; k < d; ++k) {
          const double value = ties ? random.integer(-1, 2) / 2.0 : random.normal();
          y.push_back(static_cast<T>(score * value + (k + 1 < d ? shift : 0)));
          delta.push_back(scaled ? static_cast<T>(std::sqrt(random.integer(1, 8))) : T(1));
        }
        check_solution(y, delta, random);
      }
    }
  }
}

// One case of each branch.
template <class T>
void test_by_hand() {
  factormax::test::current_case = "by hand";
  const T eps = 4 * std::numeric_limits<T>::epsilon();
  const std::vector<T> one(3, T(1));

  const Solved<T> box = solve<T>({T(0.5), T(0.2), T(0.6)}, one);
  CHECK(box.v == (std::vector<T>{T(0.5), T(0.2), T(0.6)}));
  CHECK(box.t == (std::vector<T>{0, 0, 0}));

  const Solved<T> pooled = solve<T>({T(0.75), T(0.25), T(0.25)}, one);  // l_0 = l_out
  CHECK_NEAR(pooled.v[0], 0.5, eps);
  CHECK_NEAR(pooled.v[2], 0.5, eps);
  CHECK_NEAR(pooled.t[0], 0.25, eps);
  CHECK_NEAR(pooled.t[2], 0, 0);

  const Solved<T> tight = solve<T>({T(0.1), T(0.1), T(0.8)}, one);  // l_out = l_0 + l_1
  CHECK_NEAR(tight.v[0], 0.3, eps);
  CHECK_NEAR(tight.v[2], 0.6, eps);
  CHECK_NEAR(tight.t[2], 0.2, eps);

  const Solved<T> alone = solve<T>({T(0.8)}, {T(1)});  // the or of nothing
  CHECK_NEAR(alone.v[0], 0, eps);
}

}  // namespace

int main(int argc, char** argv) {
  const std::uint64_t seed = factormax::test::seed_from(argc, argv);
  test_by_hand<double>();
  test_by_hand<float>();
  test_random<double>(seed);
  test_random<float>(seed);
  return factormax::test::finish();
}
