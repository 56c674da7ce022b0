// Structured factors that share no variable with each other, as hubs of the compact dual: on its
// variables a hub takes the place of the box, docs/math.md (17)-(18). Kernels for graphs without
// hubs have nothing of this.
#pragma once

#include "active_set.cuh"

namespace factormax {

template <class V, bool = V::kHubs>
class Hubs {
 public:
  FM_DEVICE explicit Hubs(const Graph<V>&) {}
};

template <class V>
class Hubs<V, true> {
  using T = typename V::T;
  using Io = typename V::Io;
  using Rows = RowArray<V>;

 public:
  FM_DEVICE explicit Hubs(const Graph<V>& graph) : graph_(graph), a_(graph.a), team_(graph.team) {}

  FM_DEVICE bool failed() const { return failed_; }

  // Takes the scores of an instance; those of variables are in eta().
  FM_DEVICE void begin() {
    T *own = graph_.hub_scores(), *x = graph_.hub_x();
    each_place([&](int k, int j) { x[k] = graph_.eta()[j]; });
#pragma unroll 1
    for (int k = team_.rank; k < a_.hub_scores; k += V::kTeam)
      own[k] = T(graph_.score[a_.pairs + k]);
    team_.sync();
    each_set([](StructureSet<V>& set) { set.begin(); });
  }

  FM_DEVICE void rescale(T ratio) const {
    T* own = graph_.hub_scores();
#pragma unroll 1
    for (int k = team_.rank; k < a_.hub_scores; k += V::kTeam) own[k] *= ratio;
  }

  // Takes the reduced score of a variable; false if no hub has it.
  FM_DEVICE bool takes(int j, T z) const {
    const int k = a_.hub_at[j];
    if (k >= 0) graph_.hub_x()[k] = z;
    return k >= 0;
  }
  // The same for another number, in `rest`.
  FM_DEVICE void take_rest(int j, T value) const {
    const int k = a_.hub_at[j];
    if (k >= 0) graph_.hub_rest()[k] = value;
  }

  // Finds the marginals at the reduced scores that were taken, also in mu. Returns this thread's
  // part of the value of the dual.
  FM_FUNCTION T evaluate(T* mu) {
    T value = 0;
    each_set([&](StructureSet<V>& set) {
      if (!failed_ && set.solve() != Found::kSolved) failed_ = true;
      if (!failed_) value += set.feature_value();
    });
    const T *x = graph_.hub_x(), *v = graph_.hub_v();
    each_place([&](int k, int j) {
      mu[j] = v[k];
      if (v[k] != 0) value += v[k] * (x[k] - T(0.5) * v[k]);
    });
    team_.sync();
    return value;
  }

  // Completes their faces, once they are solved; error: of x.
  FM_DEVICE void complete(T error) {
    each_set([&](StructureSet<V>& set) {
      if (!failed_ && set.complete(error) != Found::kSolved) failed_ = true;
    });
  }

  // The scores of the best structures for what is in x, in place of the reduced scores; of the
  // factors' own scores only -inf counts.
  FM_DEVICE T support() {
    T sum = 0;
    each_set(
        [&](StructureSet<V>& set) { sum += set.best_score(graph_.hub_x() + set.hub().first); });
    return sum;
  }

  // Writes the marginals of the factors' scores; returns this thread's part of what they score.
  FM_DEVICE double write_features(Io* out) const {
    double total = 0;
    T* sums = graph_.hub_scores();
    each_set([&](StructureSet<V>& set) {
      set.scatter_features(true, sums + set.hub().score);
#pragma unroll 1
      for (int k = team_.rank; k < set.hub().scores; k += V::kTeam) {
        const T value = sums[set.hub().score + k];
        out[set.hub().score + k] = Io(value);
        if (value != 0) {
          total += double(graph_.score[a_.pairs + set.hub().score + k]) * double(value);
        }
      }
    });
    return total;
  }

  FM_DEVICE void save() const {
    u16* saved = a_.hub_saved + graph_.instance * a_.hub_saved_stride;
    int calls = 0;
    each_set([&](StructureSet<V>& set) {
      set.save(saved + set.hub().saved);
      calls += set.calls();
    });
    if (team_.rank == 0) a_.calls[graph_.instance] = calls;
  }
  FM_DEVICE void write_nothing(Io* out, Io nan) const {
    u16* saved = a_.hub_saved + graph_.instance * a_.hub_saved_stride;
#pragma unroll 1
    for (int f = team_.rank; f < a_.num_hubs; f += V::kTeam) saved[Hub(a_, f).saved] = 0;
#pragma unroll 1
    for (int k = team_.rank; k < a_.hub_scores; k += V::kTeam) out[k] = nan;
    if (team_.rank == 0) a_.calls[graph_.instance] = 0;
  }
  // Restores what the gradient needs of them.
  FM_DEVICE void restore() const {
    const u16* saved = a_.hub_saved + graph_.instance * a_.hub_saved_stride;
    each_set([&](StructureSet<V>& set) { set.restore(saved + set.hub().saved); });
  }

  // ---- The reduced system ----------------------------------------------------------------------

  // Adds something positive to the diagonal of rows that `takes`, if hubs let them move.
  template <class Takes>
  FM_DEVICE void add_to_diagonal(Takes takes, Rows scale, Rows diagonal) const {
    each_set([&](StructureSet<V>& set) {
      if (set.is_vertex()) return;
      graph_.for_rows([&](int r) {
        if (!takes(r)) return;
        T squares = 0, low = infinity<T>(), high = -infinity<T>();
        each_entry(r, set.hub(), [&](int, int, T c) { squares += c * c; });
        if (squares == 0) return;
#pragma unroll 1
        for (int i = 0; i < set.count; ++i) {
          const T own = product(r, set, i);
          low = least(low, own);
          high = most(high, own);
        }
        if (high > low) diagonal[r] += squares * scale[r] * scale[r] / 2;
      });
    });
    team_.sync();
  }

  // v = J y on the variables of hubs, y in `rest`.
  FM_FUNCTION void apply(T* v) const {
    each_set([&](StructureSet<V>& set) {
      set.gather(graph_.hub_rest() + set.hub().first, set.work());
      set.project(set.work());
      spread(set, v);
    });
  }

  // Adds to the matrix of the active rows, lower triangle: A J A^T = B^T B, docs/math.md (52), with
  // B = (I - ee^T) L^-1 M^T A^T and e = L^-1 1 normalised.
  FM_FUNCTION void add_to_matrix(Rows scale, int count, T* matrix) const {
    const int* active = graph_.active();
    each_set([&](StructureSet<V>& set) {
      if (set.is_vertex()) return;
      const int size = set.count;
      T* B = graph_.hub_more();  // (size, count)
#pragma unroll 1
      for (int e = team_.rank; e < size * count; e += V::kTeam) {
        const int r = active[e % count];
        B[e] = product(r, set, e / count) * scale[r];
      }
      team_.sync();
#pragma unroll 1
      for (int j = 0; j < size; ++j) {  // L^-1, but for the division by the diagonal
        const T inverse = set.inverse()[j];
#pragma unroll 1
        for (int e = team_.rank; e < (size - j - 1) * count; e += V::kTeam) {
          const int i = j + 1 + e / count, q = e % count;
          B[i * count + q] -= set.factor_row(i)[j] * inverse * B[j * count + q];
        }
        team_.sync();
      }
      T norm = 0;
#pragma unroll 1
      for (int i = 0; i < size; ++i) norm += set.ones()[i] * set.ones()[i];
#pragma unroll 1
      for (int q = team_.rank; q < count; q += V::kTeam) {
        T along = 0;
#pragma unroll 1
        for (int i = 0; i < size; ++i) {
          B[i * count + q] *= set.inverse()[i];
          along += B[i * count + q] * set.ones()[i];
        }
#pragma unroll 1
        for (int i = 0; i < size; ++i) B[i * count + q] -= set.ones()[i] * (along / norm);
      }
      team_.sync();
#pragma unroll 1
      for (int e = team_.rank; e < count * (count + 1) / 2; e += V::kTeam) {
        const u32 corner = a_.corner[e];
        const int x = int(corner >> 16), y = int(corner & 0xffff);
        T sum = 0;
#pragma unroll 4
        for (int i = 0; i < size; ++i) sum += B[i * count + x] * B[i * count + y];
        matrix[e] += sum;
      }
      team_.sync();
    });
  }

  // v and the scores become M Q c and N Q c, c = M^T rest + N^T scores, docs/math.md (54).
  FM_FUNCTION void pull_back(T* v) const {
    each_set([&](StructureSet<V>& set) {
      T* scores = graph_.hub_scores() + set.hub().score;
      set.gather(graph_.hub_rest() + set.hub().first, set.work());
      set.gather_features(scores, set.work());
      set.project(set.work());
      spread(set, v);
      set.scatter_features(false, scores);
    });
  }

  // Takes their variables out of the box, for the reduced system.
  FM_DEVICE void leave_box(T* mu) const {
    each_place([&](int, int j) { mu[j] = 0; });
    team_.sync();
  }

  // Calls visit(k, j) for the places of the hubs' variables, and which these are.
  template <class Visit>
  FM_DEVICE void each_place(Visit visit) const {
#pragma unroll 1
    for (int k = team_.rank; k < a_.hub_vars; k += V::kTeam) visit(k, a_.hub_var[k]);
  }

 private:
  template <class Visit>
  FM_DEVICE void each_set(Visit visit) const {
#pragma unroll 1
    for (int f = 0; f < a_.num_hubs; ++f) {
      StructureSet<V> set(graph_, f);
      visit(set);
      team_.sync();
    }
  }

  // Calls visit(k, slot, c) for the entries of a row in a hub.
  template <class Visit>
  FM_DEVICE void each_entry(int r, const Hub& hub, Visit visit) const {
    graph_.each_entry(r, [&](int j, T c) {
      const int k = a_.hub_at[j] - hub.first;
      if (k >= 0 && k < hub.vars) visit(k, int(a_.hub_slot[hub.first + k]), c);
    });
  }

  // a_r . m_i
  FM_DEVICE T product(int r, const StructureSet<V>& set, int i) const {
    T sum = 0;
    each_entry(r, set.hub(), [&](int k, int slot, T c) { sum += set.has(i, k, slot) ? c : T(0); });
    return sum;
  }

  // v = M c on the variables of a hub, c in its scratch
  FM_DEVICE void spread(const StructureSet<V>& set, T* v) const {
    T* own = graph_.hub_more();
    set.scatter(set.work(), own);
#pragma unroll 1
    for (int k = team_.rank; k < set.hub().vars; k += V::kTeam) {
      v[a_.hub_var[set.hub().first + k]] = own[k];
    }
    team_.sync();
  }

  const Graph<V>& graph_;
  const Args<V>& a_;
  const Team<V::kTeam>& team_;
  bool failed_ = false;
};

}  // namespace factormax
