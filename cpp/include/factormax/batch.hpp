// The two entry points of the core: solve a batch, and differentiate a solved batch.
#pragma once

#include "factormax/problem.hpp"

namespace factormax {

enum class Method : std::int32_t { compact = 0, admm = 1 };

// Bytes one thread works in.
template <class T>
std::size_t workspace_bytes(const Problem<T>& problem, Method method);

template <class T>
void solve_batch(const Problem<T>& problem, std::int64_t batch, Method method,
                 const Options& options, Batched<const T> warm, const Outputs<T>& out,
                 Control& control);

template <class T>
struct BatchGradients {
  Batched<const T> grad_mu;              // (n,)
  Batched<const T> grad_mu_v;            // (P,)
  Batched<const std::int8_t> var_side;   // (n,)
  Batched<const std::int8_t> row_side;   // (R + P,)
  const std::int32_t* status = nullptr;  // (B,) of the solve: infeasible instances get 0
  Batched<T> grad_eta_u;                 // (n,)
  Batched<T> grad_eta_v;                 // (P,)
  double* residual = nullptr;            // (B,) of the reduced system, relative
};

template <class T>
void vjp_batch(const Problem<T>& problem, std::int64_t batch, const BatchGradients<T>& grads,
               Control& control);

}  // namespace factormax
