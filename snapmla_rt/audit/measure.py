"""One layer of an audit: value ranges, the error of every cache, and where SnapMLA's comes from.

Everything is measured against float64 attention on the capture's own values. What is sampled:

    float64 figures     up to `rows` query rows (step x token x head), spread evenly; all tokens
    bit-exact decode    up to `exact_rows` of these; all tokens
    context lengths     up to 4 of these, on the first, middle and last layer

Two figures for every cache: `errors`, the whole FP8 path (queries, cache and P rounded, float64
otherwise), and `cache_only`, where nothing but the cache is (the paper's Table 3 names caches).
SnapMLA's own kernel arithmetic comes on top, in `decode`: the reference, which the kernels equal
byte for byte.

Sources, each alone in exact attention, so that they show what each would cost by itself:

    Q               queries in e4m3, as keys see them
    K               latents in e4m3, as keys only
    V               latents in e4m3, as values only
    RoPE            division by the scale and rounding to bf16, of q and k
    P               probabilities in e4m3 per row and block
    accumulator     the decode's 14-bit sums, exp2 and float32: what the bit-exact output, before
                    its rounding to bf16, differs by from float64 with all of the above
    output          rounding to bf16
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..capture import LayerCapture
from ..config import (
    BLOCK_SIZE,
    FP8_MAX,
    KV_LORA_RANK,
    LN2,
    QK_ROPE_HEAD_DIM,
    SCALE_MIN,
    DecodeConfig,
)
from ..metrics import ErrorSummary, error_summary
from ..reference.mla_decode import Tokens, decode_split, finish_split
from ..reference.numerics import (
    bf16_from_f32,
    e4m3_from_f32,
    f32_from_bf16,
    f32_from_e4m3,
    log2_soft,
    rcp_rn,
)
from ..reference.ordered_pipeline import Pipeline, ordered_pipeline
from ..reference.quant_configs import CONFIGS, QuantizedKV, attend, quantize_kv, quantize_queries
from ..reference.quantize import f32_input, quantize_rows

F64 = NDArray[np.float64]
F32 = NDArray[np.float32]

SOURCES = ("Q", "K", "V", "RoPE", "P", "accumulator", "output")
QUANTILES = (0.01, 0.25, 0.5, 0.75, 0.99, 0.999)
CONTEXT_ROWS = 4


@dataclass(frozen=True)
class Sampling:
    """How much of a layer is measured; see the module."""

    rows: int = 48
    exact_rows: int = 16


@dataclass(frozen=True)
class PartRange:
    """Magnitudes of one part of the cache (latent or RoPE), and what FP8 costs it.

    quantiles: of |x|, at QUANTILES; dynamic_range: max |x| / median |x|; fp8_mse: mean square error
    of per-token e4m3 with a scale of its own; kept_mse: of how SnapMLA keeps it.
    """

    maximum: float
    quantiles: tuple[float, ...]
    dynamic_range: float
    fp8_mse: float
    kept_mse: float


@dataclass(frozen=True)
class ConfigErrors:
    """One cache: errors of the whole FP8 path, relative L2 with only the cache quantised, values
    that saturate, and non-zero values whose code is zero."""

    errors: ErrorSummary
    cache_only: float
    cache_only_errors: ErrorSummary
    saturated: int
    underflow: int


@dataclass(frozen=True)
class ContextError:
    """Errors of one accumulation after `tokens`: relative L2, and gain = <o - r, r> / <r, r>, the
    bias along the answer; both against float64 with the same rounded P."""

    tokens: int
    relative_l2: float
    gain: float


@dataclass(frozen=True)
class LayerAudit:
    """Everything about one layer; see the module for what was sampled."""

    name: str
    tokens: int
    rows: int
    exact_rows: int
    latent: PartRange
    rope: PartRange
    configs: dict[str, ConfigErrors]
    decode: ErrorSummary
    worst_row: float  # relative L2 of the worst row of `decode`
    bf16: float  # relative L2 of bf16 outputs: what no bf16 kernel avoids
    sources: dict[str, float]
    accumulation: dict[str, list[ContextError]] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> LayerAudit:
        """What `as_dict` gave, also after a journey through JSON."""
        own = {key: values[key] for key in cls.__dataclass_fields__ if key in values}
        own["latent"], own["rope"] = _part_of(values["latent"]), _part_of(values["rope"])
        own["decode"] = _summary_of(values["decode"])
        own["configs"] = {
            name: ConfigErrors(
                **{
                    **config,
                    "errors": _summary_of(config["errors"]),
                    "cache_only_errors": _summary_of(config["cache_only_errors"]),
                }
            )
            for name, config in values["configs"].items()
        }
        own["accumulation"] = {
            kind: [ContextError(**point) for point in points]
            for kind, points in values["accumulation"].items()
        }
        return cls(**own)


def _part_of(values: dict[str, Any]) -> PartRange:
    return PartRange(**{**values, "quantiles": tuple(values["quantiles"])})


def _summary_of(values: dict[str, Any]) -> ErrorSummary:
    return ErrorSummary(**{**values, "worst_at": tuple(values["worst_at"])})


# --- sampling -------------------------------------------------------------------------------------


def sample_rows(layer: LayerCapture, count: int) -> tuple[F32, NDArray[np.int64]]:
    """Up to `count` query rows [r, 576], evenly over steps, tokens and heads, and how many tokens
    each of them sees."""
    shape = layer.q.shape[:3]
    total = int(np.prod(shape))
    if total <= count:
        index = np.arange(total)
    else:  # a step coprime to the size visits every head before it repeats one
        step = max(total // count, 1)
        while np.gcd(step, total) != 1:
            step += 1
        index = np.sort(np.arange(count) * step % total)
    rows = f32_input("q", layer.q.reshape(total, -1)[index])
    step_of, token_of, _ = np.unravel_index(index, shape)
    limits = layer.prefill_tokens + step_of * layer.seq_len_q + token_of + 1
    return rows, limits.astype(np.int64)


def _evenly(total: int, count: int) -> NDArray[np.int64]:
    return np.unique(np.linspace(0, total - 1, min(count, total)).round().astype(np.int64))


# --- one layer ------------------------------------------------------------------------------------


class _Layer:
    """The sampled rows of a layer, and exact attention over them."""

    def __init__(self, layer: LayerCapture, sampling: Sampling) -> None:
        self.scale = layer.softmax_scale
        self.q32, self.limits = sample_rows(layer, sampling.rows)
        self.latent32 = f32_input("kv_c", layer.kv_c)
        self.rope32 = f32_input("k_pe", layer.k_pe)
        self.q = self.q32.astype(np.float64)
        self.latent = self.latent32.astype(np.float64)
        self.rope = self.rope32.astype(np.float64)
        self.exact = self.attend(self.q, self.latent, self.rope, self.latent)
        q_latent, q_rope = quantize_queries(self.q32)
        self.q_latent, self.q_rope = q_latent, q_rope

    def attend(
        self,
        q: F64,
        k_latent: F64,
        k_rope: F64,
        values: F64,
        value_scale: F64 | None = None,
        *,
        rows: NDArray[np.int64] | slice = slice(None),
    ) -> tuple[F64, F64]:
        """Outputs and lse of q, which are these of the sampled rows."""
        keys = np.concatenate([k_latent, k_rope], axis=1)
        return attend(q, keys, values, self.scale, self.limits[rows], value_scale)

    @property
    def quantised_q(self) -> F64:
        return np.concatenate([self.q_latent, self.q_rope], axis=1)


def audit_layer(
    layer: LayerCapture,
    sampling: Sampling = Sampling(),
    with_contexts: bool = False,
    advance: Callable[[int], None] = lambda _: None,
) -> LayerAudit:
    """Measure one layer. `advance(1)` is called after each of `units(with_contexts)` parts."""
    own = _Layer(layer, sampling)
    latent = _part_range(own.latent32, None)
    configs: dict[str, ConfigErrors] = {}
    snapmla: QuantizedKV | None = None
    for name in CONFIGS:
        cache = quantize_kv(name, own.latent32, own.rope32)
        configs[name] = _config_errors(own, cache)
        snapmla = cache if name == "snapmla" else snapmla
        advance(1)
    assert snapmla is not None
    rope = _part_range(own.rope32, snapmla.rope)
    chosen = _evenly(len(own.q), sampling.exact_rows)
    out, lse = bit_exact(own.q32[chosen], own.latent32, own.rope32, own.limits[chosen], own.scale)
    advance(1)
    exact, exact_lse = own.exact[0][chosen], own.exact[1][chosen]
    rounded = f32_from_bf16(bf16_from_f32(out)).astype(np.float64)
    sources = _sources(own, snapmla, chosen, out)
    advance(1)
    accumulation = {}
    if with_contexts:
        accumulation = context_errors(own, snapmla, chosen)
        advance(1)
    size = np.maximum(np.linalg.norm(exact, axis=1), np.finfo(np.float64).tiny)
    return LayerAudit(
        name=layer.name,
        tokens=layer.num_tokens,
        rows=len(own.q),
        exact_rows=len(chosen),
        latent=latent,
        rope=rope,
        configs=configs,
        decode=error_summary(rounded, exact, lse, exact_lse),
        worst_row=float((np.linalg.norm(rounded - exact, axis=1) / size).max()),
        bf16=sources["output"],
        sources=sources,
        accumulation=accumulation,
    )


def units(with_contexts: bool) -> int:
    """How often `audit_layer` reports progress."""
    return len(CONFIGS) + 2 + with_contexts


def _part_range(x: F32, kept: F64 | None) -> PartRange:
    """Ranges of latent or RoPE [n, d]; kept: as SnapMLA has it (None: in e4m3)."""
    magnitude = np.abs(x)
    quantiles = tuple(float(v) for v in np.quantile(magnitude, QUANTILES))
    top = magnitude.max(axis=1, keepdims=True)
    scale = np.maximum(top / np.float32(FP8_MAX), np.float32(SCALE_MIN))
    coded = f32_from_e4m3(e4m3_from_f32(x / scale)).astype(np.float64) * scale
    wide = x.astype(np.float64)
    fp8_mse = float(np.mean(np.square(coded - wide)))
    return PartRange(
        maximum=float(magnitude.max()),
        quantiles=quantiles,
        dynamic_range=float(magnitude.max() / max(quantiles[2], np.finfo(np.float32).tiny)),
        fp8_mse=fp8_mse,
        kept_mse=fp8_mse if kept is None else float(np.mean(np.square(kept - wide))),
    )


def _config_errors(own: _Layer, cache: QuantizedKV) -> ConfigErrors:
    exact, exact_lse = own.exact
    alone, alone_lse = own.attend(own.q, cache.latent, cache.rope, cache.latent)
    out, lse = own.attend(
        own.quantised_q, cache.latent, cache.rope, cache.latent, cache.value_scale
    )
    cache_only = error_summary(alone, exact, alone_lse, exact_lse)
    return ConfigErrors(
        errors=error_summary(out, exact, lse, exact_lse),
        cache_only=cache_only.relative_l2,
        cache_only_errors=cache_only,
        saturated=cache.saturated,
        underflow=cache.underflow,
    )


def _relative(got: F64, want: F64) -> float:
    size = float(np.linalg.norm(want))
    return float(np.linalg.norm(got - want)) / size if size else 0.0


def _sources(
    own: _Layer, cache: QuantizedKV, chosen: NDArray[np.int64], out: F32
) -> dict[str, float]:
    """Relative L2 of each source alone, over the rows of the bit-exact decode."""

    def output(*given: F64) -> F64:
        return own.attend(*given, rows=chosen)[0]

    exact = own.exact[0][chosen]
    q_latent = np.concatenate([own.q_latent, own.q[:, KV_LORA_RANK:]], axis=1)[chosen]
    q_rope = np.concatenate([own.q[:, :KV_LORA_RANK], own.q_rope], axis=1)[chosen]
    q = own.q[chosen]
    everything = output(
        own.quantised_q[chosen], cache.latent, cache.rope, cache.latent, cache.value_scale
    )
    rounded = f32_from_bf16(bf16_from_f32(exact.astype(np.float32))).astype(np.float64)
    return {
        "Q": _relative(output(q_latent, own.latent, own.rope, own.latent), exact),
        "K": _relative(output(q, cache.latent, own.rope, own.latent), exact),
        "V": _relative(output(q, own.latent, own.rope, cache.latent), exact),
        "RoPE": _relative(output(q_rope, own.latent, cache.rope, own.latent), exact),
        "P": _relative(output(q, own.latent, own.rope, own.latent, cache.value_scale), exact),
        "accumulator": _relative(out.astype(np.float64), everything),
        "output": _relative(rounded, exact),
    }


# --- the bit-exact decode -------------------------------------------------------------------------


def bit_exact(
    q: F32, latent: F32, rope: F32, limits: NDArray[np.int64], softmax_scale: float
) -> tuple[F32, F64]:
    """Rows q [r, 576] through the reference of mla_decode, unsplit, over a cache of these tokens:
    out float32 [r, 512] before its rounding to bf16, and lse [r] in nats."""
    count = int(limits.max())
    padded = -(-count // BLOCK_SIZE) * BLOCK_SIZE
    codes = np.zeros((padded, KV_LORA_RANK), np.uint8)
    keys = np.zeros((padded, QK_ROPE_HEAD_DIM), np.uint16)
    scale = np.zeros(padded, np.float32)
    codes[:count], keys[:count], scale[:count] = quantize_rows(latent[:count], rope[:count])
    with np.errstate(all="ignore"):
        inverse = np.where(scale == 0, np.float32(0), rcp_rn(scale)).astype(np.float32)
        shape = (-1, BLOCK_SIZE)
        tokens = Tokens(
            codes.reshape(*shape, KV_LORA_RANK),
            keys.reshape(*shape, QK_ROPE_HEAD_DIM),
            scale.reshape(shape),
            log2_soft(scale).reshape(shape),
            inverse.reshape(shape),
        )
    query = quantize_rows(q[:, :KV_LORA_RANK], q[:, KV_LORA_RANK:])
    config = DecodeConfig(1, 1, softmax_scale, block_n=BLOCK_SIZE)
    out, lse2 = finish_split(decode_split(query, tokens, limits, config, 0))
    return out, lse2.astype(np.float64) * LN2


# --- accumulation against context -----------------------------------------------------------------


def context_lengths(tokens: int) -> tuple[int, ...]:
    """Powers of two from 256 up, and the longest multiple of 128, within `tokens`."""
    longest = tokens - tokens % (2 * BLOCK_SIZE)
    lengths = [1 << k for k in range(8, 21) if 1 << k < longest]
    return (*lengths, longest) if longest else ()


def context_errors(
    own: _Layer, cache: QuantizedKV, chosen: NDArray[np.int64]
) -> dict[str, list[ContextError]]:
    """Errors of Algorithm 1 (enforced order) by accumulation and context length: rows see the first
    tokens of the layer, whatever they saw when they were captured."""
    lengths = context_lengths(len(own.latent))
    rows = chosen[:: max(len(chosen) // CONTEXT_ROWS, 1)][:CONTEXT_ROWS]
    if not lengths:
        return {}
    q, keys = own.quantised_q[rows], np.concatenate([cache.latent, cache.rope], axis=1)
    codes, _, scale = quantize_rows(own.latent32, own.rope32)
    scores = ((q @ keys.T) * own.scale).astype(np.float32)
    found: dict[str, list[ContextError]] = {"in_place": [], "two_level": []}
    results = {
        kind: ordered_pipeline(scores, codes, scale, Pipeline(accumulation=kind), lengths)
        for kind in found
    }
    for count in lengths:
        seen = slice(0, count)
        limits = np.full(len(rows), count)
        want, _ = attend(
            q, keys[seen], cache.latent[seen], own.scale, limits, cache.value_scale[seen]
        )
        for kind, result in results.items():
            error = result.prefixes[count].astype(np.float64) - want
            gain = float(np.vdot(error, want) / np.vdot(want, want)) if want.any() else 0.0
            found[kind].append(ContextError(count, _relative(error + want, want), gain))
    return found
