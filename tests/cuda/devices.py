"""Torch's tensors on an emulated device, which is the host under another name."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import emulator
import pytest
import torch
from machine import EmulatedFlag

from factormax import _engines
from factormax._engines.cuda.device import TorchMachine
from factormax._engines.cuda.engine import CudaEngine
from factormax._fronts.torch import plan
from factormax._fronts.torch.arrays import Kind

__all__ = ["EmulatedEngine", "EmulatedTorchMachine", "compiles", "emulate", "on", "on_the_host"]

#: Marks what needs a compiled solve to be done on a device.
compiles = pytest.mark.skipif(torch.__version__ < (2, 11), reason="needs a newer torch")


class EmulatedTorchMachine(TorchMachine):
    """Torch's memory on the host, and emulated kernels."""

    stream = 0  # type: ignore[assignment]
    capturing = False  # type: ignore[assignment]

    def __init__(self) -> None:
        self.device = torch.device("cpu")

    def load(self, variant: str, names: Sequence[str]) -> dict[str, Any]:
        return dict(emulator.load(variant, names))

    @property
    def shared_bytes(self) -> int:
        return emulator.attributes().shared_per_block

    def flag(self) -> Any:
        return EmulatedFlag()


class EmulatedEngine(CudaEngine):
    name = "cpu"

    def __init__(self) -> None:
        super().__init__(lambda device: EmulatedTorchMachine(), lambda number: "")
        self.solves = 0

    def begin(self, *args: Any) -> Any:
        self.solves += 1
        return super().begin(*args)


def emulate(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> EmulatedEngine:
    """Has tensors on the host solved by an emulated device until the end of the test."""
    engine = EmulatedEngine()
    monkeypatch.setattr(_engines, "ENGINES", [engine, *_engines.ENGINES])

    def kind_of(place: Any, dtype: Any) -> Kind:
        value = dtype if dtype.is_floating_point else torch.get_default_dtype()
        return Kind(place, value, False)

    monkeypatch.setattr(Kind, "of", kind_of)
    plan._remembered_pattern.cache_clear()
    request.addfinalizer(plan._remembered_pattern.cache_clear)
    return engine


@contextmanager
def on_the_host() -> Iterator[None]:
    """As if there were no device."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_engines, "engine_there", lambda *asked: None)
        yield


def on(device: str, *tensors: Any) -> list[Any]:
    return [t.detach().clone().to(device).requires_grad_() for t in tensors]
