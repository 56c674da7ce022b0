// A move of local search: the best states of a random induced forest, by dynamic programming.
#pragma once

#include <algorithm>
#include <limits>
#include <utility>

#include "factormax/search/state.hpp"

namespace factormax {

class ForestSearch : public SearchState {
 public:
  void allocate(const SearchModel& m, Workspace& ws) {
    SearchState::allocate(m, ws);
    const int U = m.num_units;
    movable_ = ws.take<std::uint8_t>(U);
    order_ = ws.take<std::int32_t>(U);
    row_taken_ = ws.take<std::uint8_t>(m.num_rows);
    root_ = ws.take<std::int32_t>(U);
    parent_ = ws.take<std::int32_t>(U);
    chosen_ = ws.take<std::uint8_t>(U);
    tree_ = ws.take<std::int32_t>(U);
    message_ = ws.take<double>(m.num_states);
  }

  // To be called once, when there is memory.
  void prepare() {
    SearchState::prepare();
    for (int u = 0; u < m_.num_units; ++u) order_[u] = u;
    std::fill(row_taken_.begin(), row_taken_.end(), std::uint8_t(0));
  }

 protected:
  std::uint64_t draw() {  // splitmix64
    std::uint64_t z = (random_ += 0x9E3779B97F4A7C15ull);
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
    return z ^ (z >> 31);
  }

  int draw(int end) { return static_cast<int>(draw() % static_cast<std::uint64_t>(end)); }

  // Moves random units that form a forest to their best states; returns the gain.
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

  Span<std::uint8_t> movable_;  // (U,)
  Span<std::uint8_t> chosen_;   // (U,) units of the forest
  std::uint64_t random_ = 1;

 private:
  int find(int u) {
    while (root_[u] != u) u = root_[u] = root_[root_[u]];
    return u;
  }

  // Whether it stays a forest with u: the neighbours of u in it must be in different trees, and
  // share only tables of two units with u, and no row.
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
    const int listed = list_trees(size);
    begin_messages(listed);
    send_to_roots(listed);
    choose_from_roots(listed);
    const double before = value_;
    for (int k = 0; k < listed; ++k) apply(tree_[k], to_[tree_[k]]);
    return value_ - before;
  }

  // Breadth first from a root of each tree: tree_ has every unit after its parent.
  int list_trees(int size) {
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
    return listed;
  }

  // The scores of states that break no row, without what the neighbours in the forest add.
  void begin_messages(int listed) {
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
  }

  void send_to_roots(int listed) {
    for (int k = listed - 1; k >= 0; --k) {
      const int v = tree_[k], u = parent_[v];
      if (u < 0) continue;
      for_neighbours(v, [&](int w, int f, int place, int other) {
        if (w != u) return;
        const double* table = m_.table + m_.table_ptr[f];
        for (int t = 0; t < m_.states(u); ++t) {
          double best = -std::numeric_limits<double>::infinity();
          for (int q = 0; q < m_.states(v); ++q) {
            best = std::max(best, message_[m_.state_ptr[v] + q] +
                                      table[stride_[other] * t + stride_[place] * q]);
          }
          message_[m_.state_ptr[u] + t] += best;
        }
        work_ -= std::int64_t(m_.states(u)) * m_.states(v);
      });
    }
  }

  // Leaves the choices in to_.
  void choose_from_roots(int listed) {
    for (int k = 0; k < listed; ++k) {
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
      double most = total(best) + eps_;  // stays where others are no better
      for (int q = 0; q < m_.states(v); ++q) {
        if (total(q) > most) {
          best = q;
          most = total(q);
        }
      }
      to_[v] = best;
      dirty_[v] = 1;
    }
  }

  Span<std::int32_t> order_, root_, parent_, tree_;  // (U,)
  Span<std::uint8_t> row_taken_;                     // (R,)
  Span<double> message_;                             // (S,)
};

}  // namespace factormax
