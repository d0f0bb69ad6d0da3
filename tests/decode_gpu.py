"""Running a DecodeCase on GPU 0 through the API, without any framework.

What a call must write is filled with 0xA5 before, and its workspace with NaN: a row that is left
out, or a partial result that is read but was not written, shows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from compare import difference_report
from decode_cases import PLANES, DecodeCase, plane_places
from numpy.typing import NDArray

from snapmla_rt import api
from snapmla_rt.array import DeviceArray, to_device, to_host
from snapmla_rt.driver import memory
from snapmla_rt.plan import DecodePlan
from snapmla_rt.tensor import TensorView

UNWRITTEN = 0xA5
mla_decode: Any = api.mla_decode  # called with its eight arrays as one sequence
Result = tuple[NDArray[np.uint16], NDArray[np.float32]]


def put(array: NDArray[Any], device: int = 0) -> TensorView:
    """A copy on the GPU."""
    return to_device(np.ascontiguousarray(array), device).view()


def filled(shape: tuple[int, ...], dtype: str, byte: int, device: int = 0) -> TensorView:
    """Memory on the GPU with every byte set."""
    array = DeviceArray(shape, dtype, device)
    memory.fill(array.ptr, byte, array.nbytes, device, memory.LEGACY_STREAM)
    memory.synchronize(memory.LEGACY_STREAM, device)
    return array.view()


def planes_on_gpu(buffers: Sequence[TensorView], layout: str) -> tuple[TensorView, ...]:
    """The three planes of a cache that lies in `buffers`."""
    found = []
    for (shape, strides, dtype), (at, start, step) in zip(
        PLANES, plane_places(layout), strict=True
    ):
        buffer = buffers[at]
        whole = (buffer.nbytes // step, *shape)
        name = np.dtype(dtype).name
        found.append(
            TensorView(
                buffer.ptr + start, whole, (step, *strides), name, "cuda", 0, owner=buffer.owner
            )
        )
    return tuple(found)


class OnGpu:
    """The arrays of a case on GPU 0; call `plan` and `decode` any number of times."""

    def __init__(self, case: DecodeCase) -> None:
        self.spec = case.spec
        self.query = tuple(put(array) for array in case.query)
        self.buffers = [put(buffer) for buffer in case.buffers]
        self.paged = planes_on_gpu(self.buffers, case.spec.layout)
        self.block_table = put(case.block_table)
        self.cache_seqlens = put(case.cache_seqlens)
        # A case of its own lengths is planned from cache_seqlens as it is then: tests change it.
        own = case.spec.plan_lengths == "own"
        self.planned_lengths = None if own else put(case.planned_lengths())

    @property
    def arguments(self) -> Any:
        """The eight arrays in the order of mla_decode."""
        return (*self.query, *self.paged, self.block_table, self.cache_seqlens)

    @property
    def batch(self) -> int:
        return self.cache_seqlens.shape[0]

    def plan(self, stream: Any = None, out: DecodePlan | None = None, **changes: Any) -> DecodePlan:
        options = {**self.spec.plan_options, **changes}
        heads, seq_len_q = self.spec.num_heads_q, self.spec.seq_len_q
        lengths = self.cache_seqlens if self.planned_lengths is None else self.planned_lengths
        return api.plan_decode(lengths, heads, seq_len_q, out=out, stream=stream, **options)

    def results(self) -> tuple[TensorView, TensorView]:
        """Fresh out and lse."""
        heads, seq_len_q = self.spec.num_heads_q, self.spec.seq_len_q
        out = filled((self.batch, seq_len_q, heads, 512), "bfloat16", UNWRITTEN)
        return out, filled((self.batch, heads, seq_len_q), "float32", UNWRITTEN)

    def workspace(self, plan: DecodePlan) -> TensorView:
        longest = min(self.block_table.shape[1] * 64, 1 << 20)
        return filled((api.decode_workspace_size(plan, self.batch, longest),), "uint8", 0xFF)

    def enqueue(self, plan: DecodePlan, stream: Any = None, **options: Any) -> None:
        """One mla_decode call; out, lse and workspace among the options."""
        settings = {"causal": self.spec.causal, **options}
        mla_decode(*self.arguments, plan, self.spec.softmax_scale, stream=stream, **settings)

    def decode(self, plan: DecodePlan | None = None, stream: Any = None, **options: Any) -> Result:
        """out (bits) and lse of a plan (its own by default)."""
        plan = self.plan(stream) if plan is None else plan
        out, lse = self.results()
        workspace = self.workspace(plan)
        self.enqueue(plan, stream, out=out, lse=lse, workspace=workspace, **options)
        handle = memory.LEGACY_STREAM if stream is None else int(stream)
        return to_host(out, handle).view(np.uint16), to_host(lse, handle)


def run(case: DecodeCase) -> Result:
    """A case through plan_decode and mla_decode."""
    return OnGpu(case).decode()


def report(got: Result, want: Result) -> str | None:
    """None where out and lse have the same bytes, else the first differences in words."""
    found = [
        difference_report("out", got[0], want[0]),
        difference_report("lse", got[1], want[1]),
    ]
    return "\n".join(text for text in found if text) or None


def differing_bytes(got: Result, want: Result) -> int:
    """Bytes of out and lse that differ."""
    out = np.count_nonzero(_bytes(got[0]) != _bytes(want[0]))
    return int(out + np.count_nonzero(_bytes(got[1]) != _bytes(want[1])))


def _bytes(x: NDArray[Any]) -> NDArray[np.uint8]:
    return np.ascontiguousarray(x).reshape(-1).view(np.uint8)
