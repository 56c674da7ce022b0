"""Compiling, keeping, loading and launching kernels: by a fake driver, and by a real one if any."""

from __future__ import annotations

import ctypes
import logging
import multiprocessing
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from host_compiler import build

from factormax._engines.cuda import compiler, cubins, driver

VARIANT = "// a variant\n"


class Args(ctypes.Structure):
    _fields_ = (("first", ctypes.c_int64), ("output", ctypes.c_void_p))


class Fake(ctypes.Structure):
    """What the fake driver notes, and how it behaves: see `fake_cuda.cpp`."""

    _fields_ = (
        *((name, ctypes.c_int) for name in ("init_code", "driver_version", "devices")),
        *((name, ctypes.c_int) for name in ("nvrtc_major", "compiled", "allowed", "allowances")),
        *((name, ctypes.c_int) for name in ("launches", "launch_code", "grid", "block", "shared")),
        *((name, ctypes.c_int64) for name in ("stream", "context", "first_word")),
    )


def forget() -> None:
    """As in a new process."""
    driver._modules.clear()
    for kept in (driver.unavailable, driver._cuda, driver._device, driver._compiler_for):
        kept.cache_clear()
    driver._announce.cache_clear()


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """A folder for the code of each test, and nothing that outlasts it."""
    monkeypatch.setenv("FACTORMAX_CACHE", str(tmp_path / "cache"))
    yield tmp_path / "cache"
    forget()


@pytest.fixture
def fake(monkeypatch):
    path = str(build(Path(__file__).with_name("fake_cuda.cpp").read_text()))
    monkeypatch.setattr(driver, "LIBCUDA", path)
    monkeypatch.setattr(compiler, "_candidates", lambda: iter(["nowhere.so", path]))
    forget()
    fake = Fake.in_dll(ctypes.CDLL(path), "fake")
    before = bytes(fake)
    yield fake
    ctypes.memmove(ctypes.addressof(fake), before, len(before))


def context_of(fake):
    """The context that is current in this thread."""
    library = ctypes.CDLL(driver.LIBCUDA)
    library.fake_context.restype = ctypes.c_int64
    return library.fake_context()


class TestUnavailable:
    def test_without_a_driver(self, monkeypatch):
        monkeypatch.setattr(driver, "LIBCUDA", "libnothing.so.1")
        forget()
        reason = "there is no CUDA driver (libnothing.so.1 was not found)"
        assert driver.unavailable() == reason
        with pytest.raises(RuntimeError, match="there is no CUDA driver"):
            driver.load(VARIANT, ["forward"], 0)
        with pytest.raises(RuntimeError, match="there is no CUDA driver"):
            driver.attributes(0)

    def test_with_something_else_of_that_name(self, monkeypatch):
        monkeypatch.setattr(driver, "LIBCUDA", None)  # the process itself
        forget()
        assert driver.unavailable() == "the CUDA driver is too old: it has no cuInit"

    def test_with_everything(self, fake):
        assert driver.unavailable() == ""
        assert driver.unavailable(1) == ""
        assert driver.unavailable(2) == "there is no CUDA device 2: the driver sees 2"

    def test_without_a_device(self, fake):
        fake.init_code = 100
        words = "no CUDA-capable device is detected (CUDA_ERROR_NO_DEVICE)"
        assert driver.unavailable() == f"the CUDA driver could not be started: {words}"

    def test_without_nvrtc(self, fake, monkeypatch):
        monkeypatch.setattr(compiler, "_candidates", lambda: iter(["nowhere.so"]))
        reason = "NVRTC was not found: pip install nvidia-cuda-nvrtc, or set CUDA_HOME"
        assert driver.unavailable() == reason

    def test_with_a_newer_nvrtc_than_driver(self, fake):
        fake.nvrtc_major = 13
        reason = driver.unavailable()
        assert reason.startswith("NVRTC 13.4 (")
        assert "needs a newer driver than the one for CUDA 12" in reason
        assert "pip install nvidia-cuda-nvrtc-cu12" in reason

    def test_with_a_newer_driver_than_nvrtc(self, fake):
        fake.driver_version = 13000
        assert driver.unavailable() == ""

    def test_architectures(self, fake):
        nvrtc, _ = compiler.find(12)
        assert nvrtc.architecture((9, 0)) == "sm_90"
        assert nvrtc.architecture((8, 9)) == "sm_86"  # runs what is older
        assert nvrtc.architecture((10, 0)) == ""
        assert nvrtc.architecture((7, 5)) == ""


def test_finding_nvrtc(tmp_path, monkeypatch):
    for place in ("wheels/nvidia/cuda_nvrtc/lib", "wheels/nvidia/cu13/lib", "cuda/lib64"):
        (tmp_path / place).mkdir(parents=True)
        for name in ("libnvrtc.so.12", "libnvrtc.alt.so.12", "libnvrtc-builtins.so.12.4"):
            (tmp_path / place / name).touch()
    (tmp_path / "wheels/nvidia/__init__.py").touch()  # as in wheels of CUDA 12
    monkeypatch.syspath_prepend(tmp_path / "wheels")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cuda"))
    found = [c for c in compiler._candidates() if str(tmp_path) in c]
    assert [str(Path(f).relative_to(tmp_path).parent) for f in found] == [
        *("wheels/nvidia/cu13/lib", "wheels/nvidia/cuda_nvrtc/lib", "cuda/lib64")
    ]
    assert {Path(f).name for f in found} == {"libnvrtc.so.12"}


def test_attributes(fake):
    assert driver.attributes(1) == driver.Attributes("Fake 1", (9, 0), 132, 232_448, 233_472)


class TestLoad:
    def test_compiles_once(self, fake):
        first = driver.load(VARIANT, ["forward", "backward"], 0)
        again = driver.load(VARIANT, ["backward"], 0)
        assert list(first) == ["forward", "backward"]
        assert again["backward"] is first["backward"]
        assert fake.compiled == 1

    def test_code_is_for_this_package_and_device(self, fake, cache):
        driver.load(VARIANT, ["forward"], 0)
        (kept,) = cache.iterdir()
        code = cubins.read(kept.stem).decode()
        assert code.startswith(VARIANT)
        for part in (*compiler.headers(), *compiler.OPTIONS, "--gpu-architecture=sm_90"):
            assert part in code

    def test_every_device_loads_code_of_its_own(self, fake):
        """Of the same kind, they share what is compiled; a function runs where it was loaded."""
        both = [driver.load(VARIANT, ["forward"], number)["forward"] for number in (0, 1)]
        assert fake.compiled == 1
        assert [function._handle.value for function in both] == [2100, 2101]
        for number in (0, 1, 0):
            both[number].launch(1, 32, 0, 0, Args())
            assert fake.context == 100 + number

    def test_threads_compile_once(self, fake):
        together = threading.Barrier(8)

        def load(_):
            together.wait()
            return driver.load(VARIANT, ["forward"], 0)["forward"]

        with ThreadPoolExecutor(8) as pool:
            found = list(pool.map(load, range(8)))
        assert fake.compiled == 1
        assert all(function is found[0] for function in found)

    def test_a_function_that_is_not_there(self, fake):
        with pytest.raises(RuntimeError, match="cuModuleGetFunction failed: invalid argument"):
            driver.load(VARIANT, ["absent"], 0)

    def test_the_log_is_in_the_error(self, fake):
        with pytest.raises(RuntimeError, match=r"NVRTC 12\.4 (?s:.*)variant\.cu\(1\): wrong"):
            driver.load("#error no", ["forward"], 0)
        assert context_of(fake) == 0

    def test_says_so_once(self, fake, caplog, cache):
        caplog.set_level(logging.INFO, "factormax")
        for variant in ("// a", "// b"):
            driver.load(variant, ["forward"], 0)
        said = [(r.levelname, r.getMessage()) for r in caplog.records]
        assert [level for level, _ in said] == ["WARNING", "INFO", "INFO"]
        assert said[0][1] == (
            "factormax is compiling CUDA kernels for Fake 0, which takes a few seconds; they are "
            f"kept in {cache}."
        )
        forget()
        caplog.clear()
        driver.load("// a", ["forward"], 0)
        assert not caplog.records  # from disk

    def test_finds_the_code_of_another_process(self, fake):
        for _ in range(2):
            forget()
            driver.load(VARIANT, ["forward"], 0)
        assert fake.compiled == 1

    def test_what_the_code_depends_on(self, fake, monkeypatch):
        driver.load(VARIANT, ["forward"], 0)
        driver.load(VARIANT + " ", ["forward"], 0)
        assert fake.compiled == 2
        for module, name, other in (
            (compiler, "headers", lambda: {"team.cuh": "// another"}),
            (compiler, "OPTIONS", ("--std=c++20",)),
            (compiler.Nvrtc, "architecture", lambda *_: "sm_86"),
        ):
            with monkeypatch.context() as patch:
                patch.setattr(module, name, other)
                forget()
                before = fake.compiled
                driver.load(VARIANT, ["forward"], 0)
                assert fake.compiled == before + 1
        fake.nvrtc_major = 11
        forget()
        before = fake.compiled
        driver.load(VARIANT, ["forward"], 0)
        assert fake.compiled == before + 1

    @pytest.mark.parametrize("damage", [lambda c: c[:-1], lambda c: b"", lambda c: b"x" + c[1:]])
    def test_damaged_code_is_compiled_again(self, fake, cache, damage):
        driver.load(VARIANT, ["forward"], 0)
        (kept,) = cache.iterdir()
        whole = kept.read_bytes()
        kept.write_bytes(damage(whole))
        forget()
        driver.load(VARIANT, ["forward"], 0)
        assert fake.compiled == 2
        assert kept.read_bytes() == whole

    def test_a_folder_that_cannot_be_written_to(self, fake, tmp_path, monkeypatch):
        (tmp_path / "file").touch()
        monkeypatch.setenv("FACTORMAX_CACHE", str(tmp_path / "file" / "folder"))
        driver.load(VARIANT, ["forward"], 0)
        assert fake.compiled == 1

    def test_no_folder(self, fake, tmp_path, monkeypatch):
        monkeypatch.setenv("FACTORMAX_CACHE", "")
        monkeypatch.chdir(tmp_path)
        driver.load(VARIANT, ["forward"], 0)
        assert fake.compiled == 1
        assert not list(tmp_path.iterdir())


class TestFolder:
    def test_is_the_users(self, monkeypatch, tmp_path):
        monkeypatch.delenv("FACTORMAX_CACHE")
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        assert cubins.folder() == tmp_path / "factormax"
        monkeypatch.delenv("XDG_CACHE_HOME")
        monkeypatch.setenv("HOME", str(tmp_path))
        assert cubins.folder() == tmp_path / ".cache" / "factormax"

    def test_is_chosen(self, monkeypatch, tmp_path):
        monkeypatch.setenv("FACTORMAX_CACHE", str(tmp_path))
        assert cubins.folder() == tmp_path
        monkeypatch.setenv("FACTORMAX_CACHE", "")
        assert cubins.folder() is None
        assert cubins.read("key") is None
        assert not cubins.write("key", b"code")

    def test_a_write_that_fails_leaves_nothing(self, cache, monkeypatch):
        def refuse(*_):
            raise OSError("disk full")

        monkeypatch.setattr(os, "replace", refuse)
        assert not cubins.write("key", b"code")
        assert not list(cache.iterdir())

    def test_many_processes(self, cache):
        """Readers see nothing, or the whole of what one of the writers wrote."""
        context = multiprocessing.get_context("spawn")
        with context.Pool(4) as pool:
            bad = pool.map(write_and_read, range(4))
        assert bad == [0] * 4
        assert [file.name for file in cache.iterdir()] == ["key.cubin"]


def write_and_read(number):
    """How often something else was read than was ever written."""
    bad = 0
    for turn in range(200):
        cubins.write("key", bytes([number]) * (1 << 16) + bytes([turn]))
        code = cubins.read("key")
        bad += code is None or len(set(code[:-1])) != 1 or len(code) != (1 << 16) + 1
    return bad


class TestLaunch:
    @pytest.fixture
    def function(self, fake):
        return driver.load(VARIANT, ["forward"], 1)["forward"]

    def test_hands_everything_on(self, fake, function):
        function.launch(5, 64, 1024, 77, Args(42, None))
        assert (fake.grid, fake.block, fake.shared) == (5, 64, 1024)
        assert (fake.stream, fake.first_word) == (77, 42)
        assert fake.allowances == 0

    def test_large_shared_memory_is_asked_for_once(self, fake, function):
        for shared in (48 << 10, 100_000, 200_000):
            function.launch(1, 32, shared, 0, Args())
        assert (fake.allowances, fake.allowed) == (1, 232_448)

    def test_too_much_shared_memory(self, fake, function):
        message = r"forward: a block needs 300000 bytes .* can have only 232448 on Fake 1"
        with pytest.raises(RuntimeError, match=message):
            function.launch(1, 32, 300_000, 0, Args())
        assert fake.launches == 0

    def test_nothing_to_launch(self, fake, function):
        function.launch(0, 32, 0, 0, Args())
        assert fake.launches == 0

    def test_errors_have_the_drivers_words(self, fake, function):
        fake.launch_code = 1
        message = r"forward: the launch of 5 blocks of 64 threads .* invalid argument \(CUDA_ERROR"
        with pytest.raises(RuntimeError, match=message):
            function.launch(5, 64, 0, 0, Args())
        assert context_of(fake) == 0

    def test_waiting(self, fake):
        driver.synchronize(77, 1)
        assert (fake.stream, fake.context, context_of(fake)) == (77, 101, 0)
        fake.launch_code = 1
        with pytest.raises(RuntimeError, match="a kernel failed: invalid argument"):
            driver.synchronize(77, 1)

    @pytest.mark.parametrize("before", [0, 100, 101])
    def test_runs_in_the_context_of_its_device(self, fake, function, before):
        """And leaves the thread as it was: without one, on another device, or on this one."""
        library = ctypes.CDLL(driver.LIBCUDA)
        library.cuCtxPushCurrent_v2.argtypes = [ctypes.c_int64]
        found = []

        def run():
            if before:
                library.cuCtxPushCurrent_v2(before)
            function.launch(1, 32, 0, 0, Args())
            found.append((fake.context, context_of(fake)))

        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
        assert found == [(101, before)]

    def test_registers(self, function):
        assert (function.registers, function.local_bytes) == (40, 8)

    def test_is_quick(self, fake, function):
        """A few microseconds of Python; the bound is loose for a busy machine."""
        args = Args(1, None)
        with function._device.current():
            start = time.perf_counter()
            for _ in range(2000):
                function.launch(5, 64, 1024, 0, args)
            assert (time.perf_counter() - start) / 2000 < 50e-6


SCALE = """
struct Args {
  long long first;
  float* output;
};
extern "C" __global__ void scale(const __grid_constant__ Args args) {
  extern __shared__ __align__(16) char memory[];
  float* shared = reinterpret_cast<float*>(memory);
  shared[threadIdx.x] = args.first * 2.0f + threadIdx.x;
  __syncthreads();
  if (args.output) args.output[blockIdx.x * blockDim.x + threadIdx.x] = shared[threadIdx.x];
}
"""


def test_real_nvrtc():
    nvrtc, why = compiler.find(1000)
    if nvrtc is None:
        pytest.skip(why)
    assert nvrtc.compile(SCALE, compiler.headers(), "sm_90").startswith(b"\x7fELF")
    with pytest.raises(RuntimeError, match=r"variant.cu\(1\): error: .*nowhere"):
        nvrtc.compile("int x = nowhere;", {}, "sm_90")


@pytest.mark.gpu
class TestOnDevice:
    @pytest.fixture(autouse=True)
    def fresh(self):
        forget()

    def test_attributes(self):
        found = driver.attributes(0)
        assert found.name
        assert found.capability >= (5, 0)
        assert found.sms > 0
        assert 48 << 10 <= found.shared_per_block <= found.shared_per_sm

    @pytest.mark.parametrize("shared", [256, 60_000])
    def test_launches(self, shared):
        torch = pytest.importorskip("torch")
        function = driver.load(SCALE, ["scale"], 0)["scale"]
        output = torch.zeros(3 * 64, device="cuda:0")
        stream = torch.cuda.current_stream(0).cuda_stream
        expected = (10.0 + torch.arange(64)).repeat(3)

        def run():
            function.launch(3, 64, shared, stream, Args(5, output.data_ptr()))

        for start in (run, lambda: join(run)):  # here, and in a thread that has no context
            output.zero_()
            torch.cuda.synchronize()
            start()
            torch.cuda.synchronize()
            assert torch.equal(output.cpu(), expected)
        assert function.registers > 0
        assert function.local_bytes == 0

    def test_on_a_stream_and_in_a_graph(self):
        torch = pytest.importorskip("torch")
        function = driver.load(SCALE, ["scale"], 0)["scale"]
        output = torch.zeros(64, device="cuda:0")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            stream = torch.cuda.current_stream(0).cuda_stream
            function.launch(1, 64, 256, stream, Args(5, output.data_ptr()))
        graph.replay()
        torch.cuda.synchronize()
        assert output[0].item() == 10

    def test_from_disk(self, caplog):
        driver.load(SCALE, ["scale"], 0)
        forget()
        caplog.clear()
        function = driver.load(SCALE, ["scale"], 0)["scale"]
        function.launch(1, 64, 256, 0, Args(5, None))
        assert not caplog.records

    def test_refuses_what_is_too_large(self):
        function = driver.load(SCALE, ["scale"], 0)["scale"]
        with pytest.raises(RuntimeError, match="invalid argument"):
            function.launch(1, 2048, 0, 0, Args(5, None))
        with pytest.raises(RuntimeError, match="bytes of shared memory, but can have"):
            function.launch(1, 32, 1 << 20, 0, Args(5, None))

    def test_is_quick(self):
        torch = pytest.importorskip("torch")
        function = driver.load(SCALE, ["scale"], 0)["scale"]
        args = Args(5, None)
        torch.zeros(1, device="cuda:0")
        function.launch(1, 64, 256, 0, args)
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(500):
            function.launch(1, 64, 256, 0, args)
        seconds = (time.perf_counter() - start) / 500
        torch.cuda.synchronize()
        assert seconds < 50e-6


def join(run):
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
