"""A solve in three pictures: the projection, the dual of one row, and the passes of a matching."""

import matplotlib.pyplot as plt
import numpy as np

import factormax as fm

INK, BLUE, ORANGE, GREY = "#333333", "#1F6FB5", "#D9822B", "#C8CDD2"
figure, (left, middle, right) = plt.subplots(1, 3, figsize=(10.5, 3.4), layout="constrained")

# ---- Scores are projected onto the polytope: AtMostOne of two variables --------------------------
left.fill([0, 1, 0], [0, 0, 1], color="#E3EDF7")
left.plot([0, 1, 0, 0], [0, 0, 1, 0], color=BLUE, linewidth=1.2)
for scores in ([0.9, 0.7], [1.5, 0.2], [0.2, -0.4], [0.25, 0.35]):
    fg = fm.FactorGraph()
    u = fg.variable_from(np.array(scores))
    fg.add(fm.AtMostOne(u))
    fg.solve()
    left.annotate(
        "",
        u.value,
        scores,
        arrowprops={"arrowstyle": "->", "color": GREY, "shrinkA": 3, "shrinkB": 3},
    )
    left.plot(*scores, "o", color=ORANGE, markersize=5)
    left.plot(*u.value, "o", color=BLUE, markersize=6)
left.plot([], [], "o", color=ORANGE, label="scores η")
left.plot([], [], "o", color=BLUE, label="marginals μ")
left.set(xlim=(-0.3, 1.75), ylim=(-0.55, 1.25), aspect="equal", xlabel="first", ylabel="second")
left.legend(frameon=False, fontsize=8, loc="upper right")
left.set_title("1. What is solved: a projection", fontsize=10)

# ---- One row: all its variables follow one multiplier --------------------------------------------
scores = np.array([1.6, 1.2, 0.7, 0.1])
tau = np.linspace(-0.2, 1.7, 400)
values = np.clip(scores - tau[:, None], 0, 1)
middle.plot(tau, values, color=GREY, linewidth=1.2)
middle.plot(tau, values.sum(axis=1), color=BLUE, linewidth=2, label="their sum")
best = tau[np.abs(values.sum(axis=1) - 1).argmin()]
middle.plot([best, best], [0, 1], color=ORANGE, linestyle=":")
middle.plot(best, 1, "o", color=ORANGE, label="Xor: the sum is 1")
middle.plot([], [], color=GREY, label="marginals clip(η − τ, 0, 1)")
middle.set(xlabel="multiplier τ of the row", ylim=(0, 3.2))
middle.legend(frameon=False, fontsize=8)
middle.set_title("2. How: one multiplier per row", fontsize=10)

# ---- How far the rows are from holding, pass by pass ---------------------------------------------
scores = 2 * np.random.default_rng(0).normal(size=(20, 20))


def residuals(most, **options):
    """The residual after each number of passes."""
    found = []
    for passes in range(1, most + 1):
        fg = fm.FactorGraph()
        u = fg.variable_from(scores)
        fg.add(fm.Xor(u, axis=1))
        fg.add(fm.AtMostOne(u, axis=0))
        solution = fg.solve(tol=1e-10, max_iter=passes, on_failure="ignore", **options)
        found.append(max(float(solution.primal_residual), 1e-16))
        if solution.converged:
            break
    return found


for name, colour, options in (("ADMM", GREY, {"method": "admm"}), ("factormax", BLUE, {})):
    found = residuals(60, **options)
    right.semilogy(range(1, len(found) + 1), found, color=colour, linewidth=2, label=name)
right.plot(len(found), found[-1], "o", color=BLUE)
right.annotate(
    "exact finish",
    (len(found), found[-1]),
    (12, 4),
    textcoords="offset points",
    fontsize=8,
    color=INK,
)
right.set(xlabel="passes over the graph", ylabel="how far the rows are from holding")
right.legend(frameon=False, fontsize=8)
right.set_title("3. How soon: a 20×20 matching", fontsize=10)
for axes in (left, middle, right):
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=8)
