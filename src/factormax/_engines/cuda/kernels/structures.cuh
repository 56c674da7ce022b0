// The structures of a factor that its solution may use, by a team of threads: the twin of the
// core's `StructureSet` and `ActiveSet`, docs/math.md (48)-(53).
//
// Structures are lists of the variables that are on, at most one per slot. Sums over structures
// have a fixed order, and what follows from them is known to the whole team. Steps that depend on
// one another are left to one warp: a block would wait at every step.
//
// This file has the data of the set, and its products with vectors; what it does is in the files
// that are named below.
#pragma once

#include "oracles.cuh"

namespace factormax {

enum class Found : int {
  kSolved,
  kNone,   // the factor has no structure
  kFull,   // there is no room for the structures
  kLimit,  // too many calls of the oracle
};

template <class V>
class StructureSet {
  using T = typename V::T;
  static constexpr int kWorkers = V::kTeam < 32 ? V::kTeam : 32;

 public:
  FM_DEVICE StructureSet(const Graph<V>& graph, int f)
      : graph_(graph), team_(graph.team), hub_(graph.a, f) {
    char* base = graph.hubs() + hub_.memory;
    const int room = hub_.capacity + 1;  // one for the candidate
    T* next = reinterpret_cast<T*>(base);
    const auto take = [&](int size) {
      T* taken = next;
      next += size;
      return taken;
    };
    state_ = take(kState);
    factor_ = take(room * (room + 1) / 2);
    p_ = take(room);
    theta_ = take(room);
    y_ = take(room);
    ones_ = take(room);
    inverse_ = take(room);
    target_ = take(room);
    work_ = take(room);
    on_ = reinterpret_cast<u16*>(next);
    x_ = graph.hub_x() + hub_.first;
    v_ = graph.hub_v() + hub_.first;
    rest_ = graph.hub_rest() + hub_.first;
    scores_ = graph.hub_scores() + hub_.score;
    count = int(state_[0]);
    shift_ = state_[1];
    level_ = state_[2];
    given_ = int(state_[3]);
    calls_ = int(state_[4]);
  }

  int count;  // structures at hand

  FM_DEVICE const Hub& hub() const { return hub_; }
  FM_DEVICE int calls() const { return calls_; }
  FM_DEVICE bool is_vertex() const { return count <= 1; }
  FM_DEVICE T* work() const { return work_; }
  FM_DEVICE const T* ones() const { return ones_; }
  FM_DEVICE const T* inverse() const { return inverse_; }
  FM_DEVICE T* factor_row(int i) const { return factor_ + i * (i + 1) / 2; }
  FM_DEVICE u16* on(int i) const { return on_ + i * hub_.slots; }
  FM_DEVICE bool has(int i, int k, int slot) const { return on(i)[slot] == u16(k); }

  // Starts anew: nothing is known of the solution.
  FM_DEVICE void begin() {
    const T* param = graph_.a.hub_param + graph_.instance * graph_.a.hub_param_stride;
    given_ = look(team_, hub_, x_, param[hub_.number]);
    count = calls_ = 0;
    shift_ = level_ = 0;
#pragma unroll 1
    for (int k = team_.rank; k < hub_.vars; k += V::kTeam) v_[k] = 0;
    keep();
  }

  // Takes over structures that a solve has left.
  FM_DEVICE void restore(const u16* saved) {
    count = saved[0];
#pragma unroll 1
    for (int k = team_.rank; k < count * hub_.slots; k += V::kTeam) on_[k] = saved[1 + k];
#pragma unroll 1
    for (int i = team_.rank; i < count; i += V::kTeam) theta_[i] = 0;
    given_ = calls_ = 0;
    shift_ = level_ = 0;
    team_.sync();
    refactor();
    keep();
  }
  FM_DEVICE void save(u16* saved) const {
    if (team_.rank == 0) saved[0] = u16(count);
#pragma unroll 1
    for (int k = team_.rank; k < count * hub_.slots; k += V::kTeam) saved[1 + k] = on_[k];
  }

  // SparseMAP at x, from the structures at hand; v is then the marginals.
  FM_FUNCTION Found solve();

  // Adds structures, with probability 0, until those at hand span the optimal face: the structures
  // that tie for the best, as far as variables that are 0 or 1 stay so. The derivative needs that,
  // the solution does not. To be called after `solve` at the same x; error: of x. docs/math.md
  // (53).
  FM_FUNCTION Found complete(T error);

  // The score of the best structure for these scores; of the factor's own scores only -inf counts.
  // -inf if there is none.
  FM_FUNCTION T best_score(const T* scores) {
    if (!ask(scores, true)) return -infinity<T>();
    T sum = 0;
#pragma unroll 1
    for (int s = team_.rank; s < hub_.slots; s += V::kTeam) {
      if (on(count)[s] != kOff) sum += scores[on(count)[s]];
    }
    keep();
    return team_.sum(sum);
  }

  // This thread's part of eta_v . Np, to be summed.
  FM_DEVICE T feature_value() const {
    T sum = 0;
#pragma unroll 1
    for (int i = team_.rank; i < count; i += V::kTeam) {
      if (p_[i] != 0) sum += p_[i] * feature_score(i);
    }
    return sum;
  }

  // out_k = sum_i c_i n_ik, for all scores of the factor; c: p, or work
  FM_FUNCTION void scatter_features(bool of_p, T* out) const {
    const T* c = of_p ? p_ : work_;
#pragma unroll 1
    for (int k = team_.rank; k < hub_.scores; k += V::kTeam) out[k] = 0;
    team_.sync();
#pragma unroll 1
    for (int i = 0; i < count; ++i) {
      const T own = c[i];
      if (own == 0) continue;
      each_feature(hub_, on(i), [&](int k) {  // each score has one owner
        if (k % V::kTeam == team_.rank) out[k] += own;
      });
    }
    team_.sync();
  }
  // c_i += v . n_i
  FM_DEVICE void gather_features(const T* v, T* c) const {
#pragma unroll 1
    for (int i = team_.rank; i < count; i += V::kTeam) {
      T sum = c[i];
      each_feature(hub_, on(i), [&](int k) { sum += v[k]; });
      c[i] = sum;
    }
    team_.sync();
  }

  // c_i = v . m_i
  FM_FUNCTION void gather(const T* v, T* c) const {
#pragma unroll 1
    for (int i = team_.rank; i < count; i += V::kTeam) c[i] = sum_on(i, v);
    team_.sync();
  }

  // v = sum_i c_i m_i
  FM_FUNCTION void scatter(const T* c, T* v) const {
#pragma unroll 1
    for (int k = team_.rank; k < hub_.vars; k += V::kTeam) v[k] = 0;
    team_.sync();
#pragma unroll 1
    for (int s = team_.rank; s < hub_.slots; s += V::kTeam) {
#pragma unroll 4
      for (int i = 0; i < count; ++i) {
        const u16 k = on(i)[s];
        if (k != kOff) v[k] += c[i];
      }
    }
    team_.sync();
  }

  // c <- Q c,  Q = Z - Z11^TZ / (1^TZ1),  Z = (LL^T)^-1. At a vertex: 0.
  FM_FUNCTION void project(T* c) const;

 private:
  // See the core's `ActiveSet`.
  static constexpr T kGap = T(1e-13), kNearGap = T(1e-9), kFace = T(1e-10);
  static constexpr T kFarProbe = T(1e-6), kNearProbe = T(1e-8);
  static constexpr T kRounding = T(1e-15), kPositive = T(1e-9), kDependent = T(1e-10);
  static constexpr int kIdle = 64;
  static constexpr int kMostCalls = 4000;
  static constexpr int kState = 6;  // numbers kept from call to call

  FM_DEVICE void keep() const {
    team_.sync();
    if (team_.rank == 0) {
      state_[0] = T(count);
      state_[1] = shift_;
      state_[2] = level_;
      state_[3] = T(given_);
      state_[4] = T(calls_);
    }
    team_.sync();
  }
  FM_DEVICE Found leave(Found found) const {
    keep();
    return found;
  }

  FM_DEVICE bool is_full() const { return count == hub_.capacity && count <= hub_.vars; }

  // Asks for the best structure, which goes to place `count`.
  FM_FUNCTION bool ask(const T* scores, bool plain = false) {
    ++calls_;
    team_.sync();
    return find_best<V>(team_, hub_, given_, scores, scores_, plain, graph_.hub_scratch(),
                        on(count));
  }

  FM_DEVICE static T random(u32 turn, u32 k) {
    u32 h = (turn * 0x9E3779B9u) ^ (k * 0x85EBCA6Bu + 0xC2B2AE35u);
    h = (h ^ (h >> 16)) * 0x7FEB352Du;
    h = (h ^ (h >> 15)) * 0x846CA68Bu;
    h ^= h >> 16;
    return T(h) * T(4.656612873077393e-10) - 1;  // 2^-31
  }

  FM_DEVICE T sum_on(int i, const T* v) const {
    const u16* list = on(i);
    T sum = 0;
#pragma unroll 4
    for (int s = 0; s < hub_.slots; ++s) sum += list[s] != kOff ? v[list[s]] : T(0);
    return sum;
  }
  FM_DEVICE T feature_score(int i) const {
    T sum = 0;
    each_feature(hub_, on(i), [&](int k) { sum += scores_[k]; });
    return sum;
  }
  // The candidate's scores, for two scores of its variables.
  FM_FUNCTION Several<T, 2> candidate_scores(const T* first, const T* second) const {
    T sums[3] = {0, 0, 0};
    const u16* list = on(count);
#pragma unroll 1
    for (int s = team_.rank; s < hub_.slots; s += V::kTeam) {
      if (list[s] == kOff) continue;
      sums[0] += first[list[s]];
      sums[1] += second[list[s]];
    }
    each_feature(hub_, list, [&](int k) { sums[2] += scores_[k]; }, team_.rank, V::kTeam);
    team_.reduce(sums, Add());
    return {{sums[0] + sums[2], sums[1] + sums[2]}};
  }

  FM_DEVICE T overlap(int a, int b) const {
    const u16 *first = on(a), *second = on(b);
    int same = 0;
#pragma unroll 4
    for (int s = 0; s < hub_.slots; ++s) same += first[s] == second[s] && first[s] != kOff;
    return T(same);
  }

  FM_DEVICE static void wait() {
    if constexpr (kWorkers > 1) __syncwarp();
  }

  // A warp holds a vector in registers: member k has entries k, k + 32, ...
  static constexpr int kChunks = V::kStructureChunks * 32 / kWorkers;

  FM_DEVICE void average() const { scatter(p_, v_); }

  // The smaller of two ratios, the first of equal ones.
  struct Sooner {
    FM_DEVICE Several<T, 2> operator()(Several<T, 2> a, Several<T, 2> b) const {
      return b.at[0] < a.at[0] || (b.at[0] == a.at[0] && b.at[1] < a.at[1]) ? b : a;
    }
  };

  // In structure_factor.cuh.
  FM_FUNCTION void forward_substitute(T* b, int rows) const;
  FM_FUNCTION void back_substitute(T* b) const;
  FM_DEVICE void load(const T* b, int size, T (&own)[kChunks]) const;
  FM_DEVICE void store(const T (&own)[kChunks], int size, T* b) const;
  FM_FUNCTION bool append(T theta, bool force);
  FM_FUNCTION void remove(int i);
  FM_DEVICE void rotate(int i) const;
  FM_FUNCTION void refactor();

  // In active_set.cuh.
  FM_FUNCTION void set_scores();
  FM_DEVICE T reduce() const;
  FM_DEVICE T spread() const;
  FM_DEVICE void aim();
  FM_FUNCTION bool settle(bool fresh);
  FM_DEVICE void accept() const;
  FM_DEVICE void prune(T least_p);
  FM_FUNCTION bool swap_dependent(T theta);

  const Graph<V>& graph_;
  const Team<V::kTeam>& team_;
  Hub hub_;
  T* state_;
  T* factor_;  // L, row after row
  T *p_, *theta_, *y_, *ones_, *inverse_, *target_, *work_;
  u16* on_;
  T *x_, *v_, *rest_;
  const T* scores_;
  T shift_, level_;
  int given_, calls_;
};

}  // namespace factormax
