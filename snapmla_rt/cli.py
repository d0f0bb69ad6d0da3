"""The command line: `snapmla decode | audit | doctor | precompile`, or `python -m snapmla_rt`.

Exit codes: 0 done; 1 the work failed; 2 bad input, told in one line that names the argument, what
was expected and what came; 130 interrupted.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from . import __version__
from .arguments import OneLineParser, integer
from .audit.command import add_command as add_audit
from .backend import BACKENDS
from .capture import LayerCapture, encode_safetensors, paper_distribution, read_capture
from .config import BLOCK_N_CHOICES, MAX_CACHE_SEQLEN, MAX_NUM_HEADS_Q, SCALE_ROUNDINGS
from .decode_run import DecodeOptions, RunResult, bytes_report, decode_run
from .environment import jit_mode
from .errors import USE_REFERENCE, ArgumentError, SnapMLAError, UnsupportedDeviceError
from .places import refuse_inputs, why_not_writable
from .report import doctor_text, json_text, run_dict, run_text

# What a run without FILE makes; the reference needs a minute for it where no core is compiled.
DEFAULTS = {"tokens": 4096, "heads": 64, "steps": 8, "seq_len_q": 1, "seed": 0}
MAX_SEQ_LEN_Q = 8
_OUT_SUFFIXES = (".npz", ".safetensors")
_USE_REFERENCE = "--backend reference"  # what USE_REFERENCE is here


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        if arguments[:1] == ["precompile"]:  # has options of its own
            from .jit.precompile import main as precompile

            return precompile(arguments[1:])
        args = _parser().parse_args(arguments)
        if args.run is not _doctor:  # which says what is wrong instead of stopping at it
            jit_mode()
        code = int(args.run(args))
        sys.stdout.flush()  # a reader that went away shows here, not while Python shuts down
        return code
    except SystemExit as stop:  # --help, --version and argparse's errors
        return stop.code if isinstance(stop.code, int) else 2
    except SnapMLAError as error:
        message = str(error).replace(USE_REFERENCE, _USE_REFERENCE)
        print(f"snapmla: error: {message}", file=sys.stderr)
        return 2 if isinstance(error, ArgumentError) else 1
    except KeyboardInterrupt:
        print("snapmla: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of a pipe went away, as `snapmla ... | head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _parser() -> argparse.ArgumentParser:
    about = __doc__.partition("\n")[0] if __doc__ else None
    parser = OneLineParser(prog="snapmla", description=about)
    parser.add_argument("--version", action="version", version=f"snapmla_rt {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    _add_decode(commands)
    add_audit(commands)
    doctor = commands.add_parser("doctor", help="what this machine has, and what is missing")
    doctor.add_argument("--json", action="store_true", help="print JSON")
    doctor.set_defaults(run=_doctor)
    # dispatched before argparse sees it; named here for --help
    commands.add_parser("precompile", help="compile all kernels into the cache (no GPU needed)")
    return parser


def _add_decode(commands: Any) -> None:
    decode = commands.add_parser(
        "decode",
        help="decode a capture through an FP8 cache and measure the error",
        description=(
            "Prefill a paged FP8 cache, decode step by step, and compare with float64 attention."
        ),
    )
    option = decode.add_argument
    option("file", nargs="?", metavar="FILE", help=".safetensors or .npz capture; else made up")
    tokens, heads = integer(1, MAX_CACHE_SEQLEN), integer(1, MAX_NUM_HEADS_Q)
    option("--tokens", type=tokens, help="tokens, steps included (4096; without FILE)")
    option("--heads", type=heads, help="query heads (64; without FILE)")
    option("--steps", type=integer(1), help="decode steps (8; with FILE: its first steps)")
    option("--seq-len-q", type=integer(1, MAX_SEQ_LEN_Q), help="tokens a step (1; without FILE)")
    option("--seed", type=integer(0), help="of the made-up data (0; without FILE)")
    option("--block-n", type=int, choices=BLOCK_N_CHOICES, default=64, help="tokens of a block")
    option("--scale-rounding", choices=SCALE_ROUNDINGS, default="exact")
    option("--backend", choices=BACKENDS, default="auto", help="auto: CUDA where it can run")
    option("--out", metavar="PATH", help="write out and lse (.npz: out as float32; .safetensors)")
    option("--json", action="store_true", help="print JSON instead of the table")
    decode.set_defaults(run=_decode)


def _decode(args: argparse.Namespace) -> int:
    # before the work: nothing is computed that cannot be kept
    out = _out_path(args.out, [] if args.file is None else [args.file])
    captures = _captures(args)
    options = DecodeOptions(args.block_n, args.scale_rounding, args.backend)
    result = _run(captures, options)
    if out is not None:
        _write_outputs(out, result)
    source = args.file or f"made up (seed {_given(args, 'seed')})"
    sizes = bytes_report(sum(layer.capture.num_tokens for layer in result.layers))
    if args.json:
        print(json_text(run_dict(result, sizes, source, args.out)))
    else:
        print(run_text(result, sizes, source, args.out))
    return 0


def _run(captures: list[LayerCapture], options: DecodeOptions) -> RunResult:
    try:
        return decode_run(captures, options)
    except UnsupportedDeviceError as error:
        if options.backend != "cuda":
            raise
        # It was asked for where it cannot be had: a matter of the options, not of the work.
        raise ArgumentError("--backend", "what this machine can run", f"cuda: {error}") from error


def _given(args: argparse.Namespace, name: str) -> int:
    value = getattr(args, name)
    return DEFAULTS[name] if value is None else int(value)


def _captures(args: argparse.Namespace) -> list[LayerCapture]:
    if args.file is None:
        tokens, steps, seq_len_q = (_given(args, n) for n in ("tokens", "steps", "seq_len_q"))
        if steps * seq_len_q > tokens:
            expected = f"steps * seq-len-q of at most the {tokens} of --tokens"
            raise ArgumentError("--steps", expected, f"{steps} * {seq_len_q}")
        heads, seed = _given(args, "heads"), _given(args, "seed")
        return [paper_distribution(tokens, heads, steps, seq_len_q, seed)]
    for name in ("tokens", "heads", "seq_len_q", "seed"):
        if getattr(args, name) is not None:
            flag = "--" + name.replace("_", "-")
            raise ArgumentError(flag, "no value where FILE gives the data", getattr(args, name))
    captures = read_capture(args.file)
    return captures if args.steps is None else [c.first_steps(args.steps) for c in captures]


def _doctor(args: argparse.Namespace) -> int:
    from . import doctor

    report = doctor.report()
    both = f"{USE_REFERENCE} (snapmla decode {_USE_REFERENCE})"  # who asks may write either
    report["advice"] = [text.replace(USE_REFERENCE, both) for text in report["advice"]]
    print(json_text(report) if args.json else doctor_text(report))
    return 0


# --- writing --------------------------------------------------------------------------------------


def _out_path(text: str | None, inputs: Sequence[str]) -> Path | None:
    if text is None:
        return None
    path = Path(text)
    if path.suffix.lower() not in _OUT_SUFFIXES:
        raise ArgumentError("--out", "a path ending in .npz or .safetensors", repr(text))
    refuse_inputs("--out", path, inputs)
    if not os.path.isdir(path.parent):
        raise ArgumentError("--out", "a path in an existing directory", repr(text))
    if os.path.isdir(path) or (os.path.exists(path) and not os.access(path, os.W_OK)):
        raise ArgumentError("--out", "a file that can be written", repr(text))
    reason = why_not_writable(path.parent)
    if reason is not None:
        raise ArgumentError("--out", "a file that can be written", f"{text!r} ({reason})")
    return path


def _write_outputs(path: Path, result: RunResult) -> None:
    """Write to a file beside it and move that over `path`: an interrupted run leaves no half."""
    arrays: dict[str, Any] = {}
    for layer in result.layers:
        prefix = f"{layer.capture.name}." if layer.capture.name else ""
        arrays[prefix + "out"] = layer.out
        arrays[prefix + "lse"] = layer.lse
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            if path.suffix.lower() == ".npz":
                np.savez(file, **{k: v.astype(np.float32) for k, v in arrays.items()})
            else:
                file.write(encode_safetensors(arrays))
        os.replace(temporary, path)
    except OSError as error:
        raise ArgumentError("--out", "a file that can be written", error) from error
    finally:
        temporary.unlink(missing_ok=True)


if __name__ == "__main__":
    sys.exit(main())
