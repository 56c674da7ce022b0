// What a solve is given and what it answers: index arrays shared by a batch, numbers per instance.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <limits>

#include "factormax/span.hpp"

namespace factormax {

enum class RowKind : std::int8_t {
  absent = 0,      // not part of this instance
  inequality = 1,  // a . mu <= b, multiplier >= 0
  equality = 2,    // a . mu = b, multiplier free
};

enum class BlockKind : std::int8_t {
  row = 0,     // one row
  or_out = 1,  // rows l_i - l_out <= 0, then l_out - sum l_i <= 0 (the output stands last)
  band = 2,    // two rows of the same entries, -a . mu <= -lower, then a . mu <= upper
};

// Structures with a MAP oracle: `structured/oracle.hpp` lists them.
enum class OracleKind : std::int8_t;

enum class OracleAnswer { found, none, failed };

enum class Status : std::int32_t {
  converged = 0,    // the projected gradient met the tolerance
  max_iter = 1,     // the iterations ran out
  infeasible = 2,   // a Farkas certificate was found
  interrupted = 3,  // stopped from outside
  stalled = 4,      // no further progress in this precision
  not_proved = 5,   // a search ended before its answer was proved to be the best
};

// Where an unknown is at the solution: what the backward pass needs to know of it. A pair whose
// score is 0 is tied where its row holds exactly: the smallest score of either sign would act on
// one of its literals.
enum class Side : std::int8_t { lower = -1, interior = 0, upper = 1, absent = 2, tied = 3 };

// An array with a leading batch dimension; stride 0 shares one row among all instances.
template <class T>
struct Batched {
  T* data = nullptr;
  std::int64_t stride = 0;

  T* at(std::int64_t instance) const {
    return data == nullptr ? nullptr : data + instance * stride;
  }
};

// Some of a batch's factor scores, side by side: all instances share them, or each has its own.
struct ScoreRun {
  int begin = 0, count = 0;  // which scores
  int column = 0;            // of the first, among the shared ones or among an instance's own
  bool shared = false;
};

// The factor scores of a batch of which the instances share some, and not others.
template <class T>
struct MixedScores {
  Span<const ScoreRun> runs;  // all scores, in their order; empty if the scores are not mixed
  const T* shared = nullptr;
  Batched<const T> own;
  Batched<const double> heat;  // (1,) divides what an instance shares; null: nothing does
};

// What can be wrong with the answer of a callback.
enum class CallbackFault : int { none, raised, not_binary, forbidden, not_finite };

// An oracle of the user's own.
struct CallbackFunction {
  // Writes the best structure m (d,), 0 or 1, and its features n (s,); both come filled with 0.
  // Returns 0, or 1 if there is no structure, or -1 if it failed.
  using Call = int (*)(const double* eta_u, std::int64_t d, const double* eta_v, std::int64_t s,
                       double* m, double* n, void* context, std::int64_t instance);
  Call call = nullptr;
  void* context = nullptr;
  std::atomic<int>* fault = nullptr;  // the first fault stays

  OracleAnswer fail(CallbackFault what) const {
    int none = 0;
    fault->compare_exchange_strong(none, static_cast<int>(what));
    return OracleAnswer::failed;
  }
};

// S structured factors. One that shares no variable with an earlier one is a hub: it takes the
// place of the box on its variables. The others are linked to what is there by multipliers, one for
// each of their variables; such a tie is a link.
struct Structured {
  int count = 0;
  int num_links = 0;                      // multipliers of all linked factors
  int num_scores = 0;                     // own scores of all factors
  const std::int8_t* kind = nullptr;      // (S,)  OracleKind
  const std::uint8_t* linked = nullptr;   // (S,)
  const std::int32_t* var_ptr = nullptr;  // (S + 1,)
  const std::int32_t* var = nullptr;
  const std::int32_t* shape_ptr = nullptr;  // (S + 1,)
  const std::int32_t* shape = nullptr;
  const std::int32_t* score_ptr = nullptr;  // (S + 1,) scores of a factor, in eta_v after the pairs
  Batched<const double> param;              // (S,)
  const CallbackFunction* callback = nullptr;  // (S,), or null if there is no callback
  std::int64_t first = 0;                      // number that callbacks get for the first instance

  Span<const std::int32_t> vars(int f) const {
    return {var + var_ptr[f], var_ptr[f + 1] - var_ptr[f]};
  }
  Span<const std::int32_t> shapes(int f) const {
    return {shape + shape_ptr[f], shape_ptr[f + 1] - shape_ptr[f]};
  }
  int scores(int f) const { return score_ptr[f + 1] - score_ptr[f]; }
};

class Components;
class LoneRows;

// The compiled graph: R rows of a sparse matrix A, P pairs, and F blocks of rows (one per factor).
// This is what does not depend on the scalar type.
struct Layout {
  int num_vars = 0;
  int num_rows = 0;
  int num_entries = 0;
  int num_pairs = 0;
  int num_blocks = 0;
  int num_factors = 0;  // the first blocks; each is absent where all its variables are masked
  const std::int32_t* row_ptr = nullptr;         // (R + 1,)
  const std::int32_t* col = nullptr;             // (nnz,)
  const std::int8_t* kind = nullptr;             // (R,)  RowKind
  const std::int32_t* pair_var = nullptr;        // (P, 2)
  const std::uint8_t* pair_negated = nullptr;    // (P, 2)
  const std::int32_t* block_ptr = nullptr;       // (F + 1,)
  const std::int8_t* block_kind = nullptr;       // (F,)  BlockKind
  const std::uint8_t* block_isolated = nullptr;  // (F + P,)  shares no variable with another
  Batched<const std::uint8_t> mask;              // (n,)  optional; 0: the variable is off
  Structured structured;
  double row_precision = 0;  // relative precision of coef and rhs, if worse than their type's
  const Components* components = nullptr;  // null: it is solved as a whole
  const LoneRows* lone_rows = nullptr;     // null: not all factors are lone rows

  int num_dual() const { return num_rows + num_pairs + structured.num_links; }
  int num_scores() const { return num_pairs + structured.num_scores; }
  int num_incidences() const { return num_entries + 2 * num_pairs + structured.num_links; }
};

template <class T>
struct Problem : Layout {
  Batched<const T> coef;        // (nnz,)
  Batched<const T> rhs;         // (R,)
  bool constant_coefs = false;  // components of one kind have the same coef
  Batched<const T> eta_u;       // (n,)
  Batched<const T> eta_v;       // (P + scores of the structured factors,)
  MixedScores<T> mixed;         // in place of eta_v, which is null then

  bool is_mixed() const { return !mixed.runs.empty(); }
};

// Whether a variable is present: a score of -inf is a mask too. mask, eta: the instance's, or null.
template <class T>
bool is_present(const std::uint8_t* mask, const T* eta, std::int32_t j) {
  return (mask == nullptr || mask[j] != 0) &&
         (eta == nullptr || eta[j] != -std::numeric_limits<T>::infinity());
}

// The sign of the multiplier that proves that a row can't hold; 0 if it can. least, most: the range
// of a . mu over the box; precision: the row's, relative.
template <class T>
int refutation(T least, T most, T b, bool equality, T precision) {
  // Parameters computed in float may miss their own sum.
  const T slack = std::max(T(1e-7), 16 * precision) * (most - least + std::fabs(b));
  return least > b + slack ? 1 : equality && most < b - slack ? -1 : 0;
}

// Whether structured factors are solved without structures: trees and matchings by the rows of
// their polytopes, sequences by the flows on their transitions.
enum class ByRows : std::int32_t {
  never = 0,
  dense = 1,   // where that is faster
  always = 2,  // where it can be done
  // Structures were asked for: no rows, and flows are taken apart into paths, except with a budget,
  // where there are no flows.
  listed = 3,
};

struct Options {
  double tol = 1e-6;
  int max_iter = 1000;
  int max_inner_iter = 100000;  // oracle calls per structured factor and pass
  double step_size = 1.0;       // ADMM only
  bool finish = true;           // the exact finish of the compact dual
  ByRows by_rows = ByRows::dense;
  bool linear = false;  // ADMM only: without the quadratic term, which is AD3
};

// How the solve of one instance ended.
struct Result {
  Status status = Status::max_iter;
  int iterations = 0;
  std::int64_t oracle_calls = 0;
  double primal_residual = 0;
  double dual_residual = 0;
};

// Per-instance outputs. The backward pass needs var_side, row_side and the structures found.
template <class T>
struct Outputs {
  Batched<T> mu;                  // (n,)
  Batched<T> mu_v;                // (P + structured scores,)
  Batched<T> tau;                 // (R + P + links,)
  Batched<std::int8_t> var_side;  // (n,)  Side
  Batched<std::int8_t> row_side;  // (R + P + links,)  Side
  double* objective = nullptr;    // (B,)
  double* primal_residual = nullptr;
  double* dual_residual = nullptr;
  std::int32_t* iterations = nullptr;
  std::int32_t* status = nullptr;
  std::int32_t* oracle_calls = nullptr;
  double* upper_bound = nullptr;     // (B,) linear methods only
  std::uint8_t* integral = nullptr;  // (B,)
};

template <class T>
void write_result(const Result& result, std::int64_t i, const Outputs<T>& out) {
  out.status[i] = static_cast<std::int32_t>(result.status);
  out.iterations[i] = result.iterations;
  out.oracle_calls[i] = static_cast<std::int32_t>(result.oracle_calls);
  out.primal_residual[i] = result.primal_residual;
  out.dual_residual[i] = result.dual_residual;
}

// Lets a long computation be stopped: the calling thread calls `poll` now and then, and `stop`
// tells all other threads. After the deadline no new pass begins, as if the iterations had run out.
struct Control {
  using Clock = std::chrono::steady_clock;
  Clock::time_point deadline = Clock::time_point::max();
  std::atomic<bool> stop{false};
  std::atomic<bool> out_of_memory{false};
  bool (*poll)() = nullptr;

  bool stopped(bool may_poll) {
    if (stop.load(std::memory_order_relaxed)) return true;
    if (may_poll && poll != nullptr && poll()) stop.store(true, std::memory_order_relaxed);
    return stop.load(std::memory_order_relaxed);
  }
  bool late() const { return deadline != Clock::time_point::max() && Clock::now() >= deadline; }
  void fail_for_memory() {
    out_of_memory.store(true, std::memory_order_relaxed);
    stop.store(true, std::memory_order_relaxed);
  }
};

}  // namespace factormax
