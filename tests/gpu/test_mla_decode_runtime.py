"""mla_decode in a running process: streams, threads, devices, host arrays, torch, the debug build,
looking inside a block, and hangs."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from decode_cases import SOFTMAX_SCALE, DecodeCase, DecodeSpec, build, draw
from decode_gpu import OnGpu, Result, put, report, run

from snapmla_rt import api
from snapmla_rt.array import to_host
from snapmla_rt.decode_select import VARIANTS
from snapmla_rt.driver import memory
from snapmla_rt.driver.device import device_count
from snapmla_rt.inspect_decode import trace_block
from snapmla_rt.reference.mla_decode import mla_decode as reference_decode

ROOT = Path(__file__).resolve().parents[2]
mla_decode: Any = api.mla_decode  # called with its eight arrays as one sequence
trace: Any = trace_block
PLAIN = DecodeSpec(11, 24, 2, (700, 65, 0, 1, 300), pattern="loud_tokens")


# --- Streams, threads, devices -------------------------------------------------------------------


def test_two_streams_and_threads() -> None:
    """Four threads, each with a stream, results and workspace of its own."""
    cases = [build(draw(seed)) for seed in (1, 3, 8, 13)]
    want = [run(case) for case in cases]
    wrong: list[str] = []
    barrier = threading.Barrier(len(cases))

    def work(case: DecodeCase, expected: Result) -> None:
        try:
            on_gpu, stream = OnGpu(case), memory.Stream(0)
            barrier.wait()
            for _ in range(25):
                text = report(on_gpu.decode(stream=stream.handle), expected)
                if text:
                    wrong.append(f"{case.spec}\n{text}")
        except BaseException as error:
            wrong.append(repr(error))

    threads = [threading.Thread(target=work, args=pair) for pair in zip(cases, want, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong, "\n".join(wrong[:3])


def test_arrays_of_two_devices_are_refused() -> None:
    if device_count() < 2:
        pytest.skip("one GPU")
    on_gpu = OnGpu(build(PLAIN))
    arguments: Any = list(on_gpu.arguments)
    arguments[6] = put(build(PLAIN).block_table, 1)
    with pytest.raises(ValueError, match="block_table"):
        mla_decode(*arguments, on_gpu.plan(), SOFTMAX_SCALE)


def test_a_second_device() -> None:
    if device_count() < 2:
        pytest.skip("one GPU")
    case = build(PLAIN)
    want = run(case)
    arrays: Any = [
        put(a, 1) for a in (*case.query, *case.paged, case.block_table, case.cache_seqlens)
    ]
    plan = api.plan_decode(arrays[7], PLAIN.num_heads_q, PLAIN.seq_len_q)
    out, lse = mla_decode(*arrays, plan, PLAIN.softmax_scale)
    assert report((out.numpy().view(np.uint16), lse.numpy()), want) is None


def test_host_arrays_through_the_gpu() -> None:
    case = build(replace(PLAIN, layout="record"))
    arguments: Any = (*case.query, *case.paged, case.block_table, case.cache_seqlens)
    plan = api.plan_decode(case.cache_seqlens, PLAIN.num_heads_q, 2, backend="cuda")
    out, lse = mla_decode(*arguments, plan, PLAIN.softmax_scale, backend="cuda")
    assert isinstance(out, np.ndarray)
    want = reference_decode(*arguments, plan, PLAIN.softmax_scale)
    assert report((out.view(np.uint16), lse), (want[0].view(np.uint16), want[1])) is None


def test_the_reference_on_gpu_arrays() -> None:
    on_gpu = OnGpu(build(replace(PLAIN, layout="record")))
    got = on_gpu.decode(on_gpu.plan(), backend="reference")
    assert report(got, on_gpu.decode()) is None


# --- torch ---------------------------------------------------------------------------------------


def torch_arguments(torch: Any, case: DecodeCase) -> Any:
    """The arrays of a case as torch tensors; e4m3 and bf16 as torch's own types."""
    kinds = {"float8_e4m3fn": torch.float8_e4m3fn, "bfloat16": torch.bfloat16}
    tensors = []
    for array in (*case.query, *case.paged, case.block_table, case.cache_seqlens):
        bits = np.ascontiguousarray(array)
        kind = kinds.get(array.dtype.name)
        if kind is not None:
            bits = bits.view(np.uint8 if array.itemsize == 1 else np.int16)
        tensor = torch.from_numpy(bits).cuda()
        tensors.append(tensor if kind is None else tensor.view(kind))
    return tensors


def torch_result(torch: Any, out: Any, lse: Any) -> Result:
    torch.cuda.synchronize()
    return out.view(torch.int16).cpu().numpy().view(np.uint16), lse.cpu().numpy()


def test_torch_tensors() -> None:
    """torch's tensors and current stream: allocated by torch, ordered after torch's work, and the
    second call is the first one's, looked up."""
    torch = pytest.importorskip("torch")
    case = build(PLAIN)
    want = run(case)
    arguments: Any = torch_arguments(torch, case)
    plan = api.plan_decode(arguments[7], PLAIN.num_heads_q, PLAIN.seq_len_q)
    assert plan.parts.is_cuda and plan.parts.dtype == torch.int32
    for stream in (torch.cuda.current_stream(), torch.cuda.Stream()):
        with torch.cuda.stream(stream):
            stream.wait_stream(torch.cuda.default_stream())
            late = arguments[0].clone()
            late.view(torch.uint8).zero_()
            torch.cuda._sleep(20_000_000)  # the query is written long after the call returns
            late.copy_(arguments[0])
            for _ in range(3):
                out, lse = mla_decode(late, *arguments[1:], plan, PLAIN.softmax_scale)
            assert out.dtype == torch.bfloat16 and lse.dtype == torch.float32
            assert report(torch_result(torch, out, lse), want) is None
    explicit = torch.cuda.Stream()
    explicit.wait_stream(torch.cuda.current_stream())
    out, lse = mla_decode(*arguments, plan, PLAIN.softmax_scale, stream=explicit)
    assert report(torch_result(torch, out, lse), want) is None
    only = mla_decode(*arguments, plan, PLAIN.softmax_scale, return_lse=False)
    assert report((torch_result(torch, only, lse)[0], want[1]), want) is None


def test_torch_calls_allocate_nothing_when_all_is_given() -> None:
    torch = pytest.importorskip("torch")
    arguments: Any = torch_arguments(torch, build(PLAIN))
    plan = api.plan_decode(arguments[7], PLAIN.num_heads_q, PLAIN.seq_len_q)
    out, lse = mla_decode(*arguments, plan, PLAIN.softmax_scale)
    longest = 64 * arguments[6].shape[1]
    size = api.decode_workspace_size(plan, len(PLAIN.lengths), longest)
    room = torch.empty(size, dtype=torch.uint8, device="cuda")
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    for _ in range(5):
        api.plan_decode(arguments[7], PLAIN.num_heads_q, PLAIN.seq_len_q, out=plan)
        mla_decode(*arguments, plan, PLAIN.softmax_scale, out=out, lse=lse, workspace=room)
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before


def test_bound_calls() -> None:
    """A bound call gives the call's bytes each time, and reads what its arrays hold by then."""
    on_gpu, other = OnGpu(build(PLAIN)), OnGpu(build(replace(PLAIN, seed=12)))
    want = on_gpu.decode()
    bind: Any = api.bind_mla_decode
    out, lse = on_gpu.results()
    bound = bind(*on_gpu.arguments, on_gpu.plan(), PLAIN.softmax_scale, out=out, lse=lse)
    kept = [put(to_host(part)) for part in on_gpu.query]
    for source, same in ((other.query, False), (kept, True)):
        for mine, theirs in zip(on_gpu.query, source, strict=True):
            memory.copy_on_device(mine.ptr, theirs.ptr, mine.nbytes, 0, 0)
        for target, fresh in zip((out, lse), on_gpu.results(), strict=True):
            memory.copy_on_device(target.ptr, fresh.ptr, fresh.nbytes, 0, 0)
        bound()
        got = to_host(out).view(np.uint16), to_host(lse)
        assert (report(got, want) is None) == same


def test_torch_strided_queries() -> None:
    """Rows further apart than they are long are read where they are; rows that do not form one run
    are refused, never misread."""
    torch = pytest.importorskip("torch")
    case = build(PLAIN)
    want = run(case)
    arguments: Any = torch_arguments(torch, case)
    plan = api.plan_decode(arguments[7], PLAIN.num_heads_q, PLAIN.seq_len_q)
    b, s, h = arguments[2].shape
    wide = torch.zeros((b, s, h, 640), dtype=torch.uint8, device="cuda")
    wide[..., :512] = arguments[0].view(torch.uint8)
    strided: Any = [wide[..., :512], *arguments[1:]]
    out, lse = mla_decode(*strided, plan, PLAIN.softmax_scale)
    assert report(torch_result(torch, out, lse), want) is None
    swapped = arguments[0].view(torch.uint8).transpose(1, 2).contiguous().transpose(1, 2)
    with pytest.raises(ValueError, match="q_nope"):
        mla_decode(swapped, *arguments[1:], plan, PLAIN.softmax_scale)


# --- Debug build, tracing, hangs -----------------------------------------------------------------


def in_a_process(script: str, timeout: float = 240.0, **environment: str) -> Any:
    """Run a script with the tests' modules on its path."""
    paths = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests" / "gpu")]
    env = dict(os.environ, PYTHONPATH=os.pathsep.join(paths), SNAPMLA_JIT="lazy", **environment)
    return subprocess.run(
        [sys.executable, "-c", script], env=env, capture_output=True, text=True, timeout=timeout
    )


def test_debug_kernels_give_the_same_bytes() -> None:
    script = """
from decode_cases import *
from decode_gpu import run, report
from snapmla_rt.decode_select import VARIANTS
for seed in (0, 2, 3, 7, 12, 18):
    spec = draw(seed, tuple(VARIANTS))
    one = solve(spec)
    assert report(run(one.case()), (one.out, one.lse)) is None, spec
print("fine")
"""
    done = in_a_process(script, SNAPMLA_DEBUG="1")
    assert done.returncode == 0 and "fine" in done.stdout, done.stdout + done.stderr


def test_debug_kernels_name_a_bad_block_id() -> None:
    script = """
import numpy as np
from decode_cases import *
from decode_gpu import OnGpu, put
case = build(DecodeSpec(0, 16, 1, (200,)))
on_gpu = OnGpu(case)
case.block_table[0, 1] = 1 << 24
on_gpu.block_table = put(case.block_table)
try:
    on_gpu.decode()
except Exception as error:
    print("refused", type(error).__name__)
"""
    done = in_a_process(script, SNAPMLA_DEBUG="1")
    assert "refused CudaError" in done.stdout, done.stdout + done.stderr
    assert "num_blocks" in done.stdout and ".cuh:" in done.stdout, "it says where and what"


@pytest.mark.parametrize(
    "spec",
    [
        DecodeSpec(1, 16, 1, (300, 77), pattern="loud_tokens"),
        DecodeSpec(2, 20, 1, (200,), pattern="rising", num_splits=2),
        DecodeSpec(3, 48, 2, (130,), pattern="attention_sink"),  # two row tiles
        DecodeSpec(4, 64, 1, (0, 100), pattern="wide", causal=False),
        DecodeSpec(5, 70, 1, (300, 1), pattern="loud_tokens", block_n=max(VARIANTS)),
    ],
    ids=["rows16", "rows32", "two tiles", "rows64", "long blocks"],
)
def test_trace_of_a_block_by_name(spec: DecodeSpec) -> None:
    """The debug kernel's intermediates are the reference's, name by name, bit by bit."""
    case = build(spec)
    arguments: Any = (*case.query, *case.paged, case.block_table, case.cache_seqlens)
    plan = case.plan()
    _, _, traces = reference_decode(
        *arguments, plan, spec.softmax_scale, causal=spec.causal, trace=True
    )
    first_block = dict.fromkeys(range(len(spec.lengths)), 0)
    on_gpu = OnGpu(case)
    gpu_plan: Any = on_gpu.plan()
    for (req, _), blocks in sorted(traces.items()):
        for want in blocks:
            block = first_block[req]
            first_block[req] += 1
            place = {"request": req, "block": block, "causal": spec.causal}
            got = trace(*on_gpu.arguments, gpu_plan, spec.softmax_scale, **place)
            for name, value in got.items():
                expected = np.asarray(want[name])
                bits = np.dtype(f"u{expected.itemsize}")
                same = value.view(bits) == np.ascontiguousarray(expected).view(bits)
                assert same.all(), f"{name} of request {req}, block {block}: {(~same).sum()} differ"
    assert set(got) == {"S", "M", "n", "e", "P", "t", "r", "R", "L", "T", "O"}
    with pytest.raises(ValueError, match="block"):
        trace(*on_gpu.arguments, gpu_plan, 1.0, request=0, block=1000)


def test_five_hundred_random_batches_end() -> None:
    """Random batches, lengths and cuts, twice each with equal bytes, under a watchdog."""
    script = """
import numpy as np
from decode_cases import *
from decode_gpu import *
rng = np.random.default_rng(9)
cases = []
for heads, seq_len_q in ((16, 1), (32, 1), (64, 1), (128, 1), (20, 3)):
    cases.append(build(DecodeSpec(1, heads, seq_len_q, (64 * 90,) + (0,) * 63)))
placed = [OnGpu(case) for case in cases]
for turn in range(500):
    case, on_gpu = cases[turn % 5], placed[turn % 5]
    batch = int(rng.integers(1, 65))
    lengths = np.zeros(64, np.int32)
    lengths[:batch] = np.where(rng.random(batch) < 0.2, 0, rng.integers(0, 64 * 90, batch))
    lengths[:batch] //= 1 + int(rng.integers(0, 20))
    table = np.resize(case.block_table[0, :90], (64, 90)).astype(np.int32)
    mode = [{}, {"num_splits": int(rng.integers(1, 30))}, {"batch_invariant": 128}][turn % 3]
    on_gpu.block_table, on_gpu.cache_seqlens = put(table), put(lengths)
    plan = on_gpu.plan(num_sms=int(rng.integers(1, 140)), **mode)
    first = on_gpu.decode(plan)
    assert report(on_gpu.decode(plan), first) is None, (turn, lengths, mode)
    assert np.isfinite(first[1][lengths > 2]).all()
print("ended")
"""
    done = in_a_process(script, timeout=180)
    assert done.returncode == 0 and "ended" in done.stdout, done.stdout + done.stderr
