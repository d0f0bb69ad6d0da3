"""The decode tools without a GPU: what the fuzzer draws and how it shrinks, what the benchmark asks
for, and that both know the peers' recorded cases."""

from __future__ import annotations

import itertools
import json
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools"))

import accuracy_gpu
import bench_data
import bench_mla_decode
import counters_decode
import fuzz_decode
import numpy as np
import pytest
import sanitize
from bench import Timing, earlier_rows
from bench_decode_data import Case, Yardsticks
from decode_cases import (
    LAYOUTS,
    PATTERNS,
    PLAN_LENGTHS,
    DecodeSpec,
    build,
    draw,
    planes_of,
    smaller,
    solve,
)


@pytest.mark.parametrize("block_n", [64, 128])
def test_a_plan_of_other_lengths_is_of_the_same_blocks_and_bytes(block_n: int) -> None:
    spec = DecodeSpec(3, 2, 2, (200, 0, 64, 129, 1), "loud_tokens", num_sms=3, block_n=block_n)
    own = build(spec)
    want = own.expected()
    for other in PLAN_LENGTHS[1:]:
        case = build(replace(spec, plan_lengths=other))
        lengths = case.planned_lengths()
        assert (lengths != own.cache_seqlens).any() and lengths[1] == 0
        assert (-(-lengths // block_n) == -(-own.cache_seqlens // block_n)).all()
        for got, expected in zip(case.expected(), want, strict=True):
            assert got.tobytes() == expected.tobytes()


def test_drawn_cases_reach_every_kind() -> None:
    """The first thousand seeds: every pattern, layout, cut and variant, lengths at edges, small."""
    specs = [draw(seed, (64, 128)) for seed in range(1000)]
    assert {spec.pattern for spec in specs} == set(PATTERNS)
    assert {spec.layout for spec in specs} == set(LAYOUTS)
    assert {spec.num_splits for spec in specs} == {None, *range(1, 9)}
    assert {spec.plan_lengths for spec in specs} == set(PLAN_LENGTHS)
    assert {spec.block_n for spec in specs} == {64, 128}
    assert {spec.causal for spec in specs} == {True, False}
    assert any(spec.batch_invariant for spec in specs)
    rows = {spec.num_heads_q * spec.seq_len_q for spec in specs}
    assert min(rows) == 1 and max(rows) > 128 and {16, 32, 64, 128} <= rows
    lengths = [length for spec in specs for length in spec.lengths]
    assert {0, 1, 63, 64, 65, 127, 128, 129} <= set(lengths)
    long = [length for length in lengths if length > 1500]
    assert 0 < len(long) < len(specs) / 20 and max(long) <= 12_000
    cost = [sum(spec.lengths) * (spec.num_heads_q * spec.seq_len_q + 64) for spec in specs]
    assert np.mean(cost) < 400_000, "about a third of a second each in the reference"


def test_a_case_is_the_same_everywhere() -> None:
    """Built twice, the same bytes; unused slots are NaN and unused table entries absurd."""
    for layout in LAYOUTS:
        spec = DecodeSpec(4, 3, 1, (70, 0, 5), layout=layout)
        first, second = build(spec), build(spec)
        for one, two in zip(first.buffers, second.buffers, strict=True):
            assert (one == two).all()
        for plane, again in zip(first.paged, planes_of(first.buffers, layout), strict=True):
            assert plane.strides == again.strides and np.shares_memory(plane, again)
        seen = int(np.isfinite(first.paged[1]).sum())
        assert seen == 75, "one scale a token"
        used = np.arange(first.block_table.shape[1]) * 64 < first.cache_seqlens[:, None]
        assert (first.block_table[used] < first.paged[0].shape[0]).all()
        absurd = first.block_table[~used]
        assert ((absurd < 0) | (absurd >= first.paged[0].shape[0])).all()


def test_shrinking_keeps_what_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """A made-up fault that needs 3 requests of more than 64 tokens and more than one head."""

    def compare(one: Any) -> tuple[int, str]:
        spec = one.spec
        bad = sum(length > 64 for length in spec.lengths) >= 3 and spec.num_heads_q > 1
        return (7, "made up") if bad else (0, "")

    monkeypatch.setattr(fuzz_decode, "compare_on_gpu", compare)
    monkeypatch.setattr(fuzz_decode, "solve", lambda spec: type("One", (), {"spec": spec})())
    start = DecodeSpec(5, 40, 2, (300, 65, 0, 1, 200, 9), pattern="wide", num_splits=3)
    small = fuzz_decode.shrink(start, 60)
    assert len(small.lengths) == 3 and all(64 < length < 130 for length in small.lengths)
    assert 1 < small.num_heads_q < 4 and small.pattern == "normal" and small.num_splits is None
    assert all(trial != small for trial in smaller(small))


def test_a_difference_is_counted_and_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """One byte of one case differs: the run goes on, the file says so, the exit code is 1."""

    def solved(pool: Any, specs: Any) -> Any:
        return map(solve, specs)

    def compare(one: Any) -> tuple[int, str]:
        return (1, "made up") if one.spec.seed == 1 else (0, "")

    class NoPool:
        def __enter__(self) -> NoPool:
            return self

        def __exit__(self, *_: Any) -> None: ...

    small = {seed: DecodeSpec(seed, 2, 1, (3,)) for seed in range(3)}
    monkeypatch.setattr(fuzz_decode, "draw", lambda seed, blocks=(): small[seed])
    monkeypatch.setattr(fuzz_decode, "compare_on_gpu", compare)
    monkeypatch.setattr(fuzz_decode, "solved", solved)
    monkeypatch.setattr(fuzz_decode, "worker_pool", lambda workers: NoPool())
    monkeypatch.setattr(fuzz_decode, "machine", lambda index: {"gpu": "none", "driver": "none"})
    out = tmp_path / "result.json"
    options = ["--cases", "3", "--no-grid", "--out", str(out), "--commit", "abc"]
    assert fuzz_decode.main(options) == 1
    result = json.loads(out.read_text())
    assert (result["cases"], result["differing_bytes"], result["differing_cases"]) == (3, 1, 1)
    assert result["seed"] == 0 and result["commit"] == "abc" and "seed=1" in result["failures"][0]


def test_the_fixed_grid_comes_before_the_drawn_cases() -> None:
    """The grid is imported from the GPU tests: a renamed module must not end the fuzzer."""
    args = fuzz_decode.parser().parse_args(["--cases", "2"])
    specs = list(fuzz_decode.specs_of(args))
    blocks = tuple(fuzz_decode.VARIANTS)
    assert specs[-2:] == [fuzz_decode.draw(seed, blocks) for seed in range(2)]
    grid = specs[:-2]
    assert {spec.block_n for spec in grid} == set(blocks)
    assert {spec.num_heads_q for spec in grid} >= {1, 63, 64, 126, 128}


# --- The benchmark and the peers -----------------------------------------------------------------


def test_the_table_is_what_was_asked_for() -> None:
    cases = bench_mla_decode.table_cases()
    assert len(cases) == 27 and len(set(cases)) == 27
    assert Case(16, 1, 128, 8192) in cases and Case(128, 2, 8, 131072) in cases
    one = Case(16, 1, 128, 8192)
    assert one.kv_bytes == 128 * 8192 * 644 and one.flops == 2 * 128 * 16 * 8192 * 1088


def fake_run() -> Any:
    run = object.__new__(bench_mla_decode.Run)
    run.peers = json.loads(bench_mla_decode.PEERS.read_text())
    run.yardsticks = type("Fixed", (), {"read_gbps": staticmethod(lambda nbytes: 4500.0)})()
    return run


@pytest.mark.parametrize(
    ("case", "us", "met"),
    [
        (Case(16, 1, 128, 8192), 100.0, "aim"),
        (Case(16, 1, 128, 8192), 160.0, "must"),
        (Case(16, 1, 128, 8192), 200.0, "missed"),
        (Case(128, 1, 8, 131072), 330.0, "missed"),
        (Case(128, 1, 8, 131072), 300.0, "must"),
        (Case(64, 1, 128, 8192), 187.67, "missed"),  # 0.7996 of 4,500 GB/s, which rounds to 0.8
        (Case(128, 1, 8, 131072), 324.52, "missed"),  # 899.96 TFLOP/s
        (Case(64, 1, 1, 131072), 31.0, "aim"),
        (Case(64, 1, 1, 131072), 46.0, "missed"),
        (Case(64, 1, 128, 4096), 153.6 / 1.6, "must"),
        (Case(64, 1, 128, 4096), 153.6 / 1.4, "missed"),
    ],
)
def test_targets(case: Case, us: float, met: str, capsys: pytest.CaptureFixture[str]) -> None:
    row = fake_run().row(case, us, "burst")
    assert row["met"] == met, row
    assert met in capsys.readouterr().out


def test_grades_of_the_committed_table_follow_from_its_numbers() -> None:
    """Within what rounding leaves open: us is given to 0.01, the read rate to 1 GB/s."""
    result = json.loads((bench_mla_decode.RESULTS / "mla_decode_h200.json").read_text())
    assert {f"cublas_fp8_8192_{name}_accum_tflops" for name in ("fast", "full")} <= set(
        result["yardsticks"]
    )
    rows = result["rows"]
    graded = [row for row in rows if row["section"] == "table" and "met" in row]
    assert len(graded) == 24  # all but the three of 512 tokens, where FlashMLA has no time
    for row in graded:
        case = Case(row["h"], row["s_q"], row["b"], row["context"])
        possible = set()
        for us, read in itertools.product(
            (row["us"] - 0.005, row["us"] + 0.005), (row["read_gbps"] - 0.5, row["read_gbps"] + 0.5)
        ):
            measured = bench_mla_decode.measures(case, us, read, row.get("flash_mla_bf16_us"))
            possible.add(bench_mla_decode.target_of(case, measured, "burst")[1])
        assert row["met"] in possible, (row, possible)


def test_rows_that_a_run_does_not_replace_stay_with_their_commit(tmp_path: Path) -> None:
    path = tmp_path / "result.json"

    def is_replaced(row: dict[str, Any]) -> bool:
        return row["section"] in ("table", "steps")

    assert earlier_rows(None, "rows", is_replaced) == []
    assert earlier_rows(path, "rows", is_replaced) == []
    rows = [
        {"section": "table", "us": 1.0},
        {"section": "heads", "us": 2.0},
        {"section": "invariant", "us": 3.0, "commit": "older"},
    ]
    path.write_text(json.dumps({"commit": "old", "rows": rows}))
    kept = earlier_rows(path, "rows", is_replaced)
    assert [(row["us"], row["commit"]) for row in kept] == [(2.0, "old"), (3.0, "older")]


def test_yardsticks_stay_with_their_commit_and_machine(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    now = {"commit": "new", "gpu": "a GPU", "driver": "1"}
    earlier = bench_mla_decode.earlier_yardsticks
    assert earlier(None, now) == earlier(path, now) == {}
    path.write_text(json.dumps({**now, "yardsticks": {"cublas": 1500.0}}))
    assert earlier(path, now) == {"cublas": 1500.0}
    for name in now:
        assert earlier(path, {**now, name: "other"}) == {}, name


def test_sanitizer_rows_of_other_parts_stay_with_their_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run of one tool over one part replaces its own row and no other."""
    path = tmp_path / "result.json"
    old = [
        {"part": part, "tool": tool} for part in ("data", "decode") for tool in ("a", "memcheck")
    ]
    path.write_text(json.dumps({"commit": "old", "tools": old}))
    monkeypatch.setattr(sanitize, "find_sanitizer", lambda: "sanitizer")
    monkeypatch.setattr(sanitize, "machine", lambda index: {"commit": "new"})
    monkeypatch.setattr(
        sanitize,
        "run_tool",
        lambda sanitizer, tool, part, timeout: {"part": part, "tool": tool, "exit_code": 0},
    )
    assert sanitize.main(["--part", "decode", "--tool", "memcheck", "--out", str(path)]) == 0
    tools = json.loads(path.read_text())["tools"]
    assert [(row["part"], row["tool"], row["commit"]) for row in tools] == [
        ("data", "a", "old"),
        ("data", "memcheck", "old"),
        ("decode", "a", "old"),
        ("decode", "memcheck", "new"),
    ]


def test_the_peers_cover_the_table() -> None:
    """Every row of the table but the short contexts of 512 tokens has the peers beside it."""
    run = fake_run()
    for case in bench_mla_decode.table_cases():
        found = run.peer(case, "burst")
        assert found or case.context == 512, case
    for h, s_q in bench_mla_decode.TARGETS:
        assert run.peer(Case(h, s_q, 128, 8192), "sustained"), (h, s_q)


def test_accuracy_cases_are_the_peers() -> None:
    """Every case that the peers were measured on is measured, and lies beside theirs."""
    recorded = json.loads(accuracy_gpu.PEERS.read_text())["accuracy"]
    wanted = {(row["case"], row["b"], row["context"]) for row in recorded}
    ours = {(c.name, c.b, c.context) for c in accuracy_gpu.cases(False) if not c.plan}
    assert ours == wanted
    flat = [case for case in accuracy_gpu.cases(False) if case.plan]
    assert {case.context for case in flat} == {8192, 32768, 131072}


def test_accumulating_in_place_drifts() -> None:
    """The model of the paper's accumulation loses more the longer the context, on values of one
    sign, and next to nothing over one block."""
    from snapmla_rt.reference.numerics import e4m3_from_f32, f32_from_e4m3

    rng = np.random.default_rng(0)
    gains = []
    for tokens in (64, 1024, 8192):
        codes = e4m3_from_f32((100 * (0.5 + rng.standard_normal((tokens, 16)))).astype(np.float32))
        values = f32_from_e4m3(codes).astype(np.float64)
        weights = np.ones((4, tokens))
        got = accuracy_gpu._accumulate_in_place(weights, codes, e4m3_from_f32) / tokens
        exact = np.repeat(values.mean(axis=0, keepdims=True), 4, axis=0)
        gains.append(float(((got - exact) * exact).sum() / (exact * exact).sum()))
    assert abs(gains[0]) < 1e-3 and gains[2] < -0.02 and gains[2] < gains[1] < 0, gains


class _Bench:
    device_index = 0

    def floors(self) -> dict[str, float]:
        return {}

    def copy_gbps(self, nbytes: int) -> float:
        return 4000.0

    def time(self, enqueue: object) -> Timing:
        return Timing(2.0, 1.9, 2.1, 1.5)


def test_rows_of_a_benchmark_are_kept_as_they_are_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_data, "machine", lambda index: {"gpu": "none"})
    out = tmp_path / "rows.json"
    old = [{"kernel": "append_kv", "tokens": n, "cache": "cold", "us": 9} for n in (1, 7)]
    out.write_text(json.dumps(old))
    report = bench_data.Report(_Bench(), out)  # type: ignore[arg-type]
    for tokens in (1, 2):
        report.measure("append_kv", tokens, 8000, lambda i: None, cache="cold")
        rows = {row["tokens"]: row for row in json.loads(out.read_text())}
        assert set(rows) == {7, 1, 2} - {tokens + 1}  # the row of another size stays
        assert rows[7]["us"] == 9 and rows[tokens]["gbps"] == 4
    assert [path.name for path in tmp_path.iterdir()] == ["rows.json"]


def test_the_read_yardstick_stays_within_its_pool() -> None:
    yardsticks = Yardsticks.__new__(Yardsticks)
    yardsticks.pool = SimpleNamespace(num_blocks=2)  # type: ignore[assignment]
    yardsticks._found = {}
    with pytest.raises(ValueError, match="pool's 82432"):
        yardsticks.read_gbps(6 * 16384)


def test_counters_are_numbers_with_units() -> None:
    text = """==PROF== Connected
"ID","device__name","gpu__time_duration.sum","dram__bytes_read.sum.per_second","dram__throughput.avg.pct_of_peak_sustained_elapsed"
"","","ns","byte/s","%"
"0","No-CC","1,234.5","7","n/a"
"""
    found = counters_decode.read_counters(text)
    assert found == {
        "dram__bytes_read.sum.per_second [byte/s]": 7.0,
        "gpu__time_duration.sum [ns]": 1234.5,
    }
    with pytest.raises(RuntimeError, match="No kernels were profiled"):
        counters_decode.read_counters("==WARNING== No kernels were profiled.")


def test_pictures(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    import bench_plots

    row = {"section": "table", "read_gbps": 4500, "tflops": 700.0, "us": 200.0, "h": 16, "s_q": 1}
    rows = [
        {**row, "b": 128, "context": 8192, "flash_mla_bf16_us": 287.3},
        {**row, "b": 32, "context": 16384, "section": "heads"},
    ]
    yardsticks = {"cublas_fp8_8192_fast_accum_tflops": 1500.0}
    bench_plots.draw({"gpu": "none", "rows": rows, "yardsticks": yardsticks}, tmp_path)
    assert len(list(tmp_path.glob("*.png"))) == 2
