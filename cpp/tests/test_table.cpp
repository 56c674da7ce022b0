// The oracle of Table against all joint states.
#include <limits>
#include <vector>

#include "factormax/oracle/table.hpp"
#include "oracles.hpp"

namespace {

using factormax::oracle::Table;
using namespace factormax::test;

// The best state of each group, -1 for none, and the joint index.
struct Choice {
  std::vector<std::int32_t> on;
  int joint = -1;
  long double value = -std::numeric_limits<long double>::infinity();
};

template <class T>
Choice enumerate(const std::vector<std::int32_t>& sizes, const std::vector<T>& eta_u,
                 const std::vector<T>& eta_v) {
  Choice best;
  const int m = static_cast<int>(sizes.size());
  for (int joint = 0; joint < static_cast<int>(eta_v.size()); ++joint) {
    std::vector<std::int32_t> on(m);
    long double value = eta_v[joint];
    for (int g = m - 1, rest = joint, end = static_cast<int>(eta_u.size()); g >= 0; --g) {
      end -= sizes[g];
      on[g] = end + rest % sizes[g];
      value += eta_u[on[g]];
      rest /= sizes[g];
    }
    // Where two groups tie, the lowest state of the last wins.
    const bool tie = value == best.value && !std::isinf(value) && m == 2;
    if (value > best.value || (tie && on[1] < best.on[1])) best = {on, joint, value};
  }
  return best;
}

template <class T>
Choice one_by_one(const std::vector<std::int32_t>& sizes, const std::vector<T>& eta_u) {
  Choice best;
  best.value = 0;
  int at = 0;
  for (const int size : sizes) {
    int state = -1;
    for (int k = at; k < at + size; ++k) {
      if (!std::isinf(eta_u[k]) && (state < 0 || eta_u[k] > eta_u[state])) state = k;
    }
    best.on.push_back(state);
    if (state >= 0) best.value += eta_u[state];
    at += size;
  }
  return best;
}

template <class T>
void check_table(Random& random, const std::vector<std::int32_t>& sizes, int kind, double forbidden,
                 double absent) {
  const int m = static_cast<int>(sizes.size());
  const T inf = std::numeric_limits<T>::infinity();
  Allocated<Table<T>> a(sizes);
  Table<T>& oracle = a.oracle;
  CHECK(oracle.slots() == m && oracle.feature_slots() == 1);

  int vars = 0, joint = 1;
  for (const int size : sizes) {
    vars += size;
    joint *= size;
  }
  CHECK(Table<T>::fits({sizes.data(), m}, vars, joint));
  std::vector<T> eta_u = scores<T>(random, kind, vars, forbidden);
  const std::vector<T> eta_v = scores<T>(random, kind, joint, forbidden);
  bool whole = true;
  for (int g = 0, at = 0; g < m; at += sizes[g++]) {
    if (random.uniform() < absent) {
      for (int k = 0; k < sizes[g]; ++k) eta_u[at + k] = -inf;
      whole = false;
    } else {  // at least one state
      T& one = eta_u[at + random.integer(0, sizes[g] - 1)];
      if (std::isinf(one)) one = static_cast<T>(draw(random, kind));
    }
  }

  CHECK(oracle.prepare(eta_u.data()));
  std::vector<std::int32_t> on(m, kPoison), features(1, kPoison);
  const bool found = oracle.map(eta_u.data(), eta_v.data(), on.data(), features.data());
  const Choice best = whole ? enumerate(sizes, eta_u, eta_v) : one_by_one(sizes, eta_u);
  CHECK(found == !std::isinf(best.value));
  if (!found) return;
  long double value = 0, size = 0;
  for (const T x : eta_u) size = std::isinf(x) ? size : std::fmax(size, std::fabs(x));
  for (const T x : eta_v) size = std::isinf(x) ? size : std::fmax(size, std::fabs(x));
  int index = 0;
  for (int g = 0, at = 0; g < m; at += sizes[g++]) {
    CHECK((on[g] >= at && on[g] < at + sizes[g]) || (!whole && on[g] == -1));
    if (on[g] < 0) continue;
    value += eta_u[on[g]];
    index = index * sizes[g] + on[g] - at;
  }
  CHECK(features[0] == (whole ? index : -1));
  if (features[0] >= 0) value += eta_v[features[0]];
  CHECK_NEAR(value, best.value, 4 * (m + 1) * std::numeric_limits<T>::epsilon() * size);
  const bool ruled = !whole || (m <= 2 && (kind == 1 || kind == 2));
  if (ruled) CHECK(on == best.on && features[0] == best.joint);
}

template <class T>
void test_random(std::uint64_t seed) {
  Random random(seed);
  const std::vector<std::vector<std::int32_t>> shapes = {
      {1},       {2},       {40},         {1, 1},       {2, 2},
      {5, 5},    {3, 40},   {40, 3},      {25, 25},     {1, 9},
      {9, 1},    {17, 8},   {2, 2, 2},    {3, 4, 5},    {5, 20, 3},
      {1, 1, 7}, {7, 1, 1}, {2, 3, 2, 3}, {4, 4, 4, 4}, {2, 2, 2, 2, 2, 2, 2, 2, 2, 2}};
  for (const std::vector<std::int32_t>& sizes : shapes) {
    for (int kind = 0; kind < 5; ++kind) {
      for (int repeat = 0; repeat < 40; ++repeat) {
        factormax::test::current_case = kKinds[kind];
        for (const int size : sizes) factormax::test::current_case += " " + std::to_string(size);
        const double forbidden = repeat % 2 == 0 ? 0 : random.uniform(0, 0.7);
        check_table<T>(random, sizes, kind, forbidden, repeat % 4 == 3 ? 0.3 : 0);
      }
    }
  }
}

}  // namespace

int main(int argc, char** argv) {
  const std::uint64_t seed = factormax::test::seed_from(argc, argv);
  test_random<double>(seed);
  test_random<float>(seed);
  return factormax::test::finish();
}
