// Local search for the best structure: good assignments soon, no proof.
//
// The search is over the states of units: a binary variable is a unit of two states, a one-hot
// group is a unit with one state per variable. Tables over units give scores, rows over states are
// constraints. The score of every state of every unit, given all other units, is kept up to date,
// so that a move costs only what it changes. The moves are: one unit to another state; chains of
// such moves, each of which mends a row that the last one broke; and the best states of a random
// induced forest, by dynamic programming. Broken rows cost a price that grows while they stay
// broken.
//
// Effort is counted in work, not in time: the same input gives the same answer.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <utility>

#include "factormax/search/forest.hpp"

namespace factormax {

class LocalSearch : public ForestSearch {
 public:
  void allocate(const SearchModel& m, Workspace& ws) {
    ForestSearch::allocate(m, ws);
    best_x_ = ws.take<std::int32_t>(m.num_units);
    tabu_ = ws.take<std::int64_t>(m.num_units);
  }

  // Starts from x, a state (counted within its unit) for each unit; x then holds the best found.
  // Only movable units move. Returns whether an x that meets all rows was found.
  bool run(std::int32_t* x, const std::uint8_t* movable, std::int64_t work, std::uint64_t seed) {
    random_ = seed * 2 + 1;
    work_ = work;
    best_value_ = -std::numeric_limits<double>::infinity();
    for (int u = 0; u < m_.num_units; ++u) {
      const std::uint8_t* allowed = m_.allowed + m_.state_ptr[u];
      const int first = static_cast<int>(std::find(allowed, allowed + m_.states(u), 1) - allowed);
      const bool may = movable[u] != 0 && first < m_.states(u);
      x_[u] = may && allowed[x[u]] == 0 ? first : x[u];
      const auto places = std::count(allowed, allowed + m_.states(u), 1);
      movable_[u] = may && places > 1;
    }
    std::fill(tabu_.begin(), tabu_.end(), 0);
    moves_ = 0;
    evaluate();
    set_prices();
    settle();
    // The mode that has found more for its work goes on.
    std::int64_t spent[3] = {0, 0, 0};
    int wins[3] = {1, 1, 1};
    int sweeps = 32;
    while (work_ > 0 && any_movable()) {
      int mode = 0;
      for (int k = 1; k < 3; ++k) {
        if (double(spent[k]) / wins[k] < double(spent[mode]) / wins[mode]) mode = k;
      }
      const double before = best_value_;
      const std::int64_t left = work_;
      if (mode == 0) {
        anneal(sweeps);
        sweeps = std::min(2 * sweeps, 1 << 20);
      } else if (mode == 1) {
        tabu_phase();
      } else {
        kick();
      }
      settle();
      if (best_value_ > before) {
        ++wins[mode];
      } else if (best_value_ > -std::numeric_limits<double>::infinity()) {
        return_to_best();
      }
      if (left == work_) --work_;
      spent[mode] += left - work_;
    }
    const bool found = best_value_ > -std::numeric_limits<double>::infinity();
    if (found) std::copy(best_x_.begin(), best_x_.end(), x);
    return found;
  }

 private:
  static constexpr int kLongestChain = 6;

  bool any_movable() const {
    return std::any_of(movable_.begin(), movable_.end(), [](std::uint8_t b) { return b != 0; });
  }

  void note_best() {
    if (num_broken_ > 0 || !(value_ > best_value_ + eps_)) return;
    best_value_ = value_;
    std::copy(x_.begin(), x_.end(), best_x_.begin());
    work_ -= m_.num_units / 8 + 1;
  }

  void return_to_best() {
    for (int u = 0; u < m_.num_units; ++u) {
      if (x_[u] != best_x_[u]) apply(u, best_x_[u]);
    }
    work_ -= m_.num_units / 4 + 1;
  }

  // Moves to where no move of any kind improves, and notes the result if it is the best.
  void settle() {
    for (int round = 0; round < 50 && work_ > 0; ++round) {
      sweep();
      for (int tries = 0; num_broken_ > 0 && tries < 20 && work_ > 0; ++tries) {
        raise_prices();
        sweep();
      }
      note_best();
      const double before = value_;
      if (m_.num_rows > 0 && num_broken_ == 0) chains();
      if (m_.num_tables > 0) {
        for (int fails = 0; fails < 3 && work_ > 0;) {
          if (forest() <= eps_) ++fails;
        }
      }
      note_best();
      if (num_broken_ == 0 && value_ <= before + eps_) return;
    }
    sweep();
    note_best();
  }

  // Moves single units for as long as that improves.
  void sweep() {
    for (bool moved = true; moved && work_ > 0;) {
      moved = false;
      for (int u = 0; u < m_.num_units && work_ > 0; ++u) {
        if (movable_[u] == 0) continue;
        for (int again = 0; again < 4; ++again) {
          refresh(u);
          if (!(gain_[u] > eps_)) break;
          apply(u, to_[u]);
          moved = true;
        }
      }
      work_ -= m_.num_units / 4 + 1;
    }
  }

  // For every move that would add to the score but breaks rows: can others mend them for less?
  void chains() {
    for (int u = 0; u < m_.num_units && work_ > 0; ++u) {
      if (movable_[u] == 0) continue;
      for (int t = 0; t < m_.states(u) && work_ > 0; ++t) {
        const int s = m_.state_ptr[u] + t;
        if (t == x_[u] || m_.allowed[s] == 0 || !(given_[s] - given_[state(u)] > eps_)) continue;
        chain(u, t);
      }
    }
  }

  void chain(int u, int to) {
    const double before = value_;
    std::pair<int, int> undo[kLongestChain];
    int length = 0;
    undo[length++] = {u, x_[u]};
    apply(u, to);
    while (num_broken_ > 0 && length < kLongestChain) {
      const int r = broken_[num_broken_ - 1];
      int mender = -1;
      for (int k = m_.row_ptr[r]; k < m_.row_ptr[r + 1]; ++k) {
        const int v = unit_of_[m_.row_state[k]];
        if (movable_[v] == 0) continue;
        bool locked = false;
        for (int j = 0; j < length; ++j) locked = locked || undo[j].first == v;
        if (locked) continue;
        refresh(v);
        if (mender < 0 || gain_[v] > gain_[mender]) mender = v;
      }
      work_ -= m_.row_ptr[r + 1] - m_.row_ptr[r];
      if (mender < 0 || to_[mender] == x_[mender]) break;
      undo[length++] = {mender, x_[mender]};
      apply(mender, to_[mender]);
    }
    if (num_broken_ == 0 && value_ > before + eps_) return;
    while (length-- > 0) apply(undo[length].first, undo[length].second);
  }

  // Makes the best moves, even those that cost; a unit that has just moved stays, unless moving it
  // beats the best.
  void tabu_phase() {
    const int U = m_.num_units;
    const int most_idle = 200 + 4 * std::min(U, 500);
    int patience = most_idle;
    const std::int64_t tenure = 2 + std::min(U / 10, 20);
    while (patience-- > 0 && work_ > 0) {
      int chosen = -1;
      double most = -std::numeric_limits<double>::infinity();
      for (int u = 0; u < U; ++u) {
        if (movable_[u] == 0) continue;
        refresh(u);
        const double gain = gain_[u];
        if (!(gain > most)) continue;
        const bool aspires = num_broken_ == 0 && value_ + gain > best_value_ + eps_;
        if (tabu_[u] > moves_ && !aspires) continue;
        most = gain;
        chosen = u;
      }
      work_ -= U / 2 + 1;
      if (chosen < 0) {  // all of them have just moved
        ++moves_;
        continue;
      }
      if (most <= 0) {
        const double before = best_value_;
        note_best();
        if (best_value_ > before) patience = most_idle;
        if (num_broken_ > 0) raise_prices();
      }
      apply(chosen, to_[chosen]);
      tabu_[chosen] = moves_ + tenure + draw(10);
    }
    note_best();
  }

  // Makes random moves that may cost, but less and less.
  void anneal(int sweeps) {
    double mean = 0;
    int counted = 0;
    for (int u = 0; u < m_.num_units; ++u) {
      if (movable_[u] == 0) continue;
      refresh(u);
      if (gain_[u] > -scale_) {
        mean += std::fabs(gain_[u]);
        ++counted;
      }
    }
    if (!(mean > 0)) return;
    mean /= counted;
    // At most half of the work left: what is found must still be settled.
    const std::int64_t end = work_ / 2;
    const std::int64_t each = std::max<std::int64_t>(1, 4 * std::int64_t(m_.num_units));
    sweeps = static_cast<int>(std::min<std::int64_t>(sweeps, (work_ - end) / each + 1));
    const double hot = mean, cold = mean / 30;
    for (int k = 0; k < sweeps && work_ > end; ++k) {
      const double share = sweeps > 1 ? double(k) / (sweeps - 1) : 1.0;
      const double heat = hot * std::pow(cold / hot, share);
      for (int u = 0; u < m_.num_units; ++u) {
        if (movable_[u] == 0) continue;
        const int states = m_.states(u);
        int t = states == 2 ? 1 - x_[u] : draw(states - 1);
        if (states > 2 && t >= x_[u]) ++t;
        if (m_.allowed[m_.state_ptr[u] + t] == 0) continue;
        const double gain = given_[m_.state_ptr[u] + t] - given_[state(u)] - row_cost(u, t);
        work_ -= 3;
        if (gain < 0) {
          if (gain < -30 * heat) continue;
          const double p = static_cast<double>(draw() >> 11) * 0x1p-53;
          if (p >= std::exp(gain / heat)) continue;
        }
        apply(u, t);
      }
    }
  }

  // Moves a unit and those near it to random states.
  void kick() {
    const int U = m_.num_units;
    const int wanted = 2 + draw(std::max(1, std::min(U / 5, 60)));
    int size = 0;
    std::fill(chosen_.begin(), chosen_.end(), std::uint8_t(0));
    work_ -= U / 8 + 1;
    const auto take = [&](int u) {
      if (chosen_[u] != 0 || size >= wanted) return;
      chosen_[u] = 1;
      queue_[size++] = u;
    };
    for (int at = 0; size < wanted && at <= size; ++at) {
      if (at == size) {
        const int before = size;
        for (int tries = 0; tries < 8 && size == before; ++tries) take(draw(U));
        if (size == before) break;
      }
      const int u = queue_[at];
      for (int k = touch_ptr_[u]; k < touch_ptr_[u + 1] && size < wanted; ++k) {
        const int f = touch_[k].table;
        // Only some of many neighbours: a patch of a dense graph would otherwise always be the
        // same.
        if (touch_ptr_[u + 1] - touch_ptr_[u] > 16 && draw(4) != 0) continue;
        for (int j = m_.scope_ptr[f]; j < m_.scope_ptr[f + 1]; ++j) take(m_.scope[j]);
        --work_;
      }
    }
    for (int k = 0; k < size; ++k) {
      const int u = queue_[k];
      if (movable_[u] == 0) continue;
      const int t = draw(m_.states(u));
      if (m_.allowed[m_.state_ptr[u] + t] != 0) apply(u, t);
    }
  }

  Span<std::int32_t> best_x_;
  Span<std::int64_t> tabu_;
  double best_value_ = 0;
};

}  // namespace factormax
