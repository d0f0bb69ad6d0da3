"""The command line: the main job end to end, and what a user's mistakes are answered with."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from compare import assert_same_bytes

from snapmla_rt import __version__, cli, progress, run_backends
from snapmla_rt.capture import encode_safetensors, paper_distribution, read_safetensors
from snapmla_rt.decode_run import DecodeOptions, decode_run
from snapmla_rt.errors import ArgumentError, UnsupportedDeviceError
from snapmla_rt.metrics import error_summary
from snapmla_rt.reference import tensor_core
from snapmla_rt.reference.attention_fp64 import attention_fp64
from snapmla_rt.reference.fetch_dequant import fetch_dequant
from snapmla_rt.reference.mla_decode import mla_decode
from snapmla_rt.reference.plan_decode import plan_decode
from snapmla_rt.reference.quantize_q import quantize_q
from snapmla_rt.report import json_text
from snapmla_rt.run_backends import ReferenceBackend, StageTimes, make_backend

SMALL = ["--tokens", "150", "--heads", "3", "--steps", "2", "--seq-len-q", "2"]
REFERENCE = ["--backend", "reference"]
STAGES = ["append_kv", "quantize_q", "plan_decode", "mla_decode", "mla_combine"]


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    code = cli.main(list(argv))
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def write_capture(path: Path, layers: dict[str, Any]) -> None:
    """A safetensors file of LayerCaptures by name."""
    arrays = {}
    for name, layer in layers.items():
        prefix = f"{name}." if name else ""
        for field in ("q", "kv_c", "k_pe"):
            arrays[prefix + field] = getattr(layer, field)
        arrays[prefix + "softmax_scale"] = np.array([layer.softmax_scale], np.float64)
    path.write_bytes(encode_safetensors(arrays))


# --- the main job ---------------------------------------------------------------------------------


def test_the_table_names_everything_the_job_measures(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "decode", *SMALL, *REFERENCE)
    assert code == 0 and err == ""  # no progress bar where nobody watches
    assert "644 bytes a token, BF16 1152 (55.9 %)" in out
    assert "150 tokens (146 prefilled), 2 steps of 2, 3 heads" in out
    for word in ("relative L2", "cosine diff.", "worst element", "lse error", *STAGES):
        assert word in out
    assert out.count("float64") == 3


def test_json_holds_the_same_run_and_plausible_errors(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "decode", *SMALL, *REFERENCE, "--json")
    result = json.loads(out)
    assert code == 0 and result["backend"] == "reference"
    (layer,) = result["layers"]
    assert (layer["tokens"], layer["steps"], layer["seq_len_q"]) == (150, 2, 2)
    assert layer["num_heads_q"] == 3 and layer["prefill_tokens"] == 146
    assert list(result["stages"]) == STAGES
    assert result["stages"]["append_kv"]["calls"] == 3  # one prefill and two steps
    assert all(stage["seconds"] > 0 for stage in result["stages"].values())
    assert result["cache"]["bytes_per_token"] == 644
    assert result["cache"]["cache_bytes"] == 150 * 644
    errors = layer["errors"]
    # e4m3 latents cost a few per cent against the inputs as they came; the decode itself far less
    assert 5e-3 < errors["unquantised"]["relative_l2"] < 0.1
    assert 0 < errors["dequantised"]["relative_l2"] < errors["unquantised"]["relative_l2"]
    assert len(errors["dequantised"]["worst_at"]) == 4


def test_the_generated_capture_loses_nothing_but_the_rounding_of_p() -> None:
    """4,096 tokens x 64 heads: within 5 % of float64 attention whose only change is P in e4m3."""
    layer = paper_distribution(4096, 64, 1)
    errors = decode_run([layer], DecodeOptions(backend="reference")).layers[0].errors
    assert errors.dequantised.relative_l2 <= 1.05 * errors.floor.relative_l2
    assert errors.floor.relative_l2 > 5e-3  # so the line above says something
    # and with the output in bf16 on both sides the two agree far closer
    assert errors.dequantised.relative_l2 <= 1.01 * errors.floor_bf16.relative_l2


@pytest.mark.parametrize("options", [[], ["--block-n", "128"], ["--scale-rounding", "pow2"]])
def test_outputs_equal_the_stages_called_by_hand(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str]
) -> None:
    """One batch over a cache filled at once gives the bytes of prefill and steps."""
    path = tmp_path / "out.safetensors"
    code, _, _ = run(capsys, "decode", *SMALL, *REFERENCE, *options, "--out", str(path))
    assert code == 0
    got = read_safetensors(path)
    block_n = 128 if "128" in options else 64
    rounding = "pow2" if "pow2" in options else "exact"
    layer = paper_distribution(150, 3, 2, 2, 0)
    backend = ReferenceBackend(block_n, rounding)
    backend.allocate(3)
    backend.append(layer.kv_c, layer.k_pe, np.arange(150))
    for step, seqlen in enumerate((148, 150)):
        plan = plan_decode([seqlen], 3, 2, block_n=block_n)
        out, lse = mla_decode(
            *quantize_q(layer.q[step : step + 1], scale_rounding=rounding),
            *backend.cache_on_host(),
            np.arange(3, dtype=np.int32)[None],
            np.array([seqlen], np.int32),
            plan,
            layer.softmax_scale,
        )
        assert_same_bytes(f"out of step {step}", got["out"][step], out[0])
        assert_same_bytes(f"lse of step {step}", got["lse"][step], lse[0])


def test_the_printed_error_is_that_of_the_written_output(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "out.npz"
    code, text, _ = run(capsys, "decode", *SMALL, *REFERENCE, "--json", "--out", str(path))
    assert code == 0
    layer = paper_distribution(150, 3, 2, 2, 0)
    keys = np.concatenate([layer.kv_c, layer.k_pe], axis=1)
    expected, expected_lse = attention_fp64(layer.q, [keys[:148], keys], layer.softmax_scale)
    with np.load(path) as archive:
        assert archive["out"].dtype == np.float32 and archive["out"].shape == (2, 2, 3, 512)
        error = archive["out"] - expected
        lse_error = np.abs(archive["lse"] - expected_lse).max()
    printed = json.loads(text)["layers"][0]["errors"]["unquantised"]
    assert printed["relative_l2"] == pytest.approx(
        np.linalg.norm(error) / np.linalg.norm(expected), rel=1e-9
    )
    assert printed["worst_element"] == pytest.approx(np.abs(error).max(), rel=1e-9)
    assert printed["lse_error"] == pytest.approx(lse_error, rel=1e-6)
    assert tuple(printed["worst_at"]) == np.unravel_index(np.abs(error).argmax(), error.shape)


def test_a_file_of_several_layers_gives_a_table_each(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "capture.safetensors"
    layers = {f"layers.{i}": paper_distribution(70 + i, 2, 3, 1, i) for i in (0, 1)}
    write_capture(path, layers)
    out_path = tmp_path / "out.npz"
    code, text, _ = run(capsys, "decode", str(path), *REFERENCE, "--json", "--out", str(out_path))
    assert code == 0
    result = json.loads(text)
    assert [layer["name"] for layer in result["layers"]] == ["layers.0", "layers.1"]
    assert [layer["tokens"] for layer in result["layers"]] == [70, 71]
    assert result["cache"]["cache_bytes"] == 141 * 644
    with np.load(out_path) as archive:
        assert sorted(archive.files) == [
            f"layers.{i}.{part}" for i in (0, 1) for part in ("lse", "out")
        ]
    # --steps keeps the first steps, whose bytes do not depend on the rest
    code, _, _ = run(
        capsys, "decode", str(path), *REFERENCE, "--steps", "1", "--out", str(tmp_path / "1.npz")
    )
    assert code == 0
    with np.load(out_path) as whole, np.load(tmp_path / "1.npz") as first:
        assert_same_bytes("out", first["layers.1.out"], whole["layers.1.out"][:1])


def test_a_capture_without_prefill_and_queries_before_any_key() -> None:
    """All tokens are decode tokens: the first step sees itself only."""
    layer = paper_distribution(4, 2, 2, 2, 1)
    (result,) = decode_run([layer], DecodeOptions(backend="reference")).layers
    assert layer.prefill_tokens == 0
    # the first query token sees one key: the answer is that key's latent, whatever the query
    backend = ReferenceBackend(64, "exact")
    backend.allocate(1)
    backend.append(layer.kv_c, layer.k_pe, np.arange(4))
    latent, _ = fetch_dequant(*backend.cache_on_host(), np.array([0]))
    np.testing.assert_allclose(
        result.out[0, 0].astype(np.float32),
        np.tile(latent.astype(np.float32), (2, 1)),
        rtol=2**-7,  # both are bf16, each rounded once
    )


def test_json_of_a_number_that_json_lacks() -> None:
    summary = error_summary(np.ones(3), np.zeros(3), np.zeros(1), np.zeros(1))
    assert summary.relative_l2 == float("inf")
    assert json.loads(json_text({"a": summary.as_dict()}))["a"]["relative_l2"] is None


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_nan_output_is_never_reported_as_small(bad: float) -> None:
    out = np.ones((2, 3))
    out[1, 2] = bad
    summary = error_summary(out, np.ones((2, 3)), np.zeros(2), np.zeros(2))
    assert not summary.relative_l2 < 1 and not summary.worst_element < 1
    assert summary.worst_at == (1, 2)
    lse = error_summary(np.ones(3), np.ones(3), np.array([0.0, np.nan]), np.zeros(2))
    assert np.isnan(lse.lse_error) and lse.relative_l2 == 0.0


# --- mistakes -------------------------------------------------------------------------------------

WRONG: list[tuple[list[str], str]] = [
    (["decode", "--tokens", "0"], "--tokens: expected an integer of 1..1048576, got '0'"),
    (["decode", "--tokens", "many"], "--tokens: expected an integer of 1..1048576, got 'many'"),
    (["decode", "--heads", "129"], "--heads: expected an integer of 1..128, got '129'"),
    (["decode", "--seq-len-q", "9"], "--seq-len-q: expected an integer of 1..8, got '9'"),
    (["decode", "--steps", "-3"], "--steps: expected an integer >= 1, got '-3'"),
    (["decode", "--seed", "-1"], "--seed: expected an integer >= 0, got '-1'"),
    (["decode", "--steps", "5", "--tokens", "4"], r"at most the 4 of --tokens, got 5 \* 1"),
    (["decode", "--block-n", "96"], "--block-n: invalid choice: '?96'?"),
    (["decode", "--scale-rounding", "up"], "--scale-rounding: invalid choice: 'up'"),
    (["decode", "--backend", "tpu"], "--backend: invalid choice: 'tpu'"),
    (["decode", "--frobnicate"], "unrecognized arguments: --frobnicate"),
    (["decode", "missing.npz"], "missing.npz: expected a readable .* got no such file"),
    (["decode", "."], "got a directory"),
    (["decode", "--out", "x.csv"], "--out: expected a path ending in .npz or .safetensors"),
    (["decode", "--out", "no/such/dir/x.npz"], "--out: expected a path in an existing directory"),
    (["decod"], "invalid choice: 'decod'"),
    ([], "required: COMMAND"),
]


@pytest.mark.parametrize(("argv", "message"), WRONG, ids=[" ".join(a) or "none" for a, _ in WRONG])
def test_a_mistake_is_one_line_and_exit_code_2(
    capsys: pytest.CaptureFixture[str], argv: list[str], message: str
) -> None:
    code, out, err = run(capsys, *argv)
    assert code == 2 and out == ""
    assert err.count("\n") == 1 and "Traceback" not in err
    assert re.search(message, err), err


@pytest.mark.parametrize("flag", ["--tokens", "--heads", "--seq-len-q", "--seed"])
def test_a_file_fixes_what_the_flags_would_make(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flag: str
) -> None:
    write_capture(tmp_path / "c.safetensors", {"": paper_distribution(5, 1, 1)})
    code, _, err = run(capsys, "decode", str(tmp_path / "c.safetensors"), flag, "2")
    assert code == 2 and f"{flag}: expected no value where FILE gives the data, got 2" in err


def test_nan_in_a_capture_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    layer = paper_distribution(5, 1, 1)
    layer.k_pe[3, 7] = np.nan
    write_capture(tmp_path / "c.safetensors", {"layers.3": layer})
    code, _, err = run(capsys, "decode", str(tmp_path / "c.safetensors"))
    assert code == 2 and "layers.3.k_pe: expected finite values, got nan at [3, 7]" in err


def test_a_failed_write_leaves_the_old_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "out.npz"
    path.write_bytes(b"old")

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "savez", full)
    argv = ["--tokens", "2", "--heads", "1", "--steps", "1", "--out", str(path)]
    code, _, err = run(capsys, "decode", *REFERENCE, *argv)
    assert code == 2 and "--out: " in err and "No space left" in err
    assert path.read_bytes() == b"old" and list(tmp_path.iterdir()) == [path]


def test_interruption_is_code_130_without_a_traceback(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "decode_run", interrupted)
    code, _, err = run(capsys, "decode", *SMALL)
    assert code == 130 and err == "snapmla: interrupted\n"


# --- backends, progress, the other commands -------------------------------------------------------


def test_auto_falls_back_to_the_reference_and_cuda_does_not(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def absent(*_: Any) -> None:
        raise UnsupportedDeviceError("no Hopper GPU: found none")

    monkeypatch.setattr(run_backends, "_cuda_backend", absent)
    assert make_backend("auto", 64, "exact").name == "reference"
    with pytest.raises(ArgumentError, match="backend"):
        make_backend("rocm", 64, "exact")
    code, _, err = run(capsys, "decode", *SMALL, "--backend", "cuda")
    assert code == 1 and err == "snapmla: error: no Hopper GPU: found none\n"


def test_stage_times_count_calls() -> None:
    times = StageTimes()
    with times.measure("a"):
        pass
    times.add("a", 2.0)
    times.add("b", 1.0)
    assert times.calls == {"a": 2, "b": 1} and 2.0 <= times.seconds["a"] < 2.1


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_the_bar_shows_on_a_terminal_only_and_cleans_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "_PATIENCE", 0.0)
    monkeypatch.setattr(progress, "_MIN_INTERVAL", 0.0)
    for stream in (_Terminal(), io.StringIO()):
        with progress.Progress("decode", 4, stream) as bar:
            for _ in range(4):
                bar.advance()
        text = stream.getvalue()
        if stream.isatty():
            assert "decode [#######" in text and "4/4" in text and text.endswith("\r\x1b[K")
        else:
            assert text == ""


def test_version_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "--version")[:2] == (0, f"snapmla_rt {__version__}\n")
    code, out, _ = run(capsys, "--help")
    assert code == 0 and all(name in out for name in ("decode", "doctor", "precompile"))


def test_doctor_says_what_this_machine_has(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("snapmla_rt.doctor")
    code, out, _ = run(capsys, "doctor", "--json")
    report = json.loads(out)
    assert code == 0 and report
    text = json.dumps(report).lower()
    for word in ("driver", "gpu", "nvrtc", "cache"):
        assert word in text
    compiled = tensor_core.compiled_available()
    assert report["cores"]["reference._wgmma"] == ("compiled" if compiled else "pure Python")
    code, out, _ = run(capsys, "doctor")
    assert code == 0 and len(out.splitlines()) >= 5


def test_precompile_takes_its_own_options(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from snapmla_rt.jit import precompile

    seen: list[list[str]] = []

    def fake(argv: list[str]) -> int:
        seen.append(argv)
        return 7

    monkeypatch.setattr(precompile, "main", fake)
    assert cli.main(["precompile", "--check", "--kernel", "append_kv"]) == 7
    assert seen == [["--check", "--kernel", "append_kv"]]


def test_python_dash_m_from_a_bare_checkout(repo_root: Path) -> None:
    """The same command without installation; a mistake shows no traceback there either."""
    command = [sys.executable, "-m", "snapmla_rt", "decode", *REFERENCE]
    small = ["--tokens", "65", "--heads", "1", "--steps", "1"]
    done = subprocess.run([*command, *small], cwd=repo_root, capture_output=True, text=True)
    assert done.returncode == 0 and "relative L2" in done.stdout and done.stderr == ""
    wrong = subprocess.run([*command, "none.npz"], cwd=repo_root, capture_output=True, text=True)
    assert wrong.returncode == 2 and wrong.stderr.count("\n") == 1


def test_a_closed_pipe_is_no_traceback(repo_root: Path) -> None:
    """`snapmla decode | head`: the reader is gone when the table is printed."""
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "snapmla_rt", "decode", *REFERENCE]
    small = ["--tokens", "3", "--heads", "1", "--steps", "1"]
    with os.fdopen(writer, "wb") as pipe:
        done = subprocess.run(
            [*command, *small], cwd=repo_root, stdout=pipe, stderr=subprocess.PIPE, text=True
        )
    assert done.returncode == 1 and done.stderr == ""


def test_bfloat16_is_the_public_output_type() -> None:
    layer = paper_distribution(3, 1, 1)
    (result,) = decode_run([layer], DecodeOptions(backend="reference")).layers
    assert result.out.dtype == np.dtype(ml_dtypes.bfloat16) and result.lse.dtype == np.float32


def test_one_minus_cosine_is_never_negative_and_keeps_nan() -> None:
    """Equal vectors whose cosine rounds to just above 1."""
    differences = []
    for seed in range(50):
        x = np.random.default_rng(seed).standard_normal(1000)
        differences.append(error_summary(x, x, np.zeros(1), np.zeros(1)).cosine_difference)
        assert differences[-1] < 1e-14
    assert min(differences) == 0.0
    x = np.array([1.0, np.nan])
    assert np.isnan(error_summary(x, np.ones(2), np.zeros(1), np.zeros(1)).cosine_difference)
