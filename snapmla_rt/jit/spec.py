"""The kernel table's vocabulary: parameter structs, variants, kernels and their limits.

One rule lays a params struct out on both sides: every field is aligned to its own size (a tensor
map to 64 bytes), in the order given, and the struct is padded to its largest alignment. `header.py`
renders the same rule as C++ and asserts its size; the packer here fills the bytes.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import ArgumentError

MAX_PARAMS_BYTES = 4096  # every driver we accept takes this much
MAX_SMEM_BYTES = 227 * 1024  # shared memory of one CTA on sm_90 (static plus dynamic)
REGISTER_FILE = 65536  # 32-bit registers of one SM
TENSOR_MAP_BYTES = 128

# type -> (C++ type, struct code, size, alignment)
_SCALARS: dict[str, tuple[str, str, int, int]] = {
    "i32": ("int", "i", 4, 4),
    "u32": ("unsigned int", "I", 4, 4),
    "i64": ("long long", "q", 8, 8),
    "u64": ("unsigned long long", "Q", 8, 8),
    "f32": ("float", "f", 4, 4),
    "ptr": ("void*", "Q", 8, 8),
    "tensor_map": ("TensorMap", "128s", TENSOR_MAP_BYTES, 64),
}
_TYPED_PTR = re.compile(r"ptr<([\w ]+)>")
_IDENTIFIER = re.compile(r"[A-Za-z_]\w*")


def struct_name(stage: str) -> str:
    """C++ name of a stage's params struct: `append_kv` -> `AppendKvParams`."""
    return "".join(part.capitalize() for part in stage.split("_")) + "Params"


@dataclass(frozen=True)
class Struct:
    """A params struct used as a field of another one (`prepare` holds two stages' structs)."""

    stage: str
    fields: tuple[tuple[str, FieldType], ...]


FieldType = str | Struct
Fields = tuple[tuple[str, FieldType], ...]


@dataclass(frozen=True)
class Field:
    """One laid-out field: `path` is dotted for fields of a nested struct."""

    path: str
    type: str
    offset: int
    size: int


@dataclass(frozen=True)
class ParamsLayout:
    """Offsets, size, alignment and struct format of a params struct.

    `pack_into(buffer, offset, *values)` takes the leaf values in order: ints for integer and ptr
    fields, floats for f32, 128 bytes for tensor maps.
    """

    leaves: tuple[Field, ...]
    size: int
    align: int
    packer: struct.Struct = field(compare=False)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(leaf.path for leaf in self.leaves)

    def pack(self, *values: Any) -> bytes:
        """The struct's bytes for the leaf values in order."""
        return self.packer.pack(*values)


def c_type(kind: FieldType) -> str:
    """C++ spelling of a field type."""
    if isinstance(kind, Struct):
        return struct_name(kind.stage)
    typed = _TYPED_PTR.fullmatch(kind)
    return f"{typed.group(1)}*" if typed else _SCALARS[kind][0]


def _scalar(kind: str, path: str) -> tuple[str, str, int, int]:
    scalar = _SCALARS["ptr"] if _TYPED_PTR.fullmatch(kind) else _SCALARS.get(kind)
    if scalar is None:
        raise ArgumentError(f"type of {path}", f"one of {sorted(_SCALARS)} or ptr<T>", repr(kind))
    return scalar


def _round_up(value: int, align: int) -> int:
    return -(-value // align) * align


def _lay_out(fields: Fields, prefix: str, base: int, leaves: list[Field]) -> tuple[int, int]:
    """Append the leaves of `fields`, which start at `base`; return (size, alignment)."""
    offset, align = 0, 1
    for name, kind in fields:
        path = prefix + name
        if isinstance(kind, Struct):
            size, own = _lay_out(kind.fields, "", 0, [])
            offset = _round_up(offset, own)
            _lay_out(kind.fields, f"{path}.", base + offset, leaves)
        else:
            _, _, size, own = _scalar(kind, path)
            offset = _round_up(offset, own)
            leaves.append(Field(path, kind, base + offset, size))
        offset += size
        align = max(align, own)
    return _round_up(offset, align), align


def layout(fields: Fields) -> ParamsLayout:
    """Lay out a params struct. Raises ArgumentError for unknown types, bad or repeated names."""
    _check_names(fields)
    leaves: list[Field] = []
    size, align = _lay_out(fields, "", 0, leaves)
    if not 0 < size <= MAX_PARAMS_BYTES:
        raise ArgumentError("params", f"1 to {MAX_PARAMS_BYTES} bytes", size)
    code, at = "<", 0
    for leaf in leaves:
        code += f"{leaf.offset - at}x" if leaf.offset > at else ""
        code += _scalar(leaf.type, leaf.path)[1]
        at = leaf.offset + leaf.size
    code += f"{size - at}x" if size > at else ""
    return ParamsLayout(tuple(leaves), size, align, struct.Struct(code))


def _check_names(fields: Fields) -> None:
    names = [name for name, _ in fields]
    for name in names:
        if not _IDENTIFIER.fullmatch(name) or names.count(name) > 1:
            raise ArgumentError("params", "distinct C identifiers as names", repr(name))
    for _, kind in fields:
        if isinstance(kind, Struct):
            _check_names(kind.fields)


@dataclass(frozen=True)
class Variant:
    """One compilation of a kernel: `defines` become -DNAME=VALUE.

    dynamic_smem_bytes: dynamic shared memory of a launch. max_registers and max_spill_bytes
    override the kernel's own limits. allow_serialized: ptxas may serialise wgmma here (a build to
    look inside, where calls cross the pipeline); everywhere else that fails the compilation.
    on_demand: compiled at its first use only, not at import, not by a plain `snapmla precompile`.
    """

    name: str = ""
    defines: tuple[tuple[str, int | str], ...] = ()
    dynamic_smem_bytes: int = 0
    max_registers: int | None = None
    max_spill_bytes: int | None = None
    allow_serialized: bool = False
    on_demand: bool = False


@dataclass(frozen=True)
class KernelSpec:
    """One row of the kernel table.

    name: the stage; its params header is `<name>_params.h`, its struct `<Name>Params`.
    source: file under the source root. entry: `extern "C" __global__` name (default: name).
    params: (field, type) pairs; types i32 u32 i64 u64 f32 ptr ptr<T> tensor_map or Struct.
    threads: threads of a CTA. cluster: CTAs of a cluster along x, y, z, or None.
    max_registers: registers a thread that ptxas may report (None: what `threads` leaves).
    max_spill_bytes: spill stores plus loads that ptxas may report.
    """

    name: str
    source: str
    params: Fields
    threads: int
    entry: str = ""
    variants: tuple[Variant, ...] = (Variant(),)
    cluster: tuple[int, int, int] | None = None
    max_registers: int | None = None
    max_spill_bytes: int = 0
    layout: ParamsLayout = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "entry", self.entry or self.name)
        object.__setattr__(self, "layout", layout(self.params))
        if not 1 <= self.threads <= 1024 or self.threads % 32:
            raise ArgumentError(f"threads of {self.name}", "a multiple of 32 to 1024", self.threads)
        names = [variant.name for variant in self.variants]
        if not names or len(set(names)) != len(names):
            raise ArgumentError(f"variants of {self.name}", "distinct names, at least one", names)
        for variant in self.variants:
            if not 0 <= variant.dynamic_smem_bytes <= MAX_SMEM_BYTES:
                raise ArgumentError(
                    f"dynamic_smem_bytes of {self.name}/{variant.name}",
                    f"0 to {MAX_SMEM_BYTES}",
                    variant.dynamic_smem_bytes,
                )

    def variant(self, name: str = "") -> Variant:
        """The variant of that name. Raises ArgumentError with the names there are."""
        for variant in self.variants:
            if variant.name == name:
                return variant
        raise ArgumentError(
            f"variant of {self.name}", f"one of {[v.name for v in self.variants]}", repr(name)
        )

    def register_limit(self, variant: Variant) -> int:
        """Registers a thread that this variant may use."""
        limit = self.max_registers if variant.max_registers is None else variant.max_registers
        fits = min(255, REGISTER_FILE // self.threads)
        return fits if limit is None else min(limit, fits)

    def spill_limit(self, variant: Variant) -> int:
        """Spill bytes (stores plus loads) that this variant may have."""
        own = variant.max_spill_bytes
        return self.max_spill_bytes if own is None else own


@dataclass(frozen=True)
class KernelTable:
    """All kernels of a project, where their sources lie, and the constants they see.

    source_root: folder of the `.cu` and `.cuh` files. constants: (name, value) pairs for the
    rendered header `constants_header` (see header.render_constants).
    """

    specs: tuple[KernelSpec, ...]
    source_root: Path
    constants: tuple[tuple[str, Any], ...] = ()
    constants_header: str = "config.h"

    def __post_init__(self) -> None:
        names = [spec.name for spec in self.specs]
        if len(set(names)) != len(names):
            raise ArgumentError("specs", "distinct kernel names", names)

    def __getitem__(self, name: str) -> KernelSpec:
        for spec in self.specs:
            if spec.name == name:
                return spec
        raise ArgumentError("kernel", f"one of {[s.name for s in self.specs]}", repr(name))

    def jobs(
        self, names: Iterable[str] = (), on_demand: bool = False
    ) -> list[tuple[KernelSpec, Variant]]:
        """Every (kernel, variant) of the table, or of the kernels named.

        on_demand: whether variants that serve nobody by themselves are among them.
        """
        wanted = [self[name] for name in names] or list(self.specs)
        return [
            (spec, variant)
            for spec in wanted
            for variant in spec.variants
            if on_demand or not variant.on_demand
        ]
