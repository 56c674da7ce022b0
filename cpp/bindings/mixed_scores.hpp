// Factor scores of which the instances share some, as Python describes them.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
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

  // How many of the first scores are shared.
  int shared_before(int count) const {
    int found = 0;
    for (const ScoreRun& run : runs) {
      if (run.shared) found += std::clamp(count - run.begin, 0, run.count);
    }
    return found;
  }

  Span<const ScoreRun> span() const { return {runs.data(), static_cast<int>(runs.size())}; }

  std::vector<ScoreRun> runs;  // those that are not empty
  std::size_t num_shared = 0;
};

// Shared scores as the coldest instance has them, which are the largest; NaN if a temperature is
// not positive.
template <class T>
std::vector<T> coldest(Span<const T> scores, Span<const double> heat) {
  double least = heat.empty() ? 1 : std::numeric_limits<double>::infinity();
  for (const double t : heat) least = t > 0 ? std::min(least, t) : std::nan("");
  std::vector<T> found(scores.begin(), scores.end());
  for (T& score : found) score = static_cast<T>(score / least);
  return found;
}

}  // namespace factormax::python
