"""What the figures of a layer mean, in words.

The limits are rules of thumb, not promises. Three mantissa bits cost about 3 % of an output on
normally distributed data whatever the quantiser does, and models whose layers all lie there lose
nothing measurable (SnapMLA, Table 1; the small model of tools/results/numerics.md). Above 15 %, or
where a single row loses half of its length, an evaluation is due before such a cache serves anyone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from .measure import LayerAudit

LEVELS = ("fine", "check", "harm")
FINE_RELATIVE_L2, HARM_RELATIVE_L2 = 0.05, 0.15
FINE_WORST_ROW, HARM_WORST_ROW = 0.15, 0.5
_SAY = {
    "fine": "no harm expected",
    "check": "noticeable error: compare the model's quality on a task of yours",
    "harm": "harm likely: do not use FP8 for this layer without an evaluation",
}
_WHY = {
    "Q": "the rounding of the queries",
    "K": "the rounding of the latents as keys",
    "V": "the rounding of the latents as values",
    "RoPE": 'the bf16 rounding of the divided RoPE part (scale_rounding="pow2" avoids it)',
    "P": "the rounding of the probabilities",
    "accumulator": "the tensor core's 14-bit sums",
    "output": "the rounding of the output to bf16",
}


@dataclass(frozen=True)
class Verdict:
    """level: one of LEVELS; text: why, in a sentence or two."""

    level: str
    text: str


def verdict(layer: LayerAudit) -> Verdict:
    """Judge SnapMLA on one layer, and say what the other caches would do to it."""
    error, worst = layer.decode.relative_l2, layer.worst_row
    if not (math.isfinite(error) and math.isfinite(worst)):
        return Verdict("harm", "harm likely: the output is not finite")
    level = "check"
    if error < FINE_RELATIVE_L2 and worst < FINE_WORST_ROW:
        level = "fine"
    elif error >= HARM_RELATIVE_L2 or worst >= HARM_WORST_ROW:
        level = "harm"
    source = max(layer.sources, key=lambda name: layer.sources[name])
    text = f"{_SAY[level]}: {100 * error:.1f} % error, most of it from {_WHY[source]}"
    return Verdict(level, "; ".join([text, *_others(layer)]))


def _others(layer: LayerAudit) -> list[str]:
    """Remarks on the other caches that are worth a line."""
    said = []
    own = layer.configs["snapmla"].errors.relative_l2
    factor = layer.configs["A"].errors.relative_l2 / own if own else 1.0
    if factor >= 1.5:
        said.append(f"RoPE in FP8 too would make it {factor:.1f} times as large")
    static = layer.configs["B"]
    if static.saturated:
        said.append(f"a static scale of 1.0 saturates {static.saturated:,} values")
    for name, what in (("B", "a static scale"), ("C", "one scale for the layer")):
        times = layer.configs[name].errors.relative_l2 / own if own else 1.0
        if times >= 1.5:
            said.append(f"{what} makes it {times:.1f} times as large")
    return said


def overall(verdicts: list[tuple[str, Verdict]]) -> Verdict:
    """One verdict over (layer name, verdict): the worst level, and which layers have it."""
    worst = max((v.level for _, v in verdicts), key=LEVELS.index)
    names = [name or "the layer" for name, v in verdicts if v.level == worst]
    count = f"{len(names)} of {len(verdicts)} layers"
    if worst == "fine":
        return Verdict(worst, f"FP8 is not expected to hurt: all {len(verdicts)} layers are fine")
    shown = ", ".join(names[:6]) + (", ..." if len(names) > 6 else "")
    start = "FP8 may hurt" if worst == "check" else "FP8 is likely to hurt"
    return Verdict(worst, f"{start}: {count} ({shown}); {_SAY[worst]}")
