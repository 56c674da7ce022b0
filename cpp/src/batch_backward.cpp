#include <algorithm>
#include <limits>
#include <memory>

#include "factormax/backward.hpp"
#include "factormax/batch.hpp"
#include "factormax/parallel.hpp"
#include "factormax/structured/row_form.hpp"
#include "factormax/structured/structured.hpp"
#include "thread_memory.hpp"

namespace factormax {
namespace {

template <class T>
struct BackwardState {
  Instance<T> instance;
  StructuredFactors<T> structured;
  ReducedSystem<T> system;
  Span<T> d, rhs;

  // growth: of the room for structures, 0 if there are none because all was solved by rows.
  void allocate(const Problem<T>& p, int growth, Workspace& ws) {
    d = ws.take<T>(p.num_vars);
    if (growth > 0) {
      instance.allocate(p, ws);
      structured.allocate(p, growth, ws);
      system.allocate(p, hubs(), ws);
      rhs = ws.take<T>(p.num_dual());
    }
  }
  void allocate_rows(const Problem<T>& p, Workspace& ws) {
    const Problem<T> size = form.largest(p);
    form.allocate(p, ws);
    row_instance.allocate(size, ws);
    row_system.allocate(size, nullptr, ws);
    row_rhs = ws.take<T>(size.num_dual());
  }

  RowForm<T> form;
  Instance<T> row_instance;
  ReducedSystem<T> row_system;
  Span<T> row_rhs;

  StructuredFactors<T>* hubs() { return structured.any() ? &structured : nullptr; }
};

template <class T>
std::size_t backward_bytes(const Problem<T>& problem, int growth, bool rows) {
  Workspace counter;
  BackwardState<T> state;
  state.allocate(problem, growth, counter);
  if (rows) state.allocate_rows(problem, counter);
  return counter.used();
}

// Where the structures of each instance begin.
struct StructureOffsets {
  std::vector<std::int64_t> structure, on, features, dense, cuts;
};

template <class T>
StructureOffsets offsets_of(const Problem<T>& problem, std::int64_t batch,
                            const std::int32_t* count, const std::int32_t* num_cuts) {
  const std::vector<StructureSizes> sizes = structure_sizes(problem);
  StructureOffsets at;
  for (auto* a : {&at.structure, &at.on, &at.features, &at.dense, &at.cuts}) {
    a->assign(batch + 1, 0);
  }
  for (std::int64_t i = 0; i < batch; ++i) {
    at.structure[i + 1] = at.structure[i];
    at.on[i + 1] = at.on[i];
    at.features[i + 1] = at.features[i];
    at.dense[i + 1] = at.dense[i];
    at.cuts[i + 1] = at.cuts[i];
    for (std::size_t f = 0; f < sizes.size(); ++f) {
      const std::int64_t k = count[i * static_cast<std::int64_t>(sizes.size()) + f];
      at.structure[i + 1] += k;
      at.on[i + 1] += k * sizes[f].slots;
      at.features[i + 1] += k * sizes[f].feature_slots;
      at.dense[i + 1] += k * sizes[f].dense;
      const std::int64_t c = num_cuts[i * static_cast<std::int64_t>(sizes.size()) + f];
      if (c > 0) at.cuts[i + 1] += c * list_length(problem, static_cast<int>(f));
    }
  }
  return at;
}

// The structures of the forward pass, into the active sets.
template <class T>
void adopt(const BatchGradients<T>& grads, const StructureOffsets& at, std::int64_t i,
           StructuredFactors<T>& structured) {
  const Span<StructuredFactor> all = structured.all();
  const std::int32_t* count = grads.count + i * all.size;
  const double* prob = grads.prob + at.structure[i];
  const std::int32_t* on = grads.on + at.on[i];
  const std::int32_t* features = grads.features + at.features[i];
  const double* dense = grads.dense + at.dense[i];
  const std::int32_t* num_cuts = grads.num_cuts + i * all.size;
  const std::uint8_t* flags = grads.cuts + at.cuts[i];
  for (int f = 0; f < all.size; ++f) {
    ActiveSet& set = all[f].set;
    if (num_cuts[f] > 0) {
      all[f].by_flow = all[f].has_flow && all[f].flow.adopt(flags, all[f].w.data);
      all[f].present = all[f].present && all[f].by_flow;
      flags += SequenceFlow::num_flags(all[f].flow.shape());
      continue;
    }
    for (int k = 0; k < count[f]; ++k) {
      std::copy(on, on + set.shape().slots, set.on(set.count));
      std::copy(features, features + set.shape().feature_slots, set.features(set.count));
      std::copy(dense, dense + set.shape().dense_scores, set.dense(set.count));
      on += set.shape().slots;
      features += set.shape().feature_slots;
      dense += set.shape().dense_scores;
      set.adopt(*prob++);
    }
    all[f].present = all[f].present && set.count > 0;
  }
}

// Of an instance that was solved by rows. Returns the residual.
template <class T>
double vjp_by_rows(const Problem<T>& p, std::int64_t i, const BatchGradients<T>& grads,
                   const StructureOffsets& at, const Gradients<T>& g, BackwardState<T>& state) {
  RowForm<T>& form = state.form;
  form.begin(p, i);
  if (!form.adopt(grads.num_cuts + i * p.structured.count, grads.cuts + at.cuts[i])) {
    return std::numeric_limits<double>::infinity();  // no solution has such rows
  }
  const Problem<T>& larger = form.problem();
  form.take_rows(grads.row_side.at(i), form.row_side.data);
  state.row_instance.prepare(larger, 0);
  return vjp(larger, state.row_instance, 0, grads.var_side.at(i), form.row_side.data, g,
             state.row_system, static_cast<StructuredFactors<T>*>(nullptr), state.d, state.row_rhs);
}

template <class T>
void vjp_one(const Problem<T>& p, std::int64_t i, const BatchGradients<T>& grads,
             const StructureOffsets& at, BackwardState<T>& state) {
  Gradients<T> g{grads.grad_mu.at(i), grads.grad_mu_v.at(i), grads.grad_eta_u.at(i),
                 grads.grad_eta_v.at(i)};
  if (grads.status[i] == static_cast<std::int32_t>(Status::infeasible)) {
    std::fill_n(g.grad_eta_u, p.num_vars, T(0));
    std::fill_n(g.grad_eta_v, p.num_scores(), T(0));
    grads.residual[i] = 0;
    return;
  }
  if (RowForm<T>::possible(p) && grads.num_cuts[i * p.structured.count] >= 0) {
    grads.residual[i] = vjp_by_rows(p, i, grads, at, g, state);
    return;
  }
  state.instance.prepare(p, i);
  if (state.structured.any()) {
    state.structured.prepare(p, state.instance, i, false);
    adopt(grads, at, i, state.structured);
    if (grads.grad_prob != nullptr) g.grad_p = grads.grad_prob + at.structure[i];
  }
  grads.residual[i] = vjp(p, state.instance, i, grads.var_side.at(i), grads.row_side.at(i), g,
                          state.system, state.hubs(), state.d, state.rhs);
}

}  // namespace

template <class T>
std::vector<StructureSizes> structure_sizes(const Problem<T>& problem) {
  Workspace counter;
  std::vector<StructureSizes> sizes(problem.structured.count);
  for (int f = 0; f < problem.structured.count; ++f) {
    Oracle oracle;
    oracle.allocate(static_cast<OracleKind>(problem.structured.kind[f]),
                    problem.structured.shapes(f), counter);
    sizes[f] = {oracle.slots(), oracle.feature_slots(),
                oracle.is_dense() ? problem.structured.scores(f) : 0};
  }
  return sizes;
}

template <class T>
int list_length(const Problem<T>& problem, int f) {
  const Structured& s = problem.structured;
  if (s.kind[f] != static_cast<std::int8_t>(OracleKind::sequence)) {
    return RowForm<T>::list_length(s, f);
  }
  return SequenceFlow::num_flags(oracle::SequenceShape(s.shapes(f)));
}

template <class T>
void vjp_batch(const Problem<T>& solved, std::int64_t batch, const BatchGradients<T>& grads,
               Control& control) {
  Problem<T> problem = solved;
  problem.eta_u = {};  // all that matters of the scores is in the sides
  const int kinds = problem.structured.count;
  StructureOffsets at;
  int growth = 1;
  bool rows = false;
  if (kinds > 0) {
    at = offsets_of(problem, batch, grads.count, grads.num_cuts);
    const std::int64_t all = batch * kinds;
    const bool possible = RowForm<T>::possible(problem);
    const auto by_rows = [&](int c) { return possible && c >= 0; };
    rows = std::any_of(grads.num_cuts, grads.num_cuts + all, by_rows);
    const bool structures = !std::all_of(grads.num_cuts, grads.num_cuts + all, by_rows);
    growth = structures ? 1 : 0;
    const int most = *std::max_element(grads.count, grads.count + all);
    while (structures && 64 * growth < most) growth *= 4;
  }
  const std::size_t bytes = backward_bytes(problem, growth, rows);
  const auto make_worker = [&]() -> Worker {
    auto leased = std::make_shared<Leased<BackwardState<T>>>(bytes);
    Workspace* workspace = leased->lease.get();
    if (workspace == nullptr) {
      control.fail_for_memory();
    } else {
      leased->state.allocate(problem, growth, *workspace);
      if (rows) leased->state.allocate_rows(problem, *workspace);
    }
    return [&, leased](std::int64_t i, bool is_caller) {
      if (control.stopped(is_caller)) return;
      for (ReducedSystem<T>* system : {&leased->state.system, &leased->state.row_system}) {
        system->control = &control;
        system->may_poll = is_caller;
      }
      vjp_one(problem, i, grads, at, leased->state);
    };
  };
  parallel_for(batch, make_worker, [&] { control.stopped(true); });
}

#define FACTORMAX_INSTANTIATE(T)                                              \
  template std::vector<StructureSizes> structure_sizes<T>(const Problem<T>&); \
  template int list_length<T>(const Problem<T>&, int);                        \
  template void vjp_batch<T>(const Problem<T>&, std::int64_t, const BatchGradients<T>&, Control&);

FACTORMAX_INSTANTIATE(float)
FACTORMAX_INSTANTIATE(double)

}  // namespace factormax
