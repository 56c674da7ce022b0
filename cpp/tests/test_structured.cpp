// Structured factors in a graph: optimality by the oracle itself, the structures found, symmetry of
// the derivative, linear programs, more structures than there is room for at first, masks; trees
// and matchings by rows.
#include <numeric>

#include "factormax/batch.hpp"
#include "factormax/structured/oracle.hpp"
#include "graph.hpp"
#include "structured_graph.hpp"

namespace {

using namespace factormax;
using factormax::test::Answer;
using factormax::test::Literal;
using factormax::test::Model;
using factormax::test::Random;
using factormax::test::range;

template <class T>
double best_score(const Problem<T>& p, int f, std::vector<double> scores, const T* eta_v) {
  Oracle oracle;
  Workspace counter;
  const auto kind = static_cast<OracleKind>(p.structured.kind[f]);
  oracle.allocate(kind, p.structured.shapes(f), counter);
  Workspace ws(counter.used());
  oracle.allocate(kind, p.structured.shapes(f), ws);
  std::vector<double> own(eta_v, eta_v + p.structured.scores(f));
  std::vector<std::int32_t> on(oracle.slots() + 1), features(oracle.feature_slots() + 1);
  CHECK(oracle.prepare(scores.data(), {p.structured.param.at(0)[f]}));
  CHECK(oracle.map(scores.data(), own.data(), on.data(), features.data(), nullptr) ==
        OracleAnswer::found);
  double sum = 0;
  for (int s = 0; s < oracle.slots(); ++s) sum += on[s] >= 0 ? scores[on[s]] : 0;
  for (int s = 0; s < oracle.feature_slots(); ++s) sum += features[s] >= 0 ? own[features[s]] : 0;
  return sum;
}

// mu is the mean of the structures, and no structure has a better reduced score.
template <class T>
void check_hubs(const Problem<T>& p, const Answer<T>& a, int batch, double tol) {
  const std::vector<StructureSizes> sizes = structure_sizes(p);
  std::size_t structure = 0, place = 0;
  for (int i = 0; i < batch; ++i) {
    const T* mu = a.mu.data() + i * p.num_vars;
    std::vector<double> z(p.num_vars);
    for (int j = 0; j < p.num_vars; ++j) z[j] = p.eta_u.at(i)[j];
    for (int r = 0; r < p.num_rows; ++r) {
      double product = 0;
      for (int k = p.row_ptr[r]; k < p.row_ptr[r + 1]; ++k) {
        z[p.col[k]] -= double(p.coef.at(i)[k]) * a.tau[i * p.num_dual() + r];
        product += double(p.coef.at(i)[k]) * mu[p.col[k]];
      }
      CHECK(product <= p.rhs.at(i)[r] + tol);
    }
    // The multipliers of the links, and how many share the quadratic of a variable.
    std::vector<double> lambda(p.structured.var_ptr[p.structured.count]), shares(p.num_vars, 1.0);
    int link = p.num_rows + p.num_pairs;
    for (int f = 0; f < p.structured.count; ++f) {
      if (!p.structured.linked[f]) continue;
      for (int k = p.structured.var_ptr[f]; k < p.structured.var_ptr[f + 1]; ++k) {
        lambda[k] = a.tau[i * p.num_dual() + link++];
        z[p.structured.var[k]] -= lambda[k];
        shares[p.structured.var[k]] += 1;
      }
    }
    for (int f = 0; f < p.structured.count; ++f) {
      const int count = a.found.count[i * p.structured.count + f];
      const int slots = sizes[f].slots, d = p.structured.vars(f).size;
      CHECK(count >= 1 && count <= d + 1);
      std::vector<double> sum(d);
      double total = 0;
      for (int k = 0; k < count; ++k, ++structure) {
        const double prob = a.found.prob[structure];
        CHECK(prob >= 0);
        total += prob;
        for (int s = 0; s < slots; ++s, ++place) {
          if (a.found.on[place] >= 0) sum[a.found.on[place]] += prob;
        }
      }
      CHECK_NEAR(total, 1, 1e-9);
      std::vector<double> reduced(d);
      double own = 0;
      for (int k = 0; k < d; ++k) {
        const int j = p.structured.vars(f)[k];
        CHECK_NEAR(sum[k], mu[j], tol);
        const double scores = p.structured.linked[f] ? lambda[p.structured.var_ptr[f] + k] : z[j];
        reduced[k] = scores - mu[j] / shares[j];
        own += reduced[k] * mu[j];
      }
      const T* eta_v = p.eta_v.at(i) + p.num_pairs + p.structured.score_ptr[f];
      const T* mu_v = a.mu_v.data() + i * p.num_scores() + p.structured.score_ptr[f];
      for (int k = 0; k < p.structured.scores(f); ++k) own += double(eta_v[k]) * mu_v[k];
      CHECK(best_score(p, f, reduced, eta_v) - own <= tol * (1 + std::fabs(own)));
    }
  }
}

// d2 . J d1 = d1 . J d2
template <class T>
void check_symmetry(const Problem<T>& p, const Answer<T>& a, int batch, Random& random,
                    double tol) {
  std::vector<T> d[2], g[2];
  for (int k = 0; k < 2; ++k) {
    d[k].resize(a.mu.size());
    g[k].resize(a.mu.size());
    for (T& value : d[k]) value = static_cast<T>(random.normal());
    std::vector<T> zero(a.mu_v.size()), grad_v(a.mu_v.size());
    std::vector<double> residual(batch);
    BatchGradients<T> grads;
    grads.grad_mu = {d[k].data(), p.num_vars};
    grads.grad_mu_v = {zero.data(), p.num_scores()};
    grads.var_side = {a.var_side.data(), p.num_vars};
    grads.row_side = {a.row_side.data(), p.num_dual()};
    grads.status = a.status.data();
    grads.grad_eta_u = {g[k].data(), p.num_vars};
    grads.grad_eta_v = {grad_v.data(), p.num_scores()};
    grads.residual = residual.data();
    grads.take(a.found);
    Control control;
    vjp_batch<T>(p, batch, grads, control);
    for (const double r : residual) CHECK(r <= tol);
  }
  for (int i = 0; i < batch; ++i) {
    double first = 0, second = 0, size = 1;
    for (int j = i * p.num_vars; j < (i + 1) * p.num_vars; ++j) {
      first += double(d[1][j]) * g[0][j];
      second += double(d[0][j]) * g[1][j];
      size += std::fabs(double(d[0][j]) * g[1][j]);
    }
    CHECK_NEAR(first, second, tol * size);
  }
}

template <class T>
Model<T> tree_with_budgets(int n, int budget) {
  Model<T> model(n * n);
  model.add(OracleKind::tree, range(0, n * n), {n, 0}, 0);
  for (int h = 0; h < n; ++h) {
    std::vector<Literal> arcs;
    for (int m = 0; m < n; ++m) {
      if (m != h) arcs.push_back({m * n + h});
    }
    if (!arcs.empty()) model.rows.row(arcs, T(1), T(budget), RowKind::inequality);
  }
  return model;
}

template <class T>
Model<T> lone_tree(int n, bool single_root) {
  Model<T> model(n * n);
  model.add(OracleKind::tree, range(0, n * n), {n, single_root}, 0);
  return model;
}

template <class T>
Model<T> chains(int n, int states) {  // a grid of chains: the columns are linked
  Model<T> model(n * n * states);
  for (int i = 0; i < n; ++i) {
    model.add(OracleKind::sequence, range(i * n * states, (i + 1) * n * states),
              {n, states, 0, 0, 0}, states * states);
  }
  for (int j = 0; j < n; ++j) {
    std::vector<int> vars;
    for (int i = 0; i < n; ++i) {
      for (int s = 0; s < states; ++s) vars.push_back((i * n + j) * states + s);
    }
    model.add(OracleKind::sequence, vars, {n, states, 1, 1, 1},
              (n - 1) * states * states + 2 * states);
  }
  return model;
}

template <class T>
Model<T> mixture() {
  Model<T> model(6 + 6 + 5);
  model.add(OracleKind::matching, range(0, 6), {2, 3}, 0);
  model.add(OracleKind::table, range(6, 11), {2, 3}, 6);
  model.add(OracleKind::sequence_budget, range(11, 17), {6, 1, 4}, 5, 3);
  model.rows.row({{0}, {6}, {11}}, T(1), T(1), RowKind::inequality);
  model.rows.row({{4}, {8}, {12}, {16}}, T(1), T(2), RowKind::inequality);
  return model;
}

template <class T>
void check(const char* name, Model<T> model, Random& random, int batch) {
  const bool exact = std::numeric_limits<T>::digits > 24;
  for (const double scale : {0.05, 0.5, 3.0}) {
    test::current_case =
        std::string(name) + (exact ? " double " : " float ") + std::to_string(scale);
    model.scores(random, batch, scale);
    const Problem<T> p = model.problem();
    Options options;
    options.tol = exact ? 1e-9 : 1e-4;
    options.by_rows = ByRows::never;
    const Answer<T> a(p, batch, Method::compact, options);
    for (const int status : a.status) CHECK(status == static_cast<int>(Status::converged));
    check_hubs(p, a, batch, exact ? 1e-7 : 1e-3);
    check_symmetry(p, a, batch, random, exact ? 1e-7 : 1e-2);

    options.max_iter = 3000;
    options.tol = exact ? 1e-7 : 1e-3;
    const Answer<T> admm(p, batch, Method::admm, options);
    for (std::size_t j = 0; j < a.mu.size(); ++j) {
      CHECK_NEAR(admm.mu[j], a.mu[j], exact ? 1e-4 : 2e-2);
    }
    options.tol = exact ? 1e-6 : 1e-3;
    const Answer<T> lp(p, batch, Method::proximal, options);
    for (int i = 0; i < batch; ++i) {
      CHECK(lp.status[i] == static_cast<int>(Status::converged));
      CHECK(lp.objective[i] <=
            lp.upper_bound[i] + 10 * options.tol * (1 + std::fabs(lp.upper_bound[i])));
      CHECK(lp.objective[i] >= a.objective[i] - options.tol);  // without the quadratic
    }
  }
}

template <class T>
Model<T> tree_and_matching(int n) {
  Model<T> model(n * n + 2 * n);
  model.add(OracleKind::tree, range(0, n * n), {n, 1}, 0);
  model.add(OracleKind::matching, range(n * n, n * n + 2 * n), {2, n}, 0);
  model.rows.row({{0}, {1}, {n * n}}, T(1), T(1), RowKind::inequality);
  return model;
}

// By rows: the same marginals, without an oracle.
template <class T>
void check_by_rows(const char* name, Model<T> model, Random& random, int batch) {
  const bool exact = std::numeric_limits<T>::digits > 24;
  for (const double scale : {0.0, 0.05, 0.5, 3.0}) {
    test::current_case =
        std::string(name) + " by rows" + (exact ? " double " : " float ") + std::to_string(scale);
    model.scores(random, batch, scale);
    const Problem<T> p = model.problem();
    Options options;
    options.tol = exact ? 1e-9 : 1e-4;
    options.by_rows = ByRows::never;
    const Answer<T> a(p, batch, Method::compact, options);
    options.by_rows = ByRows::always;
    const Answer<T> b(p, batch, Method::compact, options);
    for (int i = 0; i < batch; ++i) {
      CHECK(b.status[i] == static_cast<int>(Status::converged));
      CHECK(b.oracle_calls[i] == 0 && b.found.num_cuts[i * p.structured.count] >= 0);
    }
    for (std::size_t j = 0; j < a.mu.size(); ++j) {
      CHECK_NEAR(b.mu[j], a.mu[j], exact ? 1e-7 : 1e-3);
    }
    check_symmetry(p, b, batch, random, exact ? 1e-7 : 1e-2);
  }
}

// Masked variables: those of the last word, and one arc.
template <class T>
void check_mask(Random& random) {
  test::current_case = "mask";
  const int n = 6;
  Model<T> model = tree_with_budgets<T>(n, 2);
  model.scores(random, 1, 1.0);
  model.rows.mask.assign(n * n, 1);
  for (int k = 0; k < n; ++k) model.rows.mask[(n - 1) * n + k] = model.rows.mask[k * n + n - 1] = 0;
  model.rows.mask[2 * n + 1] = 0;
  const Problem<T> p = model.problem();
  const Answer<T> a(p, 1, Method::compact, Options());
  CHECK(a.status[0] == 0);
  for (int m = 0; m + 1 < n; ++m) {
    double sum = 0;
    for (int h = 0; h < n; ++h) sum += a.mu[m * n + h];
    CHECK_NEAR(sum, 1, 1e-5);
  }
  for (int k = 0; k < n; ++k) CHECK(a.mu[(n - 1) * n + k] == 0 && a.mu[k * n + n - 1] == 0);
  CHECK(a.mu[2 * n + 1] == 0);
  check_symmetry(p, a, 1, random, std::numeric_limits<T>::digits > 24 ? 1e-7 : 1e-2);
}

void check_infeasible(Random& random) {
  test::current_case = "infeasible";
  Model<double> model(6);
  model.add(OracleKind::matching, range(0, 6), {2, 3}, 0);
  model.rows.row({{0}, {1}, {2}}, 1.0, 0.0, RowKind::inequality);
  model.scores(random, 2, 1.0);
  for (const Method method : {Method::compact, Method::admm, Method::proximal, Method::ad3}) {
    const Answer<double> a(model.problem(), 2, method, Options());
    for (const int status : a.status) CHECK(status == static_cast<int>(Status::infeasible));
  }
}

template <class T>
void check_all(Random& random) {
  check("tree", tree_with_budgets<T>(5, 2), random, 4);
  check("one word", tree_with_budgets<T>(1, 2), random, 2);
  check("mixture", mixture<T>(), random, 6);
  check("chains", chains<T>(3, 2), random, 3);
  check_by_rows("tree", tree_with_budgets<T>(5, 2), random, 4);
  check_by_rows("one word", tree_with_budgets<T>(1, 2), random, 2);
  check_by_rows("tree of 15 words", tree_with_budgets<T>(15, 3), random, 2);
  check_by_rows("tree alone", lone_tree<T>(9, false), random, 4);
  check_by_rows("tree alone with a single root", lone_tree<T>(9, true), random, 4);
  check_by_rows("tree and matching", tree_and_matching<T>(6), random, 3);
  check_mask<T>(random);
}

}  // namespace

int main(int argc, char** argv) {
  Random random(factormax::test::seed_from(argc, argv));
  check_all<double>(random);
  check_all<float>(random);
  // More structures than there is room for at first.
  Model<double> model = tree_with_budgets<double>(18, 18);
  factormax::test::current_case = "growth";
  model.scores(random, 2, 0.02);
  const Problem<double> p = model.problem();
  Options options;
  options.by_rows = ByRows::never;
  const Answer<double> a(p, 2, Method::compact, options);
  for (const int count : a.found.count) CHECK(count > 4 * 18);
  check_hubs(p, a, 2, 1e-7);
  check_symmetry(p, a, 2, random, 1e-7);
  check_infeasible(random);
  return factormax::test::finish();
}
