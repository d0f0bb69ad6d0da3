"""The plots of tools/report.py that are not an audit's (matplotlib)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib import pyplot as plt
from matplotlib.ticker import FuncFormatter

from snapmla_rt.audit.plots import COLOURS, LATENT, ROPE, STYLE
from snapmla_rt.reference.quant_configs import CONFIGS

_SCHEMES = {
    "rescale_p": ("inverted, P0 rescaled (Problem 1)", ROPE, "^"),
    "roll_back": ("inverted, O rolled back (Problem 2)", "#e09f3e", "s"),
    "enforced": ("enforced order", LATENT, "o"),
    "mla_decode": ("mla_decode", "#111111", "."),
}


def draw_order(sweeps: dict[str, list[dict[str, Any]]], path: Path) -> None:
    """Errors of the schemes over the scale ratio and the logit gap of two blocks."""
    titles = {
        "log2 ratio": ("Louder or quieter values", "log2 of block 1's value scale over block 0's"),
        "log2 ratio, block 1 silent": ("The same, block 1 silent here", "log2 ratio"),
        "gap": ("Larger or smaller logits", "block 1's logits above block 0's (nats)"),
    }
    with plt.rc_context(STYLE):
        figure, all_axes = plt.subplots(1, 3, figsize=(15, 4.4), sharey=True)
        for axes, (name, points) in zip(all_axes, sweeps.items(), strict=True):
            for scheme, (label, colour, marker) in _SCHEMES.items():
                finite = [(p["x"], p[scheme]) for p in points if p[scheme] is not None]
                lost = [p["x"] for p in points if p[scheme] is None]
                x, y = zip(*finite, strict=True)
                axes.plot(x, y, marker=marker, markersize=5, color=colour, label=label)
                axes.plot(lost, [2.0] * len(lost), "x", color=colour, markersize=9, mew=2.5)
            axes.set_yscale("log")
            axes.set_ylim(2e-3, 4)
            axes.set_title(titles[name][0])
            axes.set_xlabel(titles[name][1])
        all_axes[2].annotate("not finite", (100, 2.0), (30, 0.9), color="#555555")
        all_axes[0].set_ylabel("error of the second warpgroup")
        handles, labels = all_axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="lower center", ncols=4, bbox_to_anchor=(0.5, -0.12))
        figure.savefig(path)
        plt.close(figure)


def draw_drift(
    drifts: dict[str, dict[str, float]],
    cublas: dict[int, float],
    kernel: dict[int, float],
    decode: dict[int, float],
    path: Path,
) -> None:
    """Bias of flat attention by context length: model, hardware, two levels."""
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(figsize=(7.5, 4.8))
        for kind, colour, label in (
            ("in_place", ROPE, "in place, bit-exact model"),
            ("two_level", LATENT, "two levels, bit-exact model"),
        ):
            points = drifts[f"{kind}, mean 0.5, sd 1"]
            x = [int(n) for n in points]
            axes.plot(x, [abs(y) for y in points.values()], "-", color=colour, lw=2, label=label)
        for found, marker, label in (
            (cublas, "o", "cuBLAS fast accumulation, H200"),
            (kernel, "x", "FP8 decode kernel in place, H200"),
        ):
            size = {"markersize": 8, "mew": 2, "markerfacecolor": "none"}
            y = [abs(v) for v in found.values()]
            axes.plot(list(found), y, marker, color="#111111", label=label, **size)
        if decode:
            y = [abs(v) for v in decode.values()]
            axes.plot(list(decode), y, "D", color=LATENT, label="mla_decode (with P rounded)")
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,.0f}"))
        axes.tick_params(axis="x", rotation=30)
        axes.set_xlabel("tokens of context")
        axes.set_ylabel("|mean signed relative error|")
        axes.set_title("Flat attention over values 0.5 + N(0, 1)")
        axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
        figure.savefig(path)
        plt.close(figure)


def draw_evaluation(arms: dict[str, Any], path: Path) -> None:
    """KL from BF16 and greedy disagreement of each cache of the small model."""
    names = [name for name in arms if name != "bf16"]
    titles = [CONFIGS[name].title for name in names]
    colours = [COLOURS[name] for name in names]
    panels = (
        ("KL of the next byte from BF16 (nats)", [arms[n]["kl_from_bf16"] for n in names]),
        (
            "Greedy bytes that differ from BF16's",
            [1 - arms[n]["greedy"]["agreement_along_bf16_text"] for n in names],
        ),
    )
    with plt.rc_context(STYLE):
        figure, all_axes = plt.subplots(1, 2, figsize=(11, 3.6), sharey=True)
        for axes, (title, values) in zip(all_axes, panels, strict=True):
            axes.barh(range(len(names)), values, color=colours)
            axes.set_yticks(range(len(names)), titles)
            axes.set_title(title, fontsize=11)
            axes.grid(axis="y", visible=False)
        all_axes[0].invert_yaxis()
        all_axes[1].xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{100 * x:.2g} %"))
        figure.savefig(path)
        plt.close(figure)
