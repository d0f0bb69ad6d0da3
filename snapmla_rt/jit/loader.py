"""From a kernel table to kernels ready to launch: memory, disk, compiler; then driver.

One process-wide lock is held while a kernel is being compiled and while the process forks, so a
child never inherits a compiler (or a cache lock) in mid-flight. NVRTC releases the GIL, so Python
goes on while the background thread compiles; a first call waits only for the kernel it needs.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
import warnings
import weakref
from typing import Any

from ..driver.pci import has_hopper
from ..environment import JIT_VARIABLE, debug_wanted, jit_mode
from ..errors import CompileError, SnapMLAError
from .compiler import (
    CompiledKernel,
    compile_unit,
    label,
    limit_violations,
    make_unit,
    nvrtc_identity,
)
from .disk_cache import DiskCache, make_key
from .spec import KernelSpec, KernelTable, Variant

# Between two kernels the background thread leaves the lock alone for this long: Python's locks are
# not fair, and a first call must not wait for the whole table.
_YIELD_S = 0.001

_compile_lock = threading.RLock()
_loaders: weakref.WeakSet[KernelLoader] = weakref.WeakSet()


def load_or_compile(
    table: KernelTable, spec: KernelSpec, variant: Variant, cache: DiskCache
) -> CompiledKernel:
    """The compiled variant, from `cache` or else from NVRTC (and then stored there).

    `$SNAPMLA_DEBUG=1` adds line numbers for profilers. Raises CompileError,
    UnsupportedDeviceError.
    """
    unit = make_unit(table, spec, variant, ("-lineinfo",) if debug_wanted() else ())
    header_parts = [part for pair in unit.headers.items() for part in pair]
    key = make_key(
        nvrtc_identity(),
        *unit.options,
        f"allow_serialized={unit.allow_serialized}",
        unit.source_name,
        unit.entry,
        unit.source,
        *header_parts,
    )

    def build() -> bytes:
        if jit_mode() == "off":
            raise CompileError(
                f"{unit.name}: not in the cache {cache.directory} and {JIT_VARIABLE}=off forbids "
                f"compiling; run 'snapmla precompile' with the same NVRTC ({nvrtc_identity()})"
            )
        return compile_unit(unit).to_bytes()

    return CompiledKernel.from_bytes(cache.get_or_build(key, build))


class KernelLoader:
    """Kernels of one table by (name, variant, device), each compiled and loaded once.

    cache: the disk cache (default: the user's). Thread-safe; usable after a fork as far as CUDA
    is (see driver.check.initialise).
    """

    def __init__(self, table: KernelTable, cache: DiskCache | None = None) -> None:
        self.table = table
        self._cache = cache or DiskCache()
        self._compiled: dict[tuple[str, str], CompiledKernel] = {}
        self._libraries: dict[tuple[str, str], Any] = {}
        self._kernels: dict[tuple[str, str, int], Any] = {}
        self._load_lock = threading.Lock()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        _loaders.add(self)

    def compiled(self, name: str, variant: str = "") -> CompiledKernel:
        """The compiled variant. Needs no driver.

        Raises ArgumentError for unknown names and an unknown `$SNAPMLA_JIT` (whether or not the
        disk cache has the kernel), CompileError, UnsupportedDeviceError.
        """
        found = self._compiled.get((name, variant))
        if found is not None:
            return found
        jit_mode()
        spec = self.table[name]
        chosen = spec.variant(variant)
        with _compile_lock:
            return self._compile_locked(spec, chosen)

    def _compile_locked(self, spec: KernelSpec, variant: Variant) -> CompiledKernel:
        key = (spec.name, variant.name)
        found = self._compiled.get(key)
        if found is None:
            found = load_or_compile(self.table, spec, variant, self._cache)
            _warn_of_limits(spec, variant, found)
            self._compiled[key] = found
        return found

    def kernel(self, name: str, variant: str = "", device_index: int = 0) -> Any:
        """The driver.launch.Kernel of a variant on a device.

        A dictionary look-up after the first call. Raises UnsupportedDeviceError for a device that
        is not Hopper, and what `compiled` raises.
        """
        found = self._kernels.get((name, variant, device_index))
        return self._load(name, variant, device_index) if found is None else found

    def _load(self, name: str, variant: str, device_index: int) -> Any:
        from ..driver.device import device_context, relaxed_capture, require_hopper
        from ..driver.launch import Kernel, get_kernel, load_library

        jit_mode()  # a mistake in the environment is said before what the machine lacks
        require_hopper(device_index)
        compiled = self.compiled(name, variant)
        spec = self.table[name]
        chosen = spec.variant(variant)
        key = (name, variant, device_index)
        with self._load_lock:
            if key not in self._kernels:
                with device_context(device_index), relaxed_capture():
                    library = self._libraries.get(key[:2])
                    if library is None:
                        library = self._libraries[key[:2]] = load_library(compiled.cubin)
                    smem = chosen.dynamic_smem_bytes
                    handle = get_kernel(library, spec.entry, device_index, smem)
                title = label(spec, chosen)
                self._kernels[key] = Kernel(
                    title, handle, device_index, spec.layout, spec.threads, smem, spec.cluster
                )
            return self._kernels[key]

    def start_background(self, only_on_hopper: bool = True) -> None:
        """Compile or read the whole table in a daemon thread, once a process.

        only_on_hopper: do so only if NVML names a Hopper GPU (asked in the thread; no context).
        Errors are left for the call that needs the kernel, which raises them.
        """
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._compile_all, args=(only_on_hopper,), name="snapmla-jit", daemon=True
            )
            self._thread.start()

    def _compile_all(self, only_on_hopper: bool) -> None:
        with _compile_lock:  # a fork waits until NVML is done, too
            if only_on_hopper and not has_hopper():
                return
        for spec, variant in self.table.jobs():
            time.sleep(_YIELD_S)
            if self._stop.is_set():
                return
            try:
                with _compile_lock:
                    self._compile_locked(spec, variant)
            except (SnapMLAError, OSError):
                continue

    def wait_background(self, timeout_s: float | None = None) -> bool:
        """Wait for the background compilation, if any; whether it has ended."""
        if self._thread is not None:
            self._thread.join(timeout_s)
            return not self._thread.is_alive()
        return True

    def stop_background(self) -> None:
        """End the background compilation after the kernel it is at, and wait for that.

        Ending the process while NVRTC runs could crash it, so this runs at exit.
        """
        self._stop.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def _after_fork_in_child(self) -> None:
        self._load_lock = threading.Lock()
        self._thread = None  # threads do not survive a fork; first calls compile what is missing


def _warn_of_limits(spec: KernelSpec, variant: Variant, kernel: CompiledKernel) -> None:
    """A kernel over its stated limits is slower, not wrong: CI fails on it, users are told."""
    wrong = limit_violations(spec, variant, kernel.resources)
    if wrong:
        warnings.warn(
            f"{label(spec, variant)}: {'; '.join(wrong)} (with NVRTC {nvrtc_identity()})",
            RuntimeWarning,
            stacklevel=2,
        )


@atexit.register
def _stop_all() -> None:
    for loader in list(_loaders):
        loader.stop_background()


def _after_fork_in_parent() -> None:
    _compile_lock.release()


def _after_fork_in_child() -> None:
    # The forking thread holds the lock here, but its new identity is not the RLock's owner.
    global _compile_lock
    _compile_lock = threading.RLock()
    for loader in list(_loaders):
        loader._after_fork_in_child()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=lambda: _compile_lock.acquire(),
        after_in_parent=_after_fork_in_parent,
        after_in_child=_after_fork_in_child,
    )
