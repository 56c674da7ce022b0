// A long graph: the strips that it is cut into, and their solution on several threads.
#include <random>

#include "factormax/parallel.hpp"
#include "solution.hpp"

// A private header of the core.
#include "../src/graph_parts.hpp"

namespace {

using namespace factormax;
using test::Graph;
using test::Solution;

// Frames of `width` variables, of which one is on, tied to the next frame by pairs.
template <class T>
Graph<T> make_frames(int frames, int width) {
  std::mt19937 engine(1);
  std::normal_distribution<double> normal;
  Graph<T> graph(frames * width);
  for (int f = 0; f < frames; ++f) {
    std::vector<test::Literal> frame;
    for (int k = 0; k < width; ++k) frame.push_back({f * width + k});
    graph.row(frame, T(1), T(1), RowKind::equality);
  }
  for (int j = 0; j + width < graph.n; ++j) graph.pair({j}, {j + width});
  for (int j = 0; j < graph.n; ++j) graph.eta_u.push_back(T(normal(engine)));
  for (int q = 0; q < graph.num_pairs(); ++q) graph.eta_v.push_back(T(normal(engine)));
  return graph;
}

// Prepares the only instance of a graph.
template <class T>
class Prepared {
 public:
  explicit Prepared(Graph<T>& graph) : problem_(graph.problem()), memory_(bytes()) {
    instance.allocate(problem_, memory_);
    instance.prepare(problem_, 0);
  }
  Instance<T> instance;

 private:
  std::size_t bytes() {
    Workspace counter;
    Instance<T>().allocate(problem_, counter);
    return counter.used();
  }
  Problem<T> problem_;
  Workspace memory_;
};

// Every row is in one part at most, with all its variables, and no two parts share a variable.
template <class T>
void check_parts(const Instance<T>& p, GraphParts<T>& parts) {
  std::vector<int> owner(p.n, -1), seen(p.m, 0);
  for (int k = 0; k < parts.count(); ++k) {
    int before = -1;
    for (const std::int32_t r : parts.rows(k)) {
      CHECK(r > before);
      before = r;
      ++seen[r];
      for (int e = p.ptr[r]; e < p.ptr[r + 1]; ++e) {
        int& own = owner[p.col[e]];
        CHECK(own < 0 || own == k);
        own = k;
      }
    }
  }
  CHECK(std::count(seen.begin(), seen.end(), 1) == parts.num_rows());
  CHECK(std::none_of(seen.begin(), seen.end(), [](int times) { return times > 1; }));
}

void test_parts() {
  Graph<double> graph = make_frames<double>(1000, 8);
  Prepared<double> prepared(graph);
  const Instance<double>& p = prepared.instance;
  GraphParts<double> parts;
  CHECK(parts.cut(p));
  CHECK(parts.count() >= 8);
  check_parts(p, parts);
  const std::vector<std::int32_t> border = parts.border();
  CHECK(parts.num_rows() + static_cast<int>(border.size()) == p.m);
  CHECK(border.size() < static_cast<std::size_t>(p.m / 16));
  parts.surround(p, border, 3);
  check_parts(p, parts);
  CHECK(parts.num_rows() > static_cast<int>(border.size()) && parts.num_rows() < p.m / 2);
  for (const std::int32_t r : border) {  // they are inside now
    bool inside = false;
    for (int k = 0; k < parts.count(); ++k) {
      const auto rows = parts.rows(k);
      inside |= std::binary_search(rows.begin(), rows.end(), r);
    }
    CHECK(inside);
  }
  Graph<double> wide = make_frames<double>(100, 80);
  CHECK(!GraphParts<double>().cut(Prepared<double>(wide).instance));
}

template <class T>
void test_threads() {
  Graph<T> graph = make_frames<T>(2000, 10);
  Options options;
  if (sizeof(T) == 4) options.tol = 1e-4;
  set_num_threads(1);
  const Solution<T> alone = test::solve(graph, 1, Method::compact, options);
  CHECK(alone.status_of(0) == Status::converged);
  for (const int threads : {2, 5}) {
    set_num_threads(threads);
    CHECK(test::solve(graph, 1, Method::compact, options).same_as(alone));
  }
  set_num_threads(0);
  // From multipliers of 0 it is solved as a whole.
  const std::vector<T> zero(graph.num_dual(), T(0));
  Solution<T> whole(graph, 1);
  test::solve_into(graph, Method::compact, options, whole, {zero.data(), 0});
  CHECK(whole.status_of(0) == Status::converged);
  CHECK(!whole.same_as(alone));
  T apart = 0;
  for (int j = 0; j < graph.n; ++j) apart = std::max(apart, std::fabs(whole.mu[j] - alone.mu[j]));
  CHECK(apart <= T(10 * options.tol));
}

}  // namespace

int main() {
  test_parts();
  test_threads<double>();
  test_threads<float>();
  return test::finish();
}
