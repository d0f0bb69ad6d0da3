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

from snapmla_rt import __version__, cli, places, progress, run_backends
from snapmla_rt.capture import encode_safetensors, paper_distribution, read_safetensors
from snapmla_rt.decode_run import DecodeOptions, decode_run
from snapmla_rt.errors import USE_REFERENCE, ArgumentError, UnsupportedDeviceError
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


@pytest.mark.parametrize("suffix", [".npz", ".safetensors"])
@pytest.mark.parametrize("way", ["itself", "symbolic link", "hard link", "other spelling"])
def test_an_input_is_never_overwritten(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    suffix: str,
    way: str,
) -> None:
    """Said before any work, and the capture is whole afterwards."""
    monkeypatch.setattr(cli, "read_capture", None)  # called: TypeError
    capture, out = tmp_path / f"c{suffix}", tmp_path / f"out{suffix}"
    capture.write_bytes(b"precious")
    if way == "symbolic link":
        out.symlink_to(capture)
    elif way == "hard link":
        os.link(capture, out)
    else:
        out = capture if way == "itself" else tmp_path / ".." / tmp_path.name / capture.name
    code, _, err = run(capsys, "decode", str(capture), *REFERENCE, "--out", str(out))
    assert code == 2 and "--out: expected a file that is no input, got " in err, err
    assert err.count("\n") == 1 and capture.read_bytes() == b"precious"


def test_out_where_no_file_can_be_made_is_said_before_the_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where access(2) says yes: to root it does so of /proc."""
    monkeypatch.setattr(cli, "decode_run", None)
    monkeypatch.setattr(os, "access", lambda *_: True)
    if Path("/proc/self").exists():
        code, _, err = run(capsys, "decode", *SMALL, "--out", "/proc/x.npz")
        assert code == 2 and "--out: expected a file that can be written" in err
    long = str(tmp_path / ("x" * 300) / "out.npz")  # Path.is_dir() raises for it before 3.12
    code, _, err = run(capsys, "decode", *SMALL, "--out", long)
    assert code == 2 and "--out: expected a path in an existing directory" in err
    code, _, err = run(capsys, "decode", long)
    assert code == 2 and "File name too long" in err and err.count("\n") == 1


def test_whether_a_place_can_be_written_is_tried(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "astray").symlink_to(tmp_path / "nowhere" / "at all")
    before = sorted(tmp_path.rglob("*"))
    for good in (".", "new", "new/and/deep"):
        assert places.why_not_writable(tmp_path / good) is None
    for bad in ("file", "file/below", "astray", "astray/below", "x" * 300):
        assert places.why_not_writable(tmp_path / bad), bad
    assert sorted(tmp_path.rglob("*")) == before


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
        raise UnsupportedDeviceError(f"no Hopper GPU: found none; {USE_REFERENCE} runs anywhere")

    monkeypatch.setattr(run_backends, "_cuda_backend", absent)
    assert make_backend("auto", 64, "exact").name == "reference"
    with pytest.raises(ArgumentError, match="backend"):
        make_backend("rocm", 64, "exact")
    code, _, err = run(capsys, "decode", *SMALL, "--backend", "cuda")
    # asked for by an option, so the answer speaks of options
    assert code == 2 and err == (
        "snapmla: error: --backend: expected what this machine can run, got cuda: "
        "no Hopper GPU: found none; --backend reference runs anywhere\n"
    )


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


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="no /proc")
def test_the_doctor_tries_whether_the_cache_can_be_written(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda *_: True)  # as it answers root
    monkeypatch.setenv("SNAPMLA_CACHE_DIR", "/proc/x")
    code, out, _ = run(capsys, "doctor", "--json")
    report = json.loads(out)
    assert code == 0 and report["kernel_cache"]["writable"] is False
    assert any("/proc/x cannot be written" in text for text in report["advice"])


def test_the_doctor_survives_a_cache_directory_that_cannot_be(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SNAPMLA_CACHE_DIR", "/" + "x" * 300)
    code, out, _ = run(capsys, "doctor")
    assert code == 0 and "cannot be written (File name too long)" in out


def test_the_doctor_names_the_reference_in_both_ways(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from snapmla_rt import doctor

    monkeypatch.setattr(doctor, "report", lambda: {"advice": [f"use {USE_REFERENCE}"]})
    _, out, _ = run(capsys, "doctor")
    assert "use backend='reference' (snapmla decode --backend reference)" in out


@pytest.mark.parametrize("argv", [["decode", *SMALL, *REFERENCE], ["audit", "x.npz"]])
def test_a_wrong_jit_variable_stops_a_command_in_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, argv: list[str]
) -> None:
    monkeypatch.setenv("SNAPMLA_JIT", "foo")
    code, out, err = run(capsys, *argv)
    assert code == 2 and out == ""
    assert err == (
        "snapmla: error: SNAPMLA_JIT: expected one of ('import', 'lazy', 'off'), got 'foo'\n"
    )


def test_the_doctor_reports_wrong_variables(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SNAPMLA_JIT", "foo")
    monkeypatch.setenv("SNAPMLA_DEBUG", "off")
    code, out, err = run(capsys, "doctor", "--json")
    report = json.loads(out)
    assert code == 0 and err == "" and report["ready"] is False
    (jit,) = (text for text in report["advice"] if text.startswith("SNAPMLA_JIT"))
    assert "expected one of ('import', 'lazy', 'off'), got 'foo'" in jit and "unset it" in jit
    assert any(
        text.startswith("SNAPMLA_DEBUG='off' turns debugging on") for text in report["advice"]
    )
    for name, value in (("SNAPMLA_JIT", "off"), ("SNAPMLA_DEBUG", "0")):
        monkeypatch.setenv(name, value)
    _, out, _ = run(capsys, "doctor", "--json")
    assert not any("SNAPMLA_JIT" in text for text in json.loads(out)["advice"])


@pytest.mark.parametrize(
    ("command", "code"), [(["decode", *SMALL, *REFERENCE], 2), (["doctor"], 0)]
)
def test_a_process_with_a_wrong_jit_variable_says_so_once(
    repo_root: Path, command: list[str], code: int
) -> None:
    """`python -m` and the installed script: the warning of the import does not come on top."""
    env = {**os.environ, "SNAPMLA_JIT": "foo", "PYTHONPATH": str(repo_root)}
    script = "import sys; sys.argv[0] = '/bin/snapmla'; from snapmla_rt.cli import main; "
    script += "sys.exit(main())"
    for start in (["-m", "snapmla_rt"], ["-c", script]):
        done = subprocess.run(
            [sys.executable, *start, *command], env=env, capture_output=True, text=True
        )
        assert done.returncode == code, done.stderr
        assert done.stderr.count("\n") == (1 if code else 0), done.stderr
        assert "SNAPMLA_JIT: expected one of" in done.stdout + done.stderr


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
