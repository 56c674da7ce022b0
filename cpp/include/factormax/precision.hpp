// What the digits of a scalar type allow: the tolerances that differ between float and double, in
// one place. Those that do not differ are next to the code that uses them.
#pragma once

namespace factormax {

template <class T>
struct Precision;

template <>
struct Precision<double> {
  // Whether this is the finest type. What a coarser one can't resolve is left to a finer one.
  static constexpr bool finest = true;
  // A residual above this is never put down to rounding: an answer that far off is no answer.
  static constexpr double unresolved = 5e-3;
  // Whether multipliers resolve the gap between a linear program's value and its bound.
  static constexpr bool solves_linear_programs = true;
  // Whether sums over the hundreds of pairs of a variable keep enough digits.
  static constexpr bool adds_many_pairs = true;
  // Whether directions from nearly singular systems lead nearer to the solution.
  static constexpr bool resolves_flat_systems = true;
  // Relative residual of the reduced system in a finish, whose outcome is checked anyway,
  static constexpr double finish = 1e-8;
  // and in the backward pass, where it is the error of the gradient.
  static constexpr double backward = 1e-12;
  // Added to the diagonal of the reduced system, which is often singular, relative to the average:
  // refinement takes it out again, a digit or more per step.
  static constexpr double ridge = 1e-9;
  // A diagonal entry below this, relative to the largest, or below its square, is rounding.
  static constexpr double rigid = 1e-12;
  // How closely the interior point method meets rows, relative to ||a||; the finish does the rest.
  static constexpr double feasible = 1e-10;
  // The least elasticity of a row in its factors, relative to how far its variables give way. It is
  // well above the rounding, so that the factors stay accurate, and small beside what other rows
  // leave of that, so that two steps of refinement make up for it.
  static constexpr double elasticity = 1e-11;
  // How far below 0 a Farkas certificate must be, relative to its terms: beyond the rounding of its
  // sum.
  static constexpr double certificate = 1e-10;
};

template <>
struct Precision<float> {
  static constexpr bool finest = false;
  static constexpr double unresolved = 1e-4;
  static constexpr bool solves_linear_programs = false;
  static constexpr bool adds_many_pairs = false;
  static constexpr bool resolves_flat_systems = false;
  static constexpr float finish = 1e-4f;
  static constexpr float backward = 1e-5f;
  static constexpr float ridge = 1e-6f;
  static constexpr float rigid = 1e-6f;
  static constexpr float feasible = 1e-5f;
  static constexpr float elasticity = 1e-3f;
  static constexpr double certificate = 1e-5;  // the sum is in double in both
};

}  // namespace factormax
