// The buffers of a solve and of its gradient, filled with poison, and calls that write them.
#pragma once

#include <algorithm>
#include <cstring>
#include <limits>

#include "factormax/batch.hpp"
#include "graph.hpp"

namespace factormax::test {

// The buffers of a solution, poisoned.
template <class T>
struct Solution : BatchOutputs<T> {
  int batch, n, pairs;

  Solution(Graph<T>& graph, int batch_size, T poison = std::numeric_limits<T>::quiet_NaN())
      : BatchOutputs<T>(graph.problem(), batch_size),
        batch(batch_size),
        n(graph.n),
        pairs(graph.num_pairs()) {
    for (auto* a : {&mu, &mu_v, &tau}) std::fill(a->begin(), a->end(), poison);
    for (auto* a : {&objective, &primal_residual, &dual_residual}) {
      std::fill(a->begin(), a->end(), double(poison));
    }
    for (auto* a : {&var_side, &row_side}) std::fill(a->begin(), a->end(), std::int8_t(77));
    for (auto* a : {&iterations, &status, &oracle_calls}) std::fill(a->begin(), a->end(), -77);
  }

  using BatchOutputs<T>::mu, BatchOutputs<T>::mu_v, BatchOutputs<T>::tau;
  using BatchOutputs<T>::var_side, BatchOutputs<T>::row_side, BatchOutputs<T>::objective;
  using BatchOutputs<T>::primal_residual, BatchOutputs<T>::dual_residual;
  using BatchOutputs<T>::iterations, BatchOutputs<T>::status, BatchOutputs<T>::oracle_calls;

  Status status_of(int i) const { return static_cast<Status>(status[i]); }

  // Bit for bit, so that NaN equals NaN.
  bool same_as(const Solution& other) const {
    const auto same = [](const auto& a, const auto& b) {
      return a.size() == b.size() &&
             (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof a[0]) == 0);
    };
    return same(mu, other.mu) && same(mu_v, other.mu_v) && same(tau, other.tau) &&
           same(var_side, other.var_side) && same(row_side, other.row_side) &&
           same(objective, other.objective) && same(primal_residual, other.primal_residual) &&
           same(dual_residual, other.dual_residual) && same(iterations, other.iterations) &&
           same(status, other.status);
  }
};

template <class T>
void solve_into(Graph<T>& graph, Method method, const Options& options, Solution<T>& out,
                Batched<const T> warm = {}) {
  Control control;
  const Outputs<T> outputs = out.outputs();
  FoundStructures found;
  solve_batch<T>(graph.problem(), out.batch, method, options, warm, outputs, found, control);
}

template <class T>
Solution<T> solve(Graph<T>& graph, int batch, Method method, const Options& options) {
  Solution<T> out(graph, batch);
  solve_into(graph, method, options, out);
  return out;
}

// The gradients of a batch, poisoned as well.
template <class T>
struct Gradient {
  std::vector<T> eta_u, eta_v;
  std::vector<double> residual;
};

// grad_mu: (batch, n), grad_mu_v: (batch, P). The solution is of as many instances, or of one.
template <class T>
Gradient<T> vjp(Graph<T>& graph, const Solution<T>& at, int batch, const std::vector<T>& grad_mu,
                const std::vector<T>& grad_mu_v) {
  const T nan = std::numeric_limits<T>::quiet_NaN();
  Gradient<T> out{std::vector<T>(static_cast<std::size_t>(batch) * at.n, nan),
                  std::vector<T>(static_cast<std::size_t>(batch) * at.pairs, nan),
                  std::vector<double>(batch, nan)};
  const bool shared = at.batch == 1;
  const std::vector<std::int32_t> status(batch, at.status[0]);
  BatchGradients<T> grads;
  grads.grad_mu = {grad_mu.data(), at.n};
  grads.grad_mu_v = {grad_mu_v.data(), at.pairs};
  grads.var_side = {at.var_side.data(), shared ? 0 : at.n};
  grads.row_side = {at.row_side.data(), shared ? 0 : at.dual};
  grads.status = shared ? status.data() : at.status.data();
  grads.grad_eta_u = {out.eta_u.data(), at.n};
  grads.grad_eta_v = {out.eta_v.data(), at.pairs};
  grads.residual = out.residual.data();
  Control control;
  vjp_batch<T>(graph.problem(), batch, grads, control);
  return out;
}

}  // namespace factormax::test
