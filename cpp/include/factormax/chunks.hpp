// Loops over the rows or the variables of one large instance, which all threads share. What a
// thread takes is a chunk, and the chunks depend on the size alone: so do the sums, which are taken
// chunk by chunk, and the answer, whatever the number of threads.
#pragma once

#include <algorithm>

#include "factormax/parallel.hpp"
#include "factormax/vector_ops.hpp"

namespace factormax {

constexpr int kWorthSharing = 32768;  // less is done before another thread has woken up
constexpr int kLeastChunk = 4096, kMostChunks = 256;

// How many of `size` are in a chunk, all but the last.
inline int chunk_length(int size) {
  return std::max(kLeastChunk, (size + kMostChunks - 1) / kMostChunks);
}

// static: gcc 13 stops with an internal error where a template that is instantiated with a lambda
// has vector clones and external linkage.
template <class Body>
FACTORMAX_VECTOR static void run_shared_body(const void* body, int begin, int end) {
  (*static_cast<const Body*>(body))(begin, end);
}

// Calls body(begin, end), marked FACTORMAX_BODY, for the chunks of [0, size). gcc vectorises no
// reduction that stands in the body itself: it has to be in a function that the body calls.
template <class Body>
FACTORMAX_INLINE void in_chunks(int size, const Body& body) {
  if (size < kWorthSharing) return body(0, size);
  share_chunks(size, chunk_length(size), &run_shared_body<Body>, &body);
}

// The sum of part(begin, end) over the chunks.
template <class Sum, class Part>
FACTORMAX_INLINE Sum sum_of_chunks(int size, const Part& part) {
  if (size < kWorthSharing) return part(0, size);
  Sum sums[kMostChunks];
  const int length = chunk_length(size);
  in_chunks(size,
            [&](int begin, int end) FACTORMAX_BODY { sums[begin / length] = part(begin, end); });
  Sum sum = sums[0];
  for (int k = 1; k * length < size; ++k) sum += sums[k];
  return sum;
}

// The largest part(begin, end) of the chunks.
template <class T, class Part>
FACTORMAX_INLINE T largest_of_chunks(int size, const Part& part) {
  struct Largest {
    T value;
    void operator+=(const Largest& other) { value = other.value > value ? other.value : value; }
  };
  return sum_of_chunks<Largest>(
             size, [&](int begin, int end) FACTORMAX_BODY { return Largest{part(begin, end)}; })
      .value;
}

// Lists the i < size for which listed(i), ascending; returns how many. It is called once for each
// i, and there is no branch, as the outcome would be hard to predict. list: (size,)
template <class Listed>
FACTORMAX_INLINE int list_in_chunks(int size, std::int32_t* list, const Listed& listed) {
  const auto part = [&](int begin, int end) FACTORMAX_BODY {
    int count = 0;
    for (int i = begin; i < end; ++i) {
      list[begin + count] = i;
      count += listed(i);
    }
    return count;
  };
  if (size < kWorthSharing) return part(0, size);
  int counts[kMostChunks];
  const int length = chunk_length(size);
  in_chunks(size,
            [&](int begin, int end) FACTORMAX_BODY { counts[begin / length] = part(begin, end); });
  int count = counts[0];
  for (int k = 1; k * length < size; ++k) {
    std::copy_n(list + k * length, counts[k], list + count);
    count += counts[k];
  }
  return count;
}

template <class T>
FACTORMAX_INLINE T max_abs_in_chunks(Span<const T> a) {
  return largest_of_chunks<T>(a.size, [=](int begin, int end) FACTORMAX_BODY {
    return max_abs(Span<const T>{a.data + begin, end - begin});
  });
}

template <class T>
FACTORMAX_INLINE T dot_in_chunks(Span<const T> a, Span<const T> b) {
  return sum_of_chunks<T>(a.size, [=](int begin, int end) FACTORMAX_BODY {
    return dot(Span<const T>{a.data + begin, end - begin},
               Span<const T>{b.data + begin, end - begin});
  });
}

}  // namespace factormax
