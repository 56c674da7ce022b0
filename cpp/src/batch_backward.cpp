#include <algorithm>
#include <limits>
#include <memory>
#include <numeric>

#include "factormax/backward.hpp"
#include "factormax/batch.hpp"
#include "factormax/components.hpp"
#include "factormax/lone_rows.hpp"
#include "factormax/parallel.hpp"
#include "factormax/structured/lone_tree.hpp"
#include "factormax/structured/row_form.hpp"
#include "factormax/structured/structured.hpp"
#include "local_problem.hpp"
#include "score_rows.hpp"
#include "structure_lists.hpp"
#include "thread_memory.hpp"

namespace factormax {
namespace {

template <class T>
struct BackwardState {
  Instance<T> instance;
  StructuredFactors<T> structured;
  ReducedSystem<T> system;
  Span<T> d, rhs;

  // growth: factor of the room for structures; 0 if there are none, as all was solved by rows.
  void allocate(const Problem<T>& p, int growth, Workspace& ws) {
    d = ws.take<T>(p.num_vars);
    if (growth > 0) {
      instance.allocate(p, ws);
      structured.allocate(p, growth, ws);
      system.allocate(p, hubs(), ws);
      rhs = ws.take<T>(p.num_dual());
    }
  }
  // most_lists: the most lists of flags of a factor.
  void allocate_rows(const Problem<T>& p, int most_lists, Workspace& ws) {
    is_tree = most_lists < LoneTree::kMostSets && LoneTree::is_all_of(p);
    if (is_tree) return tree.allocate(p.structured.shapes(0)[0], ws);
    const Problem<T> size = form.largest(p);
    form.allocate(p, ws);
    row_instance.allocate(size, ws);
    row_system.allocate(size, nullptr, ws);
    row_rhs = ws.take<T>(size.num_dual());
  }

  LoneTree tree;
  bool is_tree = false;  // it takes the place of the rows

  RowForm<T> form;
  Instance<T> row_instance;
  ReducedSystem<T> row_system;
  Span<T> row_rhs;

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
    grads.residual[i] = state.is_tree ? vjp_of_tree(p, i, grads, at, g, state.tree)
                                      : vjp_by_rows(p, i, grads, at, g, state);
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
                          state.system, state.hubs(), state.d, state.rhs);
}

// Differentiates instances of one layout, one after the other on one thread.
template <class T>
class BackwardWorker {
 public:
  BackwardWorker(const Problem<T>& problem, const Needs& needs, Control& control)
      : problem_(problem), control_(control), leased_([&](BackwardState<T>& state, Workspace& ws) {
          state.allocate(problem, needs.growth(), ws);
          if (needs.rows) state.allocate_rows(problem, needs.most_lists, ws);
        }) {
    if (!leased_.valid()) control.fail_for_memory();
  }

  void operator()(std::int64_t i, const BatchGradients<T>& grads, const StructureOffsets& at,
                  bool is_caller) {
    if (control_.stopped(is_caller)) return;
    for (ReducedSystem<T>* system : {&leased_.state.system, &leased_.state.row_system}) {
      system->control = &control_;
      system->may_poll = is_caller;
    }
    vjp_one(problem_, i, grads, at, leased_.state);
  }

 private:
  const Problem<T>& problem_;
  Control& control_;
  Leased<BackwardState<T>> leased_;
};

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
               const StructureOffsets& at, Control& control) {
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
        (*worker)(i, at, is_caller);
      }
    };
  };
  parallel_for(grads.summed.num_blocks(batch), make_worker, [&] { control.stopped(true); });
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
                    const StructureOffsets& at, Control& control) {
  const Components& components = *problem.components;
  const int chunks = components.num_chunks(), factors = problem.structured.count;
  std::vector<Needs> needs(components.num_kinds());
  const std::vector<int> leaders = solved_by_rows_with(problem);
  for (int f = 0; f < factors; ++f)
    needs[components[components.of_factor(f)].kind].structures = false;
  for (std::int64_t k = 0; k < batch * factors; ++k) {
    const int f = static_cast<int>(k % factors);
    needs[components[components.of_factor(f)].kind].add(leaders[f] >= 0 && grads.num_cuts[k] >= 0,
                                                        grads.count[k], grads.num_cuts[k]);
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
            worst = worse(worst, (*workers)[k](i, components[c], grads, at, is_caller));
          }
        }
      }
    };
  };
  parallel_for(blocks * chunks, make_worker, [&] { control.stopped(true); });
  for (std::int64_t i = 0; i < batch; ++i) {
    grads.residual[i] =
        std::accumulate(&residuals[i * chunks], &residuals[i * chunks] + chunks, 0.0, worse);
  }
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
std::vector<int> solved_by_rows_with(const Problem<T>& problem) {
  std::vector<int> leader(problem.structured.count, -1);
  const auto lead = [&](const Layout& layout, const auto& number) {
    Problem<T> own;
    static_cast<Layout&>(own) = layout;
    if (!RowForm<T>::possible(own)) return;
    for (int k = 0; k < layout.structured.count; ++k) leader[number(k)] = number(0);
  };
  if (problem.components == nullptr) {
    lead(problem, [](int k) { return k; });
    return leader;
  }
  const Components& components = *problem.components;
  for (int c = 0; c < components.count(); ++c) {
    const Component& own = components[c];
    lead(components.layout(own.kind), [&](int k) { return own.factors.index[k]; });
  }
  return leader;
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
  StructureOffsets at;
  if (problem.structured.count > 0) at = offsets_of(problem, batch, grads.count, grads.num_cuts);
  const auto differentiate = problem.components == nullptr ? vjp_whole<T> : vjp_components<T>;
  differentiate(problem, batch, grads, at, control);
  if (!grads.summed.runs.empty()) add_blocks(grads.summed, batch);
}

#define FACTORMAX_INSTANTIATE(T)                                              \
  template std::vector<StructureSizes> structure_sizes<T>(const Problem<T>&); \
  template std::vector<int> solved_by_rows_with<T>(const Problem<T>&);        \
  template int list_length<T>(const Problem<T>&, int);                        \
  template void vjp_batch<T>(const Problem<T>&, std::int64_t, const BatchGradients<T>&, Control&);

FACTORMAX_INSTANTIATE(float)
FACTORMAX_INSTANTIATE(double)

}  // namespace factormax
