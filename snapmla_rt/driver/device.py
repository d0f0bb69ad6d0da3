"""What a GPU is, whether the kernels run on it, and making its context current.

The device is always that of the tensors, never "the current one".
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ..errors import USE_REFERENCE, ArgumentError, UnsupportedDeviceError
from .check import bindings, call, initialise

REQUIRED_CAPABILITY = (9, 0)


@dataclass(frozen=True)
class DeviceInfo:
    """Properties of one GPU (of one MIG instance, where it is split); sizes in bytes."""

    index: int
    name: str
    compute_capability: tuple[int, int]
    num_sms: int
    max_smem_per_cta: int
    l2_bytes: int
    total_bytes: int

    @property
    def arch(self) -> str:
        major, minor = self.compute_capability
        return f"sm_{major}{minor}"


def device_count() -> int:
    """GPUs the driver shows to this process. Raises UnsupportedDeviceError without a driver."""
    initialise()
    return call("cuDeviceGetCount")


@functools.lru_cache(maxsize=64)
def device_info(index: int) -> DeviceInfo:
    """Properties of GPU `index`. Creates no context. Raises ArgumentError for no such GPU."""
    count = device_count()
    if not 0 <= index < count:
        raise ArgumentError("device", f"0 to {count - 1}", index)
    device = call("cuDeviceGet", index)
    kinds = bindings().CUdevice_attribute

    def attribute(name: str) -> int:
        return call("cuDeviceGetAttribute", getattr(kinds, f"CU_DEVICE_ATTRIBUTE_{name}"), device)

    return DeviceInfo(
        index=index,
        name=call("cuDeviceGetName", 256, device).split(b"\0")[0].decode(errors="replace").strip(),
        compute_capability=(
            attribute("COMPUTE_CAPABILITY_MAJOR"),
            attribute("COMPUTE_CAPABILITY_MINOR"),
        ),
        num_sms=attribute("MULTIPROCESSOR_COUNT"),
        max_smem_per_cta=attribute("MAX_SHARED_MEMORY_PER_BLOCK_OPTIN"),
        l2_bytes=attribute("L2_CACHE_SIZE"),
        total_bytes=call("cuDeviceTotalMem", device),
    )


@functools.lru_cache(maxsize=64)
def require_hopper(index: int) -> DeviceInfo:
    """`device_info(index)` of a GPU that can run the kernels.

    Raises UnsupportedDeviceError "requires sm_90a (Hopper), found sm_XX (name)" for any other.
    """
    info = device_info(index)
    if info.compute_capability != REQUIRED_CAPABILITY:
        raise UnsupportedDeviceError(
            f"requires sm_90a (Hopper), found {info.arch} ({info.name}, device {index}); "
            f"{USE_REFERENCE} runs anywhere"
        )
    return info


_contexts: dict[int, Any] = {}
_contexts_lock = threading.Lock()


def primary_context(index: int) -> Any:
    """The device's primary context (shared with the CUDA runtime), retained once a process."""
    context = _contexts.get(index)
    if context is None:
        device_info(index)
        with _contexts_lock:
            context = _contexts.get(index)
            if context is None:
                context = _contexts[index] = call("cuDevicePrimaryCtxRetain", index)
    return context


def current_device() -> int | None:
    """Device of this thread's current context, or None where there is none."""
    # Asked for the context first: without one, cuCtxGetDevice fails, which memcheck reports.
    if not int(call("cuCtxGetCurrent")):
        return None
    return int(call("cuCtxGetDevice"))


@contextlib.contextmanager
def device_context(index: int) -> Iterator[None]:
    """Make a context of GPU `index` current for the block.

    A current context of that device stays as it is (the caller's own or green context); else the
    primary context is pushed, and popped at the end.
    """
    initialise()
    if current_device() == index:
        yield
        return
    call("cuCtxPushCurrent", primary_context(index))
    try:
        yield
    finally:
        call("cuCtxPopCurrent")


@contextlib.contextmanager
def relaxed_capture() -> Iterator[None]:
    """Let this thread allocate, free and load code while a stream is being captured.

    None of that is recorded, and without this it would end the capture, also one that the caller
    began through another library. Needs no context.
    """
    mode = bindings().CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
    before = call("cuThreadExchangeStreamCaptureMode", mode)
    try:
        yield
    finally:
        call("cuThreadExchangeStreamCaptureMode", before)


def current_num_sms(index: int) -> int:
    """SMs that a launch on GPU `index` from this thread may use.

    Fewer than the device's where a green context of that device is current; not cached, since it
    follows the context.
    """
    info = device_info(index)
    if current_device() != index:
        return info.num_sms
    driver = bindings()
    kind = driver.CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM
    context = call("cuCtxGetCurrent")
    try:
        code, resource = driver.cuCtxGetDevResource(context, kind)
    except RuntimeError:  # a driver before 12.4 has neither the function nor green contexts
        return info.num_sms
    return info.num_sms if code != 0 else int(resource.sm.smCount)
