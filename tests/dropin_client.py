"""A serving engine in miniature that knows the drop-in faces by their conventions alone.

`Engine` keeps what an engine keeps: pages of 64 slots handed out in any order, page 0 for dummy
writes, tables that are zero where nothing is, lengths that include the new tokens. It speaks to a
face through append, decode and fetch; the faces here are FluentLLM's, FlashMLA's in its forms, and
this package's own API as the twin whose bytes they must give.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from snapmla_rt import api
from snapmla_rt.compat import flash_mla, flash_mla_fp8

PAGE = 64
SCALE = 0.1352337788608801  # DeepSeek's with YaRN
BF16 = np.dtype(ml_dtypes.bfloat16)
api_decode: Any = api.mla_decode
api_append: Any = api.append_kv


class Numpy:
    """Arrays in main memory: the faces run the reference."""

    def put(self, array: NDArray[Any]) -> Any:
        return np.array(array)

    def host(self, array: Any) -> NDArray[Any]:
        return np.ascontiguousarray(array)

    def view(self, array: Any, shape: tuple[int, ...], dtype: str = "") -> Any:
        kind = {"float8_e4m3fn": ml_dtypes.float8_e4m3fn}.get(dtype)
        return (array if kind is None else array.view(kind)).reshape(shape)


class Torch:
    """torch tensors on a device."""

    def __init__(self, device: str) -> None:
        import torch

        self.torch: Any = torch
        self.device = device
        self._kinds = {"bfloat16": torch.bfloat16, "float8_e4m3fn": torch.float8_e4m3fn}

    def put(self, array: NDArray[Any]) -> Any:
        kind = self._kinds.get(array.dtype.name)
        bits = np.ascontiguousarray(array)
        if kind is not None:
            bits = bits.view(np.uint8 if array.itemsize == 1 else np.int16)
        tensor = self.torch.from_numpy(bits.copy()).to(self.device)
        return tensor if kind is None else tensor.view(kind)

    def host(self, tensor: Any) -> NDArray[Any]:
        names = {kind: name for name, kind in self._kinds.items()}
        name = names.get(tensor.dtype)
        tensor = tensor.detach().contiguous()
        if name is not None:
            tensor = tensor.view(self.torch.uint8 if name[0] == "f" else self.torch.int16)
        array = tensor.cpu().numpy()
        return array if name is None else array.view(getattr(ml_dtypes, name))

    def same(self, a: Any, b: Any) -> bool:
        """Compared where the tensors are."""
        kind = self.torch.uint8
        same_kind = a.shape == b.shape and a.dtype == b.dtype
        return same_kind and self.torch.equal(a.contiguous().view(kind), b.contiguous().view(kind))

    def view(self, tensor: Any, shape: tuple[int, ...], dtype: str = "") -> Any:
        return (tensor if not dtype else tensor.view(self._kinds[dtype])).view(shape)


def host_pool(num_pages: int) -> tuple[NDArray[Any], ...]:
    """The arrays of a layer as an allocator leaves them: never zeroed, here NaN everywhere."""
    slots = num_pages * PAGE
    return (
        np.full((slots, 1, 512), 0xFF, np.uint8),
        np.full((slots, 1, 1), np.nan, np.float32),
        np.full((slots, 1, 64), 0xFFFF, np.uint16).view(BF16),
    )


# --- Faces ---------------------------------------------------------------------------------------


class FluentLLM:
    """flash_mla_fp8 as FluentLLM's backend and memory pool call it."""

    def __init__(self, library: Any, num_pages: int) -> None:
        self.library = library
        self.lora, self.scale, self.rope = (library.put(a) for a in host_pool(num_pages))

    def append(self, key: Any, indices: Any) -> None:
        flash_mla_fp8.quantize_and_cache_k(
            key=key,
            k_lora_cache=self.lora,
            k_lora_scale_cache=self.scale,
            k_rope_cache=self.rope,
            indices=indices,
            head_dim_v=512,
        )

    def metadata(self, lengths: Any, seq_len_q: int, heads: int) -> tuple[Any, Any]:
        return flash_mla_fp8.get_mla_metadata(lengths, seq_len_q * heads, 1)

    def decode(self, q: Any, table: Any, lengths: Any, metadata: Any = None) -> tuple[Any, Any]:
        _, seq_len_q, heads, _ = q.shape
        parts, num_splits = metadata or self.metadata(lengths, seq_len_q, heads)
        q_nope, q_scale, q_rope = flash_mla_fp8.quantize_ckv_per_token_head(q, kv_lora_rank=512)
        view = self.library.view
        return flash_mla_fp8.flash_mla_ckv_fp8_per_token(
            q_nope=q_nope,
            q_rope=q_rope,
            k_cache_lora=view(self.lora, (-1, PAGE, 1, 512)),
            k_cache_rope=view(self.rope, (-1, PAGE, 1, 64)),
            q_scale=q_scale,
            k_scale=view(self.scale, (-1, PAGE, 1, 1)),
            block_table=table,
            cache_seqlens=lengths,
            head_dim_v=512,
            tile_scheduler_metadata=parts,
            num_splits=num_splits,
            softmax_scale=SCALE,
            causal=True,
        )

    def fetch(self, indices: Any) -> tuple[Any, Any]:
        latent = self.library.view(self.lora, tuple(self.lora.shape), "float8_e4m3fn")
        found = flash_mla_fp8.dequantize_ckv_fused_indexed(latent, self.rope, self.scale, indices)
        return found[0].squeeze(1), found[1].squeeze(1)

    def pool(self) -> tuple[Any, Any, Any]:
        return self.lora, self.scale, self.rope


class FlashMLA(FluentLLM):
    """flash_mla as vLLM and others call it, over this package's cache. form: "object" or
    "tensors", how the metadata travels."""

    def __init__(self, library: Any, num_pages: int, form: str) -> None:
        super().__init__(library, num_pages)
        self.form = form

    def metadata(self, lengths: Any, seq_len_q: int, heads: int) -> tuple[Any, Any]:
        if self.form == "object":
            return flash_mla.get_mla_metadata()
        return flash_mla.get_mla_metadata(lengths, seq_len_q * heads // 1, 1)

    def cache(self) -> Any:
        view = self.library.view
        widths = (512, 1, 64)
        return tuple(view(a, (-1, PAGE, 1, w)) for a, w in zip(self.pool(), widths, strict=True))

    def decode(self, q: Any, table: Any, lengths: Any, metadata: Any = None) -> tuple[Any, Any]:
        _, seq_len_q, heads, _ = q.shape
        parts, num_splits = metadata or self.metadata(lengths, seq_len_q, heads)
        return flash_mla.flash_mla_with_kvcache(
            q,
            self.cache(),
            table,
            lengths,
            512,
            parts,
            num_splits,
            softmax_scale=SCALE,
            causal=True,
        )


class Native(FluentLLM):
    """This package's own API on the same arrays, seen as blocks."""

    def planes(self) -> tuple[Any, Any, Any]:
        view = self.library.view
        return (
            view(self.lora, (-1, PAGE, 512)),
            view(self.scale, (-1, PAGE)),
            view(self.rope, (-1, PAGE, 64)),
        )

    def append(self, key: Any, indices: Any) -> None:
        api_append(key[:, 0, :512], key[:, 0, 512:], *self.planes(), indices)

    def decode(self, q: Any, table: Any, lengths: Any, metadata: Any = None) -> tuple[Any, Any]:
        _, seq_len_q, heads, _ = q.shape
        plan = api.plan_decode(lengths, heads, seq_len_q)
        query = api.quantize_q(q)
        return api_decode(*query, *self.planes(), table, lengths, plan, SCALE)

    def fetch(self, indices: Any) -> tuple[Any, Any]:
        return api.fetch_dequant(*self.planes(), indices)


# --- Engine --------------------------------------------------------------------------------------


@dataclass
class Request:
    pages: list[int] = field(default_factory=list)
    length: int = 0


@dataclass
class Step:
    """What one forward pass gives to a layer: rows beyond the requests are padding."""

    key: NDArray[Any]  # bf16 [batch * s_q, 1, 576]
    indices: NDArray[np.int32]
    q: NDArray[Any]  # bf16 [batch, s_q, heads, 576]
    table: NDArray[np.int32]
    lengths: NDArray[np.int32]


class Engine:
    """Requests, pages and tokens; says what every call gets."""

    def __init__(self, heads: int, num_pages: int, max_pages: int, seed: int = 0) -> None:
        self.rng = np.random.default_rng(seed)
        self.heads, self.max_pages = heads, max_pages
        self.free = [int(p) for p in self.rng.permutation(np.arange(1, num_pages))]  # never page 0
        self.requests: list[Request] = []

    def tokens(self, *shape: int) -> NDArray[Any]:
        loud = np.exp2(self.rng.integers(-3, 4, (*shape[:-1], 1)))
        return (loud * self.rng.standard_normal(shape, np.float32)).astype(BF16)

    def slots(self, request: Request, begin: int, end: int) -> NDArray[np.int32]:
        at = np.arange(begin, end)
        pages = np.array(request.pages, np.int32)
        return (pages[at // PAGE] * PAGE + at % PAGE).astype(np.int32)

    def grow(self, request: Request, count: int) -> NDArray[np.int32]:
        """Slots of `count` new tokens."""
        begin, request.length = request.length, request.length + count
        while len(request.pages) * PAGE < request.length:
            request.pages.append(self.free.pop())
        return self.slots(request, begin, request.length)

    def prefill(self, count: int) -> tuple[NDArray[Any], NDArray[np.int32]]:
        """A new request of `count` tokens: (key, indices)."""
        self.requests.append(Request())
        return self.tokens(count, 1, 576), self.grow(self.requests[-1], count)

    def rollback(self, request: Request, count: int) -> None:
        """Rejected draft tokens: the length goes back, pages that are empty then are free again."""
        request.length -= count
        while (len(request.pages) - 1) * PAGE >= max(request.length, 1):
            self.free.append(request.pages.pop())

    def step(self, seq_len_q: int, batch: int, pad_page: int = 0) -> Step:
        """Decode (1), verify (s_q) or draft-extend: every request gets s_q new tokens. Padded rows:
        length 1, table entry pad_page, tokens to the dummy page, as FluentLLM pads."""
        count = len(self.requests)
        assert count <= batch
        indices = np.zeros((batch, seq_len_q), np.int32)
        table = np.zeros((batch, self.max_pages), np.int32)
        lengths = np.ones(batch, np.int32)
        table[count:] = pad_page
        for row, request in enumerate(self.requests):
            indices[row] = self.grow(request, seq_len_q)
            table[row, : len(request.pages)] = request.pages
            lengths[row] = request.length
        key = self.tokens(batch * seq_len_q, 1, 576)
        q = self.rng.standard_normal((batch, seq_len_q, self.heads, 576), np.float32).astype(BF16)
        return Step(key, indices.reshape(-1), q, table, lengths)

    def chunk(self, request: Request, begin: int, end: int) -> NDArray[np.int32]:
        """Slots that a chunked prefill fetches."""
        return self.slots(request, begin, end)


def same_bytes(library: Any, got: Any, want: Any) -> bool:
    """Whether arrays have the same bytes, one by one."""
    for g, w in zip(got, want, strict=True):
        if hasattr(library, "same"):
            if not library.same(g, w):
                return False
            continue
        first, second = library.host(g), library.host(w)
        if first.shape != second.shape or first.tobytes() != second.tobytes():
            return False
    return True


def run_step(face: Any, step: Step) -> tuple[Any, Any]:
    """Append and decode one step through a face."""
    put = face.library.put
    face.append(put(step.key), put(step.indices))
    return face.decode(put(step.q), put(step.table), put(step.lengths))


def drive(face: Any, twin: Any, engine: Engine, batch: int, num_requests: int) -> None:
    """Prefill, decode, verify with 4 draft tokens, rollback, decode again, chunked fetch: after
    every call the face has the twin's bytes, in its results and in the whole pool."""
    library = face.library
    for _ in range(num_requests):
        key, indices = engine.prefill(int(engine.rng.integers(1, 3 * PAGE)))
        for one in (face, twin):
            one.append(library.put(key), library.put(indices))
    assert same_bytes(library, face.pool(), twin.pool()), "prefill"
    for seq_len_q, pad_page in ((1, 0), (4, 0), (1, 1)):
        step = engine.step(seq_len_q, batch, pad_page)
        got, want = run_step(face, step), run_step(twin, step)
        assert same_bytes(library, got, want), f"s_q {seq_len_q}"
        assert same_bytes(library, face.pool(), twin.pool()), f"pool after s_q {seq_len_q}"
        lse = library.host(got[1])[:num_requests]
        assert np.isfinite(lse).all(), (
            "requests see their tokens only, whatever else the pool holds"
        )
        if seq_len_q == 4:
            for request in engine.requests:  # 0 to 3 of the drafts are rejected
                engine.rollback(request, int(engine.rng.integers(0, 4)))
    request = engine.requests[0]
    wanted = library.put(engine.chunk(request, request.length // 3, request.length))
    assert same_bytes(library, face.fetch(wanted), twin.fetch(wanted)), "fetch"


def loaded(name: str) -> bool:
    """Whether a library can be imported here."""
    import importlib.util

    return name in sys.modules or importlib.util.find_spec(name) is not None
