// The dual that the solver minimises, docs/math.md (12)-(14), and its closed form for isolated
// rows.
#pragma once

#include "solver.cuh"

namespace factormax {

// Isolated rows, which share no variable with another, have a closed form, but for the order of
// their kinks: Newton's method with a bracket, docs/math.md (29). Each group of lanes has a row.
template <class V>
FM_DEVICE void Solver<V>::solve_isolated() const {
  constexpr int kLanes = V::kIsolatedLanes, kGroups = V::kTeam / kLanes;
#pragma unroll 1
  for (int first = 0; first < a_.num_isolated; first += kGroups) {
    const int own = first + team_.rank / kLanes;
    const int r = own < a_.num_isolated ? a_.isolated[own] : -1;
    const bool here = r >= 0 && scale_[r] > 0;
    const T t = solve_row<kLanes>(here ? r : -1);
    if (here && team_.rank % kLanes == 0) next_x_[r] = t / scale_[r];
  }
  team_.sync();
}

// r: -1 for lanes that have no row, and only keep in step.
template <class V>
template <int LANES>
FM_DEVICE typename V::T Solver<V>::solve_row(int r) const {
  const int lane = team_.rank % LANES;
  const T* eta = graph_.eta();
  const int begin = r < 0 ? 0 : a_.row_ptr[r], end = r < 0 ? 0 : a_.row_ptr[r + 1];
  const auto each = [&](auto visit) {
#pragma unroll 1
    for (int k = begin + lane; k < end; k += LANES) {
      const int entry = a_.row_entry[k];
      if (graph_.present(entry >> 1)) visit(T(eta[entry >> 1]), graph_.row_coef(entry, k));
    }
  };
  const T b = r < 0 ? T(0) : rhs_[r], lo = r < 0 ? T(0) : lo_[r];
  T product = 0, squares = 0, size = 1, below = infinity<T>(), above = -infinity<T>();
  each([&](T y, T w) {
    product += w * y;
    squares += w * w;
    size = most(size, magnitude(w) * least(magnitude(y), T(1)));
    if (w == 0) return;
    const T p = y / w, q = (y - 1) / w;  // where the variable is at its bounds
    below = least(below, least(p, q));
    above = most(above, most(p, q));
  });
  product = over_group<LANES>(product, Add());
  squares = over_group<LANES>(squares, Add());
  size = over_group<LANES>(size, Max());
  T left = most(lo, -over_group<LANES>(-below, Max()));
  T right = over_group<LANES>(above, Max());
  const T tolerance = 8 * kEps * most(size, magnitude(b));
  bool done = r < 0 || squares == 0;
  T t = done ? T(0) : clip((product - b) / squares, left, most(left, right));
  if (lo == 0) t = 0;  // an inequality that holds by itself has no multiplier
  bool at_bound = lo == 0;
#pragma unroll 1
  for (int step = 0; step < 200 && team_.any(!done); ++step) {
    T total = 0;
    T slope = 0;
    each([&](T y, T w) {
      const T z = y - w * t;
      total += w * to_box(z);
      slope += inside_box(z) ? w * w : T(0);
    });
    const T excess = T(over_group<LANES>(total, Add()) - b);
    slope = over_group<LANES>(slope, Add());
    if (done) continue;
    if (at_bound) {
      at_bound = false;
      if (excess <= 0) {
        done = true;
        continue;
      }
    }
    if (magnitude(excess) <= tolerance) {
      done = true;
      continue;
    }
    (excess > 0 ? left : right) = t;
    T next = slope > 0 ? t + excess / slope : t;
    if (!(next > left && next < right)) {
      next = left + (right - left) / 2;
      if (!(next > left && next < right)) done = true;
    }
    if (!done) t = next;
  }
  return t;
}

// Combines values of LANES neighbours; all threads of the team take part.
template <class V>
template <int LANES, class Value, class Combine>
FM_DEVICE Value Solver<V>::over_group(Value value, Combine combine) const {
  if constexpr (LANES <= 32) {
    return over_lanes<LANES>(value, combine);
  } else {
    Value values[1] = {value};
    team_.reduce(values, combine);
    return values[0];
  }
}

// Evaluates the dual at next_x: finds next_g and mu.
template <class V>
FM_DEVICE typename Solver<V>::Seen Solver<V>::evaluate() {
  T* t = graph_.t();
  const T* eta = graph_.eta();
  T* mu = graph_.mu();
  graph_.for_rows([&](int r) {
    const T own = next_x_[r] * scale_[r];
    t[r] = graph_.is_soft(r) && graph_.score[r - a_.hard] < 0 ? -own : own;
  });
  team_.sync();
  T sums[4] = {0, 0, 0, 0}, peaks[2] = {0, 0};
  taken([&](int j, T sum) {
    const T z = T(eta[j] - sum), u = to_box(z);
    if constexpr (V::kHubs) {
      if (hubs_.takes(j, z)) return;
    }
    mu[j] = u;
    sums[3] += u > 0 ? u * (z - T(0.5) * u) : T(0);
  });
  team_.sync();
  if constexpr (V::kHubs) sums[3] += hubs_.evaluate(mu);
  graph_.template by_row<2>(
      Add(), [&](u32 code, T c) { return c * graph_.value_at(mu, code); },
      [&](int r, T product) {
        const T x = next_x_[r], g = scale_[r] * (rhs_[r] - product);
        const T s = x - x_[r], y = g - g_[r];
        next_g_[r] = g;
        sums[0] += g * s;
        sums[1] += s * s;
        sums[2] += y * y;
        sums[3] += rhs_[r] * scale_[r] * x;
        if constexpr (V::kUneven) return;
        peaks[0] = most(peaks[0], lack_of_even(r, x, g));
        peaks[1] = most(peaks[1], magnitude(x) * scale_[r]);
      });
  if constexpr (V::kUneven) {
    find_units(mu);
    graph_.for_rows([&](int r) {
      peaks[0] = most(peaks[0], lack(r, next_x_[r], next_g_[r]));
      peaks[1] = most(peaks[1], magnitude(next_x_[r]) * scale_[r] * unit(r));
    });
  }
  team_.reduce(sums, Add());
  team_.reduce(peaks, Max());
  return {sums[0], sums[1], sums[2], sums[3], peaks[0], peaks[1]};
}

// Calls take(j, what the multipliers in t() take from variable j); those of pairs have a sign.
template <class V>
template <class Take>
FM_DEVICE void Solver<V>::taken(Take take) const {
  const T* t = graph_.t();
  graph_.template by_variable<4>(
      T(0), Add(),
      [&](u32 code, int place) {
        T own = graph_.value_at(t, code);
        if (V::kPairs && graph_.is_second(code)) own = magnitude(own);
        if (V::kCoefs == 2 && place >= 0) return T(own * graph_.coef[place]);
        const bool negated = (V::kCoefs > 0 || V::kPairs) && graph_.is_negated(code);
        return T(negated ? -own : own);
      },
      take);
}

// What a row lacks: how far it is from optimal. Never form x - g: far out it would round to x.
template <class V>
FM_DEVICE typename V::T Solver<V>::lack_of_even(int r, T x, T g) const {
  return magnitude(most(least(g, x - lo_[r]), x - hi_[r])) * norm_[r];
}

// The same where coefficients differ: in units of variables, beyond the rounding of its sum.
template <class V>
FM_DEVICE typename V::T Solver<V>::lack(int r, T x, T g) const {
  const T even = lack_of_even(r, x, g);
  if (!V::kUneven || even == 0 || graph_.is_soft(r) || (a_.flags[r] & kUneven) == 0) return even;
  const T moved = most(magnitude(g) * norm_[r] - 4 * kEps * sizes()[r], T(0)) / unit(r);
  return most(least(moved, g > 0 ? x - lo_[r] : hi_[r] - x), even);
}

template <class V>
FM_DEVICE typename V::T Solver<V>::unit(int r) const {
  if (!V::kUneven || graph_.is_soft(r)) return 1;
  return units()[r];
}

// How far a row moves its variables: the free ones, or the next one to become free, which may be
// the one with the smallest coefficient. z: reduced scores, or what they are clipped to.
template <class V>
FM_DEVICE void Solver<V>::find_units(const T* z) const {
  struct Both {
    FM_DEVICE Several<T, 4> operator()(Several<T, 4> p, Several<T, 4> q) const {
      return {
          {p.at[0] + q.at[0], least(p.at[1], q.at[1]), least(p.at[2], q.at[2]), p.at[3] + q.at[3]}};
    }
  };
  const Rows unit = units(), size = sizes();
  graph_.by_hard_row(
      Several<T, 4>{{0, 1, 1, 0}}, Both(),
      [&](u32 code, int place) {
        const int j = graph_.index_of(code);
        const T c = graph_.row_coef(code, place), value = z[j], own = magnitude(c);
        Several<T, 4> found = {{0, 1, 1, own * to_box(value)}};
        if (c == 0 || !graph_.present(j)) return found;
        if (inside_box(value)) {
          found.at[0] = c * c;
        } else {
          found.at[(value <= 0) == (c > 0) ? 1 : 2] = own;  // if a . mu is to grow, to shrink
        }
        return found;
      },
      [&](int r, Several<T, 4> sum) {
        const bool up = next_g_[r] > 0;
        unit[r] = 1;
        size[r] = magnitude(rhs_[r]) + sum.at[3];
        if ((a_.flags[r] & kUneven) == 0) return;
        unit[r] = sum.at[0] > 0 ? least(T(sqrt(sum.at[0])), T(1)) : sum.at[up ? 1 : 2];
      });
  team_.sync();
}

}  // namespace factormax
