"""Speed of the tensor-core model: NumPy against the compiled path, on one core and on several.

    python tools/bench_tensor_core.py [--repeats N] [--threads N] [--json]

Measures the chains of reference/tensor_core.py with uniformly random finite codes: one e4m3 chain
64 x 64 x 512 on both paths, and QK and PV of 64 query rows over 8,192 tokens on the compiled path.
Every figure is the best of the repeats (other work on the machine only ever adds time), and both
paths are checked to give the same bits. Exits with 1 where the compiled path is not built.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from snapmla_rt.reference import tensor_core as tc

ROWS, TOKENS = 64, 8192


def best_of(repeats: int, function: Callable[[], Any]) -> tuple[float, Any]:
    """Shortest wall time in seconds over the repeats, and the last result."""
    seconds, result = float("inf"), None
    for _ in range(repeats):
        start = time.perf_counter()
        result = function()
        seconds = min(seconds, time.perf_counter() - start)
    return seconds, result


def operands() -> dict[str, np.ndarray]:
    """Random finite e4m3 codes and N(0,1) bf16, from a fixed seed."""
    rng = np.random.default_rng(1)

    def codes(*shape: int) -> np.ndarray:
        x = rng.integers(0, 256, shape, dtype=np.uint8)
        return np.where((x & 0x7F) == 0x7F, np.uint8(0), x)

    def rope(*shape: int) -> np.ndarray:
        x = rng.standard_normal(shape).astype(np.float32)
        return (x.view(np.uint32) >> np.uint32(16)).astype(np.uint16)

    return {
        "q_codes": codes(ROWS, 512),
        "q_rope": rope(ROWS, 64),
        "k_codes": codes(TOKENS, 512),
        "k_rope": rope(TOKENS, 64),
        "p_codes": codes(ROWS, TOKENS) & np.uint8(0x7F),
    }


def measure(repeats: int, threads: int) -> dict[str, float]:
    """All figures by name; seconds unless the name says otherwise."""
    data = operands()
    p, v = data["q_codes"], data["k_codes"][:64].T  # 64 x 64 outputs, 512 deep
    numpy_s, expected = best_of(min(repeats, 5), lambda: tc.pv_chain(p, v, backend="numpy"))
    compiled_s, actual = best_of(repeats, lambda: tc.pv_chain(p, v, backend="compiled"))
    if not np.array_equal(expected, actual):
        raise SystemExit("the compiled path differs from the NumPy path")
    figures = {
        "chain_64x64x512_numpy_s": numpy_s,
        "chain_64x64x512_compiled_s": compiled_s,
        "chain_64x64x512_speedup": numpy_s / compiled_s,
        "compiled_ns_per_product": compiled_s / (64 * 64 * 512) * 1e9,
    }
    qk = [data[name] for name in ("q_codes", "q_rope", "k_codes", "k_rope")]
    pv = data["p_codes"], data["k_codes"]
    for n in sorted({1, threads}):
        count = max(1, min(repeats, 5))
        qk_s, _ = best_of(count, partial(tc.qk_chain, *qk, num_threads=n))
        pv_s, _ = best_of(count, partial(tc.pv_chain, *pv, num_threads=n))
        figures[f"qk_{ROWS}x{TOKENS}_threads{n}_s"] = qk_s
        figures[f"pv_{ROWS}x{TOKENS}_threads{n}_s"] = pv_s
    return figures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--threads", type=int, default=1, help="also measure with this many")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.repeats < 1 or options.threads < 1:
        parser.error("--repeats and --threads: expected at least 1")
    if not tc.compiled_available():
        print("the compiled tensor core is not built: nothing to compare", file=sys.stderr)
        return 1
    figures = measure(options.repeats, options.threads)
    if options.json:
        print(json.dumps(figures, indent=2))
    else:
        for name, value in figures.items():
            print(f"{name:34} {value:12.6g}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
