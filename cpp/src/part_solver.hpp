// Some rows of an instance, solved by themselves while the multipliers of all others stand still.
#pragma once

#include <algorithm>

#include "factormax/compact.hpp"

namespace factormax {

// The multipliers of a whole instance, scaled, and the reduced scores that belong to them.
template <class T>
struct Standing {
  Span<T> x;                 // (m,)
  Span<T> z;                 // (n,)
  Span<std::int32_t> place;  // (n,) -1; scratch of whoever solves the variable's rows
};

// How much room the largest part takes.
struct PartSize {
  int vars = 0, hard = 0, rows = 0, entries = 0;

  void cover(const PartSize& other) {
    vars = std::max(vars, other.vars);
    hard = std::max(hard, other.hard);
    rows = std::max(rows, other.rows);
    entries = std::max(entries, other.entries);
  }
  bool holds(const PartSize& other) const {
    return other.vars <= vars && other.hard <= hard && other.rows <= rows &&
           other.entries <= entries;
  }
};

template <class T>
class PartSolver {
 public:
  explicit PartSolver(const PartSize& size) : memory_(bytes(size)) {
    if (memory_.valid()) allocate(size, memory_);
  }
  // False if the memory could not be had.
  bool valid() const { return memory_.valid(); }

  // Solves for the multipliers of these rows, ascending, and updates them and the reduced scores of
  // their variables, unless there is no solution. cold: as if there were no multipliers yet.
  Result solve(const Instance<T>& whole, Span<const std::int32_t> rows, const Standing<T>& at,
               const Options& options, bool cold, Control& control, bool may_poll) {
    cut_out(whole, rows, at);
    Result result;
    if (cold) {
      result = compact_.solve(instance_, nullptr, options, control, may_poll);
    } else {
      compact_.begin(instance_, options, control, may_poll);
      for (int i = 0; i < rows.size; ++i) compact_.point().x[i] = at.x[rows[i]];
      compact_.minimise(T(options.tol), options.max_iter, false);
      result = compact_.result();
    }
    const bool better = result.status != Status::infeasible && result.status != Status::interrupted;
    const DualPoint<T>& found = compact_.point();
    for (int i = 0; i < rows.size && better; ++i) at.x[rows[i]] = found.x[i];
    for (int j = 0; j < instance_.n; ++j) {
      const std::int32_t v = instance_.var[j];
      at.place[v] = -1;
      if (better) at.z[v] = found.z[j];
    }
    return result;
  }

 private:
  static std::size_t bytes(const PartSize& size) {
    Workspace counter;
    PartSolver().allocate(size, counter);
    return counter.used();
  }

  PartSolver() = default;

  void allocate(const PartSize& size, Workspace& ws) {
    Problem<T> largest;
    largest.num_vars = size.vars;
    largest.num_rows = size.hard;
    largest.num_pairs = size.rows;  // there may be parts without hard rows
    largest.num_entries = size.entries;
    instance_.allocate(largest, ws);
    compact_.allocate(largest, nullptr, ws);
  }

  // The instance of these rows. Their variables are numbered as they come.
  void cut_out(const Instance<T>& whole, Span<const std::int32_t> rows, const Standing<T>& at) {
    Instance<T>& p = instance_;
    p.n = p.m = p.hard = p.num_uneven = 0;
    p.ptr[0] = 0;
    p.row_eps = whole.row_eps;
    for (const std::int32_t r : rows) {
      p.hard += r < whole.hard;
      take_row(whole, r, at);
    }
    p.links = p.m;
    p.block[0] = {BlockKind::row, 0, 1, false};  // none has a closed form
    p.num_blocks = 1;
    p.lay_out_rows();
    p.largest_score = p.top_score = 0;
    for (int j = 0; j < p.n; ++j) take_score(std::fabs(p.eta[j]), p.eta[j]);
    for (int r = p.hard; r < p.m; ++r) take_score(p.hi[r] * p.scale[r], p.hi[r] * p.scale[r]);
  }

  void take_score(T size, T score) {
    instance_.largest_score = std::max(instance_.largest_score, size);
    instance_.top_score = std::max(instance_.top_score, score);
  }

  void take_row(const Instance<T>& whole, std::int32_t r, const Standing<T>& at) {
    Instance<T>& p = instance_;
    const T tau = at.x[r] * whole.scale[r];
    int e = p.ptr[p.m];
    for (int k = whole.ptr[r]; k < whole.ptr[r + 1]; ++k, ++e) {
      const std::int32_t v = whole.col[k];
      if (at.place[v] < 0) {
        p.var[p.n] = v;
        p.eta[p.n] = at.z[v];
        at.place[v] = p.n++;
      }
      const std::int32_t j = at.place[v];
      p.col[e] = j;
      p.coef[e] = whole.coef[k];
      p.eta[j] += whole.coef[k] * tau;  // what it takes away
    }
    p.rhs[p.m] = whole.rhs[r];
    p.lo[p.m] = whole.lo[r];
    p.hi[p.m] = whole.hi[r];
    p.scale[p.m] = whole.scale[r];
    p.norm[p.m] = whole.norm[r];
    p.uneven[p.m] = whole.uneven[r];
    p.num_uneven += whole.uneven[r];
    p.ptr[++p.m] = e;
  }

  Instance<T> instance_;
  CompactSolver<T> compact_;
  Workspace memory_;
};

}  // namespace factormax
