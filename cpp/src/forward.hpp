// The solve of one instance, by any method.
#pragma once

#include <algorithm>
#include <new>
#include <vector>

#include "factormax/admm.hpp"
#include "factormax/batch.hpp"
#include "factormax/linear.hpp"
#include "factormax/outputs.hpp"
#include "factormax/proximal.hpp"
#include "factormax/structured/lone_tree.hpp"
#include "factormax/structured/row_form.hpp"
#include "factormax/structured/structured.hpp"
#include "strips.hpp"

namespace factormax {

// What it takes to solve a problem by the rows of its structured factors.
template <class T>
struct RowFormState {
  RowForm<T> form;
  Instance<T> instance;
  CompactSolver<T> compact;

  void allocate(const Problem<T>& p, Workspace& ws) {
    const Problem<T> size = form.largest(p);
    form.allocate(p, ws);
    instance.allocate(size, ws);
    compact.allocate(size, nullptr, ws);
  }
};

// All that one thread needs for one method, laid out in one workspace.
template <class T>
struct ForwardState {
  Instance<T> instance;
  StructuredFactors<T> structured;
  AdmmSolver<T> admm;
  ProximalSolver<T> proximal;
  std::vector<T> start;  // multipliers that strips were solved for
  Span<T> error;
  Span<T> rows;  // scratch of AD3
  RowFormState<T> by_rows;
  LoneTree tree;
  bool has_row_form = false, is_tree = false;

  DualPoint<T>* point = nullptr;  // where the method ended
  Span<const T> certificate;      // that nothing is feasible
  LinearProgram<T> program;       // for linear methods
  double bound = 0;
  bool integral = false;

  // growth: factor of the room for structures.
  void allocate(const Problem<T>& p, Method method, int growth, Workspace& ws) {
    instance.allocate(p, ws);
    error = ws.take<T>(p.num_vars);
    if (method == Method::ad3) {
      rows = ws.take<T>(p.num_dual());
      program.allocate(p, ws);
    }
    structured.allocate(p, growth, ws);
    StructuredFactors<T>* hubs = structured.any() ? &structured : nullptr;
    has_row_form = method == Method::compact && RowForm<T>::possible(p);
    if (has_row_form) by_rows.allocate(p, ws);
    is_tree = has_row_form && LoneTree::is_all_of(p);
    if (is_tree) tree.allocate(p.structured.shapes(0)[0], ws);
    if (method == Method::admm || method == Method::ad3) admm.allocate(p, hubs, ws);
    if (method == Method::compact || method == Method::proximal) proximal.allocate(p, hubs, ws);
  }
};

// The structures of one instance.
struct InstanceStructures {
  std::vector<std::int32_t> count, on, features, num_cuts;
  std::vector<double> prob, dense;
  std::vector<std::uint8_t> cuts;

  void take(const StructuredFactor& factor, bool present) {
    const ActiveSet& set = factor.set;
    const bool by_flow = present && factor.by_flow;
    const int found = present && !by_flow ? set.count : 0;
    count.push_back(found);
    num_cuts.push_back(by_flow ? 1 : factor.present && factor.impossible ? -2 : -1);
    if (by_flow) {
      factor.with_flow([&](const auto& own) {
        const std::size_t begin = cuts.size();
        cuts.resize(begin + own.num_flags());
        own.write_flags(cuts.data() + begin);
      });
    }
    prob.insert(prob.end(), set.p.data, set.p.data + found);
    on.insert(on.end(), set.on(0), set.on(found));
    features.insert(features.end(), set.features(0), set.features(found));
    dense.insert(dense.end(), set.dense(0), set.dense(found));
  }

  void take_tree(const LoneTree& tree) {
    count.push_back(0);
    num_cuts.push_back(0);
    tree.tight_sets([&](Span<const std::uint8_t> members) {
      ++num_cuts.back();
      cuts.insert(cuts.end(), members.begin(), members.end());
    });
  }

  // Only the rows that hold tightly bear on the derivative.
  template <class T>
  void take_rows(RowForm<T>& form, int factors) {
    for (int f = 0; f < factors; ++f) {
      count.push_back(0);
      num_cuts.push_back(0);
      form.tight_rows(f, [&](Span<std::uint8_t> flags) {
        ++num_cuts.back();
        cuts.insert(cuts.end(), flags.begin(), flags.end());
      });
    }
  }
};

// Writes a start for a large and long instance. Returns the passes that it took, over the part that
// took the most; 0 without a start.
template <class T>
int start_by_strips(const Problem<T>& p, const Options& options, ForwardState<T>& state,
                    Control& control, bool may_poll) {
  const Instance<T>& instance = state.instance;
  if constexpr (Precision<T>::finest) {  // float leaves such graphs to double
    if (instance.m < Strips<T>::kManyRows || p.structured.count > 0 || !instance.consistent ||
        !options.finish) {
      return 0;
    }
    try {
      Strips<T> strips(instance, options, control, may_poll);
      if (!strips.solve()) return 0;
      state.start.assign(static_cast<std::size_t>(p.num_dual()), T(0));
      strips.write_multipliers(state.start.data());
      return strips.passes();
    } catch (const std::bad_alloc&) {
      return 0;  // it can do without
    }
  }
  return 0;
}

// Solves a prepared instance by the method; the state then holds the point it ended at. has_rows:
// the compact method may give up, since the instance is then solved by rows.
template <class T>
Result run(const Problem<T>& p, Method method, Options options, const T* warm, bool has_rows,
           ForwardState<T>& state, Control& control, bool may_poll) {
  Instance<T>& instance = state.instance;
  Result result;
  switch (method) {
    case Method::compact: {
      const int passes =
          warm == nullptr ? start_by_strips(p, options, state, control, may_poll) : 0;
      if (passes > 0) warm = state.start.data();
      result = state.proximal.solve_quadratic(instance, warm, options, control, may_poll, has_rows);
      result.iterations = std::max(result.iterations, passes);
      state.point = &state.proximal.point();
      state.certificate = state.proximal.certificate();
      break;
    }
    case Method::proximal:
      result = state.proximal.solve(instance, warm, options, control, may_poll);
      state.point = &state.proximal.point();
      state.certificate = state.proximal.certificate();
      state.bound = state.proximal.bound();
      state.integral = state.proximal.integral();
      break;
    default: {
      options.linear = method == Method::ad3;
      const double asked = options.tol;
      StructuredFactors<T>* hubs = state.structured.any() ? &state.structured : nullptr;
      if (options.linear) {
        options.tol /= 16;  // the gap to the bound is larger than the residuals
        state.program.begin(instance, hubs);
      }
      const double unit = options.linear ? state.program.size() : 1.0;
      result = state.admm.solve(instance, warm, options, unit, control, may_poll);
      DualPoint<T>& at = state.admm.point();
      state.point = &at;
      state.certificate = state.admm.certificate();
      if (!options.linear || result.status == Status::infeasible) break;
      for (int r = 0; r < instance.m; ++r) {
        at.x[r] = clip(at.x[r], instance.lo[r], instance.hi[r]);
      }
      reduced_scores(instance, Span<const T>(at.x), at.z, state.rows);
      const T *eta = instance.eta.data, *hi = instance.hi.data;
      state.bound = state.program.bound(at.z.data, at.x.data, 1.0);
      const double value = state.program.value(at.mu.data, eta, hi, 1.0);
      const double gap = state.bound - value;
      result.dual_residual = std::max(gap, 0.0);
      if (result.status == Status::converged && !state.program.negligible(gap, value, asked)) {
        result.status = Status::max_iter;
      }
      state.integral = state.program.round(at.mu, eta, hi, 1.0, state.bound, asked);
    }
  }
  return result;
}

// Solves an instance by rows, adding those of trees as they are violated. Returns false, with
// nothing written, if that can't be done. Where float is too coarse for it, only that fact is
// written. spent: passes that were spent in vain before.
template <class T>
bool solve_by_rows(const Problem<T>& p, std::int64_t i, const Options& options, const T* warm,
                   int spent, const Outputs<T>& out, InstanceStructures* found,
                   RowFormState<T>& state, Span<T> scratch, Control& control, bool may_poll) {
  RowForm<T>& form = state.form;
  Instance<T>& instance = state.instance;
  if (!form.begin(p, i)) return false;
  const Problem<T>& larger = form.problem();
  if (warm != nullptr) {
    fill(form.tau, T(0));
    form.take_rows(warm, form.tau.data);
  }
  const DualPoint<T>& at = state.compact.point();
  // As exact as the structures are: the finish gives that for another pass or two.
  Options exact = options;
  exact.tol = std::min(options.tol, 1e-12);
  exact.max_iter = std::min(options.max_iter, 300);
  Result result;
  for (bool first = true;; first = false) {
    instance.prepare(larger, 0);
    const T* start = warm != nullptr || !first ? form.tau.data : nullptr;
    const Result now = state.compact.solve(instance, start, exact, control, may_poll);
    result.status = Status::converged;
    result.iterations += now.iterations;
    result.primal_residual = result.dual_residual = now.primal_residual;
    const bool near = now.status == Status::max_iter || now.status == Status::stalled;
    if (now.status != Status::converged && !(near && now.primal_residual <= options.tol)) {
      if (Precision<T>::finest || now.status != Status::stalled) return false;
      result.status = Status::stalled;
      result.primal_residual = std::numeric_limits<double>::infinity();  // nothing to begin from
      write_result(result, i, out);
      return true;
    }
    const auto mu = [&](std::int32_t j) {
      return instance.new_var[j] < 0 ? T(0) : at.mu[instance.new_var[j]];
    };
    const double eps = std::numeric_limits<T>::epsilon();
    const auto cuts = form.add_violated(mu, 4 * now.primal_residual + std::max(64 * eps, 1e-11));
    if (cuts == RowForm<T>::Cuts::none) break;
    if (cuts == RowForm<T>::Cuts::no_room) return false;
    int most = options.max_iter;
    if (options.by_rows != ByRows::always) most = std::min(most, form.worthwhile_passes(mu));
    exact.max_iter = most - result.iterations;
    if (exact.max_iter <= 0) return false;
    fill(form.tau, T(0));
    for (int r = 0; r < instance.m; ++r) form.tau[instance.row[r]] = at.x[r] * instance.scale[r];
  }
  Outputs<T> own;
  own.mu = {out.mu.at(i), 0};
  own.mu_v = {out.mu_v.at(i), 0};
  own.tau = {form.tau.data, 0};
  own.var_side = {out.var_side.at(i), 0};
  own.row_side = {form.row_side.data, 0};
  own.objective = out.objective + i;
  write_solution(larger, instance, StructuredFactors<T>(), at, T(0), scratch, 0, own);
  check_rows(instance, own.mu.at(0), result);
  result.iterations += spent;
  form.give_rows(form.tau.data, out.tau.at(i));
  form.give_rows(form.row_side.data, out.row_side.at(i));
  found->take_rows(form, p.structured.count);
  write_result(result, i, out);
  return true;
}

// Solves an instance that is nothing but a tree; if that can't be done, nothing is written.
template <class T>
LoneTree::End solve_tree(const Problem<T>& p, std::int64_t i, const Options& options,
                         const Outputs<T>& out, InstanceStructures* found, LoneTree& tree,
                         Control& control, bool may_poll) {
  const bool single_root = p.structured.shapes(0)[1] != 0,
             always = options.by_rows == ByRows::always;
  const LoneTree::End end = tree.solve(p.eta_u.at(i), p.mask.at(i), single_root, always,
                                       options.max_iter, control, may_poll);
  if (end != LoneTree::End::solved) return end;
  tree.write(out.mu.at(i), out.var_side.at(i));
  out.objective[i] = objective(p, i, out.mu.at(i), out.mu_v.at(i), 1.0);
  found->take_tree(tree);
  Result result;
  result.status = Status::converged;
  result.iterations = tree.passes;
  result.primal_residual = result.dual_residual = tree.residual;
  write_result(result, i, out);
  return end;
}

template <class T>
void solve_one(const Problem<T>& p, std::int64_t i, Method method, const Options& options,
               const T* warm, const Outputs<T>& out, InstanceStructures* found,
               ForwardState<T>& state, Control& control, bool may_poll) {
  Instance<T>& instance = state.instance;
  StructuredFactors<T>& structured = state.structured;
  const bool has_rows =
      state.has_row_form && (options.by_rows == ByRows::always || options.by_rows == ByRows::dense);
  bool dense = has_rows;
  if (has_rows && state.is_tree) {
    const auto end = solve_tree(p, i, options, out, found, state.tree, control, may_poll);
    if (end == LoneTree::End::solved) return;
    dense = end != LoneTree::End::sparse;
  }
  dense = dense && (options.by_rows == ByRows::always || RowForm<T>::is_dense(p, i));
  if (dense && solve_by_rows(p, i, options, warm, 0, out, found, state.by_rows, state.error,
                             control, may_poll)) {
    return;
  }
  instance.prepare(p, i, method == Method::compact || method == Method::proximal);
  if (structured.any() && !structured.prepare(p, instance, i, true)) instance.consistent = false;
  const bool may_give_up = has_rows && !dense;
  Result result = run(p, method, options, warm, may_give_up, state, control, may_poll);
  if (may_give_up && state.proximal.gave_up()) {
    const int spent = result.iterations;
    Options rest = options;
    rest.by_rows = ByRows::always;
    rest.max_iter -= spent;
    if (solve_by_rows(p, i, rest, warm, spent, out, found, state.by_rows, state.error, control,
                      may_poll)) {
      return;
    }
    result = run(p, method, rest, warm, false, state, control, may_poll);
    result.iterations += spent;
  }
  const bool linear = method == Method::proximal || method == Method::ad3;
  if (options.by_rows == ByRows::listed && result.status != Status::infeasible) {
    structured.list_structures(!linear, result.primal_residual);
  }
  if (structured.any() && structured.trouble() == ActiveSetResult::no_room) return;
  if (structured.any() && structured.trouble() == ActiveSetResult::stopped) {
    control.stop.store(true, std::memory_order_relaxed);
  }
  if (linear) out.integral[i] = 0;
  if (result.status == Status::infeasible) {
    write_infeasible(p, instance, state.certificate, i, out);
    if (linear) out.upper_bound[i] = -std::numeric_limits<double>::infinity();
  } else if (linear) {
    write_vertex(p, instance, structured, *state.point, i, out);
    const double value = out.objective[i];
    const double size =
        method == Method::ad3 ? state.program.size() : state.proximal.program().size();
    out.integral[i] = state.integral;
    // No bound is below a solution, though large multipliers may round it so; and what differs from
    // a structure by rounding does not differ.
    const bool met = state.integral && state.bound <= value + 1e-14 * (size + std::fabs(value));
    const bool below = result.status == Status::converged && state.bound < value;
    out.upper_bound[i] = met || below ? value : state.bound;
  } else {
    // The compact dual's error is in its gradient; ADMM's copies disagree by its residuals.
    const double apart = std::max(result.primal_residual, result.dual_residual);
    const T error = method == Method::compact ? T(0) : static_cast<T>(apart);
    write_solution(p, instance, structured, *state.point, error, state.error, i, out);
    check_rows(instance, out.mu.at(i), result);
  }
  for (const StructuredFactor& f : structured.all()) {
    found->take(f, f.present && result.status != Status::infeasible);
  }
  write_result(result, i, out);
}

}  // namespace factormax
