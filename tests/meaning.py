"""What the factors made of rows mean, and parameters for them. It knows nothing of factormax."""

import numpy as np

# kind -> predicate(x, params) over a 0/1 tuple of literals. Pair forbids nothing.
MEANING = {
    "Xor": lambda x, p: sum(x) == 1,
    "AtMostOne": lambda x, p: sum(x) <= 1,
    "Or": lambda x, p: any(x),
    "Nand": lambda x, p: not all(x),
    "Imply": lambda x, p: bool(x[-1]) or not all(x[:-1]),
    "XorOut": lambda x, p: sum(x[:-1]) <= 1 and x[-1] == (sum(x[:-1]) == 1),
    "OrOut": lambda x, p: x[-1] == any(x[:-1]),
    "AndOut": lambda x, p: x[-1] == all(x[:-1]),
    "Budget": lambda x, p: sum(x) <= p["budget"],
    "AtLeast": lambda x, p: sum(x) >= p["count"],
    "Exactly": lambda x, p: sum(x) == p["count"],
    "Knapsack": lambda x, p: np.dot(p["costs"], x) <= p["budget"],
    "Linear": lambda x, p: (
        p.get("lower", -np.inf) - 1e-9 <= np.dot(p["coefs"], x) <= p.get("upper", np.inf) + 1e-9
    ),
    "Pair": lambda x, p: True,
}

# Kinds that are defined by their rows, which are not the convex hull of the assignments.
RELAXED = ("Knapsack", "Linear")


def random_params(kind: str, d: int, rng) -> dict:
    """Parameters of a factor over d literals that bind often, and never alone are infeasible."""
    match kind:
        case "Budget":
            return {"budget": int(rng.integers(0, d + 1))}
        case "AtLeast" | "Exactly":
            return {"count": int(rng.integers(0, d + 1))}
        case "Knapsack":
            costs = rng.uniform(0.1, 2, d)
            return {"costs": costs, "budget": float(rng.uniform(0.1, 0.9) * costs.sum())}
        case "Linear":
            coefs = rng.normal(size=d)
            point = float(coefs @ rng.uniform(0.1, 0.9, d))
            width = float(rng.uniform(0.05, 0.5))
            bounds = {"lower": point - width / 2, "upper": point + width / 2}
            only = rng.choice(["lower", "upper", "both", "equal"])
            if only in bounds:
                bounds = {only: point}
            elif only == "equal":
                bounds = {"lower": point, "upper": point}
            return {"coefs": coefs, **bounds}
        case _:
            return {}
