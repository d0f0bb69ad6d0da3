"""The main job: prefill a paged cache, decode step by step, and measure what FP8 costs.

For each layer of a capture: the first tokens are appended as a prefill, then every step appends its
s_q tokens and decodes through append_kv, quantize_q, plan_decode, mla_decode and mla_combine.
Afterwards every step is computed again by float64 attention, on the inputs as they came (what the
caller loses in all) and on the dequantised inputs (what the decode itself loses), beside the floor
of the scheme: float64 attention whose only change is that P is rounded to e4m3.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .capture import BFLOAT16, LayerCapture
from .config import BLOCK_SIZE, BYTES_PER_TOKEN, HEAD_DIM_QK
from .metrics import ErrorSummary, error_summary
from .progress import Progress
from .run_backends import Backend, make_backend

BYTES_PER_TOKEN_BF16 = 2 * HEAD_DIM_QK  # what a BF16 cache of the same model takes

_PREFILL_CHUNK = 4096  # tokens of one prefill append


@dataclass(frozen=True)
class DecodeOptions:
    """block_n: 64 or 128 tokens a softmax block; scale_rounding: "exact" or "pow2"; backend:
    "auto", "cuda" or "reference"."""

    block_n: int = 64
    scale_rounding: str = "exact"
    backend: str = "auto"


@dataclass(frozen=True)
class LayerErrors:
    """unquantised: against float64 attention on the inputs as they came; dequantised: on what the
    cache and the quantised queries stand for; floor: float64 with P rounded, against the same;
    floor_bf16: the floor with its output rounded to bf16, as every output here is. Where one token
    holds most of a row's weight P loses next to nothing, and the output's rounding is what is left.
    """

    unquantised: ErrorSummary
    dequantised: ErrorSummary
    floor: ErrorSummary
    floor_bf16: ErrorSummary


@dataclass(frozen=True)
class LayerResult:
    """Outputs of one layer: out bf16 [steps, s_q, h, 512], lse f32 [steps, h, s_q], and how far
    they are from float64."""

    capture: LayerCapture
    out: NDArray[Any]
    lse: NDArray[np.float32]
    errors: LayerErrors


@dataclass(frozen=True)
class RunResult:
    """Everything of a run; stage times are summed over its layers."""

    layers: list[LayerResult]
    backend: Backend
    options: DecodeOptions


def decode_run(captures: Sequence[LayerCapture], options: DecodeOptions) -> RunResult:
    """Run every layer; ArgumentError or UnsupportedDeviceError for options that do not fit."""
    backend = make_backend(options.backend, options.block_n, options.scale_rounding)
    layers = [_run_layer(capture, backend, options.block_n) for capture in captures]
    return RunResult(layers, backend, options)


class _Request:
    """The blocks of one request, shuffled as in a cache that has been used for a while."""

    def __init__(self, num_tokens: int) -> None:
        self.num_blocks = -(-num_tokens // BLOCK_SIZE)
        order = np.random.default_rng(0).permutation(self.num_blocks)
        self.block_table = order.astype(np.int32)[None]

    def slots(self, begin: int, end: int) -> NDArray[np.int64]:
        """Slots of tokens begin..end."""
        token = np.arange(begin, end)
        block = self.block_table[0, token // BLOCK_SIZE].astype(np.int64)
        return block * BLOCK_SIZE + token % BLOCK_SIZE


def _run_layer(capture: LayerCapture, backend: Backend, block_n: int) -> LayerResult:
    request = _Request(capture.num_tokens)
    backend.allocate(request.num_blocks)
    label = f"{capture.name}: " if capture.name else ""
    _prefill(capture, backend, request, label)
    steps = []
    with Progress(f"{label}decode", capture.num_steps) as progress:
        for step in range(capture.num_steps):
            begin = capture.prefill_tokens + step * capture.seq_len_q
            end = begin + capture.seq_len_q
            new = slice(begin, end)
            backend.append(capture.kv_c[new], capture.k_pe[new], request.slots(begin, end))
            seqlens = np.array([end], np.int32)
            q = capture.q[step : step + 1]
            steps.append(backend.decode(q, request.block_table, seqlens, capture.softmax_scale))
            progress.advance()
    out = np.concatenate([step.out for step in steps])
    lse = np.concatenate([step.lse for step in steps])
    queries = [step.query for step in steps]
    errors = _errors(capture, backend, request, queries, (out, lse), block_n, label)
    return LayerResult(capture, out, lse, errors)


def _prefill(capture: LayerCapture, backend: Backend, request: _Request, label: str) -> None:
    with Progress(f"{label}prefill", capture.prefill_tokens) as progress:
        for begin in range(0, capture.prefill_tokens, _PREFILL_CHUNK):
            end = min(begin + _PREFILL_CHUNK, capture.prefill_tokens)
            new = slice(begin, end)
            backend.append(capture.kv_c[new], capture.k_pe[new], request.slots(begin, end))
            progress.advance(end - begin)


def _errors(
    capture: LayerCapture,
    backend: Backend,
    request: _Request,
    queries: list[tuple[NDArray[Any], NDArray[Any], NDArray[Any]]],
    results: tuple[NDArray[Any], NDArray[Any]],
    block_n: int,
    label: str,
) -> LayerErrors:
    """Every step against float64. A step sees the prefix of the tokens that it saw when it ran:
    cached tokens do not change once written."""
    from .reference import attention_fp64 as fp64

    slots = request.slots(0, capture.num_tokens)
    cache = backend.cache_on_host()
    raw = np.concatenate([fp64.as_f64(capture.kv_c), fp64.as_f64(capture.k_pe)], axis=1)
    cached = fp64.dequantise_cache(*cache, slots)
    k_scale = fp64.as_f64(cache[1])[slots // BLOCK_SIZE, slots % BLOCK_SIZE]
    exact, dequantised, floor = [], [], []
    with Progress(f"{label}float64", capture.num_steps) as progress:
        for step, (q_nope, q_rope, q_scale) in enumerate(queries):
            end = capture.prefill_tokens + (step + 1) * capture.seq_len_q
            q = fp64.dequantise(q_nope, q_scale, q_rope)
            scale = capture.softmax_scale
            exact.append(fp64.attention_fp64(capture.q[step : step + 1], [raw[:end]], scale))
            dequantised.append(fp64.attention_fp64(q, [cached[:end]], scale))
            floor.append(
                fp64.attention_fp64_p_rounded(
                    q, [cached[:end]], [k_scale[:end]], scale, block_n=block_n
                )
            )
            progress.advance()
    on_cached, with_p_rounded = _stacked(dequantised), _stacked(floor)
    in_bf16 = with_p_rounded[0].astype(BFLOAT16), with_p_rounded[1]
    return LayerErrors(
        unquantised=_summary(results, _stacked(exact)),
        dequantised=_summary(results, on_cached),
        floor=_summary(with_p_rounded, on_cached),
        floor_bf16=_summary(in_bf16, on_cached),
    )


def _stacked(steps: list[tuple[Any, Any]]) -> tuple[NDArray[Any], NDArray[Any]]:
    return np.concatenate([out for out, _ in steps]), np.concatenate([lse for _, lse in steps])


def _summary(got: tuple[Any, Any], reference: tuple[Any, Any]) -> ErrorSummary:
    return error_summary(got[0], reference[0], got[1], reference[1])


def bytes_report(num_tokens: int) -> dict[str, Any]:
    """Bytes of the cache against BF16, per token and for num_tokens."""
    return {
        "bytes_per_token": BYTES_PER_TOKEN,
        "bytes_per_token_bf16": BYTES_PER_TOKEN_BF16,
        "ratio": BYTES_PER_TOKEN / BYTES_PER_TOKEN_BF16,
        "cache_bytes": num_tokens * BYTES_PER_TOKEN,
        "cache_bytes_bf16": num_tokens * BYTES_PER_TOKEN_BF16,
    }
