"""Answers of the kernels on emulated warps and blocks, compared with those of the core."""

from __future__ import annotations

from typing import Any

import numpy as np
from machine import EmulatedMachine

import factormax as fm
from factormax._engines.cpu import CpuEngine
from factormax._engines.cuda.launcher import DeviceRun, Launcher
from factormax._engines.cuda.plan import Plan
from factormax._inputs import Inputs
from factormax._options import Options
from factormax._task import Task

__all__ = ["check", "check_order", "check_start", "check_teams", "inputs_of", "solve"]

TOL = {np.float32: 1e-5, np.float64: 1e-9}
ERROR = {np.float32: 2e-5, np.float64: 1e-7}
GRAD_ERROR = {np.float32: 2e-4, np.float64: 1e-7}


def inputs_of(fg: fm.FactorGraph, dtype: Any) -> Inputs:
    """The numbers of a graph, laid out flat."""
    scores = [np.asarray(t.scores, dtype) for t in fg._tensors]
    own = [np.asarray(p.given, dtype) for p in fg._score_parts()]
    return Task(fg, scores, own, dtype).inputs


def check(inputs: Inputs, run: DeviceRun, dtype: Any, seed: int = 1) -> None:
    """Compares an answer and its gradient with the core's, in double and to the last digits."""
    found = run.found
    exact = inputs.wide()
    wanted = CpuEngine().solve(exact, Options(tol=1e-12), None)
    assert (found.status == 0).all(), found.status
    np.testing.assert_allclose(found.mu, wanted.mu, rtol=0, atol=ERROR[dtype])
    np.testing.assert_allclose(found.mu_v, wanted.mu_v, rtol=0, atol=ERROR[dtype])
    np.testing.assert_allclose(found.objective, wanted.objective, rtol=1e-5, atol=ERROR[dtype])
    rng = np.random.default_rng(seed)
    grad, grad_v = (rng.standard_normal(x.shape).astype(dtype) for x in (found.mu, found.mu_v))
    grad_u, grad_s, residual = run.vjp(grad, grad_v)
    wanted_u, wanted_s, _, _ = CpuEngine().vjp(
        exact, wanted, grad.astype(np.float64), grad_v.astype(np.float64), None
    )
    assert (residual <= 1e-4).all()
    np.testing.assert_allclose(grad_u, wanted_u, rtol=0, atol=GRAD_ERROR[dtype])
    np.testing.assert_allclose(grad_s, wanted_s, rtol=0, atol=GRAD_ERROR[dtype])


def solve(fg: fm.FactorGraph, dtype: Any, order: Any = "forward", **options: Any) -> DeviceRun:
    options = {"tol": TOL[dtype]} | options
    return Launcher(EmulatedMachine(order)).solve(inputs_of(fg, dtype), Options(**options))


def check_teams(model: Any, team: int, monkeypatch: Any) -> None:
    """A team of any size gives the core's answers."""
    monkeypatch.setattr(Plan, "_team", lambda self, batch: team)
    for seed in range(3):
        fg = model(np.random.default_rng(seed), np.float64)
        run = solve(fg, np.float64)
        assert run.stages[0].program.choice.team == team
        check(inputs_of(fg, np.float64), run, np.float64)


def check_order(model: Any, monkeypatch: Any) -> None:
    """The order of threads changes no bit."""
    monkeypatch.setattr(Plan, "_team", lambda self, batch: 64)
    fg = model(np.random.default_rng(0), np.float32)
    grad = np.random.default_rng(1).standard_normal(inputs_of(fg, np.float32).eta_u.shape)
    answers = []
    for order in ("forward", "reverse", "shuffled"):
        run = solve(fg, np.float32, order)
        own = np.ones_like(run.found.mu_v)
        gradients = run.vjp(grad.astype(np.float32), own)
        answers.append([run.found.mu, run.found.mu_v, run.found.tau, *gradients])
    for other in answers[1:]:
        for one, two in zip(answers[0], other, strict=True):
            np.testing.assert_array_equal(one, two)


def check_start(model: Any) -> None:
    """From its own solution, a solve is done at once."""
    inputs = inputs_of(model(np.random.default_rng(0), np.float64), np.float64)
    launcher = Launcher(EmulatedMachine())
    first = launcher.solve(inputs, Options(tol=1e-9)).found
    again = launcher.solve(inputs, Options(tol=1e-9), first.tau).found
    assert (again.iterations <= 2).all() and (first.iterations > 4).any()
    np.testing.assert_allclose(again.mu, first.mu, rtol=0, atol=1e-8)
