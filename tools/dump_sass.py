"""Print the machine code of a kernel: `python tools/dump_sass.py mla_decode [--variant NAME]`.

Needs the `inspect` extra (nvidia-cuda-nvdisasm), no GPU. `--counts` prints how often each
instruction occurs instead, the quickest look at what ptxas made of a change.
"""

from __future__ import annotations

import argparse
import collections
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from snapmla_rt.errors import SnapMLAError
from snapmla_rt.jit.compiler import compile_unit, make_unit
from snapmla_rt.jit.precompile import DEFAULT_TABLE, load_table

_INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)")


def find_nvdisasm() -> str:
    """Path of nvdisasm: on PATH, or in the wheel. Raises FileNotFoundError with what to install."""
    found = shutil.which("nvdisasm")
    if found:
        return found
    for root in map(Path, sys.path):
        for path in sorted(root.glob("nvidia/**/bin/nvdisasm")):
            return str(path)
    raise FileNotFoundError("nvdisasm: pip install 'snapmla-rt[inspect]'")


def disassemble(cubin: bytes, with_lines: bool = False) -> str:
    """SASS of a cubin."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        options = ["--print-line-info"] if with_lines else []
        command = [find_nvdisasm(), "--print-code", *options, str(path)]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def count_instructions(sass: str) -> dict[str, int]:
    """Occurrences of each opcode (with its modifiers), the most frequent first."""
    return dict(collections.Counter(_INSTRUCTION.findall(sass)).most_common())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("kernel")
    parser.add_argument("--variant", default=None, help="default: the first one")
    parser.add_argument("--counts", action="store_true", help="instruction counts only")
    parser.add_argument("--lines", action="store_true", help="with source lines")
    parser.add_argument("--table", default=DEFAULT_TABLE, help=argparse.SUPPRESS)
    args = parser.parse_args()
    try:
        table = load_table(args.table)
        spec = table[args.kernel]
        variant = spec.variants[0] if args.variant is None else spec.variant(args.variant)
        extra = ("-lineinfo",) if args.lines else ()
        kernel = compile_unit(make_unit(table, spec, variant, extra))
        sass = disassemble(kernel.cubin, args.lines)
    except (SnapMLAError, FileNotFoundError) as error:
        print(f"dump_sass: {error}", file=sys.stderr)
        return 2
    if not args.counts:
        print(sass)
        return 0
    for opcode, count in count_instructions(sass).items():
        print(f"{count:6d}  {opcode}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
