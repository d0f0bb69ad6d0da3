"""The host side of the driver layer against a stand-in libcuda (fake_cuda.c): which calls are made,
with what bytes, and what a caller is told. Each case runs in its own process, since the driver is
loaded once a process."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("cuda.bindings")
HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]

PROBE = """
#include "probe_params.h"
extern "C" __global__ void __launch_bounds__(64) probe(const __grid_constant__ ProbeParams p) {
  p.out[threadIdx.x] = p.count + (int)p.offset;
}
"""

PREAMBLE = """
import ctypes, os, sys, threading
from pathlib import Path
import numpy as np
from snapmla_rt.errors import *
from snapmla_rt.driver import check, device, launch, memory, tensor_map
from snapmla_rt.jit.spec import KernelSpec, KernelTable, Struct, Variant
from snapmla_rt.jit.loader import KernelLoader

FAKE = ctypes.CDLL("libcuda.so.1")

def fake(name):
    return ctypes.c_int.in_dll(FAKE, name)

class Launch(ctypes.Structure):
    _fields_ = [("grid", ctypes.c_uint * 3), ("block", ctypes.c_uint * 3),
                ("shared", ctypes.c_uint), ("stream", ctypes.c_void_p),
                ("num_attributes", ctypes.c_uint), ("ids", ctypes.c_int * 4),
                ("words", (ctypes.c_uint * 3) * 4), ("params", ctypes.c_ubyte * 4096),
                ("function", ctypes.c_void_p), ("device", ctypes.c_int),
                ("launches", ctypes.c_int)]

def last():
    return Launch.in_dll(FAKE, "fake_launch")

def loader(**changes):
    row = dict(name="probe", source="probe.cu", threads=64,
               params=(("count", "i32"), ("offset", "i64"), ("out", "ptr<int>"),
                       ("map", "tensor_map"), ("factor", "f32")),
               variants=(Variant("", (), 100_000),))
    row.update(changes)
    return KernelLoader(KernelTable((KernelSpec(**row),), Path(os.environ["PROBE_DIR"])))

def raises(kind, call, *words):
    try:
        call()
    except kind as error:
        missing = [word for word in words if word not in str(error)]
        assert not missing, (missing, str(error))
        return error
    raise AssertionError(f"{kind.__name__} was not raised")
"""


@pytest.fixture(scope="session")
def fake_driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the stand-in libcuda.so.1 and the probe kernel."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler for the stand-in driver")
    folder = tmp_path_factory.mktemp("fake_driver")
    library = folder / "libcuda.so.1"
    command = [compiler, "-Wall", "-Werror", "-shared", "-fPIC", "-O1", "-o", str(library)]
    subprocess.run([*command, str(HERE / "fake_cuda.c"), "-ldl"], check=True)
    (folder / "probe.cu").write_text(PROBE)
    return folder


@pytest.fixture
def run_with_fake(fake_driver: Path) -> Callable[..., str]:
    """Run a script with the stand-in driver; fails with its traceback when it raises."""

    def run(script: str, **environment: str) -> str:
        env = dict(
            os.environ,
            LD_LIBRARY_PATH=str(fake_driver),
            PYTHONPATH=str(ROOT),
            PROBE_DIR=str(fake_driver),
            SNAPMLA_CACHE_DIR=str(fake_driver / "cache"),
            SNAPMLA_JIT="lazy",
        )
        env.pop("CUDA_VISIBLE_DEVICES", None)
        env.update(environment)
        text = PREAMBLE + textwrap.dedent(script)
        done = subprocess.run(
            [sys.executable, "-c", text], env=env, capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    return run


def test_launch_passes_every_byte(run_with_fake: Callable[..., str]) -> None:
    """Grid, block, stream, shared memory, attributes and the packed struct reach the driver."""
    run_with_fake(
        """
        import struct
        kernel = loader(cluster=(2, 1, 1)).kernel("probe", device_index=1)
        fake("fake_param_bytes").value = 256
        descriptor = bytes(range(128))
        kernel.launch((70000, 3, 2), 0x77, -5, 1 << 40, 0xDEADBEEF000, descriptor, 1.5)
        sent = last()
        assert list(sent.grid) == [70000, 3, 2] and list(sent.block) == [64, 1, 1]
        assert sent.stream == 0x77 and sent.shared == 100_000 and sent.device == 1
        assert fake("fake_shared_attribute").value == 100_000
        assert sent.num_attributes == 1 and sent.ids[0] == 4 and list(sent.words[0]) == [2, 1, 1]
        # i32 at 0, i64 at 8, ptr at 16, tensor map at 64, f32 at 192: 256 bytes, aligned to 64
        want = struct.pack("<i4xqQ40x128sf60x", -5, 1 << 40, 0xDEADBEEF000, descriptor, 1.5)
        assert bytes(sent.params)[:256] == want
        kernel.launch((1, 1, 1), 0, 1, 1, 1, descriptor, 0.0, pdl=True)
        sent = last()
        assert sent.num_attributes == 2 and sent.ids[1] == 6 and sent.words[1][0] == 1
        kernel.launch((1, 1, 1), 0, 1, 1, 1, descriptor, 0.0)
        assert last().num_attributes == 1, "pdl must not stick"
        assert FAKE.fake_context_depth() == 0, "contexts are popped"
        """
    )


def test_prepared_launch_passes_the_same_bytes(run_with_fake: Callable[..., str]) -> None:
    """What `prepare` fixed reaches the driver at every call, whatever was launched in between."""
    run_with_fake(
        """
        kernel = loader(cluster=(2, 1, 1)).kernel("probe", device_index=1)
        fake("fake_param_bytes").value = 256
        values = (-5, 1 << 40, 0xDEADBEEF000, bytes(range(128)), 1.5)
        def seen():
            sent = last()
            return (list(sent.grid), list(sent.block), sent.stream, sent.shared, sent.device,
                    sent.num_attributes, list(sent.ids)[:sent.num_attributes],
                    [list(w) for w in sent.words][:sent.num_attributes],
                    bytes(sent.params)[:256], sent.function)
        for stream in (0, 2, 0x77):
            for pdl in (False, True):
                kernel.launch((7, 3, 2), stream, *values, pdl=pdl)
                want = seen()
                prepared = kernel.prepare((7, 3, 2), stream, *values, pdl=pdl)
                for _ in range(3):
                    kernel.launch((1, 1, 1), 5, 1, 2, 3, bytes(128), 0.5)
                    prepared()
                    assert seen() == want, (seen(), want)
        # A current context of the device is used; with a stream of its own none is needed.
        with device.device_context(0):
            prepared = kernel.prepare((1, 1, 1), 0, *values)
            prepared()
            assert last().device == 1 and device.current_device() == 0
        assert FAKE.fake_context_depth() == 0
        assert kernel.prepare((0, 1, 1), 0, *values) is None
        raises(ArgumentError, lambda: kernel.prepare((1, 1, 1), 0, *values[:-1]), "got 4")
        fake("fake_launch_result").value = 701
        error = raises(CudaError, prepared, "cuLaunchKernelEx of probe", "grid (1, 1, 1)", "701")
        assert error.code == 701
        """
    )


def test_launch_refuses_what_does_not_fit(run_with_fake: Callable[..., str]) -> None:
    run_with_fake(
        """
        kernel = loader().kernel("probe")
        good = [1, 2, 3, bytes(128), 0.5]
        grid = (1, 1, 1)
        raises(ArgumentError, lambda: kernel.launch(grid, 0, *good[:-1]), "5 (count", "got 4")
        for at, bad in ((0, 1 << 31), (1, 1.5), (2, -1), (3, "text"), (4, 1e300)):
            values = good[:at] + [bad] + good[at + 1:]
            raises(ArgumentError, lambda: kernel.launch(grid, 0, *values), "values of probe")
        assert last().launches == 0
        for empty in ((0, 1, 1), (1, 0, 1), (1, 1, 0)):
            kernel.launch(empty, 0, *good)
        assert last().launches == 0, "an empty grid launches nothing"
        fake("fake_launch_result").value = 701
        error = raises(CudaError, lambda: kernel.launch(grid, 0, *good),
                       "cuLaunchKernelEx of probe", "grid (1, 1, 1)", "701")
        assert error.code == 701
        """
    )


def test_prepared_launch_equals_launch(run_with_fake: Callable[..., str]) -> None:
    """What `prepare` makes enqueues what `launch` would, each time, on whatever thread."""
    run_with_fake(
        """
        fake("fake_param_bytes").value = 256
        kernel = loader(cluster=(2, 1, 1)).kernel("probe", device_index=1)
        values = (-5, 1 << 40, 0xDEADBEEF000, bytes(range(128)), 1.5)
        def sent():
            s = last()
            return (list(s.grid), list(s.block), s.shared, s.stream, s.num_attributes,
                    list(s.ids)[:s.num_attributes], [list(w) for w in s.words][:s.num_attributes],
                    bytes(s.params)[:256], s.function, s.device)
        for stream in (0, 2, 0x77):
            for pdl in (False, True):
                kernel.launch((70000, 3, 2), stream, *values, pdl=pdl)
                want = sent()
                prepared = kernel.prepare((70000, 3, 2), stream, *values, pdl=pdl)
                kernel.launch((1, 1, 1), 9, 0, 0, 0, bytes(128), 0.0)
                for _ in range(2):
                    before = last().launches
                    thread = threading.Thread(target=prepared)
                    thread.start()
                    thread.join()
                    assert sent() == want and last().launches == before + 1
        assert kernel.prepare((0, 1, 1), 0, *values) is None
        raises(ArgumentError, lambda: kernel.prepare((1, 1, 1), 0, *values[:-1]), "values of probe")
        fake("fake_launch_result").value = 701
        raises(CudaError, prepared, "cuLaunchKernelEx of probe", "(70000, 3, 2)", "701")
        """
    )


def test_grids_beyond_32_bits_are_refused(run_with_fake: Callable[..., str]) -> None:
    """Never cut to 32 bits, which would launch a part of the work without a word."""
    run_with_fake(
        """
        kernel, values = loader().kernel("probe"), (1, 2, 3, bytes(128), 0.5)
        for grid in ((2**32 + 1, 1, 1), (1, 2**32 + 1, 1), (1, 1, 2**31), (-1, 1, 1), (1, 1, -5)):
            for call in (kernel.launch, kernel.prepare):
                raises(ArgumentError, lambda: call(grid, 0, *values), "grid of probe", str(grid))
        assert last().launches == 0
        kernel.launch((2**31 - 1, 1, 1), 0, *values)
        assert last().grid[0] == 2**31 - 1
        """
    )


def test_launch_from_many_threads(run_with_fake: Callable[..., str]) -> None:
    """32 threads first-calling one kernel: one compile, one load, every launch whole."""
    run_with_fake(
        """
        from snapmla_rt.jit import loader as loading
        compiled = []
        inner = loading.compile_unit
        loading.compile_unit = lambda unit: compiled.append(1) or inner(unit)
        os.environ["SNAPMLA_CACHE_DIR"] += "_threads"
        source, start = loader(), threading.Barrier(32)
        seen = []
        def work(number):
            start.wait()
            for _ in range(20):
                kernel = source.kernel("probe", device_index=number % 2)
                kernel.launch((1, 1, 1), number, number, 0, 0, bytes(128), 0.0)
            seen.append(kernel)
        threads = [threading.Thread(target=work, args=(n,)) for n in range(32)]
        [t.start() for t in threads]; [t.join() for t in threads]
        assert len(compiled) == 1 and len({id(k) for k in seen}) == 2 and len(seen) == 32
        assert fake("fake_library_loads").value == 1 and last().launches == 640
        """
    )


def test_current_context_is_left_alone(run_with_fake: Callable[..., str]) -> None:
    """The tensors' device decides; a current context of it is used, others are restored."""
    run_with_fake(
        """
        kernel = loader().kernel("probe", device_index=1)
        values = (1, 2, 3, bytes(128), 0.5)
        made = fake("fake_contexts_made").value
        with device.device_context(0):
            kernel.launch((1, 1, 1), 0, *values)
            assert last().device == 1 and device.current_device() == 0
        with device.device_context(1):
            kernel.launch((1, 1, 1), 0, *values)
            assert last().device == 1 and FAKE.fake_context_depth() == 1
        assert device.current_device() is None
        assert fake("fake_contexts_made").value <= made + 1, "each primary context is kept"
        raises(ArgumentError, lambda: device.device_info(7), "device: expected 0 to 1, got 7")
        """
    )


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({"FAKE_CUDA_MAJOR": "8", "FAKE_CUDA_MINOR": "0"}, ("requires sm_90a (Hopper)", "sm_80")),
        ({"FAKE_CUDA_MAJOR": "10", "FAKE_CUDA_MINOR": "0"}, ("found sm_100", "reference")),
        ({"FAKE_CUDA_MAJOR": "12", "FAKE_CUDA_MINOR": "1"}, ("found sm_121",)),
        ({"FAKE_CUDA_VERSION": "11080"}, ("CUDA 11.8", "or newer", "update the driver")),
        ({"FAKE_CUDA_DEVICES": "0"}, ("finds no GPU",)),
    ],
)
def test_unsupported_machines(
    run_with_fake: Callable[..., str], environment: dict[str, str], words: tuple[str, ...]
) -> None:
    """Every entry point says what was found and what is needed; `auto` uses the reference."""
    run_with_fake(
        f"""
        words = {words!r}
        raises(UnsupportedDeviceError, lambda: device.require_hopper(0), *words)
        raises(UnsupportedDeviceError, lambda: loader().kernel("probe"), *words)
        from snapmla_rt.backend import resolve_backend
        raises(UnsupportedDeviceError, lambda: resolve_backend("cuda", {{}}), *words)
        assert resolve_backend("auto", {{}}) == ("reference", -1)
        """,
        **environment,
    )


def test_driver_older_than_the_bindings(run_with_fake: Callable[..., str]) -> None:
    run_with_fake(
        """
        if check.bindings_major() >= 13:
            raises(UnsupportedDeviceError, check.initialise, "CUDA 12.4", "580", "snapmla-rt[cu12]")
        else:
            check.initialise()
        """,
        FAKE_CUDA_VERSION="12040",
    )


def test_fork(run_with_fake: Callable[..., str]) -> None:
    """Fork before use: the child can use the GPU. Fork after: a clear error at once, no hang."""
    run_with_fake(
        """
        def in_child(work):
            child = os.fork()
            if child == 0:
                try:
                    work()
                except BaseException as error:
                    print(type(error).__name__, error, flush=True)
                    os._exit(1)
                os._exit(0)
            return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

        source = loader()
        source.compiled("probe")  # compiling is not using the GPU
        launch_it = lambda: source.kernel("probe").launch((1, 1, 1), 0, 1, 2, 3, bytes(128), 0.5)
        assert in_child(launch_it) == 0
        launch_it()
        kernel = source.kernel("probe")
        def all_refused():
            for call in (launch_it, check.initialise, lambda: memory.DeviceBuffer(16, 0),
                         lambda: kernel.launch((1, 1, 1), 0, 1, 2, 3, bytes(128), 0.5)):
                raises(CudaError, call, "forked", "spawn")
        assert in_child(all_refused) == 0
        """
    )


def test_fork_after_another_library_used_cuda(run_with_fake: Callable[..., str]) -> None:
    run_with_fake(
        """
        assert FAKE.cuInit(0) == 0  # as torch would
        child = os.fork()
        if child == 0:
            raises(CudaError, check.initialise, "cuInit", "forked", "spawn")
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        """
    )


def test_import_calls_nothing_in_the_driver(run_with_fake: Callable[..., str]) -> None:
    """With a driver and SNAPMLA_JIT=import: no cuInit and no context, in the thread either."""
    run_with_fake(
        """
        from snapmla_rt import kernels
        from snapmla_rt.jit import at_import
        at_import._DRIVER_DEVICES = ("/dev/null",)  # as on a machine with the driver's devices
        at_import.start()
        assert kernels.LOADER._thread is not None, "the thread was started"
        assert kernels.LOADER.wait_background(60)
        assert fake("fake_init_calls").value == 0 and fake("fake_contexts_made").value == 0
        assert "cuda.bindings.driver" not in sys.modules
        """,
        SNAPMLA_JIT="import",
    )


def test_compiling_calls_nothing_in_the_driver(run_with_fake: Callable[..., str]) -> None:
    """NVRTC itself calls cuInit unless told not to, which would forbid CUDA in forked children."""
    run_with_fake(
        """
        os.environ["SNAPMLA_CACHE_DIR"] += "_init"
        assert loader().compiled("probe").cubin
        assert fake("fake_init_calls").value == 0
        """
    )


def test_memory_and_copies(run_with_fake: Callable[..., str]) -> None:
    run_with_fake(
        """
        import gc, ml_dtypes
        from snapmla_rt.array import DeviceArray, copy_into, new_array, to_device, to_host
        from snapmla_rt.tensor import view
        rng = np.random.default_rng(0)
        for dtype in (np.uint8, np.float32, np.int64, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn):
            host = rng.integers(0, 100, (3, 5, 7)).astype(dtype).transpose(2, 0, 1)
            there = to_device(host, 1)
            assert there.view().device == "cuda:1" and there.dtype == host.dtype.name
            back = there.numpy()
            assert back.dtype == host.dtype and (back == host).all()
            assert view(there, "x").ptr == there.ptr
        strided = to_device(rng.integers(0, 255, (4, 6)).astype(np.uint8), 0)
        whole = strided.view()
        whole.shape, whole.strides = (4, 2), (6, 3)
        assert (to_host(whole) == strided.numpy()[:, ::3]).all()
        target = np.zeros((6, 4), np.uint8).T
        copy_into(strided.view(), target)
        assert (target == strided.numpy()).all()
        assert to_host(to_device(np.zeros((0, 4), np.float32)).view()).shape == (0, 4)
        assert type(new_array(strided.view(), (2,), "float32")) is DeviceArray
        raises(MemoryError, lambda: memory.DeviceBuffer(1 << 40, 0), "GPU 0", str(1 << 40))
        raises(MemoryError, lambda: DeviceArray((1 << 40,), "float32"))
        pinned = memory.PinnedBuffer(64)
        bytes_of = np.frombuffer(pinned.view(), np.uint8)
        bytes_of[:] = 7
        del pinned
        gc.collect()
        assert (bytes_of == 7).all(), "a view keeps the memory"
        del there, strided, whole, back, target, bytes_of, host
        gc.collect()
        assert fake("fake_live_allocations").value == 0, "everything is freed"
        """
    )


def test_tensor_map_arguments(run_with_fake: Callable[..., str]) -> None:
    run_with_fake(
        """
        encode = tensor_map.encode_tiled
        made = encode("bfloat16", 0x10000, (64, 100, 7), (128, 41216), (64, 32, 1))
        words = np.frombuffer(made, np.uint64)
        assert len(made) == 128 and words[0] == 9 | 3 << 8 | 3 << 16 | 3 << 24
        assert words[1] == 0x10000 and list(words[2:5]) == [64, 100, 7]
        assert list(words[7:9]) == [128, 41216]
        assert [int(w) >> 32 for w in words[11:14]] == [64, 32, 1]
        assert [int(w) & 0xffffffff for w in words[11:14]] == [1, 1, 1]
        again = encode("bfloat16", 0x10000, [64, 100, 7], [128, 41216], [64, 32, 1])
        assert again is made, "encoded once"
        one = encode("uint8", 16, (128,), (), (128,), swizzle="none", l2_promotion="none")
        assert np.frombuffer(one, np.uint64)[0] == 0 | 1 << 8
        good = dict(element="uint8", address=0x1000, dims=(512, 9), strides_bytes=(512,),
                    box=(128, 8))
        for argument, bad in (
            ("element", "float8"), ("address", 0x1008), ("address", 0), ("dims", (0, 9)),
            ("dims", ()), ("dims", (1,) * 6), ("strides_bytes", (8,)), ("strides_bytes", ()),
            ("strides_bytes", (1 << 40,)), ("strides_bytes", (-16,)), ("box", (128, 257)),
            ("box", (8, 8)), ("box", (256, 1)), ("box", (128,)), ("box", (0, 1)),
        ):
            raises(ArgumentError, lambda: encode(**{**good, argument: bad}), argument)
        raises(ArgumentError, lambda: encode(**good, swizzle="96B"), "swizzle")
        raises(ArgumentError, lambda: encode(**good, l2_promotion="1K"), "l2_promotion")
        """
    )


def test_streams(run_with_fake: Callable[..., str]) -> None:
    """Producers on other streams are waited for by event; under capture nothing is touched."""
    run_with_fake(
        """
        from snapmla_rt.array import to_device
        from snapmla_rt.tensor import resolve_stream, view

        class Array:
            def __init__(self, stream):
                self.inner = to_device(np.zeros(4, np.float32), 1)
                self.__cuda_array_interface__ = dict(
                    self.inner.__cuda_array_interface__, stream=stream)

        a, b, none = (view(Array(s), "x") for s in (0x50, 0x60, None))
        legacy = view(Array(1), "x")
        assert a.device_index == 1, "asked of the driver"
        assert legacy.stream == 0 and none.stream is None
        assert resolve_stream(None, [none], 1) == 0
        assert resolve_stream(None, [none, a], 1) == 0x50
        waits = fake("fake_event_waits")
        assert waits.value == 0
        assert resolve_stream(0x50, [a], 1) == 0x50 and waits.value == 0
        assert resolve_stream(0x50, [a, b, b, none, legacy], 1) == 0x50 and waits.value == 2
        assert resolve_stream(memory.Stream(1), [none], 1) == 0x5001
        fake("fake_capturing").value = 1
        assert resolve_stream(0x70, [a, b, legacy], 1) == 0x70
        assert waits.value == 2 and fake("fake_event_records").value == 2
        """
    )


def test_capture_survives_loading_and_memory(run_with_fake: Callable[..., str]) -> None:
    """First call, allocation and garbage inside a capture, which a plain call would break."""
    run_with_fake(
        """
        import gc
        fake("fake_capturing").value = 1
        loader().kernel("probe").launch((1, 1, 1), 9, 1, 2, 3, bytes(128), 0.5)
        buffers = [memory.DeviceBuffer(64, 0), memory.PinnedBuffer(64)]
        assert fake("fake_live_allocations").value == 2
        del buffers
        gc.collect()
        assert fake("fake_live_allocations").value == 0
        raises(CudaError, lambda: check.call("cuMemAlloc", 64), "cuMemAlloc", "900")
        """
    )


def test_sms_follow_the_green_context(run_with_fake: Callable[..., str]) -> None:
    run_with_fake(
        """
        assert device.current_num_sms(0) == 132, "no context: the device's"
        with device.device_context(1):
            assert device.current_num_sms(1) == 16 and device.current_num_sms(0) == 132
        """,
        FAKE_CUDA_GREEN_SMS="16",
    )
