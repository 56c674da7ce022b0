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

// All oracles: the kind, an enumerator of OracleKind here and in Python, and the class. This is the
// one place where they are listed.
#define FACTORMAX_ORACLES(ORACLE)                         \
  ORACLE(tree, oracle::Arborescence<double>)              \
  ORACLE(projective_tree, oracle::ProjectiveTree<double>) \
  ORACLE(matching, oracle::Assignment<double>)            \
  ORACLE(sequence, oracle::Sequence<double>)              \
  ORACLE(sequence_budget, oracle::SequenceBudget<double>) \
  ORACLE(table, oracle::Table<double>)                    \
  ORACLE(callback, oracle::Callback)

namespace factormax {

enum class OracleKind : std::int8_t {
#define FACTORMAX_ORACLE(kind, Class) kind,
  FACTORMAX_ORACLES(FACTORMAX_ORACLE)
#undef FACTORMAX_ORACLE
};

// Whether the shape of a structured factor is valid, and agrees with its variables and scores.
inline bool fits(OracleKind which, oracle::Shape shape, std::int64_t vars, std::int64_t scores) {
  switch (which) {
#define FACTORMAX_ORACLE(kind, Class) \
  case OracleKind::kind:              \
    return Class::fits(shape, vars, scores);
    FACTORMAX_ORACLES(FACTORMAX_ORACLE)
#undef FACTORMAX_ORACLE
  }
  return false;
}

class Oracle {
 public:
  // The shape must fit.
  void allocate(OracleKind which, oracle::Shape shape, Workspace& ws) {
    switch (which) {
#define FACTORMAX_ORACLE(kind, Class)             \
  case OracleKind::kind:                          \
    oracle_.emplace<Class>().allocate(shape, ws); \
    break;
      FACTORMAX_ORACLES(FACTORMAX_ORACLE)
#undef FACTORMAX_ORACLE
    }
  }

  // To be called once per instance; false if there is no structure.
  bool prepare(const double* eta_u, const oracle::InstanceInputs& inputs = {}) {
    return std::visit([&](auto& o) { return o.prepare(eta_u, inputs); }, oracle_);
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
  // Whether features are numbers for all scores, not a list of those that count.
  bool is_dense() const { return std::holds_alternative<oracle::Callback>(oracle_); }

 private:
  template <class, class... Classes>
  using OneOf = std::variant<Classes...>;

#define FACTORMAX_ORACLE(kind, Class) , Class
  OneOf<void FACTORMAX_ORACLES(FACTORMAX_ORACLE)> oracle_;
#undef FACTORMAX_ORACLE
};

}  // namespace factormax
