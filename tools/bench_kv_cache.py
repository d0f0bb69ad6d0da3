"""Cost of the cache manager's operations on one core: python tools/bench_kv_cache.py [--json].

Without built extensions beside the sources, a copy is compiled in a temporary folder first
(--uncompiled measures the plain Python twin instead). Times are in microseconds. Each figure is
the median over repetitions; a repetition of the decode step is the mean over 64 steps in a row,
in which each of the 256 requests crosses a block's end once.

step_256_us             one decode step of 256 requests: a slot each, table rows, lengths, slots
step_256_all_new_us     the dearest step: all 256 requests take a new block in it
step_256_calls_us       the same through 256 single allocate_slots calls
commit_256_us           commit of one token each (4 of 256 blocks become full and are hashed)
alloc_free_2048_us      allocate_slots and free of one request of 131,072 tokens
lookup_2048_us          get_computed_blocks of 131,136 tokens that hits 2,048 blocks
lookup_2048_hash_us     the SHA-256 part of it, measured alone; hash_share is the quotient
*_by_pool               by pool size, free queue shuffled (_fresh: in order of ids); the blocks
                        come and go at the head of the queue, as those of running requests do
*_by_pool_cold          other blocks of the shuffled queue each time: every step along the list
                        is a dependent access to memory that no cache holds
vllm                    the same blocks through vLLM's own pool, with --vllm-source
"""

from __future__ import annotations

import argparse
import gc
import importlib.machinery
import importlib.util
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
COMPILED = ("prefix_map", "block_pool", "request_blocks", "block_table", "manager")
POOL_SIZES = (1_000, 10_000, 100_000, 1_000_000, 10_000_000)
NUM_REQUESTS = 256
NUM_BLOCKS_LONG = 2048
CHILD = "SNAPMLA_BENCH_CHILD"  # set in the process that runs on the temporary build


def _median_us(action: Callable[[], Any], repeats: int, prepare: Callable[[], Any] | None) -> float:
    times = []
    for _ in range(repeats):
        if prepare is not None:
            prepare()
        start = time.perf_counter_ns()
        action()
        times.append((time.perf_counter_ns() - start) / 1e3)
    return statistics.median(times)


def _aged(pool: Any, seed: int = 0) -> None:
    """Shuffle the whole free queue: block ids no longer follow one another in memory."""
    ids = pool.get_new_blocks(pool.num_free_blocks)
    pool.free_blocks(np.random.default_rng(seed).permutation(ids))


def _decoding(kv: Any, num_blocks: int, aged: bool) -> tuple[Any, Any, list[str]]:
    """A manager with 256 requests whose lengths stand at every offset of a block, and a table."""
    manager = kv.KVCacheManager(num_blocks, debug=False)
    if aged:
        _aged(manager.pool)
    names = [f"request-{i}" for i in range(NUM_REQUESTS)]
    for i, name in enumerate(names):
        manager.allocate_slots(name, 1 + i % 64)
    table = kv.BlockTable(NUM_REQUESTS, NUM_BLOCKS_LONG)
    manager.update_table(table, names)
    return manager, table, names


def _rewind(manager: Any, table: Any, names: Sequence[str]) -> None:
    for i, name in enumerate(names):
        manager.truncate(name, 1 + i % 64)
    manager.update_table(table, names)


def step_us(kv: Any, num_blocks: int, aged: bool, repeats: int) -> float:
    """Mean over 64 steps, median over repetitions."""
    manager, table, names = _decoding(kv, num_blocks, aged)

    def steps() -> None:
        for _ in range(64):
            manager.allocate_step(table)

    rewind = lambda: _rewind(manager, table, names)  # noqa: E731
    return _median_us(steps, repeats, rewind) / 64


def step_details(kv: Any, num_blocks: int, repeats: int) -> dict[str, float]:
    """The dearest step, the step in single calls, and the commit of a step."""
    manager, table, names = _decoding(kv, num_blocks, True)

    def to_the_end() -> None:
        for name in names:
            manager.truncate(name, 0)
            manager.allocate_slots(name, 64)
        manager.update_table(table, names)

    def calls() -> None:
        for name in names:
            manager.allocate_slots(name, 1)
        manager.update_table(table)

    result = {
        "step_256_all_new_us": _median_us(
            lambda: manager.allocate_step(table), repeats, to_the_end
        ),
        "step_256_calls_us": _median_us(calls, repeats, None),
    }
    manager, table, names = _decoding(kv, num_blocks, True)
    for i, name in enumerate(names):
        manager.commit(name, np.full(1 + i % 64, i))
    ids = np.arange(NUM_REQUESTS, dtype=np.int32)
    rounds = []
    for _ in range(repeats):  # as for the step: means over 64 steps, their median
        spent = 0
        for _ in range(64):
            manager.allocate_step(table)
            start = time.perf_counter_ns()
            manager.commit_step(table, ids)
            spent += time.perf_counter_ns() - start
        rounds.append(spent / 64e3)
    return {**result, "commit_256_us": statistics.median(rounds)}


def alloc_free_us(kv: Any, num_blocks: int, aged: bool, repeats: int) -> float:
    """One request of 2,048 blocks, from nothing to nothing."""
    manager = kv.KVCacheManager(num_blocks, debug=False)
    if aged:
        _aged(manager.pool)

    def one() -> None:
        manager.allocate_slots("long", NUM_BLOCKS_LONG * 64)
        manager.free("long")

    return _median_us(one, repeats, None)


def alloc_free_cold_us(kv: Any, num_blocks: int, repeats: int) -> float:
    """As above, but each time other blocks of an aged pool, which left the caches long ago."""
    manager = kv.KVCacheManager(num_blocks, debug=False)
    _aged(manager.pool)
    kept: list[int] = []

    def one() -> None:
        manager.allocate_slots("long", NUM_BLOCKS_LONG * 64)
        manager.free("long")

    def move_on() -> None:
        name = len(kept)
        kept.append(name)
        if manager.allocate_slots(name, NUM_BLOCKS_LONG * 64) is None:
            for other in range(name):
                manager.free(other)
            kept.clear()

    rounds = min(repeats, num_blocks // NUM_BLOCKS_LONG - 2)
    return _median_us(one, max(rounds, 1), move_on)


def lookup_us(kv: Any, repeats: int) -> dict[str, float]:
    """A prompt of 2,049 blocks, all cached; one is left to compute."""
    manager = kv.KVCacheManager(10_000, debug=False)
    tokens = np.random.default_rng(0).integers(0, 129_280, (NUM_BLOCKS_LONG + 1) * 64)
    tokens = tokens.astype(np.int32)
    manager.allocate_slots("prompt", len(tokens))
    start = time.perf_counter_ns()
    manager.commit("prompt", tokens)
    commit = (time.perf_counter_ns() - start) / 1e3
    assert len(manager.get_computed_blocks(tokens).block_ids) == NUM_BLOCKS_LONG
    hashing = kv.block_hash
    raw, root = hashing.token_bytes(tokens), hashing.root_digest(b"")
    whole = _median_us(lambda: manager.get_computed_blocks(tokens), repeats, None)
    alone = _median_us(lambda: hashing.hash_blocks(root, raw, 0, NUM_BLOCKS_LONG), repeats, None)
    return {
        "lookup_2048_us": whole,
        "lookup_2048_hash_us": alone,
        "lookup_2048_hash_share": alone / whole,
        "commit_2048_us": commit,
    }


def pool_us(kv: Any, repeats: int) -> float:
    """get_new_blocks(2048) and free_blocks of the bare pool, to set beside vLLM's."""
    pool = kv.BlockPool(10_000, debug=False)
    return _median_us(lambda: pool.free_blocks(pool.get_new_blocks(NUM_BLOCKS_LONG)), repeats, None)


# --- vLLM's pool --------------------------------------------------------------------------------


class _StandIns(importlib.machinery.PathFinder):
    """Serves two files of vLLM's source; every other vllm module is an empty stand-in.

    Allocation and freeing use nothing from them, so neither torch nor a GPU library is loaded.
    """

    def __init__(self, source: Path) -> None:
        self.files = {
            f"vllm.v1.core.{name}": source / "vllm" / "v1" / "core" / f"{name}.py"
            for name in ("block_pool", "kv_cache_utils")
        }

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:  # type: ignore[override]
        if fullname.split(".")[0] != "vllm":
            return None
        if fullname in self.files:
            return importlib.util.spec_from_file_location(fullname, self.files[fullname])
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)  # type: ignore[arg-type]

    def create_module(self, spec: Any) -> ModuleType:
        class StandIn(ModuleType):
            def __getattr__(self, name: str) -> Any:
                if name.startswith("__"):
                    raise AttributeError(name)
                return type(name, (), {}) if name[0].isupper() else MagicMock()

        return StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        module.__path__ = []


def vllm_us(source: Path, repeats: int) -> dict[str, Any]:
    """vLLM's BlockPool from its unpacked source distribution, in this process."""
    sys.meta_path.insert(0, _StandIns(source))
    block_pool = importlib.import_module("vllm.v1.core.block_pool")
    pool = block_pool.BlockPool(10_000, True, 64)

    def one() -> None:
        pool.free_blocks(reversed(pool.get_new_blocks(NUM_BLOCKS_LONG)))

    def steps() -> None:
        held = [pool.get_new_blocks(1) for _ in range(NUM_REQUESTS)]
        for blocks in held:
            pool.free_blocks(blocks)

    return {
        "version": _vllm_version(source),
        "how": "block_pool.py and kv_cache_utils.py of the source distribution, loaded by path;"
        " stand-ins for every other vllm module; no torch, no GPU part",
        "pool_alloc_free_2048_us": _median_us(one, repeats, None),
        "pool_256_single_blocks_us": _median_us(steps, repeats, None),
    }


def _vllm_version(source: Path) -> str:
    for line in (source / "PKG-INFO").read_text().splitlines():
        if line.startswith("Version: "):
            return line.removeprefix("Version: ")
    return "unknown"


# --- main ---------------------------------------------------------------------------------------


def _modules() -> Any:
    from types import SimpleNamespace

    from snapmla_rt.kv_cache import block_hash, block_pool, block_table, manager

    return SimpleNamespace(
        block_hash=block_hash,
        BlockPool=block_pool.BlockPool,
        BlockTable=block_table.BlockTable,
        KVCacheManager=manager.KVCacheManager,
        compiled=not str(manager.__file__).endswith(".py"),
    )


def _sizes(limit: int, least: int) -> Iterator[int]:
    return (size for size in POOL_SIZES if least <= size <= limit)


def measure(limit: int, repeats: int, vllm_source: Path | None) -> dict[str, Any]:
    """All figures, by name; pools up to `limit` blocks."""
    kv = _modules()
    gc.disable()
    fresh, aged = {}, {}
    for size in _sizes(limit, 1):
        fresh[str(size)] = step_us(kv, size, False, repeats)
        aged[str(size)] = step_us(kv, size, True, repeats)
    long = list(_sizes(limit, 10_000))
    result: dict[str, Any] = {
        "step_256_us": aged["100000"] if "100000" in aged else max(aged.values()),
        **step_details(kv, 100_000, repeats),
        "alloc_free_2048_us": alloc_free_us(kv, 100_000, True, repeats),
        **lookup_us(kv, repeats),
        "step_256_us_by_pool": aged,
        "step_256_us_by_pool_fresh": fresh,
        "alloc_free_2048_us_by_pool": {str(n): alloc_free_us(kv, n, True, repeats) for n in long},
        "alloc_free_2048_us_by_pool_fresh": {
            str(n): alloc_free_us(kv, n, False, repeats) for n in long
        },
        "alloc_free_2048_us_by_pool_cold": {
            str(n): alloc_free_cold_us(kv, n, repeats) for n in long
        },
        "pool_alloc_free_2048_us": pool_us(kv, repeats),
        "compiled": kv.compiled,
        "machine": {
            "python": platform.python_version(),
            "numpy": np.__version__,
            "processor": _processor(),
        },
    }
    if vllm_source is not None:
        result["vllm"] = vllm_us(vllm_source, repeats)
    else:
        result["vllm"] = {"note": "not measured: give --vllm-source an unpacked sdist"}
    return result


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _rounded(item) for name, item in value.items()}
    return round(value, 3) if isinstance(value, float) else value


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":")[1].strip() for line in lines if "model name" in line), "unknown")


def _run_on_a_build(arguments: list[str]) -> int:
    """Compile a copy of the package in a temporary folder and run this file on it."""
    with tempfile.TemporaryDirectory() as scratch:
        package = Path(scratch) / "snapmla_rt"
        ignore = shutil.ignore_patterns("__pycache__", "*.so", "*.c")
        shutil.copytree(ROOT / "snapmla_rt", package, ignore=ignore)
        files = [str(package / "kv_cache" / f"{name}.py") for name in COMPILED]
        command = [sys.executable, "-m", "Cython.Build.Cythonize", "-i", "-q", "-j2", *files]
        flags = sysconfig.get_config_var("CFLAGS") or ""
        env = {**os.environ, "CFLAGS": f"{flags} -O3 -g0 -w"}
        done = subprocess.run(command, cwd=scratch, env=env, capture_output=True, text=True)
        if done.returncode != 0:
            print(done.stdout[-4000:], done.stderr[-4000:], sep="\n", file=sys.stderr)
            return done.returncode
        env = {**os.environ, "PYTHONPATH": scratch, CHILD: "1"}
        return subprocess.run([sys.executable, __file__, *arguments], env=env).returncode


def main() -> int:
    """Parse the command line, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--uncompiled", action="store_true", help="measure the plain Python twin")
    parser.add_argument("--max-pool", type=int, default=POOL_SIZES[-1], help="largest pool")
    parser.add_argument("--repeats", type=int, default=50)
    parser.add_argument("--vllm-source", type=Path, help="folder of vLLM's unpacked sdist")
    options = parser.parse_args()
    if CHILD not in os.environ:
        sys.path.insert(0, str(ROOT))
        if not options.uncompiled and not _modules().compiled:
            return _run_on_a_build(sys.argv[1:])
    result = _rounded(measure(options.max_pool, options.repeats, options.vllm_source))
    if options.json:
        print(json.dumps(result, indent=1))
        return 0
    for name, value in result.items():
        print(f"{name:34}", value)
    return 0


if __name__ == "__main__":
    sys.exit(main())
