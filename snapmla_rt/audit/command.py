"""`snapmla audit FILE...`: read captures, measure every layer, print, draw."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..capture import LayerCapture, read_capture
from ..errors import ArgumentError
from ..progress import Progress
from ..report import json_text

if TYPE_CHECKING:
    from .measure import LayerAudit, Sampling

_EXACT_ROWS, _EXACT_ROWS_UNCOMPILED = 16, 2


def add_command(commands: Any, integer: Any) -> None:
    """Add `audit` to the subparsers of the command line; integer(low, high) parses numbers."""
    parser = commands.add_parser(
        "audit",
        help="what FP8 costs a model, layer by layer, from captures of it",
        description="Measure the error of FP8 caches on captured activations, without a GPU.",
    )
    option = parser.add_argument
    option("files", nargs="+", metavar="FILE", help=".safetensors or .npz captures")
    option("--rows", type=integer(1, 4096), default=48, help="query rows measured a layer (48)")
    option("--plots", metavar="DIR", help="write five plots there (needs snapmla-rt[plot])")
    option("--json", action="store_true", help="print JSON instead of tables")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """The command; returns its exit code."""
    # The reference is loaded by the command, not by the command line.
    from ..reference.tensor_core import compiled_available
    from .measure import Sampling
    from .report import audit_dict, audit_text

    folder = _plot_folder(args.plots)
    layers = read_layers(args.files)
    exact = _EXACT_ROWS if compiled_available() else _EXACT_ROWS_UNCOMPILED
    sampling = Sampling(args.rows, min(args.rows, exact))
    found = audit_layers(layers, sampling)
    written: list[str] = []
    if folder is not None:
        from .plots import draw

        written = [str(path) for path in draw(found, folder)]
    if args.json:
        print(json_text({**audit_dict(found, args.files, sampling), "plots": written}))
    else:
        print(audit_text(found, args.files, sampling))
        for path in written:
            print(f"written    {path}")
    return 0


def _plot_folder(text: str | None) -> Path | None:
    """Where plots go; what could stop them is said before the work."""
    if text is None:
        return None
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        expected = 'matplotlib (pip install "snapmla-rt[plot]")'
        raise ArgumentError("--plots", expected, "no matplotlib") from error
    path = Path(text)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ArgumentError("--plots", "a directory that can be written", error) from error
    return path


def read_layers(files: list[str]) -> list[LayerCapture]:
    """All layers of the files; of several files, named after theirs."""
    layers = []
    with Progress("read", len(files)) as progress:
        for file in files:
            for layer in read_capture(file):
                name = layer.name
                if len(files) > 1:
                    name = f"{Path(file).stem}.{name}" if name else Path(file).stem
                layers.append(replace(layer, name=name))
            progress.advance()
    return layers


def audit_layers(layers: list[LayerCapture], sampling: Sampling) -> list[LayerAudit]:
    """Audit every layer, with a progress bar; context lengths on the first, middle and last."""
    from .measure import audit_layer, units

    with_contexts = {0, len(layers) // 2, len(layers) - 1}
    total = sum(units(index in with_contexts) for index in range(len(layers)))
    with Progress("audit", total) as progress:
        return [
            audit_layer(layer, sampling, index in with_contexts, progress.advance)
            for index, layer in enumerate(layers)
        ]
