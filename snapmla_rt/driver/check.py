"""Driver calls with every return code checked, and the driver found or its absence explained."""

from __future__ import annotations

import ctypes
import functools
import importlib
import os
import threading
from typing import Any

from ..errors import USE_REFERENCE, CudaError, SnapMLAError, UnsupportedDeviceError

CU13_MIN_DRIVER = "580"
CU12_MIN_DRIVER = "525"
LIBCUDA = "libcuda.so.1"
_REFERENCE_HINT = f"{USE_REFERENCE} runs without a GPU"

_lock = threading.Lock()
_initialised = False
forked_after_use = False  # True in a child whose parent had initialised CUDA through us


def has_driver() -> bool:
    """Whether libcuda can be loaded. Calls nothing in it; about 0.1 ms where it is absent."""
    return _load_libcuda() is None


@functools.lru_cache(maxsize=1)
def _load_libcuda() -> str | None:
    """None when libcuda loads, else the loader's reason."""
    try:
        ctypes.CDLL(LIBCUDA)
    except OSError as error:
        return str(error)
    return None


def bindings() -> Any:
    """The module cuda.bindings.driver, imported at first use.

    Raises UnsupportedDeviceError when the driver or the bindings are missing.
    """
    # NOTE: probe first. Without libcuda some calls of the bindings raise once and then hang.
    missing = _load_libcuda()
    if missing is not None:
        raise UnsupportedDeviceError(
            f"no CUDA driver: {LIBCUDA} cannot be loaded ({missing}); the kernels need a Hopper "
            f"GPU with driver {CU13_MIN_DRIVER} or newer (cu13) or {CU12_MIN_DRIVER} (cu12); "
            f"{_REFERENCE_HINT}"
        )
    return _import_bindings()


@functools.lru_cache(maxsize=1)
def _import_bindings() -> Any:
    try:
        return importlib.import_module("cuda.bindings.driver")
    except ImportError as error:
        raise UnsupportedDeviceError(
            f"cuda-bindings cannot be imported ({error}): pip install 'snapmla-rt[cu13]' or "
            f"'snapmla-rt[cu12]'; {_REFERENCE_HINT}"
        ) from error


@functools.lru_cache(maxsize=1)
def bindings_major() -> int:
    """CUDA major version that cuda-bindings was made for (12 or 13)."""
    version = importlib.import_module("cuda.bindings").__version__
    return int(version.split(".")[0])


def cuda_error(call: str, code: Any) -> CudaError:
    """The error for a failed driver call, with the code's name and the driver's own words."""
    driver = bindings()
    text = ""
    status, words = driver.cuGetErrorString(code)
    if status == driver.CUresult.CUDA_SUCCESS and words:
        text = f": {words.decode(errors='replace')}"
    name = getattr(code, "name", str(code))
    hint = ""
    if name == "CUDA_ERROR_NOT_INITIALIZED":
        hint = (
            " (in a process forked after its parent used CUDA? CUDA cannot be used there: start "
            "workers with the 'spawn' method)"
        )
    error = CudaError(f"{call}: {name} ({int(code)}){text}{hint}")
    error.call, error.code = call, int(code)
    return error


def call(name: str, *args: Any) -> Any:
    """Call a driver function by name; return its result, or None, or a tuple of several.

    Raises CudaError for any code but success, UnsupportedDeviceError without a driver.
    """
    result = getattr(bindings(), name)(*args)
    if result[0] != 0:
        raise cuda_error(name, result[0])
    if len(result) == 1:
        return None
    return result[1] if len(result) == 2 else result[1:]


def initialise() -> None:
    """cuInit, once a process, after checking that the driver is new enough.

    Raises UnsupportedDeviceError (no driver, too old, no device) or CudaError. In a process forked
    after its parent used CUDA it raises CudaError at once: the driver would fail or hang.
    """
    global _initialised
    if forked_after_use:
        raise CudaError(
            "this process was forked after its parent used CUDA, which CUDA does not support; "
            "start workers with the 'spawn' method, or fork before the first CUDA call"
        )
    if _initialised:
        return
    with _lock:
        if not _initialised:
            check_driver_version()
            _cu_init()
            _initialised = True


def driver_version() -> tuple[int, int]:
    """CUDA version (major, minor) that the installed driver supports."""
    version = call("cuDriverGetVersion")
    return version // 1000, version % 1000 // 10


def check_driver_version() -> None:
    """Raise UnsupportedDeviceError where the driver is too old for the installed bindings."""
    try:
        major, minor = driver_version()
    except SnapMLAError:
        raise
    except RuntimeError as error:  # an old driver may lack even the entry-point lookup
        raise UnsupportedDeviceError(f"the CUDA driver does not answer: {error}") from error
    needed = bindings_major()
    if major < needed:
        minimum = CU13_MIN_DRIVER if needed >= 13 else CU12_MIN_DRIVER
        other = " (or install 'snapmla-rt[cu12]')" if needed >= 13 and major == 12 else ""
        raise UnsupportedDeviceError(
            f"the driver supports CUDA {major}.{minor}, found with cuda-bindings for CUDA "
            f"{needed}, which need driver {minimum} or newer: update the driver{other}; "
            f"{_REFERENCE_HINT}"
        )


def _cu_init() -> None:
    driver = bindings()
    (code,) = driver.cuInit(0)
    if code == driver.CUresult.CUDA_ERROR_NO_DEVICE:
        raise UnsupportedDeviceError(
            "the CUDA driver finds no GPU (CUDA_VISIBLE_DEVICES is "
            f"{os.environ.get('CUDA_VISIBLE_DEVICES')!r}); the kernels need a Hopper GPU; "
            f"{_REFERENCE_HINT}"
        )
    if code != 0:
        raise cuda_error("cuInit", code)


def _after_fork_in_child() -> None:
    global forked_after_use, _lock
    _lock = threading.Lock()
    forked_after_use = forked_after_use or _initialised


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
