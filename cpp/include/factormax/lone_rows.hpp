// Graphs all of whose factors are single rows over variables of their own, with one coefficient, 1
// or -1: `Xor`, `AtMostOne`, `Exactly`, `Budget` and their like, alone or thousands side by side.
// To solve such a row is to find the root of a function of one unknown, and to differentiate it is
// to subtract a mean: each row is read, solved and written while it is in the cache.
#pragma once

#include <memory>
#include <vector>

#include "factormax/batch.hpp"
#include "factormax/components.hpp"

namespace factormax {

// s * (sum of its variables) <= b or = b; or, if `row` is -1, the variables that are in no row.
struct LoneRow {
  Indices vars;
  int row = -1;  // number in the layout
  int sign = 1;  // s
  bool equality = false;
};

class LoneRows {
 public:
  // Null unless all factors are such rows. coef: (nnz,).
  static std::unique_ptr<const LoneRows> of(const Layout& layout, const double* coef);

  int longest() const { return longest_; }
  // Each chunk has as many rows as are worth a thread's while.
  int num_chunks() const { return static_cast<int>(chunk_ptr_.size()) - 1; }
  Span<const LoneRow> chunk(int c) const {
    return {rows_.data() + chunk_ptr_[c], chunk_ptr_[c + 1] - chunk_ptr_[c]};
  }

 private:
  void add(const LoneRow& row);

  std::vector<LoneRow> rows_;
  std::vector<std::int32_t> free_;  // variables that are in no row
  std::vector<int> chunk_ptr_{0};
  std::int64_t in_chunk_ = 0;  // variables of the last chunk
  int longest_ = 0;
};

// Bytes that a thread works in.
template <class T>
std::size_t lone_row_bytes(const LoneRows& rows);

// Like `solve_batch` and `vjp_batch`, for problems that have `lone_rows`.
template <class T>
void solve_lone_rows(const Problem<T>& problem, std::int64_t batch, double tol,
                     const Outputs<T>& out, Control& control);
template <class T>
void vjp_lone_rows(const Problem<T>& problem, std::int64_t batch, const BatchGradients<T>& grads,
                   Control& control);

}  // namespace factormax
