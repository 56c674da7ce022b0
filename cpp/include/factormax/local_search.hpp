// Local search for the best structure: good assignments soon, no proof.
//
// What is searched are units, each in one of a few states: a binary variable is a unit of two
// states, a one-hot group a unit of as many as it has variables. Tables over units give scores,
// rows over states are constraints. For every state of every unit the score given all other units
// is kept up to date, so that a move costs what it changes. The moves are: one unit to another
// state; chains of such moves, each of which mends a row that the last one broke; and the best
// states of a random induced forest, by dynamic programming. Broken rows cost a price that grows
// while they stay so.
//
// All is counted in work, not in time: the same input gives the same answer.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <utility>

#include "factormax/span.hpp"

namespace factormax {

struct SearchModel {
  int num_units = 0, num_states = 0, num_tables = 0, num_rows = 0;
  const std::int32_t* state_ptr = nullptr;  // (U + 1,) where the states of each unit begin
  const double* score = nullptr;            // (S,) of each state, finite
  const std::uint8_t* allowed = nullptr;    // (S,) 1 if a unit may be there, else 0
  const std::int32_t* scope_ptr = nullptr;  // (F + 1,) where the units of each table begin
  const std::int32_t* scope = nullptr;
  const std::int64_t* table_ptr =
      nullptr;                            // (F + 1,) where its scores begin: the last unit's state
  const double* table = nullptr;          // runs fastest; finite
  const std::int32_t* row_ptr = nullptr;  // (R + 1,)
  const std::int32_t* row_state = nullptr;  // the states that count in each row
  const double* coef = nullptr;
  const double* rhs = nullptr;          // (R,)
  const std::uint8_t* equal = nullptr;  // (R,) whether the sum must be rhs, or at most that

  int states(int u) const { return state_ptr[u + 1] - state_ptr[u]; }
  int order(int f) const { return scope_ptr[f + 1] - scope_ptr[f]; }
};

class LocalSearch {
 public:
  void allocate(const SearchModel& m, Workspace& ws) {
    m_ = m;
    const int U = m.num_units, S = m.num_states, R = m.num_rows;
    const int entries = m.row_ptr[R], scopes = m.scope_ptr[m.num_tables];
    unit_of_ = ws.take<std::int32_t>(S);
    touch_ptr_ = ws.take<std::int32_t>(U + 1);
    touch_ = ws.take<Touch>(scopes);
    stride_ = ws.take<std::int64_t>(scopes);
    state_row_ptr_ = ws.take<std::int32_t>(S + 1);
    state_row_ = ws.take<Entry>(entries);
    largest_ = ws.take<double>(R);
    x_ = ws.take<std::int32_t>(U);
    best_x_ = ws.take<std::int32_t>(U);
    movable_ = ws.take<std::uint8_t>(U);
    dirty_ = ws.take<std::uint8_t>(U);
    given_ = ws.take<double>(S);
    gain_ = ws.take<double>(U);
    to_ = ws.take<std::int32_t>(U);
    tabu_ = ws.take<std::int64_t>(U);
    order_ = ws.take<std::int32_t>(U);
    sum_ = ws.take<double>(R);
    price_ = ws.take<double>(R);
    left_ = ws.take<double>(R);
    broken_place_ = ws.take<std::int32_t>(R);
    broken_ = ws.take<std::int32_t>(R);
    row_taken_ = ws.take<std::uint8_t>(R);
    root_ = ws.take<std::int32_t>(U);
    parent_ = ws.take<std::int32_t>(U);
    chosen_ = ws.take<std::uint8_t>(U);
    queue_ = ws.take<std::int32_t>(U);
    tree_ = ws.take<std::int32_t>(U);
    message_ = ws.take<double>(S);
  }

  // Once, after memory was given.
  void prepare() {
    for (int u = 0; u < m_.num_units; ++u) {
      order_[u] = u;
      for (int s = m_.state_ptr[u]; s < m_.state_ptr[u + 1]; ++s) unit_of_[s] = u;
    }
    std::fill(touch_ptr_.begin(), touch_ptr_.end(), 0);
    for (int f = 0; f < m_.num_tables; ++f) {
      std::int64_t stride = 1;
      for (int k = m_.scope_ptr[f + 1] - 1; k >= m_.scope_ptr[f]; --k) {
        stride_[k] = stride;
        stride *= m_.states(m_.scope[k]);
        ++touch_ptr_[m_.scope[k] + 1];
      }
    }
    for (int u = 0; u < m_.num_units; ++u) touch_ptr_[u + 1] += touch_ptr_[u];
    std::copy(touch_ptr_.begin(), touch_ptr_.end() - 1, queue_.begin());
    for (int f = 0; f < m_.num_tables; ++f) {
      for (int k = m_.scope_ptr[f]; k < m_.scope_ptr[f + 1]; ++k) {
        touch_[queue_[m_.scope[k]]++] = {f, k};
      }
    }
    prepare_rows();
  }

  // From x, a state (counted within its unit) for each unit, which then holds the best that was
  // found. Only units that are movable move. Returns whether all rows hold.
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
    // What has found more for its work goes on.
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

  // The score of each state given the states x of all other units, (S,).
  void conditional(const std::int32_t* x, double* out) {
    std::copy(x, x + m_.num_units, x_.begin());
    evaluate();
    std::copy(given_.begin(), given_.end(), out);
  }

 private:
  struct Touch {
    std::int32_t table, place;  // place: in scope
  };
  struct Entry {
    std::int32_t row;
    double coef;
  };
  static constexpr int kLongestChain = 6;

  void prepare_rows() {
    std::fill(state_row_ptr_.begin(), state_row_ptr_.end(), 0);
    for (int r = 0; r < m_.num_rows; ++r) {
      largest_[r] = 0;
      for (int k = m_.row_ptr[r]; k < m_.row_ptr[r + 1]; ++k) {
        ++state_row_ptr_[m_.row_state[k] + 1];
        largest_[r] = std::max(largest_[r], std::fabs(m_.coef[k]));
      }
    }
    for (int s = 0; s < m_.num_states; ++s) state_row_ptr_[s + 1] += state_row_ptr_[s];
    // Filled from the back, so that each begin is where it should be afterwards.
    for (int r = m_.num_rows - 1; r >= 0; --r) {
      for (int k = m_.row_ptr[r + 1] - 1; k >= m_.row_ptr[r]; --k) {
        state_row_[--state_row_ptr_[m_.row_state[k] + 1]] = {r, m_.coef[k]};
      }
    }
    // Now ptr[s + 1] is where s begins: shift by one.
    for (int s = 0; s < m_.num_states; ++s) state_row_ptr_[s] = state_row_ptr_[s + 1];
    state_row_ptr_[m_.num_states] = m_.row_ptr[m_.num_rows];
    std::fill(left_.begin(), left_.end(), 0.0);
    std::fill(row_taken_.begin(), row_taken_.end(), std::uint8_t(0));
  }

  std::uint64_t draw() {  // splitmix64
    std::uint64_t z = (random_ += 0x9E3779B97F4A7C15ull);
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
    return z ^ (z >> 31);
  }
  int draw(int end) { return static_cast<int>(draw() % static_cast<std::uint64_t>(end)); }

  int state(int u) const { return m_.state_ptr[u] + x_[u]; }

  // ---- What is kept up to date
  // -------------------------------------------------------------------

  void evaluate() {
    std::copy(m_.score, m_.score + m_.num_states, given_.begin());
    value_ = 0;
    for (int u = 0; u < m_.num_units; ++u) value_ += m_.score[state(u)];
    for (int f = 0; f < m_.num_tables; ++f) {
      const std::int64_t at = cell(f);
      value_ += m_.table[at];
      for (int k = m_.scope_ptr[f]; k < m_.scope_ptr[f + 1]; ++k) {
        const int u = m_.scope[k];
        const double* column = m_.table + at - stride_[k] * x_[u];
        for (int t = 0; t < m_.states(u); ++t) {
          given_[m_.state_ptr[u] + t] += column[stride_[k] * t];
        }
      }
    }
    num_broken_ = 0;
    for (int r = 0; r < m_.num_rows; ++r) {
      sum_[r] = 0;
      broken_place_[r] = -1;
    }
    for (int u = 0; u < m_.num_units; ++u) {
      for_rows(state(u), [&](int r, double c) { sum_[r] += c; });
    }
    for (int r = 0; r < m_.num_rows; ++r) note_broken(r);
    std::fill(dirty_.begin(), dirty_.end(), std::uint8_t(1));
    work_ -= m_.num_states + m_.row_ptr[m_.num_rows] + 2 * m_.scope_ptr[m_.num_tables];
  }

  // Where the scores of a table are that count now.
  std::int64_t cell(int f) const {
    std::int64_t at = m_.table_ptr[f];
    for (int k = m_.scope_ptr[f]; k < m_.scope_ptr[f + 1]; ++k) at += stride_[k] * x_[m_.scope[k]];
    return at;
  }

  template <class Visit>
  void for_rows(int s, Visit&& visit) const {
    for (int k = state_row_ptr_[s]; k < state_row_ptr_[s + 1]; ++k) {
      visit(state_row_[k].row, state_row_[k].coef);
    }
  }

  double excess(int r, double sum) const {
    const double over = sum - m_.rhs[r];
    const double by = m_.equal[r] != 0 ? std::fabs(over) : over;
    return by > 1e-9 * (1 + std::fabs(m_.rhs[r])) ? by : 0.0;
  }

  void note_broken(int r) {
    const bool is_broken = excess(r, sum_[r]) > 0;
    if (is_broken == (broken_place_[r] >= 0)) return;
    if (is_broken) {
      broken_place_[r] = num_broken_;
      broken_[num_broken_++] = r;
    } else {
      const int last = broken_[--num_broken_], place = broken_place_[r];
      broken_[place] = last;
      broken_place_[last] = place;
      broken_place_[r] = -1;
    }
  }

  void apply(int u, int to) {
    const int from = x_[u];
    if (from == to) return;
    value_ += given_[m_.state_ptr[u] + to] - given_[m_.state_ptr[u] + from];
    for (int k = touch_ptr_[u]; k < touch_ptr_[u + 1]; ++k) {
      const auto [f, place] = touch_[k];
      const std::int64_t at = cell(f), jump = stride_[place] * (to - from);
      for (int other = m_.scope_ptr[f]; other < m_.scope_ptr[f + 1]; ++other) {
        if (other == place) continue;
        const int v = m_.scope[other];
        const std::int64_t stride = stride_[other];
        const double* column = m_.table + at - stride * x_[v];
        double* given = given_.data + m_.state_ptr[v];
        const int states = m_.states(v);
        for (int t = 0; t < states; ++t) {
          given[t] += column[stride * t + jump] - column[stride * t];
        }
        dirty_[v] = 1;
        work_ -= 2 + states;
      }
    }
    for_rows(state(u), [&](int r, double c) { add_to_row(r, -c); });
    x_[u] = to;
    for_rows(state(u), [&](int r, double c) { add_to_row(r, c); });
    dirty_[u] = 1;
    work_ -= 4;
    ++moves_;
  }

  void add_to_row(int r, double c) {
    const double before = sum_[r];
    sum_[r] += c;
    note_broken(r);
    // Where no single move breaks the row, before and after, nothing changes for its units.
    if (m_.equal[r] == 0 && std::max(before, sum_[r]) + 2 * largest_[r] <= m_.rhs[r]) return;
    mark_row(r);
  }

  void mark_row(int r) {
    for (int k = m_.row_ptr[r]; k < m_.row_ptr[r + 1]; ++k) dirty_[unit_of_[m_.row_state[k]]] = 1;
    work_ -= (m_.row_ptr[r + 1] - m_.row_ptr[r]) / 4 + 1;
  }

  // Calls visit(state within the unit, gain of score, cost of rows) for every other allowed state.
  template <class Visit>
  void for_moves(int u, Visit&& visit) {
    const int begin = m_.state_ptr[u], now = state(u);
    double leaving = 0;
    for_rows(now, [&](int r, double c) {
      left_[r] = c;
      leaving += price_[r] * (excess(r, sum_[r] - c) - excess(r, sum_[r]));
    });
    for (int s = begin; s < m_.state_ptr[u + 1]; ++s) {
      if (s == now || m_.allowed[s] == 0) continue;
      double cost = leaving;
      for_rows(s, [&](int r, double c) {
        const double sum = sum_[r] - left_[r];
        cost += price_[r] * (excess(r, sum + c) - excess(r, sum));
      });
      work_ -= 1 + state_row_ptr_[s + 1] - state_row_ptr_[s];
      visit(s - begin, given_[s] - given_[now], cost);
    }
    for_rows(now, [&](int r, double) { left_[r] = 0; });
    work_ -= 2;
  }

  // The best move of a unit, at the prices of the rows.
  void refresh(int u) {
    if (dirty_[u] == 0) return;
    dirty_[u] = 0;
    gain_[u] = -std::numeric_limits<double>::infinity();
    to_[u] = x_[u];
    for_moves(u, [&](int to, double gain, double cost) {
      if (gain - cost > gain_[u]) {
        gain_[u] = gain - cost;
        to_[u] = to;
      }
    });
  }

  bool any_movable() const {
    return std::any_of(movable_.begin(), movable_.end(), [](std::uint8_t b) { return b != 0; });
  }

  // ---- Prices
  // ------------------------------------------------------------------------------------

  void set_prices() {
    double largest = 0;
    for (int u = 0; u < m_.num_units; ++u) {
      for (int s = m_.state_ptr[u]; s < m_.state_ptr[u + 1]; ++s) {
        if (m_.allowed[s] == 0) continue;
        largest = std::max(largest, std::fabs(given_[s] - given_[state(u)]));
      }
    }
    scale_ = largest > 0 ? largest : 1.0;
    eps_ = 1e-12 * scale_;
    for (int r = 0; r < m_.num_rows; ++r) {
      price_[r] = scale_ / (largest_[r] > 0 ? largest_[r] : 1.0);
    }
  }

  void raise_prices() {
    for (int k = 0; k < num_broken_; ++k) {
      const int r = broken_[k];
      price_[r] = std::min(price_[r] * 1.5, 1e6 * scale_ / (largest_[r] > 0 ? largest_[r] : 1.0));
      mark_row(r);
    }
  }

  // ---- Moves
  // -------------------------------------------------------------------------------------

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

  // To where no move of any kind improves; then remembers it if it is the best.
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

  // Random units that are tied to each other as a forest, to their best states; returns the gain.
  double forest() {
    const int U = m_.num_units;
    std::fill(chosen_.begin(), chosen_.end(), std::uint8_t(0));
    int size = 0;
    for (int k = U - 1; k > 0; --k) std::swap(order_[k], order_[draw(k + 1)]);
    for (int u = 0; u < U; ++u) root_[u] = u;
    for (int k = 0; k < U && work_ > 0; ++k) {
      const int u = order_[k];
      if (movable_[u] != 0 && may_join(u)) {
        join(u);
        queue_[size++] = u;
      }
    }
    work_ -= 2 * U;
    for (int k = 0; k < size; ++k) leave_rows(queue_[k]);
    if (work_ <= 0) return 0;
    return best_forest(size);
  }

  int find(int u) {
    while (root_[u] != u) u = root_[u] = root_[root_[u]];
    return u;
  }

  // Whether the forest stays one: each neighbour in it in a tree of its own, and in tables of two.
  bool may_join(int u) {
    bool fits = true;
    for_all_rows_of(u, [&](int r) { fits = fits && row_taken_[r] == 0; });
    int seen = 0;
    for (int k = touch_ptr_[u]; fits && k < touch_ptr_[u + 1]; ++k) {
      const auto [f, place] = touch_[k];
      for (int other = m_.scope_ptr[f]; other < m_.scope_ptr[f + 1]; ++other) {
        const int v = m_.scope[other];
        if (other == place || chosen_[v] == 0) continue;
        const int root = find(v);
        if (m_.order(f) > 2 || parent_[root] == -2) {
          fits = false;
          break;
        }
        parent_[root] = -2;  // met
        tree_[seen++] = root;
      }
      --work_;
    }
    for (int k = 0; k < seen; ++k) parent_[tree_[k]] = -1;
    return fits;
  }

  void join(int u) {
    chosen_[u] = 1;
    parent_[u] = -1;
    for (int k = touch_ptr_[u]; k < touch_ptr_[u + 1]; ++k) {
      const auto [f, place] = touch_[k];
      for (int other = m_.scope_ptr[f]; other < m_.scope_ptr[f + 1]; ++other) {
        const int v = m_.scope[other];
        if (other != place && chosen_[v] != 0) root_[find(v)] = u;
      }
    }
    for_all_rows_of(u, [&](int r) { row_taken_[r] = 1; });
  }

  void leave_rows(int u) {
    for_all_rows_of(u, [&](int r) { row_taken_[r] = 0; });
  }

  template <class Visit>
  void for_all_rows_of(int u, Visit&& visit) {
    for (int s = m_.state_ptr[u]; s < m_.state_ptr[u + 1]; ++s) {
      for_rows(s, [&](int r, double) { visit(r); });
    }
  }

  // Calls visit(neighbour, table, own place, its place) for the neighbours in the forest.
  template <class Visit>
  void for_neighbours(int u, Visit&& visit) const {
    for (int k = touch_ptr_[u]; k < touch_ptr_[u + 1]; ++k) {
      const auto [f, place] = touch_[k];
      if (m_.order(f) != 2) continue;
      const int first = m_.scope_ptr[f], other = place == first ? first + 1 : first;
      const int v = m_.scope[other];
      if (chosen_[v] != 0) visit(v, f, place, other);
    }
  }

  double best_forest(int size) {
    // Breadth first from a root of each tree: tree_ has every unit after its parent.
    int listed = 0;
    for (int k = 0; k < size; ++k) parent_[queue_[k]] = -3;  // not met yet
    for (int k = 0; k < size; ++k) {
      const int start = queue_[k];
      if (parent_[start] != -3) continue;
      parent_[start] = -1;
      const int begin = listed;
      tree_[listed++] = start;
      for (int at = begin; at < listed; ++at) {
        const int u = tree_[at];
        for_neighbours(u, [&](int v, int, int, int) {
          if (parent_[v] != -3) return;
          parent_[v] = u;
          tree_[listed++] = v;
        });
      }
    }
    const double worst = -std::numeric_limits<double>::infinity();
    for (int k = 0; k < listed; ++k) {
      const int u = tree_[k], begin = m_.state_ptr[u];
      for (int t = 0; t < m_.states(u); ++t) message_[begin + t] = worst;
      message_[state(u)] = given_[state(u)];
      for_moves(u, [&](int t, double gain, double cost) {
        if (cost <= 0) message_[begin + t] = given_[state(u)] + gain;
      });
      for_neighbours(u, [&](int v, int f, int place, int other) {
        const double* column = m_.table + m_.table_ptr[f] + stride_[other] * x_[v];
        for (int t = 0; t < m_.states(u); ++t) message_[begin + t] -= column[stride_[place] * t];
        work_ -= m_.states(u);
      });
    }
    for (int k = listed - 1; k >= 0; --k) {  // from the leaves
      const int v = tree_[k], u = parent_[v];
      if (u < 0) continue;
      for_neighbours(v, [&](int w, int f, int place, int other) {
        if (w != u) return;
        const double* table = m_.table + m_.table_ptr[f];
        for (int t = 0; t < m_.states(u); ++t) {
          double best = worst;
          for (int q = 0; q < m_.states(v); ++q) {
            best = std::max(best, message_[m_.state_ptr[v] + q] +
                                      table[stride_[other] * t + stride_[place] * q]);
          }
          message_[m_.state_ptr[u] + t] += best;
        }
        work_ -= std::int64_t(m_.states(u)) * m_.states(v);
      });
    }
    for (int k = 0; k < listed; ++k) {  // from the roots; to_ holds what is chosen
      const int v = tree_[k], u = parent_[v];
      const double* message = message_.data + m_.state_ptr[v];
      const double* column = nullptr;
      std::int64_t stride = 0;
      if (u >= 0) {
        for_neighbours(v, [&](int w, int f, int place, int other) {
          if (w != u) return;
          column = m_.table + m_.table_ptr[f] + stride_[other] * to_[u];
          stride = stride_[place];
        });
      }
      const auto total = [&](int q) {
        return message[q] + (column != nullptr ? column[stride * q] : 0.0);
      };
      int best = x_[v];
      double most = total(best) + eps_;  // where others are no better it stays
      for (int q = 0; q < m_.states(v); ++q) {
        if (total(q) > most) {
          best = q;
          most = total(q);
        }
      }
      to_[v] = best;
      dirty_[v] = 1;
    }
    const double before = value_;
    for (int k = 0; k < listed; ++k) apply(tree_[k], to_[tree_[k]]);
    return value_ - before;
  }

  // Best moves, also those that cost, but none of a unit that has moved just now.
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

  // Random moves that may cost, less and less.
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
    // No more than half of what is left: what was found is to be settled.
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

  double row_cost(int u, int to) {
    const int now = state(u), s = m_.state_ptr[u] + to;
    if (state_row_ptr_[now] == state_row_ptr_[now + 1] &&
        state_row_ptr_[s] == state_row_ptr_[s + 1]) {
      return 0;
    }
    double cost = 0;
    for_rows(now, [&](int r, double c) {
      left_[r] = c;
      cost += price_[r] * (excess(r, sum_[r] - c) - excess(r, sum_[r]));
    });
    for_rows(s, [&](int r, double c) {
      const double sum = sum_[r] - left_[r];
      cost += price_[r] * (excess(r, sum + c) - excess(r, sum));
      --work_;
    });
    for_rows(now, [&](int r, double) { left_[r] = 0; });
    return cost;
  }

  // A unit and what is near it, to any states.
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
        // Of many neighbours some: a patch of a dense graph would always be the same.
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

  SearchModel m_;
  Span<std::int32_t> unit_of_, touch_ptr_, state_row_ptr_, x_, best_x_, to_, order_;
  Span<std::int32_t> broken_place_, broken_, root_, parent_, queue_, tree_;
  Span<Touch> touch_;
  Span<Entry> state_row_;
  Span<std::int64_t> stride_, tabu_;
  Span<double> largest_, given_, gain_, sum_, price_, left_, message_;
  Span<std::uint8_t> movable_, dirty_, row_taken_, chosen_;
  double value_ = 0, best_value_ = 0, scale_ = 1, eps_ = 0;
  int num_broken_ = 0;
  std::int64_t work_ = 0, moves_ = 0;
  std::uint64_t random_ = 1;
};

}  // namespace factormax
