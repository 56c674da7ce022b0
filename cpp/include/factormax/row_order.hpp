// An order of the rows of C C^T in which its envelope is small. The rows of a sparse graph that
// still move fall into small clusters, and the order in which the rows were given mixes them.
#pragma once

#include "factormax/columns.hpp"

namespace factormax {

template <class T>
class RowOrder {
 public:
  void allocate(int rows, int vars, Workspace& ws) {
    order_ = ws.take<std::int32_t>(rows);
    place_ = ws.take<std::int32_t>(rows);
    row_seen_ = ws.take<std::int32_t>(rows);
    column_seen_ = ws.take<std::int32_t>(vars);
  }

  // Finds an order by the method of Cuthill and McKee: breadth first through each cluster, from a
  // row at its far end, and all of it reversed. by_row: the same matrix.
  Envelope find(const Columns<T>& c, const Rows<T>& by_row, int rows) {
    fill(row_seen_.first(rows), 0);
    fill(column_seen_.first(c.count), 0);
    stamp_ = 0;
    int placed = 0;
    for (int i = 0; i < rows; ++i) {
      if (row_seen_[i] != 0) continue;
      const int end = reach(c, by_row, i, placed);
      placed = end <= placed + 2 ? end : reach(c, by_row, order_[end - 1], placed);
    }
    for (int k = 0; k < rows; ++k) place_[order_[k]] = rows - 1 - k;
    return measure(c, rows);
  }

  // Where row i stands in the order.
  std::int32_t place(int i) const { return place_[i]; }

  Span<std::int32_t> scratch() const { return row_seen_; }  // (rows,), free between calls of `find`

  // Puts numbers of the rows into the order; scratch: as many.
  template <class Number>
  void permute(Span<Number> numbers, Span<Number> scratch) const {
    for (int i = 0; i < numbers.size; ++i) scratch[place_[i]] = numbers[i];
    copy(Span<const Number>(scratch.first(numbers.size)), numbers);
  }

 private:
  // Lists the rows of the cluster of `seed`, nearest first, in order_ from `begin` on; returns
  // where the list ends.
  int reach(const Columns<T>& c, const Rows<T>& by_row, int seed, int begin) {
    ++stamp_;
    int end = begin;
    order_[end++] = seed;
    row_seen_[seed] = stamp_;
    for (int at = begin; at < end; ++at) {
      const int i = order_[at];
      for (int e = by_row.ptr[i]; e < by_row.ptr[i + 1]; ++e) {
        const int f = by_row.column[e];
        if (column_seen_[f] == stamp_) continue;
        column_seen_[f] = stamp_;
        for (int k = c.ptr[f]; k < c.ptr[f + 1]; ++k) {
          const std::int32_t other = c.row[k];
          if (row_seen_[other] == stamp_) continue;
          row_seen_[other] = stamp_;
          order_[end++] = other;
        }
      }
    }
    return end;
  }

  Envelope measure(const Columns<T>& c, int rows) {
    const Span<std::int32_t> first = row_seen_;  // no longer needed
    for (int i = 0; i < rows; ++i) first[i] = place_[i];
    for (int f = 0; f < c.count; ++f) {
      std::int32_t least = rows;
      for (int k = c.ptr[f]; k < c.ptr[f + 1]; ++k) least = std::min(least, place_[c.row[k]]);
      for (int k = c.ptr[f]; k < c.ptr[f + 1]; ++k)
        first[c.row[k]] = std::min(first[c.row[k]], least);
    }
    Envelope found;
    for (int i = 0; i < rows; ++i) {
      const double width = place_[i] - first[i];
      found.size += place_[i] - first[i] + 1;
      found.work += width * width;
    }
    return found;
  }

  Span<std::int32_t> order_, place_;           // row number k, from the end; and where a row is
  Span<std::int32_t> row_seen_, column_seen_;  // the last search that came by
  int stamp_ = 0;                              // of this search
};

}  // namespace factormax
