"""Running a fuzz case on a GPU, comparing with the reference, and shrinking what differs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, Protocol

import numpy as np
from fuzz_cases import FILLER, Case, cache_planes, expect_append, expect_fetch
from numpy.typing import NDArray

from snapmla_rt import api
from snapmla_rt.reference.layout import ranges_to_slots
from snapmla_rt.reference.quantize_q import quantize_q
from snapmla_rt.tensor import TensorView

Outputs = dict[str, NDArray[Any]]


class Runner(Protocol):
    """Computes the outputs of a case under the names of `case.expected`."""

    def run(self, case: Case) -> Outputs: ...


@contextmanager
def fewer_ctas(count: int) -> Iterator[None]:
    """Launches meanwhile as if the GPU held only so many CTAs of any kernel at once."""
    from snapmla_rt import data_launch

    own = data_launch.ctas_at_once
    data_launch.ctas_at_once = lambda *_: count  # type: ignore[assignment]
    try:
        yield
    finally:
        data_launch.ctas_at_once = own


class GpuRunner:
    """Runs cases through the API on GPU `device_index`, in buffers that are kept and grown."""

    backend = "cuda"

    def __init__(self, device_index: int = 0) -> None:
        self.device_index = device_index
        self._buffers: dict[str, Any] = {}

    def _space(self, name: str, nbytes: int) -> int:
        from snapmla_rt.driver.memory import DeviceBuffer

        own = self._buffers.get(name)
        if own is None or own.nbytes < nbytes:
            own = self._buffers[name] = DeviceBuffer(max(nbytes, 1 << 20), self.device_index)
        return int(own.ptr)

    def place(self, name: str, array: NDArray[Any]) -> TensorView:
        """A copy of a contiguous host array on the GPU."""
        from snapmla_rt.driver.memory import copy_to_device

        ptr = self._space(name, array.nbytes)
        source = array.__array_interface__["data"][0]
        copy_to_device(ptr, source, array.nbytes, self.device_index, 0)
        return self._view(ptr, array)

    def empty(self, name: str, like: NDArray[Any], byte: int = 0x5A) -> TensorView:
        """Memory for an output, filled with `byte` so that what is not written shows."""
        from snapmla_rt.driver.memory import fill

        ptr = self._space(name, like.nbytes)
        fill(ptr, byte, like.nbytes, self.device_index, 0)
        return self._view(ptr, like)

    def _view(self, ptr: int, like: NDArray[Any]) -> TensorView:
        dtype = like.dtype.name
        return TensorView(ptr, like.shape, like.strides, dtype, "cuda", self.device_index)

    def planes(self, raw: TensorView, layout: str) -> tuple[Any, Any, Any]:
        """The three planes of a cache that lies in `raw`."""
        shape_only = np.empty(raw.shape[0], np.uint8)
        base = shape_only.__array_interface__["data"][0]
        found = []
        for plane in cache_planes(shape_only, layout):
            offset = plane.__array_interface__["data"][0] - base
            found.append(self._view(raw.ptr + offset, plane))
        return found[0], found[1], found[2]

    def fetch(self, view: TensorView, like: NDArray[Any]) -> NDArray[Any]:
        """The bytes of a contiguous view, in an array like `like`."""
        from snapmla_rt.driver.memory import copy_to_host, synchronize

        result = np.empty(like.shape, like.dtype)
        target = result.__array_interface__["data"][0]
        copy_to_host(target, view.ptr, result.nbytes, self.device_index, 0)
        synchronize(0, self.device_index)
        return result

    def run(self, case: Case) -> Outputs:
        step = {
            "quantize_q": self._quantize_q,
            "append_kv": self._append_kv,
            "fetch_dequant": self._fetch_dequant,
        }[case.kernel]
        few = case.options.get("ctas_at_once")
        with fewer_ctas(few) if few else nullcontext():
            views = step(case)
        return {name: self.fetch(v, case.expected[name]) for name, v in views.items()}

    def _quantize_q(self, case: Case) -> dict[str, TensorView]:
        out = {name: self.empty(name, want) for name, want in case.expected.items()}
        q = self.place("q", case.inputs["q"])
        mode = case.options["scale_rounding"]
        api.quantize_q(q, out=tuple(out.values()), scale_rounding=mode, backend=self.backend)
        return out

    def _append_kv(self, case: Case) -> dict[str, TensorView]:
        raw = self.empty("cache", case.expected["cache"], FILLER)
        tokens = self.place("tokens", case.inputs["tokens"])
        slots = self.place("slots", case.inputs["slot_mapping"])
        from snapmla_rt.data_launch import latent_part, rope_part

        api.append_kv(
            latent_part(tokens),
            rope_part(tokens),
            *self.planes(raw, case.options["layout"]),
            slots,
            scale_rounding=case.options["scale_rounding"],
            backend=self.backend,
            checked=False,
        )
        return {"cache": raw}

    def _fetch_dequant(self, case: Case) -> dict[str, TensorView]:
        cache = self.planes(self.place("cache", case.inputs["cache"]), case.options["layout"])
        out = {name: self.empty(name, want) for name, want in case.expected.items()}
        options: dict[str, Any] = {"out": tuple(out.values()), "backend": self.backend}
        if "slots" in case.inputs:
            slots = self.place("slots", case.inputs["slots"])
            api.fetch_dequant(*cache, slots, checked=False, **options)
            return out
        names = ("block_table", "starts", "cu_seqlens")
        table, starts, ends = (self.place(name, case.inputs[name]) for name in names)
        api.fetch_dequant_ranges(*cache, table, starts, ends, **options)
        return out


# --- Comparing ---------------------------------------------------------------------------------


def _bytes(x: NDArray[Any]) -> NDArray[np.uint8]:
    return np.ascontiguousarray(x).reshape(-1).view(np.uint8)


def differing_bytes(got: Outputs, expected: Outputs) -> int:
    """Bytes in which the outputs differ from the reference's."""
    total = 0
    for name, want in expected.items():
        a, b = _bytes(got[name]), _bytes(want)
        even = a.size // 8 * 8
        same = np.array_equal(a[:even].view(np.uint64), b[:even].view(np.uint64))
        if not same or not np.array_equal(a[even:], b[even:]):
            total += int(np.count_nonzero(a != b))
    return total


# --- Shrinking ---------------------------------------------------------------------------------


def subset(case: Case, tokens: NDArray[np.int64]) -> Case:
    """The case with these tokens (rows) only, and the reference's answer for it."""
    options = {**case.options, "num_tokens": int(tokens.size)}
    if case.kernel == "quantize_q":
        rows = case.inputs["q"].reshape(-1, 576)[tokens]
        small = Case(case.kernel, case.seed, {"q": rows.reshape(-1, 1, 1, 576)}, options)
    elif case.kernel == "append_kv":
        inputs = {name: array[tokens] for name, array in case.inputs.items()}
        small = Case(case.kernel, case.seed, inputs, options)
    else:
        inputs = {"cache": case.inputs["cache"], "slots": _row_slots(case)[tokens]}
        small = Case(case.kernel, case.seed, inputs, options)
    return answer(small)


def _row_slots(case: Case) -> NDArray[Any]:
    if "slots" in case.inputs:
        return case.inputs["slots"]
    names = ("block_table", "starts", "cu_seqlens")
    return ranges_to_slots(*(case.inputs[n] for n in names), case.options["num_blocks"])


def answer(case: Case) -> Case:
    """Fill in the reference's answer for the case's inputs."""
    if case.kernel == "quantize_q":
        mode = case.options["scale_rounding"]
        names = ("q_nope", "q_rope", "q_scale")
        found = quantize_q(case.inputs["q"], scale_rounding=mode)
        case.expected = dict(zip(names, found, strict=True))
    elif case.kernel == "append_kv":
        expect_append(case)
    else:
        expect_fetch(case)
    return case


def fails(case: Case, runner: Runner) -> bool:
    return differing_bytes(runner.run(case), case.expected) > 0


def shrink(case: Case, runner: Runner, budget: int = 400) -> Case:
    """A smaller failing case: as few tokens, then as few non-zero values as halving finds."""
    tokens = np.arange(case.num_tokens)
    start = subset(case, tokens)
    if not fails(start, runner):
        return case  # fails only in the form it has (its ranges, or its moment)
    best, step = start, max(1, tokens.size // 2)
    while budget > 0:
        for at in range(0, tokens.size, step):
            rest = np.delete(tokens, np.s_[at : at + step])
            budget -= 1
            if rest.size and budget > 0:
                smaller = subset(case, rest)
                if fails(smaller, runner):
                    tokens, best = rest, smaller
                    break
        else:
            if step == 1:
                break
        step = min(max(1, step // 2), max(1, tokens.size // 2))
    return _zero_values(best, runner, budget)


def _zero_values(case: Case, runner: Runner, budget: int) -> Case:
    """Zero runs of values that the failure does not need."""
    name = {"quantize_q": "q", "append_kv": "tokens"}.get(case.kernel)
    if name is None:
        return case
    step = 256
    while step and budget > 0:
        for at in range(0, 576, step):
            kept = case.inputs[name]
            if not kept[..., at : at + step].view(f"u{kept.itemsize}").any():
                continue
            trial = kept.copy()
            trial[..., at : at + step] = 0
            other = Case(case.kernel, case.seed, {**case.inputs, name: trial}, case.options)
            budget -= 1
            if budget > 0 and fails(answer(other), runner):
                case = other
        step //= 2
    return case


def describe(case: Case, got: Outputs) -> str:
    """The failing input and the first differing outputs, in bits a person can type in again."""
    lines = [f"{case.kernel} seed {case.seed} options {case.options}"]
    for name, array in case.inputs.items():
        if array.size > 4096:
            lines.append(f"  {name}: {array.dtype} {list(array.shape)} (from the seed)")
        elif array.dtype.kind in "iu":
            lines.append(f"  {name}: {array.dtype} {array.tolist()}")
        else:
            bits = array.view(f"u{array.itemsize}")
            at = np.argwhere(bits != 0)[:64]
            values = ", ".join(f"{list(map(int, i))}: 0x{int(bits[tuple(i)]):x}" for i in at)
            lines.append(f"  {name}: {array.dtype} {list(array.shape)}, zero but {values}")
    for name, want in case.expected.items():
        a, b = _bytes(got[name]), _bytes(want)
        for i in np.flatnonzero(a != b)[:8]:
            lines.append(f"  {name} byte {i}: got 0x{a[i]:02x}, expected 0x{b[i]:02x}")
    return "\n".join(lines)
