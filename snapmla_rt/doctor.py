"""`snapmla doctor`: what this machine has for the kernels, and what to do about what is missing."""

from __future__ import annotations

import importlib.machinery
import importlib.metadata
import importlib.util
import os
import platform
import sys
from pathlib import Path
from typing import Any

from . import __version__
from .driver import check, nvml
from .driver.device import REQUIRED_CAPABILITY
from .environment import DEBUG_VARIABLE, JIT_VARIABLE, jit_mode
from .errors import USE_REFERENCE, ArgumentError, SnapMLAError
from .jit import compiler, disk_cache
from .places import why_not_writable

_PACKAGES = (
    "numpy",
    "ml_dtypes",
    "cuda-core",
    "cuda-bindings",
    "nvidia-cuda-nvrtc",
    "nvidia-cuda-nvrtc-cu12",
    "nvidia-cuda-cuobjdump",
    "nvidia-cuda-nvdisasm",
)
VARIABLES = (JIT_VARIABLE, disk_cache.CACHE_DIR_VARIABLE, DEBUG_VARIABLE)


def _packages() -> dict[str, str | None]:
    found: dict[str, str | None] = {}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = None
    return found


def _cores(advice: list[str]) -> dict[str, str]:
    """ "compiled" or "pure Python" for each module that has a compiled form."""
    package = Path(__file__).parent
    names = [f"{__package__}.reference._wgmma"]
    for declared in sorted(package.rglob("*.pxd")):
        names.append(
            ".".join([str(__package__), *declared.relative_to(package).parts])[: -len(".pxd")]
        )
    suffixes = tuple(importlib.machinery.EXTENSION_SUFFIXES)
    found = {}
    for name in names:
        spec = importlib.util.find_spec(name)
        compiled = spec is not None and str(spec.origin).endswith(suffixes)
        found[name.partition(".")[2]] = "compiled" if compiled else "pure Python"
    if "pure Python" in found.values():
        advice.append(
            "the CPU core is not compiled: same results, slower; install with a C compiler"
        )
    return found


def _driver(advice: list[str]) -> dict[str, Any]:
    found: dict[str, Any] = {"libcuda": check.has_driver(), "version": nvml.driver_version()}
    found |= {"cuda": None, "new_enough": False}
    try:
        found["cuda"] = ".".join(map(str, check.driver_version()))
        check.check_driver_version()
        found["new_enough"] = True
    except (SnapMLAError, RuntimeError) as error:
        advice.append(str(error))
    return found


def _nvrtc(advice: list[str]) -> str | None:
    try:
        return compiler.nvrtc_identity()
    except SnapMLAError as error:
        advice.append(str(error))
        return None


def _gpus(advice: list[str]) -> list[str]:
    gpus = nvml.gpus()
    if not gpus and check.has_driver():
        advice.append("NVML lists no GPU: the kernels need a Hopper GPU visible to this process")
    if gpus and not any(gpu.compute_capability == REQUIRED_CAPABILITY for gpu in gpus):
        advice.append("none of the GPUs is a Hopper (sm_90): use " + USE_REFERENCE)
    return [f"{g.name}, sm_{g.compute_capability[0]}{g.compute_capability[1]}" for g in gpus]


def _cache(advice: list[str]) -> dict[str, Any]:
    """State of the cache directory; leaves nothing behind."""
    directory = disk_cache.default_cache_dir()
    if directory is None:
        advice.append(f"no home directory: set {disk_cache.CACHE_DIR_VARIABLE} to keep kernels")
        return {"directory": None, "entries": 0, "writable": False}
    # os.path, not Path: it says no where Path raises (a name too long, a parent that is closed)
    entries = len(list(directory.glob("*.cubin"))) if os.path.isdir(directory) else 0
    reason = why_not_writable(directory)
    if reason is not None:
        advice.append(
            f"{directory} cannot be written ({reason}): kernels are compiled anew in every "
            f"process; set {disk_cache.CACHE_DIR_VARIABLE} to a directory that can"
        )
    return {"directory": str(directory), "entries": entries, "writable": reason is None}


def _environment(advice: list[str]) -> bool:
    """Whether the variables let kernels be used."""
    debug = os.environ.get(DEBUG_VARIABLE, "")
    if debug not in ("", "0", "1"):
        advice.append(
            f"{DEBUG_VARIABLE}={debug!r} turns debugging on, as all but 0 does: set it to 1 "
            "or 0, or unset it"
        )
    try:
        jit_mode()
    except ArgumentError as error:
        advice.append(f"{error}: no kernel can be used; set it to one of these or unset it")
        return False
    return True


def report() -> dict[str, Any]:
    """What is here: nested values for printing or JSON. Creates no context, leaves no file.

    `ready` says whether the kernels can run; `advice` lists what to do where they cannot (the
    reference backend runs anyway).
    """
    advice: list[str] = []
    allowed = _environment(advice)
    nvrtc, driver, gpus = _nvrtc(advice), _driver(advice), _gpus(advice)
    hopper = any(f"sm_{REQUIRED_CAPABILITY[0]}{REQUIRED_CAPABILITY[1]}" in gpu for gpu in gpus)
    cache = _cache(advice)
    return {
        "snapmla_rt": __version__,
        "python": f"{platform.python_version()} ({sys.platform} {platform.machine()})",
        "packages": _packages(),
        "cores": _cores(advice),
        "nvrtc": nvrtc,
        "driver": driver,
        "gpus": gpus,
        "kernel_cache": cache,
        "environment": {name: os.environ.get(name) for name in VARIABLES},
        "ready": bool(allowed and nvrtc and hopper and driver["new_enough"]),
        "advice": advice,
    }
