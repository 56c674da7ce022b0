// The oracles of Sequence and SequenceBudget against all structures, or a plain recursion.
#include <limits>
#include <tuple>
#include <utility>
#include <vector>

#include "factormax/oracle/sequence.hpp"
#include "factormax/oracle/sequence_budget.hpp"
#include "oracles.hpp"

namespace {

using factormax::oracle::Sequence;
using factormax::oracle::SequenceBudget;
using namespace factormax::test;

template <class T>
long double rounding(const std::vector<T>& eta_u, const std::vector<T>& eta_v, int terms) {
  long double size = 0;
  for (const T value : eta_u) size = std::isinf(value) ? size : std::fmax(size, std::fabs(value));
  for (const T value : eta_v) size = std::isinf(value) ? size : std::fmax(size, std::fabs(value));
  return 2.0L * terms * terms * std::numeric_limits<T>::epsilon() * size;
}

template <class T>
struct Structure {
  bool found = false;
  std::vector<std::int32_t> on, features;
  long double value = 0;
};

// Runs the oracle twice, in its own workspace: the second answer must equal the first.
template <class T, class Oracle>
Structure<T> best_of(Oracle& oracle, const std::vector<T>& eta_u, const std::vector<T>& eta_v) {
  Structure<T> out, again;
  for (Structure<T>* s : {&out, &again}) {
    s->on.assign(oracle.slots(), kPoison);
    s->features.assign(oracle.feature_slots(), kPoison);
    s->found = oracle.map(eta_u.data(), eta_v.data(), s->on.data(), s->features.data());
  }
  CHECK(out.found == again.found);
  if (!out.found) return out;
  CHECK(out.on == again.on && out.features == again.features);
  for (const int j : out.on) {
    CHECK(j >= -1 && j < static_cast<int>(eta_u.size()));
    if (j >= 0) out.value += eta_u[j];
  }
  for (const int k : out.features) {
    CHECK(k >= -1 && k < static_cast<int>(eta_v.size()));
    if (k >= 0) out.value += eta_v[k];
  }
  CHECK(!std::isnan(out.value) && !std::isinf(out.value));
  return out;
}

// ------------------------------------------------------------------------------------------
// Sequence

struct Shape {
  int length, states;
  bool per_step, has_initial, has_final;

  int block() const { return states * states; }
  int initial_at() const { return per_step ? (length - 1) * block() : block(); }
  int final_at() const { return initial_at() + has_initial * states; }
  int transition(int t, int from, int to) const {
    return per_step * t * block() + from * states + to;
  }
};

template <class T>
long double value_of(const Shape& shape, const std::vector<T>& eta_u, const std::vector<T>& eta_v,
                     const std::vector<int>& state) {
  const int present = static_cast<int>(state.size());
  long double sum = 0;
  for (int t = 0; t < present; ++t) {
    sum += eta_u[t * shape.states + state[t]];
    if (t > 0) sum += eta_v[shape.transition(t - 1, state[t - 1], state[t])];
  }
  if (present > 0 && shape.has_initial) sum += eta_v[shape.initial_at() + state[0]];
  if (present > 0 && shape.has_final) sum += eta_v[shape.final_at() + state[present - 1]];
  return sum;
}

// Counts through all sequences, the first step fastest: the order in which ties are broken.
template <class T>
std::pair<std::vector<int>, long double> enumerate(const Shape& shape, int present,
                                                   const std::vector<T>& eta_u,
                                                   const std::vector<T>& eta_v) {
  std::vector<int> state(present, 0), best;
  long double most = -std::numeric_limits<long double>::infinity();
  while (true) {
    const long double value = value_of(shape, eta_u, eta_v, state);
    if (value > most) {
      most = value;
      best = state;
    }
    int t = 0;
    while (t < present && ++state[t] == shape.states) state[t++] = 0;
    if (t == present) return {best, most};
  }
}

template <class T>
long double recursion(const Shape& shape, int present, const std::vector<T>& eta_u,
                      const std::vector<T>& eta_v) {
  const long double inf = std::numeric_limits<long double>::infinity();
  std::vector<long double> best(shape.states), next(shape.states);
  for (int s = 0; s < shape.states; ++s) {
    best[s] = eta_u[s] + (shape.has_initial ? (long double)eta_v[shape.initial_at() + s] : 0);
  }
  for (int t = 1; t < present; ++t) {
    for (int to = 0; to < shape.states; ++to) {
      next[to] = -inf;
      for (int from = 0; from < shape.states; ++from) {
        const T score = eta_v[shape.transition(t - 1, from, to)];
        next[to] = std::fmax(next[to], best[from] + score + eta_u[t * shape.states + to]);
      }
    }
    best = next;
  }
  long double most = -inf;
  for (int s = 0; s < shape.states; ++s) {
    most =
        std::fmax(most, best[s] + (shape.has_final ? (long double)eta_v[shape.final_at() + s] : 0));
  }
  return most;
}

template <class T>
void check_sequence(Random& random, const Shape& shape, int present, int kind, double forbidden,
                    bool all) {
  Allocated<Sequence<T>> a(
      {shape.length, shape.states, shape.per_step, shape.has_initial, shape.has_final});
  Sequence<T>& oracle = a.oracle;
  CHECK(oracle.slots() == shape.length && oracle.feature_slots() == shape.length + 1);

  const T inf = std::numeric_limits<T>::infinity();
  std::vector<T> eta_u = scores<T>(random, kind, shape.length * shape.states, forbidden);
  const std::vector<T> eta_v =
      scores<T>(random, kind, shape.final_at() + shape.has_final * shape.states, forbidden);
  for (int t = 0; t < shape.length; ++t) {
    if (t < present) {  // at least one state
      T& one = eta_u[t * shape.states + random.integer(0, shape.states - 1)];
      if (std::isinf(one)) one = static_cast<T>(draw(random, kind));
    } else {
      for (int s = 0; s < shape.states; ++s) eta_u[t * shape.states + s] = -inf;
    }
  }
  CHECK(oracle.prepare(eta_u.data()));
  const Structure<T> found = best_of<T>(oracle, eta_u, eta_v);

  std::vector<int> state;
  long double most = 0;
  if (present == 0) {
    CHECK(found.found);
  } else if (all) {
    std::tie(state, most) = enumerate(shape, present, eta_u, eta_v);
  } else {
    most = recursion(shape, present, eta_u, eta_v);
  }
  CHECK(found.found == !std::isinf(most));
  if (!found.found || std::isinf(most)) return;
  CHECK_NEAR(found.value, most, rounding(eta_u, eta_v, 2 * shape.length + 2));

  // The features are those of the states.
  std::vector<int> chosen(present);
  for (int t = 0; t < shape.length; ++t) {
    CHECK((found.on[t] >= 0) == (t < present));
    if (found.on[t] < 0) continue;
    CHECK(found.on[t] / shape.states == t);
    chosen[t] = found.on[t] % shape.states;
  }
  for (int t = 0; t + 1 < shape.length; ++t) {
    CHECK(found.features[t] ==
          (t + 1 < present ? shape.transition(t, chosen[t], chosen[t + 1]) : -1));
  }
  const bool some = present > 0;
  CHECK(found.features[shape.length - 1] ==
        (some && shape.has_initial ? shape.initial_at() + chosen[0] : -1));
  CHECK(found.features[shape.length] ==
        (some && shape.has_final ? shape.final_at() + chosen[present - 1] : -1));
  if (all && (kind == 1 || kind == 2)) CHECK(chosen == state);
}

template <class T>
void test_sequence(std::uint64_t seed) {
  Random random(seed);
  const std::vector<std::pair<int, int>> small = {{1, 1}, {1, 40}, {2, 2},  {2, 33}, {3, 1},
                                                  {3, 3}, {3, 9},  {3, 13}, {5, 2},  {5, 4},
                                                  {8, 2}, {2, 8},  {2, 5},  {4, 6}};
  const std::vector<std::pair<int, int>> large = {{20, 25}, {30, 16}, {10, 50}, {60, 3}};
  for (const bool all : {true, false}) {
    for (const auto& [length, states] : all ? small : large) {
      for (int kind = 0; kind < 5; ++kind) {
        for (int repeat = 0; repeat < times(all ? 24 : 8); ++repeat) {
          const Shape shape{length, states, random.flip(), random.flip(), random.flip()};
          const int present = random.integer(0, 3) > 0 ? length : random.integer(0, length);
          const double forbidden = random.flip() ? 0 : random.uniform(0, all ? 0.6 : 0.2);
          factormax::test::current_case = std::string("sequence ") + kKinds[kind] + " " +
                                          std::to_string(length) + "x" + std::to_string(states) +
                                          ", repeat " + std::to_string(repeat);
          check_sequence<T>(random, shape, present, kind, forbidden, all);
        }
      }
    }
  }
}

// ------------------------------------------------------------------------------------------
// SequenceBudget

template <class T>
long double best_subset(const std::vector<T>& eta_u, const std::vector<T>& coupling, int budget,
                        std::vector<std::int32_t>& on) {
  const int length = static_cast<int>(eta_u.size());
  long double most = -1;
  for (int set = 0; set < 1 << length; ++set) {  // ascending: off wins where two differ last
    long double value = 0;
    int count = 0;
    for (int t = 0; t < length; ++t) {
      if ((set >> t & 1) == 0) continue;
      ++count;
      value += eta_u[t];
      if (t > 0 && (set >> (t - 1) & 1) == 1) value += coupling[t - 1];
    }
    if (count > budget || (set > 0 && value <= most)) continue;
    most = value;
    for (int t = 0; t < length; ++t) on[t] = (set >> t & 1) == 1 ? t : -1;
  }
  return most;
}

// The best with exactly c on up to t, the last of them off or on.
template <class T>
long double budget_recursion(const std::vector<T>& eta_u, const std::vector<T>& coupling,
                             int budget) {
  const long double inf = std::numeric_limits<long double>::infinity();
  std::vector<long double> off(budget + 1, -inf), on(budget + 1, -inf);
  off[0] = 0;
  for (std::size_t t = 0; t < eta_u.size(); ++t) {
    for (int c = budget; c >= 0; --c) {
      const long double now = std::fmax(off[c], on[c]);
      on[c] = c == 0
                  ? -inf
                  : eta_u[t] + std::fmax(off[c - 1], t == 0 ? -inf : on[c - 1] + coupling[t - 1]);
      off[c] = now;
    }
  }
  long double most = 0;
  for (int c = 0; c <= budget; ++c) most = std::fmax(most, std::fmax(off[c], on[c]));
  return most;
}

template <class T>
void check_budget(Random& random, int length, bool per_step, int budget, int kind, double forbidden,
                  bool all) {
  Allocated<SequenceBudget<T>> a({length, per_step, random.flip() ? std::max(0, budget) : 1 << 30});
  SequenceBudget<T>& oracle = a.oracle;
  CHECK(oracle.slots() == length && oracle.feature_slots() == length - 1);

  const std::vector<T> eta_u = scores<T>(random, kind, length, forbidden);
  const std::vector<T> eta_v = scores<T>(random, kind, per_step ? length - 1 : 1, 0);
  std::vector<T> coupling = eta_v;
  if (!per_step) coupling.assign(length - 1, eta_v[0]);
  CHECK(oracle.prepare(eta_u.data(), {double(budget)}));
  const Structure<T> found = best_of<T>(oracle, eta_u, eta_v);
  CHECK(found.found);

  budget = std::max(0, std::min(budget, length));
  std::vector<std::int32_t> expected(length);
  const long double most = all ? best_subset(eta_u, coupling, budget, expected)
                               : budget_recursion(eta_u, coupling, budget);
  CHECK_NEAR(found.value, most, rounding(eta_u, eta_v, 2 * length));
  int total = 0;
  for (int t = 0; t < length; ++t) {
    CHECK(found.on[t] == -1 || found.on[t] == t);
    total += found.on[t] == t;
    if (t == 0) continue;
    const bool both = found.on[t] >= 0 && found.on[t - 1] >= 0;
    CHECK(found.features[t - 1] == (both ? per_step * (t - 1) : -1));
  }
  CHECK(total <= budget);
  if (all && (kind == 1 || kind == 2)) CHECK(found.on == expected);
}

template <class T>
void test_budget(std::uint64_t seed) {
  Random random(seed);
  for (const int length : {1, 2, 3, 5, 8, 11, 40, 150}) {
    const bool all = length <= 11;
    for (int kind = 0; kind < 5; ++kind) {
      for (int repeat = 0; repeat < times(length <= 8 ? 60 : 12); ++repeat) {
        const int budget = random.integer(-1, repeat % 3 == 0 ? length + 1 : 1 + length / 3);
        const double forbidden = random.flip() ? 0 : random.uniform();
        factormax::test::current_case = std::string("budget ") + kKinds[kind] + " " +
                                        std::to_string(length) + ", at most " +
                                        std::to_string(budget);
        check_budget<T>(random, length, random.flip(), budget, kind, forbidden, all);
      }
    }
  }
}

}  // namespace

int main(int argc, char** argv) {
  const std::uint64_t seed = factormax::test::seed_from(argc, argv);
  test_sequence<double>(seed);
  test_sequence<float>(seed);
  test_budget<double>(seed);
  test_budget<float>(seed);
  return factormax::test::finish();
}
