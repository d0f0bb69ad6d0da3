"""The params layout rule and the rendered headers, checked by the compiler itself."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from snapmla_rt.errors import ArgumentError, CompileError
from snapmla_rt.jit import header
from snapmla_rt.jit.spec import (
    KernelSpec,
    KernelTable,
    Struct,
    Variant,
    layout,
    struct_name,
)

CTYPES: dict[str, Any] = {
    "i32": ctypes.c_int32,
    "u32": ctypes.c_uint32,
    "i64": ctypes.c_int64,
    "u64": ctypes.c_uint64,
    "f32": ctypes.c_float,
    "ptr": ctypes.c_uint64,
    "ptr<const unsigned char>": ctypes.c_uint64,
}
scalar_fields = st.lists(st.sampled_from(sorted(CTYPES)), min_size=1, max_size=24)


def named(kinds: list[Any]) -> tuple[tuple[str, Any], ...]:
    return tuple((f"f{index}", kind) for index, kind in enumerate(kinds))


@given(scalar_fields, scalar_fields)
def test_layout_is_the_c_layout(outer: list[str], inner: list[str]) -> None:
    """Same offsets and size as the platform's C compiler gives (through ctypes), nested too."""
    fields = (*named(outer), ("inner", Struct("inner", named(inner))), ("last", "i32"))
    placed = layout(fields)

    class Inner(ctypes.Structure):
        _fields_ = [(name, CTYPES[kind]) for name, kind in named(inner)]

    class Outer(ctypes.Structure):
        _fields_ = [
            *((name, CTYPES[kind]) for name, kind in named(outer)),
            ("inner", Inner),
            ("last", ctypes.c_int32),
        ]

    assert (placed.size, placed.align) == (ctypes.sizeof(Outer), ctypes.alignment(Outer))
    offsets = {leaf.path: leaf.offset for leaf in placed.leaves}
    for name, _ in named(outer):
        assert offsets[name] == getattr(Outer, name).offset
    for name, _ in named(inner):
        assert offsets[f"inner.{name}"] == Outer.inner.offset + getattr(Inner, name).offset
    assert offsets["last"] == Outer.last.offset


@given(
    st.lists(st.sampled_from([*sorted(CTYPES), "tensor_map"]), min_size=1, max_size=12), st.data()
)
def test_packed_bytes_are_the_fields(kinds: list[str], data: st.DataObject) -> None:
    """Each value lies at its offset in its own type; padding is zero; tensor maps at 64."""
    ranges = {
        "i32": st.integers(-(2**31), 2**31 - 1),
        "u32": st.integers(0, 2**32 - 1),
        "i64": st.integers(-(2**63), 2**63 - 1),
        "f32": st.floats(width=32, allow_nan=False),
        "tensor_map": st.binary(min_size=128, max_size=128),
    }
    values = [data.draw(ranges.get(kind, st.integers(0, 2**64 - 1))) for kind in kinds]
    placed = layout(named(kinds))
    packed = placed.pack(*values)
    assert len(packed) == placed.size
    covered = np.zeros(placed.size, bool)
    for leaf, value in zip(placed.leaves, values, strict=True):
        raw = packed[leaf.offset : leaf.offset + leaf.size]
        covered[leaf.offset : leaf.offset + leaf.size] = True
        if leaf.type == "tensor_map":
            assert leaf.offset % 64 == 0 and raw == value
        else:
            assert CTYPES[leaf.type].from_buffer_copy(raw).value == value
    assert not np.frombuffer(packed, np.uint8)[~covered].any()


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ((("a", "i16"),), "i16"),
        ((("a", "ptr<"),), "ptr"),
        ((("a", "i32"), ("a", "u32")), "distinct"),
        ((("2a", "i32"),), "identifiers"),
        ((), "bytes"),
        (tuple((f"m{i}", "tensor_map") for i in range(40)), "4096"),
        ((("s", Struct("inner", (("x", "i32"), ("x", "i32")))),), "distinct"),
    ],
)
def test_bad_params_are_named(fields: Any, word: str) -> None:
    with pytest.raises(ArgumentError, match=word):
        layout(fields)


def test_bad_rows_are_named() -> None:
    fields = (("a", "i32"),)
    for threads in (0, 33, 2048):
        with pytest.raises(ArgumentError, match="threads of k"):
            KernelSpec("k", "k.cu", fields, threads)
    with pytest.raises(ArgumentError, match="variants of k"):
        KernelSpec("k", "k.cu", fields, 32, variants=(Variant("x"), Variant("x")))
    with pytest.raises(ArgumentError, match="dynamic_smem_bytes of k/big"):
        KernelSpec("k", "k.cu", fields, 32, variants=(Variant("big", (), 227 * 1024 + 1),))
    row = KernelSpec("k", "k.cu", fields, 32, variants=(Variant("x"),))
    with pytest.raises(ArgumentError, match=r"variant of k: expected one of \['x'\]"):
        row.variant("y")
    with pytest.raises(ArgumentError, match="distinct kernel names"):
        KernelTable((row, row), Path())
    with pytest.raises(ArgumentError, match=r"kernel: expected one of \['k'\]"):
        KernelTable((row,), Path())["j"]


def test_register_limit_is_what_the_threads_leave() -> None:
    row = KernelSpec("k", "k.cu", (("a", "i32"),), 512, max_registers=200)
    assert row.register_limit(Variant()) == 128
    assert row.register_limit(Variant(max_registers=64)) == 64
    assert KernelSpec("k", "k.cu", (("a", "i32"),), 64).register_limit(Variant()) == 255
    assert row.spill_limit(Variant()) == 0 and row.spill_limit(Variant(max_spill_bytes=8)) == 8


# --- Headers -----------------------------------------------------------------------------------


@given(st.integers(0, 2**32 - 1))
@settings(max_examples=300)
def test_float_literals_keep_their_bits(bits: int) -> None:
    """Every finite float32, subnormals and -0 among them, survives the hex literal."""
    value = np.uint32(bits).view(np.float32)
    if not np.isfinite(value):
        with pytest.raises(ArgumentError, match="finite"):
            header.float_bits_literal(bits)
        return
    literal = header.float_bits_literal(bits)
    assert literal.endswith("f")
    assert np.float32(float.fromhex(literal[:-1])).view(np.uint32) == bits


def test_constants_are_rendered_by_kind() -> None:
    text = header.render_constants(
        [
            ("TILE_M", 64),
            ("BIG", 1 << 40),
            ("HALF", 0.5),
            ("FLAG", True),
            ("LN2_BITS", 0x3F317218),
            ("SIZES", (1, 2)),
            ("COEFFS_BITS", (0x3F800000, 0x80000000)),
        ]
    )
    for line in (
        "constexpr int kTileM = 64;",
        "constexpr long long kBig = 1099511627776LL;",
        "constexpr float kHalf = 0x1.0000000000000p-1f;",
        "constexpr bool kFlag = true;",
        "constexpr unsigned int kLn2Bits = 0x3f317218u;",
        "constexpr float kLn2 = 0x1.62e4300000000p-1f;",
        "__device__ constexpr int kSizes[2] = {1, 2};",
        "__device__ constexpr float kCoeffs[2] = {0x1.0000000000000p+0f, -0x0.0p+0f};",
    ):
        assert line in text, line


@pytest.mark.parametrize("value", [0.1, float("nan"), float("inf"), "text", None])
def test_constants_that_would_lose_bits_are_refused(value: Any) -> None:
    with pytest.raises(ArgumentError, match="constant X"):
        header.render_constants([("X", value)])


def test_struct_names() -> None:
    assert struct_name("append_kv") == "AppendKvParams"
    text = header.render_params("prepare", (("q", Struct("quantize_q", (("n", "i32"),))),))
    assert '#include "quantize_q_params.h"' in text and "  QuantizeQParams q;" in text


def table_in(folder: Path, source: str, **files: str) -> KernelTable:
    (folder / "k.cu").write_text(source)
    for name, text in files.items():
        path = folder / name.replace("__", "/").replace("_cuh", ".cuh")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return KernelTable((KernelSpec("k", "k.cu", (("a", "i32"),), 32),), folder)


def test_only_reached_headers_count(tmp_path: Path) -> None:
    """Includes are followed through headers, cycles end, commented or absent ones do no harm."""
    table = table_in(
        tmp_path,
        '#include "common/a.cuh"\n#include "k_params.h"\n'
        '// #include "b.cuh"\n#include "absent.h"\n',
        common__a_cuh='#pragma once\n  #  include "ptx/c.cuh"\n',
        ptx__c_cuh='#pragma once\n#include "common/a.cuh"\n',
        b_cuh="",
    )
    _, headers = header.collect_sources(table, table["k"])
    assert list(headers) == ["common/a.cuh", "k_params.h", "ptx/c.cuh"]


def test_headers_stay_under_the_source_root(tmp_path: Path) -> None:
    (tmp_path / "outside.cuh").write_text("secret")
    inner = tmp_path / "src"
    inner.mkdir()
    table = table_in(inner, '#include "../outside.cuh"\n')
    assert header.collect_sources(table, table["k"])[1] == {}


def test_missing_source_is_named(tmp_path: Path) -> None:
    table = KernelTable((KernelSpec("k", "k.cu", (("a", "i32"),), 32),), tmp_path)
    with pytest.raises(CompileError, match=re.escape("no source file k.cu")):
        header.collect_sources(table, table["k"])


def test_one_layout_a_stage(tmp_path: Path) -> None:
    """A nested struct must be laid out as the stage's own row says."""
    inner = KernelSpec("k", "k.cu", (("a", "i32"),), 32)
    other = KernelSpec("m", "m.cu", (("s", Struct("k", (("a", "i64"),))),), 32)
    with pytest.raises(ArgumentError, match="one layout a stage"):
        header.rendered_headers(KernelTable((inner, other), tmp_path))
