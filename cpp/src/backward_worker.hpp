// One instance after the other on one thread: the derivative of its solution.
#pragma once

#include <algorithm>
#include <limits>

#include "factormax/backward.hpp"
#include "factormax/batch.hpp"
#include "factormax/structured/lone_tree.hpp"
#include "factormax/structured/row_form.hpp"
#include "factormax/structured/structured.hpp"
#include "structure_lists.hpp"
#include "thread_memory.hpp"

namespace factormax {

template <class T>
struct BackwardState {
  Instance<T> instance;
  StructuredFactors<T> structured;
  PullBack<T> pull;
  Span<T> d;

  // growth: factor of the room for structures; 0 if there are none, as all was solved by rows.
  void allocate(const Problem<T>& p, int growth, Workspace& ws) {
    d = ws.take<T>(p.num_vars);
    if (growth > 0) {
      instance.allocate(p, ws);
      structured.allocate(p, growth, ws);
      pull.allocate(p, hubs(), ws);
    }
  }
  // most_lists: the most lists of flags of a factor.
  void allocate_rows(const Problem<T>& p, int most_lists, Workspace& ws) {
    is_tree = most_lists < LoneTree::kMostSets && LoneTree::is_all_of(p);
    if (is_tree) return tree.allocate(p.structured.shapes(0)[0], ws);
    const Problem<T> size = form.largest(p);
    form.allocate(p, ws);
    row_instance.allocate(size, ws);
    row_pull.allocate(size, nullptr, ws);
  }

  LoneTree tree;
  bool is_tree = false;  // it takes the place of the rows

  RowForm<T> form;
  Instance<T> row_instance;
  PullBack<T> row_pull;

  StructuredFactors<T>* hubs() { return structured.any() ? &structured : nullptr; }
};

// What instances that are laid out alike need room for.
struct Needs {
  bool rows = false, structures = true;
  int most = 0;        // structures of a factor, at most
  int most_lists = 0;  // lists of flags, at most

  void add(bool by_rows, int count, int lists) {
    rows |= by_rows;
    structures |= !by_rows;
    most = std::max(most, count);
    most_lists = std::max(most_lists, lists);
  }
  int growth() const {
    int growth = structures ? 1 : 0;
    while (structures && 64 * growth < most) growth *= 4;
    return growth;
  }
};

// The gradient of an instance that is nothing but a tree. Returns the residual.
template <class T>
double vjp_of_tree(const Problem<T>& p, std::int64_t i, const BatchGradients<T>& grads,
                   const StructureOffsets& at, const Gradients<T>& g, LoneTree& tree) {
  const int words = p.structured.shapes(0)[0];
  const std::uint8_t* members = grads.cuts + at.cuts[i];
  tree.begin_derivative(grads.var_side.at(i), p.structured.shapes(0)[1] != 0);
  for (int c = 0; c < grads.num_cuts[i]; ++c, members += words) {
    if (!tree.adopt(members)) return std::numeric_limits<double>::infinity();
  }
  return tree.derivative(g.grad_mu, g.grad_eta_u);
}

// The gradient of an instance that was solved by rows. Returns the residual.
template <class T>
double vjp_by_rows(const Problem<T>& p, std::int64_t i, const BatchGradients<T>& grads,
                   const StructureOffsets& at, const Gradients<T>& g, BackwardState<T>& state) {
  RowForm<T>& form = state.form;
  form.begin(p, i);
  const std::int64_t first = i * p.structured.count;
  if (!form.adopt(grads.num_cuts + first, grads.cuts + at.cuts[first])) {
    return std::numeric_limits<double>::infinity();  // no solution has such rows
  }
  const Problem<T>& larger = form.problem();
  form.take_rows(grads.row_side.at(i), form.row_side.data);
  state.row_instance.prepare(larger, 0);
  return vjp(larger, state.row_instance, 0, grads.var_side.at(i), form.row_side.data, g,
             state.row_pull, static_cast<StructuredFactors<T>*>(nullptr), state.d);
}

// Trees and matchings are solved by rows all together or not at all; sequences are solved by flows
// or not. by_rows: whether all is.
template <class T>
bool lists_fit(const Structured& s, const std::int32_t* num_cuts, bool possible, bool by_rows) {
  for (int f = 0; f < s.count; ++f) {
    const auto kind = static_cast<OracleKind>(s.kind[f]);
    const bool flows = kind == OracleKind::sequence || kind == OracleKind::sequence_budget;
    const bool listed = num_cuts[f] >= 0;
    if (possible ? listed != by_rows : listed && !flows) return false;
  }
  return true;
}

template <class T>
void vjp_one(const Problem<T>& p, std::int64_t i, const BatchGradients<T>& grads,
             const StructureOffsets& at, BackwardState<T>& state) {
  Gradients<T> g{grads.grad_mu.at(i), grads.grad_mu_v.at(i), grads.grad_eta_u.at(i),
                 grads.grad_eta_v.at(i)};
  const std::int32_t* num_cuts = grads.num_cuts + i * p.structured.count;
  const bool possible = RowForm<T>::possible(p), by_rows = possible && num_cuts[0] >= 0;
  const bool fit = lists_fit<T>(p.structured, num_cuts, possible, by_rows);
  constexpr double lost = std::numeric_limits<double>::infinity();
  const auto give_up = [&](double residual) {
    std::fill_n(g.grad_eta_u, p.num_vars, T(0));
    std::fill_n(g.grad_eta_v, p.num_scores(), T(0));
    grads.residual[i] = residual;
  };
  if (!fit) return give_up(lost);
  if (grads.status[i] == static_cast<std::int32_t>(Status::infeasible)) return give_up(0);
  if (by_rows) {
    grads.residual[i] = state.is_tree ? vjp_of_tree(p, i, grads, at, g, state.tree)
                                      : vjp_by_rows(p, i, grads, at, g, state);
    if (grads.residual[i] == lost) give_up(lost);
    return;
  }
  state.instance.prepare(p, i);
  if (state.structured.any()) {
    state.structured.prepare(p, state.instance, i, false);
    adopt(grads, at, i, state.structured);
    if (grads.grad_prob != nullptr)
      g.grad_p = grads.grad_prob + at.structure[i * p.structured.count];
  }
  grads.residual[i] = vjp(p, state.instance, i, grads.var_side.at(i), grads.row_side.at(i), g,
                          state.pull, state.hubs(), state.d);
}

// Differentiates instances of one layout, one after the other on one thread.
template <class T>
class BackwardWorker {
 public:
  BackwardWorker(const Problem<T>& problem, const Needs& needs, Control& control)
      : problem_(problem),
        control_(control),
        leased_(problem.structured.count == 0, [&](BackwardState<T>& state, Workspace& ws) {
          state.allocate(problem, needs.growth(), ws);
          if (needs.rows) state.allocate_rows(problem, needs.most_lists, ws);
        }) {
    if (!leased_.valid()) control.fail_for_memory();
  }

  void operator()(std::int64_t i, const BatchGradients<T>& grads, const StructureOffsets& at,
                  bool is_caller) {
    if (control_.stopped(is_caller)) return;
    for (PullBack<T>* pull : {&leased_.state.pull, &leased_.state.row_pull}) {
      pull->system.control = &control_;
      pull->system.may_poll = is_caller;
    }
    vjp_one(problem_, i, grads, at, leased_.state);
  }

 private:
  const Problem<T>& problem_;
  Control& control_;
  Leased<BackwardState<T>> leased_;
};

}  // namespace factormax
