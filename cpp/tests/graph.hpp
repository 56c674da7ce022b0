// Graphs for the tests, the way the Python side compiles them, and the buffers of their solutions.
#pragma once

#include <algorithm>
#include <cstring>
#include <limits>
#include <vector>

#include "check.hpp"
#include "factormax/batch.hpp"

namespace factormax::test {

struct Literal {
  int var;
  bool negated = false;
};

// The index arrays of a graph. With an instance dimension in front of col, coef, rhs, kind, mask,
// eta_u or eta_v, that array is one for each instance; without, all instances share it.
template <class T>
struct Graph {
  int n = 0;
  std::vector<std::int32_t> row_ptr{0}, block_ptr{0}, pair_var;
  std::vector<std::int8_t> block_kind;
  std::vector<std::uint8_t> pair_negated;

  std::vector<std::int32_t> col;
  std::vector<T> coef, rhs;
  std::vector<std::int8_t> kind;
  std::vector<std::uint8_t> mask;
  std::vector<T> eta_u, eta_v;
  std::vector<std::uint8_t> isolated;  // filled by `problem`

  explicit Graph(int num_vars) : n(num_vars) {}

  int num_rows() const { return static_cast<int>(row_ptr.size()) - 1; }
  int num_entries() const { return row_ptr.back(); }
  int num_pairs() const { return static_cast<int>(pair_var.size()) / 2; }
  int num_blocks() const { return static_cast<int>(block_kind.size()); }
  int num_dual() const { return num_rows() + num_pairs(); }

  // sum_k weight_k l_k (= or <=) bound
  void row(const std::vector<Literal>& literals, const std::vector<T>& weights, T bound,
           RowKind row_kind) {
    T b = bound;
    for (std::size_t k = 0; k < literals.size(); ++k) {
      b -= literals[k].negated ? weights[k] : T(0);
      col.push_back(literals[k].var);
      coef.push_back(literals[k].negated ? -weights[k] : weights[k]);
    }
    end_row(b, row_kind);
    end_block(BlockKind::row);
  }
  void row(const std::vector<Literal>& literals, T weight, T bound, RowKind row_kind) {
    row(literals, std::vector<T>(literals.size(), weight), bound, row_kind);
  }

  // The last literal is the or of the others. Those that `present` leaves out have no row, and the
  // output is the last one present.
  void or_out(const std::vector<Literal>& literals, const std::vector<std::uint8_t>& present = {}) {
    const int d = static_cast<int>(literals.size());
    const auto here = [&](int k) { return present.empty() || present[literals[k].var] != 0; };
    const auto sign = [&](int k) { return T(literals[k].negated ? -1 : 1); };
    const auto offset = [&](int k) { return T(literals[k].negated ? 1 : 0); };
    int out = d - 1;
    while (out > 0 && !here(out)) --out;
    T inputs = 0;
    for (int k = 0; k + 1 < d; ++k) {
      col.insert(col.end(), {literals[k].var, literals[out].var});
      coef.insert(coef.end(), {sign(k), -sign(out)});
      const bool given = here(k) && k != out;
      end_row(offset(out) - offset(k), given ? RowKind::inequality : RowKind::absent);
    }
    for (int k = 0; k < d; ++k) {
      if (here(k) && k != out) inputs += offset(k);
      col.push_back(literals[k].var);
      coef.push_back(here(k) ? (k == out ? sign(k) : -sign(k)) : T(0));
    }
    end_row(inputs - offset(out), here(out) ? RowKind::inequality : RowKind::absent);
    end_block(BlockKind::or_out);
  }

  void pair(Literal a, Literal b) {
    pair_var.insert(pair_var.end(), {a.var, b.var});
    pair_negated.insert(pair_negated.end(), {std::uint8_t(a.negated), std::uint8_t(b.negated)});
  }

  Problem<T> problem() {
    find_isolated();
    Problem<T> p;
    p.num_vars = n;
    p.num_rows = num_rows();
    p.num_entries = num_entries();
    p.num_pairs = num_pairs();
    p.num_blocks = num_blocks();
    p.row_ptr = row_ptr.data();
    p.col = batched(col, num_entries());
    p.coef = batched(coef, num_entries());
    p.rhs = batched(rhs, num_rows());
    p.kind = batched(kind, num_rows());
    p.pair_var = pair_var.data();
    p.pair_negated = pair_negated.data();
    p.block_ptr = block_ptr.data();
    p.block_kind = block_kind.data();
    p.block_isolated = isolated.data();
    if (!mask.empty()) p.mask = batched(mask, n);
    p.eta_u = batched(eta_u, n);
    p.eta_v = batched(eta_v, num_pairs());
    return p;
  }

  void normal_scores(Random& random, int batch, double scale) {
    eta_u.resize(static_cast<std::size_t>(batch) * n);
    eta_v.resize(static_cast<std::size_t>(batch) * num_pairs());
    for (T& s : eta_u) s = static_cast<T>(scale * random.normal());
    for (T& s : eta_v) s = static_cast<T>(scale * random.normal());
  }

 private:
  template <class U>
  static Batched<const U> batched(const std::vector<U>& values, int columns) {
    const bool shared = static_cast<int>(values.size()) == columns;
    return {values.data(), shared ? 0 : columns};
  }

  void end_row(T bound, RowKind row_kind) {
    row_ptr.push_back(static_cast<std::int32_t>(col.size()));
    rhs.push_back(bound);
    kind.push_back(static_cast<std::int8_t>(row_kind));
  }
  void end_block(BlockKind block) {
    block_ptr.push_back(num_rows());
    block_kind.push_back(static_cast<std::int8_t>(block));
  }

  // Blocks and pairs none of whose variables is in another.
  void find_isolated() {
    std::vector<std::vector<int>> members;
    for (int f = 0; f < num_blocks(); ++f) {
      const int last = block_ptr[f + 1] - 1;  // the last row of a block names all its variables
      members.emplace_back(col.begin() + row_ptr[last], col.begin() + row_ptr[last + 1]);
    }
    for (int q = 0; q < num_pairs(); ++q) members.push_back({pair_var[2 * q], pair_var[2 * q + 1]});
    std::vector<int> degree(n, 0);
    for (const auto& vars : members) {
      for (const int j : vars) ++degree[j];
    }
    isolated.clear();
    for (const auto& vars : members) {
      isolated.push_back(
          std::all_of(vars.begin(), vars.end(), [&](int j) { return degree[j] == 1; }));
    }
  }
};

// One graph whose instances are the given ones: same topology, each with its own numbers.
template <class T>
Graph<T> stack(const std::vector<Graph<T>>& graphs) {
  Graph<T> all = graphs[0];
  const auto append = [](auto& to, const auto& from) {
    to.insert(to.end(), from.begin(), from.end());
  };
  for (std::size_t i = 1; i < graphs.size(); ++i) {
    append(all.col, graphs[i].col);
    append(all.coef, graphs[i].coef);
    append(all.rhs, graphs[i].rhs);
    append(all.kind, graphs[i].kind);
    append(all.mask, graphs[i].mask);
    append(all.eta_u, graphs[i].eta_u);
    append(all.eta_v, graphs[i].eta_v);
  }
  return all;
}

// The rows and columns of a rows x columns grid sum to 1, or to at most 1.
template <class T>
Graph<T> matching(int rows, int columns, RowKind kind) {
  Graph<T> graph(rows * columns);
  for (int i = 0; i < rows; ++i) {
    std::vector<Literal> line;
    for (int k = 0; k < columns; ++k) line.push_back({i * columns + k});
    graph.row(line, T(1), T(1), kind);
  }
  for (int k = 0; k < columns; ++k) {
    std::vector<Literal> line;
    for (int i = 0; i < rows; ++i) line.push_back({i * columns + k});
    graph.row(line, T(1), T(1), kind);
  }
  return graph;
}

// The buffers of a solution, poisoned.
template <class T>
struct Solution {
  int batch, n, pairs, dual;
  std::vector<T> mu, mu_v, tau;
  std::vector<std::int8_t> var_side, row_side;
  std::vector<double> objective, primal_residual, dual_residual;
  std::vector<std::int32_t> iterations, status;

  Solution(const Graph<T>& graph, int batch_size, T poison = std::numeric_limits<T>::quiet_NaN())
      : batch(batch_size),
        n(graph.n),
        pairs(graph.num_pairs()),
        dual(graph.num_dual()),
        mu(size(n), poison),
        mu_v(size(pairs), poison),
        tau(size(dual), poison),
        var_side(size(n), 77),
        row_side(size(dual), 77),
        objective(batch, poison),
        primal_residual(batch, poison),
        dual_residual(batch, poison),
        iterations(batch, -77),
        status(batch, -77) {}

  Outputs<T> outputs() {
    return {{mu.data(), n},         {mu_v.data(), pairs},    {tau.data(), dual},
            {var_side.data(), n},   {row_side.data(), dual}, objective.data(),
            primal_residual.data(), dual_residual.data(),    iterations.data(),
            status.data()};
  }

  Status status_of(int i) const { return static_cast<Status>(status[i]); }

  // Bit for bit, so that NaN equals NaN.
  bool same_as(const Solution& other) const {
    const auto same = [](const auto& a, const auto& b) {
      return a.size() == b.size() &&
             (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof a[0]) == 0);
    };
    return same(mu, other.mu) && same(mu_v, other.mu_v) && same(tau, other.tau) &&
           same(var_side, other.var_side) && same(row_side, other.row_side) &&
           same(objective, other.objective) && same(primal_residual, other.primal_residual) &&
           same(dual_residual, other.dual_residual) && same(iterations, other.iterations) &&
           same(status, other.status);
  }

 private:
  std::size_t size(int columns) const { return static_cast<std::size_t>(batch) * columns; }
};

template <class T>
void solve_into(Graph<T>& graph, Method method, const Options& options, Solution<T>& out,
                Batched<const T> warm = {}) {
  Control control;
  const Outputs<T> outputs = out.outputs();
  solve_batch<T>(graph.problem(), out.batch, method, options, warm, outputs, control);
}

template <class T>
Solution<T> solve(Graph<T>& graph, int batch, Method method, const Options& options) {
  Solution<T> out(graph, batch);
  solve_into(graph, method, options, out);
  return out;
}

// The gradients of a batch, poisoned as well.
template <class T>
struct Gradient {
  std::vector<T> eta_u, eta_v;
  std::vector<double> residual;
};

// grad_mu: (batch, n), grad_mu_v: (batch, P). The solution is of as many instances, or of one.
template <class T>
Gradient<T> vjp(Graph<T>& graph, const Solution<T>& at, int batch, const std::vector<T>& grad_mu,
                const std::vector<T>& grad_mu_v) {
  const T nan = std::numeric_limits<T>::quiet_NaN();
  Gradient<T> out{std::vector<T>(static_cast<std::size_t>(batch) * at.n, nan),
                  std::vector<T>(static_cast<std::size_t>(batch) * at.pairs, nan),
                  std::vector<double>(batch, nan)};
  const bool shared = at.batch == 1;
  const std::vector<std::int32_t> status(batch, at.status[0]);
  BatchGradients<T> grads;
  grads.grad_mu = {grad_mu.data(), at.n};
  grads.grad_mu_v = {grad_mu_v.data(), at.pairs};
  grads.var_side = {at.var_side.data(), shared ? 0 : at.n};
  grads.row_side = {at.row_side.data(), shared ? 0 : at.dual};
  grads.status = shared ? status.data() : at.status.data();
  grads.grad_eta_u = {out.eta_u.data(), at.n};
  grads.grad_eta_v = {out.eta_v.data(), at.pairs};
  grads.residual = out.residual.data();
  Control control;
  vjp_batch<T>(graph.problem(), batch, grads, control);
  return out;
}

}  // namespace factormax::test
