"""The emulated device as the engine takes it. Its memory is NumPy's, filled with NaN."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import emulator
import numpy as np
import numpy.typing as npt


class EmulatedFlag:
    def __init__(self) -> None:
        self._value = np.zeros(1, np.int32)
        self.address = int(self._value.ctypes.data)

    def __enter__(self) -> EmulatedFlag:
        return self

    def wait(self) -> bool:
        found = bool(self._value[0])
        self._value[0] = 0
        return found

    def __exit__(self, *_: object) -> None:
        pass


class EmulatedMachine:
    """See `factormax._engines.cuda.program.Machine`."""

    stream = 0
    capturing = False

    def __init__(self, order: Any = "forward", seed: int = 0) -> None:
        self.order, self.seed = order, seed

    def load(self, variant: str, names: Sequence[str]) -> dict[str, Any]:
        return dict(emulator.load(variant, names, order=self.order, seed=self.seed))

    @property
    def shared_bytes(self) -> int:
        return emulator.attributes().shared_per_block

    def empty(self, shape: tuple[int, ...], dtype: Any) -> npt.NDArray[Any]:
        found = np.empty(shape, dtype)
        found.view(np.uint8)[...] = 0xFF
        return found

    def like(self, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
        return self.empty(array.shape, array.dtype)

    def upload(self, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
        return array.copy()

    def pointer(self, array: npt.NDArray[Any]) -> int:
        return int(array.ctypes.data)

    def plain(self, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
        return np.ascontiguousarray(array)

    def dtype(self, array: npt.NDArray[Any]) -> np.dtype[Any]:
        return array.dtype

    def view(self, array: Any, dtype: Any, shape: tuple[int, ...]) -> npt.NDArray[Any]:
        return array.view(dtype).reshape(shape)

    def with_zeros(self, array: npt.NDArray[Any], at: int, count: int) -> npt.NDArray[Any]:
        return np.insert(array, [at] * count, 0, axis=1)

    def without(self, array: npt.NDArray[Any], start: int, stop: int) -> npt.NDArray[Any]:
        return np.delete(array, np.s_[start:stop], axis=1)

    def download(self, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
        return array.copy()

    def put(self, array: npt.NDArray[Any], index: Any, values: npt.NDArray[Any]) -> None:
        array[index] = values

    def flag(self) -> EmulatedFlag:
        return EmulatedFlag()
