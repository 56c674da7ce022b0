// A small dense system of equations, symmetric and positive semidefinite, with unknowns held at 0.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>

#include "factormax/vector_ops.hpp"

namespace factormax {

class SetSystem {
 public:
  void allocate(int most, Workspace& ws) {
    most_ = most;
    for (Span<double>* a : {&matrix_, &factor_}) *a = ws.take<double>(std::int64_t(most) * most);
    for (Span<double>* a : {&rhs, &solution, &pivot_, &rest_}) *a = ws.take<double>(most);
    held = ws.take<std::uint8_t>(most);
  }

  Span<std::uint8_t> held;     // which unknowns are 0
  Span<double> rhs, solution;  // what is asked, and the answer

  void clear(int count) {
    count_ = count;
    for (int i = 0; i < count; ++i) {
      std::fill_n(matrix_.data + std::int64_t(i) * most_, i + 1, 0.0);
    }
  }

  double& entry(int i, int j) const {
    return matrix_.data[i >= j ? std::int64_t(i) * most_ + j : std::int64_t(j) * most_ + i];
  }
  double diagonal(int i) const { return entry(i, i); }

  // L D L^T of the matrix without what is held.
  void factorise() {
    double trace = 0;
    for (int i = 0; i < count_; ++i) trace += held[i] ? 0.0 : diagonal(i);
    const double ridge = kRidge * trace / std::max(count_, 1);
    for (int i = 0; i < count_; ++i) {
      double* row = factor_.data + std::int64_t(i) * most_;
      for (int j = 0; j < i; ++j) row[j] = held[i] || held[j] ? 0.0 : entry(i, j);
      double own = held[i] ? 1.0 : diagonal(i) + ridge;
      for (int j = 0; j < i; ++j) {
        const double* other = factor_.data + std::int64_t(j) * most_;
        double sum = row[j];
        for (int k = 0; k < j; ++k) sum -= row[k] * other[k];
        row[j] = sum;
      }
      for (int j = 0; j < i; ++j) {
        const double scaled = row[j] * pivot_[j];
        own -= row[j] * scaled;
        row[j] = scaled;
      }
      pivot_[i] = 1 / std::max(own, ridge / 2);
    }
  }

  // Returns what is left of rhs, at most.
  double solve() {
    double left = 0;
    fill(solution.first(count_), 0.0);
    for (int i = 0; i < count_; ++i) {
      if (held[i]) rhs[i] = 0;
      rest_[i] = rhs[i];
    }
    for (int round = 0; round < 3; ++round) {
      substitute();
      for (int i = 0; i < count_; ++i) solution[i] += rest_[i];
      left = 0;
      for (int i = 0; i < count_; ++i) {
        double sum = rhs[i];
        for (int j = 0; j < count_ && !held[i]; ++j) {
          if (!held[j]) sum -= entry(i, j) * solution[j];
        }
        rest_[i] = sum;
        left = std::max(left, std::fabs(sum));
      }
      if (left <= 4 * kEps) break;
    }
    return left;
  }

 private:
  static constexpr double kEps = std::numeric_limits<double>::epsilon();
  static constexpr double kRidge = 1e-11;  // relative, of the matrix

  void substitute() {
    for (int i = 0; i < count_; ++i) {
      const double* row = factor_.data + std::int64_t(i) * most_;
      for (int j = 0; j < i; ++j) rest_[i] -= row[j] * rest_[j];
    }
    for (int i = 0; i < count_; ++i) rest_[i] *= pivot_[i];
    for (int i = count_ - 1; i >= 0; --i) {
      const double* row = factor_.data + std::int64_t(i) * most_;
      for (int j = 0; j < i; ++j) rest_[j] -= row[j] * rest_[i];
    }
  }

  int count_ = 0, most_ = 0;
  Span<double> matrix_, factor_;  // (most, most), the lower triangles
  Span<double> pivot_, rest_;     // (most,)
};

}  // namespace factormax
