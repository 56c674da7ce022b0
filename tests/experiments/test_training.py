"""The loop, its files and its command line, on a task that takes no time."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from experiments import command  # noqa: E402
from experiments.log import RunFile, read_runs  # noqa: E402
from experiments.task import Task  # noqa: E402
from experiments.timing import LayerClock  # noqa: E402


class Line(Task):
    """Fits a line; dropout makes the order of random numbers matter."""

    name = "line"
    monitor = "fit"

    def __init__(self, stop_in_epoch: int | None = None, validated: bool = True) -> None:
        self.clock = LayerClock()
        self.model = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Dropout(0.5))
        self.model.append(torch.nn.Linear(8, 1))
        data = np.random.default_rng(0).normal(size=(40, 3)).astype(np.float32)
        self.x = torch.from_numpy(data)
        self.y = self.x.sum(dim=1, keepdim=True)
        self.stop_in_epoch = stop_in_epoch
        self.validated = validated
        self.epoch = 0

    def batches(self, rng):
        self.epoch += 1
        return list(torch.from_numpy(rng.permutation(40)).split(10))

    def loss(self, batch):
        if self.epoch == self.stop_in_epoch:
            raise KeyboardInterrupt
        hidden = self.clock(torch.tanh, self.model(self.x[batch]))
        return (hidden - self.y[batch]).square().mean()

    def evaluate(self, split):
        if split == "valid" and not self.validated:
            return {}
        return {"fit": -float((self.model(self.x) - self.y).square().mean())}

    def exhibits(self):
        return {"weight": self.model[0].weight[0].tolist()}


def run(tmp_path: Path, *argv: str, task=Line, models=("a", "b")) -> list:
    parser = command.parser("", models, epochs=4, batch_size=10, learning_rate=0.01, decay=0.5)
    args = parser.parse_args(["--quiet", "--output", str(tmp_path), *argv])
    command.main(
        args, lambda args, model: task(), experiment="line", variant=lambda args, model: model
    )
    return read_runs(tmp_path)


def test_every_model_and_seed_is_a_run(tmp_path):
    runs = run(tmp_path, "--seeds", "0", "1")
    assert [(r.model, r.seed) for r in runs] == [("a", 0), ("a", 1), ("b", 0), ("b", 1)]
    assert all(len(r.epochs) == 4 for r in runs)
    assert runs[0].epochs == [{**e, "kind": "epoch"} for e in runs[0].epochs]
    # The same seed gives the same run, another seed another.
    assert runs[0].result["test"] == runs[2].result["test"] != runs[1].result["test"]
    best = max(runs[0].epochs, key=lambda epoch: epoch["valid"]["fit"])
    assert runs[0].result["epoch"] == best["epoch"]
    assert runs[0].result["test"] == best["valid"], "tested as after the best epoch"
    assert 0 < runs[0].epochs[0]["layer_seconds"] < runs[0].epochs[0]["seconds"]


def test_the_device(tmp_path, monkeypatch, capsys):
    class Moved(Line):
        def to(self, device):
            super().to(device)
            assert self.device == torch.device("cpu")

    plain, on_cpu = (
        run(tmp_path / name, "a", *flags, task=Moved)[0]
        for name, flags in (("plain", ()), ("cpu", ("--device", "cpu")))
    )
    assert on_cpu.result == plain.result and on_cpu.settings == plain.settings
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for device, message in (("cuda", "finds no CUDA device"), ("tpu", "must be cpu or cuda")):
        with pytest.raises(SystemExit):
            run(tmp_path, "a", "--device", device)
        assert message in capsys.readouterr().err


def test_a_task_moves_its_model():
    task = Line()
    task.to("meta")
    assert task.device.type == "meta"
    assert all(p.is_meta for p in task.model.parameters())


def test_rate_decays_without_a_better_epoch(tmp_path):
    class Worse(Line):
        def evaluate(self, split):
            return {"fit": -float(self.epoch)}

    (r,) = run(tmp_path, "a", task=Worse)
    assert [e["learning_rate"] for e in r.epochs] == [0.01, 0.01, 0.005, 0.0025]
    assert r.result["epoch"] == 1


def test_patience(tmp_path):
    class Worse(Line):
        def evaluate(self, split):
            return {"fit": -float(self.epoch)}

    (r,) = run(tmp_path, "a", "--patience", "2", task=Worse)
    assert len(r.epochs) == 3


def test_without_validation_the_last_epoch_counts(tmp_path):
    (r,) = run(tmp_path, "a", task=lambda: Line(validated=False))
    assert r.result["epoch"] == 4


def test_an_interrupted_run_ends_as_one_that_was_not(tmp_path):
    (whole,) = run(tmp_path / "whole", "a")
    with pytest.raises(SystemExit, match="same command goes on"):
        run(tmp_path / "parts", "a", task=lambda: Line(stop_in_epoch=3))
    assert len(RunFile(tmp_path / "parts/line/a-seed0.jsonl").read().epochs) == 2
    (parts,) = run(tmp_path / "parts", "a")
    assert parts.result == whole.result
    assert [e["loss"] for e in parts.epochs] == [e["loss"] for e in whole.epochs]


def test_a_half_written_line_is_dropped(tmp_path):
    with pytest.raises(SystemExit, match="same command goes on"):
        run(tmp_path, "a", task=lambda: Line(stop_in_epoch=3))
    path = tmp_path / "line/a-seed0.jsonl"
    with path.open("a") as file:
        file.write('{"kind": "epoch", "epo')
    (r,) = run(tmp_path, "a")
    assert [e["epoch"] for e in r.epochs] == [1, 2, 3, 4]
    assert [json.loads(line)["kind"] for line in path.read_text().splitlines()][-1] == "result"


def test_finished_runs_are_left_and_longer_ones_go_on(tmp_path):
    (first,) = run(tmp_path, "a")
    before = (tmp_path / "line/a-seed0.jsonl").read_bytes()
    run(tmp_path, "a")
    assert (tmp_path / "line/a-seed0.jsonl").read_bytes() == before
    (longer,) = run(tmp_path, "a", "--epochs", "6")
    assert len(longer.epochs) == 6
    assert longer.epochs[:4] == first.epochs
    (again,) = run(tmp_path, "a", "--fresh")
    assert again.result == first.result


def test_fewer_epochs_are_refused(tmp_path):
    run(tmp_path, "a")
    with pytest.raises(SystemExit, match=r"--epochs 4 \(now 2\)"):
        run(tmp_path, "a", "--epochs", "2")


def test_a_finished_run_without_a_checkpoint_is_not_overwritten(tmp_path):
    """As the committed ones are."""
    run(tmp_path, "a")
    (tmp_path / "checkpoints/line/a-seed0.pt").unlink()
    before = (tmp_path / "line/a-seed0.jsonl").read_bytes()
    with pytest.raises(SystemExit, match="--epochs 4"):
        run(tmp_path, "a", "--epochs", "6")
    assert (tmp_path / "line/a-seed0.jsonl").read_bytes() == before


def test_a_checkpoint_of_other_settings(tmp_path):
    run(tmp_path, "a")
    (tmp_path / "line/a-seed0.jsonl").unlink()
    with pytest.raises(SystemExit, match=r"learning_rate 0\.01, not 0\.5.*--fresh"):
        run(tmp_path, "a", "--learning-rate", "0.5")


def test_conflicts_are_found_before_anything_is_trained(tmp_path):
    run(tmp_path, "b")
    with pytest.raises(SystemExit, match="b-seed0 was run before"):
        run(tmp_path, "--learning-rate", "0.5")
    assert not (tmp_path / "line/a-seed0.jsonl").exists()


def test_other_settings_are_refused(tmp_path):
    run(tmp_path, "a")
    with pytest.raises(SystemExit, match=r"--learning-rate 0.01 \(now 0.5\).*--fresh"):
        run(tmp_path, "a", "--learning-rate", "0.5")


def test_unknown_model(tmp_path):
    with pytest.raises(SystemExit, match="no model 'c': choose from a, b"):
        run(tmp_path, "c")


def test_a_loss_that_is_not_finite(tmp_path):
    class Lost(Line):
        def loss(self, batch):
            return super().loss(batch) * float("nan")

    with pytest.raises(SystemExit, match="--learning-rate"):
        run(tmp_path, "a", task=Lost)


def test_a_checkpoint_of_another_model(tmp_path):
    run(tmp_path, "a")

    class Wider(Line):
        def __init__(self):
            super().__init__()
            self.model = torch.nn.Linear(3, 1)

    with pytest.raises(SystemExit, match="--fresh"):
        run(tmp_path, "a", "--epochs", "6", task=Wider)


def test_bad_numbers():
    parser = command.parser("", ["a"], epochs=1, batch_size=1, learning_rate=1.0)
    bad = {"--epochs": "0", "--learning-rate": "0", "--batch-size": "0", "--seeds": "-1"}
    bad |= {"--decay": "2", "--weight-decay": "-1"}
    for flag, value in bad.items():
        with pytest.raises(SystemExit):
            parser.parse_args([f"{flag}={value}"])
    assert isinstance(parser.parse_args([]), argparse.Namespace)


def test_progress_is_shown(tmp_path, capsys):
    parser = command.parser("", ["a"], epochs=2, batch_size=10, learning_rate=0.01)
    args = parser.parse_args(["--output", str(tmp_path)])
    command.main(args, lambda *_: Line(), experiment="line", variant=lambda *_: "a")
    shown = capsys.readouterr().out
    assert "a, seed 0: epoch 1/2" in shown
    assert "min left" in shown
    assert "test fit" in shown
