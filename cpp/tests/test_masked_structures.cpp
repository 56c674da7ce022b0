// What masks leave of graphs with structured factors: solved and differentiated part by part, with
// the same answer as in one piece.
#include "factormax/components.hpp"
#include "factormax/parallel.hpp"
#include "factormax/structured/oracle.hpp"
#include "structured_graph.hpp"

namespace {

using namespace factormax;
using test::Answer;
using test::Model;
using test::Random;
using test::range;

// Structured factors of every kind in a row. Between any two stands a variable that rows or a pair
// join to both; every second one of those is masked.
struct Row {
  Model<double> model{0};
  std::vector<std::uint8_t> mask;

  explicit Row(int turns = 3) {
    for (int turn = 0; turn < turns; ++turn) {
      add(OracleKind::tree, 16, {4, 1}, 0);
      add(OracleKind::matching, 9, {3, 3}, 0);
      add(OracleKind::sequence, 12, {4, 3, 0, 0, 0}, 9);
      add(OracleKind::tree, 9, {3, 0}, 0);
      add(OracleKind::sequence_budget, 6, {6, 1, 4}, 5, 3);
      add(OracleKind::projective_tree, 9, {3, 1}, 0);
      add(OracleKind::table, 5, {2, 3}, 6);
      add_linked(turn == 1);
    }
    add_absent();
    model.rows.n = static_cast<int>(mask.size());
    model.rows.mask = mask;
  }

 private:
  int variables(int count, bool present) {
    mask.resize(mask.size() + count, present);
    return static_cast<int>(mask.size()) - count;
  }

  void add(OracleKind kind, int vars, const std::vector<int>& shape, int scores, double param = 0) {
    const int first = variables(vars, true);
    model.add(kind, range(first, first + vars), shape, scores, param);
    join(first, first + vars - 1);
  }

  // To what came before; `last` waits for what comes next.
  void join(int first, int last) {
    if (last_ >= 0) {
      const int joint = variables(1, ++joints_ % 2 == 0);
      model.rows.row({{last_}, {joint}}, 1.0, 1.0, RowKind::inequality);
      if (joints_ % 3 == 0) {
        model.rows.pair({joint, true}, {first, false});
      } else {
        model.rows.row({{joint}, {first}, {first + 1}}, 1.0, 1.0, RowKind::inequality);
      }
    }
    last_ = last;
  }

  // Two sequences that share their last step, which may be masked.
  void add_linked(bool cut) {
    const int first = variables(9, true), second = variables(6, true);
    std::vector<int> other = range(second, second + 6);
    for (int j = first + 6; j < first + 9; ++j) {
      other.push_back(j);
      if (cut) mask[j] = 0;
    }
    model.add(OracleKind::sequence, range(first, first + 9), {3, 3, 0, 0, 0}, 9);
    model.add(OracleKind::sequence, other, {3, 3, 0, 0, 0}, 9);
    join(first, second);
  }

  // A table and a row that have lost all their variables, beside one that has lost some of them.
  void add_absent() {
    const int first = variables(5, false);
    model.add(OracleKind::table, range(first, first + 5), {2, 3}, 6);
    model.rows.row({{first}, {first + 1}}, 1.0, 1.0, RowKind::equality);
    model.rows.row({{first + 2}, {0}, {1}}, 1.0, 1.0, RowKind::inequality);
  }

  int last_ = -1, joints_ = 0;
};

struct Slope {
  std::vector<double> eta_u, eta_v, residual;
};

Slope vjp(const Problem<double>& p, const Answer<double>& at, int batch) {
  Random random(5);
  const double nan = std::numeric_limits<double>::quiet_NaN();
  std::vector<double> grad_mu(at.mu.size()), grad_mu_v(at.mu_v.size());
  for (auto* list : {&grad_mu, &grad_mu_v}) {
    for (double& g : *list) g = random.normal();
  }
  Slope out{std::vector<double>(at.mu.size(), nan), std::vector<double>(at.mu_v.size(), nan),
            std::vector<double>(batch, nan)};
  BatchGradients<double> grads;
  grads.grad_mu = {grad_mu.data(), p.num_vars};
  grads.grad_mu_v = {grad_mu_v.data(), p.num_scores()};
  grads.var_side = {at.var_side.data(), p.num_vars};
  grads.row_side = {at.row_side.data(), p.num_dual()};
  grads.status = at.status.data();
  grads.grad_eta_u = {out.eta_u.data(), p.num_vars};
  grads.grad_eta_v = {out.eta_v.data(), p.num_scores()};
  grads.residual = out.residual.data();
  grads.take(at.found);
  Control control;
  vjp_batch<double>(p, batch, grads, control);
  return out;
}

void check_near(const std::vector<double>& a, const std::vector<double>& b, double tol) {
  CHECK(a.size() == b.size());
  for (std::size_t k = 0; k < a.size(); ++k) CHECK_NEAR(a[k], b[k], tol);
}

// The structures of a factor add up to the marginals of its variables.
void check_structures(const Problem<double>& p, const Answer<double>& a, int batch) {
  const std::vector<StructureSizes> sizes = structure_sizes(p);
  const std::size_t factors = sizes.size();
  std::size_t structure = 0, place = 0;
  CHECK(a.found.count.size() == batch * factors && a.found.num_cuts.size() == batch * factors);
  for (std::size_t k = 0; k < batch * factors; ++k) {
    const auto vars = p.structured.vars(static_cast<int>(k % factors));
    const double* mu = a.mu.data() + k / factors * p.num_vars;
    std::vector<double> sum(vars.size, 0.0);
    for (int c = 0; c < a.found.count[k]; ++c, ++structure) {
      for (int s = 0; s < sizes[k % factors].slots; ++s, ++place) {
        if (a.found.on[place] >= 0) sum[a.found.on[place]] += a.found.prob[structure];
      }
    }
    for (int j = 0; j < vars.size; ++j) CHECK_NEAR(sum[j], mu[vars[j]], 1e-7);
  }
  CHECK(structure == a.found.prob.size() && place == a.found.on.size());
}

void check_masked(Method method, ByRows by_rows, double scale, int threads) {
  test::current_case = "method " + std::to_string(int(method)) + ", by rows " +
                       std::to_string(int(by_rows)) + ", scale " + std::to_string(scale) + ", " +
                       std::to_string(threads) + " threads";
  set_num_threads(threads);
  const int batch = 3;
  Row row;
  Random random(17);
  row.model.scores(random, batch, scale);
  Problem<double> p = row.model.problem();
  const auto parts = Components::of_present(p, row.mask.data());
  CHECK(parts != nullptr && parts->num_structured() > 10);
  Options options;
  options.tol = 1e-9;
  options.max_iter = 20000;
  options.by_rows = by_rows;
  const Answer<double> whole(p, batch, method, options);
  p.components = parts.get();
  const Answer<double> ours(p, batch, method, options);
  const bool linear = method == Method::proximal || method == Method::ad3;
  for (int i = 0; i < batch; ++i) {
    CHECK(whole.status[i] == int(Status::converged) && ours.status[i] == int(Status::converged));
    CHECK_NEAR(ours.objective[i], whole.objective[i], 1e-6);
    if (linear) CHECK_NEAR(ours.upper_bound[i], whole.upper_bound[i], 1e-6);
  }
  for (std::size_t j = 0; j < ours.mu.size(); ++j) {
    const bool absent = ours.var_side[j] == std::int8_t(Side::absent);
    CHECK(absent == (row.mask[j % row.mask.size()] == 0));
    CHECK(!absent || ours.mu[j] == 0);
  }
  if (by_rows == ByRows::listed || by_rows == ByRows::never) check_structures(p, ours, batch);
  set_num_threads(0);
  if (linear) return;  // its solutions need not be unique
  const double tol = method == Method::compact ? 1e-7 : 1e-5;
  check_near(ours.mu, whole.mu, tol);
  check_near(ours.mu_v, whole.mu_v, tol);
  if (method != Method::compact) return;
  const Slope slope = vjp(p, ours, batch);
  p.components = nullptr;
  const Slope exact = vjp(p, whole, batch);
  for (const double r : slope.residual) CHECK(r <= 1e-7);
  check_near(slope.eta_u, exact.eta_u, 1e-6);
  check_near(slope.eta_v, exact.eta_v, 1e-6);
}

// Every variable, row and factor is in one component; those beside it are masked.
void check_parts() {
  test::current_case = "parts";
  Row row;
  const Problem<double> p = row.model.problem();
  const auto parts = Components::of_present(p, row.mask.data());
  std::vector<int> vars(p.num_vars, 0), dual(p.num_dual(), 0), scores(p.num_scores(), 0),
      factors(p.structured.count, 0);
  const auto count = [](const Indices& indices, std::vector<int>& seen) {
    for (int k = 0; k < indices.count - indices.ghosts; ++k) ++seen[indices.index[k]];
  };
  for (int c = 0; c < parts->count(); ++c) {
    const Component& own = (*parts)[c];
    count(own.vars, vars);
    count(own.dual, dual);
    count(own.scores, scores);
    count(own.factors, factors);
    for (int k = own.vars.count - own.vars.ghosts; k < own.vars.count; ++k) {
      CHECK(row.mask[own.vars.index[k]] == 0);
    }
    for (int k = 0; k < own.factors.count; ++k) {
      CHECK(parts->of_factor(own.factors.index[k]) == c);
    }
    CHECK(parts->layout(own.kind).num_vars == own.vars.count);
    CHECK(parts->layout(own.kind).num_dual() == own.dual.count);
  }
  for (const auto* seen : {&vars, &dual, &scores, &factors}) {
    CHECK(std::all_of(seen->begin(), seen->end(), [](int times) { return times == 1; }));
  }
}

// One part that can't hold: nothing is left of its instance but the proof, in that part's rows.
void check_infeasible() {
  test::current_case = "infeasible";
  Row row;
  // The first tree has one root, and here none may be: its roots are on the diagonal.
  row.model.rows.row({{0}, {5}, {10}, {15}}, 1.0, 0.0, RowKind::inequality);
  Random random(19);
  row.model.scores(random, 1, 1.0);
  Problem<double> p = row.model.problem();
  const auto parts = Components::of_present(p, row.mask.data());
  p.components = parts.get();
  const Answer<double> ours(p, 1, Method::compact, Options());
  CHECK(ours.status[0] == int(Status::infeasible));
  for (std::size_t j = 0; j < ours.mu.size(); ++j) {
    CHECK(row.mask[j] != 0 ? std::isnan(ours.mu[j]) : ours.mu[j] == 0);
  }
  CHECK(ours.found.prob.empty() && ours.found.count.size() == std::size_t(p.structured.count));
  const int guilty = parts->of_factor(0);
  for (int c = 0; c < parts->count(); ++c) {
    const Indices& dual = (*parts)[c].dual;
    for (int k = 0; k < dual.count && c != guilty; ++k) CHECK(ours.tau[dual.index[k]] == 0);
  }
  const Slope slope = vjp(p, ours, 1);
  for (const double g : slope.eta_u) CHECK(g == 0);
}

// Lists of rows that no solve could have found are refused, not followed.
void check_lists() {
  test::current_case = "lists";
  Model<double> model(18);
  model.add(OracleKind::matching, range(0, 9), {3, 3}, 0);
  model.add(OracleKind::matching, range(9, 18), {3, 3}, 0);
  model.rows.row({{0}, {9}}, 1.0, 1.0, RowKind::inequality);
  Random random(23);
  model.scores(random, 1, 1.0);
  const Problem<double> p = model.problem();
  Options options;
  options.by_rows = ByRows::always;
  Answer<double> at(p, 1, Method::compact, options);
  CHECK(vjp(p, at, 1).residual[0] <= 1e-7);
  at.found.num_cuts[1] = -1;
  at.found.cuts.resize(3);
  CHECK(vjp(p, at, 1).residual[0] == std::numeric_limits<double>::infinity());
}

void check_threads() {
  test::current_case = "threads";
  Row row;
  Random random(29);
  row.model.scores(random, 4, 0.7);
  Problem<double> p = row.model.problem();
  const auto parts = Components::of_present(p, row.mask.data());
  p.components = parts.get();
  std::vector<Answer<double>> found;
  std::vector<Slope> slopes;
  for (const int threads : {1, 4}) {
    set_num_threads(threads);
    found.emplace_back(p, 4, Method::compact, Options());
    slopes.push_back(vjp(p, found.back(), 4));
  }
  set_num_threads(0);
  CHECK(found[0].mu == found[1].mu && found[0].tau == found[1].tau);
  CHECK(found[0].objective == found[1].objective && found[0].mu_v == found[1].mu_v);
  CHECK(found[0].found.prob == found[1].found.prob && found[0].found.on == found[1].found.on);
  CHECK(found[0].found.cuts == found[1].found.cuts);
  CHECK(slopes[0].eta_u == slopes[1].eta_u && slopes[0].eta_v == slopes[1].eta_v);
}

// Large instances are split by their own masks, whichever threads that takes: all as if alone.
void check_masks_of_their_own() {
  test::current_case = "masks of their own";
  const int batch = 3;
  Row row(8);
  const std::size_t n = row.mask.size();
  Random random(31);
  row.model.scores(random, batch, 0.7);
  std::vector<std::uint8_t>& mask = row.model.rows.mask;
  mask.resize(n * batch, 1);  // nothing is masked in the second instance,
  for (std::size_t j = n / 2; j < n; ++j) mask[2 * n + j] = row.mask[j];  // half in the third
  const Problem<double> p = row.model.problem();
  CHECK(Components::may_part(p));
  std::vector<Answer<double>> found;
  std::vector<Slope> slopes;
  for (const int threads : {1, 4}) {
    set_num_threads(threads);
    found.emplace_back(p, batch, Method::compact, Options());
    slopes.push_back(vjp(p, found.back(), batch));
  }
  set_num_threads(0);
  CHECK(found[0].mu == found[1].mu && found[0].objective == found[1].objective);
  CHECK(found[0].found.prob == found[1].found.prob && found[0].found.on == found[1].found.on);
  CHECK(found[0].found.num_cuts == found[1].found.num_cuts);
  CHECK(slopes[0].eta_u == slopes[1].eta_u && slopes[0].eta_v == slopes[1].eta_v);
  std::size_t structures = 0;
  for (int i = 0; i < batch; ++i) {
    Problem<double> own = p;
    own.mask = {p.mask.at(i), 0};
    own.eta_u = {p.eta_u.at(i), 0};
    own.eta_v = {p.eta_v.at(i), 0};
    const Answer<double> alone(own, 1, Method::compact, Options());
    CHECK(alone.status[0] == int(Status::converged));
    CHECK(std::equal(alone.mu.begin(), alone.mu.end(), found[0].mu.begin() + i * n));
    CHECK(alone.objective[0] == found[0].objective[i]);
    const std::vector<double>& prob = found[0].found.prob;
    CHECK(std::equal(alone.found.prob.begin(), alone.found.prob.end(), prob.begin() + structures));
    structures += alone.found.prob.size();
  }
  CHECK(structures == found[0].found.prob.size());
}

// Threads share the factors of one instance in which nothing is masked: with the same bits.
void check_shared_factors() {
  test::current_case = "shared factors";
  Row row(20);
  row.model.rows.mask.clear();
  Random random(23);
  row.model.scores(random, 1, 1.0);
  const Problem<double> p = row.model.problem();
  Options options;
  options.max_iter = 60;
  set_num_threads(1);
  const Answer<double> alone(p, 1, Method::compact, options);
  CHECK(alone.iterations[0] > 1);
  for (const int threads : {2, 5}) {
    set_num_threads(threads);
    const Answer<double> ours(p, 1, Method::compact, options);
    CHECK(ours.status == alone.status && ours.iterations == alone.iterations);
    CHECK(ours.mu == alone.mu && ours.mu_v == alone.mu_v && ours.tau == alone.tau);
    CHECK(ours.found.prob == alone.found.prob && ours.found.on == alone.found.on);
  }
  set_num_threads(0);
}

}  // namespace

int main() {
  check_parts();
  for (const double scale : {0.1, 1.0, 5.0}) {
    for (const ByRows by_rows : {ByRows::never, ByRows::dense, ByRows::always, ByRows::listed}) {
      check_masked(Method::compact, by_rows, scale, 2);
    }
  }
  check_masked(Method::admm, ByRows::dense, 1.0, 1);
  check_masked(Method::proximal, ByRows::dense, 1.0, 1);
  check_masked(Method::ad3, ByRows::dense, 1.0, 1);
  check_infeasible();
  check_shared_factors();
  check_lists();
  check_threads();
  check_masks_of_their_own();
  return test::finish();
}
