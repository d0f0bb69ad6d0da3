"""The drop-in faces on a GPU: bytes of the native API, eager and captured; streams and memory.

The client (tests/dropin_client.py) knows the faces by their conventions alone. Everything is torch
tensors; without torch these tests are skipped.
"""

from __future__ import annotations

import threading
from typing import Any

import pytest
from dropin_client import PAGE, SCALE, Engine, Native, Step, Torch, drive, run_step, same_bytes
from dropin_gpu import CUDA, FACES, filled_face, make, per_tensor_case

from snapmla_rt import api, torch_ops
from snapmla_rt.compat import flash_mla, flash_mla_fp8
from snapmla_rt.driver.device import device_count

torch: Any = pytest.importorskip("torch")
decode: Any = flash_mla.flash_mla_with_kvcache

# --- The client -----------------------------------------------------------------------------------


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


# --- Streams, threads, devices, memory ------------------------------------------------------------


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


# --- torch operators ------------------------------------------------------------------------------


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
