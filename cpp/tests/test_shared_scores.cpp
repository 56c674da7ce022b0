// Factor scores that a batch shares in part, divided per instance or not: the same answers as if
// every instance had all of them, and the same gradients, summed.
#include <string>

#include "factormax/parallel.hpp"
#include "solution.hpp"

namespace {

using namespace factormax;
using test::Graph;
using test::Random;
using test::Solution;

constexpr int kBatches[] = {1, 3, 33, 70};

// The scores of a graph's pairs in both forms.
template <class T>
struct Scores {
  std::vector<ScoreRun> runs;
  std::vector<T> shared, own;
  std::vector<double> heat;
  int num_own = 0;

  // From (B, P) in the graph, which is made to repeat what is shared.
  Scores(Graph<T>& graph, int batch, bool heated, Random& random) {
    const int pairs = graph.num_pairs();
    int columns[2] = {0, 0};
    for (int begin = 0; begin < pairs;) {
      const int count = std::min(pairs - begin, random.integer(1, 5));
      const bool is_shared = random.flip();
      runs.push_back({begin, count, columns[is_shared], is_shared});
      columns[is_shared] += count;
      begin += count;
    }
    num_own = columns[0];
    shared.resize(columns[1]);
    own.resize(std::size_t(batch) * num_own);
    for (const ScoreRun& run : runs) {
      for (int k = 0; k < run.count; ++k) {
        for (int i = 0; i < batch; ++i) {
          T& score = graph.eta_v[std::size_t(i) * pairs + run.begin + k];
          if (!run.shared) {
            own[std::size_t(i) * num_own + run.column + k] = score;
          } else if (i == 0) {
            shared[run.column + k] = score;
          } else {
            score = shared[run.column + k];
          }
        }
      }
    }
    if (heated) divide(graph, batch, random);
  }

  Span<const ScoreRun> all() const { return {runs.data(), static_cast<int>(runs.size())}; }

  Problem<T> problem(Graph<T>& graph) const {
    Problem<T> p = graph.problem();
    p.eta_v = {};
    p.mixed = {all(), shared.data(), {own.data(), num_own}, {}};
    if (!heat.empty()) p.mixed.heat = {heat.data(), 1};
    return p;
  }

 private:
  // What the graph repeats, by a number per instance.
  void divide(Graph<T>& graph, int batch, Random& random) {
    const std::size_t pairs = graph.num_pairs();
    for (int i = 0; i < batch; ++i) {
      heat.push_back(0.5 + random.uniform());
      for (const ScoreRun& run : runs) {
        for (int k = run.begin; run.shared && k < run.begin + run.count; ++k) {
          T& score = graph.eta_v[i * pairs + k];
          score = static_cast<T>(score / heat[i]);
        }
      }
    }
  }
};

// Parts that share no variable, so that the graph may be split: rows, and pairs of all signs.
template <class T>
Graph<T> some_graph(Random& random, int batch, bool masked) {
  const int parts = random.integer(1, 4), size = 6;
  Graph<T> graph(parts * size);
  for (int part = 0; part < parts; ++part) {
    const auto any = [&] { return test::Literal{part * size + random.integer(0, size - 1)}; };
    graph.row({{part * size}, {part * size + 1}, {part * size + 2}}, T(1), T(1),
              RowKind::inequality);
    for (int q = 0; q < 2 * size; ++q) {
      const test::Literal first = any();
      test::Literal second = any();
      while (second.var == first.var) second = any();
      second.negated = random.flip();
      graph.pair(first, second);
    }
  }
  graph.normal_scores(random, batch, 1.0);
  if (masked) {
    graph.mask.resize(graph.eta_u.size());
    for (std::uint8_t& here : graph.mask) here = random.uniform() < 0.8;
  }
  return graph;
}

// What the core sums: block by block, then the blocks.
template <class T>
std::vector<T> summed(const Scores<T>& scores, const std::vector<T>& grad, int batch, int size) {
  const std::size_t pairs = grad.size() / batch;
  std::vector<T> total(scores.shared.size(), T(0));
  for (int first = 0; first < batch; first += size) {
    std::vector<T> block(total.size(), T(0));
    for (int i = first; i < std::min(first + size, batch); ++i) {
      for (const ScoreRun& run : scores.runs) {
        for (int k = 0; run.shared && k < run.count; ++k) {
          block[run.column + k] += grad[i * pairs + run.begin + k];
        }
      }
    }
    for (std::size_t c = 0; c < total.size(); ++c) total[c] += block[c];
  }
  return total;
}

template <class T>
void check_gradient(Graph<T>& graph, const Scores<T>& scores, const Solution<T>& at,
                    Random& random) {
  const int batch = at.batch, pairs = at.pairs;
  std::vector<T> grad_mu(at.mu.size()), grad_mu_v(at.mu_v.size());
  for (auto* grad : {&grad_mu, &grad_mu_v}) {
    for (T& g : *grad) g = static_cast<T>(random.normal());
  }
  const auto full = test::vjp(graph, at, batch, grad_mu, grad_mu_v);
  const std::size_t shared = scores.shared.size();
  std::vector<T> grad_u(grad_mu.size()), own(scores.own.size());
  std::vector<double> residual(batch);
  BatchGradients<T> grads;
  grads.grad_mu = {grad_mu.data(), at.n};
  grads.grad_mu_v = {grad_mu_v.data(), pairs};
  grads.var_side = {at.var_side.data(), at.n};
  grads.row_side = {at.row_side.data(), at.dual};
  grads.status = at.status.data();
  grads.grad_eta_u = {grad_u.data(), at.n};
  grads.summed.runs = scores.all();
  grads.summed.block = random.integer(1, 1 + batch / 4);
  std::vector<T> sums(std::size_t(grads.summed.num_blocks(batch)) * shared, T(77));
  grads.summed.sums = {sums.data(), static_cast<std::int64_t>(shared)};
  grads.summed.own = {own.data(), scores.num_own};
  grads.residual = residual.data();
  Control control;
  vjp_batch<T>(scores.problem(graph), batch, grads, control);
  CHECK(grad_u == full.eta_u);
  sums.resize(shared);
  CHECK(sums == summed(scores, full.eta_v, batch, static_cast<int>(grads.summed.block)));
  for (const ScoreRun& run : scores.runs) {
    for (int i = 0; i < batch && !run.shared; ++i) {
      const T* from = full.eta_v.data() + std::size_t(i) * pairs + run.begin;
      CHECK(std::equal(from, from + run.count,
                       own.data() + std::size_t(i) * scores.num_own + run.column));
    }
  }
}

template <class T>
void check_case(std::uint64_t seed, int batch, bool split, bool masked, bool heated, int threads) {
  test::current_case = "seed " + std::to_string(seed) + ", batch " + std::to_string(batch);
  Random random(seed);
  Graph<T> graph = some_graph<T>(random, batch, masked);
  const Scores<T> scores(graph, batch, heated, random);
  if (split) graph.split();
  for (const Method method : {Method::proximal, Method::admm, Method::compact}) {
    set_num_threads(1);
    const Solution<T> expected = test::solve(graph, batch, method, Options());
    set_num_threads(threads);
    Solution<T> found(graph, batch);
    Control control;
    FoundStructures structures;
    solve_batch<T>(scores.problem(graph), batch, method, Options(), {}, found.outputs(), structures,
                   control);
    CHECK(found.same_as(expected));
    if (method == Method::compact) check_gradient(graph, scores, found, random);
  }
}

}  // namespace

int main(int argc, char** argv) {
  const std::uint64_t seed = test::seed_from(argc, argv);
  CHECK(ScoreSums<double>::block_size(0, 5) == 1 && ScoreSums<double>::block_size(9999, 0) == 1);
  CHECK(ScoreSums<double>::block_size(1024, 64) == 1);      // few numbers per block
  CHECK(ScoreSums<double>::block_size(1024, 12561) == 16);  // many: 64 blocks
  for (int trial = 0; trial < test::times(32); ++trial) {
    const int batch = kBatches[trial % 4], threads = 1 + trial % 3;
    const bool split = trial / 4 % 2 == 1, masked = trial / 8 % 2 == 1;
    const bool heated = trial / 16 % 2 == 1;
    check_case<double>(seed + trial, batch, split, masked, heated, threads);
    check_case<float>(seed + trial, batch, split, masked, heated, threads);
  }
  set_num_threads(0);
  return test::finish();
}
