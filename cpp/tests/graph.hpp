// Graphs for the tests, the way the Python side compiles them.
#pragma once

#include <algorithm>
#include <memory>
#include <vector>

#include "check.hpp"
#include "factormax/components.hpp"
#include "factormax/problem.hpp"

namespace factormax::test {

struct Literal {
  int var;
  bool negated = false;
};

// The index arrays of a graph. Where coef, rhs, mask, eta_u or eta_v has an instance dimension in
// front, there is one array per instance; without, all instances share it.
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
  std::shared_ptr<const Components> components;

  explicit Graph(int num_vars) : n(num_vars) {}

  int num_rows() const { return static_cast<int>(row_ptr.size()) - 1; }
  int num_entries() const { return row_ptr.back(); }
  int num_pairs() const { return static_cast<int>(pair_var.size()) / 2; }
  int num_blocks() const { return static_cast<int>(block_kind.size()); }
  int num_dual() const { return num_rows() + num_pairs(); }

  // From now on the graph is solved component by component.
  void split() { components = Components::of(problem()); }

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

  // lower <= sum_k weight_k l_k <= upper
  void band(const std::vector<Literal>& literals, const std::vector<T>& weights, T lower, T upper) {
    for (const T sign : {T(-1), T(1)}) {
      T b = sign < 0 ? -lower : upper;
      for (std::size_t k = 0; k < literals.size(); ++k) {
        b -= literals[k].negated ? sign * weights[k] : T(0);
        col.push_back(literals[k].var);
        coef.push_back(literals[k].negated ? -sign * weights[k] : sign * weights[k]);
      }
      end_row(b, RowKind::inequality);
    }
    end_block(BlockKind::band);
  }

  // The last literal is the or of the others.
  void or_out(const std::vector<Literal>& literals) {
    const Literal out = literals.back();
    const auto sign = [](Literal l) { return T(l.negated ? -1 : 1); };
    const auto offset = [](Literal l) { return T(l.negated ? 1 : 0); };
    T inputs = 0;
    for (std::size_t k = 0; k + 1 < literals.size(); ++k) {
      col.insert(col.end(), {literals[k].var, out.var});
      coef.insert(coef.end(), {sign(literals[k]), -sign(out)});
      end_row(offset(out) - offset(literals[k]), RowKind::inequality);
      inputs += offset(literals[k]);
    }
    for (const Literal& l : literals) {
      col.push_back(l.var);
      coef.push_back(l.var == out.var ? sign(l) : -sign(l));
    }
    end_row(inputs - offset(out), RowKind::inequality);
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
    p.num_blocks = p.num_factors = num_blocks();
    p.row_ptr = row_ptr.data();
    p.col = col.data();
    p.kind = kind.data();
    p.coef = batched(coef, num_entries());
    p.rhs = batched(rhs, num_rows());
    p.pair_var = pair_var.data();
    p.pair_negated = pair_negated.data();
    p.block_ptr = block_ptr.data();
    p.block_kind = block_kind.data();
    p.block_isolated = isolated.data();
    p.components = components.get();
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
    append(all.coef, graphs[i].coef);
    append(all.rhs, graphs[i].rhs);
    append(all.mask, graphs[i].mask);
    append(all.eta_u, graphs[i].eta_u);
    append(all.eta_v, graphs[i].eta_v);
  }
  return all;
}

// The rows and columns of a rows x columns grid sum to 1, to at most 1, or, with a negative weight,
// to at least 1.
template <class T>
Graph<T> matching(int rows, int columns, RowKind kind, T weight = 1) {
  Graph<T> graph(rows * columns);
  for (int i = 0; i < rows; ++i) {
    std::vector<Literal> line;
    for (int k = 0; k < columns; ++k) line.push_back({i * columns + k});
    graph.row(line, weight, weight, kind);
  }
  for (int k = 0; k < columns; ++k) {
    std::vector<Literal> line;
    for (int i = 0; i < rows; ++i) line.push_back({i * columns + k});
    graph.row(line, weight, weight, kind);
  }
  return graph;
}

// Random factors that a hidden assignment meets, in which masked variables are off. Which factors,
// and over which variables, depends on the seed alone; their numbers depend on the mask, too.
template <class T>
Graph<T> logic(std::uint64_t seed, int n, int factors, const std::vector<std::uint8_t>& mask = {}) {
  Random random(seed);
  Graph<T> graph(n);
  std::vector<int> order(n), truth(n);
  for (int j = 0; j < n; ++j) {
    order[j] = j;
    truth[j] = random.flip();
    if (!mask.empty() && mask[j] == 0) truth[j] = 0;
  }
  for (int f = 0; f < factors; ++f) {
    const int d = random.integer(2, std::min(6, n)), kind = random.integer(0, 3);
    const bool weighted = random.integer(0, 3) == 0;
    std::vector<Literal> literals;
    std::vector<T> weights;
    int on = 0;
    T load = 0, total = 0;
    bool last_on = false;
    for (int k = 0; k < d; ++k) {
      std::swap(order[k], order[random.integer(k, n - 1)]);
      const bool negated = random.integer(0, 3) == 0;
      const int weight = random.integer(1, 4), j = order[k];
      literals.push_back({j, negated});
      weights.push_back(weighted ? T(weight) : T(1));
      last_on = (truth[j] != 0) != negated;
      on += last_on;
      load += last_on ? weights[k] : T(0);
      total += weights[k];
    }
    if (kind == 0) {  // Xor, Exactly
      graph.row(literals, weights, load, RowKind::equality);
    } else if (kind == 1) {  // AtMostOne, Budget, Knapsack
      graph.row(literals, weights, std::max(load, std::floor(total / 2)), RowKind::inequality);
    } else if (kind == 2) {  // Or
      for (T& weight : weights) weight = -weight;
      graph.row(literals, weights, -std::min(load, T(1)), RowKind::inequality);
    } else {
      const bool any = on > static_cast<int>(last_on);
      if (any != last_on) literals.back().negated = !literals.back().negated;
      graph.or_out(literals);
    }
  }
  return graph;
}

template <class T>
Graph<T> random_pairs(Random& random, int n, int pairs) {
  Graph<T> graph(n);
  for (int q = 0; q < pairs; ++q) {
    const int a = random.integer(0, n - 1);
    const int b = (a + random.integer(1, n - 1)) % n;
    graph.pair({a, random.integer(0, 3) == 0}, {b, random.integer(0, 3) == 0});
  }
  return graph;
}

}  // namespace factormax::test
