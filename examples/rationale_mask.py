"""Learn which words explain a label: a rationale extractor's mask, by SequenceBudget.

Sentences differ in length. Each holds one planted span of four neighbouring words of the same
class, which is the label, and scattered words of all classes that only distract. A small network
scores every word and every two neighbours; at most four words pass the mask; the label is predicted
from these alone. Only the label is ever shown in training.

You will see how much of the mask falls on the span before and after, and where the picture is:

    python examples/rationale_mask.py
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import factormax as fm

CLASSES, PLAIN, SPAN, LONGEST = 6, 9, 4, 18  # word ids below CLASSES carry a class
BATCH = 32


def make_batch(size: int, random: torch.Generator) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Words `(size, LONGEST)`, which of them are there, which are the span, and the labels."""
    place = torch.arange(LONGEST)
    lengths = torch.randint(10, LONGEST + 1, (size, 1), generator=random)
    words = torch.randint(CLASSES, CLASSES + PLAIN, (size, LONGEST), generator=random)
    distracting = torch.rand(size, LONGEST, generator=random) < 0.2
    distractor = torch.randint(0, CLASSES, (size, LONGEST), generator=random)
    words = torch.where(distracting, distractor, words)
    labels = torch.randint(0, CLASSES, (size,), generator=random)
    start = (torch.rand(size, 1, generator=random) * (lengths - SPAN + 1)).long()
    span = (place >= start) & (place < start + SPAN)
    return torch.where(span, labels[:, None], words), place < lengths, span, labels


class Extractor(nn.Module):
    """Scores words, masks all but a few, and predicts the label from what is left."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(CLASSES + PLAIN, 16)
        self.scorer = nn.Linear(16, 1)
        nn.init.zeros_(self.scorer.weight)  # all words alike at first
        nn.init.constant_(self.scorer.bias, 0.2)
        self.together = nn.Parameter(torch.full((16,), 0.02))  # a bonus if neighbours are alike
        self.classifier = nn.Linear(16, CLASSES, bias=False)

    def mask(self, words: Tensor, present: Tensor) -> Tensor:
        """How much of each word passes, `(batch, LONGEST)`; padding is masked, hence 0."""
        x = self.embedding(words)
        scores = self.scorer(x).squeeze(-1)
        bonus = (x[:, 1:] * x[:, :-1]) @ self.together  # of two neighbours, (batch, LONGEST - 1)
        fg = fm.FactorGraph(batch_dims=1)
        u = fg.variable_from(scores, mask=present)
        fg.add(fm.SequenceBudget(u, bonus, budget=SPAN))
        fg.solve()
        return u.value

    def forward(self, words: Tensor, present: Tensor) -> Tensor:
        weights = self.mask(words, present)
        return self.classifier((weights[..., None] * self.embedding(words)).sum(dim=1))


def on_span(model: Extractor, words: Tensor, present: Tensor, span: Tensor) -> float:
    """The share of the mask that falls on the span."""
    with torch.no_grad():
        weights = model.mask(words, present)
    return float((weights * span).sum() / weights.sum().clamp(min=1e-9))


def train(model: Extractor, steps: int, random: torch.Generator) -> None:
    optimiser = torch.optim.Adam(model.parameters(), lr=0.03)
    for _ in range(steps):
        words, present, _, labels = make_batch(BATCH, random)
        loss = F.cross_entropy(model(words, present), labels)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()


def draw(path: Path, masks: dict[str, Tensor], words: Tensor, present: Tensor, span: Tensor):
    """The masks of a few sentences, one per row; the span is outlined."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.patches import Rectangle

    figure, axes = plt.subplots(1, len(masks), figsize=(13, 4.6), layout="constrained")
    for ax, (title, mask) in zip(axes, masks.items(), strict=True):
        ax.imshow(mask.where(present, torch.nan), cmap="Blues", vmin=0, vmax=1.3, aspect="auto")
        for i, j in present.nonzero().tolist():
            word = int(words[i, j])
            letter = "ABCDEF"[word] if word < CLASSES else "·"
            dark = mask[i, j] > 0.8
            ax.text(j, i, letter, ha="center", va="center", color="white" if dark else "#444444")
        for i, row in enumerate(span):
            start = int(row.nonzero()[0]) - 0.5
            outline = {"fill": False, "edgecolor": "#D1495B", "linewidth": 2, "clip_on": False}
            ax.add_patch(Rectangle((start, i - 0.5), SPAN, 1, **outline))
        ax.set_title(title, fontsize=14)
        ax.set(xticks=[], yticks=[])
        ax.spines[:].set_visible(False)
    axes[0].set_ylabel("sentences")
    figure.supxlabel("red: the planted span; blue: what the mask lets pass; letters: classes")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120, facecolor="white")
    plt.close(figure)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    picture = Path(__file__).parent / "output" / "rationale_mask.png"
    parser.add_argument("--steps", type=int, default=100, help="training steps (%(default)s)")
    parser.add_argument("--output", type=Path, default=picture, help="where the picture goes")
    parser.add_argument("--no-plot", action="store_true", help="draw no picture")
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = Extractor()
    words, present, span, labels = make_batch(256, torch.Generator().manual_seed(1))
    before, share = model.mask(words, present).detach(), on_span(model, words, present, span)
    train(model, args.steps, torch.Generator().manual_seed(2))
    after = model.mask(words, present).detach()
    right = (model(words, present).argmax(dim=1) == labels).float().mean()
    print(f"of the mask on the span: {share:.0%} before, ", end="")
    print(f"{on_span(model, words, present, span):.0%} after; labels right: {right:.0%}")
    if not args.no_plot:
        few = slice(0, 10)
        masks = {"before training": before[few], "after training": after[few]}
        draw(args.output, masks, words[few], present[few], span[few])
        print(f"The picture is in {args.output}")


if __name__ == "__main__":
    main()
