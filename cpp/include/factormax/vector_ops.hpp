// The few dense loops everything else is made of. `omp simd` permits the reassociation of sums
// here, and only here; the build has no -ffast-math. Where the compiler does not know the pragma
// it is ignored, and the loop means the same.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "factormax/span.hpp"

// Functions marked with this are compiled twice, for any x86-64 and for one with AVX2; which one
// runs is decided at load time. What they call must be inlined to be compiled twice as well. clang
// can't do this for templates, and most of these are: its builds use AVX2 only with
// -march=x86-64-v3.
#if defined(__GNUC__) && __GNUC__ >= 12 && !defined(__clang__) && defined(__x86_64__) && \
    defined(__GLIBC__) && !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
#define FACTORMAX_VECTOR __attribute__((target_clones("arch=x86-64-v3", "default")))
#else
#define FACTORMAX_VECTOR
#endif
#if defined(__GNUC__)
#define FACTORMAX_INLINE inline __attribute__((always_inline))
#define FACTORMAX_BODY __attribute__((always_inline))  // after the parameters of a lambda
#else
#define FACTORMAX_INLINE inline
#define FACTORMAX_BODY
#endif

// Goes before a loop that finds largest and smallest values, for gcc alone. clang starts such a
// reduction at the largest finite number, so that all -inf would come out as finite, and MSVC does
// not know it.
#if defined(__GNUC__) && !defined(__clang__)
#define FACTORMAX_PRAGMA(text) _Pragma(#text)
#define FACTORMAX_EXTREMES(reductions) FACTORMAX_PRAGMA(omp simd reductions)
#else
#define FACTORMAX_EXTREMES(reductions)
#endif

// Functions marked with this round every product before it is added to a sum. gcc otherwise uses
// instructions that do both at once wherever it can, which depends on how a loop is vectorised;
// other compilers go by the expression alone.
#if defined(__GNUC__) && !defined(__clang__)
#define FACTORMAX_ROUNDED __attribute__((noinline, optimize("fp-contract=off")))
#else
#define FACTORMAX_ROUNDED
#endif

namespace factormax {

template <class T>
FACTORMAX_INLINE T clip(T value, T lo, T hi) {
  return value < lo ? lo : (value > hi ? hi : value);
}

template <class T>
FACTORMAX_INLINE T dot(Span<const T> a, Span<const T> b) {
  T sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int i = 0; i < a.size; ++i) sum += a.data[i] * b.data[i];
  return sum;
}

template <class T>
FACTORMAX_INLINE T dot(Span<T> a, Span<T> b) {
  return dot(Span<const T>(a), Span<const T>(b));
}

// y += alpha * x
template <class T>
FACTORMAX_INLINE void axpy(T alpha, Span<const T> x, Span<T> y) {
#pragma omp simd
  for (int i = 0; i < x.size; ++i) y.data[i] += alpha * x.data[i];
}

// The largest of `floor` and of value(i) for i < n, each computed once; a NaN is passed over.
// Compilers other than gcc vectorise it only if the lanes are written out.
template <class T, class Value>
FACTORMAX_INLINE T largest_of(int n, T floor, Value value) {
#if defined(__GNUC__) && !defined(__clang__)
  T largest = floor;
  FACTORMAX_EXTREMES(reduction(max : largest))
  for (int i = 0; i < n; ++i) {
    const T candidate = value(i);
    largest = candidate > largest ? candidate : largest;
  }
#else
  constexpr int kLanes = 64 / sizeof(T);
  T lanes[kLanes], largest = floor;
  for (T& lane : lanes) lane = floor;
  int i = 0;
  for (; i + kLanes <= n; i += kLanes) {
#pragma omp simd
    for (int l = 0; l < kLanes; ++l) {
      const T candidate = value(i + l);
      lanes[l] = candidate > lanes[l] ? candidate : lanes[l];
    }
  }
  for (const T lane : lanes) largest = lane > largest ? lane : largest;
  for (; i < n; ++i) {
    const T candidate = value(i);
    largest = candidate > largest ? candidate : largest;
  }
#endif
  return largest;
}

template <class T>
FACTORMAX_INLINE T max_abs(Span<const T> a) {
  return largest_of(a.size, T(0), [a](int i) { return std::fabs(a.data[i]); });
}

// Whether there is no NaN and no infinity: times 0 they are NaN, and stay so in a sum.
template <class T>
FACTORMAX_VECTOR bool all_finite(const T* a, std::int64_t size) {
  T sum = 0;
#pragma omp simd reduction(+ : sum)
  for (std::int64_t i = 0; i < size; ++i) sum += a[i] * 0;
  return sum == 0;
}

template <class T, class U>
inline void copy(Span<U> from, Span<T> to) {
  std::copy(from.begin(), from.end(), to.begin());
}

template <class T>
inline void fill(Span<T> a, T value) {
  std::fill(a.begin(), a.end(), value);
}

}  // namespace factormax
