// The best assignment: every row to one column, every column to at most one row. Shortest
// augmenting paths after Jonker and Volgenant (1987), in O(rows^2 cols).
//
// eta_u: (rows, cols), rows <= cols. A row that is all -inf is absent.
//
// Columns have prices, and every matched row has the column of its best value, score - price. First
// each row bids: it takes its best column, and raises the price until the second best is as good;
// the row it drives out bids again, a few times. The rows then left are matched one by one along
// the path on which the matched rows lose the least; the prices change so that they lose nothing. A
// column without a row must keep the price 0, the lowest, unless every column gets a row: then any
// prices will do to start, and those of the last call are nearly right if the scores have changed
// little.
//
// Ties: a row takes its first best column in order, free ones before taken ones, and rows choose in
// order. As the last prices are kept, what wins then also depends on the calls since `prepare`.
#pragma once

#include <cstdint>
#include <limits>

#include "factormax/oracle/inputs.hpp"
#include "factormax/vector_ops.hpp"

namespace factormax::oracle {

template <class T>
class Assignment {
 public:
  // shape: rows, columns.
  static bool fits(Shape shape, std::int64_t vars, std::int64_t scores) {
    return is_shape(shape, 2) && 0 < shape[0] && shape[0] <= shape[1] &&
           vars == std::int64_t(shape[0]) * shape[1] && scores == 0;
  }

  void allocate(Shape shape, Workspace& ws) {
    const int rows = rows_ = shape[0], cols = cols_ = shape[1];
    present_ = ws.take<std::int32_t>(rows);
    column_of_ = ws.take<std::int32_t>(rows);
    last_column_ = ws.take<std::int32_t>(rows);
    open_ = ws.take<std::int32_t>(rows);
    row_of_ = ws.take<std::int32_t>(cols);
    scanned_ = ws.take<std::int32_t>(cols);
    price_ = ws.take<double>(cols);
    raised_ = ws.take<double>(cols);
    rank_ = ws.take<double>(cols);
    loss_ = ws.take<double>(cols);
    from_ = ws.take<double>(cols);
    loss_at_ = ws.take<double>(cols);
  }

  int slots() const { return rows_; }
  int feature_slots() const { return 0; }

  FACTORMAX_VECTOR bool prepare(const T* eta_u, const InstanceInputs& = {}) {
    double* best = price_.data;  // per column
    fill(price_, -kInf);
    count_ = 0;
    for (int i = 0; i < rows_; ++i) {
      const T* eta = eta_u + i * cols_;
      const double most = largest_of(cols_, -kInf, [=](int j) {
        best[j] = larger(best[j], eta[j]);
        return double(eta[j]);
      });
      if (most != -kInf) present_[count_++] = i;
    }
    int usable = 0;
    for (int j = 0; j < cols_; ++j) usable += best[j] != -kInf;
    square_ = count_ == usable;
    warm_ = false;
    return count_ <= usable && solve(eta_u, true);
  }

  bool map(const T* eta_u, const T* /*eta_v*/, std::int32_t* on, std::int32_t* /*features*/) {
    for (int i = 0; i < rows_; ++i) on[i] = -1;
    if (!solve(eta_u, false)) return false;
    for (int k = 0; k < count_; ++k) on[present_[k]] = present_[k] * cols_ + column_of_[k];
    return true;
  }

 private:
  // Leaves the columns of the present rows in `column_of_`. first: the first call since `prepare`.
  FACTORMAX_VECTOR bool solve(const T* eta_u, bool first) {
    start_prices(eta_u);
    for (int j = 0; j < cols_; ++j) {
      row_of_[j] = -1;
      rank_[j] = j;
    }
    warm_ = false;  // until there are prices to keep
    fill(column_of_, -1);
    if (first) fill(last_column_, -1);
    int open = 0, again = count_ / 2;
    for (int next = 0, k = 0; next < count_ || k != next;) {
      if (k == next) ++next;  // otherwise k has been driven out
      const int loser = bid(eta_u, k);
      if (loser == kNone) return false;
      if (loser == kWon) {
        k = next;
      } else if (loser != k && again > 0) {
        --again;
        k = loser;
      } else {
        open_[open++] = loser;
        k = next;
      }
    }
    for (int i = 0; i < open; ++i) {
      if (!augment(eta_u, open_[i])) return false;
    }
    int kept = 0;
    for (int k = 0; k < count_; ++k) {
      kept += column_of_[k] == last_column_[k];
      last_column_[k] = column_of_[k];
    }
    // Where most rows have moved the scores have too: old prices are then worse than none.
    warm_ = square_ && (first || 2 * kept >= count_);
    return true;
  }

  FACTORMAX_INLINE void start_prices(const T* eta_u) {
    double* price = price_.data;
    if (warm_) {
      // Prices far above the scores would cost them their last digits.
      double scale = 0;
      for (int k = 0; k < count_; ++k) {
        const T* eta = row(eta_u, k);
        FACTORMAX_EXTREMES(reduction(max : scale))
        for (int j = 0; j < cols_; ++j) {
          const double size = eta[j] > 0 ? eta[j] : -eta[j];
          scale = size > scale && size < kInf ? size : scale;
        }
      }
      double lowest = kInf, highest = -kInf;
      FACTORMAX_EXTREMES(reduction(min : lowest) reduction(max : highest))
      for (int j = 0; j < cols_; ++j) {
        lowest = smaller(lowest, price[j]);
        highest = larger(highest, price[j]);
      }
      if (highest - lowest <= 4 * scale) {
#pragma omp simd
        for (int j = 0; j < cols_; ++j) price[j] -= lowest;
        return;
      }
    }
    if (!square_) {
      fill(price_, 0.0);
      return;
    }
    fill(price_, -kInf);
    for (int k = 0; k < count_; ++k) {
      const T* eta = row(eta_u, k);
#pragma omp simd
      for (int j = 0; j < cols_; ++j) price[j] = larger(price[j], eta[j]);
    }
    for (int j = 0; j < cols_; ++j) price[j] = price[j] == -kInf ? 0 : price[j];
  }

  enum Bid { kWon = -1, kNone = -2 };

  // Returns the row that is now without a column: the one that was driven out, or k itself; kWon if
  // there is none, kNone if every column is forbidden to k.
  FACTORMAX_INLINE int bid(const T* eta_u, int k) {
    const int n = cols_;
    const T* eta = row(eta_u, k);
    const double *rank = rank_.data, *price = price_.data;
    double* value = loss_.data;
    const double most = largest_of(n, -kInf, [=](int j) { return value[j] = eta[j] - price[j]; });
    if (most == -kInf) return kNone;
    double first = kInf, last = -kInf, below = -kInf;
    FACTORMAX_EXTREMES(reduction(min : first) reduction(max : last, below))
    for (int j = 0; j < n; ++j) {
      const double v = value[j], r = rank[j];  // loaded whatever v is: a select, not a branch
      const double f = v == most ? r : kInf, l = v == most ? r : -kInf, b = v == most ? -kInf : v;
      first = f < first ? f : first;
      last = l > last ? l : last;
      below = b > below ? b : below;
    }
    const int column = first < n ? int(first) : int(first) - n, loser = row_of_[column];
    const bool alone = first == last && below != -kInf;
    if (loser >= 0 && !alone) return k;  // driving it out would not help: the price cannot rise
    if (alone) price_[column] += most - below;
    match(k, column);
    return loser >= 0 ? loser : kWon;
  }

  // Dijkstra over the columns: loss[j] is the least that the matched rows lose if row `start` gets
  // in and the last of those that move takes column j. A scanned column is shut by a price of inf,
  // so that the loops go over all columns without a test. Row and rank are stored as double for the
  // same reason.
  FACTORMAX_INLINE bool augment(const T* eta_u, int start) {
    const int n = cols_;
    double *loss = loss_.data, *raised = raised_.data, *from = from_.data, *price = price_.data;
    const double* rank = rank_.data;
    const T* eta = row(eta_u, start);
    double least = -largest_of(n, -kInf, [=](int j) {
      loss[j] = price[j] - eta[j];
      raised[j] = price[j];
      from[j] = start;
      return -loss[j];
    });
    int scanned = 0, column;
    for (;;) {
      if (least == kInf) return false;
      const double first = -largest_of(n, -kInf, [=](int j) {
        const double r = -rank[j];  // loaded whatever the loss is: a select, not a branch
        return loss[j] == least ? r : -kInf;
      });
      column = first < n ? int(first) : int(first) - n;
      if (first < n) break;
      scanned_[scanned] = column;
      loss_at_[scanned++] = least;
      loss[column] = raised[column] = kInf;
      const double k = row_of_[column];
      eta = row(eta_u, row_of_[column]);
      const double now = (price[column] - eta[column]) - least;
      least = -largest_of(n, -kInf, [=](int j) {
        const double other = (raised[j] - eta[j]) - now, before = loss[j], by = from[j];
        from[j] = other < before ? k : by;
        loss[j] = smaller(before, other);
        return -loss[j];
      });
    }
    for (int i = 0; i < scanned; ++i) price[scanned_[i]] += least - loss_at_[i];
    for (int k = -1; k != start;) {
      k = int(from[column]);
      const int left = column_of_[k];
      match(k, column);
      column = left;
    }
    return true;
  }

  FACTORMAX_INLINE void match(int k, int column) {
    row_of_[column] = k;
    column_of_[k] = column;
    rank_[column] = column + cols_;
  }

  FACTORMAX_INLINE const T* row(const T* eta_u, int k) const { return eta_u + present_[k] * cols_; }
  FACTORMAX_INLINE static double larger(double a, double b) { return b > a ? b : a; }
  FACTORMAX_INLINE static double smaller(double a, double b) { return b < a ? b : a; }

  static constexpr double kInf = std::numeric_limits<double>::infinity();

  int rows_ = 0, cols_ = 0, count_ = 0;
  bool square_ = false;  // every column that is not all -inf gets a row
  bool warm_ = false;    // the prices of the last call are there
  Span<std::int32_t> present_, column_of_, last_column_, open_;  // (rows)
  Span<std::int32_t> row_of_, scanned_;  // (cols), row_of_ -1 for a free column
  Span<double> price_, raised_;          // raised_: in `augment`, inf where scanned
  Span<double> rank_;                    // of column j: j where free, cols + j where taken
  Span<double> loss_, from_, loss_at_;
};

}  // namespace factormax::oracle
