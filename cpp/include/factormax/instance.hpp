// One instance of a batch, as the solvers see it: rows with one bounded multiplier each, over the
// variables that may be on. A masked variable is off, so its column is left out of every row.
#pragma once

#include <cmath>
#include <limits>

#include "factormax/precision.hpp"
#include "factormax/problem.hpp"
#include "factormax/vector_ops.hpp"

namespace factormax {

// Rows with a closed form of their own: a factor, or one row of a factor without one.
struct Block {
  BlockKind kind;
  std::int32_t first;  // first row
  std::int32_t count;
  bool isolated;  // shares no variable with another
};

// Consecutive rows over a grid of variables, all with one coefficient: entry k of row i is variable
// base + i * row_stride + k * col_stride. Slices of tensors look like this, and need no indices.
template <class T>
struct Tile {
  std::int32_t first, rows, length;
  std::int32_t base, row_stride, col_stride;
  T coef;

  bool by_row() const { return col_stride == 1; }
};

template <class T>
struct Instance {
  int n = 0;      // variables present
  int m = 0;      // rows present
  int hard = 0;   // the first `hard` rows are constraints,
  int links = 0;  // those before `links` are soft (pairs), the rest tie a link to mu
  int num_blocks = 0;
  bool complete = false;   // all variables of the Problem are present: var is the identity
  bool wide = false;       // sums over its many pairs lose digits in float: add up in double
  bool consistent = true;  // false: some row alone, or a structured factor, can't hold
  int refuted = -1;        // a row of the Problem that can't, and the multiplier that proves it
  T refuting = 0;
  T row_eps = 0;        // relative precision of coef and rhs
  T largest_score = 0;  // largest magnitude of a score
  T top_score = 0;      // largest score, where pairs count by magnitude
  double constant = 0;  // constant term of the pairs, docs/math.md (11)
  int num_uneven = 0;   // rows with coefficients of different size
  int longest_row = 0;
  int highest_degree = 0;  // the most rows that a variable is in

  Span<std::int32_t> ptr;  // (m + 1,)
  Span<std::int32_t> col;  // variable of an entry
  Span<T> coef;
  Span<T> rhs;
  Span<T> lo, hi;          // bounds of the scaled multiplier x = ||a|| tau
  Span<T> scale;           // 1 / ||a||; for links, what makes their curvature about 1
  Span<T> eta;             // scores, with the linear part of the pairs
  Span<T> eta_low;         // what rounding loses of those, if `wide`
  Span<double> wide_sum;   // (n,) scratch, if `wide`
  Span<T> pair_shift;      // (m - hard,) what each soft row added to its second variable's score
  Span<std::int32_t> var;  // variable of the Problem
  Span<std::int32_t> row;  // row of the Problem (R + p for pair p)
  Span<Block> block;

  Span<std::int32_t> new_var;  // inverse of `var`, -1 where masked

  Span<std::int32_t> var_ptr;    // (n + 1,) the transpose of A: where a variable's entries begin,
  Span<std::int32_t> var_row;    // their rows,
  Span<std::int32_t> var_entry;  // and their places in col and coef

  int num_tiles = 0, num_loose = 0;
  bool crossed = false;       // tiles 0 and 1 are the rows and the columns of all variables
  Span<Tile<T>> tile;         // hard rows that are grids
  Span<std::int32_t> loose;   // the other hard rows
  Span<T> norm;               // (m,) ||a||
  Span<std::uint8_t> uneven;  // (m,) whether its coefficients differ in size; the largest is 1

  Span<T> gain;                // (n,) the most that a variable can earn per unit
  Span<std::uint8_t> at_zero;  // (n,) the round that proved it 0; 0: none did; kHeld: in a row
  bool any_at_zero = false;    // if so, their pairs are left out

  Span<T> weight;             // (n,) share of the quadratic that is not the links': 1 without links
  Span<std::uint8_t> in_hub;  // (n,) whether it is in a hub, which takes the place of the box

  void allocate(const Problem<T>& p, Workspace& ws) {
    const int rows = p.num_dual();
    const int entries = p.num_incidences();
    ptr = ws.take<std::int32_t>(rows + 1);
    col = ws.take<std::int32_t>(entries);
    coef = ws.take<T>(entries);
    rhs = ws.take<T>(rows);
    lo = ws.take<T>(rows);
    hi = ws.take<T>(rows);
    scale = ws.take<T>(rows);
    eta = ws.take<T>(p.num_vars);
    pair_shift = ws.take<T>(p.num_pairs);
    if (can_be_wide(p)) {
      eta_low = ws.take<T>(p.num_vars);
      wide_sum = ws.take<double>(p.num_vars);
    }
    var = ws.take<std::int32_t>(p.num_vars);
    row = ws.take<std::int32_t>(rows);
    block = ws.take<Block>(p.num_rows + p.num_pairs);
    new_var = ws.take<std::int32_t>(p.num_vars);
    var_ptr = ws.take<std::int32_t>(p.num_vars + 1);
    var_row = ws.take<std::int32_t>(entries);
    var_entry = ws.take<std::int32_t>(entries);
    tile = ws.take<Tile<T>>(p.num_rows);
    loose = ws.take<std::int32_t>(p.num_rows);
    norm = ws.take<T>(rows);
    uneven = ws.take<std::uint8_t>(rows);
    gain = ws.take<T>(p.num_vars);
    at_zero = ws.take<std::uint8_t>(p.num_vars);
    weight = ws.take<T>(p.num_vars);
    in_hub = ws.take<std::uint8_t>(p.num_vars);
    prepared_ = false;
  }

  int length(int r) const { return ptr[r + 1] - ptr[r]; }
  // Neither 0, which wraps around, nor kHeld.
  bool is_at_zero(int j) const { return std::uint8_t(at_zero.data[j] - 1) < kHeld - 1; }
  bool is_soft(int r) const { return r >= hard && r < links; }
  bool is_link(int r) const { return r >= links; }
  bool weighted() const { return links < m; }
  // 1 / weight, and how much mu moves with z where it is free
  T give(int j) const { return weighted() ? 1 / weight[j] : T(1); }

  // leave_out: whether to drop the pairs of variables that are certain to be 0; they say nothing.
  void prepare(const Problem<T>& p, std::int64_t i, bool leave_out = false) {
    complete = keep_variables(p.mask.at(i), p.eta_u.at(i), p.num_vars);
    row_eps = std::max(std::numeric_limits<T>::epsilon(), T(p.row_precision));
    // Rows that no instance changes are laid out once.
    const bool shared = complete && p.coef.stride == 0 && p.rhs.stride == 0;
    if (!(shared && prepared_)) {
      m = 0;
      num_blocks = num_uneven = 0;
      refuted = -1;
      ptr[0] = 0;
      add_hard_rows(p, i);
      hard = m;
      find_tiles();
      hard_blocks_ = num_blocks;
    }
    consistent = refuted < 0;
    m = hard;
    num_blocks = hard_blocks_;
    any_at_zero = leave_out && p.num_pairs >= kManyPairs && p.structured.count == 0 &&
                  find_zeros(p, p.eta_v.at(i));
    add_pairs(p, i);
    links = m;
    add_links(p.structured, p.num_rows + p.num_pairs);
    if (!(shared && prepared_) || any_at_zero || left_out_) transpose();
    prepared_ = shared;
    left_out_ = any_at_zero;
  }

  // What follows from the rows, where those have been written by somebody else.
  void lay_out_rows() {
    find_tiles();
    transpose();
  }

 private:
  // Returns whether all are present. Without scores they count as 0.
  bool keep_variables(const std::uint8_t* mask, const T* eta_u, int num_vars) {
    if (mask == nullptr && keep_all(eta_u, num_vars)) return true;
    n = 0;
    largest_score = top_score = 0;
    for (int j = 0; j < num_vars; ++j) {
      const T score = eta_u == nullptr ? T(0) : eta_u[j];
      const bool present = is_present(mask, eta_u, j);
      new_var[j] = present ? n : -1;
      if (present) {
        var[n] = j;
        eta[n] = score;
        largest_score = std::max(largest_score, std::fabs(score));
        top_score = std::max(top_score, score);
        ++n;
      }
    }
    return n == num_vars;
  }

  bool keep_all(const T* eta_u, int num_vars) {
    if (eta_u == nullptr) {
      top_score = largest_score = 0;
      fill(eta.first(num_vars), T(0));
    } else if (!keep_scores(eta_u, num_vars)) {
      return false;
    }
    if (prepared_) return true;  // the indices stand as they were
    n = num_vars;
    for (int j = 0; j < n; ++j) var[j] = new_var[j] = j;
    return true;
  }

  // Returns whether they are all finite.
  FACTORMAX_VECTOR bool keep_scores(const T* eta_u, int num_vars) {
    T top = 0, bottom = 0;
    FACTORMAX_EXTREMES(reduction(max : top) reduction(min : bottom))
    for (int j = 0; j < num_vars; ++j) {
      top = eta_u[j] > top ? eta_u[j] : top;
      bottom = eta_u[j] < bottom ? eta_u[j] : bottom;
      eta.data[j] = eta_u[j];
    }
    top_score = top;
    largest_score = std::max(top, -bottom);
    return largest_score <= std::numeric_limits<T>::max();
  }

  void transpose() {
    longest_row = 1;
    for (int r = 0; r < m; ++r) longest_row = std::max(longest_row, length(r));
    fill(var_ptr.first(n + 1), 0);
    for (int k = 0; k < ptr[m]; ++k) ++var_ptr[col[k] + 1];
    highest_degree = 0;
    for (int j = 0; j < n; ++j) {
      highest_degree = std::max(highest_degree, static_cast<int>(var_ptr[j + 1]));
      var_ptr[j + 1] += var_ptr[j];
    }
    for (int r = 0; r < m; ++r) {
      for (int k = ptr[r]; k < ptr[r + 1]; ++k) {
        const int place = var_ptr[col[k]]++;
        var_row[place] = r;
        var_entry[place] = k;
      }
    }
    for (int j = n; j > 0; --j) var_ptr[j] = var_ptr[j - 1];
    var_ptr[0] = 0;
  }

  void find_tiles() {
    num_tiles = num_loose = 0;
    for (int r = 0; r < hard;) {
      Tile<T> grid;
      const int rows = grid_at(r, grid);
      const bool worth = grid.by_row() ? grid.length >= 4 : grid.row_stride == 1 && rows >= 4;
      if (worth) {
        tile[num_tiles++] = grid;
      } else {
        for (int i = 0; i < rows; ++i) loose[num_loose++] = r + i;
      }
      r += rows;
    }
    crossed = num_tiles == 2 && num_loose == 0 && is_cross(tile[0], tile[1]);
  }

  // Whether these are the rows and the columns of one grid that is all the variables.
  bool is_cross(const Tile<T>& rows, const Tile<T>& columns) const {
    return rows.by_row() && rows.base == 0 && rows.row_stride == rows.length &&
           rows.rows * rows.length == n && columns.base == 0 && columns.row_stride == 1 &&
           columns.col_stride == rows.length && columns.rows == rows.length &&
           columns.length == rows.rows;
  }

  // The largest grid that begins with row r; returns how many rows it has, at least 1.
  int grid_at(int r, Tile<T>& grid) const {
    const int begin = ptr[r], d = length(r);
    grid = {r, 1, d, col[begin], 0, d > 1 ? col[begin + 1] - col[begin] : 1, coef[begin]};
    if (!is_line(r, grid)) {
      grid.col_stride = 0;  // no grid
      return 1;
    }
    for (int next = r + 1; next < hard && length(next) == d; ++next) {
      const int stride = col[ptr[next]] - col[ptr[next - 1]];
      if (grid.rows > 1 ? stride != grid.row_stride : stride < 0) break;
      if (!is_line(next, grid)) break;
      grid.row_stride = stride;
      ++grid.rows;
    }
    return grid.rows;
  }

  bool is_line(int r, const Tile<T>& grid) const {
    const int begin = ptr[r];
    for (int k = 0; k < grid.length; ++k) {
      if (coef[begin + k] != grid.coef || col[begin + k] != col[begin] + k * grid.col_stride) {
        return false;
      }
    }
    return true;
  }

  // Rows that hold for every mu of the box are left out, and so is a factor all of whose variables
  // are masked (see Problem::num_factors).
  void add_hard_rows(const Problem<T>& p, std::int64_t i) {
    for (int f = 0; f < p.num_blocks; ++f) {
      const int first = m, begin = p.row_ptr[p.block_ptr[f]], end = p.row_ptr[p.block_ptr[f + 1]];
      int off = 0;
      for (int k = begin; k < end && !complete; ++k) off += new_var[p.col[k]] < 0;
      if (f < p.num_factors && off == end - begin) continue;
      const auto kind = static_cast<BlockKind>(p.block_kind[f]);
      const int last = p.block_ptr[f + 1] - 1;
      // A band whose bounds are equal is one equation.
      const bool equal = kind == BlockKind::band && p.rhs.at(i)[last - 1] == -p.rhs.at(i)[last];
      for (int r = equal ? last : p.block_ptr[f]; r <= last; ++r) add_row(p, i, r, equal);
      const bool isolated = p.block_isolated[f] != 0;
      const bool whole = kind == BlockKind::or_out ? off == 0 : kind == BlockKind::band;
      if (whole && m - first > 1) {
        block[num_blocks++] = {kind, first, m - first, isolated};
        continue;
      }
      for (int r = first; r < m; ++r) {  // the rows of one factor share variables
        block[num_blocks++] = {BlockKind::row, r, 1, isolated && m - first == 1};
      }
    }
  }

  void add_row(const Problem<T>& p, std::int64_t i, int r, bool equality) {
    if (p.kind[r] == static_cast<std::int8_t>(RowKind::absent)) return;
    equality |= p.kind[r] == static_cast<std::int8_t>(RowKind::equality);
    const T* p_coef = p.coef.at(i);
    const T b = p.rhs.at(i)[r];
    int e = ptr[m];
    T squares = 0, least = 0, most = 0;  // range of a . mu over the box
    bool differ = false;
    for (int k = p.row_ptr[r]; k < p.row_ptr[r + 1]; ++k) {
      const std::int32_t j = new_var[p.col[k]];
      if (j < 0 || p_coef[k] == 0) continue;
      col[e] = j;
      coef[e] = p_coef[k];
      squares += p_coef[k] * p_coef[k];
      differ |= std::fabs(p_coef[k]) != std::fabs(coef[ptr[m]]);
      (p_coef[k] < 0 ? least : most) += p_coef[k];
      ++e;
    }
    const int sign = refutation(least, most, b, equality, row_eps);
    if (refuted < 0 && sign != 0) {
      refuted = r;
      refuting = T(sign);
    }
    if (e == ptr[m] || (!equality && most <= b)) return;
    const T inf = std::numeric_limits<T>::infinity();
    rhs[m] = b;
    lo[m] = equality ? -inf : T(0);
    hi[m] = inf;
    norm[m] = std::sqrt(squares);
    scale[m] = 1 / norm[m];
    uneven[m] = differ;
    num_uneven += differ;
    row[m] = r;
    ptr[++m] = e;
  }

  // A variable that is in pairs only, and earns nothing even if all its partners with a positive
  // score are on, is 0, docs/math.md (11a). Those that are 0 stop counting as partners, and so on.
  bool find_zeros(const Problem<T>& p, const T* s) {
    int negated = 0;
    for (int k = 0; k < 2 * p.num_pairs; ++k) negated |= p.pair_negated[k];
    if (negated) return false;
    fill(at_zero.first(n), std::uint8_t(0));
    for (int k = 0; k < ptr[hard]; ++k) at_zero[col[k]] = kHeld;
    int zeros = 0;
    for (std::uint8_t round = 1; round <= kZeroRounds; ++round) {
      std::copy(eta.data, eta.data + n, gain.data);
      for (int q = 0; q < p.num_pairs; ++q) {
        const std::int32_t j1 = new_var.data[p.pair_var[2 * q]];
        const std::int32_t j2 = new_var.data[p.pair_var[2 * q + 1]];
        if (!(s[q] > 0) || j1 < 0 || j2 < 0) continue;
        if (!is_at_zero(j2)) gain.data[j1] += s[q];
        if (!is_at_zero(j1)) gain.data[j2] += s[q];
      }
      const int before = zeros;
      for (int j = 0; j < n; ++j) {
        if (at_zero[j] != 0 || gain[j] > 0) continue;
        at_zero[j] = round;
        ++zeros;
      }
      if (zeros - before <= n / kFewZeros || zeros == n) break;  // not worth another look
    }
    return zeros > 0;
  }

  // s * min(l1, l2) = s l2 - s max(0, l2 - l1) for s >= 0, and s * max(0, l1 + l2 - 1) otherwise:
  // a linear term and a row whose violation costs |s|, docs/math.md (9)-(11).
  void add_pairs(const Problem<T>& p, std::int64_t i) {
    const T* s = p.eta_v.at(i);
    constant = 0;
    wide = can_be_wide(p);
    if (wide) std::copy(eta.data, eta.data + n, wide_sum.data);
    for (int q = 0; q < p.num_pairs; ++q) {
      const std::int32_t j1 = new_var[p.pair_var[2 * q]], j2 = new_var[p.pair_var[2 * q + 1]];
      if (j1 < 0 || j2 < 0) {
        add_half_pair(p, q, j1, j2, s[q]);
        continue;
      }
      if (any_at_zero && (is_at_zero(j1) || is_at_zero(j2))) continue;
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
      if (attractive) constant += double(s[q]) * n2;
      add_score(j2, shift);
      lo[m] = 0;
      norm[m] = T(1.41421356237309504880);
      scale[m] = T(0.70710678118654752440);
      uneven[m] = 0;
      hi[m] = std::fabs(s[q]) * norm[m];
      largest_score = std::max(largest_score, std::fabs(s[q]));
      top_score = std::max(top_score, std::fabs(s[q]));
      row[m] = p.num_rows + q;
      block[num_blocks++] = {BlockKind::row, m, 1, p.block_isolated[p.num_blocks + q] != 0};
      ptr[++m] = e + 2;
    }
    if (!wide) return;
    for (int j = 0; j < n; ++j) {
      const double most = std::numeric_limits<T>::max(), sum = clip(wide_sum[j], -most, most);
      eta[j] = T(sum);
      eta_low[j] = T(sum - double(eta[j]));
    }
  }

  // Whether a variable is in so many pairs, on average, that sums over them need double.
  static bool can_be_wide(const Problem<T>& p) {
    return !Precision<T>::adds_many_pairs && p.num_pairs >= kPairsToWiden * p.num_vars;
  }

  void add_score(int j, T score) {
    const T most = std::numeric_limits<T>::max();
    eta[j] = clip(eta[j] + score, -most, most);
    if (wide) wide_sum[j] += double(score);
  }

  // A pair with one end masked: if that literal is a negation it is true, and the score goes to the
  // other literal alone.
  void add_half_pair(const Problem<T>& p, int q, std::int32_t j1, std::int32_t j2, T score) {
    const std::uint8_t* negated = p.pair_negated + 2 * q;
    const int here = j1 < 0 ? 1 : 0;
    const std::int32_t j = here == 0 ? j1 : j2;
    if (j < 0 || negated[1 - here] == 0) return;
    add_score(j, negated[here] != 0 ? -score : score);
    constant += double(score) * negated[here];
    largest_score = std::max(largest_score, std::fabs(score));
    top_score = std::max(top_score, std::fabs(score));
  }

  // A link is a row with one entry, whose right-hand side is the linked factor's own marginal. The
  // quadratic of a variable is shared evenly by all that hold it, docs/math.md (17).
  void add_links(const Structured& s, int first) {
    if (s.count == 0) return;
    fill(in_hub.first(n), std::uint8_t(0));
    fill(weight.first(n), T(1));
    const T inf = std::numeric_limits<T>::infinity();
    for (int f = 0; f < s.count; ++f) {
      for (const std::int32_t v : s.vars(f)) {
        const std::int32_t j = new_var[v];
        if (s.linked[f] == 0) {
          if (j >= 0) in_hub[j] = 1;
          continue;
        }
        if (j >= 0) {
          const int e = ptr[m];
          col[e] = j;
          coef[e] = 1;
          rhs[m] = 0;
          lo[m] = -inf;
          hi[m] = inf;
          uneven[m] = 0;
          row[m] = first;
          ptr[++m] = e + 1;
          weight[j] += 1;
        }
        ++first;
      }
    }
    for (int j = 0; j < n; ++j) weight[j] = 1 / weight[j];
    for (int r = links; r < m; ++r) {  // both sides move by 1 / weight
      scale[r] = std::sqrt(weight[col[ptr[r]]] / 2);
      norm[r] = 1 / scale[r];
    }
  }

  static constexpr int kManyPairs = 64;    // with fewer, a solve is quicker than looking for zeros
  static constexpr int kZeroRounds = 3;    // each costs a sweep over the pairs, and finds fewer
  static constexpr int kFewZeros = 16;     // finding 1/16 of the variables does not pay for a sweep
  static constexpr int kPairsToWiden = 8;  // per variable: from here on, float sums lose a digit
  static constexpr std::uint8_t kHeld = 255;  // not a round: the variable is in a row

  bool prepared_ = false;
  bool left_out_ = false;  // whether the last instance left out pairs
  int hard_blocks_ = 0;
};

}  // namespace factormax
