// A tree that shares no variable with another factor, by the multipliers of sets of words alone,
// docs/math.md (61a)-(61c). Given those, the heads of a word are a sparsemax of their own, so that
// the unknowns are as few as the sets that bind, and Newton's method on them costs little more than
// the sparsemaxes.
#pragma once

#include <limits>

#include "factormax/structured/oracle.hpp"
#include "factormax/structured/tree_cuts.hpp"

namespace factormax {

// All in double, whatever the scores.
class LoneTree {
 public:
  void allocate(int words, Workspace& ws) {
    n_ = words;
    most_ = std::min(2 * words + 9, kMostSets);
    const std::int64_t arcs = std::int64_t(words) * words, entries = std::int64_t(most_) * words;
    scores_ = ws.take<double>(arcs);
    raised_ = ws.take<double>(words);
    tau_ = ws.take<double>(words);
    head_ = ws.take<std::int32_t>(arcs);
    value_ = ws.take<double>(arcs);
    count_ = ws.take<std::int32_t>(words);
    state_ = ws.take<std::uint8_t>(words);
    member_ = ws.take<std::uint8_t>(entries);
    outside_ = ws.take<double>(entries);
    word_ = ws.take<std::int32_t>(entries);
    size_ = ws.take<std::int32_t>(most_);
    set_ptr_ = ws.take<std::int32_t>(words + 1);
    set_ = ws.take<std::int32_t>(entries);
    for (Span<double>* a : {&lambda_, &g_, &step_, &before_, &g_before_, &pivot_, &work_,
                            &solution_, &rest_, &moved_}) {
      *a = ws.take<double>(most_);
    }
    for (Span<std::int32_t>* a : {&active_, &place_, &touching_}) *a = ws.take<std::int32_t>(most_);
    pinned_ = ws.take<std::uint8_t>(most_);
    matrix_ = ws.take<double>(std::int64_t(most_) * most_);
    factor_ = ws.take<double>(std::int64_t(most_) * most_);
    column_ = ws.take<double>(std::int64_t(most_) * words);
    cuts_.allocate(words, ws);
  }

  static constexpr int kMostSets = 256;  // the matrix of more takes too long

  // Whether there is nothing but one.
  static bool is_all_of(const Layout& p) {
    const Structured& s = p.structured;
    if (s.count != 1 || s.kind[0] != static_cast<std::int8_t>(OracleKind::tree)) return false;
    const Span<const std::int32_t> vars = s.vars(0);
    if (p.num_rows + p.num_pairs + s.num_links > 0 || vars.size != p.num_vars) return false;
    for (int k = 0; k < vars.size; ++k) {
      if (vars[k] != k) return false;
    }
    return true;
  }

  int passes = 0;       // evaluations, of the last solve
  double residual = 0;  // what the rows of the sets lack

  enum class End {
    solved,
    sparse,  // so few heads have a chance that structures are the better way, docs/math.md (61)
    failed,  // there is no tree, or too many sets bind, or scores are too large, or it was stopped
  };

  // eta: (n, n), [m, h], [m, m] for the root; mask: the same, or null.
  template <class T>
  End solve(const T* eta, const std::uint8_t* mask, bool single_root, bool even_if_sparse,
            int max_passes, Control& control, bool may_poll) {
    num_sets_ = passes = 0;
    max_passes_ = std::min(max_passes, kMostPasses);
    control_ = &control;
    may_poll_ = may_poll;
    single_root_ = single_root;
    residual = 0;
    if (!load(eta, mask)) return End::failed;
    project_words();
    if (!even_if_sparse && is_sparse()) return End::sparse;
    if (single_root) {
      for (int m = 0; m < n_; ++m) cuts_.member[m] = state_[m] != kAbsent;
      add_set();
    }
    for (bool first = num_sets_ == 0;; first = false) {
      if (!first && !minimise()) return End::failed;
      const int before = num_sets_;
      bool room = true;
      cuts_.find(
          [&](int m, const auto& visit) {
            for (int k = 0; k < count_[m]; ++k) visit(head(m)[k], value(m)[k]);
          },
          [&](int m) { return state_[m] != kAbsent; }, 4 * residual + kViolated,
          [&] { return is_known(); }, [&] { return room = add_set(); });
      if (!room) return End::failed;
      if (num_sets_ == before) return End::solved;
    }
  }

  // The solution: marginals and their sides, where 0 and 1 are exact, docs/math.md (40).
  template <class T>
  void write(T* mu, std::int8_t* side) const {
    const double error = 2 * (num_sets_ + 1) * residual;
    const std::int64_t arcs = std::int64_t(n_) * n_;
    std::fill_n(mu, arcs, T(0));
    std::fill_n(side, arcs, static_cast<std::int8_t>(Side::lower));
    for (std::int64_t j = 0; any_absent_ && j < arcs; ++j) {
      if (scores_[j] == -kInf) side[j] = static_cast<std::int8_t>(Side::absent);
    }
    for (int m = 0; m < n_; ++m) {
      const std::int64_t row = std::int64_t(m) * n_;
      for (int k = 0; k < count_[m]; ++k) {
        const std::int64_t j = row + head(m)[k];
        const double z = value(m)[k], eta = scores_[j];
        const double margin = error + 8 * kEps * (std::fabs(eta) + std::fabs(eta - z));
        if (z <= margin) continue;
        const bool upper = z >= 1 - margin;
        mu[j] = upper ? T(1) : T(z);
        side[j] = static_cast<std::int8_t>(upper ? Side::upper : Side::interior);
      }
    }
  }

  // visit(members): each set whose row holds tightly, but not the single root's.
  template <class Visit>
  void tight_sets(const Visit& visit) const {
    for (int s = single_root_ ? 1 : 0; s < num_sets_; ++s) {
      const double error = std::max(residual, double(size_[s]) * residual * (num_sets_ + 1));
      const double margin = 2 * error + 8 * kEps * (1 + lambda_[s]);
      if (lambda_[s] > margin || g_[s] <= margin) visit(members(s));
    }
  }

  // ---- The derivative, from what the two above wrote.

  // side: (n, n). Then `adopt` for each set.
  void begin_derivative(const std::int8_t* side, bool single_root) {
    num_sets_ = 0;
    single_root_ = single_root;
    for (int m = 0; m < n_; ++m) {
      const std::int8_t* row = side + std::int64_t(m) * n_;
      std::int32_t* heads = head(m);
      int count = 0;
      for (int h = 0; h < n_; ++h) {
        heads[count] = h;
        count += row[h] == static_cast<std::int8_t>(Side::interior);
      }
      count_[m] = count;
      cuts_.member[m] = std::any_of(
          row, row + n_, [](std::int8_t s) { return s != static_cast<std::int8_t>(Side::absent); });
    }
    if (single_root) add_set();
  }

  // Returns false if there is no room for it.
  bool adopt(const std::uint8_t* members) {
    if (num_sets_ == most_) return false;
    std::copy(members, members + n_, cuts_.member.data);
    add_set();
    return true;
  }

  // grad = J d, docs/math.md (61c). Returns the residual relative to d.
  template <class T>
  FACTORMAX_VECTOR double derivative(const T* d, T* grad) {
    std::fill_n(grad, std::int64_t(n_) * n_, T(0));
    const double largest = max_abs(Span<const T>{d, n_ * n_});
    for (int m = 0; m < n_; ++m) {
      double sum = 0;
      for (int k = 0; k < count_[m]; ++k) {
        sum += value(m)[k] = double(d[std::int64_t(m) * n_ + head(m)[k]]);
      }
      for (int k = 0; k < count_[m]; ++k) value(m)[k] -= sum / count_[m];
    }
    list_sets();
    products();
    for (int s = 0; s < num_sets_; ++s) {
      active_[s] = s;
      work_[s] = g_[s];
    }
    build(num_sets_);
    for (int s = 0; s < num_sets_; ++s) pinned_[s] = diagonal(s) <= kFlat;
    factorise(num_sets_);
    const double left = refine(num_sets_);
    for (int m = 0; m < n_; ++m) {
      double sum = 0;
      for (int e = set_ptr_[m]; e < set_ptr_[m + 1]; ++e) {
        const double t = solution_[set_[e]];
        for (int k = 0; t != 0 && k < count_[m]; ++k) {
          value(m)[k] -= t * coef(set_[e], m, head(m)[k]);
        }
      }
      for (int k = 0; k < count_[m]; ++k) sum += value(m)[k];
      for (int k = 0; k < count_[m]; ++k) {
        grad[std::int64_t(m) * n_ + head(m)[k]] = T(value(m)[k] - sum / count_[m]);
      }
    }
    return largest > 0 ? left / largest : 0;
  }

 private:
  static constexpr int kMostPasses = 200;
  static constexpr int kStructures = 8;  // and one for two words: more cost more than this
  static constexpr double kInf = std::numeric_limits<double>::infinity();
  static constexpr double kEps = std::numeric_limits<double>::epsilon();
  static constexpr double kLargest = 1e6;         // scores above lose too many digits
  static constexpr double kViolated = 1e-11;      // a set that lacks less is not violated
  static constexpr double kClose = 1e-12;         // rows that lack no more hold, if no step helps
  static constexpr double kFlat = 1e-9;           // curvature below is none
  static constexpr double kLeastCurvature = 0.1;  // of a single set, that a step counts on
  static constexpr double kRidge = 1e-11;         // relative, of the matrix

  enum : std::uint8_t { kAbsent, kUntouched, kTouched };  // by a set

  std::int32_t* head(int m) const { return head_.data + std::int64_t(m) * n_; }
  double* value(int m) const { return value_.data + std::int64_t(m) * n_; }
  Span<const std::uint8_t> members(int s) const {
    return {member_.data + std::int64_t(s) * n_, n_};
  }
  const double* outside(int s) const { return outside_.data + std::int64_t(s) * n_; }
  const std::int32_t* words(int s) const { return word_.data + std::int64_t(s) * n_; }

  // Returns whether the scores are not too large.
  template <class T>
  FACTORMAX_VECTOR bool load(const T* eta, const std::uint8_t* mask) {
    any_absent_ = false;
    largest_ = 0;
    for (int m = 0; m < n_; ++m) {
      const std::int64_t row = std::int64_t(m) * n_;
      const T* from = eta + row;
      double* to = scores_.data + row;
      double top = -kInf, bottom = kInf;
      FACTORMAX_EXTREMES(reduction(max : top) reduction(min : bottom))
      for (int h = 0; h < n_; ++h) {
        to[h] = from[h];
        top = to[h] > top ? to[h] : top;
        bottom = to[h] < bottom ? to[h] : bottom;
      }
      if (mask != nullptr || bottom == -kInf) {
        any_absent_ = true;
        top = -kInf;
        bottom = kInf;
        for (int h = 0; h < n_; ++h) {
          if (mask != nullptr && mask[row + h] == 0) to[h] = -kInf;
          top = std::max(top, to[h]);
          if (to[h] != -kInf) bottom = std::min(bottom, to[h]);
        }
      }
      state_[m] = top == -kInf ? kAbsent : kUntouched;
      if (state_[m] != kAbsent) largest_ = std::max({largest_, top, -bottom});
    }
    for (int h = 0; any_absent_ && h < n_; ++h) {  // an absent word is no head
      for (int m = 0; state_[h] == kAbsent && m < n_; ++m) {
        scores_[std::int64_t(m) * n_ + h] = -kInf;
      }
    }
    return largest_ <= kLargest;
  }

  // Returns whether there is room for `cuts_.member`, a set of words without a multiplier yet.
  bool add_set() {
    if (num_sets_ == most_) return false;
    const int s = num_sets_++;
    const std::int64_t begin = std::int64_t(s) * n_;
    int size = 0;
    for (int m = 0; m < n_; ++m) {
      const bool inside = cuts_.member[m] != 0;
      member_[begin + m] = inside;
      outside_[begin + m] = inside ? 0.0 : 1.0;
      word_[begin + size] = m;
      size += inside;
      if (inside) state_[m] = kTouched;
    }
    size_[s] = size;
    lambda_[s] = 0;
    return true;
  }

  bool is_known() const {
    for (int s = 0; s < num_sets_; ++s) {
      if (std::equal(members(s).begin(), members(s).end(), cuts_.member.begin())) return true;
    }
    return false;
  }

  // The sets of each word.
  void list_sets() {
    fill(set_ptr_, 0);
    for (int s = 0; s < num_sets_; ++s) {
      for (int k = 0; k < size_[s]; ++k) ++set_ptr_[words(s)[k] + 1];
    }
    for (int m = 0; m < n_; ++m) set_ptr_[m + 1] += set_ptr_[m];
    for (int s = 0; s < num_sets_; ++s) {
      for (int k = 0; k < size_[s]; ++k) set_[set_ptr_[words(s)[k]]++] = s;
    }
    for (int m = n_; m > 0; --m) set_ptr_[m] = set_ptr_[m - 1];
    set_ptr_[0] = 0;
  }

  // The sparsemax of the scores x of word m: its level and its support. Nothing that is 1 below the
  // highest is in it; what is below the level of the others goes, until none is. Sums are over the
  // support alone, in its order, so that words that are absent leave no trace.
  FACTORMAX_INLINE void project_word(int m, const double* x) {
    std::int32_t* heads = head(m);
    double* values = value(m);
    const double bottom = highest(x) - 1;
    int count = 0;
    for (int h = 0; h < n_; ++h) {  // without a branch: which are above is hard to foresee
      heads[count] = h;
      values[count] = x[h];
      count += x[h] > bottom;
    }
    double level = 0;
    for (int before = 0; before != count;) {
      before = count;
      double sum = -1;
      for (int k = 0; k < before; ++k) sum += values[k];
      level = sum / before;
      count = 0;
      for (int k = 0; k < before; ++k) {
        heads[count] = heads[k];
        values[count] = values[k];
        count += values[k] > level;
      }
      count = std::max(count, 1);
    }
    for (int k = 0; k < count; ++k) values[k] -= level;
    tau_[m] = level;
    count_[m] = count;
  }

  // The same where the support is likely to be the one at hand.
  FACTORMAX_INLINE void follow_word(int m, const double* x) {
    const std::int32_t* heads = head(m);
    double* values = value(m);
    const int count = count_[m];
    double sum = -1, least = kInf, many = 0;
    for (int k = 0; k < count; ++k) {
      sum += x[heads[k]];
      least = std::min(least, x[heads[k]]);
    }
    const double level = sum / count;
#pragma omp simd reduction(+ : many)
    for (int h = 0; h < n_; ++h) many += x[h] > level ? 1.0 : 0.0;
    if (static_cast<int>(many) != count || !(least > level)) return project_word(m, x);
    tau_[m] = level;
    for (int k = 0; k < count; ++k) values[k] = x[heads[k]] - level;
  }

  FACTORMAX_INLINE double highest(const double* x) const {
    double most = -kInf;
    FACTORMAX_EXTREMES(reduction(max : most))
    for (int h = 0; h < n_; ++h) most = x[h] > most ? x[h] : most;
    return most;
  }

  // Without any set.
  FACTORMAX_VECTOR void project_words() {
    ++passes;
    for (int m = 0; m < n_; ++m) {
      const double* x = scores_.data + std::int64_t(m) * n_;
      if (state_[m] == kAbsent) {
        count_[m] = 0;
      } else {
        project_word(m, x);
      }
    }
  }

  // After that.
  bool is_sparse() const {
    int words = 0, heads = 0;
    for (int m = 0; m < n_; ++m) {
      words += state_[m] != kAbsent;
      heads += count_[m];
    }
    return heads - words <= kStructures + words / 2;
  }

  // The words' heads for the multipliers lambda_, phi and its gradient g_, docs/math.md
  // (61a)-(61b).
  FACTORMAX_VECTOR void evaluate() {
    ++passes;
    double* x = raised_.data;
    for (int m = 0; m < n_; ++m) {
      if (set_ptr_[m] == set_ptr_[m + 1]) continue;
      const double* own = scores_.data + std::int64_t(m) * n_;
      double to_root = 0;
      for (int h = 0; h < n_; ++h) x[h] = own[h];
      for (int e = set_ptr_[m]; e < set_ptr_[m + 1]; ++e) {
        const double t = lambda_[set_[e]];
        if (t == 0) continue;
        const double* out = outside(set_[e]);
        to_root += t;
#pragma omp simd
        for (int h = 0; h < n_; ++h) x[h] += t * out[h];
      }
      x[m] += to_root;
      follow_word(m, x);
    }
    measure();
  }

  // phi and its gradient, where the words' heads are those for lambda_.
  void measure() {
    phi_ = 0;
    for (int m = 0; m < n_; ++m) {
      if (state_[m] == kAbsent) continue;
      double squares = 0;
      for (int k = 0; k < count_[m]; ++k) squares += value(m)[k] * value(m)[k];
      phi_ += tau_[m] + squares / 2;
    }
    products();
    for (int s = 0; s < num_sets_; ++s) {
      phi_ -= lambda_[s];
      g_[s] -= 1;
    }
  }

  // Whether head h of word m, which is in set s, is outside of it: the root is.
  double coef(int s, int m, int h) const { return h == m ? 1.0 : outside(s)[h]; }

  // g_: what each set has of `value` from outside.
  void products() {
    fill(g_.first(num_sets_), 0.0);
    for (int m = 0; m < n_; ++m) {
      for (int e = set_ptr_[m]; e < set_ptr_[m + 1]; ++e) {
        const int s = set_[e];
        double sum = 0;
        for (int k = 0; k < count_[m]; ++k) sum += value(m)[k] * coef(s, m, head(m)[k]);
        g_[s] += sum;
      }
    }
  }

  bool is_equality(int s) const { return single_root_ && s == 0; }

  double lack() const {
    double most = 0;
    for (int s = 0; s < num_sets_; ++s) {
      const double g = g_[s];
      most = std::max(most, g > 0 && !is_equality(s) ? std::min(g, lambda_[s]) : std::fabs(g));
    }
    return most;
  }

  // Minimises phi over the multipliers of the sets at hand.
  bool minimise() {
    list_sets();
    measure();
    double best = kInf;
    int idle = 0;
    for (;;) {
      residual = lack();
      if (residual <= 16 * kEps * (1 + largest_)) return true;
      idle = residual < best / 2 ? 0 : idle + 1;
      best = std::min(best, residual);
      const bool near = residual <= kClose * (1 + largest_);
      if (near && idle > 2) return true;
      if (passes >= max_passes_ || !find_step()) return near;
      if (control_->late() || control_->stopped(may_poll_)) return false;
      if (search()) continue;
      find_gradient_step();  // from the matrix at hand
      if (!search()) return near;
    }
  }

  // A step along step_ that brings phi down.
  bool search() {
    const double phi = phi_, noise = 64 * kEps * (1 + std::fabs(phi));
    std::copy_n(lambda_.data, num_sets_, before_.data);
    std::copy_n(g_.data, num_sets_, g_before_.data);
    double alpha = 1;
    for (int tries = 0; tries < 25; ++tries) {
      double slope = 0, end = 0;
      for (int s = 0; s < num_sets_; ++s) {
        const double to = before_[s] + alpha * step_[s];
        lambda_[s] = is_equality(s) ? to : std::max(to, 0.0);
        slope += g_before_[s] * (lambda_[s] - before_[s]);
      }
      if (!(slope < 0)) break;
      evaluate();
      for (int s = 0; s < num_sets_; ++s) end += g_[s] * (lambda_[s] - before_[s]);
      if (end <= 0 || phi_ <= phi + 1e-4 * slope + noise) return true;
      alpha *= clip(slope / (slope - end), 0.1, 0.7);  // the secant, within reason
    }
    std::copy_n(before_.data, num_sets_, lambda_.data);
    evaluate();
    return false;
  }

  // step_: Newton's, with the multipliers that it would take below 0 put there. A set that no head
  // is free to move for has no curvature: its multiplier goes to where one becomes free.
  bool find_step() {
    fill(step_.first(num_sets_), 0.0);
    int count = 0;
    for (int s = 0; s < num_sets_; ++s) {
      if (is_equality(s) || lambda_[s] > 0 || g_[s] < 0) active_[count++] = s;
    }
    build(count);
    for (int i = 0; i < count; ++i) {
      pinned_[i] = diagonal(i) <= kFlat;
      if (!pinned_[i]) continue;
      const double kick = distance(active_[i]);
      if (kick == kInf) return false;  // no tree has a word of the set with a head outside
      step_[active_[i]] = g_[active_[i]] < 0 ? kick : -g_[active_[i]];
      moved_[i] = 0;
    }
    for (int round = 0; round < 8; ++round) {
      factorise(count);
      for (int i = 0; i < count; ++i) {
        work_[i] = -g_[active_[i]];
        for (int j = 0; j < count; ++j) {
          if (pinned_[j]) work_[i] -= entry(i, j) * moved_[j];
        }
      }
      refine(count);
      bool clipped = false;
      for (int i = 0; i < count; ++i) {
        const int s = active_[i];
        if (pinned_[i]) continue;
        step_[s] = solution_[i];
        if (is_equality(s) || lambda_[s] + solution_[i] >= 0) continue;
        step_[s] = moved_[i] = -lambda_[s];
        pinned_[i] = 1;
        clipped = true;
      }
      if (!clipped) break;
    }
    return true;
  }

  // step_: against the gradient, which is sure to bring phi down. After find_step.
  void find_gradient_step() {
    for (int s = 0; s < num_sets_; ++s) {
      const double curvature = place_[s] < 0 ? 1.0 : std::max(diagonal(place_[s]), kLeastCurvature);
      step_[s] = -g_[s] / curvature;
    }
  }

  // By how much the multiplier of a set has to grow until a head outside of it is half a head.
  double distance(int s) const {
    double least = kInf;
    for (int k = 0; k < size_[s]; ++k) {
      const int m = words(s)[k];
      const double* own = scores_.data + std::int64_t(m) * n_;
      for (int h = 0; h < n_; ++h) {
        if (coef(s, m, h) == 0 || own[h] == -kInf) continue;
        double x = own[h];
        for (int e = set_ptr_[m]; e < set_ptr_[m + 1]; ++e) {
          x += lambda_[set_[e]] * coef(set_[e], m, h);
        }
        least = std::min(least, tau_[m] - x);
      }
    }
    return std::max(least, 0.0) + 0.5;
  }

  double& entry(int i, int j) const {
    return matrix_.data[i >= j ? std::int64_t(i) * most_ + j : std::int64_t(j) * most_ + i];
  }
  double diagonal(int i) const { return entry(i, i); }

  // The matrix of the first `count` of active_, docs/math.md (61c).
  void build(int count) {
    fill(place_.first(num_sets_), -1);
    for (int i = 0; i < count; ++i) {
      place_[active_[i]] = i;
      std::fill_n(matrix_.data + std::int64_t(i) * most_, i + 1, 0.0);
    }
    for (int m = 0; m < n_; ++m) {
      const int free = count_[m];
      if (free < 2) continue;
      int rows = 0;
      for (int e = set_ptr_[m]; e < set_ptr_[m + 1]; ++e) {
        const int s = set_[e];
        if (place_[s] < 0) continue;
        double* b = column_.data + std::int64_t(rows) * n_;
        double sum = 0;
        for (int k = 0; k < free; ++k) sum += b[k] = coef(s, m, head(m)[k]);
        if (sum == 0 || sum == free) continue;  // nothing to choose
        for (int k = 0; k < free; ++k) b[k] -= sum / free;
        touching_[rows] = place_[s];
        for (int other = 0; other <= rows; ++other) {
          const double* c = column_.data + std::int64_t(other) * n_;
          double product = 0;
          for (int k = 0; k < free; ++k) product += b[k] * c[k];
          entry(touching_[rows], touching_[other]) += product;
        }
        ++rows;
      }
    }
  }

  // factor_ = L D L^T of the matrix without the pinned.
  void factorise(int count) {
    double trace = 0;
    for (int i = 0; i < count; ++i) trace += pinned_[i] ? 0.0 : diagonal(i);
    const double ridge = kRidge * trace / std::max(count, 1);
    for (int i = 0; i < count; ++i) {
      double* row = factor_.data + std::int64_t(i) * most_;
      for (int j = 0; j < i; ++j) row[j] = pinned_[i] || pinned_[j] ? 0.0 : entry(i, j);
      double own = pinned_[i] ? 1.0 : diagonal(i) + ridge;
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

  // solution_ of the matrix without the pinned, for work_; returns what is left.
  double refine(int count) {
    double left = 0;
    fill(solution_.first(count), 0.0);
    for (int i = 0; i < count; ++i) {
      if (pinned_[i]) work_[i] = 0;
      rest_[i] = work_[i];
    }
    for (int round = 0; round < 3; ++round) {
      for (int i = 0; i < count; ++i) {
        const double* row = factor_.data + std::int64_t(i) * most_;
        for (int j = 0; j < i; ++j) rest_[i] -= row[j] * rest_[j];
      }
      for (int i = 0; i < count; ++i) rest_[i] *= pivot_[i];
      for (int i = count - 1; i >= 0; --i) {
        const double* row = factor_.data + std::int64_t(i) * most_;
        for (int j = 0; j < i; ++j) rest_[j] -= row[j] * rest_[i];
      }
      for (int i = 0; i < count; ++i) solution_[i] += rest_[i];
      left = 0;
      for (int i = 0; i < count; ++i) {
        double sum = work_[i];
        for (int j = 0; j < count && !pinned_[i]; ++j) {
          if (!pinned_[j]) sum -= entry(i, j) * solution_[j];
        }
        rest_[i] = sum;
        left = std::max(left, std::fabs(sum));
      }
      if (left <= 4 * kEps) break;
    }
    return left;
  }

  int n_ = 0, most_ = 0, num_sets_ = 0, max_passes_ = 0;
  Control* control_ = nullptr;
  bool may_poll_ = false;
  bool single_root_ = false, any_absent_ = false;
  double largest_ = 0, phi_ = 0;
  Span<double> scores_;                    // (n, n)
  Span<double> raised_;                    // (n,) the scores of a word, with what its sets add
  Span<double> tau_;                       // (n,) the level of each word
  Span<std::int32_t> head_, count_;        // (n, n), (n,) the heads of each word that are free,
  Span<double> value_;                     // and their marginals, or a vector like those
  Span<std::uint8_t> state_;               // (n,)
  Span<std::uint8_t> member_;              // (sets, n)
  Span<double> outside_;                   // (sets, n) 1 where a word is no member
  Span<std::int32_t> word_, size_;         // (sets, n), (sets,) the members
  Span<std::int32_t> set_ptr_, set_;       // the sets of each word
  Span<double> lambda_, g_;                // (sets,) multipliers, gradient
  Span<double> step_, before_, g_before_;  // (sets,)
  Span<double> matrix_, factor_, pivot_;   // of the active sets
  Span<double> work_, solution_, rest_, moved_;
  Span<double> column_;  // (sets, n)
  Span<std::int32_t> active_, place_, touching_;
  Span<std::uint8_t> pinned_;
  TreeCuts cuts_;
};

}  // namespace factormax
