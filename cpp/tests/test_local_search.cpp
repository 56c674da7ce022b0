// Local search against all assignments of small random models.
#include <limits>
#include <vector>

#include "check.hpp"
#include "factormax/local_search.hpp"

namespace {

using factormax::LocalSearch;
using factormax::SearchModel;
using factormax::Workspace;
using factormax::test::Random;

constexpr double kNone = -std::numeric_limits<double>::infinity();

// A model with the arrays that it points to.
struct Drawn {
  std::vector<std::int32_t> state_ptr{0}, scope_ptr{0}, scope, row_ptr{0}, row_state;
  std::vector<std::int64_t> table_ptr{0};
  std::vector<double> score, table, coef, rhs;
  std::vector<std::uint8_t> allowed, equal;

  SearchModel model() const {
    SearchModel m;
    m.num_units = static_cast<int>(state_ptr.size()) - 1;
    m.num_states = state_ptr.back();
    m.num_tables = static_cast<int>(scope_ptr.size()) - 1;
    m.num_rows = static_cast<int>(rhs.size());
    m.state_ptr = state_ptr.data();
    m.score = score.data();
    m.allowed = allowed.data();
    m.scope_ptr = scope_ptr.data();
    m.scope = scope.data();
    m.table_ptr = table_ptr.data();
    m.table = table.data();
    m.row_ptr = row_ptr.data();
    m.row_state = row_state.data();
    m.coef = coef.data();
    m.rhs = rhs.data();
    m.equal = equal.data();
    return m;
  }
};

double draw_score(Random& random, bool tied) {
  return tied ? random.integer(-1, 1) : random.normal();
}

Drawn draw(Random& random, int units, int tables, int rows, bool tied) {
  Drawn d;
  for (int u = 0; u < units; ++u) {
    const int states = random.integer(1, 4);
    d.state_ptr.push_back(d.state_ptr.back() + states);
    for (int s = 0; s < states; ++s) {
      d.score.push_back(draw_score(random, tied));
      d.allowed.push_back(s == 0 || random.uniform() < 0.9);
    }
  }
  for (int f = 0; f < tables; ++f) {
    std::vector<std::int32_t> own;
    std::int64_t size = 1;
    for (int u = 0; u < units; ++u) {
      const bool wanted = random.integer(0, units - 1) < 3 && own.size() < 3;
      if (!wanted) continue;
      own.push_back(u);
      size *= d.state_ptr[u + 1] - d.state_ptr[u];
    }
    if (own.empty()) continue;
    if (random.flip()) std::swap(own.front(), own.back());
    d.scope.insert(d.scope.end(), own.begin(), own.end());
    d.scope_ptr.push_back(static_cast<std::int32_t>(d.scope.size()));
    d.table_ptr.push_back(d.table_ptr.back() + size);
    for (std::int64_t k = 0; k < size; ++k) d.table.push_back(2 * draw_score(random, tied));
  }
  for (int r = 0; r < rows; ++r) {
    for (int s = 0; s < d.state_ptr.back(); ++s) {
      if (random.uniform() > 0.4) continue;
      d.row_state.push_back(s);
      d.coef.push_back(random.integer(0, 3) == 0 ? -1 : 1);
    }
    d.row_ptr.push_back(static_cast<std::int32_t>(d.row_state.size()));
    d.rhs.push_back(random.integer(0, 2));
    d.equal.push_back(random.integer(0, 3) == 0);
  }
  return d;
}

// From first principles; kNone if a row is broken or a state is not allowed.
double value_of(const SearchModel& m, const std::vector<std::int32_t>& x) {
  double value = 0;
  std::vector<std::uint8_t> on(static_cast<std::size_t>(m.num_states));
  for (int u = 0; u < m.num_units; ++u) {
    const int s = m.state_ptr[u] + x[u];
    if (m.allowed[s] == 0) return kNone;
    on[s] = 1;
    value += m.score[s];
  }
  for (int f = 0; f < m.num_tables; ++f) {
    std::int64_t at = 0;
    for (int k = m.scope_ptr[f]; k < m.scope_ptr[f + 1]; ++k) {
      at = at * m.states(m.scope[k]) + x[m.scope[k]];
    }
    value += m.table[m.table_ptr[f] + at];
  }
  for (int r = 0; r < m.num_rows; ++r) {
    double sum = 0;
    for (int k = m.row_ptr[r]; k < m.row_ptr[r + 1]; ++k) sum += on[m.row_state[k]] * m.coef[k];
    if (sum > m.rhs[r] || (m.equal[r] != 0 && sum < m.rhs[r])) return kNone;
  }
  return value;
}

double best_of(const SearchModel& m) {
  std::vector<std::int32_t> x(static_cast<std::size_t>(m.num_units));
  double best = kNone;
  for (;;) {
    best = std::max(best, value_of(m, x));
    int u = 0;
    while (u < m.num_units && ++x[u] == m.states(u)) x[u++] = 0;
    if (u == m.num_units) return best;
  }
}

void check_model(Random& random, const Drawn& drawn, int& optima, int& models) {
  const SearchModel m = drawn.model();
  LocalSearch search;
  Workspace counter;
  search.allocate(m, counter);
  Workspace memory(counter.used());
  search.allocate(m, memory);
  search.prepare();

  const double best = best_of(m);
  std::vector<std::int32_t> start(static_cast<std::size_t>(m.num_units)), x;
  for (int u = 0; u < m.num_units; ++u) start[u] = random.integer(0, m.states(u) - 1);
  const std::vector<std::uint8_t> movable(start.size(), 1);
  x = start;
  const bool found = search.run(x.data(), movable.data(), 100000, 1);
  CHECK(!found || best > kNone);
  if (found) {
    const double value = value_of(m, x);
    CHECK(value > kNone);
    CHECK(value <= best + 1e-9);
    CHECK(value >= value_of(m, start) - 1e-9);
  }
  if (best > kNone) {
    ++models;
    optima += found && value_of(m, x) >= best - 1e-9;
  }
  std::vector<std::int32_t> again = start;
  CHECK(search.run(again.data(), movable.data(), 100000, 1) == found);
  CHECK(again == x);

  // What does not move stays, and without work there is still an answer if it begins with one.
  std::vector<std::uint8_t> some = movable;
  for (auto& bit : some) bit = random.flip();
  again = start;
  search.run(again.data(), some.data(), 5000, 2);
  for (int u = 0; u < m.num_units; ++u) CHECK(some[u] != 0 || again[u] == start[u]);
  again = start;
  search.run(again.data(), movable.data(), 0, 3);

  std::vector<double> given(static_cast<std::size_t>(m.num_states));
  search.conditional(start.data(), given.data());
  if (m.num_rows == 0) {
    for (int u = 0; u < m.num_units; ++u) {
      for (int t = 0; t < m.states(u); ++t) {
        again = start;
        again[u] = t;
        const double there = value_of(m, again), here = value_of(m, start);
        if (there == kNone || here == kNone) continue;
        CHECK_NEAR(given[m.state_ptr[u] + t] - given[m.state_ptr[u] + start[u]], there - here,
                   1e-9);
      }
    }
  }
}

void test_random(std::uint64_t seed) {
  Random random(seed);
  int optima = 0, models = 0;
  for (int repeat = 0; repeat < factormax::test::times(120); ++repeat) {
    const int units = random.integer(3, 7), rows = repeat % 2 == 0 ? 0 : random.integer(1, 3);
    const Drawn drawn = draw(random, units, random.integer(0, 8), rows, repeat % 3 == 0);
    factormax::test::current_case = "model " + std::to_string(repeat);
    check_model(random, drawn, optima, models);
  }
  CHECK(optima >= models - models / 20);
}

void test_nothing() {
  factormax::test::current_case = "nothing";
  Random random(0);
  int optima = 0, models = 0;
  check_model(random, Drawn{}, optima, models);
  CHECK(optima == 1);
}

}  // namespace

int main(int argc, char** argv) {
  test_random(factormax::test::seed_from(argc, argv));
  test_nothing();
  return factormax::test::finish();
}
