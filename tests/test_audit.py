"""`snapmla audit`: its figures against the paths they stand for, its messages, its plots."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import time
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from snapmla_rt import cli
from snapmla_rt.audit import command as audit_command
from snapmla_rt.audit.command import audit_layers, read_layers
from snapmla_rt.audit.measure import (
    SOURCES,
    LayerAudit,
    Sampling,
    audit_layer,
    bit_exact,
    context_lengths,
    sample_rows,
    units,
)
from snapmla_rt.audit.verdict import overall, verdict
from snapmla_rt.capture import BFLOAT16, LayerCapture, encode_safetensors, paper_distribution
from snapmla_rt.decode_run import DecodeOptions, decode_run
from snapmla_rt.reference.numerics import bf16_from_f32, f32_from_bf16
from snapmla_rt.reference.quant_configs import CONFIGS
from snapmla_rt.reference.tensor_core import compiled_available

SAMPLE = Path(__file__).resolve().parent / "data" / "tiny_mla_capture.safetensors"
HAS_MATPLOTLIB = importlib.util.find_spec("matplotlib") is not None
needs_matplotlib = pytest.mark.skipif(not HAS_MATPLOTLIB, reason="matplotlib is not installed")
needs_sample = pytest.mark.skipif(
    not SAMPLE.is_file(), reason="the capture of the small model is not there"
)
SMALL = Sampling(rows=8, exact_rows=4)


def capture(seed: int = 0, tokens: int = 300, rope: float = 1.0, **shape: int) -> LayerCapture:
    """Like the paper's distribution; rope: the size of the RoPE queries."""
    options = {"num_heads_q": 4, "num_steps": 3, "seq_len_q": 1, **shape}
    layer = paper_distribution(tokens, seed=seed, **options)
    q = layer.q.astype(np.float32)
    q[..., 512:] *= rope
    return LayerCapture("", q.astype(BFLOAT16), layer.kv_c, layer.k_pe, layer.softmax_scale)


def arrays_of(layers: dict[str, LayerCapture]) -> dict[str, Any]:
    arrays = {}
    for name, layer in layers.items():
        prefix = f"{name}." if name else ""
        for field in ("q", "kv_c", "k_pe"):
            arrays[prefix + field] = getattr(layer, field)
        arrays[prefix + "softmax_scale"] = np.array([layer.softmax_scale])
    return arrays


def write(path: Path, layers: dict[str, LayerCapture]) -> str:
    path.write_bytes(encode_safetensors(arrays_of(layers)))
    return str(path)


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    code = cli.main(["audit", *argv])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.fixture(scope="module")
def audited() -> LayerAudit:
    return audit_layer(capture(), SMALL, with_contexts=True)


# --- the figures ----------------------------------------------------------------------------------


def test_the_bit_exact_decode_is_the_decodes() -> None:
    """Every row of a whole capture: the bytes that `snapmla decode` writes."""
    layer = capture(seq_len_q=2, num_steps=2)
    result = decode_run([layer], DecodeOptions(backend="reference")).layers[0]
    q, limits = sample_rows(layer, 10**6)
    kv_c, k_pe = layer.kv_c.astype(np.float32), layer.k_pe.astype(np.float32)
    out, lse = bit_exact(q, kv_c, k_pe, limits, layer.softmax_scale)
    got = bf16_from_f32(out).reshape(result.out.shape)
    want = result.out.view(np.uint16)
    # a plan may split a request, the audit does not: the two then differ by roundings of float32
    different = got != want
    assert different.mean() < 0.02
    close = f32_from_bf16(got)[different], f32_from_bf16(want)[different]
    np.testing.assert_allclose(*close, rtol=2**-6, atol=1e-4)
    np.testing.assert_allclose(
        lse.reshape(2, 2, 4).transpose(0, 2, 1), result.lse.astype(np.float64), atol=1e-5
    )


def test_the_audits_error_is_the_decodes_error() -> None:
    layer = capture(seq_len_q=2, num_steps=2)
    result = decode_run([layer], DecodeOptions(backend="reference")).layers[0]
    found = audit_layer(layer, Sampling(rows=1000, exact_rows=1000))
    want = result.errors.unquantised
    assert found.rows == found.exact_rows == 16
    assert found.decode.relative_l2 == pytest.approx(want.relative_l2, rel=0.01)
    assert found.decode.lse_error == pytest.approx(want.lse_error, rel=0.01)
    assert found.decode.worst_element == pytest.approx(want.worst_element, rel=0.05)


def test_rows_are_spread_and_see_what_they_saw() -> None:
    layer = capture(num_heads_q=6, num_steps=4, seq_len_q=2)
    q, limits = sample_rows(layer, 48)
    assert len(q) == 48 and limits.min() == 293 and limits.max() == 300
    some, seen = sample_rows(layer, 12)
    assert len(some) == 12 and len(set(seen)) > 4
    whole = layer.q.reshape(48, 576).astype(np.float32)
    index = [int(np.flatnonzero((whole == row).all(axis=1))[0]) for row in some]
    assert len(set(index)) == 12 and len({i % 6 for i in index}) == 6  # every head
    np.testing.assert_array_equal(seen, 292 + np.array(index) // 6 + 1)


def test_sources_explain_the_total(audited: LayerAudit) -> None:
    """Independent errors add as squares: the parts give the whole within what their chance
    correlation leaves."""
    assert tuple(audited.sources) == SOURCES
    total = np.sqrt(sum(value**2 for value in audited.sources.values()))
    assert audited.decode.relative_l2 == pytest.approx(total, rel=0.25)
    assert all(value > 0 for value in audited.sources.values())
    assert audited.sources["output"] < 2**-8 and audited.sources["accumulator"] < 0.01


def test_a_source_that_costs_nothing_shows_nothing() -> None:
    """Values and queries that e4m3 holds, one visible token: no source but the sums is left."""
    layer = capture(tokens=3, num_heads_q=2)
    ones = LayerCapture(
        "",
        np.ones_like(layer.q),
        np.full_like(layer.kv_c, 448.0),
        np.zeros_like(layer.k_pe),
        layer.softmax_scale,
    )
    found = audit_layer(ones, SMALL)
    assert found.sources["Q"] == found.sources["K"] == found.sources["RoPE"] == 0
    assert found.sources["V"] == 0 and found.sources["P"] < 1e-6
    assert found.decode.relative_l2 < 1e-6 and verdict(found).level == "fine"


def test_a_is_worse_the_more_rope_decides() -> None:
    ratios = []
    for rope in (1.0, 3.0, 8.0):
        found = audit_layer(capture(rope=rope, tokens=1000, num_heads_q=8), SMALL)
        own = found.configs["snapmla_pow2"].cache_only
        ratios.append(found.configs["A"].cache_only / own)
        for name in ("snapmla", "B", "C", "D", "D_1x128"):
            assert found.configs[name].cache_only < 1.5 * own
    assert ratios == sorted(ratios) and ratios[-1] > 5
    assert "RoPE in FP8 too would make it" in verdict(found).text


def test_ranges_and_parts(audited: LayerAudit) -> None:
    assert audited.latent.maximum == 10.0 and audited.rope.maximum > 200
    assert audited.rope.dynamic_range > 10 * audited.latent.dynamic_range
    assert audited.latent.quantiles == tuple(sorted(audited.latent.quantiles))
    assert audited.rope.fp8_mse > 20 * audited.rope.kept_mse > 0
    assert audited.latent.kept_mse == audited.latent.fp8_mse


def test_contexts_grow_in_place_and_stay_in_two_levels() -> None:
    assert context_lengths(4096) == (256, 512, 1024, 2048, 4096)
    assert context_lengths(960) == (256, 512, 896) and context_lengths(100) == ()
    layer = capture(tokens=2048)
    flat = LayerCapture(
        "",
        (layer.q.astype(np.float32) * 1e-3).astype(BFLOAT16),
        (np.float32(0.5) + layer.kv_c.astype(np.float32)).astype(BFLOAT16),
        layer.k_pe,
        layer.softmax_scale,
    )
    found = audit_layer(flat, SMALL, with_contexts=True).accumulation
    in_place, two_level = found["in_place"], found["two_level"]
    assert [p.tokens for p in in_place] == [256, 512, 1024, 2048]
    assert in_place[-1].relative_l2 > 5 * in_place[0].relative_l2
    assert in_place[-1].gain < -1e-3
    assert max(p.relative_l2 for p in two_level) < 3e-4


def test_an_audit_survives_json(audited: LayerAudit) -> None:
    assert LayerAudit.from_dict(json.loads(json.dumps(audited.as_dict()))) == audited


# --- the verdict ----------------------------------------------------------------------------------


def test_verdicts_follow_the_error() -> None:
    mild = audit_layer(capture(), SMALL)
    assert verdict(mild).level == "fine" and "no harm expected" in verdict(mild).text
    sharp = capture(seed=1)
    loud = (sharp.q.astype(np.float32) * 60).astype(BFLOAT16)  # logits of tens of nats
    bad = audit_layer(
        LayerCapture("", loud, sharp.kv_c, sharp.k_pe, sharp.softmax_scale),
        Sampling(12, 12),
    )
    assert verdict(bad).level == "harm" and "harm likely" in verdict(bad).text
    whole = overall([("a", verdict(mild)), ("b", verdict(bad))])
    assert whole.level == "harm" and "1 of 2 layers (b)" in whole.text
    assert "all 1 layers are fine" in overall([("a", verdict(mild))]).text


def test_a_saturating_static_scale_is_named() -> None:
    layer = capture(tokens=100)
    loud = (layer.kv_c.astype(np.float32) * 100).astype(BFLOAT16)
    found = audit_layer(LayerCapture("", layer.q, loud, layer.k_pe, layer.softmax_scale), SMALL)
    assert found.configs["B"].saturated > 0 and found.configs["C"].saturated == 0
    assert "a static scale of 1.0 saturates" in verdict(found).text


# --- the command ----------------------------------------------------------------------------------


def test_the_tables_hold_every_layer_and_cache(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write(tmp_path / "x.safetensors", {f"layers.{i}": capture(i) for i in (0, 1, 10)})
    code, out, err = run(capsys, file, "--rows", "6")
    assert code == 0 and err == ""
    exact = 6 if compiled_available() else 2
    assert f"6 query rows a layer (--rows), {exact} of them through the bit-exact decode" in out
    assert out.index("layers.1 ") < out.index("layers.10")
    for word in ("SnapMLA", "pow2", "A split", "D 1x128", "RMSE", "lse error", *SOURCES):
        assert word in out
    assert max(map(len, out.splitlines())) <= 120
    assert out.count("no harm expected") == 3 and "all 3 layers are fine" in out


def test_json_holds_every_figure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write(tmp_path / "x.safetensors", {"": capture()})
    code, out, _ = run(capsys, file, "--json", "--rows", "6")
    result = json.loads(out)
    assert code == 0 and result["verdict"]["level"] == "fine"
    (layer,) = result["layers"]
    assert set(layer["configs"]) == set(CONFIGS) == set(result["configs"])
    assert layer["configs"]["A"]["errors"]["relative_l2"] > 0
    assert layer["accumulation"]["in_place"][0]["tokens"] == 256
    assert result["sampling"]["rows"] == 6


def test_several_files_name_their_layers(tmp_path: Path) -> None:
    first = write(tmp_path / "first.safetensors", {"": capture()})
    second = write(tmp_path / "second.safetensors", {"layers.2": capture(1)})
    assert [layer.name for layer in read_layers([first, second])] == ["first", "second.layers.2"]
    assert [layer.name for layer in read_layers([second])] == ["layers.2"]


def test_files_of_the_same_name_are_told_apart(tmp_path: Path) -> None:
    def names(*paths: str) -> list[str]:
        files = []
        for path in paths:
            (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
            files.append(write(tmp_path / path, {"layers.2": layer}))
        return [found.name for found in read_layers(files)]

    layer = capture(tokens=5)
    folders = names("a/x.safetensors", "b/x.safetensors")
    assert folders == ["a/x.safetensors.layers.2", "b/x.safetensors.layers.2"]
    deep = names("a/c/x.safetensors", "b/c/x.safetensors", "y.safetensors")
    assert deep[:2] == ["a/c/x.safetensors.layers.2", "b/c/x.safetensors.layers.2"]
    assert len(set(deep)) == 3
    np.savez(tmp_path / "x.npz", **arrays_of({"layers.2": layer}))
    both = [str(tmp_path / "x.npz"), write(tmp_path / "x.safetensors", {"layers.2": layer})]
    found = [layer.name for layer in read_layers(both)]
    assert found == ["x.npz.layers.2", "x.safetensors.layers.2"]
    # and where the name of a file and that of a layer meet
    met = [write(tmp_path / "a.safetensors", {"b": layer})]
    met.append(write(tmp_path / "a.b.safetensors", {"": layer}))
    assert len({layer.name for layer in read_layers(met)}) == 2


def test_a_file_given_twice_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write(tmp_path / "x.safetensors", {"": capture(tokens=5)})
    (tmp_path / "link.safetensors").symlink_to(file)
    for again in (file, str(tmp_path / "link.safetensors")):
        code, out, err = run(capsys, file, again)
        assert code == 2 and out == "" and err.count("\n") == 1
        assert f"{again}: expected each file once, got the same file as '{file}'" in err


def test_an_error_names_the_file_it_is_in(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good = arrays_of({"": capture(tokens=64)})
    first = write(tmp_path / "first.safetensors", {"": capture(tokens=64)})
    nan = good["kv_c"].copy()
    nan[5, 7] = np.nan
    wrong = {
        "shape": {"k_pe": good["k_pe"][:, :32]},
        "short": {"k_pe": good["k_pe"][:9]},
        "nan": {"kv_c": nan},
        "dtype": {"kv_c": good["kv_c"].astype(np.float64)},
        "scale": {"softmax_scale": np.zeros(1)},
        "missing": {"kv_c": None},
    }
    for name, change in wrong.items():
        path = tmp_path / f"{name}.safetensors"
        arrays = {k: v for k, v in {**good, **change}.items() if v is not None}
        path.write_bytes(encode_safetensors(arrays))
        code, _, err = run(capsys, first, str(path))
        (field,) = change
        assert code == 2 and f"error: {path}: {field}: expected " in err, err


def test_progress_counts_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    from snapmla_rt.audit import command

    totals, steps = [], []

    class Counter:
        def __init__(self, label: str, total: int) -> None:
            totals.append(total)

        def __enter__(self) -> Counter:
            return self

        def __exit__(self, *error: Any) -> None: ...

        def advance(self, count: int = 1) -> None:
            steps.append(count)

    monkeypatch.setattr(command, "Progress", Counter)
    audit_layers([capture(0), capture(1), capture(2), capture(3)], SMALL)
    assert totals == [sum(steps)] == [3 * units(True) + units(False)]


def test_bad_captures_are_answered_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good = arrays_of({"layers.0": capture(tokens=64)})
    nan = good["layers.0.kv_c"].copy()
    nan[5, 7] = np.nan
    broken: dict[str, tuple[dict[str, Any], str]] = {
        "shape": ({**good, "layers.0.k_pe": good["layers.0.k_pe"][:, :32]}, "k_pe: expected shape"),
        "nan": ({**good, "layers.0.kv_c": nan}, "kv_c: expected finite values, got nan at [5, 7]"),
        "missing": (
            {k: v for k, v in good.items() if not k.endswith("k_pe")},
            "layers.0.k_pe: expected an array of this name",
        ),
        "short": ({**good, "layers.0.k_pe": good["layers.0.k_pe"][:9]}, "kv_c has 64 tokens"),
    }
    for name, (arrays, message) in broken.items():
        path = tmp_path / f"{name}.safetensors"
        path.write_bytes(encode_safetensors(arrays))
        code, out, err = run(capsys, str(path))
        assert code == 2 and out == "" and err.count("\n") == 1
        assert message in err, err
    code, _, err = run(capsys, str(tmp_path / "absent.safetensors"))
    assert code == 2 and "no such file" in err
    code, _, err = run(capsys, str(path), "--rows", "0")
    assert code == 2 and "--rows" in err


@pytest.mark.skipif(HAS_MATPLOTLIB, reason="matplotlib is installed")
def test_plots_without_matplotlib_say_what_to_install(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write(tmp_path / "x.safetensors", {"": capture()})
    code, out, err = run(capsys, file, "--plots", str(tmp_path / "plots"))
    assert code == 2 and "snapmla-rt[plot]" in err and out == ""


@pytest.fixture
def any_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that can be imported: what the folder is held to does not depend on drawing."""
    if not HAS_MATPLOTLIB:
        monkeypatch.setitem(sys.modules, "matplotlib", types.ModuleType("matplotlib"))


@pytest.mark.usefixtures("any_matplotlib")
def test_plots_go_into_an_existing_or_one_new_directory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write(tmp_path / "x.safetensors", {"": capture(tokens=5)})
    monkeypatch.setattr(audit_command, "read_layers", None)  # all of this is said before the work
    (tmp_path / "file").write_text("x")
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked" / "value_ranges.png").symlink_to(file)
    before = sorted(tmp_path.rglob("*"))
    refused = {
        "no/such": "--plots: expected a path in an existing directory",
        "file": "--plots: expected a directory that can be written",
        "linked": "--plots: expected a file that is no input",
    }
    for folder, message in refused.items():
        code, out, err = run(capsys, file, "--plots", str(tmp_path / folder))
        assert code == 2 and out == "" and err.count("\n") == 1 and message in err, err
    assert sorted(tmp_path.rglob("*")) == before
    assert audit_command._plot_folder(str(tmp_path / "one"), [file]) == tmp_path / "one"
    if Path("/proc/self").exists():
        monkeypatch.setattr(os, "access", lambda *_: True)  # as it answers root
        code, _, err = run(capsys, file, "--plots", "/proc/self")
        assert code == 2 and "--plots: expected a directory that can be written" in err


def test_a_plot_that_cannot_be_written_is_no_traceback(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> list[Path]:
        raise OSError(28, "No space left on device")

    plots = types.ModuleType("snapmla_rt.audit.plots")
    plots.draw = full  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "snapmla_rt.audit.plots", plots)
    monkeypatch.setitem(sys.modules, "matplotlib", types.ModuleType("matplotlib"))
    file = write(tmp_path / "x.safetensors", {"": capture(tokens=5)})
    code, out, err = run(capsys, file, "--rows", "1", "--plots", str(tmp_path / "plots"))
    assert code == 2 and out == "" and "--plots: " in err and "No space left" in err


@needs_matplotlib
def test_plots_show_the_layers_they_were_given(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from snapmla_rt.audit import plots

    file = write(tmp_path / "x.safetensors", {f"layers.{i}": capture(i) for i in range(2)})
    code, _, _ = run(capsys, file, "--rows", "6", "--plots", str(tmp_path / "plots"))
    names = {path.name for path in (tmp_path / "plots").iterdir()}
    expected = ("value_ranges", "error_by_part", "error_by_cache", "error_by_context")
    assert code == 0 and names == {f"{n}.png" for n in (*expected, "error_by_source")}
    assert all((tmp_path / "plots" / name).stat().st_size > 5000 for name in names)
    layers = audit_layers(read_layers([file]), SMALL)
    axes = plots.error_by_cache(layers).axes[2]
    drawn = {line.get_label(): list(line.get_ydata()) for line in axes.get_lines()}
    assert drawn[CONFIGS["A"].title] == [layer.configs["A"].cache_only for layer in layers]
    inset = {line.get_label() for line in axes.child_axes[0].get_lines()}
    assert CONFIGS["A"].title not in inset and CONFIGS["C"].title in inset
    bars = plots.error_by_source(layers).axes[0].patches
    height = sum(bar.get_height() for bar in bars if abs(bar.get_x() + 0.35) < 0.01)
    assert height == pytest.approx(layers[0].decode.relative_l2)


@pytest.mark.slow
def test_a_model_of_32_layers_takes_less_than_a_minute(tmp_path: Path) -> None:
    layer = paper_distribution(4096, 64, 4)
    file = write(tmp_path / "x.safetensors", {f"layers.{i}": layer for i in range(32)})
    start = time.perf_counter()
    assert cli.main(["audit", file, "--json"]) == 0
    assert time.perf_counter() - start < 60


# --- the real capture -----------------------------------------------------------------------------


@needs_sample
def test_the_small_models_capture_is_real_and_its_audit_is_fine() -> None:
    assert SAMPLE.stat().st_size <= 8_000_000
    layers = read_layers([str(SAMPLE)])
    assert len(layers) >= 4 and all(layer.num_heads_q == 16 for layer in layers)
    assert all(layer.num_tokens >= 512 for layer in layers)
    for layer in layers:
        k = layer.kv_c.astype(np.float32)
        assert np.abs(np.corrcoef(k[:-1].ravel(), k[1:].ravel())[0, 1]) > 0.01  # text, not noise
    found = audit_layers(layers[::5], SMALL)
    # Caches that keep RoPE differ by where a layer's few heavy tokens fall between the codes: up to
    # 9 % in tools/results/numerics.md. With RoPE in FP8 a single layer may be lucky, not the mean.
    kept = ("snapmla_pow2", "B", "C", "D", "D_1x128")
    for layer_audit in found:
        own = layer_audit.configs["snapmla"].cache_only
        assert own < 1.15 * min(layer_audit.configs[name].cache_only for name in kept)
        assert verdict(layer_audit).level == "fine"
    split = [a.configs["A_split"].cache_only / a.configs["snapmla"].cache_only for a in found]
    assert np.mean(split) > 1.05


def recipe() -> str:
    """The capture recipe of the README."""
    readme = (Path(__file__).resolve().parent.parent / "README.md").read_text()
    return readme.split("```python\nimport torch\n", 1)[1].split("```", 1)[0]


def test_the_recipe_is_short_and_python() -> None:
    lines = [line for line in recipe().splitlines() if line.strip()]
    assert len(lines) < 30
    compile(recipe(), "README.md", "exec")


def test_the_recipe_captures_what_the_model_computes(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch", reason="the recipe needs torch")
    transformers = pytest.importorskip("transformers", reason="the recipe needs transformers")
    from snapmla_rt.reference.attention_fp64 import attention_fp64

    space: dict[str, Any] = {"torch": torch}
    exec(compile(recipe(), "README.md", "exec"), space)
    config = transformers.DeepseekV3Config(
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        q_lora_rank=48,
        intermediate_size=32,
        first_k_dense_replace=2,
        vocab_size=50,
        initializer_range=0.1,
    )
    torch.manual_seed(0)
    model = transformers.DeepseekV3ForCausalLM(config).eval()
    outputs = {}
    for layer in model.model.layers:
        layer.self_attn.register_forward_hook(
            lambda attn, args, out: outputs.update({attn.layer_idx: out[0][0]})
        )
    path = tmp_path / "hf.safetensors"
    space["capture"](model, torch.randint(50, (1, 40)), path)
    for index, layer in enumerate(read_layers([str(path)])):
        attn = model.model.layers[index].self_attn
        values = attn.kv_b_proj.weight.view(4, -1, 512)[:, 128:].detach().double().numpy()
        keys = np.concatenate([layer.kv_c, layer.k_pe], axis=1).astype(np.float64)
        out, _ = attention_fp64(layer.q[-1:].astype(np.float64), [keys], layer.softmax_scale)
        heads = np.einsum("hc,hvc->hv", out[0, 0], values).reshape(-1)
        got = attn.o_proj.weight.detach().double().numpy() @ heads
        want = outputs[index][-1].double().numpy()
        assert np.linalg.norm(got - want) < 0.02 * np.linalg.norm(want)  # bf16 of the capture


def test_the_package_knows_no_plots_until_asked() -> None:
    """matplotlib is an extra: reading captures and measuring must not import it."""
    import subprocess

    code = "import sys, snapmla_rt.cli; sys.exit('matplotlib' in sys.modules)"
    root = Path(__file__).resolve().parent.parent
    assert subprocess.run([sys.executable, "-c", code], cwd=root, check=False).returncode == 0
