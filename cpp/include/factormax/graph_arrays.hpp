// A factor graph as index arrays, grown factor by factor, in the form that `Problem` points into.
// It trusts what it is given: `FactorGraph` in builder.hpp checks.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "factormax/problem.hpp"

namespace factormax {

// A binary variable, or its negation.
struct Literal {
  int var = 0;
  bool negated = false;

  Literal operator~() const { return {var, !negated}; }
};

template <class T>
struct GraphArrays {
  std::vector<std::int32_t> row_ptr{0}, col, block_ptr{0}, pair_var;
  std::vector<T> coef, rhs;
  std::vector<std::int8_t> kind, block_kind;
  std::vector<std::uint8_t> pair_negated;
  std::vector<std::int8_t> oracle_kind;
  std::vector<std::uint8_t> linked;
  std::vector<std::int32_t> var_ptr{0}, var, shape_ptr{0}, shape, score_ptr{0};
  std::vector<double> param;
  std::vector<std::int32_t> degree;         // (n,) how many factors a variable is in
  std::vector<std::uint8_t> in_structured;  // (n,) whether one of them has an oracle
  int num_links = 0;

  int num_vars() const { return static_cast<int>(degree.size()); }
  int num_pairs() const { return static_cast<int>(pair_var.size()) / 2; }
  int num_scores() const { return num_pairs() + score_ptr.back(); }

  void resize(std::size_t num_vars) {
    degree.resize(num_vars);
    in_structured.resize(num_vars);
  }

  // sum of coefs_k u_k (= or <=) bound. Rows up to the next `end_block` are one factor.
  void row(const std::vector<Literal>& u, const std::vector<T>& coefs, T bound, RowKind row_kind) {
    for (std::size_t k = 0; k < u.size(); ++k) {
      if (u[k].negated) bound -= coefs[k];
      col.push_back(u[k].var);
      coef.push_back(u[k].negated ? -coefs[k] : coefs[k]);
    }
    row_ptr.push_back(static_cast<std::int32_t>(col.size()));
    rhs.push_back(bound);
    kind.push_back(static_cast<std::int8_t>(row_kind));
  }
  void end_block(BlockKind block, const std::vector<Literal>& u) {
    block_ptr.push_back(static_cast<std::int32_t>(rhs.size()));
    block_kind.push_back(static_cast<std::int8_t>(block));
    for (const Literal l : u) ++degree[l.var];
  }

  void pair(Literal a, Literal b) {
    for (const Literal l : {a, b}) {
      pair_var.push_back(l.var);
      pair_negated.push_back(l.negated);
      ++degree[l.var];
    }
  }

  // sizes: see OracleKind. The first structured factor of its variables is a hub; one that shares
  // some of them with an earlier one is linked.
  void structured(OracleKind which, const std::vector<Literal>& u,
                  const std::vector<std::int32_t>& sizes, int scores) {
    bool shares = false;
    for (const Literal l : u) {
      shares |= in_structured[l.var] != 0;
      in_structured[l.var] = 1;
      ++degree[l.var];
      var.push_back(l.var);
    }
    num_links += shares ? static_cast<int>(u.size()) : 0;
    oracle_kind.push_back(static_cast<std::int8_t>(which));
    linked.push_back(shares);
    var_ptr.push_back(static_cast<std::int32_t>(var.size()));
    shape.insert(shape.end(), sizes.begin(), sizes.end());
    shape_ptr.push_back(static_cast<std::int32_t>(shape.size()));
    score_ptr.push_back(score_ptr.back() + scores);
    param.push_back(0);
  }

  // Blocks, then pairs, none of whose variables is in another factor.
  std::vector<std::uint8_t> isolated() const {
    std::vector<std::uint8_t> alone;
    const auto only_here = [&](std::int32_t j) { return degree[j] == 1; };
    for (std::size_t f = 0; f < block_kind.size(); ++f) {
      const auto begin = col.begin() + row_ptr[block_ptr[f]];
      alone.push_back(std::all_of(begin, col.begin() + row_ptr[block_ptr[f + 1]], only_here));
    }
    for (auto q = pair_var.begin(); q != pair_var.end(); q += 2) {
      alone.push_back(std::all_of(q, q + 2, only_here));
    }
    return alone;
  }

  // Without scores, and without `block_isolated`.
  Problem<T> problem() const {
    Problem<T> p;
    p.num_vars = num_vars();
    p.num_rows = static_cast<int>(rhs.size());
    p.num_entries = static_cast<int>(col.size());
    p.num_pairs = num_pairs();
    p.num_blocks = p.num_factors = static_cast<int>(block_kind.size());
    p.row_ptr = row_ptr.data();
    p.col = col.data();
    p.kind = kind.data();
    p.coef = {coef.data(), 0};
    p.rhs = {rhs.data(), 0};
    p.pair_var = pair_var.data();
    p.pair_negated = pair_negated.data();
    p.block_ptr = block_ptr.data();
    p.block_kind = block_kind.data();
    Structured& s = p.structured;
    s.count = static_cast<int>(oracle_kind.size());
    s.num_links = num_links;
    s.num_scores = score_ptr.back();
    s.kind = oracle_kind.data();
    s.linked = linked.data();
    s.var_ptr = var_ptr.data();
    s.var = var.data();
    s.shape_ptr = shape_ptr.data();
    s.shape = shape.data();
    s.score_ptr = score_ptr.data();
    s.param = {param.data(), 0};
    return p;
  }
};

}  // namespace factormax
