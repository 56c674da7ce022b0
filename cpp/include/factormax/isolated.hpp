// Factors that share no variable with another: their multipliers, in closed form.
#pragma once

#include "factormax/instance.hpp"
#include "factormax/local/box_row.hpp"
#include "factormax/local/or_out.hpp"

namespace factormax {

template <class T>
class IsolatedFactors {
 public:
  void allocate(const Problem<T>& p, Workspace& ws) {
    const int links = std::max(p.num_dual(), p.num_vars) + 2;
    for (Span<T>* s : {&y_, &w_, &h_, &v_, &t_, &delta_}) *s = ws.take<T>(links);
    order_ = ws.take<std::int32_t>(links);
  }

  // Whether every factor is one.
  static bool are_all(const Instance<T>& p) {
    if (p.weighted()) return false;
    const Span<Block> blocks = p.block.first(p.num_blocks);
    return std::all_of(blocks.begin(), blocks.end(), [](const Block& b) { return b.isolated; });
  }

  // Writes their scaled multipliers into x: (m,).
  void solve(const Instance<T>& p, Span<T> x) {
    for (const Block& block : p.block.first(p.num_blocks)) {
      if (!block.isolated) continue;
      if (block.kind == BlockKind::or_out) {
        solve_or_out(p, block, x);
      } else {
        solve_row(p, block, x);
      }
    }
  }

 private:
  // A row, or two with the same coefficients that make a band.
  void solve_row(const Instance<T>& p, const Block& block, Span<T> x) {
    const int last = block.first + block.count - 1;
    const int begin = p.ptr[last], d = p.length(last);
    const Span<T> y = y_.first(d), w = w_.first(d), h = h_.first(d);
    for (int k = 0; k < d; ++k) {
      y[k] = p.eta[p.col[begin + k]];
      w[k] = p.coef[begin + k];
      h[k] = 1;
    }
    const T s = p.scale[last];
    const local::BoxRow<T> row{y, w, h, p.rhs[last]};
    if (block.kind == BlockKind::band) {
      const T both = local::box_band(row, -p.rhs[block.first]);
      x[last] = std::max(both, T(0)) / s;
      x[block.first] = std::max(-both, T(0)) / p.scale[block.first];
      return;
    }
    x[last] = local::box_row(row, p.lo[last] * s, p.hi[last] * s) / s;
  }

  void solve_or_out(const Instance<T>& p, const Block& block, Span<T> x) {
    const int last = block.first + block.count - 1;
    const int begin = p.ptr[last], d = p.length(last);
    const Span<T> y = y_.first(d), t = t_.first(d), delta = delta_.first(d);
    // The row l_out - sum l_i <= 0 has coefficient -sign on the inputs, +sign on the output.
    for (int k = 0; k < d; ++k) {
      const bool negated = (p.coef[begin + k] > 0) != (k == d - 1);
      const T eta = p.eta[p.col[begin + k]];
      y[k] = negated ? 1 - eta : eta;
      delta[k] = 1;
    }
    local::or_out<T>(y, delta, v_.first(d), t, w_.first(d), h_.first(d), order_.first(d));
    for (int k = 0; k < std::min(d, block.count); ++k) {
      x[block.first + k] = t[k] / p.scale[block.first + k];
    }
  }

  Span<T> y_, w_, h_, v_, t_, delta_;
  Span<std::int32_t> order_;
};

}  // namespace factormax
