"""NVRTC: CUDA text to a cubin for exactly sm_90a, with registers, spills and warnings read back.

Needs the wheels only: no driver, no GPU, no toolkit.
"""

from __future__ import annotations

import functools
import importlib
import json
import re
from dataclasses import asdict, dataclass, field
from typing import Any

from ..errors import CompileError, UnsupportedDeviceError
from .header import collect_sources
from .spec import MAX_SMEM_BYTES, KernelSpec, KernelTable, Variant

ARCH = "sm_90a"
MIN_NVRTC = (12, 0)  # the first with sm_90a
INSTALL_HINT = "pip install 'snapmla-rt[cu13]' (driver 580 or newer) or 'snapmla-rt[cu12]'"

# NOTE: without --no-cache NVRTC calls cuInit, after which a forked child cannot use CUDA.
# --fmad=false: a product and a sum stay two roundings unless the source says __fmaf_rn, so plain
# C++ arithmetic means the same as the NumPy reference.
BASE_OPTIONS = (
    f"-arch={ARCH}",
    "--std=c++17",
    "--no-cache",
    "--fmad=false",
    "-Xptxas=-v",
)

_LOCATION = re.compile(r"^(?P<file>[^\s():]+)\((?P<line>\d+)\): (?:catastrophic )?error", re.M)
_ENTRY = re.compile(r"Compiling entry function '([^']+)'")
_SPILLS = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_USED = re.compile(r"Used (\d+) registers(?:.*?(\d+) bytes smem)?")
# C7508: setmaxnreg ignored. C7510 to C7518: wgmma serialised, for one reason each. ptxas says
# both as information, which -Werror does not fail on. The codes above shift between versions (in
# 13.0 C7519 only tells of a fence that ptxas adds for register operands), so words decide there.
_FATAL_NOTE = re.compile(
    r"^.*(?:\bC75(?:08|1[0-8])\b|setmaxnreg ignored|wgmma\S* instructions are serialized).*$", re.M
)
_CONTEXT_LINES = 3


@dataclass(frozen=True)
class Resources:
    """What ptxas reported for one entry: registers a thread, bytes of the rest."""

    registers: int = 0
    spill_bytes: int = 0
    stack_bytes: int = 0
    static_smem_bytes: int = 0


@dataclass(frozen=True)
class CompileUnit:
    """Everything that decides a cubin's bytes, apart from the compiler itself."""

    name: str
    source_name: str
    source: str
    headers: dict[str, str]
    options: tuple[str, ...]
    entry: str
    allow_serialized: bool = False


@dataclass(frozen=True)
class CompiledKernel:
    """A cubin and what the compiler said of it."""

    cubin: bytes = field(repr=False)
    resources: Resources
    log: str = field(default="", repr=False)

    def to_bytes(self) -> bytes:
        """The form the disk cache keeps: a JSON line, then the cubin."""
        head = json.dumps({"resources": asdict(self.resources), "log": self.log})
        return head.encode() + b"\n" + self.cubin

    @classmethod
    def from_bytes(cls, data: bytes) -> CompiledKernel:
        head, _, cubin = data.partition(b"\n")
        fields = json.loads(head)
        return cls(cubin, Resources(**fields["resources"]), fields["log"])


def label(spec: KernelSpec, variant: Variant) -> str:
    """`mla_decode/h16` or, for an unnamed variant, the kernel's name."""
    return f"{spec.name}/{variant.name}" if variant.name else spec.name


def make_unit(
    table: KernelTable, spec: KernelSpec, variant: Variant, extra_options: tuple[str, ...] = ()
) -> CompileUnit:
    """Gather a variant's text, headers and options. Raises CompileError without a source file."""
    source, headers = collect_sources(table, spec)
    defines = tuple(f"-D{name}={value}" for name, value in variant.defines)
    options = BASE_OPTIONS + defines + extra_options
    return CompileUnit(
        label(spec, variant),
        spec.source,
        source,
        headers,
        options,
        spec.entry,
        variant.allow_serialized,
    )


def _load_nvrtc() -> Any:
    """cuda.bindings.nvrtc, or UnsupportedDeviceError with what to install."""
    try:
        return importlib.import_module("cuda.bindings.nvrtc")
    except ImportError as error:
        raise UnsupportedDeviceError(
            f"compiling the kernels needs cuda-bindings and NVRTC, found neither usable: {error}; "
            f"{INSTALL_HINT}"
        ) from error


def nvrtc_version() -> tuple[int, int]:
    """(major, minor) of the NVRTC in use.

    Raises UnsupportedDeviceError when it is missing (with the places searched) or older than 12.0.
    """
    nvrtc = _load_nvrtc()
    try:
        code, major, minor = nvrtc.nvrtcVersion()
    except Exception as error:  # the bindings raise their own types, which differ by version
        raise UnsupportedDeviceError(
            f"the NVRTC library was not found: {error}; {INSTALL_HINT}"
        ) from error
    _check(nvrtc, code, "nvrtcVersion")
    if (major, minor) < MIN_NVRTC:
        raise UnsupportedDeviceError(
            f"needs NVRTC >= {MIN_NVRTC[0]}.{MIN_NVRTC[1]} for {ARCH}, found {major}.{minor}; "
            f"{INSTALL_HINT}"
        )
    return major, minor


@functools.lru_cache(maxsize=1)
def nvrtc_identity() -> str:
    """The exact NVRTC for cache keys: library version and, where known, the wheel's build."""
    major, minor = nvrtc_version()
    metadata = importlib.import_module("importlib.metadata")
    for wheel in ("nvidia-cuda-nvrtc", "nvidia-cuda-nvrtc-cu12"):
        try:
            version = metadata.version(wheel)
        except metadata.PackageNotFoundError:
            continue
        if version.split(".")[:2] == [str(major), str(minor)]:
            return f"{major}.{minor} ({wheel} {version})"
    return f"{major}.{minor}"


def _check(nvrtc: Any, code: Any, call: str) -> None:
    if code != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise CompileError(f"{call}: {getattr(code, 'name', code)}")


def _fetch(nvrtc: Any, program: Any, what: str) -> bytes:
    """The program's log or cubin, whichever `what` names in NVRTC's getters."""
    code, size = getattr(nvrtc, f"nvrtcGet{what}Size")(program)
    _check(nvrtc, code, f"nvrtcGet{what}Size")
    # NVRTC writes into it. Not bytes: Python shares objects of one byte, such as an empty log.
    data = bytearray(size)
    _check(nvrtc, getattr(nvrtc, f"nvrtcGet{what}")(program, data)[0], f"nvrtcGet{what}")
    return bytes(data)


def compile_unit(unit: CompileUnit) -> CompiledKernel:
    """Compile to a cubin.

    Raises CompileError with the log and numbered source lines, also when ptxas reports that it
    serialised wgmma or ignored setmaxnreg: such a kernel would run, several times slower.
    Raises UnsupportedDeviceError when NVRTC is missing or too old.
    """
    nvrtc_version()
    nvrtc = _load_nvrtc()
    code, program = nvrtc.nvrtcCreateProgram(
        unit.source.encode(),
        unit.source_name.encode(),
        len(unit.headers),
        [text.encode() for text in unit.headers.values()],
        [name.encode() for name in unit.headers],
    )
    _check(nvrtc, code, "nvrtcCreateProgram")
    try:
        options = [option.encode() for option in unit.options]
        (code,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
        log = _fetch(nvrtc, program, "ProgramLog").rstrip(b"\0 \n").decode(errors="replace")
        if code != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            raise CompileError(_error_text(unit, getattr(code, "name", str(code)), log))
        cubin = _fetch(nvrtc, program, "CUBIN")
    finally:
        nvrtc.nvrtcDestroyProgram(program)
    notes = _FATAL_NOTE.findall(log)
    if notes and not unit.allow_serialized:
        raise CompileError(f"{unit.name}: ptxas says\n" + "\n".join(dict.fromkeys(notes)))
    if not cubin.startswith(b"\x7fELF"):
        raise CompileError(f"{unit.name}: NVRTC gave no cubin ({len(cubin)} bytes)\n{log}")
    return CompiledKernel(cubin, parse_resources(log, unit.entry), log)


def _error_text(unit: CompileUnit, code: str, log: str) -> str:
    parts = [f"{unit.name}: {code} with {' '.join(unit.options)}"]
    seen: set[tuple[str, int]] = set()
    for match in _LOCATION.finditer(log):
        place = (match["file"], int(match["line"]))
        if place not in seen and len(seen) < 5:
            seen.add(place)
            parts.append(_excerpt(unit, *place))
    return "\n".join([*(part for part in parts if part), log])


def _excerpt(unit: CompileUnit, file: str, line: int) -> str:
    """Numbered lines around a place in the kernel's file or one of its headers."""
    text = unit.source if file == unit.source_name else unit.headers.get(file)
    if text is None:
        return ""
    lines = text.splitlines()
    first, last = max(1, line - _CONTEXT_LINES), min(len(lines), line + _CONTEXT_LINES)
    body = [
        f"{'>' if number == line else ' '}{number:5d} | {lines[number - 1]}"
        for number in range(first, last + 1)
    ]
    return "\n".join([f"{file}:", *body])


def parse_resources(log: str, entry: str) -> Resources:
    """What `-Xptxas -v` reports for `entry`; spills and stack of functions it calls are added.

    Raises CompileError when the log does not name the entry (it is not `extern "C"`, or absent).
    """
    starts = [(match.group(1), match.end()) for match in _ENTRY.finditer(log)]
    names = [name for name, _ in starts]
    if entry not in names:
        raise CompileError(f'no extern "C" __global__ {entry} in the compiled text, found {names}')
    ends = [start for _, start in starts[1:]] + [len(log)]
    begin = dict(starts)[entry]
    section = log[begin : ends[names.index(entry)]]
    spills = [tuple(map(int, groups)) for groups in _SPILLS.findall(section)]
    used = _USED.search(section)
    if not spills or used is None:
        raise CompileError(f"{entry}: ptxas -v reported no registers or spills:\n{log}")
    return Resources(
        registers=int(used.group(1)),
        spill_bytes=sum(stores + loads for _, stores, loads in spills),
        stack_bytes=sum(stack for stack, _, _ in spills),
        static_smem_bytes=int(used.group(2) or 0),
    )


def limit_violations(spec: KernelSpec, variant: Variant, resources: Resources) -> list[str]:
    """How a compiled variant exceeds its row of the kernel table; empty when it does not."""
    smem = resources.static_smem_bytes + variant.dynamic_smem_bytes
    checks = (
        ("registers", resources.registers, spec.register_limit(variant)),
        ("spill bytes", resources.spill_bytes, spec.spill_limit(variant)),
        ("shared-memory bytes", smem, MAX_SMEM_BYTES),
    )
    return [f"{what}: {got}, limit {limit}" for what, got, limit in checks if got > limit]
