// The best joint state of a few one-hot groups, scored by a table.
//
// eta_u: the groups one after the other, sizes K_1, ..., K_m. eta_v: (K_1, ..., K_m) in C order.
// A group whose states are all -inf is absent: then the table does not apply, and each of the
// other groups takes its own best state.
//
// Ties: the groups are cut in two, first the leading, then the trailing ones, and each half has
// its states in C order. The first trailing half wins, then the first leading one. With two groups:
// the lowest state of the second, then of the first. Without the table: the lowest state of each.
#pragma once

#include <cstdint>
#include <limits>

#include "factormax/oracle/inputs.hpp"
#include "factormax/oracle/max_plus.hpp"

namespace factormax::oracle {

template <class T>
class Table {
 public:
  // shape: the sizes of the groups.
  static bool fits(Shape group_sizes, std::int64_t vars, std::int64_t scores) {
    std::int64_t sum = 0, states = 1;
    if (group_sizes.empty()) return false;
    for (const std::int32_t size : group_sizes) {
      if (size < 1 || (states *= size) >= std::int64_t(1) << 30) return false;
      sum += size;
    }
    return vars == sum && scores == states;
  }

  void allocate(Shape group_sizes, Workspace& ws) {
    groups_ = group_sizes.size;
    sizes_ = ws.take<std::int32_t>(groups_);
    if (sizes_.data != nullptr) copy(group_sizes, sizes_);
    num_vars_ = 0;
    std::int64_t joint = 1;
    for (const std::int32_t size : group_sizes) {
      num_vars_ += size;
      joint *= size;
    }
    joint_ = static_cast<int>(joint);
    // Trailing groups are joined until a row of the table is long enough for a loop to pay.
    split_ = groups_ - 1;
    cols_ = group_sizes[split_];
    while (split_ > 1 && cols_ < kLongRow) cols_ *= group_sizes[--split_];
    rows_ = joint_ / cols_;
    leading_ = ws.take<T>(rows_);
    trailing_ = ws.take<T>(cols_);
    best_ = ws.take<T>(cols_);
  }

  int slots() const { return groups_; }
  int feature_slots() const { return 1; }

  bool prepare(const T* eta_u, const InstanceInputs& = {}) {
    whole_ = true;
    for (int g = 0, at = 0; g < groups_; at += sizes_[g++]) {
      whole_ = whole_ && first_best(eta_u + at, sizes_[g]) >= 0;
    }
    return true;  // only eta_v can forbid every joint state
  }

  FACTORMAX_VECTOR bool map(const T* eta_u, const T* eta_v, std::int32_t* on,
                            std::int32_t* features) {
    features[0] = -1;
    if (!whole_) {
      for (int g = 0, at = 0; g < groups_; at += sizes_[g++]) {
        const int state = first_best(eta_u + at, sizes_[g]);
        on[g] = state < 0 ? -1 : at + state;
      }
      return true;
    }

    // The table is a matrix: its rows the leading groups, its columns the trailing ones.
    const T* leading = sums(eta_u, 0, split_, leading_.data);
    const T* trailing = sums(eta_u, split_, groups_, trailing_.data);
    T* best = best_.data;
    max_plus(leading, eta_v, rows_, cols_, best);
#pragma omp simd
    for (int j = 0; j < cols_; ++j) best[j] += trailing[j];
    const int j = first_best(best, cols_);
    if (j < 0) return false;
    int i = 0;  // the first row that reaches best[j], by the sums that made it
    while (i + 1 < rows_ && leading[i] + eta_v[i * cols_ + j] + trailing[j] != best[j]) ++i;

    features[0] = i * cols_ + j;
    for (int g = groups_ - 1, joint = features[0], end = num_vars_; g >= 0; --g) {
      end -= sizes_[g];
      on[g] = end + joint % sizes_[g];
      joint /= sizes_[g];
    }
    return true;
  }

 private:
  static constexpr int kLongRow = 16;

  // The first of the largest; -1 if all are -inf.
  static FACTORMAX_INLINE int first_best(const T* value, int size) {
    T most = -std::numeric_limits<T>::infinity();
    int best = -1;
    for (int k = 0; k < size; ++k) {
      if (value[k] > most) {
        most = value[k];
        best = k;
      }
    }
    return best;
  }

  // The score of each joint state of groups first..last - 1, in C order.
  FACTORMAX_INLINE const T* sums(const T* eta_u, int first, int last, T* out) const {
    for (int g = 0; g < first; ++g) eta_u += sizes_[g];
    if (last - first == 1) return eta_u;
    out[0] = 0;
    int count = 1;
    for (int g = first; g < last; ++g) {
      const int size = sizes_[g];
      for (int i = count - 1; i >= 0; --i) {  // from the end, for this is in place
        const T sum = out[i];
        for (int k = 0; k < size; ++k) out[i * size + k] = sum + eta_u[k];
      }
      count *= size;
      eta_u += size;
    }
    return out;
  }

  int groups_ = 0, num_vars_ = 0, joint_ = 0;
  int split_ = 0, rows_ = 0, cols_ = 0;
  bool whole_ = false;  // no group is absent
  Span<std::int32_t> sizes_;
  Span<T> leading_;          // (rows,)
  Span<T> trailing_, best_;  // (cols,)
};

}  // namespace factormax::oracle
