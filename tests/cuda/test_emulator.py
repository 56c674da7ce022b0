"""The emulator that other tests of kernels rely on: what it computes, and what it must notice."""

from __future__ import annotations

import ctypes

import emulator
import numpy as np
import pytest
from emulator import ORDERS


class Args(ctypes.Structure):
    _fields_ = (("input", ctypes.c_void_p), ("output", ctypes.c_void_p), ("n", ctypes.c_int))


HEAD = """
struct Args {
  const double* input;
  double* output;
  int n;
};
constexpr unsigned kAll = 0xffffffffu;
extern "C" __global__ void __launch_bounds__(1024) kernel(const __grid_constant__ Args args) {
  const int t = threadIdx.x;
  const int i = blockIdx.x * blockDim.x + t;
  FACTORMAX_SHARED(memory);
  double* shared = reinterpret_cast<double*>(memory);
"""


class Other(ctypes.Structure):
    _fields_ = (("n", ctypes.c_int),)


def kernel(body, order="forward", seed=0):
    return emulator.load(HEAD + body + "}", ["kernel"], order=order, seed=seed)["kernel"]


def run(body, given, order="forward", seed=0, *, grid=1, block=32, shared=0):
    """What the body of a kernel writes to `args.output`, one number per thread."""
    function = kernel(body, order, seed)
    given = np.asarray(given, np.float64)
    output = np.full(grid * block, -7.0)
    function.launch(grid, block, shared, 0, Args(given.ctypes.data, output.ctypes.data, given.size))
    return output


def numbers(size):
    return np.random.default_rng(size).normal(size=size)


SUM_OF_BLOCK = """
  double sum = args.input[i];
  for (int d = 16; d > 0; d /= 2) sum += __shfl_xor_sync(kAll, sum, d);
  if (t % 32 == 0) shared[t / 32] = sum;
  __syncthreads();
  sum = 0;
  for (int w = 0; w < static_cast<int>(blockDim.x) / 32; ++w) sum += shared[w];
  args.output[i] = sum;
"""


@pytest.mark.parametrize("block", [32, 64, 1024])
@pytest.mark.parametrize("order", ORDERS)
def test_sum_of_a_block_by_shuffles(order, block):
    given = numbers(3 * block)
    found = run(SUM_OF_BLOCK, given, order, grid=3, block=block, shared=block // 4)
    expected = np.repeat(given.reshape(3, block).sum(1), block)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-12)
    assert np.array_equal(found, run(SUM_OF_BLOCK, given, grid=3, block=block, shared=block // 4))


# A call, and what it gives to each of 64 threads; v is the number of the thread.
COLLECTIVES = {
    "__shfl_sync(kAll, v, 5)": lambda t: t // 32 * 32 + 5,
    "__shfl_sync(kAll, v, 3, 8)": lambda t: t // 8 * 8 + 3,
    "__shfl_sync(kAll, v, t + 1)": lambda t: t // 32 * 32 + (t + 1) % 32,
    "__shfl_sync(kAll, static_cast<float>(v), 5)": lambda t: t // 32 * 32 + 5,
    "__shfl_sync(kAll, static_cast<long long>(v), 5)": lambda t: t // 32 * 32 + 5,
    "__shfl_xor_sync(kAll, v, 7)": lambda t: t ^ 7,
    "__shfl_up_sync(kAll, v, 3)": lambda t: np.where(t % 32 < 3, t, t - 3),
    "__shfl_up_sync(kAll, v, 3, 4)": lambda t: np.where(t % 4 < 3, t, t - 3),
    "__shfl_down_sync(kAll, v, 3)": lambda t: np.where(t % 32 > 28, t, t + 3),
    "__shfl_down_sync(kAll, v, 3, 4)": lambda t: np.where(t % 4 > 0, t, t + 3),
    "__popc(__ballot_sync(kAll, v > 40))": lambda t: np.where(t < 32, 0, 23),
    "__ffs(__ballot_sync(kAll, t % 32 == 9))": lambda t: np.full(64, 10),
    "__any_sync(kAll, v == 40)": lambda t: t >= 32,
    "__all_sync(kAll, v < 40)": lambda t: t < 32,
    "__syncthreads_or(v == 40)": lambda t: np.ones(64),
    "__syncthreads_or(v == 64)": lambda t: np.zeros(64),
    "__syncthreads_and(v < 64)": lambda t: np.ones(64),
    "__syncthreads_and(v < 63)": lambda t: np.zeros(64),
    "__syncthreads_count(v > 40)": lambda t: np.full(64, 23),
    "gridDim.x * 100 + blockDim.x": lambda t: np.full(64, 164),
}


@pytest.mark.parametrize("order", ORDERS)
def test_collectives(order):
    lines = [f"args.output[{64 * k} + t] = {call};" for k, call in enumerate(COLLECTIVES)]
    output = np.full((len(COLLECTIVES), 64), -7.0)
    function = kernel("const double v = t;\n" + "\n".join(lines), order)
    function.launch(1, 64, 0, 0, Args(None, output.ctypes.data, 0))
    for (call, expected), found in zip(COLLECTIVES.items(), output, strict=True):
        np.testing.assert_array_equal(found, expected(np.arange(64)), err_msg=call)


def test_masks_split_a_warp():
    body = """
      double v = t;
      if (t < 16) {
        for (int d = 8; d > 0; d /= 2) v += __shfl_xor_sync(0x0000ffffu, v, d);
      } else {
        v = __ballot_sync(0xffff0000u, t == 20);
        __syncwarp(0xffff0000u);
      }
      args.output[i] = v;
    """
    for order in ORDERS:
        found = run(body, [], order)
        np.testing.assert_array_equal(found, np.repeat([120, 2**20], 16))


def test_a_block_of_one_thread():
    body = """
      shared[0] = args.input[0];
      __syncthreads();
      __syncwarp();
      const int on = __ballot_sync(kAll, 1) + __any_sync(kAll, 0) + __all_sync(kAll, 1);
      args.output[i] = __shfl_sync(kAll, shared[0], 0) + on + __syncthreads_or(0);
    """
    np.testing.assert_array_equal(run(body, [3.0], grid=4, block=1, shared=8), np.full(4, 5.0))


def test_mathematics_is_overloaded():
    """Whatever float goes in, float comes out, as in CUDA."""
    calls = "sqrt(#) rsqrt(#) fabs(#) abs(#) fmin(#,#) fmax(#,#) copysign(#,#) fma(#,#,#) exp(#) "
    calls += "log(#) floor(#) ceil(#) min(#,#) max(#,#)"
    same = "".join(
        f"static_assert(sizeof({call.replace('#', one)}) == {size});"
        for call in calls.split()
        for one, size in (("1.0f", 4), ("1.0", 8))
    )
    found = run(same + "args.output[i] = rsqrt(4.0) + min(2, 3) + max(2.0f, 3.0f);", [])
    np.testing.assert_array_equal(found, np.full(32, 5.5))


def test_what_nvrtc_does_not_know_does_not_compile():
    with pytest.raises(RuntimeError, match="INFINITY"):
        run("args.output[i] = INFINITY;", [])


def test_atomics_count_every_thread():
    count = np.zeros(1, np.int32)
    function = kernel("atomicAdd(reinterpret_cast<int*>(args.output), 2);")
    function.launch(3, 64, 0, 0, Args(None, count.ctypes.data, 0))
    assert count[0] == 2 * 3 * 64


def test_a_barrier_orders_memory():
    body = """
      shared[t] = args.input[t];
      __syncthreads();
      const double next = shared[(t + 1) % blockDim.x];
      __syncthreads();
      shared[t] = 2 * next;
      __syncthreads();
      args.output[i] = shared[blockDim.x - 1 - t];
    """
    given = numbers(96)
    for order in ORDERS:
        for seed in range(3):
            found = run(body, given, order, seed, block=96, shared=96 * 8)
            np.testing.assert_array_equal(found, 2 * np.roll(given, -1)[::-1])


def test_a_race_shows_in_another_order():
    """Without a barrier, what a neighbour has written depends on who ran first."""
    body = "shared[t] = args.input[t]; args.output[i] = shared[(t + 1) % 32];"
    given = numbers(32)
    forward, reverse, shuffled = (run(body, given, order, shared=256) for order in ORDERS)
    assert np.isnan(forward[:-1]).all() and forward[-1] == given[0]
    assert (reverse[:-1] == given[1:]).all() and np.isnan(reverse[-1])
    assert 0 < np.isnan(shuffled).sum() < 32


def test_a_race_between_warps_shows_in_another_order():
    body = """
      if (t == 0) shared[0] = 1;
      __syncwarp();
      args.output[i] = shared[0];
    """
    forward, reverse, _ = (run(body, [], order, block=64, shared=8) for order in ORDERS)
    assert (forward == 1).all()
    assert np.isnan(reverse[32:]).all()


def test_blocks_too_run_in_any_order():
    def turns(order, seed=0):
        output = np.zeros(9)  # the last counts the blocks so far
        function = kernel("if (t == 0) args.output[blockIdx.x] = args.output[8]++;", order, seed)
        function.launch(8, 32, 0, 0, Args(None, output.ctypes.data, 0))
        return output[:8].tolist()

    assert turns("forward") == list(range(8))
    assert turns("reverse") == list(range(8))[::-1]
    assert sorted(turns("shuffled")) == list(range(8))
    assert turns("shuffled", 1) != turns("shuffled", 2)
    assert turns("shuffled", 1) == turns("shuffled", 1)


def test_shared_memory_is_nan_in_every_block():
    body = "args.output[i] = shared[t]; shared[t] = 1;"
    assert np.isnan(run(body, [], grid=3, shared=256)).all()


def test_writing_outside_shared_memory():
    writes = {
        "shared[3] = 1": "",
        "shared[4] = 1": "0 bytes past the end",
        "memory[35] = 1": "3 bytes past the end",
        "memory[-1] = 1": "0 bytes before the start",
    }
    cases = "".join(f"case {k}: {write}; break;" for k, write in enumerate(writes))
    function = kernel(f"if (i == 64) switch (args.n) {{ {cases} }}")
    for k, words in enumerate(writes.values()):
        args = Args(None, None, k)
        if not words:
            function.launch(3, 32, 32, 0, args)
            continue
        with pytest.raises(RuntimeError, match=f"block 2 wrote {words} of its 32 bytes of shared"):
            function.launch(3, 32, 32, 0, args)


# What the threads of a block of 64 do, and what is said of it.
DIVERGENT = {
    "two functions of a warp": (
        "if (t < 8) __syncwarp(); else __any_sync(kAll, 1);",
        ["8 of 64 wait in __syncwarp", "wait in __any_sync", "the first is thread 8"],
    ),
    "a function of a warp and one of the block": (
        "if (t < 8) __syncwarp(); else __syncthreads();",
        ["8 of 64 wait in __syncwarp", "56 of 64 wait in __syncthreads", "0 have ended"],
    ),
    "the same function on two lines": (
        "if (t < 32) {\n__syncthreads();\n} else {\n__syncthreads();\n}",
        ["32 of 64 wait in __syncthreads", "the first is thread 0", "the first is thread 32"],
    ),
    "values of two types": (
        "if (t < 8) __shfl_sync(kAll, 1.0, 0); else __shfl_sync(kAll, 1.0f, 0);",
        ["8 of 64 wait in __shfl_sync", "the first is thread 8"],
    ),
    "two masks that overlap": (
        "__syncwarp(t < 8 ? 0x1ffu : kAll);",
        ["8 of 64 wait in __syncwarp", "mask 000001ff", "mask ffffffff"],
    ),
    "a thread has left the block": (
        "if (t == 5) return;\n__syncthreads();",
        ["63 of 64 wait in __syncthreads", "the first is thread 0", "1 have ended"],
    ),
    "a thread has left the warp": (
        "if (t == 0 || t >= 32) return;\n__shfl_xor_sync(kAll, t, 1);",
        ["31 of 64 wait in __shfl_xor_sync", "the first is thread 1", "33 have ended"],
    ),
    "a mask without the caller": ("__syncwarp(0x7ffffffeu);", ["is not in the mask"]),
    "a lane outside of the mask": (
        "if (t < 16) __shfl_xor_sync(0xffffu, t, 16);",
        ["reads lane 16, which takes no part in __shfl_xor_sync"],
    ),
}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("case", DIVERGENT)
def test_threads_that_do_not_meet(case, order):
    cases = [f"case {k}: {body} break;" for k, (body, _) in enumerate(DIVERGENT.values())]
    function = kernel("switch (args.n) {\n" + "\n".join(cases) + "\n}", order)
    with pytest.raises(RuntimeError, match=r"^kernel: block 0: ") as error:
        function.launch(1, 64, 0, 0, Args(None, None, list(DIVERGENT).index(case)))
    _, words = DIVERGENT[case]
    for word in words:
        assert word in str(error.value)


def test_the_place_of_a_collective_is_told():
    with pytest.raises(RuntimeError, match=r"__syncthreads \(source\.cpp:\d+\)"):
        run("if (t) __syncthreads();", [])


def test_it_works_again_after_an_error():
    body = "if (args.n == 0 && t == 5) return;\n__syncthreads();\nargs.output[i] = args.n;"
    with pytest.raises(RuntimeError, match="do not meet"):
        run(body, [])
    np.testing.assert_array_equal(run(body, [1.0, 2.0]), np.full(32, 2.0))


def test_what_the_driver_would_refuse():
    with pytest.raises(RuntimeError, match=r"multiple of 32 up to 1024, got 48"):
        run("", [], block=48)
    with pytest.raises(RuntimeError, match=r"needs 1000000 bytes of shared memory"):
        run("", [], shared=1_000_000)
    with pytest.raises(RuntimeError, match=r"arguments have 4 bytes, but the kernel takes 24"):
        kernel("").launch(1, 32, 0, 0, Other())


def test_a_grid_of_nothing():
    assert run("args.output[i] = 1;", [], grid=0).size == 0


def test_compilers_say_what_is_wrong():
    with pytest.raises(RuntimeError, match=r"nowhere"):
        emulator.load("int x = nowhere;", [])


def test_deep_loops_are_quick():
    """A hundred thousand collectives of a block take seconds at most."""
    body = """
      double sum = t;
      for (int k = 0; k < 20000; ++k) {
        for (int d = 16; d > 0; d /= 2) sum = 0.5 * (sum + __shfl_xor_sync(kAll, sum, d));
      }
      args.output[i] = sum;
    """
    np.testing.assert_allclose(run(body, []), np.full(32, 15.5))
