// Factor scores of which a batch shares some: one row from several arrays, and its gradient back
// into several.
#pragma once

#include <algorithm>
#include <cstdint>

#include "factormax/batch.hpp"
#include "factormax/components.hpp"

namespace factormax {

// Cuts some of the scores where the runs end: f(k, count, run, column) is called for `count` scores
// from number k of these scores on, which are the columns from `column` on.
template <class F>
void each_piece(Span<const ScoreRun> runs, const Indices& scores, int total, const F& f) {
  const ScoreRun* run = runs.begin();
  for (int k = 0, count = 0; k < total; k += count) {
    const int q = scores.adjoin ? scores.index[0] + k : scores.index[k];
    if (q < run->begin || q >= run->begin + run->count) {
      const auto before = [](int score, const ScoreRun& r) { return score < r.begin; };
      run = std::upper_bound(runs.begin(), runs.end(), q, before) - 1;
    }
    const int most = std::min(total - k, run->begin + run->count - q);
    count = scores.adjoin ? most : 1;
    while (count < most && scores.index[k + count] == q + count) ++count;
    f(k, count, *run, run->column + q - run->begin);
  }
}

// All scores of a problem.
inline Indices all_scores(const Layout& p) {
  static constexpr std::int32_t first = 0;
  return {&first, p.num_scores(), p.num_scores() > 0, 0};
}

// Copies scores that the instances share as instance i has them.
template <class T>
void copy_shared(const MixedScores<T>& mixed, std::int64_t i, int column, int count, T* to) {
  const T* from = mixed.shared + column;
  const double* heat = mixed.heat.at(i);
  if (heat == nullptr) {
    std::copy_n(from, count, to);
  } else {
    for (int k = 0; k < count; ++k) to[k] = static_cast<T>(from[k] / *heat);
  }
}

// Some scores of an instance, where they are or copied to `row`.
template <class T>
const T* gather_scores(const Problem<T>& p, const Indices& scores, std::int64_t i, T* row) {
  if (!p.is_mixed()) return scores.gather(p.eta_v.at(i), row);
  const T* found = row;
  each_piece(p.mixed.runs, scores, scores.count,
             [&](int k, int count, const ScoreRun& run, int column) {
               const T* from = (run.shared ? p.mixed.shared : p.mixed.own.at(i)) + column;
               if (run.shared && p.mixed.heat.data != nullptr) {
                 copy_shared(p.mixed, i, column, count, row + k);
               } else if (count == scores.count) {
                 found = from;
               } else {
                 std::copy_n(from, count, row + k);
               }
             });
  return found;
}

// Adds the gradient of some scores of an instance to the sums of its block. The instances of a
// block come in their order; the first one finds nothing there.
template <class T>
void add_gradient(const ScoreSums<T>& to, const Indices& scores, std::int64_t i, const T* grad) {
  const bool first = i % to.block == 0;
  each_piece(to.runs, scores, scores.count - scores.ghosts,
             [&](int k, int count, const ScoreRun& run, int column) {
               T* out = (run.shared ? to.sums.at(i / to.block) : to.own.at(i)) + column;
               if (first || !run.shared) {
                 std::copy_n(grad + k, count, out);
               } else {
                 for (int c = 0; c < count; ++c) out[c] += grad[k + c];
               }
             });
}

// The rest of what has been summed block by block.
template <class T>
void add_blocks(const ScoreSums<T>& to, std::int64_t batch) {
  for (std::int64_t b = 1; b < to.num_blocks(batch); ++b) {
    for (std::int64_t c = 0; c < to.sums.stride; ++c) to.sums.data[c] += to.sums.at(b)[c];
  }
}

// A problem whose factor scores are those of one instance at a time, side by side in memory of its
// own, if they are not so anyway.
template <class T>
class InstanceScores {
 public:
  InstanceScores(const Problem<T>& p, Control& control)
      : problem_(p), mixed_(p.mixed), memory_(bytes(p)) {
    problem_.mixed = {};
    if (!memory_.valid()) control.fail_for_memory();
    if (!p.is_mixed() || !memory_.valid()) return;
    row_ = memory_.template take<T>(p.num_scores());
    problem_.eta_v = {row_.data, 0};
    if (!is_heated()) copy_all_shared(0);
  }

  static std::size_t bytes(const Problem<T>& p) {
    return p.is_mixed() ? std::size_t(p.num_scores()) * sizeof(T) : 0;
  }

  const Problem<T>& problem() const { return problem_; }

  // From now on the scores are those of instance i.
  void enter(std::int64_t i) {
    if (row_.empty()) return;
    if (is_heated()) copy_all_shared(i);
    for (const ScoreRun& run : mixed_.runs) {
      if (!run.shared) std::copy_n(mixed_.own.at(i) + run.column, run.count, to(run));
    }
  }

 private:
  void copy_all_shared(std::int64_t i) {
    for (const ScoreRun& run : mixed_.runs) {
      if (run.shared) copy_shared(mixed_, i, run.column, run.count, to(run));
    }
  }
  bool is_heated() const { return mixed_.heat.data != nullptr; }
  T* to(const ScoreRun& run) const { return row_.data + run.begin; }

  Problem<T> problem_;
  MixedScores<T> mixed_;
  Workspace memory_;
  Span<T> row_;
};

}  // namespace factormax
