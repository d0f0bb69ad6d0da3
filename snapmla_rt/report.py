"""What the commands print: the tables of a run and of the doctor, and both as JSON."""

from __future__ import annotations

import json
import math
from typing import Any

from . import __version__
from .decode_run import LayerErrors, RunResult
from .metrics import ErrorSummary

_KINDS = {
    "unquantised": "float64 on the inputs as they came",
    "dequantised": "float64 on the dequantised inputs",
    "floor": "floor: float64 with only P rounded",
    "floor_bf16": "the same, output rounded to BF16",
}


def json_text(value: Any) -> str:
    """Indented JSON; numbers that JSON does not have (NaN, infinities) become null."""
    return json.dumps(_plain(value), indent=2)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


def run_dict(
    result: RunResult, sizes: dict[str, Any], source: str, out: str | None
) -> dict[str, Any]:
    """Everything that `snapmla decode` found, as plain values."""
    times = result.backend.times
    return {
        "version": __version__,
        "source": source,
        "backend": result.backend.name,
        "backend_detail": result.backend.detail,
        "block_n": result.options.block_n,
        "scale_rounding": result.options.scale_rounding,
        "cache": sizes,
        "layers": [
            {
                "name": layer.capture.name,
                "tokens": layer.capture.num_tokens,
                "prefill_tokens": layer.capture.prefill_tokens,
                "steps": layer.capture.num_steps,
                "seq_len_q": layer.capture.seq_len_q,
                "num_heads_q": layer.capture.num_heads_q,
                "softmax_scale": layer.capture.softmax_scale,
                "errors": {kind: summary.as_dict() for kind, summary in _by_kind(layer.errors)},
            }
            for layer in result.layers
        ],
        "stages": {
            stage: {"calls": calls, "seconds": times.seconds[stage]}
            for stage, calls in times.calls.items()
        },
        "out": out,
    }


def _by_kind(errors: LayerErrors) -> list[tuple[str, ErrorSummary]]:
    return [(kind, getattr(errors, kind)) for kind in _KINDS]


def run_text(result: RunResult, sizes: dict[str, Any], source: str, out: str | None) -> str:
    """The table of `snapmla decode`."""
    options, backend = result.options, result.backend
    lines = [
        f"input      {source}",
        f"backend    {backend.name} ({backend.detail})",
        f"options    block of {options.block_n} tokens, scale rounding {options.scale_rounding}",
        f"cache      {sizes['bytes_per_token']} bytes a token, BF16 {sizes['bytes_per_token_bf16']}"
        f" ({100 * sizes['ratio']:.1f} %)",
    ]
    for layer in result.layers:
        capture = layer.capture
        title = capture.name or "layer"
        lines += [
            "",
            f"{title:<10} {capture.num_tokens:,} tokens ({capture.prefill_tokens:,} prefilled), "
            f"{capture.num_steps} steps of {capture.seq_len_q}, {capture.num_heads_q} heads, "
            f"softmax scale {capture.softmax_scale:.6g}",
            *_error_table(layer.errors),
        ]
    lines += ["", *_stage_table(result)]
    if out is not None:
        lines += ["", f"written    {out}"]
    return "\n".join(lines)


def _error_table(errors: LayerErrors) -> list[str]:
    columns = ("relative L2", "cosine diff.", "worst element", "lse error")
    lines = [f"{'error against':<36}" + "".join(f"{c:>15}" for c in columns)]
    for kind, e in _by_kind(errors):
        values = (e.relative_l2, e.cosine_difference, e.worst_element, e.lse_error)
        lines.append(f"{_KINDS[kind]:<36}" + "".join(f"{v:>15.3e}" for v in values))
    return lines


def _stage_table(result: RunResult) -> list[str]:
    times = result.backend.times
    lines = [f"{'stage':<16}{'calls':>7}{'total':>12}{'a call':>12}"]
    for stage, calls in times.calls.items():
        seconds = times.seconds[stage]
        lines.append(
            f"{stage:<16}{calls:>7}{_duration(seconds):>12}{_duration(seconds / calls):>12}"
        )
    return lines


def _duration(seconds: float) -> str:
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{seconds * 1e3:.2f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.1f} us"


def doctor_text(report: dict[str, Any]) -> str:
    """A report of nested values as indented lines."""
    return "\n".join(_doctor_lines(report, ""))


def _doctor_lines(report: dict[str, Any], indent: str) -> list[str]:
    width = max((len(str(key)) for key in report), default=0) + 2
    lines: list[str] = []
    for key, value in report.items():
        if isinstance(value, dict):
            lines += [f"{indent}{key}", *_doctor_lines(value, indent + "  ")]
        elif isinstance(value, list | tuple):
            lines += [f"{indent}{key}", *(f"{indent}  - {item}" for item in value)]
        else:
            lines.append(f"{indent}{key!s:<{width}}{_shown(value)}")
    return lines


def _shown(value: Any) -> str:
    if value is None:
        return "none"
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)
