"""Headers rendered in memory: the constants every kernel sees, and one params struct a kernel.

Nothing is written to disk; NVRTC gets these texts beside the `.cuh` files it may include.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ..errors import ArgumentError, CompileError
from .spec import Fields, KernelSpec, KernelTable, Struct, c_type, layout, struct_name

TENSOR_MAP_HEADER = "tensor_map.h"
_TENSOR_MAP_TEXT = """\
#pragma once
// cuda.h does not compile under NVRTC: this is CUtensorMap as the hardware reads it.
struct alignas(64) TensorMap {
  unsigned long long opaque[16];
};
static_assert(sizeof(TensorMap) == 128 && alignof(TensorMap) == 64, "tensor map layout");
"""
# The first NVRTC seen to know __builtin_offsetof; 12.9 does not.
_OFFSETOF_VERSION = 1305
_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*"([^"]+)"', re.MULTILINE)


def constant_name(name: str) -> str:
    """`TILE_M` -> `kTileM`: the project's C++ spelling of a Python constant."""
    return "k" + "".join(part.capitalize() for part in name.split("_"))


def float_bits_literal(bits: int) -> str:
    """A C++17 float literal with exactly these 32 bits (finite values only)."""
    value = struct.unpack("<f", struct.pack("<I", bits))[0]
    return _float_literal("bits", value)


def _float_literal(name: str, value: float) -> str:
    if value != value or value in (float("inf"), float("-inf")):
        raise ArgumentError(f"constant {name}", "a finite float", value)
    if struct.unpack("<f", struct.pack("<f", value))[0] != value:
        raise ArgumentError(f"constant {name}", "a value that float32 holds exactly", value)
    return value.hex() + "f"


def _constant_lines(name: str, value: Any) -> list[str]:
    c_name = constant_name(name)
    if isinstance(value, (tuple, list)):
        return _array_lines(name, value)
    if isinstance(value, bool):
        return [f"constexpr bool {c_name} = {str(value).lower()};"]
    if isinstance(value, float):
        return [f"constexpr float {c_name} = {_float_literal(name, value)};"]
    if not isinstance(value, int):
        raise ArgumentError(f"constant {name}", "int, float, bool or a tuple of them", repr(value))
    if name.endswith("_BITS"):  # the bits of a float32: both the bits and the float are rendered
        plain = constant_name(name[: -len("_BITS")])
        return [
            f"constexpr unsigned int {c_name} = 0x{value:08x}u;",
            f"constexpr float {plain} = {float_bits_literal(value)};",
        ]
    if -(2**31) <= value < 2**31:
        return [f"constexpr int {c_name} = {value};"]
    return [f"constexpr long long {c_name} = {value}LL;"]


def _array_lines(name: str, values: Iterable[Any]) -> list[str]:
    """Arrays live in constant-foldable device memory: an unrolled read becomes an immediate."""
    items = list(values)
    c_name = constant_name(name)
    if name.endswith("_BITS"):
        bits = ", ".join(f"0x{item:08x}u" for item in items)
        floats = ", ".join(float_bits_literal(item) for item in items)
        plain = constant_name(name[: -len("_BITS")])
        return [
            f"__device__ constexpr unsigned int {c_name}[{len(items)}] = {{{bits}}};",
            f"__device__ constexpr float {plain}[{len(items)}] = {{{floats}}};",
        ]
    if all(isinstance(item, int) for item in items):
        body = ", ".join(str(item) for item in items)
        return [f"__device__ constexpr int {c_name}[{len(items)}] = {{{body}}};"]
    body = ", ".join(_float_literal(name, float(item)) for item in items)
    return [f"__device__ constexpr float {c_name}[{len(items)}] = {{{body}}};"]


def render_constants(constants: Iterable[tuple[str, Any]]) -> str:
    """The constants header. (NAME, value) pairs become `kName`:

    int -> int (long long where it does not fit), bool -> bool, float -> float as an exact hex
    literal (ArgumentError where float32 cannot hold it), NAME_BITS -> the bits as unsigned
    `kNameBits` and the float32 they spell as `kName`, tuples -> arrays of these.
    """
    lines = ["#pragma once", "// Rendered from the Python configuration: the one home of these."]
    for name, value in constants:
        lines += [f"[[maybe_unused]] {line}" for line in _constant_lines(name, value)]
    return "\n".join(lines) + "\n"


def params_header(stage: str) -> str:
    """Include name of a stage's params struct."""
    return f"{stage}_params.h"


def render_params(stage: str, fields: Fields) -> str:
    """The header of one params struct, with its size, alignment and offsets asserted."""
    name, placed = struct_name(stage), layout(fields)
    nested = {kind.stage for _, kind in fields if isinstance(kind, Struct)}
    includes = sorted(params_header(inner) for inner in nested)
    if any(kind == "tensor_map" for _, kind in fields):
        includes.append(TENSOR_MAP_HEADER)
    lines = ["#pragma once", *(f'#include "{include}"' for include in includes)]
    lines += [f"struct alignas({placed.align}) {name} {{"]
    lines += [f"  {c_type(kind)} {field};" for field, kind in fields]
    lines += ["};"]
    lines += [f'static_assert(sizeof({name}) == {placed.size}, "{name}: size");']
    lines += [f'static_assert(alignof({name}) == {placed.align}, "{name}: alignment");']
    lines += [f"#if __CUDACC_VER_MAJOR__ * 100 + __CUDACC_VER_MINOR__ >= {_OFFSETOF_VERSION}"]
    lines += [
        f"static_assert(__builtin_offsetof({name}, {leaf.path}) == {leaf.offset}, "
        f'"{name}.{leaf.path}: offset");'
        for leaf in placed.leaves
    ]
    return "\n".join([*lines, "#endif"]) + "\n"


def _all_structs(fields: Fields) -> Iterable[Struct]:
    for _, kind in fields:
        if isinstance(kind, Struct):
            yield kind
            yield from _all_structs(kind.fields)


def rendered_headers(table: KernelTable) -> dict[str, str]:
    """Every in-memory header of the table, by include name."""
    headers = {
        TENSOR_MAP_HEADER: _TENSOR_MAP_TEXT,
        table.constants_header: render_constants(table.constants),
    }
    for spec in table.specs:
        for inner in _all_structs(spec.params):
            headers.setdefault(params_header(inner.stage), render_params(inner.stage, inner.fields))
    for spec in table.specs:
        text = render_params(spec.name, spec.params)
        if headers.setdefault(params_header(spec.name), text) != text:
            raise ArgumentError(
                f"params of {spec.name}", "one layout a stage", "two different ones"
            )
    return headers


def _read(root: Path, name: str) -> str | None:
    path = (root / name).resolve()
    if not path.is_relative_to(root.resolve()) or not path.is_file():
        return None
    return path.read_text(encoding="utf-8")


def collect_sources(table: KernelTable, spec: KernelSpec) -> tuple[str, dict[str, str]]:
    """The kernel's text and every header it reaches, by include name.

    Only what is reached counts, so a change of one header recompiles only its users. A name that
    is neither rendered nor under the source root is left to NVRTC, which says where it was asked
    for. Raises CompileError when the kernel's own file is missing.
    """
    source = _read(table.source_root, spec.source)
    if source is None:
        raise CompileError(f"{spec.name}: no source file {spec.source} under {table.source_root}")
    rendered = rendered_headers(table)
    headers: dict[str, str] = {}
    pending = _INCLUDE.findall(source)
    while pending:
        name = pending.pop()
        if name in headers:
            continue
        text = rendered.get(name)
        if text is None:
            text = _read(table.source_root, name)
        if text is None:
            continue
        headers[name] = text
        pending += _INCLUDE.findall(text)
    return source, dict(sorted(headers.items()))
