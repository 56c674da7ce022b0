// CUDA on one thread of a CPU, so that kernels can be tested where there is no GPU.
//
// Every thread of a block is a fiber, which runs until it waits in a collective function of its
// warp or block, and goes on once all the others wait in the same one. Which fiber runs next is the
// caller's choice: a kernel whose answers depend on it has a race. Blocks run one after another.
// The emulator is stricter than a GPU: threads have to meet on the same line, a lane that a shuffle
// reads from has to take part in it, and shared memory is NaN until it is written.
#pragma once

#ifndef _XOPEN_SOURCE
#define _XOPEN_SOURCE 700  // macOS hides ucontext without it
#endif

#include <math.h>
#include <setjmp.h>
#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <type_traits>
#include <vector>

struct dim3 {
  unsigned x = 1, y = 1, z = 1;
};
static dim3 threadIdx, blockIdx, blockDim, gridDim;

namespace emulator {

constexpr int kWarp = 32;
constexpr int kMostThreads = 1024;
constexpr std::size_t kStack = 256 << 10;
constexpr std::size_t kCanary = 4096;
constexpr unsigned char kCanaryByte = 0xC5;

enum class Order { kForward, kReverse, kShuffled };
enum class State { kReady, kWaiting, kEnded };
enum class Kind { kBarrier, kVote, kShuffle };

// A call of a collective function: all members have to wait in equal calls.
struct Call {
  Kind kind;
  const char* name;
  const char* file;
  int line;
  unsigned lanes;  // lanes that take part, one bit each; 0: the whole block
  int bytes;       // size of the value that is exchanged

  bool operator==(const Call& other) const {
    return line == other.line && lanes == other.lanes && bytes == other.bytes &&
           same(name, other.name) && same(file, other.file);
  }
  static bool same(const char* a, const char* b) { return a == b || std::strcmp(a, b) == 0; }
  std::string text() const {
    const char* slash = std::strrchr(file, '/');
    return std::string(name) + " (" + (slash ? slash + 1 : file) + ":" + std::to_string(line) + ")";
  }
};

struct Thread {
  State state;
  bool begun;
  jmp_buf place;
  Call call;
  unsigned long long value, result;
  int source;  // the lane that a shuffle reads from
};

// The stacks of a block's threads, each with a page below it that must not be touched.
class Stacks {
 public:
  explicit Stacks(int threads) : page_(sysconf(_SC_PAGESIZE)), bytes_(threads * (kStack + page_)) {
    void* memory = mmap(nullptr, bytes_, PROT_NONE, MAP_PRIVATE | MAP_ANON, -1, 0);
    if (memory == MAP_FAILED) std::abort();
    memory_ = static_cast<char*>(memory);
    for (int t = 0; t < threads; ++t) mprotect(at(t), kStack, PROT_READ | PROT_WRITE);
  }
  ~Stacks() { munmap(memory_, bytes_); }
  Stacks(const Stacks&) = delete;
  Stacks& operator=(const Stacks&) = delete;
  char* at(int thread) const { return memory_ + thread * (kStack + page_) + page_; }

 private:
  std::size_t page_, bytes_;
  char* memory_;
};

// Everything is static, and there is one translation unit per library: the libraries of two kernels
// share nothing. The caller must make one launch at a time.
static jmp_buf home;
static Thread threads[kMostThreads];
static int size, me, ended;
static Order order;
static unsigned long long seed;
static const Stacks* stacks;
static unsigned long long ready[kMostThreads / 64];  // a bit per thread
static unsigned arrived[kMostThreads / kWarp];  // lanes that wait in a collective of their warp
static int arrived_in_block;
static char* shared_memory;
static std::string failure;
static void (*body)();

// ---- Fibers -------------------------------------------------------------------------------------

[[noreturn]] static void fail(const std::string& message) {
  failure = message;
  _longjmp(home, 1);
}

static void set_ready(int thread) {
  threads[thread].state = State::kReady;
  ready[thread / 64] |= 1ull << (thread % 64);
}

// The first thread that is ready, from `start` on, or -1.
static int next_ready(int start) {
  for (int word = start / 64; word * 64 < size; ++word) {
    unsigned long long bits = ready[word];
    if (word == start / 64) bits &= ~0ull << (start % 64);
    if (bits) return word * 64 + __builtin_ctzll(bits);
  }
  return -1;
}

static int last_ready() {
  for (int word = (size - 1) / 64; word >= 0; --word) {
    if (ready[word]) return word * 64 + 63 - __builtin_clzll(ready[word]);
  }
  return -1;
}

// Knuth's linear congruential generator; its high bits are good enough.
static unsigned draw(unsigned most) {
  seed = seed * 6364136223846793005ull + 1442695040888963407ull;
  return static_cast<unsigned>(seed >> 33) % most;
}

static int choose() {
  if (order == Order::kForward) return next_ready(0);
  if (order == Order::kReverse) return last_ready();
  const int found = next_ready(static_cast<int>(draw(static_cast<unsigned>(size))));
  return found >= 0 ? found : next_ready(0);
}

static void begin();

// Lets the next thread run. If there is none, the block has ended, or its threads do not meet.
// setcontext enters a fiber; from then on _setjmp and _longjmp switch, without a system call.
[[noreturn]] static __attribute__((noinline)) void go_on() {
  const int next = choose();
  if (next < 0) _longjmp(home, 1);
  ready[next / 64] &= ~(1ull << (next % 64));
  me = next;
  threadIdx.x = static_cast<unsigned>(next);
  if (threads[next].begun) _longjmp(threads[next].place, 1);
  threads[next].begun = true;
  static ucontext_t fresh;
  getcontext(&fresh);
  fresh.uc_stack.ss_sp = stacks->at(next);
  fresh.uc_stack.ss_size = kStack;
  fresh.uc_link = nullptr;
  makecontext(&fresh, begin, 0);
  setcontext(&fresh);
  std::abort();  // setcontext does not return
}

static __attribute__((noinline)) void suspend() {
  if (_setjmp(threads[me].place) == 0) go_on();
}

static void begin() {
  body();
  threads[me].state = State::kEnded;
  ++ended;
  go_on();
}

// ---- Collective functions -----------------------------------------------------------------------

// Where all threads are, when they do not meet.
static std::string whereabouts() {
  std::string text = "block " + std::to_string(blockIdx.x) + ": the threads do not meet. ";
  for (int t = 0; t < size; ++t) {
    if (threads[t].state != State::kWaiting) continue;
    const Call& call = threads[t].call;
    int before = 0, count = 0;  // threads that wait where t does
    for (int other = 0; other < size; ++other) {
      if (threads[other].state != State::kWaiting || !(threads[other].call == call)) continue;
      before += other < t;
      ++count;
    }
    if (before > 0) continue;
    char mask[32] = "";
    if (call.lanes) std::snprintf(mask, sizeof(mask), ", mask %08x", call.lanes);
    text += std::to_string(count) + " of " + std::to_string(size) + " wait in " + call.text() +
            mask + ", the first is thread " + std::to_string(t) + "; ";
  }
  return text + std::to_string(ended) + " have ended.";
}

static void finish_warp(int first, unsigned lanes) {
  const Call& call = threads[me].call;
  unsigned votes = 0;
  for (int l = 0; l < kWarp; ++l) {
    if (!(lanes >> l & 1)) continue;
    if (!(threads[first + l].call == call)) fail(whereabouts());
    votes |= static_cast<unsigned>(threads[first + l].value != 0) << l;
  }
  for (int l = 0; l < kWarp; ++l) {
    if (!(lanes >> l & 1)) continue;
    Thread& thread = threads[first + l];
    thread.result = votes;
    if (call.kind == Kind::kShuffle) {
      if (!(lanes >> thread.source & 1)) {
        fail("block " + std::to_string(blockIdx.x) + ": thread " + std::to_string(first + l) +
             " reads lane " + std::to_string(thread.source) + ", which takes no part in " +
             call.text() + ".");
      }
      thread.result = threads[first + thread.source].value;
    }
    set_ready(first + l);
  }
  arrived[first / kWarp] &= ~lanes;
}

static void finish_block() {
  unsigned long long votes = 0;
  for (int t = 0; t < size; ++t) {
    if (!(threads[t].call == threads[me].call)) fail(whereabouts());
    votes += threads[t].value != 0;
  }
  for (int t = 0; t < size; ++t) {
    threads[t].result = votes;
    set_ready(t);
  }
  arrived_in_block = 0;
}

static unsigned long long meet(const Call& call, unsigned long long value, int source = 0) {
  Thread& thread = threads[me];
  thread.call = call;
  thread.value = value;
  thread.source = source;
  thread.state = State::kWaiting;
  if (call.lanes == 0) {
    if (++arrived_in_block == size) finish_block();
  } else {
    const int first = me / kWarp * kWarp, lane = me % kWarp;
    const unsigned present = size - first < kWarp ? (1u << (size - first)) - 1 : ~0u;
    if (!(call.lanes >> lane & 1)) {
      fail("block " + std::to_string(blockIdx.x) + ": thread " + std::to_string(me) +
           " is not in the mask that it gives to " + call.text() + ".");
    }
    arrived[first / kWarp] |= 1u << lane;
    const unsigned lanes = call.lanes & present;
    if ((arrived[first / kWarp] & lanes) == lanes) finish_warp(first, lanes);
  }
  suspend();
  return thread.result;
}

template <class V>
V shuffle(const char* name, unsigned mask, V value, int source, const char* file, int line) {
  static_assert(std::is_arithmetic_v<V> && (sizeof(V) == 4 || sizeof(V) == 8),
                "A shuffle takes int, unsigned, long long, unsigned long long, float or double.");
  unsigned long long bits = 0;
  std::memcpy(&bits, &value, sizeof(V));
  bits = meet({Kind::kShuffle, name, file, line, mask, sizeof(V)}, bits, source);
  std::memcpy(&value, &bits, sizeof(V));
  return value;
}

// ---- Launches -----------------------------------------------------------------------------------

static __attribute__((noinline)) bool run_block() {
  std::memset(ready, 0, sizeof(ready));
  std::memset(arrived, 0, sizeof(arrived));
  arrived_in_block = ended = 0;
  for (int t = 0; t < size; ++t) {
    threads[t].begun = false;
    set_ready(t);
  }
  if (_setjmp(home) == 0) go_on();
  if (failure.empty() && ended < size) failure = whereabouts();
  return failure.empty();
}

template <class Args>
struct Kernel {
  static inline void (*function)(Args);
  static inline const Args* args;
  static void call() { function(*args); }
};

// What Python calls: 0, or 1 and a message.
struct Launch {
  unsigned grid;
  int block;
  unsigned long long shared;
  int order;
  unsigned long long seed;
  const void* args;
  unsigned long long args_bytes;
  char* message;
  unsigned long long message_bytes;
};

template <class Args>
void run(void (*kernel)(Args), const Launch& launch) {
  if (launch.args_bytes != sizeof(Args)) {
    failure = "the arguments have " + std::to_string(launch.args_bytes) +
              " bytes, but the kernel takes " + std::to_string(sizeof(Args)) + ".";
    return;
  }
  const int block = launch.block;
  if (block != 1 && (block <= 0 || block % kWarp != 0 || block > kMostThreads)) {
    failure =
        "a block has 1 thread, or a multiple of 32 up to 1024, got " + std::to_string(block) + ".";
    return;
  }
  size = block;
  alignas(Args) unsigned char copy[sizeof(Args)];  // Python's may be aligned less
  std::memcpy(copy, launch.args, sizeof(Args));
  Kernel<Args>::function = kernel;
  Kernel<Args>::args = reinterpret_cast<const Args*>(copy);
  body = Kernel<Args>::call;
  blockDim.x = static_cast<unsigned>(block);
  gridDim.x = launch.grid;

  const Stacks own(block);
  stacks = &own;
  const std::size_t bytes = launch.shared;
  // 16 bytes more to align it.
  std::vector<unsigned char> memory(2 * kCanary + bytes + 16);
  const std::size_t off = reinterpret_cast<std::size_t>(memory.data()) % 16;
  unsigned char* start = memory.data() + kCanary + (16 - off) % 16;
  shared_memory = reinterpret_cast<char*>(start);

  order = static_cast<Order>(launch.order);
  std::vector<unsigned> blocks(launch.grid);
  for (unsigned b = 0; b < launch.grid; ++b) {
    blocks[b] = order == Order::kReverse ? launch.grid - 1 - b : b;
  }
  seed = launch.seed;
  if (order == Order::kShuffled) {
    for (unsigned b = launch.grid; b > 1; --b) std::swap(blocks[b - 1], blocks[draw(b)]);
  }
  for (unsigned b : blocks) {
    blockIdx.x = b;
    std::memset(memory.data(), kCanaryByte, memory.size());
    std::memset(start, 0xFF, bytes);
    if (!run_block()) return;
    for (std::size_t i = 0; i < kCanary; ++i) {
      const bool before = start[-1 - static_cast<std::ptrdiff_t>(i)] != kCanaryByte;
      if (before || start[bytes + i] != kCanaryByte) {
        failure = "block " + std::to_string(b) + " wrote " + std::to_string(i) + " bytes " +
                  (before ? "before the start" : "past the end") + " of its " +
                  std::to_string(bytes) + " bytes of shared memory.";
        return;
      }
    }
  }
}

template <class Args>
int launch(void (*kernel)(Args), const Launch& launch) {
  failure.clear();
  run(kernel, launch);
  std::snprintf(launch.message, launch.message_bytes, "%s", failure.c_str());
  return failure.empty() ? 0 : 1;
}

}  // namespace emulator

#define FACTORMAX_EMULATE(kernel)                                         \
  extern "C" __attribute__((visibility("default"))) int emulate_##kernel( \
      const emulator::Launch* launch) {                                   \
    return emulator::launch(kernel, *launch);                             \
  }

// ---- What CUDA calls them -----------------------------------------------------------------------

#define __global__
#define __device__
#define __host__
#define __constant__
#define __forceinline__ inline
#define __noinline__
#define __align__(n) alignas(n)
#define __grid_constant__
#define __launch_bounds__(...)
#define FACTORMAX_SHARED(name) char* const name = emulator::shared_memory

// Where a call is made: a default argument is evaluated there.
#define EMULATOR_HERE const char *file = __builtin_FILE(), int line = __builtin_LINE()

inline void __syncthreads(EMULATOR_HERE) {
  emulator::meet({emulator::Kind::kBarrier, "__syncthreads", file, line, 0, 0}, 0);
}
inline int __syncthreads_count(int on, EMULATOR_HERE) {
  return static_cast<int>(
      emulator::meet({emulator::Kind::kBarrier, "__syncthreads_count", file, line, 0, 4}, on != 0));
}
inline int __syncthreads_or(int on, EMULATOR_HERE) {
  return emulator::meet({emulator::Kind::kBarrier, "__syncthreads_or", file, line, 0, 4},
                        on != 0) != 0;
}
inline int __syncthreads_and(int on, EMULATOR_HERE) {
  return emulator::meet({emulator::Kind::kBarrier, "__syncthreads_and", file, line, 0, 4},
                        on == 0) == 0;
}
inline void __syncwarp(unsigned mask = ~0u, EMULATOR_HERE) {
  emulator::meet({emulator::Kind::kVote, "__syncwarp", file, line, mask, 0}, 0);
}
inline unsigned __ballot_sync(unsigned mask, int on, EMULATOR_HERE) {
  return static_cast<unsigned>(
      emulator::meet({emulator::Kind::kVote, "__ballot_sync", file, line, mask, 4}, on != 0));
}
inline int __any_sync(unsigned mask, int on, EMULATOR_HERE) {
  return emulator::meet({emulator::Kind::kVote, "__any_sync", file, line, mask, 4}, on != 0) != 0;
}
inline int __all_sync(unsigned mask, int on, EMULATOR_HERE) {
  return emulator::meet({emulator::Kind::kVote, "__all_sync", file, line, mask, 4}, on == 0) == 0;
}
// `width` lanes form a group of their own; up and down end at its borders.
template <class V>
V __shfl_sync(unsigned mask, V value, int source, int width = 32, EMULATOR_HERE) {
  const int lane = emulator::me % emulator::kWarp;
  const int from = (lane & ~(width - 1)) | (source & (width - 1));
  return emulator::shuffle("__shfl_sync", mask, value, from, file, line);
}
template <class V>
V __shfl_xor_sync(unsigned mask, V value, int distance, int width = 32, EMULATOR_HERE) {
  const int lane = emulator::me % emulator::kWarp, from = lane ^ distance;
  const bool inside = from < (lane & ~(width - 1)) + width;
  return emulator::shuffle("__shfl_xor_sync", mask, value, inside ? from : lane, file, line);
}
template <class V>
V __shfl_up_sync(unsigned mask, V value, unsigned distance, int width = 32, EMULATOR_HERE) {
  const int lane = emulator::me % emulator::kWarp, from = lane - static_cast<int>(distance);
  const bool inside = from >= (lane & ~(width - 1));
  return emulator::shuffle("__shfl_up_sync", mask, value, inside ? from : lane, file, line);
}
template <class V>
V __shfl_down_sync(unsigned mask, V value, unsigned distance, int width = 32, EMULATOR_HERE) {
  const int lane = emulator::me % emulator::kWarp, from = lane + static_cast<int>(distance);
  const bool inside = from < (lane & ~(width - 1)) + width;
  return emulator::shuffle("__shfl_down_sync", mask, value, inside ? from : lane, file, line);
}

// Nothing else runs in between.
template <class V>
V atomicAdd(V* at, V value) {
  static_assert(std::is_integral_v<V>, "Sums of reals would depend on the order of threads.");
  const V before = *at;
  *at += value;
  return before;
}
template <class V>
V atomicMin(V* at, V value) {
  const V before = *at;
  if (value < before) *at = value;
  return before;
}
inline void __threadfence() {}
inline void __threadfence_block() {}
template <class V>
V __ldg(const V* at) {
  return *at;
}

inline int __popc(unsigned bits) { return __builtin_popcount(bits); }
inline int __popcll(unsigned long long bits) { return __builtin_popcountll(bits); }
inline int __ffs(int bits) { return __builtin_ffs(bits); }
inline int __ffsll(long long bits) { return __builtin_ffsll(bits); }
inline int __clz(int bits) { return bits ? __builtin_clz(static_cast<unsigned>(bits)) : 32; }

namespace emulator {
template <class To, class From>
To bits_as(From value) {
  static_assert(sizeof(To) == sizeof(From));
  To result;
  std::memcpy(&result, &value, sizeof(To));
  return result;
}
}  // namespace emulator
inline float __int_as_float(int bits) { return emulator::bits_as<float>(bits); }
inline int __float_as_int(float value) { return emulator::bits_as<int>(value); }
inline float __uint_as_float(unsigned bits) { return emulator::bits_as<float>(bits); }
inline unsigned __float_as_uint(float value) { return emulator::bits_as<unsigned>(value); }
inline double __longlong_as_double(long long bits) { return emulator::bits_as<double>(bits); }
inline long long __double_as_longlong(double value) { return emulator::bits_as<long long>(value); }

// NVRTC has no C headers, so kernels must do without these.
#undef INFINITY
#undef NAN
#undef HUGE_VAL

// CUDA's mathematical functions are overloaded in the global namespace.
using std::abs;
using std::ceil;
using std::copysign;
using std::exp;
using std::fabs;
using std::floor;
using std::fma;
using std::fmax;
using std::fmin;
using std::isfinite;
using std::isinf;
using std::isnan;
using std::log;
using std::signbit;
using std::sqrt;
inline float rsqrt(float value) { return 1 / std::sqrt(value); }
inline double rsqrt(double value) { return 1 / std::sqrt(value); }
template <class V>
V min(V a, V b) {
  if constexpr (std::is_floating_point_v<V>) return std::fmin(a, b);
  return b < a ? b : a;
}
template <class V>
V max(V a, V b) {
  if constexpr (std::is_floating_point_v<V>) return std::fmax(a, b);
  return a < b ? b : a;
}
