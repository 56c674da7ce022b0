// Sets of words that marginals of arcs leave without a head outside: what keeps them from being
// marginals of trees, docs/math.md (60). What a set lacks is how much the marginals of the arcs
// into it fall short of 1.
#pragma once

#include <algorithm>

#include "factormax/vector_ops.hpp"

namespace factormax {

// Marginals with one head per word are those of trees if and only if every word gets a flow of 1
// from the root, with the marginals as capacities. Words are taken in the order of what flows into
// them directly; once a word has its flow, it is as good a source as the root, for no set that
// lacks some can hold it. So all but the first few flows take a single look.
class TreeCuts {
 public:
  void allocate(int words, Workspace& ws) {
    words_ = words;
    const std::int64_t arcs = std::int64_t(words) * words;
    in_ptr_ = ws.take<std::int32_t>(words + 1);
    out_ptr_ = ws.take<std::int32_t>(words + 2);
    for (Span<std::int32_t>* a : {&head_, &modifier_, &out_arc_}) *a = ws.take<std::int32_t>(arcs);
    capacity_ = ws.take<double>(arcs);
    flow_ = ws.take<double>(arcs);
    inflow_ = ws.take<double>(words);
    used_ = ws.take<double>(words);
    outflow_ = ws.take<double>(words);
    state_ = ws.take<std::uint8_t>(words);
    queue_ = ws.take<std::int32_t>(words);
    came_by_ = ws.take<std::int32_t>(words);
    supply_ = ws.take<std::int32_t>(words);
    seen_ = ws.take<std::uint8_t>(words);
    passes_on_ = ws.take<std::uint8_t>(words);
    member = ws.take<std::uint8_t>(words);
  }

  Span<std::uint8_t> member;  // (words,) whether a word is in the set that was found
  // Whether light words are skipped: those that give the others no more than they get from the
  // sources. A set that lacks some lacks no less without such a word.
  bool skip_light = false;

  // How many words there are from now on.
  void resize(int words) { words_ = words; }

  // heads(m, visit): calls visit(h, mu) for each head h of word m, h = m for the root; heads with
  // mu = 0 may be left out. present(m): whether the word is present. known(): whether the set lacks
  // that much only by rounding. report(): called for every other set that lacks more than
  // `tolerance`; returns false to stop.
  template <class Heads, class Present, class Known, class Report>
  void find(const Heads& heads, const Present& present, double tolerance, const Known& known,
            const Report& report) {
    load(heads, present, 1e-3 * tolerance);
    wanted_ = 1 - tolerance;
    for (int m = 0; m < words_; ++m) {
      if (state_[m] == kOpen && is_clear(m)) finish(m);
    }
    for (;;) {
      int word = -1;
      for (int m = 0; m < words_; ++m) {
        if (state_[m] == kOpen && (word < 0 || inflow_[m] > inflow_[word])) word = m;
      }
      if (word < 0) return;
      if (flow_to(word) || known()) {
        finish(word);
        continue;
      }
      for (int m = 0; m < words_; ++m) {
        if (member[m]) state_[m] = kSkipped;
      }
      if (!report()) return;
    }
  }

 private:
  enum : std::uint8_t { kAbsent, kOpen, kSkipped, kDone };

  template <class Heads, class Present>
  void load(const Heads& heads, const Present& present, double least) {
    least_ = least;
    int arcs = 0;
    fill(out_ptr_, 0);
    fill(outflow_, 0.0);
    for (int m = 0; m < words_; ++m) {
      in_ptr_[m] = arcs;
      inflow_[m] = 0;
      state_[m] = present(m) ? kOpen : kAbsent;
      if (state_[m] == kAbsent) continue;
      heads(m, [&](int h, double value) {
        if (value <= least) return;
        if (h == m) {
          inflow_[m] = value;
          return;
        }
        head_[arcs] = h;
        modifier_[arcs] = m;
        capacity_[arcs] = value;
        outflow_[h] += value;
        ++out_ptr_[h + 2];
        ++arcs;
      });
    }
    in_ptr_[words_] = arcs;
    for (int h = 0; h < words_; ++h) out_ptr_[h + 2] += out_ptr_[h + 1];
    for (int a = 0; a < arcs; ++a) out_arc_[out_ptr_[head_[a] + 1]++] = a;
  }

  // Whether no flow has to be found for a word: its heads are all finished, or it is light.
  bool is_clear(int m) const {
    return skip_light ? outflow_[m] <= inflow_[m] + least_ : inflow_[m] >= wanted_;
  }

  // Marks the word as done, for it has its flow, and with it those that are clear now.
  void finish(int word) {
    int begin = 0, end = 0;
    state_[word] = kDone;
    queue_[end++] = word;
    while (begin < end) {
      const int at = queue_[begin++];
      for (int k = out_ptr_[at]; k < out_ptr_[at + 1]; ++k) {
        const int next = modifier_[out_arc_[k]];
        inflow_[next] += capacity_[out_arc_[k]];
        if (state_[next] != kOpen || !is_clear(next)) continue;
        state_[next] = kDone;
        queue_[end++] = next;
      }
      for (int a = in_ptr_[at]; skip_light && a < in_ptr_[at + 1]; ++a) {
        const int from = head_[a];
        outflow_[from] -= capacity_[a];
        if (state_[from] != kOpen || !is_clear(from)) continue;
        state_[from] = kDone;
        queue_[end++] = from;
      }
    }
  }

  // Whether all that is wanted flows from the sources to the word; if not, `member` is the largest
  // set that lets no more in (the smallest ones differ little from word to word, and are many).
  // First what the word's heads have themselves, then along shortest paths, searched from the word.
  bool flow_to(int word) {
    fill(flow_.first(in_ptr_[words_]), 0.0);
    fill(used_, 0.0);
    fill(passes_on_, std::uint8_t(0));
    double total = used_[word] = inflow_[word];
    for (int a = in_ptr_[word]; a < in_ptr_[word + 1]; ++a) {
      const int from = head_[a];
      if (state_[from] == kDone || inflow_[from] <= least_) continue;
      flow_[a] = used_[from] = std::min(capacity_[a], inflow_[from]);
      passes_on_[from] = 1;
      total += flow_[a];
    }
    while (total < wanted_) {
      const int found = search(word, wanted_ - total);
      if (found == 0) {
        keep_unreached();
        return false;
      }
      for (int k = 0; k < found && total < wanted_; ++k) total += send(supply_[k], word);
    }
    return true;
  }

  // Sends what more can flow from there along the path that was found, unless others have used it
  // up; returns how much.
  double send(int from, int word) {
    double step = inflow_[from] - used_[from];
    for_path(from, word, [&](int arc, bool along) {
      step = std::min(step, along ? capacity_[arc] - flow_[arc] : flow_[arc]);
    });
    if (step <= 0) return 0;
    for_path(from, word, [&](int arc, bool along) {
      flow_[arc] += along ? step : -step;
      passes_on_[head_[arc]] = 1;
    });
    used_[from] += step;
    return step;
  }

  // `member`: the words that nothing more can be sent to from the sources.
  void keep_unreached() {
    int begin = 0, end = 0;
    for (int m = 0; m < words_; ++m) {
      const bool outside = state_[m] == kDone || state_[m] == kAbsent;
      const bool reached = !outside && inflow_[m] - used_[m] > least_;
      member[m] = !outside && !reached;
      if (reached) queue_[end++] = m;
    }
    const auto reach = [&](int next) {
      if (!member[next]) return;
      member[next] = 0;
      queue_[end++] = next;
    };
    while (begin < end) {
      const int at = queue_[begin++];
      for (int k = out_ptr_[at]; k < out_ptr_[at + 1]; ++k) {
        const int a = out_arc_[k];
        if (capacity_[a] - flow_[a] > least_) reach(modifier_[a]);
      }
      for (int a = in_ptr_[at]; a < in_ptr_[at + 1]; ++a) {
        if (flow_[a] > least_) reach(head_[a]);
      }
    }
  }

  // Finds the nearest words with supply left, until they have as much as is asked for or there are
  // no more; returns how many are in supply_. The word itself has none.
  int search(int word, double asked) {
    fill(seen_, std::uint8_t(0));
    int begin = 0, end = 0, found = 0;
    queue_[end++] = word;
    seen_[word] = 1;
    const auto see = [&](int next, int by) {
      if (seen_[next] || state_[next] == kDone) return;
      seen_[next] = 1;
      came_by_[next] = by;
      queue_[end++] = next;
      const double supply = inflow_[next] - used_[next];
      if (supply <= least_) return;
      supply_[found++] = next;
      asked -= supply;
    };
    while (begin < end && asked > 0) {
      const int at = queue_[begin++];
      for (int a = in_ptr_[at]; a < in_ptr_[at + 1]; ++a) {
        if (capacity_[a] - flow_[a] > least_) see(head_[a], a);
      }
      if (!passes_on_[at]) continue;
      for (int k = out_ptr_[at]; k < out_ptr_[at + 1]; ++k) {
        const int a = out_arc_[k];  // takes back what flows there
        if (flow_[a] > least_) see(modifier_[a], -1 - a);
      }
    }
    return found;
  }

  // Calls visit(arc, whether along it), from the supply to the word.
  template <class Visit>
  void for_path(int from, int word, const Visit& visit) const {
    for (int at = from; at != word;) {
      const int by = came_by_[at];
      visit(by >= 0 ? by : -1 - by, by >= 0);
      at = by >= 0 ? modifier_[by] : head_[-1 - by];
    }
  }

  int words_ = 0;
  double least_ = 0, wanted_ = 1;                // less counts as nothing; this much is enough
  Span<std::int32_t> in_ptr_, head_, modifier_;  // arcs by modifier
  Span<std::int32_t> out_ptr_, out_arc_;         // and by head
  Span<double> capacity_, flow_;                 // (arcs,)
  Span<double> inflow_, outflow_, used_;         // (words,) from the sources, to others, used
  Span<std::uint8_t> state_, seen_;
  Span<std::uint8_t> passes_on_;                 // (words,) whether some flow may leave a word
  Span<std::int32_t> queue_, came_by_, supply_;  // for the search
};

}  // namespace factormax
