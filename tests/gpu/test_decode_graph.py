"""CUDA graphs: preparation, plan, decode and combine captured once and replayed with other lengths,
tables and tokens in place give what eager calls give; dependent launches keep their order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from decode_cases import DecodeSpec, build, draw
from decode_gpu import OnGpu, Result, filled, planes_on_gpu, put, report, run

from snapmla_rt import api
from snapmla_rt.array import to_host
from snapmla_rt.driver import memory
from snapmla_rt.driver.graph import Graph
from snapmla_rt.plan import DecodePlan
from snapmla_rt.reference.append_kv import append_kv as reference_append
from snapmla_rt.reference.mla_decode import mla_decode as reference_decode
from snapmla_rt.reference.plan_decode import plan_decode as reference_plan
from snapmla_rt.reference.quantize_q import quantize_q as reference_quantize
from snapmla_rt.tensor import TensorView

mla_decode: Any = api.mla_decode  # called with its eight arrays as one sequence
prepare: Any = api.prepare
BLOCK = 64
SCALE = 576**-0.5
MAX_BATCH, MAX_BLOCKS, POOL = 9, 40, 160


def write(target: TensorView, array: np.ndarray, stream: int) -> None:
    """Overwrite a GPU array in place."""
    source = np.ascontiguousarray(array)
    assert source.nbytes == target.nbytes
    address = source.__array_interface__["data"][0]
    memory.copy_to_device(target.ptr, address, source.nbytes, 0, stream)
    memory.synchronize(stream, 0)


@dataclass
class Step:
    """What changes from replay to replay; padded rows have length 0, slot -1, absurd tables."""

    q: np.ndarray
    kv_c: np.ndarray
    k_pe: np.ndarray
    slots: np.ndarray
    table: np.ndarray
    lengths: np.ndarray


class Model:
    """One layer's cache and buffers, sized for MAX_BATCH requests, on the GPU and beside it."""

    def __init__(self, heads: int, seq_len_q: int, seed: int, **mode: Any) -> None:
        self.rng = np.random.default_rng(seed)
        self.heads, self.seq_len_q, self.mode = heads, seq_len_q, mode
        spec = DecodeSpec(seed, heads, seq_len_q, (BLOCK * POOL,), layout="record")
        case = build(spec)  # every block of the pool holds tokens
        self.host = case.paged
        self.buffer = put(case.buffers[0])
        self.paged = planes_on_gpu([self.buffer], "record")
        self.pool = case.paged[0].shape[0]
        b, s, h, n = MAX_BATCH, seq_len_q, heads, MAX_BATCH * seq_len_q
        self.q = filled((b, s, h, 576), "float32", 0)
        self.kv_c, self.k_pe = filled((n, 512), "float32", 0), filled((n, 64), "float32", 0)
        self.slots = filled((n,), "int64", 0xFF)
        self.table = filled((b, MAX_BLOCKS), "int32", 0xFF)
        self.lengths = filled((b,), "int32", 0)
        self.query = (
            filled((b, s, h, 512), "float8_e4m3fn", 0xA5),
            filled((b, s, h, 64), "bfloat16", 0xA5),
            filled((b, s, h), "float32", 0xA5),
        )
        self.out = filled((b, s, h, 512), "bfloat16", 0xA5)
        self.lse = filled((b, h, s), "float32", 0xA5)
        self.plan: DecodePlan = api.plan_decode(self.lengths, heads, seq_len_q, **mode)
        size = api.decode_workspace_size(self.plan, MAX_BATCH, BLOCK * MAX_BLOCKS)
        self.workspace = filled((size,), "uint8", 0xFF)

    def step(self, batch: int, longest: int) -> Step:
        """A step of `batch` requests with their own blocks, and padding after them."""
        rng, s = self.rng, self.seq_len_q
        lengths = np.zeros(MAX_BATCH, np.int32)
        lengths[:batch] = rng.integers(s, max(longest, s + 1), batch)
        table = np.full((MAX_BATCH, MAX_BLOCKS), 2**31 - 1, np.int32)
        free = rng.permutation(self.pool)
        slots = np.full(MAX_BATCH * s, -1, np.int64)
        for req in range(batch):
            count = -(-int(lengths[req]) // BLOCK)
            table[req, :count], free = free[:count], free[count:]
            new = np.arange(lengths[req] - s, lengths[req])
            slots[req * s : (req + 1) * s] = (
                table[req, new // BLOCK].astype(np.int64) * BLOCK + new % BLOCK
            )
        shape = (MAX_BATCH, s, self.heads, 576)
        q = rng.standard_normal(shape).astype(np.float32)
        kv = rng.standard_normal((MAX_BATCH * s, 576)).astype(np.float32)
        return Step(q, kv[:, :512].copy(), kv[:, 512:].copy(), slots, table, lengths)

    def load(self, step: Step, stream: int) -> None:
        for target, array in (
            (self.q, step.q),
            (self.kv_c, step.kv_c),
            (self.k_pe, step.k_pe),
            (self.slots, step.slots),
            (self.table, step.table),
            (self.lengths, step.lengths),
        ):
            write(target, array, stream)

    def enqueue(self, stream: int) -> None:
        """Plan, preparation, decode, combine: everything of a step."""
        api.plan_decode(
            self.lengths, self.heads, self.seq_len_q, out=self.plan, stream=stream, **self.mode
        )
        new = (self.q, self.kv_c, self.k_pe, *self.paged, self.slots)
        prepare(*new, out=self.query, stream=stream, pdl=True)
        mla_decode(
            *(*self.query, *self.paged, self.table, self.lengths),
            self.plan,
            SCALE,
            out=self.out,
            lse=self.lse,
            workspace=self.workspace,
            stream=stream,
        )

    def results(self, stream: int) -> Result:
        return to_host(self.out, stream).view(np.uint16), to_host(self.lse, stream)

    def expected(self, step: Step) -> Result:
        """The same step by the reference, on the host's cache."""
        reference_append(step.kv_c, step.k_pe, *self.host, step.slots)
        query = reference_quantize(step.q)
        options = {**self.mode, "num_sms": self.plan.config.num_sms}
        plan = reference_plan(step.lengths, self.heads, self.seq_len_q, **options)
        out, lse = reference_decode(*query, *self.host, step.table, step.lengths, plan, SCALE)
        return out.view(np.uint16), lse


@pytest.mark.parametrize(
    ("heads", "seq_len_q", "mode"),
    [(8, 1, {}), (16, 2, {}), (64, 1, {"num_splits": 3}), (20, 4, {"batch_invariant": 128})],
)
def test_replays_equal_the_reference(heads: int, seq_len_q: int, mode: dict[str, Any]) -> None:
    """Captured at short lengths, so with few splits; replayed with more and fewer requests, longer
    and shorter, other tables and other tokens, all changed in place."""
    model = Model(heads, seq_len_q, seed=heads, **mode)
    stream = memory.Stream(0)
    first = model.step(2, 70)
    model.load(first, stream.handle)
    model.enqueue(stream.handle)
    text = report(model.results(stream.handle), model.expected(first))
    assert text is None, f"eager\n{text}"
    graph = Graph(0)
    with graph.capture(stream.handle):
        model.enqueue(stream.handle)
    for turn, (batch, longest) in enumerate(
        ((2, 70), (9, 800), (1, 2500), (0, 0), (5, 64), (9, 900), (3, 2000), (7, 300))
    ):
        step = model.step(batch, longest)
        model.load(step, stream.handle)
        graph.launch(stream.handle)
        text = report(model.results(stream.handle), model.expected(step))
        assert text is None, f"replay {turn}: {batch} requests up to {longest}\n{text}"


def test_replays_equal_eager_calls() -> None:
    """A hundred replays against eager calls of the same step, without a wait between the two."""
    model, eager = Model(16, 1, seed=5), Model(16, 1, seed=5)
    stream = memory.Stream(0)
    step = model.step(3, 100)
    for one in (model, eager):
        one.load(step, stream.handle)
        one.enqueue(stream.handle)
    graph = Graph(0)
    with graph.capture(stream.handle):
        model.enqueue(stream.handle)
    rng = np.random.default_rng(0)
    for turn in range(100):
        batch, longest = int(rng.integers(0, 10)), int(rng.integers(1, 850))
        step = model.step(batch, longest)
        for one in (model, eager):
            one.load(step, stream.handle)
        graph.launch(stream.handle)
        eager.enqueue(stream.handle)
        text = report(model.results(stream.handle), eager.results(stream.handle))
        assert text is None, f"turn {turn}\n{text}"


def test_first_call_inside_a_capture() -> None:
    """A call whose kernels were never loaded can be captured: loading is no part of the graph."""
    from test_mla_decode_runtime import in_a_process

    script = """
from decode_cases import *
from decode_gpu import *
from snapmla_rt.driver import memory
from snapmla_rt.driver.graph import Graph
import numpy as np
case = build(DecodeSpec(0, 20, 1, (300, 65), num_splits=2))
on_gpu, stream, graph = OnGpu(case), memory.Stream(0), Graph(0)
plan = api.plan_decode(on_gpu.cache_seqlens, 20, 1, num_splits=2)
out, lse = on_gpu.results()
room = on_gpu.workspace(plan)
with graph.capture(stream.handle):
    api.plan_decode(on_gpu.cache_seqlens, 20, 1, num_splits=2, out=plan, stream=stream.handle)
    on_gpu.enqueue(plan, stream.handle, out=out, lse=lse, workspace=room)
for _ in range(2):
    graph.launch(stream.handle)
got = to_host(out, stream.handle).view(np.uint16), to_host(lse, stream.handle)
want = case.expected()
assert report(got, (want[0].view(np.uint16), want[1])) is None
print("fine")
"""
    done = in_a_process(script)
    assert done.returncode == 0 and "fine" in done.stdout, done.stdout + done.stderr


def test_layers_that_share_buffers_do_not_overtake_each_other() -> None:
    """Many dependent launches in a row over one workspace and one output, with splits: each layer's
    combine must have read before the next layer's decode writes. The results of every layer are
    copied out in between on the same stream; they equal calls with buffers of their own."""
    specs = [DecodeSpec(i, 16, 1, (900, 70, 400), pattern="loud_tokens") for i in range(6)]
    layers = [OnGpu(build(spec)) for spec in specs]
    want = [layer.decode() for layer in layers]
    plan = layers[0].plan()
    out, lse = layers[0].results()
    room = layers[0].workspace(plan)
    stream = memory.Stream(0)
    rounds = 30
    kept = [filled(out.shape, "bfloat16", 0) for _ in range(rounds * len(layers))]
    for turn in range(rounds):
        for at, layer in enumerate(layers):
            layer.enqueue(plan, stream.handle, out=out, lse=lse, workspace=room)
            place = kept[turn * len(layers) + at]
            if turn % 2:  # every other round nothing stands between the dependent launches
                memory.copy_on_device(place.ptr, out.ptr, out.nbytes, 0, stream.handle)
    for at in range(len(layers)):
        layers[at].enqueue(plan, stream.handle, out=out, lse=lse, workspace=room)
        got = to_host(out, stream.handle).view(np.uint16), to_host(lse, stream.handle)
        assert report(got, want[at]) is None
    for turn in range(1, rounds, 2):
        for at in range(len(layers)):
            copied = to_host(kept[turn * len(layers) + at], stream.handle).view(np.uint16)
            assert (copied == want[at][0]).all(), (turn, at)


def test_torch_graphs() -> None:
    """Captured by torch, with torch's tensors changed in place by copy_."""
    torch = pytest.importorskip("torch")
    from test_mla_decode_runtime import torch_arguments, torch_result

    spec = DecodeSpec(3, 16, 1, (600, 65, 1, 300), pattern="loud_tokens")
    case = build(spec)
    arguments = torch_arguments(torch, case)
    lengths = arguments[7]
    plan = api.plan_decode(lengths, 16, 1)
    out, lse = mla_decode(*arguments, plan, SCALE)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        api.plan_decode(lengths, 16, 1, out=plan)
        mla_decode(*arguments, plan, SCALE, out=out, lse=lse)
    for new in ((600, 65, 1, 300), (1, 1, 1, 1), (0, 0, 0, 0), (600, 64, 0, 299)):
        changed = np.array(new, np.int32)
        lengths.copy_(torch.from_numpy(changed))
        graph.replay()
        want = reference_decode(
            *case.query,
            *case.paged,
            case.block_table,
            changed,
            reference_plan(changed, 16, 1, num_sms=plan.config.num_sms),
            SCALE,
        )
        text = report(torch_result(torch, out, lse), (want[0].view(np.uint16), want[1]))
        assert text is None, f"{new}\n{text}"


def test_drawn_cases_captured() -> None:
    """Any case gives the same bytes captured as eagerly."""
    for seed in range(12):
        on_gpu = OnGpu(build(draw(seed)))
        want = on_gpu.decode()
        stream, graph = memory.Stream(0), Graph(0)
        plan = on_gpu.plan()
        out, lse = on_gpu.results()
        room = on_gpu.workspace(plan)
        with graph.capture(stream.handle):
            on_gpu.plan(stream.handle, out=plan)
            on_gpu.enqueue(plan, stream.handle, out=out, lse=lse, workspace=room)
        graph.launch(stream.handle)
        got = to_host(out, stream.handle).view(np.uint16), to_host(lse, stream.handle)
        assert report(got, want) is None, draw(seed)


def test_results_do_not_depend_on_what_ran_before() -> None:
    """A plan made for fewer splits than its workspace was sized for, and the other way round."""
    case = build(DecodeSpec(1, 8, 1, (2000,) + (0,) * 8, pattern="loud_tokens"))
    want = run(case)
    on_gpu = OnGpu(case)
    plan = on_gpu.plan()
    for _ in range(3):
        assert report(on_gpu.decode(plan), want) is None
        other = on_gpu.plan(num_splits=7)
        on_gpu.decode(other)
