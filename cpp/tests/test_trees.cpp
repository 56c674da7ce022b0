// The tree oracles: against all trees of a few words, and against slow algorithms beyond.
#include <algorithm>
#include <limits>
#include <vector>

#include "factormax/oracle/arborescence.hpp"
#include "factormax/oracle/projective_tree.hpp"
#include "oracles.hpp"

namespace {

using factormax::oracle::Arborescence;
using factormax::oracle::ProjectiveTree;
using factormax::test::Allocated;
using factormax::test::Random;

constexpr long double kInf = std::numeric_limits<long double>::infinity();
using Heads = std::vector<int>;  // by word, the root numbered after the last word

bool is_tree(const Heads& heads) {
  const int n = static_cast<int>(heads.size());
  for (int m = 0; m < n; ++m) {
    int at = m;
    for (int steps = 0; at != n; ++steps) {
      if (steps > n) return false;
      at = heads[at];
    }
  }
  return true;
}

int num_roots(const Heads& heads) {
  return static_cast<int>(std::count(heads.begin(), heads.end(), static_cast<int>(heads.size())));
}

bool is_projective(const Heads& heads) {
  const int n = static_cast<int>(heads.size());
  const auto position = [&](int w) { return w == n ? -1 : w; };
  for (int a = 0; a < n; ++a) {
    for (int b = 0; b < n; ++b) {
      const auto [a0, a1] = std::minmax({a, position(heads[a])});
      const auto [b0, b1] = std::minmax({b, position(heads[b])});
      if (a0 < b0 && b0 < a1 && a1 < b1) return false;
    }
  }
  return true;
}

bool allowed(const Heads& heads, bool single_root, bool projective) {
  return is_tree(heads) && (!single_root || num_roots(heads) == 1) &&
         (!projective || is_projective(heads));
}

std::vector<Heads> all_trees(int n, bool single_root, bool projective) {
  std::vector<Heads> trees;
  Heads heads(n, 0);
  for (;;) {
    bool loop = false;
    for (int m = 0; m < n; ++m) loop = loop || heads[m] == m;
    if (!loop && allowed(heads, single_root, projective)) trees.push_back(heads);
    int m = 0;
    while (m < n && ++heads[m] > n) heads[m++] = 0;
    if (m == n) return trees;
  }
}

// The scores of the present words: [m][h], the root after the last word.
struct Sentence {
  std::vector<int> word;
  std::vector<std::vector<long double>> score;
  long double scale = 0;

  template <class T>
  Sentence(const std::vector<T>& eta, int n) {
    for (int m = 0; m < n; ++m) {
      const auto row = eta.begin() + m * n;
      if (std::any_of(row, row + n, [](T x) { return !std::isinf(x); })) word.push_back(m);
    }
    for (const int m : word) {
      score.emplace_back();
      for (const int h : word) score.back().push_back(h == m ? -kInf : eta[m * n + h]);
      score.back().push_back(eta[m * n + m]);
      for (const long double x : score.back()) {
        if (!std::isinf(x)) scale = std::max(scale, std::fabs(x));
      }
    }
  }
  int size() const { return static_cast<int>(word.size()); }
  long double value(const Heads& heads) const {
    long double sum = 0;
    for (int m = 0; m < size(); ++m) sum += score[m][heads[m]];
    return sum;
  }
};

// ---- Slow algorithms

// Chu and Liu's algorithm as it is taught; the root is the last node. -inf if there is no tree.
long double slow_arborescence(const std::vector<std::vector<long double>>& score) {
  const int n = static_cast<int>(score.size());
  if (n == 0) return 0;
  Heads best(n);
  long double sum = 0;
  for (int m = 0; m < n; ++m) {
    const auto& row = score[m];
    best[m] = static_cast<int>(std::max_element(row.begin(), row.end()) - row.begin());
    if (row[best[m]] == -kInf) return -kInf;
    sum += row[best[m]];
  }
  // Some cycle of the best heads, if there is one.
  std::vector<int> in_cycle(n, 0);
  bool found = false;
  for (int start = 0; start < n && !found; ++start) {
    int at = start;
    for (int steps = 0; steps < n && at != n; ++steps) at = best[at];
    for (found = at != n; at != n && in_cycle[at] == 0; at = best[at]) in_cycle[at] = 1;
  }
  if (!found) return sum;

  std::vector<int> outside;
  long double of_cycle = 0;
  for (int m = 0; m < n; ++m) {
    if (in_cycle[m] != 0) {
      of_cycle += score[m][best[m]];
    } else {
      outside.push_back(m);
    }
  }
  // The words outside keep their order, the cycle comes after them, the root last.
  const int k = static_cast<int>(outside.size());
  std::vector<std::vector<long double>> smaller(k + 1, std::vector<long double>(k + 2, -kInf));
  for (int i = 0; i < k; ++i) {
    const auto& row = score[outside[i]];
    for (int j = 0; j < k; ++j) smaller[i][j] = row[outside[j]];
    smaller[i][k + 1] = row[n];
    for (int c = 0; c < n; ++c) {
      if (in_cycle[c] != 0) smaller[i][k] = std::max(smaller[i][k], row[c]);
    }
  }
  for (int c = 0; c < n; ++c) {
    if (in_cycle[c] == 0) continue;
    const auto gain = [&](int h) { return score[c][h] - score[c][best[c]]; };
    for (int j = 0; j < k; ++j) smaller[k][j] = std::max(smaller[k][j], gain(outside[j]));
    smaller[k][k + 1] = std::max(smaller[k][k + 1], gain(n));
  }
  return of_cycle + slow_arborescence(smaller);
}

// Over all trees of each span and each head of it, and all first subtrees of each forest.
class SlowProjective {
 public:
  explicit SlowProjective(const Sentence& s)
      : s_(s), n_(s.size()), tree_(n_ * n_ * n_, kUnknown), forest_(n_ * n_ * (n_ + 1), kUnknown) {}

  long double best(bool single_root) {
    if (n_ == 0) return 0;
    if (!single_root) return forest(0, n_ - 1, n_);
    long double most = -kInf;
    for (int r = 0; r < n_; ++r) most = std::max(most, tree(0, n_ - 1, r) + s_.score[r][n_]);
    return most;
  }

 private:
  static constexpr long double kUnknown = kInf;

  long double tree(int i, int j, int head) {
    long double& known = tree_[(i * n_ + j) * n_ + head];
    if (known == kUnknown) known = forest(i, head - 1, head) + forest(head + 1, j, head);
    return known;
  }
  long double forest(int i, int j, int head) {
    if (i > j) return 0;
    const int at = (i * n_ + j) * (n_ + 1) + head;
    if (forest_[at] != kUnknown) return forest_[at];
    long double most = -kInf;
    for (int end = i; end <= j; ++end) {
      for (int r = i; r <= end; ++r) {
        most = std::max(most, tree(i, end, r) + s_.score[r][head] + forest(end + 1, j, head));
      }
    }
    return forest_[at] = most;
  }

  const Sentence& s_;
  int n_;
  std::vector<long double> tree_, forest_;
};

long double slow_best(const Sentence& s, bool single_root, bool projective) {
  if (projective) return SlowProjective(s).best(single_root);
  if (!single_root || s.size() == 0) return slow_arborescence(s.score);
  long double most = -kInf;
  for (int r = 0; r < s.size(); ++r) {
    auto score = s.score;
    for (int m = 0; m < s.size(); ++m) {
      if (m != r) score[m].back() = -kInf;
    }
    most = std::max(most, slow_arborescence(score));
  }
  return most;
}

long double brute_best(const Sentence& s, const std::vector<Heads>& trees) {
  if (s.size() == 0) return 0;
  long double most = -kInf;
  for (const Heads& heads : trees) most = std::max(most, s.value(heads));
  return most;
}

// ---- The oracle against them

// What `map` found, checked to be a tree of the present words; empty if it found none.
template <class T, class Oracle>
Heads found(Oracle& oracle, const std::vector<T>& eta, const Sentence& s, bool single_root,
            bool projective) {
  const int n = oracle.slots();
  std::vector<std::int32_t> on(n, -7);
  if (!oracle.map(eta.data(), nullptr, on.data(), nullptr)) return {};
  Heads heads;
  std::vector<int> place(n, -1);
  for (int i = 0; i < s.size(); ++i) place[s.word[i]] = i;
  for (int m = 0; m < n; ++m) {
    CHECK(place[m] >= 0 ? on[m] / n == m && on[m] >= 0 : on[m] == -1);
    if (place[m] < 0 || on[m] < 0) continue;
    const int h = on[m] % n;
    CHECK(h == m || place[h] >= 0);
    heads.push_back(h == m ? s.size() : place[h]);
  }
  CHECK(heads.empty() || allowed(heads, single_root, projective));
  return heads;
}

template <class T, class Oracle>
void check_best(Oracle& oracle, bool prepared, const std::vector<T>& eta, const Sentence& s,
                bool single_root, bool projective, long double best) {
  CHECK(prepared == (best != -kInf));
  const Heads heads = found(oracle, eta, s, single_root, projective);
  if (best == -kInf || s.size() == 0) {
    CHECK(heads.empty());
    return;
  }
  CHECK(static_cast<int>(heads.size()) == s.size());
  if (static_cast<int>(heads.size()) != s.size()) return;
  // Arborescence computes in double, and a tree is a sum of at most n scores.
  const long double eps = projective ? static_cast<long double>(std::numeric_limits<T>::epsilon())
                                     : std::numeric_limits<double>::epsilon();
  CHECK_NEAR(s.value(heads), best, 4 * eps * s.scale * s.size() * s.size());
}

enum class Kind { kNormal, kInteger, kEqual, kZero, kHuge, kTiny, kPenalty, kSymmetric, kLast };

template <class T>
std::vector<T> random_scores(Random& random, int n, Kind kind) {
  std::vector<T> eta(n * n);
  const double same = random.normal();
  for (T& x : eta) {
    double value = random.normal();
    if (kind == Kind::kInteger) value = random.integer(-2, 2);
    if (kind == Kind::kEqual) value = same;
    if (kind == Kind::kZero) value = 0;
    if (kind == Kind::kHuge) value *= 1e9;
    if (kind == Kind::kTiny) value *= 1e-30;
    if (kind == Kind::kPenalty && random.flip()) value -= 1e9;
    x = static_cast<T>(value);
  }
  if (kind == Kind::kSymmetric) {  // every best arc between two words closes a cycle
    for (int m = 0; m < n; ++m) {
      for (int h = 0; h < m; ++h) eta[m * n + h] = eta[h * n + m];
    }
  }
  return eta;
}

// Forbidden arcs and absent words, the same in every instance they are applied to.
std::vector<int> random_pattern(Random& random, int n, double forbidden, double absent) {
  std::vector<int> gone(n * n);
  for (int m = 0; m < n; ++m) {
    const bool all = random.uniform() < absent;
    for (int h = 0; h < n; ++h) gone[m * n + h] = all || random.uniform() < forbidden ? 1 : 0;
  }
  return gone;
}

template <class T>
void forbid(std::vector<T>& eta, const std::vector<int>& gone) {
  for (std::size_t i = 0; i < eta.size(); ++i) {
    if (gone[i] != 0) eta[i] = -std::numeric_limits<T>::infinity();
  }
}

template <class Oracle, class T, class Best>
void compare(Random& random, int n, bool single_root, bool projective, int repeats, Best best) {
  Allocated<Oracle> a({n, single_root});
  CHECK(a.oracle.slots() == n && a.oracle.feature_slots() == 0);
  for (int repeat = 0; repeat < factormax::test::times(repeats); ++repeat) {
    const double forbidden = repeat % 4 * 0.25, absent = repeat % 3 == 0 ? 0.3 : 0;
    const std::vector<int> gone = random_pattern(random, n, forbidden, absent);
    bool prepared = false;
    for (int call = 0; call < 3; ++call) {  // one `prepare` for several scores
      const Kind kind = static_cast<Kind>(random.integer(0, static_cast<int>(Kind::kLast) - 1));
      factormax::test::current_case =
          std::string(projective ? "projective" : "any tree") + (single_root ? ", one root" : "") +
          (sizeof(T) == 4 ? ", float" : "") + ", n " + std::to_string(n) + ", repeat " +
          std::to_string(repeat) + ", kind " + std::to_string(static_cast<int>(kind));
      std::vector<T> eta = random_scores<T>(random, n, kind);
      forbid(eta, gone);
      if (call == 0) prepared = a.oracle.prepare(eta.data());
      const Sentence s(eta, n);
      check_best(a.oracle, prepared, eta, s, single_root, projective, best(s));
    }
  }
}

template <class Oracle, class T>
void test_oracle(std::uint64_t seed, bool projective) {
  Random random(seed);
  for (const bool single_root : {false, true}) {
    std::vector<std::vector<Heads>> trees;
    for (int n = 0; n <= 5; ++n) trees.push_back(all_trees(n, single_root, projective));
    for (int n = 1; n <= 5; ++n) {
      compare<Oracle, T>(random, n, single_root, projective, n < 5 ? 1500 : 200,
                         [&](const Sentence& s) { return brute_best(s, trees[s.size()]); });
    }
    for (const int n : {6, 7, 8, 9, 13, 16, 17, 24}) {
      compare<Oracle, T>(random, n, single_root, projective, n < 10 ? 100 : 12,
                         [&](const Sentence& s) { return slow_best(s, single_root, projective); });
    }
    for (const int n : {40, 101}) {
      Allocated<Oracle> a({n, single_root});
      for (const Kind kind : {Kind::kNormal, Kind::kInteger, Kind::kZero, Kind::kSymmetric}) {
        factormax::test::current_case = "n " + std::to_string(n);
        const std::vector<T> eta = random_scores<T>(random, n, kind);
        CHECK(a.oracle.prepare(eta.data()));
        const Sentence s(eta, n);
        const Heads heads = found(a.oracle, eta, s, single_root, projective);
        if (projective || (single_root && n > 40)) continue;  // too slow to compare with
        CHECK_NEAR(s.value(heads), slow_best(s, single_root, false), 1e-9L);
      }
    }
  }
}

// What the comments of the headers promise.
template <class T>
void test_by_hand() {
  factormax::test::current_case = "by hand";
  const T inf = std::numeric_limits<T>::infinity();
  std::vector<std::int32_t> on(3);

  // 0 and 1 would head each other; the root takes the one that loses less.
  Allocated<Arborescence<T>> pair({2, false});
  const std::vector<T> cycle = {1, 5, 6, 3};
  CHECK(pair.oracle.prepare(cycle.data()));
  CHECK(pair.oracle.map(cycle.data(), nullptr, on.data(), nullptr));
  CHECK(on[0] == 1 && on[1] == 3);

  // Two roots are better, even by far, but only one is allowed.
  Allocated<Arborescence<T>> any({2, true});
  Allocated<ProjectiveTree<T>> projective({2, true});
  const std::vector<T> roots = {T(1e9), T(-1e9), 0, T(1e9)};
  CHECK(any.oracle.prepare(roots.data()) && projective.oracle.prepare(roots.data()));
  CHECK(any.oracle.map(roots.data(), nullptr, on.data(), nullptr));
  CHECK(on[0] == 0 && on[1] == 2);
  CHECK(projective.oracle.map(roots.data(), nullptr, on.data(), nullptr));
  CHECK(on[0] == 0 && on[1] == 2);

  // Word 1 is absent, and so is the only head of word 2.
  Allocated<Arborescence<T>> three({3, false});
  Allocated<ProjectiveTree<T>> three_projective({3, false});
  std::vector<T> orphan = {0, -inf, -inf, -inf, -inf, -inf, -inf, 1, -inf};
  CHECK(!three.oracle.prepare(orphan.data()) && !three_projective.oracle.prepare(orphan.data()));
  orphan[6] = -1;
  CHECK(three.oracle.prepare(orphan.data()) && three_projective.oracle.prepare(orphan.data()));
  CHECK(three.oracle.map(orphan.data(), nullptr, on.data(), nullptr));
  CHECK(on == (std::vector<std::int32_t>{0, -1, 6}));
  CHECK(three_projective.oracle.map(orphan.data(), nullptr, on.data(), nullptr));
  CHECK(on == (std::vector<std::int32_t>{0, -1, 6}));

  const std::vector<T> nothing(9, -inf);
  CHECK(three.oracle.prepare(nothing.data()) && three_projective.oracle.prepare(nothing.data()));
  CHECK(three.oracle.map(nothing.data(), nullptr, on.data(), nullptr));
  CHECK(on == (std::vector<std::int32_t>{-1, -1, -1}));
  CHECK(three_projective.oracle.map(nothing.data(), nullptr, on.data(), nullptr));
  CHECK(on == (std::vector<std::int32_t>{-1, -1, -1}));
}

}  // namespace

int main(int argc, char** argv) {
  const std::uint64_t seed = factormax::test::seed_from(argc, argv);
  test_by_hand<double>();
  test_by_hand<float>();
  test_oracle<Arborescence<double>, double>(seed, false);
  test_oracle<Arborescence<float>, float>(seed, false);
  test_oracle<ProjectiveTree<double>, double>(seed, true);
  test_oracle<ProjectiveTree<float>, float>(seed, true);
  return factormax::test::finish();
}
