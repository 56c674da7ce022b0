"""The table of the page on benchmarks, drawn."""

import re
from pathlib import Path

import matplotlib.pyplot as plt

page = Path("../benchmarks.md").read_text(encoding="utf-8")  # plots are drawn in this folder
table = re.search(r"\| problem \|.*?\n\|---.*?\n(.*?)\n\n", page, re.DOTALL)[1]
rows = [[cell.strip(" `") for cell in line.strip("|").split("|")] for line in table.splitlines()]


def bounds(text):
    """The ends of a range such as "1.2–1.6"."""
    low, _, high = text.partition("–")
    return float(low), float(high or low)


figure, axes = plt.subplots(figsize=(8, 0.27 * len(rows) + 0.8), layout="constrained")
for place, (_, _, own, _, other, ratio) in enumerate(rows):
    for text, colour, size in ((own, "#1F6FB5", 7), (other, "#D9822B", 6)):
        low, high = bounds(text)
        axes.plot([low, high], [place, place], color=colour, linewidth=3, solid_capstyle="round")
        axes.plot((low * high) ** 0.5, place, "o", color=colour, markersize=size)
    ends = bounds(own)[1], bounds(other)[0]
    axes.plot(ends, [place, place], color="#C8CDD2", linewidth=1, zorder=0)
    axes.annotate(
        f"{ratio}×", (bounds(other)[1], place), (8, 0), textcoords="offset points", va="center",
        fontsize=8, color="#555555",
    )  # fmt: skip
axes.plot([], [], "o", color="#1F6FB5", label="factormax")
axes.plot([], [], "o", color="#D9822B", label="the other")
labels = [f"{problem.replace('`', '')}, {what}: {name}" for problem, what, _, name, _, _ in rows]
axes.set_yticks(range(len(rows)), labels, fontsize=7.5)
axes.set_ylim(len(rows) - 0.4, -0.6)
axes.set_xscale("log")
axes.set_xlim(right=6000)
axes.set_xlabel("milliseconds")
axes.grid(axis="x", color="#EEEEEE")
axes.set_axisbelow(True)
for side in ("top", "right", "left"):
    axes.spines[side].set_visible(False)
axes.tick_params(axis="y", length=0)
axes.legend(loc="upper left", frameon=False, fontsize=8)
