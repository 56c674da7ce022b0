// What a solve answers.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <type_traits>
#include <variant>

#include "arrays.hpp"
#include "factormax/batch.hpp"
#include "inputs.hpp"

namespace factormax::python {

// The answers of a batch, which it owns.
class Solution {
 public:
  template <class T>
  struct Typed {
    Buffer<T> mu, mu_v, tau;
  };

  Solution(std::size_t batch, std::size_t vars, std::size_t scores, std::size_t dual, bool wide)
      : var_side(batch, vars),
        row_side(batch, dual),
        objective(batch, 1),
        primal_residual(batch, 1),
        dual_residual(batch, 1),
        upper_bound(batch, 1),
        iterations(batch, 1),
        status(batch, 1),
        oracle_calls(batch, 1),
        integral(batch, 1) {
    std::fill_n(upper_bound.data.get(), batch, std::numeric_limits<double>::infinity());
    std::fill_n(integral.data.get(), batch, std::uint8_t(0));
    if (wide) {
      numbers.emplace<Typed<double>>(Typed<double>{{batch, vars}, {batch, scores}, {batch, dual}});
    } else {
      numbers.emplace<Typed<float>>(Typed<float>{{batch, vars}, {batch, scores}, {batch, dual}});
    }
  }

  // A solution with room for the answers to these inputs.
  explicit Solution(const Inputs& inputs)
      : Solution(inputs.batch(), static_cast<std::size_t>(inputs.model().num_vars()),
                 static_cast<std::size_t>(inputs.model().num_scores()),
                 static_cast<std::size_t>(inputs.model().num_dual()), inputs.is_double()) {}

  bool is_double() const { return std::holds_alternative<Typed<double>>(numbers); }
  std::size_t batch() const { return var_side.rows; }
  bool all_converged() const {
    const std::int32_t* own = status.data.get();
    const auto converged = static_cast<std::int32_t>(Status::converged);
    return std::all_of(own, own + batch(), [&](std::int32_t code) { return code == converged; });
  }

  // How each instance ended, (5, B): the residuals, then iterations, status and oracle calls.
  Buffer<double> report() const {
    Buffer<double> found(5, batch());
    double* out = found.data.get();
    out = std::copy_n(primal_residual.data.get(), batch(), out);
    out = std::copy_n(dual_residual.data.get(), batch(), out);
    out = std::copy_n(iterations.data.get(), batch(), out);
    out = std::copy_n(status.data.get(), batch(), out);
    std::copy_n(oracle_calls.data.get(), batch(), out);
    return found;
  }

  // What the derivative needs of each instance that has no structures, side by side, (B, n + dual +
  // 1): the sides of variables and rows, and the status.
  Buffer<std::int8_t> sides() const {
    Buffer<std::int8_t> found(batch(), var_side.columns + row_side.columns + 1);
    std::int8_t* out = found.data.get();
    for (std::size_t i = 0; i < batch(); ++i) {
      out = std::copy_n(var_side.data.get() + i * var_side.columns, var_side.columns, out);
      out = std::copy_n(row_side.data.get() + i * row_side.columns, row_side.columns, out);
      *out++ = static_cast<std::int8_t>(status.data[i]);
    }
    return found;
  }
  void take_sides(const Matrix<const std::int8_t>& given) {
    const std::size_t columns = var_side.columns + row_side.columns + 1;
    require(given.shape(0) == batch() && given.shape(1) == columns, "sides has the wrong shape");
    const std::int8_t* in = given.data();
    for (std::size_t i = 0; i < batch(); ++i) {
      std::copy_n(in, var_side.columns, var_side.data.get() + i * var_side.columns);
      std::copy_n(in + var_side.columns, row_side.columns,
                  row_side.data.get() + i * row_side.columns);
      status.data[i] = in[columns - 1];
      in += columns;
    }
  }

  template <class T>
  Outputs<T> outputs() {
    Typed<T>& own = std::get<Typed<T>>(numbers);
    Outputs<T> out;
    out.mu = own.mu.batched();
    out.mu_v = own.mu_v.batched();
    out.tau = own.tau.batched();
    out.var_side = var_side.batched();
    out.row_side = row_side.batched();
    out.objective = objective.data.get();
    out.primal_residual = primal_residual.data.get();
    out.dual_residual = dual_residual.data.get();
    out.iterations = iterations.data.get();
    out.status = status.data.get();
    out.oracle_calls = oracle_calls.data.get();
    out.upper_bound = upper_bound.data.get();
    out.integral = integral.data.get();
    return out;
  }

  void require_fit(const Model& model, std::size_t size, bool wide) const {
    const std::size_t scores = std::visit(
        [](const auto& own) {
          if constexpr (std::is_same_v<std::decay_t<decltype(own)>, std::monostate>) {
            return std::size_t(0);
          } else {
            return own.mu_v.columns;
          }
        },
        numbers);
    require(batch() == size && var_side.columns == std::size_t(model.num_vars()) &&
                row_side.columns == std::size_t(model.num_dual()) &&
                scores == std::size_t(model.num_scores()) && is_double() == wide,
            "the solution does not fit the inputs");
  }

  std::variant<std::monostate, Typed<double>, Typed<float>> numbers;
  Buffer<std::int8_t> var_side, row_side;
  Buffer<double> objective, primal_residual, dual_residual, upper_bound;
  Buffer<std::int32_t> iterations, status, oracle_calls;
  Buffer<std::uint8_t> integral;
  FoundStructures structures;
};

}  // namespace factormax::python
