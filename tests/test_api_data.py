"""The data-movement calls on the reference backend, and their argument checks. No GPU needed."""

from __future__ import annotations

import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from compare import assert_same_bytes
from poison import poisoned_cache

from snapmla_rt import api, data_launch, workspace
from snapmla_rt.driver import memory
from snapmla_rt.errors import ArgumentError
from snapmla_rt.reference.append_kv import append_kv as reference_append
from snapmla_rt.reference.fetch_dequant import fetch_dequant as reference_fetch
from snapmla_rt.reference.quantize_q import quantize_q as reference_quantize
from snapmla_rt.tensor import view


def rows(*shape: int, dtype: Any = ml_dtypes.bfloat16, seed: int = 0) -> np.ndarray:
    return (3 * np.random.default_rng(seed).standard_normal(shape)).astype(dtype)


@pytest.mark.parametrize("mode", ["exact", "pow2"])
@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16, np.float32])
def test_quantize_q_equals_the_reference(mode: str, dtype: Any) -> None:
    q = rows(2, 3, 4, 576, dtype=dtype)
    want = reference_quantize(q, scale_rounding=mode)
    options: dict[str, Any] = {"scale_rounding": mode, "backend": "reference"}
    forms = [
        api.quantize_q(q, **options),
        api.quantize_q_parts(q[..., :512], q[..., 512:], **options),
        api.quantize_q(q.transpose(1, 0, 2, 3).copy().transpose(1, 0, 2, 3), **options),
    ]
    out = tuple(np.empty_like(w) for w in want)
    assert api.quantize_q(q, out=out, **options)[0] is out[0]
    for form in [*forms, out]:
        for got, expected in zip(form, want, strict=True):
            assert_same_bytes("q", got, expected)


@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_append_prepare_fetch_equal_the_reference(backend: str) -> None:
    tokens, q = rows(5, 576), rows(5, 1, 2, 576, seed=1)
    slots = np.array([0, 64, -1, 64, 127])
    want, one, two = (poisoned_cache(2) for _ in range(3))
    reference_append(tokens[:, :512], tokens[:, 512:], *want, slots)
    api.append_kv(tokens[:, :512], tokens[:, 512:], *one, slots, backend=backend)
    query = api.prepare(q, tokens[:, :512], tokens[:, 512:], *two, slots, backend="reference")
    for cache in (one, two):
        for got, expected in zip(cache, want, strict=True):
            bits = f"u{got.dtype.itemsize}"
            assert_same_bytes("cache", got.view(bits), expected.view(bits))
    for got, expected in zip(query, reference_quantize(q), strict=True):
        assert_same_bytes("query", got, expected)
    rows_wanted = reference_fetch(*want, slots)
    whole = np.zeros((5, 600), ml_dtypes.bfloat16)[:, 8:584]
    pair = api.fetch_dequant(*want, slots, backend="reference")
    api.fetch_dequant(*want, slots, backend="reference", out=whole, concatenate=True)
    for fetched in (pair, (whole[:, :512], whole[:, 512:])):
        for part, expected in zip(fetched, rows_wanted, strict=True):
            assert_same_bytes("rows", np.ascontiguousarray(part), expected)


def test_fetch_ranges_fills_the_rest_with_zeros() -> None:
    cache = poisoned_cache(2)
    tokens = rows(128, 576)
    reference_append(tokens[:, :512], tokens[:, 512:], *cache, np.arange(128))
    table = np.array([[1, 2**31 - 1], [0, 1]], np.int32)
    starts, ends = np.array([60, 63], np.int32), np.array([0, 4, 6], np.int32)
    options: dict[str, Any] = {"backend": "reference"}
    kv_c, k_pe = api.fetch_dequant_ranges(*cache, table, starts, ends, num_tokens=8, **options)
    want = reference_fetch(*cache, np.array([124, 125, 126, 127, 63, 64, -1, -1]))
    assert_same_bytes("kv_c", kv_c, want[0])
    assert_same_bytes("k_pe", k_pe, want[1])
    kv_c, _ = api.fetch_dequant_ranges(*cache, table, starts, ends, **options)
    assert kv_c.shape == (6, 512)
    with pytest.raises(ArgumentError, match="num_tokens"):
        api.fetch_dequant_ranges(*cache, table, starts, ends, num_tokens=5, **options)


def test_nothing_is_written_for_a_bad_slot() -> None:
    cache, before = poisoned_cache(1), poisoned_cache(1)
    tokens = rows(2, 576)
    with pytest.raises(ArgumentError, match=r"slot_mapping: .*slot 64 at index 1"):
        api.append_kv(tokens[:, :512], tokens[:, 512:], *cache, np.array([0, 64]))
    for got, expected in zip(cache, before, strict=True):
        bits = f"u{got.dtype.itemsize}"
        assert_same_bytes("cache", got.view(bits), expected.view(bits))


def _good() -> dict[str, Any]:
    cache = poisoned_cache(2)
    tokens = rows(3, 576)
    return {
        "kv_c": tokens[:, :512],
        "k_pe": tokens[:, 512:],
        "ckv_cache": cache[0],
        "k_scale_cache": cache[1],
        "k_rope_cache": cache[2],
        "slot_mapping": np.arange(3),
    }


BAD: dict[str, tuple[str, Callable[[dict[str, Any]], Any]]] = {
    "width": ("kv_c", lambda a: a["kv_c"][:, 1:]),
    "rows": ("k_pe", lambda a: a["k_pe"][1:]),
    "other type than kv_c": ("k_pe", lambda a: a["k_pe"].astype(np.float16)),
    "inner stride": ("kv_c", lambda a: np.repeat(a["kv_c"], 2, axis=1)[:, ::2]),
    "block size 16": ("ckv_cache", lambda a: np.zeros((2, 16, 512), np.uint8)),
    "argument order": ("k_scale_cache", lambda a: a["k_rope_cache"]),
    "blocks": ("k_rope_cache", lambda a: a["k_rope_cache"][:1]),
    "scale type": ("k_scale_cache", lambda a: a["k_scale_cache"].astype(np.float64)),
    "slot type": ("slot_mapping", lambda a: a["slot_mapping"].astype(np.int16)),
    "slot count": ("slot_mapping", lambda a: np.arange(4)),
    "overlapping cache": (
        "ckv_cache",
        lambda a: np.lib.stride_tricks.as_strided(
            np.zeros(600, np.uint8), (2, 64, 512), (0, 0, 1), writeable=True
        ),
    ),
    "text": ("kv_c", lambda a: "tokens"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_arguments_are_named(case: str) -> None:
    name, change = BAD[case]
    arguments = _good()
    api.append_kv(**arguments, backend="reference")
    arguments[name] = change(arguments)
    with pytest.raises(ArgumentError) as error:
        api.append_kv(**arguments, backend="reference")
    assert error.value.name == name


def test_bad_out_is_named() -> None:
    q = rows(1, 1, 2, 576)
    want = reference_quantize(q)
    for i in range(3):
        out = [np.empty_like(w) for w in want]
        out[i] = out[i][:, :, :1]
        with pytest.raises(ArgumentError, match=rf"out\[{i}\]"):
            api.quantize_q(q, out=out, backend="reference")
    with pytest.raises(ArgumentError, match="out"):
        api.quantize_q(q, out=out[:2], backend="reference")
    with pytest.raises(ArgumentError, match="backend"):
        api.quantize_q(q, backend="gpu")


def test_launch_values_of_strided_queries() -> None:
    """What the kernels are told: one stride where one leads through all rows, and alignment."""
    q = np.zeros((2, 3, 4, 576), np.float16)
    whole = view(q, "q")
    assert data_launch.row_stride(whole) == 1152
    assert data_launch.row_stride(view(q[:, :, :1], "q")) == 4 * 1152
    assert data_launch.row_stride(view(q[:, :2], "q")) is None
    assert data_launch.row_stride(view(q[:1, :2], "q")) == 1152
    assert data_launch.row_stride(view(q[:1, :1, :1], "q")) == 0
    rope = data_launch.rope_part(whole)
    assert rope.ptr == whole.ptr + 1024 and rope.shape == (2, 3, 4, 64)
    odd = np.zeros((3, 577), np.float16)
    assert not data_launch.is_aligned(view(odd, "odd"), 16)
    assert data_launch.is_aligned(view(odd[:1], "odd"), 2)


def test_threads_have_their_own_workspace_of_the_per_thread_stream(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its handle, 2, is the same in every thread; the stream is not."""

    class Fake:
        def __init__(self, device: int, slots: int, tokens: int) -> None:
            self.num_slots, self.num_tokens = slots, tokens

        def fits(self, slots: int, tokens: int) -> bool:
            return slots <= self.num_slots and tokens <= self.num_tokens

    monkeypatch.setattr(workspace, "AppendWorkspace", Fake)
    monkeypatch.setattr(memory, "is_capturing", lambda stream, device: False)
    for stream, shared in ((2, False), (77, True)):
        find = functools.partial(workspace.stream_workspace, 0, stream, 64, 5000)
        own = find()
        with ThreadPoolExecutor(1) as one, ThreadPoolExecutor(1) as other:
            found = [one.submit(find).result(), other.submit(find).result()]
        assert find() is own
        assert (found[0] is own) == shared and (found[0] is found[1]) == shared
    workspace._current.pop((0, 77))
