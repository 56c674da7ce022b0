// A graph falls apart into connected components, each of which is solved as an instance of its own,
// docs/math.md (16a). Components that are laid out alike share one layout, so that one workspace
// serves them all.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "factormax/problem.hpp"

namespace factormax {

// Which of the whole graph's numbers are a component's, in its own order; often they are adjacent.
struct Indices {
  const std::int32_t* index = nullptr;
  int count = 0;
  bool adjoin = false;  // they are index[0], index[0] + 1, ..., and there is at least one
  int ghosts = 0;       // the last ones, which belong to others and are not written

  static Indices of(const std::int32_t* index, int count, int ghosts = 0) {
    bool adjoin = count > 0 && ghosts == 0;
    for (int k = 1; k < count && adjoin; ++k) adjoin = index[k] == index[0] + k;
    return {index, count, adjoin, ghosts};
  }

  // Its numbers: in place, or copied to `own`. Null if `whole` is.
  template <class X>
  const X* gather(const X* whole, X* own) const {
    if (whole == nullptr) return nullptr;
    if (adjoin) return whole + index[0];
    for (int k = 0; k < count; ++k) own[k] = whole[index[k]];
    return own;
  }

  // Where to write its numbers; `scatter` must follow.
  template <class X>
  X* place(X* whole, X* own) const {
    return adjoin && whole != nullptr ? whole + index[0] : own;
  }
  template <class X>
  void scatter(const X* own, X* whole) const {
    if (adjoin || whole == nullptr) return;
    for (int k = 0; k < count - ghosts; ++k) whole[index[k]] = own[k];
  }
};

struct Component {
  int kind = 0;         // which layout it has
  Indices vars;         // into (n,)
  Indices dual;         // into (R + P + links,)
  Indices scores;       // into (P + scores of the structured factors,)
  Indices factors;      // into (S,): structured factors
  int structures = -1;  // its number among those with structured factors; -1: it has none
};

class Components {
 public:
  // Null if there is only one. Variables that are in no factor are one component together, and so
  // are small components with closed forms. coef: (nnz,) or null; components of one kind have the
  // same.
  static std::unique_ptr<const Components> of(const Layout& whole, const double* coef = nullptr);

  // Whether masks may split this graph into parts that are worth finding, which takes as long as a
  // few passes over it.
  static bool may_part(const Layout& whole);
  // The components of what masks leave; null if they are hardly smaller than `whole.components`.
  // present: (n,). A factor keeps its masked variables. Small components without structured factors
  // are put together.
  static std::unique_ptr<const Components> of_present(const Layout& whole,
                                                      const std::uint8_t* present);

  // Consecutive components of one kind.
  struct Run {
    int kind, first, last;
  };

  const Component& operator[](int c) const { return all_[c]; }
  int count() const { return static_cast<int>(all_.size()); }
  const Layout& layout(int kind) const { return kinds_[kind]->layout; }
  int num_kinds() const { return static_cast<int>(kinds_.size()); }
  // How many have structured factors, and which component a structured factor is in.
  int num_structured() const { return num_structured_; }
  int of_factor(int f) const { return of_factor_[f]; }

  // The components are cut into chunks, each with enough work to be worth a thread's while: large
  // components first, those of one kind together.
  int num_chunks() const { return static_cast<int>(chunk_ptr_.size()) - 1; }
  Span<const Run> chunk(int k) const {
    return {runs_.data() + chunk_ptr_[k], chunk_ptr_[k + 1] - chunk_ptr_[k]};
  }

 private:
  // The index arrays of a layout.
  struct Arrays {
    int num_vars = 0, num_links = 0;
    std::vector<std::int32_t> row_ptr, col, block_ptr, pair_var;
    std::vector<std::int8_t> kind, block_kind, oracle_kind;
    std::vector<std::uint8_t> pair_negated, block_isolated, linked;
    std::vector<std::int32_t> var_ptr, var, shape_ptr, shape, score_ptr;
    std::vector<double> coef;

    void clear();
    std::uint64_t hash() const;
    bool operator==(const Arrays& other) const;
    Layout layout() const;
    std::int64_t work() const;
  };
  struct Kind {
    Arrays arrays;
    Layout layout;  // a view of the arrays
    std::int64_t work;
  };
  class Finder;

  void cut_into_chunks();

  std::vector<Component> all_;
  std::vector<std::unique_ptr<const Kind>> kinds_;
  std::vector<std::int32_t> var_, dual_, score_, factor_, of_factor_;
  std::vector<Run> runs_;
  std::vector<int> chunk_ptr_;
  int num_structured_ = 0;
};

}  // namespace factormax
