// Projected L-BFGS on the compact dual with an exact finish, docs/math.md (12)-(22): the twin of
// the core's `CompactSolver`, for graphs of rows, pairs and hubs, by a team of threads.
//
// All members of the team hold the same scalars and take the same branches. What needs another way
// (interior points, proximal steps) ends as stalled or out of passes, and is left to the CPU.
//
// This file has the data of the solver; what it does is in the files that are named below.
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

  // The constants of the core's solver; the reasons are given there.
  static constexpr T kDirect = 32, kFirst = 16, kStage = 4;
  static constexpr T kPromising = T(0.015), kMostPromising = T(0.25), kNear = T(5e-3);
  static constexpr T kCutBelow = T(1e-1), kSooner = T(1e-2);  // residuals at which cuts are sought
  static constexpr T kOraclePromising = T(0.1);
  static constexpr T kSteep = T(0.9), kLonger = 4, kRay = 1000, kLongest = T(1e8);
  static constexpr T kArmijo = T(1e-4), kJump = T(1e-3), kNearer = T(0.9), kSane = 10;
  static constexpr T kFar = 1000;
  static constexpr int kTries = 25, kStall = 12, kFirstCheck = 24, kCheckEvery = 64;
  static constexpr int kStagePasses = 200;  // before the next stage begins anyway
  // For conjugate gradients, which take a launch's time: few steps, as the finish is only an
  // attempt.
  static constexpr int kFinishSteps = Constants<T>::kDouble ? 200 : 60;
  static constexpr T kFinish = Constants<T>::kDouble ? T(1e-6) : T(1e-3);
  static constexpr double kCertificate = Constants<T>::kDouble ? 1e-10 : 1e-5;
  static constexpr T kStageTolerance = T(0.1);

  enum class Phase { start, search, back, finish };

  // What an evaluation shows.
  struct Seen {
    T slope;     // along the step from x, at its end
    T squares;   // squared length of the step,
    T bends;     // and of the change of the gradient
    T value;     // of the dual
    T residual;  // in units of variables
    T largest;   // largest multiplier
  };

  // instance.cuh
  FM_DEVICE bool take_scores();
  FM_DEVICE bool leave_out();
  FM_DEVICE bool take_rows();
  FM_DEVICE bool take_row(int r, const T* rhs, Several<T, 3> sum) const;
  FM_DEVICE void set_row(int r, T scale, T b, bool equality) const;
  FM_DEVICE bool all_masked(int first, int last) const;
  FM_DEVICE void take_pairs();
  FM_DEVICE bool find_zeros() const;
  FM_DEVICE bool in_hard_row(int j) const;
  FM_DEVICE bool is_zero(int j) const { return u8(graph_.zero()[j] - 1) < kHeld - 1; }
  static constexpr u8 kHeld = 255;
  static constexpr int kZeroRounds = 3, kFewZeros = 16;
  // Tells whether a variable is present, apart from what trees and pairs rule out.
  FM_DEVICE auto given_by_user() const {
    const Io* scores = a_.eta_u + graph_.instance * a_.n;
    const u8* mask = a_.mask == nullptr ? nullptr : a_.mask + graph_.instance * a_.mask_stride;
    return
        [=](int j) { return T(scores[j]) > -infinity<T>() && (mask == nullptr || mask[j] != 0); };
  }

  // dual.cuh
  FM_DEVICE void solve_isolated() const;
  template <int LANES>
  FM_DEVICE T solve_row(int r) const;
  template <int LANES, class Value, class Combine>
  FM_DEVICE Value over_group(Value value, Combine combine) const;
  FM_DEVICE Seen evaluate();
  template <class Take>
  FM_DEVICE void taken(Take take) const;
  FM_DEVICE T lack_of_even(int r, T x, T g) const;
  FM_DEVICE T lack(int r, T x, T g) const;
  FM_DEVICE T unit(int r) const;
  FM_DEVICE Rows units() const { return graph_.row_array(kHistory + 2 * kMemory); }
  FM_DEVICE Rows sizes() const { return graph_.row_array(kHistory + 2 * kMemory + 1); }
  FM_DEVICE void find_units(const T* z) const;

  // steps.cuh
  FM_DEVICE void accept(bool remember);
  FM_DEVICE void forget();
  // Steps, newest first, and what they changed in the gradient; 0 where there are none yet. In
  // shared memory they are shifted, which is cheaper than looking up where they are.
  static constexpr bool kShifted = V::kRowsShared;
  FM_DEVICE Rows step(int age) const { return graph_.row_array(kHistory + slot(age)); }
  FM_DEVICE Rows bend(int age) const { return graph_.row_array(kHistory + kMemory + slot(age)); }
  FM_DEVICE int slot(int age) const;
  FM_DEVICE T move(T by) const;
  FM_DEVICE T toward_next() const;
  FM_DEVICE bool frozen(int r) const;
  FM_DEVICE T direction() const;
  FM_DEVICE static constexpr int pair_of(int i, int j) { return i * (i + 1) / 2 + j; }
  FM_DEVICE void recursion(T (&of_step)[kMemory], T (&of_bend)[kMemory], T& gamma) const;

  // finish.cuh
  FM_DEVICE bool guess();
  FM_DEVICE Rows conjugate(int k) const {
    return graph_.row_array(kHistory + 2 * kMemory + (V::kUneven ? 2 : 0) + k);
  }
  FM_DEVICE bool infeasible();
  FM_DEVICE bool certifies(bool change);
  struct Pairwise {
    FM_DEVICE Several<double, 2> operator()(Several<double, 2> p, Several<double, 2> q) const {
      return {{p.at[0] + q.at[0], p.at[1] + q.at[1]}};
    }
  };

  // answer.cuh
  FM_DEVICE void write_scalars(double objective, double residual) const;
  FM_DEVICE void write_nothing() const;
  FM_DEVICE void write();
  FM_DEVICE void share(const T* z, Rows missing, T* error) const;
  template <class Touches, class ErrorOf, class MayBeFree>
  FM_DEVICE void spread(Touches touches, ErrorOf error_of, MayBeFree may_be_free, const T* z,
                        T* error) const;
  FM_DEVICE double write_pairs(const T* mu, Io* tau, i8* row_side) const;
  FM_DEVICE void check_rows(const T* mu);

  // solve.cuh
  FM_DEVICE void begin();
  FM_DEVICE void rescale(T ratio) const;
  FM_DEVICE void enlarge() const;
  FM_DEVICE void minimise();
  FM_DEVICE bool rows_may_be_alone() const;
  FM_DEVICE bool add_cuts(T residual);
  FM_DEVICE void finish_at(T residual, T resolution);
  FM_DEVICE void finish_hubs();
  FM_DEVICE void give_up();

  const Graph<V>& graph_;
  const Args<V>& a_;
  const Team<V::kTeam>& team_;
  Rows x_, g_, next_x_, next_g_, d_, lo_, hi_, scale_, rhs_, mark_, norm_;
  Hubs<V> hubs_;
  bool at_x_ = false;  // the hubs are solved at x
  T largest_score_ = 0, top_score_ = 0, promise_ = 0, residual_ = 0;
  bool complete_ = true;
  int stages_ = 0;  // stages left, in which the scores are scaled down
  int passes_ = 0, status_ = kMaxIter;
  bool empty_ = false;  // nothing is remembered; at first the memory is not even 0
  int head_ = 0;
};

}  // namespace factormax
