"""The host side of GPU decode calls, with a stand-in driver and a stand-in torch: which kernels are
launched with which values, what is looked up again, what is allocated, and what is refused.

Runs in a process of its own, since the driver is loaded once a process.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("cuda.bindings")
ROOT = Path(__file__).resolve().parents[1]

PREAMBLE = """
import ctypes, struct, sys, types
import numpy as np
import snapmla_rt
from snapmla_rt import ArgumentError, api, decode_launch
from snapmla_rt.driver.launch import Kernel
from snapmla_rt.kernels import TABLE
from snapmla_rt.plan import plan_config

# --- a stand-in torch ---
class Dtype(str):
    pass
torch = types.ModuleType("torch")
for name in ("uint8", "bfloat16", "float32", "int32", "int64", "float8_e4m3fn", "float64"):
    setattr(torch, name, Dtype("torch." + name))
SIZE = {"uint8": 1, "float8_e4m3fn": 1, "bfloat16": 2, "float32": 4, "int32": 4, "int64": 8,
        "float64": 8}
ALLOCATIONS = []
current_stream = 0x5001

class Device:
    def __init__(self, index): self.type, self.index = "cuda", index

class Tensor:
    is_cuda = True
    def __init__(self, ptr, shape, strides, dtype, index=0):
        self.ptr, self.shape, self.strides, self.dtype = ptr, tuple(shape), tuple(strides), dtype
        self.device = Device(index)
    def data_ptr(self): return self.ptr
    def stride(self): return self.strides
    def element_size(self): return SIZE[self.dtype[6:]]
    def get_device(self): return self.device.index
    @property
    def nbytes(self): return int(np.prod(self.shape)) * self.element_size()
    def is_contiguous(self):
        return self.strides == natural(self.shape)
    def new_empty(self, shape, dtype):
        return torch.empty(shape if isinstance(shape, tuple) else (shape,), dtype=dtype,
                           device=self.device)

def natural(shape):
    strides, step = [], 1
    for n in reversed(shape):
        strides.append(step); step *= n
    return tuple(reversed(strides))

_next = [1 << 40]
def tensor(shape, dtype, strides=None, index=0):
    ptr = _next[0]; _next[0] += 1 << 36
    return Tensor(ptr, shape, strides or natural(shape), dtype, index)

def empty(shape, dtype, device):
    ALLOCATIONS.append((shape, dtype)); return tensor(shape, dtype, index=device.index)
torch.empty = empty
torch.cuda = types.SimpleNamespace(is_initialized=lambda: True,
                                   is_current_stream_capturing=lambda: False,
                                   current_stream=lambda i: types.SimpleNamespace(
                                       cuda_stream=current_stream))
torch._C = types.SimpleNamespace(_cuda_getCurrentRawStream=lambda index: current_stream,
                                 _cuda_getDevice=lambda: current_device)
current_device = 0
torch.Tensor = Tensor
sys.modules["torch"] = torch

# --- kernels that say what they were told ---
SENT, PREPARED = [], []
class Recording(Kernel):
    def __init__(self, name, variant, index):
        spec = TABLE[name]; chosen = spec.variant(variant)
        super().__init__(name, 0x9000, index, spec.layout, spec.threads,
                         chosen.dynamic_smem_bytes, spec.cluster)
        self.spec, self.variant = spec, variant
    def note(self, grid, stream, values, pdl):
        named = dict(zip(self.spec.layout.names, values))
        return types.SimpleNamespace(name=self.name, variant=self.variant, grid=grid,
                                     stream=stream, pdl=pdl, device=self.device_index, **named)
    def launch(self, grid, stream, *values, pdl=False):
        super().launch(grid, stream, *values, pdl=pdl)
        SENT.append(self.note(grid, stream, values, pdl))
    def prepare(self, grid, stream, *values, pdl=False):
        made, note = super().prepare(grid, stream, *values, pdl=pdl), self.note(
            grid, stream, values, pdl)
        PREPARED.append(note)
        class Noted:
            def __call__(self):
                made(); SENT.append(note)
            def direct(self):
                refused = made.direct()
                if not refused: SENT.append(note)
                return refused
        return Noted()
decode_launch.load_kernel = lambda name, variant, index: Recording(name, variant, index)

def arrays(b=3, s=1, h=20, blocks=9, width=40, index=0):
    t = lambda shape, dtype: tensor(shape, getattr(torch, dtype), index=index)
    return [t((b, s, h, 512), "float8_e4m3fn"), t((b, s, h, 64), "bfloat16"),
            t((b, s, h), "float32"), t((blocks, 64, 512), "uint8"),
            t((blocks, 64), "float32"), t((blocks, 64, 64), "bfloat16"),
            t((b, width), "int32"), t((b,), "int32")]

def raises(call, *words):
    try:
        call()
    except ArgumentError as error:
        assert all(w in str(error) for w in words), str(error)
    else:
        raise AssertionError("nothing was raised")
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], None]:
    """Run a script after PREAMBLE with the stand-ins."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler for the stand-in driver")
    folder = tmp_path_factory.mktemp("fake_driver")
    source = ROOT / "tests" / "driver" / "fake_cuda.c"
    command = [compiler, "-shared", "-fPIC", "-O1", "-o", str(folder / "libcuda.so.1")]
    subprocess.run([*command, str(source), "-ldl"], check=True)

    def go(script: str) -> None:
        env = dict(
            os.environ, LD_LIBRARY_PATH=str(folder), PYTHONPATH=str(ROOT), SNAPMLA_JIT="lazy"
        )
        text = PREAMBLE + textwrap.dedent(script)
        done = subprocess.run(
            [sys.executable, "-c", text], env=env, capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, done.stdout + done.stderr

    return go


def test_values_of_a_call(run: Callable[[str], None]) -> None:
    """Every parameter of plan, decode and combine, and the grids."""
    run(
        """
        given = arrays(s=2)
        plan = api.plan_decode(given[7], 20, 2)
        sent = SENT.pop()
        assert sent.name == "plan_decode" and sent.grid == (1, 1, 1) and sent.pdl
        assert sent.stream == current_stream and sent.cache_seqlens == given[7].ptr
        assert (sent.batch, sent.num_parts, sent.block_n) == (3, 132, 64)
        assert sent.fixed_splits == 0 and sent.split_blocks == 0
        assert sent.parts == plan.parts.ptr and sent.num_splits == plan.num_splits.ptr
        assert ALLOCATIONS == [((132, 8), "torch.int32"), ((4,), "torch.int32")]
        ALLOCATIONS.clear()
        out, lse = api.mla_decode(*given, plan, 0.5)
        decode, combine = SENT
        assert decode.name == "mla_decode" and decode.variant == "rows64" and decode.pdl
        assert decode.grid == (1, 132, 1) and decode.num_rows == 40
        assert (decode.num_heads_q, decode.seq_len_q, decode.causal) == (20, 2, 1)
        assert decode.num_blocks == 9 and decode.block_table_stride == 40
        assert decode.out == out.ptr and decode.lse == lse.ptr and decode.q_scale == given[2].ptr
        assert decode.trace_req == -1 and decode.trace == 0
        assert abs(decode.logit_factor - 0.5 * 1.4426950408889634) < 1e-15
        word = lambda m, i: struct.unpack_from("<Q", m, 8 * i)[0]
        # the stand-in's descriptor: address, dims from word 2, strides from word 7
        assert word(decode.ckv_map, 1) == given[3].ptr
        assert [word(decode.ckv_map, i) for i in (2, 3, 4, 5)] == [128, 64, 4, 9]
        assert [word(decode.ckv_map, i) for i in (7, 8, 9)] == [512, 128, 32768]
        assert [word(decode.rope_map, i) for i in (1, 4, 7, 8)] == [given[5].ptr, 9, 128, 8192]
        assert [word(decode.q_nope_map, i) for i in (1, 2, 3, 4)] == [given[0].ptr, 512, 40, 3]
        assert [word(decode.q_nope_map, i) for i in (7, 8)] == [512, 512 * 40]
        assert [word(decode.q_rope_map, i) for i in (1, 7, 8)] == [given[1].ptr, 128, 128 * 40]
        assert decode.k_scale_step == 1
        assert [word(decode.k_scale_map, i) for i in (1, 2, 3, 7)] == [given[4].ptr, 64, 9, 256]
        assert combine.name == "mla_combine" and combine.pdl and combine.batch == 3
        assert combine.o_accum == decode.o_accum and combine.lse_accum == decode.lse_accum
        assert combine.lse_accum - combine.o_accum == 135 * 40 * 512 * 4
        assert combine.o_accum % 16 == 0 and combine.num_rows == 40
        assert [a for a in ALLOCATIONS] == [
            ((3, 2, 20, 512), "torch.bfloat16"), ((3, 20, 2), "torch.float32"),
            ((135 * 40 * (2048 + 4),), "torch.uint8")]
        """
    )


def test_record_layout_and_single_block(run: Callable[[str], None]) -> None:
    run(
        """
        given = arrays(h=16)
        record = 41216
        given[3].strides = (record, 512, 1)
        given[4].strides = (record // 4, 1)
        given[5].strides = (record // 2, 64, 1)
        plan = api.plan_decode(given[7], 16, 1, num_splits=1)
        SENT.clear()
        api.mla_decode(*given, plan, 0.5, causal=False)
        (decode,) = SENT  # nothing can be split: no combine, no workspace
        word = lambda m, i: struct.unpack_from("<Q", m, 8 * i)[0]
        assert word(decode.ckv_map, 9) == record and word(decode.rope_map, 8) == record
        assert word(decode.k_scale_map, 7) == record and decode.variant == "rows16"
        assert decode.o_accum == 0 and decode.causal == 0 and decode.fixed_splits == 1
        for stride in (32768 + 8, 16384, 1 << 40):
            given[3].strides = (stride, 512, 1)
            raises(lambda: api.mla_decode(*given, plan, 0.5), "ckv_cache", "stride")
        one = arrays(h=16, blocks=1)
        one[3].strides = (7, 512, 1)  # of a single block the stride means nothing
        api.mla_decode(*one, plan, 0.5)
        assert word(SENT[-1].ckv_map, 9) == 32768
        """
    )


def test_calls_are_prepared_once(run: Callable[[str], None]) -> None:
    """A call with the same addresses, shapes and strides is only looked up; any other is not."""
    run(
        """
        given = arrays(width=4000)
        plan = api.plan_decode(given[7], 20, 1)
        out, lse = tensor((3, 1, 20, 512), torch.bfloat16), tensor((3, 20, 1), torch.float32)
        room = tensor((api.decode_workspace_size(plan),), torch.uint8)
        options = dict(out=out, lse=lse, workspace=room)
        def count(given=given, plan=plan, scale=0.5, **changes):
            before = len(PREPARED); SENT.clear()
            api.mla_decode(*given, plan, scale, **{**options, **changes})
            assert [s.name for s in SENT] == ["mla_decode", "mla_combine"]
            return len(PREPARED) - before
        ALLOCATIONS.clear()
        assert count() == 2
        assert count() == 0 and count() == 0
        assert not ALLOCATIONS, "everything was given"
        again = [Tensor(t.ptr, t.shape, t.strides, t.dtype) for t in given]
        assert count(again) == 0, "new tensors over the same memory"
        assert api.plan_decode(given[7], 20, 1, out=plan) is plan and count() == 0
        assert count(scale=0.25) == 2 and count(causal=False) == 2 and count() == 0
        for at in range(8):
            moved = list(again); old = moved[at]
            moved[at] = tensor(old.shape, old.dtype)
            assert count(moved) == 2, at
            assert count(moved) == 0, at
        bits = list(again)
        bits[0] = Tensor(given[0].ptr, given[0].shape, given[0].strides, torch.uint8)
        assert count(bits) == 2, "another dtype is checked again"
        bits[0] = Tensor(given[0].ptr, given[0].shape, given[0].strides, torch.float32)
        raises(lambda: count(bits), "q_nope", "float8_e4m3fn")
        bits = list(again)
        bits[6] = Tensor(given[6].ptr, (3, 2000), (4000, 1), torch.int32)
        assert count(bits) == 2 and SENT[0].block_table_stride == 4000
        bits[7] = Tensor(given[7].ptr, (2,), (1,), torch.int32)
        raises(lambda: count(bits), "cache_seqlens")
        globals()["current_stream"] = 0x5002
        assert count() == 2 and SENT[0].stream == 0x5002
        assert count() == 0
        assert count(stream=0x5002) == 0 and count(stream=0x5003) == 2
        # memory that is allocated for an explicit stream comes from that stream's pool
        entered = []
        class Current:
            def __init__(self, stream): self.stream = stream
            def __enter__(self): entered.append(self.stream)
            def __exit__(self, *_): entered.append("left")
        torch.cuda.ExternalStream = lambda handle, device: ("external", handle)
        torch.cuda.stream = Current
        assert count(stream=0x5003, out=None) == 2
        assert entered == [("external", 0x5003), "left"]
        # on the default stream the device must be torch's current one, else it is made so
        globals()["current_stream"] = 0
        assert count() == 2 and count() == 0 and SENT[0].stream == 0
        globals()["current_device"] = 1
        assert count() == 2 and {s.device for s in SENT} == {0}
        globals()["current_device"], globals()["current_stream"] = 0, 0x5002
        # results that are not given are allocated, and found again where they land
        ALLOCATIONS.clear()
        api.mla_decode(*given, plan, 0.5, workspace=room, lse=lse, return_lse=False)
        assert len(ALLOCATIONS) == 1
        """
    )


def test_wrong_workspaces_and_devices(run: Callable[[str], None]) -> None:
    run(
        """
        given = arrays()
        plan = api.plan_decode(given[7], 20, 1)
        need = 135 * 20 * (2048 + 4)
        call = lambda **k: api.mla_decode(*given, plan, 0.5, **k)
        small = tensor((need - 16,), torch.uint8)
        raises(lambda: call(workspace=small), "workspace", f"at least {need} bytes",
               "decode_workspace_size(plan, 3, 2560)")
        raises(lambda: call(workspace=tensor((4 * need,), torch.uint8, (2,))), "workspace")
        raises(lambda: call(workspace=Tensor(1 << 41 | 8, (need,), (1,), torch.uint8)), "workspace")
        raises(lambda: call(workspace=tensor((need,), torch.uint8, index=1)), "workspace", "cuda:1")
        call(workspace=tensor((need // 4,), torch.float32))
        other = list(given); other[5] = tensor((9, 64, 64), torch.bfloat16, index=1)
        raises(lambda: api.mla_decode(*other, plan, 0.5), "k_rope_cache", "cuda:1")
        raises(lambda: call(out=tensor((3, 1, 20, 512), torch.bfloat16, index=1)), "out", "cuda:1")
        far = arrays(index=1)
        raises(lambda: api.mla_decode(*far, plan, 0.5), "plan.parts", "cuda:1", "cuda:0")
        host = snapmla_rt.plan_decode(np.zeros(3, np.int32), 20, 1)
        raises(lambda: api.mla_decode(*given, host, 0.5), "plan.parts", "cpu")
        SENT.clear()
        own = api.plan_decode(far[7], 20, 1)
        api.mla_decode(*far, own, 0.5)
        assert {s.device for s in SENT} == {1}
        wide = api.plan_decode(given[7], 20, 1, block_n=128)
        from snapmla_rt import decode_select
        narrow = {64: decode_select.VARIANTS[64]}
        decode_select.VARIANTS = narrow
        raises(lambda: api.mla_decode(*given, wide, 0.5), "plan", "block_n 128")
        """
    )


def test_max_seqlen_bounds_the_workspace(run: Callable[[str], None]) -> None:
    run(
        """
        given = arrays(width=1 << 14)  # a table for 2^20 tokens
        plan = api.plan_decode(given[7], 20, 1, batch_invariant=True, max_seqlen=8192)
        size = api.decode_workspace_size(plan)
        assert size == 12 * 20 * (2048 + 4) + 240
        SENT.clear()
        api.mla_decode(*given, plan, 0.5, workspace=tensor((size,), torch.uint8))
        decode, combine = SENT
        assert decode.split_blocks == 32 and combine.lse_accum - combine.o_accum == 12 * 20 * 2048
        without = api.plan_decode(given[7], 20, 1, batch_invariant=True)
        assert api.decode_workspace_size(without) == 3 * 512 * 20 * (2048 + 4) + 240
        """
    )


def test_a_bound_call(run: Callable[[str], None]) -> None:
    """The same launches as the call's, prepared once; its arrays are kept."""
    run(
        """
        given = arrays()
        plan = api.plan_decode(given[7], 20, 1)
        SENT.clear()
        bound = api.bind_mla_decode(*given, plan, 0.5, causal=False)
        assert not SENT and bound.out.shape == (3, 1, 20, 512)
        bound(); bound()
        assert [s.name for s in SENT] == ["mla_decode", "mla_combine"] * 2
        assert SENT[0].causal == 0 and SENT[0].out == bound.out.ptr and SENT[0].lse == bound.lse.ptr
        assert all(any(array is kept for kept in bound.arrays) for array in given)
        other = list(given); other[7] = tensor((2,), torch.int32)
        raises(lambda: api.bind_mla_decode(*other, plan, 0.5), "cache_seqlens")
        SENT.clear()
        api.mla_decode(*given, plan, 0.5, causal=False, out=bound.out, lse=bound.lse)
        want = vars(SENT[0]); SENT.clear(); bound()
        differ = {k for k in want if want[k] != vars(SENT[0])[k]}
        assert differ == {"o_accum", "lse_accum"}, differ
        """
    )
