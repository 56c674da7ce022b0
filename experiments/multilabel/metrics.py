"""Example F1."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

__all__ = ["best_threshold", "example_f1"]

#: What is tried on validation.
THRESHOLDS = tuple(round(0.05 * k, 2) for k in range(1, 20))


def example_f1(predicted: Tensor, y: Tensor) -> float:
    """The mean over examples of 2|y ∩ p| / (|y| + |p|), in percent.

    It counts as 1 for an example that has no labels and is given none. (In bibtex all have some.)

    Args:
        predicted: `(n, labels)`, boolean.
        y: `(n, labels)`, of 0 and 1.

    Example:
        >>> import torch
        >>> y = torch.tensor([[1, 1, 0], [0, 0, 0]])
        >>> example_f1(torch.tensor([[True, False, False], [False, False, False]]), y)  # 2/3 and 1
        83.33...
    """
    p = predicted.to(y.dtype)
    both, total = (p * y).sum(dim=1), p.sum(dim=1) + y.sum(dim=1)
    f1 = (2 * both).double() / total.clamp(min=1)
    return 100 * float(f1.masked_fill(total == 0, 1).mean())


def best_threshold(
    confidence: Tensor, y: Tensor, thresholds: Iterable[float] = THRESHOLDS
) -> float:
    """The threshold with the best example F1; of equals the one nearest to ½."""
    return max(thresholds, key=lambda t: (example_f1(confidence > t, y), -abs(t - 0.5)))
