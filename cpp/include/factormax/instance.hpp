// One instance of a batch, as the solvers see it: rows with one bounded multiplier each, over the
// variables that are present. Masked variables and absent rows are gone from here on.
#pragma once

#include <cmath>
#include <limits>

#include "factormax/problem.hpp"
#include "factormax/vector_ops.hpp"

namespace factormax {

struct Block {
  BlockKind kind;
  std::int32_t first;  // row
  std::int32_t count;
  std::int32_t source;  // block, or num_blocks + pair, of the Problem
};

template <class T>
struct Instance {
  int n = 0;           // variables present
  int m = 0;           // rows present
  int hard = 0;        // the first `hard` rows are constraints, the others are soft (pairs)
  int num_blocks = 0;  // factors present
  bool consistent = true;  // false: a row without variables can't hold

  Span<std::int32_t> ptr;   // (m + 1,)
  Span<std::int32_t> col;   // variable of an entry
  Span<T> coef;
  Span<T> rhs;
  Span<T> lo, hi;           // bounds of the scaled multiplier x = ||a|| tau
  Span<T> scale;            // 1 / ||a||
  Span<T> eta;              // scores, with the linear part of the pairs
  Span<T> pair_shift;       // (m - hard,) the linear part that soft row added to its second variable
  Span<std::int32_t> var;   // variable of the Problem
  Span<std::int32_t> row;   // row of the Problem (R + p for pair p)
  Span<Block> block;

  Span<std::int32_t> new_var;  // inverse of `var`, -1 where masked

  void allocate(const Problem<T>& p, Workspace& ws) {
    const int rows = p.num_dual();
    const int entries = p.num_entries + 2 * p.num_pairs;
    ptr = ws.take<std::int32_t>(rows + 1);
    col = ws.take<std::int32_t>(entries);
    coef = ws.take<T>(entries);
    rhs = ws.take<T>(rows);
    lo = ws.take<T>(rows);
    hi = ws.take<T>(rows);
    scale = ws.take<T>(rows);
    eta = ws.take<T>(p.num_vars);
    pair_shift = ws.take<T>(p.num_pairs);
    var = ws.take<std::int32_t>(p.num_vars);
    row = ws.take<std::int32_t>(rows);
    block = ws.take<Block>(p.num_blocks + p.num_pairs);
    new_var = ws.take<std::int32_t>(p.num_vars);
  }

  int length(int r) const { return ptr[r + 1] - ptr[r]; }
  bool is_soft(int r) const { return r >= hard; }

  void prepare(const Problem<T>& p, std::int64_t i) {
    keep_variables(p.mask.at(i), p.eta_u.at(i), p.num_vars);
    m = 0;
    num_blocks = 0;
    consistent = true;
    ptr[0] = 0;
    add_hard_rows(p, i);
    hard = m;
    add_pairs(p, i);
  }

 private:
  void keep_variables(const std::uint8_t* mask, const T* eta_u, int num_vars) {
    n = 0;
    for (int j = 0; j < num_vars; ++j) {
      const bool present =
          (mask == nullptr || mask[j] != 0) && eta_u[j] != -std::numeric_limits<T>::infinity();
      new_var[j] = present ? n : -1;
      if (present) {
        var[n] = j;
        eta[n] = eta_u[j];
        ++n;
      }
    }
  }

  void add_hard_rows(const Problem<T>& p, std::int64_t i) {
    const T inf = std::numeric_limits<T>::infinity();
    const std::int32_t* p_col = p.col.at(i);
    const T* p_coef = p.coef.at(i);
    const T* p_rhs = p.rhs.at(i);
    const std::int8_t* p_kind = p.kind.at(i);
    for (int f = 0; f < p.num_blocks; ++f) {
      const int first = m;
      for (int r = p.block_ptr[f]; r < p.block_ptr[f + 1]; ++r) {
        if (p_kind[r] == static_cast<std::int8_t>(RowKind::absent)) continue;
        const bool equality = p_kind[r] == static_cast<std::int8_t>(RowKind::equality);
        int e = ptr[m];
        T squares = 0;
        for (int k = p.row_ptr[r]; k < p.row_ptr[r + 1]; ++k) {
          const std::int32_t j = new_var[p_col[k]];
          if (j < 0 || p_coef[k] == 0) continue;
          col[e] = j;
          coef[e] = p_coef[k];
          squares += p_coef[k] * p_coef[k];
          ++e;
        }
        if (e == ptr[m]) {  // 0 <= b, or 0 = b
          if (equality ? p_rhs[r] != 0 : p_rhs[r] < 0) consistent = false;
          continue;
        }
        rhs[m] = p_rhs[r];
        lo[m] = equality ? -inf : T(0);
        hi[m] = inf;
        scale[m] = 1 / std::sqrt(squares);
        row[m] = r;
        ptr[++m] = e;
      }
      if (m > first) {
        block[num_blocks++] = {static_cast<BlockKind>(p.block_kind[f]), first, m - first, f};
      }
    }
  }

  // s * min(l1, l2) = s l2 - s max(0, l2 - l1) for s >= 0, and s * max(0, l1 + l2 - 1) otherwise:
  // a linear term and a row whose violation costs |s|, docs/math.md (soft rows).
  void add_pairs(const Problem<T>& p, std::int64_t i) {
    const T* s = p.eta_v.at(i);
    for (int q = 0; q < p.num_pairs; ++q) {
      const std::int32_t j1 = new_var[p.pair_var[2 * q]], j2 = new_var[p.pair_var[2 * q + 1]];
      if (j1 < 0 || j2 < 0) continue;
      // literal l = offset + sign * mu
      const T n1 = p.pair_negated[2 * q], n2 = p.pair_negated[2 * q + 1];
      const T sign1 = 1 - 2 * n1, sign2 = 1 - 2 * n2;
      const int e = ptr[m];
      col[e] = j1;
      col[e + 1] = j2;
      const bool attractive = s[q] >= 0;
      coef[e] = attractive ? -sign1 : sign1;
      coef[e + 1] = sign2;
      rhs[m] = attractive ? n1 - n2 : 1 - n1 - n2;
      const T shift = attractive ? s[q] * sign2 : T(0);
      pair_shift[m - hard] = shift;
      eta[j2] += shift;
      lo[m] = 0;
      scale[m] = T(0.70710678118654752440);
      hi[m] = std::fabs(s[q]) / scale[m];
      row[m] = p.num_rows + q;
      block[num_blocks++] = {BlockKind::row, m, 1, p.num_blocks + q};
      ptr[++m] = e + 2;
    }
  }
};

}  // namespace factormax
