#include "factormax/lone_rows.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>

#include "factormax/local/box_row.hpp"
#include "factormax/parallel.hpp"
#include "factormax/precision.hpp"
#include "local_problem.hpp"
#include "thread_memory.hpp"

namespace factormax {

namespace {

constexpr std::int64_t kGrain = 4096;  // variables; less is not worth another thread
constexpr double kEps = std::numeric_limits<double>::epsilon();

// ---- Loops over one row

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

// ---- Forward

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

// If a row can't hold, nothing is left of its instance but the proof.
template <class T>
void write_ended(const Problem<T>& p, std::int64_t i, const Ended& ended, const Outputs<T>& out) {
  const bool infeasible = ended.refuted >= 0;
  const double inf = std::numeric_limits<double>::infinity();
  out.objective[i] = infeasible ? -inf : ended.objective;
  if (!infeasible) {
    const Status status = ended.converged ? Status::converged : Status::stalled;
    return write_result({status, 1, 0, ended.residual, ended.residual}, i, out);
  }
  write_result({Status::infeasible, 0, 0, inf, 0}, i, out);
  const std::uint8_t* mask = p.mask.at(i);
  const T* eta = p.eta_u.at(i);
  for (int j = 0; j < p.num_vars; ++j) {
    out.mu.at(i)[j] = is_present(mask, eta, j) ? std::numeric_limits<T>::quiet_NaN() : T(0);
  }
  const auto absent = static_cast<std::int8_t>(Side::absent);
  std::fill_n(out.tau.at(i), p.num_rows, T(0));
  std::fill_n(out.var_side.at(i), p.num_vars, absent);
  std::fill_n(out.row_side.at(i), p.num_rows, absent);
  out.tau.at(i)[ended.refuted] = static_cast<T>(ended.refuting);
}

// Calls work(worker, i, chunk) for all chunks of all instances; small instances are taken several
// at a time. make() is called by each thread.
template <class Make, class Work>
void for_chunks(const Layout& p, std::int64_t batch, const Make& make, const Work& work,
                Control& control) {
  const std::int64_t chunks = p.lone_rows->num_chunks();
  const std::int64_t together =
      chunks > 1 ? 1 : std::max<std::int64_t>(1, kGrain / std::max(p.num_vars, 1));
  const std::int64_t items = (batch + together - 1) / together;
  parallel_for(
      items * chunks,
      [&]() -> Worker {
        auto worker = make();
        return [&, worker, chunks, together](std::int64_t item, bool is_caller) {
          if (control.stopped(is_caller)) return;
          const std::int64_t first = item / chunks * together;
          const std::int64_t last = std::min(batch, first + together);
          for (std::int64_t i = first; i < last; ++i) {
            work(*worker, i, static_cast<int>(item % chunks));
          }
        };
      },
      [&] { control.stopped(true); });
}

}  // namespace

// ---- The rows of a layout

std::unique_ptr<const LoneRows> LoneRows::of(const Layout& p, const double* coef) {
  if (p.num_pairs > 0 || p.structured.count > 0 || p.num_rows != p.num_blocks) return nullptr;
  auto made = std::make_unique<LoneRows>();
  std::vector<std::uint8_t> taken(static_cast<std::size_t>(p.num_vars), 0);
  made->rows_.reserve(static_cast<std::size_t>(p.num_rows) + 1);
  for (int f = 0; f < p.num_blocks; ++f) {
    const int r = p.block_ptr[f], begin = p.row_ptr[r], end = p.row_ptr[r + 1];
    const auto kind = static_cast<RowKind>(p.kind[r]);
    const bool plain = p.block_kind[f] == static_cast<std::int8_t>(BlockKind::row) &&
                       p.block_ptr[f + 1] == r + 1 && p.block_isolated[f] != 0 &&
                       kind != RowKind::absent;
    if (!plain) return nullptr;
    const double sign = begin < end ? coef[begin] : 1.0;
    const bool even = std::all_of(coef + begin, coef + end, [&](double a) { return a == sign; });
    if (!even || std::fabs(sign) != 1) return nullptr;
    for (int k = begin; k < end; ++k) taken[p.col[k]] = 1;
    made->add(
        {Indices::of(p.col + begin, end - begin), r, sign > 0 ? 1 : -1, kind == RowKind::equality});
  }
  for (int j = 0; j < p.num_vars; ++j) {
    if (taken[j] == 0) made->free_.push_back(j);
  }
  const int free = static_cast<int>(made->free_.size());
  if (free > 0) made->add({Indices::of(made->free_.data(), free), -1, 1, false});
  made->chunk_ptr_.push_back(static_cast<int>(made->rows_.size()));
  return made;
}

void LoneRows::add(const LoneRow& row) {
  if (in_chunk_ >= kGrain) {
    chunk_ptr_.push_back(static_cast<int>(rows_.size()));
    in_chunk_ = 0;
  }
  rows_.push_back(row);
  in_chunk_ += row.vars.count;
  longest_ = std::max(longest_, row.vars.count);
}

// ---- Entry points

template <class T>
std::size_t lone_row_bytes(const LoneRows& rows) {
  Workspace counter;
  RowSolver<T>(Problem<T>(), 0, Outputs<T>()).allocate(rows.longest(), counter);
  return counter.used();
}

template <class T>
void solve_lone_rows(const Problem<T>& p, std::int64_t batch, double tol, const Outputs<T>& out,
                     Control& control) {
  const LoneRows& rows = *p.lone_rows;
  const int chunks = rows.num_chunks();
  std::vector<Ended> ended(chunks > 1 ? batch * chunks : 0);
  struct State {
    State(const Problem<T>& p, double tol, const Outputs<T>& out, Control& control)
        : lease(memory_of_thread(), lone_row_bytes<T>(*p.lone_rows)), solver(p, tol, out) {
      if (lease.get() == nullptr) {
        control.fail_for_memory();
      } else {
        solver.allocate(p.lone_rows->longest(), *lease.get());
      }
    }
    ThreadMemory::Lease lease;
    RowSolver<T> solver;
  };
  const auto make = [&] { return std::make_shared<State>(p, tol, out, control); };
  const auto work = [&](State& state, std::int64_t i, int c) {
    Ended own;
    for (const LoneRow& row : rows.chunk(c)) state.solver.solve(i, row, own);
    if (chunks > 1) {
      ended[i * chunks + c] = own;
    } else {
      write_ended(p, i, own, out);
    }
  };
  for_chunks(p, batch, make, work, control);
  if (control.stop.load() || chunks == 1) return;
  for (std::int64_t i = 0; i < batch; ++i) {
    Ended all;
    for (int c = 0; c < chunks; ++c) all.add(ended[i * chunks + c]);
    write_ended(p, i, all, out);
  }
}

template <class T>
void vjp_lone_rows(const Problem<T>& p, std::int64_t batch, const BatchGradients<T>& grads,
                   Control& control) {
  // For rows whose variables do not lie side by side.
  struct Room {
    Room(int longest, Control& control)
        : lease(memory_of_thread(), static_cast<std::size_t>(longest) * (2 * sizeof(T) + 1) + 256) {
      if (Workspace* ws = lease.get()) {
        grad = ws->take<T>(longest);
        out = ws->take<T>(longest);
        side = ws->take<std::int8_t>(longest);
      } else {
        control.fail_for_memory();
      }
    }
    ThreadMemory::Lease lease;
    Span<T> grad, out;
    Span<std::int8_t> side;
  };
  const LoneRows& rows = *p.lone_rows;
  const auto make = [&] { return std::make_shared<Room>(rows.longest(), control); };
  const auto work = [&](Room& room, std::int64_t i, int c) {
    const bool infeasible = grads.status[i] == static_cast<std::int32_t>(Status::infeasible);
    const std::int8_t* row_side = grads.row_side.at(i);
    if (c == 0) grads.residual[i] = 0;
    for (const LoneRow& row : rows.chunk(c)) {
      const Indices& vars = row.vars;
      const T* grad = vars.gather(grads.grad_mu.at(i), room.grad.data);
      const std::int8_t* side = vars.gather(grads.var_side.at(i), room.side.data);
      T* own = vars.place(grads.grad_eta_u.at(i), room.out.data);
      if (infeasible) {
        std::fill_n(own, vars.count, T(0));
      } else {
        const bool tight =
            row.row >= 0 && row_side[row.row] == static_cast<std::int8_t>(Side::interior);
        pull_back(grad, side, vars.count, tight, own);
      }
      vars.scatter(own, grads.grad_eta_u.at(i));
    }
  };
  for_chunks(p, batch, make, work, control);
}

#define FACTORMAX_INSTANTIATE(T)                                                               \
  template std::size_t lone_row_bytes<T>(const LoneRows&);                                     \
  template void solve_lone_rows<T>(const Problem<T>&, std::int64_t, double, const Outputs<T>&, \
                                   Control&);                                                  \
  template void vjp_lone_rows<T>(const Problem<T>&, std::int64_t, const BatchGradients<T>&,    \
                                 Control&);

FACTORMAX_INSTANTIATE(float)
FACTORMAX_INSTANTIATE(double)

}  // namespace factormax
