// What the backward pass needs is decided here once, in `classify`, and used in `vjp`:
//
//   (A_I J A_I^T) t = A_I J d,   q = d - A_I^T t,   grad eta = J q,      docs/math.md (42),
//
// with M Q c in place of J d on structured factors, where c is the gradient with respect to p.
#pragma once

#include <cstring>
#include <utility>

#include "factormax/dual.hpp"
#include "factormax/pair_ties.hpp"
#include "factormax/reduced.hpp"

namespace factormax {

// What a row lacks also moves the free variables of the rows that it shares some with, and so on.
template <class T>
class ErrorSpread {
 public:
  // worst: the largest lack of a row; bound: no variable's error is larger before it travels.
  ErrorSpread(const Instance<T>& p, const DualPoint<T>& at, T worst, T bound)
      : p_(p), at_(at), bound_(bound), near_(std::max(kTravel * worst, 2 * bound)) {}

  // Whether something is so close to its bound that the error decides on which side it is. What
  // rounding alone puts there, or what is beyond, stays there with any error.
  FACTORMAX_INLINE bool in_doubt() const {
    const auto any_variable = [this](const auto& give) {
      return largest_of(p_.n, T(0), [&](int j) {
               const T z = at_.z.data[j] * give(j), inside = z < T(0.5) ? z : 1 - z;
               return inside > rounding(j, z) && inside <= near_ ? T(1) : T(0);
             }) > 0;
    };
    const auto one = [](int) { return T(1); };
    const auto weighed = [this](int j) { return p_.give(j); };
    if (p_.weighted() ? any_variable(weighed) : any_variable(one)) return true;
    if (negligible()) return false;
    for (int r = 0; r < p_.m; ++r) {
      const bool at_bound = at_.x[r] <= p_.lo[r] + near_ || at_.x[r] >= p_.hi[r] - near_;
      if (at_bound && touches(r) && std::fabs(slack(r)) > row_rounding(r)) return true;
    }
    return false;
  }

  // z is the rounded difference of the score and of what the multipliers take.
  FACTORMAX_INLINE T rounding(int j, T z) const {
    const T eta = p_.eta.data[j];
    return 8 * std::numeric_limits<T>::epsilon() * (std::fabs(eta) + std::fabs(eta - z));
  }

  // b - a . mu, in units of variables
  T slack(int r) const { return at_.g[r] * p_.norm[r] / row_unit(p_, at_, r); }
  T row_rounding(int r) const {
    return 8 * std::numeric_limits<T>::epsilon() * (1 + std::fabs(at_.x[r]));
  }

  // Adds what row r lacks to the errors of its variables.
  void share(int r, T missing, Span<T> error) const {
    int free = 0;
    for (int k = p_.ptr[r]; k < p_.ptr[r + 1]; ++k) {
      const T z = at_.z[p_.col[k]] * p_.give(p_.col[k]);
      free += z > 0 && z < 1;
    }
    const T each = missing / std::max(free, 1);
    for (int k = p_.ptr[r]; k < p_.ptr[r + 1]; ++k) error[p_.col[k]] += each;
  }

  // Gives each variable the largest error among those it is coupled to by rows that hold tightly,
  // in sweeps. mark: (m,) is scratch.
  void spread(Span<T> error, std::int8_t* mark) const {
    const int plain = p_.m < kManyRows ? kPlainSweeps : 0;
    bool changed = true;
    for (int sweep = 0; changed && sweep < kSweeps; ++sweep) {
      if (sweep == plain) {
        for (int r = 0; r < p_.m; ++r) mark[r] = couples(r) ? kChanged : kLoose;
      }
      changed = sweep < plain ? spread_once(error) : spread_on(error, mark);
    }
  }

  // How far a . mu may be off.
  T of_row(int r, Span<T> error) const {
    T sum = 0;
    for_free(r, [&](int j) { sum += error[j]; });
    return sum;
  }
  T of_row(int r) const { return p_.length(r) * bound_; }

  // Whether rows need not be told apart by their errors.
  bool negligible() const { return bound_ <= kLeast; }

  bool touches(int r) const {
    return std::fabs(at_.g[r]) * p_.norm[r] <= near_ * row_unit(p_, at_, r);
  }

 private:
  T largest_error(int r, Span<T> error) const {
    T largest = 0;
    for_free(r, [&](int j) { largest = std::max(largest, error[j]); });
    return largest;
  }

  // A sweep over all rows. Returns whether any variable has changed.
  bool spread_once(Span<T> error) const {
    bool changed = false;
    for (int r = 0; r < p_.m; ++r) {
      if (!touches(r)) continue;
      const T largest = largest_error(r, error);
      for_free(r, [&](int j) {
        changed |= error[j] < largest;
        error[j] = std::max(error[j], largest);
      });
    }
    return changed;
  }

  // Whether an error in row r may travel on.
  bool couples(int r) const {
    int free = 0;
    if (touches(r)) for_free(r, [&](int) { ++free; });
    return free > 1;
  }

  // A sweep over the rows one of whose variables has changed. Returns whether any does again.
  bool spread_on(Span<T> error, std::int8_t* mark) const {
    const auto next = [&](int r) {
      const void* found = std::memchr(mark + r, kChanged, p_.m - r);
      return found == nullptr ? p_.m
                              : static_cast<int>(static_cast<const std::int8_t*>(found) - mark);
    };
    bool changed = false;
    for (int r = next(0); r < p_.m; r = next(r + 1)) {
      const T largest = largest_error(r, error);
      for_free(r, [&](int j) {
        if (!(error[j] < largest)) return;
        changed = true;
        error[j] = largest;
        for (int k = p_.var_ptr[j]; k < p_.var_ptr[j + 1]; ++k) {
          std::int8_t& other = mark[p_.var_row[k]];
          other = other == kLoose ? kLoose : kChanged;
        }
      });
      mark[r] = kSettled;
    }
    return changed;
  }

  template <class Visit>
  void for_free(int r, const Visit& visit) const {
    for (int k = p_.ptr[r]; k < p_.ptr[r + 1]; ++k) {
      const T z = at_.z[p_.col[k]] * p_.give(p_.col[k]);
      if (z > -near_ && z < 1 + near_) visit(p_.col[k]);
    }
  }

  // Rows that couple nothing; rows whose variables have one error, or may have several.
  static constexpr std::int8_t kLoose = 0, kSettled = 1, kChanged = 2;
  static constexpr int kSweeps = 32;      // at most: farther away, errors are left as they are
  static constexpr int kManyRows = 4096;  // fewer are swept in the time that it takes to mark them,
  static constexpr int kPlainSweeps = 4;  // the first times, which change most of them
  static constexpr T kTravel = T(1e4);    // within this many lacks of a bound, errors decide
  static constexpr T kLeast = T(1e-9);    // a row with less slack is as good as tight

  const Instance<T>& p_;
  const DualPoint<T>& at_;
  T bound_, near_;
};

// Sides of variables and rows at the solution, and the marginals: what counts as clipped is exactly
// 0 or 1 there, so that value and gradient have one support. In doubt a variable is clipped and a
// row is tight, which gives the derivative wherever there is one, docs/math.md (40). The margin is
// there because at a 0/1 solution the multipliers are not unique, and a solver may stop just at the
// edge of their set, where a variable looks free by no more than its error.
//
// The error is local: what a row lacks is spread over its free variables. `at_least` is what the
// solver knows of its own error besides; error: (n,) is scratch. Where something stands as close to
// its bound as that error may have travelled, it does travel: see `ErrorSpread`. Elsewhere it
// decides nothing and is not followed.
template <class T>
FACTORMAX_VECTOR void classify(const Problem<T>& problem, const Instance<T>& p,
                               const DualPoint<T>& at, T at_least, Span<T> error, T* mu,
                               std::int8_t* var_side, std::int8_t* row_side) {
  const T eps = std::numeric_limits<T>::epsilon();
  const T most = T(1e-3);  // a margin above would clip what is visibly free
  // A row whose multiplier acts can't be known to hold better than its sum is rounded.
  const auto lack = [&](int r) {
    const T missing = row_lack(p, at, r);
    return at.x[r] != 0 && missing < eps ? eps : missing;
  };
  T worst = at_least;
  for (int r = 0; r < p.m; ++r) {
    const T missing = lack(r);
    if (missing >= eps) worst = std::max(worst, missing);
  }
  const ErrorSpread<T> travel(p, at, worst, at_least + p.highest_degree * worst);
  const bool follow = worst < most && travel.in_doubt();
  fill(error.first(p.n), at_least);
  if (follow || worst >= most) {
    for (int r = 0; r < p.m; ++r) {
      const T missing = lack(r);
      if (missing >= eps) travel.share(r, missing, error);
    }
  }
  if (follow) travel.spread(error, row_side);  // which is written below
  // Without a branch, for the sides are hard to foresee: lower is -1, interior 0, upper 1.
  const auto value_of = [&](int j, T z) {
    const T inside = at.mu.data[j], twice = 2 * error.data[j];
    const T margin = (twice < most ? twice : most) + travel.rounding(j, z);
    const T raised = z >= 1 - margin ? T(1) : inside;
    return z <= margin ? T(0) : raised;
  };
  const auto side_of = [](T value) {
    return static_cast<std::int8_t>((value == 1) - (value == 0));
  };
  if (p.complete && !p.weighted()) {
#pragma omp simd
    for (int j = 0; j < p.n; ++j) mu[j] = value_of(j, at.z.data[j]);
#pragma omp simd
    for (int j = 0; j < p.n; ++j) var_side[j] = side_of(mu[j]);
  } else {
    std::fill_n(var_side, problem.num_vars, static_cast<std::int8_t>(Side::absent));
    std::fill_n(mu, problem.num_vars, T(0));
    for (int j = 0; j < p.n; ++j) {
      const int v = p.var[j];
      mu[v] = value_of(j, at.z[j] * p.give(j));
      var_side[v] = side_of(mu[v]);
    }
  }
  if (problem.structured.count > 0) {  // on hubs their faces tell what is free
    for (int j = 0; j < p.n; ++j) {
      if (p.in_hub[j]) var_side[p.var[j]] = static_cast<std::int8_t>(Side::interior);
    }
  }
  std::fill(row_side, row_side + problem.num_dual(), static_cast<std::int8_t>(Side::absent));
  for (int r = 0; r < p.m; ++r) {
    T missing = std::max(lack(r), at_least);
    if (follow && travel.touches(r)) missing = std::max(missing, travel.of_row(r, error));
    if (travel.negligible()) missing = std::max(missing, travel.of_row(r));
    const T margin = std::min(2 * missing, most) + travel.row_rounding(r);
    const T slack = travel.slack(r);
    const bool low = at.x[r] <= p.lo[r] + margin, high = at.x[r] >= p.hi[r] - margin;
    Side side = Side::interior;
    if (low && high) {  // a pair with hardly any score
      side = std::fabs(slack) <= margin ? Side::tied : slack < 0 ? Side::upper : Side::lower;
    } else if ((low || high) && std::fabs(slack) > margin) {
      side = low ? Side::lower : Side::upper;
    }
    row_side[p.row[r]] = static_cast<std::int8_t>(side);
  }
}

// The literals of pair q: l = negated ? 1 - mu : mu. A masked variable is 0.
template <class T>
struct PairView {
  int j1, j2;
  T sign1, sign2;

  PairView(const Problem<T>& p, int q)
      : j1(p.pair_var[2 * q]),
        j2(p.pair_var[2 * q + 1]),
        sign1(1 - 2 * T(p.pair_negated[2 * q])),
        sign2(1 - 2 * T(p.pair_negated[2 * q + 1])) {}

  T value(const T* mu, T score) const {
    const T l1 = sign1 > 0 ? mu[j1] : 1 - mu[j1], l2 = sign2 > 0 ? mu[j2] : 1 - mu[j2];
    return score >= 0 ? std::min(l1, l2) : std::max(T(0), l1 + l2 - 1);
  }

  // How the value moves with the two variables. side: of the pair's row; at a tie the slope is the
  // mean of those on both sides of it, docs/math.md (44).
  std::pair<T, T> slope(const Instance<T>& p, T score, std::int8_t side) const {
    const bool here1 = p.complete || p.new_var[j1] >= 0, here2 = p.complete || p.new_var[j2] >= 0;
    if (here1 && here2) {
      const bool tied = side == static_cast<std::int8_t>(Side::tied);
      const T upper = tied ? T(0.5) : T(side == static_cast<std::int8_t>(Side::upper));
      return {upper * sign1, (score >= 0 ? 1 - upper : upper) * sign2};
    }
    return {here1 && sign2 < 0 ? sign1 : T(0), here2 && sign1 < 0 ? sign2 : T(0)};
  }
};

template <class T>
struct Gradients {
  const T* grad_mu;                // (n,)
  const T* grad_mu_v;              // (P + structured scores,)
  T* grad_eta_u;                   // (n,)
  T* grad_eta_v;                   // (P + structured scores,)
  const double* grad_p = nullptr;  // of all structures of the instance, or null
};

// c = M^T d + N^T d_v + d_p of every structured factor, docs/math.md (54), with d the gradient of
// mu on hubs and what `of_link` gives on links; then visit(f) with MQc in f.y, NQc in f.eta_v.
template <class T, class OfLink, class Visit>
void push_to_structures(const Problem<T>& problem, const StructuredFactors<T>& structured,
                        const Gradients<T>& grads, const T* d, const OfLink& of_link,
                        const Visit& visit) {
  const double* grad_p = grads.grad_p;
  for (int i = 0; i < structured.all().size; ++i) {
    StructuredFactor& f = structured.all()[i];
    if (!f.present) continue;
    fill(f.y, 0.0);
    f.each([&](int k, int r) { f.y[k] = f.linked ? of_link(r) : double(d[f.var[k]]); });
    const T* d_v = grads.grad_mu_v + problem.num_pairs + problem.structured.score_ptr[i];
    for (int k = 0; k < f.eta_v.size; ++k) f.eta_v[k] = double(d_v[k]);  // scratch, here
    f.pull_back(grad_p);
    if (grad_p != nullptr) grad_p += f.set.count;
    visit(i, f);
  }
}

// Adds what the structured factors have of A_I J d to the right-hand side.
template <class T>
void add_structures(const Problem<T>& problem, const Instance<T>& p,
                    const StructuredFactors<T>& structured, const Gradients<T>& grads, const T* d,
                    ReducedSystem<T>& system, Span<T> rhs) {
  const Span<T> s = system.scratch();
  const auto no_link = [](int) { return 0.0; };
  push_to_structures(problem, structured, grads, d, no_link, [&](int, StructuredFactor& f) {
    f.each([&](int k, int r) {
      if (!f.linked) {
        s[f.var[k]] = T(f.y[k]);
      } else if (const int i = system.position(r); i >= 0) {
        rhs[i] -= T(f.y[k]) * p.scale[r];
      }
    });
  });
  system.add_hub_products(s.data, rhs);
}

// Writes the gradients of the scores of structured factors, and of the variables in hubs.
template <class T>
void write_structures(const Problem<T>& problem, const Instance<T>& p,
                      const StructuredFactors<T>& structured, const Gradients<T>& grads, const T* d,
                      const ReducedSystem<T>& system) {
  T* grad_scores = grads.grad_eta_v + problem.num_pairs;
  std::fill(grad_scores, grad_scores + problem.structured.num_scores, T(0));
  const auto of_link = [&](int r) {
    const int i = system.position(r);
    return i >= 0 ? double(system.solution[i]) * p.scale[r] : 0.0;
  };
  push_to_structures(problem, structured, grads, d, of_link, [&](int i, StructuredFactor& f) {
    T* own = grad_scores + problem.structured.score_ptr[i];
    for (int k = 0; k < f.eta_v.size; ++k) own[k] = T(f.eta_v[k]);
    if (f.linked) return;
    f.each([&](int k, int) { grads.grad_eta_u[p.var[f.var[k]]] = T(f.y[k]); });
  });
}

// What pulls a gradient back through one instance.
template <class T>
struct PullBack {
  PairTies<T> ties;         // for graphs of pairs alone,
  ReducedSystem<T> system;  // and for all others
  Span<T> rhs;

  // structured: of the same problem, or null if it has none.
  void allocate(const Problem<T>& p, StructuredFactors<T>* structured, Workspace& ws) {
    if (PairTies<T>::apply_to(p)) return ties.allocate(p, ws);
    system.allocate(p, structured, ws);
    rhs = ws.take<T>(p.num_dual());
  }
};

// d -= A_I^T t, docs/math.md (42). Returns the largest residual of the reduced system, relative to
// the incoming gradient.
template <class T, class Free, class Tight>
FACTORMAX_INLINE T project(const Problem<T>& problem, const Instance<T>& p, const Free& is_free,
                           const Tight& is_tight, const std::int8_t* var_side,
                           const Gradients<T>& grads, PullBack<T>& pull,
                           StructuredFactors<T>* structured, Span<T> d) {
  ReducedSystem<T>& system = pull.system;
  int count = 0;
  for (int r = 0; r < p.m; ++r) {
    if (is_tight(r)) system.active[count++] = r;
  }
  system.count = count;
  if (p.complete) {
    const auto interior = static_cast<std::int8_t>(Side::interior);
    system.build(p, [=](int j) { return var_side[j] == interior; });
  } else {
    system.build(p, is_free);
  }
  system.multiply_box(d.data, pull.rhs);
  if (structured != nullptr) {
    add_structures(problem, p, *structured, grads, d.data, system, pull.rhs);
  }
  const T size = max_abs(Span<const T>(d.first(p.n)));
  // A gradient that the rows leave as it is makes a right-hand side of rounding.
  const T rounding = 4 * std::numeric_limits<T>::epsilon() * size;
  const T residual = system.solve(Span<const T>(pull.rhs), T(Precision<T>::backward), rounding);
  system.subtract_transpose(Span<const T>(system.solution), d.data);
  return size > 0 ? residual / size : T(0);
}

// Returns the largest residual of the system that it solves, relative to the incoming gradient.
template <class T>
FACTORMAX_VECTOR T vjp(const Problem<T>& problem, const Instance<T>& p, std::int64_t instance,
                       const std::int8_t* var_side, const std::int8_t* row_side,
                       const Gradients<T>& grads, PullBack<T>& pull,
                       StructuredFactors<T>* structured, Span<T> d) {
  const auto interior = static_cast<std::int8_t>(Side::interior);
  const T* score = problem.eta_v.at(instance);
  const auto slope = [&](const PairView<T>& pair, int q) {
    return pair.slope(p, score[q], row_side[problem.num_rows + q]);
  };

  // d: the gradient with respect to mu, with what comes through the values of the pairs.
  if (p.complete) {
    std::copy(grads.grad_mu, grads.grad_mu + p.n, d.data);
  } else {
    for (int j = 0; j < p.n; ++j) d[j] = grads.grad_mu[p.var[j]];
  }
  for (int q = 0; q < problem.num_pairs; ++q) {
    if (grads.grad_mu_v[q] == 0) continue;
    const PairView<T> pair(problem, q);
    const auto [first, second] = slope(pair, q);
    if (first != 0) d[p.new_var[pair.j1]] += first * grads.grad_mu_v[q];
    if (second != 0) d[p.new_var[pair.j2]] += second * grads.grad_mu_v[q];
  }

  const auto is_free = [&](int j) { return var_side[p.var[j]] == interior; };
  const auto is_tight = [&](int r) { return row_side[p.row[r]] == interior; };
  T residual = 0;
  if (PairTies<T>::apply_to(problem)) {
    pull.ties.project(p, is_free, is_tight, d);
  } else {
    residual = project(problem, p, is_free, is_tight, var_side, grads, pull, structured, d);
  }
  if (p.complete && !p.weighted()) {
    for (int j = 0; j < p.n; ++j) grads.grad_eta_u[j] = var_side[j] == interior ? d[j] : T(0);
  } else {
    std::fill(grads.grad_eta_u, grads.grad_eta_u + problem.num_vars, T(0));
    for (int j = 0; j < p.n; ++j) {
      if (is_free(j)) grads.grad_eta_u[p.var[j]] = d[j] * p.give(j);
    }
  }
  if (structured != nullptr) write_structures(problem, p, *structured, grads, d.data, pull.system);
  for (int q = 0; q < problem.num_pairs; ++q) {
    const PairView<T> pair(problem, q);
    const auto [first, second] = slope(pair, q);
    grads.grad_eta_v[q] = first * grads.grad_eta_u[pair.j1] + second * grads.grad_eta_u[pair.j2];
  }
  return residual;
}

}  // namespace factormax
