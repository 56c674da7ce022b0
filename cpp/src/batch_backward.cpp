#include <algorithm>
#include <limits>
#include <memory>
#include <numeric>

#include "backward_worker.hpp"
#include "factormax/batch.hpp"
#include "factormax/components.hpp"
#include "factormax/lone_rows.hpp"
#include "factormax/parallel.hpp"
#include "factormax/structured/row_form.hpp"
#include "local_problem.hpp"
#include "masked_parts.hpp"
#include "score_rows.hpp"
#include "structure_lists.hpp"

namespace factormax {
namespace {

// Differentiates whole instances.
template <class T>
class WholeVjp {
 public:
  WholeVjp(const Problem<T>& problem, const Needs& needs, const BatchGradients<T>& grads,
           Control& control)
      : scores_(problem, control),
        grads_(grads),
        control_(control),
        memory_(is_summed() ? std::size_t(problem.num_scores()) * sizeof(T) : 0),
        worker_(scores_.problem(), needs, control) {
    if (is_summed()) grads_.grad_eta_v = {memory_.template take<T>(problem.num_scores()).data, 0};
    if (!memory_.valid()) control.fail_for_memory();
  }

  void operator()(std::int64_t i, const StructureOffsets& at, bool is_caller) {
    if (control_.stop.load(std::memory_order_relaxed)) return;
    scores_.enter(i);
    worker_(i, grads_, at, is_caller);
    if (!is_summed() || control_.stop.load(std::memory_order_relaxed)) return;
    add_gradient(grads_.summed, all_scores(scores_.problem()), i, grads_.grad_eta_v.at(i));
  }

 private:
  bool is_summed() const { return !grads_.summed.runs.empty(); }

  InstanceScores<T> scores_;
  BatchGradients<T> grads_;
  Control& control_;
  Workspace memory_;
  BackwardWorker<T> worker_;
};

template <class T>
void vjp_whole(const Problem<T>& problem, std::int64_t batch, const BatchGradients<T>& grads,
               const StructureOffsets& at, Control& control, bool may_poll) {
  Needs needs;
  if (problem.structured.count > 0) {
    needs.structures = false;
    const bool possible = RowForm<T>::possible(problem);
    for (std::int64_t k = 0; k < batch * problem.structured.count; ++k) {
      needs.add(possible && grads.num_cuts[k] >= 0, grads.count[k], grads.num_cuts[k]);
    }
  }
  const std::int64_t block = grads.summed.block;
  const auto make_worker = [&]() -> Worker {
    auto worker = std::make_shared<WholeVjp<T>>(problem, needs, grads, control);
    return [&, worker](std::int64_t item, bool is_caller) {
      for (std::int64_t i = item * block; i < std::min((item + 1) * block, batch); ++i) {
        (*worker)(i, at, is_caller&& may_poll);
      }
    };
  };
  parallel_for(grads.summed.num_blocks(batch), make_worker, [&] { control.stopped(may_poll); });
}

// ---- Components

// Differentiates components of one kind.
template <class T>
class ComponentVjp {
 public:
  ComponentVjp(const Problem<T>& whole, int kind, const Needs& needs, Control& control)
      : factors_(whole.structured.count),
        local_(whole, whole.components->layout(kind)),
        offsets_(local_.problem().structured.count),
        memory_(bytes()),
        worker_(local_.problem(), needs, control) {
    if (memory_.valid()) {
      allocate(memory_);
    } else {
      control.fail_for_memory();
    }
  }

  // Returns the residual.
  double operator()(std::int64_t i, const Component& component, const BatchGradients<T>& grads,
                    const StructureOffsets& at, bool is_caller) {
    local_.gather(component, i);
    const Indices &vars = component.vars, &dual = component.dual, &scores = component.scores;
    double residual = 0;
    BatchGradients<T> own;
    own.grad_mu.data = vars.gather(grads.grad_mu.at(i), grad_mu_.data);
    own.grad_mu_v.data = scores.gather(grads.grad_mu_v.at(i), grad_mu_v_.data);
    own.var_side.data = vars.gather(grads.var_side.at(i), var_side_.data);
    own.row_side.data = dual.gather(grads.row_side.at(i), row_side_.data);
    own.status = grads.status + i;
    own.grad_eta_u.data = vars.place(grads.grad_eta_u.at(i), grad_eta_u_.data);
    own.grad_eta_v.data = scores.place(grads.grad_eta_v.at(i), grad_eta_v_.data);
    own.residual = &residual;
    if (component.factors.count > 0) {
      structures_.gather(grads, at, i * factors_, component.factors, own);
    }
    worker_(0, own, offsets_, is_caller);
    vars.scatter(own.grad_eta_u.data, grads.grad_eta_u.at(i));
    if (grads.summed.runs.empty()) {
      scores.scatter(own.grad_eta_v.data, grads.grad_eta_v.at(i));
    } else {
      add_gradient(grads.summed, scores, i, own.grad_eta_v.data);
    }
    return residual;
  }

 private:
  std::size_t bytes() {
    Workspace counter;
    allocate(counter);
    return counter.used();
  }

  void allocate(Workspace& ws) {
    const Layout& p = local_.problem();
    local_.allocate(ws);
    for (Span<T>* a : {&grad_mu_, &grad_eta_u_}) *a = ws.take<T>(p.num_vars);
    for (Span<T>* a : {&grad_mu_v_, &grad_eta_v_}) *a = ws.take<T>(p.num_scores());
    var_side_ = ws.take<std::int8_t>(p.num_vars);
    row_side_ = ws.take<std::int8_t>(p.num_dual());
  }

  int factors_;  // structured factors of the whole
  LocalProblem<T> local_;
  Span<T> grad_mu_, grad_mu_v_, grad_eta_u_, grad_eta_v_;
  Span<std::int8_t> var_side_, row_side_;
  LocalStructures structures_;
  StructureOffsets offsets_;  // of one instance, which begins at 0
  Workspace memory_;
  BackwardWorker<T> worker_;
};

template <class T>
void vjp_components(const Problem<T>& problem, std::int64_t batch, const BatchGradients<T>& grads,
                    const StructureOffsets& at, Control& control, bool may_poll) {
  const Components& components = *problem.components;
  const int chunks = components.num_chunks(), factors = problem.structured.count;
  std::vector<Needs> needs(components.num_kinds());
  std::vector<std::uint8_t> possible;  // by rows, for each kind
  for (int kind = 0; kind < components.num_kinds(); ++kind) {
    Problem<T> own;
    static_cast<Layout&>(own) = components.layout(kind);
    possible.push_back(RowForm<T>::possible(own));
    needs[kind].structures = own.structured.count == 0;
  }
  for (std::int64_t k = 0; k < batch * factors; ++k) {
    const int kind = components[components.of_factor(static_cast<int>(k % factors))].kind;
    needs[kind].add(possible[kind] != 0 && grads.num_cuts[k] >= 0, grads.count[k],
                    grads.num_cuts[k]);
  }
  std::vector<double> residuals(batch * chunks, 0.0);
  const std::int64_t block = grads.summed.block, blocks = grads.summed.num_blocks(batch);
  const auto make_worker = [&]() -> Worker {
    auto workers = std::make_shared<ByKind<ComponentVjp<T>>>();
    return [&, workers](std::int64_t item, bool is_caller) {
      const std::int64_t chunk = item / blocks, first = item % blocks * block;
      const Span<const Components::Run> runs = components.chunk(static_cast<int>(chunk));
      workers->enter(runs, [&](int kind) {
        return std::make_unique<ComponentVjp<T>>(problem, kind, needs[kind], control);
      });
      for (std::int64_t i = first; i < std::min(first + block, batch); ++i) {
        double& worst = residuals[i * chunks + chunk];
        for (int k = 0; k < runs.size; ++k) {
          for (int c = runs[k].first; c < runs[k].last; ++c) {
            if (control.stop.load(std::memory_order_relaxed)) return;
            const double own = (*workers)[k](i, components[c], grads, at, is_caller && may_poll);
            worst = worse(worst, own);
          }
        }
      }
    };
  };
  parallel_for(blocks * chunks, make_worker, [&] { control.stopped(may_poll); });
  for (std::int64_t i = 0; i < batch; ++i) {
    grads.residual[i] =
        std::accumulate(&residuals[i * chunks], &residuals[i * chunks] + chunks, 0.0, worse);
  }
}

// ---- Parts that masks leave

// Which variables a solution has.
template <class T>
struct Solved {
  const BatchGradients<T>& grads;

  bool operator()(std::int64_t i, int j) const {
    return grads.var_side.at(i)[j] != static_cast<std::int8_t>(Side::absent);
  }
};

// Instance i as a batch of one.
template <class T>
BatchGradients<T> alone(BatchGradients<T> g, std::int64_t i, int factors,
                        const StructureOffsets& at) {
  const auto row = [i](auto& all) { all = {all.at(i), 0}; };
  row(g.grad_mu);
  row(g.grad_mu_v);
  row(g.var_side);
  row(g.row_side);
  row(g.grad_eta_u);
  row(g.grad_eta_v);
  g.summed = {};
  g.status += i;
  g.residual += i;
  const std::int64_t first = i * factors;
  g.count += first;
  g.num_cuts += first;
  g.prob += at.structure[first];
  if (g.grad_prob != nullptr) g.grad_prob += at.structure[first];
  g.on += at.on[first];
  g.features += at.features[first];
  g.dense += at.dense[first];
  g.cuts += at.cuts[first];
  return g;
}

// may_poll: whether this is the thread that `control` polls on.
template <class T>
void vjp_now(const Problem<T>& problem, std::int64_t batch, const BatchGradients<T>& grads,
             const StructureOffsets& at, Control& control, bool may_poll) {
  const auto differentiate = problem.components == nullptr ? vjp_whole<T> : vjp_components<T>;
  differentiate(problem, batch, grads, at, control, may_poll);
}

template <class T>
void vjp_each_masked(const Problem<T>& problem, std::int64_t batch, const BatchGradients<T>& grads,
                     const StructureOffsets& at, Control& control) {
  const ScoreSums<T>& summed = grads.summed;
  const auto differentiate = [&](std::int64_t i, std::vector<T>& row, bool is_caller) {
    const auto parts = parts_of(problem, i, Solved<T>{grads});
    const Problem<T> own = alone(parts == nullptr ? problem : in_parts(problem, *parts), i);
    BatchGradients<T> one = alone(grads, i, problem.structured.count, at);
    if (!row.empty()) one.grad_eta_v = {row.data(), 0};
    vjp_now(own, 1, one, offsets_of(own, 1, one.count, one.num_cuts), control, is_caller);
    if (row.empty() || control.stop.load(std::memory_order_relaxed)) return;
    add_gradient(summed, all_scores(problem), i, row.data());
  };
  const auto make_worker = [&]() -> Worker {
    const std::size_t scores = summed.runs.empty() ? 0 : std::size_t(problem.num_scores());
    auto row = std::make_shared<std::vector<T>>(scores);
    return [&, row](std::int64_t item, bool is_caller) {
      const std::int64_t end = std::min((item + 1) * summed.block, batch);
      for (std::int64_t i = item * summed.block; i < end; ++i) {
        if (control.stopped(is_caller)) return;
        differentiate(i, *row, is_caller);
      }
    };
  };
  parallel_for(summed.num_blocks(batch), make_worker, [&] { control.stopped(true); });
}

// Structured factors are differentiated in the parts that they were solved in, each by rows or by
// structures. Rows are as quick in one piece.
template <class T>
void vjp_masked(const Problem<T>& problem, std::int64_t batch, const BatchGradients<T>& grads,
                Control& control) {
  const StructureOffsets at = offsets_of(problem, batch, grads.count, grads.num_cuts);
  const Solved<T> there{grads};
  const bool may_part = batch > 0 && Components::may_part(problem);
  const Masked masked = may_part ? how_masked(problem.num_vars, batch, there) : Masked::no;
  if (masked == Masked::each_own) return vjp_each_masked(problem, batch, grads, at, control);
  const auto parts = masked == Masked::alike ? parts_of(problem, 0, there) : nullptr;
  if (parts == nullptr) return vjp_now(problem, batch, grads, at, control, true);
  vjp_now(in_parts(problem, *parts), batch, grads, at, control, true);
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
  switch (static_cast<OracleKind>(s.kind[f])) {
    case OracleKind::sequence:
      return SequenceFlow::num_flags(oracle::SequenceShape(s.shapes(f)));
    case OracleKind::sequence_budget:
      return BudgetFlow::num_flags(s.vars(f).size);
    default:
      return RowForm<T>::list_length(s, f);
  }
}

template <class T>
void vjp_batch(const Problem<T>& solved, std::int64_t batch, const BatchGradients<T>& grads,
               Control& control) {
  if (solved.lone_rows != nullptr) return vjp_lone_rows(solved, batch, grads, control);
  Problem<T> problem = solved;
  problem.eta_u = {};  // all that matters of the scores is in the sides
  if (problem.structured.count > 0) {
    vjp_masked(problem, batch, grads, control);
  } else {
    vjp_now(problem, batch, grads, StructureOffsets(), control, true);
  }
  if (!grads.summed.runs.empty()) add_blocks(grads.summed, batch);
}

#define FACTORMAX_INSTANTIATE(T)                                              \
  template std::vector<StructureSizes> structure_sizes<T>(const Problem<T>&); \
  template int list_length<T>(const Problem<T>&, int);                        \
  template void vjp_batch<T>(const Problem<T>&, std::int64_t, const BatchGradients<T>&, Control&);

FACTORMAX_INSTANTIATE(float)
FACTORMAX_INSTANTIATE(double)

}  // namespace factormax
