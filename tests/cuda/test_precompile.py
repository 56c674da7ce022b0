"""`factormax.cuda`, as users call it."""

import numpy as np
import pytest

import factormax as fm
from factormax._engines.cuda import driver
from factormax._engines.cuda.engine import CudaEngine


def graph(tree: bool = False) -> fm.FactorGraph:
    fg = fm.FactorGraph(batch_dims=1)
    u = fg.variable_from(np.zeros((2, 4, 4)))
    fg.add(fm.DepTree(u, projective=True) if tree else fm.Xor(u, axis=1))
    return fg


def test_it_says_why_there_is_no_device(monkeypatch):
    monkeypatch.setattr(driver, "unavailable", lambda device=0: "there is no CUDA driver")
    assert fm.cuda.unavailable() == "there is no CUDA driver"
    with pytest.raises(fm.GraphError, match="there is no CUDA driver"):
        fm.cuda.precompile(graph())


def test_a_graph_without_a_kernel_is_refused():
    with pytest.raises(fm.GraphError, match="DepTree has no kernel"):
        fm.cuda.precompile(graph(tree=True))


@pytest.fixture
def made(monkeypatch):
    """The sources of all kernels that are made."""
    from machine import EmulatedMachine

    machine, made = EmulatedMachine(), []
    monkeypatch.setattr(
        machine, "load", lambda source, names: made.append(source) or dict.fromkeys(names)
    )
    monkeypatch.setattr(driver, "unavailable", lambda device=0: "")
    emulated = CudaEngine(lambda device: machine, lambda number: "")
    monkeypatch.setattr("factormax.cuda.ENGINES", [emulated])
    return made


def test_kernels_for_all_sizes_and_precisions_are_made(made):
    fm.cuda.precompile(graph(), batch_sizes=(1, 10_000), dtypes=("float32", "float64"))
    assert len(made) == 2 * 3  # float32 has two precisions
    assert all("FACTORMAX_KERNELS" in source for source in made)


def test_kernels_for_scores_of_which_the_batch_shares_some_are_made(made):
    fg = graph()
    u = fg.variable(4)
    fg.add(fm.Pair(u[:2], u[2:], np.zeros(2)))
    fm.cuda.precompile(fg, batch_sizes=(1,), dtypes=("float64",))
    fg.add(fm.Pair(u[:2], u[2:], np.zeros((2, 2))))
    fm.cuda.precompile(fg, batch_sizes=(1,), dtypes=("float64",))
    # If all are shared, there may still be a temperature per instance.
    assert ["kMixed = 0" in source for source in made] == [True, False, False]


@pytest.mark.gpu
def test_it_compiles():
    fm.cuda.precompile(graph(), batch_sizes=(1,))
