"""Decode problems that a few numbers describe: the same on every machine, cheap to send to a worker
process, and written down in full by `repr`.

Everything that a decode must not read is poisoned: unused slots of the cache are NaN in all three
planes, unused entries of the block table hold ids that no cache has, blocks lie shuffled.
"""

from __future__ import annotations

import multiprocessing
import os
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray
from poison import poison_block_table, poisoned_cache
from strategies import pattern_values, scaled, shuffled_block_table, slots_of

from snapmla_rt.config import RECORD_BYTES, RECORD_ROPE_OFFSET, RECORD_SCALE_OFFSET
from snapmla_rt.plan import DecodePlan
from snapmla_rt.reference.append_kv import append_kv
from snapmla_rt.reference.mla_decode import mla_decode
from snapmla_rt.reference.plan_decode import plan_decode
from snapmla_rt.reference.quantize_q import quantize_q

BLOCK = 64
SOFTMAX_SCALE = 576**-0.5
# Where the planes lie. "strided": separate buffers whose blocks are further apart than they are
# long, as in a cache that several layers share.
LAYOUTS = ("separate", "record", "strided")
STRIDED_GAPS = (4096, 48, 1008)  # bytes after each block: latent, scale, RoPE

# What the plan is made from: the lengths; or, since a plan serves all lengths of its blocks, whole
# blocks, or one token of each last block.
PLAN_LENGTHS = ("own", "whole", "first")

# Shapes of data that break attention kernels; those of `strategies` come first.
PATTERNS = (
    *("normal", "zero", "negative_zero", "equal_tokens", "dominant_token", "saturating"),
    *("scale_ties", "one_hot", "wide"),
    "loud_tokens",  # token scales over six octaves
    "attention_sink",  # the first token's logits far above a long, low tail
    "rising",  # each block's logits above the last one's: the reference rises at every block
    "falling",
    "cliff",  # logits drop by hundreds in the middle of a block
    "nan_tokens",  # a few tokens hold NaN or infinities
    "nan_queries",
    "one_query_dim",  # a single non-zero query dim: logits of one product
)


@dataclass(frozen=True)
class DecodeSpec:
    """One decode problem. magnitude: of the latents and RoPE; query_magnitude: of q; plan options
    as in plan_decode; lengths: tokens of each request; plan_lengths: of PLAN_LENGTHS."""

    seed: int
    num_heads_q: int
    seq_len_q: int
    lengths: tuple[int, ...]
    pattern: str = "normal"
    magnitude: float = 1.0
    query_magnitude: float = 1.0
    layout: str = "separate"
    softmax_scale: float = SOFTMAX_SCALE
    causal: bool = True
    num_splits: int | None = None
    batch_invariant: int = 0
    block_n: int = 64
    num_sms: int = 132
    spare_columns: int = 2
    plan_lengths: str = "own"

    @property
    def plan_options(self) -> dict[str, Any]:
        return {
            "num_splits": self.num_splits,
            "batch_invariant": self.batch_invariant,
            "block_n": self.block_n,
            "num_sms": self.num_sms,
        }


@dataclass
class DecodeCase:
    """The arrays of a DecodeSpec. paged: ckv_cache, k_scale_cache, k_rope_cache in the layout of
    the spec, views of `buffers` (uint8, one or three)."""

    spec: DecodeSpec
    query: tuple[Any, Any, Any]
    paged: tuple[Any, Any, Any]
    block_table: NDArray[np.int32]
    cache_seqlens: NDArray[np.int32]
    buffers: tuple[NDArray[np.uint8], ...]

    def planned_lengths(self) -> NDArray[np.int32]:
        """The lengths that the plan is made from."""
        unit, own = self.spec.block_n, self.cache_seqlens
        whole = -(-own // unit) * unit
        choices = {"own": own, "whole": whole, "first": whole - (unit - 1) * (own > 0)}
        return choices[self.spec.plan_lengths].astype(np.int32)

    def plan(self) -> DecodePlan:
        spec = self.spec
        return plan_decode(
            self.planned_lengths(), spec.num_heads_q, spec.seq_len_q, **spec.plan_options
        )

    def expected(self) -> tuple[NDArray[Any], NDArray[np.float32]]:
        """out bf16 and lse of the reference."""
        return mla_decode(
            *self.query,
            *self.paged,
            self.block_table,
            self.cache_seqlens,
            self.plan(),
            self.spec.softmax_scale,
            causal=self.spec.causal,
        )


def build(spec: DecodeSpec) -> DecodeCase:
    """The arrays of a problem; a pure function of the spec."""
    rng = np.random.default_rng(spec.seed)
    seqlens = np.array(spec.lengths, np.int32)
    table, num_blocks = shuffled_block_table(seqlens, rng)
    paged, buffers = _poisoned(num_blocks, spec.layout)
    for req, length in enumerate(spec.lengths):
        tokens = _tokens(spec, length, rng)
        slots = slots_of(table[req], length)
        append_kv(tokens[:, :512], tokens[:, 512:], *paged, slots)
    width = table.shape[1] + spec.spare_columns
    wide = np.zeros((len(seqlens), width), np.int32)
    wide[:, : table.shape[1]] = table
    query = quantize_q(_queries(spec, rng))
    return DecodeCase(spec, query, paged, poison_block_table(wide, seqlens), seqlens, buffers)


def _tokens(spec: DecodeSpec, length: int, rng: np.random.Generator) -> NDArray[np.float32]:
    """[length, 576] of the spec's pattern."""
    pattern, seed = spec.pattern, int(rng.integers(1 << 30))
    named = ("normal", "zero", "negative_zero", "equal_tokens", "dominant_token", "saturating")
    if pattern in (*named, "scale_ties", "one_hot", "wide"):
        x = np.concatenate(
            [pattern_values(pattern, length, 512, seed), pattern_values(pattern, length, 64, seed)],
            axis=1,
        )
    else:
        x = rng.standard_normal((length, 576)).astype(np.float32)
        position = np.arange(length, dtype=np.float32)[:, None]
        if pattern == "loud_tokens":
            x *= np.exp2(rng.integers(-3, 4, (length, 1))).astype(np.float32)
        elif pattern == "attention_sink":
            x[:, 512:] = 0.1 * x[:, 512:] + np.where(position == 0, 40, -40)
        elif pattern in ("rising", "falling"):
            sign = 1 if pattern == "rising" else -1
            x[:, 512:] = 0.1 * x[:, 512:] + sign * position / 16
        elif pattern == "cliff":
            x[:, 512:] = 0.1 * x[:, 512:] + np.where(position < length // 2, 60, -60)
    x = scaled(x, spec.magnitude)
    if pattern == "nan_tokens" and length:
        for value in (np.nan, np.inf):
            at = rng.integers(length, size=1 + length // 100), rng.integers(576)
            x[at] = value
    return x


def _queries(spec: DecodeSpec, rng: np.random.Generator) -> NDArray[np.float32]:
    shape = (len(spec.lengths), spec.seq_len_q, spec.num_heads_q, 576)
    q = rng.standard_normal(shape).astype(np.float32)
    if spec.pattern in ("attention_sink", "rising", "falling", "cliff"):
        q[..., 512:] = 1.0  # so that the RoPE keys decide the logits
    elif spec.pattern == "one_query_dim":
        q *= np.arange(576) == rng.integers(576)
    q = scaled(q, spec.query_magnitude)
    if spec.pattern == "nan_queries" and q.size:
        flat = q.reshape(-1, 576)
        flat[rng.integers(len(flat)), rng.integers(576)] = np.nan
    return q


def _poisoned(
    num_blocks: int, layout: str
) -> tuple[tuple[Any, Any, Any], tuple[NDArray[np.uint8], ...]]:
    """(the three planes, all NaN; the memory they lie in)."""
    sizes = [step for _, _, step in plane_places(layout)]
    if layout == "record":
        sizes = sizes[:1]
    buffers = tuple(aligned(num_blocks * size) for size in sizes)
    planes = planes_of(buffers, layout)
    for plane, one in zip(planes, poisoned_cache(1), strict=True):
        bits = np.dtype(f"u{plane.dtype.itemsize}")
        plane.view(bits)[:] = one.view(bits)
    return planes, buffers


PLANES = (
    ((64, 512), (512, 1), ml_dtypes.float8_e4m3fn),
    ((64,), (4,), np.float32),
    ((64, 64), (128, 2), ml_dtypes.bfloat16),
)


def plane_places(layout: str) -> tuple[tuple[int, int, int], ...]:
    """(buffer, start, bytes from block to block) of ckv_cache, k_scale_cache and k_rope_cache."""
    if layout == "record":
        starts = (0, RECORD_SCALE_OFFSET, RECORD_ROPE_OFFSET)
        return tuple((0, start, RECORD_BYTES) for start in starts)
    gaps = STRIDED_GAPS if layout == "strided" else (0, 0, 0)
    steps = (size + gap for size, gap in zip((32768, 256, 8192), gaps, strict=True))
    return tuple((i, 0, step) for i, step in enumerate(steps))


def planes_of(buffers: tuple[NDArray[np.uint8], ...], layout: str) -> tuple[Any, Any, Any]:
    """The three planes of a cache that lies in `buffers`."""
    found = []
    for (shape, strides, dtype), (at, start, step) in zip(
        PLANES, plane_places(layout), strict=True
    ):
        num_blocks = buffers[at].size // step
        whole = (num_blocks, *shape)
        found.append(np.ndarray(whole, dtype, buffers[at], start, (step, *strides)))
    return found[0], found[1], found[2]


def aligned(nbytes: int, alignment: int = 128) -> NDArray[np.uint8]:
    """Zeroed host memory whose address is a multiple of `alignment`."""
    raw = np.zeros(nbytes + alignment, np.uint8)
    start = -raw.__array_interface__["data"][0] % alignment
    return raw[start : start + nbytes]


# --- Solving problems in worker processes --------------------------------------------------------


@dataclass
class Solved:
    """A case and the reference's answer, in a form that travels between processes."""

    spec: DecodeSpec
    query: tuple[Any, Any, Any]
    block_table: NDArray[np.int32]
    buffers: tuple[NDArray[np.uint8], ...]
    out: NDArray[np.uint16]
    lse: NDArray[np.float32]

    def case(self) -> DecodeCase:
        paged = planes_of(self.buffers, self.spec.layout)
        seqlens = np.array(self.spec.lengths, np.int32)
        return DecodeCase(self.spec, self.query, paged, self.block_table, seqlens, self.buffers)


def solve(spec: DecodeSpec) -> Solved:
    """Build a problem and answer it with the reference."""
    case = build(spec)
    out, lse = case.expected()
    return Solved(spec, case.query, case.block_table, case.buffers, out.view(np.uint16), lse)


def worker_pool(workers: int | None = None) -> ProcessPoolExecutor:
    """Processes for `solve`. They never touch the GPU and start no compiler."""
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ.setdefault(name, "1")  # NumPy's own threads would only get in the way
    os.environ.setdefault("SNAPMLA_JIT", "lazy")  # read when a worker imports the package
    context = multiprocessing.get_context("spawn")
    count = workers or len(os.sched_getaffinity(0))
    return ProcessPoolExecutor(count, mp_context=context)


def solved(pool: ProcessPoolExecutor, specs: Iterable[DecodeSpec]) -> Iterator[Solved]:
    """The answers in order, a bounded number of them ahead."""
    pending: deque[Future[Solved]] = deque()
    for spec in specs:
        pending.append(pool.submit(solve, spec))
        if len(pending) >= 64:
            yield pending.popleft().result()
    while pending:
        yield pending.popleft().result()


# --- Drawing problems ----------------------------------------------------------------------------

HEADS = (1, 2, 3, 4, 8, 9, 12, 16, 20, 24, 32, 40, 48, 63, 64, 96, 126, 128)
# Both sides of a block, of two, of the 128-token variant, of a ring of four stages, and of the
# sixteen blocks that the load warp looks ahead.
EDGES = (0, 1, 2, 63, 64, 65, 127, 128, 129, 191, 192, 193, 255, 256, 257, 320, 321, 512, 513)
# Ends of float32, the regions of SCALE_MIN and ROPE_GUARD, and the range of real latents.
MAGNITUDES = (1e-45, 1.1754942e-38, 2.0**-105, 2.0**-96, 1e-12, 1e-3, 1.0, 10.0, 1e3, 1e30, 3e38)
SCALES = (SOFTMAX_SCALE, 192**-0.5, 0.1352337788608801, 1.0, 1e-6, 1e-38, 1e30)


def draw(seed: int, block_n: tuple[int, ...] = (64,)) -> DecodeSpec:
    """A problem from a seed: small, most lengths at an edge or below 1,500 tokens, a few long."""
    rng = np.random.default_rng([seed, 0xDEC0DE])
    heads = int(rng.choice(HEADS)) if rng.random() < 0.7 else int(rng.integers(1, 129))
    seq_len_q = int(rng.choice([1, 1, 1, 2, 2, 3, 4, 8]))
    while heads * seq_len_q > 512:
        seq_len_q = max(1, seq_len_q // 2)
    # The reference's cost is rows x tokens: keep a case near 0.3 s.
    budget = int(400_000 / (heads * seq_len_q + 64))
    lengths = _draw_lengths(rng, max(budget, 130))
    if rng.random() < 0.03:  # a few long ones: many rounds of every ring, and real balancing
        heads, seq_len_q = min(heads, 32), 1
        lengths = (int(rng.integers(2000, 12_001)), int(rng.choice(EDGES)))
    plain = rng.random() < 0.3
    pattern = "loud_tokens" if plain else str(rng.choice(PATTERNS))
    magnitude = float(rng.choice([1.0, 10.0]) if plain else rng.choice(MAGNITUDES))
    query = float(rng.choice([1.0, 10.0]) if plain else rng.choice(MAGNITUDES))
    if pattern in ("attention_sink", "rising", "falling", "cliff"):
        magnitude, query = float(rng.choice([1.0, 10.0])), float(rng.choice([1.0, 10.0]))
    mode = rng.integers(4)
    return DecodeSpec(
        seed=seed,
        num_heads_q=heads,
        seq_len_q=seq_len_q,
        lengths=lengths,
        pattern=pattern,
        magnitude=magnitude,
        query_magnitude=query,
        layout=str(rng.choice(LAYOUTS)),
        softmax_scale=SOFTMAX_SCALE if plain else float(rng.choice(SCALES)),
        causal=bool(rng.random() < 0.75),
        num_splits=int(rng.integers(1, 9)) if mode == 1 else None,
        batch_invariant=int(128 * rng.integers(1, 6)) if mode == 2 else 0,
        block_n=int(rng.choice(block_n)),
        num_sms=int(rng.choice([132, 132, 1, 7, 78, 160])) if mode == 3 else 132,
        spare_columns=int(rng.integers(0, 40)),
        plan_lengths=("own", *PLAN_LENGTHS)[seed % 4],
    )


def _draw_lengths(rng: np.random.Generator, budget: int) -> tuple[int, ...]:
    lengths: list[int] = []
    batch = int(rng.choice([1, 1, 2, 3, 4, 7, 12, 40]))
    for _ in range(batch):
        room = budget - sum(lengths)
        kind = rng.random()
        if kind < 0.45:
            length = int(rng.choice(EDGES))
        elif kind < 0.6:
            length = int(rng.integers(0, 20))
        else:
            length = int(rng.integers(0, min(1500, max(room, 1)) + 1))
        lengths.append(min(length, max(room, 0)))
    return tuple(lengths)


def smaller(spec: DecodeSpec) -> list[DecodeSpec]:
    """Simpler problems near this one, the boldest first: what shrinking tries."""
    found: list[DecodeSpec] = []
    count = len(spec.lengths)
    if count > 1:
        half = count // 2
        found += [replace(spec, lengths=spec.lengths[:half])]
        found += [replace(spec, lengths=spec.lengths[half:])]
        found += [
            replace(spec, lengths=spec.lengths[:i] + spec.lengths[i + 1 :]) for i in range(count)
        ]
    for i, length in enumerate(spec.lengths):
        for shorter in {length // 2, length - 64, length - 1}:
            if 0 <= shorter < length:
                lengths = (*spec.lengths[:i], shorter, *spec.lengths[i + 1 :])
                found.append(replace(spec, lengths=lengths))
    for name, value in (
        *(("seq_len_q", 1), ("num_heads_q", 1), ("num_heads_q", spec.num_heads_q // 2)),
        *(("num_splits", None), ("batch_invariant", 0), ("num_sms", 132), ("layout", "separate")),
        *(("pattern", "normal"), ("magnitude", 1.0), ("query_magnitude", 1.0)),
        *(("softmax_scale", SOFTMAX_SCALE), ("causal", True), ("spare_columns", 0)),
        ("plan_lengths", "own"),
    ):
        if value != 0 or name in ("batch_invariant", "spare_columns"):
            trial = replace(spec, **{name: value})  # type: ignore[arg-type]
            if trial != spec:
                found.append(trial)
    return found
