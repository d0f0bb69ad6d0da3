"""The drop-in faces on a GPU: float64 attention, the failures that the peers' users reported, and
per-tensor caches. Everything is torch tensors; without torch these tests are skipped.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from dropin_client import PAGE, SCALE, Engine, Native, Numpy, same_bytes
from dropin_gpu import (
    ABSURD,
    CUDA,
    as_f64,
    check_against_oracle,
    filled_face,
    make,
    oracle,
    per_tensor_case,
)

from snapmla_rt.api_widen import widen_per_tensor
from snapmla_rt.compat import flash_mla, flash_mla_fp8
from snapmla_rt.reference.widen_per_tensor import rope_bits
from snapmla_rt.reference.widen_per_tensor import widen_per_tensor as reference_widen

torch: Any = pytest.importorskip("torch")
decode: Any = flash_mla.flash_mla_with_kvcache

# --- Float64 --------------------------------------------------------------------------------------


HEADS = (1, 3, 9, 63, 64, 126, 128)


class Dense:
    """A pool of 64 requests of 4,096 tokens, of FlashMLA's test distribution (N(0, 1) / 10 within
    +-1), in shuffled pages; NaN where nothing was written."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.batch, self.pages = 64, 64
        count = self.batch * self.pages
        self.face = make("FlashMLA tensors", count)
        self.table = torch.randperm(count, device="cuda", dtype=torch.int32).view(64, 64)
        shape = (count * PAGE, 1, 576)
        self.key = (torch.randn(shape, device="cuda") / 10).clamp(-1, 1).bfloat16()

    def fill(self, lengths: Any) -> None:
        """Exactly the tokens of these lengths, the rest NaN."""
        for plane in self.face.pool():
            plane.view(torch.uint8).fill_(0xFF)
        at = torch.arange(PAGE * self.pages, device="cuda")
        for row, length in enumerate(lengths.tolist()):
            if length:
                slots = self.table[row].long()[at[:length] // PAGE] * PAGE + at[:length] % PAGE
                first = row * PAGE * self.pages
                self.face.append(self.key[first : first + length], slots.int())

    def tokens(self, batch: int, num_tokens: int) -> tuple[Any, Any]:
        """(values [b, n, 576], scales [b, n]) of the first tokens, float64; 0 and 1 where none."""
        lora, scale, rope = self.face.pool()
        at = torch.arange(num_tokens, device="cuda")
        slots = self.table[:batch].long()[:, at // PAGE] * PAGE + at % PAGE
        k_scale = scale[slots, 0, 0].double()
        values = torch.cat(
            [as_f64(lora[slots, 0].view(torch.float8_e4m3fn)), rope[slots, 0].double()], -1
        )
        values = values * k_scale[..., None]
        unwritten = torch.isnan(k_scale)
        return values.masked_fill(unwritten[..., None], 0.0), k_scale.masked_fill(unwritten, 1.0)


@pytest.fixture(scope="module")
def dense() -> Dense:
    return Dense()


@pytest.mark.parametrize("num_tokens", [20, 140, 4096])
def test_the_dense_grid_against_float64(dense: Dense, num_tokens: int) -> None:
    """FlashMLA's public grid: b, s_q, h_q; lengths up to s_k, half the rows empty, NaN tails, an
    absurd id in every unused table entry."""
    generator = torch.Generator(device="cuda").manual_seed(num_tokens)
    random = {"generator": generator, "device": "cuda"}
    lengths = torch.randint(1, num_tokens + 1, (64,), dtype=torch.int32, **random)
    lengths[0] = num_tokens
    lengths[1::2] = 0
    dense.fill(lengths)
    used = -(-lengths // PAGE)
    absurd = torch.arange(64, device="cuda")[None] >= used[:, None]
    table = dense.table.masked_fill(absurd, ABSURD)
    padded = -(-num_tokens // 64) * 64
    kv, k_scale = dense.tokens(64, padded)
    for batch in (1, 6, 64):
        for seq_len_q in (1, 2, 4):
            for heads in HEADS:
                shape = (batch, seq_len_q, heads, 576)
                q = (torch.randn(shape, **random) / 10).clamp(-1, 1).bfloat16()
                own = lengths[:batch].contiguous()
                out, lse = dense.face.decode(q, table[:batch], own)
                q_nope, q_scale, q_rope = flash_mla_fp8.quantize_ckv_per_token_head(q)
                q64 = torch.cat([as_f64(q_nope), q_rope.double()], -1) * q_scale[..., None]
                rows = (batch, seq_len_q * heads)
                offset = torch.arange(seq_len_q, device="cuda") - seq_len_q + 1
                visible = own[:, None] + offset
                visible = visible.clamp(min=0).repeat_interleave(heads, 1)
                want = oracle(
                    q64.view(*rows, 576), kv[:batch], k_scale[:batch], visible, float(SCALE)
                )
                lse_rows = lse.transpose(1, 2).reshape(rows)
                check_against_oracle(out.view(*rows, 512), lse_rows, want, visible)


def test_a_growing_request(dense: Dense) -> None:
    """20 heads, 1 to 2,000 tokens in appends of 1 to 300: within the bound at every length."""
    rng = np.random.default_rng(0)
    length, ends = 0, []
    while length < 2000:
        length = min(2000, length + int(rng.integers(1, 301)))
        ends.append(length)
    dense.fill(torch.tensor([2000]))
    kv, k_scale = dense.tokens(1, 2048)
    for end in ends:
        q = (torch.randn(1, 1, 20, 576, device="cuda") / 10).bfloat16()
        own = torch.tensor([end], dtype=torch.int32, device="cuda")
        out, lse = dense.face.decode(q, dense.table[:1], own)
        q_nope, q_scale, q_rope = flash_mla_fp8.quantize_ckv_per_token_head(q)
        q64 = torch.cat([as_f64(q_nope), q_rope.double()], -1) * q_scale[..., None]
        visible = torch.full((1, 20), end, device="cuda")
        want = oracle(q64.view(1, 20, 576), kv, k_scale, visible, float(SCALE))
        check_against_oracle(out.view(1, 20, 512), lse.view(1, 20), want, visible)


def test_one_query_at_a_time_agrees_with_four(dense: Dense) -> None:
    """Positions 1 to 200: the last of four causal queries is the same attention as one query alone;
    no jump where a block of 64 begins."""
    lengths = torch.arange(1, 201, dtype=torch.int32, device="cuda")
    dense.fill(torch.tensor([200]))
    table = dense.table[:1].expand(200, 64).contiguous()
    q = (torch.randn(200, 4, 16, 576, device="cuda") / 10).bfloat16()
    four, lse_four = dense.face.decode(q, table, lengths)
    for back in range(4):
        alone, lse = dense.face.decode(q[:, 3 - back : 4 - back], table, (lengths - back).clamp(0))
        a, b = alone[:, 0].double(), four[:, 3 - back].double()
        error = torch.linalg.vector_norm(a - b, dim=(1, 2))
        size = torch.linalg.vector_norm(b, dim=(1, 2))
        assert (error <= 2.0**-7 * size).all(), f"{back} before the last: {error.max()}"
        same = torch.isclose(lse[:, :, 0], lse_four[:, :, 3 - back], rtol=1e-6, atol=1e-6)
        assert same.all()


# --- Known failures of the peers ------------------------------------------------------------------


@pytest.mark.parametrize("heads", [8, 16])
def test_metadata_for_nine_rows_serves_one_to_nine(heads: int) -> None:
    num_pages = 60
    face, twin = make("FluentLLM", num_pages), Native(CUDA, num_pages)
    buffers = face.metadata(torch.ones(9, dtype=torch.int32, device="cuda"), 1, heads)
    engine = Engine(heads, num_pages, 6)
    for count in range(1, 10):
        key, indices = engine.prefill(60 + 3 * count)
        step = engine.step(1, count)
        for one in (face, twin):
            one.append(CUDA.put(key), CUDA.put(indices))
            one.append(CUDA.put(step.key), CUDA.put(step.indices))
        arrays = [CUDA.put(a) for a in (step.q, step.table, step.lengths)]
        fresh = face.metadata(arrays[2], 1, heads)
        buffers[0].copy_(fresh[0])
        buffers[1][: count + 1].copy_(fresh[1])
        assert same_bytes(CUDA, face.decode(*arrays, buffers), twin.decode(*arrays)), count


@pytest.mark.parametrize("batch", [1, 7, 132, 133, 1000, 65536])
def test_all_lengths_zero(batch: int) -> None:
    face = make("FlashMLA tensors", 2)
    q = torch.full((batch, 1, 2, 576), torch.nan, device="cuda", dtype=torch.bfloat16)
    table = torch.full((batch, 2), ABSURD, dtype=torch.int32, device="cuda")
    zeros = torch.zeros(batch, dtype=torch.int32, device="cuda")
    place = {
        "out": torch.full((batch, 1, 2, 512), 123.0, device="cuda", dtype=torch.bfloat16),
        "lse": torch.full((batch, 2, 1), 123.0, device="cuda"),
    }
    parts, ends = face.metadata(zeros, 1, 2)
    decode(q, face.cache(), table, zeros, 512, parts, ends, SCALE, True, **place)
    assert (place["out"] == 0).all() and torch.isposinf(place["lse"]).all()


@pytest.mark.parametrize(("seq_len_q", "heads", "length"), [(1024, 16, 256), (200, 128, 300)])
def test_more_query_rows_than_the_gpu_holds(seq_len_q: int, heads: int, length: int) -> None:
    num_pages = 8
    face, twin = make("FlashMLA tensors", num_pages), Native(CUDA, num_pages)
    engine = Engine(heads, num_pages, 6)
    key, indices = engine.prefill(length)
    for one in (face, twin):
        one.append(CUDA.put(key), CUDA.put(indices))
    q = torch.randn(1, seq_len_q, heads, 576, device="cuda").bfloat16()
    table = CUDA.put(np.array([engine.requests[0].pages], np.int32))
    lengths = torch.tensor([length], dtype=torch.int32, device="cuda")
    parts, ends = face.metadata(lengths, seq_len_q, heads)
    assert parts.shape[0] >= 1
    got = face.decode(q, table, lengths, (parts, ends))
    assert same_bytes(CUDA, got, twin.decode(q, table, lengths))
    early = max(seq_len_q - length, 0)  # queries before the first token
    assert (got[0][0, :early] == 0).all() and torch.isposinf(got[1][0, :, :early]).all()


def test_a_nan_token_marks_the_rows_that_see_it() -> None:
    """Never lse +inf beside a finite out, and no other row. The last draft token is NaN."""
    face, step = filled_face("FlashMLA tensors")
    arrays = [CUDA.put(a) for a in (step.q, step.table, step.lengths)]
    want = face.decode(*arrays)
    nan = torch.full((1, 1, 576), torch.nan, device="cuda", dtype=torch.bfloat16)
    face.append(nan, CUDA.put(step.indices[1:2]))  # request 0, its second new token
    out, lse = face.decode(*arrays)
    assert torch.isnan(out[0, 1]).all() and torch.isnan(lse[0, :, 1]).all()
    assert same_bytes(CUDA, (out[0, 0], out[1:]), (want[0][0, 0], want[0][1:]))
    assert same_bytes(CUDA, (lse[0, :, 0], lse[1:]), (want[1][0, :, 0], want[1][1:]))


def test_garbage_lengths_of_a_dummy_run() -> None:
    """Batches of every size up to 40 with random lengths over a pool of NaN: every call ends."""
    face = make("FlashMLA tensors", 41)
    rng = np.random.default_rng(1)
    for batch in range(1, 41):
        lengths = CUDA.put(rng.integers(0, 40 * PAGE + 1, batch).astype(np.int32))
        table = CUDA.put(rng.integers(0, 41, (batch, 40)).astype(np.int32))
        q = torch.randn(batch, 1, 16, 576, device="cuda").bfloat16()
        _, lse = face.decode(q, table, lengths)
        wanted = torch.where(lengths == 0, torch.inf, torch.nan)
        assert (torch.isnan(lse[:, 0, 0]) == torch.isnan(wanted)).all()


def test_strided_arrays_are_right_or_refused() -> None:
    """q as a slice and transposed, a cache whose pages are further apart: the same bytes."""
    face, step = filled_face("FlashMLA tensors")
    q, table, lengths = (CUDA.put(a) for a in (step.q, step.table, step.lengths))
    want = face.decode(q, table, lengths)
    b, s, h, _ = q.shape
    wide = torch.zeros(b, s, h, 640, device="cuda", dtype=torch.bfloat16)
    wide[..., :576] = q
    swapped = q.transpose(0, 1).contiguous().transpose(0, 1)
    for other in (wide[..., :576], swapped):
        assert same_bytes(CUDA, face.decode(other, table, lengths), want)
    apart = []
    for plane in face.cache():
        big = torch.zeros(plane.shape[0], 128, *plane.shape[2:], dtype=plane.dtype, device="cuda")
        big[:, :64] = plane
        apart.append(big[:, :64])
    parts, ends = face.metadata(lengths, s, h)
    got = decode(q, tuple(apart), table, lengths, 512, parts, ends, SCALE, True)
    assert same_bytes(CUDA, got, want)
    odd = [apart[0][..., ::2], *apart[1:]]
    with pytest.raises(ValueError, match="k_cache"):
        decode(q, tuple(odd), table, lengths, 512, parts, ends, SCALE, True)


def test_a_page_far_beyond_32_bits() -> None:
    """Records 1,040,000 bytes apart: page 2,143 begins beyond 2^31 bytes."""
    face, step = filled_face("FlashMLA tensors")
    q, table, lengths = (CUDA.put(a) for a in (step.q, step.table, step.lengths))
    want = face.decode(q, table, lengths)
    step_bytes, count = 1_040_000, 2144
    memory = torch.full((step_bytes * count,), 0xFF, dtype=torch.uint8, device="cuda")
    pages = memory.as_strided((count, 64, 1, 644), (step_bytes, 644, 644, 1))
    records = pages[:, :, 0].view(count, 41216)
    lora, scale, rope = (a.view(40, -1).view(torch.uint8) for a in face.pool())
    far = torch.arange(40, device="cuda")
    records[2143 - far] = torch.cat([lora, rope, scale], 1)
    parts, ends = face.metadata(lengths, 2, 20)
    used = torch.arange(table.shape[1], device="cuda")[None] * PAGE < lengths[:, None]
    moved = torch.where(used, 2143 - table, table)
    got = decode(q, pages, moved, lengths, 512, parts, ends, SCALE, True)
    assert same_bytes(CUDA, got, want)


# --- Per-tensor caches ----------------------------------------------------------------------------


@pytest.mark.parametrize(("seed", "batch"), [(0, 3), (1, 1), (2, 700), (3, 5000)])
def test_widening_equals_the_reference(seed: int, batch: int) -> None:
    """Every byte, also of pages that nobody sees; more columns than CTAs at large batches."""
    case = per_tensor_case(seed, batch)
    codes, table, lengths = case["host"]
    descale = np.array([0.5 + seed], np.float32)
    want_rope = np.full((len(codes), 64, 64), 0xA5A5, np.uint16)
    want_scale = np.zeros(64, np.float32)
    reference_widen(codes, table, lengths, descale, want_rope, want_scale)
    q = np.random.default_rng(9).integers(0, 256, (batch, 2, 5, 576), dtype=np.uint8)
    rope = CUDA.put(np.full((len(codes), 64, 64), 0xA5A5, np.uint16).view(np.int16))
    rope = rope.view(torch.bfloat16)
    scale = torch.zeros(64, device="cuda")
    q_rope = torch.zeros(batch, 2, 5, 64, dtype=torch.bfloat16, device="cuda")
    q_scale = torch.zeros(batch, 2, 5, device="cuda")
    wide = torch.zeros(batch, 2, 5, 640, dtype=torch.uint8, device="cuda")
    wide[..., :576] = CUDA.put(q)
    query = (wide[..., :576], CUDA.put(descale), q_rope, q_scale)
    apart = torch.zeros(len(codes), 65, 592, dtype=torch.uint8, device="cuda")
    apart[:, :64, :576] = CUDA.put(np.ascontiguousarray(codes))
    cache = apart[:, :64, :576]
    arrays = (cache, case["table"], case["lengths"], CUDA.put(descale), rope, scale)
    widen_per_tensor(*arrays, query=query)
    assert (rope.view(torch.int16).cpu().numpy().view(np.uint16) == want_rope).all()
    assert (scale.cpu().numpy() == want_scale).all()
    assert (q_rope.view(torch.int16).cpu().numpy().view(np.uint16) == rope_bits(q)).all()
    assert (q_scale.cpu().numpy() == descale[0]).all()


@pytest.mark.parametrize("e4m3_query", [True, False])
def test_per_tensor_decode_equals_the_reference(e4m3_query: bool) -> None:
    """vLLM's cache through the face, on the GPU and by the reference; captured too."""
    case = per_tensor_case(2, batch=3)
    codes, table, lengths = case["host"]
    generator = np.random.default_rng(5)
    q = generator.standard_normal((3, 2, 9, 576)).astype(np.float32)
    host_q: Any = CUDA.host(torch.from_numpy(q).to(torch.bfloat16))
    if e4m3_query:
        host_q = CUDA.host(torch.from_numpy(q).to(torch.float8_e4m3fn))
    scales = {"descale_k": np.array([2.0**-7], np.float32)}
    if e4m3_query:
        scales["descale_q"] = np.array([0.25], np.float32)
    on_gpu = {name: CUDA.put(scale) for name, scale in scales.items()}
    parts, ends = flash_mla.get_mla_metadata(case["lengths"], 18, 1)
    tail = (512, parts, ends, SCALE, True)
    arrays = (CUDA.put(host_q), case["k_cache"], case["table"], case["lengths"])
    got = decode(*arrays, *tail, **on_gpu)
    host = (512, CUDA.host(parts), CUDA.host(ends), SCALE, True)
    want = decode(host_q, codes[:, :, None], table, lengths, *host, **scales)
    assert same_bytes(Numpy(), [CUDA.host(part) for part in got], want)
    assert np.isfinite(want[1][lengths > 2]).all()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = decode(*arrays, *tail, **on_gpu)
    graph.replay()
    assert same_bytes(CUDA, captured, got)
