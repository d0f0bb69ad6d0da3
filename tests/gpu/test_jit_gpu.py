"""The runtime on a real GPU: params read back, launches, graphs, streams, forks, times."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from snapmla_rt import kernels
from snapmla_rt.array import DeviceArray, to_device, to_host
from snapmla_rt.driver import memory
from snapmla_rt.driver.device import current_device, device_context, device_count, require_hopper
from snapmla_rt.driver.graph import Graph
from snapmla_rt.driver.tensor_map import encode_tiled
from snapmla_rt.errors import CudaError
from snapmla_rt.jit.disk_cache import DiskCache
from snapmla_rt.jit.loader import KernelLoader
from snapmla_rt.jit.spec import KernelSpec, KernelTable, ParamsLayout, Struct, Variant
from snapmla_rt.tensor import resolve_stream, view

ROOT = Path(__file__).resolve().parents[2]

ALL_TYPES = (
    ("a", "i32"),
    ("b", "u64"),
    ("c", "f32"),
    ("inner", Struct("inner", (("x", "u32"), ("y", "i64"), ("map", "tensor_map")))),
    ("p", "ptr<float>"),
    ("d", "u32"),
    ("q", "ptr"),
    ("m", "tensor_map"),
    ("e", "i32"),
)

SOURCES = {
    # adds `add` to every element, in order of launches
    "add": """
#include "add_params.h"
extern "C" __global__ void __launch_bounds__(256) add(const __grid_constant__ AddParams p) {
  asm volatile("griddepcontrol.wait;" ::: "memory");
  long long i = blockIdx.x * 256ll + threadIdx.x;
  if (i < p.count) p.data[i] = p.data[i] * 3 + p.add;
}
""",
    # waits, then writes: what reads the value too early sees the old one
    "slow_write": """
#include "slow_write_params.h"
extern "C" __global__ void slow_write(const __grid_constant__ SlowWriteParams p) {
  unsigned long long start, now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(start));
  do {
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  } while (now - start < p.nanoseconds);
  *p.data = p.value;
}
""",
    # the whole of a large dynamic shared memory, reversed
    "shared": """
#include "shared_params.h"
extern __shared__ int s[];
extern "C" __global__ void __launch_bounds__(256) shared(const __grid_constant__ SharedParams p) {
  for (int i = threadIdx.x; i < p.words; i += 256) s[i] = i;
  __syncthreads();
  for (int i = threadIdx.x; i < p.words; i += 256) p.out[i] = s[p.words - 1 - i];
}
""",
    # rank of each CTA in its cluster
    "cluster": """
#include "cluster_params.h"
extern "C" __global__ void cluster(const __grid_constant__ ClusterParams p) {
  unsigned rank, size;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(size));
  if (threadIdx.x == 0) p.out[blockIdx.x] = size * 100 + rank;
}
""",
}
SHARED_BYTES = 227 * 1024
ROWS = (
    KernelSpec("add", "add.cu", (("data", "ptr<int>"), ("count", "i64"), ("add", "i32")), 256),
    KernelSpec(
        "slow_write",
        "slow_write.cu",
        (("data", "ptr<int>"), ("nanoseconds", "u64"), ("value", "i32")),
        32,
    ),
    KernelSpec(
        "shared",
        "shared.cu",
        (("out", "ptr<int>"), ("words", "i32")),
        256,
        variants=(Variant("", (), SHARED_BYTES),),
    ),
    KernelSpec("cluster", "cluster.cu", (("out", "ptr<int>"),), 32, cluster=(4, 1, 1)),
)


@pytest.fixture(scope="module")
def loader(tmp_path_factory: pytest.TempPathFactory) -> KernelLoader:
    folder = tmp_path_factory.mktemp("jit_gpu")
    for name, text in SOURCES.items():
        (folder / f"{name}.cu").write_text(text)
    return KernelLoader(KernelTable(ROWS, folder), DiskCache(folder / "cache"))


# --- Parameters --------------------------------------------------------------------------------


def read_back_source(spec: KernelSpec) -> str:
    """A kernel that copies every field's bytes, at the address the compiler gives it."""
    copies = "\n".join(
        f"  copy(p.out + {leaf.offset}, &p.fields.{leaf.path}, sizeof(p.fields.{leaf.path}));"
        for leaf in spec.layout.leaves
    )
    return f"""
#include "read_back_params.h"
__device__ void copy(unsigned char* to, const void* from, int bytes) {{
  for (int i = 0; i < bytes; ++i) to[i] = ((const unsigned char*)from)[i];
}}
extern "C" __global__ void read_back(const __grid_constant__ ReadBackParams p) {{
{copies}
}}
"""


def random_values(layout: ParamsLayout, rng: np.random.Generator) -> list[Any]:
    """A value for each leaf that no neighbour or padding could pass for."""
    makers: dict[str, Callable[[], Any]] = {
        "i32": lambda: int(rng.integers(-(2**31), 2**31)),
        "u32": lambda: int(rng.integers(0, 2**32)),
        "i64": lambda: int(rng.integers(-(2**63), 2**63)),
        "u64": lambda: int(rng.integers(0, 2**63)) * 2 + 1,
        "f32": lambda: float(np.float32(rng.normal())),
        "tensor_map": lambda: rng.bytes(128),
    }
    return [makers.get(leaf.type, makers["u64"])() for leaf in layout.leaves]


@pytest.mark.parametrize(
    "spec",
    [KernelSpec("all_types", "-", ALL_TYPES, 32), *kernels.TABLE.specs],
    ids=lambda spec: spec.name,
)
def test_every_field_is_read_back(spec: KernelSpec, tmp_path: Path) -> None:
    """Both sides lay out every params struct of the project alike, by the device's own word."""
    (tmp_path / "read_back.cu").write_text(read_back_source(spec))
    fields = (("out", "ptr<unsigned char>"), ("fields", Struct(spec.name, spec.params)))
    row = KernelSpec("read_back", "read_back.cu", fields, 32)
    source = KernelLoader(KernelTable((row,), tmp_path), DiskCache(tmp_path / "cache"))
    values = random_values(spec.layout, np.random.default_rng(7))
    out = to_device(np.zeros(spec.layout.size, np.uint8))
    source.kernel("read_back").launch((1, 1, 1), 0, out.ptr, *values)
    want = np.frombuffer(spec.layout.pack(*values), np.uint8)
    assert (out.numpy() == want).all()


# --- Launches ----------------------------------------------------------------------------------


def test_chained_launches_with_and_without_pdl(loader: KernelLoader) -> None:
    """A long chain of dependent launches: each waits for the one before, PDL or not."""
    count, start = 100_000, np.arange(100_000, dtype=np.int32) % 7
    stream = memory.Stream(0)
    kernel = loader.kernel("add")
    for pdl in (False, True):
        data = to_device(start)
        want = start.astype(np.int64)
        for step in range(50):
            grid = (-(-count // 256), 1, 1)
            kernel.launch(grid, stream.handle, data.ptr, count, step, pdl=pdl)
            want = (want * 3 + step) % 2**32
        assert (data.numpy(stream.handle).astype(np.int64) % 2**32 == want).all()


def test_capture_and_replay(loader: KernelLoader) -> None:
    """Captured after a warm-up launch, with PDL edges; every replay does the work again."""
    count, stream = 1000, memory.Stream(0)
    kernel = loader.kernel("add")
    data = to_device(np.ones(count, np.int32))
    kernel.launch((4, 1, 1), stream.handle, data.ptr, count, 0)
    graph = Graph(0)
    with graph.capture(stream.handle):
        assert memory.is_capturing(stream.handle, 0)
        for step in range(3):
            kernel.launch((4, 1, 1), stream.handle, data.ptr, count, step, pdl=True)
    assert not memory.is_capturing(stream.handle, 0)
    assert (data.numpy(stream.handle) == 3).all(), "capturing runs nothing"
    value = 3
    for _ in range(5):
        graph.launch(stream.handle)
        for step in range(3):
            value = value * 3 + step
        assert (data.numpy(stream.handle) == np.int64(value).astype(np.int32)).all()


def test_prepared_launches(loader: KernelLoader) -> None:
    """Prepared once, called often, eagerly and under capture, with and without a context."""
    stream, kernel = memory.Stream(0), loader.kernel("add")
    for handle in (stream.handle, 0):
        data = to_device(np.ones(10, np.int32))
        prepared = kernel.prepare((1, 1, 1), handle, data.ptr, 10, 1, pdl=True)
        assert prepared is not None
        prepared()
        with device_context(device_count() - 1):  # perhaps another GPU's
            prepared()
        assert (data.numpy(handle) == 13).all()
        if handle:
            graph = Graph(0)
            with graph.capture(handle):
                prepared()
            graph.launch(handle)
            assert (data.numpy(handle) == 40).all()


def test_first_call_inside_a_capture(loader: KernelLoader) -> None:
    """Loading the code, allocating and freeing neither break a capture nor enter it."""
    stream, data = memory.Stream(0), to_device(np.ones(10, np.int32))
    fresh = KernelLoader(loader.table, loader._cache)
    graph = Graph(0)
    with graph.capture(stream.handle):
        fresh.kernel("add").launch((1, 1, 1), stream.handle, data.ptr, 10, 1)
        DeviceArray((1000,), "float32")
        memory.PinnedBuffer(1000)
    graph.launch(stream.handle)
    graph.launch(stream.handle)
    assert (data.numpy(stream.handle) == 13).all()


def test_all_dynamic_shared_memory(loader: KernelLoader) -> None:
    words = SHARED_BYTES // 4
    out = DeviceArray((words,), "int32")
    loader.kernel("shared").launch((1, 1, 1), 0, out.ptr, words)
    assert (out.numpy() == np.arange(words)[::-1]).all()


def test_clusters(loader: KernelLoader) -> None:
    out = DeviceArray((8,), "int32")
    kernel = loader.kernel("cluster")
    kernel.launch((8, 1, 1), 0, out.ptr)
    assert out.numpy().tolist() == [400, 401, 402, 403] * 2
    with pytest.raises(CudaError, match="cuLaunchKernelEx of cluster with grid"):
        kernel.launch((6, 1, 1), 0, out.ptr)


def test_refused_launches_are_errors(loader: KernelLoader) -> None:
    """65,536 CTAs along y or z: the driver's refusal is not swallowed, along x they all run."""
    out = to_device(np.zeros(70_000 * 256, np.int32))
    kernel = loader.kernel("add")
    for grid in ((1, 65_536, 1), (1, 1, 65_536)):
        with pytest.raises(CudaError, match="CUDA_ERROR_INVALID_VALUE"):
            kernel.launch(grid, 0, out.ptr, out.shape[0], 1)
    assert (out.numpy() == 0).all()
    kernel.launch((70_000, 1, 1), 0, out.ptr, out.shape[0], 1)
    assert (out.numpy() == 1).all()


def test_failed_work_surfaces_at_synchronisation() -> None:
    """A stray write poisons a context, so in a process of its own: the error names the call."""
    out = run_script(
        """
        kernel = loader.kernel("add")
        kernel.launch((1, 1, 1), 0, 16, 10, 1)
        try:
            memory.synchronize(0, 0)
        except CudaError as error:
            print("said:", error)
        """
    )
    assert "said: cuStreamSynchronize: CUDA_ERROR_ILLEGAL_ADDRESS" in out


def test_devices_have_their_own_handles(loader: KernelLoader) -> None:
    if device_count() < 2:
        pytest.skip("needs two GPUs")
    for index in (1, 0, 1):
        data = to_device(np.full(10, index, np.int32), index)
        loader.kernel("add", device_index=index).launch((1, 1, 1), 0, data.ptr, 10, 5)
        assert (data.numpy() == index * 3 + 5).all()
        out = DeviceArray((16,), "int32", index)
        loader.kernel("shared", device_index=index).launch((1, 1, 1), 0, out.ptr, 16)
        assert out.numpy()[0] == 15
        assert current_device() is None or current_device() in (0, 1)


def test_device_of_a_pointer_and_tensor_maps() -> None:
    index = device_count() - 1
    data = DeviceArray((64, 576), "bfloat16", index)
    bare = type("Bare", (), {"__cuda_array_interface__": data.__cuda_array_interface__})()
    assert view(bare, "x").device_index == index
    args = ("bfloat16", data.ptr, (576, 64), (1152,), (64, 64))
    assert len(encode_tiled(*args)) == 128 and encode_tiled(*args) is encode_tiled(*args)


# --- Streams, copies ---------------------------------------------------------------------------


def test_work_waits_for_the_producer_s_stream(loader: KernelLoader) -> None:
    """A producer still running on stream A: a call on B that is told of A sees its result."""
    first, second = memory.Stream(0), memory.Stream(0)
    data = to_device(np.zeros(1, np.int32))
    loader.kernel("slow_write").launch((1, 1, 1), first.handle, data.ptr, 20_000_000, 7)
    array = type("Array", (), {})()
    array.__cuda_array_interface__ = {**data.__cuda_array_interface__, "stream": first.handle}
    stream = resolve_stream(second, [view(array, "x")], 0)
    assert stream == second.handle
    loader.kernel("add").launch((1, 1, 1), stream, data.ptr, 1, 1)
    assert data.numpy(stream)[0] == 22


def test_pinned_copies_are_asynchronous(loader: KernelLoader) -> None:
    """A copy behind a 50 ms kernel returns at once and carries the kernel's result."""
    stream, pinned = memory.Stream(0), memory.PinnedBuffer(4)
    data = to_device(np.zeros(1, np.int32))
    host = np.frombuffer(pinned.view(), np.int32)
    host[:] = -1
    kernel = loader.kernel("slow_write")
    start = time.perf_counter()
    kernel.launch((1, 1, 1), stream.handle, data.ptr, 50_000_000, 9)
    memory.copy_to_host(pinned.ptr, data.ptr, 4, 0, stream.handle)
    assert time.perf_counter() - start < 0.03 and host[0] == -1
    stream.synchronize()
    assert host[0] == 9


def test_torch_tensors_and_streams(loader: KernelLoader) -> None:
    torch = pytest.importorskip("torch")
    data = torch.zeros(1000, dtype=torch.int32, device="cuda:0")
    side = torch.cuda.Stream()
    kernel = loader.kernel("add")
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)
        data += 5
        seen = view(data, "x")
        stream = resolve_stream(None, [seen], 0)
        assert stream == side.cuda_stream
        kernel.launch((4, 1, 1), stream, seen.ptr, 1000, 1)
    torch.cuda.synchronize()
    assert (data == 16).all()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        seen = view(data, "x")
        kernel.launch((4, 1, 1), resolve_stream(None, [seen], 0), seen.ptr, 1000, 0)
    graph.replay()
    torch.cuda.synchronize()
    assert (data == 48).all()
    for name in ("float8_e4m3fn", "bfloat16", "float16"):
        made = torch.ones(3, 4, device="cuda").to(getattr(torch, name))
        assert view(made.t(), "x").dtype == name
        assert (to_host(view(made.t(), "x")).astype(np.float32) == 1).all()


def test_cupy_arrays_and_streams(loader: KernelLoader) -> None:
    cupy = pytest.importorskip("cupy")
    with cupy.cuda.Stream(non_blocking=True) as stream:
        data = cupy.arange(100, dtype=cupy.int32)
        seen = view(data, "x")
        assert resolve_stream(None, [seen], 0) == stream.ptr
        loader.kernel("add").launch((1, 1, 1), stream.ptr, seen.ptr, 100, 1)
        assert (cupy.asnumpy(data) == np.arange(100) * 3 + 1).all()


# --- Processes and times -----------------------------------------------------------------------

SCRIPT = """
import faulthandler, os, sys, time
faulthandler.enable()
import numpy as np
sys.path.insert(0, {tests!r})
start = time.perf_counter()
import snapmla_rt
from snapmla_rt.array import DeviceArray, to_device
from snapmla_rt.driver import check, device, memory
from snapmla_rt.errors import *
from pathlib import Path
from snapmla_rt.jit.disk_cache import DiskCache
from snapmla_rt.jit.loader import KernelLoader
from snapmla_rt.jit.spec import KernelSpec, KernelTable
folder = Path({folder!r})
loader = KernelLoader(KernelTable((KernelSpec(
    "add", "add.cu", (("data", "ptr<int>"), ("count", "i64"), ("add", "i32")), 256),), folder),
    DiskCache(folder / "cache"))

def use():
    data = to_device(np.ones(10, np.int32))
    loader.kernel("add").launch((1, 1, 1), 0, data.ptr, 10, 1)
    assert (data.numpy() == 4).all()

def in_child(work):
    child = os.fork()
    if child == 0:
        code = 1
        try:
            work()
            code = 0
        except BaseException as error:
            print(type(error).__name__, error, flush=True)
        os._exit(code)
    status = os.waitpid(child, 0)[1]
    if status:
        print("child ended with", status, flush=True)
    return status
"""


def run_script(text: str, **environment: str) -> str:
    """Run SCRIPT and then `text` in a process of its own; fails with its traceback."""
    with tempfile.TemporaryDirectory() as made:
        place = Path(made)
        (place / "add.cu").write_text(SOURCES["add"])
        whole = SCRIPT.format(tests=str(ROOT), folder=str(place)) + textwrap.dedent(text)
        env = dict(os.environ, PYTHONPATH=str(ROOT), SNAPMLA_JIT="lazy")
        env.update(environment)
        command = [sys.executable, "-c", whole]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_fork_before_use() -> None:
    """Import (with its background thread), fork, use the GPU in children and then in the parent."""
    run_script(
        """
        for _ in range(3):
            assert in_child(use) == 0
        use()
        """,
        SNAPMLA_JIT="import",
    )


def test_fork_after_use_is_a_clear_error() -> None:
    run_script(
        """
        use()
        def refused():
            try:
                use()
            except CudaError as error:
                assert "forked" in str(error) and "spawn" in str(error)
            else:
                raise AssertionError("no error")
        assert in_child(refused) == 0
        use()
        """
    )


def test_import_initialises_nothing_and_compiles_in_the_background(tmp_path: Path) -> None:
    """No cuInit after import and its thread: the driver itself still answers 'not initialised'."""
    out = run_script(
        """
        from snapmla_rt import kernels
        assert kernels.LOADER.wait_background(120)
        import ctypes
        count = ctypes.c_int()
        not_initialised = 3
        assert ctypes.CDLL("libcuda.so.1").cuDeviceGetCount(ctypes.byref(count)) == not_initialised
        print(len(kernels.LOADER._compiled), len(kernels.TABLE.jobs()))
        """,
        SNAPMLA_JIT="import",
        SNAPMLA_CACHE_DIR=str(tmp_path / "cache"),
    )
    compiled, jobs = map(int, out.split())
    assert compiled == jobs > 0
    assert len(list((tmp_path / "cache").glob("*.cubin"))) == jobs


TIMES = """
imported = time.perf_counter() - start
from snapmla_rt import kernels
begin = time.perf_counter()
for spec, variant in kernels.TABLE.jobs():
    kernels.LOADER.compiled(spec.name, variant.name)
compiled = time.perf_counter() - begin
begin = time.perf_counter()
device.require_hopper(0)
with device.device_context(0):
    context = time.perf_counter() - begin
    begin = time.perf_counter()
    for spec, variant in kernels.TABLE.jobs():
        kernels.kernel(spec.name, variant.name)
    loaded = time.perf_counter() - begin
print(imported, compiled, context, loaded)
"""


def test_cold_and_warm_times(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Cold compile of everything <= 15 s; warm cache to every kernel loaded <= 1 s."""
    cache = {"SNAPMLA_CACHE_DIR": str(tmp_path / "cache")}
    with capsys.disabled():
        print()
        for name in ("cold", "warm"):
            times = [float(part) for part in run_script(TIMES, **cache).split()]
            print(
                f"  {name}: import {times[0]:.3f} s, compile or read all {times[1]:.3f} s, "
                f"context {times[2]:.3f} s, load all {times[3]:.3f} s"
            )
            assert times[1] < (15 if name == "cold" else 1)
            assert times[3] < 1


def test_launch_cost(loader: KernelLoader, capsys: pytest.CaptureFixture[str]) -> None:
    """Host time of a launch with a current context and without; the bound leaves a slow host."""
    kernel, stream = loader.kernel("add"), memory.Stream(0)
    data = DeviceArray((256,), "int32")

    def microseconds() -> float:
        best = float("inf")
        for _ in range(20):
            begin = time.perf_counter()
            for _ in range(100):
                kernel.launch((1, 1, 1), stream.handle, data.ptr, 256, 1)
            best = min(best, (time.perf_counter() - begin) * 1e4)
            stream.synchronize()
        return best

    bare = microseconds()
    with device_context(0):
        current = microseconds()
    with capsys.disabled():
        print(f"\n  launch: {current:.2f} us, {bare:.2f} us where the context is pushed each time")
    assert current < 10 and bare < 20
    assert require_hopper(0).num_sms > 0
