"""Device and pinned host memory, copies and streams: what a cache and NumPy callers need.

Frameworks bring their own memory; nothing here is called by the kernels' enqueue functions.
"""

from __future__ import annotations

import contextlib
import ctypes
from typing import Any

from ..errors import ArgumentError, CudaError
from . import check
from .check import bindings, call
from .device import device_context, relaxed_capture

LEGACY_STREAM = 0


class DeviceBuffer:
    """`nbytes` of memory on GPU `device_index`, freed with the object; 256-byte aligned.

    ptr: its address. Raises MemoryError when the device has too little memory.
    """

    def __init__(self, nbytes: int, device_index: int) -> None:
        if nbytes < 0:
            raise ArgumentError("nbytes", "at least 0", nbytes)
        self.nbytes = nbytes
        self.device_index = device_index
        self.ptr = 0
        with device_context(device_index), relaxed_capture():
            self.ptr = _allocate("cuMemAlloc", max(nbytes, 1), nbytes, f"GPU {device_index}")

    def free(self) -> None:
        """Give the memory back now (the driver first waits for work that uses it)."""
        pointer, self.ptr = self.ptr, 0
        if pointer and not check.forked_after_use:
            with device_context(self.device_index), relaxed_capture():
                call("cuMemFree", pointer)

    def __del__(self, suppress: Any = contextlib.suppress) -> None:
        with suppress(Exception):  # the driver (and this module) may be gone at interpreter exit
            self.free()


class PinnedBuffer:
    """`nbytes` of page-locked host memory, usable for asynchronous copies of every GPU.

    ptr: its address; `view()` gives it as a writable memoryview of bytes.
    """

    def __init__(self, nbytes: int, device_index: int = 0) -> None:
        if nbytes < 0:
            raise ArgumentError("nbytes", "at least 0", nbytes)
        self.nbytes = nbytes
        self.device_index = device_index
        self.ptr = 0
        portable = 1  # CU_MEMHOSTALLOC_PORTABLE: pinned for every context
        with device_context(device_index), relaxed_capture():
            self.ptr = _allocate("cuMemHostAlloc", max(nbytes, 1), nbytes, "pinned", portable)

    def view(self) -> memoryview:
        """The bytes. The view keeps this object alive, and so its memory."""
        array = (ctypes.c_char * self.nbytes).from_address(self.ptr)
        array._owner = self  # type: ignore[attr-defined]
        return memoryview(array).cast("B")

    def free(self) -> None:
        """Unpin and give the memory back; views of it must not be used any more."""
        pointer, self.ptr = self.ptr, 0
        if pointer and not check.forked_after_use:
            with device_context(self.device_index), relaxed_capture():
                call("cuMemFreeHost", pointer)

    def __del__(self, suppress: Any = contextlib.suppress) -> None:
        with suppress(Exception):
            self.free()


def device_of_pointer(pointer: int) -> int:
    """GPU on which a device address lies. Raises CudaError for an address CUDA does not know."""
    check.initialise()
    kind = bindings().CUpointer_attribute.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
    return int(call("cuPointerGetAttribute", kind, pointer))


def _allocate(function: str, size: int, nbytes: int, place: str, *args: Any) -> int:
    try:
        return int(call(function, size, *args))
    except CudaError as error:
        if error.code == int(bindings().CUresult.CUDA_ERROR_OUT_OF_MEMORY):
            raise MemoryError(f"{place}: {nbytes} bytes cannot be allocated ({error})") from error
        raise


def copy_to_device(dst: int, src: int, nbytes: int, device_index: int, stream: int) -> None:
    """Enqueue a host-to-device copy between addresses; asynchronous from pinned memory."""
    if nbytes:
        with device_context(device_index):
            call("cuMemcpyHtoDAsync", dst, src, nbytes, stream)


def copy_to_host(dst: int, src: int, nbytes: int, device_index: int, stream: int) -> None:
    """Enqueue a device-to-host copy between addresses; synchronise before reading `dst`."""
    if nbytes:
        with device_context(device_index):
            call("cuMemcpyDtoHAsync", dst, src, nbytes, stream)


def copy_on_device(dst: int, src: int, nbytes: int, device_index: int, stream: int) -> None:
    """Enqueue a copy inside one GPU; the ranges must not overlap."""
    if nbytes:
        with device_context(device_index):
            call("cuMemcpyDtoDAsync", dst, src, nbytes, stream)


def fill(dst: int, byte: int, nbytes: int, device_index: int, stream: int) -> None:
    """Enqueue setting `nbytes` at `dst` to `byte`."""
    if nbytes:
        with device_context(device_index):
            call("cuMemsetD8Async", dst, byte, nbytes, stream)


def synchronize(stream: int, device_index: int) -> None:
    """Wait until everything enqueued on the stream is done. Raises CudaError for failed work."""
    with device_context(device_index):
        call("cuStreamSynchronize", stream)


def is_capturing(stream: int, device_index: int) -> bool:
    """Whether the stream is being captured into a CUDA graph."""
    if stream == LEGACY_STREAM or stream == 1:
        return False  # the legacy stream cannot be captured, and asking would end other captures
    with device_context(device_index):
        status = call("cuStreamIsCapturing", stream)
    return status != bindings().CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_NONE


def capture_id(stream: int, device_index: int) -> int:
    """A number that names the capture the stream is in, unique in the process; 0 outside of one."""
    if stream == LEGACY_STREAM or stream == 1:
        return 0
    with device_context(device_index):
        status, number = call("cuStreamGetCaptureInfo", stream)[:2]
    active = bindings().CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_ACTIVE
    return int(number) if status == active else 0


def wait_for_stream(consumer: int, producer: int, device_index: int) -> None:
    """Order what follows on `consumer` after what is on `producer`; the host does not wait."""
    if consumer == producer:
        return
    disable_timing = 2  # CU_EVENT_DISABLE_TIMING
    with device_context(device_index):
        event = call("cuEventCreate", disable_timing)
        try:
            call("cuEventRecord", event, producer)
            call("cuStreamWaitEvent", consumer, event, 0)
        finally:
            call("cuEventDestroy", event)  # the driver keeps it until the wait is done


class Stream:
    """A stream of our own on GPU `device_index` that does not wait for the legacy stream."""

    def __init__(self, device_index: int) -> None:
        self.device_index = device_index
        self.handle = 0
        non_blocking = 1  # CU_STREAM_NON_BLOCKING
        with device_context(device_index):
            self.handle = int(call("cuStreamCreate", non_blocking))

    def __cuda_stream__(self) -> tuple[int, int]:
        return (0, self.handle)

    def synchronize(self) -> None:
        """Wait for everything enqueued here."""
        synchronize(self.handle, self.device_index)

    def close(self) -> None:
        """Destroy the stream once its work is done; the host does not wait."""
        handle, self.handle = self.handle, 0
        if handle and not check.forked_after_use:
            with device_context(self.device_index):
                call("cuStreamDestroy", handle)

    def __del__(self, suppress: Any = contextlib.suppress) -> None:
        with suppress(Exception):
            self.close()
