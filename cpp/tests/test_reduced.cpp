// The reduced system (A_I J A_I^T) t = r, dense and by conjugate gradients, also where it is
// singular: what `solve` returns must be the residual, and small whenever r is in the range.
#include "factormax/reduced.hpp"
#include "graph.hpp"

namespace {

using namespace factormax;
using test::Graph;
using test::Random;

template <class T>
struct System {
  Problem<T> problem;
  Workspace counter, workspace;
  Instance<T> instance;
  ReducedSystem<T> reduced;
  std::vector<bool> free;

  explicit System(Graph<T>& graph) : problem(graph.problem()) {
    instance.allocate(problem, counter);
    reduced.allocate(problem, nullptr, counter);
    workspace = Workspace(counter.used());
    instance.allocate(problem, workspace);
    reduced.allocate(problem, nullptr, workspace);
    instance.prepare(problem, 0);
    free.assign(instance.n, true);
    reduced.count = instance.m;
    for (int r = 0; r < instance.m; ++r) reduced.active[r] = r;
  }

  bool build() {
    return reduced.build(instance, [&](int j) { return free[j]; });
  }

  // (A_I J A_I^T + shift) t, from the arrays of the graph, in double.
  std::vector<double> product(const std::vector<double>& t) const {
    const Instance<T>& p = instance;
    std::vector<double> v(p.n, 0), out(reduced.count, 0);
    for (int i = 0; i < reduced.count; ++i) {
      const int r = reduced.active[i];
      for (int k = p.ptr[r]; k < p.ptr[r + 1]; ++k) {
        v[p.col[k]] += double(p.coef[k]) * p.scale[r] * t[i];
      }
    }
    for (int i = 0; i < reduced.count; ++i) {
      const int r = reduced.active[i];
      for (int k = p.ptr[r]; k < p.ptr[r + 1]; ++k) {
        if (free[p.col[k]]) out[i] += double(p.coef[k]) * p.scale[r] * v[p.col[k]];
      }
      out[i] += double(reduced.shift) * t[i];
    }
    return out;
  }

  // The largest residual of `solution`, in double.
  double residual(const std::vector<T>& rhs) const {
    const Span<T> s = reduced.solution.first(reduced.count);
    const std::vector<double> found = product(std::vector<double>(s.begin(), s.end()));
    double largest = 0;
    for (int i = 0; i < reduced.count; ++i) {
      const double gap = std::fabs(found[i] - double(rhs[i]));
      largest = gap > largest || std::isnan(gap) ? gap : largest;
    }
    return largest;
  }
};

template <class T>
constexpr bool is_double = std::numeric_limits<T>::digits > 24;

// Solves for a right-hand side in the range. Returns how many rows were left.
template <class T>
int check_system(System<T>& s, Random& random) {
  CHECK(s.build());
  int placed = 0;  // rows that were dropped stand nowhere
  for (int r = 0; r < s.instance.m; ++r) placed += s.reduced.position(r) >= 0;
  CHECK(placed == s.reduced.count);
  for (int i = 0; i < s.reduced.count; ++i) CHECK(s.reduced.position(s.reduced.active[i]) == i);
  std::vector<double> t(s.reduced.count);
  for (double& value : t) value = random.normal();
  const std::vector<double> exact = s.product(t);
  const std::vector<T> rhs(exact.begin(), exact.end());
  double size = 0;
  for (const T value : rhs) size = std::max(size, std::fabs(double(value)));

  const T wanted = is_double<T> ? T(1e-12) : T(1e-5);
  const T told = s.reduced.solve({rhs.data(), s.reduced.count}, wanted);
  const double true_residual = s.residual(rhs);
  CHECK(true_residual <= 20 * wanted * size);
  CHECK_NEAR(told, true_residual, 20 * wanted * size);
  return s.reduced.count;
}

// Sparse rows of +-1 and of real weights: as many variables as rows, or more.
template <class T>
Graph<T> random_rows(Random& random, int rows, int vars, int length) {
  Graph<T> graph(vars);
  std::vector<int> order(vars);
  for (int j = 0; j < vars; ++j) order[j] = j;
  for (int r = 0; r < rows; ++r) {
    std::vector<test::Literal> literals;
    std::vector<T> weights;
    const bool plain = random.flip();
    for (int k = 0; k < length; ++k) {
      std::swap(order[k], order[random.integer(k, vars - 1)]);
      literals.push_back({order[k], random.flip()});
      weights.push_back(plain ? T(1) : static_cast<T>(random.uniform(0.5, 2)));
    }
    graph.row(literals, weights, T(1), RowKind::inequality);
  }
  graph.eta_u.assign(vars, T(0));
  return graph;
}

template <class T>
void test_random(std::uint64_t seed) {
  Random random(seed);
  for (const int rows : {1, 2, 5, 30, 255, 256, 257, 400}) {
    for (int repeat = 0; repeat < (rows > 100 ? 2 : 20); ++repeat) {
      test::current_case = "random, rows " + std::to_string(rows);
      Graph<T> graph = random_rows<T>(random, rows, 2 * rows + 6, 5);
      System<T> s(graph);
      for (int j = 0; j < s.instance.n; ++j)
        s.free[j] = random.uniform() < (repeat % 2 == 0 ? 0.8 : 0.2);
      const int left = check_system(s, random);
      CHECK(left <= rows);
    }
  }
}

// With a shift: in the envelope, by the free variables, and by conjugate gradients.
template <class T>
void test_shift(std::uint64_t seed) {
  Random random(seed);
  for (const int rows : {1, 30, 256, 400}) {
    for (const double free : {0.8, 0.1}) {
      for (const double shift : {1.0, 0.01}) {
        test::current_case =
            "shift, rows " + std::to_string(rows) + ", free " + std::to_string(free);
        Graph<T> graph = random_rows<T>(random, rows, 2 * rows + 6, 5);
        System<T> s(graph);
        s.reduced.shift = T(shift);
        for (int j = 0; j < s.instance.n; ++j) s.free[j] = random.uniform() < free;
        check_system(s, random);
      }
    }
  }
}

// The rows of a matching: all rows minus all columns is 0, so the matrix has rank 2n - 1.
template <class T>
void test_matching(std::uint64_t seed) {
  Random random(seed);
  for (const int n : {2, 5, 20, 128, 150}) {
    for (const double free : {1.0, 0.3}) {
      test::current_case = "matching, n " + std::to_string(n) + ", free " + std::to_string(free);
      Graph<T> graph = test::matching<T>(n, n, RowKind::equality);
      graph.eta_u.assign(graph.n, T(0));
      System<T> s(graph);
      for (int j = 0; j < s.instance.n; ++j) s.free[j] = random.uniform() < free;
      check_system(s, random);
    }
  }
}

// Leading rows that share nothing, and others that share several variables with them, some of which
// cancel.
template <class T>
void test_leading_rows(std::uint64_t seed) {
  Random random(seed);
  for (const int lead : {1, 2, 7, 40}) {
    for (const int others : {1, 2, 3, 8, 41}) {
      test::current_case = "leading " + std::to_string(lead) + ", others " + std::to_string(others);
      Graph<T> graph(4 * lead);
      for (int r = 0; r < lead; ++r) {
        graph.row({{4 * r}, {4 * r + 1}, {4 * r + 2}, {4 * r + 3}}, T(1), T(1), RowKind::equality);
      }
      for (int r = 0; r < others; ++r) {
        const int first = 4 * random.integer(0, lead - 1), second = 4 * random.integer(0, lead - 1);
        std::vector<test::Literal> line{{first}, {first + 1, random.flip()}};
        if (second != first) line.push_back({second + 2, random.flip()});
        if (random.flip()) line.push_back({first + 3, random.flip()});
        graph.row(line, T(1), T(1), RowKind::inequality);
      }
      graph.eta_u.assign(graph.n, T(0));
      System<T> s(graph);
      for (int j = 0; j < s.instance.n; ++j) s.free[j] = random.uniform() < 0.9;
      check_system(s, random);
    }
  }
}

// Chains whose links are given in any order: neighbours are put together, which makes factors
// cheap.
template <class T>
void test_clusters(std::uint64_t seed) {
  Random random(seed);
  for (const int chains : {1, 40, 700}) {
    for (const int links : {1, 3, 12}) {
      test::current_case =
          "clusters, " + std::to_string(chains) + " of " + std::to_string(links) + " links";
      const int rows = chains * links;
      std::vector<int> order(rows);
      for (int r = 0; r < rows; ++r) order[r] = r;
      for (int r = 0; r < rows; ++r) std::swap(order[r], order[random.integer(r, rows - 1)]);
      Graph<T> graph(chains * (links + 1));
      for (const int r : order) {
        const int first = r / links * (links + 1) + r % links;
        graph.row({{first, random.flip()}, {first + 1}}, T(random.uniform(0.5, 2)), T(1),
                  RowKind::inequality);
      }
      graph.eta_u.assign(graph.n, T(0));
      System<T> s(graph);
      s.reduced.most_work = std::max(4.0 * rows, 64.0 * 64 * 64);
      check_system(s, random);
      for (int i = 0; i < rows; ++i) CHECK(s.reduced.position(s.reduced.active[i]) == i);
    }
  }
  Graph<T> graph = random_rows<T>(random, 200, 406, 5);
  System<T> s(graph);
  s.reduced.most_work = 4.0 * 200;
  CHECK(!s.build());
}

// Many rows over few variables: solved by way of the variables.
template <class T>
void test_few_variables(std::uint64_t seed) {
  Random random(seed);
  for (const int vars : {3, 12, 40, 60}) {
    for (const double free : {1.0, 0.5}) {
      test::current_case = "few variables, " + std::to_string(vars);
      Graph<T> graph(vars);
      for (int i = 0; i < vars; ++i) {
        for (int j = 0; j < i; ++j) {
          graph.row({{j, random.flip()}, {i}}, T(random.uniform(0.5, 2)), T(1),
                    RowKind::inequality);
        }
      }
      for (int r = 0; r < 70; ++r) {  // enough of them not to be factorised as they are
        graph.row({{0, random.flip()}, {1}, {vars - 1, random.flip()}}, T(1), T(1),
                  RowKind::equality);
      }
      graph.eta_u.assign(vars, T(0));
      System<T> s(graph);
      for (int j = 0; j < vars; ++j) s.free[j] = random.uniform() < free;
      check_system(s, random);
    }
  }
}

// Every row twice: half the eigenvalues are 0.
template <class T>
void test_repeated_rows(std::uint64_t seed) {
  Random random(seed);
  for (const int rows : {2, 20, 150}) {
    test::current_case = "repeated, rows " + std::to_string(rows);
    Graph<T> graph(3 * rows);
    for (int r = 0; r < rows; ++r) {
      const std::vector<test::Literal> line{{3 * r}, {3 * r + 1}, {(3 * r + 5) % (3 * rows)}};
      graph.row(line, T(1), T(1), RowKind::equality);
      graph.row(line, T(2), T(2), RowKind::equality);
    }
    graph.eta_u.assign(graph.n, T(0));
    System<T> s(graph);
    check_system(s, random);
  }
}

// Rows without a free variable are dropped; the others keep their order.
template <class T>
void test_dropped_rows(std::uint64_t seed) {
  test::current_case = "dropped rows";
  Random random(seed);
  Graph<T> graph(12);
  for (int r = 0; r < 4; ++r) {
    graph.row({{3 * r}, {3 * r + 1}, {3 * r + 2}}, T(1), T(1), RowKind::equality);
  }
  graph.eta_u.assign(graph.n, T(0));
  System<T> s(graph);
  for (const int j : {3, 4, 5, 9, 10, 11}) s.free[j] = false;
  CHECK(check_system(s, random) == 2);
  CHECK(s.reduced.active[0] == 0 && s.reduced.active[1] == 2);

  for (int j = 0; j < 12; ++j) s.free[j] = false;
  s.build();
  CHECK(s.reduced.count == 0);
  CHECK(s.reduced.solve({nullptr, 0}, T(1e-6)) == 0);
}

// A right-hand side out of the range: nothing solves it, and `solve` must say so.
template <class T>
void test_inconsistent(std::uint64_t seed) {
  Random random(seed);
  for (const int copies : {2, 300}) {
    test::current_case = "inconsistent, copies " + std::to_string(copies);
    Graph<T> graph(3);
    for (int r = 0; r < copies; ++r) graph.row({{0}, {1}, {2}}, T(1), T(1), RowKind::equality);
    graph.eta_u.assign(graph.n, T(0));
    System<T> s(graph);
    s.build();
    std::vector<T> rhs(copies, T(1));
    rhs[0] = -1;
    const T told = s.reduced.solve({rhs.data(), copies}, T(1e-6));
    CHECK(told >= T(0.9));
    CHECK_NEAR(told, s.residual(rhs), 0.1);

    std::fill(rhs.begin(), rhs.end(), T(0));
    CHECK(s.reduced.solve({rhs.data(), copies}, T(1e-6)) == 0);
    CHECK(s.residual(rhs) == 0);
  }
}

template <class T>
void test_all(std::uint64_t seed) {
  test_random<T>(seed);
  test_shift<T>(seed);
  test_matching<T>(seed);
  test_leading_rows<T>(seed);
  test_clusters<T>(seed);
  test_few_variables<T>(seed);
  test_repeated_rows<T>(seed);
  test_dropped_rows<T>(seed);
  test_inconsistent<T>(seed);
}

}  // namespace

int main(int argc, char** argv) {
  const std::uint64_t seed = test::seed_from(argc, argv);
  test_all<double>(seed);
  test_all<float>(seed);
  return test::finish();
}
