// The flows of a sequence's solution, roughly, by an interior point method, docs/math.md (67)-(68):
// whatever the scores, a dozen or two iterations tell which edges carry flow.
//
// The normal equations of the flow problem are those of a network of resistors, with two nodes for
// every state of every step (where flow comes in, and where it goes out), which is eliminated
// without a subtraction.
#pragma once

#include <limits>

#include "factormax/oracle/max_plus.hpp"
#include "factormax/oracle/sequence.hpp"
#include "factormax/vector_ops.hpp"

namespace factormax {

class FlowInterior {
 public:
  void allocate(const oracle::SequenceShape& shape, Workspace& ws) {
    shape_ = shape;
    const int S = shape.states, L = shape.length;
    const std::int64_t edges = std::int64_t(L) * S * S;
    for (Span<double>* a : {&flow_, &slack_, &ratio_, &flow_step_, &slack_step_, &product_}) {
      *a = ws.take<double>(edges);
    }
    for (Span<double>* a : {&x_, &mu_, &give_, &out_, &in_, &out_lack_, &in_lack_, &out_step_,
                            &in_step_, &to_, &from_}) {
      *a = ws.take<double>(L * S);
    }
    even_ = ws.take<double>(L);
    live_ = ws.take<std::int32_t>(L * S);
    count_ = ws.take<std::int32_t>(L);
    network_ = ws.take<double>(std::int64_t(2) * L * S * (2 * S + 1));
    inverse_ = ws.take<double>(2 * L * S);
    wide_ = ws.take<double>(std::int64_t(2) * S * (2 * S + 1));
    clique_ = ws.take<double>(std::int64_t(S) * (S + 1));
  }

  // Keeps only the first `states` states from here on, as if there were no others.
  void set_states(int states) { shape_.states = states; }

  // Leaves out edges and states that can't be part of a solution, docs/math.md (69). Returns the
  // size of the scores of the others; 0 if there is no path. x: (L, S) with the scores of the ends.
  FACTORMAX_VECTOR double screen(const double* x, const double* eta_v, int steps, const double* w) {
    const int S = shape_.states;
    steps_ = steps;
    const double best = best_ways(x, eta_v);
    const double inf = std::numeric_limits<double>::infinity();
    if (!(best > -inf)) return 0;
    double room = 0;
    for (int t = 0; t < steps; ++t) {
      double largest = 0;
      for (int s = 0; s < S; ++s) largest = std::max(largest, w[t * S + s]);
      room += largest;
    }
    least_ = best - room * (1 + 1e-9);
    double size = 0, edges = 0;
    for (int t = 0; t < steps; ++t) {
      double lo = inf, hi = -inf;
      count_[t] = 0;
      for (int s = 0; s < S; ++s) {
        const int k = t * S + s;
        if (!(to_[k] + from_[k] >= least_)) continue;
        live_[t * S + count_[t]++] = s;
        lo = std::min(lo, x[k]);
        hi = std::max(hi, x[k]);
      }
      size = std::max(size, hi - lo);
      lo = inf;
      hi = -inf;
      for (int i = 0; t > 0 && i < S; ++i) {
        if (!(to_[(t - 1) * S + i] + from_[(t - 1) * S + i] >= least_)) continue;
        const double *score = eta_v + shape_.transition_at(t, i), to = to_[(t - 1) * S + i];
        const double *here = x + t * S, *on = from_.data + t * S;
        FACTORMAX_EXTREMES(reduction(min : lo) reduction(max : hi))
        for (int j = 0; j < S; ++j) {
          const bool live = to + score[j] + here[j] + on[j] >= least_;
          lo = live && score[j] < lo ? score[j] : lo;
          hi = live && score[j] > hi ? score[j] : hi;
        }
      }
      if (hi > lo) edges = std::max(edges, hi - lo);
    }
    size_of_edges_ = edges;
    size = std::max(size, edges);
    return size > 1e-30 ? size : 1;
  }

  // After `screen`: the size of the scores of the edges alone.
  double size_of_edges() const { return size_of_edges_; }

  // After `screen`, with the same scores. At least two steps.
  void begin(const double* x, const double* eta_v, const double* w, double size) {
    const int S = shape_.states;
    size_ = size;
    nu_ = 0;
    edges_ = 0;
    for (int t = 0; t < steps_; ++t) {
      double sum = 0, mean = 0;
      const int n = count_[t];
      for (int k = 0; k < n; ++k) mean += x[t * S + live_[t * S + k]] / n;
      for (int k = 0; k < n; ++k) {
        const int s = t * S + live_[t * S + k];
        x_[t * S + k] = x[s] - mean;
        sum += give_[t * S + k] = 1 / w[s];
      }
      even_[t] = 1 / sum;
    }
    for (int t = 0; t < steps_; ++t) {
      const bool first = t == 0, last = t == steps_ - 1;
      for (int k = 0; k < count_[t]; ++k) {
        const double x_here = x_[t * S + k];
        out_[t * S + k] = last ? 0 : -x_here * (first ? 1.0 : 0.5);
        in_[t * S + k] = first ? 0 : x_here * (last ? 1.0 : 0.5);
      }
    }
    for (int t = steps_ - 1; t > 0; --t) {
      const int n = count_[t - 1], m = count_[t];
      double least = std::numeric_limits<double>::infinity();
      for (int i = 0; i < n; ++i) {
        const int from = live_[(t - 1) * S + i];
        const double* score = eta_v + shape_.transition_at(t, from);
        for (int j = 0; j < m; ++j) {
          const int to = live_[t * S + j], e = edge(t, i, j);
          const bool live = is_live(t, from, to, score[to], x);
          flow_[e] = (live ? 1 : size_ / kFar) / (double(n) * m);
          slack_[e] = live ? out_[(t - 1) * S + i] - in_[t * S + j] - score[to] : kFar;
          if (live) least = std::min(least, slack_[e]);
        }
      }
      // What all states of a step have in common does not matter.
      const double shift = size_ - least;
      for (int i = 0; i < n; ++i) {
        out_[(t - 1) * S + i] += shift;
        x_[(t - 1) * S + i] -= shift;
      }
      for (int e = edge(t, 0, 0); e < edge(t, n, 0); ++e) {
        if (slack_[e] < kFar) slack_[e] += shift;
      }
      edges_ += n * m;
    }
  }

  // The mean of flow times slack, relative to the size of the scores: 0 at the solution.
  double gap() const { return gap_ / size_ / size_; }

  // One step of Mehrotra's method; false once rounding is all that is left.
  bool iterate() {
    const int S = shape_.states;
    measure();
    if (!(gap() > 1e-18)) return false;
    factorise();
    double most = solve(0, false);
    const double ahead = std::min(1.0, most);
    double rest = 0;
    for (int t = 1; t < steps_; ++t)
      rest += foresee(edge(t, 0, 0), edge(t, count_[t - 1], 0), ahead);
    rest /= edges_;
    const double ratio = rest / gap_;
    most = solve(ratio * ratio * ratio * gap_, true);
    const double step = std::min(1.0, most * std::max(0.99, 1 - gap()));
    for (int t = 0; t < steps_; ++t) {
      for (int k = t * S; k < t * S + count_[t]; ++k) {
        out_[k] += step * out_step_[k];
        in_[k] += step * in_step_[k];
      }
      if (t > 0) move(edge(t, 0, 0), edge(t, count_[t - 1], 0), step);
    }
    nu_ += step * nu_step_;
    measure();
    return std::isfinite(gap_);
  }

  // Calls visit(t, from, to, flow) for the edges that carry flow (more than they have slack), and
  // first(s, mu) for the states of the first step.
  template <class Visit, class First>
  void visit(const Visit& visit, const First& first) const {
    const int S = shape_.states;
    for (int k = 0; k < count_[0]; ++k) {
      double sum = 0;
      bool any = false;
      for (int j = 0; j < count_[1]; ++j) {
        const int e = edge(1, k, j);
        if (!(flow_[e] > slack_[e])) continue;
        any = true;
        sum += flow_[e];
      }
      if (any) first(live_[k], sum);
    }
    for (int t = 1; t < steps_; ++t) {
      for (int i = 0; i < count_[t - 1]; ++i) {
        for (int j = 0; j < count_[t]; ++j) {
          const int e = edge(t, i, j);
          if (flow_[e] > slack_[e]) visit(t, live_[(t - 1) * S + i], live_[t * S + j], flow_[e]);
        }
      }
    }
  }

 private:
  static constexpr double kFar = 1e100;  // slack of an edge that is left out

  int edge(int t, int i, int j) const {
    return t * shape_.states * shape_.states + i * count_[t] + j;
  }

  // to_: the best way to a state, with its score; from_: the best way on. Returns the best of all.
  FACTORMAX_VECTOR double best_ways(const double* x, const double* eta_v) {
    const int S = shape_.states;
    const double inf = std::numeric_limits<double>::infinity();
    for (int s = 0; s < S; ++s) {
      to_[s] = x[s];
      from_[(steps_ - 1) * S + s] = 0;
    }
    for (int t = 1; t < steps_; ++t) {
      double* next = to_.data + t * S;
      oracle::max_plus(next - S, eta_v + shape_.transition_at(t, 0), S, S, next);
#pragma omp simd
      for (int s = 0; s < S; ++s) next[s] += x[t * S + s];
    }
    double best = -inf;
    for (int s = 0; s < S; ++s) best = std::max(best, to_[(steps_ - 1) * S + s]);
    for (int t = steps_ - 1; t > 0; --t) {
      const double *on = from_.data + t * S, *here = x + t * S;
      for (int i = 0; i < S; ++i) {
        const double* score = eta_v + shape_.transition_at(t, i);
        from_.data[(t - 1) * S + i] =
            largest_of(S, -inf, [=](int j) { return score[j] + here[j] + on[j]; });
      }
    }
    return best;
  }

  bool is_live(int t, int i, int j, double score, const double* x) const {
    const int S = shape_.states;
    return to_[(t - 1) * S + i] + score + x[t * S + j] + from_[t * S + j] >= least_;
  }

  // Finds what the flows lack: by how much they miss the marginals, and these their sum.
  FACTORMAX_VECTOR void measure() {
    const int S = shape_.states;
    total_lack_ = 1;
    double gap = 0;
    for (int t = 0; t < steps_; ++t) {
      for (int k = t * S; k < t * S + count_[t]; ++k) {
        const double in = t == 0 ? nu_ : in_.data[k];
        mu_[k] = give_[k] * (even_[t] + x_[k] + out_[k] - in);
        out_lack_[k] = in_lack_[k] = mu_[k];
        if (t == 0) total_lack_ -= mu_[k];
      }
    }
    for (int t = 1; t < steps_; ++t) {
      const int n = count_[t - 1], m = count_[t];
      double* in = in_lack_.data + t * S;
      for (int i = 0; i < n; ++i) {
        const int e = edge(t, i, 0);
        const double *flow = flow_.data + e, *slack = slack_.data + e;
        double* ratio = ratio_.data + e;
        double sum = 0;
#pragma omp simd reduction(+ : sum, gap)
        for (int j = 0; j < m; ++j) {
          gap += flow[j] * slack[j];
          sum += flow[j];
          in[j] -= flow[j];
          ratio[j] = flow[j] / slack[j];
        }
        out_lack_[(t - 1) * S + i] -= sum;
      }
    }
    gap_ = gap / edges_;
  }

  FACTORMAX_VECTOR double foresee(int begin, int end, double step) {
    double sum = 0;
    const double *flow = flow_.data, *slack = slack_.data;
    double *flow_step = flow_step_.data, *slack_step = slack_step_.data, *product = product_.data;
#pragma omp simd reduction(+ : sum)
    for (int e = begin; e < end; ++e) {
      sum += (flow[e] + step * flow_step[e]) * (slack[e] + step * slack_step[e]);
      product[e] = flow_step[e] * slack_step[e];
    }
    return sum;
  }

  FACTORMAX_VECTOR void move(int begin, int end, double step) {
    double *flow = flow_.data, *slack = slack_.data;
    const double *flow_step = flow_step_.data, *slack_step = slack_step_.data;
#pragma omp simd
    for (int e = begin; e < end; ++e) {
      flow[e] += step * flow_step[e];
      slack[e] += step * slack_step[e];
    }
  }

  // Newton's direction to flow . slack = target, less what the first direction left if `corrected`;
  // returns how far it can be followed.
  FACTORMAX_VECTOR double solve(double target, bool corrected) {
    const int S = shape_.states;
    for (int t = 0; t < steps_; ++t) {
      for (int k = t * S; k < t * S + count_[t]; ++k) {
        out_step_[k] = t + 1 < steps_ ? -out_lack_[k] : 0.0;
        in_step_[k] = t > 0 ? in_lack_[k] : 0.0;
      }
    }
    nu_step_ = -total_lack_;
    const double weight = corrected ? 1 : 0;
    for (int t = 1; t < steps_; ++t) {
      const int n = count_[t - 1], m = count_[t];
      double* in = in_step_.data + t * S;
      for (int i = 0; i < n; ++i) {
        const int e = edge(t, i, 0);
        const double *flow = flow_.data + e, *slack = slack_.data + e, *product = product_.data + e;
        double *wanted = flow_step_.data + e, sum = 0;
        if (!corrected) std::fill_n(product_.data + e, m, 0.0);
#pragma omp simd reduction(+ : sum)
        for (int j = 0; j < m; ++j) {
          const double value = (target - weight * product[j]) / slack[j] - flow[j];
          wanted[j] = value;
          sum += value;
          in[j] -= value;
        }
        out_step_[(t - 1) * S + i] += sum;
      }
    }
    substitute();
    double steepest = 1e-300;
    for (int t = 1; t < steps_; ++t) {
      const int n = count_[t - 1], m = count_[t];
      const double* in = in_step_.data + t * S;
      for (int i = 0; i < n; ++i) {
        const int e = edge(t, i, 0);
        const double *flow = flow_.data + e, *slack = slack_.data + e, *ratio = ratio_.data + e;
        double *flow_step = flow_step_.data + e, *slack_step = slack_step_.data + e;
        const double out = out_step_[(t - 1) * S + i];
        FACTORMAX_EXTREMES(reduction(max : steepest))
        for (int j = 0; j < m; ++j) {
          const double change = out - in[j], moved = flow_step[j] - ratio[j] * change;
          slack_step[j] = change;
          flow_step[j] = moved;
          const double first = -moved / flow[j], second = -change / slack[j];
          const double fastest = first > second ? first : second;
          steepest = fastest > steepest ? fastest : steepest;
        }
      }
    }
    return 1 / steepest;
  }

  // The eliminated network. Stage 2 t is where flow comes into step t, 2 t + 1 where it left t - 1.
  double* row(int stage, int k) const {
    const int S = shape_.states;
    return network_.data + (std::int64_t(stage) * S + k) * (2 * S + 1);
  }

  FACTORMAX_VECTOR void factorise() {
    const int S = shape_.states;
    // The nodes where flow comes into the step at hand: conductances among them, ground last.
    double *X = wide_.data, *clique = clique_.data;
    {
      const int t = steps_ - 1, m = count_[t];
      std::fill_n(clique, m * (m + 1), 0.0);
      for (int j = 0; j < m; ++j) clique[j * (m + 1) + m] = give_[t * S + j];
    }
    for (int t = steps_ - 1; t > 0; --t) {
      const int m = count_[t], n = count_[t - 1];
      int width = m + n + 1;
      for (int i = m; i < m + n; ++i) std::fill_n(X + i * width, width, 0.0);
      for (int j = 0; j < m; ++j) {
        double* x = X + j * width;
        std::copy(clique + j * (m + 1), clique + j * (m + 1) + m, x);
        for (int i = 0; i < n; ++i) x[m + i] = ratio_[edge(t, i, j)];
        x[m + n] = clique[j * (m + 1) + m];
      }
      eliminate(X, m, n, 2 * t);
      keep_clique(X, m, n, width);
      // Where flow leaves step t - 1, each node tied to the one where it came in.
      const int others = t > 1 ? n : 1;
      width = n + others + 1;
      for (int i = n; i < n + others; ++i) std::fill_n(X + i * width, width, 0.0);
      for (int i = 0; i < n; ++i) {
        double* x = X + i * width;
        std::copy(clique + i * (n + 1), clique + i * (n + 1) + n, x);
        std::fill_n(x + n, others, 0.0);
        x[n + (t > 1 ? i : 0)] = give_[(t - 1) * S + i];
        x[n + others] = clique[i * (n + 1) + n];
      }
      eliminate(X, n, others, 2 * t + 1);
      keep_clique(X, n, others, width);
    }
    nu_inverse_ = 1 / clique[1];
  }

  // Two nodes at a time, for both change the same rows.
  FACTORMAX_INLINE void eliminate(double* X, int own, int others, int stage) {
    const int n = own + others, width = n + 1;
    int k = 0;
    for (; k + 1 < own; k += 2) {
      const double* x = X + k * width;
      double* y = X + (k + 1) * width;
      const double *first = normalise(x, stage, k, width), part = first[k + 1];
#pragma omp simd
      for (int j = k + 2; j < width; ++j) y[j] += part * x[j];
      const double* second = normalise(y, stage, k + 1, width);
      for (int i = k + 2; i < n; ++i) {
        const double a = first[i], b = second[i];
        double* other = X + i * width;
#pragma omp simd
        for (int j = i + 1; j < width; ++j) other[j] += a * x[j] + b * y[j];
      }
    }
    if (k == own) return;
    const double *x = X + k * width, *last = normalise(x, stage, k, width);
    for (int i = k + 1; i < n; ++i) {
      const double a = last[i];
      double* other = X + i * width;
#pragma omp simd
      for (int j = i + 1; j < width; ++j) other[j] += a * x[j];
    }
  }

  // Row k of the eliminated network: conductances to the nodes that are left, over their sum.
  FACTORMAX_INLINE const double* normalise(const double* x, int stage, int k, int width) {
    double *norm = row(stage, k), sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int j = k + 1; j < width; ++j) sum += x[j];
    const double inverse = inverse_[stage * shape_.states + k] = 1 / sum;
#pragma omp simd
    for (int j = k + 1; j < width; ++j) norm[j] = x[j] * inverse;
    return norm;
  }

  FACTORMAX_INLINE void keep_clique(const double* X, int own, int others, int width) {
    for (int i = 0; i < others; ++i) {
      const double* x = X + (own + i) * width + own;
      double* to = clique_.data + i * (others + 1);
      for (int j = i + 1; j <= others; ++j) to[j] = x[j];
    }
  }

  FACTORMAX_INLINE void push(int stage, double* p, int own, double* q, int others) const {
    for (int k = 0; k < own; ++k) {
      const double *norm = row(stage, k), value = p[k];
#pragma omp simd
      for (int j = k + 1; j < own; ++j) p[j] += norm[j] * value;
#pragma omp simd
      for (int j = 0; j < others; ++j) q[j] += norm[own + j] * value;
    }
  }

  FACTORMAX_INLINE void pull(int stage, double* p, int own, const double* q, int others) const {
    for (int k = own - 1; k >= 0; --k) {
      const double* norm = row(stage, k);
      double value = p[k] * inverse_[stage * shape_.states + k];
#pragma omp simd reduction(+ : value)
      for (int j = k + 1; j < own; ++j) value += norm[j] * p[j];
#pragma omp simd reduction(+ : value)
      for (int j = 0; j < others; ++j) value += norm[own + j] * q[j];
      p[k] = value;
    }
  }

  FACTORMAX_INLINE void substitute() {
    const int S = shape_.states;
    for (int t = steps_ - 1; t > 0; --t) {
      const int n = count_[t - 1];
      double *in = in_step_.data + t * S, *out = out_step_.data + (t - 1) * S;
      push(2 * t, in, count_[t], out, n);
      if (t > 1) {
        push(2 * t + 1, out, n, in - S, n);
      } else {
        push(2 * t + 1, out, n, &nu_step_, 1);
      }
    }
    nu_step_ *= nu_inverse_;
    for (int t = 1; t < steps_; ++t) {
      const int n = count_[t - 1];
      double *in = in_step_.data + t * S, *out = out_step_.data + (t - 1) * S;
      if (t > 1) {
        pull(2 * t + 1, out, n, in - S, n);
      } else {
        pull(2 * t + 1, out, n, &nu_step_, 1);
      }
      pull(2 * t, in, count_[t], out, n);
    }
  }

  oracle::SequenceShape shape_;
  int steps_ = 0;
  int edges_ = 0;
  double size_ = 1, size_of_edges_ = 0, least_ = 0, gap_ = 0;
  double nu_ = 0, nu_step_ = 0, nu_inverse_ = 0, total_lack_ = 0;
  Span<std::int32_t> live_, count_;    // (L, S), (L,) the states that are not left out
  Span<double> flow_, slack_, ratio_;  // (L, n, m) edges between them
  Span<double> flow_step_, slack_step_, product_;
  Span<double> x_, mu_, give_, out_, in_;  // (L, S) of these states
  Span<double> out_lack_, in_lack_, out_step_, in_step_;
  Span<double> to_, from_;  // (L, S) of all
  Span<double> even_;       // (L,)
  Span<double> network_, inverse_, wide_, clique_;
};

}  // namespace factormax
