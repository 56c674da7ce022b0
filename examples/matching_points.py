"""Learn to match two point sets, with softmax attention and with a sparse one-to-one matching.

Set B is set A after a rotation, a smooth deformation and some noise, in shuffled order. Pairs
differ in size, and some points of either set have no partner. Every point of B carries a short
random vector, and each point of A has to read the vector of its partner (zeros if it has none).
That is the only training signal: the network is never told who matches whom.

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
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from tqdm import tqdm

import factormax as fm

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MAX_POINTS = 16  # sets are padded to this many points
BATCH = 48
HELD_OUT = 256
LEARNING_RATE = 3e-3

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
    truth: Tensor  # (batch, n, n + 1), 0/1; the last column is "no partner"
    values: Tensor  # (batch, n, 4), what the points of B carry

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
    return Batch(a, b, in_a, in_b, truth, normal(n, 4))


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
    """How far what each point of A reads is from what its partner carries."""
    errors = (weights - batch.truth)[:, :, :-1] @ batch.values
    return (errors**2).sum() / batch.in_a.sum()


# ---- Training and measuring ----------------------------------------------------------------------


@dataclass
class Curves:
    """Held-out accuracy while training."""

    steps: list[int] = field(default_factory=list)
    accuracy: dict[str, list[float]] = field(default_factory=lambda: {k: [] for k in LAYERS})


def train(steps: int, seed: int, held_out: Batch) -> tuple[dict[str, Matcher], Curves]:
    """Trains one matcher per layer, side by side on the same batches."""
    models: dict[str, Matcher] = {}
    for name, layer in LAYERS.items():
        torch.manual_seed(seed)  # the same initial weights
        models[name] = Matcher(layer)
    optimizers = [torch.optim.AdamW(m.parameters(), LEARNING_RATE) for m in models.values()]
    schedules = [
        torch.optim.lr_scheduler.OneCycleLR(o, LEARNING_RATE, total_steps=steps, pct_start=0.1)
        for o in optimizers
    ]
    random = torch.Generator().manual_seed(seed)
    curves = Curves()
    every = max(1, steps // 25)
    bar = tqdm(range(1, steps + 1), desc="training both", unit="step", ncols=100)
    for step in bar:
        batch = make_batch(BATCH, random)
        for model, optimizer, schedule in zip(
            models.values(), optimizers, schedules, strict=True
        ):
            optimizer.zero_grad()
            reading_loss(model(batch), batch).backward()
            optimizer.step()
            schedule.step()
        if step == 1 or step % every == 0 or step == steps:
            curves.steps.append(step)
            for name, model in models.items():
                with torch.no_grad():
                    right = is_right(model(held_out), held_out)
                curves.accuracy[name].append(100 * ratio(right, held_out.in_a))
            bar.set_postfix_str(
                ", ".join(f"{name} {acc[-1]:.0f} %" for name, acc in curves.accuracy.items())
            )
    return models, curves


def ratio(hits: Tensor, among: Tensor) -> float:
    return (hits & among).sum().item() / among.sum().item()


def is_right(weights: Tensor, batch: Batch) -> Tensor:
    """Whether the largest weight of each point of A is on the truth, `(batch, n)`."""
    return weights.argmax(dim=2) == batch.truth.argmax(dim=2)


@dataclass
class Report:
    """What a matcher does on held-out pairs."""

    accuracy: float  # % of points of A whose largest weight is right
    crowded: float  # % of points of B whose weights sum to more than 1
    choices: float  # nonzero weights per point of A
    layer_share: float  # % of the time of a training step that its layer takes


def measure(model: Matcher, held_out: Batch) -> Report:
    with torch.no_grad():
        weights = model(held_out)
    return Report(
        accuracy=100 * ratio(is_right(weights, held_out), held_out.in_a),
        crowded=100 * ratio(weights[:, :, :-1].sum(dim=1) > 1 + 1e-3, held_out.in_b),
        choices=((weights > 1e-3).sum() / held_out.in_a.sum()).item(),
        layer_share=100 * layer_share(model),
    )


def layer_share(model: Matcher, repeats: int = 7) -> float:
    """The part of a training step, forward and backward, that is spent in the layer."""
    batch = make_batch(BATCH, torch.Generator().manual_seed(0))
    scores = model.scores(batch).detach().requires_grad_()

    def layer_alone() -> None:
        model.layer(scores, batch.mask).sum(dim=1).square().sum().backward()

    def whole_step() -> None:
        reading_loss(model(batch), batch).backward()

    def median_seconds(call: Callable[[], None]) -> float:
        seconds = []
        for _ in range(repeats):
            start = time.perf_counter()
            call()
            seconds.append(time.perf_counter() - start)
        return sorted(seconds)[repeats // 2]

    return median_seconds(layer_alone) / median_seconds(whole_step)


def repaired_accuracy(model: Matcher, held_out: Batch) -> float:
    """Accuracy if the scores get the best one-to-one matching only after training.

    LP-SparseMAP tends to the highest-scoring matching as the scores grow.
    """
    with torch.no_grad():
        weights = matching_layer(100 * model.scores(held_out), held_out.mask)
    return 100 * ratio(is_right(weights, held_out), held_out.in_a)


def summary(reports: dict[str, Report], repaired: float) -> str:
    soft, sparse = reports["softmax"], reports["factormax"]
    rows = [
        ("points matched correctly", f"{soft.accuracy:.1f} %", f"{sparse.accuracy:.1f} %"),
        ("points of B claimed more than once", f"{soft.crowded:.1f} %", f"{sparse.crowded:.1f} %"),
        ("nonzero weights per point of A", f"{soft.choices:.1f}", f"{sparse.choices:.1f}"),
        (
            "share of a training step in the layer",
            f"{soft.layer_share:.0f} %",
            f"{sparse.layer_share:.0f} %",
        ),
    ]
    lines = [f"{'On ' + str(HELD_OUT) + ' held-out pairs':<40}{'softmax':>10}{'factormax':>12}"]
    lines += [f"{name:<40}{left:>10}{right:>12}" for name, left, right in rows]
    lines.append(
        f"Forcing the softmax scores into a one-to-one matching after training gives "
        f"{repaired:.1f} %."
    )
    return "\n".join(lines)


# ---- The picture ---------------------------------------------------------------------------------

RIGHT, WRONG, INK, PALE = "#0072B2", "#E8590C", "#222222", "#9A9A9A"


@dataclass
class Pair:
    """One pair without padding, the points of B ordered so that the truth is a diagonal."""

    a: Tensor  # (m, 2)
    b: Tensor  # (n, 2)
    truth: Tensor  # (m, n + 1)
    weights: dict[str, Tensor]  # (m, n + 1) by name


def typical_pair(models: dict[str, Matcher], held_out: Batch) -> Pair:
    """The held-out pair on which both models do closest to what they do on average."""
    with torch.no_grad():
        weights = {name: model(held_out) for name, model in models.items()}
    distance = torch.zeros(len(held_out.a))
    for w in weights.values():
        right = (is_right(w, held_out) & held_out.in_a).sum(dim=1)
        points = held_out.in_a.sum(dim=1)
        distance += (right / points - right.sum() / points.sum()).abs()
    some_alone = held_out.truth[:, :, -1].sum(dim=1) > 0
    i = int(torch.where(some_alone, distance, 9.0).argmin())

    rows, columns = held_out.in_a[i], held_out.in_b[i]
    partner = held_out.truth[i, :, :-1]
    place = torch.where(partner.sum(dim=0) > 0, partner.argmax(dim=0), MAX_POINTS)
    order = place[columns].argsort()

    def trimmed(matrix: Tensor) -> Tensor:
        inner = matrix[rows, :-1][:, columns][:, order]
        return torch.cat([inner, matrix[rows, -1:]], dim=1)

    return Pair(
        held_out.a[i][rows],
        held_out.b[i][columns][order],
        trimmed(held_out.truth[i]),
        {name: trimmed(w[i]) for name, w in weights.items()},
    )


def draw_lines(ax: Axes, pair: Pair, weights: Tensor) -> None:
    """Both point sets, A left and B right, with a line for every weight."""
    a, b = pair.a - pair.a.mean(dim=0), pair.b - pair.b.mean(dim=0) + torch.tensor([3.4, 0.0])
    for i, row in enumerate(weights[:, :-1].tolist()):
        for j, weight in enumerate(row):
            if weight > 1e-3:
                right = pair.truth[i, j] > 0
                ax.plot(
                    *torch.stack([a[i], b[j]]).T,
                    color=RIGHT if right else WRONG,
                    alpha=weight,
                    linewidth=1.8,
                    zorder=2 if right else 3,
                )
    for i, weight in enumerate(weights[:, -1].tolist()):
        colour = RIGHT if pair.truth[i, -1] > 0 else WRONG
        if weight > 1e-3:
            ax.plot(*a[i], "o", ms=15, mfc="none", mec=colour, mew=2, alpha=weight, zorder=4)
    for points, alone in (
        (a, pair.truth[:, -1] > 0),
        (b, pair.truth[:, :-1].sum(dim=0) == 0),
    ):
        ax.plot(*points[~alone].T, "o", ms=7, mfc=INK, mec="white", mew=0.8, zorder=5)
        ax.plot(*points[alone].T, "o", ms=7, mfc="white", mec=INK, mew=1.4, zorder=5)
    ax.text(0, -1.62, "set A", ha="center", va="top", color=INK)
    ax.text(3.4, -1.62, "set B", ha="center", va="top", color=INK)
    ax.set(xlim=(-1.5, 4.9), ylim=(-1.95, 1.6), aspect="equal")
    ax.axis("off")


def draw_matrix(ax: Axes, pair: Pair, weights: Tensor) -> None:
    """The weights as a heat map, blue on the truth and orange off it."""
    from matplotlib.colors import to_rgb

    colour = torch.where(
        pair.truth[..., None] > 0, torch.tensor(to_rgb(RIGHT)), torch.tensor(to_rgb(WRONG))
    )
    w = weights[..., None].clamp(0, 1)
    ax.imshow(((1 - w) + w * colour).numpy(), aspect="auto", interpolation="nearest")
    m, columns = weights.shape
    ax.set_xticks([x - 0.5 for x in range(columns + 1)], minor=True)
    ax.set_yticks([y - 0.5 for y in range(m + 1)], minor=True)
    ax.grid(which="minor", color="#E4E4E4", linewidth=0.6)
    ax.axvline(columns - 1.5, color=INK, linewidth=1)
    ax.tick_params(which="both", length=0)
    ax.set_xticks([(columns - 2) / 2, columns - 1], ["points of B", "none"])
    ax.set_yticks([])


def draw(
    path: Path, pair: Pair, curves: Curves, reports: dict[str, Report]
) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    plt.rcParams.update({"font.size": 11, "axes.titlesize": 13, "text.color": INK})
    figure = plt.figure(figsize=(13, 7.4), layout="constrained")
    grid = figure.add_gridspec(2, 4, width_ratios=[1, 1, 1, 0.95], height_ratios=[1, 1])
    panels = {"the truth": pair.truth, **pair.weights}
    for k, (name, weights) in enumerate(panels.items()):
        ax = figure.add_subplot(grid[0, k])
        draw_lines(ax, pair, weights)
        ax.set_title(name, fontweight="bold")
        ax = figure.add_subplot(grid[1, k])
        draw_matrix(ax, pair, weights)
        if k == 0:
            ax.set_ylabel("points of A")
    draw_curves(figure.add_subplot(grid[0, 3]), curves)
    draw_table(figure.add_subplot(grid[1, 3]), reports)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120, facecolor="white")
    plt.close(figure)


def draw_curves(ax: Axes, curves: Curves) -> None:
    for name, style, colour in (("factormax", "-", INK), ("softmax", "--", PALE)):
        accuracy = curves.accuracy[name]
        ax.plot(curves.steps, accuracy, style, color=colour, linewidth=2.2)
        ax.annotate(name, (curves.steps[-1], accuracy[-1]), color=colour)
    ax.set(ylim=(0, 100), xlabel="training steps")
    ax.set_title("correct matches, held out (%)")
    ax.spines[["top", "right"]].set_visible(False)


def draw_table(ax: Axes, reports: dict[str, Report]) -> None:
    ax.axis("off")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    here = Path(__file__).parent
    parser.add_argument("--steps", type=int, default=500, help="training steps (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of weights and data (%(default)s)")
    parser.add_argument("--output", type=Path, default=here / "output" / "matching_points.png")
    parser.add_argument("--no-plot", action="store_true", help="skip the picture")
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    torch.set_num_threads(1)  # tensors this small gain nothing from more; factormax uses all cores
    held_out = make_batch(HELD_OUT, torch.Generator().manual_seed(args.seed + 10_000))
    models, curves = train(args.steps, args.seed, held_out)
    reports = {name: measure(model, held_out) for name, model in models.items()}
    print(summary(reports, repaired_accuracy(models["softmax"], held_out)))
    if not args.no_plot:
        draw(args.output, typical_pair(models, held_out), curves, reports)
        print(f"The picture is in {args.output}")


if __name__ == "__main__":
    main()
