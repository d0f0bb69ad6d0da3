"""What the GPU tests of the drop-in faces share: faces, hostile cases, a float64 oracle."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from dropin_client import Engine, FlashMLA, FluentLLM, Step, Torch

torch: Any = pytest.importorskip("torch")
ABSURD = 2147480000  # what FlashMLA's tests put into unused table entries
CUDA = Torch("cuda:0")
FACES = ("FluentLLM", "FlashMLA tensors", "FlashMLA object")


def make(face: str, num_pages: int, library: Any = CUDA) -> Any:
    if face == "FluentLLM":
        return FluentLLM(library, num_pages)
    return FlashMLA(library, num_pages, face.partition(" ")[2])


def filled_face(face: str, heads: int = 20) -> tuple[Any, Step]:
    """A face with two requests, and a step whose tokens are appended."""
    one, engine = make(face, 40), Engine(heads, 40, 20)
    for count in (900, 3):
        one.append(*(CUDA.put(a) for a in engine.prefill(count)))
    step = engine.step(2, 3)
    one.append(CUDA.put(step.key), CUDA.put(step.indices))
    return one, step


def per_tensor_case(seed: int, batch: int = 3, num_blocks: int = 40) -> dict[str, Any]:
    """Hostile arguments of widen_per_tensor on the GPU: pages apart, absurd ids, NaN codes."""
    rng = np.random.default_rng(seed)
    codes: Any = rng.integers(0, 256, (num_blocks, 64, 1, 576), dtype=np.uint8)
    if seed % 2 == 0:
        codes = codes & 0xF7  # no NaN code
    width = 20
    table = rng.integers(0, num_blocks, (batch, width)).astype(np.int32)
    lengths = rng.integers(0, 64 * width + 1, batch).astype(np.int32)
    lengths[0] = 64 * width
    used = -(-lengths // 64)
    table[np.arange(width)[None] >= used[:, None]] = ABSURD
    return {
        "k_cache": CUDA.put(codes).view(torch.float8_e4m3fn),
        "table": CUDA.put(table),
        "lengths": CUDA.put(lengths),
        "host": (codes[:, :, 0], table, lengths),
    }


def as_f64(codes: Any) -> Any:
    """e4m3 values in float64."""
    return codes.float().double()


def oracle(q: Any, kv: Any, k_scale: Any, visible: Any, softmax_scale: float) -> dict[str, Any]:
    """Attention in float64 on what the codes stand for, and how far FP8 may be from it.

    q [b, r, 576], kv [b, n, 576], k_scale [b, n], n a multiple of 64; visible [b, r]: tokens that a
    row sees. The bound, per element of out, with normalised weights w, f = w k_scale, v the values,
    c = v / k_scale their codes, F the largest f of a block of 64 tokens:
    - P = e4m3(448 f / F): half a step is 2^-4 of a normal P and 2^-10 of a subnormal one;
    - P V runs in two tensor-core steps of 33 addends, each cut to 2^-13 of the largest product or
      sum, and their results to 2^-13;
    - S runs in 16 such steps: no score moves by more than eta = 16 (33 + 1) 2^-13 of the sum of its
      products' magnitudes, no weight by more than 2 eta;
    - out is rounded to bf16: 2^-8.
    floor: the same attention with only P rounded.
    """
    seen = torch.arange(kv.shape[1], device=kv.device)[None, None] < visible[..., None]
    scores = softmax_scale * (q @ kv.mT)
    scores = scores.masked_fill(~seen, -torch.inf)
    empty = (visible <= 0)[..., None]
    top = scores.amax(-1, keepdim=True).masked_fill(empty, 0.0)
    w = torch.exp(scores - top)
    total = w.sum(-1, keepdim=True)
    w = torch.where(empty, torch.zeros_like(w), w / total)
    lse = torch.where(empty, torch.inf, top + torch.log(total))[..., 0]
    v = kv[..., :512]
    out = w @ v
    b, r, n = w.shape
    f = w * k_scale[:, None]
    largest = f.view(b, r, n // 64, 64).amax(-1)
    step = (largest / 448).repeat_interleave(64, -1)
    p = torch.where(step > 0, f / step, 0.0).float().clamp(max=448.0)
    codes = v / k_scale[..., None]
    floor = (as_f64(p.to(torch.float8_e4m3fn)) * step) @ codes
    blocks = codes.abs().view(b, n // 64, 64, 512)
    size = w @ v.abs()
    reach = (q.abs() @ kv.abs().mT).masked_fill(~seen, 0.0).amax(-1)
    eta = 16 * 34 * 2.0**-13 * softmax_scale * reach
    bound = (2.0**-4 + 68 * 2.0**-13 + 2.2 * eta[..., None]) * size
    bound += 2.0**-10 / 448 * (largest @ blocks.sum(2))
    bound += 66 * 2.0**-13 * (largest @ blocks.amax(2).clamp(min=2.0**-6))
    bound = 1.02 * bound + 2.0**-8 * (out.abs() + bound) + 1e-30
    return {"out": out, "lse": lse, "bound": bound, "floor": floor, "eta": eta}


def check_against_oracle(out: Any, lse: Any, want: dict[str, Any], visible: Any) -> None:
    """out and lse in [b, r, ...] order of rows."""
    got = out.double()
    assert torch.isfinite(got).all() and not torch.isnan(lse).any()
    none = visible <= 0
    assert (out[none] == 0).all() and torch.isposinf(lse[none]).all()
    assert torch.isfinite(lse[~none]).all()
    over = (got - want["out"]).abs() - want["bound"]
    assert (over <= 0).all(), f"out beyond its bound by {float(over.max())}"
    error = torch.linalg.vector_norm(got - want["out"])
    floor = torch.linalg.vector_norm(want["floor"] - want["out"])
    size = torch.linalg.vector_norm(want["out"])
    assert error <= 1.1 * floor + 2.0**-9 * size, "more than what rounding P and out costs"
    # FlashMLA's tolerance of lse; a row of one or two tokens is near a single score, whose own
    # error in FP8 does not average out: there the bound is that of the scores.
    tolerance = 1e-5 + 8.01 / 65536 * want["lse"].abs()
    tolerance = torch.where(visible <= 2, torch.maximum(tolerance, want["eta"]), tolerance)
    wrong = (lse.double() - want["lse"]).abs() > tolerance
    assert not (wrong & ~none).any(), "lse"
