// The model of a local search, an assignment of it, and what is kept up to date with every move:
// the score of each state given all other units, the sums of the rows, and which of them are
// broken.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

#include "factormax/span.hpp"

namespace factormax {

struct SearchModel {
  int num_units = 0, num_states = 0, num_tables = 0, num_rows = 0;
  const std::int32_t* state_ptr = nullptr;  // (U + 1,) where the states of each unit begin
  const double* score = nullptr;            // (S,) finite
  const std::uint8_t* allowed = nullptr;    // (S,) 1 if a unit may be there, else 0
  const std::int32_t* scope_ptr = nullptr;  // (F + 1,) where the units of each table begin
  const std::int32_t* scope = nullptr;
  const std::int64_t* table_ptr = nullptr;  // (F + 1,) where its scores begin
  const double* table = nullptr;            // the last unit's state runs fastest; finite
  const std::int32_t* row_ptr = nullptr;    // (R + 1,)
  const std::int32_t* row_state = nullptr;  // the states that count in each row
  const double* coef = nullptr;
  const double* rhs = nullptr;          // (R,)
  const std::uint8_t* equal = nullptr;  // (R,) 1: the sum must be rhs; 0: at most rhs

  int states(int u) const { return state_ptr[u + 1] - state_ptr[u]; }
  int order(int f) const { return scope_ptr[f + 1] - scope_ptr[f]; }
};

class SearchState {
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
    dirty_ = ws.take<std::uint8_t>(U);
    given_ = ws.take<double>(S);
    gain_ = ws.take<double>(U);
    to_ = ws.take<std::int32_t>(U);
    sum_ = ws.take<double>(R);
    price_ = ws.take<double>(R);
    left_ = ws.take<double>(R);
    broken_place_ = ws.take<std::int32_t>(R);
    broken_ = ws.take<std::int32_t>(R);
    queue_ = ws.take<std::int32_t>(U);
  }

  // To be called once, when there is memory.
  void prepare() {
    for (int u = 0; u < m_.num_units; ++u) {
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

  // The score of each state given the states x of all other units, (S,).
  void conditional(const std::int32_t* x, double* out) {
    std::copy(x, x + m_.num_units, x_.begin());
    evaluate();
    std::copy(given_.begin(), given_.end(), out);
  }

 protected:
  struct Touch {
    std::int32_t table, place;  // place: index into scope
  };

  struct Entry {
    std::int32_t row;
    double coef;
  };

  int state(int u) const { return m_.state_ptr[u] + x_[u]; }

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

  // Where the current score of a table is.
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
    // If no single move can break the row, before or after, nothing changes for its units.
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

  SearchModel m_;
  Span<std::int32_t> unit_of_, touch_ptr_, state_row_ptr_;
  Span<Touch> touch_;
  Span<Entry> state_row_;
  Span<std::int64_t> stride_;
  Span<double> largest_;                      // (R,) coefficient, in magnitude
  Span<std::int32_t> x_;                      // (U,) the states
  Span<double> given_;                        // (S,) scores given all other units
  Span<double> gain_;                         // (U,) gain of the best move, unless dirty
  Span<std::int32_t> to_;                     // (U,) the best move
  Span<std::uint8_t> dirty_;                  // (U,)
  Span<double> sum_, price_, left_;           // (R,)
  Span<std::int32_t> broken_place_, broken_;  // (R,)
  Span<std::int32_t> queue_;                  // (U,) scratch
  double value_ = 0, scale_ = 1, eps_ = 0;
  int num_broken_ = 0;
  std::int64_t work_ = 0, moves_ = 0;  // work left, and moves made

 private:
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
  }
};

}  // namespace factormax
