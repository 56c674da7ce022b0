// A component of a graph as a problem of its own, of one instance.
#pragma once

#include <algorithm>
#include <cstring>
#include <memory>
#include <vector>

#include "factormax/components.hpp"
#include "score_rows.hpp"

namespace factormax {

// The larger one; NaN is the worst.
inline double worse(double a, double b) { return a > b || a != a ? a : b; }

// The numbers of a component that do not lie side by side in those of the whole are copied.
template <class T>
class LocalProblem {
 public:
  // For components of this layout.
  LocalProblem(const Problem<T>& whole, const Layout& layout) : whole_(whole) {
    static_cast<Layout&>(problem_) = layout;
    problem_.row_precision = whole.row_precision;
  }

  void allocate(Workspace& ws) {
    const int factors = problem_.structured.count;
    coef_ = ws.take<T>(problem_.num_entries);
    rhs_ = ws.take<T>(problem_.num_rows);
    eta_u_ = ws.take<T>(problem_.num_vars);
    eta_v_ = ws.take<T>(problem_.num_scores());
    mask_ = ws.take<std::uint8_t>(problem_.num_vars);
    param_ = ws.take<double>(factors);
    callback_ = ws.take<CallbackFunction>(factors);
    problem_.coef = {coef_.data, 0};
    problem_.rhs = {rhs_.data, 0};
  }

  const Problem<T>& problem() const { return problem_; }

  // From now on the problem is this component of instance i.
  void gather(const Component& c, std::int64_t i) {
    gather_rows(c, i);
    problem_.eta_u.data = c.vars.gather(whole_.eta_u.at(i), eta_u_.data);
    problem_.eta_v.data = gather_scores(whole_, c.scores, i, eta_v_.data);
    problem_.mask.data = c.vars.gather(whole_.mask.at(i), mask_.data);
    const Structured& s = whole_.structured;
    Structured& own = problem_.structured;
    if (own.count == 0) return;
    own.param.data = c.factors.gather(s.param.at(i), param_.data);
    own.callback = c.factors.gather(s.callback, callback_.data);
    own.first = s.first + i;
  }

 private:
  // The stride says whether rows differ from those before. Once they do, none are remembered.
  void gather_rows(const Component& c, std::int64_t i) {
    const T *coef = whole_.coef.at(i), *rhs = whole_.rhs.at(i);
    const bool known = begun_ && whole_.constant_coefs;
    bool differ = false;
    for (int r = 0; r < problem_.num_rows; ++r) {
      const std::int32_t from = c.dual.index[r];
      const T* own = coef + whole_.row_ptr[from];
      const int first = problem_.row_ptr[r], count = problem_.row_ptr[r + 1] - first;
      if (!known) differ |= replace(own, count, coef_.data + first);
      differ |= replace(rhs + from, 1, rhs_.data + r);
    }
    if (differ && begun_) problem_.coef.stride = problem_.rhs.stride = 1;
    begun_ = true;
  }

  bool replace(const T* from, int count, T* to) const {
    const std::size_t bytes = static_cast<std::size_t>(count) * sizeof(T);
    if (count == 0 || (begun_ && std::memcmp(from, to, bytes) == 0)) return false;
    std::copy(from, from + count, to);
    return true;
  }

  const Problem<T>& whole_;
  Problem<T> problem_;
  bool begun_ = false;
  Span<T> coef_, rhs_, eta_u_, eta_v_;
  Span<std::uint8_t> mask_;
  Span<double> param_;
  Span<CallbackFunction> callback_;
};

// What a thread needs for the kinds of the chunk it is at, and no others.
template <class Solver>
class ByKind {
 public:
  // make(kind): a unique_ptr.
  template <class Make>
  void enter(Span<const Components::Run> chunk, const Make& make) {
    if (chunk.data == at_) return;
    at_ = chunk.data;
    std::vector<Own> next;
    for (const Components::Run& run : chunk) {
      const auto known = std::find_if(own_.begin(), own_.end(), [&](const Own& o) {
        return o.kind == run.kind && o.solver != nullptr;
      });
      next.push_back({run.kind, nullptr});
      if (known != own_.end()) next.back().solver = std::move(known->solver);
    }
    own_ = std::move(next);  // the others give their memory back first
    for (Own& o : own_) {
      if (o.solver == nullptr) o.solver = make(o.kind);
    }
  }

  Solver& operator[](int run) { return *own_[run].solver; }

 private:
  struct Own {
    int kind;
    std::unique_ptr<Solver> solver;
  };

  const Components::Run* at_ = nullptr;
  std::vector<Own> own_;
};

}  // namespace factormax
