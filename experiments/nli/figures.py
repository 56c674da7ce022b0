"""The picture of attention, as the paper's Figure 4: two models on the same pair of sentences."""

from __future__ import annotations

from pathlib import Path
from typing import Any

__all__ = ["draw_attention"]


def draw_attention(
    exhibits_a: dict[str, Any],
    exhibits_b: dict[str, Any],
    path: Path,
    *,
    pair: int = 0,
    titles: tuple[str, str] = ("softmax", "LP-sequential"),
) -> None:
    """Draws the attention of two models beside each other, and saves the picture.

    Shown is how the words of the shorter sentence attend to the longer one: their weights sum to 1
    with every kind of attention. A word of the premise is a row, one of the hypothesis a column.

    Args:
        exhibits_a: those of one run, as `NLITask.exhibits` gives them.
        exhibits_b: those of another run on the same data.
        path: where to save the picture.
        pair: which of the exhibited pairs.
        titles: the titles of the two pictures.

    Raises:
        ValueError: if the runs do not exhibit the same pair.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.colors import LinearSegmentedColormap

    both = [exhibits["pairs"][pair] for exhibits in (exhibits_a, exhibits_b)]
    premise, hypothesis = both[0]["premise"], both[0]["hypothesis"]
    if (premise, hypothesis) != (both[1]["premise"], both[1]["hypothesis"]):
        raise ValueError(f"The runs exhibit different sentences as pair {pair}: not the same data.")
    shorter_first = len(premise) <= len(hypothesis)

    # From exactly white, so that a weight of 0 can be told from a small one.
    colours = LinearSegmentedColormap.from_list("weights", ["white", "#9ecae1", "#08306b"])
    longest = max(len(word) for word in hypothesis)
    size = (0.72 * len(hypothesis) + 2.6, 0.36 * len(premise) + 0.11 * longest + 1.0)
    figure, axes = plt.subplots(1, 2, figsize=size, sharey=True, layout="compressed")
    for ax, shown, title in zip(axes, both, titles, strict=True):
        weights = shown["to_hypothesis" if shorter_first else "to_premise"]
        image = ax.imshow(weights, cmap=colours, vmin=0, vmax=1)
        ax.set_xticks(range(len(hypothesis)), hypothesis, rotation=90, fontsize=11)
        ax.set_yticks(range(len(premise)), premise, fontsize=11)
        ax.set_xticks([i - 0.5 for i in range(1, len(hypothesis))], minor=True)
        ax.set_yticks([i - 0.5 for i in range(1, len(premise))], minor=True)
        ax.grid(which="minor", color="#e8e8e8", linewidth=0.6)
        ax.tick_params(which="both", length=0)
        ax.spines[:].set_color("#bbbbbb")
        ax.set_title(title, fontsize=13)
        ax.set_xlabel("hypothesis", fontsize=11, color="#666666")
    axes[0].set_ylabel("premise", fontsize=11, color="#666666")
    figure.colorbar(image, ax=axes, shrink=0.8, pad=0.02).outline.set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150, facecolor="white", bbox_inches="tight")
    plt.close(figure)
