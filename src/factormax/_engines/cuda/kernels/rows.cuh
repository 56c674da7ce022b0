// The kernels for graphs of rows and pairs.
#pragma once

#include "solve.cuh"
#include "vjp.cuh"

namespace factormax {

// The gradient needs fewer arrays over rows.
template <class V>
struct Backward : V {
  static constexpr int kRowArrays = V::kBackwardRowArrays;
};

// Lets a team run on each instance; several share a block if they are warps.
template <class V, class Run>
FM_DEVICE void for_instance(const Args<V>& args, char* shared) {
  const int own = threadIdx.x / V::kTeam;
  const i64 instance = i64(blockIdx.x) * V::kTeamsPerBlock + own;
  if (instance >= args.batch) return;
  if (args.retry && Run::is_done(args, instance)) return;
  char* base = shared + own * args.team_bytes;
  const Graph<V> graph(args, {int(threadIdx.x) % V::kTeam, base}, base, instance);
  Run run(graph);
  run();
}

}  // namespace factormax

#define FACTORMAX_KERNEL(name, V, Run)                                      \
  extern "C" __global__ void __launch_bounds__(V::kTeam* V::kTeamsPerBlock) \
      name(const __grid_constant__ factormax::Args<V> args) {               \
    FACTORMAX_SHARED(shared);                                               \
    factormax::for_instance<V, factormax::Run<V>>(args, shared);            \
  }
#define FACTORMAX_KERNELS(V)                      \
  FACTORMAX_KERNEL(forward, V, Solver)            \
  using BackwardVariant = factormax::Backward<V>; \
  FACTORMAX_KERNEL(backward, BackwardVariant, Vjp)
