// Which variables of a graph belong together: the first step on the way to its components.
#pragma once

#include <cstdint>
#include <vector>

#include "factormax/problem.hpp"

namespace factormax {

// Every variable has the number of its component, in the order of their first variables.
class ComponentLabels {
 public:
  explicit ComponentLabels(const Layout& whole);
  // What masks leave. present: (n,). A masked variable joins nothing; it goes with the first
  // structured factor that it is in, or else stands alone.
  ComponentLabels(const Layout& whole, const std::uint8_t* present);

  int count() const { return count_; }
  int of_var(int j) const { return of_var_[j]; }
  // All variables of a factor that are present are in its component. Pairs are numbered after the
  // blocks, and structured factors after the pairs.
  int of_factor(int f) const { return of_factor_[f]; }
  // The most variables of one component that are present.
  int largest(const std::uint8_t* present) const;

  // What has a closed form is solved in one pass, alone or among others. So small ones go together:
  // a solve for each would cost more than they do.
  void gather_closed();
  // What masks leave is laid out for one solve alone, so nothing that is small is worth a layout of
  // its own: it goes together with its neighbours, masked variables among them. What has
  // structured factors is: each of them takes longer than its layout, and many are alike.
  void gather_neighbours();

 private:
  template <class Visit>
  void each_factor(const Visit& visit) const;
  void renumber(std::vector<std::int32_t>& group);

  const Layout& p_;
  int count_ = 0;
  std::vector<std::int32_t> of_var_;     // (n,)
  std::vector<std::int32_t> of_factor_;  // (F + P + S,)
};

}  // namespace factormax
