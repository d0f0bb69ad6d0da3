"""Compile every kernel of a table ahead of time, each in a child process.

A child process, because some wgmma mistakes crash ptxas and with it the whole process: here that
is one failed row with the kernel's name. `--check` writes nothing and holds every kernel to its
limits; without it the disk cache is filled, on any machine, with or without a GPU.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from ..arguments import OneLineParser, integer
from ..environment import JIT_VARIABLE, jit_mode
from ..errors import ArgumentError, CompileError, SnapMLAError, UnsupportedDeviceError
from .compiler import (
    CompiledKernel,
    Resources,
    compile_unit,
    label,
    limit_violations,
    make_unit,
    nvrtc_identity,
)
from .spec import KernelSpec, KernelTable, Variant

DEFAULT_TABLE = "snapmla_rt.kernels:TABLE"
CHILD_TIMEOUT_S = 600.0
_MODULE = "snapmla_rt.jit.precompile"  # not __name__, which is "__main__" under -m
_ROOT = str(Path(__file__).resolve().parents[2])


@dataclass(frozen=True)
class Row:
    """The outcome of one (kernel, variant): `error` is empty when all is well."""

    name: str
    seconds: float
    cubin_bytes: int = 0
    resources: Resources | None = None
    error: str = ""


def load_table(path: str) -> KernelTable:
    """The KernelTable at `module:attribute`."""
    module, _, attribute = path.partition(":")
    expected = "a KernelTable at module:attribute"
    try:
        table = getattr(importlib.import_module(module), attribute or "TABLE")
    except (ImportError, AttributeError, ValueError) as error:
        raise ArgumentError("table", expected, f"{path!r} ({error})") from error
    if not isinstance(table, KernelTable):
        raise ArgumentError("table", expected, repr(path))
    return table


def _chosen(args: argparse.Namespace) -> list[tuple[KernelSpec, Variant]]:
    """What to compile. Raises ArgumentError, with the names there are, for an unknown one."""
    table = load_table(args.table)
    if args.variant is None:
        return table.jobs(args.kernel, on_demand=args.all)
    if not args.kernel:
        raise ArgumentError("--variant", "--kernel beside it", f"--variant {args.variant} alone")
    return [(spec, spec.variant(args.variant)) for spec in map(table.__getitem__, args.kernel)]


def _compile_one(
    table: KernelTable, spec: KernelSpec, variant: Variant, cache_dir: str | None
) -> CompiledKernel:
    if cache_dir is None:
        return compile_unit(make_unit(table, spec, variant))
    from .disk_cache import DiskCache
    from .loader import load_or_compile

    return load_or_compile(table, spec, variant, DiskCache(cache_dir or None, must_write=True))


def _child(args: argparse.Namespace) -> int:
    """Compile one variant and print its row as JSON on the last line of stdout."""
    table = load_table(args.table)
    spec = table[args.kernel[0]]
    variant = spec.variant(args.variant)
    name, start = label(spec, variant), time.perf_counter()
    try:
        kernel = _compile_one(table, spec, variant, None if args.check else args.cache_dir)
    except SnapMLAError as error:
        row = Row(name, time.perf_counter() - start, error=str(error))
    else:
        wrong = "; ".join(limit_violations(spec, variant, kernel.resources))
        seconds = time.perf_counter() - start
        row = Row(name, seconds, len(kernel.cubin), kernel.resources, wrong)
        if args.log:
            print(kernel.log, file=sys.stderr)
    print(json.dumps(asdict(row)))
    return 0


def _run_child(args: argparse.Namespace, spec: KernelSpec, variant: Variant) -> Row:
    command = [sys.executable, "-m", _MODULE, "--child", "--table", args.table]
    command += ["--kernel", spec.name, "--variant", variant.name]
    command += ["--check"] if args.check else ["--cache-dir", args.cache_dir]
    command += ["--log"] if args.log else []
    # The child must not start a background compilation of its own.
    paths = [_ROOT, *(path for path in sys.path if path)]
    env = dict(os.environ, PYTHONPATH=os.pathsep.join(paths), **{JIT_VARIABLE: "lazy"})
    name, start = label(spec, variant), time.perf_counter()
    try:
        done = subprocess.run(
            command, env=env, capture_output=True, text=True, timeout=CHILD_TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        return Row(name, time.perf_counter() - start, error=f"over {CHILD_TIMEOUT_S:.0f} s")
    seconds = time.perf_counter() - start
    if args.log and done.stderr:
        print(done.stderr, file=sys.stderr)
    if done.returncode != 0:
        reason = f"signal {-done.returncode}" if done.returncode < 0 else f"exit {done.returncode}"
        return Row(name, seconds, error=f"the compiler process ended with {reason}\n{done.stderr}")
    fields = json.loads(done.stdout.splitlines()[-1])
    resources = fields.pop("resources")
    return Row(**fields, resources=Resources(**resources) if resources else None)


def _print_row(row: Row) -> None:
    status = "FAIL" if row.error else "ok"
    if row.resources is None:
        figures = f"{'-':>5} {'-':>6} {'-':>6} {'-':>8}"
    else:
        used = row.resources
        figures = (
            f"{used.registers:5d} {used.spill_bytes:6d} {used.static_smem_bytes:6d} "
            f"{row.cubin_bytes:8d}"
        )
    print(f"{row.name:<40} {figures} {row.seconds:7.2f}  {status}")
    if row.error:
        print("    " + row.error.replace("\n", "\n    "))


def _child_seconds() -> float:
    """Processor seconds of the children that have ended."""
    times = os.times()
    return times.children_user + times.children_system


def _parser() -> argparse.ArgumentParser:
    parser = OneLineParser(
        prog="snapmla precompile",
        description="Compile every kernel for sm_90a and fill the disk cache (no GPU needed).",
    )
    parser.add_argument("--check", action="store_true", help="write nothing, hold the limits")
    parser.add_argument("--kernel", action="append", default=[], help="only this kernel")
    parser.add_argument("--all", action="store_true", help="also variants for debugging")
    parser.add_argument("--cache-dir", default="", help="default: SNAPMLA_CACHE_DIR or XDG")
    jobs = os.cpu_count() or 1
    parser.add_argument("--jobs", type=integer(1), default=jobs, help="child processes")
    parser.add_argument("--log", action="store_true", help="print the compiler's log")
    parser.add_argument("--table", default=DEFAULT_TABLE, help=argparse.SUPPRESS)
    parser.add_argument("--variant", default=None, help="only this variant of --kernel")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run `snapmla precompile` with these arguments; 0 when every kernel compiled within limits."""
    args = _parser().parse_args(argv)
    if args.child:
        return _child(args)
    try:
        jit_mode()  # of no use to the children, but what is filled here would be of none later
        jobs = _chosen(args)
        if not jobs:
            raise ArgumentError("--kernel", "one with variants for use, or --all", args.kernel)
        identity = nvrtc_identity()
    except (ArgumentError, CompileError, UnsupportedDeviceError) as error:
        print(f"snapmla precompile: error: {error}", file=sys.stderr)
        return 2
    return _compile_all(args, jobs, identity)


def _compile_all(
    args: argparse.Namespace, jobs: list[tuple[KernelSpec, Variant]], identity: str
) -> int:
    """Compile and print a row each; 1 if any failed."""
    print(f"NVRTC {identity}, {len(jobs)} to compile")
    print(f"{'kernel':<40} {'regs':>5} {'spills':>6} {'smem':>6} {'cubin':>8} {'seconds':>7}")
    start, failed, before = time.perf_counter(), 0, _child_seconds()
    with ThreadPoolExecutor(args.jobs) as pool:
        for row in pool.map(lambda job: _run_child(args, *job), jobs):
            _print_row(row)
            failed += bool(row.error)
    wall, processor = time.perf_counter() - start, _child_seconds() - before
    print(f"{len(jobs) - failed} ok, {failed} failed, {wall:.1f} s, processor {processor:.1f} s")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
