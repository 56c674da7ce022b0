"""NVRTC, which compiles kernels, shipped as CUDA C++ text, to machine code for the GPU at hand.

NVRTC comes with torch's CUDA wheels, with `pip install nvidia-cuda-nvrtc`, and with CUDA itself.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator
from functools import lru_cache
from importlib import resources, util
from pathlib import Path

__all__ = ["OPTIONS", "Nvrtc", "find", "headers"]

#: Besides the architecture. Unmarked functions, lambdas included, are for the device.
OPTIONS = ("--std=c++17", "-default-device")

_SUCCESS = 0
_COMPILATION_FAILED = 6
_LIBRARIES = "libnvrtc.so*"  # neither the builtins, which NVRTC loads itself, nor the .alt variant


@lru_cache(maxsize=1)
def headers() -> dict[str, str]:
    """The sources of all kernels, by the name under which they include each other."""
    folder = resources.files("factormax._engines.cuda") / "kernels"
    files = sorted(folder.iterdir(), key=lambda file: file.name)
    return {f.name: f.read_text(encoding="utf-8") for f in files if f.name.endswith(".cuh")}


class Nvrtc:
    """One NVRTC library.

    Args:
        path: the library, as the loader takes it.

    Raises:
        OSError: if it can't be loaded.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._library = ctypes.CDLL(path)
        self._library.nvrtcGetErrorString.restype = ctypes.c_char_p
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._call("nvrtcVersion", ctypes.byref(major), ctypes.byref(minor))
        #: The version of the CUDA release it belongs to.
        self.version = (major.value, minor.value)

    def __str__(self) -> str:
        return f"NVRTC {self.version[0]}.{self.version[1]} ({self.path})"

    def architecture(self, capability: tuple[int, int]) -> str:
        """The architecture to compile for, such as "sm_90", for a device of this capability, or "".

        Code also runs on later devices of the same major capability.
        """
        count = ctypes.c_int()
        self._call("nvrtcGetNumSupportedArchs", ctypes.byref(count))
        known = (ctypes.c_int * count.value)()
        self._call("nvrtcGetSupportedArchs", known)
        major, minor = capability
        fitting = [arch for arch in known if 10 * major <= arch <= 10 * major + minor]
        return f"sm_{max(fitting)}" if fitting else ""

    def compile(self, source: str, includes: dict[str, str], architecture: str) -> bytes:
        """The machine code (CUBIN) of a source, which includes others by name.

        Raises:
            RuntimeError: if NVRTC rejects the source; the message holds its log.
        """
        texts, names = (
            (ctypes.c_char_p * len(includes))(*[text.encode() for text in column])
            for column in (includes.values(), includes)
        )
        options = [f"--gpu-architecture={architecture}", *OPTIONS]
        arguments = (ctypes.c_char_p * len(options))(*[option.encode() for option in options])
        program = ctypes.c_void_p()
        self._call(
            "nvrtcCreateProgram",
            ctypes.byref(program),
            source.encode(),
            b"variant.cu",
            len(includes),
            texts,
            names,
        )
        try:
            code = self._library.nvrtcCompileProgram(program, len(options), arguments)
            if code == _COMPILATION_FAILED:
                log = self._take("nvrtcGetProgramLog", program).rstrip(b"\0").decode()
                raise RuntimeError(f"{self} can't compile the kernels for {architecture}:\n{log}")
            self._check("nvrtcCompileProgram", code)
            return self._take("nvrtcGetCUBIN", program)
        finally:
            self._library.nvrtcDestroyProgram(ctypes.byref(program))

    def _take(self, name: str, program: ctypes.c_void_p) -> bytes:
        """What an NVRTC function writes into memory, whose size another function gives."""
        size = ctypes.c_size_t()
        self._call(f"{name}Size", program, ctypes.byref(size))
        taken = ctypes.create_string_buffer(size.value)
        self._call(name, program, taken)
        return taken.raw

    def _call(self, name: str, *arguments: object) -> None:
        self._check(name, self._library[name](*arguments))

    def _check(self, name: str, code: int) -> None:
        if code != _SUCCESS:
            words = self._library.nvrtcGetErrorString(code).decode()
            raise RuntimeError(f"{self.path}: {name} failed with {words}.")


def find(newest: int) -> tuple[Nvrtc | None, str]:
    """The first NVRTC whose code a driver for CUDA `newest` can load; or None, and why.

    A driver loads code from its own major release of CUDA and from earlier ones.
    """
    too_new = ""
    for path in _candidates():
        try:
            nvrtc = Nvrtc(path)
        except (OSError, AttributeError):  # it is missing, or is not what its name says
            continue
        if nvrtc.version[0] <= newest:
            return nvrtc, ""
        too_new = too_new or str(nvrtc)
    if too_new:
        return None, (
            f"{too_new} needs a newer driver than the one for CUDA {newest}: update the driver, or "
            f"pip install nvidia-cuda-nvrtc-cu{newest}"
        )
    return None, "NVRTC was not found: pip install nvidia-cuda-nvrtc, or set CUDA_HOME"


def _candidates() -> Iterator[str]:
    """Where NVRTC may be: in Python wheels, in a CUDA that the user chose, in the system."""
    folders: list[Path] = []
    # nvidia/cuda_nvrtc/lib for CUDA 12, nvidia/cu13/lib for CUDA 13. Nothing is imported.
    wheels = util.find_spec("nvidia")
    for place in (wheels and wheels.submodule_search_locations) or []:
        folders += sorted(Path(place).glob("*/lib"))
    homes = [os.environ.get(name) for name in ("CUDA_HOME", "CUDA_PATH")]
    folders += [Path(home, lib) for home in homes if home for lib in ("lib64", "lib")]
    folders.append(Path(sys.prefix, "lib"))  # conda
    for folder in folders:
        yield from map(str, sorted(folder.glob(_LIBRARIES)))
    yield from ("libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so")  # as the loader finds them
    for folder in sorted(Path("/usr/local").glob("cuda*/lib64"), reverse=True):
        yield from map(str, sorted(folder.glob(_LIBRARIES)))
