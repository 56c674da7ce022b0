// A tree that shares no variable with another factor, by the multipliers of sets of words alone,
// docs/math.md (61a)-(61c). Given those, the heads of a word are a sparsemax of their own, so that
// the unknowns are as few as the sets that bind, and Newton's method on them costs little more than
// the sparsemaxes.
#pragma once

#include <limits>

#include "factormax/structured/oracle.hpp"
#include "factormax/structured/set_system.hpp"
#include "factormax/structured/tree_cuts.hpp"
#include "factormax/structured/tree_guesses.hpp"
#include "factormax/structured/word_heads.hpp"
#include "factormax/structured/word_sets.hpp"

namespace factormax {

// All in double, whatever the scores.
class LoneTree {
 public:
  void allocate(int words, Workspace& ws) {
    n_ = words;
    most_ = std::min(2 * words + 9, kMostSets);
    words_.allocate(words, ws);
    sets_.allocate(words, most_, ws);
    system_.allocate(most_, ws);
    guesses_.allocate(words, ws);
    cuts_.allocate(words, ws);
    cuts_.skip_light = true;
    for (Span<double>* a : {&lambda_, &g_, &step_, &before_, &g_before_, &moved_}) {
      *a = ws.take<double>(WordSets::length(most_));
    }
    for (Span<std::int32_t>* a : {&active_, &place_}) *a = ws.take<std::int32_t>(most_);
    is_raised_ = ws.take<std::uint8_t>(words);
    member_ = ws.take<std::uint8_t>(words);
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
    passes = 1;
    max_passes_ = std::min(max_passes, kMostPasses);
    control_ = &control;
    may_poll_ = may_poll;
    single_root_ = single_root;
    residual = 0;
    words_.load(eta, mask);
    if (!(words_.largest <= kLargest)) return End::failed;
    if (!words_.project_all()) return End::failed;
    if (!even_if_sparse && is_sparse()) return End::sparse;
    sets_.clear();
    fill(is_raised_, std::uint8_t(0));
    if (single_root) add_set(words_.present.data);
    guess();
    for (;;) {
      if (sets_.count > 0 && !minimise()) return End::failed;
      const int before = sets_.count;
      if (!cut()) return End::failed;
      if (sets_.count == before) return End::solved;
      guess();
    }
  }

  // The solution: marginals and their sides, where 0 and 1 are exact, docs/math.md (40).
  template <class T>
  void write(T* mu, std::int8_t* side) const {
    const double error = 2 * (sets_.count + 1) * residual;
    const std::int64_t arcs = std::int64_t(n_) * n_;
    std::fill_n(mu, arcs, T(0));
    std::fill_n(side, arcs, static_cast<std::int8_t>(Side::lower));
    for (int m = 0; m < n_; ++m) {
      const std::int64_t row = std::int64_t(m) * n_;
      const double* scores = words_.scores(m);
      for (int h = 0; words_.any_absent && h < n_; ++h) {
        if (scores[h] == -kInf) side[row + h] = static_cast<std::int8_t>(Side::absent);
      }
      for (int k = 0; k < words_.count[m]; ++k) {
        const int h = words_.head(m)[k];
        const double z = words_.value(m)[k], eta = scores[h];
        const double margin = error + 8 * kEps * (std::fabs(eta) + std::fabs(eta - z));
        if (z <= margin) continue;
        const bool upper = z >= 1 - margin;
        mu[row + h] = upper ? T(1) : T(z);
        side[row + h] = static_cast<std::int8_t>(upper ? Side::upper : Side::interior);
      }
    }
  }

  // visit(members): each set whose row holds tightly, but not the single root's.
  template <class Visit>
  void tight_sets(const Visit& visit) const {
    for (int s = single_root_ ? 1 : 0; s < sets_.count; ++s) {
      const double error = std::max(residual, double(sets_.size(s)) * residual * (sets_.count + 1));
      const double margin = 2 * error + 8 * kEps * (1 + lambda_[s]);
      if (lambda_[s] > margin || g_[s] <= margin) visit(sets_.members(s));
    }
  }

  // ---- The derivative, from what the two above wrote.

  // side: (n, n). Then `adopt` for each set.
  void begin_derivative(const std::int8_t* side, bool single_root) {
    sets_.clear();
    single_root_ = single_root;
    for (int m = 0; m < n_; ++m) {
      const std::int8_t* row = side + std::int64_t(m) * n_;
      std::int32_t* heads = words_.head(m);
      int count = 0;
      for (int h = 0; h < n_; ++h) {
        heads[count] = h;
        count += row[h] == static_cast<std::int8_t>(Side::interior);
      }
      words_.count[m] = count;
      member_[m] = std::any_of(
          row, row + n_, [](std::int8_t s) { return s != static_cast<std::int8_t>(Side::absent); });
    }
    if (single_root) add_set(member_.data);
  }

  // Returns false if there is no room for it.
  bool adopt(const std::uint8_t* members) { return add_set(members); }

  // grad = J d, docs/math.md (61c). Returns the residual relative to d.
  template <class T>
  FACTORMAX_VECTOR double derivative(const T* d, T* grad) {
    std::fill_n(grad, std::int64_t(n_) * n_, T(0));
    const double largest = max_abs(Span<const T>{d, n_ * n_});
    for (int m = 0; m < n_; ++m) {
      double sum = 0;
      double* value = words_.value(m);
      for (int k = 0; k < words_.count[m]; ++k) {
        sum += value[k] = double(d[std::int64_t(m) * n_ + words_.head(m)[k]]);
      }
      for (int k = 0; k < words_.count[m]; ++k) value[k] -= sum / words_.count[m];
    }
    sets_.products(words_, g_);
    for (int s = 0; s < sets_.count; ++s) {
      active_[s] = s;
      system_.rhs[s] = g_[s];
    }
    sets_.build(words_, active_, sets_.count, system_);
    for (int s = 0; s < sets_.count; ++s) system_.held[s] = system_.diagonal(s) <= kFlat;
    system_.factorise();
    const double left = system_.solve();
    for (int m = 0; m < n_; ++m) {
      double sum = 0;
      double* value = words_.value(m);
      const std::int32_t* heads = words_.head(m);
      const int count = words_.count[m];
      for (int s = 0; s < sets_.count; ++s) {
        const double t = system_.solution[s];
        if (t == 0 || !sets_.members(s)[m]) continue;
        for (int k = 0; k < count; ++k) value[k] -= t * sets_.coef(s, m, heads[k]);
      }
      for (int k = 0; k < count; ++k) sum += value[k];
      for (int k = 0; k < count; ++k) {
        grad[std::int64_t(m) * n_ + heads[k]] = T(value[k] - sum / count);
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

  // What a row lacks by rounding alone.
  double noise() const { return 16 * kEps * (1 + words_.largest); }

  // Returns whether there is room for it.
  bool add_set(const std::uint8_t* member) {
    if (!sets_.add(member)) return false;
    lambda_[sets_.count - 1] = 0;
    return true;
  }

  // After the words have been projected.
  bool is_sparse() const {
    int words = 0, heads = 0;
    for (int m = 0; m < n_; ++m) {
      words += words_.present[m];
      heads += words_.count[m];
    }
    return heads - words <= kStructures + words / 2;
  }

  // ---- Sets

  auto heads() const {
    return [this](int m, const auto& visit) {
      for (int k = 0; k < words_.count[m]; ++k) visit(words_.head(m)[k], words_.value(m)[k]);
    };
  }
  auto present() const {
    return [this](int m) { return words_.present[m] != 0; };
  }

  // Whether sets have been found that lack some, without a search for all of them. There are always
  // as many left to be searched for.
  bool guess() {
    const int before = sets_.count;
    if (before >= most_ / 2) return false;
    guesses_.find(heads(), present(), [&] {
      const std::uint8_t* found = guesses_.member.data;
      return sets_.count < most_ / 2 && !sets_.is_known(found) && add_set(found);
    });
    return sets_.count > before;
  }

  // Adds sets that lack some, if there are any. Returns false if there is no room.
  bool cut() {
    bool room = true;
    cuts_.find(
        heads(), present(), 4 * residual + kViolated,
        [&] { return sets_.is_known(cuts_.member.data); },
        [&] { return room = add_set(cuts_.member.data); });
    return room;
  }

  // ---- The dual

  // The words' heads for the multipliers lambda_, phi and its gradient g_, docs/math.md
  // (61a)-(61b).
  FACTORMAX_VECTOR void evaluate() {
    ++passes;
    int count = 0;
    for (int s = 0; s < sets_.count; ++s) {
      if (lambda_[s] != 0) active_[count++] = s;
    }
    double* x = words_.raised.data;
    for (int m = 0; m < n_; ++m) {
      if (!words_.present[m]) continue;
      const double* from = words_.scores(m);
      double to_root = 0;
      for (int i = 0; i < count; ++i) {
        const int s = active_[i];
        if (!sets_.members(s)[m]) continue;
        const double t = lambda_[s];
        const double* out = sets_.outside(s);
        to_root += t;
#pragma omp simd
        for (int h = 0; h < words_.stride; ++h) x[h] = from[h] + t * out[h];
        from = x;
      }
      const bool is_raised = from == x;
      if (!is_raised && !is_raised_[m]) continue;
      if (is_raised) x[m] += to_root;
      words_.follow(m, from);
      is_raised_[m] = is_raised;
    }
    measure();
  }

  // phi and its gradient, where the words' heads are those for lambda_.
  void measure() {
    phi_ = 0;
    for (int m = 0; m < n_; ++m) {
      if (!words_.present[m]) continue;
      const double* value = words_.value(m);
      double squares = 0;
      for (int k = 0; k < words_.count[m]; ++k) squares += value[k] * value[k];
      phi_ += words_.tau[m] + squares / 2;
    }
    sets_.products(words_, g_);
    for (int s = 0; s < sets_.count; ++s) {
      phi_ -= lambda_[s];
      g_[s] -= 1;
    }
  }

  bool is_equality(int s) const { return single_root_ && s == 0; }

  double lack() const {
    double most = 0;
    for (int s = 0; s < sets_.count; ++s) {
      const double g = g_[s];
      most = std::max(most, g > 0 && !is_equality(s) ? std::min(g, lambda_[s]) : std::fabs(g));
    }
    return most;
  }

  // Minimises phi over the multipliers of the sets at hand, and of those that turn up on the way.
  bool minimise() {
    measure();
    double best = kInf;
    int idle = 0;
    bool stepped = false;
    for (;;) {
      residual = lack();
      if (residual <= noise()) return true;
      if (stepped && residual > TreeGuesses::kLeast && guess()) {
        measure();
        residual = lack();
      }
      stepped = true;
      idle = residual < best / 2 ? 0 : idle + 1;
      best = std::min(best, residual);
      const bool near = residual <= kClose * (1 + words_.largest);
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
    const int count = sets_.count;
    const double phi = phi_, noise = 64 * kEps * (1 + std::fabs(phi));
    std::copy_n(lambda_.data, count, before_.data);
    std::copy_n(g_.data, count, g_before_.data);
    double alpha = 1;
    for (int tries = 0; tries < 25; ++tries) {
      double slope = 0, end = 0;
      for (int s = 0; s < count; ++s) {
        const double to = before_[s] + alpha * step_[s];
        lambda_[s] = is_equality(s) ? to : std::max(to, 0.0);
        slope += g_before_[s] * (lambda_[s] - before_[s]);
      }
      if (!(slope < 0)) break;
      evaluate();
      for (int s = 0; s < count; ++s) end += g_[s] * (lambda_[s] - before_[s]);
      if (end <= 0 || phi_ <= phi + 1e-4 * slope + noise) return true;
      alpha *= shorter(slope, end, alpha);
    }
    std::copy_n(before_.data, count, lambda_.data);
    evaluate();
    return false;
  }

  // By how much to shorten a step that went too far: to where a slope of `slope` at its beginning
  // and `end` at its end is 0, if its curvature at the beginning is what a whole step of Newton's
  // takes it for, and grows from there.
  static double shorter(double slope, double end, double alpha) {
    const double from = -slope, bend = std::max(end + from - alpha * from, 0.0);
    const double linear = alpha * from;
    const double to = 2 * from / (linear + std::sqrt(linear * linear + 4 * bend * from));
    return clip(to, 0.1, 0.9);
  }

  // step_: Newton's, with the multipliers that it would take below 0 put there. A set that no head
  // is free to move for has no curvature: its multiplier goes to where one becomes free.
  bool find_step() {
    fill(step_.first(sets_.count), 0.0);
    fill(place_.first(sets_.count), -1);
    int count = 0;
    for (int s = 0; s < sets_.count; ++s) {
      if (!is_equality(s) && lambda_[s] <= 0 && g_[s] >= 0) continue;
      place_[s] = count;
      active_[count++] = s;
    }
    sets_.build(words_, active_, count, system_);
    for (int i = 0; i < count; ++i) {
      const int s = active_[i];
      moved_[i] = 0;
      system_.held[i] = system_.diagonal(i) <= kFlat;
      if (!system_.held[i] || std::fabs(g_[s]) <= noise()) continue;
      const double kick = distance(s);
      if (kick == kInf && g_[s] < 0) return false;  // no tree has such a word with a head outside
      step_[s] = g_[s] < 0 ? kick : -std::min(kick, is_equality(s) ? kInf : lambda_[s]);
    }
    for (int round = 0; round < 8 && !solve_step(count); ++round) continue;
    // Two sets may differ in no head that is free: then the step has no end, but the scores have.
    const double most = max_abs(Span<const double>(step_.first(sets_.count)));
    const double limit = 4 * (1 + words_.largest);
    for (int s = 0; most > limit && s < sets_.count; ++s) step_[s] *= limit / most;
    return true;
  }

  // Returns whether none of the multipliers would go below 0.
  bool solve_step(int count) {
    system_.factorise();
    for (int i = 0; i < count; ++i) {
      system_.rhs[i] = -g_[active_[i]];
      for (int j = 0; j < count; ++j) {
        if (moved_[j] != 0) system_.rhs[i] -= system_.entry(i, j) * moved_[j];
      }
    }
    system_.solve();
    bool none = true;
    for (int i = 0; i < count; ++i) {
      const int s = active_[i];
      if (system_.held[i]) continue;
      step_[s] = system_.solution[i];
      if (is_equality(s) || lambda_[s] + step_[s] >= 0) continue;
      step_[s] = moved_[i] = -lambda_[s];
      system_.held[i] = 1;
      none = false;
    }
    return none;
  }

  // step_: against the gradient, which is sure to bring phi down. After find_step.
  void find_gradient_step() {
    for (int s = 0; s < sets_.count; ++s) {
      const double curvature =
          place_[s] < 0 ? 1.0 : std::max(system_.diagonal(place_[s]), kLeastCurvature);
      step_[s] = -g_[s] / curvature;
    }
  }

  // By how much the multiplier of a set without curvature has to grow until a word with its heads
  // inside has half a head outside, or to fall until one with its heads outside has half inside.
  double distance(int s) const {
    const double from = g_[s] < 0 ? 0.0 : 1.0;
    double least = kInf;
    for (int m = 0; m < n_; ++m) {
      if (!sets_.members(s)[m] || sets_.coef(s, m, words_.head(m)[0]) != from) continue;
      const double* own = words_.scores(m);
      for (int h = 0; h < n_; ++h) {
        if (sets_.coef(s, m, h) == from || own[h] == -kInf) continue;
        double x = own[h];
        for (int other = 0; other < sets_.count; ++other) {
          if (sets_.members(other)[m]) x += lambda_[other] * sets_.coef(other, m, h);
        }
        least = std::min(least, words_.tau[m] - x);
      }
    }
    return std::max(least, 0.0) + 0.5;
  }

  int n_ = 0, most_ = 0, max_passes_ = 0;
  Control* control_ = nullptr;
  bool may_poll_ = false, single_root_ = false;
  double phi_ = 0;
  WordHeads words_;
  WordSets sets_;
  SetSystem system_;
  TreeGuesses guesses_;
  TreeCuts cuts_;
  Span<double> lambda_, g_;                        // (sets,) multipliers, gradient
  Span<double> step_, before_, g_before_, moved_;  // (sets,)
  Span<std::int32_t> active_, place_;              // (sets,)
  Span<std::uint8_t> is_raised_;                   // (n,) whether a multiplier adds to a word
  Span<std::uint8_t> member_;                      // (n,)
};

}  // namespace factormax
