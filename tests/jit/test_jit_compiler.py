"""NVRTC itself: compiles, errors, reports and the traps that must not pass."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

pytest.importorskip("cuda.bindings.nvrtc")

from snapmla_rt.errors import ArgumentError, CompileError, UnsupportedDeviceError
from snapmla_rt.jit import compiler
from snapmla_rt.jit.compiler import CompiledKernel, Resources, compile_unit, make_unit
from snapmla_rt.jit.spec import KernelSpec, KernelTable, Struct, Variant

ALL_TYPES = (
    ("a", "i32"),
    ("b", "u64"),
    ("c", "f32"),
    ("inner", Struct("inner", (("x", "u32"), ("y", "i64"), ("map", "tensor_map")))),
    ("p", "ptr<float>"),
    ("d", "u32"),
    ("q", "ptr"),
    ("m", "tensor_map"),
    ("e", "i32"),
)


def table(folder: Path, source: str, **changes: object) -> KernelTable:
    (folder / "k.cu").write_text(source)
    row = {"name": "k", "source": "k.cu", "params": ALL_TYPES, "threads": 128, **changes}
    constants = (("LN2_BITS", 0x3F317218), ("COEFFS_BITS", (0x3F800000, 0x40000000)))
    return KernelTable((KernelSpec(**row),), folder, constants)  # type: ignore[arg-type]


def compiled(table: KernelTable, variant: str = "") -> CompiledKernel:
    spec = table["k"]
    return compile_unit(make_unit(table, spec, spec.variant(variant)))


GOOD = """
#include "config.h"
#include "k_params.h"
static_assert(sizeof(KParams) == 512, "as the table lays it out");
extern "C" __global__ void __launch_bounds__(128) k(const __grid_constant__ KParams p) {
  __shared__ float s[32];
  s[threadIdx.x % 32] = p.c + kCoeffs[1] + p.inner.y;
  __syncthreads();
  p.p[threadIdx.x] = s[0] + kLn2;
}
"""


def test_a_kernel_compiles_to_a_cubin_with_its_resources(tmp_path: Path) -> None:
    """Size and offsets of every field type are asserted by the compiler (13.5: offsets too)."""
    kernel = compiled(table(tmp_path, GOOD))
    assert kernel.cubin.startswith(b"\x7fELF")
    used = kernel.resources
    assert 0 < used.registers < 64 and used.spill_bytes == 0 and used.static_smem_bytes == 128
    # NVRTC's empty log is one byte, and Python shares objects of one byte.
    assert [ord(bytes([i])) for i in range(256)] == list(range(256))
    assert CompiledKernel.from_bytes(kernel.to_bytes()) == kernel


def test_sums_and_products_are_not_fused(tmp_path: Path) -> None:
    """a * b + c keeps two roundings, as NumPy does; __fmaf_rn gives one."""
    source = """
#include "k_params.h"
extern "C" __global__ void k(const __grid_constant__ KParams p) {
  p.p[0] = p.p[1] * p.p[2] + p.p[3];
}
"""
    plain = compiled(table(tmp_path, source)).cubin
    fused = source.replace("p.p[1] * p.p[2] + p.p[3]", "__fmaf_rn(p.p[1], p.p[2], p.p[3])")
    assert plain != compiled(table(tmp_path, fused)).cubin
    sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))
    try:
        import dump_sass

        counts = dump_sass.count_instructions(dump_sass.disassemble(plain))
    except FileNotFoundError as error:
        pytest.skip(str(error))
    finally:
        sys.path.pop(0)
    assert counts.get("FMUL") == 1 and counts.get("FADD") == 1 and "FFMA" not in counts


def test_wrong_struct_size_fails(tmp_path: Path) -> None:
    with pytest.raises(CompileError, match="as the table lays it out"):
        compiled(table(tmp_path, GOOD.replace("== 512", "== 448")))


def test_errors_show_numbered_source_and_log(tmp_path: Path) -> None:
    (tmp_path / "common").mkdir()
    (tmp_path / "common" / "bad.cuh").write_text("// one\n// two\nint f() { return oops; }\n")
    source = '#include "common/bad.cuh"\n#include "k_params.h"\n' + GOOD
    with pytest.raises(CompileError) as caught:
        compiled(table(tmp_path, source))
    text = str(caught.value)
    assert "common/bad.cuh:" in text and ">    3 | int f() { return oops; }" in text
    assert "     2 | // two" in text and 'identifier "oops" is undefined' in text


def test_missing_header_is_said(tmp_path: Path) -> None:
    with pytest.raises(CompileError, match=r"nowhere\.cuh"):
        compiled(table(tmp_path, '#include "nowhere.cuh"\n' + GOOD))


def test_toolkit_headers_are_not_needed(tmp_path: Path) -> None:
    """No include path is given: only in-memory headers can be found (a wheel has no toolkit)."""
    with pytest.raises(CompileError, match="cuda_fp16"):
        compiled(table(tmp_path, "#include <cuda_fp16.h>\n" + GOOD))


def test_entry_must_be_there(tmp_path: Path) -> None:
    with pytest.raises(CompileError, match=r"no extern \"C\" __global__ k .* found"):
        compiled(table(tmp_path, GOOD.replace('extern "C"', "")))


SERIALISED = """
#include "k_params.h"
extern "C" __global__ void __launch_bounds__(128) k(const __grid_constant__ KParams p) {
  float d[4] = {0.f, 0.f, 0.f, 0.f};
  unsigned long long a = p.b, b = p.b + p.d;
  asm volatile("wgmma.fence.sync.aligned;");
  for (int i = 0; i < p.a; ++i) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%0,%1,%2,%3}, %4, %5, "
                 "1, 1, 1, 0, 0;" : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "l"(a + i), "l"(b + i));
    d[0] = d[0] * 2.f;
  }
  asm volatile("wgmma.commit_group.sync.aligned;");
  asm volatile("wgmma.wait_group.sync.aligned 0;");
  p.p[threadIdx.x] = d[0] + d[1] + d[2] + d[3];
}
"""


def test_serialised_wgmma_fails_the_build(tmp_path: Path) -> None:
    with pytest.raises(CompileError, match=r"C75\d\d|serialized"):
        compiled(table(tmp_path, SERIALISED))


def test_ignored_setmaxnreg_fails_the_build(tmp_path: Path) -> None:
    """Without launch bounds ptxas cannot know the register pool and ignores setmaxnreg (C7508)."""
    source = """
#include "k_params.h"
extern "C" __global__ void k(const __grid_constant__ KParams p) {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
  p.p[threadIdx.x] = p.c;
}
"""
    with pytest.raises(CompileError, match=r"C7508|setmaxnreg ignored"):
        compiled(table(tmp_path, source))


@pytest.mark.parametrize("number", [7508, 7510, 7511, 7512, 7514, 7517, 7518])
def test_every_note_of_the_family_is_fatal(number: int) -> None:
    log = f"ptxas info    : (C{number}) something about performance in 'k'\nptxas info : fine\n"
    assert compiler._FATAL_NOTE.findall(log) == [log.splitlines()[0]]
    assert not compiler._FATAL_NOTE.findall("ptxas info : Used 7508 registers (C7600)")


LOGS = {
    "12.9": """ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'other' for 'sm_90a'
ptxas info    : Function properties for other
    0 bytes stack frame, 4 bytes spill stores, 4 bytes spill loads
ptxas info    : Used 255 registers, used 1 barriers
ptxas info    : Compiling entry function 'k' for 'sm_90a'
ptxas info    : Function properties for k
    16 bytes stack frame, 12 bytes spill stores, 20 bytes spill loads
ptxas info    : Function properties for helper
    8 bytes stack frame, 1 bytes spill stores, 2 bytes spill loads
ptxas info    : Used 168 registers, used 3 barriers, 512 bytes smem, 24 bytes cmem[2]
""",
    "13.5": """ptxas info    : 28 bytes gmem
ptxas info    : Compiling entry function 'k' for 'sm_90a'
ptxas info    : Function properties for k
ptxas         .     24 bytes stack frame, 13 bytes spill stores, 22 bytes spill loads
ptxas info    : Used 168 registers, used 3 barriers, 24 bytes cumulative stack size, 512 bytes smem
ptxas info    : Compile time = 9.039 ms
""",
}


@pytest.mark.parametrize("version", LOGS)
def test_reports_of_both_compilers_are_read(version: str) -> None:
    used = compiler.parse_resources(LOGS[version], "k")
    assert used == Resources(168, 35, 24, 512)
    with pytest.raises(CompileError, match="absent"):
        compiler.parse_resources(LOGS[version], "absent")


def test_limits_of_the_table(tmp_path: Path) -> None:
    spec = KernelSpec("k", "k.cu", (("a", "i32"),), 384, max_registers=160, max_spill_bytes=8)
    check = compiler.limit_violations
    assert check(spec, Variant(), Resources(160, 8, 0, 0)) == []
    assert check(spec, Variant(), Resources(161, 0)) == ["registers: 161, limit 160"]
    assert check(spec, Variant(), Resources(0, 9)) == ["spill bytes: 9, limit 8"]
    big = Variant(dynamic_smem_bytes=227 * 1024)
    assert check(spec, big, Resources(0, 0, 0, 16)) == ["shared-memory bytes: 232464, limit 232448"]


def test_missing_nvrtc_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings.nvrtc", None)
    with pytest.raises(UnsupportedDeviceError, match=r"snapmla-rt\[cu13\]"):
        compiler.nvrtc_version()


class _FakeNvrtc:
    class nvrtcResult:
        NVRTC_SUCCESS = 0

    def __init__(self, answer: object) -> None:
        self.answer = answer

    def nvrtcVersion(self) -> object:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


def test_old_or_unloadable_nvrtc(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "_load_nvrtc", lambda: _FakeNvrtc((0, 11, 8)))
    with pytest.raises(UnsupportedDeviceError, match=r"NVRTC >= 12\.0 for sm_90a, found 11\.8"):
        compiler.nvrtc_version()
    failure = RuntimeError("searched /a and /b")
    monkeypatch.setattr(compiler, "_load_nvrtc", lambda: _FakeNvrtc(failure))
    with pytest.raises(UnsupportedDeviceError, match="searched /a and /b"):
        compiler.nvrtc_version()


def test_variants_see_their_defines(tmp_path: Path) -> None:
    source = GOOD.replace("p.c +", "p.c + WIDTH +")
    both = (Variant("w1", (("WIDTH", 1),)), Variant("w2", (("WIDTH", 2),)))
    made = table(tmp_path, source, variants=both)
    assert compiled(made, "w1").cubin != compiled(made, "w2").cubin
    with pytest.raises(ArgumentError, match="variant of k"):
        compiled(made, "w3")
