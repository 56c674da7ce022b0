// The compiled model: views of the variables, rules with parameters, the order of rows, what is
// isolated, linked or held, and what it refuses.
#include <functional>

#include "factormax/model.hpp"
#include "factormax/structured/oracle.hpp"
#include "solution.hpp"

namespace {

using namespace factormax;
using factormax::test::current_case;
using factormax::test::Random;
using Ints = std::vector<std::int64_t>;
using Numbers = std::vector<double>;
using SharedModel = std::shared_ptr<const Model>;

constexpr double kInf = std::numeric_limits<double>::infinity();

Part strided(std::int64_t offset, Ints outer, Ints outer_strides, Ints inner, Ints inner_strides,
             bool negated = false) {
  return {negated, offset, outer, outer_strides, inner, inner_strides, {}};
}

Part listed(std::int64_t size, const Ints& literals) {
  return {false, 0, {std::int64_t(literals.size()) / size}, {0}, {size}, {0}, literals};
}

Row row(const Numbers& coefs, double bound, RowKind kind = RowKind::inequality, int coef_param = -1,
        int bound_param = -1) {
  Row made{{}, coefs, bound, kind, coef_param, bound_param};
  for (std::size_t k = 0; k < coefs.size(); ++k) made.literals.push_back(std::int32_t(k));
  return made;
}

Rule xor_rule(int size) {
  return {"Xor", BlockKind::row, size, {}, {row(Numbers(size, 1), 1, RowKind::equality)}};
}

Rule budget_rule(int size) {
  return {
      "Budget", BlockKind::row, size, {0}, {row(Numbers(size, 1), 1, RowKind::inequality, -1, 0)}};
}

// Two bounds on a weighted sum.
Rule between_rule(BlockKind block, int size) {
  return {"Between",
          block,
          size,
          {1, 0, 0},
          {row(Numbers(size, -1), -1, RowKind::inequality, 0, 1),
           row(Numbers(size, 1), 1, RowKind::inequality, 0, 2)}};
}

Group rows(const Rule& rule, std::vector<Part> parts) {
  Group group;
  group.rule = std::make_shared<const Rule>(rule);
  group.parts = std::move(parts);
  return group;
}

Group pairs(std::vector<Part> parts) {
  Group group;
  group.parts = std::move(parts);
  return group;
}

Group matchings(std::int32_t side, std::vector<Part> parts, int link = 0) {
  Group group;
  group.structured = true;
  group.name = "Matching";
  group.oracle = OracleKind::matching;
  group.shape = {side, side};
  group.slots = side;
  group.link = link;
  group.parts = std::move(parts);
  return group;
}

SharedModel make(std::int64_t num_vars, const std::vector<Group>& groups) {
  std::string error;
  const SharedModel model = Model::make(num_vars, groups, error);
  CHECK(error.empty());
  if (model != nullptr) return model;
  std::fprintf(stderr, "%s: %s\n", current_case.c_str(), error.c_str());
  std::exit(1);
}

// Numbers that are the same for all instances.
std::vector<Param> shared(const std::vector<Numbers>& numbers) {
  std::vector<Param> params;
  for (const Numbers& own : numbers) params.push_back({own.data(), 0, 1});
  return params;
}

template <class T = double>
std::vector<T> coefs(const Model& model, const std::vector<Param>& params = {}, int instance = 0,
                     const std::int8_t* held = nullptr) {
  std::vector<T> written(model.num_entries(), T(77));
  model.write_coefs(params, instance, held, written.data());
  return written;
}

template <class T = double>
std::vector<T> bounds(const Model& model, const std::vector<Param>& params = {}, int instance = 0,
                      const std::int8_t* held = nullptr) {
  std::vector<T> written(model.num_rows(), T(77));
  model.write_bounds(params, instance, held, written.data());
  return written;
}

std::vector<int> isolated(const Model& model) {
  const std::uint8_t* flags = model.problem<double>().block_isolated;
  return {flags, flags + model.num_blocks() + model.num_pairs()};
}

using I32 = std::vector<std::int32_t>;

void test_views() {
  current_case = "strided views";
  // The rows and the columns of a 2 x 3 grid that begins at variable 1.
  const SharedModel grid = make(8, {rows(xor_rule(3), {strided(1, {2}, {3}, {3}, {1})}),
                                    rows(xor_rule(2), {strided(1, {3}, {1}, {2}, {3})})});
  CHECK(grid->col() == (I32{1, 2, 3, 4, 5, 6, 1, 4, 2, 5, 3, 6}));
  CHECK(grid->row_ptr() == (I32{0, 3, 6, 8, 10, 12}));
  CHECK(grid->block_ptr() == (I32{0, 1, 2, 3, 4, 5}));
  CHECK(coefs(*grid) == Numbers(12, 1) && bounds(*grid) == Numbers(5, 1));
  CHECK(!grid->has_coef_params() && !grid->has_row_params());

  current_case = "views of several axes, backwards, and of one variable for all factors";
  const SharedModel axes =
      make(12, {rows(xor_rule(4), {strided(0, {3}, {1}, {2, 2}, {6, 3})}),
                rows(xor_rule(2), {strided(11, {2}, {-1}, {2}, {-4})}),
                rows(xor_rule(2), {strided(5, {2}, {0}, {}, {}), strided(0, {2}, {1}, {}, {})})});
  CHECK(axes->col() == (I32{0, 3, 6, 9, 1, 4, 7, 10, 2, 5, 8, 11, 11, 7, 10, 6, 5, 0, 5, 1}));

  current_case = "lists, beside views, with negated literals";
  const SharedModel lists = make(
      6, {rows(xor_rule(3),
               {listed(2, {2 * 5 + 1, 2 * 3, 2 * 0, 2 * 4}), strided(1, {2}, {1}, {1}, {1}, true)}),
          pairs({listed(1, {2 * 2 + 1}), strided(4, {1}, {1}, {}, {})})});
  CHECK(lists->col() == (I32{5, 3, 1, 0, 4, 2}));
  CHECK(coefs(*lists) == (Numbers{-1, 1, -1, 1, 1, -1}));
  CHECK(coefs<float>(*lists) == (std::vector<float>{-1, 1, -1, 1, 1, -1}));
  CHECK(bounds(*lists) == (Numbers{-1, 0}));
  CHECK(lists->pair_var() == (I32{2, 4}));
  CHECK(lists->pair_negated() == (std::vector<std::uint8_t>{1, 0}));

  current_case = "nothing at all";
  const SharedModel none = make(0, {rows(xor_rule(3), {strided(0, {0}, {1}, {3}, {1})}),
                                    pairs({strided(0, {0}, {1}, {}, {})})});
  CHECK(none->num_rows() == 0 && none->num_dual() == 0 && none->bounded()->num_rows() == 0);
}

void test_parameters() {
  current_case = "coefficients and bounds of parameters";
  const Rule rule{"Loads",
                  BlockKind::row,
                  3,
                  {1, 0},
                  {row({1, -1, 2}, 2, RowKind::inequality, 0, 1),
                   {{2, 0}, {1, 1}, 1, RowKind::equality, -1, -1},
                   {{1}, {-3}, 1, RowKind::inequality, 0, -1}}};
  const SharedModel model = make(6, {rows(rule, {listed(3, {0, 3, 4, 6, 8, 11})})});
  CHECK(model->param_sizes() == (Ints{6, 2}));
  CHECK(model->has_coef_params() && model->has_row_params());
  CHECK(model->col() == (I32{0, 1, 2, 2, 0, 1, 3, 4, 5, 5, 3, 4}));
  CHECK(model->row_kind() == (std::vector<std::int8_t>{1, 2, 1, 1, 2, 1}));
  // Two instances: each has its own coefficients, the bound is one number for all.
  const Numbers loads{1, 2, 4, 3, 0, 1, 0, 0, 0, -1, 5, 2}, limit{7};
  const std::vector<Param> params{{loads.data(), 6, 1}, {limit.data(), 0, 0}};
  // A row with such coefficients is divided by the largest: 1, 2, 8; 3, 0, 2; 1, 5, 4.
  const auto near = [](const Numbers& actual, const Numbers& expected) {
    CHECK(actual.size() == expected.size());
    for (std::size_t k = 0; k < expected.size(); ++k) CHECK_NEAR(actual[k], expected[k], 1e-15);
  };
  near(coefs(*model, params), {1.0 / 8, 2.0 / 8, 1, 1, 1, 1,  //
                               1, 0, -2.0 / 3, -1, 1, 0});
  near(bounds(*model, params), {14.0 / 8 + 2.0 / 8, 1, 1.0 / 6 + 1,  //
                                14.0 / 3 - 2.0 / 3, 0, 1});
  near(coefs(*model, params, 1), {0, 0, 0, 1, 1, 0,  //
                                  -1.0 / 5, -1, -4.0 / 5, -1, 1, -1});
  near(bounds(*model, params, 1), {14, 1, 1, 14.0 / 5 - 4.0 / 5, 0, 1.0 / 15});

  current_case = "bounds that are met exactly, and that are none";
  const SharedModel sums =
      make(2, {rows(between_rule(BlockKind::band, 2), {strided(0, {1}, {0}, {2}, {1}, true)})});
  const std::vector<Numbers> exact{{0.1, 0.2}, {-kInf}, {0.3}};
  CHECK(bounds(*sums, shared(exact)) == (Numbers{1e30, 0}));
  const std::vector<Numbers> float_range{{1, 2}, {-1e300}, {1e300}};
  CHECK(bounds<float>(*sums, shared(float_range)) == (std::vector<float>{1e30f, 1e30f}));

  current_case = "parameters of structured factors";
  Group budgets = matchings(0, {strided(0, {2}, {3}, {3}, {1})});
  budgets.name = "SequenceBudget";
  budgets.oracle = OracleKind::sequence_budget;
  budgets.shape = {3, 0, 2};
  budgets.slots = 3;
  budgets.num_scores = 1;
  budgets.has_param = true;
  const SharedModel structured =
      make(6, {matchings(1, {strided(0, {1}, {0}, {1}, {1})}),
               rows(budget_rule(2), {strided(0, {1}, {0}, {2}, {1})}), budgets});
  CHECK(structured->param_sizes() == (Ints{1, 2}));
  const std::vector<Numbers> numbers{{9}, {1, 2}};
  Numbers written(3, 77);
  structured->write_oracle_params(shared(numbers), 0, written.data());
  CHECK(written == (Numbers{0, 1, 2}));
  CHECK(bounds(*structured, shared(numbers)) == Numbers{9});
  CHECK(structured->num_scores() == 2);
}

void test_bundles() {
  current_case = "rows of one rule together, in order";
  const SharedModel model =
      make(9, {rows(budget_rule(2), {listed(2, {0, 2, 4, 6})}),
               rows(xor_rule(3), {listed(3, {0, 4, 8})}),
               rows(budget_rule(3), {strided(0, {0}, {0}, {3}, {1})}), pairs({listed(2, {0, 16})}),
               rows(budget_rule(2), {listed(2, {9, 11})}), rows(xor_rule(2), {listed(2, {12, 14})}),
               rows(xor_rule(3), {listed(3, {2, 6, 10})})});
  CHECK(model->col() == (I32{0, 1, 2, 3, 4, 5, 0, 2, 4, 1, 3, 5, 6, 7}));
  CHECK(model->param_sizes() == (Ints{2, 0, 1}));
  const std::vector<Numbers> numbers{{1, 2}, {}, {5}};
  CHECK(bounds(*model, shared(numbers)) == (Numbers{1, 2, 3, 1, 1, 1}));
  const std::vector<std::pair<int, int>> places{{0, 0}, {0, 1}, {4, 0},  {1, 0},
                                                {6, 0}, {5, 0}, {-1, -1}};
  for (int block = 0; block < 7; ++block) {
    std::pair<int, int> place;
    model->place_of_block(block, place.first, place.second);
    CHECK(place == places[block]);
  }

  current_case = "rules of one name that differ";
  Rule other = xor_rule(2);
  other.rows[0].bound = 2;
  const SharedModel differ =
      make(6, {rows(xor_rule(2), {listed(2, {0, 2})}), rows(other, {listed(2, {4, 6})}),
               rows(xor_rule(2), {listed(2, {8, 10})})});
  CHECK(differ->col() == (I32{0, 1, 4, 5, 2, 3}) && bounds(*differ) == (Numbers{1, 1, 2}));
}

// The rows and pairs of a model as the tests solve them.
test::Graph<double> graph_of(const Model& model, const std::vector<Param>& params) {
  test::Graph<double> graph(model.num_vars());
  graph.row_ptr = model.row_ptr();
  graph.col = model.col();
  graph.kind = model.row_kind();
  graph.block_ptr = model.block_ptr();
  graph.block_kind = model.block_kind();
  graph.coef = coefs(model, params);
  graph.rhs = bounds(model, params);
  return graph;
}

void test_several_rows() {
  Random random(1);
  const int n = 6;
  for (int repeat = 0; repeat < 20; ++repeat) {
    // A band, and two rows: one factor alone, or two that overlap.
    const std::vector<Part> parts{repeat % 2 == 0 ? strided(0, {1}, {0}, {n}, {1})
                                                  : strided(0, {2}, {2}, {n - 2}, {1}, true)};
    const int size = static_cast<int>(parts[0].inner[0]),
              count = static_cast<int>(parts[0].outer[0]);
    std::vector<Numbers> numbers(3);
    for (int k = 0; k < count; ++k) {
      double middle = 0;
      for (int j = 0; j < size; ++j) {
        numbers[0].push_back(random.normal());
        middle += numbers[0].back() / 2;
      }
      numbers[1].push_back(middle - 0.2);
      numbers[2].push_back(middle + random.uniform(0, 0.2));
    }
    Numbers eta(n), weights(n);
    for (int j = 0; j < n; ++j) eta[j] = 2 * random.normal(), weights[j] = random.normal();
    Options options;
    options.tol = 1e-10;
    options.max_iter = 100000;
    std::vector<Numbers> values, gradients;
    for (const BlockKind block : {BlockKind::band, BlockKind::row}) {
      const SharedModel model = make(n, {rows(between_rule(block, size), parts)});
      CHECK(model->num_blocks() == count && model->num_rows() == 2 * count);
      CHECK(model->block_ptr().back() == 2 * count);
      test::Graph<double> graph = graph_of(*model, shared(numbers));
      graph.eta_u = eta;
      for (const Method method : {Method::compact, Method::admm}) {
        current_case = method == Method::admm ? "several rows, ADMM" : "several rows";
        const auto solution = test::solve(graph, 1, method, options);
        CHECK(solution.status_of(0) == Status::converged);
        values.push_back(solution.mu);
        gradients.push_back(test::vjp(graph, solution, 1, weights, {}).eta_u);
      }
    }
    for (std::size_t k = 1; k < values.size(); ++k) {
      for (int j = 0; j < n; ++j) {
        CHECK_NEAR(values[k][j], values[0][j], 1e-7);
        CHECK_NEAR(gradients[k][j], gradients[0][j], 1e-7);
      }
    }
  }
}

void test_isolated() {
  current_case = "isolated blocks and pairs";
  const SharedModel model =
      make(16, {rows(xor_rule(2), {strided(0, {3}, {2}, {2}, {1})}), pairs({listed(2, {10, 12})}),
                rows(budget_rule(1), {listed(1, {14})}), pairs({listed(2, {16, 18})}),
                matchings(2, {strided(10, {1}, {0}, {4}, {1})}), pairs({listed(2, {26, 28})})});
  // Blocks, then pairs: variable 5 is in a pair, 13 in a matching.
  CHECK(isolated(*model) == (std::vector<int>{1, 1, 0, 1, 0, 1, 0}));
  std::vector<int> held(model->bounded()->num_blocks() + 3, 0);
  held[model->num_blocks() + 15] = 1;  // a variable that is in no factor
  CHECK(isolated(*model->bounded()) == held);
}

void test_links() {
  current_case = "links of structured factors";
  const SharedModel model =
      make(20, {matchings(2, {strided(0, {2}, {4}, {4}, {1})}),   // 0 to 3, 4 to 7
                matchings(2, {strided(7, {1}, {0}, {4}, {1})}),   // shares 7
                matchings(1, {strided(10, {2}, {5}, {1}, {1})}),  // shares 10; 15
                matchings(1, {strided(16, {2}, {1}, {1}, {1})}, 1),
                matchings(1, {strided(18, {2}, {1}, {1}, {1})}, 2)});
  const std::vector<bool> linked{false, false, true, true, false, false, true, true, true};
  const std::vector<std::pair<int, int>> places{{0, 0}, {0, 1}, {1, 0}, {2, 0}, {2, 1},
                                                {3, 0}, {3, 1}, {4, 0}, {4, 1}};
  CHECK(model->num_structured() == 9);
  for (int f = 0; f < model->num_structured(); ++f) {
    const StructuredView view = model->structured(f);
    CHECK(view.linked == linked[f] && view.name == "Matching");
    CHECK(std::pair(view.group, view.number) == places[f]);
  }
  CHECK(model->problem<double>().structured.num_links == 4 + 1 + 1 + 1 + 1);
  CHECK(model->num_dual() == 8);
  CHECK(model->structured(2).variables == (I32{7, 8, 9, 10}));
  CHECK(model->structured(2).shape == (I32{2, 2}) && model->structured(2).slots == 2);

  current_case = "scores of structured factors come after those of pairs";
  Group table = matchings(0, {strided(0, {2}, {5}, {5}, {1})});
  table.oracle = OracleKind::table;
  table.shape = {2, 3};
  table.slots = 2;
  table.num_scores = 6;
  const SharedModel scores = make(10, {table, pairs({listed(2, {0, 2, 4, 6})})});
  CHECK(scores->num_scores() == 14);
  CHECK(scores->structured(0).score_begin == 2 && scores->structured(1).score_begin == 8);
  CHECK(scores->structured(1).num_scores == 6);
}

void test_bounded() {
  current_case = "held variables";
  // The name of a rule is its own.
  const Rule own{"held", BlockKind::row, 1, {0}, {row({2}, 1, RowKind::inequality, -1, 0)}};
  const SharedModel model =
      make(3, {rows(budget_rule(2), {listed(2, {0, 4})}), rows(own, {listed(1, {2})})});
  const SharedModel bounded = model->bounded();
  CHECK(bounded == model->bounded() && bounded->num_rows() == model->num_rows() + 3);
  CHECK(bounded->num_rows() == 5 && bounded->col() == (I32{0, 2, 1, 0, 1, 2}));
  CHECK(bounded->param_sizes() == model->param_sizes());
  const std::vector<Numbers> numbers{{1}, {7}};
  const std::int8_t held[] = {1, -1, 0};
  CHECK(coefs(*bounded, shared(numbers), 0, held) == (Numbers{1, 1, 2, -1, 1, 1}));
  CHECK(bounds(*bounded, shared(numbers), 0, held) == (Numbers{1, 7, -1, 1, 0}));
  CHECK(coefs(*bounded, shared(numbers)) == (Numbers{1, 1, 2, 1, 1, 1}));
  CHECK(bounds(*bounded, shared(numbers)) == (Numbers{1, 7, 1, 1, 1}));
  int group = 0, number = 0;
  bounded->place_of_block(3, group, number);
  CHECK(group == 2 && number == 1);

  test::Graph<double> graph = graph_of(*bounded, shared(numbers));
  graph.coef = coefs(*bounded, shared(numbers), 0, held);
  graph.rhs = bounds(*bounded, shared(numbers), 0, held);
  graph.eta_u = {-2, 0.3, 5};
  const auto solution = test::solve(graph, 1, Method::compact, {});
  CHECK_NEAR(solution.mu[0], 1, 1e-6);
  CHECK_NEAR(solution.mu[1], 0.3, 1e-6);
  CHECK_NEAR(solution.mu[2], 0, 1e-6);
}

void check_refused(const std::string& expected, std::int64_t num_vars,
                   const std::vector<Group>& groups) {
  current_case = expected;
  std::string error;
  CHECK(Model::make(num_vars, groups, error) == nullptr);
  CHECK(error == expected);
  if (error != expected) std::fprintf(stderr, "got: %s\n", error.c_str());
}

void test_refused_variables() {
  const auto xors = [](std::vector<Part> parts) { return rows(xor_rule(2), std::move(parts)); };
  check_refused("the graph has too many variables", -1, {});
  check_refused("the graph has too many variables", std::int64_t(1) << 30, {});
  check_refused("a factor has no variables", 4, {xors({})});
  check_refused("parts of different numbers", 4,
                {xors({strided(0, {2}, {1}, {}, {}), strided(2, {1}, {1}, {}, {})})});
  for (const Ints& literals : {Ints{0}, Ints{0, 2, 4}}) {
    Part part = listed(2, {0, 2});
    part.literals = literals;
    check_refused("a list of literals has the wrong size", 4, {xors({part})});
  }
  for (const Part& part : {listed(2, {0, 8}), listed(2, {-1, 0}), strided(0, {1}, {0}, {2}, {4}),
                           strided(1, {2}, {-2}, {2}, {1}), strided(3, {1}, {1}, {2}, {1})}) {
    check_refused("an index is out of range", 4, {xors({part})});
  }
  check_refused("Xor: variable 3 is in it twice.", 4, {xors({listed(2, {0, 2, 6, 7})})});
  check_refused("Pair: variable 1 is in it twice.", 4, {pairs({strided(1, {1}, {0}, {2}, {0})})});
  check_refused("Matching: variable 1 is in it twice.", 4,
                {matchings(2, {strided(0, {1}, {0}, {2, 2}, {1, 1})})});
  check_refused("a pair has two variables", 4, {pairs({strided(0, {1}, {0}, {3}, {1})})});

  const std::string large = "the graph is too large: the core indexes with 32 bits";
  const std::int64_t much = std::int64_t(1) << 29;
  check_refused(large, 4, {xors({strided(0, {2}, {}, {2}, {1})})});
  check_refused(large, 4, {xors({strided(0, {-1}, {1}, {2}, {1})})});
  check_refused(large, 4, {xors({strided(0, {much, 2}, {0, 0}, {2}, {1})})});
  check_refused(large, 4, {xors({strided(0, {much}, {0}, {2}, {1})})});
  const Part huge = strided(0, {2 * much - 1}, {0}, {2 * much - 1}, {0});
  check_refused(large, 4, {xors(std::vector<Part>(16, huge))});
  Rule many = xor_rule(1);
  many.rows.assign(1024, row({1}, 1));
  check_refused(large, 4, {rows(many, {strided(0, {much / 256}, {0}, {1}, {0})})});
}

void test_refused_rules() {
  const auto check = [](const std::string& error, const std::function<void(Rule&)>& change) {
    Rule rule = between_rule(BlockKind::band, 2);
    rule.param_names = {"weights", "low", "high"};
    change(rule);
    check_refused("Between: " + error, 4, {rows(rule, {strided(0, {1}, {0}, {2}, {1})})});
  };
  check("its rows are for 3 literals, but it has 2", [](Rule& rule) { rule.size = 3; });
  check("its rows are for -1 literals, but it has 2", [](Rule& rule) { rule.size = -1; });
  check("it has no rows", [](Rule& rule) { rule.rows.clear(); });

  const std::string block = "its rows are not those of its block kind";
  check(block, [](Rule& rule) { rule.rows.pop_back(); });  // a band has two
  check(block, [](Rule& rule) { rule.rows[0].literals = {1, 0}; });
  check(block, [](Rule& rule) { rule.rows[0].coefs = {-1, -2}; });
  check(block, [](Rule& rule) { rule.rows[0].kind = RowKind::equality; });
  check(block, [](Rule& rule) { rule.rows[0].coef_param = -1; });

  check("row 0: 1 coefficients for 2 literals", [](Rule& rule) { rule.rows[0].coefs = {1}; });
  check("row 0: literal 1 is in it twice",
        [](Rule& rule) { rule.rows[1].literals = rule.rows[0].literals = {1, 1}; });
  check("row 1: literal 2, but there are 2", [](Rule& rule) { rule.rows[1].literals[0] = 2; });
  check("row 1: literal -1, but there are 2", [](Rule& rule) { rule.rows[1].literals[0] = -1; });

  check("row 0: coef_param=1 (low) has one number per factor, but must have one per literal",
        [](Rule& rule) { rule.rows[0].coef_param = 1; });
  check("row 0: coef_param=1 has one number per factor, but must have one per literal",
        [](Rule& rule) {
          rule.rows[0].coef_param = 1;
          rule.param_names.clear();
        });
  check("row 0: bound_param=0 (weights) has one number per literal, but must have one per factor",
        [](Rule& rule) { rule.rows[0].bound_param = 0; });
  check("row 0: coef_param=3, but it has 3 parameters",
        [](Rule& rule) { rule.rows[0].coef_param = 3; });
  check("row 0: coef_param=-2, but it has 3 parameters",
        [](Rule& rule) { rule.rows[0].coef_param = -2; });
  check("row 0: bound_param=3, but it has 3 parameters",
        [](Rule& rule) { rule.rows[0].bound_param = 3; });
}

void test_or_out_rules() {
  current_case = "the rows of OrOut and AndOut";
  const std::vector<Part> parts{strided(0, {1}, {0}, {3}, {1})};
  const auto rule = [](double sign) {
    const Numbers sum{-sign, -sign, sign};
    return Rule{"OrOut",
                BlockKind::or_out,
                3,
                {0},
                {{{0, 2}, {sign, -sign}, 0, RowKind::inequality, -1, -1},
                 {{1, 2}, {sign, -sign}, 0, RowKind::inequality, -1, -1},
                 row(sum, sign < 0 ? 1 : 0)}};
  };
  make(3, {rows(rule(1), parts), rows(rule(-1), parts)});
  const auto check = [&](const std::function<void(std::vector<Row>&)>& change) {
    Rule bad = rule(1);
    change(bad.rows);
    check_refused("OrOut: its rows are not those of its block kind", 3, {rows(bad, parts)});
  };
  check([](auto& own) { own.pop_back(); });
  check([](auto& own) { own.push_back(own[0]); });
  check([](auto& own) { std::swap(own[0], own[1]); });
  check([](auto& own) { own[0] = {}; });
  check([](auto& own) { own[2] = {{0}, {-1}, 0, RowKind::inequality, -1, -1}; });
  check([](auto& own) { own[1].coefs = {-1, 1}; });
  check([](auto& own) { own[1].kind = RowKind::equality; });
  check([](auto& own) { own[2].bound = 1; });
  check([](auto& own) { own[2].bound_param = 0; });
}

void test_refused_structures() {
  const std::string shape =
      "Matching: its oracle has no shape (3, 3) with 4 variables and 0 scores";
  const Part four = strided(0, {1}, {0}, {4}, {1});
  check_refused(shape, 4, {matchings(3, {four})});
  check_refused("Matching: a structured factor takes no negated variables", 4,
                {matchings(2, {listed(4, {0, 2, 5, 6})})});
  const auto check = [&](bool holds, OracleKind kind, const I32& sizes, std::int64_t vars,
                         std::int64_t scores) {
    current_case = "fits, kind " + std::to_string(static_cast<int>(kind));
    CHECK(fits(kind, {sizes.data(), static_cast<int>(sizes.size())}, vars, scores) == holds);
  };
  for (const OracleKind tree : {OracleKind::tree, OracleKind::projective_tree}) {
    check(true, tree, {3, 1}, 9, 0);
    for (const I32& sizes : {I32{3}, I32{2, 0}, I32{-3, 0}, I32{3, 1, 1}}) {
      check(false, tree, sizes, 9, 0);
    }
    check(false, tree, {0, 0}, 0, 0);
    check(false, tree, {3, 0}, 9, 1);
  }
  check(true, OracleKind::matching, {2, 3}, 6, 0);
  check(false, OracleKind::matching, {3, 2}, 6, 0);
  check(true, OracleKind::sequence, {4, 2, 0, 0, 1}, 8, 6);
  check(true, OracleKind::sequence, {4, 2, 1, 1, 1}, 8, 16);
  check(false, OracleKind::sequence, {4, 2, 1, 0, 1}, 8, 16);
  check(false, OracleKind::sequence, {1 << 20, 1, 0, 0, 0}, 1 << 20, 1);
  check(true, OracleKind::sequence_budget, {4, 1, 2}, 4, 3);
  check(false, OracleKind::sequence_budget, {4, 0, 2}, 4, 3);
  check(true, OracleKind::table, {2, 3}, 5, 6);
  for (const I32& sizes : {I32{}, I32{2, 0}, I32{3, 3}, I32(40, 2)}) {
    check(false, OracleKind::table, sizes, 5, 6);
  }
  check(true, OracleKind::callback, {5, 2}, 5, 2);
  check(false, OracleKind::callback, {4, 2}, 5, 2);
  check(false, OracleKind::callback, {0, 2}, 0, 2);
  check(false, static_cast<OracleKind>(99), {2}, 5, 2);

  Group wrong = matchings(2, {four});
  for (const int slots : {0, 1, 3}) {
    wrong.slots = slots;
    check_refused("Matching: slots is " + std::to_string(slots) +
                      ", but must be 2, as slots() of its oracle says",
                  4, {wrong});
  }
  wrong.slots = -1;
  CHECK(make(4, {wrong})->structured(0).slots == 2);

  Group own = matchings(0, {strided(0, {4}, {1}, {1}, {1})});
  own.slots = -1;
  own.oracle = OracleKind::sequence_budget;
  own.shape = {1, 0, 1};
  own.num_scores = 1;
  make(4, {own});
  own.oracle = OracleKind::table;
  own.shape = {1};
  make(4, {own});
  // Scores, too, are counted with 32 bits.
  own.shape = I32(29, 2);
  own.num_scores = 1 << 29;
  own.parts = {strided(0, {2}, {58}, {58}, {1})};
  check_refused("the graph is too large: the core indexes with 32 bits", 116, {own});
}

}  // namespace

int main() {
  test_views();
  test_parameters();
  test_bundles();
  test_several_rows();
  test_isolated();
  test_links();
  test_bounded();
  test_refused_variables();
  test_refused_rules();
  test_or_out_rules();
  test_refused_structures();
  return factormax::test::finish();
}
