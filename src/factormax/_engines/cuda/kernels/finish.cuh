// What ends a solve: the exact finish, docs/math.md (21), and proofs that nothing is feasible,
// (23).
#pragma once

#include "solver.cuh"

namespace factormax {

// The exact finish: the active set is guessed from x - g, the other multipliers are put on their
// bounds, and the rest is solved for. Returns false if that leads nowhere.
template <class V>
FM_DEVICE bool Solver<V>::guess() {
  const T* mu = graph_.mu();
  if constexpr (V::kHubs) hubs_.leave_box(graph_.mu());
  bool others = false;
  graph_.for_rows([&](int r) {
    const T down = x_[r] - lo_[r], up = x_[r] - hi_[r];
    const bool inside = g_[r] < down && g_[r] > up;
    next_x_[r] = inside ? x_[r] : (g_[r] >= down ? lo_[r] : hi_[r]);
    d_[r] = next_x_[r] - x_[r];
    others |= d_[r] != 0;
    next_g_[r] = inside ? -g_[r] : T(0);
  });
  others = team_.any(others);
  team_.sync();
  System<V> system(graph_, hubs_, scale_);
  if (others) {
    system.multiply(d_, [](int) { return true; }, [&](int r, T value) { next_g_[r] -= value; });
  }
  graph_.by_row(
      Add(), [&](u32 code, T c) { return inside_box(graph_.value_at(mu, code)) ? c * c : T(0); },
      [&](int r, T squares) {
        const T down = x_[r] - lo_[r], up = x_[r] - hi_[r];
        const bool inside = g_[r] < down && g_[r] > up;
        d_[r] = inside ? squares * scale_[r] * scale_[r] : T(0);
      });
  if constexpr (V::kHubs) {
    const auto inside = [&](int r) {
      return g_[r] < x_[r] - lo_[r] && g_[r] > x_[r] - hi_[r] && scale_[r] > 0;
    };
    hubs_.add_to_diagonal(inside, scale_, d_);
  }
  const int count = system.number(d_);
  if (count == 0) return others;
  const int* place = graph_.place();
  T* b = graph_.b();
  if (system.dense()) {
    graph_.for_rows([&](int r) {
      if (place[r] >= 0) b[place[r]] = next_g_[r];
    });
    system.factorise(d_);
    system.substitute();
  } else if constexpr (V::kConjugate) {
    const Rows x = conjugate(0), p = conjugate(1), q = conjugate(2);
    T size = 0;
    graph_.for_rows([&](int r) {
      if (place[r] >= 0) size = most(size, magnitude(next_g_[r]));
    });
    system.conjugate_gradients(next_g_, x, p, q, d_, kFinishSteps, team_.max(size) * kFinish);
    graph_.for_rows([&](int r) { d_[r] = x[r]; });
  } else {
    return false;
  }
  bool wild = false;
  T farthest = 0;
  graph_.for_rows([&](int r) { farthest = most(farthest, magnitude(x_[r])); });
  farthest = team_.max(farthest);
  graph_.for_rows([&](int r) {
    if (place[r] < 0) return;
    const T delta = system.dense() ? b[place[r]] : d_[r];
    wild |= !(magnitude(delta) <= kSane * (1 + farthest));  // the system is singular
    next_x_[r] = clip(x_[r] + delta, lo_[r], hi_[r]);
  });
  return !team_.any(wild);
}

// Tries the multipliers themselves, and their change since the last try, which tends to a ray
// that proves that nothing is feasible, docs/math.md (23). The proof is left in next_x.
template <class V>
FM_DEVICE bool Solver<V>::infeasible() {
  if (a_.hard == 0) return false;
#pragma unroll 1
  for (int turn = 0; turn < 2; ++turn) {
    if (certifies(turn == 1)) {
      status_ = kInfeasible;
      return true;
    }
  }
  graph_.for_rows([&](int r) { mark_[r] = x_[r]; });
  return false;
}

template <class V>
FM_DEVICE bool Solver<V>::certifies(bool change) {
  T* t = graph_.t();
  double sums[2] = {0, 0};  // of the certificate, and of its terms in magnitude
  bool finite = true;
  team_.sync();
  graph_.for_rows([&](int r) {
    T y = graph_.is_soft(r) ? T(0) : (change ? x_[r] - mark_[r] : x_[r]) * scale_[r];
    if (lo_[r] == 0) y = most(y, T(0));
    finite &= magnitude(y) < infinity<T>();
    next_x_[r] = t[r] = y;
    sums[0] += double(rhs_[r]) * double(y);
    sums[1] += magnitude(double(rhs_[r]) * double(y));
  });
  team_.sync();
  graph_.by_variable(
      Several<double, 2>{{0, 0}}, Pairwise(),
      [&](u32 code, int place) {
        const int r = graph_.index_of(code);
        if (r >= a_.hard) return Several<double, 2>{{0, 0}};
        const double term = double(graph_.var_coef(code, place)) * double(t[r]);
        return Several<double, 2>{{term, magnitude(term)}};
      },
      [&](int j, Several<double, 2> sum) {
        if constexpr (V::kHubs) {
          const bool present = j < a_.n && graph_.present(j);
          if (hubs_.takes(j, present ? T(-sum.at[0]) : -infinity<T>())) {
            sums[1] += sum.at[1];
            return;
          }
        }
        if (!graph_.present(j)) return;
        sums[0] += most(0.0, -sum.at[0]);
        sums[1] += sum.at[1];
      });
  if constexpr (V::kHubs) {
    at_x_ = false;
    team_.sync();
    const T best = hubs_.support();
    if (!(best > -infinity<T>())) finite = false;
    if (team_.rank == 0) sums[0] += double(best);
  }
  team_.reduce(sums, Add());
  return !team_.any(!finite) && sums[0] < -kCertificate * sums[1];
}

}  // namespace factormax
