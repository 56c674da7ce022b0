"""The CUDA driver, through ctypes: kernels are compiled, kept, loaded and launched.

CUDA is not needed to build or import this. Compiling a variant takes seconds, so its code is kept
on disk (see `cubins`). The first time that a process compiles, the logger `factormax` says so at
the level WARNING, which Python shows on stderr by default; the details are logged at the level
INFO. `logging.getLogger("factormax").setLevel(logging.ERROR)` silences both.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import logging
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from ctypes import addressof, byref, c_int, c_uint, c_void_p
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

from factormax._engines.cuda import compiler, cubins

__all__ = ["Attributes", "Function", "attributes", "load", "synchronize", "unavailable"]

#: The library of the driver, as the loader takes it.
LIBCUDA = "libcuda.so.1"

_logger = logging.getLogger("factormax")

# None for functions that every solve calls, because converting by type takes longer than the call.
# Their arguments are passed by ctypes as they are: int for an int, c_void_p for an address.
_SIGNATURES: dict[str, list[Any] | None] = {
    "cuInit": [c_uint],
    "cuDriverGetVersion": [c_void_p],
    "cuGetErrorName": [c_int, c_void_p],
    "cuGetErrorString": [c_int, c_void_p],
    "cuDeviceGetCount": [c_void_p],
    "cuDeviceGet": [c_void_p, c_int],
    "cuDeviceGetName": [c_void_p, c_int, c_int],
    "cuDeviceGetAttribute": [c_void_p, c_int, c_int],
    "cuDevicePrimaryCtxRetain": [c_void_p, c_int],
    "cuCtxGetCurrent": None,
    "cuCtxPushCurrent_v2": [c_void_p],
    "cuCtxPopCurrent_v2": [c_void_p],
    "cuModuleLoadData": [c_void_p, c_void_p],
    "cuModuleGetFunction": [c_void_p, c_void_p, ctypes.c_char_p],
    "cuFuncGetAttribute": [c_void_p, c_int, c_void_p],
    "cuFuncSetAttribute": [c_void_p, c_int, c_int],
    "cuLaunchKernel": None,
    "cuStreamSynchronize": None,
}

# Numbers of CUdevice_attribute.
_NUM_SMS = 16
_CAPABILITY_MAJOR = 75
_CAPABILITY_MINOR = 76
_SHARED_PER_SM = 81
_SHARED_PER_BLOCK_OPTIN = 97

# Numbers of CUfunction_attribute.
_STATIC_SHARED_BYTES = 1
_LOCAL_BYTES = 3
_NUM_REGISTERS = 4
_MOST_DYNAMIC_SHARED_BYTES = 8

#: The shared memory that a block may have without requesting more.
_PLAIN_SHARED = 48 << 10


@dataclass(frozen=True)
class Attributes:
    """The properties of a device.

    Attributes:
        name: the driver's name for it.
        capability: major and minor, such as (9, 0).
        sms: number of multiprocessors.
        shared_per_block: the most bytes of shared memory that a block can have.
        shared_per_sm: bytes of shared memory of a multiprocessor.
    """

    name: str
    capability: tuple[int, int]
    sms: int
    shared_per_block: int
    shared_per_sm: int


@cache
def unavailable(device: int = 0) -> str:
    """The reason why kernels can't run on this device, in one clause, or "" if they can."""
    try:
        _compiler_for(device)
    except RuntimeError as error:
        return str(error)
    return ""


def attributes(device: int) -> Attributes:
    """The properties of this device."""
    return _device(device).attributes


def load(variant: str, names: Sequence[str], device: int) -> dict[str, Function]:
    """The kernels of a variant on a device, by name.

    Args:
        variant: a source in CUDA C++. It may include the kernels of this package by name, and must
            define functions `extern "C" __global__` of one argument, a struct.
        names: the names of these functions.
        device: the number of the device.

    Raises:
        RuntimeError: if there is no such device, or the variant does not compile; the message says
            why.
    """
    module = _modules.get((variant, device))
    if module is None:
        with _loading:  # one thread compiles, the others wait for it
            module = _modules.get((variant, device))
            if module is None:
                module = _modules[variant, device] = _Module(variant, device)
    return {name: module.function(name) for name in names}


def synchronize(stream: int, device: int) -> None:
    """Waits until everything queued on a stream of this device is done.

    Raises:
        RuntimeError: if a kernel failed.
    """
    there = _device(device)
    code = there.within(there.cuda.library.cuStreamSynchronize, c_void_p(stream))
    if code:
        raise RuntimeError(f"a kernel failed: {there.cuda.words(code)}")


class Function:
    """A kernel of one argument, a struct, on one device. Made by `load`."""

    __slots__ = ("_device", "_handle", "_launch", "_plain", "name")

    def __init__(self, device: _Device, handle: c_void_p, name: str) -> None:
        self.name = name
        self._device = device
        self._handle = handle
        self._plain = _PLAIN_SHARED
        self._launch = device.cuda.library.cuLaunchKernel

    def launch(
        self, grid: int, block: int, shared: int, stream: int, args: ctypes.Structure
    ) -> None:
        """Queues the kernel; the driver copies `args` before this returns.

        Args:
            grid: number of blocks; 0 does nothing.
            block: threads per block.
            shared: bytes of dynamic shared memory per block.
            stream: the stream's address; 0 is the default stream.
            args: the kernel's argument.

        Raises:
            RuntimeError: if the driver rejects the launch.
        """
        if not grid:
            return
        if shared > self._plain:
            self._allow(shared)
        given = byref(c_void_p(addressof(args)))
        sizes = (grid, 1, 1, block, 1, 1, shared)
        code = self._device.within(
            self._launch, self._handle, *sizes, c_void_p(stream), given, None
        )
        if code:
            raise RuntimeError(
                f"{self.name}: the launch of {grid} blocks of {block} threads with {shared} bytes "
                f"of shared memory failed: {self._device.cuda.words(code)}"
            )

    @property
    def registers(self) -> int:
        """Registers per thread."""
        return self._attribute(_NUM_REGISTERS)

    @property
    def local_bytes(self) -> int:
        """Bytes of local memory per thread: arrays, and what does not fit into registers."""
        return self._attribute(_LOCAL_BYTES)

    def _attribute(self, number: int) -> int:
        value = c_int()
        with self._device.current():
            self._device.cuda.call("cuFuncGetAttribute", byref(value), number, self._handle)
        return value.value

    def _allow(self, shared: int) -> None:
        """Lets blocks have all the shared memory there is; requested once."""
        most = self._device.attributes.shared_per_block - self._attribute(_STATIC_SHARED_BYTES)
        if shared > most:
            raise RuntimeError(
                f"{self.name}: a block needs {shared} bytes of shared memory, but can have only "
                f"{most} on {self._device.attributes.name}."
            )
        with self._device.current():
            self._device.cuda.call(
                "cuFuncSetAttribute", self._handle, _MOST_DYNAMIC_SHARED_BYTES, most
            )
        self._plain = most


class _Cuda:
    """The driver's functions."""

    def __init__(self) -> None:
        try:
            self.library = ctypes.CDLL(LIBCUDA)
        except OSError:
            raise RuntimeError(f"there is no CUDA driver ({LIBCUDA} was not found)") from None
        for name, types in _SIGNATURES.items():
            try:
                getattr(self.library, name).argtypes = types
            except AttributeError:
                raise RuntimeError(f"the CUDA driver is too old: it has no {name}") from None
        code = self.library.cuInit(0)
        if code:
            raise RuntimeError(f"the CUDA driver could not be started: {self.words(code)}")
        version, count = c_int(), c_int()
        self.call("cuDriverGetVersion", byref(version))
        self.call("cuDeviceGetCount", byref(count))
        self.release = version.value // 1000  # the major release of CUDA
        self.count = count.value

    def call(self, name: str, *arguments: Any) -> None:
        """Calls a function of the driver, and raises if it fails."""
        code = getattr(self.library, name)(*arguments)
        if code:
            raise RuntimeError(f"{name} failed: {self.words(code)}")

    def words(self, code: int) -> str:
        """What the driver says about an error."""
        name, words = ctypes.c_char_p(), ctypes.c_char_p()
        self.library.cuGetErrorName(code, byref(name))
        self.library.cuGetErrorString(code, byref(words))
        return f"{(words.value or b'unknown error').decode()} ({(name.value or b'?').decode()})"


class _Device:
    """One device, with its primary context, which torch uses, too."""

    def __init__(self, cuda: _Cuda, number: int) -> None:
        if not 0 <= number < cuda.count:
            raise RuntimeError(f"there is no CUDA device {number}: the driver sees {cuda.count}")
        self.cuda = cuda
        self._where = cuda.library.cuCtxGetCurrent
        self.handle = c_int()
        cuda.call("cuDeviceGet", byref(self.handle), number)
        self.context = c_void_p()
        cuda.call("cuDevicePrimaryCtxRetain", byref(self.context), self.handle)
        self._address = self.context.value
        name = ctypes.create_string_buffer(256)
        cuda.call("cuDeviceGetName", name, len(name), self.handle)
        self.attributes = Attributes(
            name=name.value.decode(),
            capability=(self._attribute(_CAPABILITY_MAJOR), self._attribute(_CAPABILITY_MINOR)),
            sms=self._attribute(_NUM_SMS),
            shared_per_block=self._attribute(_SHARED_PER_BLOCK_OPTIN),
            shared_per_sm=self._attribute(_SHARED_PER_SM),
        )

    def _attribute(self, number: int) -> int:
        value = c_int()
        self.cuda.call("cuDeviceGetAttribute", byref(value), number, self.handle)
        return value.value

    def within(self, function: Any, *given: Any) -> int:
        """Calls a function of the driver in the context of this device; returns its result."""
        current = c_void_p()
        self._where(byref(current))
        if current.value == self._address:
            return function(*given)  # type: ignore[no-any-return]
        with self.current():  # autograd's threads have no context, others may have another device
            return function(*given)  # type: ignore[no-any-return]

    @contextmanager
    def current(self) -> Iterator[None]:
        """Makes this device current for the thread, meanwhile."""
        self.cuda.call("cuCtxPushCurrent_v2", self.context)
        try:
            yield
        finally:
            self.cuda.call("cuCtxPopCurrent_v2", byref(c_void_p()))


class _Module:
    """The loaded code of a variant."""

    def __init__(self, variant: str, number: int) -> None:
        self._device = _device(number)
        self._handle = c_void_p()
        self._functions: dict[str, Function] = {}
        code = _code(variant, number)
        with self._device.current():
            self._device.cuda.call("cuModuleLoadData", byref(self._handle), code)

    def function(self, name: str) -> Function:
        found = self._functions.get(name)
        if found is None:
            handle = c_void_p()
            with self._device.current():
                self._device.cuda.call(
                    "cuModuleGetFunction", byref(handle), self._handle, name.encode()
                )
            # Two threads may both get here; the first one's function is used.
            found = self._functions.setdefault(name, Function(self._device, handle, name))
        return found


_modules: dict[tuple[str, int], _Module] = {}
_loading = threading.Lock()


@lru_cache(maxsize=1)
def _cuda() -> _Cuda:
    return _Cuda()


@cache
def _device(number: int) -> _Device:
    return _Device(_cuda(), number)


@cache
def _compiler_for(number: int) -> tuple[compiler.Nvrtc, str]:
    """The compiler for a device, and the architecture to compile for."""
    device = _device(number)
    nvrtc, why = compiler.find(device.cuda.release)
    if nvrtc is None:
        raise RuntimeError(why)
    architecture = nvrtc.architecture(device.attributes.capability)
    if not architecture:
        major, minor = device.attributes.capability
        raise RuntimeError(
            f"{nvrtc} does not compile for {device.attributes.name} (compute capability "
            f"{major}.{minor})"
        )
    return nvrtc, architecture


def _code(variant: str, number: int) -> bytes:
    """The machine code of a variant, from disk if it is there."""
    nvrtc, architecture = _compiler_for(number)
    includes = compiler.headers()
    whole = [variant, sorted(includes.items()), architecture, compiler.OPTIONS, nvrtc.version]
    key = hashlib.sha256(json.dumps(whole).encode()).hexdigest()
    code = cubins.read(key)
    if code is None:
        _announce(_device(number).attributes.name)
        start = time.perf_counter()
        code = nvrtc.compile(variant, includes, architecture)
        seconds = time.perf_counter() - start
        kept = cubins.write(key, code)
        _logger.info(
            "compiled a CUDA kernel of %d KB in %.1f s, %s: %s",
            *(len(code) >> 10, seconds, "kept on disk" if kept else "not kept", variant.strip()),
        )
    return code


@cache  # once per process and kind of device
def _announce(name: str) -> None:
    folder = cubins.folder()
    _logger.warning(
        "factormax is compiling CUDA kernels for %s, which takes a few seconds%s.",
        *(name, f"; they are kept in {folder}" if folder else ""),
    )
