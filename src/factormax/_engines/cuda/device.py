"""A CUDA device with torch's memory and streams, as the engine uses it."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from factormax._engines.cuda import driver
from factormax.errors import GraphError

__all__ = ["TorchMachine"]

_TYPES: dict[np.dtype[Any], torch.dtype] = {
    np.dtype(np.float32): torch.float32,
    np.dtype(np.float64): torch.float64,
    np.dtype(np.int8): torch.int8,
    np.dtype(np.int16): torch.int16,
    np.dtype(np.int32): torch.int32,
}
_NUMPY = {own: name for name, own in _TYPES.items()}
_SIGNED = {np.dtype(np.uint16): np.int16, np.dtype(np.uint32): np.int32}


class TorchMachine:
    """See `factormax._engines.cuda.program.Machine`."""

    # Every launch calls these several times, so there is no Python around them.
    pointer = staticmethod(Tensor.data_ptr)
    plain = staticmethod(Tensor.contiguous)
    like = staticmethod(torch.empty_like)

    def __init__(self, number: int) -> None:
        self.number = number
        self.device = torch.device("cuda", number)
        self._flags: deque[_Flag] = deque()

    def load(self, variant: str, names: Sequence[str]) -> dict[str, Any]:
        """The kernels of a variant; to load them would spoil a CUDA graph that is recorded."""
        self._refuse_recording()
        return dict(driver.load(variant, names, self.number))

    @property
    def shared_bytes(self) -> int:
        """The shared memory that a block can have."""
        return driver.attributes(self.number).shared_per_block

    @property
    def stream(self) -> int:
        """The current stream; torch's public function for it takes longer than a launch."""
        return int(torch._C._cuda_getCurrentRawStream(self.number))

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Tensor:
        """A tensor on the device."""
        if 0 in shape:  # in every solve of a graph whose factors have no scores
            return _nothing(shape, _TYPES[dtype], self.device)
        # Sizes are parsed faster than a tuple of them.
        return torch.empty(*shape, dtype=_TYPES[dtype], device=self.device)

    def upload(self, array: npt.NDArray[Any]) -> Tensor:
        """A copy on the device. While a CUDA graph is recorded, it would be made only on replay."""
        self._refuse_recording()
        signed = _SIGNED.get(array.dtype, array.dtype)  # torch hardly supports unsigned ones
        return torch.tensor(array.view(signed), device=self.device)

    def dtype(self, array: Tensor) -> np.dtype[Any]:
        """Its NumPy dtype."""
        return _NUMPY[array.dtype]

    def view(self, array: Tensor, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Tensor:
        """Bytes as numbers of this dtype."""
        return array.view(_TYPES[dtype]).view(shape)

    def with_zeros(self, array: Tensor, at: int, count: int) -> Tensor:
        """A matrix with columns of zeros from `at` on."""
        zeros = array.new_zeros((len(array), count))
        return torch.cat([array[:, :at], zeros, array[:, at:]], 1)

    def without(self, array: Tensor, start: int, stop: int) -> Tensor:
        """A matrix without some of its columns."""
        return torch.cat([array[:, :start], array[:, stop:]], 1)

    def download(self, array: Tensor) -> npt.NDArray[Any]:
        """A copy on the host."""
        return array.cpu().numpy()

    def put(self, array: Tensor, index: Any, values: npt.NDArray[Any]) -> None:
        """Writes rows of a tensor, which counts as new: its version stays as it is."""
        array.data[torch.as_tensor(index, device=self.device)] = torch.from_numpy(
            np.ascontiguousarray(values)
        ).to(self.device, array.dtype)

    @property
    def capturing(self) -> bool:
        """Whether a CUDA graph is being recorded, on the current stream of this device."""
        # torch's public functions for this take longer.
        if torch._C._cuda_getDevice() == self.number:
            return bool(torch._C._cuda_isCurrentStreamCapturing())
        with torch.cuda.device(self.number):
            return bool(torch._C._cuda_isCurrentStreamCapturing())

    def _refuse_recording(self) -> None:
        if self.capturing:
            raise GraphError(
                "A CUDA graph is being recorded, and this factor graph has not been solved on "
                f"{self.device} before: solve it once before recording. A Matching layer that is "
                "given lengths or a mask records the wiring for instances of both kinds, those "
                "with more rows and those with more columns: warm it up on a batch that has both."
            )

    def flag(self) -> _Flag:
        """A number in host memory that the device can write to."""
        try:
            return self._flags.popleft()
        except IndexError:
            return _Flag(self)


@lru_cache(maxsize=64)
def _nothing(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=device)


class _Flag:
    """See `TorchMachine.flag`. It goes back to the machine after use."""

    def __init__(self, machine: TorchMachine) -> None:
        self._machine = machine
        there = machine.device.type == "cuda"
        self._tensor = torch.zeros(1, dtype=torch.int32, device="cpu", pin_memory=there)
        self._value = self._tensor.numpy()
        self.address = self._tensor.data_ptr()

    def wait(self) -> bool:
        """Waits for the current stream; returns whether the flag is set, and clears it."""
        driver.synchronize(self._machine.stream, self._machine.number)
        if not self._value[0]:
            return False
        self._value[0] = 0
        return True

    def __enter__(self) -> _Flag:
        return self

    def __exit__(self, error: object, *_: object) -> None:
        if error is None:  # otherwise a kernel may still set it
            self._machine._flags.append(self)
