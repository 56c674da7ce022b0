// The structures of a factor that its solution may use, by a team of threads: the twin of the
// core's `StructureSet` and `ActiveSet`, docs/math.md (48)-(53).
//
// Structures are lists of the variables that are on, at most one per slot. Sums over structures
// have an order, and what follows from them is known to the whole team. Steps that depend on one
// another are left to one warp: a block would wait at every step.
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

  // Nothing is known of the solution.
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
  FM_FUNCTION Found solve() {
    if (count == 0) {
      if (!ask(x_)) return leave(Found::kNone);
      shift_ = candidate_scores(x_, x_).at[0];
      append(0, false);
      if (team_.rank == 0) p_[0] = 1;
      team_.sync();
    } else {
      set_scores();
    }
    bool fresh = false;  // the last structure was just added
    bool refactored = false;
    T best = 0;
    int idle = -1;  // steps without gain: a few in a row are usual at ties
    const int most_calls = calls_ + kMostCalls;
#pragma unroll 1
    for (;;) {
      const bool goes_on = settle(fresh);
      average();
      if (!goes_on) break;  // what the oracle offered was no better, but for rounding
      const T squares = reduce();
      const T value = level_ + squares / 2;
      const bool gained = idle < 0 || value > best + 4 * Constants<T>::kEps * magnitude(best);
      if (gained) best = value;
      idle = gained ? 0 : idle + 1;
      if (idle > kIdle + count) break;  // as far as this precision goes
      if (calls_ >= most_calls) return leave(Found::kLimit);
      if (!ask(rest_)) return leave(Found::kNone);
      const Several<T, 2> score = candidate_scores(rest_, x_);
      const T gap = score.at[0] - level_, size = 1 + magnitude(shift_);
      if (gap <= kGap * size) break;
      if (gap <= kNearGap * size && gap <= 2 * spread()) {
        // So close that the error of p itself may be what is left.
        if (refactored) break;
        refactor();
        refactored = true;
        fresh = false;
        continue;
      }
      if (is_full()) return leave(Found::kFull);
      if (!append(score.at[1] - shift_, false)) {
        if (gap <= kNearGap * size) break;
        if (!swap_dependent(score.at[1] - shift_)) {
          settle(false);
          average();
          break;
        }
      } else if (team_.rank == 0) {
        p_[count - 1] = 0;
      }
      team_.sync();
      fresh = true;
      refactored = false;
    }
    return leave(Found::kSolved);
  }

  // Adds structures, with probability 0, until those at hand span the optimal face, where variables
  // that are 0 or 1 stay so: the derivative needs that, the solution does not. After `solve` at the
  // same x; error: of x. docs/math.md (53).
  FM_FUNCTION Found complete(T error) {
    const T size = 1 + magnitude(shift_), least_p = most(2 * error, kGap * size);
    prune(least_p);
    if (count <= 1) return leave(Found::kSolved);
    T *direction = graph_.hub_more(), *probe = direction + hub_.vars;
    const T on_face = most(kFace * size, 4 * error);
    bool near_by = false;  // a probe found a structure that is not of the face
    reduce();
    // Variables at 0 are lowered, so that structures with them lose; those at 1 are raised.
    const auto at_one = [&](int k) { return v_[k] > 1 - least_p / 2; };
    int ones = 0;
#pragma unroll 1
    for (int k = team_.rank; k < hub_.vars; k += V::kTeam) {
      if (v_[k] < least_p / 2) rest_[k] -= size;
      ones += at_one(k);
    }
    ones = team_.sum(ones);
    team_.sync();
    bool found = true;
#pragma unroll 1
    for (u32 turn = 0; found && count <= hub_.vars; ++turn) {
      // r = r0 - M Q M^T r0 has the same product with all structures at hand.
#pragma unroll 1
      for (int k = team_.rank; k < hub_.vars; k += V::kTeam) direction[k] = random(turn, u32(k));
      team_.sync();
      gather(direction, work_);
      project(work_);
      scatter(work_, probe);
#pragma unroll 1
      for (int k = team_.rank; k < hub_.vars; k += V::kTeam) direction[k] -= probe[k];
      found = false;
#pragma unroll 1
      for (int way = 0; way < 4; ++way) {
        const T far = way < 2 ? kFarProbe : kNearProbe, step = way % 2 == 0 ? far : -far;
#pragma unroll 1
        for (int k = team_.rank; k < hub_.vars; k += V::kTeam) {
          probe[k] = rest_[k] + size * (at_one(k) ? 8 * far : step * direction[k]);
        }
        team_.sync();
        if (!ask(probe)) return leave(Found::kNone);
        const Several<T, 2> score = candidate_scores(rest_, x_);
        int held = 0;
#pragma unroll 1
        for (int s = team_.rank; s < hub_.slots; s += V::kTeam) {
          held += on(count)[s] != kOff && at_one(on(count)[s]);
        }
        if (level_ - score.at[0] > on_face || team_.sum(held) != ones) {
          near_by = true;
          continue;
        }
        if (is_full()) return leave(Found::kFull);
        found = append(score.at[1] - shift_, false);
        if (found) break;
        // Both far probes stayed on the face, so nothing hides in its neighbourhood.
        if (way == 1 && !near_by) break;
      }
      if (found && team_.rank == 0) p_[count - 1] = 0;
      team_.sync();
    }
    return leave(Found::kSolved);
  }

  // The score of the best structure with these scores, of the edges' only whether they are
  // forbidden; -inf if there is none.
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

  // What the members have of eta_v . Np, to be summed.
  FM_DEVICE T feature_value() const {
    T sum = 0;
#pragma unroll 1
    for (int i = team_.rank; i < count; i += V::kTeam) {
      if (p_[i] != 0) sum += p_[i] * feature_score(i);
    }
    return sum;
  }

  // out_k = sum_i c_i n_ik, of all scores of the factor; c: p, or work
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

  // c <- Q c,  Q = Z - Z11^TZ / (1^TZ1),  Z = (LL^T)^-1. Of a vertex: 0.
  FM_FUNCTION void project(T* c) const {
    forward_substitute(c, count);
    T sums[2] = {0, 0};
#pragma unroll 1
    for (int i = team_.rank; i < count; i += V::kTeam) {
      sums[0] += c[i] * ones_[i];
      sums[1] += ones_[i] * ones_[i];
    }
    team_.reduce(sums, Add());
    const T share = sums[0] / sums[1];
#pragma unroll 1
    for (int i = team_.rank; i < count; i += V::kTeam) {
      c[i] = is_vertex() ? T(0) : c[i] - ones_[i] * share;
    }
    team_.sync();
    back_substitute(c);
  }

 private:
  // See the core's `ActiveSet`.
  static constexpr T kGap = T(1e-13), kNearGap = T(1e-9), kFace = T(1e-10);
  static constexpr T kFarProbe = T(1e-6), kNearProbe = T(1e-8);
  static constexpr T kRounding = T(1e-15), kPositive = T(1e-9), kDependent = T(1e-10);
  static constexpr int kIdle = 64;
  static constexpr int kMostCalls = 4000;
  static constexpr int kState = 6;  // what lives on from call to call

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

  // The best structure goes to place `count`.
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
  // Of the candidate, with two scores of its variables.
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

  // b <- L^-1 b for the first `rows` rows
  FM_FUNCTION void forward_substitute(T* b, int rows) const {
    if (team_.rank < kWorkers) {
      if constexpr (kWorkers == 1) {
        for (int i = 0; i < rows; ++i) {
          T sum = b[i];
          for (int j = 0; j < i; ++j) sum -= factor_row(i)[j] * b[j];
          b[i] = sum * inverse_[i];
        }
      } else {
        T own[kChunks];
        load(b, rows, own);
#pragma unroll
        for (int q = 0; q < kChunks; ++q) {
#pragma unroll 1
          for (int j = q * 32; j < rows && j < q * 32 + 32; ++j) {
            const T known = __shfl_sync(kAll, own[q], j % 32) * inverse_[j];
#pragma unroll
            for (int c = q; c < kChunks; ++c) {
              const int i = c * 32 + team_.rank;
              if (c * 32 >= rows) break;
              if (i > j && i < rows) own[c] -= factor_row(i)[j] * known;
            }
          }
        }
        store(own, rows, b);
      }
    }
    team_.sync();
  }
  // b <- L^-T b
  FM_FUNCTION void back_substitute(T* b) const {
    if (team_.rank < kWorkers) {
      if constexpr (kWorkers == 1) {
        for (int i = count - 1; i >= 0; --i) {
          const T known = b[i] *= inverse_[i];
          for (int k = 0; k < i; ++k) b[k] -= factor_row(i)[k] * known;
        }
      } else {
        T own[kChunks];
        load(b, count, own);
#pragma unroll
        for (int q = kChunks - 1; q >= 0; --q) {
#pragma unroll 1
          for (int i = least(count, q * 32 + 32) - 1; i >= q * 32; --i) {
            const T known = __shfl_sync(kAll, own[q], i % 32) * inverse_[i];
            const T* row = factor_row(i);
#pragma unroll
            for (int c = 0; c <= q; ++c) {
              const int k = c * 32 + team_.rank;
              if (k < i) own[c] -= row[k] * known;
            }
          }
        }
        store(own, count, b);
      }
    }
    team_.sync();
  }
  FM_DEVICE void load(const T* b, int size, T (&own)[kChunks]) const {
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      const int i = c * 32 + team_.rank;
      own[c] = i < size ? b[i] : T(0);
    }
  }
  // Divided by the diagonal.
  FM_DEVICE void store(const T (&own)[kChunks], int size, T* b) const {
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      const int i = c * 32 + team_.rank;
      if (i < size) b[i] = own[c] * inverse_[i];
    }
  }

  // Takes in the structure at place `count`; false if it is affinely dependent on the others: then
  // its row of the factor tells how.
  FM_FUNCTION bool append(T theta, bool force) {
    const int k = count;
    T* row = factor_row(k);
#pragma unroll 1
    for (int i = team_.rank; i < k; i += V::kTeam) row[i] = 1 + overlap(i, k);
    const T own = 1 + overlap(k, k);
    team_.sync();
    forward_substitute(row, k);
    T sums[3] = {0, 0, 0};
#pragma unroll 1
    for (int i = team_.rank; i < k; i += V::kTeam) {
      sums[0] += row[i] * row[i];
      sums[1] += row[i] * ones_[i];
      sums[2] += row[i] * y_[i];
    }
    team_.reduce(sums, Add());
    const T rest = own - sums[0];
    const bool dependent = rest <= kDependent * own || k > hub_.vars;
    if (team_.rank == 0) theta_[k] = theta;
    team_.sync();
    if (dependent && !force) return false;
    if (team_.rank == 0) {
      const T pivot = sqrt(most(rest, kDependent * own));
      row[k] = pivot;
      inverse_[k] = 1 / pivot;
      ones_[k] = (1 - sums[1]) / pivot;
      y_[k] = (theta - sums[2]) / pivot;
    }
    ++count;
    team_.sync();
    return true;
  }

  // Takes out structure i. Givens rotations make the rows below triangular without its row, and
  // they move up. Meanwhile other warps, where there are any, move the rest.
  FM_FUNCTION void remove(int i) {
    const int last = count - 1;
    team_.sync();
    if (team_.rank < kWorkers) rotate(i);
    constexpr int kMovers = V::kTeam > kWorkers ? V::kTeam - kWorkers : V::kTeam;
    const int first = V::kTeam > kWorkers ? team_.rank - kWorkers : team_.rank;
    // A column has one owner, which moves it from the top.
    const int columns = i + 2 + hub_.slots;
#pragma unroll 1
    for (int c = first < 0 ? columns : first; c < columns; c += kMovers) {
      if (c < i) {
#pragma unroll 2
        for (int r = i; r < last; ++r) factor_row(r)[c] = factor_row(r + 1)[c];
      } else if (c < i + 2) {
        T* list = c == i ? p_ : theta_;
#pragma unroll 2
        for (int r = i; r < last; ++r) list[r] = list[r + 1];
      } else {
        const int s = c - i - 2;
#pragma unroll 2
        for (int r = i; r < last; ++r) on(r)[s] = on(r + 1)[s];
      }
    }
    count = last;
    team_.sync();
  }

  // Of `remove`: columns i and on, of the rows below row i, y and ones. A member has its rows r in
  // registers, as far as they are carried from column to column: what it writes to the row above
  // has been read there.
  FM_DEVICE void rotate(int i) const {
    T own[kChunks];
    const auto row_of = [&](int r) { return r < count ? factor_row(r) : r == count ? y_ : ones_; };
    const int rows = count + 2;
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      const int r = c * kWorkers + team_.rank;
      own[c] = r > i && r < rows ? row_of(r)[i] : T(0);
    }
#pragma unroll 1
    for (int k = i; k < count - 1; ++k) {
      const T b = factor_row(k + 1)[k + 1];
      T a = 0;
      if constexpr (kWorkers == 1) {
        a = own[k + 1];
      } else {
#pragma unroll
        for (int c = 0; c < kChunks; ++c) {
          if (c == (k + 1) / 32) a = own[c];
        }
        a = __shfl_sync(kAll, a, (k + 1) % 32);
      }
      const T inverse = rsqrt(a * a + b * b), cosine = a * inverse, sine = b * inverse;
#pragma unroll
      for (int c = 0; c < kChunks; ++c) {
        const int r = c * kWorkers + team_.rank;
        if (c * kWorkers >= rows) break;
        if (r <= k || r >= rows) continue;
        const T next = row_of(r)[k + 1];
        T* to = r < count ? factor_row(r - 1) : row_of(r);
        to[k] = cosine * own[c] + sine * next;
        own[c] = cosine * next - sine * own[c];
        if (r == k + 1) inverse_[k] = inverse;
      }
      wait();
    }
  }

  // L anew: updates have left their errors in it.
  FM_FUNCTION void refactor() {
#pragma unroll 1
    for (int e = team_.rank; e < count * count; e += V::kTeam) {
      const int i = e / count, j = e % count;
      if (j <= i) factor_row(i)[j] = 1 + overlap(i, j);
    }
#pragma unroll 1
    for (int i = team_.rank; i < count; i += V::kTeam) {
      ones_[i] = 1;
      y_[i] = theta_[i];
      target_[i] = 1 + overlap(i, i);
    }
    team_.sync();
#pragma unroll 1
    for (int j = 0; j < count; ++j) {
      const T pivot = sqrt(most(factor_row(j)[j], kDependent * target_[j])), inverse = 1 / pivot;
      team_.sync();
#pragma unroll 1
      for (int i = j + team_.rank; i < count; i += V::kTeam) {
        if (i == j) {
          factor_row(j)[j] = pivot;
          inverse_[j] = inverse;
        } else {
          factor_row(i)[j] *= inverse;
        }
      }
      team_.sync();
      const int left = count - j - 1;
#pragma unroll 1
      for (int e = team_.rank; e < left * left; e += V::kTeam) {
        const int i = j + 1 + e / left, k = j + 1 + e % left;
        if (k <= i) factor_row(i)[k] -= factor_row(i)[j] * factor_row(k)[j];
      }
      team_.sync();
    }
    forward_substitute(ones_, count);
    forward_substitute(y_, count);
  }

  // New scores for the structures at hand.
  FM_FUNCTION void set_scores() {
#pragma unroll 1
    for (int i = team_.rank; i < count; i += V::kTeam) {
      theta_[i] = sum_on(i, x_) + feature_score(i);
    }
    team_.sync();
    shift_ = theta_[0];
    team_.sync();
#pragma unroll 1
    for (int i = team_.rank; i < count; i += V::kTeam) y_[i] = theta_[i] -= shift_;
    team_.sync();
    forward_substitute(y_, count);
  }

  FM_DEVICE void average() const { scatter(p_, v_); }

  // rest = x - v; returns v . v
  FM_DEVICE T reduce() const {
    T squares = 0;
#pragma unroll 1
    for (int k = team_.rank; k < hub_.vars; k += V::kTeam) {
      rest_[k] = x_[k] - v_[k];
      squares += v_[k] * v_[k];
    }
    team_.sync();
    return team_.sum(squares);
  }

  // How much the reduced scores of the structures at hand, all equal in theory, differ.
  FM_DEVICE T spread() const {
    T largest = 0;
#pragma unroll 1
    for (int i = team_.rank; i < count; i += V::kTeam) {
      largest = most(largest, magnitude(sum_on(i, rest_) + feature_score(i) - level_));
    }
    return team_.max(largest);
  }

  // target = Z (theta + c 1), with c such that it sums to 1: the optimum without p >= 0.
  FM_DEVICE void aim() {
    T sums[2] = {0, 0};
#pragma unroll 1
    for (int i = team_.rank; i < count; i += V::kTeam) {
      sums[0] += ones_[i] * y_[i];
      sums[1] += ones_[i] * ones_[i];
    }
    team_.reduce(sums, Add());
    const T c = (1 - sums[0]) / sums[1];
    level_ = shift_ + 1 - c;
#pragma unroll 1
    for (int i = team_.rank; i < count; i += V::kTeam) target_[i] = y_[i] + c * ones_[i];
    team_.sync();
    back_substitute(target_);
  }

  // The smaller of two ratios, the first of equal ones.
  struct Sooner {
    FM_DEVICE Several<T, 2> operator()(Several<T, 2> a, Several<T, 2> b) const {
      return b.at[0] < a.at[0] || (b.at[0] == a.at[0] && b.at[1] < a.at[1]) ? b : a;
    }
  };

  // Moves p to the best point of the face at hand, dropping structures whose probability reaches 0.
  // Returns false if the structure just added is dropped at once.
  FM_FUNCTION bool settle(bool fresh) {
#pragma unroll 1
    for (;;) {
      aim();
      Several<T, 2> first[1] = {{{infinity<T>(), T(count)}}};
#pragma unroll 1
      for (int i = team_.rank; i < count; i += V::kTeam) {
        if (target_[i] >= -kRounding) continue;
        first[0] = Sooner()(first[0], {{p_[i] / (p_[i] - target_[i]), T(i)}});
      }
      team_.reduce(first, Sooner());
      const int drop = int(first[0].at[1]);
      if (drop == count) {
        accept();
        return true;
      }
      const T step = least(first[0].at[0], T(1));
#pragma unroll 1
      for (int i = team_.rank; i < count; i += V::kTeam) {
        p_[i] = most(p_[i] + step * (target_[i] - p_[i]), T(0));
      }
      const bool newest = drop == count - 1;
      remove(drop);
      if (fresh && newest && step == 0) {
        aim();
        accept();
        return false;
      }
      fresh = fresh && !newest && step == 0;
    }
  }

  // p = target, but for its rounding.
  FM_DEVICE void accept() const {
    T sum = 0;
#pragma unroll 1
    for (int i = team_.rank; i < count; i += V::kTeam) sum += most(target_[i], T(0));
    sum = team_.sum(sum);
#pragma unroll 1
    for (int i = team_.rank; i < count; i += V::kTeam) p_[i] = most(target_[i], T(0)) / sum;
    team_.sync();
  }

  FM_DEVICE void prune(T least_p) {
    bool pruned = false;
#pragma unroll 1
    for (int i = count - 1; i >= 0 && count > 1; --i) {
      if (p_[i] >= least_p) continue;
      remove(i);
      pruned = true;
    }
    if (!pruned) return;
    settle(false);
    average();
  }

  // The candidate is m = sum_i beta_i m_i, sum beta = 1, yet scores better (its features differ):
  // shift mass to it until the first p_i is 0, and let it take that place.
  FM_FUNCTION bool swap_dependent(T theta) {
    const int k = count;
    const T* row = factor_row(k);
#pragma unroll 1
    for (int i = team_.rank; i < k; i += V::kTeam) work_[i] = row[i];
    team_.sync();
    back_substitute(work_);  // beta
    Several<T, 2> first[1] = {{{infinity<T>(), T(k)}}};
#pragma unroll 1
    for (int i = team_.rank; i < k; i += V::kTeam) {
      if (work_[i] > kPositive) first[0] = Sooner()(first[0], {{p_[i] / work_[i], T(i)}});
    }
    team_.reduce(first, Sooner());
    const int out = int(first[0].at[1]);
    if (out == k) return false;
    const T share = first[0].at[0];
#pragma unroll 1
    for (int i = team_.rank; i < k; i += V::kTeam) p_[i] = most(p_[i] - share * work_[i], T(0));
    remove(out);
#pragma unroll 1
    for (int s = team_.rank; s < hub_.slots; s += V::kTeam) on(k - 1)[s] = on(k)[s];
    team_.sync();
    if (!append(theta, false)) return false;
    if (team_.rank == 0) p_[count - 1] = share;
    team_.sync();
    return true;
  }

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
