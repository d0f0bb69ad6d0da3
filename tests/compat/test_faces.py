"""The drop-in faces without a GPU: a client written from the conventions, and every argument.

NumPy arrays always, torch tensors where torch is; both run the reference. GPU: tests/gpu.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from dropin_client import (
    BF16,
    PAGE,
    SCALE,
    Engine,
    FlashMLA,
    FluentLLM,
    Native,
    Numpy,
    Torch,
    drive,
    host_pool,
    loaded,
    run_step,
    same_bytes,
)

from snapmla_rt import api
from snapmla_rt.compat import flash_mla, flash_mla_fp8
from snapmla_rt.config import RECORD_BYTES, RECORD_ROPE_OFFSET, RECORD_SCALE_OFFSET
from snapmla_rt.errors import ArgumentError
from snapmla_rt.kv_cache.storage import HostKVCacheStorage
from snapmla_rt.reference.attention_fp64 import (
    attention_fp64,
    attention_fp64_p_rounded,
    dequantise,
    dequantise_cache,
    e4m3_table,
)

E4M3 = ml_dtypes.float8_e4m3fn
LIBRARIES: list[Any] = [
    Numpy(),
    pytest.param("torch", marks=pytest.mark.skipif(not loaded("torch"), reason="no torch")),
]


def library_of(name: Any) -> Any:
    return Torch("cpu") if name == "torch" else name


def faces(library: Any, num_pages: int) -> dict[str, Any]:
    return {
        "FluentLLM": FluentLLM(library, num_pages),
        "FlashMLA tensors": FlashMLA(library, num_pages, "tensors"),
        "FlashMLA object": FlashMLA(library, num_pages, "object"),
    }


# --- The client ----------------------------------------------------------------------------------


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("face", ["FluentLLM", "FlashMLA tensors", "FlashMLA object"])
def test_a_client_gets_the_bytes_of_the_api(library: Any, face: str) -> None:
    library = library_of(library)
    num_pages = 24
    engine = Engine(heads=3, num_pages=num_pages, max_pages=5)
    drive(faces(library, num_pages)[face], Native(library, num_pages), engine, 4, 3)


def test_results_are_attention() -> None:
    """Beside float64 attention on what the codes stand for, the face loses what rounding P to e4m3
    must lose (float64 attention with only P rounded) and the rounding of its output, no more."""
    face, step, (out, lse) = small_step(heads=4)
    lora, scale, rope = face.pool()
    blocks = (lora.reshape(-1, PAGE, 512), scale.reshape(-1, PAGE), rope.reshape(-1, PAGE, 64))
    slots = [
        row[np.arange(n) // PAGE] * PAGE + np.arange(n) % PAGE
        for row, n in zip(step.table, step.lengths, strict=True)
    ]
    tokens = [dequantise_cache(*blocks, at) for at in slots[:2]]  # the third row is padding
    scales = [scale.reshape(-1)[at] for at in slots[:2]]
    q = dequantise(*flash_mla_fp8.quantize_ckv_per_token_head(step.q[:2]))
    want, want_lse = attention_fp64(q, tokens, SCALE)
    floor, _ = attention_fp64_p_rounded(q, tokens, scales, SCALE)
    size = np.linalg.norm(want)
    error = np.linalg.norm(out[:2].astype(np.float64) - want) / size
    assert error < 1.2 * np.linalg.norm(floor - want) / size + 2.0**-8
    # lse moves no more than the scores do: 16 steps of 33 addends, each cut to 2^-13 of the largest
    # magnitude in the step, which is at most the sum of all
    for row, keys in enumerate(tokens):
        reach = SCALE * (np.abs(q[row]) @ np.abs(keys).T).max(axis=-1).T
        assert (np.abs(lse[row] - want_lse[row]) <= 16 * 34 * 2.0**-13 * reach).all()


def test_metadata_in_larger_buffers() -> None:
    """Made once for the largest batch, filled by copies for each: the same bytes."""
    library = Numpy()
    face, twin = FluentLLM(library, 40), Native(library, 40)
    engine = Engine(heads=3, num_pages=40, max_pages=4)
    parts, num_splits = face.metadata(np.ones(16, np.int32), 2, 3)
    assert parts.shape == (132, 8) and num_splits.shape == (17,)
    for count in (1, 5, 9):
        while len(engine.requests) < count:
            key, indices = engine.prefill(70 + 5 * len(engine.requests))
            for one in (face, twin):
                one.append(key, indices)
        step = engine.step(2, count)
        fresh = face.metadata(step.lengths, 2, 3)
        assert fresh[0].shape == parts.shape and fresh[1].shape == (count + 1,)
        np.copyto(parts, fresh[0])
        np.copyto(num_splits[: count + 1], fresh[1])
        face.append(step.key, step.indices)
        twin.append(step.key, step.indices)
        want = twin.decode(step.q, step.table, step.lengths)
        for ends in (num_splits, num_splits[: count + 1]):
            got = face.decode(step.q, step.table, step.lengths, (parts, ends))
            assert same_bytes(library, got, want), count


def test_cumulative_num_splits() -> None:
    lengths = np.array([0, 1, 64, 5000, 70000], np.int32)
    for face in (flash_mla, flash_mla_fp8):
        parts, ends = face.get_mla_metadata(lengths, 128, 1)
        assert parts.dtype == ends.dtype == np.int32 and parts.shape[1] == 8
        assert ends[0] == 0 and (np.diff(ends) >= 1).all() and ends.shape == (6,)
    for rows in (16 * 1024, 200 * 128):  # more row tiles than SMs
        parts, _ = flash_mla.get_mla_metadata(lengths, rows, 1, 128, True)
        assert parts.shape == (1, 8)


@pytest.mark.parametrize("batch", [1, 7, 132, 133, 1000, 4095, 4096, 4097, 12000])
def test_metadata_of_any_batch(batch: int) -> None:
    parts, ends = flash_mla.get_mla_metadata(np.zeros(batch, np.int32), 16, 1)
    assert parts.shape == (132, 8) and ends.shape == (batch + 1,)
    assert (ends == np.arange(batch + 1)).all()


# --- Forms of the cache --------------------------------------------------------------------------


def small_step(heads: int = 3, seq_len_q: int = 2) -> tuple[FluentLLM, Any, Any]:
    """(a filled FluentLLM pool, its step, the results)."""
    library = Numpy()
    engine = Engine(heads=heads, num_pages=9, max_pages=4)
    face = FluentLLM(library, 9)
    for count in (100, 3):
        face.append(*engine.prefill(count))
    step = engine.step(seq_len_q, 3)
    return face, step, run_step(face, step)


def flash(step: Any, cache: Any, **changes: Any) -> tuple[Any, Any]:
    """flash_mla_with_kvcache on a step."""
    options: dict[str, Any] = {"softmax_scale": SCALE, "causal": True}
    names = ("q", "k_cache", "block_table", "cache_seqlens", "head_dim_v")
    arguments = dict(zip(names, (step.q, cache, step.table, step.lengths, 512), strict=True))
    rows = step.q.shape[1] * step.q.shape[2]
    parts, ends = flash_mla.get_mla_metadata(step.lengths, rows, 1)
    arguments |= {"tile_scheduler_metadata": parts, "num_splits": ends} | options | changes
    return flash_mla.flash_mla_with_kvcache(**arguments)


def test_records_and_storages_are_the_same_cache() -> None:
    face, step, want = small_step()
    lora, scale, rope = face.pool()
    records = np.zeros((9, RECORD_BYTES), np.uint8)
    records[:, :RECORD_ROPE_OFFSET] = lora.reshape(9, -1)
    records[:, RECORD_ROPE_OFFSET:RECORD_SCALE_OFFSET] = rope.view(np.uint8).reshape(9, -1)
    records[:, RECORD_SCALE_OFFSET:] = scale.view(np.uint8).reshape(9, -1)
    pages = records.reshape(9, PAGE, 1, 644)
    apart = np.zeros((9, 2 * PAGE, 1, 644), np.uint8)  # pages of several layers side by side
    apart[:, :PAGE] = pages
    storage = HostKVCacheStorage(9)
    storage.ckv_cache.view(np.uint8)[...] = lora.reshape(9, PAGE, 512)
    storage.k_scale_cache[...] = scale.reshape(9, PAGE)
    storage.k_rope_cache.view(np.uint16)[...] = rope.view(np.uint16).reshape(9, PAGE, 64)
    three = [a.reshape(9, PAGE, 1, -1) for a in face.pool()]
    flat = [three[0][:, :, 0], three[1][:, :, 0, 0], three[2][:, :, 0]]
    forms = {
        "record": pages,
        "record e4m3": pages.view(E4M3),
        "record int8": pages.view(np.int8),
        "strided records": apart[:, :PAGE],
        "three arrays": three,
        "without the head": flat,
        "storage": storage,
    }
    for name, cache in forms.items():
        assert same_bytes(face.library, flash(step, cache), want), name


def per_tensor(seed: int = 0, batch: int = 2, heads: int = 3, seq_len_q: int = 2) -> Any:
    """(q e4m3, codes e4m3 with NaN where nothing may be read, table, lengths, scales, floats of q
    and of each request's tokens)."""
    rng = np.random.default_rng(seed)
    lengths = np.array([100, 70][:batch], np.int32)
    table = np.array([[5, 2, 2147480000], [1, 3, -1]], np.int32)[:batch]
    codes = np.full((7, PAGE, 1, 576), 0x7F, np.uint8)
    scales = np.array([0.03], np.float32), np.array([0.017], np.float32)
    tokens = []
    for row, length in zip(table, lengths, strict=True):
        values = (40 * rng.standard_normal((length, 576))).astype(E4M3)
        at = np.arange(length)
        codes[row[at // PAGE], at % PAGE, 0] = values.view(np.uint8)
        tokens.append(e4m3_table()[values.view(np.uint8)] * float(scales[1][0]))
    q = (40 * rng.standard_normal((batch, seq_len_q, heads, 576))).astype(E4M3)
    q_values = e4m3_table()[q.view(np.uint8)] * float(scales[0][0])
    return q, codes.view(E4M3), table, lengths, scales, q_values, tokens


def test_a_per_tensor_cache() -> None:
    """vLLM's: 576 codes a token. Near float64 on what the codes stand for (both RoPE parts are
    exact), and the bytes of this package's decode on the same codes."""
    q, codes, table, lengths, (descale_q, descale_k), q_values, tokens = per_tensor()
    parts, ends = flash_mla.get_mla_metadata(lengths, 6, 1)
    call = (codes, table, lengths, 512, parts, ends)
    options: dict[str, Any] = {"softmax_scale": SCALE, "causal": True, "descale_k": descale_k}
    out, lse = flash_mla.flash_mla_with_kvcache(q, *call, descale_q=descale_q, **options)
    want, want_lse = attention_fp64(q_values, tokens, SCALE)
    assert out.dtype == BF16
    error = np.linalg.norm(out.astype(np.float64) - want) / np.linalg.norm(want)
    assert error < 0.03 and np.abs(lse - want_lse).max() < 2e-3
    other = flash_mla.flash_mla_with_kvcache_fp8(
        q, *call, SCALE, True, descale_q=descale_q, descale_k=descale_k
    )
    assert same_bytes(Numpy(), other, (out, lse))
    # a bf16 query is quantised inside, with a scale a token and head: at least as near
    bf16 = flash_mla.flash_mla_with_kvcache(q_values.astype(BF16), *call, **options)
    error = np.linalg.norm(bf16[0].astype(np.float64) - want) / np.linalg.norm(want)
    assert error < 0.08 and np.abs(bf16[1] - want_lse).max() < 0.1
    plan = api.plan_decode(lengths, 3, 2)
    rope = codes[:, :, 0, 512:].astype(np.float32).astype(BF16)
    decode: Any = api.mla_decode
    native = decode(
        *(q[..., :512], q[..., 512:].astype(np.float32).astype(BF16)),
        np.full((2, 2, 3), descale_q[0], np.float32),
        *(np.ascontiguousarray(codes[:, :, 0, :512]), np.full((7, PAGE), descale_k[0]), rope),
        *(table, lengths, plan, SCALE),
    )
    assert same_bytes(Numpy(), native, (out, lse))


def test_workspaces_hold_everything() -> None:
    """A workspace of the size asked for is enough and gives the same bytes; one byte less is named.
    What was in it does not matter."""
    face, step, want = small_step()
    cache = tuple(a.reshape(9, PAGE, 1, -1) for a in face.pool())
    q, codes, table, lengths, (descale_q, descale_k), _, _ = per_tensor()
    parts, ends = flash_mla.get_mla_metadata(lengths, 6, 1)
    per_tensor_call = (codes, table, lengths, 512, parts, ends)
    scales = {"descale_q": descale_q, "descale_k": descale_k}
    want8 = flash_mla.flash_mla_with_kvcache(q, *per_tensor_call, SCALE, True, **scales)
    size = flash_mla.get_workspace_size(step.q, cache, parts)
    size8 = flash_mla.get_workspace_size(q, codes, flash_mla.FlashMLASchedMeta())

    def own(room: Any) -> Any:
        return flash(step, cache, workspace=room)

    def other(room: Any) -> Any:
        call: Any = flash_mla.flash_mla_with_kvcache
        return call(q, *per_tensor_call, SCALE, True, workspace=room, **scales)

    for nbytes, call, expected in ((size, own, want), (size8, other, want8)):
        room = np.full(nbytes, 0xFF, np.uint8)
        assert same_bytes(Numpy(), call(room), expected)
        with pytest.raises(ArgumentError, match="workspace"):
            call(room[:100])
        with pytest.raises(ArgumentError, match="workspace"):
            call(room.view(np.int32))
    assert flash_mla_fp8.get_workspace_size(step.q[..., :512], parts) > 132 * 6 * 512 * 4


def test_float16_queries() -> None:
    """Quantised as they are; the result is the bf16 one in float16, or `out` as it is."""
    face, step, _ = small_step()
    cache = tuple(a.reshape(9, PAGE, 1, -1) for a in face.pool())
    step.q = step.q.astype(np.float16)
    place = np.empty((*step.q.shape[:3], 512), BF16)
    out, lse = flash(step, cache, out=place)
    narrow, _ = flash(step, cache)
    assert out is place and narrow.dtype == np.float16 and lse.dtype == np.float32
    assert (narrow == place.astype(np.float16)).all()


def test_values_are_the_latent_of_the_keys() -> None:
    """One visible token: its value is the first 512 of its key."""
    face = FluentLLM(Numpy(), 2)
    engine = Engine(heads=2, num_pages=2, max_pages=1)
    step = engine.step(1, 1)
    step.indices[:] = 64
    step.table[:] = 1
    out, _ = run_step(face, step)
    latent, _ = face.fetch(np.array([64], np.int32))
    assert (out.astype(np.float32) == latent.astype(np.float32)).all()


# --- The object ----------------------------------------------------------------------------------


def test_the_object_notices_other_shapes_and_lengths() -> None:
    face, step, want = small_step()
    cache = tuple(a.reshape(9, PAGE, 1, -1) for a in face.pool())
    meta, nothing = flash_mla.get_mla_metadata()
    assert nothing is None and isinstance(meta, flash_mla.FlashMLASchedMeta)
    both = {"tile_scheduler_metadata": meta, "num_splits": None}
    for _ in range(2):
        assert same_bytes(face.library, flash(step, cache, **both), want)
    with pytest.raises(ArgumentError, match="causal"):
        flash(step, cache, **both, causal=False)
    with pytest.raises(ArgumentError, match="num_splits"):
        flash(step, cache, tile_scheduler_metadata=meta, num_splits=np.zeros(4, np.int32))
    step.lengths[0] -= 64  # the same array with other values
    got = flash(step, cache, **both)
    assert same_bytes(face.library, got, flash(step, cache))
    step.q = step.q[:, :1]
    with pytest.raises(ArgumentError, match="s_q"):
        flash(step, cache, **both)


@pytest.mark.skipif(not loaded("torch"), reason="no torch")
def test_torch_metadata_of_another_batch_is_refused() -> None:
    """As get_mla_metadata returned it; a buffer that was filled since is the caller's word."""
    library = Torch("cpu")
    face: Any = FluentLLM(library, 9)
    engine = Engine(heads=3, num_pages=9, max_pages=4)
    for count in (100, 3):
        face.append(*(library.put(a) for a in engine.prefill(count)))
    step = engine.step(1, 2)
    large: Any = face.metadata(library.torch.ones(6, dtype=library.torch.int32), 1, 3)
    arrays: Any = [library.put(a) for a in (step.q, step.table, step.lengths)]
    with pytest.raises(ArgumentError, match=r"get_mla_metadata for the 2 requests.*one for 6"):
        face.decode(*arrays, large)
    fresh = face.metadata(arrays[2], 1, 3)
    large[0].copy_(fresh[0])
    large[1][:3].copy_(fresh[1])
    assert same_bytes(library, face.decode(*arrays, large), face.decode(*arrays))
    one = library.put(np.ones(1, np.int32))
    with pytest.raises(ArgumentError, match=r"num_splits|tile_scheduler_metadata"):
        face.decode(*arrays, face.metadata(one, 1, 3))
    grad = arrays[0].clone().requires_grad_()
    with pytest.raises(ArgumentError, match="inference only"):
        face.decode(grad, *arrays[1:])


# --- Arguments -----------------------------------------------------------------------------------

_face, _step, _ = small_step()
_three = tuple(a.reshape(9, PAGE, 1, -1) for a in _face.pool())
_sparse = np.zeros((3, 2, 64), np.int32)
_codes = np.zeros((9, PAGE, 1, 576), np.uint8)
_one = np.ones(1, np.float32)
FLASH_WRONG: dict[str, tuple[str, dict[str, Any]]] = {
    "bf16 cache": ("k_cache", {"k_cache": np.zeros((9, PAGE, 1, 576), BF16)}),
    "bf16 bits": ("k_cache", {"k_cache": np.zeros((9, PAGE, 1, 576), np.uint16)}),
    "sparse cache": ("k_cache", {"k_cache": np.zeros((9, PAGE, 1, 656), np.uint8)}),
    "small sparse cache": ("k_cache", {"k_cache": np.zeros((9, PAGE, 1, 584), np.uint8)}),
    "page of 16": ("k_cache", {"k_cache": np.zeros((36, 16, 1, 644), np.uint8)}),
    "page of 32": ("k_cache", {"k_cache": np.zeros((18, 32, 1, 576), np.uint8)}),
    "page of 128": ("k_cache[0]", {"k_cache": tuple(a[:8].reshape(4, 128, 1, -1) for a in _three)}),
    "two key heads": ("k_cache", {"k_cache": np.zeros((9, PAGE, 2, 644), np.uint8)}),
    "two arrays": ("k_cache", {"k_cache": _three[:2]}),
    "storage order": ("k_cache[1]", {"k_cache": (_three[0], _three[2], _three[1])}),
    "width": ("k_cache", {"k_cache": np.zeros((9, PAGE, 1, 512), np.uint8)}),
    "no array": ("k_cache", {"k_cache": 3}),
    "indices": ("indices", {"indices": _sparse}),
    "attn_sink": ("attn_sink", {"attn_sink": np.zeros(3, np.float32)}),
    "extra_k_cache": ("extra_k_cache", {"extra_k_cache": _codes}),
    "extra indices": ("extra_indices_in_kvcache", {"extra_indices_in_kvcache": _sparse}),
    "topk_length": ("topk_length", {"topk_length": _step.lengths}),
    "extra_topk_length": ("extra_topk_length", {"extra_topk_length": _step.lengths}),
    "head_dim_v": ("head_dim_v", {"head_dim_v": 128}),
    "q of 512": ("q", {"q": _step.q[..., :512]}),
    "q 3-D": ("q", {"q": _step.q[0]}),
    "q float64": ("q", {"q": _step.q.astype(np.float64)}),
    "q e4m3 on a scaled cache": ("q", {"q": _step.q.astype(E4M3)}),
    "too many heads": ("q", {"q": np.zeros((3, 1, 129, 576), BF16)}),
    "descale_q without e4m3": ("descale_q", {"descale_q": _one}),
    "descale_k without codes": ("descale_k", {"descale_k": _one}),
    "codes without descale_k": ("descale_k", {"k_cache": _codes}),
    "descale_k shape": ("descale_k", {"k_cache": _codes, "descale_k": np.ones(3, np.float32)}),
    "descale_k dtype": ("descale_k", {"k_cache": _codes, "descale_k": np.ones(1)}),
    "e4m3 without descale_q": (
        "descale_q",
        {"q": _step.q.astype(E4M3), "k_cache": _codes, "descale_k": _one},
    ),
    "metadata of fewer": ("num_splits", {"num_splits": np.zeros(3, np.int32)}),
    "metadata of more": (
        "tile_scheduler_metadata",
        {"tile_scheduler_metadata": flash_mla.get_mla_metadata(np.full(9, 70, np.int32), 6, 1)[0]},
    ),
    "metadata dtype": (
        "tile_scheduler_metadata",
        {"tile_scheduler_metadata": np.zeros((132, 8), np.int64)},
    ),
    "metadata width": (
        "tile_scheduler_metadata",
        {"tile_scheduler_metadata": np.zeros((132, 4), np.int32)},
    ),
    "num_splits not cumulative": ("num_splits", {"num_splits": np.array([0, 2, 1, 3], np.int32)}),
    "table 1-D": ("block_table", {"block_table": _step.table[0]}),
    "table batch": ("block_table", {"block_table": _step.table[:2]}),
    "table dtype": ("block_table", {"block_table": _step.table.astype(np.int64)}),
    "lengths batch": ("cache_seqlens", {"cache_seqlens": _step.lengths[:2]}),
    "lengths dtype": ("cache_seqlens", {"cache_seqlens": _step.lengths.astype(np.int64)}),
    "scale": ("softmax_scale", {"softmax_scale": -1.0}),
    "out": ("out", {"out": np.zeros((3, 2, 3, 512), np.float32)}),
    "lse": ("lse", {"lse": np.zeros((3, 2, 3), np.float32)}),
    "workspace": ("workspace", {"workspace": np.zeros(16, np.float32)}),
}


@pytest.mark.parametrize("what", FLASH_WRONG)
def test_flash_mla_names_every_wrong_argument(what: str) -> None:
    name, changes = FLASH_WRONG[what]
    changes = dict(changes)
    with pytest.raises(ArgumentError) as caught:
        flash(_step, changes.pop("k_cache", _three), **changes)
    assert caught.value.name == name, str(caught.value)


def test_errors_name_the_way_out() -> None:
    cases = {
        "bf16 cache": "append_kv",
        "indices": "FlashMLA's sparse kernels",
        "sparse cache": "sparse",
        "attn_sink": "applied afterwards",
        "page of 16": "page_block_size must be 64",
        "page of 128": "page_block_size must be 64",
    }
    for what, words in cases.items():
        _, changes = FLASH_WRONG[what]
        changes = dict(changes)
        with pytest.raises(ArgumentError, match=words):
            flash(_step, changes.pop("k_cache", _three), **changes)
    for name in ("flash_mla_sparse_fwd", "flash_attn_varlen_func"):
        with pytest.raises(ArgumentError, match=f"{name}.*kernel"):
            getattr(flash_mla, name)(1, 2, key=3)


METADATA_WRONG: dict[str, tuple[str, tuple[Any, ...]]] = {
    "two key heads": ("num_heads_k", (_step.lengths, 6, 2)),
    "no rows": ("num_q_tokens_per_head_k", (_step.lengths, 0, 1)),
    "fraction": ("num_q_tokens_per_head_k", (_step.lengths, 1.5, 1)),
    "only lengths": ("num_q_tokens_per_head_k", (_step.lengths,)),
    "lengths dtype": ("cache_seqlens", (_step.lengths.astype(np.int64), 6, 1)),
    "lengths 2-D": ("cache_seqlens", (_step.lengths[None], 6, 1)),
    "topk": ("topk", (_step.lengths, 6, 1, 3, True, 64)),
}


@pytest.mark.parametrize("what", METADATA_WRONG)
def test_metadata_names_every_wrong_argument(what: str) -> None:
    name, arguments = METADATA_WRONG[what]
    for face in (flash_mla, flash_mla_fp8):
        with pytest.raises(ArgumentError) as caught:
            face.get_mla_metadata(*arguments)
        assert caught.value.name == name, str(caught.value)


def pool_call(**changes: Any) -> dict[str, Any]:
    lora, scale, rope = host_pool(2)
    arguments = {
        "key": np.zeros((2, 1, 576), BF16),
        "k_lora_cache": lora,
        "k_lora_scale_cache": scale,
        "k_rope_cache": rope,
        "indices": np.array([64, 65], np.int32),
        "head_dim_v": 512,
    }
    return arguments | changes


APPEND_WRONG: dict[str, tuple[str, dict[str, Any]]] = {
    "key 2-D": ("key", {"key": np.zeros((2, 576), BF16)}),
    "key width": ("key", {"key": np.zeros((2, 1, 512), BF16)}),
    "key dtype": ("key", {"key": np.zeros((2, 1, 576), np.float64)}),
    "key count": ("indices", {"key": np.zeros((3, 1, 576), BF16)}),
    "wrong order": ("k_lora_scale_cache", {"k_lora_scale_cache": host_pool(2)[2]}),
    "rope as latent": ("k_lora_cache", {"k_lora_cache": host_pool(2)[2]}),
    "latent dtype": ("k_lora_cache", {"k_lora_cache": host_pool(2)[0].view(np.int8)}),
    "rope dtype": ("k_rope_cache", {"k_rope_cache": np.zeros((128, 1, 64), np.float32)}),
    "slots": ("k_lora_cache", {"k_lora_cache": host_pool(2)[0][:100]}),
    "read-only": ("k_lora_cache", {"k_lora_cache": np.broadcast_to(np.uint8(0), (128, 1, 512))}),
    "indices dtype": ("indices", {"indices": np.zeros(2, np.int16)}),
    "indices beyond": ("indices", {"indices": np.array([64, 128], np.int32)}),
    "head_dim_v": ("head_dim_v", {"head_dim_v": 128}),
}


@pytest.mark.parametrize("what", APPEND_WRONG)
def test_append_names_every_wrong_argument(what: str) -> None:
    name, changes = APPEND_WRONG[what]
    with pytest.raises(ArgumentError) as caught:
        flash_mla_fp8.quantize_and_cache_k(**pool_call(**changes))
    assert caught.value.name == name, str(caught.value)


def test_fetch_takes_its_own_order() -> None:
    lora, scale, rope = host_pool(2)
    wanted = np.array([-1, 5], np.int32)
    k_nope, k_rope = flash_mla_fp8.dequantize_ckv_fused_indexed(
        lora.view(E4M3), rope, scale, wanted
    )
    assert k_nope.shape == (2, 1, 512) and k_rope.shape == (2, 1, 64)
    assert (k_nope[0] == 0).all() and np.isnan(k_nope[1].astype(np.float32)).all()
    out = (np.empty((2, 1, 512), BF16), np.empty((2, 1, 64), BF16))
    assert flash_mla_fp8.dequantize_ckv_fused_indexed(lora, rope, scale, wanted, out=out) is out
    assert same_bytes(Numpy(), out, (k_nope, k_rope))
    for arguments, name in (
        ((lora, scale, rope, wanted), "k_scale"),  # the order of storage
        ((rope, lora, scale, wanted), "k_lora"),
        ((lora, rope, scale, wanted.astype(np.float32)), "indices"),
        ((lora.view(np.int8), rope, scale, wanted), "k_lora"),
    ):
        with pytest.raises(ArgumentError) as caught:
            flash_mla_fp8.dequantize_ckv_fused_indexed(*arguments)
        assert caught.value.name == name, str(caught.value)


def test_quantised_queries_come_in_fluentllms_order() -> None:
    q = _step.q
    q_nope, q_scale, q_rope = flash_mla_fp8.quantize_ckv_per_token_head(q, kv_lora_rank=512)
    want = api.quantize_q(q)
    assert same_bytes(Numpy(), (q_nope, q_rope, q_scale), want)
    out = (np.empty_like(q_nope), np.empty_like(q_scale), np.empty_like(q_rope))
    flash_mla_fp8.quantize_ckv_per_token_head(q, out=out)
    assert same_bytes(Numpy(), out, (q_nope, q_scale, q_rope))
    with pytest.raises(ArgumentError, match="kv_lora_rank"):
        flash_mla_fp8.quantize_ckv_per_token_head(q, 128)
    with pytest.raises(ArgumentError, match="three arrays"):
        flash_mla_fp8.quantize_ckv_per_token_head(q, out=out[:2])


def test_decode_names_its_own_arguments() -> None:
    face, step, want = small_step()
    view = face.library.view
    q_nope, q_scale, q_rope = flash_mla_fp8.quantize_ckv_per_token_head(step.q)
    parts, ends = face.metadata(step.lengths, 2, 3)
    good: dict[str, Any] = {
        "q_nope": q_nope,
        "q_rope": q_rope,
        "k_cache_lora": view(face.lora, (-1, PAGE, 1, 512)),
        "k_cache_rope": view(face.rope, (-1, PAGE, 1, 64)),
        "q_scale": q_scale[..., None],  # with or without a last dimension
        "k_scale": view(face.scale, (-1, PAGE, 1, 1)),
        "block_table": step.table,
        "cache_seqlens": step.lengths,
        "tile_scheduler_metadata": parts,
        "num_splits": ends,
        "softmax_scale": SCALE,
        "causal": True,
    }
    decode = flash_mla_fp8.flash_mla_ckv_fp8_per_token
    assert same_bytes(face.library, decode(**good), want)
    meta, _ = flash_mla_fp8.get_mla_metadata()
    changed = good | {"tile_scheduler_metadata": meta, "num_splits": None}
    assert same_bytes(face.library, decode(**changed), want)
    for name, value in (
        ("q_nope", q_nope[0]),
        ("q_rope", q_rope[:, :, :1]),
        ("q_scale", q_scale[:1]),
        ("k_cache_lora", good["k_cache_lora"].view(np.int8)),
        ("k_cache_lora", good["k_cache_rope"]),
        ("k_cache_rope", good["k_cache_rope"].view(np.int16)),
        ("k_scale", good["k_scale"].view(np.int32)),
        ("block_table", step.table.astype(np.int64)),
        ("head_dim_v", 64),
        ("num_splits", ends[:2]),
        ("softmax_scale", 0.0),
    ):
        with pytest.raises(ArgumentError) as caught:
            decode(**(good | {name: value}))
        assert caught.value.name == name, str(caught.value)


def test_default_softmax_scale() -> None:
    face, step, _ = small_step()
    cache = tuple(a.reshape(9, PAGE, 1, -1) for a in face.pool())
    want = flash(step, cache, softmax_scale=576**-0.5)
    assert same_bytes(face.library, flash(step, cache, softmax_scale=None), want)


def test_supports_says_what_and_why() -> None:
    assert flash_mla.supports() == (True, "")
    assert flash_mla.supports(kv_cache="fp8_per_tensor", q_dtype="float8_e4m3fn")[0]
    for change, word in (
        ({"kv_cache": "bfloat16"}, "append_kv"),
        ({"kv_cache": "int4"}, "kv_cache"),
        ({"q_dtype": "float8_e4m3fn"}, "q_dtype"),
        ({"num_heads_q": 129}, "1..128"),
        ({"num_heads_k": 2}, "num_heads_k"),
        ({"page_block_size": 16}, "64"),
        ({"head_dim_v": 128}, "512"),
        ({"sparse": True}, "sparse"),
    ):
        fine, reason = flash_mla.supports(**change)  # type: ignore[arg-type]
        assert not fine and word in reason, change
