// The assignment oracle: against all injections for a few rows, and by prices that prove the answer
// for more.
#include <algorithm>
#include <limits>
#include <vector>

#include "factormax/oracle/assignment.hpp"
#include "oracles.hpp"

namespace {

using factormax::oracle::Assignment;
using factormax::test::Random;

constexpr long double kInf = std::numeric_limits<long double>::infinity();

template <class T>
using Allocated = factormax::test::Allocated<Assignment<T>>;

template <class T>
struct Scores {
  int rows, cols;
  std::vector<T> eta;

  T at(int i, int j) const { return eta[i * cols + j]; }
  bool present(int i) const {
    for (int j = 0; j < cols; ++j) {
      if (!std::isinf(at(i, j))) return true;
    }
    return false;
  }
  long double scale() const {
    long double most = 0;
    for (const T x : eta) {
      if (!std::isinf(x)) most = std::max<long double>(most, std::fabs(x));
    }
    return most;
  }
};

// The best of all assignments of the rows from i on; -inf if there is none.
template <class T>
long double brute_best(const Scores<T>& s, std::vector<char>& taken, int i = 0) {
  if (i == s.rows) return 0;
  if (!s.present(i)) return brute_best(s, taken, i + 1);
  long double best = -kInf;
  for (int j = 0; j < s.cols; ++j) {
    if (taken[j] != 0 || std::isinf(s.at(i, j))) continue;
    taken[j] = 1;
    best = std::max(best, s.at(i, j) + brute_best(s, taken, i + 1));
    taken[j] = 0;
  }
  return best;
}

// The columns that `map` found, -1 for absent rows, checked to be an assignment; empty if none.
template <class T>
std::vector<int> found(Assignment<T>& oracle, const Scores<T>& s) {
  std::vector<std::int32_t> on(s.rows, -7);
  if (!oracle.map(s.eta.data(), nullptr, on.data(), nullptr)) return {};
  std::vector<int> column, count(s.cols, 0);
  for (int i = 0; i < s.rows; ++i) {
    const bool valid = s.present(i) ? on[i] >= 0 && on[i] / s.cols == i : on[i] == -1;
    CHECK(valid);
    if (!valid) return {};
    column.push_back(on[i] < 0 ? -1 : on[i] % s.cols);
    if (on[i] < 0) continue;
    CHECK(!std::isinf(s.eta[on[i]]));
    CHECK(++count[column[i]] == 1);
  }
  return column;
}

// The computation is in double.
template <class T>
long double tolerance(const Scores<T>& s) {
  return 32 * std::numeric_limits<double>::epsilon() * s.scale() * s.rows;
}

// Optimal if there are prices p >= 0, 0 for free columns, such that each row has its best column:
// p_j >= score(i, j) - score(i, own) + p_own. Finds the least such prices, from 0 upwards.
template <class T>
bool is_optimal(const Scores<T>& s, const std::vector<int>& column) {
  const long double tol = tolerance(s);
  std::vector<long double> price(s.cols, 0);
  bool changed = true;
  for (int round = 0; changed; ++round) {
    if (round > s.rows + 1) return false;  // a cycle of changes pays
    changed = false;
    for (int i = 0; i < s.rows; ++i) {
      if (column[i] < 0) continue;
      const long double own = price[column[i]] - s.at(i, column[i]);
      for (int j = 0; j < s.cols; ++j) {
        if (std::isinf(s.at(i, j)) || price[j] >= s.at(i, j) + own - tol) continue;
        price[j] = s.at(i, j) + own;
        changed = true;
      }
    }
  }
  for (const int j : column) {
    if (j >= 0) price[j] = 0;
  }
  return *std::max_element(price.begin(), price.end()) <= tol;  // of the free columns
}

enum class Kind {
  kNormal,
  kNear,
  kInteger,
  kEqual,
  kZero,
  kHuge,
  kTiny,
  kPenalty,
  kProduct,
  kLast
};

template <class T>
Scores<T> random_scores(Random& random, int rows, int cols, Kind kind,
                        const std::vector<double>& base) {
  Scores<T> s{rows, cols, std::vector<T>(rows * cols)};
  const double same = random.normal();
  for (int k = 0; k < rows * cols; ++k) {
    double value = random.normal();
    if (kind == Kind::kNear) value = base[k] + 0.01 * value;
    if (kind == Kind::kInteger) value = random.integer(-2, 2);
    if (kind == Kind::kEqual) value = same;
    if (kind == Kind::kZero) value = 0;
    if (kind == Kind::kHuge) value *= 1e9;
    if (kind == Kind::kTiny) value *= 1e-30;
    if (kind == Kind::kPenalty && random.flip()) value -= 1e9;
    // The classical hard case: every row wants the last columns.
    if (kind == Kind::kProduct) value = (k / cols + 1) * (k % cols + 1);
    s.eta[k] = static_cast<T>(value);
  }
  return s;
}

template <class T>
void test_shape(Random& random, int rows, int cols, int repeats, bool brute) {
  Allocated<T> a({rows, cols});
  CHECK(a.oracle.slots() == rows && a.oracle.feature_slots() == 0);
  for (int repeat = 0; repeat < factormax::test::times(repeats); ++repeat) {
    const double forbidden = repeat % 4 * 0.25, absent = repeat % 3 == 0 ? 0.3 : 0;
    const double closed = repeat % 5 == 0 ? 0.3 : 0;  // share of columns
    std::vector<int> gone(rows * cols);
    std::vector<double> base(rows * cols), shut(cols);
    for (double& x : base) x = random.normal();
    for (double& x : shut) x = random.uniform();
    for (int i = 0; i < rows; ++i) {
      const bool all = random.uniform() < absent;
      for (int j = 0; j < cols; ++j) {
        gone[i * cols + j] = all || shut[j] < closed || random.uniform() < forbidden ? 1 : 0;
      }
    }
    bool prepared = false;
    for (int call = 0; call < 6; ++call) {  // one `prepare`; the later calls start from prices
      const Kind kind =
          call % 3 < 2 ? Kind::kNear
                       : static_cast<Kind>(random.integer(0, static_cast<int>(Kind::kLast) - 1));
      factormax::test::current_case =
          std::string(sizeof(T) == 4 ? "float, " : "") + std::to_string(rows) + " x " +
          std::to_string(cols) + ", repeat " + std::to_string(repeat) + ", call " +
          std::to_string(call) + ", kind " + std::to_string(static_cast<int>(kind));
      Scores<T> s = random_scores<T>(random, rows, cols, kind, base);
      for (int k = 0; k < rows * cols; ++k) {
        if (gone[k] != 0) s.eta[k] = -std::numeric_limits<T>::infinity();
      }
      if (call == 0) prepared = a.oracle.prepare(s.eta.data());
      const std::vector<int> column = found(a.oracle, s);
      CHECK(prepared == !column.empty());
      if (!column.empty()) CHECK(is_optimal(s, column));
      if (!brute) continue;
      std::vector<char> taken(cols, 0);
      const long double best = brute_best(s, taken);
      CHECK(prepared == (best != -kInf));
      if (column.empty() || best == -kInf) continue;
      long double value = 0;
      for (int i = 0; i < rows; ++i) value += column[i] < 0 ? 0 : s.at(i, column[i]);
      CHECK_NEAR(value, best, tolerance(s));
    }
  }
}

template <class T>
void test_random(std::uint64_t seed) {
  Random random(seed);
  for (int rows = 1; rows <= 5; ++rows) {
    for (int cols = rows; cols <= 6; ++cols) {
      test_shape<T>(random, rows, cols, rows < 5 ? 300 : 100, true);
    }
  }
  for (const int rows : {8, 15, 33}) {
    for (const int cols : {rows, rows + 1, 2 * rows}) test_shape<T>(random, rows, cols, 60, false);
  }
  test_shape<T>(random, 100, 100, 2, false);
  test_shape<T>(random, 90, 130, 2, false);
}

// What the comment of the header promises.
template <class T>
void test_by_hand() {
  factormax::test::current_case = "by hand";
  const T inf = std::numeric_limits<T>::infinity();
  using Columns = std::vector<int>;

  const Scores<T> equal{3, 4, std::vector<T>(12, T(0.5))};
  Allocated<T> wide({3, 4});
  CHECK(wide.oracle.prepare(equal.eta.data()));
  CHECK(found(wide.oracle, equal) == (Columns{0, 1, 2}));
  CHECK(found(wide.oracle, equal) == (Columns{0, 1, 2}));

  const Scores<T> nothing{3, 4, std::vector<T>(12, -inf)};
  CHECK(wide.oracle.prepare(nothing.eta.data()));
  CHECK(found(wide.oracle, nothing) == (Columns{-1, -1, -1}));

  // Row 0 has one column only; row 1 must leave it, whatever it costs.
  Allocated<T> square({2, 2});
  const Scores<T> forced{2, 2, {0, -inf, T(1e9), T(-1e9)}};
  CHECK(square.oracle.prepare(forced.eta.data()));
  CHECK(found(square.oracle, forced) == (Columns{0, 1}));

  const Scores<T> crowded{2, 2, {0, -inf, 1, -inf}};
  CHECK(!square.oracle.prepare(crowded.eta.data()));
  CHECK(found(square.oracle, crowded).empty());

  // Large prices of one call must not blur the scores of the next.
  const Scores<T> large{2, 2, {T(1e9), 0, T(2e9), 0}}, small{2, 2, {T(1e-9), 0, 0, 0}};
  CHECK(square.oracle.prepare(large.eta.data()));
  CHECK(found(square.oracle, large) == (Columns{1, 0}));
  CHECK(found(square.oracle, small) == (Columns{0, 1}));
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
