// The builder: against graphs compiled by hand, derivatives against finite differences, what it
// refuses, and that solutions survive changes of the graph.
#include <functional>
#include <numeric>
#include <thread>

#include "factormax/builder.hpp"
#include "solution.hpp"

namespace {

using namespace factormax;
using factormax::test::current_case;
using factormax::test::Random;
using Graph = FactorGraph<double>;

constexpr double kInf = std::numeric_limits<double>::infinity();

std::vector<double> normal(Random& random, int count, double scale = 1) {
  std::vector<double> numbers(count);
  for (double& x : numbers) x = scale * random.normal();
  return numbers;
}

void check_same(const std::vector<double>& actual, const std::vector<double>& expected,
                double tol) {
  CHECK(actual.size() == expected.size());
  for (std::size_t k = 0; k < expected.size(); ++k) CHECK_NEAR(actual[k], expected[k], tol);
}

Options tight() {
  Options options;
  options.tol = 1e-12;
  return options;
}

// The gradient of a random function of the solution, against central differences.
void check_gradient(const std::function<Graph(const std::vector<double>&)>& build, int count,
                    Random& random) {
  std::vector<double> theta = normal(random, count);
  const auto at = [&](const std::vector<double>& x) {
    const auto s = build(x).solve(tight());
    CHECK(s.converged());
    return s;
  };
  const auto solution = at(theta);
  const std::vector<double> w = normal(random, static_cast<int>(solution.values.size()));
  const std::vector<double> w_v = normal(random, static_cast<int>(solution.factor_values.size()));
  const auto value = [&](const Graph::Solution& s) {
    return std::inner_product(w.begin(), w.end(), s.values.begin(), 0.0) +
           std::inner_product(w_v.begin(), w_v.end(), s.factor_values.begin(), 0.0);
  };
  const auto gradient = solution.vjp(w, w_v);
  std::vector<double> all(gradient.scores);
  all.insert(all.end(), gradient.factor_scores.begin(), gradient.factor_scores.end());
  CHECK(static_cast<int>(all.size()) == count);
  constexpr double kStep = 1e-6;
  for (int k = 0; k < count; ++k) {
    std::vector<double> up(theta), down(theta);
    up[k] += kStep;
    down[k] -= kStep;
    CHECK_NEAR(all[k], (value(at(up)) - value(at(down))) / (2 * kStep), 1e-6);
  }
}

Graph matching(const std::vector<double>& scores, int rows, int columns, bool one_factor) {
  Graph fg;
  const Variables u = fg.add_variables(scores);
  if (one_factor) {
    fg.add_matching(u.all(), rows, columns);
    return fg;
  }
  for (int i = 0; i < rows; ++i) {
    const auto row = u.slice(i * columns, columns);
    rows <= columns ? fg.add_xor(row) : fg.add_at_most_one(row);
  }
  for (int j = 0; j < columns; ++j) {
    const auto column = u.slice(j, rows, columns);
    rows <= columns ? fg.add_at_most_one(column) : fg.add_xor(column);
  }
  return fg;
}

void test_against_hand_made() {
  current_case = "against index arrays made by hand";
  Random random(0);
  const int rows = 4, columns = 6, batch = 5;
  auto by_hand = test::matching<double>(rows, columns, RowKind::inequality);
  by_hand.normal_scores(random, batch, 1.0);
  const auto expected = test::solve(by_hand, batch, Method::compact, tight());
  Graph fg;
  const Variables u = fg.add_variables(std::vector<double>(rows * columns));
  for (int i = 0; i < rows; ++i) fg.add_at_most_one(u.slice(i * columns, columns));
  for (int j = 0; j < columns; ++j) fg.add_at_most_one(u.slice(j, rows, columns));
  const auto solution = fg.solve(by_hand.eta_u, {}, tight());
  CHECK(solution.batch() == batch);
  for (int i = 0; i < batch; ++i) CHECK(solution.converged(i));
  CHECK(solution.values == expected.mu);
  CHECK(solution.objective == expected.objective);
  const std::vector<double> weights = normal(random, batch * rows * columns);
  CHECK(solution.vjp(weights).scores == test::vjp(by_hand, expected, batch, weights, {}).eta_u);
}

void test_rows() {
  current_case = "rows";
  Random random(1);
  for (int repeat = 0; repeat < 10; ++repeat) {
    const std::vector<double> scores = normal(random, 4, 2);
    const auto values = [&](const std::function<void(Graph&, const Variables&)>& add) {
      Graph fg;
      const Variables u = fg.add_variables(scores);
      add(fg, u);
      const auto solution = fg.solve(tight());
      CHECK(solution.converged());
      return solution.values;
    };
    const auto same = [&](auto first, auto second) {
      check_same(values(first), values(second), 1e-9);
    };
    using G = Graph&;
    using V = const Variables&;
    const std::vector<double> ones(4, 1.0), twos(4, 2.0);
    same([&](G fg, V u) { fg.add_xor(u.all()); },
         [&](G fg, V u) { fg.add_linear(u.all(), twos, 2, 2); });
    same([&](G fg, V u) { fg.add_at_most_one(u.all()); },
         [&](G fg, V u) { fg.add_budget(u.all(), 1); });
    same([&](G fg, V u) { fg.add_or(u.all()); }, [&](G fg, V u) { fg.add_at_least(u.all(), 1); });
    same([&](G fg, V u) { fg.add_exactly(u.all(), 2); },
         [&](G fg, V u) {
           fg.add_budget(u.all(), 2);
           fg.add_at_least(u.all(), 2);
         });
    same([&](G fg, V u) { fg.add_linear(u.all(), ones, 1, 3); },
         [&](G fg, V u) { fg.add_linear({~u[0], ~u[1], ~u[2], ~u[3]}, ones, 1, 3); });
    same([&](G fg, V u) { fg.add_imply({u[0], u[1]}); },
         [&](G fg, V u) { fg.add_or({~u[0], u[1]}); });
    same([&](G fg, V u) { fg.add_or_out(u.all()); },
         [&](G fg, V u) {
           for (int k = 0; k < 3; ++k) fg.add_imply({u[k], u[3]});
           fg.add_or({u[0], u[1], u[2], ~u[3]});
         });
    same([&](G fg, V u) { fg.add_or_out({u[0], ~u[1]}); },
         [&](G fg, V u) { fg.add_linear({u[0], u[1]}, {1, 1}, 1, 1); });
    same([&](G, V) {}, [&](G fg, V u) { fg.add_linear(u.all(), ones, -kInf, kInf); });
    // Rows of one kind are laid out together, each with its own numbers.
    same(
        [&](G fg, V u) {
          fg.add_budget(u.slice(0, 3), 1);
          fg.add_linear({u[0], u[3]}, {3, -1}, -kInf, 1);
          fg.add_budget(u.slice(1, 3), 2);
          fg.add_linear({u[2], ~u[3]}, {-1, 2}, 0.5, 1.5);
        },
        [&](G fg, V u) {
          fg.add_linear({u[2], u[3]}, {-2, -4}, -3, -1);
          fg.add_linear(u.slice(1, 3), {1, 1, 1}, -kInf, 2);
          fg.add_linear({u[0], u[3]}, {6, -2}, -kInf, 2);
          fg.add_at_most_one(u.slice(0, 3));
        });
  }
}

void test_structured() {
  current_case = "structured factors";
  Random random(2);
  for (const auto& [rows, columns] : {std::pair(3, 5), {5, 3}, {4, 4}}) {
    const std::vector<double> scores = normal(random, rows * columns);
    check_same(matching(scores, rows, columns, true).solve(tight()).values,
               matching(scores, rows, columns, false).solve(tight()).values, 1e-8);
  }
  // A sequence of two states is a chain of pairs.
  const int length = 6;
  for (int repeat = 0; repeat < 5; ++repeat) {
    const std::vector<double> scores = normal(random, 2 * length), coupling = normal(random, 1);
    Graph chain, sequence;
    const Variables u = chain.add_variables(scores), v = sequence.add_variables(scores);
    for (int t = 0; t < length; ++t) chain.add_xor(u.slice(2 * t, 2));
    std::vector<Graph::Scores> pairs;
    for (int t = 1; t < length; ++t) {
      pairs.push_back(chain.add_pair(u[2 * t - 1], u[2 * t + 1], coupling[0]));
    }
    const auto transitions = sequence.add_sequence(v.all(), length, 2, {0, 0, 0, coupling[0]});
    const auto a = chain.solve(tight()), b = sequence.solve(tight());
    check_same(a.values, b.values, 1e-8);
    double on = 0;
    for (const auto& pair : pairs) on += a.factor_values[a.offset(pair)];
    CHECK_NEAR(b.factor_values[b.offset(transitions) + 3], on, 1e-7);
  }
  // A tree of two words: one hangs from the root, or both do.
  Graph tree;
  const Variables arcs = tree.add_variables({0.1, 2.0, 0.0, 3.0});
  tree.add_dep_tree(arcs.all(), 2, true, true);
  check_same(tree.solve(tight()).values, {0, 1, 0, 1}, 1e-9);
}

void test_gradients() {
  Random random(3);
  current_case = "gradient of rows and pairs";
  check_gradient(
      [](const std::vector<double>& x) {
        Graph fg;
        const Variables u = fg.add_variables(std::vector<double>(x.begin(), x.begin() + 6));
        fg.add_xor(u.slice(0, 3));
        fg.add_budget({u[2], u[3], ~u[4], u[5]}, 2);
        fg.add_pair(u[0], u[3], x[6]);
        fg.add_pair(~u[1], u[5], x[7]);
        return fg;
      },
      8, random);
  current_case = "gradient of a sequence beside rows and a pair";
  check_gradient(
      [](const std::vector<double>& x) {
        Graph fg;
        const Variables u = fg.add_variables(std::vector<double>(x.begin(), x.begin() + 12));
        // The scores of pairs come first, whatever was added first.
        fg.add_sequence(u.all(), 4, 3, std::vector<double>(x.begin() + 13, x.begin() + 22),
                        std::vector<double>(x.begin() + 22, x.end()));
        fg.add_pair(u[0], u[5], x[12]);
        fg.add_at_most_one(u.slice(1, 4, 3));
        return fg;
      },
      25, random);
  current_case = "gradient of two matchings that share variables";
  check_gradient(
      [](const std::vector<double>& x) {
        Graph fg;
        const Variables u = fg.add_variables(x);
        fg.add_matching(u.slice(0, 12), 3, 4);
        fg.add_matching(u.slice(8, 6), 2, 3);
        return fg;
      },
      14, random);
}

void test_linear_program() {
  current_case = "linear program";
  Random random(4);
  const std::vector<double> scores = normal(random, 20);
  const auto rows = matching(scores, 4, 5, false).solve(tight(), Method::proximal);
  const auto factor = matching(scores, 4, 5, true).solve(tight(), Method::proximal);
  CHECK(rows.converged() && factor.converged() && rows.integral[0] && factor.integral[0]);
  CHECK(rows.values == factor.values);
  CHECK_NEAR(rows.upper_bound[0], rows.objective[0], 1e-9);
}

void test_statuses() {
  current_case = "statuses and scores of -inf";
  Graph fg;
  const Variables u = fg.add_variables({1.0, -kInf, 0.5});
  fg.add_xor({u[0], u[1]});
  const auto feasible = fg.solve();
  CHECK(feasible.converged());
  check_same(feasible.values, {1, 0, 0.5}, 1e-9);
  CHECK_NEAR(feasible.value(~u[2]), 0.5, 1e-9);
  fg.add_xor({u[0], u[2]});
  fg.add_xor({u[1], u[2]});
  const auto none = fg.solve();
  CHECK(none.status() == Status::infeasible && std::isnan(none.values[0]));
  check_same(none.vjp({1, 1, 1}).scores, {0, 0, 0}, 0);
  // Solutions keep the graph that they came from.
  check_same(feasible.vjp({0, 0, 1}).scores, {0, 0, 1}, 1e-9);
}

void test_copies() {
  current_case = "copies go their own ways";
  Graph first;
  const Variables u = first.add_variables({1.0, 0.8});
  Graph second = first;
  first.add_xor(u.all());
  second.add_budget(u.all(), 2);
  check_same(first.solve().values, {0.6, 0.4}, 1e-9);
  check_same(second.solve().values, {1, 0.8}, 1e-9);
  Graph third = first;
  third.add_variable(0.3);
  check_same(third.solve().values, {0.6, 0.4, 0.3}, 1e-9);
  check_same(first.solve().values, {0.6, 0.4}, 1e-9);
}

void test_threads() {
  current_case = "the first solve by several threads";
  Random random(5);
  const Graph fg = matching(normal(random, 20), 4, 5, false);
  std::vector<std::vector<double>> values(4);
  std::vector<std::thread> threads;
  for (auto& own : values) threads.emplace_back([&] { own = fg.solve().values; });
  for (std::thread& thread : threads) thread.join();
  for (const auto& own : values) CHECK(!own.empty() && own == values[0]);
}

template <class Call>
void check_refused(const char* part, Call call) {
  current_case = part;
  try {
    call();
    CHECK(false && "nothing was thrown");
  } catch (const std::invalid_argument& error) {
    CHECK(std::string(error.what()).find(part) != std::string::npos);
  }
}

void test_refusals() {
  Graph fg;
  const Variables u = fg.add_variables(std::vector<double>(6));
  const double nan = std::numeric_limits<double>::quiet_NaN();
  check_refused("finite or -inf, got nan", [&] { fg.add_variable(nan); });
  check_refused("index 6 is not in 0 to 5", [&] { u[6]; });
  check_refused("at least one literal", [&] { fg.add_xor({}); });
  check_refused("no variable 9: the graph has 6", [&] { fg.add_or({Literal{9}}); });
  check_refused("variable 2 is in it twice", [&] { fg.add_pair(u[2], ~u[2], 1); });
  check_refused("scores must be finite, got", [&] { fg.add_pair(u[2], u[3], -kInf); });
  check_refused("at least 0, got -1", [&] { fg.add_budget(u.all(), -1); });
  check_refused("as many coefficients as literals, 6, got 1",
                [&] { fg.add_linear(u.all(), {1}, 0, 1); });
  check_refused("lower <= upper", [&] { fg.add_linear({u[0]}, {1}, 2, 1); });
  check_refused("lower <= upper", [&] { fg.add_linear({u[0]}, {1}, nan, 1); });
  check_refused("at least 2 literals", [&] { fg.add_or_out({u[0]}); });
  check_refused("expected 2 x 2 variables, got 6", [&] { fg.add_matching(u.all(), 2, 2); });
  check_refused("not their negations", [&] { fg.add_matching({~u[0]}, 1, 1); });
  check_refused("expected 9 transitions, or as many per step, got 4",
                [&] { fg.add_sequence(u.all(), 2, 3, {1, 2, 3, 4}); });
  check_refused("initial and a final score per state",
                [&] { fg.add_sequence(u.all(), 3, 2, {1, 2, 3, 4}, {1}); });
  check_refused("expected 6 scores per instance, got 7",
                [&] { fg.solve(std::vector<double>(7), {}); });
  check_refused("expected 0 factor scores", [&] { fg.solve(std::vector<double>(6), {1}); });
  check_refused("scores must be finite, got", [&] {
    Graph pairs;
    const Variables v = pairs.add_variables({0, 0});
    pairs.add_pair(v[0], v[1], 1);
    pairs.solve({0, 0, 0, 0}, {1, -kInf});
  });
  check_refused("has no variables", [] { Graph().solve(); });
  Options none;
  none.tol = 0;
  check_refused("tol > 0", [&] { fg.solve(none); });
  check_refused("expected gradients of 6 values", [&] { fg.solve().vjp({1}); });
  check_refused("piecewise constant",
                [&] { fg.solve({}, Method::proximal).vjp(std::vector<double>(6)); });
  check_refused("use FactorGraph<double>", [] {
    FactorGraph<float> narrow;
    narrow.add_variable(1);
    narrow.solve({}, Method::ad3);
  });
  check_refused("add_sequence: the factor is too large", [] {
    Graph large;
    const int length = 1 << 20;
    large.add_sequence(large.add_variables(std::vector<double>(length)).all(), length, 1, {0});
  });
  check_refused("must come last", [&] {
    fg.add_sequence(u.all(), 3, 2, {1, 2, 3, 4});
    fg.solve({0, 0, -kInf, -kInf, 0, 0}, {});
  });
}

}  // namespace

int main() {
  test_against_hand_made();
  test_rows();
  test_structured();
  test_gradients();
  test_linear_program();
  test_statuses();
  test_copies();
  test_threads();
  test_refusals();
  return factormax::test::finish();
}
