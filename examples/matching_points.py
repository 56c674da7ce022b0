"""Learn to match two point sets, with softmax attention and with a sparse one-to-one matching.

Set B is set A after a rotation, a smooth deformation and some noise, in shuffled order. Pairs
differ in size, and some points of either set have no partner. Every point of B carries a short
random vector, and each point of A has to read the vector of its partner (zeros if it has none).
What it reads is the only training signal: the true matching serves to measure, not to train.

Two copies of one small network start from the same weights and see the same data. They differ in
the layer that turns scores into weights:

    softmax     each point of A spreads its attention over all points of B
    factormax   each point of A picks one point of B or none, no point of B is picked twice

You will see a progress bar, a summary on held-out pairs, and where the picture is. Under a minute:

    python examples/matching_points.py
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from tqdm import tqdm

import factormax as fm

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MAX_POINTS = 16  # sets are padded to this many points
BATCH = 48
HELD_OUT = 256
LEARNING_RATE = 3e-3
LIMIT = 1.01  # a sum of weights above this counts as above 1

# ---- The two layers ------------------------------------------------------------------------------
# Scores are (batch, m, n + 1); the last column is "no partner". The mask is False on padding.


def softmax_layer(scores: Tensor, mask: Tensor) -> Tensor:
    """Softmax over each row: every point of A on its own."""
    weights = torch.softmax(scores.masked_fill(~mask, -1e9), dim=-1)
    return weights * mask


def matching_layer(scores: Tensor, mask: Tensor) -> Tensor:
    """The LP-SparseMAP matching: rows sum to 1, columns (but the last) to at most 1."""
    fg = fm.FactorGraph(batch_dims=1)
    u = fg.variable_from(scores, mask=mask)
    fg.add(fm.Xor(u, axis=1))
    fg.add(fm.AtMostOne(u[:, :-1], axis=0))
    fg.solve()
    return u.value


Layer = Callable[[Tensor, Tensor], Tensor]
LAYERS: dict[str, Layer] = {"softmax": softmax_layer, "factormax": matching_layer}

# ---- The data ------------------------------------------------------------------------------------


@dataclass
class Batch:
    """Pairs of point sets, padded to n points each."""

    a: Tensor  # (batch, n, 2)
    b: Tensor  # (batch, n, 2)
    in_a: Tensor  # (batch, n), False on padding
    in_b: Tensor  # (batch, n)
    values: Tensor  # (batch, n, 4), what the points of B carry
    wanted: Tensor  # (batch, n, 4), what the points of A should read
    truth: Tensor  # (batch, n, n + 1), 0/1, "no partner" last; for measuring only

    @property
    def mask(self) -> Tensor:
        """Which scores are in the problem, `(batch, n, n + 1)`."""
        return self.in_a[:, :, None] & F.pad(self.in_b, (0, 1), value=True)[:, None, :]


def make_batch(size: int, random: torch.Generator) -> Batch:
    """Pairs with 9 to 14 points in common, and up to 2 more in each set that have no partner."""
    n = MAX_POINTS

    def uniform(*shape: int) -> Tensor:
        return torch.rand(size, *shape, generator=random)

    def normal(*shape: int) -> Tensor:
        return torch.randn(size, *shape, generator=random)

    shared = torch.randint(9, 15, (size, 1), generator=random)
    extra_a, extra_b = torch.randint(0, 3, (2, size, 1), generator=random)
    place = torch.arange(n)
    common, in_a, in_b = place < shared, place < shared + extra_a, place < shared + extra_b

    a = 2 * uniform(n, 2) - 1
    deformed = a + 0.08 * torch.sin(1.5 * a @ normal(2, 2) + 2 * math.pi * uniform(1, 2))
    b = torch.where(common[..., None], deformed, 2 * uniform(n, 2) - 1)
    b = rotate(b + 0.015 * normal(n, 2), 2 * math.pi * uniform())

    order = (uniform(n) + 2 * ~in_b).argsort(dim=1)  # shuffled, padding last
    b = b.gather(1, order[..., None].expand(-1, -1, 2))
    partner = (order[:, None, :] == place[:, None]) & common[:, :, None]
    alone = in_a & ~common
    truth = torch.cat([partner, alone[..., None]], dim=2).float()
    values = normal(n, 4)
    return Batch(a, b, in_a, in_b, values, partner.float() @ values, truth)


def rotate(points: Tensor, angle: Tensor) -> Tensor:
    """Rotates each set of points, `(batch, n, 2)`, by its angle, `(batch,)`."""
    c, s = torch.cos(angle), torch.sin(angle)
    return points @ torch.stack([c, s, -s, c], dim=-1).view(-1, 2, 2)


# ---- The network ---------------------------------------------------------------------------------


class PointEncoder(nn.Module):
    """Embeds each point by its distances to the others, in two rounds of messages.

    The embedding does not change when the set is rotated, and follows it when it is shuffled.
    """

    def __init__(self, hidden: int = 32, rounds: int = 2, bins: int = 12) -> None:
        super().__init__()
        self.hidden = hidden
        self.register_buffer("centres", torch.linspace(0.0, 2.2, bins))
        self.distance = nn.ModuleList(nn.Linear(bins, hidden) for _ in range(rounds))
        self.ends = nn.ModuleList(nn.Linear(hidden, 2 * hidden) for _ in range(rounds))
        self.update = nn.ModuleList(
            nn.Sequential(nn.Linear(2 * hidden, hidden), nn.SiLU(), nn.Linear(hidden, hidden))
            for _ in range(rounds)
        )
        self.norm = nn.ModuleList(nn.LayerNorm(hidden) for _ in range(rounds))

    def forward(self, points: Tensor, present: Tensor) -> Tensor:
        offsets = torch.cdist(points, points)[..., None] - self.centres
        bumps = torch.exp(-((offsets / 0.2) ** 2))
        others = present[:, :, None] & present[:, None, :] & ~torch.eye(points.shape[1]).bool()
        h = points.new_zeros(*points.shape[:2], self.hidden)
        for distance, ends, update, norm in zip(
            self.distance, self.ends, self.update, self.norm, strict=True
        ):
            to, fro = ends(h).chunk(2, dim=-1)
            messages = F.silu(distance(bumps) + to[:, :, None] + fro[:, None, :])
            heard = (messages * others[..., None]).sum(dim=2) / 4
            h = norm(h + update(torch.cat([h, heard], dim=-1)))
        return h


class Matcher(nn.Module):
    """Scores every pair of points by how near their embeddings are, and hands that to a layer."""

    def __init__(self, layer: Layer, hidden: int = 32) -> None:
        super().__init__()
        self.layer = layer
        self.encode = PointEncoder(hidden)
        self.project = nn.Linear(hidden, hidden, bias=False)
        self.no_partner = nn.Linear(hidden, 1)
        self.log_scale = nn.Parameter(torch.tensor(1.5))

    def scores(self, batch: Batch) -> Tensor:
        """How well each point of A fits each of B, and "no partner"; `(batch, n, n + 1)`."""
        h_a, h_b = self.encode(batch.a, batch.in_a), self.encode(batch.b, batch.in_b)
        gaps = self.project(h_a)[:, :, None] - self.project(h_b)[:, None, :]
        nearness = -self.log_scale.exp() * (gaps**2).mean(dim=-1)
        return torch.cat([nearness, self.no_partner(h_a) - 2], dim=2)

    def forward(self, batch: Batch) -> Tensor:
        return self.layer(self.scores(batch), batch.mask)


def reading_loss(weights: Tensor, batch: Batch) -> Tensor:
    """The mean squared distance of what the points of A read from what they should read."""
    errors = weights[:, :, :-1] @ batch.values - batch.wanted
    return (errors**2).sum() / batch.in_a.sum()


# ---- Training and measuring ----------------------------------------------------------------------


@dataclass
class Metrics:
    """What a matcher does on held-out pairs."""

    accuracy: float  # % of points of A with their largest weight where it belongs
    crowded: float  # % of points of B that receive more weight than 1 in all
    choices: float  # nonzero weights per point of A


@torch.no_grad()
def measure(weights: Tensor, batch: Batch) -> Metrics:
    sums = weights[:, :, :-1].sum(dim=1)
    return Metrics(
        accuracy=percentage(is_right(weights, batch), batch.in_a),
        crowded=percentage(sums > LIMIT, batch.in_b),
        choices=((weights > 1e-3).sum() / batch.in_a.sum()).item(),
    )


def is_right(weights: Tensor, batch: Batch) -> Tensor:
    """Whether the largest weight of each point of A is on the truth, `(batch, n)`."""
    return weights.argmax(dim=2) == batch.truth.argmax(dim=2)


def percentage(hits: Tensor, among: Tensor) -> float:
    return 100 * (hits & among).sum().item() / among.sum().item()


Models = dict[str, Matcher]
History = dict[int, dict[str, Metrics]]  # by step, then by layer


def train(steps: int, seed: int, held_out: Batch) -> tuple[Models, History]:
    """Trains one matcher per layer, side by side on the same batches."""
    models: Models = {}
    for name, layer in LAYERS.items():
        torch.manual_seed(seed)  # the same initial weights
        models[name] = Matcher(layer)
    optimizers = {k: torch.optim.AdamW(m.parameters(), LEARNING_RATE) for k, m in models.items()}
    schedules = [
        torch.optim.lr_scheduler.OneCycleLR(o, LEARNING_RATE, total_steps=steps, pct_start=0.1)
        for o in optimizers.values()
    ]
    random = torch.Generator().manual_seed(seed)
    history: History = {}
    bar = tqdm(range(1, steps + 1), desc="Training", unit="step", dynamic_ncols=True)
    for step in bar:
        batch = make_batch(BATCH, random)
        for name, model in models.items():
            optimizers[name].zero_grad()
            reading_loss(model(batch), batch).backward()
            optimizers[name].step()
        for schedule in schedules:
            schedule.step()
        if step % max(1, steps // 25) == 0 or step in (1, steps):
            with torch.no_grad():
                now = {name: measure(m(held_out), held_out) for name, m in models.items()}
            history[step] = now
            bar.set_postfix_str(", ".join(f"{k} {v.accuracy:.0f} %" for k, v in now.items()))
    return models, history


def layer_share(model: Matcher, repeats: int = 9) -> float:
    """The percentage of a training step, forward and backward, that is spent in the layer."""
    batch = make_batch(BATCH, torch.Generator().manual_seed(0))
    scores = model.scores(batch).detach().requires_grad_()

    def layer_alone() -> None:
        reading_loss(model.layer(scores, batch.mask), batch).backward()

    def whole_step() -> None:
        reading_loss(model(batch), batch).backward()

    def seconds(call: Callable[[], None]) -> float:
        times = []
        for _ in range(repeats):
            start = time.perf_counter()
            call()
            times.append(time.perf_counter() - start)
        return sorted(times)[repeats // 2]

    return 100 * seconds(layer_alone) / seconds(whole_step)


@torch.no_grad()
def repaired_accuracy(model: Matcher, held_out: Batch) -> float:
    """Accuracy if the scores are forced into a one-to-one matching, but only after training.

    As the scores grow, LP-SparseMAP tends to the matching with the highest score.
    """
    weights = matching_layer(100 * model.scores(held_out), held_out.mask)
    return measure(weights, held_out).accuracy


def summary(models: Models, final: dict[str, Metrics], held_out: Batch) -> str:
    def line(title: str, show: Callable[[str], str]) -> str:
        return f"  {title:<42}" + "".join(f"{show(name):>12}" for name in models)

    repaired = repaired_accuracy(models["softmax"], held_out)
    return "\n".join(
        [
            line(f"on {HELD_OUT} held-out pairs", str),
            line("points of A matched correctly", lambda k: f"{final[k].accuracy:.1f} %"),
            line(
                "points of B with a sum of weights above 1", lambda k: f"{final[k].crowded:.1f} %"
            ),
            line("nonzero weights per point of A", lambda k: f"{final[k].choices:.1f}"),
            line("layer's share of a training step", lambda k: f"{layer_share(models[k]):.0f} %"),
            f"Made one-to-one only after training, softmax gets {repaired:.1f} % right.",
        ]
    )


# ---- The picture ---------------------------------------------------------------------------------

RIGHT, WRONG, INK, PALE = "#0072B2", "#E8590C", "#222222", "#8C8C8C"


@dataclass
class Pair:
    """One pair without padding, the points of B ordered so that the truth is a diagonal."""

    a: Tensor  # (m, 2)
    b: Tensor  # (n, 2)
    truth: Tensor  # (m, n + 1)
    weights: dict[str, Tensor]  # (m, n + 1), by layer


@torch.no_grad()
def typical_pair(models: Models, held_out: Batch) -> Pair:
    """The held-out pair on which all models do closest to what they do on average."""
    weights = {name: model(held_out) for name, model in models.items()}
    points = held_out.in_a.sum(dim=1)
    unusual = torch.zeros(len(points))
    for w in weights.values():
        right = (is_right(w, held_out) & held_out.in_a).sum(dim=1)
        unusual += (right / points - right.sum() / points.sum()).abs()
    some_alone = held_out.truth[:, :, -1].sum(dim=1) > 0
    i = int(torch.where(some_alone, unusual, math.inf).argmin())

    rows, columns = held_out.in_a[i], held_out.in_b[i]
    partner = held_out.truth[i, :, :-1]
    place = torch.where(partner.sum(dim=0) > 0, partner.argmax(dim=0), MAX_POINTS)
    order = place[columns].argsort()

    def trim(matrix: Tensor) -> Tensor:
        return torch.cat([matrix[rows, :-1][:, columns][:, order], matrix[rows, -1:]], dim=1)

    return Pair(
        held_out.a[i][rows],
        held_out.b[i][columns][order],
        trim(held_out.truth[i]),
        {name: trim(w[i]) for name, w in weights.items()},
    )


PAIRED = {"ms": 8, "mfc": INK, "mec": "white", "mew": 0.8, "zorder": 5}
UNPAIRED = {"ms": 8, "mfc": "white", "mec": INK, "mew": 1.8, "zorder": 5}
RING = {"ms": 18, "mfc": "none", "mew": 2.4}
TITLES = {
    "truth": "The truth",
    "softmax": "Softmax attention",
    "factormax": "factormax: sparse and one to one",
}


def draw(path: Path, pair: Pair, history: History) -> None:
    """Saves the picture: one pair as lines and as matrices, and below the course of training."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    plt.rcParams.update({"font.size": 12.5, "text.color": INK, "axes.labelcolor": INK})
    figure = plt.figure(figsize=(13, 10))
    draw_legend(figure)
    outer = {"left": 0.05, "right": 0.985, "wspace": 0.16}
    top = figure.add_gridspec(1, 3, top=0.86, bottom=0.625, **outer)
    middle = figure.add_gridspec(
        2, 3, top=0.6, bottom=0.3, height_ratios=[1, 5], hspace=0.06, **outer
    )
    bottom = figure.add_gridspec(1, 3, top=0.215, bottom=0.06, **outer)
    for k, (name, weights) in enumerate({"truth": pair.truth, **pair.weights}.items()):
        draw_lines(figure.add_subplot(top[k]), name, pair, weights)
        draw_sums(figure.add_subplot(middle[0, k]), weights)
        draw_matrix(figure.add_subplot(middle[1, k]), pair, weights)
    axes = [figure.add_subplot(bottom[k]) for k in range(3)]
    draw_curve(axes[0], history, "accuracy", "Points of A matched correctly", " %")
    draw_curve(axes[1], history, "crowded", "Points of B with a sum above 1", " %")
    draw_curve(axes[2], history, "choices", "Nonzero weights per point of A", "")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120, facecolor="white")
    plt.close(figure)


def draw_legend(figure: Figure) -> None:
    from matplotlib.lines import Line2D

    figure.suptitle(
        "Which points of two sets belong together? A typical held-out pair", fontsize=19, y=0.985
    )
    ring = {**RING, "ms": 13, "mec": PALE}
    handles = [
        Line2D([], [], color=RIGHT, linewidth=3, label="weight on the truth"),
        Line2D([], [], color=WRONG, linewidth=3, label="weight elsewhere"),
        Line2D([], [], linestyle="", marker="o", **UNPAIRED, label="point without a partner"),
        Line2D([], [], linestyle="", marker="o", **ring, label="weight on “no partner”"),
    ]
    place = {"loc": "upper center", "bbox_to_anchor": (0.5, 0.958)}
    figure.legend(handles=handles, ncols=4, frameon=False, columnspacing=2.5, **place)


def draw_lines(ax: Axes, name: str, pair: Pair, weights: Tensor) -> None:
    """Both point sets, A left and B right, with a line for every weight."""
    a, b = (p - (p.amin(dim=0) + p.amax(dim=0)) / 2 for p in (pair.a, pair.b))
    (width_a, height_a), (width_b, height_b) = a.amax(dim=0).tolist(), b.amax(dim=0).tolist()
    centre_b, height = width_a + 1.1 + width_b, max(height_a, height_b)
    b = b + torch.tensor([centre_b, 0.0])
    for i, j in (weights > 1e-3).nonzero().tolist():
        right = bool(pair.truth[i, j])
        style = {"color": RIGHT if right else WRONG, "alpha": weights[i, j].item()}
        if j == len(b):
            ax.plot(*a[i], "o", **style, **RING)
        else:
            ax.plot(*torch.stack([a[i], b[j]]).T, linewidth=2.2, zorder=3 - right, **style)
    alone_a, alone_b = pair.truth[:, -1] > 0, pair.truth[:, :-1].sum(dim=0) == 0
    for points, alone in ((a, alone_a), (b, alone_b)):
        ax.plot(*points[~alone].T, "o", **PAIRED)
        ax.plot(*points[alone].T, "o", **UNPAIRED)
    ax.text(0, -height - 0.2, "set A", ha="center", va="top")
    ax.text(centre_b, -height - 0.2, "set B", ha="center", va="top")
    right = int((weights.argmax(dim=1) == pair.truth.argmax(dim=1)).sum())
    ax.set_title(f"{TITLES[name]}\n", fontsize=14.5, fontweight="bold")
    score = "never shown in training" if name == "truth" else f"{right} of {len(a)} right"
    ax.annotate(score, (0.5, 1), (0, 9), "axes fraction", "offset points", ha="center")
    ax.set(xlim=(-width_a - 0.15, centre_b + width_b + 0.15), ylim=(-height - 0.45, height + 0.15))
    ax.set_aspect("equal")
    ax.axis("off")


def draw_sums(ax: Axes, weights: Tensor) -> None:
    """How much weight each point of B receives."""
    sums = weights[:, :-1].sum(dim=0)
    colours = [WRONG if s > LIMIT else PALE for s in sums]
    ax.bar(range(len(sums)), sums, color=colours, width=0.7)
    ax.axhline(1, color=INK, linewidth=1, linestyle=":")
    ax.set(xlim=(-0.5, len(sums) + 0.5), ylim=(0, 2), yticks=[0, 1, 2], xticks=[])
    ax.set_ylabel("sum", labelpad=2)
    ax.spines[["top", "right"]].set_visible(False)


def draw_matrix(ax: Axes, pair: Pair, weights: Tensor) -> None:
    """The weights as a heat map, blue on the truth and orange off it."""
    from matplotlib.colors import to_rgb

    right, wrong = torch.tensor([to_rgb(RIGHT), to_rgb(WRONG)])
    colour = torch.where(pair.truth[..., None] > 0, right, wrong)
    w = weights[..., None].clamp(0, 1)
    ax.imshow((1 - w + w * colour).numpy(), aspect="auto", interpolation="nearest")
    m, n = weights[:, :-1].shape
    ax.set_xticks([j - 0.5 for j in range(n + 2)], minor=True)
    ax.set_yticks([i - 0.5 for i in range(m + 1)], minor=True)
    ax.grid(which="minor", color="#DDDDDD", linewidth=0.7)
    ax.axvline(n - 0.5, color=INK, linewidth=1.5)
    ax.tick_params(which="both", length=0)
    ax.set_xticks([(n - 1) / 2, n], ["points of B", "none"])
    ax.set_yticks([])
    ax.set_ylabel("points of A")


def draw_curve(ax: Axes, history: History, field: str, title: str, unit: str) -> None:
    """One metric while training, on held-out pairs."""
    steps = list(history)
    curves = {name: [getattr(h[name], field) for h in history.values()] for name in LAYERS}
    for name, style, colour in (("softmax", "--", PALE), ("factormax", "-", INK)):
        values = curves[name]
        upper = values[-1] == max(c[-1] for c in curves.values())
        ax.plot(steps, values, style, color=colour, linewidth=2.4, clip_on=False)
        ax.annotate(
            f"{name} {values[-1]:.1f}{unit}",
            (steps[-1], values[-1]),
            xytext=(7, 2 if upper else -2),
            textcoords="offset points",
            color=colour,
            va="center",
        )
    low = min(40, *map(min, curves.values())) if field == "accuracy" else 0
    high = 100 if field == "accuracy" else 1.1 * max(map(max, curves.values()))
    ax.set(xlim=(0, 1.75 * steps[-1]), ylim=(low, high))
    ax.set_xticks([0, steps[-1]])
    ax.set_xlabel("training steps", x=0.29, labelpad=-10)
    ax.set_title(title, fontsize=13.5)
    ax.spines[["top", "right"]].set_visible(False)
    ax.spines["bottom"].set_bounds(0, steps[-1])


# ---- The command line ----------------------------------------------------------------------------


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    picture = Path(__file__).parent / "output" / "matching_points.png"
    parser.add_argument("--steps", type=int, default=600, help="training steps (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="for weights and data (%(default)s)")
    parser.add_argument("--output", type=Path, default=picture, help="where the picture goes")
    parser.add_argument("--no-plot", action="store_true", help="draw no picture")
    args = parser.parse_args()
    if args.steps < 1:
        parser.error("--steps must be at least 1")
    return args


def main() -> None:
    args = parse_arguments()
    torch.set_num_threads(1)  # tensors this small gain nothing from more; factormax uses all cores
    held_out = make_batch(HELD_OUT, torch.Generator().manual_seed(args.seed + 1))
    models, history = train(args.steps, args.seed, held_out)
    print(summary(models, history[args.steps], held_out))
    if not args.no_plot:
        draw(args.output, typical_pair(models, held_out), history)
        print(f"The picture is in {args.output}")


if __name__ == "__main__":
    main()
