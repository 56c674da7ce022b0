// Matches three people with four tasks: everyone gets exactly one, no task is done twice. Prints
// the sparse matching, its gradient, and the best matching.
#include <cstdio>
#include <vector>

#include "factormax/builder.hpp"

namespace {

constexpr int kRows = 3, kColumns = 4;

void print(const char* title, const std::vector<double>& matrix) {
  std::printf("%s\n", title);
  for (int i = 0; i < kRows; ++i) {
    for (int j = 0; j < kColumns; ++j) std::printf(" %6.3f", matrix[i * kColumns + j]);
    std::printf("\n");
  }
}

}  // namespace

int main() {
  factormax::FactorGraph<double> fg;
  const factormax::Variables u = fg.add_variables({2.0, 1.8, 0.1, 0.4,  //
                                                   1.6, 0.2, 0.5, 0.0,  //
                                                   1.8, 1.4, 0.4, 0.9});
  for (int i = 0; i < kRows; ++i) fg.add_xor(u.slice(i * kColumns, kColumns));
  for (int j = 0; j < kColumns; ++j) fg.add_at_most_one(u.slice(j, kRows, kColumns));

  const auto solution = fg.solve();
  print("Matching:", solution.values);

  std::vector<double> weights(u.size);
  weights[0] = 1;  // the first person and the first task
  print("Gradient of its first entry:", solution.vjp(weights).scores);

  const auto best = fg.solve({}, factormax::Method::proximal);
  print("Best matching:", best.values);
  std::printf("It scores %.3f.\n", best.objective[0]);
  return solution.converged() && best.converged() && best.integral[0] ? 0 : 1;
}
