"""The few trees that make up one solution: arcs over the words, each tree with its probability.

Who has the telescope, and who is on the hill? The scores of an ambiguous sentence are close to a
tie, so the solution of DepTree is not one tree but a mixture of a few: those that a reader would
think of. The picture shows the marginals beside them.

    python examples/tree_structures.py
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

import factormax as fm

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WORDS = "She saw the man on the hill with a telescope".split()
INK, SURE, OPEN = "#333333", "#A0A8B0", "#1F6FB5"  # OPEN: the trees differ in it


def arc_scores() -> np.ndarray:
    """`scores[m, h]`: how well h suits as the head of m; the diagonal is the root."""
    scores = np.full((len(WORDS), len(WORDS)), -1.0)
    likely = {
        (0, 1): 2.0,  # She ← saw
        (1, 1): 2.0,  # saw hangs from the root
        (2, 3): 2.0,  # the ← man
        (3, 1): 2.0,  # man ← saw
        (4, 3): 1.2,  # the man is on the hill,
        (4, 1): 1.0,  # or that is where she saw him
        (5, 6): 2.0,  # the ← hill
        (6, 4): 2.0,  # hill ← on
        (7, 1): 1.2,  # she has the telescope,
        (7, 3): 1.0,  # or the man has it,
        (7, 6): 0.9,  # or it stands on the hill
        (8, 9): 2.0,  # a ← telescope
        (9, 7): 2.0,  # telescope ← with
    }
    for arc, score in likely.items():
        scores[arc] = score
    return scores


def solve() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Marginals `(n, n)`, trees `(K, n, n)` and their probabilities `(K,)`."""
    fg = fm.FactorGraph()
    u = fg.variable_from(arc_scores())
    tree = fg.add(fm.DepTree(u, projective=True, single_root=True))
    fg.solve()
    return u.value, tree.structures, tree.probs


def describe(tree: np.ndarray) -> str:
    heads = tree.argmax(axis=1)
    return ", ".join(
        f"{word} ← {'root' if h == m else WORDS[h]}"
        for m, (word, h) in enumerate(zip(WORDS, heads, strict=True))
    )


# ---- The picture ---------------------------------------------------------------------------------


def draw(path: Path, marginals: np.ndarray, trees: np.ndarray, probs: np.ndarray) -> None:
    """The trees on the left, one below the other, their average on the right."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure = plt.figure(figsize=(13, 0.6 + 1.45 * len(trees)), layout="constrained")
    grid = figure.add_gridspec(len(trees), 2, width_ratios=[1.2, 1])
    for k, (tree, prob) in enumerate(zip(trees, probs, strict=True)):
        ax = figure.add_subplot(grid[k, 0])
        draw_arcs(ax, tree, marginals)
        ax.text(-0.5, 1.8, f"{prob:.2f}", fontsize=17, fontweight="bold", va="top", color=INK)
    draw_matrix(figure.add_subplot(grid[:, 1]), marginals)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110, facecolor="white")
    plt.close(figure)


def draw_arcs(ax: Axes, tree: np.ndarray, marginals: np.ndarray) -> None:
    """An arc from head to modifier, a line from above for the root."""
    from matplotlib.patches import Arc

    for m, h in np.argwhere(tree):
        style = {"color": SURE if marginals[m, h] > 1 - 1e-6 else OPEN, "linewidth": 2}
        if m == h:
            ax.plot([m, m], [0.1, 1.8], **style)
            ax.plot(m, 0.12, "v", markersize=6, **style)
            continue
        width, centre = abs(m - h) - 0.16, (m + h) / 2
        ax.add_patch(Arc((centre, 0.1), width, 0.5 * width, theta2=180, **style))
        ax.plot(centre + np.sign(m - h) * width / 2, 0.12, "v", markersize=6, **style)
    for m, word in enumerate(WORDS):
        ax.text(m, 0, word, ha="center", va="top", fontsize=12, color=INK)
    ax.set(xlim=(-0.6, len(WORDS) - 0.3), ylim=(-0.35, 1.85))
    ax.axis("off")


def draw_matrix(ax: Axes, marginals: np.ndarray) -> None:
    ax.imshow(marginals, cmap="Blues", vmin=0, vmax=1.3, aspect="auto")
    for m, h in np.argwhere(marginals > 0):
        colour = "white" if marginals[m, h] > 0.7 else INK
        ax.text(h, m, f"{marginals[m, h]:.2f}", ha="center", va="center", color=colour)
    places = range(len(WORDS))
    ax.set_xticks(places, WORDS, rotation=35)
    ax.set_yticks(places, WORDS)
    ax.set_xlabel("head (the diagonal is the root)")
    ax.set_title("Their average: the marginals", fontsize=13)
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)


# ---- The command line ----------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    picture = Path(__file__).parent / "output" / "tree_structures.png"
    parser.add_argument("--output", type=Path, default=picture, help="where the picture goes")
    parser.add_argument("--no-plot", action="store_true", help="draw no picture")
    args = parser.parse_args()
    marginals, trees, probs = solve()
    for tree, prob in zip(trees, probs, strict=True):
        print(f"{prob:.2f}  {describe(tree)}")
    if not args.no_plot:
        draw(args.output, marginals, trees, probs)
        print(f"The picture is in {args.output}")


if __name__ == "__main__":
    main()
