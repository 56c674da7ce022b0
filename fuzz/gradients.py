"""What must hold of derivatives: finite differences, and symmetry."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from fuzz.case import Built, Case
from fuzz.judge import EPS, TIGHT, Infeasible, Reference, Run
from fuzz.solving import score_name

__all__ = ["check_gradient", "check_symmetry"]


def _moved(case: Case, direction: dict[Any, Any], h: float) -> Case:
    """The case with its scores, and its factors' scores, moved along a direction."""
    terms = tuple(
        replace(t, params={**t.params, name: t.params[name] + h * direction[i]})
        if (name := score_name(t))
        else t
        for i, t in enumerate(case.terms)
    )
    return replace(case, scores=case.scores + h * direction["u"], terms=terms)


def _random_direction(run: Run, case: Case, own: bool = True) -> dict[Any, Any]:
    out: dict[Any, Any] = {"u": np.where(case.present, run.rng.normal(size=case.n), 0.0)}
    for i, term in enumerate(case.terms):
        if name := score_name(term):
            shape = np.shape(term.params[name])
            drawn = np.asarray(run.rng.normal(size=shape))
            finite = np.isfinite(term.params[name])
            out[i] = np.where(finite, drawn, 0.0) if own else np.zeros(shape)
    return out


def _grads(built: Built, weights: dict[Any, Any]) -> dict[Any, Any]:
    return {(built.u if k == "u" else built.factors[k]): v for k, v in weights.items()}


def _one_instance(run: Run) -> Case | None:
    """An instance in double precision that can be differentiated."""
    one = run.case.instance(int(run.rng.integers(len(run.references))))
    reference = Reference(one)
    if one.dtype == "float32" or reference.infeasible is not False:
        run.skip("instance")
        return None
    return one


def _is_tie(
    run: Run, one: Case, loss: Callable[..., float], slope: float, noise: float, h: float
) -> bool:
    """Whether pieces with smaller and with larger slopes meet here.

    At such a point the answer has no derivative, although it may have the same one-sided slope, 0
    for instance, on both sides of a line through it; what `vjp` gives is between the slopes of the
    pieces.
    """
    slopes = []
    for _ in range(12):
        beside = _moved(one, _random_direction(run, one), 10 * h)
        slopes.append((loss(h / 10, beside) - loss(-h / 10, beside)) * 5 / h)
    return min(slopes) - noise <= slope <= max(slopes) + noise and max(slopes) - min(slopes) > noise


def check_gradient(run: Run) -> None:
    """`vjp` against finite differences: the answer is piecewise linear, so these are exact."""
    one = _one_instance(run)
    if one is None:
        return
    tol, h = 1e-12 * max(1.0, one.size), 1e-5
    try:
        built, solution = run.solve(one, tol=tol)
    except Infeasible:
        return
    if not solution.converged:
        run.skip("converged")
        return
    for _ in range(2):
        weights = _random_direction(run, one, own=one.generic)
        direction = _random_direction(run, one)

        residuals: list[float] = []

        def loss(
            h: float,
            at: Case = one,
            d: Any = direction,
            w: Any = weights,
            off: Any = residuals,
        ) -> float:
            moved, answer = run.solve(_moved(at, d, h), tol=tol)
            if not answer.converged:
                return np.nan
            off.append(float(answer.primal_residual))
            total = float(w["u"] @ moved.u.value)
            return total + sum(
                float(np.sum(v * moved.factors[i].value)) for i, v in w.items() if i != "u"
            )

        down, here, up = loss(-h), loss(0.0), loss(h)
        before, after = (here - down) / h, (up - here) / h
        noise = 1e-5 + 100 * EPS["float64"] * one.size * one.n / h
        # Marginals are off by a small multiple of the residual: see `nearness`.
        weight = sum(float(np.abs(w).sum()) for w in weights.values())
        unsure = 20 * max(residuals, default=0.0) * weight / h
        if not abs(before - after) <= noise or unsure > noise:
            run.skip("finite differences")  # a kink is near, or the re-solves are not exact
            continue
        grads = solution.vjp(_grads(built, weights))
        slope = float(grads[built.u] @ direction["u"]) + sum(
            float(np.sum(grads[built.factors[i]] * d)) for i, d in direction.items() if i != "u"
        )
        size = 1 + abs(slope)
        right = abs(slope - (up - down) / (2 * h)) <= 2 * noise * size
        if not right and _is_tie(run, one, loss, slope, 10 * noise * size, h):
            run.skip("finite differences")
            continue
        run.expect(
            "finite differences",
            right,
            f"vjp {slope!r}, finite differences {((up - down) / (2 * h))!r}",
        )
        run.expect(
            "masked",
            not grads[built.u][~one.present].any(),
            "a masked variable has a gradient",
        )


def check_symmetry(run: Run) -> None:
    """The Jacobian is the Hessian of a convex function: symmetric, of scores and factor scores."""
    one = _one_instance(run)
    if one is None:
        return
    try:
        built, solution = run.solve(one, tol=TIGHT)
    except Infeasible:
        return
    if not solution.converged:
        run.skip("converged")
        return
    a, b = (_random_direction(run, one, own=one.generic) for _ in range(2))
    products = []
    for x, y in ((a, b), (b, a)):
        grads = solution.vjp(_grads(built, x))
        products.append(
            sum(
                float(np.sum(grads[built.u if k == "u" else built.factors[k]] * v))
                for k, v in y.items()
            )
        )
    size = 1 + sum(float(np.sum(v**2)) for v in (*a.values(), *b.values()))
    run.expect(
        "Jacobian",
        abs(products[0] - products[1]) <= 1e-7 * size,
        f"a·J·b = {products[0]!r}, b·J·a = {products[1]!r}",
    )
