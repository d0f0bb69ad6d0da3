"""Launching a loaded kernel: packed parameters, reused launch configurations.

A launch packs the params struct into a buffer of the kernel, sets grid and stream on a stored
CUlaunchConfig and calls cuLaunchKernelEx, which copies the parameters before it returns. Where the
same launch is repeated with nothing changed, `Kernel.prepare` does all of that once.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from typing import Any, Protocol

from ..errors import ArgumentError, CudaError
from . import check
from .device import current_device, device_context, primary_context

_MAX_GRID = 2**31 - 1
PER_THREAD_STREAM = 2
LAST_DEFAULT_STREAM = PER_THREAD_STREAM  # 0 and 1: the legacy stream


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
        self._get_current = driver.cuCtxGetCurrent
        self._context = primary_context(device_index)
        self._context_value = int(self._context)
        self._lock = threading.Lock()
        # The params struct, 64-byte aligned as on the device, and the void*[1] that points at it.
        self._memory = ctypes.create_string_buffer(layout.size + 64)
        self._offset = -ctypes.addressof(self._memory) % 64
        self._pointer = ctypes.c_void_p(ctypes.addressof(self._memory) + self._offset)
        self._params = ctypes.addressof(self._pointer)
        self._configs = tuple(
            _make_config(driver, threads, dynamic_smem_bytes, cluster, pdl) for pdl in (False, True)
        )
        self._shape = (threads, dynamic_smem_bytes, cluster)

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
        if x > _MAX_GRID or y > _MAX_GRID or z > _MAX_GRID or x < 0 or y < 0 or z < 0:
            _check_grid(self.name, grid)
        with self._lock:
            try:
                self._pack_into(self._memory, self._offset, *values)
            except Exception as error:  # struct.error: wrong count, type or range
                raise self._value_error(values, error) from error
            config = self._configs[pdl]
            config.gridDimX, config.gridDimY, config.gridDimZ = x, y, z
            config.hStream = stream
            if self._context_is_current():
                (code,) = self._launch_ex(config, self._function, self._params, 0)
            else:
                code = self._launch_in_primary(config)
        if code != 0:
            raise self._launch_error(grid, code)

    def prepare(
        self, grid: tuple[int, int, int], stream: int, *values: Any, pdl: bool = False
    ) -> PreparedLaunch | None:
        """`launch` with everything fixed, to be called any number of times; None for an empty grid.

        Arguments and errors as in `launch`.
        """
        if 0 in grid:
            return None
        _check_grid(self.name, grid)
        try:
            params = self._layout.packer.pack(*values)
        except Exception as error:
            raise self._value_error(values, error) from error
        return PreparedLaunch(self, params, grid, stream, pdl)

    def _context_is_current(self) -> bool:
        """Whether the current context is one of this kernel's device, primary or not."""
        _, context = self._get_current()
        if int(context) == self._context_value:
            return True
        return current_device() == self.device_index if int(context) else False

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


def _check_grid(name: str, grid: tuple[int, int, int]) -> None:
    """Refuse what the driver's 32-bit fields cannot carry; smaller limits are the driver's."""
    if not all(0 <= extent <= _MAX_GRID for extent in grid):
        raise ArgumentError(f"grid of {name}", f"extents up to {_MAX_GRID}", grid)


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute: an id and a value of 64 bytes, of which the first words are used."""

    _fields_ = (("id", ctypes.c_int), ("pad", ctypes.c_int), ("words", ctypes.c_uint * 16))


class _Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("num_attributes", ctypes.c_uint),
    )


@functools.lru_cache(maxsize=1)
def _launch_function() -> Any:
    """cuLaunchKernelEx itself: through the bindings its arguments are converted at every call."""
    function = ctypes.CDLL(check.LIBCUDA).cuLaunchKernelEx
    function.restype = ctypes.c_int
    return function


class PreparedLaunch:
    """One launch whose parameters, grid and stream are fixed: calling it enqueues it.

    Nothing in it changes after it is made, and the driver copies the parameters at each call, so
    any thread may call it at any time. direct: the driver's call alone, whose result is not 0 where
    the launch was refused; call the object then, which says why. Not for a process that was forked
    after CUDA was used; and on a default stream (0 to 2) a context of the device must be current,
    where a stream of its own names its context.
    """

    __slots__ = ("_keep", "_kernel", "direct", "grid", "stream")

    def __init__(
        self, kernel: Kernel, params: bytes, grid: tuple[int, int, int], stream: int, pdl: bool
    ) -> None:
        self._kernel = kernel
        self.grid = grid
        self.stream = stream
        memory = ctypes.create_string_buffer(len(params) + 64)
        start = ctypes.addressof(memory) + -ctypes.addressof(memory) % 64
        ctypes.memmove(start, params, len(params))
        pointers = (ctypes.c_void_p * 1)(start)
        attributes = self._attributes(pdl)
        config = _Config()
        threads, config.shared_bytes, _ = kernel._shape
        config.grid[:] = grid
        config.block[:] = (threads, 1, 1)
        config.stream = stream
        config.attributes = attributes
        config.num_attributes = len(attributes)
        self._keep = (memory, pointers, attributes, config)
        arguments = (
            ctypes.c_void_p(ctypes.addressof(config)),
            ctypes.c_void_p(int(kernel._function)),
            ctypes.c_void_p(ctypes.addressof(pointers)),
            ctypes.c_void_p(None),
        )
        self.direct = functools.partial(_launch_function(), *arguments)

    def _attributes(self, pdl: bool) -> Any:
        kinds = check.bindings().CUlaunchAttributeID
        found: list[tuple[int, tuple[int, ...]]] = []
        cluster = self._kernel._shape[2]
        if cluster is not None:
            found.append((int(kinds.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION), cluster))
        if pdl:
            kind = kinds.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            found.append((int(kind), (1,)))
        attributes = (_Attribute * len(found))()
        for attribute, (kind_id, words) in zip(attributes, found, strict=True):
            attribute.id = kind_id
            attribute.words[: len(words)] = words
        return attributes

    def __call__(self) -> None:
        """Enqueue the launch. Raises CudaError for a refused launch."""
        if check.forked_after_use:
            check.initialise()  # says what is wrong
        if self.stream <= LAST_DEFAULT_STREAM or self.direct() != 0:
            self._call_in_context()

    def _call_in_context(self) -> None:
        with device_context(self._kernel.device_index):
            code = self.direct()
        if code != 0:
            raise self._kernel._launch_error(self.grid, check.bindings().CUresult(code))


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
