"""The training loop that the experiments share."""

from __future__ import annotations

import copy
import json
import math
import os
import time
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from experiments.log import Run, RunFile
from experiments.progress import Progress
from experiments.task import Task

__all__ = ["Schedule", "train"]


@dataclass(frozen=True)
class Schedule:
    """How long and how fast to train.

    Attributes:
        epochs: the most there will be.
        learning_rate: the learning rate of Adam.
        decay: what the learning rate is multiplied by after an epoch without a new best.
        patience: stop after this many epochs without a new best; None to go on to the end.
        clip: bound on the norm of the gradient.
        weight_decay: the weight decay of Adam.
    """

    epochs: int
    learning_rate: float
    decay: float = 1.0
    patience: int | None = None
    clip: float | None = None
    weight_decay: float = 0.0


@dataclass
class _State:
    """Where a run stands after an epoch. The best epoch is the last if nothing is validated."""

    epoch: int = 0
    best_epoch: int = 0
    best_valid: dict[str, float] | None = None
    best_model: dict[str, Any] | None = None


def train(
    task: Task,
    schedule: Schedule,
    *,
    seed: int,
    header: dict[str, Any],
    file: RunFile,
    checkpoint: Path,
    may_differ: Collection[str] = (),
    quiet: bool = False,
) -> dict[str, Any]:
    """Trains the task's model, and tests it as it was after its best epoch on validation.

    Every epoch draws its order and its dropout from the seed and its own number, so that a run
    taken up from its checkpoint ends as one that was never interrupted.

    Args:
        task: the model and its data.
        schedule: how long and how fast.
        seed: the seed of the order of the batches and of dropout.
        header: the first record of the file.
        file: gets a record for each epoch, and the result.
        checkpoint: read if it is there, written after each epoch.
        may_differ: settings of the header that the checkpoint's run may have had another value of.
        quiet: show no progress.

    Returns:
        The result: best epoch, its metrics on validation and test, and exhibits.

    Raises:
        SystemExit: if the loss is not finite.
    """
    optimiser = torch.optim.Adam(
        task.parameters(), lr=schedule.learning_rate, weight_decay=schedule.weight_decay
    )
    state = _State()
    if checkpoint.exists():
        state = _load(checkpoint, task, optimiser, header, may_differ)
        before = file.read() or Run({})
        file.start(header, before.epochs[: state.epoch])
    else:
        file.start(header)

    with Progress(_title(header), schedule.epochs, quiet=quiet) as progress:
        while state.epoch < schedule.epochs and not _is_out_of_patience(state, schedule):
            epoch = state.epoch + 1
            record = _train_epoch(task, schedule, optimiser, seed, epoch, progress)
            record["valid"] = valid = _evaluate(task, "valid")
            record["observed"] = task.observe()
            if _is_better(valid, state.best_valid, task.monitor):
                state.best_epoch, state.best_valid = epoch, valid
                state.best_model = copy.deepcopy(task.model.state_dict())
            else:
                for group in optimiser.param_groups:
                    group["lr"] *= schedule.decay
            state.epoch = epoch
            file.append("epoch", **record)
            _save(checkpoint, task, optimiser, state, header)
            progress.end_epoch(record)

    if state.best_model is not None:
        task.model.load_state_dict(state.best_model)
    result = {
        "epoch": state.best_epoch,
        "valid": state.best_valid or {},
        "test": _evaluate(task, "test"),
        "observed": task.observe(),
        "exhibits": _exhibits(task),
    }
    file.append("result", **result)
    return result


def _train_epoch(
    task: Task,
    schedule: Schedule,
    optimiser: torch.optim.Optimizer,
    seed: int,
    epoch: int,
    progress: Progress,
) -> dict[str, Any]:
    batches = task.batches(np.random.default_rng([seed, epoch]))
    torch.manual_seed(1_000_003 * seed + epoch)
    task.model.train()
    task.clock.take()
    start = time.perf_counter()
    total = 0.0
    for batch in progress.steps(epoch, batches):
        optimiser.zero_grad()
        loss = task.loss(batch)
        loss.backward()
        if schedule.clip is not None:
            torch.nn.utils.clip_grad_norm_(task.model.parameters(), schedule.clip)
        optimiser.step()
        value = float(loss.detach())
        if not math.isfinite(value):
            raise SystemExit(
                f"{task.name}: the loss is {value} in epoch {epoch}. Try a lower --learning-rate."
            )
        total += value
        progress.show(value)
    return {
        "epoch": epoch,
        "loss": total / max(len(batches), 1),
        "learning_rate": optimiser.param_groups[0]["lr"],
        "steps": len(batches),
        "seconds": time.perf_counter() - start,
        "layer_seconds": task.clock.take(),
    }


def _evaluate(task: Task, split: str) -> dict[str, float]:
    task.model.eval()
    with torch.no_grad():
        return task.evaluate(split)


def _exhibits(task: Task) -> dict[str, Any]:
    task.model.eval()
    with torch.no_grad():
        return task.exhibits()


def _is_better(valid: dict[str, float], best: dict[str, float] | None, monitor: str) -> bool:
    return not valid or best is None or valid[monitor] > best[monitor]


def _is_out_of_patience(state: _State, schedule: Schedule) -> bool:
    return schedule.patience is not None and state.epoch - state.best_epoch >= schedule.patience


def _title(header: dict[str, Any]) -> str:
    return f"{header.get('variant', 'run')}, seed {header.get('seed', 0)}"


def _save(
    path: Path,
    task: Task,
    optimiser: torch.optim.Optimizer,
    state: _State,
    header: dict[str, Any],
) -> None:
    """Writes beside the old checkpoint first, so that one of them is always whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_suffix(".part")
    torch.save(
        {
            "model": task.model.state_dict(),
            "optimiser": optimiser.state_dict(),
            "state": vars(state),
            "settings": json.dumps(header.get("settings", {})),
        },
        beside,
    )
    os.replace(beside, path)


def _load(
    path: Path,
    task: Task,
    optimiser: torch.optim.Optimizer,
    header: dict[str, Any],
    may_differ: Collection[str],
) -> _State:
    try:
        saved = torch.load(path, map_location=task.device, weights_only=True)
        before, now = json.loads(saved["settings"]), header.get("settings", {})
        for key in sorted((before.keys() | now.keys()) - set(may_differ)):
            if before.get(key) != now.get(key):
                raise ValueError(f"it is of a run with {key} {before.get(key)}, not {now.get(key)}")
        task.model.load_state_dict(saved["model"])
        optimiser.load_state_dict(saved["optimiser"])
    except Exception as error:
        raise SystemExit(f"Cannot go on from {path} ({error}). Start anew with --fresh.") from error
    return _State(**saved["state"])
