"""Are two sentences made of the same words? Attention that matches one to one can tell.

They are if every word has a counterpart of its own: "A A B" and "B A A", in any order. "A A B" and
"B B A" are not, although every word finds one. A small decomposable attention model attends,
compares each word with what it attends to, adds up, and answers. It is trained twice: with softmax
attention, and with `factormax.nn.Matching`. Only the answer is ever shown in training.

You will see how often each is right, and where the picture is:

    python examples/structured_attention.py
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import factormax.nn as fnn

LETTERS, SHORTEST, LONGEST, BATCH = 5, 3, 7, 64


def make_batch(size: int, random: torch.Generator) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Two sentences a row, `(size, LONGEST)` each, padded, how long they are, and the answers."""
    first, second = torch.zeros(2, size, LONGEST, dtype=torch.long)
    lengths = torch.randint(SHORTEST, LONGEST + 1, (size,), generator=random)
    answers = torch.randint(0, 2, (size,), generator=random)
    for row in range(size):
        n = int(lengths[row])
        two = torch.randperm(LETTERS, generator=random)[:2]  # these are in it, one of them twice
        others = torch.randint(0, LETTERS, (n - 3,), generator=random)
        words = torch.cat([two, two[:1], others])
        first[row, :n] = words[torch.randperm(n, generator=random)]
        if not answers[row]:
            words[2] = two[1]  # the same words, but not as often
        second[row, :n] = words[torch.randperm(n, generator=random)]
    return first, second, lengths, answers


class SoftmaxAttention(nn.Module):
    """Every word attends for itself, in both directions."""

    def forward(self, scores: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        present = torch.arange(LONGEST) < lengths[:, None]
        there = present[:, :, None] & present[:, None, :]
        scores = scores.masked_fill(~there, -1e9)
        return scores.softmax(dim=2) * there, scores.softmax(dim=1) * there


class MatchingAttention(nn.Module):
    """One matching for both directions."""

    def __init__(self) -> None:
        super().__init__()
        self.matching = fnn.Matching()

    def forward(self, scores: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        weights = self.matching(scores, lengths=(lengths, lengths))
        return weights, weights


class Comparer(nn.Module):
    """Attend, compare, aggregate."""

    def __init__(self, attention: nn.Module, dim: int = 16) -> None:
        super().__init__()
        self.embedding = nn.Embedding(LETTERS, dim)
        self.attention = attention
        self.compare = nn.Sequential(nn.Linear(2 * dim, 32), nn.ReLU(), nn.Linear(32, 8))
        self.output = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))

    def attend(self, first: Tensor, second: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """How much each word attends to each of the other sentence, in both directions."""
        scores = self.embedding(first) @ self.embedding(second).mT
        return self.attention(scores / 4, lengths)

    def forward(self, first: Tensor, second: Tensor, lengths: Tensor) -> Tensor:
        there = (torch.arange(LONGEST) < lengths[:, None])[..., None]
        a, b = self.embedding(first), self.embedding(second)
        to_second, to_first = self.attend(first, second, lengths)
        of_first = self.compare(torch.cat([a, to_second @ b], dim=2))
        of_second = self.compare(torch.cat([to_first.mT @ a, b], dim=2))
        return self.output(((of_first + of_second) * there).sum(dim=1)).squeeze(1)


def train(model: Comparer, steps: int, random: torch.Generator) -> None:
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    data = [make_batch(BATCH, random) for _ in range(min(steps, 100))]
    for step in range(steps):
        first, second, lengths, answers = data[step % len(data)]
        loss = F.binary_cross_entropy_with_logits(model(first, second, lengths), answers.float())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def accuracy(model: Comparer, test: tuple[Tensor, ...]) -> float:
    *inputs, answers = test
    with torch.no_grad():
        return float(((model(*inputs) > 0) == answers.bool()).float().mean())


def draw(path: Path, models: dict[str, Comparer], test: tuple[Tensor, ...]) -> None:
    """The attention in a pair of sentences that agrees, and in one that does not."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    first, second, lengths, answers = test
    chosen = [int(((lengths == 6) & (answers == a)).nonzero()[0]) for a in (1, 0)]
    figure, axes = plt.subplots(2, len(models), figsize=(8, 8.6), layout="constrained")
    for column, (title, model) in enumerate(models.items()):
        with torch.no_grad():
            weights, _ = model.attend(first, second, lengths)
            right = (model(first, second, lengths) > 0) == answers.bool()
        for row, i in enumerate(chosen):
            ax, n = axes[row, column], int(lengths[i])
            ax.imshow(weights[i, :n, :n], cmap="Blues", vmin=0, vmax=1.2)
            for y, x in weights[i].round(decimals=2).nonzero().tolist():
                dark = weights[i, y, x] > 0.7
                text = f"{weights[i, y, x]:.2f}".removeprefix("0")
                ax.text(x, y, text, ha="center", va="center", color="white" if dark else "#444444")
            ax.set_xticks(range(n), ["ABCDE"[w] for w in second[i, :n]], fontsize=14)
            ax.set_yticks(range(n), ["ABCDE"[w] for w in first[i, :n]], fontsize=14)
            ax.tick_params(length=0, labeltop=True, labelbottom=False)
            truth = "the same" if answers[i] else "not the same"
            ax.set_xlabel(f"{truth}: answered {'right' if right[i] else 'wrong'}", fontsize=12)
            ax.spines[:].set_visible(False)
        axes[0, column].set_title(title, fontsize=15, pad=14)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120, facecolor="white")
    plt.close(figure)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    picture = Path(__file__).parent / "output" / "structured_attention.png"
    parser.add_argument("--steps", type=int, default=150, help="training steps (%(default)s)")
    parser.add_argument("--output", type=Path, default=picture, help="where the picture goes")
    parser.add_argument("--no-plot", action="store_true", help="draw no picture")
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    torch.set_num_threads(1)
    test = make_batch(500, torch.Generator().manual_seed(1))
    models = {}
    for name, attention in (("softmax", SoftmaxAttention), ("matching", MatchingAttention)):
        torch.manual_seed(0)
        models[name] = Comparer(attention())
        train(models[name], args.steps, torch.Generator().manual_seed(2))
        print(f"{name} attention: {accuracy(models[name], test):.0%} right")
    if not args.no_plot:
        draw(args.output, models, test)
        print(f"The picture is in {args.output}")


if __name__ == "__main__":
    main()
