// The two entry points of the core: solve a batch, and differentiate a solved batch.
#pragma once

#include <algorithm>
#include <vector>

#include "factormax/problem.hpp"

namespace factormax {

// The last two solve the linear program: LP-MAP.
enum class Method : std::int32_t { compact = 0, admm = 1, proximal = 2, ad3 = 3 };

// The structures that make up the solutions of structured factors, `count` each: instance by
// instance, factor by factor. This is all the backward pass needs of those solutions.
struct FoundStructures {
  std::vector<std::int32_t> count;     // (B, S)
  std::vector<double> prob;            // one per structure; 0: it only completes the optimal face
  std::vector<std::int32_t> on;        // `slots` per structure: variables that are on, or -1
  std::vector<std::int32_t> features;  // `feature_slots` per structure: scores that count, or -1
  std::vector<double> dense;           // features of callbacks, all of them
  // For factors that were solved by rows or flows and list no structures: see `RowForm` and
  // `SequenceFlow`.
  std::vector<std::int32_t>
      num_cuts;  // (B, S) lists of flags; -1: solved by structures, -2: no structure exists
  std::vector<std::uint8_t> cuts;  // the flags of all lists
};

// How long the lists of each of a factor's structures are.
struct StructureSizes {
  int slots = 0, feature_slots = 0, dense = 0;
};
template <class T>
std::vector<StructureSizes> structure_sizes(const Problem<T>& problem);

// How long the lists of flags are that describe a factor's solution where no structures do.
template <class T>
int list_length(const Problem<T>& problem, int f);

// Bytes that one thread works in.
template <class T>
std::size_t workspace_bytes(const Problem<T>& problem, Method method);

template <class T>
void solve_batch(const Problem<T>& problem, std::int64_t batch, Method method,
                 const Options& options, Batched<const T> warm, const Outputs<T>& out,
                 FoundStructures& found, Control& control);

// Arrays for the outputs of a batch.
template <class T>
struct BatchOutputs {
  BatchOutputs(const Layout& p, std::int64_t batch)
      : vars(p.num_vars),
        scores(p.num_scores()),
        dual(p.num_dual()),
        mu(batch * vars),
        mu_v(batch * scores),
        tau(batch * dual),
        var_side(batch * vars),
        row_side(batch * dual),
        objective(batch),
        primal_residual(batch),
        dual_residual(batch),
        upper_bound(batch),
        iterations(batch),
        status(batch),
        oracle_calls(batch),
        integral(batch) {}

  Outputs<T> outputs() {
    return {{mu.data(), vars},       {mu_v.data(), scores},   {tau.data(), dual},
            {var_side.data(), vars}, {row_side.data(), dual}, objective.data(),
            primal_residual.data(),  dual_residual.data(),    iterations.data(),
            status.data(),           oracle_calls.data(),     upper_bound.data(),
            integral.data()};
  }

  int vars, scores, dual;  // numbers per instance
  std::vector<T> mu, mu_v, tau;
  std::vector<std::int8_t> var_side, row_side;
  std::vector<double> objective, primal_residual, dual_residual, upper_bound;
  std::vector<std::int32_t> iterations, status, oracle_calls;
  std::vector<std::uint8_t> integral;
};

// The gradients of factor scores, summed over the batch where the instances share them. The batch
// is cut into blocks, which do not depend on the threads. Each has a row of sums; the first ends up
// with the sum of all.
template <class T>
struct ScoreSums {
  Span<const ScoreRun> runs;  // all scores, in their order; empty: nothing is summed
  Batched<T> sums;            // (blocks, shared scores)
  Batched<T> own;             // (B, other scores)
  std::int64_t block = 1;     // instances per block

  // Few enough blocks to take little memory, and enough to keep the threads busy.
  static std::int64_t block_size(std::int64_t batch, std::int64_t shared) {
    if (shared == 0) return 1;
    const std::int64_t most = std::max<std::int64_t>(64, 65536 / shared);
    return std::max<std::int64_t>(1, (batch + most - 1) / most);
  }
  std::int64_t num_blocks(std::int64_t batch) const { return (batch + block - 1) / block; }
};

template <class T>
struct BatchGradients {
  Batched<const T> grad_mu;              // (n,)
  Batched<const T> grad_mu_v;            // (P + structured scores,)
  Batched<const std::int8_t> var_side;   // (n,)
  Batched<const std::int8_t> row_side;   // (R + P + links,)
  const std::int32_t* status = nullptr;  // (B,) of the solve: infeasible instances get 0
  Batched<T> grad_eta_u;                 // (n,)
  Batched<T> grad_eta_v;                 // (P + structured scores,), if nothing is summed
  double* residual = nullptr;            // (B,) relative, of the reduced system; +inf: no such
                                         // structures could have been found
  const std::int32_t* count = nullptr;   // (B, S), and what FoundStructures holds
  const double* prob = nullptr;
  const std::int32_t* on = nullptr;
  const std::int32_t* features = nullptr;
  const double* dense = nullptr;
  const std::int32_t* num_cuts = nullptr;
  const std::uint8_t* cuts = nullptr;
  const double* grad_prob = nullptr;  // like prob, or null
  ScoreSums<T> summed{};              // in place of grad_eta_v

  void take(const FoundStructures& found) {
    count = found.count.data();
    prob = found.prob.data();
    on = found.on.data();
    features = found.features.data();
    dense = found.dense.data();
    num_cuts = found.num_cuts.data();
    cuts = found.cuts.data();
  }
};

template <class T>
void vjp_batch(const Problem<T>& problem, std::int64_t batch, const BatchGradients<T>& grads,
               Control& control);

}  // namespace factormax
