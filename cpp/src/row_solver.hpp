// Rows that share no variable, solved one after the other on one thread.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "factormax/local/box_row.hpp"
#include "factormax/lone_rows.hpp"
#include "factormax/precision.hpp"
#include "local_problem.hpp"

namespace factormax {

constexpr double kEps = std::numeric_limits<double>::epsilon();

template <class T>
struct Extent {
  T sum, largest;
};

template <class T>
FACTORMAX_VECTOR Extent<T> extent(const T* y, int n) {
  T sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int k = 0; k < n; ++k) sum += y[k];
  return {sum, largest_of(n, -std::numeric_limits<T>::max(), [y](int k) { return y[k]; })};
}

// The sum of clip(y - t, 0, 1), and how many of these are free or just about to be. It clips y to t
// and t + 1: there compilers see a minimum and a maximum, and with 0 and 1 they do worse.
template <class T>
struct Clipped {
  T sum, free;
};

template <class T>
FACTORMAX_VECTOR Clipped<T> clipped(const T* y, int n, T t) {
  T sum = 0, free = 0;
  const T top = t + 1;
#pragma omp simd reduction(+ : sum, free)
  for (int k = 0; k < n; ++k) {
    const T below = y[k] < top ? y[k] : top;
    const T clipped = below > t ? below : t;
    sum += clipped - t;
    free += clipped == y[k] ? T(1) : T(0);
  }
  return {sum, free};
}

// Copies those above the floor to `kept`, in double. Returns how many. flags: (n + 8,).
template <class T>
FACTORMAX_VECTOR int keep_above(const T* y, int n, T floor, std::uint8_t* flags, double* kept) {
  int count = 0;
#if defined(__GNUC__) && __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
  // They are often few: flags tell where, eight at a time.
#pragma omp simd
  for (int k = 0; k < n; ++k) flags[k] = y[k] > floor;
  for (int k = n; k < n + 8; ++k) flags[k] = 0;
  for (int first = 0; first < n; first += 8) {
    std::uint64_t word;
    std::memcpy(&word, flags + first, sizeof word);
    for (; word != 0; word &= word - 1) kept[count++] = y[first + __builtin_ctzll(word) / 8];
  }
#else
  (void)flags;
  for (int k = 0; k < n; ++k) {
    kept[count] = y[k];
    count += y[k] > floor;
  }
#endif
  return count;
}

// What a row adds up to at a multiplier, in double.
struct Sums {
  double sum = 0, free = 0, objective = 0;
};

template <class T>
FACTORMAX_VECTOR Sums sums_at(const T* y, int n, double t) {
  double sum = 0, free = 0, objective = 0;
  const double top = t + 1;
#pragma omp simd reduction(+ : sum, free, objective)
  for (int k = 0; k < n; ++k) {
    const double score = y[k];
    const double below = score < top ? score : top;
    const double clipped = below > t ? below : t;
    const double v = clipped - t;
    sum += v;
    free += clipped == score ? 1.0 : 0.0;
    objective += v * (score - 0.5 * v);
  }
  return {sum, free, objective};
}

// The marginals and sides at multiplier t, which is a sum of two numbers: the difference of the
// first and a score of its size is exact. As in `classify`, what is in doubt is clipped; a score
// that is about to be clipped is about t, or t + 1.
template <class T>
FACTORMAX_VECTOR void write_row(const T* y, int n, double t, double error, T* mu,
                                std::int8_t* side) {
  const T high = static_cast<T>(t), low = static_cast<T>(t - double(high));
  const double margin = error + 16 * kEps * std::fabs(t);
  const T zero = static_cast<T>(margin);
  const T one = static_cast<T>(1 - margin - 8 * kEps) - std::numeric_limits<T>::epsilon();
#pragma omp simd
  for (int k = 0; k < n; ++k) {
    const T z = (y[k] - high) - low;
    const T above = z > zero ? z : T(0);
    mu[k] = z < one ? above : T(1);
  }
#pragma omp simd
  for (int k = 0; k < n; ++k) {
    side[k] = static_cast<std::int8_t>((mu[k] == 1) - (mu[k] == 0));
  }
}

// Subtracts the mean of the free ones from the free ones, if the row is tight.
template <class T>
FACTORMAX_VECTOR void pull_back(const T* grad, const std::int8_t* side, int n, bool tight, T* out) {
  const auto interior = static_cast<std::int8_t>(Side::interior);
  T mean = 0;
  if (tight) {
    T sum = 0, free = 0;
#pragma omp simd reduction(+ : sum, free)
    for (int k = 0; k < n; ++k) {
      sum += side[k] == interior ? grad[k] : T(0);
      free += side[k] == interior ? T(1) : T(0);
    }
    if (free > 0) mean = sum / free;
  }
#pragma omp simd
  for (int k = 0; k < n; ++k) out[k] = side[k] == interior ? grad[k] - mean : T(0);
}

// How some rows of an instance ended, taken together.
struct Ended {
  double objective = 0, residual = 0;
  int refuted = -1;  // the first row that can't hold,
  int refuting = 0;  // and the multiplier that proves it
  bool converged = true;

  void add(const Ended& other) {
    objective += other.objective;
    residual = worse(other.residual, residual);
    converged = converged && other.converged;
    if (other.refuted >= 0 && (refuted < 0 || other.refuted < refuted)) {
      refuted = other.refuted;
      refuting = other.refuting;
    }
  }
};

// Solves rows one after the other on one thread.
template <class T>
class RowSolver {
 public:
  RowSolver(const Problem<T>& problem, double tol, const Outputs<T>& out)
      : p_(problem), tol_(tol), out_(out) {}

  void allocate(int longest, Workspace& ws) {
    y_ = ws.take<T>(longest);
    mu_ = ws.take<T>(longest);
    side_ = ws.take<std::int8_t>(longest);
    place_ = ws.take<std::int32_t>(longest);
    flags_ = ws.take<std::uint8_t>(longest + 8);
    kept_ = ws.take<double>(longest + kPad);
    ones_ = ws.take<double>(longest);
    if (ones_.data != nullptr) fill(ones_, 1.0);
  }

  void solve(std::int64_t i, const LoneRow& row, Ended& ended) {
    const Indices& vars = row.vars;
    T *mu = out_.mu.at(i), *tau = out_.tau.at(i);
    std::int8_t *side = out_.var_side.at(i), *row_side = out_.row_side.at(i);
    if (p_.mask.data == nullptr && vars.adjoin) {
      const T* y = p_.eta_u.at(i) + vars.index[0];
      const Extent<T> whole = extent(y, vars.count);
      if (std::isfinite(whole.sum)) {
        solve(i, row, y, vars.count, whole, mu + vars.index[0], side + vars.index[0], tau, row_side,
              ended);
        return;
      }
    }
    const int n = gather(i, vars);
    solve(i, row, y_.data, n, extent(y_.data, n), mu_.data, side_.data, tau, row_side, ended);
    for (int k = 0; k < vars.count && n < vars.count; ++k) {
      mu[vars.index[k]] = 0;
      side[vars.index[k]] = static_cast<std::int8_t>(Side::absent);
    }
    for (int k = 0; k < n; ++k) {
      mu[place_[k]] = mu_[k];
      side[place_[k]] = side_[k];
    }
  }

 private:
  // Gathers the scores of the variables that are present. Returns how many.
  int gather(std::int64_t i, const Indices& vars) {
    const T* eta = p_.eta_u.at(i);
    const std::uint8_t* mask = p_.mask.at(i);
    int n = 0;
    for (int k = 0; k < vars.count; ++k) {
      const std::int32_t j = vars.index[k];
      place_[n] = j;
      y_[n] = eta[j];
      n += is_present(mask, eta, j);
    }
    return n;
  }

  void solve(std::int64_t i, const LoneRow& row, const T* y, int n, const Extent<T>& whole, T* mu,
             std::int8_t* side, T* tau, std::int8_t* row_side, Ended& ended) {
    Ended own;
    double t = 0, bound = 0;
    Sums at;
    const bool holds = row.row < 0 || always_holds(i, row, n, own);
    if (own.refuted >= 0) return ended.add(own);
    if (!holds) {
      bound = row.sign * double(p_.rhs.at(i)[row.row]);
      t = root(row, y, n, whole, bound, at);
    } else {
      at = sums_at(y, n, t);
    }
    own.objective = at.objective;
    if (!holds) {
      const double excess = at.sum - bound;
      const bool slack = !row.equality && t == 0 && excess * row.sign <= 0;
      own.residual = slack ? 0.0 : std::fabs(excess);
      const double rounding = 8 * kEps * (1 + std::fabs(t)) * n;
      const double most = Precision<double>::unresolved;
      own.converged = own.residual <= std::max(tol_, std::min(rounding, most));
    }
    const double most = 1e-3;  // a margin above would clip what is visibly free
    write_row(y, n, t, std::min(2 * own.residual / std::max(at.free, 1.0), most), mu, side);
    if (row.row >= 0) {
      tau[row.row] = static_cast<T>(row.sign * t);
      Side at_side = Side::interior;
      if (holds) {
        at_side = Side::absent;
      } else if (!row.equality) {
        const double x = std::fabs(t) * std::sqrt(double(n));
        const double margin = std::min(2 * n * own.residual, most) + 8 * kEps * (1 + x);
        if (x <= margin && std::fabs(at.sum - bound) > margin) at_side = Side::lower;
      }
      row_side[row.row] = static_cast<std::int8_t>(at_side);
    }
    ended.add(own);
  }

  // Whether a row holds for every mu, or is absent; one that holds for none is refuted.
  bool always_holds(std::int64_t i, const LoneRow& row, int n, Ended& own) const {
    if (n == 0) return true;
    const T b = p_.rhs.at(i)[row.row];
    const T least = row.sign > 0 ? T(0) : T(-n), most = row.sign > 0 ? T(n) : T(0);
    const T eps = std::max(std::numeric_limits<T>::epsilon(), static_cast<T>(p_.row_precision));
    own.refuting = refutation(least, most, b, row.equality, eps);
    if (own.refuting != 0) own.refuted = row.row;
    return !row.equality && most <= b;
  }

  // The multiplier, times the sign, at which the row adds up to the bound, and what it adds up to
  // there. What is 0 at a smaller multiplier is 0 here too: a few passes find such a multiplier,
  // and the rest is about the variables that are left, which are often few.
  double root(const LoneRow& row, const T* y, int n, const Extent<T>& whole, double bound,
              Sums& at) {
    const double inf = std::numeric_limits<double>::infinity();
    const double lo = row.equality || row.sign < 0 ? -inf : 0.0;
    const double hi = row.equality || row.sign > 0 ? inf : 0.0;
    if (!row.equality) {
      at = sums_at(y, n, 0.0);
      if (row.sign * (at.sum - bound) <= 0) return 0;
    }
    T floor = -std::numeric_limits<T>::infinity();
    if (bound <= 1) {
      // Rounded down: scores may be so large that 1 is nothing beside them.
      floor = std::nextafter(whole.largest - 1, floor);
    } else {
      const T rounding = n * std::numeric_limits<T>::epsilon();
      T t = (whole.sum - static_cast<T>(bound)) / n;
      t = std::min(std::max(t, static_cast<T>(lo)), static_cast<T>(hi));
      for (int step = 0; step < kLooks; ++step) {
        const Clipped<T> here = clipped(y, n, t);
        const T excess = here.sum - static_cast<T>(bound);
        if (!(here.free > 0) || !(excess > rounding * (here.sum + 1 + std::fabs(t)))) break;
        floor = t;
        t += excess / here.free;
      }
    }
    floor = std::min(floor, static_cast<T>(hi));
    const int count = keep_above(y, n, floor, flags_.data, kept_.data);
    double t = 0;
    if (!newton(count, bound, lo, hi, t, at)) {
      const Span<const double> ones = ones_.first(count);
      const local::BoxRow<double> left{kept_.first(count), ones, ones, bound};
      t = local::box_row(left, lo, hi);
      at = sums_at(kept_.data, count, t);
    }
    return t;
  }

  // Newton's method on what was kept. Returns false if it does not converge.
  bool newton(int count, double bound, double lo, double hi, double& t, Sums& at) {
    if (count == 0) return false;
    double sum = 0;
    for (int k = 0; k < count; ++k) sum += kept_[k];
    t = (sum - bound) / count;
    // Whole vectors are quicker, and what is far below adds nothing.
    const int padded = (count + kPad - 1) / kPad * kPad;
    for (int k = count; k < padded; ++k) kept_[k] = -std::numeric_limits<double>::max();
    const double most = 8 * kEps * std::max(1.0, std::fabs(bound));
    double left = lo, right = hi;
    for (int step = 0; step < kSteps; ++step) {
      if (!(t > left && t < right)) return false;
      at = sums_at(kept_.data, padded, t);
      const double excess = at.sum - bound;
      if (std::fabs(excess) <= most * (1 + std::fabs(t))) return at.free > 0 || excess == 0;
      (excess > 0 ? left : right) = t;
      t += excess / at.free;  // without a free one, out of bounds
    }
    return false;
  }

  static constexpr int kLooks = 3;   // passes over all variables, at most
  static constexpr int kSteps = 20;  // steps over those kept, at most
  static constexpr int kPad = 4;     // doubles in a vector

  const Problem<T>& p_;
  double tol_;
  const Outputs<T>& out_;
  Span<T> y_, mu_;
  Span<std::int8_t> side_;
  Span<std::int32_t> place_;
  Span<std::uint8_t> flags_;
  Span<double> kept_, ones_;
};

}  // namespace factormax
