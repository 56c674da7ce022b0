// The gradient of a solve: (A_I J A_I^T) t = A_I J d, grad eta = J (d - A_I^T t), docs/math.md
// (42), with what is active and what is free as the solve left it.
#pragma once

#include "cuts.cuh"
#include "system.cuh"

namespace factormax {

template <class V>
class Vjp {
  using T = typename V::T;
  using Io = typename V::Io;
  using Rows = RowArray<V>;

 public:
  FM_DEVICE explicit Vjp(const Graph<V>& graph)
      : graph_(graph),
        a_(graph.a),
        team_(graph.team),
        var_side_(a_.var_side + graph.instance * a_.n),
        row_side_(a_.row_side + graph.instance * graph.num_rows()),
        scale_(graph.row_array(0)),
        diagonal_(graph.row_array(1)),
        rhs_(graph.row_array(2)),
        x_(graph.row_array(3)),
        hubs_(graph) {}

  // Whether an earlier launch solved its system.
  FM_DEVICE static bool is_done(const Args<V>& args, i64 instance) {
    return args.residual[instance] <= args.retry_above;
  }

  FM_DEVICE void operator()() {
    team_.sync();
    if constexpr (V::kTrees) Cuts<V>(graph_).restore();
    if constexpr (V::kHubs) hubs_.restore();
    const T size = take_gradient();
    take_scales();
    find_right_hand_side();
    System<V> system(graph_, hubs_, scale_);
    T left = 0;
    if (system.number(diagonal_) > 0) left = solve(system);
    write(system.count > 0);
    if (team_.rank == 0) a_.residual[graph_.instance] = size > 0 ? double(left / size) : 0.0;
  }

 private:
  static constexpr T kGoal = Constants<T>::kDouble ? T(1e-12) : T(1e-5);
  static constexpr int kRefinements = 4;  // to make up for the digits that the ridge costs

  struct Slopes {
    T first, second;
  };

  // How the value of a pair moves with its two variables; at a tie, the mean of both sides.
  FM_DEVICE Slopes slopes(int p) const {
    const int first = a_.pair[2 * p], second = a_.pair[2 * p + 1];
    const T sign1 = first & 1 ? T(-1) : T(1), sign2 = second & 1 ? T(-1) : T(1);
    const bool here1 = var_side_[first >> 1] != kNoSide, here2 = var_side_[second >> 1] != kNoSide;
    const i8 side = row_side_[a_.hard + p];
    if (here1 && here2) {
      const T upper = side == kTied ? T(0.5) : T(side == kUpper);
      return {upper * sign1, (graph_.score[p] >= 0 ? 1 - upper : upper) * sign2};
    }
    return {here1 && sign2 < 0 ? sign1 : T(0), here2 && sign1 < 0 ? sign2 : T(0)};
  }

  // d, the gradient of mu with what comes through the values of the pairs, goes where eta was;
  // mu() tells what is free. Returns the largest of d.
  FM_DEVICE T take_gradient() const {
    T* d = graph_.eta();
    const Io* grad_mu = a_.grad_mu == nullptr ? nullptr : a_.grad_mu + graph_.instance * a_.n;
    const Io* grad_v = a_.grad_mu_v == nullptr
                           ? nullptr
                           : a_.grad_mu_v + graph_.instance * i64(graph_.num_scores());
    graph_.set_dummies();
    graph_.for_vars([&](int j) {
      graph_.mu()[j] = var_side_[j] == kInterior && !in_hub(j) ? T(0.5) : T(0);
      d[j] = grad_mu == nullptr ? T(0) : T(grad_mu[j]);
    });
    team_.sync();
    if (V::kPairs && grad_v != nullptr) {
      graph_.by_variable(
          T(0), Add(),
          [&](u32 code, int) {
            const int p = graph_.index_of(code) - a_.hard;
            if (p < 0 || p >= a_.pairs) return T(0);
            const Slopes slope = slopes(p);
            return (graph_.is_second(code) ? slope.second : slope.first) * T(grad_v[p]);
          },
          [&](int j, T sum) { d[j] += sum; });
      team_.sync();
    }
    T size = 0;
    graph_.for_vars([&](int j) {
      if (inside_box(graph_.mu()[j]) || in_hub(j)) size = most(size, magnitude(d[j]));
    });
    if constexpr (V::kHubs) size = most(size, take_hub_gradient(grad_v));
    return team_.max(size);
  }

  FM_DEVICE bool in_hub(int j) const {
    if constexpr (V::kHubs) return a_.hub_at[j] >= 0;
    return false;
  }
  // The gradient of the hubs' scores.
  FM_DEVICE T take_hub_gradient(const Io* grad_v) const {
    T size = 0;
#pragma unroll 1
    for (int k = team_.rank; k < a_.hub_scores; k += V::kTeam) {
      const T own = grad_v == nullptr ? T(0) : T(grad_v[a_.pairs + k]);
      graph_.hub_scores()[k] = own;
      size = most(size, magnitude(own));
    }
    return size;
  }
  // v() and the hubs' scores become M Q c and N Q c on hubs, with c = M^T (d - taken) + N^T of the
  // gradient of the hubs' scores.
  template <class Taken>
  FM_DEVICE void pull_back_hubs(Taken taken) const {
    const T* d = graph_.eta();
    hubs_.each_place([&](int k, int j) { graph_.hub_rest()[k] = d[j] - taken(k); });
    team_.sync();
    hubs_.pull_back(graph_.v());
  }

  FM_DEVICE void take_scales() const {
    if (a_.scale != nullptr) {
      graph_.for_hard_rows([&](int r) {
        if (!V::kTrees || r < a_.first_cut) scale_[r] = a_.scale[r];
      });
      if constexpr (V::kTrees) {
#pragma unroll 1
        for (int c = *graph_.cut_count() + team_.rank; c < a_.most_cuts; c += V::kTeam) {
          scale_[a_.first_cut + c] = 0;
        }
        Cuts<V>(graph_).scale_rows(
            0, [&](int j) { return var_side_[j] != kNoSide; },
            [&](int c, T scale) { scale_[a_.first_cut + c] = scale; });
      }
    } else {
      graph_.by_hard_row(
          T(0), Add(),
          [&](u32 code, int place) {
            const int j = graph_.index_of(code);
            const T c = graph_.row_coef(code, place);
            return j < a_.n && var_side_[j] != kNoSide ? c * c : T(0);
          },
          [&](int r, T squares) { scale_[r] = squares > 0 ? T(1 / sqrt(squares)) : T(0); });
    }
    graph_.for_pairs([&](int p) { scale_[a_.hard + p] = Constants<T>::kHalfRoot2; });
    team_.sync();
  }

  FM_DEVICE void find_right_hand_side() const {
    const T* mu = graph_.mu();
    const T* d = graph_.eta();
    graph_.by_row(
        Add(), [&](u32 code, T c) { return inside_box(graph_.value_at(mu, code)) ? c * c : T(0); },
        [&](int r, T squares) {
          diagonal_[r] = row_side_[r] == kInterior ? squares * scale_[r] * scale_[r] : T(0);
        });
    if constexpr (V::kHubs) {
      hubs_.add_to_diagonal([&](int r) { return row_side_[r] == kInterior; }, scale_, diagonal_);
      pull_back_hubs([](int) { return T(0); });
      T* v = graph_.v();
      graph_.for_vars([&](int j) {
        if (!in_hub(j)) v[j] = inside_box(mu[j]) ? d[j] : T(0);
      });
      team_.sync();
      graph_.by_row(
          Add(), [&](u32 code, T c) { return c * graph_.value_at(v, code); },
          [&](int r, T product) { rhs_[r] = diagonal_[r] > 0 ? product * scale_[r] : T(0); });
      return;
    }
    graph_.by_row(
        Add(),
        [&](u32 code, T c) {
          return inside_box(graph_.value_at(mu, code)) ? c * graph_.value_at(d, code) : T(0);
        },
        [&](int r, T product) { rhs_[r] = diagonal_[r] > 0 ? product * scale_[r] : T(0); });
  }

  // v() becomes J A^T t. Returns the largest residual.
  FM_DEVICE T solve(System<V>& system) const {
    T size = 0;
    graph_.for_rows([&](int r) { size = most(size, magnitude(rhs_[r])); });
    const T goal = team_.max(size) * kGoal;
    const int* place = graph_.place();
    const auto active = [=](int r) { return place[r] >= 0; };
    if (!system.dense()) {
      T left = 0;
      if constexpr (V::kConjugate) {
        const Rows p = graph_.row_array(4), q = graph_.row_array(5);
        const int steps = 4 * least(a_.n, system.count) + 50;
        left = system.conjugate_gradients(rhs_, x_, p, q, diagonal_, steps, goal);
        system.multiply(x_, active, [](int, T) {});
      }
      return left;
    }
    T* b = graph_.b();
    graph_.for_rows([&](int r) {
      x_[r] = 0;
      if (active(r)) b[place[r]] = rhs_[r];
    });
    system.factorise(diagonal_);
    T left = 0;
#pragma unroll 1
    for (int turn = 0; turn < kRefinements; ++turn) {
      system.substitute();
      graph_.for_rows([&](int r) {
        if (active(r)) x_[r] += b[place[r]];
      });
      left = 0;
      system.multiply(x_, active, [&](int r, T product) {
        if (!active(r)) return;
        b[place[r]] = rhs_[r] - product;
        left = most(left, magnitude(rhs_[r] - product));
      });
      left = team_.max(left);
      team_.sync();
      if (left <= goal) break;
    }
    return left;
  }

  FM_DEVICE void write(bool moved) const {
    T* y = graph_.eta();
    const T *mu = graph_.mu(), *v = graph_.v();
    if constexpr (V::kHubs) write_hubs(moved);
    graph_.for_vars([&](int j) {
      T own = inside_box(mu[j]) ? y[j] - (moved ? v[j] : T(0)) : T(0);
      if (in_hub(j)) own = v[j];
      a_.grad_eta_u[graph_.instance * a_.n + j] = Io(own);
      y[j] = own;
    });
    team_.sync();
    graph_.for_pairs([&](int p) {
      const Slopes slope = slopes(p);
      a_.grad_eta_v[graph_.instance * i64(graph_.num_scores()) + p] =
          Io(slope.first * y[a_.pair[2 * p] >> 1] + slope.second * y[a_.pair[2 * p + 1] >> 1]);
    });
  }

  // v() becomes the gradient of the hubs' variables. The last product has left A^T t in `rest`.
  FM_DEVICE void write_hubs(bool moved) const {
    const Io* grad_v = a_.grad_mu_v == nullptr
                           ? nullptr
                           : a_.grad_mu_v + graph_.instance * i64(graph_.num_scores());
    take_hub_gradient(grad_v);
    pull_back_hubs([&](int k) { return moved ? graph_.hub_rest()[k] : T(0); });
    Io* out = a_.grad_eta_v + graph_.instance * i64(graph_.num_scores()) + a_.pairs;
#pragma unroll 1
    for (int k = team_.rank; k < a_.hub_scores; k += V::kTeam) out[k] = Io(graph_.hub_scores()[k]);
  }

  const Graph<V>& graph_;
  const Args<V>& a_;
  const Team<V::kTeam>& team_;
  const i8 *var_side_, *row_side_;
  Rows scale_, diagonal_, rhs_, x_;
  Hubs<V> hubs_;
};

}  // namespace factormax
