#include "factormax/batch.hpp"

#include <algorithm>
#include <limits>
#include <memory>

#include "factormax/components.hpp"
#include "factormax/lone_rows.hpp"
#include "factormax/parallel.hpp"
#include "forward_worker.hpp"
#include "local_problem.hpp"
#include "masked_parts.hpp"

namespace factormax {
namespace {

template <class Part, class U>
void join(const std::vector<Part>& parts, std::vector<U> Part::* list, std::vector<U>& all) {
  std::size_t size = 0;
  for (const Part& part : parts) size += (part.*list).size();
  all.reserve(size);
  for (const Part& part : parts) all.insert(all.end(), (part.*list).begin(), (part.*list).end());
}

// Part: the structures of an instance.
template <class Part>
void join(const std::vector<Part>& parts, FoundStructures& found) {
  join(parts, &Part::count, found.count);
  join(parts, &Part::prob, found.prob);
  join(parts, &Part::on, found.on);
  join(parts, &Part::features, found.features);
  join(parts, &Part::dense, found.dense);
  join(parts, &Part::num_cuts, found.num_cuts);
  join(parts, &Part::cuts, found.cuts);
}

// ---- Components

// How some components of an instance ended, taken together.
struct Total {
  double objective = 0, upper_bound = 0, primal_residual = 0, dual_residual = 0;
  std::int32_t iterations = 0, oracle_calls = 0;
  std::int32_t status = static_cast<std::int32_t>(Status::converged);
  std::int32_t infeasible = -1;  // the component, the first one in the order of the variables
  std::uint8_t integral = 1;

  static int severity(std::int32_t status) {
    switch (static_cast<Status>(status)) {
      case Status::infeasible:
        return 4;
      case Status::interrupted:
        return 3;
      case Status::max_iter:
        return 2;
      case Status::stalled:
        return 1;
      default:
        return 0;
    }
  }

  void add(const Total& other, const Components& components) {
    objective += other.objective;
    upper_bound += other.upper_bound;
    primal_residual = worse(other.primal_residual, primal_residual);
    dual_residual = worse(other.dual_residual, dual_residual);
    iterations = std::max(iterations, other.iterations);
    oracle_calls += other.oracle_calls;
    integral &= other.integral;
    if (severity(other.status) > severity(status)) status = other.status;
    if (other.infeasible < 0) return;
    const auto first = [&](int c) {
      return components[c].vars.count > 0 ? components[c].vars.index[0] : -1;
    };
    if (infeasible < 0 || first(other.infeasible) < first(infeasible))
      infeasible = other.infeasible;
  }

  template <class T>
  void write(std::int64_t i, const Outputs<T>& out, bool linear) const {
    out.objective[i] = objective;
    out.primal_residual[i] = primal_residual;
    out.dual_residual[i] = dual_residual;
    out.iterations[i] = iterations;
    out.oracle_calls[i] = oracle_calls;
    out.status[i] = status;
    if (!linear) return;
    out.upper_bound[i] = upper_bound;
    out.integral[i] = integral;
  }
};

// Room for the answer of a component whose numbers are scattered over the instance's.
template <class T>
struct Answers {
  Span<T> mu, mu_v, tau, warm;
  Span<std::int8_t> var_side, row_side;

  void allocate(const Layout& p, Workspace& ws) {
    mu = ws.take<T>(p.num_vars);
    mu_v = ws.take<T>(p.num_scores());
    tau = ws.take<T>(p.num_dual());
    warm = ws.take<T>(p.num_dual());
    var_side = ws.take<std::int8_t>(p.num_vars);
    row_side = ws.take<std::int8_t>(p.num_dual());
  }
};

// Solves components of one kind, one after the other on one thread.
template <class T>
class ComponentWorker {
 public:
  ComponentWorker(const Problem<T>& whole, int kind, Method method, Control& control)
      : control_(control),
        local_(whole, whole.components->layout(kind)),
        memory_(bytes(whole, kind)),
        worker_(local_.problem(), method, control) {
    if (memory_.valid()) {
      local_.allocate(memory_);
      answers_.allocate(local_.problem(), memory_);
    } else {
      control_.fail_for_memory();
    }
  }

  // What it uses besides the memory of the solve.
  static std::size_t bytes(const Problem<T>& whole, int kind) {
    Workspace counter;
    LocalProblem<T>(whole, whole.components->layout(kind)).allocate(counter);
    Answers<T>().allocate(whole.components->layout(kind), counter);
    return counter.used();
  }

  // Solves component c of instance i, and adds how that ended to `ended`.
  void operator()(std::int64_t i, int c, const Component& component, const Options& options,
                  const T* warm, const Outputs<T>& out, InstanceStructures* found, Total& ended,
                  bool is_caller) {
    if (control_.stop.load(std::memory_order_relaxed)) return;
    local_.gather(component, i);
    const Indices &vars = component.vars, &dual = component.dual, &scores = component.scores;
    Outputs<T> own;
    own.mu.data = vars.place(out.mu.at(i), answers_.mu.data);
    own.mu_v.data = scores.place(out.mu_v.at(i), answers_.mu_v.data);
    own.tau.data = dual.place(out.tau.at(i), answers_.tau.data);
    own.var_side.data = vars.place(out.var_side.at(i), answers_.var_side.data);
    own.row_side.data = dual.place(out.row_side.at(i), answers_.row_side.data);
    own.objective = &ended.objective;
    own.primal_residual = &ended.primal_residual;
    own.dual_residual = &ended.dual_residual;
    own.iterations = &ended.iterations;
    own.status = &ended.status;
    own.oracle_calls = &ended.oracle_calls;
    own.upper_bound = &ended.upper_bound;
    own.integral = &ended.integral;
    worker_(0, options, dual.gather(warm, answers_.warm.data), own, found, is_caller);
    if (control_.stop.load(std::memory_order_relaxed)) return;
    ended.infeasible = ended.status == static_cast<std::int32_t>(Status::infeasible) ? c : -1;
    vars.scatter(own.mu.data, out.mu.at(i));
    scores.scatter(own.mu_v.data, out.mu_v.at(i));
    dual.scatter(own.tau.data, out.tau.at(i));
    vars.scatter(own.var_side.data, out.var_side.at(i));
    dual.scatter(own.row_side.data, out.row_side.at(i));
  }

 private:
  Control& control_;
  LocalProblem<T> local_;
  Answers<T> answers_;
  Workspace memory_;
  ForwardWorker<T> worker_;
};

// If a component has no solution, nothing is left of its instance but the proof.
template <class T>
void spoil(const Problem<T>& p, std::int64_t i, int guilty, const Outputs<T>& out) {
  const T nan = std::numeric_limits<T>::quiet_NaN();
  const std::uint8_t* mask = p.mask.at(i);
  const T* eta_u = p.eta_u.at(i);
  for (int j = 0; j < p.num_vars; ++j) {
    out.mu.at(i)[j] = is_present(mask, eta_u, j) ? nan : T(0);
  }
  std::fill_n(out.mu_v.at(i), p.num_scores(), nan);
  for (int c = 0; c < p.components->count(); ++c) {
    const Indices& dual = (*p.components)[c].dual;
    for (int k = 0; k < dual.count && c != guilty; ++k) out.tau.at(i)[dual.index[k]] = 0;
  }
  std::fill_n(out.var_side.at(i), p.num_vars, static_cast<std::int8_t>(Side::absent));
  std::fill_n(out.row_side.at(i), p.num_dual(), static_cast<std::int8_t>(Side::absent));
}

// The structures of an instance's components, in the order of the factors.
template <class T>
class StructureJoiner {
 public:
  explicit StructureJoiner(const Problem<T>& p)
      : components_(*p.components), sizes_(structure_sizes(p)), at_(components_.num_structured()) {
    for (int f = 0; f < p.structured.count; ++f) lengths_.push_back(list_length(p, f));
  }

  // parts: one per component that has structured factors. infeasible: the infeasible component, or
  // -1; if there is one, there are no structures.
  void append(const InstanceStructures* parts, int infeasible, FoundStructures& all) {
    std::fill(at_.begin(), at_.end(), Place());
    for (std::size_t f = 0; f < sizes_.size(); ++f) {
      const int c = components_.of_factor(static_cast<int>(f));
      const int number = components_[c].structures;
      const InstanceStructures& part = parts[number];
      Place& at = at_[number];
      const bool lost = infeasible >= 0;
      const std::int32_t cuts = part.num_cuts[at.factor];
      const std::int32_t count = lost ? 0 : part.count[at.factor];
      all.count.push_back(count);
      all.num_cuts.push_back(lost && c != infeasible ? kByStructures : cuts);
      ++at.factor;
      if (lost) continue;
      append(part.prob, count, at.prob, all.prob);
      append(part.on, count * sizes_[f].slots, at.on, all.on);
      append(part.features, count * sizes_[f].feature_slots, at.features, all.features);
      append(part.dense, count * sizes_[f].dense, at.dense, all.dense);
      append(part.cuts, std::max(cuts, 0) * lengths_[f], at.cuts, all.cuts);
    }
  }

 private:
  static constexpr std::int32_t kByStructures = -1;  // in num_cuts

  struct Place {
    std::size_t factor = 0, prob = 0, on = 0, features = 0, dense = 0, cuts = 0;
  };

  template <class U>
  static void append(const std::vector<U>& from, std::int64_t count, std::size_t& begin,
                     std::vector<U>& to) {
    to.insert(to.end(), from.begin() + begin, from.begin() + begin + count);
    begin += static_cast<std::size_t>(count);
  }

  const Components& components_;
  std::vector<StructureSizes> sizes_;
  std::vector<int> lengths_;
  std::vector<Place> at_;
};

// The answer does not depend on which threads solve which components: sums are taken chunk by
// chunk.
template <class T>
void solve_components(const Problem<T>& problem, std::int64_t batch, Method method,
                      const Options& options, Batched<const T> warm, const Outputs<T>& out,
                      FoundStructures& found, Control& control, bool may_poll) {
  const Components& components = *problem.components;
  const int chunks = components.num_chunks(), structured = components.num_structured();
  std::vector<Total> totals(batch * chunks);
  std::vector<InstanceStructures> parts(batch * structured);
  const auto make_worker = [&]() -> Worker {
    auto workers = std::make_shared<ByKind<ComponentWorker<T>>>();
    return [&, workers](std::int64_t item, bool is_caller) {
      // One chunk of all instances comes before the next chunk: a thread keeps to the same kinds.
      const std::int64_t chunk = item / batch, i = item % batch;
      const Span<const Components::Run> runs = components.chunk(static_cast<int>(chunk));
      workers->enter(runs, [&](int kind) {
        return std::make_unique<ComponentWorker<T>>(problem, kind, method, control);
      });
      for (int k = 0; k < runs.size; ++k) {
        for (int c = runs[k].first; c < runs[k].last; ++c) {
          const Component& component = components[c];
          InstanceStructures* own = nullptr;
          if (component.structures >= 0) own = &parts[i * structured + component.structures];
          Total ended;
          (*workers)[k](i, c, component, options, warm.at(i), out, own, ended,
                        is_caller && may_poll);
          totals[i * chunks + chunk].add(ended, components);
        }
      }
    };
  };
  parallel_for(batch * chunks, make_worker, [&] { control.stopped(may_poll); });
  if (control.stop.load()) return;
  const bool linear = method == Method::proximal || method == Method::ad3;
  StructureJoiner<T> joiner(problem);
  for (std::int64_t i = 0; i < batch; ++i) {
    Total all;
    for (int k = 0; k < chunks; ++k) all.add(totals[i * chunks + k], components);
    if (all.infeasible >= 0) {
      all.objective = all.upper_bound = -std::numeric_limits<double>::infinity();
      all.integral = 0;
      spoil(problem, i, all.infeasible, out);
    }
    all.write(i, out, linear);
    joiner.append(parts.data() + i * structured, all.infeasible, found);
  }
}

template <class T>
void solve_whole(const Problem<T>& problem, std::int64_t batch, Method method,
                 const Options& options, Batched<const T> warm, const Outputs<T>& out,
                 FoundStructures& found, Control& control, bool may_poll) {
  const bool structured = problem.structured.count > 0;
  std::vector<InstanceStructures> parts(structured ? batch : 0);
  const auto make_worker = [&]() -> Worker {
    auto scores = std::make_shared<InstanceScores<T>>(problem, control);
    auto worker = std::make_shared<ForwardWorker<T>>(scores->problem(), method, control);
    return [&, scores, worker](std::int64_t i, bool is_caller) {
      scores->enter(i);
      (*worker)(i, options, warm.at(i), out, structured ? &parts[i] : nullptr,
                is_caller && may_poll);
    };
  };
  parallel_for(batch, make_worker, [&] { control.stopped(may_poll); });
  if (control.stop.load()) return;
  join(parts, found);
}

// may_poll: whether this is the thread that `control` polls on.
template <class T>
void solve_now(const Problem<T>& problem, std::int64_t batch, Method method, const Options& options,
               Batched<const T> warm, const Outputs<T>& out, FoundStructures& found,
               Control& control, bool may_poll) {
  const auto solve = problem.components == nullptr ? solve_whole<T> : solve_components<T>;
  solve(problem, batch, method, options, warm, out, found, control, may_poll);
}

// Which variables masks and scores leave.
template <class T>
struct Scored {
  const Problem<T>& p;

  bool operator()(std::int64_t i, int j) const {
    return is_present(p.mask.at(i), p.eta_u.at(i), j);
  }
};

// Instances whose masks differ are cut into parts one by one. A thread that has no instance left
// helps with the parts of others.
template <class T>
void solve_each_masked(const Problem<T>& problem, std::int64_t batch, Method method,
                       const Options& options, Batched<const T> warm, const Outputs<T>& out,
                       FoundStructures& found, Control& control) {
  std::vector<FoundStructures> each(batch);
  const auto make_worker = [&]() -> Worker {
    return [&](std::int64_t i, bool is_caller) {
      if (control.stopped(is_caller)) return;
      const auto parts = parts_of(problem, i, Scored<T>{problem});
      const Problem<T> own = alone(parts == nullptr ? problem : in_parts(problem, *parts), i);
      solve_now<T>(own, 1, method, options, {warm.at(i), 0}, alone(out, i), each[i], control,
                   is_caller);
    };
  };
  parallel_for(batch, make_worker, [&] { control.stopped(true); });
  join(each, found);
}

}  // namespace

template <class T>
std::size_t workspace_bytes(const Problem<T>& problem, Method method) {
  if (method == Method::compact && problem.lone_rows != nullptr) {
    return lone_row_bytes<T>(*problem.lone_rows);
  }
  const Components* components = problem.components;
  if (components == nullptr) {
    return InstanceScores<T>::bytes(problem) + forward_bytes(problem, method, 1);
  }
  std::size_t most = 0;
  for (int k = 0; k < components->num_chunks(); ++k) {
    std::size_t bytes = 0;
    for (const Components::Run& run : components->chunk(k)) {
      Problem<T> own;
      static_cast<Layout&>(own) = components->layout(run.kind);
      bytes += ComponentWorker<T>::bytes(problem, run.kind) + forward_bytes(own, method, 1);
    }
    most = std::max(most, bytes);
  }
  return most;
}

template <class T>
void solve_batch(const Problem<T>& problem, std::int64_t batch, Method method,
                 const Options& options, Batched<const T> warm, const Outputs<T>& out,
                 FoundStructures& found, Control& control) {
  if (method == Method::compact && problem.lone_rows != nullptr) {
    return solve_lone_rows(problem, batch, options.tol, out, control);
  }
  const Scored<T> there{problem};
  const bool may_part = batch > 0 && Components::may_part(problem) && !all_present(problem, batch);
  const Masked masked = may_part ? how_masked(problem.num_vars, batch, there) : Masked::no;
  if (masked == Masked::each_own) {
    return solve_each_masked(problem, batch, method, options, warm, out, found, control);
  }
  const auto parts = masked == Masked::alike ? parts_of(problem, 0, there) : nullptr;
  const auto solve = [&](const Problem<T>& own) {
    solve_now(own, batch, method, options, warm, out, found, control, true);
  };
  if (parts == nullptr) {
    solve(problem);
  } else {
    solve(in_parts(problem, *parts));
  }
}

#define FACTORMAX_INSTANTIATE(T)                                                        \
  template std::size_t workspace_bytes<T>(const Problem<T>&, Method);                   \
  template void solve_batch<T>(const Problem<T>&, std::int64_t, Method, const Options&, \
                               Batched<const T>, const Outputs<T>&, FoundStructures&, Control&);

FACTORMAX_INSTANTIATE(float)
FACTORMAX_INSTANTIATE(double)

}  // namespace factormax
