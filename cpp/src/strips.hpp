// A start for one large graph, found on several threads: where the graph is long, such as a grid or
// a chain, it is cut across into strips, each of which is solved by itself. Then what that got
// wrong near the cuts is solved again, with its surroundings, until nothing is wrong any more,
// docs/math.md (22b). Which threads solve which parts makes no difference.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <vector>

#include "factormax/parallel.hpp"
#include "graph_parts.hpp"

namespace factormax {

template <class T>
class Strips {
 public:
  // Multipliers of the Problem's rows to start from, unscaled; null if the graph is small or not
  // long, or a part of it could not be solved. passes: what the slowest parts took.
  const T* start(const Instance<T>& p, int num_dual, const Options& options, Control& control,
                 bool may_poll, int& passes) {
    passes = 0;
    if (p.m < kManyRows || p.wide || p.weighted() || !p.consistent || !options.finish) {
      return nullptr;
    }
    const Call call{p, options, control, may_poll};
    begin(p);
    if (is_optimal(p, options.tol) || !parts_.cut(p)) return nullptr;
    room_ = parts_.largest();
    idle_.clear();
    int again = 0;  // rows that have been solved again
    for (int round = 0; round < kRounds; ++round) {
      if (!solve_parts(call, round == 0, passes)) return nullptr;
      find_wrong(call);
      if (wrong_.empty()) break;
      parts_.surround(p, wrong_, kReach + round * kFurther);
      again += parts_.num_rows();
      // Rows that have an effect from afar are better solved all together.
      if (again > p.m || !room_.holds(parts_.largest())) break;
    }
    multipliers_.assign(static_cast<std::size_t>(num_dual), T(0));
    for (int r = 0; r < p.m; ++r) multipliers_[p.row[r]] = x_[r] * p.scale[r];
    return multipliers_.data();
  }

 private:
  static constexpr int kManyRows = 16384;  // fewer are solved before another thread has woken up
  static constexpr int kReach = 5;         // rows around what is wrong that are solved again,
  static constexpr int kFurther = 2;       // and more each time
  static constexpr int kRounds = 12;       // at most
  static constexpr int kPatience = 300;    // passes of a part
  // Of the tolerance: what a row may lack without being wrong. The finish leaves as much.
  static constexpr double kSharp = Precision<T>::finest ? 1e-3 : 0.25;

  struct Call {
    const Instance<T>& p;
    const Options& options;
    Control& control;
    bool may_poll;
  };

  void begin(const Instance<T>& p) {
    x_.resize(static_cast<std::size_t>(p.m));
    z_.resize(static_cast<std::size_t>(p.n));
    place_.assign(static_cast<std::size_t>(p.n), -1);
    std::vector<T> work(static_cast<std::size_t>(p.m));
    for (int r = 0; r < p.m; ++r) x_[r] = p.is_soft(r) ? p.hi[r] / 2 : T(0);
    reduced_scores(p, Span<const T>{x_.data(), p.m}, Span<T>{z_.data(), p.n},
                   Span<T>{work.data(), p.m});
  }

  // Returns false if one can't be solved.
  bool solve_parts(const Call& call, bool cold, int& passes) {
    Options options = call.options;
    options.max_iter = std::min(kPatience, options.max_iter / 2 - passes);  // half for the whole
    if (options.max_iter <= 0) return false;
    if (!cold) options.tol *= kSharp;
    const Instance<T>& p = call.p;
    const Standing<T> at{{x_.data(), p.m}, {z_.data(), p.n}, {place_.data(), p.n}};
    std::atomic<bool> failed{false};
    std::atomic<int> most{0};
    const auto make_worker = [&]() -> Worker {
      return [&, solver = lend_solver()](std::int64_t part, bool is_caller) {
        if (failed.load(std::memory_order_relaxed)) return;
        const Result result = solver->solve(p, parts_.rows(static_cast<int>(part)), at, options,
                                            cold, call.control, is_caller && call.may_poll);
        if (result.status != Status::converged) failed.store(true, std::memory_order_relaxed);
        int before = most.load();
        while (before < result.iterations &&
               !most.compare_exchange_weak(before, result.iterations));
      };
    };
    parallel_for(parts_.count(), make_worker, [&] { call.control.stopped(call.may_poll); });
    passes += most.load();
    return !failed.load();
  }

  // A solver that goes back to the idle ones when it is not used any more.
  std::shared_ptr<PartSolver<T>> lend_solver() {
    std::unique_ptr<PartSolver<T>> solver;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (!idle_.empty()) {
        solver = std::move(idle_.back());
        idle_.pop_back();
      }
    }
    if (solver == nullptr) solver = std::make_unique<PartSolver<T>>(room_);
    if (!solver->valid()) throw std::bad_alloc();
    return {solver.release(), [this](PartSolver<T>* used) {
              std::lock_guard<std::mutex> lock(mutex_);
              idle_.emplace_back(used);
            }};
  }

  // Lists the rows between parts that are not optimal.
  void find_wrong(const Call& call) {
    wrong_.clear();
    parts_.each_border_row(call.p, [&](std::int32_t r) {
      if (lack(call.p, r) > kSharp * call.options.tol) wrong_.push_back(r);
    });
  }

  bool is_optimal(const Instance<T>& p, double tol) const {
    for (int r = 0; r < p.m; ++r) {
      if (lack(p, r) > tol) return false;
    }
    return true;
  }

  // What a row lacks to be optimal, as in `row_lack`.
  T lack(const Instance<T>& p, std::int32_t r) const {
    T product = 0;
    for (int k = p.ptr[r]; k < p.ptr[r + 1]; ++k) {
      product += p.coef[k] * clip_to_unit(z_[p.col[k]]);
    }
    const T g = p.scale[r] * (p.rhs[r] - product);
    return std::fabs(std::max(std::min(g, x_[r] - p.lo[r]), x_[r] - p.hi[r])) * p.norm[r];
  }

  GraphParts<T> parts_;
  std::vector<T> x_, z_;  // where the multipliers stand, scaled, and their reduced scores
  std::vector<std::int32_t> place_, wrong_;
  std::vector<T> multipliers_;
  PartSize room_;
  std::mutex mutex_;
  std::vector<std::unique_ptr<PartSolver<T>>> idle_;
};

}  // namespace factormax
