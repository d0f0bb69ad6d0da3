"""The two pictures of bench_mla_decode: the roofline, and time over heads and query length.

python tools/bench_plots.py tools/results/mla_decode_h200.json tools/results
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

BYTES_PER_TOKEN = 644


def draw(result: dict[str, Any], folder: Path) -> None:
    """Write mla_decode_roofline.png and mla_decode_heads.png, where matplotlib is installed."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        print("no pictures: matplotlib is not installed")
        return
    folder.mkdir(parents=True, exist_ok=True)
    _roofline(result, folder / "mla_decode_roofline.png", pyplot)
    _heads(result, folder / "mla_decode_heads.png", pyplot)


def _intensity(row: dict[str, Any]) -> float:
    """flop a byte of the cache."""
    return 2.0 * row["h"] * row["s_q"] * 1088 / BYTES_PER_TOKEN


def _roofline(result: dict[str, Any], path: Path, pyplot: Any) -> None:
    rows = [row for row in result["rows"] if row.get("section") in ("table", "heads")]
    if not rows:
        return
    read = max(row["read_gbps"] for row in rows) / 1e3
    peak = result["yardsticks"].get("cublas_fp8_8192_fast_accum_tflops")
    figure, axes = pyplot.subplots(figsize=(8, 5.5))
    x = [20.0, 2000.0]
    grid = [x[0] * (x[1] / x[0]) ** (i / 100) for i in range(101)]
    roof = [min(read * at, peak or float("inf")) for at in grid]
    label = f"bulk read {read:.2f} TB/s" + (f", cuBLAS FP8 {peak:.0f} TFLOP/s" if peak else "")
    axes.plot(grid, roof, color="black", linewidth=1, label=label)
    styles = {(128, 8192): "o", (32, 32768): "s", (8, 131072): "^", (1, 131072): "x"}
    for shape, marker in styles.items():
        chosen = [row for row in rows if (row["b"], row["context"]) == shape]
        points = [(_intensity(row), row["tflops"]) for row in chosen]
        if points:
            axes.plot(*zip(*points, strict=True), marker, label=f"{shape[0]} x {shape[1]}")
    for name, colour in (("flash_mla_bf16_us", "tab:red"), ("vllm_fp8_us", "tab:purple")):
        points = [
            (_intensity(row), row["tflops"] * row["us"] / row[name]) for row in rows if name in row
        ]
        if points:
            label = name.removesuffix("_us") + " (recorded)"
            axes.plot(*zip(*points, strict=True), ".", color=colour, alpha=0.6, label=label)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("flop a byte of the cache")
    axes.set_ylabel("TFLOP/s")
    axes.set_title(f"mla_decode on {result['gpu']}, burst")
    axes.grid(True, which="both", alpha=0.3)
    axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
    print(f"wrote {path}")


def _heads(result: dict[str, Any], path: Path, pyplot: Any) -> None:
    rows = [row for row in result["rows"] if row.get("section") == "heads"]
    if not rows:
        return
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4.5))
    for s_q in sorted({row["s_q"] for row in rows}):
        chosen = sorted((row for row in rows if row["s_q"] == s_q), key=lambda row: row["h"])
        heads = [row["h"] for row in chosen]
        left.plot(heads, [row["us"] for row in chosen], "o-", label=f"s_q = {s_q}")
        right.plot(heads, [row["tflops"] for row in chosen], "o-", label=f"s_q = {s_q}")
    for axes, name in ((left, "us"), (right, "TFLOP/s")):
        axes.set_xscale("log", base=2)
        axes.set_xlabel("query heads")
        axes.set_ylabel(name)
        axes.grid(True, alpha=0.3)
        axes.legend()
    shape = f"{rows[0]['b']} x {rows[0]['context']}"
    figure.suptitle(f"mla_decode, {shape}, {result['gpu']}, burst")
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
    print(f"wrote {path}")


if __name__ == "__main__":
    draw(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]))
