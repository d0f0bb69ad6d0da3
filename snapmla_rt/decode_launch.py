"""From checked arrays to the launches of the decode stages: grids, tensor maps, parameter values.

Nothing here checks what a caller gave or synchronises; the API does that before.

Dependent launches. plan_decode, mla_decode and mla_combine are launched with programmatic stream
serialisation: a kernel may become resident while its predecessor still runs. Why no kernel can read
too early or overwrite too early:

1. Every one of them, and every kernel of the data movement, executes griddepcontrol.wait in every
   thread before it touches global memory, but for two cases of mla_combine below. The wait returns
   when the predecessor on the stream has completed and its writes are visible, whenever the
   predecessor signalled launch_dependents.
   mla_decode signals after its last loads are issued and mla_combine once it has waited: both only
   decide when the successor may become resident. mla_combine reads num_splits before its wait: it
   becomes resident when mla_decode has signalled, which mla_decode does after its own wait, so
   plan_decode and everything else before mla_decode has completed by then. And its warps that find
   nothing to merge, which touch nothing else, end without a wait, but for those of its first CTA.
2. So a kernel completes only after its predecessor has completed (of mla_combine the first CTA sees
   to that), and by induction after everything before it on the stream. In particular the mla_decode
   of the next layer, or of the next step, writes out, o_accum and lse_accum only after the
   mla_combine that read them has completed: it is safe to use one workspace for all layers of a
   stream. (Two streams need one workspace each.)
3. A predecessor of another library, launched the ordinary way, signals at its end: then the wait is
   for its end. One that uses dependent launches itself must wait for its own predecessor before it
   ends, as the libraries that do so do; one that does not breaks the chain for everybody.
4. No deadlock: successors become resident only when all CTAs of the predecessor have signalled or
   ended, so none of its CTAs can be kept out by a waiting successor.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .config import BLOCK_SIZE, FLT_MIN_NORMAL, KV_LORA_RANK, LOG2E, MAX_CACHE_SEQLEN, TILE_M
from .config import QK_ROPE_HEAD_DIM as ROPE_DIM
from .decode_select import combine_ctas, decode_variant
from .plan import DecodePlan, PlanConfig
from .tensor import TensorView

if TYPE_CHECKING:
    from .driver.launch import Kernel, PreparedLaunch

FLT_MAX = 3.4028234663852886e38
LATENT_CHUNK = 128  # bytes of a latent row that one swizzled line holds
NO_TRACE = (0, -1, -1)
WORKSPACE_ALIGNMENT = 16


@dataclass(frozen=True)
class DecodeArrays:
    """The checked arrays of one decode call; out, lse and workspace as in the API."""

    q_nope: TensorView
    q_rope: TensorView
    q_scale: TensorView
    ckv: TensorView
    k_scale: TensorView
    k_rope: TensorView
    block_table: TensorView
    cache_seqlens: TensorView
    out: TensorView
    lse: TensorView

    @property
    def device_index(self) -> int:
        return self.q_nope.device_index

    @property
    def batch(self) -> int:
        return self.q_nope.shape[0]

    @property
    def num_rows(self) -> int:
        return self.q_nope.shape[1] * self.q_nope.shape[2]


class PlanOnDevice:
    """A plan's buffers on a GPU. Equal buffers and numbers share one object, so that it can stand
    for the plan in the key of a prepared call."""

    __slots__ = ("batch", "config", "device_index", "max_seqlen", "num_splits", "parts", "splits")

    def __init__(
        self, plan: DecodePlan, parts: TensorView, num_splits: TensorView, device_index: int
    ) -> None:
        self.config = plan.config
        self.batch = plan.batch
        self.max_seqlen = MAX_CACHE_SEQLEN if plan.max_seqlen is None else plan.max_seqlen
        self.device_index = device_index
        self.parts = parts.ptr
        self.num_splits = num_splits.ptr
        self.splits: dict[int, int] = {}  # block-table width -> most splits

    def max_splits(self, table_width: int) -> int:
        """Most splits that the plan can have with lengths that such a block table can hold."""
        found = self.splits.get(table_width)
        if found is None:
            longest = min(self.max_seqlen, table_width * BLOCK_SIZE)
            found = self.config.max_total_splits(self.batch, longest)
            self.splits[table_width] = found
        return found


_plans: dict[Any, PlanOnDevice] = {}
_MAX_PLANS = 4096


def plan_on_device(
    plan: DecodePlan, parts: TensorView, num_splits: TensorView, device_index: int
) -> PlanOnDevice:
    """The shared PlanOnDevice of these buffers."""
    key = (plan.config, plan.batch, plan.max_seqlen, device_index, parts.ptr, num_splits.ptr)
    found = _plans.get(key)
    if found is None:
        if len(_plans) >= _MAX_PLANS:
            _plans.clear()  # prepared calls keep what they need
        found = _plans.setdefault(key, PlanOnDevice(plan, parts, num_splits, device_index))
    return found


# --- Workspace -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class WorkspaceLayout:
    """Offsets in bytes: o_accum f32 [splits][rows][512], lse_accum f32 [splits][rows], and an lse
    f32 [batch][rows] for calls that return none."""

    lse_accum: int
    lse: int
    nbytes: int


def workspace_layout(
    config: PlanConfig, batch: int, splits: int, *, with_lse: bool = True
) -> WorkspaceLayout:
    """Layout for at most `splits` splits; a plan that cannot split (splits == batch) needs none."""
    rows = config.num_heads_q * config.seq_len_q
    partial = splits if splits > batch else 0
    lse_accum = partial * rows * KV_LORA_RANK * 4
    lse = _round_up(lse_accum + partial * rows * 4)
    return WorkspaceLayout(lse_accum, lse, lse + _round_up(batch * rows * 4) * with_lse)


def _round_up(nbytes: int) -> int:
    return -(-nbytes // WORKSPACE_ALIGNMENT) * WORKSPACE_ALIGNMENT


# --- Kernels -------------------------------------------------------------------------------------


def load_kernel(name: str, variant: str, device_index: int) -> Kernel:
    """A kernel of the table; found in memory after its first use."""
    from .kernels import kernel

    return kernel(name, variant, device_index)


def plan_values(
    config: PlanConfig, batch: int, cache_seqlens: int, parts: int, num_splits: int
) -> tuple[Any, ...]:
    """PlanDecodeParams."""
    return (
        cache_seqlens,
        parts,
        num_splits,
        batch,
        config.num_parts,
        config.block_n,
        config.overhead_blocks,
        config.remainder_blocks,
        config.num_splits or 0,
        config.split_tokens // config.block_n,
    )


def launch_plan(
    config: PlanConfig,
    cache_seqlens: TensorView,
    parts: TensorView,
    num_splits: TensorView,
    stream: int,
) -> None:
    batch = cache_seqlens.shape[0]
    values = plan_values(config, batch, cache_seqlens.ptr, parts.ptr, num_splits.ptr)
    plan = load_kernel("plan_decode", "", cache_seqlens.device_index)
    plan.launch((1, 1, 1), stream, *values, pdl=True)


def decode_launches(
    arrays: DecodeArrays,
    plan: PlanOnDevice,
    workspace: int,
    softmax_scale: float,
    causal: bool,
    stream: int,
    *,
    debug: bool = False,
    trace: tuple[int, int, int] = NO_TRACE,
    pdl: bool = True,
) -> tuple[PreparedLaunch, ...]:
    """The launches of one decode call, in order: mla_decode, and mla_combine where the plan can
    split a request. workspace: address of the memory of `workspace_layout`; trace: (address of the
    buffer of cuda_src/mla_decode/trace.cuh, request, block), which chooses the tracing variant.
    """
    config = plan.config
    splits = plan.max_splits(arrays.block_table.shape[1])
    layout = workspace_layout(config, plan.batch, splits)
    o_accum, lse_accum = workspace, workspace + layout.lse_accum
    tracing = trace is not NO_TRACE
    variant = decode_variant(arrays.num_rows, config.block_n, debug=debug or tracing, trace=tracing)
    decode = load_kernel("mla_decode", variant, arrays.device_index)
    launches = [
        decode.prepare(
            (config.num_row_tiles, config.num_parts, 1),
            stream,
            *_decode_values(arrays, plan, (o_accum, lse_accum), softmax_scale, causal, trace),
            pdl=pdl,
        )
    ]
    if splits > plan.batch:
        launches.append(_prepare_combine(arrays, plan, o_accum, lse_accum, stream, pdl))
    return tuple(launch for launch in launches if launch is not None)


def _decode_values(
    arrays: DecodeArrays,
    plan: PlanOnDevice,
    accum: tuple[int, int],
    softmax_scale: float,
    causal: bool,
    trace: tuple[int, int, int],
) -> tuple[Any, ...]:
    """MlaDecodeParams."""
    config, table = plan.config, arrays.block_table
    return (
        *_tensor_maps(arrays),
        arrays.q_scale.ptr,
        table.ptr,
        table.strides[0] // table.itemsize,
        arrays.cache_seqlens.ptr,
        plan.parts,
        plan.num_splits,
        arrays.out.ptr,
        arrays.lse.ptr,
        *accum,
        trace[0],
        logit_factor(softmax_scale),
        arrays.num_rows,
        config.num_heads_q,
        config.seq_len_q,
        int(causal),
        arrays.ckv.shape[0],
        int(block_stride(arrays.k_scale) != 0),
        config.num_splits or 0,
        config.split_tokens // config.block_n,
        *trace[1:],
    )


def logit_factor(softmax_scale: float) -> float:
    """softmax_scale * log2 e within the normal range of float32 ([S0]); packing rounds it."""
    return min(max(softmax_scale * LOG2E, FLT_MIN_NORMAL), FLT_MAX)


def _prepare_combine(
    arrays: DecodeArrays, plan: PlanOnDevice, o_accum: int, lse_accum: int, stream: int, pdl: bool
) -> PreparedLaunch | None:
    from .driver.device import device_info

    rows, config = arrays.num_rows, plan.config
    ctas = combine_ctas(device_info(arrays.device_index).num_sms, plan.batch, rows)
    values = (o_accum, lse_accum, plan.num_splits, arrays.out.ptr, arrays.lse.ptr, plan.batch)
    shape = (rows, config.num_heads_q, config.seq_len_q)
    combine = load_kernel("mla_combine", "", arrays.device_index)
    return combine.prepare((ctas, 1, 1), stream, *values, *shape, pdl=pdl)


def block_stride(plane: TensorView) -> int:
    """Bytes from block to block; of a single block its own size."""
    if plane.shape[0] > 1:
        return plane.strides[0]
    return plane.strides[1] * plane.shape[1]


def row_strides(query: TensorView) -> tuple[int, int] | None:
    """(bytes from row to row, from request to request) of [b, s_q, h, width] whose query tokens and
    heads form one run of rows; None where they do not."""
    batch, seq_len_q, heads, width = query.shape
    per_token, per_head = query.strides[1:3]
    if heads > 1 and seq_len_q > 1 and per_token != heads * per_head:
        return None
    row = per_head if heads > 1 else per_token if seq_len_q > 1 else width * query.itemsize
    return row, query.strides[0] if batch > 1 else seq_len_q * heads * row


def _tensor_maps(arrays: DecodeArrays) -> tuple[bytes, bytes, bytes, bytes, bytes]:
    """ckv_map, rope_map, q_nope_map, q_rope_map, 128-byte swizzled boxes of 64 tokens or rows, and
    k_scale_map."""
    from .driver import tensor_map

    encode_tiled = functools.partial(tensor_map.encode_tiled, device_index=arrays.device_index)
    blocks, rows, batch = arrays.ckv.shape[0], arrays.num_rows, arrays.batch
    rope_bytes = 2 * ROPE_DIM
    # No promotion to larger L2 fetches: every byte is asked for by these loads anyway, and with
    # promotion to 256 bytes an H200 delivers 7 % less.
    load_kv = functools.partial(encode_tiled, l2_promotion="none")
    ckv = load_kv(
        "uint8",
        arrays.ckv.ptr,
        (LATENT_CHUNK, BLOCK_SIZE, KV_LORA_RANK // LATENT_CHUNK, blocks),
        (arrays.ckv.strides[1], LATENT_CHUNK, block_stride(arrays.ckv)),
        (LATENT_CHUNK, BLOCK_SIZE, KV_LORA_RANK // LATENT_CHUNK, 1),
    )
    rope = load_kv(
        "bfloat16",
        arrays.k_rope.ptr,
        (ROPE_DIM, BLOCK_SIZE, blocks),
        (rope_bytes, block_stride(arrays.k_rope)),
        (ROPE_DIM, BLOCK_SIZE, 1),
    )
    q_nope, q_rope = row_strides(arrays.q_nope), row_strides(arrays.q_rope)
    assert q_nope is not None and q_rope is not None
    nope_dims, rope_dims = (KV_LORA_RANK, rows, batch), (ROPE_DIM, rows, batch)
    return (
        ckv,
        rope,
        encode_tiled("uint8", arrays.q_nope.ptr, nope_dims, q_nope, (LATENT_CHUNK, TILE_M, 1)),
        encode_tiled("bfloat16", arrays.q_rope.ptr, rope_dims, q_rope, (ROPE_DIM, TILE_M, 1)),
        _scale_map(arrays, load_kv),
    )


def _scale_map(arrays: DecodeArrays, encode: Any) -> bytes:
    """Tensor map of the scales; one line of them where it serves every block (stride 0)."""
    stride = block_stride(arrays.k_scale)
    lines = arrays.ckv.shape[0] if stride else 1
    dims, strides = (BLOCK_SIZE, lines), (stride or 4 * BLOCK_SIZE,)
    found: bytes = encode(
        "float32", arrays.k_scale.ptr, dims, strides, (BLOCK_SIZE, 1), swizzle="none"
    )
    return found
