"""The drop-in faces on a GPU: bytes of the native API, eager and captured, and float64 attention.

The client (tests/dropin_client.py) knows the faces by their conventions alone. Everything is torch
tensors; without torch these tests are skipped.
"""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
from dropin_client import (
    PAGE,
    SCALE,
    Engine,
    FlashMLA,
    FluentLLM,
    Native,
    Numpy,
    Step,
    Torch,
    drive,
    run_step,
    same_bytes,
)

from snapmla_rt import api, torch_ops
from snapmla_rt.api_widen import widen_per_tensor
from snapmla_rt.compat import flash_mla, flash_mla_fp8
from snapmla_rt.driver.device import device_count
from snapmla_rt.reference.widen_per_tensor import rope_bits
from snapmla_rt.reference.widen_per_tensor import widen_per_tensor as reference_widen

torch: Any = pytest.importorskip("torch")
ABSURD = 2147480000
CUDA = Torch("cuda:0")
decode: Any = flash_mla.flash_mla_with_kvcache


def make(face: str, num_pages: int, library: Any = CUDA) -> Any:
    if face == "FluentLLM":
        return FluentLLM(library, num_pages)
    return FlashMLA(library, num_pages, face.partition(" ")[2])


FACES = ("FluentLLM", "FlashMLA tensors", "FlashMLA object")

# --- The client ----------------------------------------------------------------------------------


@pytest.mark.parametrize("face", FACES)
@pytest.mark.parametrize(
    ("batch", "count", "heads"),
    [(1, 1, 128), (2, 1, 16), (9, 7, 8), (33, 33, 20), (128, 100, 16)],
)
def test_a_client_gets_the_bytes_of_the_api(face: str, batch: int, count: int, heads: int) -> None:
    """Prefill, decode, verify, rollback, fetch at batch 1 to 128 with padded rows."""
    num_pages = 6 * count + 2
    engine = Engine(heads, num_pages, max_pages=6, seed=batch)
    drive(make(face, num_pages), Native(CUDA, num_pages), engine, batch, count)


class Captured:
    """A face as engines capture it: buffers that stay, one graph, data copied in before replays.

    FluentLLM and FlashMLA's two tensors: metadata made outside and copied into buffers that were
    made for more requests. FlashMLA's object: made inside, so that replays plan again.
    """

    def __init__(self, face: Any, heads: int, seq_len_q: int, batch: int, max_pages: int) -> None:
        self.face, self.heads, self.seq_len_q, self.batch = face, heads, seq_len_q, batch
        rows = batch * seq_len_q
        kind, ints = {"dtype": torch.bfloat16, "device": "cuda"}, {"device": "cuda"}
        self.key = torch.zeros(rows, 1, 576, **kind)
        self.q = torch.zeros(batch, seq_len_q, heads, 576, **kind)
        self.indices = torch.zeros(rows, dtype=torch.int32, **ints)
        self.table = torch.zeros(batch, max_pages, dtype=torch.int32, **ints)
        self.lengths = torch.full((batch,), seq_len_q, dtype=torch.int32, **ints)
        self.metadata: Any = None
        if getattr(face, "form", "") != "object":
            largest = torch.ones(batch + 31, dtype=torch.int32, device="cuda")
            self.metadata = face.metadata(largest, seq_len_q, heads)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.result = self.enqueue()

    def enqueue(self) -> Any:
        self.face.append(self.key, self.indices)
        return self.face.decode(self.q, self.table, self.lengths, self.metadata)

    def load(self, step: Step) -> None:
        for target, source in (
            (self.key, step.key),
            (self.q, step.q),
            (self.indices, step.indices),
            (self.table, step.table),
            (self.lengths, step.lengths),
        ):
            target.copy_(CUDA.put(source))
        if self.metadata is not None:
            fresh = self.face.metadata(self.lengths, self.seq_len_q, self.heads)
            self.metadata[0].copy_(fresh[0])
            self.metadata[1][: self.batch + 1].copy_(fresh[1])

    def replay(self, step: Step) -> Any:
        self.load(step)
        self.graph.replay()
        return self.result


@pytest.mark.parametrize("face", FACES)
@pytest.mark.parametrize(("seq_len_q", "heads"), [(1, 16), (4, 20)])
def test_captured_steps_equal_eager_ones(face: str, seq_len_q: int, heads: int) -> None:
    """One graph for a padded batch of 9, replayed with 1 to 9 requests: short, long, more and fewer
    splits than at its capture (lengths of 1)."""
    num_pages, max_pages, batch = 300, 40, 9
    captured = Captured(make(face, num_pages), heads, seq_len_q, batch, max_pages)
    twin = Native(CUDA, num_pages)
    engine = Engine(heads, num_pages, max_pages)
    # capture ran nothing: the pools still have the same bytes
    assert same_bytes(CUDA, captured.face.pool(), twin.pool())
    for turn, new in enumerate((1, 2000, 70, 0, 300, 5, 64, 1000, 63, 1)):
        if new and len(engine.requests) < batch:
            key, indices = engine.prefill(new)
            for one in (captured.face, twin):
                one.append(CUDA.put(key), CUDA.put(indices))
        step = engine.step(seq_len_q, batch, pad_page=turn % 2)
        got, want = captured.replay(step), run_step(twin, step)
        assert same_bytes(CUDA, got, want), (turn, new)
        if turn == 6:  # a long request ends
            long = engine.requests.pop(1)
            engine.free += long.pages
    assert same_bytes(CUDA, captured.face.pool(), twin.pool())


def test_graphs_of_several_padded_batches() -> None:
    """Graphs for batches of 1, 8 and 128 over one pool, as engines keep them."""
    num_pages, heads = 700, 16
    face, twin = make("FluentLLM", num_pages), Native(CUDA, num_pages)
    graphs = {batch: Captured(face, heads, 1, batch, 8) for batch in (1, 8, 128)}
    engine = Engine(heads, num_pages, 8)
    for count in (1, 2, 8, 9, 100, 128):
        while len(engine.requests) < count:
            key, indices = engine.prefill(int(engine.rng.integers(1, 250)))
            for one in (face, twin):
                one.append(CUDA.put(key), CUDA.put(indices))
        batch = min(size for size in graphs if size >= count)
        step = engine.step(1, batch)
        assert same_bytes(CUDA, graphs[batch].replay(step), run_step(twin, step)), count


def long_run(turns: int, batch: int, max_pages: int, heads: int) -> dict[str, Any]:
    """Inputs of many steps on the GPU: one new token a request, lengths and tables change."""
    generator = torch.Generator(device="cuda").manual_seed(3)

    def ints(high: int, *shape: int) -> Any:
        options = {"generator": generator, "device": "cuda", "dtype": torch.int32}
        return torch.randint(0, high, shape, **options)

    lengths = 1 + ints(PAGE * max_pages, turns, batch) // (1 + ints(60, turns, 1))
    pages = 1 + torch.arange(batch * max_pages, dtype=torch.int32, device="cuda")
    order = torch.argsort(torch.rand(turns, pages.numel(), generator=generator, device="cuda"))
    table = pages[order].view(turns, batch, max_pages)
    at = (lengths - 1).long()
    page = torch.gather(table, 2, (at // PAGE)[..., None])[..., 0]
    normal = {"generator": generator, "device": "cuda", "dtype": torch.bfloat16}
    return {
        "key": torch.randn(turns, batch, 1, 576, **normal),
        "q": torch.randn(turns, batch, 1, heads, 576, **normal),
        "indices": (page * PAGE + at % PAGE).int(),
        "table": table.contiguous(),
        "lengths": lengths.int(),
    }


def test_a_thousand_replays_equal_eager_calls() -> None:
    """Preparation, plan, decode and combine in one graph; nothing waits between the replays."""
    turns, batch, max_pages, heads = 1000, 9, 20, 16
    steps = long_run(turns, batch, max_pages, heads)
    num_pages = batch * max_pages + 1
    tokens = torch.randn(num_pages * PAGE, 1, 576, device="cuda").bfloat16()
    slots = torch.arange(num_pages * PAGE, device="cuda", dtype=torch.int32)
    faces = [make("FlashMLA object", num_pages) for _ in range(2)]
    for face in faces:
        face.append(tokens, slots)
    captured = Captured(faces[0], heads, 1, batch, max_pages)
    found = []
    for turn in range(turns):
        for name, values in steps.items():
            getattr(captured, name).copy_(values[turn])
        captured.graph.replay()
        found.append([part.clone() for part in captured.result])
    for turn, got in enumerate(found):
        one = {name: values[turn] for name, values in steps.items()}
        faces[1].append(one["key"], one["indices"])
        want = faces[1].decode(one["q"], one["table"], one["lengths"])
        assert same_bytes(CUDA, got, want), f"replay {turn}"
    assert same_bytes(CUDA, faces[0].pool(), faces[1].pool())


def test_an_object_filled_before_a_capture_is_planned_again_inside() -> None:
    """The plan of the warm-up would be stale in replays; so would one of another capture, and one
    that a capture recorded and never ran."""
    num_pages, heads = 60, 16
    face = make("FlashMLA object", num_pages)
    tokens = torch.randn(num_pages * PAGE, 1, 576, device="cuda").bfloat16()
    face.append(tokens, torch.arange(num_pages * PAGE, device="cuda", dtype=torch.int32))
    q = torch.randn(2, 1, heads, 576, device="cuda").bfloat16()
    table = 1 + torch.arange(56, dtype=torch.int32, device="cuda").view(2, 28)
    lengths = torch.tensor([64, 1], dtype=torch.int32, device="cuda")
    shared = flash_mla.get_mla_metadata()
    eager = face.decode(q, table, lengths, shared)
    assert same_bytes(CUDA, eager, face.decode(q, table, lengths))
    graphs = []
    for _ in range(2):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            first = face.decode(q, table, lengths, shared)
            second = face.decode(q, table, lengths, shared)  # another layer: planned once
        graphs.append((graph, first, second))
    assert same_bytes(CUDA, face.decode(q, table, lengths, shared), eager)
    for new in ((1700, 3), (64, 1), (1, 1792), (0, 0)):
        lengths.copy_(torch.tensor(new, dtype=torch.int32))
        want = face.decode(q, table, lengths)
        for graph, *results in graphs:
            graph.replay()
            assert all(same_bytes(CUDA, result, want) for result in results), new
        # torch knows that the lengths were changed in place
        assert same_bytes(CUDA, face.decode(q, table, lengths, shared), want), new


def test_first_calls_inside_a_capture() -> None:
    """A process whose very first calls are captured: nothing was compiled, loaded or planned."""
    from test_mla_decode_runtime import in_a_process

    script = """
import torch
from dropin_client import *
library = Torch("cuda:0")
engine = Engine(20, 30, 6)
step = None
for form in ("object", "tensors"):
    face, twin = FlashMLA(library, 30, form), Native(library, 30)
    step = step or (engine.prefill(1), engine.step(2, 3))[1]
    put = [library.put(a) for a in (step.key, step.indices, step.q, step.table, step.lengths)]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        face.append(*put[:2])
        result = face.decode(*put[2:])
    graph.replay()
    assert same_bytes(library, result, run_step(twin, step)), form
    assert same_bytes(library, face.pool(), twin.pool())
print("fine")
"""
    done = in_a_process(script)
    assert done.returncode == 0 and "fine" in done.stdout, done.stdout + done.stderr


# --- Streams, threads, devices, memory -----------------------------------------------------------


def test_two_threads_on_two_streams() -> None:
    """Each thread drives a face of its own on its own stream."""
    wrong: list[str] = []
    barrier = threading.Barrier(2)

    def work(face: str, seed: int) -> None:
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                barrier.wait()
                for turn in range(3):
                    engine = Engine(16 + 4 * seed, 60, 6, seed=10 * seed + turn)
                    drive(make(face, 60), Native(CUDA, 60), engine, 8, 7)
        except BaseException as error:
            wrong.append(f"{face}: {error!r}")

    threads = [
        threading.Thread(target=work, args=(face, seed))
        for seed, face in enumerate(("FluentLLM", "FlashMLA object"))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong, "\n".join(wrong)


def test_two_devices() -> None:
    """The device is that of the tensors, whatever torch's current one is."""
    if device_count() < 2:
        pytest.skip("one GPU")
    other = Torch("cuda:1")
    for face in FACES:
        engine = Engine(16, 60, 6)
        drive(make(face, 60, other), Native(other, 60), engine, 8, 7)
    mixed = make("FluentLLM", 10)
    engine = Engine(16, 10, 6)
    mixed.append(*(CUDA.put(a) for a in engine.prefill(5)))
    step = engine.step(1, 1)
    with pytest.raises(ValueError, match="cuda"):
        mixed.decode(CUDA.put(step.q), CUDA.put(step.table), other.put(step.lengths))


def filled_face(face: str, heads: int = 20) -> tuple[Any, Step]:
    """A face with two requests, and a step whose tokens are appended."""
    one, engine = make(face, 40), Engine(heads, 40, 20)
    for count in (900, 3):
        one.append(*(CUDA.put(a) for a in engine.prefill(count)))
    step = engine.step(2, 3)
    one.append(CUDA.put(step.key), CUDA.put(step.indices))
    return one, step


def test_nothing_is_allocated_when_everything_is_given() -> None:
    """out, lse and a workspace of the size asked for: torch's allocator is not called."""
    face, step = filled_face("FlashMLA tensors")
    q, table, lengths = (CUDA.put(a) for a in (step.q, step.table, step.lengths))
    parts, ends = face.metadata(lengths, 2, 20)
    want = face.decode(q, table, lengths)
    cache = face.cache()
    per_tensor = per_tensor_case(7)
    codes, one = per_tensor["k_cache"], torch.ones(1, device="cuda")
    q8 = q.clamp(-4, 4).to(torch.float8_e4m3fn)
    table8 = table.clamp(max=codes.shape[0] - 1)
    place = {"out": torch.empty_like(want[0]), "lse": torch.empty_like(want[1])}
    tail = (512, parts, ends, SCALE, True)
    sizes = [flash_mla.get_workspace_size(*a, parts) for a in ((q, cache), (q8, codes))]
    rooms = [torch.full((n,), 0xFF, dtype=torch.uint8, device="cuda") for n in sizes]
    query = flash_mla_fp8.quantize_ckv_per_token_head(q)
    own = torch.empty(
        flash_mla_fp8.get_workspace_size(query[0], parts), dtype=torch.uint8, device="cuda"
    )

    def calls() -> None:
        decode(q, cache, table, lengths, *tail, workspace=rooms[0], **place)
        scales = {"descale_q": one, "descale_k": one}
        decode(q8, codes, table8, lengths, *tail, workspace=rooms[1], **scales, **place)
        flash_mla_fp8.quantize_ckv_per_token_head(q, out=query)
        flash_mla_fp8.flash_mla_ckv_fp8_per_token(
            q_nope=query[0],
            q_rope=query[2],
            q_scale=query[1],
            k_cache_lora=cache[0],
            k_scale=cache[1],
            k_cache_rope=cache[2],
            block_table=table,
            cache_seqlens=lengths,
            tile_scheduler_metadata=parts,
            num_splits=ends,
            softmax_scale=SCALE,
            causal=True,
            workspace=own,
            **place,
        )

    calls()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    for _ in range(3):
        calls()
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
    assert same_bytes(CUDA, (place["out"], place["lse"]), want)


# --- Float64 -------------------------------------------------------------------------------------


def as_f64(codes: Any) -> Any:
    """e4m3 values in float64."""
    return codes.float().double()


def oracle(q: Any, kv: Any, k_scale: Any, visible: Any, softmax_scale: float) -> dict[str, Any]:
    """Attention in float64 on what the codes stand for, and how far FP8 may be from it.

    q [b, r, 576], kv [b, n, 576], k_scale [b, n], n a multiple of 64; visible [b, r]: tokens that a
    row sees. The bound, per element of out, with normalised weights w, f = w k_scale, v the values,
    c = v / k_scale their codes, F the largest f of a block of 64 tokens:
    - P = e4m3(448 f / F): half a step is 2^-4 of a normal P and 2^-10 of a subnormal one;
    - P V runs in two tensor-core steps of 33 addends, each cut to 2^-13 of the largest product or
      sum, and their results to 2^-13;
    - S runs in 16 such steps: no score moves by more than eta = 16 (33 + 1) 2^-13 of the sum of its
      products' magnitudes, no weight by more than 2 eta;
    - out is rounded to bf16: 2^-8.
    floor: the same attention with only P rounded.
    """
    seen = torch.arange(kv.shape[1], device=kv.device)[None, None] < visible[..., None]
    scores = softmax_scale * (q @ kv.mT)
    scores = scores.masked_fill(~seen, -torch.inf)
    empty = (visible <= 0)[..., None]
    top = scores.amax(-1, keepdim=True).masked_fill(empty, 0.0)
    w = torch.exp(scores - top)
    total = w.sum(-1, keepdim=True)
    w = torch.where(empty, torch.zeros_like(w), w / total)
    lse = torch.where(empty, torch.inf, top + torch.log(total))[..., 0]
    v = kv[..., :512]
    out = w @ v
    b, r, n = w.shape
    f = w * k_scale[:, None]
    largest = f.view(b, r, n // 64, 64).amax(-1)
    step = (largest / 448).repeat_interleave(64, -1)
    p = torch.where(step > 0, f / step, 0.0).float().clamp(max=448.0)
    codes = v / k_scale[..., None]
    floor = (as_f64(p.to(torch.float8_e4m3fn)) * step) @ codes
    blocks = codes.abs().view(b, n // 64, 64, 512)
    size = w @ v.abs()
    reach = (q.abs() @ kv.abs().mT).masked_fill(~seen, 0.0).amax(-1)
    eta = 16 * 34 * 2.0**-13 * softmax_scale * reach
    bound = (2.0**-4 + 68 * 2.0**-13 + 2.2 * eta[..., None]) * size
    bound += 2.0**-10 / 448 * (largest @ blocks.sum(2))
    bound += 66 * 2.0**-13 * (largest @ blocks.amax(2).clamp(min=2.0**-6))
    bound = 1.02 * bound + 2.0**-8 * (out.abs() + bound) + 1e-30
    return {"out": out, "lse": lse, "bound": bound, "floor": floor, "eta": eta}


def check_against_oracle(out: Any, lse: Any, want: dict[str, Any], visible: Any) -> None:
    """out and lse in [b, r, ...] order of rows."""
    got = out.double()
    assert torch.isfinite(got).all() and not torch.isnan(lse).any()
    none = visible <= 0
    assert (out[none] == 0).all() and torch.isposinf(lse[none]).all()
    assert torch.isfinite(lse[~none]).all()
    over = (got - want["out"]).abs() - want["bound"]
    assert (over <= 0).all(), f"out beyond its bound by {float(over.max())}"
    error = torch.linalg.vector_norm(got - want["out"])
    floor = torch.linalg.vector_norm(want["floor"] - want["out"])
    size = torch.linalg.vector_norm(want["out"])
    assert error <= 1.1 * floor + 2.0**-9 * size, "more than what rounding P and out costs"
    # FlashMLA's tolerance of lse; a row of one or two tokens is near a single score, whose own
    # error in FP8 does not average out: there the bound is that of the scores.
    tolerance = 1e-5 + 8.01 / 65536 * want["lse"].abs()
    tolerance = torch.where(visible <= 2, torch.maximum(tolerance, want["eta"]), tolerance)
    wrong = (lse.double() - want["lse"]).abs() > tolerance
    assert not (wrong & ~none).any(), "lse"


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


# --- Per-tensor caches ---------------------------------------------------------------------------


def per_tensor_case(seed: int, batch: int = 3, num_blocks: int = 40) -> dict[str, Any]:
    """Hostile arguments of widen_per_tensor on the GPU: pages apart, absurd ids, NaN codes."""
    rng = np.random.default_rng(seed)
    codes: Any = rng.integers(0, 256, (num_blocks, 64, 1, 576), dtype=np.uint8)
    if seed % 2 == 0:
        codes = codes & 0xF7  # no NaN code
    width = 20
    table = rng.integers(0, num_blocks, (batch, width)).astype(np.int32)
    lengths = rng.integers(0, 64 * width + 1, batch).astype(np.int32)
    lengths[0] = 64 * width
    used = -(-lengths // 64)
    table[np.arange(width)[None] >= used[:, None]] = ABSURD
    return {
        "k_cache": CUDA.put(codes).view(torch.float8_e4m3fn),
        "table": CUDA.put(table),
        "lengths": CUDA.put(lengths),
        "host": (codes[:, :, 0], table, lengths),
    }


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


# --- torch operators -----------------------------------------------------------------------------


def test_torch_operators_and_their_graphs() -> None:
    ops = torch_ops.register()
    face, step = filled_face("FluentLLM")
    planes = Native.planes(face)
    q, table, lengths = (CUDA.put(a) for a in (step.q, step.table, step.lengths))
    want = face.decode(q, table, lengths)

    def layer(q: Any, lengths: Any) -> Any:
        query = ops.quantize_q(q)
        parts, ends = ops.plan_decode(lengths, 20, 2)
        return ops.mla_decode(*query, *planes, table, lengths, parts, ends, SCALE)

    assert same_bytes(CUDA, layer(q, lengths), want)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    assert same_bytes(CUDA, compiled(q, lengths), want)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = layer(q, lengths)
    graph.replay()
    assert same_bytes(CUDA, captured, want)
    with pytest.raises(RuntimeError, match="no backward"):
        layer(q.clone().requires_grad_(), lengths)


def test_api_calls_agree_with_the_faces_on_another_stream() -> None:
    """Work of torch's current stream is waited for: q is written long after the call returns."""
    face, step = filled_face("FluentLLM")
    q, table, lengths = (CUDA.put(a) for a in (step.q, step.table, step.lengths))
    want = face.decode(q, table, lengths)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        late = torch.zeros_like(q)
        torch.cuda._sleep(20_000_000)
        late.copy_(q)
        got = face.decode(late, table, lengths)
        torch.cuda.current_stream().synchronize()
    assert same_bytes(CUDA, got, want)
    assert api.merge_states(*want, *want)[0].shape == want[0].shape
