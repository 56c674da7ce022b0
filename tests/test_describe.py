"""What a notebook shows of graphs, variables, factors and solutions."""

import numpy as np
import pytest

import factormax as fm


def graph():
    fg = fm.FactorGraph(batch_dims=1)
    mask = np.ones((2, 3, 3), dtype=bool)
    mask[1, 2] = False
    arcs = fg.variable_from(np.zeros((2, 3, 3), np.float32), mask=mask, name="arcs")
    v = fg.variable(4, name="v")
    fg.add(fm.DepTree(arcs, projective=True, single_root=True))
    fg.add(fm.Budget(arcs, [1, 2, 3], axis=0))
    for k in range(3):
        fg.add(fm.AtMostOne(arcs[k]))
    fg.add(fm.Pair(v[:-1], v[1:], 0.5))
    fg.add(fm.Linear(v, [1.0, -1.0, 2.0, 0.0], upper=1.5))
    return fg, arcs, v


def test_reprs_of_factors():
    fg, _, v = graph()
    assert [repr(f) for f in fg._factors[:3]] == [
        "<DepTree over arcs, projective, single_root: 1 factor of 9 variables>",
        "<Budget over arcs, axis=0, budget=[1, 2, 3]: 3 factors of 3 variables>",
        "<AtMostOne over arcs[0]: 1 factor of 3 variables>",
    ]
    assert [repr(f) for f in fg._factors[-2:]] == [
        "<Pair over v[:-1], v[1:], scores=0.5: 3 factors of 2 variables>",
        "<Linear over v, coefs=[1, -1, 2, 0], upper=1.5: 1 factor of 4 variables>",
    ]
    table = fm.Table([v[:2], v[2:]], np.zeros((2, 2)))
    assert repr(table) == "<Table over v[:2], v[2:], scores (2, 2): 1 factor of 4 variables>"
    many = fm.Knapsack(v, np.arange(4.0), budget=2.5)
    assert "costs=[0, 1, 2, 3], budget=2.5" in repr(many)
    long = fm.Knapsack(fm.FactorGraph().variable(40), np.arange(40.0), budget=2)
    assert "costs=0 to 39, budget=2" in repr(long)


def test_reprs_of_graphs_and_variables():
    fg, arcs, v = graph()
    assert repr(fg) == (
        "<FactorGraph of 13 variables (arcs: (3, 3), v: (4,)) and 11 factors (1 DepTree, 3 Budget, "
        "3 AtMostOne, 3 Pair, 1 Linear), batch (2,)>"
    )
    assert repr(fm.FactorGraph()) == "<FactorGraph of 0 variables and 0 factors>"
    assert repr(fm.FactorGraph(1)).endswith("batch of unknown shape>")
    assert repr(arcs[:, 0]) == "<Variable arcs[:, 0] of shape (3,), batch (2,), masked>"
    assert repr(~v) == "<Variable ~v of shape (4,), batch (2,)>"


def test_reprs_of_solutions():
    fg = fm.FactorGraph()
    u = fg.variable_from(np.array([1.0, 0.0]))
    fg.add(fm.Xor(u))
    assert repr(fg.solve()) == (
        "<Solution of fg.solve(): CONVERGED after 1 iteration, objective 0.5>"
    )
    assert repr(fg.decode()).startswith("<Solution of fg.decode(): CONVERGED after ")
    batch = fm.FactorGraph(batch_dims=1)
    u = batch.variable_from(np.zeros((2, 3)), mask=np.array([[True] * 3, [True, False, False]]))
    batch.add(fm.AtLeast(u, 2))
    shown = repr(batch.solve(on_failure="ignore"))
    assert shown.startswith("<Solution of fg.solve(), batch (2,): 1 CONVERGED, 1 INFEASIBLE after")


SUMMARY = """\
13 variables, 11 factors, batch (2,)

variable  shape   scores         masked
────────  ──────  ─────────────  ───────
arcs      (3, 3)  NumPy float32  3 of 18
v         (4,)    zeros          none

factor     over               count  size  with
─────────  ─────────────────  ─────  ────  ──────────────────────────────
DepTree    arcs                   1     9  projective, single_root
Budget     arcs                   3     3  axis=0, budget=[1, 2, 3]
AtMostOne  arcs[0] … arcs[2]      3     3
Pair       v[:-1], v[1:]          3     2  scores=0.5
Linear     v                      1     4  coefs=[1, -1, 2, 0], upper=1.5
"""


def test_summary(capsys):
    fg, _, _ = graph()
    assert fg.summary() is None
    assert capsys.readouterr().out == SUMMARY
    fm.FactorGraph().summary()
    assert capsys.readouterr().out == "0 variables, 0 factors\n"


def test_summary_of_tensors(capsys):
    torch = pytest.importorskip("torch")
    fg = fm.FactorGraph()
    fg.variable_from(torch.zeros(2, requires_grad=True))
    fg.summary()
    assert "torch float32, with gradient" in capsys.readouterr().out


def test_what_is_traced():
    jax = pytest.importorskip("jax")
    shown = []

    def solve(scores, budget, mask):
        fg = fm.FactorGraph()
        u = fg.variable_from(scores, mask=mask)
        shown.extend([repr(fg.add(fm.Budget(u, budget))), repr(u)])
        fg.summary()
        shown.append(fg.to_dot())
        return fg.solve().objective

    jax.jit(solve)(np.zeros(3, np.float32), np.float32(2), np.ones(3, bool))
    assert shown[0] == "<Budget over u, budget=traced: 1 factor of 3 variables>"
    assert shown[1] == "<Variable u of shape (3,), masked>"
    assert 'label="Budget"' in shown[2]


def test_a_solution_says_whether_it_is_a_structure():
    fg = fm.FactorGraph(batch_dims=1)
    u = fg.variable_from(np.array([[1.0, 1, 1], [3, 1, 1]]))
    for i, j in ((0, 1), (0, 2), (1, 2)):  # an odd cycle: the relaxation answers 1/2 where all tie
        fg.add(fm.Nand(u[i], u[j]))
    assert repr(fg.solve_map()).endswith(", 1 of 2 integral>")
    assert repr(fg.decode()).endswith(", 2 of 2 proved optimal>")
    assert repr(fg.solve()).endswith("iterations>")
    fg = fm.FactorGraph()
    fg.add(fm.Xor(fg.variable_from(np.array([1.0, 0.5]))))
    assert repr(fg.solve_map()).endswith(", objective 1, integral>")
    assert repr(fg.decode()).endswith(", objective 1, proved optimal>")
