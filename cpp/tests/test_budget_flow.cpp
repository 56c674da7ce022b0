// Sequences with a budget by flows against the active set of structures: marginals, the derivative,
// and when flows are proved to be a mixture that keeps the budget.
#include <limits>
#include <string>
#include <vector>

#include "check.hpp"
#include "factormax/structured/structured.hpp"

namespace {

using namespace factormax;
using factormax::test::Random;

struct Case {
  int length = 0, budget = 0;
  bool per_step = true, uniform = true;
  std::vector<double> x, eta_v, w;

  std::vector<std::int32_t> shape() const { return {length, per_step, length}; }
};

Case draw(Random& random, int length, double scale) {
  Case c;
  c.length = length;
  c.budget = random.integer(0, length);
  c.per_step = random.flip();
  c.uniform = random.flip();
  const double offset = random.flip() ? 0.4 : 0.0;
  const int sign = random.integer(-1, 1);  // neighbours repel or attract each other, or either
  for (int t = 0; t < length; ++t) {
    const bool masked = random.integer(0, 9) == 0;
    const double score = offset + scale * random.normal();
    c.x.push_back(masked ? -std::numeric_limits<double>::infinity() : score);
    c.w.push_back(c.uniform ? 1.0 : 0.25 + random.uniform());
  }
  for (int k = 0; k < (c.per_step ? length - 1 : 1); ++k) {
    const double score = scale * random.normal();
    c.eta_v.push_back(sign == 0 ? score : sign * std::fabs(score));
  }
  return c;
}

struct Solvers {
  Workspace memory;
  Oracle oracle;
  ActiveSet set;
  BudgetFlow flow;

  explicit Solvers(const Case& c) {
    Workspace counter;
    allocate(c, counter);
    memory = Workspace(counter.used());
    allocate(c, memory);
  }
  void allocate(const Case& c, Workspace& ws) {
    const std::vector<std::int32_t> numbers = c.shape();
    oracle.allocate(OracleKind::sequence_budget, {numbers.data(), 3}, ws);
    ActiveSet::Shape shape;
    shape.vars = c.length;
    shape.slots = oracle.slots();
    shape.feature_slots = oracle.feature_slots();
    shape.capacity = c.length + 1;
    set.allocate(shape, ws);
    flow.allocate(c.length, c.per_step, ws);
  }
};

// That of the structures' face; symmetric with the features, too; and the same from the flags.
void check_derivative(Random& random, const Case& c, std::vector<double>& v, Solvers& s) {
  const int n = c.length, scores = static_cast<int>(c.eta_v.size());
  s.flow.complete(c.x.data(), c.eta_v.data(), 0);
  s.set.complete(c.x.data(), c.eta_v.data(), s.oracle, 0, std::numeric_limits<int>::max(),
                 v.data());
  std::vector<double> d(n), first, second(n), d_v(scores), first_v, second_v(scores);
  std::vector<double> weights(s.set.count + 1);
  for (int k = 0; k < n; ++k) d[k] = c.w[k] * (std::isfinite(c.x[k]) ? random.normal() : 0);
  for (double& value : d_v) value = random.normal();
  const Span<double> found{weights.data(), s.set.count};
  const auto by_structures = [&](bool features) {
    s.set.gather(d.data(), found);
    if (features) s.set.gather_features(d_v.data(), found);
    s.set.project(found);
    s.set.scatter(found.data, second.data());
    std::fill(second_v.begin(), second_v.end(), 0.0);
    s.set.scatter_features(found.data, second_v.data());
  };
  first = d;
  s.flow.apply(first.data());
  by_structures(false);
  for (int k = 0; k < n; ++k) CHECK_NEAR(first[k], second[k], 1e-8);

  std::vector<std::uint8_t> flags(s.flow.num_flags());
  s.flow.write_flags(flags.data());
  Solvers later(c);
  later.flow.begin(c.x.data(), c.budget);
  CHECK(later.flow.adopt(flags.data(), c.w.data()));
  by_structures(true);
  for (BudgetFlow* flow : {&s.flow, &later.flow}) {
    first = d;
    first_v = d_v;
    flow->respond(first.data(), first_v.data());
    for (int k = 0; k < n; ++k) CHECK_NEAR(first[k], second[k], 1e-8);
    for (int k = 0; k < scores; ++k) CHECK_NEAR(first_v[k], second_v[k], 1e-7);
  }
}

// Returns whether the flows were proved to be a mixture.
bool check_case(Random& random, const Case& c, double scale) {
  Solvers s(c);
  const int n = c.length;
  std::vector<double> v(n), other(n);
  Control control;
  std::int64_t calls = 0;
  s.oracle.prepare(c.x.data(), {double(c.budget), nullptr, 0});
  s.set.begin(c.w.data(), c.uniform);
  CHECK(s.set.solve(c.x.data(), c.eta_v.data(), s.oracle, 100000, control, false, other.data()) ==
        ActiveSetResult::solved);
  s.flow.begin(c.x.data(), c.budget);
  const auto solve = [&](const std::vector<double>& x) {
    return s.flow.solve(x.data(), c.eta_v.data(), c.w.data(), control, false, calls, v.data());
  };
  if (solve(c.x) != BudgetFlow::End::solved) return false;
  for (int k = 0; k < n; ++k) CHECK_NEAR(v[k], other[k], 1e-7);
  std::vector<double> features(c.eta_v.size()), mean(c.eta_v.size());
  s.flow.each_feature(v.data(), [&](int k, double value) { features[k] += value; });
  s.set.scatter_features(s.set.p.data, mean.data());
  for (std::size_t k = 0; k < mean.size(); ++k) CHECK_NEAR(features[k], mean[k], 1e-6);

  // From elsewhere and back: the same.
  const std::vector<double> before = v;
  std::vector<double> moved = c.x;
  for (double& score : moved) score += 0.1 * scale * random.normal();
  solve(moved);
  CHECK(solve(c.x) == BudgetFlow::End::solved);
  for (int k = 0; k < n; ++k) CHECK_NEAR(v[k], before[k], 1e-10);
  check_derivative(random, c, other, s);
  return true;
}

bool proves(int length, int budget, bool tight, const std::vector<double>& edges) {
  CountMixture mixture;
  Workspace counter;
  mixture.allocate(length, counter);
  Workspace memory(counter.used());
  mixture.allocate(length, memory);
  std::copy(edges.begin(), edges.end(), mixture.edge.data);
  Control control;
  return mixture.proves(length, budget, tight, control, false);
}

void check_proofs() {
  factormax::test::current_case = "proofs";
  // Three that are on together for two thirds: a budget of 2 holds only on average.
  const double a = 2.0 / 3, b = 1 - a;
  const std::vector<double> together{b, a, 0, 0, b, 0, 0, a, b, 0, 0, a};
  CHECK(!proves(3, 2, true, together));
  CHECK(proves(3, 3, false, together));
  // Three that are on for two thirds each, never two off at a time: one of them is always off.
  const std::vector<double> apart{b, a, 0, 0, 0, b, b, b, 0, b, b, b};
  CHECK(proves(3, 2, true, apart));
  // Independent neighbours are on together more often than two of three can be.
  std::vector<double> independent{b, a, 0, 0};
  for (int t = 1; t < 3; ++t) {
    independent.insert(independent.end(), {b * b, b * a, a * b, a * a});
  }
  CHECK(!proves(3, 2, true, independent));
  // Ten of a thousand on average, next to a budget and far from it.
  std::vector<double> rare{0.99, 0.01, 0, 0};
  for (int t = 1; t < 1000; ++t) {
    rare.insert(rare.end(), {0.98, 0.01, 0.01, 0});
  }
  for (const int budget : {10, 12, 30, 300}) CHECK(proves(1000, budget, budget == 10, rare));
  CHECK(!proves(1000, 9, false, rare));
}

}  // namespace

int main(int argc, char** argv) {
  Random random(factormax::test::seed_from(argc, argv));
  check_proofs();
  int proved = 0, trials = 0;
  for (const double scale : {10.0, 1.0, 0.1, 1e-2, 1e-3}) {
    for (int trial = 0; trial < 60; ++trial) {
      const int length = random.integer(1, 30);
      factormax::test::current_case = std::to_string(length) + " at " + std::to_string(scale) +
                                      ", trial " + std::to_string(trial);
      proved += check_case(random, draw(random, length, scale), scale);
      ++trials;
    }
  }
  CHECK(proved > trials / 2);
  return factormax::test::finish();
}
