// Parts of the graph of one instance: strips across all of it, and regions around some rows.
#pragma once

#include <algorithm>
#include <utility>
#include <vector>

#include "part_solver.hpp"

namespace factormax {

// Every variable is in one part or in none, and a part has the rows all of whose variables are in
// it. So the parts can be solved side by side: what one of them changes, no other sees.
template <class T>
class GraphParts {
 public:
  int count() const { return static_cast<int>(sizes_.size()); }
  // Ascending. Several threads may ask, each for a part of its own.
  Span<const std::int32_t> rows(int part) {
    const auto begin = by_part_.begin() + ptr_[part], end = by_part_.begin() + ptr_[part + 1];
    if (!std::is_sorted(begin, end)) std::sort(begin, end);
    return {by_part_.data() + ptr_[part], ptr_[part + 1] - ptr_[part]};
  }
  int num_rows() const { return static_cast<int>(by_part_.size()); }
  const PartSize& largest() const { return largest_; }
  // The rows that are in no part but share a variable with one.
  const std::vector<std::int32_t>& border() const { return border_; }

  // Cuts the graph across into strips. Returns false if it is not long enough for that.
  bool cut(const Instance<T>& p) {
    if (!find_levels(p)) return false;
    const int levels = static_cast<int>(level_.size()), count = levels / kLevels;
    level_.push_back(static_cast<std::int32_t>(members_.size()));
    sizes_.assign(static_cast<std::size_t>(count), {});
    for (int k = 0; k < levels; ++k) {
      const int strip = std::min(k / kLevels, count - 1);
      for (int at = level_[k]; at < level_[k + 1]; ++at) label_[members_[at]] = strip;
      sizes_[strip].vars += level_[k + 1] - level_[k];
    }
    rows_.clear();
    border_.clear();
    for (int r = 0; r < p.m; ++r) (part_of(p, r) >= 0 ? rows_ : border_).push_back(r);
    sort_rows(p);
    return true;
  }

  // From now on the parts are the regions within `reach` rows of the given ones.
  void surround(const Instance<T>& p, const std::vector<std::int32_t>& centers, int reach) {
    for (const std::int32_t j : members_) label_[j] = kNone;
    members_.clear();
    for (const std::int32_t r : centers) each_variable(p, r, [&](std::int32_t j) { join(j); });
    ++stamp_;
    std::size_t begin = 0;
    for (int step = 0; step < reach; ++step) begin = join_neighbours(p, begin);
    tell_apart(p);
    sort_rows(p);
  }

 private:
  static constexpr int kLevels = 32;   // per strip, at least
  static constexpr int kFewest = 8;    // strips that are worth cutting
  static constexpr int kWidest = 128;  // a level with more than 1/128 of the variables is too wide
  static constexpr std::int32_t kNone = -1, kAny = -2;  // labels of those in no part, and not yet

  // A level has the variables that are the same number of rows away from the first one; a row is
  // within one level or two adjacent ones.
  bool find_levels(const Instance<T>& p) {
    label_.assign(static_cast<std::size_t>(p.n), kNone);
    row_stamp_.assign(static_cast<std::size_t>(p.m), 0);
    stamp_ = 1;
    members_.clear();
    level_.clear();
    const auto widest = static_cast<std::size_t>(p.n / kWidest);
    for (std::int32_t first = 0; first < p.n; ++first) {
      if (p.var_ptr[first] == p.var_ptr[first + 1]) continue;
      std::size_t begin = members_.size();
      join(first);
      while (begin < members_.size()) {
        if (members_.size() - begin > widest) return false;
        level_.push_back(static_cast<std::int32_t>(begin));
        begin = join_neighbours(p, begin);
      }
    }
    return static_cast<int>(level_.size()) >= kFewest * kLevels;
  }

  void join(std::int32_t j) {
    if (label_[j] != kNone) return;
    label_[j] = kAny;
    members_.push_back(j);
  }

  // Those of the members from `begin` on; returns where they begin.
  std::size_t join_neighbours(const Instance<T>& p, std::size_t begin) {
    const std::size_t end = members_.size();
    for (; begin < end; ++begin) {
      each_row(p, members_[begin],
               [&](std::int32_t r) { each_variable(p, r, [&](std::int32_t j) { join(j); }); });
    }
    return end;
  }

  // Labels the connected parts of what has been reached, and lists their rows.
  void tell_apart(const Instance<T>& p) {
    ++stamp_;
    rows_.clear();
    border_.clear();
    sizes_.clear();
    for (const std::int32_t seed : members_) {
      if (label_[seed] != kAny) continue;
      const auto part = static_cast<std::int32_t>(sizes_.size());
      sizes_.emplace_back();
      label_[seed] = part;
      queue_.assign(1, seed);
      const auto join = [&](std::int32_t j) {
        if (label_[j] != kAny) return;
        label_[j] = part;
        queue_.push_back(j);
      };
      for (std::size_t at = 0; at < queue_.size(); ++at) {
        each_row(p, queue_[at], [&](std::int32_t r) {
          bool inside = true;
          each_variable(p, r, [&](std::int32_t j) { inside &= label_[j] != kNone; });
          (inside ? rows_ : border_).push_back(r);
          if (inside) each_variable(p, r, join);
        });
      }
      sizes_.back().vars = static_cast<int>(queue_.size());
    }
  }

  // Puts rows_ together by their parts.
  void sort_rows(const Instance<T>& p) {
    for (const std::int32_t r : rows_) {
      PartSize& size = sizes_[part_of(p, r)];
      ++size.rows;
      size.hard += r < p.hard;
      size.entries += p.length(r);
    }
    largest_ = {};
    ptr_.assign(1, 0);
    for (const PartSize& size : sizes_) {
      largest_.cover(size);
      ptr_.push_back(ptr_.back() + size.rows);
    }
    by_part_.resize(rows_.size());
    queue_.assign(ptr_.begin(), ptr_.end());  // where the next row of a part goes
    for (const std::int32_t r : rows_) by_part_[queue_[part_of(p, r)]++] = r;
  }

  // The part of a row, negative if it is in none.
  std::int32_t part_of(const Instance<T>& p, std::int32_t r) const {
    const std::int32_t label = label_[p.col[p.ptr[r]]];
    bool alike = true;
    each_variable(p, r, [&](std::int32_t j) { alike &= label_[j] == label; });
    return alike ? label : kNone;
  }

  template <class Visit>
  static void each_variable(const Instance<T>& p, std::int32_t r, const Visit& visit) {
    for (int k = p.ptr[r]; k < p.ptr[r + 1]; ++k) visit(p.col[k]);
  }

  // The rows of a variable that have not been visited since the stamp was last changed.
  template <class Visit>
  void each_row(const Instance<T>& p, std::int32_t j, const Visit& visit) {
    for (int e = p.var_ptr[j]; e < p.var_ptr[j + 1]; ++e) {
      const std::int32_t r = p.var_row[e];
      if (std::exchange(row_stamp_[r], stamp_) != stamp_) visit(r);
    }
  }

  std::vector<std::int32_t> label_;          // (n,) the part of a variable
  std::vector<std::int32_t> members_;        // the variables in parts; level by level, for strips
  std::vector<std::int32_t> level_;          // where a level begins
  std::vector<std::int32_t> rows_, border_;  // those in parts, and next to them
  std::vector<std::int32_t> ptr_, by_part_;  // rows_, part by part
  std::vector<std::int32_t> row_stamp_;      // (m,) when a row was last visited
  std::vector<std::int32_t> queue_;
  std::vector<PartSize> sizes_;
  std::int32_t stamp_ = 0;
  PartSize largest_;
};

}  // namespace factormax
