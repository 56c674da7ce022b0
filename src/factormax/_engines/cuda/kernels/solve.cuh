// Projected L-BFGS on the compact dual with an exact finish, docs/math.md (12)-(22): the twin of
// the core's `CompactSolver`, for graphs of rows, pairs and hubs, by a team of threads.
//
// All members of the team hold the same scalars and take the same turns. What needs another way
// (interior points, proximal steps) ends as stalled or out of passes, and is left to the CPU.
#pragma once

#include "cuts.cuh"
#include "system.cuh"

namespace factormax {

// As in the core, and one more.
enum Status : int {
  kConverged = 0,
  kMaxIter = 1,
  kInfeasible = 2,
  kStalled = 4,
  kBadNumber = 6,  // a score is NaN or too large
};

template <class V>
class Solver {
  using T = typename V::T;
  using Io = typename V::Io;
  using Rows = RowArray<V>;

 public:
  FM_DEVICE explicit Solver(const Graph<V>& graph)
      : graph_(graph),
        a_(graph.a),
        team_(graph.team),
        x_(graph.row_array(0)),
        g_(graph.row_array(1)),
        next_x_(graph.row_array(2)),
        next_g_(graph.row_array(3)),
        d_(graph.row_array(4)),
        lo_(graph.row_array(5)),
        hi_(graph.row_array(6)),
        scale_(graph.row_array(7)),
        rhs_(graph.row_array(8)),
        mark_(graph.row_array(9)),
        norm_(graph.row_array(10)),
        hubs_(graph) {}

  // Whether an earlier launch did what can be done.
  FM_DEVICE static bool is_done(const Args<V>& args, i64 instance) {
    const int status = args.status[instance];
    if (status == kStalled || status == kMaxIter) return false;
    if (status != kConverged && args.unsolved != nullptr) *args.unsolved = 1;
    return true;
  }

  FM_DEVICE void operator()() {
    if (a_.retry) passes_ = a_.iterations[graph_.instance];
    team_.sync();
    if constexpr (V::kTrees) Cuts<V>(graph_).begin();
    const bool good = take_scores() && leave_out() && take_rows();
    if (good) {
      take_pairs();
      if constexpr (V::kHubs) hubs_.begin();
      begin();
      minimise();
    }
    if (status_ == kInfeasible || status_ == kBadNumber || (V::kTrees && !good)) {
      write_nothing();
    } else {
      write();
    }
  }

 private:
  static constexpr int kMemory = 5;    // steps that L-BFGS remembers,
  static constexpr int kHistory = 11;  // in row arrays from this one on
  static constexpr T kEps = Constants<T>::kEps;

  // The constants of the core's solver, with its reasons.
  static constexpr T kDirect = 32, kFirst = 16, kStage = 4;
  static constexpr T kPromising = T(0.015), kMostPromising = T(0.25), kNear = T(5e-3);
  static constexpr T kCutBelow = T(1e-1), kSooner = T(1e-2);  // residuals at which cuts are sought
  static constexpr T kOraclePromising = T(0.1);
  static constexpr T kSteep = T(0.9), kLonger = 4, kRay = 1000, kLongest = T(1e8);
  static constexpr T kArmijo = T(1e-4), kJump = T(1e-3), kNearer = T(0.9), kSane = 10;
  static constexpr T kFar = 1000;
  static constexpr int kTries = 25, kStall = 12, kFirstCheck = 24, kCheckEvery = 64;
  static constexpr int kStagePasses = 200;  // before the next stage begins anyway
  // Of conjugate gradients, which take a launch's time: the finish is an attempt.
  static constexpr int kFinishSteps = Constants<T>::kDouble ? 200 : 60;
  static constexpr T kFinish = Constants<T>::kDouble ? T(1e-6) : T(1e-3);
  static constexpr double kCertificate = Constants<T>::kDouble ? 1e-10 : 1e-5;
  static constexpr T kStageTolerance = T(0.1);

  enum class Phase { start, search, back, finish };

  // What an evaluation shows.
  struct Seen {
    T slope;     // at its end, of the step from x
    T squares;   // of the step,
    T bends;     // and of the change of the gradient
    T value;     // of the dual
    T residual;  // in units of variables
    T largest;   // multiplier
  };

  // ---- The instance ----------------------------------------------------------------------------

  FM_DEVICE bool take_scores() {
    const Io* scores = a_.eta_u + graph_.instance * a_.n;
    const u8* mask = a_.mask == nullptr ? nullptr : a_.mask + graph_.instance * a_.mask_stride;
    T* eta = graph_.eta();
    bool bad = false, whole = true;
    T size = 0, top = 0;
    graph_.for_vars([&](int j) {
      T score = scores[j];
      if (mask != nullptr && mask[j] == 0) score = -infinity<T>();
      if (score > -infinity<T>()) {
        size = most(size, magnitude(score));
        top = most(top, score);
        bad |= !(score < infinity<T>());
      } else if (score == -infinity<T>()) {
        whole = false;
      } else {
        bad = true;  // NaN
      }
      eta[j] = T(score);
    });
    graph_.for_pairs([&](int p) {
      const T score = magnitude(T(graph_.score[p]));
      bad |= !(score < infinity<T>());
      size = most(size, score);
      top = most(top, score);
    });
    if constexpr (V::kHubs) {
#pragma unroll 1
      for (int k = a_.pairs + team_.rank; k < graph_.num_scores(); k += V::kTeam) {
        bad |= !(T(graph_.score[k]) < infinity<T>());  // -inf forbids what it is the score of
      }
    }
    graph_.set_dummies();
    T both[2] = {size, top};
    team_.reduce(both, Max());
    largest_score_ = both[0];
    top_score_ = both[1];
    complete_ = !team_.any(!whole);
    if (!team_.any(bad)) return true;
    status_ = kBadNumber;
    return false;
  }

  // Takes out what trees do not allow. Returns false if that would leave a factor without variables
  // that the user did not mask: trees by structures, on the CPU, know what to do then.
  FM_DEVICE bool leave_out() {
    if constexpr (V::kTrees) {
      if (complete_ || !Cuts<V>(graph_).leave_out()) return true;
      bool hidden = false;
      const auto given = given_by_user();
      const auto hides = [&](int r) {
        bool present = false, had = false;
        graph_.each_entry(r, [&](int j, T) {
          present |= graph_.present(j);
          had |= given(j);
        });
        return had && !present;
      };
      const T* rhs = a_.rhs + graph_.instance * a_.rhs_stride;
      graph_.for_hard_rows([&](int r) {
        const bool holds = a_.kind[r] == kEquality ? rhs[r] == 0 : rhs[r] >= 0;  // if all are off
        hidden |= r < a_.model_rows && !holds && hides(r);
      });
      graph_.for_pairs([&](int p) { hidden |= hides(a_.hard + p); });
      if (!team_.any(hidden)) return true;
      give_up();
      return false;
    }
    return true;
  }
  // Tells whether a variable is there, but for the rules of trees and pairs.
  FM_DEVICE auto given_by_user() const {
    const Io* scores = a_.eta_u + graph_.instance * a_.n;
    const u8* mask = a_.mask == nullptr ? nullptr : a_.mask + graph_.instance * a_.mask_stride;
    return
        [=](int j) { return T(scores[j]) > -infinity<T>() && (mask == nullptr || mask[j] != 0); };
  }

  // The bounds, scales and right-hand sides of the hard rows. Returns false if one can't hold.
  FM_DEVICE bool take_rows() {
    const T* rhs = a_.rhs + graph_.instance * a_.rhs_stride;
    if (a_.scale != nullptr && complete_) {
      graph_.for_hard_rows(
          [&](int r) { set_row(r, a_.scale[r], rhs[r], a_.kind[r] == kEquality); });
      team_.sync();
      return true;
    }
    team_.sync();
    bool holds = true;
    struct AddAll {
      FM_DEVICE Several<T, 3> operator()(Several<T, 3> p, Several<T, 3> q) const {
        return {{p.at[0] + q.at[0], p.at[1] + q.at[1], p.at[2] + q.at[2]}};
      }
    };
    graph_.by_hard_row(
        Several<T, 3>{{0, 0, 0}}, AddAll(),
        [&](u32 code, int place) {
          const T c = graph_.present(graph_.index_of(code)) ? graph_.row_coef(code, place) : T(0);
          return Several<T, 3>{{c * c, least(c, T(0)), most(c, T(0))}};
        },
        [&](int r, Several<T, 3> sum) { holds &= take_row(r, rhs, sum); });
    team_.sync();
    if (!team_.any(!holds)) return true;
    status_ = kInfeasible;
    return false;
  }

  // sum: of the squares, and the least and the most that a . mu can be.
  FM_DEVICE bool take_row(int r, const T* rhs, Several<T, 3> sum) const {
    const u8 flags = a_.flags[r];
    const int first = a_.block[2 * r], last = a_.block[2 * r + 1] - 1;
    const bool equal = (flags & (kBandLower | kBandUpper)) != 0 && rhs[first] == -rhs[last];
    const bool equality = a_.kind[r] == kEquality || equal;
    const T b = rhs[r], low = sum.at[1], high = sum.at[2];
    const bool gone = a_.kind[r] == kAbsent || (equal && (flags & kBandLower) != 0) ||
                      ((flags & kOfFactor) != 0 && !complete_ && all_masked(first, last));
    // Parameters that were worked out in float may miss their own sum.
    const T slack = most(T(1e-7), 16 * kEps) * (high - low + magnitude(b));
    const bool too_much = low > b + slack, too_little = equality && high < b - slack;
    const bool says_nothing = sum.at[0] == 0 || (!equality && high <= b);
    next_x_[r] = 0;  // the certificate
    if (!gone && (too_much || too_little)) next_x_[r] = too_much ? T(1) : T(-1);
    set_row(r, gone || says_nothing ? T(0) : 1 / sqrt(sum.at[0]), b, equality);
    return gone || !(too_much || too_little);
  }

  // A row without a scale is absent: its multiplier stays 0.
  FM_DEVICE void set_row(int r, T scale, T b, bool equality) const {
    scale_[r] = scale;
    norm_[r] = scale > 0 ? 1 / scale : T(0);
    rhs_[r] = scale > 0 ? b : T(0);
    lo_[r] = equality && scale > 0 ? -infinity<T>() : T(0);
    hi_[r] = scale > 0 ? infinity<T>() : T(0);
  }

  FM_DEVICE bool all_masked(int first, int last) const {
#pragma unroll 1
    for (int k = a_.row_ptr[first]; k < a_.row_ptr[last + 1]; ++k) {
      if (graph_.present(a_.row_entry[k] >> 1)) return false;
    }
    return true;
  }

  // A pair is a linear term, here added to the scores, and a soft row; with one end masked it is a
  // linear term at most.
  FM_DEVICE void take_pairs() {
    if constexpr (V::kPairs) {
      const bool zeros = a_.zeros != 0 && find_zeros();
      const auto given = given_by_user();
      T* eta = graph_.eta();
      graph_.by_variable(
          T(0), Add(),
          [&](u32 code, int) {
            const int p = graph_.index_of(code) - a_.hard;
            if (p < 0 || p >= a_.pairs) return T(0);
            const bool second = graph_.is_second(code), negated = graph_.is_negated(code) == second;
            const int other = a_.pair[2 * p + (second ? 0 : 1)];
            const T score = graph_.score[p], own = negated ? -score : score;
            if (!given(other >> 1)) return T((other & 1) != 0 ? own : T(0));
            const bool zero =
                zeros && (is_zero(other >> 1) || is_zero(a_.pair[2 * p + second] >> 1));
            return T(second && score >= 0 && !zero ? own : T(0));
          },
          [&](int j, T sum) { eta[j] += sum; });
      team_.sync();
      graph_.for_pairs([&](int p) {
        const int first = a_.pair[2 * p], second = a_.pair[2 * p + 1], r = a_.hard + p;
        const T score = graph_.score[p], n1 = T(first & 1), n2 = T(second & 1);
        const bool here = graph_.present(first >> 1) && graph_.present(second >> 1) &&
                          !(zeros && (is_zero(first >> 1) || is_zero(second >> 1)));
        scale_[r] = here ? Constants<T>::kHalfRoot2 : T(0);
        norm_[r] = here ? Constants<T>::kRoot2 : T(0);
        rhs_[r] = !here ? T(0) : score >= 0 ? n1 - n2 : 1 - n1 - n2;
        lo_[r] = 0;
        hi_[r] = here ? magnitude(score) * Constants<T>::kRoot2 : T(0);
      });
      team_.sync();
    }
  }

  // A variable that is in pairs only, and earns nothing even if all its partners with a positive
  // score are on, is 0, docs/math.md (11a). zero() tells the round that showed it.
  FM_DEVICE bool find_zeros() const {
    u8* zero = graph_.zero();
    T* gain = graph_.v();
    graph_.for_vars([&](int j) { zero[j] = in_hard_row(j) ? kHeld : 0; });
    if (team_.rank == 0) zero[a_.n] = 0;
    team_.sync();
    int zeros = 0;
#pragma unroll 1
    for (u8 round = 1; round <= kZeroRounds; ++round) {
      graph_.by_variable(
          T(0), Add(),
          [&](u32 code, int) {
            const int p = graph_.index_of(code) - a_.hard;
            if (p < 0 || p >= a_.pairs || !(graph_.score[p] > 0)) return T(0);
            const int other = a_.pair[2 * p + (graph_.is_second(code) ? 0 : 1)] >> 1;
            return graph_.present(other) && !is_zero(other) ? T(graph_.score[p]) : T(0);
          },
          [&](int j, T sum) { gain[j] = T(graph_.eta()[j]) + sum; });
      team_.sync();
      int fresh = 0;
      graph_.for_vars([&](int j) {
        if (zero[j] != 0 || gain[j] > 0 || !graph_.present(j)) return;
        zero[j] = round;
        ++fresh;
      });
      fresh = team_.sum(fresh);
      team_.sync();
      zeros += fresh;
      if (fresh <= a_.n / kFewZeros || zeros == a_.n) break;
    }
    return zeros > 0;
  }
  FM_DEVICE bool in_hard_row(int j) const {  // they come first
    const int first = a_.var_ptr[j];
    return first < a_.var_ptr[j + 1] && (a_.var_entry[first] >> 2) < a_.hard;
  }
  FM_DEVICE bool is_zero(int j) const { return u8(graph_.zero()[j] - 1) < kHeld - 1; }

  static constexpr u8 kHeld = 255;
  static constexpr int kZeroRounds = 3, kFewZeros = 16;

  // ---- The start -------------------------------------------------------------------------------

  FM_DEVICE void begin() {
    const T size = least(largest_score_, 4 * most(T(8), top_score_));
    T ratio = 1;
#pragma unroll 1
    for (T s = size; !a_.all_isolated && s > (stages_ == 0 ? kDirect : kFirst); s /= kStage) {
      ++stages_;
      ratio /= kStage;
    }
    rescale(ratio);
    T widest = 1;
    graph_.for_rows([&](int r) {
      if (graph_.is_soft(r)) widest = most(widest, hi_[r] * scale_[r]);
      T start = graph_.is_soft(r) ? hi_[r] / 2 : T(0);
      if (a_.warm != nullptr) {
        const T given = T(a_.warm[graph_.instance * graph_.num_rows() + r]) * ratio;
        start = scale_[r] > 0 ? clip(given / scale_[r], lo_[r], hi_[r]) : T(0);
      }
      next_x_[r] = x_[r] = mark_[r] = start;
      g_[r] = 0;
    });
    promise_ = V::kPairs ? least(kPromising * team_.max(widest) / 2, kMostPromising) : kPromising;
    if constexpr (V::kHubs) promise_ = kOraclePromising;
    team_.sync();
  }

  FM_DEVICE void rescale(T ratio) const {
    if (ratio == 1) return;
    T* eta = graph_.eta();
    graph_.for_vars([&](int j) { eta[j] *= ratio; });
    graph_.for_pairs([&](int p) { hi_[a_.hard + p] *= ratio; });
    if constexpr (V::kHubs) hubs_.rescale(ratio);
    team_.sync();
  }

  // Rows by themselves have a closed form, but for the order of their kinks: Newton's method with a
  // bracket, docs/math.md (29). Each group of lanes has a row.
  FM_DEVICE void solve_isolated() const {
    constexpr int kLanes = V::kIsolatedLanes, kGroups = V::kTeam / kLanes;
#pragma unroll 1
    for (int first = 0; first < a_.num_isolated; first += kGroups) {
      const int own = first + team_.rank / kLanes;
      const int r = own < a_.num_isolated ? a_.isolated[own] : -1;
      const bool here = r >= 0 && scale_[r] > 0;
      const T t = solve_row<kLanes>(here ? r : -1);
      if (here && team_.rank % kLanes == 0) next_x_[r] = t / scale_[r];
    }
    team_.sync();
  }

  // r: -1 for lanes that have no row, and only keep step.
  template <int LANES>
  FM_DEVICE T solve_row(int r) const {
    const int lane = team_.rank % LANES;
    const T* eta = graph_.eta();
    const int begin = r < 0 ? 0 : a_.row_ptr[r], end = r < 0 ? 0 : a_.row_ptr[r + 1];
    const auto each = [&](auto visit) {
#pragma unroll 1
      for (int k = begin + lane; k < end; k += LANES) {
        const int entry = a_.row_entry[k];
        if (graph_.present(entry >> 1)) visit(T(eta[entry >> 1]), graph_.row_coef(entry, k));
      }
    };
    const T b = r < 0 ? T(0) : rhs_[r], lo = r < 0 ? T(0) : lo_[r];
    T product = 0, squares = 0, size = 1, below = infinity<T>(), above = -infinity<T>();
    each([&](T y, T w) {
      product += w * y;
      squares += w * w;
      size = most(size, magnitude(w) * least(magnitude(y), T(1)));
      if (w == 0) return;
      const T p = y / w, q = (y - 1) / w;  // where the variable is at its bounds
      below = least(below, least(p, q));
      above = most(above, most(p, q));
    });
    product = over_group<LANES>(product, Add());
    squares = over_group<LANES>(squares, Add());
    size = over_group<LANES>(size, Max());
    T left = most(lo, -over_group<LANES>(-below, Max()));
    T right = over_group<LANES>(above, Max());
    const T tolerance = 8 * kEps * most(size, magnitude(b));
    bool done = r < 0 || squares == 0;
    T t = done ? T(0) : clip((product - b) / squares, left, most(left, right));
    if (lo == 0) t = 0;  // an inequality that holds by itself has no multiplier
    bool at_bound = lo == 0;
#pragma unroll 1
    for (int step = 0; step < 200 && team_.any(!done); ++step) {
      T total = 0;
      T slope = 0;
      each([&](T y, T w) {
        const T z = y - w * t;
        total += w * to_box(z);
        slope += inside_box(z) ? w * w : T(0);
      });
      const T excess = T(over_group<LANES>(total, Add()) - b);
      slope = over_group<LANES>(slope, Add());
      if (done) continue;
      if (at_bound) {
        at_bound = false;
        if (excess <= 0) {
          done = true;
          continue;
        }
      }
      if (magnitude(excess) <= tolerance) {
        done = true;
        continue;
      }
      (excess > 0 ? left : right) = t;
      T next = slope > 0 ? t + excess / slope : t;
      if (!(next > left && next < right)) {
        next = left + (right - left) / 2;
        if (!(next > left && next < right)) done = true;
      }
      if (!done) t = next;
    }
    return t;
  }

  // Among LANES neighbours, all threads of the team being there.
  template <int LANES, class Value, class Combine>
  FM_DEVICE Value over_group(Value value, Combine combine) const {
    if constexpr (LANES <= 32) {
      return over_lanes<LANES>(value, combine);
    } else {
      Value values[1] = {value};
      team_.reduce(values, combine);
      return values[0];
    }
  }

  // ---- The descent -----------------------------------------------------------------------------

  FM_DEVICE void minimise() {
    Phase phase = Phase::start;
    T value = 0, slope = 0, alpha = 1, good = 0;
    T residual = 0, best = 0, promising = 0, resolution = 0, largest = 0;
    int tries = 0, last_gain = 0, next_check = kFirstCheck, stage_end = kStagePasses;
    bool ray = false;
    T cut_below = kCutBelow;
    status_ = kMaxIter;
#pragma unroll 1
    for (;;) {
      if (phase == Phase::start && a_.num_isolated > 0 && rows_may_be_alone()) solve_isolated();
      const Seen seen = evaluate();
      ++passes_;
      if constexpr (V::kHubs) {
        at_x_ = false;
        if (hubs_.failed()) return give_up();
      }
      bool accepted = true, mu_is_of_x = true;
      if (phase == Phase::search) {
        const T end = seen.slope;
        const T noise = 64 * kEps * (1 + magnitude(value));
        const bool rises = end > 0 && !(seen.value <= value + kArmijo * slope + noise);
        ++tries;
        if (end > -kSteep * slope || rises) {  // too far
          accepted = false;
          if (good > 0) {
            slope = move(good);
            phase = Phase::back;
            continue;
          }
          alpha *= clip(slope / (slope - end), T(0.1), T(0.7));
          if (tries <= kTries) {
            slope = move(alpha);
            if (slope < 0) continue;
          }
        } else if (end < kSteep * slope && alpha < kLongest && tries < kTries) {
          // Hardly any curvature seen: go on, unless the whole arc is at its bounds.
          const T longer = move(kLonger * alpha);
          if (longer < slope) {
            good = alpha;
            alpha *= kLonger;
            slope = longer;
            ray |= alpha > kRay;
            continue;
          }
          move(alpha);
        }
      } else if (phase == Phase::finish) {
        const bool done =
            seen.residual <= most(T(a_.tol), resolution) || seen.residual <= kJump * residual;
        accepted = done || (seen.residual <= kNearer * residual && seen.value < value);
      }
      if (accepted) {
        const bool stepped = phase == Phase::search || phase == Phase::back;
        const T bend = seen.slope - slope;
        const bool curved = stepped && bend > kEps * sqrt(seen.squares * seen.bends);
        if (phase == Phase::start) {
          best = seen.residual;
          promising = a_.warm != nullptr && stages_ == 0 ? seen.residual : promise_;
          last_gain = passes_;
          forget();
        }
        if (phase == Phase::finish) promising = seen.residual;
        accept(curved);
        if constexpr (V::kHubs) at_x_ = true;
        residual = seen.residual;
        value = seen.value;
        largest = seen.largest;
        resolution = 4 * kEps * (1 + largest);
      } else {
        mu_is_of_x = false;
        if (phase == Phase::search && empty_) {
          finish_at(residual, resolution);
          break;
        }
        if (phase == Phase::search) forget();
      }
      const bool finish_failed = !accepted && phase == Phase::finish;

      // Is this the end, or that of a stage?
      if (residual < T(0.5) * best) {
        best = residual;
        last_gain = passes_;
      }
      const T wanted = stages_ > 0 ? kStageTolerance : T(a_.tol);
      T tol = wanted, rounding = wanted;
      if (residual <= kNear) {
        tol = most(wanted, resolution);
        rounding = most(wanted, least(2 * resolution * T(a_.longest), kNear));
      }
      const bool idle = a_.all_isolated || passes_ - last_gain > kStall;
      const bool there = residual <= tol || (residual <= rounding && idle) || a_.all_isolated;
      if (there && stages_ == 0) {
        finish_at(residual, resolution);
        if constexpr (V::kTrees) {
          if (!mu_is_of_x) {
            graph_.for_rows([&](int r) { next_x_[r] = x_[r]; });
            phase = Phase::start;
            continue;
          }
          if (status_ == kConverged && add_cuts(residual)) {
            status_ = kMaxIter;
            phase = Phase::start;
            continue;
          }
        }
        // Next to multipliers that have run off nothing is resolved.
        if (!a_.all_isolated && largest > kFar * most(T(1), largest_score_)) status_ = kStalled;
        break;
      }
      if (stages_ > 0 && (there || passes_ >= stage_end)) {
        --stages_;
        stage_end = passes_ + kStagePasses;
        enlarge();
        phase = Phase::start;
        continue;
      }
      if constexpr (V::kTrees) {  // those that are missing by far need no exact solution to be seen
        if (stages_ == 0 && mu_is_of_x && residual <= cut_below) {
          cut_below = kSooner * residual;
          if (add_cuts(residual)) {
            cut_below = kCutBelow;
            phase = Phase::start;
            continue;
          }
        }
      }
      if (passes_ >= a_.max_iter) break;
      if (passes_ >= next_check || ray) {
        ray = false;
        next_check = passes_ + least(passes_, kCheckEvery);
        if (infeasible()) return;  // leaves mu alone
      }
      if (residual <= promising && mu_is_of_x && !finish_failed) {
        promising = residual / 2;
        if (guess()) {
          phase = Phase::finish;
          continue;
        }
      }
      // What is remembered may be to blame if it leads nowhere; if nothing is, this is the end.
#pragma unroll 1
      while (slope = direction(), !(slope < 0) && !empty_) forget();
      if (!(slope < 0)) {
        finish_at(residual, resolution);
        break;
      }
      alpha = 1;
      good = 0;
      tries = 0;
      phase = Phase::search;
    }
    residual_ = residual;
    if (status_ != kConverged) infeasible();
    if constexpr (V::kHubs) finish_hubs();
  }

  // The hubs must stand at x, with their whole faces, which the gradient needs.
  FM_DEVICE void finish_hubs() {
    if (status_ == kInfeasible) return;
    if (!at_x_) {
      graph_.for_rows([&](int r) { next_x_[r] = x_[r]; });
      evaluate();
    }
    if (!hubs_.failed()) hubs_.complete(residual_);
    if (hubs_.failed()) give_up();
  }
  // A hub has too many structures, or none: for the CPU to see, from the beginning.
  FM_DEVICE void give_up() {
    status_ = kStalled;
    residual_ = infinity<T>();
  }

  // The rows of the words of trees are not alone, but as if they were they give a good start.
  FM_DEVICE bool rows_may_be_alone() const {
    if constexpr (V::kTrees) return passes_ == 0 && a_.warm == nullptr;
    return true;
  }
  // Returns whether there are new cuts, from the multipliers at hand.
  FM_DEVICE bool add_cuts(T residual) {
    using Added = typename Cuts<V>::Added;
    const Cuts<V> cuts(graph_);
    const int before = *graph_.cut_count();
    const T least_gap = Constants<T>::kDouble ? T(1e-11) : T(64) * kEps;
    const Added added = cuts.add_violated(4 * residual + least_gap);
    if (added == Added::kNoRoom) status_ = kStalled;
    if (added != Added::kSome) return false;
#pragma unroll 1
    for (int c = before + team_.rank; c < *graph_.cut_count(); c += V::kTeam) {
      const T scale = cuts.scale(c, [&](int j) { return graph_.present(j); });
      const int r = a_.first_cut + c;
      set_row(r, scale, T(graph_.cut_size()[c] - 1), false);
      x_[r] = g_[r] = mark_[r] = 0;
    }
    team_.sync();
    graph_.for_rows([&](int r) { next_x_[r] = x_[r]; });
    team_.sync();
    return true;
  }

  FM_DEVICE void finish_at(T residual, T resolution) {
    const T tol = T(a_.tol);
    T enough = tol;
    if (residual <= kNear) {
      // In float, what is not resolved is left to double.
      enough = Constants<T>::kDouble ? most(tol, least(2 * resolution * T(a_.longest), kNear))
                                     : most(tol, resolution);
    }
    status_ = residual <= enough ? kConverged : kStalled;
  }

  // The next stage begins where this one ended, with scores and multipliers that are larger.
  FM_DEVICE void enlarge() const {
    rescale(kStage);
    graph_.for_rows([&](int r) { next_x_[r] = clip(kStage * x_[r], lo_[r], hi_[r]); });
    team_.sync();
  }

  // The dual at next_x: next_g, and mu.
  FM_DEVICE Seen evaluate() {
    T* t = graph_.t();
    const T* eta = graph_.eta();
    T* mu = graph_.mu();
    graph_.for_rows([&](int r) {
      const T own = next_x_[r] * scale_[r];
      t[r] = graph_.is_soft(r) && graph_.score[r - a_.hard] < 0 ? -own : own;
    });
    team_.sync();
    T sums[4] = {0, 0, 0, 0}, peaks[2] = {0, 0};
    taken([&](int j, T sum) {
      const T z = T(eta[j] - sum), u = to_box(z);
      if constexpr (V::kHubs) {
        if (hubs_.takes(j, z)) return;
      }
      mu[j] = u;
      sums[3] += u > 0 ? u * (z - T(0.5) * u) : T(0);
    });
    team_.sync();
    if constexpr (V::kHubs) sums[3] += hubs_.evaluate(mu);
    graph_.template by_row<2>(
        Add(), [&](u32 code, T c) { return c * graph_.value_at(mu, code); },
        [&](int r, T product) {
          const T x = next_x_[r], g = scale_[r] * (rhs_[r] - product);
          const T s = x - x_[r], y = g - g_[r];
          next_g_[r] = g;
          sums[0] += g * s;
          sums[1] += s * s;
          sums[2] += y * y;
          sums[3] += rhs_[r] * scale_[r] * x;
          if constexpr (V::kUneven) return;
          peaks[0] = most(peaks[0], lack_of_even(r, x, g));
          peaks[1] = most(peaks[1], magnitude(x) * scale_[r]);
        });
    if constexpr (V::kUneven) {
      find_units(mu);
      graph_.for_rows([&](int r) {
        peaks[0] = most(peaks[0], lack(r, next_x_[r], next_g_[r]));
        peaks[1] = most(peaks[1], magnitude(next_x_[r]) * scale_[r] * unit(r));
      });
    }
    team_.reduce(sums, Add());
    team_.reduce(peaks, Max());
    return {sums[0], sums[1], sums[2], sums[3], peaks[0], peaks[1]};
  }

  // take(j, what the multipliers in t() take from variable j); those of pairs come with a sign.
  template <class Take>
  FM_DEVICE void taken(Take take) const {
    const T* t = graph_.t();
    graph_.template by_variable<4>(
        T(0), Add(),
        [&](u32 code, int place) {
          T own = graph_.value_at(t, code);
          if (V::kPairs && graph_.is_second(code)) own = magnitude(own);
          if (V::kCoefs == 2 && place >= 0) return T(own * graph_.coef[place]);
          const bool negated = (V::kCoefs > 0 || V::kPairs) && graph_.is_negated(code);
          return T(negated ? -own : own);
        },
        take);
  }

  // What a row lacks to be optimal. Never form x - g: far out it would round to x.
  FM_DEVICE T lack_of_even(int r, T x, T g) const {
    return magnitude(most(least(g, x - lo_[r]), x - hi_[r])) * norm_[r];
  }

  // The same where coefficients differ: in units of variables, beyond the rounding of its sum.
  FM_DEVICE T lack(int r, T x, T g) const {
    const T even = lack_of_even(r, x, g);
    if (!V::kUneven || even == 0 || graph_.is_soft(r) || (a_.flags[r] & kUneven) == 0) return even;
    const T moved = most(magnitude(g) * norm_[r] - 4 * kEps * sizes()[r], T(0)) / unit(r);
    return most(least(moved, g > 0 ? x - lo_[r] : hi_[r] - x), even);
  }
  FM_DEVICE T unit(int r) const {
    if (!V::kUneven || graph_.is_soft(r)) return 1;
    return units()[r];
  }
  FM_DEVICE Rows units() const { return graph_.row_array(kHistory + 2 * kMemory); }
  FM_DEVICE Rows sizes() const { return graph_.row_array(kHistory + 2 * kMemory + 1); }

  // How far a row moves its variables: the free ones, or the next one to become free, which may be
  // the one with the smallest coefficient. z: reduced scores, or what they are clipped to.
  FM_DEVICE void find_units(const T* z) const {
    struct Both {
      FM_DEVICE Several<T, 4> operator()(Several<T, 4> p, Several<T, 4> q) const {
        return {{p.at[0] + q.at[0], least(p.at[1], q.at[1]), least(p.at[2], q.at[2]),
                 p.at[3] + q.at[3]}};
      }
    };
    const Rows unit = units(), size = sizes();
    graph_.by_hard_row(
        Several<T, 4>{{0, 1, 1, 0}}, Both(),
        [&](u32 code, int place) {
          const int j = graph_.index_of(code);
          const T c = graph_.row_coef(code, place), value = z[j], own = magnitude(c);
          Several<T, 4> found = {{0, 1, 1, own * to_box(value)}};
          if (c == 0 || !graph_.present(j)) return found;
          if (inside_box(value)) {
            found.at[0] = c * c;
          } else {
            found.at[(value <= 0) == (c > 0) ? 1 : 2] = own;  // if a . mu is to grow, to shrink
          }
          return found;
        },
        [&](int r, Several<T, 4> sum) {
          const bool up = next_g_[r] > 0;
          unit[r] = 1;
          size[r] = magnitude(rhs_[r]) + sum.at[3];
          if ((a_.flags[r] & kUneven) == 0) return;
          unit[r] = sum.at[0] > 0 ? least(T(sqrt(sum.at[0])), T(1)) : sum.at[up ? 1 : 2];
        });
    team_.sync();
  }

  // x and g become next_x and next_g; their change is remembered if that is of use.
  FM_DEVICE void accept(bool remember) {
    if (remember && !kShifted) head_ = head_ == 0 ? kMemory - 1 : head_ - 1;
    empty_ = empty_ && !remember;
    graph_.for_rows([&](int r) {
      const T x = next_x_[r], g = next_g_[r];
      if (remember) {
#pragma unroll
        for (int k = kMemory - 1; kShifted && k > 0; --k) {
          step(k)[r] = step(k - 1)[r];
          bend(k)[r] = bend(k - 1)[r];
        }
        step(0)[r] = x - x_[r];
        bend(0)[r] = g - g_[r];
      }
      x_[r] = x;
      g_[r] = g;
    });
  }
  FM_DEVICE void forget() {
    if (empty_) return;
    empty_ = true;
    graph_.for_rows([&](int r) {
#pragma unroll
      for (int k = 0; k < kMemory; ++k) step(k)[r] = bend(k)[r] = 0;
    });
  }
  // Steps, newest first, and what they changed in the gradient; 0 where there are none yet. In
  // shared memory they are shifted, which is cheaper than to look up where they are.
  static constexpr bool kShifted = V::kRowsShared;
  FM_DEVICE Rows step(int age) const { return graph_.row_array(kHistory + slot(age)); }
  FM_DEVICE Rows bend(int age) const { return graph_.row_array(kHistory + kMemory + slot(age)); }
  FM_DEVICE int slot(int age) const {
    const int s = kShifted ? age : head_ + age;
    return s >= kMemory ? s - kMemory : s;
  }

  // next_x = clip(x + by d); returns g . (next_x - x)
  FM_DEVICE T move(T by) const {
    T slope = 0;
    graph_.for_rows([&](int r) {
      next_x_[r] = clip(x_[r] + by * d_[r], lo_[r], hi_[r]);
      slope += g_[r] * (next_x_[r] - x_[r]);
    });
    return team_.sum(slope);
  }

  FM_DEVICE bool frozen(int r) const {
    return (x_[r] <= lo_[r] && g_[r] > 0) || (x_[r] >= hi_[r] && g_[r] < 0);
  }

  // d = -H g on the rows that are not held by their bounds, and the first point along it. The
  // recursion needs 40 inner products; they are found at once.
  FM_DEVICE T direction() const {
    T of_step[kMemory] = {}, of_bend[kMemory] = {}, gamma = 1;
    if (!empty_) {
      T own[40] = {};
      graph_.for_rows([&](int r) {
        const T g = frozen(r) ? T(0) : g_[r], here = frozen(r) ? T(0) : T(1);
        T s[kMemory], y[kMemory];
#pragma unroll
        for (int k = 0; k < kMemory; ++k) {
          s[k] = step(k)[r];
          y[k] = bend(k)[r] * here;
        }
#pragma unroll
        for (int i = 0; i < kMemory; ++i) {
#pragma unroll
          for (int j = 0; j <= i; ++j) {
            own[pair_of(i, j)] += s[i] * y[j];
            own[15 + pair_of(i, j)] += y[i] * y[j];
          }
          own[30 + i] += s[i] * g;
          own[35 + i] += y[i] * g;
        }
      });
      team_.sum_all(own, graph_.sums());
      recursion(of_step, of_bend, gamma);
    }
    T slope = 0;
    graph_.for_rows([&](int r) {
      const T g = g_[r], x = x_[r];
      T q = -g, e = 0;
#pragma unroll
      for (int k = 0; k < kMemory; ++k) {
        q -= of_bend[k] * bend(k)[r];
        e += of_step[k] * step(k)[r];
      }
      const T d = frozen(r) ? T(0) : gamma * q + e;
      const T next = clip(x + d, lo_[r], hi_[r]);
      d_[r] = d;
      next_x_[r] = next;
      slope += g * (next - x);
    });
    return team_.sum(slope);
  }

  FM_DEVICE static constexpr int pair_of(int i, int j) { return i * (i + 1) / 2 + j; }

  // The two loops of L-BFGS on inner products: d = gamma (-g - sum of_bend y) + sum of_step s.
  FM_DEVICE void recursion(T (&of_step)[kMemory], T (&of_bend)[kMemory], T& gamma) const {
    T sums[40];
#pragma unroll
    for (int k = 0; k < 40; ++k) sums[k] = graph_.sums()[k];
    T rho[kMemory];
    bool scaled = false;
#pragma unroll
    for (int i = 0; i < kMemory; ++i) {  // newest first
      const T sy = sums[pair_of(i, i)], yy = sums[15 + pair_of(i, i)];
      const bool use = sy > kEps * yy;
      rho[i] = use ? 1 / sy : T(0);
      if (use && !scaled) gamma = sy / yy;
      scaled = scaled || use;
      T sq = -sums[30 + i];
#pragma unroll
      for (int j = 0; j < i; ++j) sq -= of_bend[j] * sums[pair_of(i, j)];
      of_bend[i] = rho[i] * sq;
    }
#pragma unroll
    for (int i = kMemory - 1; i >= 0; --i) {  // oldest first
      T yq = -sums[35 + i];
#pragma unroll
      for (int j = 0; j < kMemory; ++j) {
        yq -= of_bend[j] * sums[15 + (i > j ? pair_of(i, j) : pair_of(j, i))];
      }
      yq *= gamma;
#pragma unroll
      for (int j = i + 1; j < kMemory; ++j) yq += of_step[j] * sums[pair_of(j, i)];
      of_step[i] = of_bend[i] - rho[i] * yq;
    }
  }

  // ---- The finish ------------------------------------------------------------------------------

  // The exact finish: the active set is guessed from x - g, the other multipliers are put on their
  // bounds, and the rest is solved for. Returns false if that leads nowhere.
  FM_DEVICE bool guess() {
    const T* mu = graph_.mu();
    if constexpr (V::kHubs) hubs_.leave_box(graph_.mu());
    bool others = false;
    graph_.for_rows([&](int r) {
      const T down = x_[r] - lo_[r], up = x_[r] - hi_[r];
      const bool inside = g_[r] < down && g_[r] > up;
      next_x_[r] = inside ? x_[r] : (g_[r] >= down ? lo_[r] : hi_[r]);
      d_[r] = next_x_[r] - x_[r];
      others |= d_[r] != 0;
      next_g_[r] = inside ? -g_[r] : T(0);
    });
    others = team_.any(others);
    team_.sync();
    System<V> system(graph_, hubs_, scale_);
    if (others) {
      system.multiply(d_, [](int) { return true; }, [&](int r, T value) { next_g_[r] -= value; });
    }
    graph_.by_row(
        Add(), [&](u32 code, T c) { return inside_box(graph_.value_at(mu, code)) ? c * c : T(0); },
        [&](int r, T squares) {
          const T down = x_[r] - lo_[r], up = x_[r] - hi_[r];
          const bool inside = g_[r] < down && g_[r] > up;
          d_[r] = inside ? squares * scale_[r] * scale_[r] : T(0);
        });
    if constexpr (V::kHubs) {
      const auto inside = [&](int r) {
        return g_[r] < x_[r] - lo_[r] && g_[r] > x_[r] - hi_[r] && scale_[r] > 0;
      };
      hubs_.add_to_diagonal(inside, scale_, d_);
    }
    const int count = system.number(d_);
    if (count == 0) return others;
    const int* place = graph_.place();
    T* b = graph_.b();
    if (system.dense()) {
      graph_.for_rows([&](int r) {
        if (place[r] >= 0) b[place[r]] = next_g_[r];
      });
      system.factorise(d_);
      system.substitute();
    } else if constexpr (V::kConjugate) {
      const Rows x = conjugate(0), p = conjugate(1), q = conjugate(2);
      T size = 0;
      graph_.for_rows([&](int r) {
        if (place[r] >= 0) size = most(size, magnitude(next_g_[r]));
      });
      system.conjugate_gradients(next_g_, x, p, q, d_, kFinishSteps, team_.max(size) * kFinish);
      graph_.for_rows([&](int r) { d_[r] = x[r]; });
    } else {
      return false;
    }
    bool wild = false;
    T farthest = 0;
    graph_.for_rows([&](int r) { farthest = most(farthest, magnitude(x_[r])); });
    farthest = team_.max(farthest);
    graph_.for_rows([&](int r) {
      if (place[r] < 0) return;
      const T delta = system.dense() ? b[place[r]] : d_[r];
      wild |= !(magnitude(delta) <= kSane * (1 + farthest));  // of a singular system
      next_x_[r] = clip(x_[r] + delta, lo_[r], hi_[r]);
    });
    return !team_.any(wild);
  }
  FM_DEVICE Rows conjugate(int k) const {
    return graph_.row_array(kHistory + 2 * kMemory + (V::kUneven ? 2 : 0) + k);
  }

  // ---- Infeasible instances --------------------------------------------------------------------

  // Tries the multipliers themselves, and their change since the last try, which tends to a ray
  // that proves that nothing is feasible, docs/math.md (23). The proof is left in next_x.
  FM_DEVICE bool infeasible() {
    if (a_.hard == 0) return false;
#pragma unroll 1
    for (int turn = 0; turn < 2; ++turn) {
      if (certifies(turn == 1)) {
        status_ = kInfeasible;
        return true;
      }
    }
    graph_.for_rows([&](int r) { mark_[r] = x_[r]; });
    return false;
  }

  FM_DEVICE bool certifies(bool change) {
    T* t = graph_.t();
    double sums[2] = {0, 0};  // of the certificate, and of its terms in magnitude
    bool finite = true;
    team_.sync();
    graph_.for_rows([&](int r) {
      T y = graph_.is_soft(r) ? T(0) : (change ? x_[r] - mark_[r] : x_[r]) * scale_[r];
      if (lo_[r] == 0) y = most(y, T(0));
      finite &= magnitude(y) < infinity<T>();
      next_x_[r] = t[r] = y;
      sums[0] += double(rhs_[r]) * double(y);
      sums[1] += magnitude(double(rhs_[r]) * double(y));
    });
    team_.sync();
    graph_.by_variable(
        Several<double, 2>{{0, 0}}, Pairwise(),
        [&](u32 code, int place) {
          const int r = graph_.index_of(code);
          if (r >= a_.hard) return Several<double, 2>{{0, 0}};
          const double term = double(graph_.var_coef(code, place)) * double(t[r]);
          return Several<double, 2>{{term, magnitude(term)}};
        },
        [&](int j, Several<double, 2> sum) {
          if constexpr (V::kHubs) {
            const bool present = j < a_.n && graph_.present(j);
            if (hubs_.takes(j, present ? T(-sum.at[0]) : -infinity<T>())) {
              sums[1] += sum.at[1];
              return;
            }
          }
          if (!graph_.present(j)) return;
          sums[0] += most(0.0, -sum.at[0]);
          sums[1] += sum.at[1];
        });
    if constexpr (V::kHubs) {
      at_x_ = false;
      team_.sync();
      const T best = hubs_.support();
      if (!(best > -infinity<T>())) finite = false;
      if (team_.rank == 0) sums[0] += double(best);
    }
    team_.reduce(sums, Add());
    return !team_.any(!finite) && sums[0] < -kCertificate * sums[1];
  }
  struct Pairwise {
    FM_DEVICE Several<double, 2> operator()(Several<double, 2> p, Several<double, 2> q) const {
      return {{p.at[0] + q.at[0], p.at[1] + q.at[1]}};
    }
  };

  // ---- The answer ------------------------------------------------------------------------------

  FM_DEVICE void write_scalars(double objective, double residual) const {
    if (team_.rank != 0) return;
    a_.objective[graph_.instance] = Io(objective);
    a_.residual[graph_.instance] = residual;
    a_.iterations[graph_.instance] = passes_;
    a_.status[graph_.instance] = status_;
    if (status_ != kConverged && a_.unsolved != nullptr) *a_.unsolved = 1;
  }

  // Nothing is feasible: the multipliers are those that prove it.
  FM_DEVICE void write_nothing() const {
    const Io nan = Io(infinity<T>() - infinity<T>());
    team_.sync();
    graph_.for_vars([&](int j) {
      a_.mu[graph_.instance * a_.n + j] = status_ == kBadNumber || graph_.present(j) ? nan : Io(0);
      a_.var_side[graph_.instance * a_.n + j] = kNoSide;
    });
    graph_.for_rows([&](int r) {
      const bool proof = status_ == kInfeasible && !graph_.is_soft(r);
      a_.tau[graph_.instance * graph_.num_rows() + r] = Io(proof ? next_x_[r] : T(0));
      a_.row_side[graph_.instance * graph_.num_rows() + r] = kNoSide;
    });
    Io* values = a_.mu_v + graph_.instance * graph_.num_scores();
    graph_.for_pairs([&](int p) { values[p] = nan; });
    if constexpr (V::kHubs) hubs_.write_nothing(values + a_.pairs, nan);
    if constexpr (V::kTrees) Cuts<V>(graph_).save_nothing();
    write_scalars(-infinity<double>(), infinity<double>());
  }

  // Sides, with margins for what the rows lack, as the core's `classify` finds them.
  FM_DEVICE void write() {
    constexpr T kMost = T(1e-3), kLeast = T(1e-11), kTravel = T(1e4);
    T *t = graph_.t(), *z = graph_.mu(), *error = graph_.v();
    const Rows missing = next_g_;
    const T* eta = graph_.eta();
    Io* tau = a_.tau + graph_.instance * graph_.num_rows();
    team_.sync();
    graph_.for_rows([&](int r) {
      const T own = x_[r] * scale_[r];
      tau[r] = Io(own);
      t[r] = graph_.is_soft(r) && graph_.score[r - a_.hard] < 0 ? -own : own;
      next_g_[r] = g_[r];
    });
    team_.sync();
    taken([&](int j, T sum) { z[j] = T(eta[j] - sum); });
    team_.sync();
    if constexpr (V::kUneven) find_units(z);
    T worst = 0;
    graph_.for_rows([&](int r) {
      missing[r] = lack(r, x_[r], g_[r]);
      if (missing[r] > kEps) worst = most(worst, missing[r]);
    });
    worst = team_.max(worst);
    team_.sync();
    const T near = kTravel * worst, bound = T(a_.degree) * worst;
    const auto touches = [&](int r) {
      return magnitude(g_[r]) * norm_[r] <= near * unit(r) && scale_[r] > 0;
    };
    const auto may_be_free = [=](T value) { return value > -near && value < 1 + near; };
    const auto error_of = [&](u32 code) {
      return may_be_free(graph_.value_at(z, code)) ? graph_.value_at(error, code) : T(0);
    };
    const bool negligible = bound <= kLeast;
    bool doubt = false;
    if (!negligible) {
      share(z, missing, error);
      if (worst < kMost) {
        graph_.for_vars([&](int j) {
          doubt |= least(magnitude(z[j]), magnitude(z[j] - 1)) <= near && graph_.present(j);
        });
        graph_.for_rows([&](int r) { doubt |= x_[r] <= lo_[r] + near && touches(r); });
        doubt = team_.any(doubt);
      }
      if (doubt) spread(touches, error_of, may_be_free, z, error);
    }
    if (doubt) {
      graph_.by_row(
          Add(), [&](u32 code, T c) { return c != 0 ? error_of(code) : T(0); },
          [&](int r, T sum) {
            if (touches(r)) missing[r] = most(missing[r], sum);
          });
    }
    i8* row_side = a_.row_side + graph_.instance * graph_.num_rows();
    graph_.for_rows([&](int r) {
      int length = graph_.is_soft(r) ? 2 : a_.row_ptr[r + 1] - a_.row_ptr[r];
      if constexpr (V::kTrees) {
        if (r >= a_.first_cut && r < a_.first_cut + *graph_.cut_count()) {
          const int size = graph_.cut_size()[r - a_.first_cut];
          length = size * (size - 1);
        }
      }
      const T off = negligible ? most(missing[r], T(length) * bound) : missing[r];
      const T margin = least(2 * off, kMost) + 8 * kEps * (1 + magnitude(x_[r]));
      const T slack = g_[r] * norm_[r] / unit(r);
      const bool low = x_[r] <= lo_[r] + margin, high = x_[r] >= hi_[r] - margin;
      i8 side = kInterior;
      if (low && high) {  // a pair with hardly any score
        side = slack < 0 ? kUpper : kLower;
      } else if ((low || high) && magnitude(slack) > margin) {
        side = low ? kLower : kUpper;
      }
      row_side[r] = scale_[r] > 0 ? side : i8(kNoSide);
    });
    double total = 0;
    if (team_.rank == 0) error[a_.n] = 0;
    const auto of_hub = [&](int j, T& value) {  // whose face tells what is free
      if constexpr (V::kHubs) {
        const int k = a_.hub_at[j];
        if (k < 0) return false;
        value = graph_.hub_v()[k];
        if (value > 1 - 16 * kEps) value = 1;  // on in all structures
        return true;
      } else {
        return false;
      }
    };
    const Io* scores = a_.eta_u + graph_.instance * a_.n;
    graph_.for_vars([&](int j) {
      T value = 0;
      i8 side = kNoSide;
      if (graph_.present(j)) {
        const T own = T(eta[j]), twice = 2 * (negligible ? bound : error[j]);
        const T margin = least(twice, kMost) + 8 * kEps * (magnitude(own) + magnitude(own - z[j]));
        value = z[j] <= margin ? T(0) : z[j] >= 1 - margin ? T(1) : z[j];
        side = value == 0 ? kLower : value == 1 ? kUpper : kInterior;
        if (of_hub(j, value)) side = kInterior;
        if (value != 0) total += double(value) * (double(scores[j]) - 0.5 * double(value));
      }
      a_.mu[graph_.instance * a_.n + j] = Io(value);
      a_.var_side[graph_.instance * a_.n + j] = side;
      error[j] = value;
    });
    team_.sync();
    if constexpr (V::kPairs) total += write_pairs(error, tau, row_side);
    if constexpr (V::kTrees) Cuts<V>(graph_).save();
    if constexpr (V::kHubs) {
      hubs_.save();
      total += hubs_.write_features(a_.mu_v + graph_.instance * graph_.num_scores() + a_.pairs);
    }
    check_rows(error);
    write_scalars(team_.sum(total), double(residual_));
  }

  // What a row lacks is shared by its free variables.
  FM_DEVICE void share(const T* z, Rows missing, T* error) const {
    T* t = graph_.t();
    graph_.by_row(
        Add(),
        [&](u32 code, T c) { return c != 0 && inside_box(graph_.value_at(z, code)) ? T(1) : T(0); },
        [&](int r, T free) { t[r] = missing[r] > kEps ? missing[r] / most(free, T(1)) : T(0); });
    graph_.by_column(
        Add(), [&](int r, T c) { return c != 0 ? t[r] : T(0); },
        [&](int j, T sum) { error[j] = sum; });
    team_.sync();
  }

  // Errors travel along rows that hold tightly.
  template <class Touches, class ErrorOf, class MayBeFree>
  FM_DEVICE void spread(Touches touches, ErrorOf error_of, MayBeFree may_be_free, const T* z,
                        T* error) const {
    T* t = graph_.t();
    bool changed = true;
#pragma unroll 1
    for (int sweep = 0; changed && sweep < 32; ++sweep) {
      graph_.by_row(
          Max(), [&](u32 code, T c) { return c != 0 ? error_of(code) : T(0); },
          [&](int r, T largest) { t[r] = touches(r) ? largest : T(0); });
      changed = false;
      graph_.by_column(
          Max(), [&](int r, T c) { return c != 0 ? t[r] : T(0); },
          [&](int j, T largest) {
            if (!may_be_free(z[j]) || !(error[j] < largest)) return;
            error[j] = largest;
            changed = true;
          });
      changed = team_.any(changed);
      team_.sync();
    }
  }

  // The marginals of the pairs; returns what they add to the objective. Those that were left out
  // have their multiplier at the upper bound if their first variable was the first to be seen as 0,
  // else at 0: then the other sees nothing of it.
  FM_DEVICE double write_pairs(const T* mu, Io* tau, i8* row_side) const {
    double total = 0;
    graph_.for_pairs([&](int p) {
      const int first = a_.pair[2 * p], second = a_.pair[2 * p + 1];
      const int j1 = first >> 1, j2 = second >> 1;
      const T score = graph_.score[p];
      const T l1 = first & 1 ? 1 - mu[j1] : mu[j1], l2 = second & 1 ? 1 - mu[j2] : mu[j2];
      T value = score >= 0 ? least(l1, l2) : most(T(0), l1 + l2 - 1);
      const bool here1 = graph_.present(j1), here2 = graph_.present(j2);
      if (!here1 && !here2) value = 0;
      if (a_.zeros != 0 && here1 && here2 && (is_zero(j1) || is_zero(j2))) {
        const bool sooner = !is_zero(j2) || (is_zero(j1) && graph_.zero()[j1] <= graph_.zero()[j2]);
        const bool upper = score >= 0 && sooner;
        value = 0;
        tau[a_.hard + p] = Io(upper ? score : T(0));
        row_side[a_.hard + p] = upper ? kUpper : kLower;
      }
      a_.mu_v[graph_.instance * graph_.num_scores() + p] = Io(value);
      if (value != 0) total += double(score) * double(value);
    });
    return total;
  }

  // Nothing that is far off is called converged, however large the scores.
  FM_DEVICE void check_rows(const T* mu) {
    if (4 * kEps * (1 + largest_score_) * T(a_.longest) < kNear) return;
    T worst = 0;
    graph_.by_hard_row(
        T(0), Add(),
        [&](u32 code, int place) {
          return graph_.row_coef(code, place) * graph_.value_at(mu, code);
        },
        [&](int r, T product) {
          const T excess = product - rhs_[r];
          if (scale_[r] > 0) worst = most(worst, lo_[r] == 0 ? excess : magnitude(excess));
        });
    worst = team_.max(worst);
    if (worst <= kNear) return;
    residual_ = most(residual_, worst);
    if (status_ == kConverged) status_ = kStalled;
  }

  const Graph<V>& graph_;
  const Args<V>& a_;
  const Team<V::kTeam>& team_;
  Rows x_, g_, next_x_, next_g_, d_, lo_, hi_, scale_, rhs_, mark_, norm_;
  Hubs<V> hubs_;
  bool at_x_ = false;  // the hubs stand at x
  T largest_score_ = 0, top_score_ = 0, promise_ = 0, residual_ = 0;
  bool complete_ = true;
  int stages_ = 0;  // in which the scores are still smaller than they are
  int passes_ = 0, status_ = kMaxIter;
  bool empty_ = false;  // nothing is remembered; what is there at first is not even 0
  int head_ = 0;
};

}  // namespace factormax
