"""`snapmla audit FILE...`: read captures, measure every layer, print, draw."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..arguments import integer
from ..capture import LayerCapture, read_capture
from ..errors import ArgumentError
from ..places import refuse_inputs, same_file, why_not_writable
from ..progress import Progress
from ..report import json_text

if TYPE_CHECKING:
    from .measure import LayerAudit, Sampling

_EXACT_ROWS, _EXACT_ROWS_UNCOMPILED = 16, 2


def add_command(commands: Any) -> None:
    """Add `audit` to the subparsers of the command line."""
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

    check_each_once(args.files)
    folder = _plot_folder(args.plots, args.files)
    layers = read_layers(args.files)
    exact = _EXACT_ROWS if compiled_available() else _EXACT_ROWS_UNCOMPILED
    sampling = Sampling(args.rows, min(args.rows, exact))
    found = audit_layers(layers, sampling)
    written = [] if folder is None else _draw(found, folder)
    if args.json:
        print(json_text({**audit_dict(found, args.files, sampling), "plots": written}))
    else:
        print(audit_text(found, args.files, sampling))
        for path in written:
            print(f"written    {path}")
    return 0


def _draw(found: list[LayerAudit], folder: Path) -> list[str]:
    from .plots import draw

    try:
        return [str(path) for path in draw(found, folder)]
    except OSError as error:  # a full disk, a file there that may not be written
        raise ArgumentError("--plots", "a directory that can be written", error) from error


def _plot_folder(text: str | None, inputs: list[str]) -> Path | None:
    """Where plots go; what could stop them is said before the work."""
    if text is None:
        return None
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        expected = 'matplotlib (pip install "snapmla-rt[plot]")'
        raise ArgumentError("--plots", expected, "no matplotlib") from error
    path = Path(text)
    if not os.path.isdir(path.parent):  # as --out does: a slip of the pen makes no folders
        raise ArgumentError("--plots", "a path in an existing directory", repr(text))
    try:
        path.mkdir(exist_ok=True)
    except OSError as error:
        raise ArgumentError("--plots", "a directory that can be written", error) from error
    reason = why_not_writable(path)
    if reason is not None:
        expected = "a directory that can be written"
        raise ArgumentError("--plots", expected, f"{text!r} ({reason})")
    for drawing in path.glob("*.png"):  # a plot would be written through a link to a capture
        refuse_inputs("--plots", drawing, inputs)
    return path


def check_each_once(files: list[str]) -> None:
    """Raise ArgumentError where two paths lead to one file: its layers would count twice."""
    for index, file in enumerate(files):
        for before in files[:index]:
            if same_file(before, file):
                raise ArgumentError(file, "each file once", f"the same file as {before!r}")


def read_layers(files: list[str]) -> list[LayerCapture]:
    """All layers of the files; of several files, named after theirs."""
    layers: list[tuple[int, LayerCapture]] = []
    with Progress("read", len(files)) as progress:
        for index, file in enumerate(files):
            layers += [(index, layer) for layer in read_capture(file)]
            progress.advance()
    if len(files) == 1:
        return [layer for _, layer in layers]
    own = [(index, layer.name) for index, layer in layers]
    return [
        replace(layer, name=name)
        for (_, layer), name in zip(layers, _distinct_names(files, own), strict=True)
    ]


def _distinct_names(files: list[str], layers: list[tuple[int, str]]) -> list[str]:
    """Names of layers, given as (index of the file, name in it): after the shortest names of the
    files that tell all layers apart."""
    names: list[str] = []
    for titles in _file_titles(files):
        names = [f"{titles[file]}.{name}" if name else titles[file] for file, name in layers]
        if len(set(names)) == len(names):
            break
    return names


def _file_titles(files: list[str]) -> Iterator[list[str]]:
    """What to call the files, ever longer: stems, names, names with ever more of their folders."""
    paths = [Path(os.path.abspath(file)) for file in files]
    yield [path.stem for path in paths]
    for count in range(1, max(len(path.parts) for path in paths) + 1):
        yield [str(Path(*path.parts[-count:])) for path in paths]


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
