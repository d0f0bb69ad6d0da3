"""What NVML says of the machine's GPUs: needs no CUDA context, no cuInit and no package."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from dataclasses import dataclass

_LIBRARY = "libnvidia-ml.so.1"
_TEXT_BYTES = 96


@dataclass(frozen=True)
class GpuSummary:
    """One physical GPU; all of them, whatever CUDA_VISIBLE_DEVICES says."""

    name: str
    compute_capability: tuple[int, int]


@contextlib.contextmanager
def _session() -> Iterator[ctypes.CDLL | None]:
    try:
        nvml = ctypes.CDLL(_LIBRARY)
    except OSError:
        yield None
        return
    if nvml.nvmlInit_v2() != 0:
        yield None
        return
    try:
        yield nvml
    finally:
        nvml.nvmlShutdown()


def _gpu(nvml: ctypes.CDLL, index: int) -> GpuSummary | None:
    handle = ctypes.c_void_p()
    major, minor = ctypes.c_int(0), ctypes.c_int(0)
    name = ctypes.create_string_buffer(_TEXT_BYTES)
    if nvml.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(index), ctypes.byref(handle)) != 0:
        return None
    if nvml.nvmlDeviceGetCudaComputeCapability(handle, ctypes.byref(major), ctypes.byref(minor)):
        return None
    nvml.nvmlDeviceGetName(handle, name, ctypes.c_uint(_TEXT_BYTES))
    return GpuSummary(name.value.decode(errors="replace"), (major.value, minor.value))


def gpus() -> list[GpuSummary]:
    """Every GPU that NVML can name; empty without the library or a driver."""
    with _session() as nvml:
        if nvml is None:
            return []
        count = ctypes.c_uint(0)
        if nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)) != 0:
            return []
        found = (_gpu(nvml, index) for index in range(count.value))
        return [gpu for gpu in found if gpu is not None]


def driver_version() -> str | None:
    """The driver's version, such as "580.159.04", or None without NVML."""
    with _session() as nvml:
        text = ctypes.create_string_buffer(_TEXT_BYTES)
        if nvml is None or nvml.nvmlSystemGetDriverVersion(text, ctypes.c_uint(_TEXT_BYTES)) != 0:
            return None
        return text.value.decode(errors="replace")
