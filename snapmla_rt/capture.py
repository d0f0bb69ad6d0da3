"""Captures: the queries and keys of real or made-up decode steps, as `snapmla decode` reads them.

A capture holds, for one layer or for several with a leading name ("layers.3.q"):

    q              [steps, s_q, h, 576]   queries of each step, latent part first, rotated
    kv_c           [tokens, 512]          latents of all tokens, oldest first
    k_pe           [tokens, 64]           rotated RoPE keys of the same tokens
    softmax_scale  one positive float     may stand once, without a leading name, for all layers

in bfloat16, float16 or float32. The last steps * s_q tokens are those that the steps append.

`.safetensors` is read here, not through the safetensors package: its NumPy side has no bfloat16,
which is what captures are made of, and the format's header is 8 bytes of length and one JSON
object. The file is mapped, so only what is used is read. `.npz` has no bfloat16 either: it is
taken as uint16 bits, or as the two-byte void type that `np.savez` makes of an ml_dtypes array.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from .config import HEAD_DIM_QK, KV_LORA_RANK, MAX_CACHE_SEQLEN, MAX_NUM_HEADS_Q, QK_ROPE_HEAD_DIM
from .errors import ArgumentError

FIELDS = ("q", "kv_c", "k_pe", "softmax_scale")

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
_INPUT_DTYPES = (BFLOAT16, np.dtype(np.float16), np.dtype(np.float32))
_SAFETENSORS_DTYPES = {
    "BF16": BFLOAT16,
    "F16": np.dtype("<f2"),
    "F32": np.dtype("<f4"),
    "F64": np.dtype("<f8"),
}
_MAX_HEADER_BYTES = 100_000_000  # the limit that the format's own library has
_CHECK_ELEMENTS = 1 << 22  # elements tested for NaN at once
_SHOWN_NAMES = 12  # arrays of a file that a message lists
_ZIP_STARTS = (b"PK\x03\x04", b"PK\x05\x06")  # a zip archive; one without a member
_NPY_START = b"\x93NUMPY"


@dataclass(frozen=True)
class LayerCapture:
    """One layer of a capture, checked: every value finite, every shape as the module says."""

    name: str  # "" where the file has no leading names
    q: NDArray[Any]
    kv_c: NDArray[Any]
    k_pe: NDArray[Any]
    softmax_scale: float

    @property
    def num_steps(self) -> int:
        return int(self.q.shape[0])

    @property
    def seq_len_q(self) -> int:
        return int(self.q.shape[1])

    @property
    def num_heads_q(self) -> int:
        return int(self.q.shape[2])

    @property
    def num_tokens(self) -> int:
        return int(self.kv_c.shape[0])

    @property
    def prefill_tokens(self) -> int:
        """Tokens that are in the cache before the first step."""
        return self.num_tokens - self.num_steps * self.seq_len_q

    def first_steps(self, num_steps: int) -> LayerCapture:
        """The capture ended after its first num_steps steps; ArgumentError if it has fewer."""
        if not 1 <= num_steps <= self.num_steps:
            raise ArgumentError("--steps", f"1..{self.num_steps} (what FILE holds)", num_steps)
        tokens = self.prefill_tokens + num_steps * self.seq_len_q
        return LayerCapture(
            self.name,
            self.q[:num_steps],
            self.kv_c[:tokens],
            self.k_pe[:tokens],
            self.softmax_scale,
        )


# --- reading --------------------------------------------------------------------------------------


def read_capture(path: str | Path) -> list[LayerCapture]:
    """All layers of a `.safetensors` or `.npz` capture, in the natural order of their names.

    Raises ArgumentError, naming the file or the array in it, for a file that cannot be read or is
    not of its kind, for missing arrays, wrong shapes or dtypes, and for NaN or infinite values.
    """
    path = Path(path)
    got = _no_file(path)
    if got is not None:
        raise ArgumentError(str(path), "a readable .safetensors or .npz file", got)
    readers = {".safetensors": _read_safetensors, ".npz": _read_npz}
    reader = readers.get(path.suffix.lower())
    if reader is None:
        raise ArgumentError(str(path), "a name ending in .safetensors or .npz", repr(path.suffix))
    try:
        arrays, others = reader(path)
        return layers_of(arrays, str(path), others)
    except OSError as error:
        raise ArgumentError(str(path), "a readable file", error.strerror or error) from error


def _no_file(path: Path) -> str | None:
    """What `path` is instead of a file, or why that cannot be told; None for a file."""
    try:
        os.stat(path)  # Path.is_file() raises for some reasons and hides others
    except (FileNotFoundError, NotADirectoryError):
        return "no such file"
    except OSError as error:
        return error.strerror or str(error)
    if path.is_dir():
        return "a directory"
    return None if path.is_file() else "something that is no file"


def read_safetensors(path: Path) -> dict[str, NDArray[Any]]:
    """Name -> array of every floating-point tensor of a safetensors file, mapped read-only."""
    return _read_safetensors(path)[0]


def _read_safetensors(path: Path) -> tuple[dict[str, NDArray[Any]], list[str]]:
    """The floating-point tensors, and the names of the others."""
    size = path.stat().st_size
    if size < 8:
        raise ArgumentError(str(path), "a safetensors file", f"{size} bytes")
    data = np.memmap(path, np.uint8, "r")
    (header_bytes,) = struct.unpack("<Q", data[:8].tobytes())
    if header_bytes > min(size - 8, _MAX_HEADER_BYTES):
        got = f"a header length of {header_bytes} in a file of {size} bytes"
        raise ArgumentError(str(path), "a safetensors file", got)
    try:
        header = json.loads(data[8 : 8 + header_bytes].tobytes())
    except (ValueError, RecursionError) as error:
        raise ArgumentError(str(path), "a safetensors file", "a header that is no JSON") from error
    if not isinstance(header, dict):
        raise ArgumentError(str(path), "a JSON object as header", type(header).__name__)
    body = data[8 + header_bytes :]
    entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
    tensors = {name: _tensor(str(path), name, entry, body) for name, entry in entries.items()}
    arrays = {name: array for name, array in tensors.items() if array is not None}
    return arrays, [name for name in tensors if name not in arrays]


def _tensor(path: str, name: str, entry: Any, body: NDArray[np.uint8]) -> NDArray[Any] | None:
    """One tensor of the header; None for one that is no part of a capture."""
    where = f"{path}: {name}"
    try:
        kind, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
        whole = [*shape, begin, end]
        if not isinstance(kind, str) or not all(isinstance(n, int) and n >= 0 for n in whole):
            raise ValueError(entry)
    except (TypeError, KeyError, ValueError) as error:
        raise ArgumentError(where, "dtype, shape and data_offsets", entry) from error
    dtype = _SAFETENSORS_DTYPES.get(kind)
    if dtype is None:
        if name.rpartition(".")[2] in FIELDS:
            raise ArgumentError(where, "BF16, F16 or F32", kind)
        return None
    need = math.prod(shape) * dtype.itemsize
    if end - begin != need or end > len(body):
        got = f"data_offsets [{begin}, {end}] of {len(body)}"
        raise ArgumentError(where, f"{need} bytes for {kind} {shape}", got)
    return body[begin:end].view(dtype).reshape(shape)


def _read_npz(path: Path) -> tuple[dict[str, NDArray[Any]], list[str]]:
    """The arrays that a capture has, and the names of the others, which are not loaded."""
    _check_is_zip(path)
    with _refusing_damage(str(path), "a .npz archive", "a damaged zip archive"):
        archive = np.load(path, allow_pickle=False)
    with archive:
        names = [name for name in archive.files if name.rpartition(".")[2] in FIELDS]
        arrays = {name: _npz_array(f"{path}: {name}", archive, name) for name in names}
        return arrays, [name for name in archive.files if name not in arrays]


def _check_is_zip(path: Path) -> None:
    """Asked before NumPy is: it takes all that is neither zip nor .npy for a pickle."""
    with open(path, "rb") as file:
        start = file.read(len(_NPY_START))
    if start.startswith(_ZIP_STARTS):
        return
    got = f"another kind of file, which begins with {start!r}" if start else "an empty file"
    if start == _NPY_START:
        got = "a single .npy array"
    raise ArgumentError(str(path), "a .npz archive", got)


@contextlib.contextmanager
def _refusing_damage(where: str, expected: str, got: str) -> Iterator[None]:
    """Turn what the block raises into ArgumentError. zipfile, zlib and NumPy have an error each
    for a damaged file, and words that are about pickles or about the inside of the file."""
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        raise ArgumentError(where, expected, f"{got} ({type(error).__name__})") from error


def _npz_array(where: str, archive: Any, name: str) -> NDArray[Any]:
    with _refusing_damage(where, "one of plain arrays", "damaged data or Python objects"):
        array = archive[name]
    if not isinstance(array, np.ndarray):  # NumPy gives a member that is no .npy as its bytes
        raise ArgumentError(where, "a .npy array", "a member of another kind")
    if array.dtype == np.uint16 or array.dtype == np.dtype("V2"):
        return array.view(BFLOAT16)
    return array


# --- checking -------------------------------------------------------------------------------------


def layers_of(
    arrays: Mapping[str, NDArray[Any]], source: str = "", others: Iterable[str] = ()
) -> list[LayerCapture]:
    """The checked layers among named arrays; see the module for names, shapes and dtypes.

    source: the file that errors name; others: arrays of it that are not among `arrays`, listed
    where a name is missing.
    """
    everything = [*arrays, *others]
    if not any(name.rpartition(".")[2] == "q" for name in everything):
        expected = "arrays q, kv_c, k_pe and softmax_scale"
        raise ArgumentError(source or "capture", expected, _listed(everything))
    # Any of a layer's arrays makes it one: that its q is missing must not drop it without a word.
    parts = [name.rpartition(".") for name in arrays]
    names = {layer for layer, _, field in parts if field in ("q", "kv_c", "k_pe")}
    ordered = sorted(names, key=_natural_order)
    return [_layer(name, arrays, source, everything) for name in ordered]


def _listed(names: Iterable[str]) -> str:
    ordered = sorted(names)
    more = len(ordered) - _SHOWN_NAMES
    shown = ", ".join(ordered[:_SHOWN_NAMES]) or "no arrays"
    return f"{shown} and {more} more" if more > 0 else shown


def _where(source: str, name: str) -> str:
    return f"{source}: {name}" if source else name


def _natural_order(name: str) -> list[tuple[int, int, str]]:
    """layers.2 before layers.10."""
    parts = re.split(r"(\d+)", name)
    return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in parts]


def _layer(
    name: str, arrays: Mapping[str, NDArray[Any]], source: str, everything: list[str]
) -> LayerCapture:
    prefix = f"{name}." if name else ""
    found: dict[str, NDArray[Any]] = {}
    for field in FIELDS:
        key = prefix + field
        if key not in arrays and field == "softmax_scale":
            key = field
        if key not in arrays:
            near = _listed(n for n in everything if n.startswith(prefix))
            raise ArgumentError(_where(source, prefix + field), "an array of this name", near)
        found[field] = arrays[key]
    layer = LayerCapture(
        name,
        found["q"],
        found["kv_c"],
        found["k_pe"],
        _softmax_scale(_where(source, prefix + "softmax_scale"), found["softmax_scale"]),
    )
    check_layer(layer, source)
    return layer


def _softmax_scale(name: str, array: NDArray[Any]) -> float:
    number = array.dtype.kind in "fiu" or array.dtype == BFLOAT16  # whose kind is that of void
    if array.size != 1 or not number:
        raise ArgumentError(name, "one positive number", f"{array.dtype} {list(array.shape)}")
    value = float(array.reshape(-1)[0])
    if not 0.0 < value < math.inf:
        raise ArgumentError(name, "a positive finite number", value)
    return value


def check_layer(layer: LayerCapture, source: str = "") -> None:
    """Raise ArgumentError unless shapes, dtypes and values are what a capture holds.

    source: the file that errors name before the array.
    """
    prefix = _where(source, f"{layer.name}." if layer.name else "")
    arrays = {"q": layer.q, "kv_c": layer.kv_c, "k_pe": layer.k_pe}
    for field, array in arrays.items():
        if array.dtype not in _INPUT_DTYPES:
            raise ArgumentError(prefix + field, "bfloat16, float16 or float32", array.dtype)
    _check_shape(prefix + "q", layer.q, ("steps", "s_q", "h", HEAD_DIM_QK))
    _check_shape(prefix + "kv_c", layer.kv_c, ("tokens", KV_LORA_RANK))
    _check_shape(prefix + "k_pe", layer.k_pe, ("tokens", QK_ROPE_HEAD_DIM))
    if layer.num_heads_q > MAX_NUM_HEADS_Q:
        got = list(layer.q.shape)
        raise ArgumentError(prefix + "q", f"[steps, s_q, h <= {MAX_NUM_HEADS_Q}, 576]", got)
    if len(layer.k_pe) != layer.num_tokens:
        expected = f"[{layer.num_tokens}, {QK_ROPE_HEAD_DIM}] as kv_c has {layer.num_tokens} tokens"
        raise ArgumentError(prefix + "k_pe", expected, list(layer.k_pe.shape))
    if layer.prefill_tokens < 0:
        raise ArgumentError(
            prefix + "q",
            f"steps * s_q of at most the {layer.num_tokens} tokens of kv_c",
            f"{layer.num_steps} * {layer.seq_len_q}",
        )
    if layer.num_tokens > MAX_CACHE_SEQLEN:
        raise ArgumentError(prefix + "kv_c", f"at most {MAX_CACHE_SEQLEN} tokens", layer.num_tokens)
    for field, array in arrays.items():
        _check_finite(prefix + field, array)


def _check_shape(name: str, array: NDArray[Any], shape: tuple[str | int, ...]) -> None:
    fits = array.ndim == len(shape) and all(
        size == want if isinstance(want, int) else size >= 1
        for size, want in zip(array.shape, shape, strict=True)
    )
    if not fits:
        expected = f"[{', '.join(map(str, shape))}]"
        raise ArgumentError(name, f"shape {expected}, every size at least 1", list(array.shape))


def _check_finite(name: str, array: NDArray[Any]) -> None:
    rows = array.reshape(-1, array.shape[-1])
    step = max(1, _CHECK_ELEMENTS // rows.shape[1])
    for start in range(0, len(rows), step):
        part = rows[start : start + step].astype(np.float32)
        bad = np.argwhere(~np.isfinite(part))
        if len(bad):
            row, column = bad[0]
            index = (*np.unravel_index(start + row, array.shape[:-1]), column)
            at = ", ".join(str(int(i)) for i in index)
            raise ArgumentError(name, "finite values", f"{part[row, column]} at [{at}]")


# --- making ---------------------------------------------------------------------------------------

LATENT_LIMIT = 10.0
ROPE_LIMIT = 1000.0
# DeepSeek-V3's: one over the root of its uncompressed head size, 128 + 64.
DEFAULT_SOFTMAX_SCALE = 192**-0.5
_LOGIT_STD = 0.5  # of each of the two terms of a logit, in nats
_LOUD_CHANNELS = 6  # RoPE channels that carry the outliers


def paper_distribution(
    num_tokens: int = 4096,
    num_heads_q: int = 64,
    num_steps: int = 4,
    seq_len_q: int = 1,
    seed: int = 0,
) -> LayerCapture:
    """A made-up layer, in bfloat16, with the distribution that the paper measured (section 3.1.1).

    Latents are concentrated around zero and held within +-10; each token has its own loudness, so
    the per-token scales differ. RoPE keys are heavy-tailed (Student t with 3 degrees of freedom)
    and held within +-1e3, their outliers in a few channels that are loud for every token. Queries
    are the smaller in a channel the louder its keys are, as a trained model has it: each of the two
    terms of a logit then has a standard deviation of about half a nat, and attention is neither
    flat nor decided by one token in all but a few heads.
    """
    rng = np.random.default_rng(seed)
    loudness = np.exp(0.3 * rng.standard_normal((num_tokens, 1), np.float32))
    channel = np.exp(0.5 * rng.standard_normal(KV_LORA_RANK, np.float32))
    kv_c = rng.standard_normal((num_tokens, KV_LORA_RANK), np.float32) * loudness * channel
    kv_c = np.clip(kv_c, -LATENT_LIMIT, LATENT_LIMIT)

    rope_channel = np.exp(0.5 * rng.standard_normal(QK_ROPE_HEAD_DIM, np.float32))
    rope_channel[rng.permutation(QK_ROPE_HEAD_DIM)[:_LOUD_CHANNELS]] *= 60.0
    k_pe = rng.standard_t(3, (num_tokens, QK_ROPE_HEAD_DIM)).astype(np.float32) * rope_channel
    k_pe = np.clip(k_pe, -ROPE_LIMIT, ROPE_LIMIT)

    q = rng.standard_normal((num_steps, seq_len_q, num_heads_q, HEAD_DIM_QK), np.float32)
    q[..., :KV_LORA_RANK] *= _query_size(kv_c)
    q[..., KV_LORA_RANK:] *= _query_size(k_pe)
    q, kv_c, k_pe = (x.astype(BFLOAT16) for x in (q, kv_c, k_pe))
    layer = LayerCapture("", q, kv_c, k_pe, DEFAULT_SOFTMAX_SCALE)
    check_layer(layer)
    return layer


def _query_size(keys: NDArray[np.float32]) -> NDArray[np.float32]:
    """Per-channel size of queries that gives logits of `keys` a deviation of _LOGIT_STD nats."""
    rms = np.sqrt(np.mean(np.square(keys), axis=0, dtype=np.float64))
    size = _LOGIT_STD / (DEFAULT_SOFTMAX_SCALE * math.sqrt(keys.shape[1]) * np.maximum(rms, 1e-6))
    return size.astype(np.float32)


# --- writing --------------------------------------------------------------------------------------


def encode_safetensors(arrays: Mapping[str, NDArray[Any]]) -> bytes:
    """Named arrays (bfloat16, float16, float32 or float64) as the bytes of a safetensors file."""
    kinds = {dtype: kind for kind, dtype in _SAFETENSORS_DTYPES.items()}
    header: dict[str, Any] = {}
    offset = 0
    for name, array in arrays.items():
        end = offset + array.nbytes
        header[name] = {
            "dtype": kinds[array.dtype],
            "shape": list(array.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the format aligns the data to 8 bytes
    parts = [np.ascontiguousarray(array).tobytes() for array in arrays.values()]
    return b"".join([struct.pack("<Q", len(text)), text, *parts])
