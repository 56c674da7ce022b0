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

  // Turns off the arcs from absent words, those with no arc to them. Returns whether there were
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

  // Adds the sets of words whose heads outside sum to less than 1 - `tolerance` in mu.
  FM_DEVICE Added add_violated(T tolerance) const {
    const int before = *graph_.cut_count();
    int* room = scratch().room;
    if (team_.rank == 0) *room = 1;
    team_.sync();
#pragma unroll 1
    for (int f = 0; f < a_.num_trees; ++f) {
      if (team_.rank < kWorkers) Search(*this, f, tolerance).find();
      team_.sync();
    }
    const int count = *graph_.cut_count();
    if (*room == 0) return Added::kNoRoom;
    return count > before ? Added::kSome : Added::kNone;
  }

  // Calls take(c, 1 / the norm of its row) for cuts from `first` on, one warp each. there(j):
  // whether the variable is present.
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
    T *inflow, *used;     // (words,) from the sources
    int *reached, *room;  // (words,) by which arc, and in which direction: 2 arc + direction
    u16 *first, *level;   // (words + 1,) first arc to a word; (words,) level in a search
    u8 *state, *member;
  };
  FM_DEVICE Scratch scratch() const {
    const int words = a_.most_words;
    T* real = reinterpret_cast<T*>(graph_.base + a_.at_cut_scratch);
    int* whole = reinterpret_cast<int*>(real + 2 * words);
    u16* half = reinterpret_cast<u16*>(whole + words + 1);
    u8* byte = reinterpret_cast<u8*>(half + 2 * words + 1);
    return {real, real + words, whole, whole + words, half, half + words + 1, byte, byte + words};
  }

  FM_DEVICE int* saved() const { return a_.cuts_saved + graph_.instance * a_.cuts_saved_stride; }
  FM_DEVICE void copy(const int* from, int* to) const {
    team_.sync();
#pragma unroll 1
    for (int k = team_.rank; k < a_.cuts_saved_stride; k += V::kTeam) to[k] = from[k];
    team_.sync();
  }

  // Lists the words of a cut, from its bits, and after them the others.
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

  // Run by a warp: every word gets a flow of 1 from the root, with mu as capacities, unless a set
  // lacks some. Words are taken in the order of what flows into them directly; once a word has its
  // flow, it is as good a source as the root. See the core's `TreeCuts`.
  class Search {
   public:
    FM_DEVICE Search(const Cuts& cuts, int f, T tolerance)
        : cuts_(cuts),
          graph_(cuts.graph_),
          tree_(cuts.a_, f),
          s_(cuts.scratch()),
          rank_(cuts.team_.rank),
          words_(tree_.words),
          f_(f),
          wanted_(1 - tolerance),
          least_(T(1e-3) * tolerance),
          capacity_(graph_.v()),
          flow_(capacity_ + cuts.a_.most_arcs),
          arc_(reinterpret_cast<u16*>(flow_ + cuts.a_.most_arcs)) {}

    FM_DEVICE void find() {
      if (!load()) return stop();
#pragma unroll 1
      for (;;) {
        finish_words();
        Several<T, 2> best = {{T(-1), T(words_)}};
        for_words([&](int m) {
          if (s_.state[m] == kOpen && s_.inflow[m] > best.at[0]) best = {{s_.inflow[m], T(m)}};
        });
        best = over_lanes<kWorkers>(best, Larger());
        const int word = int(best.at[1]);
        if (word == words_) return;
        if (flow_to(word) || known()) {
          wait();
          if (rank_ == 0) s_.state[word] = kDone;
          wait();
          continue;
        }
        const bool full = *graph_.cut_count() == graph_.a.most_cuts;
        wait();
        for_words([&](int m) {
          if (s_.member[m]) s_.state[m] = kSkipped;
        });
        wait();
        if (full) return stop();
        if (rank_ == 0) cuts_.add(tree_, f_);
        wait();
      }
    }

   private:
    static constexpr int kNotReached = 0x7fffffff;
    static constexpr u16 kOutside = 0xffff;  // the level of what no search may enter

    FM_DEVICE static void wait() {
      if constexpr (kWorkers > 1) __syncwarp();
    }
    FM_DEVICE static bool any(bool value) {
      if constexpr (kWorkers > 1) return __any_sync(kAll, value) != 0;
      return value;
    }
    template <class Visit>
    FM_DEVICE void for_words(Visit visit) const {
#pragma unroll 1
      for (int m = rank_; m < words_; m += kWorkers) visit(m);
    }
    // Calls visit(arc, word, head).
    template <class Visit>
    FM_DEVICE void for_arcs(Visit visit) const {
#pragma unroll 1
      for (int e = rank_; e < arcs_; e += kWorkers) visit(e, arc_[e] >> 8, arc_[e] & 255);
    }
    FM_DEVICE bool is_outside(int m) const {
      return s_.state[m] == kDone || s_.state[m] == kAbsent;
    }

    FM_DEVICE void stop() const {
      if (rank_ == 0) *s_.room = 0;
      wait();
    }

    // Lists the arcs with a flow, word by word; false if there are too many.
    FM_DEVICE bool load() {
      const T* mu = graph_.mu();
      for_words([&](int m) {
        bool here = false;
        for (int h = 0; h < words_ && !here; ++h) here = graph_.present(tree_.arc(m, h));
        s_.state[m] = here ? kOpen : kAbsent;
      });
      arcs_ = 0;
#pragma unroll 1
      for (int m = 0; m < words_; ++m) {
        if (rank_ == 0) s_.first[m] = u16(arcs_);
#pragma unroll 1
        for (int begin = 0; begin < words_; begin += kWorkers) {
          const int h = begin + rank_;
          const T value = h < words_ ? mu[tree_.arc(m, h)] : T(0);
          const bool flows = value > least_ && h != m;
          int place = arcs_;
          if constexpr (kWorkers > 1) {
            const u32 votes = __ballot_sync(kAll, flows);
            place += __popc(votes & ((1u << rank_) - 1));
            arcs_ += __popc(votes);
          } else {
            arcs_ += flows;
          }
          if (arcs_ > graph_.a.most_arcs) return false;
          if (!flows) continue;
          capacity_[place] = value;
          arc_[place] = u16(256 * m + h);
        }
      }
      if (rank_ == 0) s_.first[words_] = u16(arcs_);
      wait();
      return true;
    }

    // Words that get all that is wanted from finished words and the root are finished too.
    FM_DEVICE void finish_words() const {
      const T* mu = graph_.mu();
      bool more = true;
#pragma unroll 1
      while (more) {
        for_words([&](int m) {
          T sum = s_.state[m] == kAbsent ? T(0) : mu[tree_.arc(m, m)];
#pragma unroll 1
          for (int e = s_.first[m]; e < s_.first[m + 1]; ++e) {
            if (s_.state[arc_[e] & 255] == kDone) sum += capacity_[e];
          }
          s_.inflow[m] = sum;
        });
        wait();
        more = false;
        for_words([&](int m) {
          if (s_.state[m] != kOpen || s_.inflow[m] < wanted_) return;
          s_.state[m] = kDone;
          more = true;
        });
        more = any(more);
        wait();
      }
    }

    // Whether all that is wanted flows from the sources to the word; if not, `member` is the
    // largest set that lets no more in. First what the word's heads have themselves, then along
    // shortest paths, searched from the word.
    FM_DEVICE bool flow_to(int word) const {
      for_words([&](int m) { s_.used[m] = m == word ? s_.inflow[m] : T(0); });
      wait();
      T total = 0;
      for_arcs([&](int e, int m, int h) {
        const bool direct = m == word && !is_outside(h);
        flow_[e] = direct ? least(capacity_[e], s_.inflow[h]) : T(0);
        if (direct) s_.used[h] = flow_[e];
        total += flow_[e];
      });
      wait();
      total = over_lanes<kWorkers>(total, Add()) + s_.inflow[word];
#pragma unroll 1
      while (total < wanted_) {
        begin_search([&](int m) { return m == word; });
        u16 level = 1;
        int from = -1;
#pragma unroll 1
        while (from < 0) {
          if (!grow<true>(level++)) {
            keep_unreached();
            return false;
          }
          from = most_supply(level);
        }
        // Others of that level may have ways of their own.
        T step = 1;
#pragma unroll 1
        while (from >= 0 && step > least_ && total < wanted_) {
          step = augment(from, word);
          total += step;
          from = most_supply(level);
        }
      }
      return true;
    }

    template <class Begins>
    FM_DEVICE void begin_search(Begins begins) const {
      for_words([&](int m) {
        s_.reached[m] = kNotReached;
        s_.level[m] = is_outside(m) ? kOutside : u16(begins(m));
      });
      wait();
    }

    // Goes on from the words of a level to those that can send them more (BACK), or that they can
    // send more to. Returns whether there are any. Of several arcs to a word the first counts.
    template <bool BACK>
    FM_DEVICE bool grow(u16 level) const {
      for_arcs([&](int e, int m, int h) {
        const int from = BACK ? m : h, to = BACK ? h : m;
        const u16 here = s_.level[from], there = s_.level[to];
        if (here == level && there == 0 && capacity_[e] - flow_[e] > least_) reach(to, 2 * e + 1);
        if (there == level && here == 0 && flow_[e] > least_) reach(from, 2 * e);
      });
      wait();
      bool grown = false;
      for_words([&](int m) {
        if (s_.level[m] != 0 || s_.reached[m] == kNotReached) return;
        s_.level[m] = u16(level + 1);
        grown = true;
      });
      grown = any(grown);
      wait();
      return grown;
    }
    FM_DEVICE void reach(int m, int by) const { atomicMin(s_.reached + m, by); }

    // The word of a level with the most supply left, or -1.
    FM_DEVICE int most_supply(u16 level) const {
      Several<T, 2> best = {{least_, T(-1)}};
      for_words([&](int m) {
        const T left = s_.inflow[m] - s_.used[m];
        if (s_.level[m] == level && left > best.at[0]) best = {{left, T(m)}};
      });
      return int(over_lanes<kWorkers>(best, Larger()).at[1]);
    }
    struct Larger {
      FM_DEVICE Several<T, 2> operator()(Several<T, 2> p, Several<T, 2> q) const {
        return q.at[0] > p.at[0] || (q.at[0] == p.at[0] && q.at[1] < p.at[1]) ? q : p;
      }
    };

    // Sends what is possible along the path that a search has found; returns how much.
    FM_DEVICE T augment(int from, int word) const {
      T step = s_.inflow[from] - s_.used[from];
      for_path(from, word, [&](int e, bool along) {
        step = least(step, along ? capacity_[e] - flow_[e] : flow_[e]);
      });
      step = most(step, T(0));
      wait();
      if (rank_ == 0) {
        for_path(from, word, [&](int e, bool along) { flow_[e] += along ? step : -step; });
        s_.used[from] += step;
      }
      wait();
      return step;
    }
    // Calls visit(arc, whether along it).
    template <class Visit>
    FM_DEVICE void for_path(int from, int word, Visit visit) const {
#pragma unroll 1
      for (int at = from; at != word;) {
        const int by = s_.reached[at], arc = arc_[by >> 1];
        const bool along = (by & 1) != 0;
        visit(by >> 1, along);
        at = along ? arc >> 8 : arc & 255;
      }
    }

    // `member`: the words that nothing more can be sent to from the sources.
    FM_DEVICE void keep_unreached() const {
      begin_search([&](int m) { return s_.inflow[m] - s_.used[m] > least_; });
#pragma unroll 1
      for (u16 level = 1; grow<false>(level); ++level) {
      }
      for_words([&](int m) { s_.member[m] = s_.level[m] == 0; });
      wait();
    }

    FM_DEVICE bool known() const {
      bool found = false;
#pragma unroll 1
      for (int c = rank_; c < *graph_.cut_count(); c += kWorkers) {
        bool same = graph_.cut_form()[c] >> 1 == f_;
        for (int m = 0; m < words_ && same; ++m) same = graph_.in_cut(c, m) == (s_.member[m] != 0);
        found |= same;
      }
      return any(found);
    }

    const Cuts& cuts_;
    const Graph<V>& graph_;
    const Tree tree_;
    const Scratch s_;
    const int rank_, words_, f_;
    const T wanted_, least_;           // this much is enough; less counts as nothing
    T *const capacity_, *const flow_;  // (arcs,)
    u16* const arc_;                   // 256 word + head
    int arcs_ = 0;
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

  const Graph<V>& graph_;
  const Args<V>& a_;
  const Team<V::kTeam>& team_;
};

}  // namespace factormax
