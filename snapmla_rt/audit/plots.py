"""The plots of an audit (matplotlib, the extra "plot"), after the paper's Figures 3 and 5.

Each function draws one figure from measured layers and returns it; `draw` writes all of them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot as plt
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, MaxNLocator

from ..reference.quant_configs import CONFIGS
from .measure import SOURCES, LayerAudit

LATENT, ROPE, KEPT = "#2a6f97", "#d1495b", "#7aa95c"
COLOURS = {
    "snapmla": "#111111",
    "snapmla_pow2": "#8a8a8a",
    "A": "#d1495b",
    "A_split": "#f0a6a6",
    "B": "#e09f3e",
    "C": "#6a994e",
    "D": "#2a6f97",
    "D_1x128": "#8ecae6",
}
MARKERS = {"snapmla": "o", "snapmla_pow2": ".", "A": "^", "A_split": "v", "B": "s", "C": "D"}
SOURCE_COLOURS = ("#2a6f97", "#61a5c2", "#a9d6e5", "#d1495b", "#e09f3e", "#111111", "#bbbbbb")

STYLE = {
    "font.size": 11,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e6e6e6",
    "legend.frameon": False,
    "axes.titlesize": 12,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "figure.dpi": 110,
    "savefig.bbox": "tight",
}


def draw(
    layers: list[LayerAudit], folder: Path, prefix: str = "", axis: str = "layer"
) -> list[Path]:
    """Write the five plots as PNG into `folder`, their names after `prefix`; returns the paths of
    those that have data. axis: what the layers are."""
    figures = {
        "value_ranges": value_ranges,
        "error_by_part": error_by_part,
        "error_by_cache": error_by_cache,
        "error_by_context": error_by_context,
        "error_by_source": error_by_source,
    }
    written = []
    with plt.rc_context(STYLE):
        for name, make in figures.items():
            figure = make(layers)
            if figure is None:
                continue
            for axes in figure.axes:
                if axes.get_xlabel() == "layer":
                    axes.set_xlabel(axis)
            path = folder / f"{prefix}{name}.png"
            figure.savefig(path)
            plt.close(figure)
            written.append(path)
    return written


def _layer_axis(axes: Any, layers: list[LayerAudit]) -> None:
    """Layers on x: their names where they fit, else their numbers."""
    axes.set_xlim(-0.7, len(layers) - 0.3)
    names = [layer.name or "layer" for layer in layers]
    if len(layers) <= 8:
        axes.set_xticks(range(len(layers)), [name.removeprefix("layers.") for name in names])
    else:
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=12))
    axes.set_xlabel("layer")
    axes.grid(axis="x", visible=False)


def _width(layers: list[LayerAudit], least: float, each: float = 0.3, most: float = 13) -> float:
    return min(max(least, 2.5 + each * len(layers)), most)


def value_ranges(layers: list[LayerAudit]) -> Any:
    """Figure 3a: magnitudes of latent and RoPE, from the 1st percentile to the maximum."""
    figure, axes = plt.subplots(figsize=(_width(layers, 7.5), 4.6))
    for offset, colour, part in ((-0.17, LATENT, "latent"), (0.17, ROPE, "rope")):
        for index, layer in enumerate(layers):
            values = getattr(layer, part)
            low, first, middle, third, _, high = values.quantiles
            x = index + offset
            floor = max(low, values.maximum * 1e-6)
            axes.plot([x, x], [floor, high], color=colour, linewidth=1.4)
            axes.plot([x, x], [max(first, floor), third], color=colour, linewidth=6)
            axes.plot(x, max(middle, floor), "o", color="white", markersize=3)
            axes.plot(x, values.maximum, "^", color=colour, markersize=7)
    axes.set_yscale("log")
    axes.set_ylabel("|value|")
    axes.set_title("Values in the cache")
    _layer_axis(axes, layers)
    grey = {"color": "#555555"}
    handles = [
        Line2D([], [], color=LATENT, linewidth=6, label="latent (512)"),
        Line2D([], [], color=ROPE, linewidth=6, label="RoPE (64)"),
        Line2D([], [], marker="^", linestyle="", label="maximum", **grey),
        Line2D([], [], linewidth=1.4, label="1 % to 99.9 %", **grey),
        Line2D([], [], linewidth=6, label="middle half", **grey),
    ]
    axes.legend(handles=handles, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return figure


def error_by_part(layers: list[LayerAudit]) -> Any:
    """Figure 3b: mean square error of e4m3 on each part, and of RoPE as SnapMLA keeps it."""
    figure, axes = plt.subplots(figsize=(_width(layers, 7.5), 4.2))
    bars = (
        ("latent in FP8", LATENT, [layer.latent.fp8_mse for layer in layers]),
        ("RoPE, if it were in FP8", ROPE, [layer.rope.fp8_mse for layer in layers]),
        ("RoPE as kept: bf16", KEPT, [layer.rope.kept_mse for layer in layers]),
    )
    for place, (label, colour, values) in enumerate(bars):
        at = [index + 0.27 * (place - 1) for index in range(len(layers))]
        axes.bar(at, values, 0.25, color=colour, label=label)
    positive = [v for _, _, values in bars for v in values if v > 0]
    if positive:
        axes.set_yscale("log")
        axes.set_ylim(min(positive) / 3, max(positive) * 3)
    axes.set_ylabel("mean square error")
    axes.set_title("What FP8 costs each part of the cache")
    _layer_axis(axes, layers)
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return figure


def error_by_cache(layers: list[LayerAudit]) -> Any:
    """Figure 5: errors by layer and cache, where only the cache is quantised; the insets leave
    out the caches with RoPE in FP8."""
    panels = (
        ("RMSE", "rmse"),
        ("1 - cosine similarity", "cosine_difference"),
        ("relative L2 error", "relative_l2"),
    )
    figure, all_axes = plt.subplots(1, 3, figsize=(15, 5.0))
    for axes, (title, field) in zip(all_axes, panels, strict=True):
        series = {
            name: [getattr(layer.configs[name].cache_only_errors, field) for layer in layers]
            for name in CONFIGS
        }
        _lines(axes, series, list(CONFIGS))
        axes.set_title(title)
        _layer_axis(axes, layers)
        quiet = [name for name in CONFIGS if not name.startswith("A")]
        top = max(max(values) for values in series.values())
        near = max(max(series[name]) for name in quiet)
        axes.set_ylim(0, max(top, near) * 1.9)
        inset = axes.inset_axes((0.21, 0.58, 0.77, 0.37))
        _lines(inset, series, quiet, size=4)
        inset.set_xlim(*axes.get_xlim())
        inset.tick_params(labelsize=8)
        if len(layers) <= 8:
            inset.set_xticks(axes.get_xticks(), axes.get_xticklabels())
        else:
            inset.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8))
        inset.set_title("without A", fontsize=9, fontweight="normal", pad=3)
        _plain_exponent(axes)
        _plain_exponent(inset)
    handles, labels = all_axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower center", ncols=4, bbox_to_anchor=(0.5, -0.12))
    figure.suptitle("Error of the attention output by cache (only the cache is quantised)", y=1.0)
    return figure


def _lines(axes: Any, series: dict[str, list[float]], names: list[str], size: int = 6) -> None:
    for name in names:
        values = series[name]
        axes.plot(
            range(len(values)),
            values,
            marker=MARKERS.get(name, "P"),
            markersize=size,
            linewidth=2.2 if name == "snapmla" else 1.3,
            color=COLOURS[name],
            label=CONFIGS[name].title,
            zorder=3 if name == "snapmla" else 2,
        )


def _plain_exponent(axes: Any) -> None:
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:.3g}"))
    axes.yaxis.set_major_locator(MaxNLocator(nbins=5))


def error_by_context(layers: list[LayerAudit]) -> Any:
    """Accumulation in place against two levels, by context length; None without such data."""
    having = [layer for layer in layers if layer.accumulation]
    if not having:
        return None
    figure, axes = plt.subplots(figsize=(7.5, 4.6))
    styles = ("-", "--", ":")
    for index, layer in enumerate(having):
        for kind, colour in (("in_place", ROPE), ("two_level", LATENT)):
            points = layer.accumulation[kind]
            label = f"{kind.replace('_', ' ')}, {layer.name or 'layer'}"
            x, y = [p.tokens for p in points], [p.relative_l2 for p in points]
            style = styles[index % len(styles)]
            axes.plot(x, y, style, marker="o", color=colour, linewidth=1.8, label=label)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,.0f}"))
    axes.set_xlabel("tokens of context")
    axes.set_ylabel("relative L2 error of the sums")
    axes.set_title("Sums kept in the tensor core, or promoted to float32")
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return figure


def error_by_source(layers: list[LayerAudit]) -> Any:
    """SnapMLA's measured error, split in proportion to the squares of its sources."""
    figure, axes = plt.subplots(figsize=(_width(layers, 7.5), 4.6))
    bottom = [0.0] * len(layers)
    squares = [sum(value**2 for value in layer.sources.values()) or 1.0 for layer in layers]
    for source, colour in zip(SOURCES, SOURCE_COLOURS, strict=True):
        heights = [
            layer.decode.relative_l2 * layer.sources[source] ** 2 / square
            for layer, square in zip(layers, squares, strict=True)
        ]
        axes.bar(range(len(layers)), heights, 0.7, bottom, color=colour, label=source)
        bottom = [a + b for a, b in zip(bottom, heights, strict=True)]
    axes.set_ylabel("relative L2 error")
    axes.set_title("Where SnapMLA's error comes from")
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{100 * y:.2g} %"))
    _layer_axis(axes, layers)
    handles, labels = axes.get_legend_handles_labels()
    axes.legend(handles[::-1], labels[::-1], loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return figure
