"""Runs CUDA kernels on the CPU: compiled by the host's C++ compiler, on emulated warps and blocks.

`load` and `attributes` take the place of the driver's. See `emulator.hpp` for what is emulated.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Literal

from host_compiler import build

from factormax._engines.cuda.compiler import headers
from factormax._engines.cuda.driver import Attributes

__all__ = ["ORDERS", "Function", "attributes", "load"]

#: The orders in which the threads of a block, and the blocks of a grid, may run.
ORDERS = ("forward", "reverse", "shuffled")
Order = Literal["forward", "reverse", "shuffled"]

_HEADER = Path(__file__).with_name("emulator.hpp")
# Fibers jump between stacks, which checks of stack frames forbid.
_FLAGS = ("-fno-stack-protector", "-U_FORTIFY_SOURCE")
_alone = threading.Lock()  # a library runs one kernel at a time


class _Launch(ctypes.Structure):
    """`emulator::Launch`."""

    _fields_ = (
        ("grid", ctypes.c_uint),
        ("block", ctypes.c_int),
        ("shared", ctypes.c_ulonglong),
        ("order", ctypes.c_int),
        ("seed", ctypes.c_ulonglong),
        ("args", ctypes.c_void_p),
        ("args_bytes", ctypes.c_ulonglong),
        ("message", ctypes.c_char_p),
        ("message_bytes", ctypes.c_ulonglong),
    )


class Function:
    """A kernel, with the driver's way to launch it.

    Args:
        library: what `build` made.
        name: the name of the kernel.
        order: which of the threads that can run is next: the first, the last, or any.
        seed: the seed of the shuffled order.
    """

    def __init__(self, library: ctypes.CDLL, name: str, order: Order, seed: int) -> None:
        self.name = name
        self._call = library[f"emulate_{name}"]
        self._call.argtypes = [ctypes.POINTER(_Launch)]
        self._order = ORDERS.index(order)
        self._seed = seed

    def launch(
        self, grid: int, block: int, shared: int, stream: int, args: ctypes.Structure
    ) -> None:
        """Runs all blocks, one after another. `stream` is for the driver alone.

        Raises:
            RuntimeError: The threads do not meet, or a block wrote outside its shared memory.
        """
        most = attributes().shared_per_block
        if shared > most:
            raise RuntimeError(
                f"{self.name}: a block needs {shared} bytes of shared memory, but can have only "
                f"{most}."
            )
        message = ctypes.create_string_buffer(2048)
        launch = _Launch(
            grid,
            block,
            shared,
            self._order,
            self._seed,
            ctypes.addressof(args),
            ctypes.sizeof(args),
            ctypes.cast(message, ctypes.c_char_p),
            len(message),
        )
        with _alone:
            failed = self._call(ctypes.byref(launch))
        if failed:
            raise RuntimeError(f"{self.name}: {message.value.decode()}")


def load(
    variant: str,
    names: Sequence[str],
    device: int = 0,
    *,
    order: Order = "forward",
    seed: int = 0,
) -> dict[str, Function]:
    """The kernels of a variant, by name; compiled on first use."""
    library = _library(variant, tuple(names))
    return {name: Function(library, name, order, seed) for name in names}


def attributes(device: int = 0) -> Attributes:
    """What the driver would say of an H100."""
    return Attributes("emulator", (9, 0), 132, 232_448, 233_472)


@cache
def _library(variant: str, names: tuple[str, ...]) -> ctypes.CDLL:
    emulated = "".join(f"FACTORMAX_EMULATE({name})\n" for name in names)
    source = f'#include "{_HEADER.name}"\n{variant}\n{emulated}'
    included = headers() if "#include" in variant else {}
    includes = {_HEADER.name: _HEADER.read_text(), **included}
    return ctypes.CDLL(str(build(source, includes, _FLAGS, _HEADER.name)))
