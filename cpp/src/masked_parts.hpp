// What the masks of a batch leave of its graph, and how many instances leave the same.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "factormax/components.hpp"
#include "factormax/vector_ops.hpp"

namespace factormax {

enum class Masked {
  no,        // every variable is present everywhere
  alike,     // the same ones are masked in all instances
  each_own,  // they differ
};

// there(i, j): whether instance i has variable j.
template <class There>
Masked how_masked(int num_vars, std::int64_t batch, const There& there) {
  for (std::int64_t i = 1; i < batch; ++i) {
    for (int j = 0; j < num_vars; ++j) {
      if (there(i, j) != there(0, j)) return Masked::each_own;
    }
  }
  for (int j = 0; j < num_vars; ++j) {
    if (!there(0, j)) return Masked::alike;
  }
  return Masked::no;
}

template <class T>
bool all_present(const Problem<T>& p, std::int64_t batch) {
  bool finite = p.mask.data == nullptr;  // a score of -inf is a mask too
  for (std::int64_t i = 0; i < (p.eta_u.stride == 0 ? 1 : batch) && finite; ++i) {
    finite = all_finite(p.eta_u.at(i), p.num_vars);
  }
  return finite;
}

// The components of what the masks of instance i leave; null if nothing would be gained by them.
// They depend on the instance alone: so does its answer, to the last bit.
template <class There>
std::unique_ptr<const Components> parts_of(const Layout& p, std::int64_t i, const There& there) {
  std::vector<std::uint8_t> present(static_cast<std::size_t>(p.num_vars));
  for (int j = 0; j < p.num_vars; ++j) present[j] = there(i, j);
  return Components::of_present(p, present.data());
}

// The same problem in other components.
template <class T>
Problem<T> in_parts(Problem<T> p, const Components& parts) {
  p.components = &parts;
  p.constant_coefs = false;  // nobody has compared those of the parts
  return p;
}

// Instance i as a batch of one.
template <class T>
Problem<T> alone(Problem<T> p, std::int64_t i) {
  p.mask = {p.mask.at(i), 0};
  p.coef = {p.coef.at(i), 0};
  p.rhs = {p.rhs.at(i), 0};
  p.eta_u = {p.eta_u.at(i), 0};
  p.eta_v = {p.eta_v.at(i), 0};
  p.mixed.own = {p.mixed.own.at(i), 0};
  p.mixed.heat = {p.mixed.heat.at(i), 0};
  p.structured.param = {p.structured.param.at(i), 0};
  p.structured.first += i;
  return p;
}

template <class T>
Outputs<T> alone(Outputs<T> out, std::int64_t i) {
  const auto row = [i](auto& all) { all = {all.at(i), 0}; };
  row(out.mu);
  row(out.mu_v);
  row(out.tau);
  row(out.var_side);
  row(out.row_side);
  const auto number = [i](auto*& all) {
    if (all != nullptr) all += i;
  };
  number(out.objective);
  number(out.primal_residual);
  number(out.dual_residual);
  number(out.iterations);
  number(out.status);
  number(out.oracle_calls);
  number(out.upper_bound);
  number(out.integral);
  return out;
}

}  // namespace factormax
