"""Where a call of the API is computed: the kernels on a Hopper GPU, or the NumPy reference."""

from __future__ import annotations

import functools
from collections.abc import Mapping

from .errors import ArgumentError, CudaError, UnsupportedDeviceError
from .tensor import TensorView, same_device

BACKENDS = ("auto", "cuda", "reference")


@functools.lru_cache(maxsize=1)
def _usable_gpu() -> int | None:
    """The first Hopper GPU that can be used, or None."""
    from .driver.device import device_count, require_hopper
    from .jit.compiler import nvrtc_version

    try:
        nvrtc_version()
        count = device_count()
    except (UnsupportedDeviceError, CudaError):
        return None
    for index in range(count):
        try:
            require_hopper(index)
        except UnsupportedDeviceError:
            continue
        return index
    return None


def resolve_backend(backend: str, views: Mapping[str, TensorView]) -> tuple[str, int]:
    """("cuda", device index) or ("reference", -1) for a call with these arguments.

    "auto": GPU arrays run on their GPU; host arrays run on the first Hopper GPU, or in the
    reference where there is none. "cuda": the kernels or an error. "reference": NumPy (arrays on a
    GPU are copied to the host by the caller of this function).
    Raises ArgumentError for another name and for arguments on different devices (naming one),
    UnsupportedDeviceError where GPU arrays lie on a GPU that the kernels cannot run on.
    """
    if backend not in BACKENDS:
        raise ArgumentError("backend", f"one of {BACKENDS}", repr(backend))
    kind, index = same_device(views) if views else ("cpu", 0)
    if backend == "reference":
        return "reference", -1
    if kind == "cuda":
        from .driver.device import require_hopper

        require_hopper(index)
        return "cuda", index
    gpu = _usable_gpu()
    if gpu is None:
        if backend == "auto":
            return "reference", -1
        _explain_no_gpu()
    return "cuda", int(gpu or 0)


def _explain_no_gpu() -> None:
    """Raise the UnsupportedDeviceError that says why no GPU is usable."""
    from .driver.device import device_count, require_hopper
    from .jit.compiler import nvrtc_version

    count = device_count()
    nvrtc_version()
    for index in range(count):
        require_hopper(index)
    raise UnsupportedDeviceError("no Hopper GPU was found")
