// An oracle of the user's own: a function that is given the scores and answers with a structure.
#pragma once

#include <cmath>
#include <limits>

#include "factormax/oracle/inputs.hpp"
#include "factormax/problem.hpp"

namespace factormax::oracle {

class Callback {
 public:
  // shape: variables, scores.
  static bool fits(Shape shape, std::int64_t vars, std::int64_t scores) {
    return shape.size == 2 && vars > 0 && vars == shape[0] && scores == shape[1];
  }

  void allocate(Shape shape, Workspace& ws) {
    vars_ = shape[0];
    scores_ = shape[1];
    structure_ = ws.take<double>(vars_);
  }

  int slots() const { return vars_; }
  int feature_slots() const { return 0; }

  bool prepare(const double*, const InstanceInputs& inputs) {
    function_ = inputs.function;
    instance_ = inputs.instance;
    return true;
  }

  // dense: (num_scores,) the features of the structure.
  OracleAnswer map(const double* eta_u, const double* eta_v, std::int32_t* on, double* dense) {
    std::fill(structure_.begin(), structure_.end(), 0.0);
    std::fill(dense, dense + scores_, 0.0);
    const int answer = function_->call(eta_u, vars_, eta_v, scores_, structure_.data, dense,
                                       function_->context, instance_);
    if (answer > 0) return OracleAnswer::none;
    if (answer < 0) return function_->fail(CallbackFault::raised);
    for (int j = 0; j < vars_; ++j) {
      const double m = structure_[j];
      if (m != 0 && m != 1) return function_->fail(CallbackFault::not_binary);
      if (m == 1 && eta_u[j] == -std::numeric_limits<double>::infinity()) {
        return function_->fail(CallbackFault::forbidden);
      }
      on[j] = m == 1 ? j : -1;
    }
    for (int k = 0; k < scores_; ++k) {
      if (!std::isfinite(dense[k])) return function_->fail(CallbackFault::not_finite);
    }
    return OracleAnswer::found;
  }

 private:
  int vars_ = 0, scores_ = 0;
  Span<double> structure_;
  const CallbackFunction* function_ = nullptr;
  std::int64_t instance_ = 0;
};

}  // namespace factormax::oracle
