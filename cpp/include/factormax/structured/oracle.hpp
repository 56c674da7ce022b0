// One MAP oracle behind one interface, whatever the structure: the solver never asks which.
#pragma once

#include <variant>

#include "factormax/oracle/arborescence.hpp"
#include "factormax/oracle/assignment.hpp"
#include "factormax/oracle/callback.hpp"
#include "factormax/oracle/projective_tree.hpp"
#include "factormax/oracle/sequence.hpp"
#include "factormax/oracle/sequence_budget.hpp"
#include "factormax/oracle/table.hpp"
#include "factormax/problem.hpp"

namespace factormax {

class Oracle {
 public:
  // shape: what the kind needs to know of its size, see OracleKind.
  void allocate(OracleKind kind, Span<const std::int32_t> shape, int vars, Workspace& ws) {
    switch (kind) {
      case OracleKind::tree:
        make<oracle::Arborescence<double>>(ws, shape[0], shape[1] != 0);
        break;
      case OracleKind::projective_tree:
        make<oracle::ProjectiveTree<double>>(ws, shape[0], shape[1] != 0);
        break;
      case OracleKind::matching:
        make<oracle::Assignment<double>>(ws, shape[0], shape[1]);
        break;
      case OracleKind::sequence:
        make<oracle::Sequence<double>>(ws, sequence_shape(shape));
        break;
      case OracleKind::sequence_budget:
        make<oracle::SequenceBudget<double>>(ws, shape[0], shape[1] != 0, shape[2]);
        break;
      case OracleKind::table:
        make<oracle::Table<double>>(ws, shape);
        break;
      case OracleKind::callback:
        make<oracle::Callback>(ws, vars, shape[0]);
        break;
    }
  }

  static oracle::SequenceShape sequence_shape(Span<const std::int32_t> shape) {
    return {shape[0], shape[1], shape[2] != 0, shape[3] != 0, shape[4] != 0};
  }

  // Once per instance; false if there is no structure.
  bool prepare(const double* eta_u, double param, const CallbackFunction* function,
               std::int64_t instance) {
    return std::visit(
        [&](auto& o) {
          using O = std::decay_t<decltype(o)>;
          if constexpr (std::is_same_v<O, oracle::SequenceBudget<double>>) {
            return o.prepare(eta_u, static_cast<int>(param));
          } else if constexpr (std::is_same_v<O, oracle::Callback>) {
            return o.prepare(eta_u, function, instance);
          } else {
            return o.prepare(eta_u);
          }
        },
        oracle_);
  }

  OracleAnswer map(const double* eta_u, const double* eta_v, std::int32_t* on,
                   std::int32_t* features, double* dense) {
    return std::visit(
        [&](auto& o) {
          if constexpr (std::is_same_v<std::decay_t<decltype(o)>, oracle::Callback>) {
            return o.map(eta_u, eta_v, on, dense);
          } else {
            return o.map(eta_u, eta_v, on, features) ? OracleAnswer::found : OracleAnswer::none;
          }
        },
        oracle_);
  }

  int slots() const {
    return std::visit([](const auto& o) { return o.slots(); }, oracle_);
  }
  int feature_slots() const {
    return std::visit([](const auto& o) { return o.feature_slots(); }, oracle_);
  }
  // Features are numbers for all scores, not a list of those that count.
  bool is_dense() const { return std::holds_alternative<oracle::Callback>(oracle_); }

 private:
  template <class O, class... Shape>
  void make(Workspace& ws, Shape... shape) {
    O made;
    made.allocate(shape..., ws);
    oracle_ = made;
  }

  std::variant<oracle::Arborescence<double>, oracle::ProjectiveTree<double>,
               oracle::Assignment<double>, oracle::Sequence<double>, oracle::SequenceBudget<double>,
               oracle::Table<double>, oracle::Callback>
      oracle_;
};

}  // namespace factormax
