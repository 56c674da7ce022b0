// The clusters of tight pairs against the reduced system, on graphs in which variables are clipped,
// pairs are negated, repeated and around cycles that contradict themselves.
#include <cmath>

#include "factormax/backward.hpp"
#include "graph.hpp"

namespace {

using namespace factormax;
using test::Graph;
using test::Random;

// A graph of pairs, prepared, with what it takes to pull a gradient back.
template <class T>
struct Pulled {
  Problem<T> problem;
  Workspace counter, memory;
  Instance<T> p;
  PairTies<T> ties;
  ReducedSystem<T> system;

  explicit Pulled(Graph<T>& graph) : problem(graph.problem()) {
    allocate(counter);
    memory = Workspace(counter.used());
    allocate(memory);
    p.prepare(problem, 0);
  }
  void allocate(Workspace& ws) {
    p.allocate(problem, ws);
    ties.allocate(problem, ws);
    system.allocate(problem, nullptr, ws);
  }

  std::vector<T> by_ties(const std::vector<int>& free, const std::vector<int>& tight,
                         std::vector<T> d) {
    ties.project(
        p, [&](int j) { return free[j] != 0; }, [&](int r) { return tight[r] != 0; },
        {d.data(), p.n});
    return d;
  }

  // J (d - A_I^T t)
  std::vector<T> by_system(const std::vector<int>& free, const std::vector<int>& tight,
                           std::vector<T> d) {
    system.count = 0;
    for (int r = 0; r < p.m; ++r) {
      if (tight[r]) system.active[system.count++] = r;
    }
    system.build(p, [&](int j) { return free[j] != 0; });
    std::vector<T> rhs(p.m + 1);
    system.multiply(d.data(), {rhs.data(), p.m});
    system.solve({rhs.data(), p.m}, T(0));
    system.subtract_transpose(Span<const T>(system.solution), d.data());
    for (int j = 0; j < p.n; ++j) d[j] = free[j] ? d[j] : T(0);
    return d;
  }
};

template <class T>
Graph<T> without_pairs(int n) {
  Graph<T> graph(n);
  graph.eta_u.assign(n, T(0.5));
  return graph;
}

void test_against_the_system() {
  Random random(3);
  for (int round = 0; round < 400; ++round) {
    const int n = random.integer(1, 30), pairs = random.integer(0, 3 * n);
    Graph<double> graph = without_pairs<double>(n);
    Graph<float> single = without_pairs<float>(n);
    for (int q = 0; q < pairs; ++q) {
      const test::Literal a{random.integer(0, n - 1), random.flip()};
      const test::Literal b{random.integer(0, n - 1), random.flip()};
      graph.pair(a, b);
      single.pair(a, b);
      graph.eta_v.push_back(random.normal());
      single.eta_v.push_back(float(graph.eta_v.back()));
    }
    std::vector<int> free(n), tight(pairs);
    std::vector<double> d(n);
    const int clipped = random.integer(0, 3);  // of four
    for (int& each : free) each = random.integer(1, 4) > clipped;
    for (int& each : tight) each = random.integer(0, 2) == 0;
    for (double& each : d) each = random.normal();
    Pulled<double> pulled(graph);
    CHECK(PairTies<double>::apply_to(pulled.problem));
    const std::vector<double> found = pulled.by_ties(free, tight, d);
    const std::vector<double> expected = pulled.by_system(free, tight, d);
    const std::vector<float> rounded =
        Pulled<float>(single).by_ties(free, tight, std::vector<float>(d.begin(), d.end()));
    for (int j = 0; j < n; ++j) {
      CHECK(std::fabs(found[j] - expected[j]) <= 1e-8);
      CHECK(std::fabs(rounded[j] - found[j]) <= 1e-6);
    }
  }
}

// A chain in an unlucky order.
void test_a_long_chain() {
  const int n = 100000;
  Graph<double> graph = without_pairs<double>(n);
  for (int j = n - 1; j > 0; --j) {
    graph.pair({j}, {j - 1});
    graph.eta_v.push_back(1);
  }
  std::vector<double> d(n);
  for (int j = 0; j < n; ++j) d[j] = j;
  const std::vector<int> every_variable(n, 1), every_pair(n - 1, 1);
  for (const double each : Pulled<double>(graph).by_ties(every_variable, every_pair, d)) {
    CHECK(std::fabs(each - 0.5 * (n - 1)) <= 1e-9);
  }
}

}  // namespace

int main() {
  test_against_the_system();
  test_a_long_chain();
  return test::finish();
}
