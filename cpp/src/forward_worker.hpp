// One instance after the other on one thread: who calls the solve, in which precision.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>

#include "forward.hpp"
#include "thread_memory.hpp"

namespace factormax {

template <class T>
std::size_t forward_bytes(const Problem<T>& problem, Method method, int growth) {
  Workspace counter;
  ForwardState<T>().allocate(problem, method, growth, counter);
  return counter.used();
}

template <class T>
class DoubleWorker;

// Solves instances one after the other on one thread. If an instance needs more structures than
// there is room for, it begins again with more. One that float can't resolve is solved in double.
template <class T>
class ForwardWorker {
 public:
  ForwardWorker(const Problem<T>& problem, Method method, Control& control)
      : problem_(problem), method_(method), control_(control) {
    if (!in_double()) reserve();
  }

  void operator()(std::int64_t i, const Options& options, const T* warm, const Outputs<T>& out,
                  InstanceStructures* found, bool is_caller) {
    const bool at_once = in_double();
    if (!at_once) solve(i, options, warm, out, found, is_caller);
    if constexpr (!Precision<T>::finest) {
      const auto is_stalled = [&] {
        return out.status[i] == static_cast<std::int32_t>(Status::stalled);
      };
      if (control_.stop.load() || !(at_once || is_stalled())) return;
      try {
        if (double_ == nullptr) {
          double_ = std::make_unique<DoubleWorker<T>>(problem_, method_, control_);
        }
      } catch (const std::bad_alloc&) {
        return control_.fail_for_memory();
      }
      if (found != nullptr) *found = {};
      const bool close = !at_once && out.primal_residual[i] <= kClose;  // a good start
      (*double_)(i, options, close ? out.tau.at(i) : warm, out, found, is_caller);
    }
  }

 private:
  void solve(std::int64_t i, const Options& options, const T* warm, const Outputs<T>& out,
             InstanceStructures* found, bool is_caller) {
    for (;;) {
      if (control_.stopped(is_caller)) return;
      ForwardState<T>& state = leased_->state;
      try {
        solve_one(problem_, i, method_, options, warm, out, found, state, control_, is_caller);
      } catch (const std::bad_alloc&) {  // lists of structures grow as they are found
        return control_.fail_for_memory();
      }
      if (!state.structured.any() || state.structured.trouble() != ActiveSetResult::no_room) return;
      growth_ *= 4;  // ends: no factor needs more structures than variables
      reserve();
    }
  }

  // In float large graphs hardly take less time, and twice as much where that stalls.
  bool in_double() const {
    return !Precision<T>::finest && method_ == Method::compact && problem_.structured.count == 0 &&
           problem_.num_dual() >= Strips<double>::kManyRows;
  }

  void reserve() {
    leased_.reset();
    const auto lay_out = [&](ForwardState<T>& state, Workspace& ws) {
      state.allocate(problem_, method_, growth_, ws);
    };
    const bool all_used = problem_.structured.count == 0;
    leased_ = std::make_unique<Leased<ForwardState<T>>>(all_used, lay_out);
    if (!leased_->valid()) control_.fail_for_memory();
  }

  static constexpr double kClose = 5e-3;

  const Problem<T>& problem_;
  Method method_;
  Control& control_;
  int growth_ = 1;
  std::unique_ptr<Leased<ForwardState<T>>> leased_;
  std::unique_ptr<DoubleWorker<T>> double_;  // made when first needed
};

// Solves single instances of a problem in double. Which ones, and from where, depends on the
// instance alone: no answer depends on the batch around it.
template <class T>
class DoubleWorker {
 public:
  DoubleWorker(const Problem<T>& problem, Method method, Control& control)
      : source_(problem),
        control_(control),
        memory_(lay_out()),
        worker_(problem_, method, control) {
    if (memory_.valid()) {
      allocate(memory_);
    } else {
      control_.fail_for_memory();
    }
  }

  void operator()(std::int64_t i, const Options& options, const T* warm, const Outputs<T>& out,
                  InstanceStructures* found, bool is_caller) {
    if (control_.stop.load()) return;
    // The stride says whether rows differ from one instance to the next.
    problem_.coef.stride = source_.coef.stride;
    problem_.rhs.stride = source_.rhs.stride;
    widen(source_.coef.at(i), coef_);
    widen(source_.rhs.at(i), rhs_);
    widen(source_.eta_u.at(i), eta_u_);
    widen(source_.eta_v.at(i), eta_v_);
    problem_.mask.data = source_.mask.at(i);
    problem_.structured.param.data = source_.structured.param.at(i);
    problem_.structured.first = source_.structured.first + i;
    if (warm != nullptr) widen(warm, warm_);
    Outputs<double> own;
    own.mu.data = mu_.data;
    own.mu_v.data = mu_v_.data;
    own.tau.data = tau_.data;
    own.var_side.data = out.var_side.at(i);
    own.row_side.data = out.row_side.at(i);
    own.objective = out.objective + i;
    own.primal_residual = out.primal_residual + i;
    own.dual_residual = out.dual_residual + i;
    own.iterations = out.iterations + i;
    own.status = out.status + i;
    own.oracle_calls = out.oracle_calls + i;
    if (out.upper_bound != nullptr) own.upper_bound = out.upper_bound + i;
    if (out.integral != nullptr) own.integral = out.integral + i;
    worker_(0, options, warm != nullptr ? warm_.data : nullptr, own, found, is_caller);
    if (control_.stop.load()) return;
    narrow(mu_, out.mu.at(i));
    narrow(mu_v_, out.mu_v.at(i));
    narrow(tau_, out.tau.at(i));
  }

 private:
  std::size_t lay_out() {
    static_cast<Layout&>(problem_) = source_;
    problem_.mask.stride = problem_.structured.param.stride = 0;
    problem_.row_precision = std::numeric_limits<T>::epsilon();
    Workspace counter;
    allocate(counter);
    return counter.used();
  }

  void allocate(Workspace& ws) {
    coef_ = ws.take<double>(source_.num_entries);
    rhs_ = ws.take<double>(source_.num_rows);
    eta_u_ = ws.take<double>(source_.num_vars);
    eta_v_ = ws.take<double>(source_.num_scores());
    mu_ = ws.take<double>(source_.num_vars);
    mu_v_ = ws.take<double>(source_.num_scores());
    tau_ = ws.take<double>(source_.num_dual());
    warm_ = ws.take<double>(source_.num_dual());
    problem_.coef.data = coef_.data;
    problem_.rhs.data = rhs_.data;
    problem_.eta_u = {eta_u_.data, 0};
    problem_.eta_v = {eta_v_.data, 0};
  }

  static void widen(const T* from, Span<double> to) { std::copy(from, from + to.size, to.data); }

  // With very large scores, multipliers in double may be too large for float.
  static void narrow(Span<double> from, T* to) {
    const double most = std::numeric_limits<T>::max();
    for (int k = 0; k < from.size; ++k) {
      to[k] = std::isnan(from[k]) ? T(from[k]) : T(clip(from[k], -most, most));
    }
  }

  const Problem<T>& source_;
  Control& control_;
  Problem<double> problem_;  // of one instance
  Span<double> coef_, rhs_, eta_u_, eta_v_, warm_, mu_, mu_v_, tau_;
  Workspace memory_;
  ForwardWorker<double> worker_;
};

}  // namespace factormax
