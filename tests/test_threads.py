"""Threads, forks, interrupts and imports: the library as a guest in somebody's process."""

import multiprocessing
import os
import signal
import subprocess
import sys
import sysconfig
import textwrap
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import factormax as fm

posix = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")


def matching(seed, batch=16, n=8, **options):
    scores = np.random.default_rng(seed).normal(size=(batch, n, n))
    fg = fm.FactorGraph(batch_dims=1)
    u = fg.variable_from(scores)
    fg.add(fm.Xor(u, axis=1))
    fg.add(fm.AtMostOne(u, axis=0))
    solution = fg.solve(**options)
    return u.value, solution.vjp({u: scores})[u]


def run(code, **options):
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=120,
        **options,
    )


# Threads -----------------------------------------------------------------------------------------


def test_several_python_threads_at_once():
    expected = [matching(seed) for seed in range(8)]
    with ThreadPoolExecutor(8) as pool:
        for _ in range(5):
            for found, wanted in zip(pool.map(matching, range(8)), expected, strict=True):
                np.testing.assert_array_equal(found, wanted)


def solve_a_bit_of_everything(seed):
    """Graphs that share what is remembered of their kind, and one solution read by all."""
    rng = np.random.default_rng(seed % 3)
    scores, found = rng.normal(size=(3, 5, 5)), []
    for factors in (
        lambda u: [fm.Xor(u, axis=1), fm.AtMostOne(u, axis=0)],
        lambda u: [fm.Matching(u)],
        lambda u: [fm.DepTree(u), fm.Budget(u, 2, axis=0)],
        lambda u: [fm.Sequence(u, scores[0])],
    ):
        fg = fm.FactorGraph(batch_dims=1)
        u = fg.variable_from(scores)
        for factor in factors(u):
            fg.add(factor)
        solution = fg.solve()
        found += [u.value, solution.vjp({u: scores})[u], np.asarray(solution.objective)]
    return found


def test_many_threads_build_and_solve():
    """At the same time where the interpreter has no lock; elsewhere in very short turns."""
    expected = [solve_a_bit_of_everything(seed) for seed in range(3)]
    start = threading.Barrier(16)

    def work(seed):
        start.wait()
        return [solve_a_bit_of_everything(seed) for _ in range(5)]

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(16) as pool:
            for seed, answers in enumerate(pool.map(work, range(16))):
                for found in answers:
                    for array, wanted in zip(found, expected[seed % 3], strict=True):
                        np.testing.assert_array_equal(array, wanted)
    finally:
        sys.setswitchinterval(before)


def test_one_solution_is_read_by_many_threads():
    scores = np.random.default_rng(0).normal(size=(4, 8, 8))
    fg = fm.FactorGraph(batch_dims=1)
    u = fg.variable_from(scores)
    tree = fg.add(fm.DepTree(u))
    solution = fg.solve()
    start = threading.Barrier(8)

    def read(_):
        start.wait()
        return solution.vjp({u: scores})[u], tree.probs

    with ThreadPoolExecutor(8) as pool:
        (grad, probs), *others = pool.map(read, range(8))
    for other_grad, other_probs in others:
        np.testing.assert_array_equal(other_grad, grad)
        for one, other in zip(other_probs, probs, strict=True):
            np.testing.assert_array_equal(one, other)


@pytest.mark.skipif(
    not sysconfig.get_config_var("Py_GIL_DISABLED"), reason="needs an interpreter without the GIL"
)
def test_the_module_leaves_the_interpreter_without_its_lock():
    """An extension module that does not say that it can do without turns the lock on again."""
    done = run("import factormax, sys; print(sys._is_gil_enabled())")
    assert done.stdout == "False\n", done.stderr


def test_the_interpreter_lock_is_released():
    """Python runs while a solve does."""
    options = {"method": "admm", "tol": 1e-15, "max_iter": 2000, "on_failure": "ignore"}
    worker = threading.Thread(target=matching, args=(0, 64, 20), kwargs=options)
    ticks = 0
    worker.start()
    while worker.is_alive():
        ticks += 1
        time.sleep(1e-4)
    assert ticks > 20


def test_changing_the_number_of_threads_while_others_solve():
    before = fm.get_num_threads()
    expected = matching(0)
    try:
        with ThreadPoolExecutor(4) as pool:
            results = [pool.submit(matching, 0) for _ in range(20)]
            for threads in (1, 3, 2, 4) * 5:
                fm.set_num_threads(threads)
            for result in results:
                np.testing.assert_array_equal(result.result(), expected)
    finally:
        fm.set_num_threads(before)


# Forks -------------------------------------------------------------------------------------------


def fork_and_solve():
    """Fork now; whether the child solves and gets the same answer within a minute."""
    expected = matching(0)
    child = os.fork()
    if child == 0:
        same = all(np.array_equal(a, b) for a, b in zip(matching(0), expected, strict=True))
        os._exit(0 if same else 1)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status) == 0
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return False


@posix
@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork.*:DeprecationWarning")
def test_fork_after_the_pool_was_used():
    assert fork_and_solve()
    matching(1)  # and the parent goes on
    assert fork_and_solve()


@posix
@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork.*:DeprecationWarning")
def test_fork_while_another_thread_solves():
    stop = threading.Event()

    def keep_solving():
        while not stop.is_set():
            matching(2)

    worker = threading.Thread(target=keep_solving)
    worker.start()
    try:
        assert all(fork_and_solve() for _ in range(10))
    finally:
        stop.set()
        worker.join()


@posix
@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork.*:DeprecationWarning")
def test_a_pool_of_forked_processes():
    expected = [matching(seed) for seed in range(4)]
    with multiprocessing.get_context("fork").Pool(2) as pool:
        found = pool.map_async(matching, range(4)).get(timeout=60)
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_array_equal(a, b)


# Interrupts --------------------------------------------------------------------------------------

ENDLESS = """
    import signal
    import numpy as np, factormax as fm
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored if started in the background
    fg = fm.FactorGraph(batch_dims=1)
    u = fg.variable_from(5 * np.random.default_rng(0).normal(size=({batch}, {n}, {n})))
    fg.add(fm.Xor(u, axis=1))
    fg.add(fm.AtMostOne(u, axis=0))
    print("ready", flush=True)
    try:
        fg.solve(method="{method}", tol=1e-300, max_iter=10**9, on_failure="ignore")
    except KeyboardInterrupt:
        print("interrupted", flush=True)
    else:
        print("finished", flush=True)
"""


@posix
@pytest.mark.parametrize("method, batch, n", [("admm", 8, 60), ("auto", 20000, 20)])
def test_ctrl_c_stops_a_long_solve(method, batch, n):
    code = textwrap.dedent(ENDLESS.format(method=method, batch=batch, n=n))
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout.readline() == "ready\n"
        time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=20)
    finally:
        process.kill()
        process.wait()
    if method == "auto" and out == "finished\n":
        pytest.skip("the solve was over before the interrupt")
    assert out == "interrupted\n"


# Imports -----------------------------------------------------------------------------------------


def test_import_brings_nothing_optional():
    result = run("""
        import sys
        import factormax as fm
        import numpy as np
        fg = fm.FactorGraph()
        u = fg.variable_from(np.array([0.2, 0.9]))
        fg.add(fm.Xor(u))
        fg.solve().vjp({u: np.ones(2)})
        found = {"torch", "matplotlib", "scipy", "jax", "cvxpy", "tqdm"} & set(sys.modules)
        found |= {m for m in sys.modules if m.endswith(("cuda.driver", "cuda.program"))}
        assert not found, found
    """)
    assert result.returncode == 0, result.stderr


def test_works_without_torch_installed():
    """An import of torch that fails must not matter."""
    result = run("""
        import sys
        sys.modules["torch"] = None
        import factormax as fm
        import numpy as np
        fg = fm.FactorGraph()
        u = fg.variable_from(np.array([0.2, 0.9]))
        fg.add(fm.Xor(u))
        fg.solve()
        assert abs(u.value.sum() - 1) < 1e-9
    """)
    assert result.returncode == 0, result.stderr


def test_nothing_is_printed():
    result = run("""
        import warnings
        import numpy as np, factormax as fm
        warnings.simplefilter("error")
        np.seterr(all="raise")
        fg = fm.FactorGraph(batch_dims=1)
        u = fg.variable_from(np.array([[0.2, -np.inf, 1e9], [1e-300, -1e9, 0.3]], np.float32))
        fg.add(fm.Xor(u))
        fg.add(fm.AtLeast([u[0], ~u[1]], 2))
        solution = fg.solve(on_failure="ignore")
        solution.vjp({u: np.ones((2, 3), np.float32)})
    """)
    assert result.returncode == 0, result.stderr
    assert result.stdout == result.stderr == ""


def test_every_public_name_exists():
    names = (
        "FactorGraph TorchFactorGraph Solution Status Factor Xor AtMostOne Or Nand Imply XorOut "
        "OrOut AndOut Budget AtLeast Exactly Knapsack Linear Pair FactormaxError GraphError "
        "ShapeError InfeasibleError NotConvergedError NotConvergedWarning set_num_threads "
        "get_num_threads"
    )
    missing = [name for name in names.split() if not hasattr(fm, name)]
    assert not missing
    assert set(fm.__all__) <= set(dir(fm))
