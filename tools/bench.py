"""Timing on a GPU, shared by the bench_*.py: the burst method, memory for it, result files.

Method 'burst': the GPU is idle for 0.3 s, then a spin kernel holds the stream while 5 warm-up and
40 timed calls are queued behind it; CUDA events around each call; the median. Three repeats; `us`
is the median of the three medians. An event pair around nothing and around an empty kernel is
measured in the same run (about 1.4 and 3.6 us on an H200): that much is in every `us`. So beside
it `us_queued` is the time of the 40 calls together, divided by 40: no event between them.
Calls rotate over copies of their data, together larger than four second-level caches where 64
copies are enough for that ('cold'; else 'rotated'), or use one copy ('warm').
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from snapmla_rt.driver.check import call, driver_version
from snapmla_rt.driver.device import device_context, device_info
from snapmla_rt.driver.memory import DeviceBuffer, Stream, copy_on_device, synchronize
from snapmla_rt.jit.loader import KernelLoader
from snapmla_rt.jit.spec import KernelSpec, KernelTable
from snapmla_rt.tensor import TensorView

ROOT = Path(__file__).resolve().parents[1]
METHOD = "burst"
WARM_UP, TIMED, REPEATS = 5, 40, 3
IDLE_S = 0.3
SPIN_CYCLES = 60_000_000  # 30 to 40 ms: longer than queueing the calls takes

_TABLE = KernelTable(
    specs=(
        KernelSpec("spin", "bench_kernels.cu", (("cycles", "i64"),), threads=32),
        KernelSpec("nothing", "bench_kernels.cu", (("unused", "i64"),), threads=32),
    ),
    source_root=Path(__file__).resolve().parent,
)


@dataclass(frozen=True)
class Timing:
    """Microseconds of one call: median of medians, the lowest and highest of the medians, and the
    time a call takes in an unbroken queue."""

    us: float
    low: float
    high: float
    us_queued: float


class Bench:
    """Times calls on one GPU, on a stream of its own (`stream`)."""

    def __init__(self, device_index: int = 0) -> None:
        self.device_index = device_index
        self.info = device_info(device_index)
        loader = KernelLoader(_TABLE)
        self._spin = loader.kernel("spin", "", device_index)
        self._nothing = loader.kernel("nothing", "", device_index)
        self._stream = Stream(device_index)
        self.stream = self._stream.handle
        self._buffers: list[DeviceBuffer] = []
        with device_context(device_index):
            self._events = [call("cuEventCreate", 0) for _ in range(2 * TIMED)]

    # --- memory

    def buffer(self, nbytes: int) -> int:
        """Address of new device memory that lives as long as this object."""
        own = DeviceBuffer(nbytes, self.device_index)
        self._buffers.append(own)
        return own.ptr

    def array(self, shape: Sequence[int], dtype: str, data: Any = None) -> TensorView:
        """A contiguous device array; `data`: a NumPy array to fill it with."""
        from snapmla_rt._dlpack import contiguous_strides
        from snapmla_rt.driver.memory import copy_to_device
        from snapmla_rt.tensor import ITEMSIZE

        strides = contiguous_strides(tuple(shape), ITEMSIZE[dtype])
        size = ITEMSIZE[dtype]
        for extent in shape:
            size *= extent
        view = TensorView(
            self.buffer(size), tuple(shape), strides, dtype, "cuda", self.device_index
        )
        if data is not None:
            source = data.__array_interface__["data"][0]
            copy_to_device(view.ptr, source, data.nbytes, self.device_index, 0)
            synchronize(0, self.device_index)
        return view

    def free(self) -> None:
        """Give all buffers back."""
        self.synchronize()
        self._buffers.clear()

    def copies_for_cold(self, nbytes: int, limit: int = 64) -> int:
        """Copies of nbytes that together exceed four second-level caches (2 to `limit`)."""
        return max(2, min(limit, -(-4 * self.info.l2_bytes // max(nbytes, 1))))

    def state(self, nbytes: int, copies: int) -> str:
        """What the caches hold of a call's data when it runs."""
        if copies == 1:
            return "warm"
        return "cold" if copies * nbytes >= 4 * self.info.l2_bytes else f"rotated over {copies}"

    def synchronize(self) -> None:
        synchronize(self.stream, self.device_index)

    # --- timing

    def time(self, enqueue: Callable[[int], Any], repeats: int = REPEATS) -> Timing:
        """Time `enqueue(i)`, which must enqueue call number i on `self.stream`."""
        enqueue(0)  # compiles, allocates
        self.synchronize()
        medians, queued = [], []
        with device_context(self.device_index):
            for _ in range(repeats):
                medians.append(statistics.median(self._burst(enqueue)))
                queued.append(self._queue(enqueue))
        middle = statistics.median(medians)
        return Timing(middle, min(medians), max(medians), statistics.median(queued))

    def _hold(self) -> None:
        self.synchronize()
        time.sleep(IDLE_S)
        self._spin.launch((1, 1, 1), self.stream, SPIN_CYCLES)

    def _burst(self, enqueue: Callable[[int], Any]) -> list[float]:
        self._hold()
        for i in range(WARM_UP):
            enqueue(i)
        for i in range(TIMED):
            call("cuEventRecord", self._events[2 * i], self.stream)
            enqueue(WARM_UP + i)
            call("cuEventRecord", self._events[2 * i + 1], self.stream)
        self._check_held()
        self.synchronize()
        pairs = zip(self._events[::2], self._events[1::2], strict=True)
        return [1e3 * call("cuEventElapsedTime", a, b) for a, b in pairs]

    def _queue(self, enqueue: Callable[[int], Any]) -> float:
        self._hold()
        for i in range(WARM_UP):
            enqueue(i)
        call("cuEventRecord", self._events[0], self.stream)
        for i in range(TIMED):
            enqueue(WARM_UP + i)
        call("cuEventRecord", self._events[1], self.stream)
        self._check_held()
        self.synchronize()
        return 1e3 * float(call("cuEventElapsedTime", *self._events[:2])) / TIMED

    def _check_held(self) -> None:
        """The spin must still run when the last call is queued, or host time is measured."""
        from snapmla_rt.driver.check import bindings

        driver = bindings()
        (code,) = driver.cuEventQuery(self._events[0])
        if code != driver.CUresult.CUDA_ERROR_NOT_READY:
            raise RuntimeError("the spin ended before all calls were queued: raise SPIN_CYCLES")

    def floors(self) -> dict[str, float]:
        """Readings of an event pair around nothing, and around an empty kernel."""
        empty = self.time(lambda i: None)
        kernel = self.time(lambda i: self._nothing.launch((1, 1, 1), self.stream, 0))
        return {
            "event_pair_us": round(empty.us, 2),
            "empty_kernel_us": round(kernel.us, 2),
            "empty_kernel_us_queued": round(kernel.us_queued, 2),
        }

    def copy_gbps(self, nbytes: int, cold: bool = True) -> float:
        """Device copy bandwidth, GB/s read plus written, of copies that move nbytes in all."""
        half = max(256, nbytes // 2)
        copies = self.copies_for_cold(2 * half) if cold else 1
        places = [(self.buffer(half), self.buffer(half)) for _ in range(copies)]

        def enqueue(i: int) -> None:
            source, target = places[i % copies]
            copy_on_device(target, source, half, self.device_index, self.stream)

        timing = self.time(enqueue)
        self.free()
        return 2 * half / timing.us / 1e3


# --- Results -----------------------------------------------------------------------------------


def commit() -> str:
    """$COMMIT, for a copy outside git; else the checkout's, with + where files differ."""
    if os.environ.get("COMMIT"):
        return os.environ["COMMIT"]
    command = ["git", "describe", "--always", "--dirty=+", "--abbrev=12"]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return ""
    return done.stdout.strip()


def machine(device_index: int) -> dict[str, str]:
    """commit, gpu and driver of a result row."""
    version = driver_version()
    return {
        "commit": commit(),
        "gpu": device_info(device_index).name,
        "driver": f"CUDA {version[0]}.{version[1]}" + _driver_package(),
    }


def _driver_package() -> str:
    """The driver package's version where the kernel module says it."""
    try:
        words = Path("/proc/driver/nvidia/version").read_text().split()
    except OSError:
        return ""
    return next((f", {w}" for w in words if w.count(".") == 2 and w[0].isdigit()), "")


def update_rows(
    path: Path, rows: Sequence[dict[str, Any]], identity: Sequence[str] = ("kernel",)
) -> None:
    """Put rows into the JSON list at `path`, in place of those with the same `identity` fields."""

    def named(row: dict[str, Any]) -> tuple[Any, ...]:
        return tuple(row.get(name) for name in identity)

    old = json.loads(path.read_text()) if path.is_file() else []
    new = {named(row) for row in rows}
    write_json(path, [*(row for row in old if named(row) not in new), *rows])


def earlier_rows(
    path: Path | None, name: str, is_replaced: Callable[[dict[str, Any]], bool]
) -> list[dict[str, Any]]:
    """The rows of the list `name` in a result file that a new run does not replace, each with the
    commit that it was measured at. No file, no rows."""
    if path is None or not path.is_file():
        return []
    old = json.loads(path.read_text())
    kept = [row for row in old[name] if not is_replaced(row)]
    return [{**row, "commit": row.get("commit", old["commit"])} for row in kept]


def write_json(path: Path, result: Any) -> None:
    """Write a result file at once: a run that is stopped leaves the old one or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(path.name + ".new")
    unfinished.write_text(json.dumps(result, indent=1) + "\n")
    unfinished.replace(path)
