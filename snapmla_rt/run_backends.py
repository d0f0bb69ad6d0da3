"""Who computes the stages of `snapmla decode`: the one seam between the run and an implementation.

A backend owns the paged cache and runs append_kv, quantize_q, plan_decode, mla_decode and
mla_combine on it; the run (`decode_run.py`) hands it NumPy arrays and takes NumPy arrays back, and
never knows where they were computed. The byte contract makes them interchangeable.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from .backend import BACKENDS
from .config import BLOCK_SIZE, KV_LORA_RANK, QK_ROPE_HEAD_DIM
from .errors import ArgumentError, UnsupportedDeviceError

# Of every plan, whatever GPU runs it: the cuts decide the last bits, and a run must give the same
# bytes on a laptop, on a GPU with fewer SMs and under a green context.
PLANNED_SMS = 132


@dataclass
class StageTimes:
    """Calls and seconds of each stage, in the order in which stages were first seen."""

    calls: dict[str, int] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def measure(self, stage: str) -> Iterator[None]:
        """Count one call of `stage` and the time that the block takes."""
        start = time.perf_counter()
        yield
        self.add(stage, time.perf_counter() - start)

    def add(self, stage: str, seconds: float) -> None:
        """Count one call of `stage` that took `seconds` (a backend with its own clock)."""
        self.calls[stage] = self.calls.get(stage, 0) + 1
        self.seconds[stage] = self.seconds.get(stage, 0.0) + seconds


class Backend(Protocol):
    """One implementation of the stages, with the paged cache of one layer."""

    name: str
    detail: str  # what it runs on, for the report
    times: StageTimes

    def allocate(self, num_blocks: int) -> None:
        """Make a cache of num_blocks blocks of 64 tokens, replacing the one before."""

    def append(self, kv_c: NDArray[Any], k_pe: NDArray[Any], slots: NDArray[Any]) -> None:
        """Quantise tokens kv_c [n, 512], k_pe [n, 64] into slots [n] of the cache."""

    def decode(
        self,
        q: NDArray[Any],
        block_table: NDArray[np.int32],
        cache_seqlens: NDArray[np.int32],
        softmax_scale: float,
    ) -> Decoded:
        """One decode step for q [b, s_q, h, 576], causal."""

    def cache_on_host(self) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
        """ckv_cache, k_scale_cache, k_rope_cache as NumPy arrays (reference/append_kv.py)."""


@dataclass(frozen=True)
class Decoded:
    """Results of a step on the host: out bf16 [b, s_q, h, 512], lse f32 [b, h, s_q] (nats), and
    the quantised query (e4m3 [b, s_q, h, 512], bf16 [b, s_q, h, 64], f32 [b, s_q, h])."""

    out: NDArray[Any]
    lse: NDArray[Any]
    query: tuple[NDArray[Any], NDArray[Any], NDArray[Any]]


def _empty_cache(num_blocks: int) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
    """Zeroed ckv_cache, k_scale_cache, k_rope_cache."""
    return (
        np.zeros((num_blocks, BLOCK_SIZE, KV_LORA_RANK), ml_dtypes.float8_e4m3fn),
        np.zeros((num_blocks, BLOCK_SIZE), np.float32),
        np.zeros((num_blocks, BLOCK_SIZE, QK_ROPE_HEAD_DIM), ml_dtypes.bfloat16),
    )


class ReferenceBackend:
    """The NumPy reference: the specification itself, on the CPU."""

    name = "reference"

    def __init__(self, block_n: int, scale_rounding: str) -> None:
        from .reference import append_kv, mla_decode, plan_decode, quantize_q, tensor_core

        self._append_kv = append_kv.append_kv
        self._quantize_q = quantize_q.quantize_q
        self._plan_decode = plan_decode.plan_decode
        self._mla_decode = mla_decode
        self._block_n = block_n
        self._scale_rounding = scale_rounding
        compiled = tensor_core.compiled_available()
        self.detail = f"CPU, {'compiled' if compiled else 'uncompiled (pure NumPy)'} core"
        self.times = StageTimes()

    def allocate(self, num_blocks: int) -> None:
        self._cache = _empty_cache(num_blocks)

    def append(self, kv_c: NDArray[Any], k_pe: NDArray[Any], slots: NDArray[Any]) -> None:
        with self.times.measure("append_kv"):
            self._append_kv(kv_c, k_pe, *self._cache, slots, scale_rounding=self._scale_rounding)

    def decode(
        self,
        q: NDArray[Any],
        block_table: NDArray[np.int32],
        cache_seqlens: NDArray[np.int32],
        softmax_scale: float,
    ) -> Decoded:
        _, seq_len_q, num_heads, _ = q.shape
        with self.times.measure("quantize_q"):
            query = self._quantize_q(q, scale_rounding=self._scale_rounding)
        with self.times.measure("plan_decode"):
            plan = self._plan_decode(
                cache_seqlens, num_heads, seq_len_q, block_n=self._block_n, num_sms=PLANNED_SMS
            )
        with self.times.measure("mla_decode"):
            splits = self._mla_decode.mla_decode_splits(
                query, self._cache, block_table, cache_seqlens, plan, softmax_scale
            )
        with self.times.measure("mla_combine"):
            out, lse = self._mla_decode.combine_splits(plan, splits)
        return Decoded(out, lse, query)

    def cache_on_host(self) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
        return self._cache


class CudaBackend:
    """The kernels on a Hopper GPU, through the public calls; each stage is waited for and timed."""

    name = "cuda"

    def __init__(self, block_n: int, scale_rounding: str) -> None:
        from . import api, array
        from .backend import resolve_backend
        from .driver.device import device_info
        from .driver.memory import synchronize

        _, self._device = resolve_backend("cuda", {})
        self._api, self._array, self._synchronize = api, array, synchronize
        self._block_n = block_n
        self._scale_rounding = scale_rounding
        self.detail = device_info(self._device).name
        self.times = StageTimes()

    @contextmanager
    def _measure(self, stage: str) -> Iterator[None]:
        with self.times.measure(stage):
            yield
            self._synchronize(0, self._device)

    def _upload(self, host: NDArray[Any]) -> Any:
        return self._array.to_device(np.ascontiguousarray(host), self._device).view()

    def allocate(self, num_blocks: int) -> None:
        self._cache = tuple(self._upload(plane) for plane in _empty_cache(num_blocks))

    def append(self, kv_c: NDArray[Any], k_pe: NDArray[Any], slots: NDArray[Any]) -> None:
        given = [self._upload(array) for array in (kv_c, k_pe, slots)]
        latent, k_scale, k_rope = self._cache
        rounding = self._scale_rounding
        with self._measure("append_kv"):
            self._api.append_kv(
                given[0], given[1], latent, k_scale, k_rope, given[2], scale_rounding=rounding
            )

    def decode(
        self,
        q: NDArray[Any],
        block_table: NDArray[np.int32],
        cache_seqlens: NDArray[np.int32],
        softmax_scale: float,
    ) -> Decoded:
        _, seq_len_q, num_heads, _ = q.shape
        given, table, seqlens = (self._upload(x) for x in (q, block_table, cache_seqlens))
        with self._measure("quantize_q"):
            query = self._api.quantize_q(given, scale_rounding=self._scale_rounding)
        with self._measure("plan_decode"):
            plan = self._api.plan_decode(
                seqlens, num_heads, seq_len_q, block_n=self._block_n, num_sms=PLANNED_SMS
            )
        (nope, rope, scale), (latent, k_scale, k_rope) = query, self._cache
        with self._measure("mla_decode + mla_combine"):
            out, lse = self._api.mla_decode(
                *(nope, rope, scale, latent, k_scale, k_rope, table, seqlens, plan), softmax_scale
            )
        return Decoded(out.numpy(), lse.numpy(), tuple(part.numpy() for part in query))

    def cache_on_host(self) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
        codes, scale, rope = (self._array.to_host(plane) for plane in self._cache)
        return codes, scale, rope


def make_backend(name: str, block_n: int, scale_rounding: str) -> Backend:
    """The backend called `name`; "auto" takes CUDA where it can run, else the reference.

    Raises ArgumentError for another name and UnsupportedDeviceError where "cuda" cannot run.
    """
    if name not in BACKENDS:
        raise ArgumentError("backend", f"one of {BACKENDS}", repr(name))
    if name != "reference":
        try:
            return _cuda_backend(block_n, scale_rounding)
        except UnsupportedDeviceError:
            if name == "cuda":
                raise
    return ReferenceBackend(block_n, scale_rounding)


def _cuda_backend(block_n: int, scale_rounding: str) -> Backend:
    """The backend on `snapmla_rt.api`; a function of its own so that tests can take it away."""
    return CudaBackend(block_n, scale_rounding)
