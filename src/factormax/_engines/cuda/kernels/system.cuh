// The reduced system (A_I J A_I^T) t = b of the exact finish, docs/math.md (21), and of the
// gradient, (42). It is over the active rows I, the free variables, whose mu is inside the box, and
// hubs, where J is M Q M^T. Variables of hubs must count as outside the box: mu() is 0 for them.
//
// It is factorised as L D L^T in shared memory, or solved by conjugate gradients where it does not
// fit. Rows are scaled, so that its diagonal is at most about 1.
#pragma once

#include "hubs.cuh"

namespace factormax {

template <class V>
class System {
  using T = typename V::T;
  using Rows = RowArray<V>;

 public:
  FM_DEVICE System(const Graph<V>& graph, const Hubs<V>& hubs, Rows scale)
      : graph_(graph), hubs_(hubs), scale_(scale) {}

  int count = 0;  // active rows

  // Numbers the rows with a positive diagonal; place is -1 for all others. Returns their number.
  FM_DEVICE int number(Rows diagonal) {
    const Graph<V>& graph = graph_;
    int *place = graph.place(), *active = graph.active();
    count = 0;
    int ahead = 0;
#pragma unroll 1
    for (int first = 0; first < graph.num_rows(); first += V::kTeam) {
      const int r = first + graph.team.rank;
      const bool in = r < graph.num_rows() && diagonal[r] > 0;
      const int i = graph.team.number(in, count);
      if (r < graph.num_rows()) place[r] = in ? i : -1;
      if (in && i < graph.a.most_active) {
        active[i] = r;
        ahead += r < graph.a.lead;
      }
    }
    lead_ = graph.team.sum(ahead);
    graph.team.sync();
    return count;
  }

  FM_DEVICE bool dense() const { return count <= graph_.a.most_active; }

  // out_r = (A J A^T x)_r for all rows: x is taken where `takes`; afterwards v() holds J A^T x.
  template <class Takes, class Write>
  FM_DEVICE void multiply(Rows x, Takes takes, Write write) const {
    const Graph<V>& graph = graph_;
    T *t = graph.t(), *v = graph.v();
    const T* mu = graph.mu();
    graph.for_rows([&](int r) { t[r] = takes(r) ? x[r] * scale_[r] : T(0); });
    graph.team.sync();
    graph.by_column(
        Add(), [&](int r, T c) { return c * t[r]; },
        [&](int j, T sum) {
          if constexpr (V::kHubs) hubs_.take_rest(j, sum);
          v[j] = inside_box(mu[j]) ? sum : T(0);
        });
    graph.team.sync();
    if constexpr (V::kHubs) hubs_.apply(v);
    graph.by_row(
        Add(), [&](u32 code, T c) { return c * Graph<V>::value_at(v, code); },
        [&](int r, T product) { write(r, product * scale_[r]); });
  }

  // L D L^T of the matrix with a small ridge; below the diagonal stays L D.
  FM_DEVICE void factorise(Rows diagonal) {
    assemble(diagonal);
    const Graph<V>& graph = graph_;
    const auto& team = graph.team;
    T *m = graph.matrix(), *inverse = graph.inverse();
    T trace = 0;
#pragma unroll 1
    for (int i = team.rank; i < count; i += V::kTeam) trace += row(m, i)[i];
    const T ridge = kRidge * team.sum(trace) / T(count);
#pragma unroll 1
    for (int i = team.rank; i < count; i += V::kTeam) {
      row(m, i)[i] += ridge;
      if (i < lead_) inverse[i] = 1 / row(m, i)[i];
    }
    team.sync();
    if (lead_ > 0 && lead_ < count) eliminate_lead(m, inverse);
#pragma unroll 1
    for (int j = lead_; j < count; ++j) {
      const T pivot = 1 / most(row(m, j)[j], ridge / 2);
      if (team.rank == 0) inverse[j] = pivot;
      eliminate(m, j, pivot);
      team.sync();
    }
  }

  // b() becomes the solution.
  FM_DEVICE void substitute() const {
    const Graph<V>& graph = graph_;
    const auto& team = graph.team;
    constexpr int kWorkers = V::kTeam < 32 ? V::kTeam : 32;
    const T *m = graph.matrix(), *inverse = graph.inverse();
    T* b = graph.b();
    if (team.rank < kWorkers) {  // one warp: a block would wait at every step
      const auto wait = [] {
        if (kWorkers > 1) __syncwarp();
      };
#pragma unroll 1
      for (int i = lead_ + team.rank; i < count; i += kWorkers) {
        T sum = 0;
#pragma unroll 4
        for (int k = 0; k < lead_; ++k) sum += row(m, i)[k] * inverse[k] * b[k];
        b[i] -= sum;
      }
      wait();
#pragma unroll 1
      for (int j = lead_; j < count; ++j) {
        const T known = b[j] * inverse[j];
#pragma unroll 1
        for (int i = j + 1 + team.rank; i < count; i += kWorkers) b[i] -= row(m, i)[j] * known;
        wait();
      }
#pragma unroll 1
      for (int i = team.rank; i < count; i += kWorkers) b[i] *= inverse[i];
      wait();
#pragma unroll 1
      for (int i = count - 1; i >= lead_; --i) {
        const T known = b[i];
#pragma unroll 1
        for (int k = team.rank; k < i; k += kWorkers) b[k] -= row(m, i)[k] * inverse[k] * known;
        wait();
      }
    }
    team.sync();
  }

  // Jacobi-preconditioned conjugate gradients from 0: x becomes the solution, over the active rows;
  // b is overwritten by the residual, the largest of which is returned.
  FM_DEVICE T conjugate_gradients(Rows b, Rows x, Rows p, Rows q, Rows diagonal, int steps,
                                  T goal) {
    const Graph<V>& graph = graph_;
    const auto& team = graph.team;
    const int* place = graph.place();
    const auto active = [=](int r) { return place[r] >= 0; };
    T rho = 0, size = 0;
    graph.for_rows([&](int r) {
      x[r] = p[r] = 0;
      if (!active(r)) return;
      p[r] = b[r] / diagonal[r];
      rho += b[r] * p[r];
      size = most(size, magnitude(b[r]));
    });
    rho = team.sum(rho);
    size = team.max(size);
#pragma unroll 1
    for (int step = 0; step < steps && size > goal && rho > 0; ++step) {
      T curvature = 0;
      multiply(p, active, [&](int r, T value) {
        q[r] = value;
        if (active(r)) curvature += p[r] * value;
      });
      curvature = team.sum(curvature);
      if (!(curvature > 0)) break;
      const T alpha = rho / curvature;
      T next = 0;
      size = 0;
      graph.for_rows([&](int r) {
        if (!active(r)) return;
        x[r] += alpha * p[r];
        b[r] -= alpha * q[r];
        next += b[r] * b[r] / diagonal[r];
        size = most(size, magnitude(b[r]));
      });
      next = team.sum(next);
      size = team.max(size);
      const T beta = next / rho;
      rho = next;
      graph.for_rows([&](int r) {
        if (active(r)) p[r] = b[r] / diagonal[r] + beta * p[r];
      });
    }
    return size;
  }

 private:
  static constexpr T kRidge = Constants<T>::kDouble ? T(1e-9) : T(1e-6);

  FM_DEVICE static T* row(T* m, int i) { return m + i * (i + 1) / 2; }
  FM_DEVICE static const T* row(const T* m, int i) { return m + i * (i + 1) / 2; }

  // Fills in the lower triangle.
  FM_DEVICE void assemble(Rows diagonal) const {
    const Graph<V>& graph = graph_;
    T* m = graph.matrix();
    const int* active = graph.active();
#pragma unroll 1
    for (int e = graph.team.rank; e < count * (count + 1) / 2; e += V::kTeam) m[e] = 0;
    graph.team.sync();
    if constexpr (V::kSimple) {  // no two variables are both in the same two rows
      graph.for_vars([&](int j) { meet_all(j, m); });
    }
#pragma unroll 1
    for (int i = graph.team.rank; i < count; i += V::kTeam) {
      const int r = active[i];
      T* own = row(m, i);
      own[i] = V::kHubs ? of_box(r) : diagonal[r];
      // The leading rows share no variable with those before them.
      if (V::kSimple || i < lead_) continue;
      const T scale = scale_[r];
      if (graph.is_soft(r)) {
        graph.pair_row(r - graph.a.hard, Add(), [&](u32 code, T c) {
          meet(Graph<V>::index_of(code), c * scale, i, own);
          return T(0);
        });
        continue;
      }
#pragma unroll 1
      for (int k = graph.a.row_ptr[r]; k < graph.a.row_ptr[r + 1]; ++k) {
        const int entry = graph.a.row_entry[k];
        meet(entry >> 1, graph.row_coef(u32(entry), k) * scale, i, own);
      }
    }
    graph.team.sync();
    if constexpr (V::kTrees) add_cuts(m);
    if constexpr (V::kHubs) hubs_.add_to_matrix(scale_, count, m);
  }

  // Adds what the rows of cuts, the last of the hard ones, have in common with others.
  FM_DEVICE void add_cuts(T* m) const {
    const Graph<V>& graph = graph_;
    const int* active = graph.active();
    const T* mu = graph.mu();
    const int hard = graph.a.hard, first = graph.a.first_cut;
    const auto is_cut = [=](int r) { return r >= first && r < hard; };
    // The other row of a pair may be soft, and come later. Each pair has a warp, for rows can be
    // long.
    constexpr int kLanes = V::kTeam < 32 ? V::kTeam : 32;
    const int warp = graph.team.rank / kLanes, lane = graph.team.rank % kLanes;
#pragma unroll 1
    for (int i = 0; i < count; ++i) {
      if (active[i] < first) continue;
#pragma unroll 1
      for (int p = warp; p < i; p += V::kTeam / kLanes) {
        const bool own = is_cut(active[i]);
        if (!own && !is_cut(active[p])) continue;
        const int cut = (own ? active[i] : active[p]) - first, r = own ? active[p] : active[i];
        T sum = 0;
        graph.each_entry(
            r,
            [&](int j, T c) {
              if (inside_box(mu[j]) && graph.cuts(cut, j)) sum += c;
            },
            lane, kLanes);
        sum = over_lanes<kLanes>(sum, Add());
        if (lane == 0) row(m, i)[p] += sum * graph.cut_coef(cut) * scale_[r] * scale_[first + cut];
      }
    }
    graph.team.sync();
  }

  // The part of the diagonal that is due to the box.
  FM_DEVICE T of_box(int r) const {
    T squares = 0;
    graph_.each_entry(r, [&](int j, T c) { squares += inside_box(graph_.mu()[j]) ? c * c : T(0); });
    return squares * scale_[r] * scale_[r];
  }

  // Adds what the rows of variable j have in common.
  FM_DEVICE void meet_all(int j, T* m) const {
    const Graph<V>& graph = graph_;
    if (!inside_box(graph.mu()[j])) return;
    const int* place = graph.place();
    const int begin = graph.a.var_ptr[j], end = graph.a.var_ptr[j + 1];
#pragma unroll 1
    for (int k = begin; k < end; ++k) {
      const int i = place[graph.a.var_entry[k] >> 2];
      if (i < 0) continue;
      const T own = var_coef(k);
#pragma unroll 1
      for (int l = begin; l < k; ++l) {
        const int p = place[graph.a.var_entry[l] >> 2];
        if (p >= 0) row(m, i > p ? i : p)[i > p ? p : i] = own * var_coef(l);
      }
    }
  }

  // Adds what row i, with this coefficient of variable j, has in common with the rows before it:
  // each row has one owner, so that sums have a fixed order.
  FM_DEVICE void meet(int j, T coef, int i, T* own) const {
    const Graph<V>& graph = graph_;
    if (!inside_box(graph.mu()[j])) return;
    const int* place = graph.place();
#pragma unroll 1
    for (int k = graph.a.var_ptr[j]; k < graph.a.var_ptr[j + 1]; ++k) {
      const int p = place[graph.a.var_entry[k] >> 2];
      if (p >= 0 && p < i) own[p] += coef * var_coef(k);
    }
  }

  // The coefficient of a variable's entry, scaled.
  FM_DEVICE T var_coef(int k) const {
    const int entry = graph_.a.var_entry[k], r = entry >> 2;
    return graph_.var_coef(r, entry & 2, entry & 1, graph_.a.var_at[k]) * scale_[r];
  }

  // Calls visit(x, y) for all y <= x < size, shared by the team.
  template <class Visit>
  FM_DEVICE void for_corners(int size, Visit visit) const {
#pragma unroll 1
    for (int e = graph_.team.rank; e < size * (size + 1) / 2; e += V::kTeam) {
      const u32 corner = graph_.a.corner[e];
      visit(int(corner >> 16), int(corner & 0xffff));
    }
  }

  // Eliminates the leading rows, whose block is diagonal, from all others at once.
  FM_DEVICE void eliminate_lead(T* m, const T* inverse) const {
    for_corners(count - lead_, [&](int x, int y) {
      const T *first = row(m, lead_ + x), *second = row(m, lead_ + y);
      T sum = 0;
#pragma unroll 4
      for (int k = 0; k < lead_; ++k) sum += first[k] * second[k] * inverse[k];
      row(m, lead_ + x)[lead_ + y] -= sum;
    });
    graph_.team.sync();
  }

  // Eliminates row j from those after it.
  FM_DEVICE void eliminate(T* m, int j, T pivot) const {
    for_corners(count - j - 1, [&](int x, int y) {
      T* own = row(m, j + 1 + x);
      own[j + 1 + y] -= own[j] * pivot * row(m, j + 1 + y)[j];
    });
  }

  const Graph<V>& graph_;
  const Hubs<V>& hubs_;
  Rows scale_;
  int lead_ = 0;
};

}  // namespace factormax
