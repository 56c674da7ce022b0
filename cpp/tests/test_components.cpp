// A graph that falls apart: every part is solved and differentiated as if it were alone.
#include "factormax/components.hpp"
#include "factormax/parallel.hpp"
#include "solution.hpp"

namespace {

using namespace factormax;
using test::Graph;
using test::Solution;

// Several graphs in one, with their variables, factors and pairs interleaved.
template <class T>
struct Together {
  Graph<T> graph{0};
  std::vector<std::vector<int>> vars, dual, scores;  // of each part, numbered in the whole

  Together(const std::vector<Graph<T>>& parts, int batch) {
    vars.resize(parts.size());
    dual.resize(parts.size());
    scores.resize(parts.size());
    in_turns(
        parts, [](const Graph<T>& g) { return g.n; },
        [&](std::size_t k, int) { vars[k].push_back(graph.n++); });
    in_turns(
        parts, [](const Graph<T>& g) { return g.num_blocks(); },
        [&](std::size_t k, int f) { add_block(parts[k], k, f); });
    in_turns(
        parts, [](const Graph<T>& g) { return g.num_pairs(); },
        [&](std::size_t k, int q) { add_pair(parts[k], k, q); });
    const int rows = graph.num_rows();
    for (std::size_t k = 0; k < parts.size(); ++k) {
      for (const int q : scores[k]) dual[k].push_back(rows + q);
    }
    graph.eta_u.resize(std::size_t(batch) * graph.n);
    graph.eta_v.resize(std::size_t(batch) * graph.num_pairs());
    graph.mask.resize(graph.eta_u.size(), 1);
    for (std::size_t k = 0; k < parts.size(); ++k) {
      scatter(parts[k].eta_u, vars[k], batch, graph.eta_u);
      scatter(parts[k].eta_v, scores[k], batch, graph.eta_v);
      if (!parts[k].mask.empty()) scatter(parts[k].mask, vars[k], batch, graph.mask);
    }
    graph.split();
  }

  template <class U>
  static void scatter(const std::vector<U>& own, const std::vector<int>& index, int batch,
                      std::vector<U>& whole) {
    const std::size_t columns = whole.size() / batch;
    for (int i = 0; i < batch; ++i) {
      for (std::size_t k = 0; k < index.size(); ++k) {
        whole[i * columns + index[k]] = own[i * index.size() + k];
      }
    }
  }

  template <class U>
  static std::vector<U> gather(const std::vector<U>& whole, const std::vector<int>& index,
                               int batch) {
    const std::size_t columns = whole.size() / batch;
    std::vector<U> own;
    for (int i = 0; i < batch; ++i) {
      for (const int j : index) own.push_back(whole[i * columns + j]);
    }
    return own;
  }

 private:
  template <class Count, class Visit>
  static void in_turns(const std::vector<Graph<T>>& parts, const Count& count, const Visit& visit) {
    bool any = true;
    for (int turn = 0; any; ++turn) {
      any = false;
      for (std::size_t k = 0; k < parts.size(); ++k) {
        if (turn >= count(parts[k])) continue;
        visit(k, turn);
        any = true;
      }
    }
  }

  void add_block(const Graph<T>& part, std::size_t k, int f) {
    for (int r = part.block_ptr[f]; r < part.block_ptr[f + 1]; ++r) {
      for (int e = part.row_ptr[r]; e < part.row_ptr[r + 1]; ++e) {
        graph.col.push_back(vars[k][part.col[e]]);
        graph.coef.push_back(part.coef[e]);
      }
      dual[k].push_back(graph.num_rows());
      graph.row_ptr.push_back(static_cast<std::int32_t>(graph.col.size()));
      graph.rhs.push_back(part.rhs[r]);
      graph.kind.push_back(part.kind[r]);
    }
    graph.block_ptr.push_back(graph.num_rows());
    graph.block_kind.push_back(part.block_kind[f]);
  }

  void add_pair(const Graph<T>& part, std::size_t k, int q) {
    scores[k].push_back(graph.num_pairs());
    const auto literal = [&](int end) {
      return test::Literal{vars[k][part.pair_var[2 * q + end]],
                           part.pair_negated[2 * q + end] != 0};
    };
    graph.pair(literal(0), literal(1));
  }
};

template <class T>
std::vector<Graph<T>> some_parts(int batch, double scale) {
  test::Random random(3);
  std::vector<Graph<T>> parts;
  parts.push_back(test::matching<T>(4, 4, RowKind::equality));
  parts.push_back(test::logic<T>(1, 12, 8));
  parts.push_back(test::random_pairs<T>(random, 9, 14));
  parts.push_back(test::matching<T>(4, 4, RowKind::equality));  // like the first one
  Graph<T> loose(3);                                            // variables without a factor
  parts.push_back(loose);
  Graph<T> row(6);
  row.row({{0}, {1}, {2}, {3}, {4}, {5}}, T(1), T(2), RowKind::inequality);
  parts.push_back(row);
  for (Graph<T>& part : parts) part.normal_scores(random, batch, scale);
  return parts;
}

template <class U>
bool same(const std::vector<U>& a, const std::vector<U>& b) {
  return a.size() == b.size() &&
         (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(U)) == 0);
}

template <class T>
void test_alone(Method method, double scale, int threads) {
  test::current_case = std::string(sizeof(T) == 4 ? "float" : "double") + ", method " +
                       std::to_string(int(method)) + ", scale " + std::to_string(scale) + ", " +
                       std::to_string(threads) + " threads";
  const int batch = 3;
  set_num_threads(threads);
  std::vector<Graph<T>> parts = some_parts<T>(batch, scale);
  Together<T> whole(parts, batch);
  Options options;
  options.max_iter = 3000;
  const Solution<T> ours = test::solve(whole.graph, batch, method, options);
  // A warm start is a slice of the multipliers, too.
  Solution<T> warm(whole.graph, batch);
  test::solve_into(whole.graph, method, options, warm, {ours.tau.data(), ours.dual});
  test::Random random(5);
  std::vector<T> grad(std::size_t(batch) * whole.graph.n);
  std::vector<T> grad_v(std::size_t(batch) * whole.graph.num_pairs());
  for (T& g : grad) g = static_cast<T>(random.normal());
  for (T& g : grad_v) g = static_cast<T>(random.normal());
  const bool linear = method == Method::proximal || method == Method::ad3;
  test::Gradient<T> slope;
  if (!linear) slope = test::vjp(whole.graph, ours, batch, grad, grad_v);
  std::vector<double> objective(batch, 0);
  std::vector<int> passes(batch, 0);
  for (std::size_t k = 0; k < parts.size(); ++k) {
    // All variables are present, but the whole has a mask: so must the parts.
    parts[k].mask.assign(parts[k].eta_u.size(), 1);
    const Solution<T> alone = test::solve(parts[k], batch, method, options);
    const auto own = [&](const auto& list, const std::vector<int>& index) {
      return Together<T>::gather(list, index, batch);
    };
    CHECK(same(own(ours.mu, whole.vars[k]), alone.mu));
    CHECK(same(own(ours.mu_v, whole.scores[k]), alone.mu_v));
    // Multipliers of linear programs are not unique: those of small rows depend on what they are
    // solved with.
    const bool in_company = linear && k + 1 == parts.size();
    CHECK(in_company || same(own(ours.tau, whole.dual[k]), alone.tau));
    CHECK(same(own(ours.var_side, whole.vars[k]), alone.var_side));
    CHECK(same(own(ours.row_side, whole.dual[k]), alone.row_side));
    Solution<T> again(parts[k], batch);
    test::solve_into(parts[k], method, options, again, {alone.tau.data(), alone.dual});
    CHECK(same(own(warm.mu, whole.vars[k]), again.mu));
    for (int i = 0; i < batch; ++i) {
      objective[i] += alone.objective[i];
      passes[i] = std::max(passes[i], alone.iterations[i]);
    }
    if (linear) continue;
    const test::Gradient<T> theirs =
        test::vjp(parts[k], alone, batch, own(grad, whole.vars[k]), own(grad_v, whole.scores[k]));
    CHECK(same(own(slope.eta_u, whole.vars[k]), theirs.eta_u));
    CHECK(same(own(slope.eta_v, whole.scores[k]), theirs.eta_v));
  }
  for (int i = 0; i < batch; ++i) {
    CHECK(std::fabs(ours.objective[i] - objective[i]) <= 1e-12 * (1 + std::fabs(objective[i])));
    CHECK(ours.iterations[i] == passes[i]);
    CHECK(ours.status_of(i) == Status::converged);
  }
  set_num_threads(0);
}

// If one part can't hold, nothing is left of its instance but the proof, in its own rows.
void test_infeasible() {
  test::current_case = "infeasible";
  const int batch = 2;
  std::vector<Graph<double>> parts = some_parts<double>(batch, 1);
  Graph<double> wrong(4);
  wrong.row({{0}, {1}, {2}}, 1.0, 1.0, RowKind::equality);
  wrong.row({{0}, {1}, {2}, {3}}, 1.0, 0.25, RowKind::inequality);
  test::Random random(7);
  wrong.normal_scores(random, batch, 1);
  parts.insert(parts.begin() + 1, wrong);
  Together<double> whole(parts, batch);
  const Solution<double> ours = test::solve(whole.graph, batch, Method::compact, Options());
  for (int i = 0; i < batch; ++i) {
    CHECK(ours.status_of(i) == Status::infeasible);
    CHECK(ours.objective[i] == -std::numeric_limits<double>::infinity());
  }
  for (const double value : ours.mu) CHECK(std::isnan(value));
  const auto absent = [](std::int8_t side) { return side == std::int8_t(Side::absent); };
  CHECK(std::all_of(ours.var_side.begin(), ours.var_side.end(), absent));
  CHECK(std::all_of(ours.row_side.begin(), ours.row_side.end(), absent));
  for (std::size_t k = 0; k < parts.size(); ++k) {
    const std::vector<double> tau = Together<double>::gather(ours.tau, whole.dual[k], batch);
    const bool any = std::any_of(tau.begin(), tau.end(), [](double t) { return t != 0; });
    CHECK(any == (k == 1));
  }
  const std::vector<double> ones(std::size_t(batch) * whole.graph.n, 1);
  const std::vector<double> ones_v(std::size_t(batch) * whole.graph.num_pairs(), 1);
  const auto slope = test::vjp(whole.graph, ours, batch, ones, ones_v);
  for (const double g : slope.eta_u) CHECK(g == 0);
}

// A grid of pairs, every third of them with a negated end, and of rows and blocks, of which every
// fifth line is masked.
Graph<double> masked_grid(int size, int batch) {
  Graph<double> graph(size * size);
  for (int r = 0; r < size; ++r) {
    for (int c = 0; c + 1 < size; ++c) {
      const int j = r * size + c;
      graph.pair({j, j % 3 == 0}, {j + 1, j % 9 == 0});
      if (r + 1 < size) graph.pair({j, false}, {j + size, j % 3 == 0});
      if (r + 1 < size && j % 4 == 0) {
        graph.row({{j}, {j + 1}, {j + size}}, 1.0, 1.0, RowKind::inequality);
      }
      if (r + 1 < size && j % 7 == 0) graph.or_out({{j}, {j + 1, true}, {j + size + 1}});
    }
  }
  test::Random random(11);
  graph.normal_scores(random, batch, 1);
  graph.mask.resize(std::size_t(size) * size);
  for (int j = 0; j < size * size; ++j) graph.mask[j] = j / size % 5 != 4;
  return graph;
}

// What masks leave is solved and differentiated part by part, with the same answer as in one piece.
void test_masked(Method method) {
  test::current_case = "masked, method " + std::to_string(int(method));
  const int batch = 2;
  Options options;
  options.tol = 1e-10;
  options.max_iter = 20000;
  Graph<double> graph = masked_grid(40, batch);
  const Solution<double> whole = test::solve(graph, batch, method, options);
  graph.components = Components::of_present(graph.problem(), graph.mask.data());
  CHECK(graph.components != nullptr);
  const Solution<double> parts = test::solve(graph, batch, method, options);
  for (int i = 0; i < batch; ++i) {
    CHECK(parts.status_of(i) == Status::converged && whole.status_of(i) == Status::converged);
    CHECK(std::fabs(parts.objective[i] - whole.objective[i]) <= 1e-7);
  }
  for (std::size_t j = 0; j < parts.mu.size(); ++j) {
    CHECK(std::fabs(parts.mu[j] - whole.mu[j]) <= 1e-8);
  }
  for (std::size_t q = 0; q < parts.mu_v.size(); ++q) {
    CHECK(std::fabs(parts.mu_v[q] - whole.mu_v[q]) <= 1e-8);
  }
  for (std::size_t j = 0; j < parts.var_side.size(); ++j) {
    const bool absent = parts.var_side[j] == std::int8_t(Side::absent);
    CHECK(absent == (graph.mask[j % graph.mask.size()] == 0));
  }
  test::Random random(13);
  std::vector<double> grad(parts.mu.size()), grad_v(parts.mu_v.size());
  for (double& g : grad) g = random.normal();
  for (double& g : grad_v) g = random.normal();
  const test::Gradient<double> ours = test::vjp(graph, parts, batch, grad, grad_v);
  graph.components = nullptr;
  const test::Gradient<double> theirs = test::vjp(graph, whole, batch, grad, grad_v);
  for (std::size_t j = 0; j < grad.size(); ++j) {
    CHECK(std::fabs(ours.eta_u[j] - theirs.eta_u[j]) <= 1e-8);
  }
  for (std::size_t q = 0; q < grad_v.size(); ++q) {
    CHECK(std::fabs(ours.eta_v[q] - theirs.eta_v[q]) <= 1e-8);
  }
}

// Large instances are split by their own masks, whichever threads that takes.
void test_masks_of_their_own() {
  test::current_case = "masks of their own";
  const int batch = 3;
  Options options;
  options.max_iter = 100;
  Graph<double> graph = masked_grid(96, batch);
  const std::size_t n = graph.mask.size();
  CHECK(Components::may_part(graph.problem()));
  for (int i = 1; i < batch; ++i) {
    for (std::size_t j = 0; j < n; ++j) graph.mask.push_back(i == 1 ? j % 96 % 7 != 3 : j != 50);
  }
  std::vector<Solution<double>> found;
  for (const int threads : {1, 3}) {
    set_num_threads(threads);
    found.push_back(test::solve(graph, batch, Method::compact, options));
  }
  set_num_threads(0);
  CHECK(found[0].same_as(found[1]));
  for (int i = 0; i < batch; ++i) {
    Graph<double> own = masked_grid(96, batch);
    const auto row = [i](auto& list, std::size_t size) {
      list = {list.begin() + i * size, list.begin() + (i + 1) * size};
    };
    row(own.eta_u, n);
    row(own.eta_v, own.num_pairs());
    own.mask = {graph.mask.begin() + i * n, graph.mask.begin() + (i + 1) * n};
    const Solution<double> alone = test::solve(own, 1, Method::compact, options);
    CHECK(std::memcmp(alone.mu.data(), &found[0].mu[i * n], n * sizeof(double)) == 0);
    CHECK(alone.objective[0] == found[0].objective[i]);
  }
}

void test_what_masks_leave() {
  test::current_case = "what masks leave";
  Graph<double> graph = masked_grid(40, 1);
  const Problem<double> p = graph.problem();
  const auto parts = Components::of_present(p, graph.mask.data());
  std::vector<int> written(p.num_vars, 0), rows(p.num_dual(), 0);
  for (int c = 0; c < parts->count(); ++c) {
    const Indices& vars = (*parts)[c].vars;
    for (int k = 0; k < vars.count; ++k) {
      if (k < vars.count - vars.ghosts) ++written[vars.index[k]];
      CHECK(k < vars.count - vars.ghosts || graph.mask[vars.index[k]] == 0);
    }
    for (int k = 0; k < (*parts)[c].dual.count; ++k) ++rows[(*parts)[c].dual.index[k]];
  }
  const auto once = [](int count) { return count == 1; };
  CHECK(std::all_of(written.begin(), written.end(), once));
  CHECK(std::all_of(rows.begin(), rows.end(), once));
  // Few masked ones split nothing, and a small graph is not worth it.
  std::vector<std::uint8_t> mask(graph.mask.size(), 1);
  mask[17] = mask[999] = 0;
  CHECK(Components::of_present(p, mask.data()) == nullptr);
  Graph<double> small = masked_grid(10, 1);
  CHECK(Components::of_present(small.problem(), small.mask.data()) == nullptr);
  CHECK(!Components::may_part(p) && Components::may_part(Graph<double>(10000).problem()));
}

void test_what_is_found() {
  test::current_case = "components";
  Graph<double> one = test::matching<double>(3, 3, RowKind::equality);
  CHECK(Components::of(one.problem()) == nullptr);
  Graph<double> none(5);  // all without a factor
  CHECK(Components::of(none.problem()) == nullptr);
  CHECK(Components::of(Graph<double>(0).problem()) == nullptr);
  Graph<double> nobodys(2);  // a factor without a variable
  nobodys.row({{0}, {1}}, 1.0, 1.0, RowKind::equality);
  nobodys.row({{1}, {0}}, 1.0, 1.0, RowKind::equality);
  nobodys.row({}, 1.0, 1.0, RowKind::equality);
  CHECK(Components::of(nobodys.problem())->count() == 2);
  // Many alike, of two rows each, and one that is larger: it comes first.
  Graph<double> many(1000);
  for (int j = 0; j < 900; j += 3) {
    many.row({{j}, {j + 1}, {j + 2}}, 1.0, 1.0, RowKind::equality);
    many.row({{j}, {j + 1}}, 1.0, 1.0, RowKind::inequality);
  }
  std::vector<test::Literal> rest;
  for (int j = 900; j < 990; ++j) rest.push_back({j});
  many.row(rest, 1.0, 1.0, RowKind::equality);
  many.row({{900}, {901}}, 1.0, 1.0, RowKind::inequality);
  const auto found = Components::of(many.problem());
  CHECK(found->count() == 302 && found->num_kinds() == 3);
  CHECK((*found)[0].vars.count == 90 && (*found)[0].vars.adjoin);
  int seen = 0;
  for (int k = 0; k < found->num_chunks(); ++k) {
    for (const Components::Run& run : found->chunk(k)) {
      for (int c = run.first; c < run.last; ++c) CHECK((*found)[c].kind == run.kind);
      CHECK(run.first == seen);
      seen = run.last;
    }
  }
  CHECK(seen == found->count());
  // Small ones with closed forms go together: a few are no reason to fall apart.
  for (const int count : {10, 1000}) {
    Graph<double> rows(10 * count);
    for (int r = 0; r < count; ++r) {
      std::vector<test::Literal> row;
      for (int j = 0; j < 10; ++j) row.push_back({10 * r + j});
      rows.row(row, 1.0, 1.0, RowKind::equality);
    }
    const auto groups = Components::of(rows.problem());
    CHECK((groups == nullptr) == (count == 10));
    if (groups == nullptr) continue;
    CHECK(groups->count() > 5 && groups->count() < 20 && groups->num_kinds() <= 2);
    for (int c = 0; c < groups->count(); ++c) CHECK((*groups)[c].vars.adjoin);
  }
}

}  // namespace

int main() {
  for (const Method method : {Method::compact, Method::admm, Method::proximal, Method::ad3}) {
    for (const int threads : {1, 3}) {
      test_alone<double>(method, 1, threads);
      test_alone<float>(method, 1, threads);
    }
  }
  test_alone<double>(Method::compact, 100, 2);
  test_alone<float>(Method::compact, 100, 2);
  test_infeasible();
  test_what_is_found();
  test_what_masks_leave();
  test_masks_of_their_own();
  for (const Method method : {Method::compact, Method::admm}) test_masked(method);
  return test::finish();
}
