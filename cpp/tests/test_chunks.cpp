// Loops that threads share: every index once, and the same bits whatever the number of threads, in
// the loops alone and in the solution of a large graph.
#include "factormax/chunks.hpp"
#include "factormax/reduced.hpp"
#include "graph.hpp"
#include "solution.hpp"

namespace {

using namespace factormax;
using test::Graph;
using test::Random;
using test::Solution;

template <class T>
void test_loops() {
  Random random(1);
  for (const int size : {0, 1, 100, kWorthSharing - 1, kWorthSharing, 100001, 3000000}) {
    std::vector<T> a(size), b(size);
    for (T& each : a) each = T(random.normal());
    const Span<const T> span{a.data(), size};
    T dot = 0, largest = 0;
    std::vector<std::int32_t> positive;
    for (const int threads : {1, 2, 5}) {
      set_num_threads(threads);
      std::fill(b.begin(), b.end(), T(0));
      in_chunks(size, [&](int begin, int end) FACTORMAX_BODY {
        for (int i = begin; i < end; ++i) b[i] += 2 * a[i];
      });
      bool doubled = true;
      for (int i = 0; i < size; ++i) doubled &= b[i] == 2 * a[i];
      CHECK(doubled);
      std::vector<std::int32_t> list(size);
      list.resize(list_in_chunks(size, list.data(), [&](int i) { return a[i] > 0; }));
      if (threads == 1) {
        dot = dot_in_chunks<T>(span, span);
        largest = max_abs_in_chunks<T>(span);
        for (int i = 0; i < size; ++i) {
          if (a[i] > 0) positive.push_back(i);
        }
        double exact = 0;
        T most = 0;
        for (const T each : a) {
          exact += double(each) * each;
          most = std::max(most, std::fabs(each));
        }
        CHECK(std::fabs(dot - exact) <= 10000 * std::numeric_limits<T>::epsilon() * exact);
        CHECK(largest == most);
      }
      CHECK((dot_in_chunks<T>(span, span) == dot));
      CHECK((max_abs_in_chunks<T>(span) == largest));
      CHECK(list == positive);
    }
  }
  set_num_threads(0);
}

Graph<double> make_random_pairs(int n, int pairs, double scale) {
  Random random(2);
  Graph<double> graph(n);
  for (int q = 0; q < pairs; ++q) {
    const int a = random.integer(0, n - 1), b = random.integer(0, n - 2);
    graph.pair({a, random.flip()}, {b < a ? b : b + 1});
    graph.eta_v.push_back(scale * random.normal());
  }
  for (int j = 0; j < n; ++j) graph.eta_u.push_back(scale * random.normal());
  return graph;
}

// Every variable is a few pairs away from all others, so that nothing can be cut apart.
void test_a_large_graph() {
  Graph<double> graph = make_random_pairs(20000, 36000, 1);
  set_num_threads(1);
  const Solution<double> alone = test::solve(graph, 1, Method::compact, Options());
  CHECK(alone.status_of(0) == Status::converged);
  for (const int threads : {2, 5}) {
    set_num_threads(threads);
    CHECK(test::solve(graph, 1, Method::compact, Options()).same_as(alone));
  }
  set_num_threads(0);
}

// Conjugate gradients over all pairs: every rounding shows after some steps.
void test_a_large_system() {
  Graph<double> graph = make_random_pairs(20000, 40000, 1);
  const Problem<double> problem = graph.problem();
  Instance<double> p;
  ReducedSystem<double> system;
  const auto allocate = [&](Workspace& ws) {
    p.allocate(problem, ws);
    system.allocate(problem, nullptr, ws);
  };
  Workspace counter;
  allocate(counter);
  Workspace memory(counter.used());
  allocate(memory);
  p.prepare(problem, 0);
  Random random(4);
  std::vector<double> rhs(p.m), alone;
  for (double& each : rhs) each = random.normal();
  system.shift = 0.01;
  system.most_steps = 60;
  for (const int threads : {1, 2, 5}) {
    set_num_threads(threads);
    system.count = p.m;
    for (int r = 0; r < p.m; ++r) system.active[r] = r;
    system.build(p, [](int) { return true; });
    const double residual = system.solve({rhs.data(), p.m}, 1e-9);
    CHECK(residual > 0 && residual < 5);
    const Span<double> found = system.solution.first(p.m);
    if (threads == 1) alone.assign(found.begin(), found.end());
    CHECK(std::equal(found.begin(), found.end(), alone.begin()));
  }
  set_num_threads(0);
}

}  // namespace

int main() {
  test_loops<double>();
  test_loops<float>();
  test_a_large_graph();
  test_a_large_system();
  return test::finish();
}
