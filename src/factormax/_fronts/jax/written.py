"""A plan as text, the only form in which a compiled JAX function can hold and save it.

`jax.export` writes it to a file: it consists of names and numbers, and no code.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import numpy as np

from factormax._fronts.jax.plan import FactorParams, Operands, Plan
from factormax._fronts.rewired import rewired
from factormax._model import model_of
from factormax._options import Options
from factormax.factors.base import BaseFactor
from factormax.scope import ListedPart, Part

__all__ = ["read", "written"]


def written(plan: Plan) -> str | None:
    """The text of a plan; None if it can't be written."""
    if plan.wiring is None:
        return None
    params = [
        [f.factor, f.name, f.size, [p if _is_plain(p) else p.tolist() for p in f.given]]
        for f in plan.factors
    ]
    what = [
        plan.wiring,
        plan.model.num_variables,
        asdict(plan.options),
        list(plan.operands),
        plan.tensors,
        plan.scores,
        plan.allow_minus_inf,
        params,
        list(plan.is_shared),
    ]
    return json.dumps(what, separators=(",", ":"), default=int)


def _is_plain(param: Any) -> bool:
    return param is None or isinstance(param, float)


def read(text: str) -> Plan:
    """The plan of a text.

    Raises:
        GraphError: if it uses a factor that this process does not know.
    """
    wiring, variables, options, operands, tensors, scores, allowed, params, *more = json.loads(text)
    factors = [_factor(*own) for own in wiring]
    if isinstance(options["search"], list):
        options["search"] = tuple(options["search"])
    return Plan(
        model_of(variables, factors),
        Options(**options),
        Operands(*operands),
        [(name, tuple(shape)) for name, shape in tensors],
        [(name, tuple(shape)) for name, shape in scores],
        allowed,
        [
            FactorParams(kind, name, size, tuple([_param(p) for p in given]))
            for kind, name, size, given in params
        ],
        wiring=wiring,
        is_shared=more[0] if more else (),
    )


def _param(given: Any) -> Any:
    return given if _is_plain(given) else np.array(given, np.float64)


def _factor(
    name: str, scope: list[Any], listed: list[bool], params: int, oracle: list[Any]
) -> BaseFactor:
    parts = [
        ListedPart(np.array(p, np.int64)) if is_list else Part(*map(_tupled, p))
        for p, is_list in zip(scope, listed, strict=True)
    ]
    return rewired(name, parts, params, oracle)


def _tupled(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
