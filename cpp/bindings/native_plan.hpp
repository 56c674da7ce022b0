// A graph of rows and pairs that is solved from flat arrays, without Python in between.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <algorithm>
#include <initializer_list>
#include <memory>
#include <vector>

#include "factormax/batch.hpp"
#include "factormax/model.hpp"
#include "mixed_scores.hpp"
#include "settings.hpp"

namespace factormax::python {

// An array without gaps that somebody else owns.
struct FlatArray {
  void* data;
  std::vector<std::size_t> shape;
  nanobind::dlpack::dtype type;

  bool is(nanobind::dlpack::dtype wanted_type, std::initializer_list<std::size_t> wanted) const {
    return type == wanted_type &&
           std::equal(shape.begin(), shape.end(), wanted.begin(), wanted.end());
  }
  template <class T>
  T* at() const {
    return static_cast<T*>(data);
  }
};

// The arrays of a call: those that a primitive of JAX is given, and those that it writes.
struct FlatCall {
  std::vector<FlatArray> given, wanted;
};

// A graph and how to solve it; all that does not depend on the scores is computed once.
class NativePlan {
 public:
  // Parameters are floats, or matrices of one row. masked: whether the third array is a mask. runs:
  // as `Inputs` takes them; if there are any, the shared scores follow, (1, S), and if `heated`,
  // what divides them, (B, 1).
  NativePlan(std::shared_ptr<const Model> model, const Settings& settings,
             const std::vector<nanobind::object>& params, bool masked, const std::vector<int>& runs,
             bool heated);

  // Both answer like the functions of the same name in factormax._fronts.jax.host. False: nothing
  // was written, and Python must deal with arrays like these.
  bool solve(const FlatCall& call, Control& control) const;
  bool apply_jacobian(const FlatCall& call, Control& control) const;

 private:
  // What a problem refers to besides the arrays of a call.
  struct Kept {
    std::vector<std::uint8_t> here;  // (B, n)
    std::vector<double> heat;        // (B,)
  };

  // How many arrays a solve is given.
  std::size_t num_given() const { return 2u + masked_ + !runs_.runs.empty() + heated_; }
  template <class T>
  Problem<T> problem() const;
  template <class T>
  bool take_scores(const FlatArray* given, Problem<T>& p, Kept& kept) const;
  template <class T>
  bool take_mixed_scores(const FlatArray* given, Problem<T>& p, Kept& kept) const;
  template <class T>
  bool solve(const FlatCall& call, Control& control) const;
  template <class T>
  bool apply_jacobian(const FlatCall& call, Control& control) const;

  std::shared_ptr<const Model> model_;
  Settings settings_;
  bool masked_, heated_;
  ScoreRuns runs_;  // none if the scores are not mixed
  std::vector<double> coef_, rhs_;
  std::vector<float> narrow_coef_, narrow_rhs_;
};

}  // namespace factormax::python
