// Two points of the compact dual, where a solver stands and where it looks, and what evaluating
// them takes.
#pragma once

#include "factormax/residual.hpp"
#include "factormax/structured/structured.hpp"

namespace factormax {

template <class T>
struct DualWalk {
  Instance<T>* p = nullptr;
  StructuredFactors<T>* structured = nullptr;  // null without
  const Options* options = nullptr;
  Control* control = nullptr;
  bool may_poll = false;
  DualPoint<T> now, next;
  Span<T> step;  // (m,) from one to the other; scratch in between

  void allocate(const Problem<T>& problem, StructuredFactors<T>* factors, Workspace& ws) {
    structured = factors;
    now.allocate(problem.num_dual(), problem.num_vars, ws);
    next.allocate(problem.num_dual(), problem.num_vars, ws);
    step = ws.take<T>(problem.num_dual());
  }

  void begin(Instance<T>& instance, const Options& how, Control& watch, bool polls) {
    p = &instance;
    options = &how;
    control = &watch;
    may_poll = polls;
    now.resize(p->m, p->n);
    next.resize(p->m, p->n);
    step.size = p->m;
  }

  void evaluate(DualPoint<T>& at) {
    if (structured == nullptr) {
      factormax::evaluate(*p, at);
    } else {
      structured->evaluate(*p, at, *options, *control, may_poll);
    }
  }

  // What the structured factors keep of their last evaluation is that of `now` after this.
  void stand() {
    if (structured != nullptr && !structured->stand_at(now)) evaluate(now);
  }

  // Whether a structured factor could not be solved.
  bool in_trouble() const {
    return structured != nullptr && structured->trouble() != ActiveSetResult::solved;
  }

  T residual() const { return residual_at(*p, now); }
};

}  // namespace factormax
