#include "factormax/batch.hpp"

#include "factormax/admm.hpp"
#include "factormax/backward.hpp"
#include "factormax/compact.hpp"
#include "factormax/parallel.hpp"

namespace factormax {
namespace {

// All that one thread needs for one method, laid out in one workspace.
template <class T>
struct ForwardState {
  Instance<T> instance;
  CompactSolver<T> compact;
  AdmmSolver<T> admm;
  Span<T> error;

  void allocate(const Problem<T>& p, Method method, Workspace& ws) {
    instance.allocate(p, ws);
    error = ws.take<T>(p.num_vars);
    if (method == Method::compact) compact.allocate(p, ws);
    if (method == Method::admm) admm.allocate(p, ws);
  }
};

template <class T>
struct BackwardState {
  Instance<T> instance;
  ReducedSystem<T> system;
  Span<T> d, rhs;

  void allocate(const Problem<T>& p, Workspace& ws) {
    instance.allocate(p, ws);
    system.allocate(p, ws);
    d = ws.take<T>(p.num_vars);
    rhs = ws.take<T>(p.num_dual());
  }
};

// A thread keeps its memory from one batch to the next, unless it is large. A batch begun from
// within another on the same thread (a signal handler that solves) gets memory of its own.
class ThreadMemory {
 public:
  class Lease {
   public:
    Lease(ThreadMemory& memory, std::size_t bytes) {
      if (memory.busy_) {
        own_ = Workspace(bytes);
        workspace_ = &own_;
        return;
      }
      memory.reserve(bytes);
      memory.busy_ = true;
      memory_ = &memory;
      workspace_ = &memory.workspace_;
    }
    ~Lease() {
      if (memory_ != nullptr) memory_->give_back();
    }
    Lease(const Lease&) = delete;
    Lease& operator=(const Lease&) = delete;

    // Null if the memory could not be had.
    Workspace* get() { return workspace_->valid() ? workspace_ : nullptr; }

   private:
    ThreadMemory* memory_ = nullptr;
    Workspace own_;
    Workspace* workspace_;
  };

 private:
  void give_back() {
    busy_ = false;
    if (capacity_ > kKeep) {
      workspace_ = Workspace();
      capacity_ = 0;
    }
  }

  void reserve(std::size_t bytes) {
    if (bytes > capacity_) {
      workspace_ = Workspace();
      workspace_ = Workspace(bytes);
      capacity_ = workspace_.valid() ? bytes : 0;
    }
    workspace_.rewind();
  }

  static constexpr std::size_t kKeep = std::size_t(64) << 20;
  Workspace workspace_;
  std::size_t capacity_ = 0;
  bool busy_ = false;
};

thread_local ThreadMemory memory;

// A state and the memory it is laid out in.
template <class State>
struct Leased {
  explicit Leased(std::size_t bytes) : lease(memory, bytes) {}
  ThreadMemory::Lease lease;
  State state;
};

template <class T>
FACTORMAX_VECTOR double objective(const Problem<T>& p, std::int64_t i, const T* mu, const T* mu_v) {
  const T *eta_u = p.eta_u.at(i), *eta_v = p.eta_v.at(i);
  double sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int j = 0; j < p.num_vars; ++j) {
    const double term = double(mu[j]) * (double(eta_u[j]) - 0.5 * double(mu[j]));
    sum += mu[j] != 0 ? term : 0.0;  // the score may be -inf
  }
  for (int q = 0; q < p.num_pairs; ++q) sum += double(eta_v[q]) * double(mu_v[q]);
  return sum;
}

template <class T>
void write_infeasible(const Problem<T>& p, const Instance<T>& instance, std::int64_t i,
                      const Outputs<T>& out) {
  const T nan = std::numeric_limits<T>::quiet_NaN();
  const auto absent = static_cast<std::int8_t>(Side::absent);
  std::fill_n(out.mu.at(i), p.num_vars, nan);
  for (int j = 0; j < p.num_vars; ++j) {
    if (instance.new_var[j] < 0) out.mu.at(i)[j] = 0;  // masked
  }
  std::fill_n(out.mu_v.at(i), p.num_pairs, nan);
  std::fill_n(out.tau.at(i), p.num_dual(), T(0));
  std::fill_n(out.var_side.at(i), p.num_vars, absent);
  std::fill_n(out.row_side.at(i), p.num_dual(), absent);
  out.objective[i] = -std::numeric_limits<double>::infinity();
}

template <class T>
FACTORMAX_VECTOR void write_solution(const Problem<T>& p, const Instance<T>& instance,
                                     const DualPoint<T>& at, T error, Span<T> scratch,
                                     std::int64_t i, const Outputs<T>& out) {
  T *mu = out.mu.at(i), *mu_v = out.mu_v.at(i), *tau = out.tau.at(i);
  std::int8_t* side = out.var_side.at(i);
  classify(p, instance, at, error, scratch, side, out.row_side.at(i));
  // What counts as clipped is exactly 0 or 1, so that value and gradient have one support.
  const auto value = [&](int j, std::int8_t where) {
    const T bound = where == static_cast<std::int8_t>(Side::upper) ? T(1) : T(0);
    return where == static_cast<std::int8_t>(Side::interior) ? at.mu.data[j] : bound;
  };
  if (instance.complete) {
#pragma omp simd
    for (int j = 0; j < instance.n; ++j) mu[j] = value(j, side[j]);
  } else {
    std::fill_n(mu, p.num_vars, T(0));
    for (int j = 0; j < instance.n; ++j) {
      const int v = instance.var[j];
      mu[v] = value(j, side[v]);
    }
  }
  std::fill_n(tau, p.num_dual(), T(0));
  for (int r = 0; r < instance.m; ++r) tau[instance.row[r]] = at.x[r] * instance.scale[r];
  for (int q = 0; q < p.num_pairs; ++q) {
    const PairView<T> pair(p, q);
    const bool present = instance.new_var[pair.j1] >= 0 && instance.new_var[pair.j2] >= 0;
    mu_v[q] = present ? pair.value(mu, p.eta_v.at(i)[q]) : T(0);
  }
  out.objective[i] = objective(p, i, mu, mu_v);
}

// How far the answer itself, with its exact zeros and ones, is from meeting the constraints: it
// goes into the residual, and nothing that is far off is called converged.
template <class T>
void check_rows(const Instance<T>& instance, const T* mu, Result& result) {
  const T eps = std::numeric_limits<T>::epsilon();
  const double limit = 5e-3;
  if (4 * eps * (1 + instance.largest_score) * instance.longest_row < limit) return;
  double worst = 0;
  for (int r = 0; r < instance.hard; ++r) {
    double product = 0;
    for (int k = instance.ptr[r]; k < instance.ptr[r + 1]; ++k) {
      product += double(instance.coef[k]) * mu[instance.var[instance.col[k]]];
    }
    const double excess = product - instance.rhs[r];
    worst = std::max(worst, instance.lo[r] == 0 ? excess : std::fabs(excess));
  }
  if (worst <= limit) return;
  result.primal_residual = std::max(result.primal_residual, worst);
  if (result.status == Status::converged) result.status = Status::stalled;
}

template <class T>
void solve_one(const Problem<T>& p, std::int64_t i, Method method, const Options& options,
               const T* warm, const Outputs<T>& out, ForwardState<T>& state, Control& control,
               bool may_poll) {
  Instance<T>& instance = state.instance;
  instance.prepare(p, i);
  const bool compact = method == Method::compact;
  Result result = compact ? state.compact.solve(p, instance, warm, options, control, may_poll)
                          : state.admm.solve(instance, warm, options, control, may_poll);
  if (result.status == Status::infeasible) {
    write_infeasible(p, instance, i, out);
  } else {
    const DualPoint<T>& at = compact ? state.compact.point() : state.admm.point();
    // The compact dual's error is in its gradient; ADMM's copies disagree by its residuals.
    const double apart = std::max(result.primal_residual, result.dual_residual);
    const T error = compact ? T(0) : static_cast<T>(apart);
    write_solution(p, instance, at, error, state.error, i, out);
    check_rows(instance, out.mu.at(i), result);
  }
  out.status[i] = static_cast<std::int32_t>(result.status);
  out.iterations[i] = result.iterations;
  out.primal_residual[i] = result.primal_residual;
  out.dual_residual[i] = result.dual_residual;
}

template <class T>
void vjp_one(const Problem<T>& p, std::int64_t i, const BatchGradients<T>& grads,
             BackwardState<T>& state) {
  const Gradients<T> g{grads.grad_mu.at(i), grads.grad_mu_v.at(i), grads.grad_eta_u.at(i),
                       grads.grad_eta_v.at(i)};
  if (grads.status[i] == static_cast<std::int32_t>(Status::infeasible)) {
    std::fill_n(g.grad_eta_u, p.num_vars, T(0));
    std::fill_n(g.grad_eta_v, p.num_pairs, T(0));
    grads.residual[i] = 0;
    return;
  }
  state.instance.prepare(p, i);
  grads.residual[i] = vjp(p, state.instance, i, grads.var_side.at(i), grads.row_side.at(i), g,
                          state.system, state.d, state.rhs);
}

}  // namespace

template <class T>
std::size_t workspace_bytes(const Problem<T>& problem, Method method) {
  Workspace counter;
  ForwardState<T>().allocate(problem, method, counter);
  return counter.used();
}

template <class T>
void solve_batch(const Problem<T>& problem, std::int64_t batch, Method method,
                 const Options& options, Batched<const T> warm, const Outputs<T>& out,
                 Control& control) {
  const std::size_t bytes = workspace_bytes(problem, method);
  const auto make_worker = [&]() -> Worker {
    auto leased = std::make_shared<Leased<ForwardState<T>>>(bytes);
    Workspace* workspace = leased->lease.get();
    if (workspace == nullptr) {
      control.fail_for_memory();
    } else {
      leased->state.allocate(problem, method, *workspace);
    }
    return [&, leased](std::int64_t i, bool is_caller) {
      if (control.stopped(is_caller)) return;
      solve_one(problem, i, method, options, warm.at(i), out, leased->state, control, is_caller);
    };
  };
  parallel_for(batch, make_worker, [&] { control.stopped(true); });
}

template <class T>
void vjp_batch(const Problem<T>& solved, std::int64_t batch, const BatchGradients<T>& grads,
               Control& control) {
  Problem<T> problem = solved;
  problem.eta_u = {};  // all that matters of the scores is in the sides
  Workspace counter;
  BackwardState<T>().allocate(problem, counter);
  const std::size_t bytes = counter.used();
  const auto make_worker = [&]() -> Worker {
    auto leased = std::make_shared<Leased<BackwardState<T>>>(bytes);
    Workspace* workspace = leased->lease.get();
    if (workspace == nullptr) {
      control.fail_for_memory();
    } else {
      leased->state.allocate(problem, *workspace);
    }
    return [&, leased](std::int64_t i, bool is_caller) {
      if (control.stopped(is_caller)) return;
      leased->state.system.control = &control;
      leased->state.system.may_poll = is_caller;
      vjp_one(problem, i, grads, leased->state);
    };
  };
  parallel_for(batch, make_worker, [&] { control.stopped(true); });
}

#define FACTORMAX_INSTANTIATE(T)                                                        \
  template std::size_t workspace_bytes<T>(const Problem<T>&, Method);                   \
  template void solve_batch<T>(const Problem<T>&, std::int64_t, Method, const Options&, \
                               Batched<const T>, const Outputs<T>&, Control&);          \
  template void vjp_batch<T>(const Problem<T>&, std::int64_t, const BatchGradients<T>&, Control&);

FACTORMAX_INSTANTIATE(float)
FACTORMAX_INSTANTIATE(double)

}  // namespace factormax
