// A team of threads that works on one instance: a warp, a block, or a single thread.
//
// All of its members take part in every function here. Sums are taken in a fixed order, so that
// results depend neither on the order of threads nor on the rest of the batch.
#pragma once

#ifdef __CUDACC__
#define FACTORMAX_SHARED(name) extern __shared__ __align__(16) char name[]
#endif
#define FM_DEVICE __device__ __forceinline__
#define FM_FUNCTION __device__ __noinline__  // long, and called from several places

namespace factormax {

using i8 = signed char;
using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using i64 = long long;

constexpr u32 kAll = 0xffffffffu;  // lanes of a warp

struct Add {
  template <class V>
  FM_DEVICE V operator()(V a, V b) const {
    return a + b;
  }
};
struct Max {
  template <class V>
  FM_DEVICE V operator()(V a, V b) const {
    return a > b ? a : b;
  }
};

// Several numbers that are combined one by one.
template <class V, int K>
struct Several {
  V at[K];
};

template <class V>
FM_DEVICE V from_lane(V value, int distance) {
  return __shfl_xor_sync(kAll, value, distance);
}
template <class V, int K>
FM_DEVICE Several<V, K> from_lane(Several<V, K> value, int distance) {
#pragma unroll
  for (int k = 0; k < K; ++k) value.at[k] = __shfl_xor_sync(kAll, value.at[k], distance);
  return value;
}

// Combines the values of each group of LANES neighbours; all of them get the result.
template <int LANES, class V, class Combine>
FM_DEVICE V over_lanes(V value, Combine combine) {
#pragma unroll
  for (int distance = LANES / 2; distance > 0; distance /= 2) {
    value = combine(value, from_lane(value, distance));
  }
  return value;
}

template <int SIZE>
struct Team {
  static constexpr int kSize = SIZE;
  static constexpr int kLanes = SIZE < 32 ? SIZE : 32;
  static constexpr int kWarps = SIZE / kLanes;
  static constexpr int kMostSums = 40;

  int rank;
  char* scratch;

  FM_DEVICE void sync() const {
    if constexpr (SIZE > 32) {
      __syncthreads();
    } else if constexpr (SIZE > 1) {
      __syncwarp();
    }
  }

  template <int K, class V, class Combine>
  FM_DEVICE void reduce(V (&values)[K], Combine combine) const {
#pragma unroll
    for (int k = 0; k < K; ++k) values[k] = over_lanes<kLanes>(values[k], combine);
    if constexpr (kWarps > 1) {
      V* parts = reinterpret_cast<V*>(scratch);
      sync();
      if (rank % 32 == 0) {
#pragma unroll
        for (int k = 0; k < K; ++k) parts[rank / 32 * K + k] = values[k];
      }
      sync();
#pragma unroll
      for (int k = 0; k < K; ++k) {
        V total = parts[k];
        for (int w = 1; w < kWarps; ++w) total = combine(total, parts[w * K + k]);
        values[k] = total;
      }
    }
  }
  template <class V>
  FM_DEVICE V sum(V value) const {
    V values[1] = {value};
    reduce(values, Add());
    return values[0];
  }
  template <class V>
  FM_DEVICE V max(V value) const {
    V values[1] = {value};
    reduce(values, Max());
    return values[0];
  }
  FM_DEVICE bool any(bool value) const {
    if constexpr (SIZE > 32) {
      return __syncthreads_or(value) != 0;
    } else if constexpr (SIZE > 1) {
      return __any_sync(kAll, value) != 0;
    } else {
      return value;
    }
  }

  // Sums 40 values at once, into shared memory: lanes swap halves of their values, which takes 42
  // exchanges instead of 200.
  template <class V>
  FM_DEVICE void sum_all(V (&values)[kMostSums], V* out) const {
    if constexpr (SIZE == 1) {
      for (int k = 0; k < kMostSums; ++k) out[k] = values[k];
    } else {
      const int lane = rank % 32;
      fold<16>(values, lane);
      fold<4>(values + 32, lane);
      values[32] += __shfl_xor_sync(kAll, values[32], 8);
      values[32] += __shfl_xor_sync(kAll, values[32], 16);
      V* parts = kWarps > 1 ? reinterpret_cast<V*>(scratch) + rank / 32 * kMostSums : out;
      sync();
      parts[lane] = values[0];
      if (lane < 8) parts[32 + lane] = values[32];
      sync();
      if constexpr (kWarps > 1) {
        const V* all = reinterpret_cast<const V*>(scratch);
        if (rank < kMostSums) {
          V total = all[rank];
          for (int w = 1; w < kWarps; ++w) total += all[w * kMostSums + rank];
          out[rank] = total;
        }
        sync();
      }
    }
  }

  // Numbers the members whose flag is set, from `base` on, in the order of ranks; `base` moves past
  // the last.
  FM_DEVICE int number(bool flag, int& base) const {
    if constexpr (SIZE == 1) {
      const int place = base;
      base += flag;
      return place;
    } else {
      const u32 votes = __ballot_sync(kAll, flag);
      int place = base + __popc(votes & ((1u << (rank % 32)) - 1));
      int total = __popc(votes);
      if constexpr (kWarps > 1) {
        int* counts = reinterpret_cast<int*>(scratch);
        sync();
        if (rank % 32 == 0) counts[rank / 32] = total;
        sync();
        total = 0;
        for (int w = 0; w < kWarps; ++w) {
          if (w == rank / 32) place += total;
          total += counts[w];
        }
      }
      base += total;
      return place;
    }
  }

 private:
  // The sum over the lanes of value k, of 2 HALF, ends up in values[0] of lane k.
  template <int HALF, class V>
  FM_DEVICE static void fold(V* values, int lane) {
    if constexpr (HALF > 0) {
      const bool upper = lane & HALF;
#pragma unroll
      for (int k = 0; k < HALF; ++k) {
        const V sent = upper ? values[k] : values[k + HALF];
        const V kept = upper ? values[k + HALF] : values[k];
        values[k] = kept + __shfl_xor_sync(kAll, sent, HALF);
      }
      fold<HALF / 2>(values, lane);
    }
  }
};

}  // namespace factormax
