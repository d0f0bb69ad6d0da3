"""What `snapmla audit` prints: tables for people, a dict for --json."""

from __future__ import annotations

from typing import Any

from .. import __version__
from ..reference.quant_configs import CONFIGS
from .measure import SOURCES, LayerAudit, Sampling
from .verdict import overall, verdict

_SHORT = {
    "snapmla": "SnapMLA",
    "snapmla_pow2": "pow2",
    "A": "A",
    "A_split": "A split",
    "B": "B",
    "C": "C",
    "D": "D 64x64",
    "D_1x128": "D 1x128",
}
_LEVEL_WIDTH = 7


def audit_dict(layers: list[LayerAudit], files: list[str], sampling: Sampling) -> dict[str, Any]:
    """Everything the audit found, as plain values."""
    verdicts = [(layer.name, verdict(layer)) for layer in layers]
    whole = overall(verdicts)
    return {
        "version": __version__,
        "files": files,
        "sampling": {"rows": sampling.rows, "exact_rows": sampling.exact_rows},
        "configs": {
            name: {"title": c.title, "latent": c.latent, "rope": c.rope}
            for name, c in CONFIGS.items()
        },
        "verdict": {"level": whole.level, "text": whole.text},
        "layers": [
            {**layer.as_dict(), "verdict": {"level": v.level, "text": v.text}}
            for layer, (_, v) in zip(layers, verdicts, strict=True)
        ],
    }


def audit_text(layers: list[LayerAudit], files: list[str], sampling: Sampling) -> str:
    """The tables of `snapmla audit`."""
    verdicts = [(layer.name, verdict(layer)) for layer in layers]
    width = max(5, *(len(layer.name) for layer in layers))
    rows = sorted({layer.rows for layer in layers})
    exact = sorted({layer.exact_rows for layer in layers})
    lines = [
        f"input      {', '.join(files)}",
        f"sampled    {_span(rows)} query rows a layer (--rows), {_span(exact)} of them through the "
        "bit-exact decode; all tokens",
        "against    float64 attention on the captured values",
        "",
        f"verdict    {overall(verdicts).text}",
        "",
        "SnapMLA, bit-exact: what the kernels give",
        *_own_table(layers, width, [v.level for _, v in verdicts]),
        "",
        "relative L2 error by cache, the whole FP8 path (queries, cache and P rounded)",
        *_config_table(layers, width, whole=True),
        "",
        "the same where nothing but the cache is rounded",
        *_config_table(layers, width, whole=False),
        "",
        "where SnapMLA's error comes from: relative L2 of each source alone",
        *_source_table(layers, width),
        "",
        *_legend(),
    ]
    lines += ["", *(f"{name or 'layer':<{width}}  {v.text}" for name, v in verdicts)]
    return "\n".join(lines)


def _span(values: list[int]) -> str:
    return str(values[0]) if len(values) == 1 else f"{values[0]}..{values[-1]}"


def _table(width: int, columns: list[str], rows: list[tuple[str, list[str]]]) -> list[str]:
    sizes = [max(len(c), *(len(r[i]) for _, r in rows)) + 2 for i, c in enumerate(columns)]
    lines = [
        f"{'layer':<{width}}" + "".join(f"{c:>{n}}" for c, n in zip(columns, sizes, strict=True))
    ]
    for name, cells in rows:
        text = "".join(f"{cell:>{n}}" for cell, n in zip(cells, sizes, strict=True))
        lines.append(f"{name or '-':<{width}}" + text)
    return lines


def _own_table(layers: list[LayerAudit], width: int, levels: list[str]) -> list[str]:
    columns = [
        "|latent|",
        "range",
        "|RoPE|",
        "range",
        "RMSE",
        "1-cosine",
        "rel. L2",
        "max error",
        "worst row",
    ]
    columns += ["lse error", "verdict"]
    rows = []
    for layer, level in zip(layers, levels, strict=True):
        e = layer.decode
        figures = (e.rmse, e.cosine_difference, e.relative_l2, e.worst_element, layer.worst_row)
        cells = []
        for part in (layer.latent, layer.rope):
            cells += [f"{part.maximum:.3g}", f"{part.dynamic_range:.3g}"]
        cells += [f"{x:.2e}" for x in (*figures, e.lse_error)]
        rows.append((layer.name, [*cells, level]))
    return _table(width, columns, rows)


def _config_table(layers: list[LayerAudit], width: int, whole: bool) -> list[str]:
    columns = [_SHORT[name] for name in CONFIGS]
    rows = []
    for layer in layers:
        found = layer.configs.values()
        values = [c.errors.relative_l2 if whole else c.cache_only for c in found]
        cells = [f"{x:.2e}" for x in values]
        if not whole:
            cells += [str(sum(layer.configs[name].saturated for name in CONFIGS))]
            cells += [str(layer.configs[name].underflow) for name in ("B", "C")]
        rows.append((layer.name, cells))
    if not whole:
        columns += ["saturated", "lost B", "lost C"]
    return _table(width, columns, rows)


def _source_table(layers: list[LayerAudit], width: int) -> list[str]:
    rows = [(layer.name, [f"{layer.sources[s]:.2e}" for s in SOURCES]) for layer in layers]
    return _table(width, list(SOURCES), rows)


def _legend() -> list[str]:
    lines = ["caches     latent                   RoPE"]
    for name, config in CONFIGS.items():
        lines.append(f"{_SHORT[name]:<11}{config.latent:<25}{config.rope}")
    return [
        *lines,
        "|latent|, |RoPE|: largest magnitude; range: the largest over the median magnitude",
        "saturated: values beyond 448 scales (of any cache; only B's can be)",
        "lost B, lost C: values that are not zero and whose code is, in these caches",
    ]
