"""Write tools/results/numerics.md, every table and plot of it, from committed data.

    python tools/report.py --measure    measures again on the CPU (two minutes), then writes
    python tools/report.py              writes from tools/results/numerics.json

Data: tests/data/tiny_mla_capture.safetensors and tools/results/tiny_mla.json, which
tools/train_tiny_mla.py made on a GPU; tools/results/reference_accuracy.json, of tools/accuracy.py;
and numerics.json, which --measure makes from the capture and from seeds. Plots need matplotlib.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
for _path in (ROOT, ROOT / "tools"):
    if str(_path) not in sys.path:  # run as a file from a bare checkout
        sys.path.insert(0, str(_path))

import numpy as np  # noqa: E402
from order_scenes import CUBLAS, KERNEL, Scene, drift, scene  # noqa: E402

from snapmla_rt.audit.command import audit_layers, read_layers  # noqa: E402
from snapmla_rt.audit.measure import SOURCES, LayerAudit, Sampling  # noqa: E402
from snapmla_rt.audit.verdict import overall, verdict  # noqa: E402
from snapmla_rt.capture import BFLOAT16, LayerCapture, paper_distribution  # noqa: E402
from snapmla_rt.reference.ordered_pipeline import ORDERS  # noqa: E402
from snapmla_rt.reference.quant_configs import CONFIGS  # noqa: E402

RESULTS = ROOT / "tools" / "results"
MEASURED = RESULTS / "numerics.json"
REPORT = RESULTS / "numerics.md"
PLOTS = RESULTS / "numerics"
CAPTURE = ROOT / "tests" / "data" / "tiny_mla_capture.safetensors"
EVALUATION = RESULTS / "tiny_mla.json"
DECODE_ACCURACY = RESULTS / "decode_accuracy_h200.json"
ACCURACY = RESULTS / "reference_accuracy.json"

ROPE_NATS = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0)
SCHEMES = (*ORDERS, "two_level", "mla_decode")
SEARCH_SCENES = 1500
OWN_FIGURES = ("RMSE", "1 - cosine", "relative L2", "max error", "worst row", "lse error")


# --- Measuring -----------------------------------------------------------------------------------


def measure() -> dict[str, Any]:
    """Everything that needs no GPU, as plain values."""
    sampling = Sampling(rows=64, exact_rows=32)
    result: dict[str, Any] = {
        "sampling": {"rows": sampling.rows, "exact_rows": sampling.exact_rows},
        "paper": [a.as_dict() for a in audit_layers(paper_layers(), sampling)],
        "order": {"sweep": order_sweep(), "search": order_search()},
        "drift": {
            f"{kind}, mean {mean:g}, sd {sd:g}": drift(kind, mean, sd)
            for mean, sd in ((0.5, 1.0), (0.5, 0.1), (0.1, 1.0))
            for kind in ("in_place", "two_level")
        },
    }
    if CAPTURE.is_file():
        layers = read_layers([str(CAPTURE)])
        result["tiny"] = [a.as_dict() for a in audit_layers(layers, sampling)]
    return result


def paper_layers() -> list[LayerCapture]:
    """The paper's distribution, one layer for each size of the RoPE term of the logits."""
    layers = []
    for index, nats in enumerate(ROPE_NATS):
        layer = paper_distribution(4096, 64, 8, seed=index)
        q = layer.q.astype(np.float32)
        q[..., 512:] *= nats / 0.5  # paper_distribution's own
        name = f"{nats:g}"
        layers.append(
            LayerCapture(name, q.astype(BFLOAT16), layer.kv_c, layer.k_pe, layer.softmax_scale)
        )
    return layers


def scheme_error(s: Scene, scheme: str) -> float:
    if scheme == "mla_decode":
        return s.error(s.mla_decode())
    if scheme == "two_level":
        return s.error(s.pipeline(accumulation="two_level"))
    return s.error(s.pipeline(order=scheme))


def order_sweep() -> dict[str, list[dict[str, Any]]]:
    """Errors over the ratio of the blocks' value scales, with and without values of block 1 in the
    channels, and over the gap of their logits."""
    sweeps: dict[str, list[dict[str, Any]]] = {}
    cases: dict[str, tuple[list[float], Callable[[float], Scene]]] = {
        "log2 ratio": ([*range(-20, 21, 2)], lambda x: scene(log2_ratio=x)),
        "log2 ratio, block 1 silent": (
            [*range(-20, 21, 2)],
            lambda x: scene(log2_ratio=x, silent=True),
        ),
        "gap": ([*range(-120, 121, 10)], lambda x: scene(gap=x)),
    }
    for name, (values, make) in cases.items():
        sweeps[name] = [
            {"x": x, **{scheme: _finite(scheme_error(make(x), scheme)) for scheme in SCHEMES}}
            for x in values
        ]
    return sweeps


def _finite(error: float) -> float | None:
    return error if np.isfinite(error) else None


def order_search() -> dict[str, dict[str, Any]]:
    """The worst of random scenes for each scheme; None as error: not finite."""
    rng = np.random.default_rng(0)
    worst: dict[str, dict[str, Any]] = {name: {"error": -1.0} for name in SCHEMES}
    failed = dict.fromkeys(SCHEMES, 0)
    for index in range(SEARCH_SCENES):
        made = {
            "gap": round(float(rng.uniform(-120, 120)), 2),
            "log2_ratio": round(float(rng.uniform(-20, 20)), 2),
            "loudness": round(float(rng.uniform(0, 2)), 2),
            "pairs": int(rng.integers(1, 3)),
            "seed": index,
        }
        s = scene(**made)  # type: ignore[arg-type]
        for name in SCHEMES:
            error = scheme_error(s, name)
            failed[name] += error > 2**-4 + 0.01
            if not error <= worst[name]["error"]:
                worst[name] = {"error": error, **made}
    for name in SCHEMES:
        worst[name]["error"] = _finite(worst[name]["error"])
        worst[name]["beyond_bound"] = failed[name]
    return worst


# --- Writing -------------------------------------------------------------------------------------


def table(columns: list[str], rows: list[list[str]]) -> list[str]:
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    return [*lines, *("| " + " | ".join(row) + " |" for row in rows), ""]


def figure(name: str, text: str) -> list[str]:
    """The picture, where it was drawn."""
    path = PLOTS / f"{name}.png"
    return [f"![{text}]({PLOTS.name}/{name}.png)", ""] if path.is_file() else []


def sci(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.2e}"


def audit_section(audits: list[dict[str, Any]], folder: str, what: str) -> list[str]:
    """Tables and plots of one audit; `what` heads the column of layers."""
    layers = [LayerAudit.from_dict(a) for a in audits]
    lines = ["SnapMLA, bit-exact:", ""]
    lines += table(
        [what, "max latent", "max RoPE", *OWN_FIGURES, "verdict"],
        [
            [
                a.name,
                f"{a.latent.maximum:.3g}",
                f"{a.rope.maximum:.3g}",
                *map(sci, (a.decode.rmse, a.decode.cosine_difference, a.decode.relative_l2)),
                *map(sci, (a.decode.worst_element, a.worst_row, a.decode.lse_error)),
                verdict(a).level,
            ]
            for a in layers
        ],
    )
    for title, field in (
        ("Relative L2, only the cache quantised (Table 3's caches)", "cache_only"),
        ("Relative L2, the whole FP8 path", "errors"),
    ):
        lines += [f"{title}:", ""]
        rows = []
        for a in layers:
            values = [
                c.cache_only if field == "cache_only" else c.errors.relative_l2
                for c in (a.configs[name] for name in CONFIGS)
            ]
            low = min(values)
            cells = [f"**{sci(v)}**" if v == low else sci(v) for v in values]
            rows.append([a.name, *cells])
        lines += table([what, *(c.title for c in CONFIGS.values())], rows)
    lines += ["What each source costs alone:", ""]
    lines += table(
        [what, *SOURCES], [[a.name, *(sci(a.sources[s]) for s in SOURCES)] for a in layers]
    )
    for name, text in (
        ("value_ranges", "value ranges"),
        ("error_by_part", "error by part"),
        ("error_by_cache", "error by cache"),
        ("error_by_context", "error by context length"),
        ("error_by_source", "error by source"),
    ):
        lines += figure(f"{folder}_{name}", text)
    return lines


def ratios(audits: list[dict[str, Any]], name: str) -> tuple[float, float]:
    """Least and largest cache-only error of a cache over SnapMLA's."""
    found = [ratio(audit, name) for audit in audits]
    return min(found), max(found)


def ratio(audit: dict[str, Any], name: str) -> float:
    """Cache-only error of a cache over SnapMLA's, in one layer."""
    configs = audit["configs"]
    return float(configs[name]["cache_only"] / configs["snapmla"]["cache_only"])


def ratio_table(audits: list[dict[str, Any]]) -> list[str]:
    rows = []
    for name, config in CONFIGS.items():
        low, high = ratios(audits, name)
        rows.append([config.title, f"{low:.2f}", f"{high:.2f}"])
    return table(["cache", "least", "largest"], rows)


def order_section(order: dict[str, Any]) -> list[str]:
    names = {
        "enforced": "enforced order",
        "rescale_p": "inverted, P0 rescaled",
        "roll_back": "inverted, O rolled back",
        "two_level": "enforced, two-level sums",
        "mla_decode": "mla_decode",
    }
    lines = []
    for sweep, points in order["sweep"].items():
        chosen = points[:: max(len(points) // 10, 1)]
        unit = " of the logits, in nats" if sweep == "gap" else " of the value scales"
        name, _, condition = sweep.partition(", ")
        lines += [f"Error over the {name}{unit}{condition and f' ({condition})'}:", ""]
        lines += table(
            ["scheme", *(f"{p['x']:g}" for p in chosen)],
            [[names[s], *(sci(p[s]) for p in chosen)] for s in SCHEMES],
        )
    lines += figure("order", "what the order protects against")
    bound = "2^-4 + 0.01"
    lines += [f"{SEARCH_SCENES:,} random scenes, the worst of each (bound {bound}):", ""]
    rows = []
    for s in SCHEMES:
        w = order["search"][s]
        where = f"gap {w['gap']}, log2 ratio {w['log2_ratio']}, loudness {w['loudness']}"
        rows.append([names[s], sci(w["error"]), str(w["beyond_bound"]), where])
    return lines + table(["scheme", "worst error", "scenes beyond the bound", "where"], rows)


def drift_section(drifts: dict[str, dict[str, float]]) -> list[str]:
    in_place, two_level = (drifts[f"{k}, mean 0.5, sd 1"] for k in ("in_place", "two_level"))
    own = decode_drift()
    rows = []
    for context in in_place:
        n = int(context)
        rows.append(
            [
                f"{n:,}",
                f"{in_place[context]:+.2e}",
                f"{CUBLAS[n]:+.2e}" if n in CUBLAS else "",
                f"{KERNEL[n]:+.2e}" if n in KERNEL else "",
                f"{two_level[context]:+.2e}",
                f"{own[n]:+.2e}" if n in own else "",
            ]
        )
    columns = ["tokens", "in place, model", "cuBLAS fast accum., H200", "FP8 kernel, H200"]
    lines = table([*columns, "two levels, model", "mla_decode, reference"], rows)
    return lines + figure("drift", "sums in place and in two levels by context length")


def decode_drift() -> dict[int, float]:
    """tools/accuracy.py's float32 bias of the reference on flat attention, by context length."""
    cases = json.loads(ACCURACY.read_text())["drift"] if ACCURACY.is_file() else []
    return {c["tokens"]: c["f32_signed"] for c in cases if c["t"] == 1e-6 and c["block_n"] == 64}


def decode_in_place() -> str:
    """tools/accuracy_gpu.py's loss of sums kept in place over flat attention, by context length."""
    rows = json.loads(DECODE_ACCURACY.read_text())["rows"]
    losses = {
        row["context"]: -100 * row["paper, in place, vs own inputs"]["gain"]
        for row in rows
        if row["case"] == "c flat q=1e-06" and "paper, in place, vs own inputs" in row
    }
    return ", ".join(f"{loss:.1f} % at {tokens:,} tokens" for tokens, loss in losses.items())


def evaluation_arms() -> dict[str, Any]:
    """The evaluated caches by name; none before tools/train_tiny_mla.py has run."""
    found = json.loads(EVALUATION.read_text()) if EVALUATION.is_file() else {}
    arms: dict[str, Any] = found.get("evaluation", {}).get("arms", {})
    return arms


def evaluation_section(data: dict[str, Any]) -> list[str]:
    text, training, model = data["text"], data["training"], data["model"]
    found = data.get("evaluation", {})
    lines = [
        f"**This model is small**: {model['parameters'] / 1e6:.0f} M parameters in "
        f"{model['layers']} layers, trained for {training['seconds']:.0f} s "
        f"({training['steps']:,} steps, {training['bytes'] / 1e6:.0f} MB of bytes) on "
        f"{text['train_bytes'] / 1e6:.1f} MB of text on one {data['device']}. Its geometry is "
        f"real: {model['heads']} heads, a latent of 512, RoPE of 64. It shows that the path "
        "works end to end and that the errors have the size that the audit says; it does not show "
        "what a model of hundreds of billions of parameters, with its outliers, would do.",
        "",
        f"Text: {text['documents']} documents of Debian's package {text['package']} "
        f"{text['version']}, licence {text['licence']}; every 25th document held out "
        f"({text['held_out_bytes']:,} bytes). The tokens are bytes.",
        "",
    ]
    if "arms" not in found:
        return [*lines, "The evaluation did not finish.", ""]
    lines += [
        f"{found['decoded_tokens']:,} held-out bytes decoded one at a time after prompts of "
        f"{found['prompt_tokens']:,}, and {found['generated_tokens']:,} greedy bytes. SnapMLA and "
        "pow2 ran through append_kv, quantize_q, plan_decode and mla_decode on the GPU; the others "
        "are the same mathematics in torch, held to reference/quant_configs.py by tests. The call "
        "and the emulation of SnapMLA differ by "
        f"{max(found['call_against_emulation']):.1e} (relative L2, worst layer, first step).",
        "",
    ]
    rows = []
    for name, arm in found["arms"].items():
        greedy = arm["greedy"]
        sequences = len(greedy["tokens_before_first_difference"])
        title = "BF16" if name == "bf16" else CONFIGS[name].title
        rows.append(
            [
                title,
                f"{arm['perplexity']:.4f}",
                f"{arm['nll_above_bf16']:+.1e} ± {arm['nll_above_bf16_standard_error']:.0e}",
                sci(arm["kl_from_bf16"]),
                f"{100 * arm['top1_agreement']:.2f} %",
                f"{100 * greedy['agreement_along_bf16_text']:.2f} %",
                f"{100 * greedy['free_running_agreement']:.1f} %",
                f"{greedy['identical_sequences']} of {sequences}",
            ]
        )
    columns = ["cache", "perplexity a byte", "nats a byte above BF16", "KL from BF16"]
    columns += ["same top byte", "greedy, along BF16's text", "greedy, free", "same whole texts"]
    lines += table(columns, rows)
    return lines + figure("evaluation", "distance of the next-byte distribution from BF16")


def report(measured: dict[str, Any]) -> str:
    """The whole page."""
    paper = measured["paper"]
    a_low, a_high = ratios(paper, "A")
    at = max(paper, key=lambda a: a["configs"]["A"]["cache_only"])["name"]
    lines = [
        "# Will FP8 hurt my model? The numbers",
        "",
        "Written by `python tools/report.py` from committed data; do not edit. Every figure is "
        "against float64 attention on unquantised values, on a CPU, by the reference that the "
        f"kernels equal byte for byte. {measured['sampling']['rows']} query rows a layer, "
        f"{measured['sampling']['exact_rows']} of them through the bit-exact decode.",
        "",
        "## In short",
        "",
        f"- RoPE must stay out of FP8 where it decides: with it in FP8 (A) the output's error is "
        f"{a_low:.1f} to {a_high:.1f} times SnapMLA's on the paper's distribution. It grows with "
        f"the RoPE term of the logits up to {at} nats, where single tokens decide whole rows.",
        *summary_lines(measured),
        "",
    ]
    lines += ["## The small model", ""]
    if EVALUATION.is_file():
        lines += evaluation_section(json.loads(EVALUATION.read_text()))
    else:
        lines += ["Not yet run: tools/train_tiny_mla.py makes its data on a GPU.", ""]
    lines += ["## Its layers", ""]
    if "tiny" in measured:
        audits = [LayerAudit.from_dict(a) for a in measured["tiny"]]
        whole = overall([(a.name, verdict(a)) for a in audits])
        lines += [
            f"The audit of {CAPTURE.relative_to(ROOT)}: {whole.text}. `snapmla audit` on it "
            "samples fewer rows and finds other figures where single rows stand out. The lse "
            "errors are against the inputs as they came; they matter only where partial results "
            "are merged with those of another cache, and the verdict leaves them out.",
            "",
        ]
        lines += audit_section(measured["tiny"], "tiny_mla", "layer")
        lines += ["Cache-only error over SnapMLA's:", "", *ratio_table(measured["tiny"])]
    else:
        lines += ["Not yet there.", ""]
    lines += [
        "## The paper's distribution",
        "",
        "Made up after the paper's section 3.1.1: latents within ±10, RoPE keys with outliers to "
        "±1000 in a few channels; 4,096 tokens, 64 heads. One row for each standard deviation of "
        "the RoPE term of the logits, in nats; the latent term has 0.5.",
        "",
        *audit_section(paper, "paper", "RoPE term"),
        "Cache-only error over SnapMLA's:",
        "",
        *ratio_table(paper),
        *disagreements(measured),
        "## The order of Algorithm 1",
        "",
        "reference/ordered_pipeline.py, one or two pairs of blocks. The second warpgroup's error, "
        "relative to the sum of weights times values: rounding P alone cannot exceed 2^-4.",
        "",
        *order_section(measured["order"]),
        "- Problem 1 is real, and wider than the paper says. Where block 1's scale is much larger, "
        "P0 vanishes, but P0 then weighs next to nothing in the row; it shows where block 1 is "
        "silent in a channel. Where block 1's scale is smaller, or equal, the rescaled P0 "
        "saturates at 448, and most of the row is lost.",
        "- Problem 2 needs domains far apart: the factor back overflows float32 at e^88, and O, "
        "which holds up to 448 x 448 a token, before it (the sweep's first failure is at 80 nats). "
        "Up to there rolling back costs nothing.",
        "- The enforced order has neither, given its epsilon: without one, a block e^100 quieter "
        "than what came before takes O beyond float32; with one, values below epsilon are lost. "
        "mla_decode keeps O in a domain that only rises and needs no epsilon.",
        "",
        "## Accumulation against context length",
        "",
        "Flat attention over values 0.5 + N(0, 1), mean signed relative error. `in place`: the "
        "bit-exact model of the tensor core with O as its accumulator; recorded: an H200, cuBLAS "
        "with fast accumulation and an FP8 decode kernel that accumulates in place.",
        "",
        *drift_section(measured["drift"]),
        "mla_decode stands beside these with its P rounded and its own scales; what is left is the "
        "rounding noise of P and V that all heads share, and does not grow with the context "
        "(tools/accuracy.py). Through the decode's own scales, with Q, K and RoPE drawn as well, "
        f"the model in place loses {decode_in_place()} ({DECODE_ACCURACY.name}).",
    ]
    return "\n".join(lines).rstrip() + "\n"


def summary_lines(measured: dict[str, Any]) -> list[str]:
    """The other points of "In short", from the data."""
    lines = []
    order, drifts = measured["order"]["search"], measured["drift"]
    in_place = drifts["in_place, mean 0.5, sd 1"]
    two_level = drifts["two_level, mean 0.5, sd 1"]
    last = max(in_place, key=int)
    for data, name in ((measured["paper"], "the paper's distribution"),) + (
        ((measured["tiny"], "the small model"),) if "tiny" in measured else ()
    ):
        errors = [a["decode"]["relative_l2"] for a in data]
        own = [a["configs"]["snapmla"]["cache_only"] for a in data]
        best = [min(c["cache_only"] for c in a["configs"].values()) for a in data]
        above = max(o / b for o, b in zip(own, best, strict=True))
        lines.append(
            f"- SnapMLA, bit-exact, on {name}: {100 * min(errors):.1f} to {100 * max(errors):.1f} "
            f"% relative L2; its cache is at most {above:.2f} times the lowest of all caches."
        )
    lines.append(
        f"- Sums kept in the tensor core come out {-100 * in_place[last]:.0f} % too small at "
        f"{int(last):,} tokens of flat attention; sums in two levels "
        f"{abs(100 * two_level[last]):.3f} %."
    )
    worst = max(order[s]["error"] for s in ("enforced", "two_level", "mla_decode"))
    lines.append(
        f"- Of {SEARCH_SCENES:,} random scenes none takes the enforced order, two-level sums or "
        f"mla_decode beyond {worst:.3f}; rescaling P0 fails in "
        f"{order['rescale_p']['beyond_bound']} and rolling O back in "
        f"{order['roll_back']['beyond_bound']}."
    )
    arms = evaluation_arms()
    if "snapmla" in arms:
        own_arm, greedy = arms["snapmla"], arms["snapmla"]["greedy"]
        lines.append(
            f"- The small model's perplexity: {arms['bf16']['perplexity']:.4f} in BF16, "
            f"{own_arm['perplexity']:.4f} with SnapMLA; "
            f"{100 * greedy['agreement_along_bf16_text']:.2f} % of {greedy['tokens']:,} greedy "
            "bytes are the same along BF16's text."
        )
    return lines


def disagreements(measured: dict[str, Any]) -> list[str]:
    """Where our data and the paper's Appendix G differ, with the figures that say so."""
    paper = measured["paper"]
    spans = {name: ratios(paper, name) for name in ("B", "C", "D", "D_1x128", "snapmla_pow2")}
    shown = {name: f"{low:.2f} to {high:.2f}" for name, (low, high) in spans.items()}
    lines = [
        "Where this differs from the paper's Figure 5:",
        "",
        "- B, C and D are not clearly worse than per-token scales here (cache-only error over "
        f"SnapMLA's: B {shown['B']}, C {shown['C']}, D {shown['D']}). e4m3 is a floating-point "
        "format: a coarser scale costs nothing until values fall below its normal range, 2^-6 of a "
        "scale, and this distribution's tokens differ in loudness by a factor of 2 or so. Where "
        "tokens differ by 2^16 the per-tensor caches lose the quiet ones whole "
        "(tests/reference/test_quant_configs.py): it is the range over tokens that decides, and "
        "LongCat's may be wider than ours.",
        f"- Blocks of 1 x 128 are a little better than one scale a token ({shown['D_1x128']}), at "
        "four scales a token.",
        "- Where RoPE decides, SnapMLA's exact scale costs something that the other caches that "
        "keep RoPE do not pay: the quotient of RoPE and scale is rounded to bf16 again. "
        f'scale_rounding="pow2" avoids it (pow2 over exact: {shown["snapmla_pow2"]}).',
    ]
    if "tiny" in measured:
        low, high = ratios(measured["tiny"], "A")
        top = max(a["rope"]["maximum"] for a in measured["tiny"])
        lines.append(
            f"- On the small model A is {low:.2f} to {high:.2f} times SnapMLA: its RoPE keys reach "
            f"{top:.3g}, not 1000. A model trained for a minute has no such outliers."
        )
        split = [ratio(a, "A_split") for a in measured["tiny"] if ratio(a, "A") < 0.95]
        if split:
            lines.append(
                f"- In {len(split)} of {len(measured['tiny'])} layers A is below SnapMLA, though "
                "it rounds more: its larger scale puts the codes of the few tokens that the "
                "sampled rows attend to elsewhere. With RoPE in FP8 and the latents on SnapMLA's "
                "own codes (A, RoPE own scale) the same layers are at "
                f"{', '.join(f'{x:.2f}' for x in split)}."
            )
    return [*lines, ""]


# --- Plots ---------------------------------------------------------------------------------------


def draw(measured: dict[str, Any]) -> None:
    """All plots into tools/results/numerics, where matplotlib is installed."""
    try:
        from snapmla_rt.audit import plots
    except ImportError:
        print("no plots: matplotlib is not installed")
        return
    from report_plots import draw_drift, draw_evaluation, draw_order

    PLOTS.mkdir(exist_ok=True)
    axis = {"paper": "standard deviation of the RoPE term (nats)", "tiny_mla": "layer"}
    for key, folder in (("paper", "paper"), ("tiny", "tiny_mla")):
        if key in measured:
            audits = [LayerAudit.from_dict(a) for a in measured[key]]
            for path in plots.draw(audits, PLOTS, f"{folder}_", axis[folder]):
                print(path.relative_to(ROOT))
    draw_order(measured["order"]["sweep"], PLOTS / "order.png")
    draw_drift(measured["drift"], CUBLAS, KERNEL, decode_drift(), PLOTS / "drift.png")
    arms = evaluation_arms()
    if arms:
        draw_evaluation(arms, PLOTS / "evaluation.png")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--measure", action="store_true", help="measure again first")
    args = parser.parse_args()
    if args.measure:
        MEASURED.write_text(json.dumps(measure(), indent=1) + "\n")
    measured = json.loads(MEASURED.read_text())
    draw(measured)
    REPORT.write_text(report(measured))
    print(REPORT.relative_to(ROOT))
    return 0


if __name__ == "__main__":
    sys.exit(main())
