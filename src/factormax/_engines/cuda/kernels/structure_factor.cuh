// The factor L of 1 + M^T M over the structures at hand, docs/math.md (50): systems with it, and
// what becomes of it when a structure comes or goes.
#pragma once

#include "structures.cuh"

namespace factormax {

template <class V>
FM_FUNCTION void StructureSet<V>::project(T* c) const {
  forward_substitute(c, count);
  T sums[2] = {0, 0};
#pragma unroll 1
  for (int i = team_.rank; i < count; i += V::kTeam) {
    sums[0] += c[i] * ones_[i];
    sums[1] += ones_[i] * ones_[i];
  }
  team_.reduce(sums, Add());
  const T share = sums[0] / sums[1];
#pragma unroll 1
  for (int i = team_.rank; i < count; i += V::kTeam) {
    c[i] = is_vertex() ? T(0) : c[i] - ones_[i] * share;
  }
  team_.sync();
  back_substitute(c);
}

// b <- L^-1 b for the first `rows` rows
template <class V>
FM_FUNCTION void StructureSet<V>::forward_substitute(T* b, int rows) const {
  if (team_.rank < kWorkers) {
    if constexpr (kWorkers == 1) {
      for (int i = 0; i < rows; ++i) {
        T sum = b[i];
        for (int j = 0; j < i; ++j) sum -= factor_row(i)[j] * b[j];
        b[i] = sum * inverse_[i];
      }
    } else {
      T own[kChunks];
      load(b, rows, own);
#pragma unroll
      for (int q = 0; q < kChunks; ++q) {
#pragma unroll 1
        for (int j = q * 32; j < rows && j < q * 32 + 32; ++j) {
          const T known = __shfl_sync(kAll, own[q], j % 32) * inverse_[j];
#pragma unroll
          for (int c = q; c < kChunks; ++c) {
            const int i = c * 32 + team_.rank;
            if (c * 32 >= rows) break;
            if (i > j && i < rows) own[c] -= factor_row(i)[j] * known;
          }
        }
      }
      store(own, rows, b);
    }
  }
  team_.sync();
}

// b <- L^-T b
template <class V>
FM_FUNCTION void StructureSet<V>::back_substitute(T* b) const {
  if (team_.rank < kWorkers) {
    if constexpr (kWorkers == 1) {
      for (int i = count - 1; i >= 0; --i) {
        const T known = b[i] *= inverse_[i];
        for (int k = 0; k < i; ++k) b[k] -= factor_row(i)[k] * known;
      }
    } else {
      T own[kChunks];
      load(b, count, own);
#pragma unroll
      for (int q = kChunks - 1; q >= 0; --q) {
#pragma unroll 1
        for (int i = least(count, q * 32 + 32) - 1; i >= q * 32; --i) {
          const T known = __shfl_sync(kAll, own[q], i % 32) * inverse_[i];
          const T* row = factor_row(i);
#pragma unroll
          for (int c = 0; c <= q; ++c) {
            const int k = c * 32 + team_.rank;
            if (k < i) own[c] -= row[k] * known;
          }
        }
      }
      store(own, count, b);
    }
  }
  team_.sync();
}

template <class V>
FM_DEVICE void StructureSet<V>::load(const T* b, int size, T (&own)[kChunks]) const {
#pragma unroll
  for (int c = 0; c < kChunks; ++c) {
    const int i = c * 32 + team_.rank;
    own[c] = i < size ? b[i] : T(0);
  }
}

// Writes `own` to b, divided by the diagonal.
template <class V>
FM_DEVICE void StructureSet<V>::store(const T (&own)[kChunks], int size, T* b) const {
#pragma unroll
  for (int c = 0; c < kChunks; ++c) {
    const int i = c * 32 + team_.rank;
    if (i < size) b[i] = own[c] * inverse_[i];
  }
}

// Takes in the structure at place `count`; false if it is affinely dependent on the others: then
// its row of the factor tells how.
template <class V>
FM_FUNCTION bool StructureSet<V>::append(T theta, bool force) {
  const int k = count;
  T* row = factor_row(k);
#pragma unroll 1
  for (int i = team_.rank; i < k; i += V::kTeam) row[i] = 1 + overlap(i, k);
  const T own = 1 + overlap(k, k);
  team_.sync();
  forward_substitute(row, k);
  T sums[3] = {0, 0, 0};
#pragma unroll 1
  for (int i = team_.rank; i < k; i += V::kTeam) {
    sums[0] += row[i] * row[i];
    sums[1] += row[i] * ones_[i];
    sums[2] += row[i] * y_[i];
  }
  team_.reduce(sums, Add());
  const T rest = own - sums[0];
  const bool dependent = rest <= kDependent * own || k > hub_.vars;
  if (team_.rank == 0) theta_[k] = theta;
  team_.sync();
  if (dependent && !force) return false;
  if (team_.rank == 0) {
    const T pivot = sqrt(most(rest, kDependent * own));
    row[k] = pivot;
    inverse_[k] = 1 / pivot;
    ones_[k] = (1 - sums[1]) / pivot;
    y_[k] = (theta - sums[2]) / pivot;
  }
  ++count;
  team_.sync();
  return true;
}

// Takes out structure i. Givens rotations make the rows below triangular without its row, and
// they move up. Meanwhile other warps, where there are any, move the rest.
template <class V>
FM_FUNCTION void StructureSet<V>::remove(int i) {
  const int last = count - 1;
  team_.sync();
  if (team_.rank < kWorkers) rotate(i);
  constexpr int kMovers = V::kTeam > kWorkers ? V::kTeam - kWorkers : V::kTeam;
  const int first = V::kTeam > kWorkers ? team_.rank - kWorkers : team_.rank;
  // A column has one owner, which moves it from the top.
  const int columns = i + 2 + hub_.slots;
#pragma unroll 1
  for (int c = first < 0 ? columns : first; c < columns; c += kMovers) {
    if (c < i) {
#pragma unroll 2
      for (int r = i; r < last; ++r) factor_row(r)[c] = factor_row(r + 1)[c];
    } else if (c < i + 2) {
      T* list = c == i ? p_ : theta_;
#pragma unroll 2
      for (int r = i; r < last; ++r) list[r] = list[r + 1];
    } else {
      const int s = c - i - 2;
#pragma unroll 2
      for (int r = i; r < last; ++r) on(r)[s] = on(r + 1)[s];
    }
  }
  count = last;
  team_.sync();
}

// Part of `remove`: rotates columns i and on, of the rows below row i, y and ones. A member has its
// rows r in registers while they are carried from column to column: what it writes to the row above
// has been read there.
template <class V>
FM_DEVICE void StructureSet<V>::rotate(int i) const {
  T own[kChunks];
  const auto row_of = [&](int r) { return r < count ? factor_row(r) : r == count ? y_ : ones_; };
  const int rows = count + 2;
#pragma unroll
  for (int c = 0; c < kChunks; ++c) {
    const int r = c * kWorkers + team_.rank;
    own[c] = r > i && r < rows ? row_of(r)[i] : T(0);
  }
  wait();
#pragma unroll 1
  for (int k = i; k < count - 1; ++k) {
    const T b = factor_row(k + 1)[k + 1];
    T a = 0;
    if constexpr (kWorkers == 1) {
      a = own[k + 1];
    } else {
#pragma unroll
      for (int c = 0; c < kChunks; ++c) {
        if (c == (k + 1) / 32) a = own[c];
      }
      a = __shfl_sync(kAll, a, (k + 1) % 32);
    }
    const T inverse = rsqrt(a * a + b * b), cosine = a * inverse, sine = b * inverse;
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      const int r = c * kWorkers + team_.rank;
      if (c * kWorkers >= rows) break;
      if (r <= k || r >= rows) continue;
      const T next = row_of(r)[k + 1];
      T* to = r < count ? factor_row(r - 1) : row_of(r);
      to[k] = cosine * own[c] + sine * next;
      own[c] = cosine * next - sine * own[c];
      if (r == k + 1) inverse_[k] = inverse;
    }
    wait();
  }
}

// Computes L anew: updates have left their errors in it.
template <class V>
FM_FUNCTION void StructureSet<V>::refactor() {
#pragma unroll 1
  for (int e = team_.rank; e < count * count; e += V::kTeam) {
    const int i = e / count, j = e % count;
    if (j <= i) factor_row(i)[j] = 1 + overlap(i, j);
  }
#pragma unroll 1
  for (int i = team_.rank; i < count; i += V::kTeam) {
    ones_[i] = 1;
    y_[i] = theta_[i];
    target_[i] = 1 + overlap(i, i);
  }
  team_.sync();
#pragma unroll 1
  for (int j = 0; j < count; ++j) {
    const T pivot = sqrt(most(factor_row(j)[j], kDependent * target_[j])), inverse = 1 / pivot;
    team_.sync();
#pragma unroll 1
    for (int i = j + team_.rank; i < count; i += V::kTeam) {
      if (i == j) {
        factor_row(j)[j] = pivot;
        inverse_[j] = inverse;
      } else {
        factor_row(i)[j] *= inverse;
      }
    }
    team_.sync();
    const int left = count - j - 1;
#pragma unroll 1
    for (int e = team_.rank; e < left * left; e += V::kTeam) {
      const int i = j + 1 + e / left, k = j + 1 + e % left;
      if (k <= i) factor_row(i)[k] -= factor_row(i)[j] * factor_row(k)[j];
    }
    team_.sync();
  }
  forward_substitute(ones_, count);
  forward_substitute(y_, count);
}

}  // namespace factormax
