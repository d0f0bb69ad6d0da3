"""Launching a loaded kernel: packed parameters, reused launch configurations.

A launch packs the params struct into a buffer of the kernel, sets grid and stream on a stored
CUlaunchConfig and calls cuLaunchKernelEx, which copies the parameters before it returns.
"""

from __future__ import annotations

import ctypes
import threading
from typing import Any, Protocol

from ..errors import ArgumentError, CudaError
from . import check
from .device import primary_context


class Layout(Protocol):
    """What a launch needs of a params layout (jit.spec.ParamsLayout has it)."""

    @property
    def size(self) -> int: ...
    @property
    def packer(self) -> Any: ...
    @property
    def names(self) -> tuple[str, ...]: ...


class Kernel:
    """A kernel variant ready to launch on one device.

    name: for messages. handle: CUkernel, valid in every context of the device. layout: of the
    params struct. threads, dynamic_smem_bytes, cluster: of every launch. Thread-safe.
    """

    def __init__(
        self,
        name: str,
        handle: Any,
        device_index: int,
        layout: Layout,
        threads: int,
        dynamic_smem_bytes: int = 0,
        cluster: tuple[int, int, int] | None = None,
    ) -> None:
        self.name = name
        self.device_index = device_index
        self._layout = layout
        self._pack_into = layout.packer.pack_into
        driver = check.bindings()
        self._function = driver.CUfunction(int(handle))
        self._launch_ex = driver.cuLaunchKernelEx
        self._get_device = driver.cuCtxGetDevice
        self._context = primary_context(device_index)
        self._lock = threading.Lock()
        # The params struct, 64-byte aligned as on the device, and the void*[1] that points at it.
        self._memory = ctypes.create_string_buffer(layout.size + 64)
        self._offset = -ctypes.addressof(self._memory) % 64
        self._pointer = ctypes.c_void_p(ctypes.addressof(self._memory) + self._offset)
        self._params = ctypes.addressof(self._pointer)
        self._configs = tuple(
            _make_config(driver, threads, dynamic_smem_bytes, cluster, pdl) for pdl in (False, True)
        )

    def launch(
        self, grid: tuple[int, int, int], stream: int, *values: Any, pdl: bool = False
    ) -> None:
        """Enqueue on `stream` (an int handle); a grid with a zero extent enqueues nothing.

        grid: CTAs along x, y, z. values: the params struct's leaves in order (ints, floats, 128
        bytes for a tensor map). pdl: programmatic stream serialisation, so the kernel may start
        while its predecessor ends (it must execute griddepcontrol.wait before reading its output).
        Raises ArgumentError for values that do not fit the struct, CudaError for a refused launch.
        """
        if check.forked_after_use:
            check.initialise()  # says what is wrong
        x, y, z = grid
        if not (x and y and z):
            return
        with self._lock:
            try:
                self._pack_into(self._memory, self._offset, *values)
            except Exception as error:  # struct.error: wrong count, type or range
                raise self._value_error(values, error) from error
            config = self._configs[pdl]
            config.gridDimX, config.gridDimY, config.gridDimZ = x, y, z
            config.hStream = stream
            code, device = self._get_device()
            if code == 0 and int(device) == self.device_index:
                (code,) = self._launch_ex(config, self._function, self._params, 0)
            else:
                code = self._launch_in_primary(config)
        if code != 0:
            raise self._launch_error(grid, code)

    def _launch_in_primary(self, config: Any) -> Any:
        """Launch with the device's primary context current for the call."""
        check.call("cuCtxPushCurrent", self._context)
        try:
            (code,) = self._launch_ex(config, self._function, self._params, 0)
        finally:
            check.call("cuCtxPopCurrent")
        return code

    def _value_error(self, values: tuple[Any, ...], error: Exception) -> ArgumentError:
        names = self._layout.names
        if len(values) != len(names):
            return ArgumentError(
                f"values of {self.name}", f"{len(names)} ({', '.join(names)})", len(values)
            )
        pairs = ", ".join(f"{name}={value!r}" for name, value in zip(names, values, strict=True))
        return ArgumentError(f"values of {self.name}", f"the struct's types ({error})", pairs)

    def _launch_error(self, grid: tuple[int, int, int], code: Any) -> CudaError:
        return check.cuda_error(f"cuLaunchKernelEx of {self.name} with grid {grid}", code)


def _make_config(
    driver: Any, threads: int, smem: int, cluster: tuple[int, int, int] | None, pdl: bool
) -> Any:
    config = driver.CUlaunchConfig()
    config.blockDimX, config.blockDimY, config.blockDimZ = threads, 1, 1
    config.sharedMemBytes = smem
    kinds, attributes = driver.CUlaunchAttributeID, []
    if cluster is not None:
        shape = driver.CUlaunchAttribute()
        shape.id = kinds.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
        dim = shape.value.clusterDim
        dim.x, dim.y, dim.z = cluster
        attributes.append(shape)
    if pdl:
        serialise = driver.CUlaunchAttribute()
        serialise.id = kinds.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        serialise.value.programmaticStreamSerializationAllowed = 1
        attributes.append(serialise)
    config.attrs = attributes
    config.numAttrs = len(attributes)
    return config


def load_library(image: bytes) -> Any:
    """Load a cubin (context-independent). Raises CudaError."""
    return check.call("cuLibraryLoadData", image, [], [], 0, [], [], 0)


def get_kernel(library: Any, entry: str, device_index: int, dynamic_smem_bytes: int) -> Any:
    """The CUkernel `entry`, given its dynamic shared memory and loaded on the device.

    A context of the device must be current: the code is brought there now, since loading at the
    first launch could meet a stream capture.
    """
    handle = check.call("cuLibraryGetKernel", library, entry.encode())
    if dynamic_smem_bytes > 0:
        kinds = check.bindings().CUfunction_attribute
        attribute = kinds.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        check.call("cuKernelSetAttribute", attribute, dynamic_smem_bytes, handle, device_index)
    function = check.call("cuKernelGetFunction", handle)
    try:
        check.call("cuFuncLoad", function)  # else it is loaded lazily, at the first launch
    except CudaError:
        raise
    except RuntimeError:  # a driver before 12.4 does not have it
        pass
    return handle
