// Sequences by flows against the active set of paths: marginals, the derivative, and the paths that
// the flows are taken apart into.
#include <limits>
#include <string>
#include <vector>

#include "check.hpp"
#include "factormax/structured/structured.hpp"

namespace {

using namespace factormax;
using factormax::test::Random;

struct Case {
  oracle::SequenceShape shape;
  std::vector<std::int32_t> numbers;
  std::vector<double> x, eta_v, w;
  bool uniform = true;

  int vars() const { return shape.length * shape.states; }
};

Case draw(Random& random, int length, int states, double scale, bool tied) {
  Case c;
  c.numbers = {length, states, random.flip(), random.flip(), random.flip()};
  c.shape = oracle::SequenceShape({c.numbers.data(), 5});
  const auto score = [&] { return scale * (tied ? random.integer(0, 2) : random.normal()); };
  const double inf = std::numeric_limits<double>::infinity();
  c.uniform = random.flip();
  for (int k = 0; k < c.vars(); ++k) {
    c.x.push_back(score());
    c.w.push_back(c.uniform ? 1.0 : 0.25 + random.uniform());
  }
  for (int k = 0; k < c.shape.num_scores(); ++k) c.eta_v.push_back(score());
  if (random.integer(0, 2) == 0) {  // absent steps, forbidden states
    const int steps = random.integer(1, length);
    for (int k = steps * states; k < c.vars(); ++k) c.x[k] = -inf;
    for (int t = 0; t < steps; ++t) {
      const int s = random.integer(0, states - 1);
      if (s > 0) c.x[t * states + s] = -inf;
    }
    const int padding = random.integer(0, states - 1);  // a state that no step has
    for (int t = 0; padding > 0 && t < steps; ++t) c.x[t * states + padding] = -inf;
  }
  if (random.integer(0, 2) == 0) {  // a state can always be followed by itself
    for (int t = 1; t < length; ++t) {
      const int i = random.integer(0, states - 1), j = random.integer(0, states - 1);
      if (i != j) c.eta_v[c.shape.transition_at(t, i) + j] = -inf;
    }
  }
  return c;
}

struct Solvers {
  Workspace memory;
  Oracle oracle;
  ActiveSet set;
  SequenceFlow flow;

  explicit Solvers(const Case& c) {
    Workspace counter;
    allocate(c, counter);
    memory = Workspace(counter.used());
    allocate(c, memory);
  }
  void allocate(const Case& c, Workspace& ws) {
    oracle.allocate(OracleKind::sequence, {c.numbers.data(), 5}, ws);
    ActiveSet::Shape shape;
    shape.vars = c.vars();
    shape.slots = oracle.slots();
    shape.feature_slots = oracle.feature_slots();
    shape.capacity = c.vars() + 1;
    set.allocate(shape, ws);
    flow.allocate(c.shape, ws);
  }
};

// W^1/2 J W^1/2 is a projector, that onto the paths' face. v: the marginals.
void check_derivative(Random& random, const Case& c, std::vector<double>& v, Solvers& s) {
  const int n = c.vars();
  const double inf = std::numeric_limits<double>::infinity();
  s.flow.complete(c.x.data(), c.eta_v.data(), 0);
  s.set.complete(c.x.data(), c.eta_v.data(), s.oracle, 0, std::numeric_limits<int>::max(),
                 v.data());
  std::vector<double> d(n), first(n), second(n), weights(s.set.count + 1);
  for (int k = 0; k < n; ++k) d[k] = c.x[k] == -inf ? 0 : random.normal();
  first = d;
  s.flow.apply(first.data());
  s.set.gather(d.data(), {weights.data(), s.set.count});
  s.set.project({weights.data(), s.set.count});
  s.set.scatter(weights.data(), second.data());
  for (int k = 0; k < n; ++k) CHECK_NEAR(first[k], second[k], 1e-9);
  for (int k = 0; k < n; ++k) second[k] = c.w[k] * first[k];
  s.flow.apply(second.data());
  for (int k = 0; k < n; ++k) CHECK_NEAR(second[k], first[k], 1e-10);
}

// The derivative is symmetric with the flows, too, and is the same from the flags.
void check_flows(Random& random, const Case& c, Solvers& s) {
  const int n = c.vars();
  const double inf = std::numeric_limits<double>::infinity();
  const int scores = c.shape.num_scores();
  std::vector<double> a(n), b(n), a_v(scores), b_v(scores);
  for (std::vector<double>* y : {&a, &b, &a_v, &b_v}) {
    for (double& value : *y) value = random.normal();
  }
  const auto dot = [](const std::vector<double>& y, const std::vector<double>& z) {
    double sum = 0;
    for (std::size_t k = 0; k < y.size(); ++k) sum += y[k] * z[k];
    return sum;
  };
  for (int k = 0; k < n; ++k) {
    if (c.x[k] == -inf) a[k] = b[k] = 0;
  }
  std::vector<double> ja = a, jb = b, ja_v = a_v, jb_v = b_v;
  s.flow.respond(ja.data(), ja_v.data());
  s.flow.respond(jb.data(), jb_v.data());
  const double across = dot(a, jb) + dot(a_v, jb_v);
  CHECK_NEAR(dot(b, ja) + dot(b_v, ja_v), across, 1e-9 * (1 + std::fabs(across)));
  std::vector<std::uint8_t> flags(SequenceFlow::num_flags(c.shape));
  s.flow.write_flags(flags.data());
  Solvers later(c);
  later.flow.begin(c.x.data());
  CHECK(later.flow.adopt(flags.data(), c.w.data()));
  std::vector<double> ka = a, ka_v = a_v;
  later.flow.respond(ka.data(), ka_v.data());
  for (int k = 0; k < n; ++k) CHECK_NEAR(ka[k], ja[k], 1e-10);
  for (int k = 0; k < scores; ++k) CHECK_NEAR(ka_v[k], ja_v[k], 1e-9);
}

// Paths are independent, and their mean is v.
void check_paths(const Case& c, const std::vector<double>& v, Solvers& s) {
  const int n = c.vars(), scores = c.shape.num_scores();
  std::vector<double> other(n);
  std::vector<double> features(scores), mean(scores);
  s.flow.each_feature(v.data(), [&](int k, double value) { features[k] += value; });
  s.set.begin(c.w.data(), c.uniform);
  CHECK(s.flow.list_paths(s.set));
  s.set.scatter(s.set.p.data, other.data());
  s.set.scatter_features(s.set.p.data, mean.data());
  for (int k = 0; k < n; ++k) CHECK_NEAR(other[k], v[k], 1e-12);
  for (int k = 0; k < scores; ++k) CHECK_NEAR(mean[k], features[k], 1e-11);
  CHECK(s.set.count <= n + 1);
}

void check_case(Random& random, const Case& c, double scale) {
  Solvers s(c);
  const int n = c.vars();
  std::vector<double> v(n), other(n);
  Control control;
  std::int64_t calls = 0;
  s.oracle.prepare(c.x.data());
  s.set.begin(c.w.data(), c.uniform);
  const ActiveSetResult by_paths =
      s.set.solve(c.x.data(), c.eta_v.data(), s.oracle, 100000, control, false, other.data());
  s.flow.begin(c.x.data());
  const auto solve = [&](const std::vector<double>& x) {
    return s.flow.solve(x.data(), c.eta_v.data(), c.w.data(), control, false, calls, v.data());
  };
  const SequenceFlow::End end = solve(c.x);
  if (by_paths == ActiveSetResult::no_structure) {
    CHECK(end == SequenceFlow::End::no_structure);
    return;
  }
  CHECK(end == SequenceFlow::End::solved);
  for (int k = 0; k < n; ++k) CHECK_NEAR(v[k], other[k], 1e-9);

  // From elsewhere and back: the same.
  std::vector<double> moved = c.x;
  for (double& score : moved) score += 0.1 * scale * random.normal();
  CHECK(solve(moved) == SequenceFlow::End::solved);
  CHECK(solve(c.x) == SequenceFlow::End::solved);
  for (int k = 0; k < n; ++k) CHECK_NEAR(v[k], other[k], 1e-9);

  check_derivative(random, c, other, s);
  check_flows(random, c, s);
  check_paths(c, v, s);
}

}  // namespace

int main(int argc, char** argv) {
  Random random(factormax::test::seed_from(argc, argv));
  for (const bool tied : {false, true}) {
    for (const double scale : {10.0, 1.0, 0.1, 1e-2, 1e-4}) {
      for (int trial = 0; trial < 25; ++trial) {
        const int length = random.integer(1, 8), states = random.integer(1, 6);
        factormax::test::current_case = std::to_string(length) + " x " + std::to_string(states) +
                                        " at " + std::to_string(scale) + (tied ? ", tied" : "") +
                                        ", trial " + std::to_string(trial);
        check_case(random, draw(random, length, states, scale, tied), scale);
      }
    }
  }
  return factormax::test::finish();
}
