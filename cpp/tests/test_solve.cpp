// Whole solves. A solution is checked by its optimality conditions, computed here from the graph
// as it was given, and against the other method.
#include "factormax/parallel.hpp"
#include "optimality.hpp"

namespace {

using namespace factormax;
using namespace factormax::test;

template <class T>
constexpr bool is_double = std::numeric_limits<T>::digits > 24;

// What to ask for, and what to expect then.
template <class T>
constexpr double accuracy = is_double<T> ? 1e-8 : 2e-5;

template <class T>
Options tight() {
  Options options;
  options.tol = is_double<T> ? 1e-9 : 1e-5;
  options.max_iter = 5000;
  return options;
}

std::string precision;

void name_case(const std::string& name, double scale = 1, Method method = Method::compact) {
  current_case = name + ", scale " + std::to_string(scale) + ", " + precision +
                 (method == Method::admm ? ", ADMM" : ", compact");
}

// ---- Tests: forward ------------------------------------------------------------------

template <class T>
void test_matching(std::uint64_t seed) {
  Random random(seed);
  for (const double scale : {0.3, 1.0, 5.0, 100.0}) {
    for (const auto& [rows, columns] : {std::pair(1, 1), {2, 2}, {3, 7}, {5, 5}, {12, 12}}) {
      for (const RowKind kind : {RowKind::equality, RowKind::inequality}) {
        if (kind == RowKind::equality && rows != columns) continue;
        name_case("matching " + std::to_string(rows) + "x" + std::to_string(columns), scale);
        Graph<T> graph = matching<T>(rows, columns, kind, T(random.flip() ? 1 : -2));
        graph.normal_scores(random, 6, scale);
        const Solution<T> out = solve(graph, 6, Method::compact, tight<T>());
        check_all(graph, out, accuracy<T>);
        check_best(graph, out, 10 * accuracy<T>);
      }
    }
  }
}

template <class T>
void test_logic(std::uint64_t seed) {
  Random random(seed);
  for (const double scale : {0.3, 1.0, 5.0}) {
    for (const int n : {3, 8, 20, 60}) {
      for (int repeat = 0; repeat < times(4); ++repeat) {
        const std::uint64_t which = 1000 * seed + 10 * n + repeat;
        name_case("logic " + std::to_string(n) + ", seed " + std::to_string(which), scale);
        Graph<T> graph = logic<T>(which, n, n / 2);
        graph.normal_scores(random, 5, scale);
        const Solution<T> out = solve(graph, 5, Method::compact, tight<T>());
        check_all(graph, out, accuracy<T>);
        check_best(graph, out, 10 * accuracy<T>);
      }
    }
  }
}

template <class T>
void test_pairs(std::uint64_t seed) {
  Random random(seed);
  for (const double scale : {0.3, 1.0, 5.0}) {
    for (const auto& [n, pairs] : {std::pair(2, 1), {2, 3}, {6, 8}, {25, 80}, {200, 600}}) {
      name_case(std::to_string(pairs) + " pairs of " + std::to_string(n), scale);
      Graph<T> graph = random_pairs<T>(random, n, pairs);
      graph.normal_scores(random, 8, scale);
      graph.eta_v[0] = 0;  // of no weight, but with a value
      const Solution<T> out = solve(graph, 8, Method::compact, tight<T>());
      check_all(graph, out, accuracy<T>);
      check_best(graph, out, 10 * accuracy<T>);

      // Together with constraints over the same variables.
      Graph<T> both = logic<T>(seed + n, n, n / 2);
      both.pair_var = graph.pair_var;
      both.pair_negated = graph.pair_negated;
      both.normal_scores(random, 8, scale);
      const Solution<T> mixed = solve(both, 8, Method::compact, tight<T>());
      check_all(both, mixed, accuracy<T>);
      check_best(both, mixed, 10 * accuracy<T>);
    }
  }
}

// Many pairs and constraints that leave little room: multipliers run away here, if anywhere.
template <class T>
void test_frustrated(std::uint64_t seed) {
  for (int repeat = 0; repeat < times(40); ++repeat) {
    name_case("frustrated, repeat " + std::to_string(repeat), 5);
    Random random(1000 * seed + repeat);
    Graph<T> graph = logic<T>(1000 * seed + repeat, 25, 12);
    const Graph<T> pairs = random_pairs<T>(random, 25, 80);
    graph.pair_var = pairs.pair_var;
    graph.pair_negated = pairs.pair_negated;
    graph.normal_scores(random, 8, 5);
    const Solution<T> out = solve(graph, 8, Method::compact, tight<T>());
    check_all(graph, out, accuracy<T>);
  }
}

// One pair, against all the points of a fine grid.
template <class T>
void test_pair_on_grid(std::uint64_t seed) {
  Random random(seed);
  constexpr int kSteps = 100;
  for (int repeat = 0; repeat < times(40); ++repeat) {
    name_case("pair on a grid, repeat " + std::to_string(repeat));
    Graph<T> graph(2);
    graph.pair({0, random.flip()}, {1, random.flip()});
    graph.normal_scores(random, 1, 1);
    for (const Method method : {Method::compact, Method::admm}) {
      const Solution<T> out = solve(graph, 1, method, tight<T>());
      check_all(graph, out, 2e-5);
      for (int a = 0; a <= kSteps; ++a) {
        for (int b = 0; b <= kSteps; ++b) {
          const T mu[2] = {T(a) / kSteps, T(b) / kSteps};
          CHECK(objective(graph, 0, mu) <= out.objective[0] + 1e-4);
        }
      }
    }
  }
}

// One factor over all the variables, or factors that share none: solved on the spot.
template <class T>
void test_isolated(std::uint64_t seed) {
  Random random(seed);
  const double tol = is_double<T> ? 1e-9 : 1e-5;
  for (const double scale : {0.3, 1.0, 1e3, 1e6}) {
    name_case("isolated", scale);
    Graph<T> graph(18);
    graph.row({{0}, {1}, {2, true}}, T(1), T(1), RowKind::equality);
    graph.row({{3}, {4}, {5}}, {T(1), T(2), T(3)}, T(2.5), RowKind::inequality);
    graph.or_out({{6}, {7, true}, {8}, {9}});
    graph.or_out({{12}, {13, true}});
    graph.band({{14}, {15, true}, {16}, {17}}, {T(1), T(2), T(-3), T(1)}, T(-0.5), T(0.25));
    graph.pair({10}, {11, true});
    graph.normal_scores(random, 50, scale);
    const Solution<T> out = solve(graph, 50, Method::compact, tight<T>());
    check_all(graph, out, tol);
    if (scale <= 1) check_best(graph, out, 10 * tol);
    for (const int passes : out.iterations) CHECK(passes <= 2);
  }
}

// Scores so large that their own resolution is all that is left.
template <class T>
void test_large_scores(std::uint64_t seed) {
  Random random(seed);
  for (const double scale : {1e3, 1e5, 1e7}) {
    name_case("large scores", scale);
    Graph<T> grid = matching<T>(6, 6, RowKind::equality);
    grid.normal_scores(random, 4, scale);
    check_all(grid, solve(grid, 4, Method::compact, tight<T>()), accuracy<T>);
    Graph<T> rules = logic<T>(seed, 12, 6);
    for (int q = 0; q < 8; ++q) rules.pair({q, q % 3 == 0}, {q + 4, q % 2 == 0});
    rules.normal_scores(random, 4, scale);
    check_all(rules, solve(rules, 4, Method::compact, tight<T>()), accuracy<T>);
  }
}

template <class T>
void test_small_graphs() {
  name_case("no rows");
  Graph<T> free(3);
  free.eta_u = {T(-0.5), T(0.25), T(7)};
  for (const Method method : {Method::compact, Method::admm}) {
    const Solution<T> out = solve(free, 1, method, tight<T>());
    CHECK(out.mu == (std::vector<T>{0, T(0.25), 1}));
    check_all(free, out, 1e-12);
    CHECK_NEAR(out.objective[0], 0.0625 - 0.03125 + 6.5, 1e-12);

    Graph<T> nothing(0);
    const Solution<T> empty = solve(nothing, 1, method, tight<T>());
    CHECK(empty.status_of(0) == Status::converged && empty.objective[0] == 0);

    Graph<T> none(3);
    solve(none, 0, method, tight<T>());
  }
}

// The compact dual and ADMM share nothing but the local solutions.
template <class T>
void test_methods_agree(std::uint64_t seed) {
  Random random(seed);
  Options options = tight<T>();
  options.max_iter = 100000;
  const double tol = is_double<T> ? 1e-6 : 2e-3;
  for (const double scale : {0.3, 1.0}) {
    std::vector<Graph<T>> graphs;
    graphs.push_back(matching<T>(4, 4, RowKind::equality));
    graphs.push_back(random_pairs<T>(random, 8, 12));
    for (int repeat = 0; repeat < 6; ++repeat) {
      graphs.push_back(logic<T>(seed + repeat, 8, 4));
      if (repeat % 2 == 0) graphs.back().pair({0}, {1, true});
    }
    for (std::size_t g = 0; g < graphs.size(); ++g) {
      name_case("methods agree, graph " + std::to_string(g), scale, Method::admm);
      graphs[g].normal_scores(random, 3, scale);
      const Solution<T> compact = solve(graphs[g], 3, Method::compact, options);
      const Solution<T> admm = solve(graphs[g], 3, Method::admm, options);
      check_all(graphs[g], compact, accuracy<T>);
      check_all(graphs[g], admm, tol / 4);
      for (std::size_t k = 0; k < compact.mu.size(); ++k) {
        CHECK_NEAR(admm.mu[k], compact.mu[k], tol);
      }
    }
  }
}

// Started at its own multipliers, a solve has nothing left to do.
template <class T>
void test_warm_start(std::uint64_t seed) {
  Random random(seed);
  name_case("warm start");
  Graph<T> graph = logic<T>(seed, 30, 15);
  graph.pair({0}, {1, true});
  graph.normal_scores(random, 4, 1);
  const Solution<T> cold = solve(graph, 4, Method::compact, tight<T>());
  Solution<T> warm(graph, 4);
  solve_into(graph, Method::compact, tight<T>(), warm, {cold.tau.data(), cold.dual});
  check_all(graph, warm, accuracy<T>);
  for (const int passes : warm.iterations) CHECK(passes <= 3);
}

// ---- Tests: masks, absent rows, batches ----------------------------------------------

// Each instance with its own mask and coefficients; the same, with the variables switched off by a
// score of -inf; and each alone.
template <class T>
void test_masks(std::uint64_t seed) {
  Random random(seed);
  const int n = 12, batch = 8;
  for (int repeat = 0; repeat < 6; ++repeat) {
    name_case("masks, repeat " + std::to_string(repeat));
    std::vector<Graph<T>> each;
    for (int i = 0; i < batch; ++i) {
      std::vector<std::uint8_t> mask(n, 1);
      for (auto& here : mask) here = i == 0 || random.uniform() < 0.75;
      Graph<T> graph = logic<T>(seed + repeat, n, 7, mask);
      graph.pair({0}, {1, true});
      graph.pair({2, true}, {3});
      graph.normal_scores(random, 1, 1);
      graph.mask = mask;
      each.push_back(graph);
    }
    Graph<T> masked = stack(each);
    Graph<T> infinite = masked;
    infinite.mask.clear();
    for (std::size_t k = 0; k < masked.mask.size(); ++k) {
      if (masked.mask[k] == 0) infinite.eta_u[k] = static_cast<T>(-kInf);
    }
    for (const Method method : {Method::compact, Method::admm}) {
      Options options = tight<T>();
      double tol = accuracy<T>;
      if (method == Method::admm) {
        options.tol = is_double<T> ? 1e-7 : 1e-4;
        options.max_iter = 50000;
        tol = 1000 * options.tol;
      }
      const Solution<T> out = solve(masked, batch, method, options);
      CHECK(out.same_as(solve(infinite, batch, method, options)));
      for (int i = 0; i < batch; ++i) {
        name_case("masks, instance " + std::to_string(i), 1, method);
        const Solution<T> alone = solve(each[i], 1, method, options);
        CHECK(std::equal(alone.tau.begin(), alone.tau.end(), &out.tau[std::size_t(i) * out.dual]));
        CHECK(alone.status[0] == out.status[i] && alone.iterations[0] == out.iterations[i]);
        check_optimal(masked, out, i, tol);
      }
    }
  }
}

// Rows that are there only so that others keep their numbers.
template <class T>
void test_absent_rows(std::uint64_t seed) {
  Random random(seed);
  name_case("absent rows");
  const int batch = 8;
  Graph<T> graph = matching<T>(4, 4, RowKind::equality);
  graph.normal_scores(random, batch, 1);
  graph.kind[2] = graph.kind[5] = static_cast<std::int8_t>(RowKind::absent);
  const Solution<T> out = solve(graph, batch, Method::compact, tight<T>());
  check_all(graph, out, accuracy<T>);
  std::fill(graph.kind.begin(), graph.kind.end(), static_cast<std::int8_t>(RowKind::absent));
  const Solution<T> none = solve(graph, batch, Method::compact, tight<T>());
  check_all(graph, none, 1e-12);
}

// An array shared by all instances, or repeated for each: the same answers.
template <class T>
void test_shared_arrays(std::uint64_t seed) {
  Random random(seed);
  name_case("shared arrays");
  const int batch = 5;
  Graph<T> shared = logic<T>(seed, 15, 8);
  shared.pair({0}, {1, true});
  shared.normal_scores(random, batch, 1);
  shared.eta_v.resize(1);
  std::vector<Graph<T>> copies(batch, shared);
  for (int i = 0; i < batch; ++i) {
    copies[i].eta_u.assign(shared.eta_u.begin() + i * shared.n,
                           shared.eta_u.begin() + (i + 1) * shared.n);
    copies[i].mask.assign(shared.n, 1);
  }
  Graph<T> repeated = stack(copies);
  for (const Method method : {Method::compact, Method::admm}) {
    Options options = tight<T>();
    options.max_iter = 300;
    const Solution<T> a = solve(shared, batch, method, options);
    CHECK(a.same_as(solve(repeated, batch, method, options)));
  }
}

// In place of multipliers there is the proof, docs/math.md (23).
template <class T>
void check_certificate(const Graph<T>& graph, const Solution<T>& out) {
  std::vector<double> a(static_cast<std::size_t>(graph.n));
  double value = 0;
  for (int r = 0; r < graph.num_rows(); ++r) {
    const double tau = out.tau[r];
    CHECK(tau >= 0 || graph.kind[r] == static_cast<int>(RowKind::equality));
    value += graph.rhs[r] * tau;
    for (int k = graph.row_ptr[r]; k < graph.row_ptr[r + 1]; ++k) {
      a[graph.col[k]] += graph.coef[k] * tau;
    }
  }
  for (const double sum : a) value += std::max(0.0, -sum);
  CHECK(value < 0);
  for (int q = graph.num_rows(); q < graph.num_dual(); ++q) CHECK(out.tau[q] == 0);
}

template <class T>
void test_infeasible() {
  const auto check_infeasible = [](const std::string& name, Graph<T> graph) {
    for (const Method method : {Method::compact, Method::admm}) {
      for (const double scale : {0.0, 1.0, 50.0}) {
        name_case("infeasible: " + name, scale, method);
        Random random(3);
        graph.normal_scores(random, 1, scale);
        const Solution<T> out = solve(graph, 1, method, tight<T>());
        CHECK(out.status_of(0) == Status::infeasible);
        CHECK(out.objective[0] == -kInf);
        for (const T value : out.mu) CHECK(std::isnan(value));
        check_certificate(graph, out);
        for (const auto side : out.var_side) CHECK(side == static_cast<int>(Side::absent));
        const Gradient<T> grad =
            vjp(graph, out, 1, std::vector<T>(graph.n, 1), std::vector<T>(graph.num_pairs(), 1));
        for (const T value : grad.eta_u) CHECK(value == 0);
        for (const T value : grad.eta_v) CHECK(value == 0);
        CHECK(grad.residual[0] == 0);
      }
    }
  };
  Graph<T> alone(2);
  alone.row({{0}, {1}}, T(1), T(3), RowKind::equality);
  check_infeasible("a row alone", alone);

  Graph<T> negative(2);
  negative.row({{0}, {1}}, T(1), T(-1), RowKind::inequality);
  check_infeasible("a negative budget", negative);

  Graph<T> two(3);
  two.row({{0}, {1}, {2}}, T(1), T(2), RowKind::equality);
  two.row({{0}, {1}, {2}}, T(1), T(1), RowKind::inequality);
  two.pair({0}, {2});
  check_infeasible("two rows", two);

  check_infeasible("a matching of 4 with 3", matching<T>(4, 3, RowKind::equality));

  Graph<T> circle(3);  // x0 != x1 != x2 != x0, and their sum is 1
  for (int j = 0; j < 3; ++j) circle.row({{j}, {(j + 1) % 3}}, T(1), T(1), RowKind::equality);
  circle.row({{0}, {1}, {2}}, T(1), T(1), RowKind::equality);
  check_infeasible("an odd circle", circle);

  Graph<T> rules(4);
  rules.or_out({{0}, {1}, {2}});
  rules.row({{2}}, T(1), T(0), RowKind::equality);
  rules.row({{0}, {3}}, T(-1), T(-2), RowKind::inequality);
  check_infeasible("an or that is off", rules);
}

// Only the instances that are infeasible say so.
template <class T>
void test_some_infeasible(std::uint64_t seed) {
  Random random(seed);
  name_case("some infeasible");
  const int batch = 6;
  Graph<T> graph = matching<T>(3, 3, RowKind::equality);
  graph.normal_scores(random, batch, 1);
  graph.mask.assign(9 * batch, 1);
  for (const int i : {1, 4}) {  // two rows are left with one and the same variable
    for (const int j : {1, 2, 4, 5}) graph.mask[9 * i + j] = 0;
  }
  const Solution<T> out = solve(graph, batch, Method::compact, tight<T>());
  for (int i = 0; i < batch; ++i) {
    if (i == 1 || i == 4) {
      CHECK(out.status_of(i) == Status::infeasible);
    } else {
      check_optimal(graph, out, i, accuracy<T>);
    }
  }
}

// A batch of everything: feasible, masked, infeasible.
template <class T>
Graph<T> mixed_batch(std::uint64_t seed, int batch) {
  Random random(seed);
  std::vector<Graph<T>> each;
  for (int i = 0; i < batch; ++i) {
    std::vector<std::uint8_t> mask(20, 1);
    if (i % 3 == 1) {
      for (auto& here : mask) here = random.uniform() < 0.8;
    }
    Graph<T> graph = logic<T>(seed, 20, 10, mask);
    for (int q = 0; q < 10; ++q) graph.pair({q, q % 3 == 0}, {q + 7, q % 2 == 0});
    graph.row({{0}, {1}}, T(1), T(i % 7 == 5 ? -1 : 2), RowKind::inequality);
    graph.normal_scores(random, 1, i % 4 == 0 ? 20 : 1);
    graph.mask = mask;
    each.push_back(graph);
  }
  return stack(each);
}

// Whatever the number of threads and the content of the buffers: bit for bit the same.
template <class T>
void test_reproducible(std::uint64_t seed) {
  const int batch = times(60);
  Graph<T> graph = mixed_batch<T>(seed, batch);
  for (const Method method : {Method::compact, Method::admm}) {
    name_case("reproducible", 1, method);
    Options options = tight<T>();
    options.max_iter = 200;
    set_num_threads(1);
    const Solution<T> one = solve(graph, batch, method, options);
    const std::vector<T> grad_mu(std::size_t(batch) * graph.n, T(0.5));
    const std::vector<T> grad_mu_v(std::size_t(batch) * graph.num_pairs(), T(-0.25));
    const Gradient<T> grad = vjp(graph, one, batch, grad_mu, grad_mu_v);
    for (const int threads : {1, 4}) {
      set_num_threads(threads);
      Solution<T> other(graph, batch, T(777));
      solve_into(graph, method, options, other);
      CHECK(one.same_as(other));
      const Gradient<T> again = vjp(graph, other, batch, grad_mu, grad_mu_v);
      CHECK(grad.eta_u == again.eta_u && grad.eta_v == again.eta_v);  // false if one is NaN
      CHECK(grad.residual == again.residual);
    }
    set_num_threads(0);
    for (int i = 0; i < batch; ++i) {
      const bool solved = one.status_of(i) != Status::infeasible;
      CHECK(one.status[i] >= 0 && one.iterations[i] >= 0);
      CHECK(!std::isnan(one.objective[i]) && !std::isnan(one.primal_residual[i]));
      for (int j = 0; j < graph.n; ++j) {
        // NaN where there is no solution, but 0 where the variable is masked.
        const T mu = one.mu[std::size_t(i) * graph.n + j];
        CHECK(solved ? !std::isnan(mu) : std::isnan(mu) || mu == 0);
        CHECK(one.var_side[std::size_t(i) * graph.n + j] <= 2);
      }
      for (int r = 0; r < one.dual; ++r) {
        CHECK(!std::isnan(one.tau[std::size_t(i) * one.dual + r]));
        CHECK(one.row_side[std::size_t(i) * one.dual + r] <= 2);
      }
    }
  }
}

// ---- Tests: backward -----------------------------------------------------------------

// The Jacobian of mu at instance 0, row by row: one vjp for each unit vector, as a batch.
template <class T>
std::vector<T> jacobian(Graph<T>& graph, const Solution<T>& out) {
  std::vector<T> units(std::size_t(graph.n) * graph.n, T(0));
  for (int j = 0; j < graph.n; ++j) units[std::size_t(j) * graph.n + j] = 1;
  const std::vector<T> zeros(std::size_t(graph.n) * graph.num_pairs(), T(0));
  const Gradient<T> grad = vjp(graph, out, graph.n, units, zeros);
  for (const double residual : grad.residual) CHECK(residual <= (is_double<T> ? 1e-9 : 1e-3));
  return grad.eta_u;
}

// Without pairs mu is a projection onto a polytope, so its Jacobian projects onto a face.
template <class T>
void check_projector(Graph<T>& graph, const Solution<T>& out) {
  const std::vector<T> jac = jacobian(graph, out);
  const double tol = is_double<T> ? 1e-8 : 5e-4;
  const int n = graph.n;
  const auto at = [&](int i, int j) { return jac[std::size_t(i) * n + j]; };
  for (int i = 0; i < n; ++i) {
    for (int j = 0; j < n; ++j) {
      double square = 0;
      for (int k = 0; k < n; ++k) square += double(at(i, k)) * at(k, j);
      CHECK_NEAR(at(i, j), at(j, i), tol);
      CHECK_NEAR(square, at(i, j), tol);
    }
  }
  // A step along the face changes no row.
  const Plain p = plain(graph, 0);
  for (const Row& row : p.rows) {
    if (out.row_side[row.index] != static_cast<int>(Side::interior)) continue;
    for (int i = 0; i < n; ++i) {
      double change = 0;
      for (std::size_t k = 0; k < row.var.size(); ++k) change += row.coef[k] * at(i, row.var[k]);
      CHECK_NEAR(change, 0, 10 * tol);
    }
  }
}

template <class T>
void test_projector(std::uint64_t seed) {
  Random random(seed);
  for (const double scale : {0.3, 1.0, 5.0}) {
    for (const int n : {2, 5, 9}) {
      name_case("projector, matching " + std::to_string(n), scale);
      Graph<T> graph = matching<T>(n, n, RowKind::equality);
      graph.normal_scores(random, 1, scale);
      check_projector(graph, solve(graph, 1, Method::compact, tight<T>()));
    }
    for (int repeat = 0; repeat < times(8); ++repeat) {
      name_case("projector, logic " + std::to_string(repeat), scale);
      Graph<T> graph = logic<T>(seed + repeat, 25, 12);
      graph.normal_scores(random, 1, scale);
      if (repeat % 2 == 1) graph.eta_u[3] = static_cast<T>(scale);
      check_projector(graph, solve(graph, 1, Method::compact, tight<T>()));
    }
  }
}

// The gradient of  <g, mu> + <g_v, mu_v>  along a random direction, against differences.
void test_differences(std::uint64_t seed) {
  Random random(seed);
  Options options;
  options.tol = 1e-12;
  const double h = 1e-6;
  precision = "double";
  for (int repeat = 0; repeat < times(30); ++repeat) {
    for (const double scale : {0.3, 1.0, 4.0}) {
      name_case("differences, repeat " + std::to_string(repeat), scale);
      const int n = 15;
      Graph<double> graph =
          repeat % 3 == 0 ? Graph<double>(n) : logic<double>(seed + repeat, n, repeat % 3 * 4);
      const Graph<double> pairs = random_pairs<double>(random, n, repeat % 2 * 12);
      graph.pair_var = pairs.pair_var;
      graph.pair_negated = pairs.pair_negated;
      graph.normal_scores(random, 1, scale);
      std::vector<double> g(n), g_v(graph.num_pairs()), d(n), d_v(graph.num_pairs());
      for (auto* values : {&g, &g_v, &d, &d_v}) {
        for (double& value : *values) value = random.normal();
      }
      const auto shifted = [&](double step) {
        Graph<double> other = graph;
        for (int j = 0; j < n; ++j) other.eta_u[j] += step * d[j];
        for (int q = 0; q < graph.num_pairs(); ++q) other.eta_v[q] += step * d_v[q];
        return solve(other, 1, Method::compact, options);
      };
      const Solution<double> here = shifted(0), up = shifted(h), down = shifted(-h);
      CHECK(here.status_of(0) == Status::converged);
      // The derivative exists where the same variables are clipped on both sides.
      if (up.var_side != down.var_side || up.row_side != down.row_side ||
          here.var_side != up.var_side || here.row_side != up.row_side) {
        continue;
      }
      double difference = 0, product = 0;
      for (int j = 0; j < n; ++j) difference += g[j] * (up.mu[j] - down.mu[j]) / (2 * h);
      for (int q = 0; q < graph.num_pairs(); ++q) {
        difference += g_v[q] * (up.mu_v[q] - down.mu_v[q]) / (2 * h);
      }
      const Gradient<double> grad = vjp(graph, here, 1, g, g_v);
      for (int j = 0; j < n; ++j) product += grad.eta_u[j] * d[j];
      for (int q = 0; q < graph.num_pairs(); ++q) product += grad.eta_v[q] * d_v[q];
      CHECK_NEAR(product, difference, 1e-4 * (1 + std::fabs(difference)));
    }
  }
}

template <class T>
void test_all(std::uint64_t seed) {
  precision = is_double<T> ? "double" : "float";
  test_small_graphs<T>();
  test_matching<T>(seed);
  test_logic<T>(seed);
  test_pairs<T>(seed);
  test_frustrated<T>(seed);
  test_pair_on_grid<T>(seed);
  test_isolated<T>(seed);
  test_large_scores<T>(seed);
  test_methods_agree<T>(seed);
  test_warm_start<T>(seed);
  test_masks<T>(seed);
  test_absent_rows<T>(seed);
  test_shared_arrays<T>(seed);
  test_infeasible<T>();
  test_some_infeasible<T>(seed);
  test_reproducible<T>(seed);
  test_projector<T>(seed);
}

}  // namespace

int main(int argc, char** argv) {
  const std::uint64_t seed = seed_from(argc, argv);
  test_all<double>(seed);
  test_all<float>(seed);
  test_differences(seed);
  return finish();
}
