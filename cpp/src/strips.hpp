// A start for one large graph, found on several threads: where the graph is long, such as a grid or
// a chain, it is cut across into strips, each of which is solved by itself. Then what that got
// wrong near the cuts is solved again, with its surroundings, until nothing is wrong any more,
// docs/math.md (22b). Which threads solve which parts makes no difference.
#pragma once

#include <atomic>
#include <memory>
#include <vector>

#include "factormax/parallel.hpp"
#include "graph_parts.hpp"

namespace factormax {

// The strips of one instance.
template <class T>
class Strips {
 public:
  static constexpr int kManyRows = 16384;  // fewer are solved before another thread has woken up

  Strips(const Instance<T>& p, const Options& options, Control& control, bool may_poll)
      : p_(p), options_(options), control_(control), may_poll_(may_poll) {
    options_.max_iter = std::min(kPatience, options.max_iter);
  }

  // Finds multipliers to start from; false if there is nothing to find, or nothing feasible.
  bool solve() {
    begin();
    if (is_optimal() || !parts_.cut(p_)) return false;
    room_ = parts_.largest();
    int again = 0;  // rows that have been solved again
    for (int round = 0; round < kRounds; ++round) {
      const End end = solve_parts(round == 0);
      if (end == End::hopeless) return false;
      if (end == End::unsolved) break;
      find_wrong();
      if (wrong_.empty()) break;
      parts_.surround(p_, wrong_, kReach << round);
      again += parts_.num_rows();
      // Rows that have an effect from afar are better solved all together.
      if (again > p_.m || !room_.holds(parts_.largest())) break;
    }
    return true;
  }

  int passes() const { return most_passes_.load(); }  // of the part that took the most

  // to: (rows of the Problem,), unscaled
  void write_multipliers(T* to) const {
    for (int r = 0; r < p_.m; ++r) to[p_.row[r]] = x_[r] * p_.scale[r];
  }

 private:
  static constexpr int kReach = 2;       // rows around a wrong one to solve again; then twice that
  static constexpr int kRounds = 6;      // the most rounds
  static constexpr int kPatience = 300;  // the most passes over a part
  // The fraction of the tolerance by which a row between parts may miss optimality and still count
  // as solved. Within parts, the exact finish reaches that.
  static constexpr double kSharp = 1e-3;

  enum class End { solved, unsolved, hopeless };  // each worse than the one before

  static End end_of(Status status) {
    switch (status) {
      case Status::converged:
        return End::solved;
      case Status::infeasible:
      case Status::interrupted:
        return End::hopeless;
      default:
        return End::unsolved;
    }
  }

  template <class U>
  static void raise_to(std::atomic<U>& largest, U value) {
    U before = largest.load();
    while (before < value && !largest.compare_exchange_weak(before, value)) {
    }
  }

  // The multipliers that any solve begins from.
  void begin() {
    x_.resize(static_cast<std::size_t>(p_.m));
    z_.resize(static_cast<std::size_t>(p_.n));
    place_.assign(static_cast<std::size_t>(p_.n), -1);
    std::vector<T> work(static_cast<std::size_t>(p_.m));
    for (int r = 0; r < p_.m; ++r) x_[r] = p_.is_soft(r) ? p_.hi[r] / 2 : T(0);
    reduced_scores(p_, Span<const T>{x_.data(), p_.m}, Span<T>{z_.data(), p_.n},
                   Span<T>{work.data(), p_.m});
  }

  // All of them, even if one can't be solved: what they leave must not depend on threads.
  End solve_parts(bool cold) {
    Options options = options_;
    if (!cold) options.tol *= kSharp;  // what is solved again was nearly right
    const Standing<T> at{{x_.data(), p_.m}, {z_.data(), p_.n}, {place_.data(), p_.n}};
    std::atomic<End> worst{End::solved};
    std::atomic<std::size_t> workers{0};
    solvers_.resize(static_cast<std::size_t>(get_num_threads()));
    const auto make_worker = [&]() -> Worker {
      return [&, solver = lend_solver(workers.fetch_add(1))](std::int64_t part, bool is_caller) {
        const auto rows = parts_.rows(static_cast<int>(part));
        const Result result =
            solver->solve(p_, rows, at, options, cold, control_, is_caller && may_poll_);
        raise_to(worst, end_of(result.status));
        raise_to(most_passes_, result.iterations);
      };
    };
    parallel_for(parts_.count(), make_worker, [&] { control_.stopped(may_poll_); });
    return worst.load();
  }

  // For the k-th thread of a round.
  std::shared_ptr<PartSolver<T>> lend_solver(std::size_t k) {
    std::shared_ptr<PartSolver<T>> own;  // if somebody has just asked for more threads
    std::shared_ptr<PartSolver<T>>& solver = k < solvers_.size() ? solvers_[k] : own;
    if (solver == nullptr) solver = std::make_shared<PartSolver<T>>(room_);
    if (!solver->valid()) throw std::bad_alloc();
    return solver;
  }

  // Lists the rows between parts that are not optimal.
  void find_wrong() {
    wrong_.clear();
    for (const std::int32_t r : parts_.border()) {
      if (lack(r) > kSharp * options_.tol) wrong_.push_back(r);
    }
  }

  bool is_optimal() const {
    for (int r = 0; r < p_.m; ++r) {
      if (lack(r) > options_.tol) return false;
    }
    return true;
  }

  // What a row lacks to be optimal, as in `row_lack`.
  T lack(std::int32_t r) const {
    T product = 0;
    for (int k = p_.ptr[r]; k < p_.ptr[r + 1]; ++k) {
      product += p_.coef[k] * clip_to_unit(z_[p_.col[k]]);
    }
    const T g = p_.scale[r] * (p_.rhs[r] - product);
    return std::fabs(std::max(std::min(g, x_[r] - p_.lo[r]), x_[r] - p_.hi[r])) * p_.norm[r];
  }

  const Instance<T>& p_;
  Options options_;
  Control& control_;
  bool may_poll_;
  GraphParts<T> parts_;
  std::vector<T> x_, z_;  // where the multipliers stand, scaled, and their reduced scores
  std::vector<std::int32_t> place_, wrong_;
  PartSize room_;
  std::vector<std::shared_ptr<PartSolver<T>>> solvers_;  // one for each thread
  std::atomic<int> most_passes_{0};
};

}  // namespace factormax
