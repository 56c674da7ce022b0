// Factor scores of which the instances share some, as Python describes them.
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "arrays.hpp"
#include "factormax/problem.hpp"

namespace factormax::python {

// Which factor scores the instances share.
struct ScoreRuns {
  ScoreRuns() = default;

  // counts: how many scores are shared, not shared, shared, and so on; `total` altogether.
  ScoreRuns(const std::vector<int>& counts, int total) {
    int columns[2] = {0, 0}, begin = 0;
    for (std::size_t k = 0; k < counts.size(); ++k) {
      require(counts[k] >= 0 && counts[k] <= total - begin, "runs: too many scores");
      const bool shared = k % 2 == 0;
      if (counts[k] > 0) runs.push_back({begin, counts[k], columns[shared], shared});
      columns[shared] += counts[k];
      begin += counts[k];
    }
    require(begin == total, "runs: too few scores");
    num_shared = static_cast<std::size_t>(columns[1]);
  }

  Span<const ScoreRun> span() const { return {runs.data(), static_cast<int>(runs.size())}; }

  std::vector<ScoreRun> runs;  // those that are not empty
  std::size_t num_shared = 0;
};

// Whether no finite score becomes NaN or infinite when any of the temperatures divides it.
template <class T>
bool stays_finite(Span<const T> scores, Span<const double> heat) {
  T largest = 0;
  for (const T score : scores) {
    if (std::isfinite(score)) largest = std::max(largest, std::fabs(score));
  }
  return std::all_of(heat.begin(), heat.end(),
                     [&](double t) { return t > 0 && std::isfinite(static_cast<T>(largest / t)); });
}

}  // namespace factormax::python
