// Rows beside the flows of a sequence, docs/math.md (70)-(72): which of them bind, and the
// multipliers with which they hold on a face of the flows. Faces and rows change together, where
// the dual would need a pass for every change of a multiplier. What a row lacks is how far it is
// from holding with equality, positive if it is violated.
#pragma once

#include "factormax/instance.hpp"
#include "factormax/structured/flow_face.hpp"

namespace factormax {

class FlowRows {
 public:
  static constexpr int kMost = 256;  // rows at most: the matrix of those that bind is dense

  // places: length times states of the sequence.
  void allocate(int rows, int entries, int places, Workspace& ws) {
    ptr_ = ws.take<std::int32_t>(rows + 1);
    used_ptr_ = ws.take<std::int32_t>(rows + 1);
    for (Span<std::int32_t>* a : {&place_, &next_, &row_, &used_place_}) {
      *a = ws.take<std::int32_t>(entries);
    }
    for (Span<double>* a : {&coef_, &used_coef_}) *a = ws.take<double>(entries);
    for (Span<double>* a : {&tau, &rhs_, &lo_, &hi_, &missing_, &old_missing_, &old_tau_}) {
      *a = ws.take<double>(rows);
    }
    binding_ = ws.take<std::uint8_t>(rows);
    active_ = ws.take<std::int32_t>(rows);
    first_ = ws.take<std::int32_t>(places);
    old_x_ = ws.take<double>(places);
    const std::int64_t most = std::min(rows, kMost);
    for (Span<double>* a : {&lack_, &step_}) *a = ws.take<double>(most);
    for (Span<double>* a : {&matrix_, &factor_}) *a = ws.take<double>(most * most);
  }

  // The rows of an instance, at most kMost, all of whose variables are those of the sequence.
  // place(j): the place of variable j in it.
  template <class T, class Place>
  void begin(const Instance<T>& p, const Place& place) {
    count_ = p.m;
    std::copy(p.ptr.data, p.ptr.data + p.m + 1, ptr_.data);
    for (int e = 0; e < p.ptr[p.m]; ++e) {
      place_[e] = place(p.col[e]);
      coef_[e] = double(p.coef[e]);
    }
    for (int r = 0; r < p.m; ++r) {
      rhs_[r] = double(p.rhs[r]);
      lo_[r] = double(p.lo[r]) * p.scale[r];
      hi_[r] = double(p.hi[r]) * p.scale[r];
      tau[r] = 0;
    }
  }

  Span<double> tau;  // (rows,) multipliers

  // Finds multipliers to begin with, and roughly the marginals that go with them: those of the
  // sequence without the scores of its edges, whose steps are rows like the others. Coordinate
  // descent, then Newton's method. docs/math.md (72). x: (L, S), from which the multipliers are
  // subtracted; mu: (L, S); level: (L,). Returns false if they run off.
  bool approach(double* x, double* mu, double* level, int steps, int states, const double* w) {
    const int places = steps * states;
    for (int t = 0; t < steps; ++t) {
      level[t] = *std::max_element(x + t * states, x + (t + 1) * states) - w[t * states];
    }
    const auto evaluate = [&] {
      for (int t = 0; t < steps; ++t) {
        level[t] = find_level(x + t * states, w + t * states, states, level[t], mu + t * states);
      }
      return find_binding(mu);
    };
    double worst = evaluate();
    for (int round = 0; round < kSweeps && worst > kRough; ++round) {
      sweep(x, mu, level, states, w);
      worst = evaluate();
    }
    for (int round = 0; round < kNewton && worst > kRough; ++round) {
      std::copy(x, x + places, old_x_.data);
      std::copy(missing_.data, missing_.data + count_, old_missing_.data);
      keep();
      newton(x, mu, steps, states, w);
      worst = evaluate();
      double before = slope(old_missing_);
      for (int cut = 0; cut < kCuts && worst > kRough; ++cut) {
        const double after = slope(missing_);
        if (!(after > -0.5 * before)) break;
        const double part = clip(before / (before - after), 0.1, 0.9);
        before *= part;
        for (int r = 0; r < count_; ++r) tau[r] = old_tau_[r] + part * (tau[r] - old_tau_[r]);
        for (int k = 0; k < places; ++k) {
          if (x[k] != old_x_[k]) x[k] = old_x_[k] + part * (x[k] - old_x_[k]);
        }
        worst = evaluate();
      }
    }
    double sum = worst;
    for (int r = 0; r < count_; ++r) sum += tau[r];
    for (int k = 0; k < places; ++k) sum += mu[k];
    return std::isfinite(sum);
  }

  // Finds the multipliers with which the binding rows hold on the face, docs/math.md (71), and
  // subtracts them from x. One that would leave its bounds stays there, and its row stops binding.
  void settle(FlowFace& face, const double* eta_v, double* x) {
    list_active();
    const int n = num_active_;
    if (n == 0) return;
    face.solve(x, eta_v);
    int used = 0;
    used_ptr_[0] = 0;
    for (int i = 0; i < n; ++i) {
      const int r = active_[i];
      lack_[i] = -rhs_[r];
      for (int e = ptr_[r]; e < ptr_[r + 1]; ++e) {
        if (!face.uses(place_[e])) continue;
        lack_[i] += coef_[e] * face.mu[place_[e]];
        used_place_[used] = place_[e];
        used_coef_[used++] = coef_[e];
      }
      used_ptr_[i + 1] = used;
    }
    for (int i = 0; i < n; ++i) {
      const int begin = used_ptr_[i];
      face.differentiate(used_place_.data + begin, used_coef_.data + begin,
                         used_ptr_[i + 1] - begin);
      for (int j = 0; j <= i; ++j) {
        double sum = 0;
        for (int e = used_ptr_[j]; e < used_ptr_[j + 1]; ++e) {
          sum += used_coef_[e] * face.mu[used_place_[e]];
        }
        matrix_[i * n + j] = matrix_[j * n + i] = sum;
      }
    }
    take_step(x);
  }

  // Whether all rows hold for mu. Those that do not hold start to bind. A binding row that has
  // slack where nothing moves stops binding, and its multiplier goes back to x. One that binds and
  // does not hold is left to the face.
  FlowFace::Holds hold(const double* mu, double tolerance, double* x) {
    FlowFace::Holds result = FlowFace::Holds::all;
    for (int r = 0; r < count_; ++r) {
      const double lack = product(r, mu) - rhs_[r];
      const bool low = tau[r] <= lo_[r], high = tau[r] >= hi_[r];
      if (std::fabs(lack) <= tolerance || (low && lack < 0) || (high && lack > 0)) continue;
      if (binding_[r] && (lack > 0 || !std::isfinite(lo_[r]))) {
        if (result == FlowFace::Holds::all) result = FlowFace::Holds::stuck;
        continue;
      }
      if (binding_[r]) change(r, tau[r], lo_[r], x);
      binding_[r] = !binding_[r];
      result = FlowFace::Holds::changed;
    }
    return result;
  }

  void keep() { std::copy(tau.data, tau.data + count_, old_tau_.data); }
  // Restores the multipliers that were kept. x comes without them, and is left less what they take.
  void restore(double* x) {
    for (int r = 0; r < count_; ++r) change(r, 0.0, old_tau_[r], x);
  }

 private:
  static constexpr double kRough = 0.02;  // what a row may lack at the start
  static constexpr double kRidge = 0.03;  // added for rows whose marginals are all 0 or 1
  static constexpr int kSweeps = 3;       // sweeps of coordinate descent
  static constexpr int kNewton = 20;      // most steps of Newton's method
  static constexpr int kCuts = 3;         // how often a step may be shortened

  double product(int r, const double* v) const {
    double sum = 0;
    for (int e = ptr_[r]; e < ptr_[r + 1]; ++e) sum += coef_[e] * v[place_[e]];
    return sum;
  }

  // Sets the multiplier of row r, which takes `from` from x now.
  void change(int r, double from, double to, double* x) {
    tau[r] = to;
    if (from == to) return;
    for (int e = ptr_[r]; e < ptr_[r + 1]; ++e) x[place_[e]] -= coef_[e] * (to - from);
  }

  // The slope of the dual along the step from the multipliers that were kept.
  double slope(Span<const double> missing) const {
    double sum = 0;
    for (int r = 0; r < count_; ++r) sum -= missing[r] * (tau[r] - old_tau_[r]);
    return sum;
  }

  void list_active() {
    num_active_ = 0;
    for (int r = 0; r < count_; ++r) {
      active_[num_active_] = r;
      num_active_ += binding_[r];
    }
  }

  // The level at which mu = (x - level) / w, where that is positive, sums to 1.
  FACTORMAX_VECTOR static double find_level(const double* x, const double* w, int states,
                                            double level, double* mu) {
    for (int tries = 0; tries < 8; ++tries) {
      double sum = -1, slope = 0;
#pragma omp simd reduction(+ : sum, slope)
      for (int s = 0; s < states; ++s) {
        const double give = x[s] > level ? 1 / w[s] : 0.0;
        const double value = x[s] > level ? (x[s] - level) * give : 0.0;
        mu[s] = value;
        sum += value;
        slope += give;
      }
      if (std::fabs(sum) < kRough / 16) break;
      level = slope > 0 ? level + sum / slope : *std::max_element(x, x + states) - w[0];
    }
    return level;
  }

  // Finds which rows bind at mu, and what all of them lack; returns the most that a binding one
  // lacks.
  double find_binding(const double* mu) {
    double worst = 0;
    for (int r = 0; r < count_; ++r) {
      missing_[r] = product(r, mu) - rhs_[r];
      binding_[r] = tau[r] > lo_[r] || missing_[r] > 0;
      if (binding_[r]) worst = std::max(worst, std::fabs(missing_[r]));
    }
    return worst;
  }

  // One row after the other, with the levels as they are.
  void sweep(double* x, double* mu, const double* level, int states, const double* w) {
    for (int r = 0; r < count_; ++r) {
      double lack = -rhs_[r], slope = 0;
      for (int e = ptr_[r]; e < ptr_[r + 1]; ++e) {
        const int k = place_[e];
        lack += coef_[e] * mu[k];
        slope += mu[k] > 0 ? coef_[e] * coef_[e] / w[k] : 0.0;
      }
      if (slope == 0) continue;
      const double before = tau[r], after = clip(before + lack / slope, lo_[r], hi_[r]);
      if (before == after) continue;
      change(r, before, after, x);
      for (int e = ptr_[r]; e < ptr_[r + 1]; ++e) {
        const int k = place_[e];
        mu[k] = std::max((x[k] - level[k / states]) / w[k], 0.0);
      }
    }
  }

  // Steps to where the binding rows lack nothing, provided that no marginal reaches or leaves 0.
  void newton(double* x, const double* mu, int steps, int states, const double* w) {
    list_active();
    const int n = num_active_;
    for (int k = 0; k < n * n; ++k) matrix_[k] = k % (n + 1) == 0 ? kRidge : 0.0;
    // first_, next_: the entries of these rows at a place, where mu is positive.
    for (int k = 0; k < steps * states; ++k) first_[k] = -1;
    for (int i = 0; i < n; ++i) {
      const int r = active_[i];
      lack_[i] = missing_[r];
      for (int e = ptr_[r]; e < ptr_[r + 1]; ++e) {
        if (!(mu[place_[e]] > 0)) continue;
        row_[e] = i;
        next_[e] = first_[place_[e]];
        first_[place_[e]] = e;
      }
    }
    for (int t = 0; t < steps; ++t) {
      double all = 0;
      int used = 0;
      for (int k = t * states; k < (t + 1) * states; ++k) {
        if (!(mu[k] > 0)) continue;
        all += 1 / w[k];
        for (int e = first_[k]; e >= 0; e = next_[e]) {
          used_place_[used] = row_[e];
          used_coef_[used++] = coef_[e] / w[k];
          for (int f = first_[k]; f >= 0; f = next_[f]) {
            matrix_[row_[e] * n + row_[f]] += coef_[e] * coef_[f] / w[k];
          }
        }
      }
      for (int a = 0; a < used; ++a) {
        for (int b = 0; b < used; ++b) {
          matrix_[used_place_[a] * n + used_place_[b]] -= used_coef_[a] * used_coef_[b] / all;
        }
      }
    }
    take_step(x);
  }

  // matrix * step = lack
  void take_step(double* x) {
    const int n = num_active_;
    for (bool again = true; again;) {
      solve(n);
      again = false;
      for (int i = 0; i < n; ++i) {
        const int r = active_[i];
        const double moved = tau[r] + step_[i];
        if (!binding_[r] || (moved >= lo_[r] && moved <= hi_[r])) continue;
        step_[i] = (moved < lo_[r] ? lo_[r] : hi_[r]) - tau[r];
        binding_[r] = 0;
        again = true;
        for (int j = 0; j < n; ++j) lack_[j] -= matrix_[j * n + i] * step_[i];
      }
    }
    for (int i = 0; i < n; ++i) {
      const int r = active_[i];
      change(r, tau[r], clip(tau[r] + step_[i], lo_[r], hi_[r]), x);
    }
  }

  // By Cholesky factors, over the rows that bind. A row that nothing moves stays as it is, and so
  // does one that moves just as those before it do.
  void solve(int n) {
    double largest = 0;
    for (int i = 0; i < n; ++i) largest = std::max(largest, matrix_[i * n + i]);
    for (int i = 0; i < n; ++i) {
      if (!binding_[active_[i]]) continue;
      double* row = factor_.data + i * n;
      double rest = lack_[i];
      for (int j = 0; j <= i; ++j) {
        if (!binding_[active_[j]]) {
          row[j] = 0;
          continue;
        }
        const double* other = factor_.data + j * n;
        double sum = matrix_[i * n + j];
        for (int k = 0; k < j; ++k) sum -= row[k] * other[k];
        if (j < i) {
          row[j] = sum * other[j];  // the diagonal holds inverses
          rest -= row[j] * step_[j];
        } else {
          row[j] = sum > 1e-9 * largest ? 1 / std::sqrt(sum) : 0;
        }
      }
      step_[i] = rest * row[i];
    }
    for (int i = n - 1; i >= 0; --i) {
      if (!binding_[active_[i]]) continue;
      double sum = step_[i];
      for (int k = i + 1; k < n; ++k) {
        if (binding_[active_[k]]) sum -= factor_[k * n + i] * step_[k];
      }
      step_[i] = sum * factor_[i * n + i];
    }
  }

  int count_ = 0;
  Span<std::int32_t> ptr_, place_;  // entries of the rows, as places in the sequence
  Span<double> coef_, rhs_, lo_, hi_;
  Span<std::uint8_t> binding_;  // (rows,)
  int num_active_ = 0;
  Span<std::int32_t> active_;                   // those that bind,
  Span<double> lack_, step_, matrix_, factor_;  // and their system
  Span<std::int32_t> used_ptr_, used_place_;    // their entries that move
  Span<double> used_coef_;
  Span<std::int32_t> first_, next_, row_;         // entries by places
  Span<double> missing_, old_missing_, old_tau_;  // (rows,) what all rows lack
  Span<double> old_x_;
};

}  // namespace factormax
