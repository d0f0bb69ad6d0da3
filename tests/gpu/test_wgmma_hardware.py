"""The tensor-core model against the GPU itself, on operands chosen where a model goes wrong.

Single steps of m64n64k32 e4m3 and m64n64k16 bf16 are launched from a kernel of this file, with
operands in shared memory without swizzle, and compared bit for bit with reference/tensor_core.py.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "reference"))

from test_tensor_core import ACCUMULATORS, KINDS, hostile_accumulator, hostile_bf16, hostile_codes

from snapmla_rt.reference import tensor_core as tc

pytestmark = pytest.mark.gpu

# Operand rows are 32 bytes in both kinds. Core matrices are 8 rows of 16 bytes, stored whole:
# [row / 8][half of k] at 128-byte steps, so the leading (k) offset is 128 and the stride is 256.
SOURCE = r"""
__device__ unsigned long long descriptor(unsigned address) {
  return ((address & 0x3FFFF) >> 4) | (128ull >> 4 << 16) | (256ull >> 4 << 32);
}
extern "C" __global__ void steps(const uint4* a, const uint4* b, float* d) {
  __shared__ __align__(128) uint4 s_a[128];
  __shared__ __align__(128) uint4 s_b[128];
  const unsigned t = threadIdx.x;
  const unsigned core = (t / 16) * 16 + (t % 2) * 8 + (t / 2) % 8;
  s_a[core] = a[blockIdx.x * 128ull + t];
  s_b[core] = b[blockIdx.x * 128ull + t];
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  __syncthreads();
  const unsigned row = (t / 32) * 16 + (t % 32) / 4, column = 2 * (t % 4);
  float* out = d + blockIdx.x * 4096ull + row * 64 + column;
  float r[32];
  for (int j = 0; j < 8; ++j) {
    r[4 * j] = out[8 * j];
    r[4 * j + 1] = out[8 * j + 1];
    r[4 * j + 2] = out[8 * j + 512];
    r[4 * j + 3] = out[8 * j + 513];
  }
  const unsigned long long a_desc = descriptor((unsigned)__cvta_generic_to_shared(s_a));
  const unsigned long long b_desc = descriptor((unsigned)__cvta_generic_to_shared(s_b));
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
  asm volatile("STEP" : OUTPUTS : "l"(a_desc), "l"(b_desc));
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
  asm volatile("wgmma.wait_group.sync.aligned 0;" : OUTPUTS : : "memory");
  for (int j = 0; j < 8; ++j) {
    out[8 * j] = r[4 * j];
    out[8 * j + 1] = r[4 * j + 1];
    out[8 * j + 512] = r[4 * j + 2];
    out[8 * j + 513] = r[4 * j + 3];
  }
}
"""
INSTRUCTIONS = {
    "e4m3": ("m64n64k32.f32.e4m3.e4m3", "1, 1, 1"),
    "bf16": ("m64n64k16.f32.bf16.bf16", "1, 1, 1, 0, 0"),
}


def source(kind: str) -> str:
    """The kernel for one kind of step."""
    shape, immediates = INSTRUCTIONS[kind]
    registers = ", ".join(f"%{i}" for i in range(32))
    step = f"wgmma.mma_async.sync.aligned.{shape} {{{registers}}}, %32, %33, {immediates};"
    outputs = ", ".join(f'"+f"(r[{i}])' for i in range(32))
    return SOURCE.replace("STEP", step).replace("OUTPUTS", outputs)


def compile_cubin(kind: str) -> bytes:
    """The kernel compiled by NVRTC for sm_90a; needs no GPU."""
    nvrtc = pytest.importorskip("cuda.bindings.nvrtc")
    _, program = nvrtc.nvrtcCreateProgram(source(kind).encode(), b"steps.cu", 0, [], [])
    options = [b"-arch=sm_90a", b"--std=c++17"]
    (status,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
    _, size = nvrtc.nvrtcGetProgramLogSize(program)
    log = bytearray(size)  # b" " * 1 is Python's own b" ": writing an empty log into it changed it
    nvrtc.nvrtcGetProgramLog(program, log)
    assert int(status) == 0, log.decode()
    _, size = nvrtc.nvrtcGetCUBINSize(program)
    cubin = bytearray(size)
    nvrtc.nvrtcGetCUBIN(program, cubin)
    return bytes(cubin)


Run = Callable[[str, np.ndarray, np.ndarray, np.ndarray], np.ndarray]


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    """run(kind, a, b, c) -> d on the GPU for operands [problems, 64, k], c [problems, 64, 64]."""
    driver = pytest.importorskip("cuda.bindings.driver")

    def call(name: str, *args: Any) -> Any:
        status, *result = getattr(driver, name)(*args)
        assert int(status) == 0, f"{name}: {status}"
        return result[0] if len(result) == 1 else result

    (status,) = driver.cuInit(0)
    if int(status) != 0 or call("cuDeviceGetCount") == 0:
        pytest.skip("no NVIDIA GPU or driver on this machine")
    device = call("cuDeviceGet", 0)
    major = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR
    if call("cuDeviceGetAttribute", major, device) != 9:
        pytest.skip("not a Hopper GPU (compute capability 9.0)")
    call("cuCtxSetCurrent", call("cuDevicePrimaryCtxRetain", device))
    kernels = {}

    def launch(kind: str, a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
        if kind not in kernels:
            module = call("cuModuleLoadData", compile_cubin(kind))
            kernels[kind] = call("cuModuleGetFunction", module, b"steps")
        d = np.array(c, order="C")
        arrays = [np.ascontiguousarray(a), np.ascontiguousarray(b), d]
        pointers = [call("cuMemAlloc", x.nbytes) for x in arrays]
        for pointer, x in zip(pointers, arrays, strict=True):
            call("cuMemcpyHtoD", pointer, x.ctypes.data, x.nbytes)
        values = tuple(int(p) for p in pointers)
        call("cuLaunchKernel", kernels[kind], len(a), 1, 1, 128, 1, 1, 0, 0,
             (values, (ctypes.c_void_p,) * 3), 0)  # fmt: skip
        call("cuMemcpyDtoH", d.ctypes.data, pointers[2], d.nbytes)
        for pointer in pointers:
            call("cuMemFree", pointer)
        return d

    yield launch
    # The primary context stays: other tests of this process hold memory and kernels in it.


def assert_equals_model(
    run: Run, kind: str, a: np.ndarray, b: np.ndarray, c: np.ndarray
) -> np.ndarray:
    step = tc.wgmma_e4m3 if kind == "e4m3" else tc.wgmma_bf16
    hardware, model = run(kind, a, b, c), step(a, b, c)
    wrong = hardware != model
    assert not wrong.any(), (
        f"{wrong.sum()} of {wrong.size} differ, first: hardware {hardware[wrong][0]:#010x}, "
        f"model {model[wrong][0]:#010x}"
    )
    return hardware


PROBLEMS = 64  # 262,144 outputs a case
BF16_KINDS = (*KINDS, "tiny", "huge")


@pytest.mark.parametrize("c_kind", ACCUMULATORS)
@pytest.mark.parametrize(
    ("kind", "operands"), [("e4m3", k) for k in KINDS] + [("bf16", k) for k in BF16_KINDS]
)
def test_hostile_steps(run: Run, kind: str, operands: str, c_kind: str) -> None:
    rng = np.random.default_rng(11)
    make, k = (hostile_codes, 32) if kind == "e4m3" else (hostile_bf16, 16)
    a = make(rng, (PROBLEMS * 64, k), operands).reshape(PROBLEMS, 64, k)
    b = make(rng, (PROBLEMS * 64, k), operands).reshape(PROBLEMS, 64, k)
    c = hostile_accumulator(rng, (PROBLEMS * 64, 64), c_kind).reshape(PROBLEMS, 64, 64)
    assert_equals_model(run, kind, a, b, c)


@pytest.mark.parametrize("exponent", range(-166, -147))
@pytest.mark.parametrize("c_bits", [0, 0x80000000, 1, 0x80000001])
def test_the_sign_of_what_vanishes_below_the_smallest_subnormal(
    run: Run, exponent: int, c_bits: int
) -> None:
    """One product of either sign at 2^exponent: down to where the window cuts it, and then +-0."""
    a, b = np.zeros((1, 64, 16), np.float32), np.zeros((1, 64, 16), np.float32)
    a[0, :, 3] = 2.0**-80 * np.where(np.arange(64) % 2, 1, -1)
    b[0, :, 3] = 2.0 ** (exponent + 80) * (1 + np.arange(64) / 64)
    a16, b16 = ((x.view(np.uint32) >> 16).astype(np.uint16) for x in (a, b))
    assert_equals_model(run, "bf16", a16, b16, np.full((1, 64, 64), c_bits, np.uint32))
