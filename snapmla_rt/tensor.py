"""Views of other libraries' arrays: address, shape, strides, dtype, device. Nothing is imported.

torch tensors are read through their methods, CuPy and Numba arrays through
`__cuda_array_interface__`, JAX and others through DLPack, NumPy arrays directly. FP8 arrives as
the framework's e4m3 type or as uint8, BF16 as the framework's type or as uint16.

Streams. The order is: an explicit `stream=`, else torch's current stream when a torch tensor is
among the arguments, else the stream that a `__cuda_array_interface__` names, else the legacy
stream. Work of a producer that names another stream is waited for with an event. While the chosen
stream is being captured into a CUDA graph nothing waits and the legacy stream is not touched: the
caller orders its own captured work.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from . import _dlpack
from .errors import ArgumentError

E4M3 = ("float8_e4m3fn", "uint8")
BF16 = ("bfloat16", "uint16")
F32 = ("float32",)
INPUT_FLOATS = ("bfloat16", "float16", "float32")
INDICES = ("int32", "int64")

ITEMSIZE = {
    "bool": 1,
    "int8": 1,
    "uint8": 1,
    "float8_e4m3fn": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2": 1,
    "int16": 2,
    "uint16": 2,
    "float16": 2,
    "bfloat16": 2,
    "int32": 4,
    "uint32": 4,
    "float32": 4,
    "int64": 8,
    "uint64": 8,
    "float64": 8,
}
LEGACY_STREAM = 0
_CAI_KINDS = {"u": "uint", "i": "int", "f": "float", "b": "bool"}
_torch_dtypes: dict[Any, str] = {}
_strided_layouts: set[Any] = set()  # torch.strided, once seen: its text costs more than a look-up

Shape = Sequence[int | str | None]


class TensorView:
    """A strided array somewhere: not to be changed after it is made.

    ptr: address of element 0. shape: extents. strides: in bytes. dtype: a name of ITEMSIZE.
    device_type: "cuda" or "cpu"; device_index: GPU number. owner: kept alive by the view.
    framework: "torch", "cupy", "jax", "numpy" or "". stream: the stream its producer named, which
    must be waited for, or None.
    """

    __slots__ = (
        "device_index",
        "device_type",
        "dtype",
        "framework",
        "owner",
        "ptr",
        "readonly",
        "shape",
        "stream",
        "strides",
    )

    def __init__(
        self,
        ptr: int,
        shape: tuple[int, ...],
        strides: tuple[int, ...],
        dtype: str,
        device_type: str,
        device_index: int,
        owner: Any = None,
        readonly: bool = False,
        framework: str = "",
        stream: int | None = None,
    ) -> None:
        self.ptr = ptr
        self.shape = shape
        self.strides = strides
        self.dtype = dtype
        self.device_type = device_type
        self.device_index = device_index
        self.owner = owner
        self.readonly = readonly
        self.framework = framework
        self.stream = stream

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        """Elements."""
        count = 1
        for extent in self.shape:
            count *= extent
        return count

    @property
    def itemsize(self) -> int:
        return ITEMSIZE[self.dtype]

    @property
    def nbytes(self) -> int:
        return self.size * self.itemsize

    @property
    def device(self) -> str:
        """`cpu` or `cuda:N`."""
        return "cpu" if self.device_type == "cpu" else f"{self.device_type}:{self.device_index}"

    @property
    def is_contiguous(self) -> bool:
        """C order without gaps; strides of extents 0 and 1 do not count."""
        want = _dlpack.contiguous_strides(self.shape, self.itemsize)
        pairs = zip(self.shape, self.strides, want, strict=True)
        return self.size == 0 or all(extent == 1 or got == w for extent, got, w in pairs)

    def __repr__(self) -> str:
        return f"TensorView({list(self.shape)} {self.dtype} on {self.device}, {self.strides} B)"


# --- Making views ------------------------------------------------------------------------------


def view(obj: Any, name: str, stream: Any = None) -> TensorView:
    """A view of an array of any supported library (a TensorView is returned as it is).

    name: the argument's name, for errors. stream: the explicit stream of the call, if any; only
    DLPack producers are told. Raises ArgumentError for anything that is not such an array.
    """
    if isinstance(obj, TensorView):
        return obj
    if isinstance(obj, np.ndarray):
        return _from_numpy(obj, name)
    if hasattr(obj, "data_ptr") and hasattr(obj, "element_size"):
        return _from_torch(obj, name)
    is_jax = type(obj).__module__.startswith("jax")
    if not is_jax and hasattr(obj, "__cuda_array_interface__"):
        return _from_cuda_array_interface(obj, name)
    if hasattr(obj, "__dlpack__") and hasattr(obj, "__dlpack_device__"):
        return _from_dlpack(obj, name, stream, is_jax)
    raise ArgumentError(name, "a torch, CuPy, JAX or NumPy array", type(obj).__name__)


def _known_dtype(dtype: str, name: str) -> str:
    if dtype not in ITEMSIZE:
        raise ArgumentError(name, f"a dtype of {sorted(ITEMSIZE)}", dtype)
    return dtype


def _from_numpy(array: np.ndarray, name: str) -> TensorView:
    if not array.dtype.isnative:
        raise ArgumentError(name, "native byte order", array.dtype.str)
    return TensorView(
        array.__array_interface__["data"][0],
        array.shape,
        array.strides,
        _known_dtype(array.dtype.name, name),
        "cpu",
        0,
        array,
        not array.flags.writeable,
        "numpy",
    )


def _from_torch(tensor: Any, name: str) -> TensorView:
    dtype = _torch_dtypes.get(tensor.dtype)
    if dtype is None:
        dtype = _known_dtype(str(tensor.dtype).removeprefix("torch."), name)
        _torch_dtypes[tensor.dtype] = dtype
    device = tensor.device
    kind = device.type
    if kind not in ("cuda", "cpu"):
        raise ArgumentError(name, "a CUDA or CPU tensor", f"device {device}")
    layout = getattr(tensor, "layout", None)
    if layout not in _strided_layouts:
        if str(layout) not in ("torch.strided", "None"):
            raise ArgumentError(name, "a strided tensor", layout)
        _strided_layouts.add(layout)
    itemsize = ITEMSIZE[dtype]
    return TensorView(
        tensor.data_ptr(),
        tuple(tensor.shape),
        tuple([step * itemsize for step in tensor.stride()]),
        dtype,
        kind,
        device.index or 0,
        tensor,
        False,
        "torch",
    )


def _cai_dtype(obj: Any, typestr: str, name: str) -> str:
    order, kind, size = typestr[0], typestr[1], typestr[2:]
    if order == ">":
        raise ArgumentError(name, "native byte order", typestr)
    if kind in _CAI_KINDS:
        base = _CAI_KINDS[kind]
        return _known_dtype(base if base == "bool" else f"{base}{8 * int(size)}", name)
    # ml_dtypes types have no letter of their own: the array's dtype still knows its name.
    return _known_dtype(str(getattr(getattr(obj, "dtype", None), "name", typestr)), name)


def _from_cuda_array_interface(obj: Any, name: str) -> TensorView:
    interface = obj.__cuda_array_interface__
    pointer, readonly = interface["data"]
    shape = tuple(interface["shape"])
    dtype = _cai_dtype(obj, interface["typestr"], name)
    strides = interface.get("strides")
    if interface.get("mask") is not None:
        raise ArgumentError(name, "an array without a mask", "a masked array")
    stream = interface.get("stream")
    if stream == 0:
        raise ArgumentError(name, "a stream of 1 (legacy), 2 or a handle in its interface", 0)
    return TensorView(
        pointer or 0,
        shape,
        tuple(strides) if strides else _dlpack.contiguous_strides(shape, ITEMSIZE[dtype]),
        dtype,
        "cuda",
        _device_of(obj, pointer or 0),
        obj,
        bool(readonly),
        "cupy" if type(obj).__module__.startswith("cupy") else "",
        None if stream is None else _normal_stream(stream),
    )


def _device_of(obj: Any, pointer: int) -> int:
    """GPU of an array whose interface does not say: the object's word, else the driver's."""
    device = getattr(obj, "device", None)
    index = getattr(device, "id", None)
    if isinstance(index, int):
        return index
    if pointer == 0:
        return 0
    from .driver.memory import device_of_pointer

    return device_of_pointer(pointer)


def _from_dlpack(obj: Any, name: str, stream: Any, is_jax: bool) -> TensorView:
    kind, index = obj.__dlpack_device__()
    on_gpu = int(kind) in (_dlpack.KIND_CUDA, _dlpack.KIND_CUDA_MANAGED)
    waits_for: int | None = None
    try:
        if is_jax or not on_gpu:
            if hasattr(obj, "block_until_ready"):
                obj.block_until_ready()  # JAX names no stream: the host waits for its value
            capsule = obj.__dlpack__()
        else:
            code, waits_for = _dlpack_stream(stream, int(index))
            capsule = obj.__dlpack__(stream=code)
        found = _dlpack.unpack(capsule)
    except (TypeError, ValueError, RuntimeError, BufferError, NotImplementedError) as error:
        raise ArgumentError(
            name, "an array that can be exported through DLPack (FP8 viewed as uint8)", error
        ) from error
    return TensorView(
        found.ptr,
        found.shape,
        found.strides,
        _known_dtype(found.dtype, name),
        found.device_type,
        found.device_index,
        (capsule, obj),
        is_jax,  # JAX arrays are immutable
        "jax" if is_jax else "",
        waits_for,
    )


def _dlpack_stream(stream: Any, device_index: int) -> tuple[int, int | None]:
    """(stream for `__dlpack__`, stream to wait for afterwards).

    Under capture -1: the producer does nothing. With an explicit stream the producer orders it.
    Otherwise the producer orders the legacy stream, which the call's stream then waits for.
    """
    if stream is None:
        return (-1, None) if _torch_is_capturing() else (1, LEGACY_STREAM)
    handle = stream_handle(stream)
    from .driver.memory import is_capturing

    if is_capturing(handle, device_index):
        return -1, None
    return (1 if handle == LEGACY_STREAM else handle), None


# --- Streams -----------------------------------------------------------------------------------


def _normal_stream(handle: int) -> int:
    """0 and 1 both mean the legacy stream."""
    return LEGACY_STREAM if handle == 1 else int(handle)


def stream_handle(stream: Any) -> int:
    """The CUstream handle of an int, torch or CuPy stream, or an object with `__cuda_stream__`.

    Raises ArgumentError for anything else.
    """
    if isinstance(stream, int) and not isinstance(stream, bool) and stream >= 0:
        return _normal_stream(stream)
    protocol = getattr(stream, "__cuda_stream__", None)
    if protocol is not None:
        pair = protocol() if callable(protocol) else protocol
        return _normal_stream(int(pair[1]))
    for attribute in ("cuda_stream", "ptr"):
        handle = getattr(stream, attribute, None)
        if isinstance(handle, int):
            return _normal_stream(handle)
    raise ArgumentError(
        "stream", "a handle (int), a torch or CuPy stream or an object with __cuda_stream__", stream
    )


def _torch_cuda() -> Any:
    """torch.cuda where torch is loaded and has initialised CUDA, else None."""
    torch = sys.modules.get("torch")
    cuda = getattr(torch, "cuda", None)
    return cuda if cuda is not None and cuda.is_initialized() else None


def _torch_is_capturing() -> bool:
    cuda = _torch_cuda()
    return cuda is not None and bool(cuda.is_current_stream_capturing())


def _torch_current_stream(device_index: int) -> int | None:
    cuda = _torch_cuda()
    if cuda is None:
        return None
    return _normal_stream(int(cuda.current_stream(device_index).cuda_stream))


def _check_stream_device(stream: Any, device_index: int) -> None:
    device = getattr(stream, "device_id", None)  # CuPy; -1 where it does not know
    if device is None:
        device = getattr(getattr(stream, "device", None), "index", None)  # torch
    if isinstance(device, int) and device >= 0 and device != device_index:
        raise ArgumentError("stream", f"a stream of cuda:{device_index}", f"one of cuda:{device}")


def resolve_stream(stream: Any, views: Sequence[TensorView], device_index: int) -> int:
    """The stream handle a call runs on, ordered after the producers of its arguments.

    The order of choice is in this module's docstring. Raises ArgumentError for a `stream` that is
    none, or one of another device.
    """
    handle = _choose_stream(stream, views, device_index)
    others = {v.stream for v in views if v.stream is not None and v.stream != handle}
    if others:
        from .driver.memory import is_capturing, wait_for_stream

        if not is_capturing(handle, device_index):
            for producer in sorted(others):
                wait_for_stream(handle, producer, device_index)
    return handle


def _choose_stream(stream: Any, views: Sequence[TensorView], device_index: int) -> int:
    if stream is not None:
        _check_stream_device(stream, device_index)
        return stream_handle(stream)
    if any(v.framework == "torch" for v in views):
        current = _torch_current_stream(device_index)
        if current is not None:
            return current
    named = (v.stream for v in views if v.stream is not None)
    return next(named, LEGACY_STREAM)


# --- Checks ------------------------------------------------------------------------------------


def _describe(shape: Shape, dims: Mapping[str, int]) -> str:
    parts = ["any" if extent is None else str(extent) for extent in shape]
    bound = [f"{e}={dims[e]}" for e in shape if isinstance(e, str) and e in dims]
    text = f"shape [{', '.join(parts)}]"
    return f"{text} with {', '.join(dict.fromkeys(bound))}" if bound else text


def _check_shape(tensor: TensorView, name: str, shape: Shape, dims: dict[str, int]) -> None:
    fits = len(shape) == len(tensor.shape)
    new: dict[str, int] = {}
    for want, got in zip(shape, tensor.shape, strict=False):
        if isinstance(want, str):
            bound = dims.get(want)
            want = new.setdefault(want, got) if bound is None else bound
        if want is not None and want != got:
            fits = False
    if not fits:
        raise ArgumentError(name, _describe(shape, dims), list(tensor.shape))
    dims.update(new)


def expect(
    obj: Any,
    name: str,
    shape: Shape,
    dtypes: str | Sequence[str],
    *,
    dims: dict[str, int] | None = None,
    contiguous: int = 1,
    align: int = 1,
    writable: bool = False,
    stream: Any = None,
) -> TensorView:
    """`view(obj, name)` if it is what a kernel takes, else ArgumentError naming what is wrong.

    shape: ints must match, None matches any extent, a string is a symbol: bound in `dims` at its
    first use and compared after that. dtypes: the names accepted. contiguous: how many trailing
    dimensions must lie without gaps (0: any strides). align: bytes that the address and every
    outer stride are multiples of. writable: refuses read-only and self-overlapping arrays.
    """
    tensor = view(obj, name, stream)
    names = (dtypes,) if isinstance(dtypes, str) else tuple(dtypes)
    _check_shape(tensor, name, shape, {} if dims is None else dims)
    if tensor.dtype not in names:
        raise ArgumentError(name, f"dtype {' or '.join(names)}", tensor.dtype)
    if 0 in tensor.shape:
        return tensor
    _check_strides(tensor, name, contiguous, align)
    if writable:
        _check_writable(tensor, name)
    return tensor


def _check_strides(tensor: TensorView, name: str, contiguous: int, align: int) -> None:
    """From the last dimension outwards: the inner ones without gaps, the outer ones aligned."""
    shape, strides = tensor.shape, tensor.strides
    outer, dense = len(shape) - contiguous, ITEMSIZE[tensor.dtype]
    for axis in range(len(shape) - 1, -1, -1):
        extent, stride = shape[axis], strides[axis]
        if extent == 1:
            continue
        if stride < 0:
            raise ArgumentError(name, "no negative strides", f"strides {strides} (bytes)")
        if axis < outer:
            if stride % align:
                wanted = f"outer strides that are multiples of {align} bytes"
                raise ArgumentError(name, wanted, f"strides {strides} (bytes)")
        elif stride != dense:
            what = "a contiguous last dimension" if contiguous == 1 else "contiguous dimensions"
            wanted = f"{what} (the last {contiguous})"
            raise ArgumentError(name, wanted, f"strides {strides} (bytes)")
        else:
            dense *= extent
    if tensor.ptr % align:
        raise ArgumentError(name, f"an address aligned to {align} bytes", hex(tensor.ptr))


def _check_writable(tensor: TensorView, name: str) -> None:
    if tensor.readonly:
        raise ArgumentError(name, "a writable array", "a read-only one")
    steps = sorted((s, n) for s, n in zip(tensor.strides, tensor.shape, strict=True) if n > 1)
    reach = tensor.itemsize
    for stride, extent in steps:
        if stride < reach:
            got = f"shape {list(tensor.shape)}, strides {tensor.strides} (bytes)"
            raise ArgumentError(name, "elements that do not overlap", got)
        reach += stride * (extent - 1)


def same_device(views: Mapping[str, TensorView]) -> tuple[str, int]:
    """(device type, index) that all share. Raises ArgumentError naming the one that differs."""
    first_name, first = next(iter(views.items()))
    for name, tensor in views.items():
        if tensor.device != first.device:
            raise ArgumentError(name, f"device {first.device} (as {first_name})", tensor.device)
    return first.device_type, first.device_index
