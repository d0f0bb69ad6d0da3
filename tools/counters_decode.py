"""Read the GPU's counters over mla_decode: what each unit of an SM does, with Nsight Compute.

    python tools/counters_decode.py --out tools/results/counters_h200.json

For h = 16, 64 and 128 at 128 x 8192, one launch each behind two others, cold caches, clocks left
alone (`ncu --clock-control none`). ncu replays the launch for each group of counters, so the time
is that of a kernel by itself on an idle GPU; the benchmark's is in mla_decode_h200.json. ncu is
looked for on the PATH, in /usr/local/cuda and /opt/nvidia. Exit code 2 without it.
"""

from __future__ import annotations

import argparse
import csv
import glob
import io
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

HEADS, BATCH, CONTEXT = (16, 64, 128), 128, 8192
SKIPPED = 2  # launches before the one that is measured
# As regular expressions, for ncu and for what is kept of its answer.
METRICS = (
    r"gpu__time_duration\.sum",
    r"sm__cycles_elapsed\.avg\.per_second",
    r"smsp__issue_active\.avg\.pct_of_peak_sustained_active",
    r"dram__bytes_read\.sum\.per_second",
    r"(dram|lts)__throughput\.avg\.pct_of_peak_sustained_elapsed",
    r"l1tex__data_(pipe_lsu_wavefronts|bank_reads|bank_writes)\.avg\.pct_of_peak_sustained_elapsed",
    r"sm__pipe_tensor_(op_hmma_)?cycles_active\.avg\.pct_of_peak_sustained_active",
    r"sm__inst_executed_pipe_(alu|fma|xu|lsu|uniform|tensor_op_gmma)\.avg\.pct_of_peak_sustained_active",
)
NUMBER = re.compile(r"[-+]?[0-9.]+([eE][-+]?[0-9]+)?")


def find_ncu() -> str | None:
    """Path of Nsight Compute's command line, or None."""
    places = [shutil.which("ncu")]
    for pattern in ("/usr/local/cuda*/bin/ncu", "/opt/nvidia/nsight-compute/*/ncu"):
        places += sorted(glob.glob(pattern), reverse=True)
    return next((place for place in places if place and os.access(place, os.X_OK)), None)


def child(heads: int) -> int:
    """The launches that ncu watches."""
    from bench import Bench
    from bench_decode_data import Call, Case, Pool

    bench = Bench(0)
    call = Call(Pool(bench), Case(heads, 1, BATCH, CONTEXT))
    for i in range(SKIPPED + 1):
        call.enqueue_decode(i)
    bench.synchronize()
    return 0


def read_counters(text: str) -> dict[str, float]:
    """Metric names, with their units, and values of ncu's raw CSV page: names, units, values."""
    lines = [line for line in text.splitlines() if line.startswith('"')]
    table = list(csv.reader(io.StringIO("\n".join(lines))))
    if len(table) < 3:
        raise RuntimeError(f"ncu gave no counters: {text[-2000:]}")
    names, units, values = table[:3]
    found = {}
    for name, unit, value in zip(names, units, values, strict=True):
        # ncu adds much of its own, such as the device's properties, and writes n/a for a counter
        # that this GPU does not have.
        number = value.replace(",", "")
        if any(re.fullmatch(metric, name) for metric in METRICS) and NUMBER.fullmatch(number):
            found[f"{name} [{unit}]"] = float(number)
    return dict(sorted(found.items()))


def measure(ncu: str, heads: int) -> dict[str, float]:
    """Counters of one launch. Raises RuntimeError with ncu's words."""
    command = [ncu, "--clock-control", "none", "--csv", "--page", "raw", "--print-units", "base"]
    command += ["--kernel-name", "mla_decode", "--launch-skip", str(SKIPPED), "--launch-count", "1"]
    command += ["--metrics", ",".join(f"regex:^{metric}$" for metric in METRICS)]
    command += [sys.executable, str(Path(__file__).resolve()), "--child", str(heads)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    if done.returncode != 0 or "==ERROR==" in done.stdout:
        raise RuntimeError((done.stdout + done.stderr)[-2000:])
    return read_counters(done.stdout)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--child", type=int, default=0, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.child:
        return child(args.child)
    ncu = find_ncu()
    if ncu is None:
        print("ncu (Nsight Compute) is not installed; see --help for where it is looked for")
        return 2
    rows: list[dict[str, Any]] = []
    for heads in HEADS:
        counters = measure(ncu, heads)
        rows.append({"h": heads, "s_q": 1, "b": BATCH, "context": CONTEXT, "counters": counters})
        print(f"h = {heads}")
        for name, value in counters.items():
            print(f"  {name:<86} {value:>16,.2f}")
        if args.out is not None:
            from bench import machine, write_json

            write_json(args.out, {"method": "ncu --clock-control none", **machine(0), "rows": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main())
