"""Views of other libraries' arrays, their checks, and the choice of stream and backend.

torch, CuPy and JAX are not needed: stand-ins carry the attributes through which they are read, and
the DLPack capsules are real ones.
"""

from __future__ import annotations

import ctypes
import sys
import types
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from snapmla_rt import tensor as tensors
from snapmla_rt.array import copy_into, new_array, numpy_dtype, to_host
from snapmla_rt.backend import resolve_backend
from snapmla_rt.driver.check import has_driver
from snapmla_rt.errors import ArgumentError, UnsupportedDeviceError
from snapmla_rt.tensor import (
    BF16,
    E4M3,
    ITEMSIZE,
    TensorView,
    expect,
    resolve_stream,
    same_device,
    stream_handle,
    view,
)


class TorchDtype:
    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return f"torch.{self.name}"


class TorchTensor:
    """What is read of a torch tensor, over memory of a NumPy array."""

    def __init__(self, array: np.ndarray, dtype: str, device: str = "cuda", index: int = 0) -> None:
        self._array = array
        self.dtype = TorchDtype(dtype)
        self.device = types.SimpleNamespace(type=device, index=index if device == "cuda" else None)
        self.shape = array.shape

    def data_ptr(self) -> int:
        return int(self._array.__array_interface__["data"][0])

    def element_size(self) -> int:
        return self._array.itemsize

    def stride(self) -> tuple[int, ...]:
        return tuple(step // self._array.itemsize for step in self._array.strides)


class CudaArray:
    """An array with a __cuda_array_interface__, as CuPy's and Numba's."""

    def __init__(self, index: int = 0, **fields: Any) -> None:
        self.device = types.SimpleNamespace(id=index)
        self.__cuda_array_interface__ = {
            "shape": (4, 8),
            "typestr": "<f4",
            "data": (0x1000, False),
            "version": 3,
            "strides": None,
            **fields,
        }


def address(array: np.ndarray) -> int:
    return int(array.__array_interface__["data"][0])


@pytest.mark.parametrize("dtype", sorted(set(ITEMSIZE) - {"float8_e4m3fnuz"}))
def test_numpy_arrays(dtype: str) -> None:
    array = np.zeros((3, 4, 5), numpy_dtype(dtype))[::2, 1:, ::-1]
    seen = view(array, "x")
    assert (seen.ptr, seen.shape, seen.strides) == (address(array), array.shape, array.strides)
    assert (seen.dtype, seen.device, seen.framework) == (dtype, "cpu", "numpy")
    assert seen.itemsize == array.itemsize and seen.nbytes == array.nbytes and seen.ndim == 3
    assert seen.owner is array and not seen.readonly and view(seen, "x") is seen


@given(
    st.lists(st.integers(0, 4), min_size=1, max_size=4),
    st.permutations(range(4)),
    st.lists(st.integers(1, 3), min_size=4, max_size=4),
)
def test_contiguity_and_host_copies(shape: list[int], order: list[int], steps: list[int]) -> None:
    """is_contiguous agrees with NumPy, and any view copies out as NumPy sees it."""
    axes = [axis for axis in order if axis < len(shape)]
    whole = np.arange(int(np.prod([n * 3 for n in shape])), dtype=np.int32)
    array = whole.reshape([n * 3 for n in shape]).transpose(axes)
    array = array[tuple(slice(None, None, step) for step in steps[: len(shape)])]
    seen = view(array, "x")
    assert seen.is_contiguous == array.flags.c_contiguous
    assert seen.size == array.size
    copy = to_host(seen)
    assert copy.shape == array.shape and (copy == array).all()


def test_readonly_and_byte_order() -> None:
    array = np.zeros(4, np.float32)
    array.flags.writeable = False
    assert view(array, "x").readonly
    with pytest.raises(ArgumentError, match="out: expected a writable array"):
        expect(array, "out", (4,), "float32", writable=True)
    with pytest.raises(ArgumentError, match="native byte order"):
        view(np.zeros(4, ">f4"), "x")
    with pytest.raises(ArgumentError, match=r"x: expected a dtype of .* got complex64"):
        view(np.zeros(4, np.complex64), "x")


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "bfloat16", "float16", "uint8", "int64"])
def test_torch_tensors(dtype: str) -> None:
    memory = np.zeros((4, 6, 8), numpy_dtype(dtype))
    array = memory.transpose(1, 0, 2)[:, ::2]
    seen = view(TorchTensor(array, dtype, index=3), "q")
    assert (seen.ptr, seen.shape, seen.strides) == (address(array), array.shape, array.strides)
    assert (seen.dtype, seen.device, seen.framework) == (dtype, "cuda:3", "torch")
    assert view(TorchTensor(array, dtype, "cpu"), "q").device == "cpu"
    assert type(seen.shape) is tuple and type(seen.strides) is tuple


def test_torch_tensors_elsewhere_are_refused() -> None:
    array = np.zeros(4, np.float32)
    with pytest.raises(ArgumentError, match="q: expected a CUDA or CPU tensor"):
        view(TorchTensor(array, "float32", "meta"), "q")
    with pytest.raises(ArgumentError, match=r"q: expected a dtype of .* got complex64"):
        view(TorchTensor(array, "complex64"), "q")
    sparse = TorchTensor(array, "float32")
    sparse.layout = "torch.sparse_coo"  # type: ignore[attr-defined]
    with pytest.raises(ArgumentError, match=r"a strided tensor, got torch\.sparse_coo"):
        view(sparse, "q")


def test_cuda_array_interface() -> None:
    seen = view(CudaArray(2), "x")
    assert (seen.ptr, seen.shape, seen.strides) == (0x1000, (4, 8), (32, 4))
    assert (seen.dtype, seen.device, seen.stream) == ("float32", "cuda:2", None)
    assert view(CudaArray(strides=(64, 4), data=(16, True)), "x").strides == (64, 4)
    assert view(CudaArray(data=(16, True)), "x").readonly
    for typestr, dtype in (
        ("|u1", "uint8"),
        ("<u2", "uint16"),
        ("<f2", "float16"),
        ("<i8", "int64"),
    ):
        assert view(CudaArray(typestr=typestr), "x").dtype == dtype
    odd = CudaArray(typestr="<V2")
    with pytest.raises(ArgumentError, match="got <V2"):
        view(odd, "x")
    odd.dtype = np.dtype(ml_dtypes.bfloat16)  # type: ignore[attr-defined]
    assert view(odd, "x").dtype == "bfloat16"
    with pytest.raises(ArgumentError, match="native byte order"):
        view(CudaArray(typestr=">f4"), "x")
    with pytest.raises(ArgumentError, match="without a mask"):
        view(CudaArray(mask=object()), "x")


def test_cuda_array_interface_streams() -> None:
    """None: nothing to wait for. 1: legacy. 2: per-thread. 0 is forbidden by the protocol."""
    assert view(CudaArray(stream=None), "x").stream is None
    assert view(CudaArray(stream=1), "x").stream == 0
    assert view(CudaArray(stream=2), "x").stream == 2
    assert view(CudaArray(stream=0x7F00), "x").stream == 0x7F00
    with pytest.raises(ArgumentError, match="got 0"):
        view(CudaArray(stream=0), "x")


# --- DLPack ------------------------------------------------------------------------------------


class FromNumPy:
    """An array known only through DLPack, on the host."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array

    def __dlpack__(self, **options: Any) -> Any:
        assert not options, "a host array has no stream"
        return self.array.__dlpack__()

    def __dlpack_device__(self) -> tuple[int, int]:
        return (1, 0)


@pytest.mark.parametrize("dtype", ["uint8", "int32", "int64", "float16", "float32"])
def test_dlpack_on_the_host(dtype: str) -> None:
    array = np.arange(60, dtype=dtype).reshape(3, 4, 5)[:, ::2]
    seen = view(FromNumPy(array), "x")
    assert (seen.ptr, seen.shape, seen.strides) == (address(array), array.shape, array.strides)
    assert (seen.dtype, seen.device) == (dtype, "cpu")


def test_dlpack_view_keeps_the_memory_and_lets_go() -> None:
    array = np.zeros(1000, np.uint8)
    before = sys.getrefcount(array)
    seen = view(FromNumPy(array), "x")
    assert sys.getrefcount(array) > before
    del seen
    assert sys.getrefcount(array) == before, "the producer's deleter ran"


def capsule(kind: int, index: int, code: int, bits: int, strides: bool = True) -> Any:
    """A real DLPack capsule of a [2, 3] array at 0x10000 (offset 64), never read."""

    class Managed(ctypes.Structure):
        _fields_ = (
            ("data", ctypes.c_void_p),
            ("kind", ctypes.c_int32),
            ("index", ctypes.c_int32),
            ("ndim", ctypes.c_int32),
            ("code", ctypes.c_uint8),
            ("bits", ctypes.c_uint8),
            ("lanes", ctypes.c_uint16),
            ("shape", ctypes.POINTER(ctypes.c_int64)),
            ("strides", ctypes.POINTER(ctypes.c_int64)),
            ("offset", ctypes.c_uint64),
            ("context", ctypes.c_void_p),
            ("deleter", ctypes.c_void_p),
        )

    extents, steps = (ctypes.c_int64 * 2)(2, 3), (ctypes.c_int64 * 2)(8, 1)
    made = Managed(0x10000, kind, index, 2, code, bits, 1, extents, None, 64, None, None)
    if strides:
        made.strides = steps
    new = ctypes.pythonapi.PyCapsule_New
    new.restype = ctypes.py_object
    new.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
    KEPT.append((made, extents, steps))
    return new(ctypes.addressof(made), b"dltensor", None)


KEPT: list[Any] = []


class OnGpu:
    """An array known only through DLPack, on GPU 1; remembers the stream it was asked with."""

    def __init__(self, code: int = 2, bits: int = 32, strides: bool = True, kind: int = 2) -> None:
        self.made = capsule(kind, 1, code, bits, strides)
        self.kind = kind
        self.asked: list[Any] = []

    def __dlpack__(self, stream: Any = "absent") -> Any:
        self.asked.append(stream)
        return self.made

    def __dlpack_device__(self) -> tuple[int, int]:
        return (self.kind, 1)


@pytest.mark.parametrize(
    ("code", "bits", "dtype"),
    [(10, 8, "float8_e4m3fn"), (4, 16, "bfloat16"), (2, 32, "float32"), (1, 8, "uint8")],
)
def test_dlpack_on_a_gpu(code: int, bits: int, dtype: str) -> None:
    seen = view(OnGpu(code, bits), "x")
    assert (seen.ptr, seen.shape, seen.device) == (0x10040, (2, 3), "cuda:1")
    assert seen.dtype == dtype and seen.strides == (bits, bits // 8)
    assert view(OnGpu(code, bits, strides=False), "x").strides == (3 * bits // 8, bits // 8)
    assert view(OnGpu(code, bits, kind=13), "x").device == "cuda:1", "managed memory"


def test_dlpack_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """No stream known: the producer orders the legacy stream, which is then waited for.
    Given: the producer orders it. Being captured: -1, and nothing is waited for."""
    array = OnGpu()
    assert view(array, "x").stream == 0 and array.asked == [1]
    capturing = False
    from snapmla_rt.driver import memory

    monkeypatch.setattr(memory, "is_capturing", lambda stream, device: capturing)
    assert view(array, "x", 0x60).stream is None and array.asked[-1] == 0x60
    assert view(array, "x", 0).stream is None and array.asked[-1] == 1
    capturing = True
    assert view(array, "x", 0x60).stream is None and array.asked[-1] == -1
    fake_torch(monkeypatch, current=0x77, capturing=True)
    assert view(array, "x").stream is None and array.asked[-1] == -1


def test_dlpack_failures_are_named() -> None:
    class Refusing(OnGpu):
        def __dlpack__(self, stream: Any = None) -> Any:
            raise BufferError("float8 is not supported")

    with pytest.raises(ArgumentError, match=r"k: expected .*FP8 viewed as uint8.*float8 is not"):
        view(Refusing(), "k")
    with pytest.raises(ArgumentError, match="DLPack code 5, 64 bits"):
        view(OnGpu(5, 64), "k")
    with pytest.raises(ArgumentError, match="k: expected a torch, CuPy, JAX or NumPy array, got"):
        view([1, 2], "k")


def test_jax_waits_on_the_host_and_is_read_only() -> None:
    class Array(OnGpu):
        __module__ = "jaxlib._jax"
        waited = False

        @property
        def __cuda_array_interface__(self) -> Any:
            raise RuntimeError("no interface for bfloat16")

        def block_until_ready(self) -> None:
            self.waited = True

    array = Array(4, 16)
    seen = view(array, "x")
    assert array.waited and array.asked == ["absent"]
    assert (seen.framework, seen.readonly, seen.stream) == ("jax", True, None)


# --- Checks ------------------------------------------------------------------------------------


def test_expect_binds_and_compares_dimensions() -> None:
    dims: dict[str, int] = {}
    q = np.zeros((3, 2, 16, 576), np.float16)
    expect(q, "q", ("b", "s_q", "h", 576), ("float16",), dims=dims)
    assert dims == {"b": 3, "s_q": 2, "h": 16}
    expect(np.zeros((3, 9), np.int32), "block_table", ("b", None), "int32", dims=dims)
    with pytest.raises(ArgumentError, match=r"cache_seqlens: expected shape \[b\] with b=3, got"):
        expect(np.zeros(4, np.int32), "cache_seqlens", ("b",), "int32", dims=dims)
    with pytest.raises(ArgumentError, match=r"shape \[n, n\]"):
        expect(np.zeros((2, 3), np.int32), "square", ("n", "n"), "int32", dims=dims)
    assert "n" not in dims, "a failed check binds nothing"
    for bad in (np.zeros(3, np.int32), np.zeros((3, 2, 16, 512), np.float16)):
        with pytest.raises(ArgumentError, match=r"q: expected shape \[b, s_q, h, 576\]"):
            expect(bad, "q", ("b", "s_q", "h", 576), "float16")


def test_expect_dtypes() -> None:
    for dtype in (ml_dtypes.float8_e4m3fn, np.uint8):
        expect(np.zeros(4, dtype), "k", (4,), E4M3)
    for dtype in (ml_dtypes.bfloat16, np.uint16):
        expect(np.zeros(4, dtype), "k", (4,), BF16)
    for dtype in (ml_dtypes.float8_e4m3fnuz, ml_dtypes.float8_e5m2, np.int8):
        with pytest.raises(ArgumentError, match="k: expected dtype float8_e4m3fn or uint8, got"):
            expect(np.zeros(4, dtype), "k", (4,), E4M3)


def test_expect_strides() -> None:
    base = np.zeros((6, 4, 640), np.float16)
    inside = base[:, :, :576]
    assert expect(inside, "q", (6, 4, 576), "float16", align=16).strides == base.strides
    expect(base.transpose(1, 0, 2), "q", (4, 6, 640), "float16", align=16)
    expect(base[:, :1], "q", (6, 1, 640), "float16", contiguous=2)
    expect(base[:, :, ::2], "q", (6, 4, 320), "float16", contiguous=0)
    with pytest.raises(ArgumentError, match="q: expected a contiguous last dimension"):
        expect(base[:, :, ::2], "q", (6, 4, 320), "float16")
    with pytest.raises(ArgumentError, match=r"contiguous dimensions \(the last 2\)"):
        expect(inside, "q", (6, 4, 576), "float16", contiguous=2)
    with pytest.raises(ArgumentError, match="no negative strides"):
        expect(base[::-1], "q", (6, 4, 640), "float16")
    with pytest.raises(ArgumentError, match="multiples of 16 bytes"):
        expect(base.reshape(-1)[:2439].reshape(3, 813)[:, :8], "q", (3, 8), "float16", align=16)
    odd = np.zeros(100, np.uint8)
    odd = odd[1 + -address(odd) % 16 :][:64]
    with pytest.raises(ArgumentError, match="an address aligned to 16 bytes"):
        expect(odd, "q", (64,), "uint8", align=16)


def test_extents_of_one_and_none_have_no_strides() -> None:
    """Frameworks put anything in the stride of an extent of 1: it must not matter."""
    array = np.zeros((1, 8), np.float32)
    odd = np.lib.stride_tricks.as_strided(array, (1, 8), (-12345, 4))
    assert expect(odd, "x", (1, 8), "float32", align=4).is_contiguous
    expect(np.zeros((0, 8), np.float32)[:, ::2], "x", (0, 4), "float32", align=1 << 20)


def test_outputs_must_not_overlap_themselves() -> None:
    one = np.zeros(64, np.float32)
    as_strided = np.lib.stride_tricks.as_strided
    for shape, strides in (((4, 8), (0, 4)), ((4, 8), (16, 4)), ((8, 8), (4, 4))):
        with pytest.raises(ArgumentError, match="out: expected elements that do not overlap"):
            out = as_strided(one, shape, strides)
            expect(out, "out", shape, "float32", contiguous=0, writable=True)
    for shape, strides in (((4, 8), (32, 4)), ((8, 4), (4, 32)), ((1, 8), (0, 4))):
        out = as_strided(one, shape, strides)
        expect(out, "out", shape, "float32", contiguous=0, writable=True)


def test_mixed_devices_are_refused_by_name() -> None:
    here, there, host = view(CudaArray(0), "a"), view(CudaArray(1), "b"), view(np.zeros(1), "c")
    assert same_device({"q": here, "k": here}) == ("cuda", 0)
    with pytest.raises(
        ArgumentError, match=r"k_scale_cache: expected device cuda:0 \(as q\), got cuda:1"
    ):
        same_device({"q": here, "k": here, "k_scale_cache": there})
    with pytest.raises(ArgumentError, match=r"out: expected device cuda:1 \(as q\), got cpu"):
        same_device({"q": there, "out": host})


# --- Streams and backends ----------------------------------------------------------------------


def fake_torch(
    monkeypatch: pytest.MonkeyPatch, current: int, capturing: bool = False, ready: bool = True
) -> None:
    stream = types.SimpleNamespace(cuda_stream=current)
    cuda = types.SimpleNamespace(
        is_initialized=lambda: ready,
        is_current_stream_capturing=lambda: capturing,
        current_stream=lambda index: stream,
    )
    monkeypatch.setitem(sys.modules, "torch", types.SimpleNamespace(cuda=cuda))


def test_stream_handles() -> None:
    assert [stream_handle(code) for code in (0, 1, 2, 0x7F12)] == [0, 0, 2, 0x7F12]
    assert stream_handle(types.SimpleNamespace(cuda_stream=0x50)) == 0x50
    assert stream_handle(types.SimpleNamespace(ptr=0x60)) == 0x60
    assert stream_handle(types.SimpleNamespace(__cuda_stream__=lambda: (0, 0x70))) == 0x70
    assert stream_handle(types.SimpleNamespace(__cuda_stream__=(0, 0x80))) == 0x80
    for bad in ("0", -1, True, 1.0, object(), types.SimpleNamespace(ptr="x")):
        with pytest.raises(ArgumentError, match="stream: expected a handle"):
            stream_handle(bad)


def test_the_choice_of_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """Explicit, then torch's current one for torch tensors, then an interface's, then legacy."""
    torch = view(TorchTensor(np.zeros(4, np.float32), "float32"), "q")
    plain = view(CudaArray(), "x")
    named = view(CudaArray(stream=0x50), "x")
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    assert resolve_stream(None, [torch, plain], 0) == 0
    fake_torch(monkeypatch, current=0x77)
    assert resolve_stream(None, [plain, torch], 0) == 0x77
    assert resolve_stream(None, [plain], 0) == 0, "not a torch call"
    assert resolve_stream(None, [named], 0) == 0x50
    assert resolve_stream(0x99, [torch], 0) == 0x99
    fake_torch(monkeypatch, current=0, ready=False)
    assert resolve_stream(None, [torch], 0) == 0
    for stream in (
        types.SimpleNamespace(cuda_stream=5, device=types.SimpleNamespace(index=1)),
        types.SimpleNamespace(ptr=5, device_id=1),
    ):
        assert resolve_stream(stream, [plain], 1) == 5
        with pytest.raises(ArgumentError, match="stream: expected a stream of cuda:0, got one of"):
            resolve_stream(stream, [plain], 0)


def test_producers_on_other_streams_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    from snapmla_rt.driver import memory

    waits: list[tuple[int, int, int]] = []
    monkeypatch.setattr(memory, "wait_for_stream", lambda *which: waits.append(which))
    monkeypatch.setattr(memory, "is_capturing", lambda stream, device: stream == 0x99)
    a, b, c = (view(CudaArray(stream=stream), "x") for stream in (0x50, 0x60, None))
    assert resolve_stream(0x50, [a, b, c, b], 3) == 0x50 and waits == [(0x50, 0x60, 3)]
    assert resolve_stream(0x99, [a, b, c], 3) == 0x99 and len(waits) == 1, "not under capture"


def test_backends_by_name() -> None:
    host = {"q": view(np.zeros(4, np.float32), "q")}
    assert resolve_backend("reference", host) == ("reference", -1)
    with pytest.raises(ArgumentError, match="backend: expected one of"):
        resolve_backend("gpu", host)
    with pytest.raises(ArgumentError, match="k: expected device cpu"):
        resolve_backend("auto", {**host, "k": view(CudaArray(), "k")})


@pytest.mark.skipif(has_driver(), reason="this machine has a CUDA driver")
def test_without_a_driver() -> None:
    host, gpu = {"q": view(np.zeros(4), "q")}, {"q": view(CudaArray(), "q")}
    assert resolve_backend("auto", host) == ("reference", -1)
    for backend, views in (("cuda", host), ("cuda", gpu), ("auto", gpu)):
        for _ in range(2):  # the bindings hang at a second call without a driver
            with pytest.raises(UnsupportedDeviceError, match=r"^no CUDA driver.*reference"):
                resolve_backend(backend, views)


def test_results_are_made_in_the_caller_s_library(monkeypatch: pytest.MonkeyPatch) -> None:
    made = new_array(view(np.zeros(1), "x"), (2, 3), "bfloat16")
    assert made.dtype == ml_dtypes.bfloat16 and made.shape == (2, 3)
    asked: list[Any] = []
    monkeypatch.setitem(
        sys.modules,
        "torch",
        types.SimpleNamespace(bfloat16="bf16", empty=lambda *a, **k: asked.append((a, k))),
    )
    like = TorchTensor(np.zeros(4, np.float32), "float32")
    new_array(view(like, "q"), (2, 3), "bfloat16")
    assert asked == [(((2, 3),), {"dtype": "bf16", "device": like.device})]


def test_copy_into_checks_the_shape() -> None:
    source = view(np.arange(6, dtype=np.float32).reshape(2, 3), "x")
    target = np.zeros((3, 2), np.float32)
    with pytest.raises(ArgumentError, match=r"out: expected shape \[2, 3\], got \[3, 2\]"):
        copy_into(source, target)
    copy_into(source, target.T)
    assert (target.T == np.arange(6).reshape(2, 3)).all()


def test_nothing_is_imported() -> None:
    names = {"torch", "cupy", "jax", "cuda"}
    assert not names & {name.split(".")[0] for name in vars(tensors)}
    assert isinstance(view(np.zeros(1), "x"), TensorView)
