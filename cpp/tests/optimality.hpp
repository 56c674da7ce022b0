// Whether a solution is one: its optimality conditions, computed from the graph as given.
#pragma once

#include "factormax/vector_ops.hpp"
#include "solution.hpp"

namespace factormax::test {

constexpr double kInf = std::numeric_limits<double>::infinity();

// ---- One instance, as the definition has it ------------------------------------------

// A row  a . mu <= b  whose multiplier is in [lo, hi].
struct Row {
  int index;  // number among rows and pairs
  std::vector<int> var;
  std::vector<double> coef;
  double b, lo, hi;
};

struct Plain {
  std::vector<bool> present;
  std::vector<double> eta;  // with the linear part of the pairs
  std::vector<Row> rows;
};

template <class T>
Plain plain(Graph<T>& graph, int i) {
  const Problem<T> p = graph.problem();
  Plain out;
  for (int j = 0; j < p.num_vars; ++j) {
    const bool masked = p.mask.data != nullptr && p.mask.at(i)[j] == 0;
    out.eta.push_back(p.eta_u.at(i)[j]);
    out.present.push_back(!masked && out.eta[j] != -kInf);
  }
  for (int r = 0; r < p.num_rows; ++r) {
    const auto kind = static_cast<RowKind>(p.kind[r]);
    if (kind == RowKind::absent) continue;
    Row row{r, {}, {}, p.rhs.at(i)[r], kind == RowKind::equality ? -kInf : 0, kInf};
    for (int k = p.row_ptr[r]; k < p.row_ptr[r + 1]; ++k) {
      if (!out.present[p.col[k]]) continue;
      row.var.push_back(p.col[k]);
      row.coef.push_back(p.coef.at(i)[k]);
    }
    out.rows.push_back(row);
  }
  for (int q = 0; q < p.num_pairs; ++q) {
    const int j1 = p.pair_var[2 * q], j2 = p.pair_var[2 * q + 1];
    if (!out.present[j1] && !out.present[j2]) continue;
    const double n1 = p.pair_negated[2 * q], n2 = p.pair_negated[2 * q + 1];
    const double s = p.eta_v.at(i)[q], sign1 = 1 - 2 * n1, sign2 = 1 - 2 * n2;
    if (!out.present[j2]) {  // its literal is a constant, n2
      out.eta[j1] += n2 * s * sign1;
    } else if (!out.present[j1]) {
      out.eta[j2] += n1 * s * sign2;
    } else if (s >= 0) {  // s l2, and s for each unit of  l2 - l1 > 0
      out.eta[j2] += s * sign2;
      out.rows.push_back({p.num_rows + q, {j1, j2}, {-sign1, sign2}, n1 - n2, 0, s});
    } else {  // -s for each unit of  l1 + l2 - 1 > 0
      out.rows.push_back({p.num_rows + q, {j1, j2}, {sign1, sign2}, 1 - n1 - n2, 0, -s});
    }
  }
  return out;
}

inline double pair_value(double l1, double l2, double score) {
  return score >= 0 ? std::min(l1, l2) : std::max(0.0, l1 + l2 - 1);
}

// <eta_u, mu> - |mu|^2 / 2 + <eta_v, values of the pairs>
template <class T>
double objective(Graph<T>& graph, int i, const T* mu) {
  const Problem<T> p = graph.problem();
  double sum = 0;
  for (int j = 0; j < p.num_vars; ++j) {
    if (mu[j] != 0) sum += double(p.eta_u.at(i)[j]) * mu[j] - 0.5 * double(mu[j]) * mu[j];
  }
  for (int q = 0; q < p.num_pairs; ++q) {
    const double mu1 = mu[p.pair_var[2 * q]], mu2 = mu[p.pair_var[2 * q + 1]];
    const double score = p.eta_v.at(i)[q];
    sum += score * pair_value(p.pair_negated[2 * q] ? 1 - mu1 : mu1,
                              p.pair_negated[2 * q + 1] ? 1 - mu2 : mu2, score);
  }
  return sum;
}

inline double clip01(double value) { return clip(value, 0.0, 1.0); }

// ---- Optimality conditions -----------------------------------------------------------

// An instance of a solution, and how closely its conditions hold.
template <class T>
struct Answer {
  const T *mu, *tau, *mu_v;
  const std::int8_t *var_side, *row_side;
  double tol, margin;

  Answer(const Solution<T>& out, int i, double tolerance)
      : mu(out.mu.data() + std::size_t(i) * out.n),
        tau(out.tau.data() + std::size_t(i) * out.dual),
        mu_v(out.mu_v.data() + std::size_t(i) * out.pairs),
        var_side(out.var_side.data() + std::size_t(i) * out.n),
        row_side(out.row_side.data() + std::size_t(i) * out.dual),
        tol(tolerance),
        margin(0) {}
};

// mu = clip(eta - A^T tau). Sets the margin: with scores of size s nothing is finer than a few eps
// s.
template <class T>
void check_variables(const Plain& p, Answer<T>& at) {
  const T *mu = at.mu, *tau = at.tau;
  const std::int8_t* var_side = at.var_side;
  const int n = static_cast<int>(p.eta.size());
  std::vector<double> z = p.eta, size(p.eta.size());
  for (std::size_t j = 0; j < z.size(); ++j) size[j] = std::fabs(z[j]);
  for (const Row& row : p.rows) {
    for (std::size_t k = 0; k < row.var.size(); ++k) {
      z[row.var[k]] -= row.coef[k] * tau[row.index];
      size[row.var[k]] += std::fabs(row.coef[k] * tau[row.index]);
    }
  }
  double largest = 1;
  for (int j = 0; j < n; ++j) {
    if (p.present[j]) largest = std::max(largest, size[j]);
  }
  const double tol = at.tol += 32 * std::numeric_limits<T>::epsilon() * largest;
  const double margin = at.margin = 16 * tol + 200 * std::numeric_limits<T>::epsilon() * largest;
  for (int j = 0; j < n; ++j) {
    if (!p.present[j]) {
      CHECK(mu[j] == 0 && var_side[j] == static_cast<int>(Side::absent));
      continue;
    }
    CHECK_NEAR(mu[j], clip01(z[j]), tol);
    switch (static_cast<Side>(var_side[j])) {
      case Side::lower:
        CHECK(mu[j] <= margin);
        break;
      case Side::upper:
        CHECK(mu[j] >= 1 - margin);
        break;
      case Side::interior:
        CHECK(mu[j] > 0 && mu[j] < 1);
        break;
      default:
        CHECK(!"a present variable has a side");
    }
  }
}

// Rows hold, multipliers stay within their bounds, and one of the two is tight.
template <class T>
void check_rows(const Plain& p, int dual, const Answer<T>& at) {
  const T *mu = at.mu, *tau = at.tau;
  const std::int8_t* row_side = at.row_side;
  const double tol = at.tol, margin = at.margin;
  std::vector<bool> seen(dual, false);
  for (const Row& row : p.rows) {
    double slack = row.b, squares = 0, most = 0;
    for (std::size_t k = 0; k < row.var.size(); ++k) {
      slack -= row.coef[k] * mu[row.var[k]];
      squares += row.coef[k] * row.coef[k];
      most += std::max(row.coef[k], 0.0);
    }
    // A row that holds whatever the variables are is absent from the answer.
    if (squares == 0 || (row.lo == 0 && row.hi == kInf && most <= row.b)) continue;
    seen[row.index] = true;
    const double norm = std::sqrt(squares), t = tau[row.index];
    CHECK(t >= row.lo - tol && t <= row.hi + tol);
    const double x = t * norm, moved = clip(x - slack / norm, row.lo * norm, row.hi * norm);
    // Far out x - slack / norm would round to x: an interior multiplier means no slack.
    const bool inside = t > row.lo + margin / norm && t < row.hi - margin / norm;
    CHECK_NEAR((inside ? slack : (x - moved) * norm), 0, tol * std::max(1.0, norm));
    switch (static_cast<Side>(row_side[row.index])) {
      case Side::lower:
        CHECK(x <= row.lo * norm + margin);
        break;
      case Side::upper:
        CHECK(x >= row.hi * norm - margin);
        break;
      case Side::tied:
      case Side::interior:
        CHECK_NEAR(slack, 0, tol * std::max(1.0, norm));
        break;
      default:
        CHECK(!"a present row has a side");
    }
    if (row.lo == -kInf) CHECK(row_side[row.index] == static_cast<int>(Side::interior));
  }
  for (int r = 0; r < dual; ++r) {
    if (!seen[r]) CHECK(tau[r] == 0 && row_side[r] == static_cast<int>(Side::absent));
  }
}

template <class T>
void check_pairs(Graph<T>& graph, const Plain& p, int i, const Answer<T>& at) {
  const T* mu = at.mu;
  for (int q = 0; q < graph.num_pairs(); ++q) {
    const int j1 = graph.pair_var[2 * q], j2 = graph.pair_var[2 * q + 1];
    const T value = at.mu_v[q];
    if (!p.present[j1] && !p.present[j2]) {
      CHECK(value == 0);
      continue;
    }
    const double l1 = graph.pair_negated[2 * q] ? 1 - double(mu[j1]) : mu[j1];
    const double l2 = graph.pair_negated[2 * q + 1] ? 1 - double(mu[j2]) : mu[j2];
    CHECK_NEAR(value, pair_value(l1, l2, graph.problem().eta_v.at(i)[q]), at.tol);
  }
}

// The conditions hold to `tol`.
template <class T>
void check_optimal(Graph<T>& graph, const Solution<T>& out, int i, double tol) {
  const Plain p = plain(graph, i);
  // Scores that the precision hardly resolves may stall, and then say so.
  double size_of_scores = 1;
  for (const double eta : p.eta) size_of_scores = std::max(size_of_scores, std::fabs(eta));
  const bool resolved = 8 * std::numeric_limits<T>::epsilon() * size_of_scores <= 1e-3;
  CHECK(out.status_of(i) == Status::converged ||
        (!resolved && out.status_of(i) == Status::stalled));
  if (out.status_of(i) != Status::converged) return;
  CHECK(out.iterations[i] >= 1 && out.primal_residual[i] >= 0 && out.dual_residual[i] >= 0);
  Answer<T> at(out, i, tol);
  check_variables(p, at);
  check_rows(p, out.dual, at);
  check_pairs(graph, p, i, at);
}

// No other instance's solution, which is feasible here too, is better: a check that does not depend
// on multipliers. For instances that share their rows, and miss no variable.
template <class T>
void check_best(Graph<T>& graph, const Solution<T>& out, double tol) {
  for (int i = 0; i < out.batch; ++i) {
    const double best = objective(graph, i, &out.mu[std::size_t(i) * out.n]);
    const double allowed = tol * (1 + std::fabs(best)) * out.n;
    CHECK_NEAR(out.objective[i], best, allowed);
    for (int k = 0; k < out.batch; ++k) {
      CHECK(objective(graph, i, &out.mu[std::size_t(k) * out.n]) <= best + allowed);
    }
  }
}

template <class T>
void check_all(Graph<T>& graph, const Solution<T>& out, double tol) {
  for (int i = 0; i < out.batch; ++i) check_optimal(graph, out, i, tol);
}

}  // namespace factormax::test
