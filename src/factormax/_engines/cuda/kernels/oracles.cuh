// The best structures of structured factors, by a team of threads: the twins of the core's oracles,
// which say what scores mean and where they are. Ties may be broken differently.
#pragma once

#include "graph.cuh"

namespace factormax {

enum HubKind : int { kSequence = 0, kSequenceBudget = 1, kTable = 2 };

constexpr u16 kOff = 0xffff;  // nothing is on in a slot

// A structured factor. In the order of `_engines/cuda/hubs.py`.
struct Hub {
  static constexpr int kNumbers = 10;

  int kind;
  int first;     // first of its variables, among those of all hubs
  int vars;      //
  int score;     // first of its scores, among those of all hubs
  int scores;    //
  int slots;     // slots of a structure
  int capacity;  // most structures
  int memory;    // where its own memory begins, in bytes
  int saved;     // where its structures are kept, in numbers of 16 bits
  int number;    // among the structured factors
  const int* shape;

  template <class V>
  FM_DEVICE Hub(const Args<V>& a, int f) {
    const int* own = a.hub + f * (kNumbers + 1);
    kind = own[0];
    first = own[1];
    vars = own[2];
    score = own[3];
    scores = own[4];
    slots = own[5];
    capacity = own[6];
    memory = own[7];
    saved = own[8];
    number = own[9];
    shape = a.hub_shape + own[10];
  }

  // For a sequence.
  FM_DEVICE int states() const { return shape[1]; }
  FM_DEVICE int transitions(int t) const {
    return shape[2] != 0 ? (t - 1) * shape[1] * shape[1] : 0;
  }
  FM_DEVICE int initial() const { return (shape[2] != 0 ? shape[0] - 1 : 1) * shape[1] * shape[1]; }
  FM_DEVICE int final() const { return initial() + (shape[3] != 0 ? shape[1] : 0); }
};

// Calls visit(k) for each score that a structure earns, in slots start, start + stride, ...
template <class Visit>
FM_DEVICE void each_feature(const Hub& hub, const u16* on, Visit visit, int start = 0,
                            int stride = 1) {
  if (hub.kind == kTable) {
    int joint = 0, at = 0;
    bool whole = start == 0;
#pragma unroll 1
    for (int g = 0; whole && g < hub.slots; at += hub.shape[g++]) {
      whole = on[g] != kOff;
      joint = joint * hub.shape[g] + (on[g] - at);
    }
    if (whole) visit(joint);
    return;
  }
#pragma unroll 1
  for (int t = start; t < hub.slots; t += stride) {
    if (on[t] == kOff) continue;
    if (hub.kind == kSequenceBudget) {
      if (t > 0 && on[t - 1] != kOff) visit(hub.shape[1] != 0 ? t - 1 : 0);
      continue;
    }
    const int S = hub.states(), state = on[t] - t * S;
    if (t > 0) {
      visit(hub.transitions(t) + (on[t - 1] - (t - 1) * S) * S + state);
    } else if (hub.shape[3] != 0) {
      visit(hub.initial() + state);
    }
    const bool last = t + 1 == hub.slots || on[t + 1] == kOff;
    if (last && hub.shape[4] != 0) visit(hub.final() + state);
  }
}

// What an instance says of a hub: how many steps of a sequence are present, the budget, or whether
// all groups of a table are present. x: -inf where masked.
template <class TeamOf, class T>
FM_DEVICE int look(const TeamOf& team, const Hub& hub, const T* x, double param) {
  constexpr int kTeam = TeamOf::kSize;
  if (hub.kind == kSequenceBudget) {
    int allowed = 0;
#pragma unroll 1
    for (int t = team.rank; t < hub.slots; t += kTeam) allowed += x[t] > -infinity<T>();
    allowed = team.sum(allowed);
    const int budget = least(least(int(param), hub.shape[2]), allowed);
    return budget > 0 ? budget : 0;
  }
  int absent = hub.slots;  // the first slot without a variable
#pragma unroll 1
  for (int s = team.rank; s < hub.slots; s += kTeam) {
    int begin = s * hub.shape[1], size = hub.shape[1];
    if (hub.kind == kTable) {
      begin = 0;
      for (int g = 0; g < s; ++g) begin += hub.shape[g];
      size = hub.shape[s];
    }
    bool any = false;
#pragma unroll 1
    for (int k = begin; k < begin + size; ++k) any |= x[k] > -infinity<T>();
    if (!any) absent = least(absent, s);
  }
  absent = -team.max(-absent);
  return hub.kind == kTable ? absent == hub.slots : absent;
}

// The largest of some values, the first of equal ones: its value and its number.
template <class T>
struct First {
  FM_DEVICE Several<T, 2> operator()(Several<T, 2> a, Several<T, 2> b) const {
    return b.at[0] > a.at[0] || (b.at[0] == a.at[0] && b.at[1] < a.at[1]) ? b : a;
  }
};

template <class V>
class Oracle {
  using T = typename V::T;
  static constexpr int kWorkers = V::kTeam < 32 ? V::kTeam : 32;

 public:
  // given: see `look`. plain: of the factor's own scores only -inf counts.
  FM_DEVICE Oracle(const Team<V::kTeam>& team, const Hub& hub, int given, const T* x,
                   const T* scores, bool plain, char* scratch, u16* on)
      : team_(team),
        hub_(hub),
        given_(given),
        x_(x),
        scores_(scores),
        plain_(plain),
        scratch_(reinterpret_cast<T*>(scratch)),
        on_(on) {}

  FM_DEVICE bool sequence() const {
    const int S = hub_.states(), steps = given_;
    T* best = scratch_;  // (L, S) best score of a sequence that ends in a state
#pragma unroll 1
    for (int t = team_.rank; t < hub_.slots; t += V::kTeam) on_[t] = kOff;
#pragma unroll 1
    for (int s = team_.rank; s < S; s += V::kTeam) {
      best[s] = hub_.shape[3] != 0 ? score(hub_.initial() + s) + x_[s] : x_[s];
    }
    team_.sync();
    if (steps == 0) return true;
    int lanes = kWorkers;  // lanes that share a state
    while (lanes > 1 && V::kTeam / lanes < S) lanes /= 2;
    const int groups = V::kTeam / lanes, lane = team_.rank % lanes;
#pragma unroll 1
    for (int t = 1; t < steps; ++t) {
      const T* before = best + (t - 1) * S;
      const int at = hub_.transitions(t);
#pragma unroll 1
      for (int first = 0; first < S; first += groups) {
        const int s = first + team_.rank / lanes;
        T largest = -infinity<T>();
#pragma unroll 4
        for (int from = s < S ? lane : S; from < S; from += lanes) {
          largest = most(largest, before[from] + score(at + from * S + s));
        }
#pragma unroll 1
        for (int distance = lanes / 2; distance > 0; distance /= 2) {
          largest = most(largest, __shfl_xor_sync(kAll, largest, distance));
        }
        if (s < S && lane == 0) best[t * S + s] = largest + x_[t * S + s];
      }
      team_.sync();
    }
    if (team_.rank < kWorkers) trace(best, steps);
    team_.sync();
    return on_[0] != kOff;
  }

  FM_DEVICE bool budget() const {
    const int width = given_ + 1, length = hub_.slots;
    // on: the best of variables 0 .. t with t on and at most c on; best: t on or off.
    T *on = scratch_, *previous = on + width, *best = previous + width, *before = best + width,
      *apart = before + width;
    u8* choice = reinterpret_cast<u8*>(apart + width);
#pragma unroll 1
    for (int c = team_.rank; c < width; c += V::kTeam) {
      on[c] = previous[c] = -infinity<T>();
      best[c] = before[c] = apart[c] = 0;
    }
    team_.sync();
#pragma unroll 1
    for (int t = 0; t < length; ++t) {
      const T eta = x_[t];
      const T gain = t == 0 ? -infinity<T>() : eta + score(hub_.shape[1] != 0 ? t - 1 : 0);
#pragma unroll 1
      for (int c = team_.rank; c < width; c += V::kTeam) {
        const T alone = c == 0 ? -infinity<T>() : apart[c - 1] + eta;
        const T joined = c == 0 ? -infinity<T>() : previous[c - 1] + gain;
        const T value = most(alone, joined);
        on[c] = value;
        best[c] = most(before[c], value);
        choice[t * width + c] = u8((value > before[c] ? 1 : 0) | (joined > alone ? 2 : 0));
      }
      team_.sync();
      T* free = apart;
      apart = before;
      before = best;
      best = free;
      free = on;
      on = previous;
      previous = free;
    }
    if (team_.rank == 0) {
      int left = given_;
      int now = 0;  // what t + 1 says about t: anything, 1 on, 2 off
#pragma unroll 1
      for (int t = length - 1; t >= 0; --t) {
        const u8 own = choice[t * width + left];
        const bool taken = now == 1 || (now == 0 && (own & 1) != 0);
        on_[t] = taken ? u16(t) : kOff;
        now = !taken ? 0 : ((own & 2) != 0 ? 1 : 2);
        left -= taken;
      }
    }
    team_.sync();
    return true;
  }

  FM_DEVICE bool table() const {
    const int groups = hub_.slots;
    if (given_ == 0) {  // the table does not apply: each group takes its own best state
#pragma unroll 1
      for (int g = team_.rank; g < groups; g += V::kTeam) {
        int at = 0;
        for (int k = 0; k < g; ++k) at += hub_.shape[k];
        T largest = -infinity<T>();
        u16 found = kOff;
        for (int k = at; k < at + hub_.shape[g]; ++k) {
          if (!(x_[k] > largest)) continue;
          largest = x_[k];
          found = u16(k);
        }
        on_[g] = found;
      }
      team_.sync();
      return true;
    }
    Several<T, 2> best[1] = {{{-infinity<T>(), T(hub_.scores)}}};
#pragma unroll 1
    for (int joint = team_.rank; joint < hub_.scores; joint += V::kTeam) {
      T sum = score(joint);
      int left = joint, at = hub_.vars;
#pragma unroll 1
      for (int g = groups - 1; g >= 0; --g) {
        const int size = hub_.shape[g];
        at -= size;
        sum += x_[at + left % size];
        left /= size;
      }
      if (sum > best[0].at[0]) best[0] = {{sum, T(joint)}};
    }
    team_.reduce(best, First<T>());
    if (!(best[0].at[0] > -infinity<T>())) return false;
    if (team_.rank == 0) {
      int left = int(best[0].at[1]), at = hub_.vars;
#pragma unroll 1
      for (int g = groups - 1; g >= 0; --g) {
        at -= hub_.shape[g];
        on_[g] = u16(at + left % hub_.shape[g]);
        left /= hub_.shape[g];
      }
    }
    team_.sync();
    return true;
  }

 private:
  FM_DEVICE T score(int k) const {
    const T own = scores_[k];
    return plain_ && own > -infinity<T>() ? T(0) : own;
  }

  // Traces back from the best last state; run by a warp.
  FM_DEVICE void trace(const T* best, int steps) const {
    const int S = hub_.states();
    Several<T, 2> last = {{-infinity<T>(), T(S)}};
#pragma unroll 1
    for (int s = team_.rank; s < S; s += kWorkers) {
      const T value = best[(steps - 1) * S + s];
      last =
          First<T>()(last, {{hub_.shape[4] != 0 ? value + score(hub_.final() + s) : value, T(s)}});
    }
    last = over_lanes<kWorkers>(last, First<T>());
    if (!(last.at[0] > -infinity<T>())) return;
    int state = int(last.at[1]);
#pragma unroll 1
    for (int t = steps - 1; t > 0; --t) {
      const T *before = best + (t - 1) * S, wanted = best[t * S + state], eta = x_[t * S + state];
      const int at = hub_.transitions(t) + state;
      if (team_.rank == 0) on_[t] = u16(t * S + state);
      state = S - 1;
      // The first that reaches what is wanted, by the sums that made it.
#pragma unroll 1
      for (int first = 0; first < S; first += kWorkers) {
        const int from = first + team_.rank;
        const bool hit = from < S && before[from] + score(at + from * S) + eta == wanted;
        if constexpr (kWorkers == 1) {
          if (!hit) continue;
          state = from;
          break;
        } else {
          const u32 votes = __ballot_sync(kAll, hit);
          if (votes == 0) continue;
          state = first + __ffs(int(votes)) - 1;
          break;
        }
      }
    }
    if (team_.rank == 0) on_[0] = u16(state);
  }

  const Team<V::kTeam>& team_;
  const Hub& hub_;
  int given_;
  const T *x_, *scores_;
  bool plain_;
  T* scratch_;
  u16* on_;
};

// The best structure; false if there is none.
template <class V, class T>
FM_DEVICE bool find_best(const Team<V::kTeam>& team, const Hub& hub, int given, const T* x,
                         const T* scores, bool plain, char* scratch, u16* on) {
  const Oracle<V> oracle(team, hub, given, x, scores, plain, scratch, on);
  if (V::kSequences && hub.kind == kSequence) return oracle.sequence();
  if (V::kSequenceBudgets && hub.kind == kSequenceBudget) return oracle.budget();
  if (V::kTables && hub.kind == kTable) return oracle.table();
  return false;
}

}  // namespace factormax
