"""A bar with the time left, and a line for every epoch."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

__all__ = ["Progress"]


class Progress:
    """The progress of a run: on a terminal a bar over all its steps, elsewhere a line an epoch.

    Args:
        title: what is run.
        epochs: the most there will be; the time left is for all of them.
        quiet: show nothing.
    """

    def __init__(self, title: str, epochs: int, *, quiet: bool = False) -> None:
        self._title = title
        self._epochs = epochs
        self._quiet = quiet
        self._bar: Any = None
        self._start = time.perf_counter()
        self._first_epoch: int | None = None

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._bar is not None:
            self._bar.close()

    def steps(self, epoch: int, batches: Sequence[Any]) -> Iterator[Any]:
        """The batches of an epoch, one after the other."""
        if self._first_epoch is None:
            self._first_epoch = epoch
            self._bar = self._new_bar(epoch - 1, len(batches))
        if self._bar is not None:
            self._bar.set_description(f"{self._title}, epoch {epoch}/{self._epochs}")
        for batch in batches:
            yield batch
            if self._bar is not None:
                self._bar.update()

    def show(self, loss: float) -> None:
        """The loss of the last step."""
        if self._bar is not None:
            self._bar.set_postfix(loss=f"{loss:.3f}", refresh=False)

    def end_epoch(self, record: dict[str, Any]) -> None:
        """The line of an epoch."""
        if self._quiet:
            return
        epoch, seconds = record["epoch"], record["seconds"]
        share = record["layer_seconds"] / seconds if seconds else 0.0
        parts = [f"{self._title}: epoch {epoch}/{self._epochs}", f"loss {record['loss']:.4f}"]
        parts += [f"{name} {value:.2f}" for name, value in record["valid"].items()]
        parts += [f"{name} {value:.3f}" for name, value in record["observed"].items()]
        parts += [f"{seconds:.1f} s, layer {share:.0%}"]
        if self._bar is not None:
            self._bar.write("  ".join(parts))
            return
        done = epoch - (self._first_epoch or 1) + 1
        left = (time.perf_counter() - self._start) / done * (self._epochs - epoch)
        print("  ".join([*parts, f"at most {left / 60:.0f} min left"]), flush=True)

    def _new_bar(self, epochs_done: int, steps: int) -> Any:
        """None where a bar would not be seen, or tqdm is not installed."""
        if self._quiet or not sys.stderr.isatty():
            return None
        try:
            from tqdm import tqdm
        except ImportError:
            return None
        return tqdm(total=self._epochs * steps, initial=epochs_done * steps, dynamic_ncols=True)
