// Trees by the rows of their polytope, docs/math.md (59)-(61): each word has one head, and no set
// of words has all of its heads within. Rows of sets, the cuts, are added when they are violated.
// They are the last of the hard rows, see `Graph::visit_cuts`.
#pragma once

#include "graph.cuh"

namespace factormax {

template <class V>
class Cuts {
  using T = typename V::T;
  static constexpr int kWorkers = V::kTeam < 32 ? V::kTeam : 32;

 public:
  FM_DEVICE explicit Cuts(const Graph<V>& graph) : graph_(graph), a_(graph.a), team_(graph.team) {}

  FM_DEVICE void begin() const {
    if (team_.rank == 0) *graph_.cut_count() = 0;
    team_.sync();
  }

  // Arcs from words that are absent, those with no arc to them, are off. Returns whether there were
  // any.
  FM_DEVICE bool leave_out() const {
    T* eta = graph_.eta();
    u8* absent = scratch().state;
    bool any = false;
#pragma unroll 1
    for (int f = 0; f < a_.num_trees; ++f) {
      const Tree tree(a_, f);
#pragma unroll 1
      for (int m = team_.rank; m < tree.words; m += V::kTeam) {
        bool here = false;
        for (int h = 0; h < tree.words; ++h) here |= graph_.present(tree.arc(m, h));
        absent[m] = !here;
      }
      team_.sync();
#pragma unroll 1
      for (int m = team_.rank; m < tree.words; m += V::kTeam) {
        for (int h = 0; h < tree.words; ++h) {
          if (!absent[h] || !graph_.present(tree.arc(m, h))) continue;
          eta[tree.arc(m, h)] = -infinity<T>();
          any = true;
        }
      }
      team_.sync();
    }
    return team_.any(any);
  }

  enum class Added { kNone, kSome, kNoRoom };

  // Adds the sets of words for which mu lacks more than `tolerance`.
  FM_DEVICE Added add_violated(T tolerance) const {
    const int before = *graph_.cut_count();
    int* room = scratch().room;
    if (team_.rank == 0) *room = 1;
    team_.sync();
#pragma unroll 1
    for (int f = 0; f < a_.num_trees; ++f) {
      const Tree tree(a_, f);
      T* flow = graph_.v();
#pragma unroll 1
      for (int k = team_.rank; k < tree.words * tree.words; k += V::kTeam) flow[tree.var[k]] = 0;
      team_.sync();
      if (team_.rank < kWorkers) find(tree, f, tolerance);
      team_.sync();
    }
    const int count = *graph_.cut_count();
    if (*room == 0) return Added::kNoRoom;
    return count > before ? Added::kSome : Added::kNone;
  }

  // take(c, 1 / the norm of its row), for cuts from `first` on, a warp each. there(j): whether the
  // variable is.
  template <class There, class Take>
  FM_DEVICE void scale_rows(int first, There there, Take take) const {
    const int lane = team_.rank % kWorkers;
#pragma unroll 1
    for (int c = first + team_.rank / kWorkers; c < *graph_.cut_count(); c += V::kTeam / kWorkers) {
      int entries = 0;
      graph_.each_of_cut(c, [&](int j) { entries += there(j); }, lane, kWorkers);
      entries = over_lanes<kWorkers>(entries, Add());
      if (lane == 0) take(c, entries > 0 ? 1 / sqrt(T(entries)) : T(0));
    }
  }

  FM_DEVICE void save() const { copy(graph_.cut_count(), saved()); }
  FM_DEVICE void save_nothing() const {
    if (team_.rank == 0) saved()[0] = 0;
  }
  FM_DEVICE void restore() const {
    copy(saved(), graph_.cut_count());
    team_.sync();
#pragma unroll 1
    for (int c = team_.rank; c < *graph_.cut_count(); c += V::kTeam) list(c);
    team_.sync();
  }

 private:
  enum State : u8 { kAbsent, kOpen, kSkipped, kDone };

  struct Scratch {
    T *inflow, *used;  // of each word, from the sources
    int* room;
    u8 *state, *seen, *queue, *next, *along, *member;
  };
  FM_DEVICE Scratch scratch() const {
    const int words = a_.most_words;
    T* real = reinterpret_cast<T*>(graph_.base + a_.at_cut_scratch);
    int* room = reinterpret_cast<int*>(real + 2 * words);
    u8* byte = reinterpret_cast<u8*>(room + 1);
    return {real,
            real + words,
            room,
            byte,
            byte + words,
            byte + 2 * words,
            byte + 3 * words,
            byte + 4 * words,
            byte + 5 * words};
  }

  FM_DEVICE int* saved() const { return a_.cuts_saved + graph_.instance * a_.cuts_saved_stride; }
  FM_DEVICE void copy(const int* from, int* to) const {
    team_.sync();
#pragma unroll 1
    for (int k = team_.rank; k < a_.cuts_saved_stride; k += V::kTeam) to[k] = from[k];
    team_.sync();
  }

  FM_DEVICE static void wait() {
    if constexpr (kWorkers > 1) __syncwarp();
  }
  FM_DEVICE static bool any(bool value) {
    if constexpr (kWorkers > 1) return __any_sync(kAll, value) != 0;
    return value;
  }

  // The words of a cut, from its bits, and behind them the others.
  FM_DEVICE void list(int c) const {
    const Tree tree = graph_.tree_of_cut(c);
    u8* own = graph_.cut_list(c);
    int size = 0;
    for (int m = 0; m < tree.words; ++m) {
      if (graph_.in_cut(c, m)) own[size++] = u8(m);
    }
    graph_.cut_size()[c] = size;
    for (int m = 0; m < tree.words; ++m) {
      if (!graph_.in_cut(c, m)) own[size++] = u8(m);
    }
  }

  // By a warp: words are taken in the order of what flows into them directly; one that has its flow
  // is as good a source as the root from then on. See the core's `TreeCuts`.
  FM_DEVICE void find(const Tree& tree, int f, T tolerance) const {
    const Scratch s = scratch();
    const T least_flow = T(1e-3) * tolerance;
    const int n = tree.words, rank = team_.rank;
    const T* mu = graph_.mu();
#pragma unroll 1
    for (int m = rank; m < n; m += kWorkers) {
      bool here = false;
      for (int h = 0; h < n; ++h) here |= graph_.present(tree.arc(m, h));
      s.state[m] = here ? kOpen : kAbsent;
      s.inflow[m] = here ? mu[tree.arc(m, m)] : T(0);
    }
    wait();
#pragma unroll 1
    for (;;) {
      Several<T, 2> best = {{T(-1), T(n)}};
#pragma unroll 1
      for (int m = rank; m < n; m += kWorkers) {
        if (s.state[m] == kOpen && s.inflow[m] > best.at[0]) best = {{s.inflow[m], T(m)}};
      }
      best = over_lanes<kWorkers>(best, Larger());
      const int word = int(best.at[1]);
      if (word == n) return;
      if (best.at[0] >= 1 - tolerance || flow_to(tree, word, 1 - tolerance, least_flow) ||
          known(tree, f)) {
        wait();
#pragma unroll 1
        for (int m = rank; m < n; m += kWorkers) {
          if (m == word) {
            s.state[m] = kDone;
          } else if (s.state[m] != kAbsent) {
            s.inflow[m] += mu[tree.arc(m, word)];
          }
        }
        wait();
        continue;
      }
      const bool full = *graph_.cut_count() == a_.most_cuts;
      wait();
#pragma unroll 1
      for (int m = rank; m < n; m += kWorkers) {
        if (s.member[m]) s.state[m] = kSkipped;
      }
      if (full) {
        if (rank == 0) *s.room = 0;
        wait();
        return;
      }
      if (rank == 0) add(tree, f);
      wait();
    }
  }
  struct Larger {
    FM_DEVICE Several<T, 2> operator()(Several<T, 2> p, Several<T, 2> q) const {
      return q.at[0] > p.at[0] || (q.at[0] == p.at[0] && q.at[1] < p.at[1]) ? q : p;
    }
  };

  FM_DEVICE void add(const Tree& tree, int f) const {
    const int c = *graph_.cut_count();
    const Scratch s = scratch();
    u32* bits = graph_.cut_bits(c);
    int inside = 0, outside = 0;
    for (int w = 0; w < a_.cut_words; ++w) bits[w] = 0;
    for (int m = 0; m < tree.words; ++m) {
      if (s.member[m]) bits[m / 32] |= 1u << (m % 32);
      (s.member[m] ? inside : outside) += s.state[m] != kAbsent;
    }
    graph_.cut_form()[c] = 2 * f + (inside - 1 > outside + 1);
    list(c);
    *graph_.cut_count() = c + 1;
  }

  FM_DEVICE bool known(const Tree& tree, int f) const {
    const u8* member = scratch().member;
    bool found = false;
#pragma unroll 1
    for (int c = team_.rank; c < *graph_.cut_count(); c += kWorkers) {
      bool same = graph_.cut_form()[c] >> 1 == f;
      for (int m = 0; m < tree.words && same; ++m) same = graph_.in_cut(c, m) == (member[m] != 0);
      found |= same;
    }
    return any(found);
  }

  // Whether `wanted` flows from the sources to the word; else `member` is the largest set that lets
  // no more in. Augments along shortest paths, searched from the word.
  FM_DEVICE bool flow_to(const Tree& tree, int word, T wanted, T least_flow) const {
    const Scratch s = scratch();
    const int n = tree.words, rank = team_.rank;
    T* flow = graph_.v();
    const T* mu = graph_.mu();
    wait();
#pragma unroll 1
    for (int k = rank; k < n * n; k += kWorkers) flow[tree.var[k]] = 0;
#pragma unroll 1
    for (int m = rank; m < n; m += kWorkers) s.used[m] = m == word ? s.inflow[m] : T(0);
    wait();
    T total = s.inflow[word];
#pragma unroll 1
    while (total < wanted) {
      const int from = search(tree, word, least_flow);
      if (from < 0) {
        keep_unreached(tree, least_flow);
        return false;
      }
      T step = s.inflow[from] - s.used[from];
#pragma unroll 1
      for (int at = from; at != word; at = s.next[at]) {
        const int to = s.next[at];  // at is the head of `to`, or `to` that of at, which takes back
        step = least(step, s.along[at] ? mu[tree.arc(to, at)] - flow[tree.arc(to, at)]
                                       : flow[tree.arc(at, to)]);
      }
      wait();
      if (rank == 0) {
        for (int at = from; at != word; at = s.next[at]) {
          const int to = s.next[at];
          if (s.along[at]) {
            flow[tree.arc(to, at)] += step;
          } else {
            flow[tree.arc(at, to)] -= step;
          }
        }
        s.used[from] += step;
      }
      total += step;
      wait();
    }
    return true;
  }

  // Puts words that are reached into the queue, in their order.
  FM_DEVICE int push(bool flag, int m, int end) const {
    u8* queue = scratch().queue;
    if constexpr (kWorkers == 1) {
      if (flag) queue[end++] = u8(m);
      return end;
    } else {
      const u32 votes = __ballot_sync(kAll, flag);
      if (flag) queue[end + __popc(votes & ((1u << team_.rank) - 1))] = u8(m);
      return end + __popc(votes);
    }
  }

  // The nearest word with supply left, or -1; next and along tell the way back.
  FM_DEVICE int search(const Tree& tree, int word, T least_flow) const {
    const Scratch s = scratch();
    const int n = tree.words, rank = team_.rank;
    const T *mu = graph_.mu(), *flow = graph_.v();
#pragma unroll 1
    for (int m = rank; m < n; m += kWorkers) s.seen[m] = m == word;
    if (rank == 0) s.queue[0] = u8(word);
    wait();
    int begin = 0, end = 1;
#pragma unroll 1
    while (begin < end) {
      const int at = s.queue[begin++];
      if (s.inflow[at] - s.used[at] > least_flow) return at;
#pragma unroll 1
      for (int first = 0; first < n; first += kWorkers) {
        const int m = first + rank;
        bool reached = false;
        if (m < n && !s.seen[m] && s.state[m] != kDone && s.state[m] != kAbsent) {
          const bool along = mu[tree.arc(at, m)] - flow[tree.arc(at, m)] > least_flow;
          reached = along || flow[tree.arc(m, at)] > least_flow;
          if (reached) {
            s.seen[m] = 1;
            s.next[m] = u8(at);
            s.along[m] = along;
          }
        }
        end = push(reached, m, end);
        wait();
      }
    }
    return -1;
  }

  // `member`: the words that nothing more can be sent to from the sources.
  FM_DEVICE void keep_unreached(const Tree& tree, T least_flow) const {
    const Scratch s = scratch();
    const int n = tree.words, rank = team_.rank;
    const T *mu = graph_.mu(), *flow = graph_.v();
    int begin = 0, end = 0;
    wait();
#pragma unroll 1
    for (int first = 0; first < n; first += kWorkers) {
      const int m = first + rank;
      bool reached = false;
      if (m < n) {
        const bool outside = s.state[m] == kDone || s.state[m] == kAbsent;
        reached = !outside && s.inflow[m] - s.used[m] > least_flow;
        s.member[m] = !outside && !reached;
      }
      end = push(reached, m, end);
    }
    wait();
#pragma unroll 1
    while (begin < end) {
      const int at = s.queue[begin++];
#pragma unroll 1
      for (int first = 0; first < n; first += kWorkers) {
        const int m = first + rank;
        bool reached = false;
        if (m < n && s.member[m]) {
          reached = mu[tree.arc(m, at)] - flow[tree.arc(m, at)] > least_flow ||
                    flow[tree.arc(at, m)] > least_flow;
          if (reached) s.member[m] = 0;
        }
        end = push(reached, m, end);
        wait();
      }
    }
  }

  const Graph<V>& graph_;
  const Args<V>& a_;
  const Team<V::kTeam>& team_;
};

}  // namespace factormax
