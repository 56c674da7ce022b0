// Whether the flows of a binary sequence are a mixture of sequences with at most, or exactly, a
// given number on, docs/math.md (75)-(77).
//
// First by a bound on how much of the Markov chain with these flows has more on. If that is not
// next to nothing, the chain is conditioned on the number, and its transitions are fitted in turn
// until the flows are those given: iterative proportional fitting. Numbers far from their mean
// hardly count, so each step keeps only a band of them.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "factormax/problem.hpp"
#include "factormax/vector_ops.hpp"

namespace factormax {

class CountMixture {
 public:
  void allocate(int length, Workspace& ws) {
    const int root = static_cast<int>(std::ceil(std::sqrt(double(length))));
    block_ = root;
    most_width_ = std::min(length + 2, kWidth * root);
    const int blocks = (length + block_ - 1) / block_;
    edge = ws.take<double>(4 * length);
    weight_ = ws.take<double>(4 * length);
    base_ = ws.take<std::int32_t>(2 * length);
    ahead_ = ws.take<double>(std::int64_t(2) * block_ * most_width_);
    kept_ = ws.take<double>(std::int64_t(2) * blocks * most_width_);
    behind_ = ws.take<double>(4 * most_width_);
  }

  // (L, 2, 2) the flow from each state to each state, into each step; into the first, from off.
  Span<double> edge;

  // Whether all `steps` steps of `edge` are such a mixture, with exactly `budget` on if `tight`.
  bool proves(int steps, int budget, bool tight, Control& control, bool may_poll) {
    steps_ = steps;
    budget_ = budget;
    tight_ = tight;
    if (!tight && is_far_below()) return true;
    prepare();
    double before = 0;
    for (int sweep = 0; sweep < kSweeps; ++sweep) {
      if (control.stopped(may_poll)) return false;
      const double error = fit();
      if (error <= kError) return true;
      if (!std::isfinite(error)) return false;
      // At this rate, would it get there?
      const int left = kSweeps - 1 - sweep;
      const double rate = error / before;
      if (sweep >= kPatience && !(error * std::pow(rate, left) <= kError)) return false;
      before = error;
    }
    return false;
  }

 private:
  static constexpr int kWidth = 16;           // widest band, relative to the root of the length
  static constexpr double kReach = 4;         // the band reaches so many deviations; a number that
                                              // is given at the end too varies half as much before
  static constexpr double kFar = -40;         // log of a probability that is below rounding
  static constexpr double kError = 1e-11;     // of a flow that is reached
  static constexpr double kEmpty = 1e-12;     // less flow than this is rounding
  static constexpr double kNothing = 1e-100;  // smaller weights of a band make no difference
  static constexpr int kSweeps = 60;
  static constexpr int kPatience = 8;      // sweeps before their rate tells anything
  static constexpr double kSteepest = 30;  // most tilt of the last weights, and
  static constexpr int kTries = 50;        // most steps to find it

  double mass(int t, int state) const { return edge[4 * t + state] + edge[4 * t + 2 + state]; }

  // Whether E[exp(tilt * (number - budget - 1))], which is more than the probability that the
  // number exceeds the budget, is next to nothing for some tilt. docs/math.md (75).
  bool is_far_below() const {
    for (double tilt = 8; tilt > 1e-2; tilt /= 2) {
      const double gain = std::exp(tilt);
      double off = edge[0], on = gain * edge[1], log = 0;
      for (int t = 1; t < steps_; ++t) {
        const double* e = edge.data + 4 * t;
        const double from_off = off / std::max(e[0] + e[1], 1e-300);
        const double from_on = on / std::max(e[2] + e[3], 1e-300);
        off = from_off * e[0] + from_on * e[2];
        on = gain * (from_off * e[1] + from_on * e[3]);
        if (off + on < 1e100 && off + on > 1e-100) continue;
        log += std::log(off + on);
        const double sum = off + on;
        off /= sum;
        on /= sum;
      }
      if (log + std::log(off + on) - tilt * (budget_ + 1) < kFar) return true;
    }
    return false;
  }

  // The transitions of the Markov chain to begin with, and the band of numbers of each state: its
  // mean, and what it deviates from that.
  void prepare() {
    double mean[2] = {0, 0}, square[2] = {0, 0}, most = 0;
    mean_ = tilt_ = 0;
    for (int k = 0; k < 4 * steps_; ++k) edge[k] = edge[k] > kEmpty ? edge[k] : 0;
    for (int t = 0; t < steps_; ++t) {
      double next[2], next_square[2];
      for (int j = 0; j < 2; ++j) {
        double sum = 0, squares = 0;
        for (int i = 0; i < 2; ++i) {
          const double flow = edge[4 * t + 2 * i + j], number = mean[i] + j;
          const double from = t > 0 ? edge[4 * t + 2 * i] + edge[4 * t + 2 * i + 1] : 1;
          weight_[4 * t + 2 * i + j] = flow > 0 ? flow / from : 0;
          sum += flow * number;
          squares += flow * (square[i] + number * number);
        }
        const double all = mass(t, j);
        next[j] = all > 0 ? sum / all : mean[0] + j;
        next_square[j] = all > 0 ? std::max(squares / all - next[j] * next[j], 0.0) : 0;
      }
      mean_ += mass(t, 1);
      for (int j = 0; j < 2; ++j) {
        mean[j] = next[j];
        square[j] = next_square[j];
        if (mass(t, j) > 0) most = std::max(most, square[j]);
        base_[2 * t + j] = static_cast<std::int32_t>(std::lround(mean[j]));
      }
    }
    const double reach = (tight_ ? kReach : 2 * kReach) * std::sqrt(most);
    const int half = static_cast<int>(std::min(reach, double(most_width_))) + 8;
    width_ = std::min(2 * half + 1, most_width_);
    for (int k = 0; k < 2 * steps_; ++k) base_[k] -= width_ / 2;
  }

  // to[k] += factor * from[k + shift]
  FACTORMAX_INLINE void add(double* to, const double* from, int shift, double factor) const {
    const int begin = std::max(0, -shift), end = std::min(width_, width_ - shift);
#pragma omp simd
    for (int k = begin; k < end; ++k) to[k] += factor * from[k + shift];
  }
  FACTORMAX_INLINE double product(const double* a, const double* b, int shift) const {
    const int begin = std::max(0, -shift), end = std::min(width_, width_ - shift);
    double sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int k = begin; k < end; ++k) sum += a[k] * b[k + shift];
    return sum;
  }
  // Scales both states of a step, so that the largest is 1.
  FACTORMAX_INLINE void normalise(double* band) const {
    double most = 0;
    FACTORMAX_EXTREMES(reduction(max : most))
    for (int k = 0; k < 2 * width_; ++k) most = band[k] > most ? band[k] : most;
    const double scale = most > 0 ? 1 / most : 0;
#pragma omp simd
    for (int k = 0; k < 2 * width_; ++k) {
      const double value = band[k] * scale;
      band[k] = value > kNothing ? value : 0;
    }
  }

  // Where, in the band of state i before step t, the number is that at the start of the band of
  // state j less what step t adds.
  int shift(int t, int i, int j) const { return base_[2 * t + j] - j - base_[2 * t - 2 + i]; }

  double* ahead(int t) const { return ahead_.data + std::int64_t(2) * (t % block_) * width_; }
  double* kept(int block) const { return kept_.data + std::int64_t(2) * block * width_; }

  // How likely the number is to end as it should, for each of the numbers so far, at each step of
  // the block. Blocks are done last to first; what the next one began with is kept.
  FACTORMAX_INLINE void look_ahead(int block) {
    const int begin = block * block_, end = std::min(begin + block_, steps_);
    for (int t = end - 1; t >= begin; --t) {
      double* here = ahead(t);
      std::fill_n(here, 2 * width_, 0.0);
      if (t == steps_ - 1) {
        for (int k = 0; k < 2 * width_; ++k) {
          const int number = base_[2 * t + k / width_] + k % width_;
          const bool good = number == budget_ || (!tight_ && number < budget_);
          here[k] = good ? std::exp(tilt_ * (number - budget_)) : 0;
        }
        continue;
      }
      const double* next = t + 1 == end ? kept(block + 1) : ahead(t + 1);
      for (int e = 0; e < 4; ++e) {
        const int i = e / 2, j = e % 2;
        const double weight = weight_[4 * (t + 1) + e];
        if (weight > 0) add(here + i * width_, next + j * width_, -shift(t + 1, i, j), weight);
      }
      normalise(here);
    }
    if (block > 0) std::copy_n(ahead(begin), 2 * width_, kept(block));
  }

  // Fits the transitions of every step once, first to last; returns the largest error found.
  FACTORMAX_VECTOR double fit() {
    for (int block = (steps_ - 1) / block_; block > 0; --block) look_ahead(block);
    double *before = behind_.data, *now = before + 2 * width_, worst = 0;
    for (int t = 0; t < steps_; ++t) {
      if (t % block_ == 0) look_ahead(t / block_);
      const double* next = ahead(t);
      double *weight = weight_.data + 4 * t, flow[4], sum = 0;
      for (int e = 0; e < 4; ++e) {
        const int i = e / 2, j = e % 2;
        flow[e] = 0;
        if (weight[e] == 0) continue;
        const int first = j - base_[2 * t + j];
        if (t > 0) {
          flow[e] = product(next + j * width_, before + i * width_, shift(t, i, j));
        } else if (first >= 0 && first < width_) {
          flow[e] = next[j * width_ + first];
        }
        sum += flow[e] *= weight[e];
        if (!(flow[e] > 0)) return std::numeric_limits<double>::infinity();
      }
      std::fill_n(now, 2 * width_, 0.0);
      for (int e = 0; e < 4; ++e) {
        const int i = e / 2, j = e % 2;
        if (weight[e] == 0) continue;
        const double target = edge[4 * t + e];
        worst = std::max(worst, std::fabs(flow[e] / sum - target));
        weight[e] *= target * sum / flow[e];
        if (t > 0) {
          add(now + j * width_, before + i * width_, shift(t, i, j), weight[e]);
        } else {
          now[j * width_ + j - base_[j]] = weight[e];
        }
      }
      normalise(now);
      std::swap(before, now);
    }
    if (!tight_) find_tilt(before);
    return worst;
  }

  // Where the number may be less than the budget, its mean follows slowly from the fit of single
  // steps. So it is fitted as well, by the tilt of the last weights. docs/math.md (77).
  void find_tilt(const double* last) {
    const int t = steps_ - 1;
    double low = -kSteepest, high = kSteepest;
    for (int tries = 0; tries < kTries; ++tries) {
      double sum = 0, excess = 0, square = 0;
      for (int k = 0; k < 2 * width_; ++k) {
        const int below = base_[2 * t + k / width_] + k % width_ - budget_;
        if (below > 0 || last[k] == 0) continue;
        const double here = last[k] * std::exp(tilt_ * below), by = budget_ + below - mean_;
        sum += here;
        excess += here * by;
        square += here * by * by;
      }
      if (!(sum > 0)) return;
      (excess > 0 ? high : low) = tilt_;
      const double next = tilt_ - excess * sum / (square * sum - excess * excess);
      const bool done = std::fabs(excess) <= kEmpty * sum;
      if (done) return;
      tilt_ = next > low && next < high ? next : (low + high) / 2;
    }
  }

  int steps_ = 0, budget_ = 0, width_ = 0, most_width_ = 0, block_ = 1;
  bool tight_ = false;
  double mean_ = 0, tilt_ = 0;
  Span<double> weight_;        // (L, 2, 2) of the transitions
  Span<std::int32_t> base_;    // (L, 2) the first number of the band of a state
  Span<double> ahead_, kept_;  // (block, 2, width), (blocks, 2, width)
  Span<double> behind_;        // (2, 2, width)
};

}  // namespace factormax
