// What the solver writes: marginals, multipliers, and on which side of their bounds things are.
#pragma once

#include "solver.cuh"

namespace factormax {

template <class V>
FM_DEVICE void Solver<V>::write_scalars(double objective, double residual) const {
  if (team_.rank != 0) return;
  a_.objective[graph_.instance] = Io(objective);
  a_.residual[graph_.instance] = residual;
  a_.iterations[graph_.instance] = passes_;
  a_.status[graph_.instance] = status_;
  if (status_ != kConverged && a_.unsolved != nullptr) *a_.unsolved = 1;
}

// Nothing is feasible: the multipliers are those that prove it.
template <class V>
FM_DEVICE void Solver<V>::write_nothing() const {
  const Io nan = Io(infinity<T>() - infinity<T>());
  team_.sync();
  graph_.for_vars([&](int j) {
    a_.mu[graph_.instance * a_.n + j] = status_ == kBadNumber || graph_.present(j) ? nan : Io(0);
    a_.var_side[graph_.instance * a_.n + j] = kNoSide;
  });
  graph_.for_rows([&](int r) {
    const bool proof = status_ == kInfeasible && !graph_.is_soft(r);
    a_.tau[graph_.instance * graph_.num_rows() + r] = Io(proof ? next_x_[r] : T(0));
    a_.row_side[graph_.instance * graph_.num_rows() + r] = kNoSide;
  });
  Io* values = a_.mu_v + graph_.instance * graph_.num_scores();
  graph_.for_pairs([&](int p) { values[p] = nan; });
  if constexpr (V::kHubs) hubs_.write_nothing(values + a_.pairs, nan);
  if constexpr (V::kTrees) Cuts<V>(graph_).save_nothing();
  write_scalars(-infinity<double>(), infinity<double>());
}

// Sides, with margins for what the rows lack, as the core's `classify` finds them.
template <class V>
FM_DEVICE void Solver<V>::write() {
  constexpr T kMost = T(1e-3), kLeast = T(1e-11), kTravel = T(1e4);
  T *t = graph_.t(), *z = graph_.mu(), *error = graph_.v();
  const Rows missing = next_g_;
  const T* eta = graph_.eta();
  Io* tau = a_.tau + graph_.instance * graph_.num_rows();
  team_.sync();
  graph_.for_rows([&](int r) {
    const T own = x_[r] * scale_[r];
    tau[r] = Io(own);
    t[r] = graph_.is_soft(r) && graph_.score[r - a_.hard] < 0 ? -own : own;
    next_g_[r] = g_[r];
  });
  team_.sync();
  taken([&](int j, T sum) { z[j] = T(eta[j] - sum); });
  team_.sync();
  if constexpr (V::kUneven) find_units(z);
  T worst = 0;
  graph_.for_rows([&](int r) {
    const T off = lack(r, x_[r], g_[r]);
    // A row whose multiplier acts can't be known to hold better than its sum is rounded.
    missing[r] = x_[r] != 0 && off < kEps ? kEps : off;
    if (missing[r] >= kEps) worst = most(worst, missing[r]);
  });
  worst = team_.max(worst);
  team_.sync();
  const T near = kTravel * worst, bound = T(a_.degree) * worst;
  const auto touches = [&](int r) {
    return magnitude(g_[r]) * norm_[r] <= near * unit(r) && scale_[r] > 0;
  };
  const auto may_be_free = [=](T value) { return value > -near && value < 1 + near; };
  const auto error_of = [&](u32 code) {
    return may_be_free(graph_.value_at(z, code)) ? graph_.value_at(error, code) : T(0);
  };
  const bool negligible = bound <= kLeast;
  bool doubt = false;
  if (!negligible) {
    share(z, missing, error);
    if (worst < kMost) {
      graph_.for_vars([&](int j) {
        doubt |= least(magnitude(z[j]), magnitude(z[j] - 1)) <= near && graph_.present(j);
      });
      graph_.for_rows([&](int r) { doubt |= x_[r] <= lo_[r] + near && touches(r); });
      doubt = team_.any(doubt);
    }
    if (doubt) spread(touches, error_of, may_be_free, z, error);
  }
  if (doubt) {
    graph_.by_row(
        Add(), [&](u32 code, T c) { return c != 0 ? error_of(code) : T(0); },
        [&](int r, T sum) {
          if (touches(r)) missing[r] = most(missing[r], sum);
        });
  }
  i8* row_side = a_.row_side + graph_.instance * graph_.num_rows();
  graph_.for_rows([&](int r) {
    int length = graph_.is_soft(r) ? 2 : a_.row_ptr[r + 1] - a_.row_ptr[r];
    if constexpr (V::kTrees) {
      if (r >= a_.first_cut && r < a_.first_cut + *graph_.cut_count()) {
        const int c = r - a_.first_cut, size = graph_.cut_size()[c];
        const bool outside = graph_.by_outside(c);
        length = size * (outside ? graph_.tree_of_cut(c).words - size + 1 : size - 1);
      }
    }
    const T off = negligible ? most(missing[r], T(length) * bound) : missing[r];
    const T margin = least(2 * off, kMost) + 8 * kEps * (1 + magnitude(x_[r]));
    const T slack = g_[r] * norm_[r] / unit(r);
    const bool low = x_[r] <= lo_[r] + margin, high = x_[r] >= hi_[r] - margin;
    i8 side = kInterior;
    if (low && high) {  // a pair with hardly any score
      side = magnitude(slack) <= margin ? kTied : slack < 0 ? kUpper : kLower;
    } else if ((low || high) && magnitude(slack) > margin) {
      side = low ? kLower : kUpper;
    }
    row_side[r] = scale_[r] > 0 ? side : i8(kNoSide);
  });
  double total = 0;
  if (team_.rank == 0) error[a_.n] = 0;
  const auto of_hub = [&](int j, T& value) {  // whose face tells what is free
    if constexpr (V::kHubs) {
      const int k = a_.hub_at[j];
      if (k < 0) return false;
      value = graph_.hub_v()[k];
      if (value > 1 - 16 * kEps) value = 1;  // on in all structures
      return true;
    } else {
      return false;
    }
  };
  const Io* scores = a_.eta_u + graph_.instance * a_.n;
  graph_.for_vars([&](int j) {
    T value = 0;
    i8 side = kNoSide;
    if (graph_.present(j)) {
      const T own = T(eta[j]), twice = 2 * (negligible ? bound : error[j]);
      const T margin = least(twice, kMost) + 8 * kEps * (magnitude(own) + magnitude(own - z[j]));
      value = z[j] <= margin ? T(0) : z[j] >= 1 - margin ? T(1) : z[j];
      side = value == 0 ? kLower : value == 1 ? kUpper : kInterior;
      if (of_hub(j, value)) side = kInterior;
      if (value != 0) total += double(value) * (double(scores[j]) - 0.5 * double(value));
    }
    a_.mu[graph_.instance * a_.n + j] = Io(value);
    a_.var_side[graph_.instance * a_.n + j] = side;
    error[j] = value;
  });
  team_.sync();
  if constexpr (V::kPairs) total += write_pairs(error, tau, row_side);
  if constexpr (V::kTrees) Cuts<V>(graph_).save();
  if constexpr (V::kHubs) {
    hubs_.save();
    total += hubs_.write_features(a_.mu_v + graph_.instance * graph_.num_scores() + a_.pairs);
  }
  check_rows(error);
  write_scalars(team_.sum(total), double(residual_));
}

// What a row lacks is shared by its free variables.
template <class V>
FM_DEVICE void Solver<V>::share(const T* z, Rows missing, T* error) const {
  T* t = graph_.t();
  graph_.by_row(
      Add(),
      [&](u32 code, T c) { return c != 0 && inside_box(graph_.value_at(z, code)) ? T(1) : T(0); },
      [&](int r, T free) { t[r] = missing[r] >= kEps ? missing[r] / most(free, T(1)) : T(0); });
  graph_.by_column(
      Add(), [&](int r, T c) { return c != 0 ? t[r] : T(0); },
      [&](int j, T sum) { error[j] = sum; });
  team_.sync();
}

// Errors travel along rows that hold tightly.
template <class V>
template <class Touches, class ErrorOf, class MayBeFree>
FM_DEVICE void Solver<V>::spread(Touches touches, ErrorOf error_of, MayBeFree may_be_free,
                                 const T* z, T* error) const {
  T* t = graph_.t();
  bool changed = true;
#pragma unroll 1
  for (int sweep = 0; changed && sweep < 32; ++sweep) {
    graph_.by_row(
        Max(), [&](u32 code, T c) { return c != 0 ? error_of(code) : T(0); },
        [&](int r, T largest) { t[r] = touches(r) ? largest : T(0); });
    changed = false;
    graph_.by_column(
        Max(), [&](int r, T c) { return c != 0 ? t[r] : T(0); },
        [&](int j, T largest) {
          if (!may_be_free(z[j]) || !(error[j] < largest)) return;
          error[j] = largest;
          changed = true;
        });
    changed = team_.any(changed);
    team_.sync();
  }
}

// The marginals of the pairs; returns what they add to the objective. Those that were left out have
// their multiplier at the upper bound if their first variable was the first to be found 0, else at
// 0: then they do not touch the other variable.
template <class V>
FM_DEVICE double Solver<V>::write_pairs(const T* mu, Io* tau, i8* row_side) const {
  double total = 0;
  graph_.for_pairs([&](int p) {
    const int first = a_.pair[2 * p], second = a_.pair[2 * p + 1];
    const int j1 = first >> 1, j2 = second >> 1;
    const T score = graph_.score[p];
    const T l1 = first & 1 ? 1 - mu[j1] : mu[j1], l2 = second & 1 ? 1 - mu[j2] : mu[j2];
    T value = score >= 0 ? least(l1, l2) : most(T(0), l1 + l2 - 1);
    const bool here1 = graph_.present(j1), here2 = graph_.present(j2);
    if (!here1 && !here2) value = 0;
    if (a_.zeros != 0 && here1 && here2 && (is_zero(j1) || is_zero(j2))) {
      const bool sooner = !is_zero(j2) || (is_zero(j1) && graph_.zero()[j1] <= graph_.zero()[j2]);
      const bool upper = score >= 0 && sooner;
      value = 0;
      tau[a_.hard + p] = Io(upper ? score : T(0));
      row_side[a_.hard + p] = upper ? kUpper : kLower;
    }
    a_.mu_v[graph_.instance * graph_.num_scores() + p] = Io(value);
    if (value != 0) total += double(score) * double(value);
  });
  return total;
}

// Nothing that is far off is called converged, however large the scores.
template <class V>
FM_DEVICE void Solver<V>::check_rows(const T* mu) {
  if (4 * kEps * (1 + largest_score_) * T(a_.longest) < kNear) return;
  T worst = 0;
  graph_.by_hard_row(
      T(0), Add(),
      [&](u32 code, int place) { return graph_.row_coef(code, place) * graph_.value_at(mu, code); },
      [&](int r, T product) {
        const T excess = product - rhs_[r];
        if (scale_[r] > 0) worst = most(worst, lo_[r] == 0 ? excess : magnitude(excess));
      });
  worst = team_.max(worst);
  if (worst <= kNear) return;
  residual_ = most(residual_, worst);
  if (status_ == kConverged) status_ = kStalled;
}

}  // namespace factormax
