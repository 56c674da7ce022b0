"""
Matching points, with and without structure
===========================================

Which points of two sets belong together? Set B is set A after a rotation, a smooth deformation and
some noise, in shuffled order. Pairs differ in size, and some points of either set have no partner.
Every point of B carries a short random vector, and each point of A has to read the vector of its
partner, or zeros if it has none. What it reads is the only training signal: the true matching is
used to measure, not to train.

Two copies of one small network start from the same weights and see the same data. They differ in
the layer that turns scores into weights: softmax attention, and a matching, which is a graph of two
factors. `make demo` runs this tutorial.
"""

# %%
# The two layers
# --------------
#
# Scores are `(batch, m, n + 1)`; the last column means "no partner". The mask is False on padding.
# Softmax looks at each row by itself. The graph says more: each point of A picks exactly one point
# of B or none, and no point of B is picked twice.

import math
import sys
from dataclasses import dataclass
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from torch import nn
from torch.nn import functional as F
from tqdm import tqdm

import factormax as fm


def softmax_layer(scores, mask):
    return torch.softmax(scores.masked_fill(~mask, -1e9), dim=-1) * mask


def matching_layer(scores, mask):
    fg = fm.FactorGraph(batch_dims=1)
    u = fg.variable_from(scores, mask=mask)
    fg.add(fm.Xor(u, axis=1))
    fg.add(fm.AtMostOne(u[:, :-1], axis=0))
    fg.solve()
    return u.value


LAYERS = {"softmax": softmax_layer, "factormax": matching_layer}

# %%
# The data
# --------
#
# The two sets of a pair have 9 to 14 points in common, and each has up to 2 more without a partner.

POINTS = 16  # sets are padded to this many points


@dataclass
class Batch:
    """Pairs of point sets, padded to n points each."""

    a: torch.Tensor  # (batch, n, 2)
    b: torch.Tensor  # (batch, n, 2)
    in_a: torch.Tensor  # (batch, n), False on padding
    in_b: torch.Tensor  # (batch, n)
    values: torch.Tensor  # (batch, n, 4), what the points of B carry
    wanted: torch.Tensor  # (batch, n, 4), what the points of A should read
    truth: torch.Tensor  # (batch, n, n + 1), 0/1, "no partner" last; for measuring only

    @property
    def mask(self):
        """Which scores are in the problem, `(batch, n, n + 1)`."""
        return self.in_a[:, :, None] & F.pad(self.in_b, (0, 1), value=True)[:, None, :]


def make_batch(size, random):
    def uniform(*shape):
        return torch.rand(size, *shape, generator=random)

    def normal(*shape):
        return torch.randn(size, *shape, generator=random)

    n = POINTS
    shared = torch.randint(9, 15, (size, 1), generator=random)
    extra_a, extra_b = torch.randint(0, 3, (2, size, 1), generator=random)
    place = torch.arange(n)
    common, in_a, in_b = place < shared, place < shared + extra_a, place < shared + extra_b

    a = 2 * uniform(n, 2) - 1
    deformed = a + 0.08 * torch.sin(1.5 * a @ normal(2, 2) + 2 * math.pi * uniform(1, 2))
    b = torch.where(common[..., None], deformed, 2 * uniform(n, 2) - 1) + 0.015 * normal(n, 2)
    angle = 2 * math.pi * uniform()
    c, s = torch.cos(angle), torch.sin(angle)
    b = b @ torch.stack([c, s, -s, c], dim=-1).view(-1, 2, 2)

    order = (uniform(n) + 2 * ~in_b).argsort(dim=1)  # shuffled, padding last
    b = b.gather(1, order[..., None].expand(-1, -1, 2))
    partner = (order[:, None, :] == place[:, None]) & common[:, :, None]
    truth = torch.cat([partner, (in_a & ~common)[..., None]], dim=2).float()
    values = normal(n, 4)
    return Batch(a, b, in_a, in_b, values, partner.float() @ values, truth)


# %%
# The network
# -----------
#
# Each point is embedded by its distances to the others, in two rounds of messages, so that the
# embedding does not change when the set is rotated. The nearer two embeddings are, the higher the
# score of the pair.


class Matcher(nn.Module):
    def __init__(self, layer, hidden=32, rounds=2, bins=12):
        super().__init__()
        self.layer, self.hidden = layer, hidden
        self.register_buffer("centres", torch.linspace(0.0, 2.2, bins))
        self.distance = nn.ModuleList(nn.Linear(bins, hidden) for _ in range(rounds))
        self.ends = nn.ModuleList(nn.Linear(hidden, 2 * hidden) for _ in range(rounds))
        self.update = nn.ModuleList(
            nn.Sequential(nn.Linear(2 * hidden, hidden), nn.SiLU(), nn.Linear(hidden, hidden))
            for _ in range(rounds)
        )
        self.norm = nn.ModuleList(nn.LayerNorm(hidden) for _ in range(rounds))
        self.project = nn.Linear(hidden, hidden, bias=False)
        self.no_partner = nn.Linear(hidden, 1)
        self.log_scale = nn.Parameter(torch.tensor(1.5))

    def encode(self, points, present):
        offsets = torch.cdist(points, points)[..., None] - self.centres
        bumps = torch.exp(-((offsets / 0.2) ** 2))
        others = present[:, :, None] & present[:, None, :] & ~torch.eye(POINTS, dtype=torch.bool)
        h = points.new_zeros(*points.shape[:2], self.hidden)
        for distance, ends, update, norm in zip(
            self.distance, self.ends, self.update, self.norm, strict=True
        ):
            to, fro = ends(h).chunk(2, dim=-1)
            messages = F.silu(distance(bumps) + to[:, :, None] + fro[:, None, :])
            heard = (messages * others[..., None]).sum(dim=2) / 4
            h = norm(h + update(torch.cat([h, heard], dim=-1)))
        return h

    def scores(self, batch):
        h_a, h_b = self.encode(batch.a, batch.in_a), self.encode(batch.b, batch.in_b)
        gaps = self.project(h_a)[:, :, None] - self.project(h_b)[:, None, :]
        nearness = -self.log_scale.exp() * (gaps**2).mean(dim=-1)
        return torch.cat([nearness, self.no_partner(h_a) - 2], dim=2)

    def forward(self, batch):
        return self.layer(self.scores(batch), batch.mask)


# %%
# Training
# --------
#
# The loss is the distance between what the points of A read and what they should read. On held-out
# pairs, three things are measured now and then: how often the largest weight is where it belongs,
# how many points of B receive more than 1 in all, and how many weights are not 0.

STEPS = 250
RATE = 3e-3


def reading_loss(weights, batch):
    errors = weights[:, :, :-1] @ batch.values - batch.wanted
    return (errors**2).sum() / batch.in_a.sum()


def is_right(weights, batch):
    return weights.argmax(dim=2) == batch.truth.argmax(dim=2)


def measure(weights, batch):
    crowded = weights[:, :, :-1].sum(dim=1) > 1.01
    return {
        "accuracy": 100 * is_right(weights, batch)[batch.in_a].float().mean().item(),
        "crowded": 100 * crowded[batch.in_b].float().mean().item(),
        "choices": ((weights > 1e-3).sum() / batch.in_a.sum()).item(),
    }


torch.set_num_threads(1)  # tensors this small gain nothing from more; factormax uses all cores
held_out = make_batch(256, torch.Generator().manual_seed(1))
models, optimizers, schedules = {}, {}, {}
for name, layer in LAYERS.items():
    torch.manual_seed(0)  # the same initial weights
    models[name] = Matcher(layer)
    optimizers[name] = torch.optim.AdamW(models[name].parameters(), RATE)
    schedules[name] = torch.optim.lr_scheduler.OneCycleLR(
        optimizers[name], RATE, total_steps=STEPS, pct_start=0.1
    )

random = torch.Generator().manual_seed(0)
history = {}
bar = tqdm(range(1, STEPS + 1), desc="Training", unit="step", dynamic_ncols=True)
for step in bar:
    batch = make_batch(48, random)
    for name, model in models.items():
        optimizers[name].zero_grad()
        reading_loss(model(batch), batch).backward()
        optimizers[name].step()
        schedules[name].step()
    if step % max(1, STEPS // 12) == 0 or step in (1, STEPS):
        with torch.no_grad():
            history[step] = {name: measure(m(held_out), held_out) for name, m in models.items()}
        right = [f"{name} {now['accuracy']:.0f} %" for name, now in history[step].items()]
        bar.set_postfix_str(", ".join(right))

# %%
# Results
# -------
#
# Does the structure help in training, or would it be enough to enforce it afterwards? The last line
# forces the scores of the softmax network into a matching after training. (As scores grow, the
# solution tends to the best matching.)

titles = {
    "accuracy": ("points of A matched correctly", " %"),
    "crowded": ("points of B with a sum of weights above 1", " %"),
    "choices": ("nonzero weights per point of A", ""),
}
print(f"{'on 256 held-out pairs':<42}" + "".join(f"{name:>12}" for name in models))
for field, (title, unit) in titles.items():
    numbers = [f"{history[STEPS][name][field]:.1f}{unit}" for name in models]
    print(f"{title:<42}" + "".join(f"{number:>12}" for number in numbers))
with torch.no_grad():
    repaired = matching_layer(100 * models["softmax"].scores(held_out), held_out.mask)
accuracy = measure(repaired, held_out)["accuracy"]
print(f"Made one-to-one only after training, softmax gets {accuracy:.1f} % right.")

# %%
# The picture
# -----------
#
# On this pair both do as well as they do on average. The points of B are put in the order of their
# partners, so that the truth is a diagonal. A ring is weight on "no partner", and a hollow point
# has none. Bars below the matrices are sums of columns; orange is what exceeds 1.

with torch.no_grad():
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
place = torch.where(partner.sum(dim=0) > 0, partner.argmax(dim=0), POINTS)
order = place[columns].argsort()


def trimmed(matrix):
    """Without padding, in the order of the partners."""
    return torch.cat([matrix[rows, :-1][:, columns][:, order], matrix[rows, -1:]], dim=1)


a, b = held_out.a[i][rows], held_out.b[i][columns][order]
truth = trimmed(held_out.truth[i])
shown = {"the truth": truth} | {name: trimmed(w[i]) for name, w in weights.items()}

INK, PALE = "#222222", "#8C8C8C"
figure = plt.figure(figsize=(12, 9.2), layout="constrained")
grid = figure.add_gridspec(3, 3, height_ratios=[3, 4, 2.4])
figure.suptitle("Blue lines and rings are right, orange ones are not", color=PALE)
for k, (name, w) in enumerate(shown.items()):
    ax = figure.add_subplot(grid[0, k])
    fm.plot.matching(
        w[:, :-1], ax, points=(a, b), truth=truth[:, :-1], unmatched=w[:, -1].clamp(max=1)
    )
    count = int((w.argmax(dim=1) == truth.argmax(dim=1)).sum())
    note = "never shown in training" if k == 0 else f"{count} of {len(a)} right"
    ax.set_title(f"{name}\n{note}", fontsize=12)
    ax = fm.plot.attention(w[:, :-1], figure.add_subplot(grid[1, k]), numbers=False)
    ax.set(xticks=[], yticks=[], xlabel="points of B", ylabel="points of A")

for k, (field, (title, unit)) in enumerate(titles.items()):
    ax = figure.add_subplot(grid[2, k])
    for name, style, colour in (("softmax", "--", PALE), ("factormax", "-", INK)):
        values = [now[name][field] for now in history.values()]
        ax.plot(list(history), values, style, color=colour, linewidth=2.2)
        label = f"{name} {values[-1]:.1f}{unit}"
        ax.annotate(label, (STEPS, values[-1]), (6, 0), textcoords="offset points", color=colour)
    top = 100 if field == "accuracy" else 1.1 * ax.get_ylim()[1]
    ax.set(xlim=(0, 1.8 * STEPS), xticks=[0, STEPS], ylim=(0, top))
    ax.set_title(title, fontsize=11)
    ax.set_xlabel("training steps", x=0.28, labelpad=-8)
    ax.spines[["top", "right"]].set_visible(False)
    ax.spines["bottom"].set_bounds(0, STEPS)

picture = Path(sys.argv[0]).parent / "output" / "matching_points.png"
picture.parent.mkdir(exist_ok=True)
figure.savefig(picture, dpi=120, facecolor="white")
print("The picture is in", picture)

plt.show()

# %%
# What to try next
# ----------------
#
# * Train for longer: 600 steps bring softmax to about 82 %, and the matching to about 89 %.
# * `fm.nn.Matching(complete=False)` needs no column for "no partner": it matches where that pays.
# * Leave the mask out, and see what padding does to the softmax and to the matching.
