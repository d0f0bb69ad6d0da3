"""Hostile inputs of the data-movement stages and what the reference makes of them.

A case is a pure function of (kernel, seed): the harness, its workers and a person who reruns a
failure get the same bytes. Rows are made in bulk with a numpy Generator, some kinds at a time:

    scaled      N(0, 1) times 2^-149 .. 2^127, so subnormal to overflow
    codes       the 256 e4m3 values times a scale
    near_ties   half-way points between e4m3 codes times a scale, give or take some ulp
    rope_ties   the same for bf16 in the RoPE part
    wide        exponents spread over 2^+-40 within a row
    raw_bits    any bit pattern: NaN, infinities, subnormals
    zero_latent +0 and -0 latents with a RoPE part of any magnitude
    one_hot     one non-zero latent value
    saturating  every value at +-amax
    planted     an ordinary row with one NaN or infinity
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from snapmla_rt.config import BLOCK_SIZE, RECORD_BYTES, RECORD_ROPE_OFFSET, RECORD_SCALE_OFFSET
from snapmla_rt.reference.append_kv import append_kv
from snapmla_rt.reference.fetch_dequant import fetch_dequant, fetch_dequant_ranges
from snapmla_rt.reference.quantize_q import quantize_q

KERNELS = ("quantize_q", "append_kv", "fetch_dequant")
DTYPES = (ml_dtypes.bfloat16, np.float16, np.float32)
DTYPE_WEIGHTS = (0.6, 0.15, 0.25)
# Both sides of the scan/claim limit, odd sizes, and mostly large ones: they carry the count.
SIZES = (1, 7, 129, 2048, 2049, 4096, 8192, 8192, 8192)
FEW_CTAS = 32
FILLER = 0xA5  # what a cache holds before an append: a stray write shows
F32 = NDArray[np.float32]


@dataclass
class Case:
    """One call: inputs by argument name, keyword options, and the expected outputs."""

    kernel: str
    seed: int
    inputs: dict[str, NDArray[Any]]
    options: dict[str, Any] = field(default_factory=dict)
    expected: dict[str, NDArray[Any]] = field(default_factory=dict)

    @property
    def num_tokens(self) -> int:
        return int(self.options["num_tokens"])


def _powers(rng: np.random.Generator, n: int) -> F32:
    """[n, 1] powers of two, 2^-149 (the smallest subnormal) to 2^125."""
    return np.ldexp(np.float32(1), rng.integers(-149, 126, (n, 1))).astype(np.float32)


@functools.lru_cache(maxsize=1)
def _pool() -> NDArray[np.float32]:
    """Rows of N(0, 1) values: every stretch of 576 of a long line of them."""
    line = np.random.default_rng(20).standard_normal(1 << 20, np.float32)
    return np.lib.stride_tricks.sliding_window_view(line, 576)


def _normal(rng: np.random.Generator, n: int) -> F32:
    """[n, 576] of N(0, 1), from the pool: fresh ones would be a quarter of the work of a case."""
    pool = _pool()
    rows: F32 = pool[rng.integers(0, len(pool), n)]
    return rows


def _scaled(rng: np.random.Generator, n: int) -> F32:
    x = _normal(rng, n)
    latent, rope = _powers(rng, n), _powers(rng, n)
    same = rng.random((n, 1)) < 0.5  # half the rows: RoPE near the latent's magnitude
    x[:, :512] *= latent
    x[:, 512:] *= np.where(same, latent, rope)
    return x


def _row_scales(rng: np.random.Generator, n: int) -> F32:
    """Scales of any mantissa; a quarter are powers of two; exponents around the 2^-96 floor too."""
    mantissa = rng.integers(0, 1 << 23, n, dtype=np.uint32)
    mantissa[rng.random(n) < 0.25] = 0
    floor = rng.random(n) < 0.15
    exponent = np.where(floor, rng.integers(-100, -85, n), rng.integers(-90, 118, n))
    bits = ((exponent + 127).astype(np.uint32) << np.uint32(23)) | mantissa
    return bits.view(np.float32)


def _finite_codes() -> NDArray[np.uint8]:
    codes = np.arange(256, dtype=np.uint8)
    return codes[(codes & 0x7F) != 0x7F]


def _codes(rng: np.random.Generator, n: int) -> F32:
    values = _finite_codes().view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    x = _normal(rng, n)
    x[:, :512] = values[rng.integers(0, values.size, (n, 512), dtype=np.uint8)]
    x[:, 0] = 448.0
    return x * _row_scales(rng, n)[:, None]


def _half_way() -> F32:
    """The points half-way between neighbouring e4m3 values, both signs."""
    positive = np.arange(0x7F, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    middle = (positive[1:] + positive[:-1]) / 2
    return np.concatenate([middle, -middle])


def _nudge(x: NDArray[Any], rng: np.random.Generator) -> F32:
    """x as float32, moved by -3 to 4 units in the last place."""
    step = rng.integers(0, 256, x.shape, dtype=np.uint8) >> np.uint8(5)
    return (x.astype(np.float32).view(np.int32) + (step.astype(np.int32) - 3)).view(np.float32)


def _near_ties(rng: np.random.Generator, n: int) -> F32:
    middle = _half_way()
    scale = _row_scales(rng, n)[:, None]
    x = _normal(rng, n)
    ties = middle[rng.integers(0, middle.size, (n, 512), dtype=np.uint8)] * scale
    x[:, :512] = _nudge(ties, rng)
    x[:, 512:] *= scale
    x[:, :1] = 448 * scale
    return x


def _rope_ties(rng: np.random.Generator, n: int) -> F32:
    scale = _row_scales(rng, n)[:, None]
    x = _normal(rng, n) * scale
    odd = rng.integers(128, 256, (n, 64)).astype(np.float32) * 2 + 1
    x[:, 512:] = _nudge(odd * (scale * np.ldexp(1.0, rng.integers(-20, 20, (n, 1)))), rng)
    x[:, :1] = 448 * scale
    return x


def _wide(rng: np.random.Generator, n: int) -> F32:
    bits = rng.integers(0, 1 << 32, (n, 576), dtype=np.uint32)
    centre = rng.integers(40, 214, (n, 1), dtype=np.uint32)
    spread = (bits >> np.uint32(23)) % np.uint32(80)
    exponent = (centre + spread - np.uint32(40)) << np.uint32(23)
    return ((bits & np.uint32(0x807FFFFF)) | exponent).view(np.float32)


def _raw_bits(rng: np.random.Generator, n: int) -> F32:
    bits = rng.integers(0, 1 << 32, (n, 576), dtype=np.uint32)
    # Most whole-random rows hold a NaN; clearing the top exponent bit keeps half of them finite.
    bits[: n // 2] &= np.uint32(0xBFFFFFFF)
    return bits.view(np.float32)


def _zero_latent(rng: np.random.Generator, n: int) -> F32:
    x = _normal(rng, n) * _powers(rng, n)
    x[:, :512] *= np.float32(0)  # keeps the signs
    return x


def _one_hot(rng: np.random.Generator, n: int) -> F32:
    x = _normal(rng, n) * _powers(rng, n)
    keep = rng.integers(0, 512, n)
    x[:, :512] *= np.arange(512) == keep[:, None]
    return x


def _saturating(rng: np.random.Generator, n: int) -> F32:
    amax = np.abs(_raw_bits(rng, 2 * n)[:n, :1])  # the finite half
    return np.copysign(np.broadcast_to(amax, (n, 576)), _normal(rng, n))


def _planted(rng: np.random.Generator, n: int) -> F32:
    x = _scaled(rng, n)
    bad = np.array([np.nan, -np.nan, np.inf, -np.inf], np.float32)
    x[np.arange(n), rng.integers(0, 576, n)] = bad[rng.integers(0, 4, n)]
    return x


KINDS = {
    "scaled": (_scaled, 0.22),
    "codes": (_codes, 0.12),
    "near_ties": (_near_ties, 0.22),
    "rope_ties": (_rope_ties, 0.12),
    "wide": (_wide, 0.1),
    "raw_bits": (_raw_bits, 0.06),
    "zero_latent": (_zero_latent, 0.04),
    "one_hot": (_one_hot, 0.04),
    "saturating": (_saturating, 0.04),
    "planted": (_planted, 0.04),
}


@np.errstate(all="ignore")
def hostile_rows(rng: np.random.Generator, n: int, dtype: Any) -> NDArray[Any]:
    """[n, 576] rows of all kinds in `dtype`, in random order of kinds."""
    weights = np.array([weight for _, weight in KINDS.values()])
    counts = rng.multinomial(n, weights / weights.sum())
    parts = [make(rng, int(c)) for (make, _), c in zip(KINDS.values(), counts, strict=True) if c]
    rows = np.concatenate(parts) if len(parts) > 1 else parts[0]
    if dtype == np.float16:
        rows = _within_float16(rng, rows)
    return rows if dtype == np.float32 else rows.astype(dtype)


def _within_float16(rng: np.random.Generator, rows: F32) -> F32:
    """Rows whose largest finite magnitude lies in float16's range, by powers of two: most would
    otherwise be all zero or infinite there. One in 16 stays as it is."""
    finite = np.where(np.isfinite(rows), np.abs(rows), np.float32(0))
    _, exponent = np.frexp(finite.max(axis=1))
    shift = rng.integers(-16, 17, len(rows)) - exponent
    shift[rng.random(len(rows)) < 1 / 16] = 0
    # in two steps: the whole factor may lie beyond float32
    first, second = (np.exp2(part).astype(np.float32) for part in (shift // 2, shift - shift // 2))
    return rows * first[:, None] * second[:, None]


# --- Caches ------------------------------------------------------------------------------------


def cache_planes(raw: NDArray[np.uint8], layout: str) -> tuple[NDArray[Any], ...]:
    """ckv uint8, scale float32, rope uint16 as views of [num_blocks * 41,216] bytes."""
    num_blocks = raw.size // RECORD_BYTES
    if layout == "record":
        blocks = raw.reshape(num_blocks, RECORD_BYTES)
        ckv = blocks[:, :RECORD_ROPE_OFFSET]
        rope = blocks[:, RECORD_ROPE_OFFSET:RECORD_SCALE_OFFSET].view(np.uint16)
        scale = blocks[:, RECORD_SCALE_OFFSET:].view(np.float32)
    else:
        cut = num_blocks * RECORD_ROPE_OFFSET
        end = num_blocks * RECORD_SCALE_OFFSET
        ckv, rope = raw[:cut], raw[cut:end].view(np.uint16)
        scale = raw[end:].view(np.float32)
    return (
        ckv.reshape(num_blocks, BLOCK_SIZE, 512),
        scale.reshape(num_blocks, BLOCK_SIZE),
        rope.reshape(num_blocks, BLOCK_SIZE, 64),
    )


def _slots(rng: np.random.Generator, n: int, num_slots: int) -> NDArray[Any]:
    """Distinct shuffled slots; some cases have skipped tokens, repeated slots, or few slots."""
    kind = rng.random()
    if kind < 0.7:
        slots = rng.permutation(num_slots)[:n]
    elif kind < 0.85:
        slots = np.sort(rng.permutation(num_slots)[:n])
        slots[rng.random(n) < 0.05] = -1
    else:
        slots = rng.integers(-1, max(1, num_slots // int(rng.choice([1, 2, 64]))), n)
    return slots.astype(np.int32 if rng.random() < 0.5 else np.int64)


def _quantize_case(seed: int, rng: np.random.Generator, n: int, mode: str) -> Case:
    dtype = DTYPES[rng.choice(3, p=DTYPE_WEIGHTS)]
    heads = int(rng.choice([h for h in (1, 3, 16, 128) if h <= n]))
    n -= n % heads
    q = hostile_rows(rng, n, dtype).reshape(n // heads, 1, heads, 576)
    case = Case("quantize_q", seed, {"q": q}, {"scale_rounding": mode, "num_tokens": n})
    names = ("q_nope", "q_rope", "q_scale")
    case.expected = dict(zip(names, quantize_q(q, scale_rounding=mode), strict=True))
    return case


def _append_case(seed: int, rng: np.random.Generator, n: int, mode: str) -> Case:
    dtype = DTYPES[rng.choice(3, p=DTYPE_WEIGHTS)]
    num_blocks = -(-n // BLOCK_SIZE) + int(rng.integers(0, 3))
    tokens = hostile_rows(rng, n, dtype)
    slots = _slots(rng, n, num_blocks * BLOCK_SIZE)
    options = {
        "scale_rounding": mode,
        "num_tokens": n,
        "num_blocks": num_blocks,
        "layout": str(rng.choice(["separate", "record"])),
    }
    case = Case("append_kv", seed, {"tokens": tokens, "slot_mapping": slots}, options)
    expect_append(case)
    return case


def expect_append(case: Case) -> None:
    """Fill in what the reference writes into a cache of FILLER bytes."""
    raw = np.full(case.options["num_blocks"] * RECORD_BYTES, FILLER, np.uint8)
    tokens = case.inputs["tokens"]
    append_kv(
        tokens[:, :512],
        tokens[:, 512:],
        *cache_planes(raw, case.options["layout"]),
        case.inputs["slot_mapping"],
        scale_rounding=case.options["scale_rounding"],
    )
    case.expected = {"cache": raw}


def _fetch_case(seed: int, rng: np.random.Generator, n: int, mode: str) -> Case:
    num_blocks = -(-n // BLOCK_SIZE) + int(rng.integers(0, 3))
    layout = str(rng.choice(["separate", "record"]))
    raw = np.frombuffer(rng.bytes(num_blocks * RECORD_BYTES), np.uint8).copy()
    planes = cache_planes(raw, layout)
    scales = _row_scales(rng, num_blocks * BLOCK_SIZE).reshape(num_blocks, BLOCK_SIZE)
    keep = rng.random((num_blocks, BLOCK_SIZE)) < 0.15  # any bits: NaN, negative, subnormal
    planes[1][...] = np.where(keep, planes[1], scales)
    options: dict[str, Any] = {"num_tokens": n, "num_blocks": num_blocks, "layout": layout}
    case = Case("fetch_dequant", seed, {"cache": raw}, options)
    if rng.random() < 0.5:
        case.inputs["slots"] = _slots(rng, n, num_blocks * BLOCK_SIZE)
    else:
        case.inputs.update(_ranges(rng, n, num_blocks))
    expect_fetch(case)
    return case


def _ranges(rng: np.random.Generator, n: int, num_blocks: int) -> dict[str, NDArray[Any]]:
    """n tokens in a few ragged ranges (some empty), over shared and shuffled blocks."""
    batch = int(rng.choice([1, 2, 31, 40, 1100]))
    cuts = np.sort(rng.integers(0, n + 1, batch - 1))
    ends = np.concatenate([[0], cuts, [n]]).astype(np.int32)
    starts = rng.integers(0, 200, batch).astype(np.int32)
    width = int((starts + np.diff(ends)).max()) // BLOCK_SIZE + 1
    table = rng.integers(0, num_blocks, (batch, width)).astype(np.int32)
    return {"block_table": table, "starts": starts, "cu_seqlens": ends}


@np.errstate(all="ignore")
def expect_fetch(case: Case) -> None:
    """Fill in the rows that the reference fetches."""
    planes = cache_planes(case.inputs["cache"], case.options["layout"])
    if "slots" in case.inputs:
        rows = fetch_dequant(*planes, case.inputs["slots"])
    else:
        names = ("block_table", "starts", "cu_seqlens")
        rows = fetch_dequant_ranges(*planes, *(case.inputs[name] for name in names))
    case.expected = {"kv_c": rows[0], "k_pe": rows[1]}


_MAKERS = {
    "quantize_q": _quantize_case,
    "append_kv": _append_case,
    "fetch_dequant": _fetch_case,
}


def make_case(kernel: str, seed: int, size: int | None = None) -> Case:
    """The case of (kernel, seed), with the reference's answer. size: tokens, else from the seed."""
    rng = np.random.default_rng([KERNELS.index(kernel), seed])
    n = int(rng.choice(SIZES)) if size is None else size
    mode = str(rng.choice(["exact", "pow2"], p=[0.75, 0.25]))
    case = _MAKERS[kernel](seed, rng, n, mode)
    # A third of the cases run with few CTAs: each warp then has as many rows as it has of the
    # longest calls, which are too long to draw.
    if seed % 3 == 0:
        case.options["ctas_at_once"] = FEW_CTAS
    return case
