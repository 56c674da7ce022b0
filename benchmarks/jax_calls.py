"""What a call costs from JAX: a jitted matching of 20 × 20, on one thread, forward and backward.

By the FFI of XLA if the core was built for it, and by way of Python. The answers are checked first.
Beside them stand callbacks of JAX that copy their array and do nothing else: what it takes itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import factormax as fm
from benchmarks.timing import interleaved, table

__all__ = ["SECTIONS"]

#: The most that was asked for, in microseconds: forward, and forward with backward.
ASKED = {"ffi": (100, 130), "callback": (150, 230)}


def solved(scores: Any) -> Any:
    fg = fm.FactorGraph()
    u = fg.variable_from(scores)
    fg.add(fm.Xor(u, axis=1))
    fg.add(fm.AtMostOne(u, axis=0))
    fg.solve()
    return u.value


def contestants(scores: Any, weight: Any) -> dict[str, Callable[[], object]]:
    """Compiled functions, by the way that they call the core and what they compute."""
    import jax

    from factormax._fronts.jax import ffi, primitives

    def loss(scores: Any) -> Any:
        return (solved(scores) * weight).sum()

    lowering = ffi.lowering
    found: dict[str, Callable[[], object]] = {}
    for way in ("ffi", "callback"):
        if way == "ffi" and ffi.unavailable():
            continue
        primitives.ffi.lowering = lowering if way == "ffi" else lambda *_: None
        # Functions of their own, for JAX remembers what it compiled.
        forward = jax.jit(lambda s: solved(s)).lower(scores).compile()
        both = jax.jit(jax.value_and_grad(lambda s: loss(s))).lower(scores).compile()
        found[f"{way}, forward"] = lambda f=forward: jax.block_until_ready(f(scores))
        found[f"{way}, + backward"] = lambda f=both: jax.block_until_ready(f(scores))
    primitives.ffi.lowering = lowering
    return found


def bare_callbacks(scores: Any) -> dict[str, Callable[[], object]]:
    """Compiled functions that call Python for a copy of the scores."""
    import jax
    from jax.experimental import io_callback

    from factormax._fronts.jax.primitives import _buffer_callback

    def copied(_: Any, place: Any, array: Any) -> None:
        np.asarray(place)[...] = np.asarray(array)

    struct: Any = jax.ShapeDtypeStruct(scores.shape, scores.dtype)
    ways: dict[str, Any] = {
        "pure_callback": lambda s: jax.pure_callback(np.copy, struct, s),
        "io_callback": lambda s: io_callback(np.copy, struct, s),
    }
    if _buffer_callback is not None:
        ways["buffer_callback"] = _buffer_callback(copied, struct)
    found: dict[str, Callable[[], object]] = {}
    for name, way in ways.items():
        function = jax.jit(way).lower(scores).compile()
        found[f"{name}, copy"] = lambda f=function: jax.block_until_ready(f(scores))
    return found


def run(quick: bool) -> tuple[str, dict[str, object]]:
    import jax.numpy as jnp

    threads = fm.get_num_threads()
    fm.set_num_threads(1)
    rng = np.random.default_rng(0)
    given, weight = rng.normal(size=(2, 20, 20)).astype(np.float32)
    exact = solved(given)
    fg = fm.FactorGraph()
    u = fg.variable_from(given)
    fg.add(fm.Xor(u, axis=1))
    fg.add(fm.AtMostOne(u, axis=0))
    grad = fg.solve().vjp({u: weight})[u]
    runs = contestants(jnp.asarray(given), jnp.asarray(weight))
    for name, function in runs.items():
        answer: Any = function()
        if name.endswith("forward"):
            np.testing.assert_allclose(answer, exact, atol=1e-6)
        else:
            np.testing.assert_allclose(answer[1], grad, atol=1e-5)
    runs |= bare_callbacks(jnp.asarray(given))
    runs["NumPy, forward"] = lambda: solved(given)
    turns = {name: 50 for name in runs}
    times = interleaved(runs, repeats=10 if quick else 60, warmup=50, in_a_row=turns)
    fm.set_num_threads(threads)
    rows: list[list[object]] = []
    for name, seconds in times.items():
        way, what = name.split(", ")
        limit = ASKED.get(way, ("", ""))[what != "forward"]
        rows.append([name, 1e6 * seconds, limit])
    text = table("JAX: a jitted 20x20 matching (µs, one thread)", ["", "median", "asked"], rows)
    return text, {"microseconds": {row[0]: row[1] for row in rows}}


SECTIONS = {"jax": run}
