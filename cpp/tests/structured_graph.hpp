// Graphs with structured factors, and their solutions.
#pragma once

#include <algorithm>
#include <numeric>
#include <vector>

#include "factormax/batch.hpp"
#include "graph.hpp"

namespace factormax::test {

// A graph of rows with structured factors beside them.
template <class T>
struct Model {
  Graph<T> rows;
  std::vector<std::int8_t> kind;
  std::vector<std::uint8_t> linked;
  std::vector<std::int32_t> var_ptr{0}, var, shape_ptr{0}, shape, score_ptr{0};
  std::vector<double> param;
  std::vector<std::uint8_t> isolated;
  std::vector<T> eta_v;
  int num_links = 0;

  explicit Model(int n) : rows(n) {}

  void add(OracleKind which, const std::vector<int>& vars, const std::vector<int>& sizes,
           int scores, double number = 0) {
    bool shares = false;
    for (const int j : vars) shares |= std::find(var.begin(), var.end(), j) != var.end();
    kind.push_back(static_cast<std::int8_t>(which));
    linked.push_back(shares);
    if (shares) num_links += static_cast<int>(vars.size());
    var.insert(var.end(), vars.begin(), vars.end());
    var_ptr.push_back(static_cast<std::int32_t>(var.size()));
    shape.insert(shape.end(), sizes.begin(), sizes.end());
    shape_ptr.push_back(static_cast<std::int32_t>(shape.size()));
    score_ptr.push_back(score_ptr.back() + scores);
    param.push_back(number);
  }

  Problem<T> problem() {
    Problem<T> p = rows.problem();
    isolated.assign(rows.num_blocks() + rows.num_pairs() + 1, 0);
    p.block_isolated = isolated.data();
    Structured& s = p.structured;
    s.count = static_cast<int>(kind.size());
    s.num_links = num_links;
    s.num_scores = score_ptr.back();
    s.kind = kind.data();
    s.linked = linked.data();
    s.var_ptr = var_ptr.data();
    s.var = var.data();
    s.shape_ptr = shape_ptr.data();
    s.shape = shape.data();
    s.score_ptr = score_ptr.data();
    s.param = {param.data(), 0};
    p.eta_v = {eta_v.data(), p.num_scores()};
    return p;
  }

  void scores(Random& random, int batch, double scale) {
    rows.eta_u.resize(static_cast<std::size_t>(batch) * rows.n);
    eta_v.resize(static_cast<std::size_t>(batch) * (rows.num_pairs() + score_ptr.back()));
    for (T& s : rows.eta_u) s = static_cast<T>(scale * random.normal());
    for (T& s : eta_v) s = static_cast<T>(scale * random.normal());
  }
};

template <class T>
struct Answer : BatchOutputs<T> {
  FoundStructures found;

  Answer(const Problem<T>& p, int batch, Method method, const Options& options)
      : BatchOutputs<T>(p, batch) {
    Control control;
    solve_batch<T>(p, batch, method, options, {}, this->outputs(), found, control);
  }
};

inline std::vector<int> range(int begin, int end) {
  std::vector<int> all(end - begin);
  std::iota(all.begin(), all.end(), begin);
  return all;
}

}  // namespace factormax::test
