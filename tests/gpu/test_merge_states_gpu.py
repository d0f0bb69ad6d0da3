"""merge_states on a GPU equals the reference in every byte."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from compare import difference_report
from numpy.typing import NDArray

from snapmla_rt import api
from snapmla_rt.array import DeviceArray, to_device, to_host
from snapmla_rt.driver import memory
from snapmla_rt.driver.graph import Graph
from snapmla_rt.reference.merge_states import merge_states as reference
from snapmla_rt.tensor import TensorView

BF16 = ml_dtypes.bfloat16
F32 = np.float32
KINDS: tuple[tuple[Any, Any, str | None], ...] = (
    *((BF16, BF16, None), (F32, F32, None), (BF16, F32, None), (F32, BF16, None)),
    *((F32, F32, "bfloat16"), (BF16, BF16, "float32")),
)


def hostile(rng: np.random.Generator, shape: tuple[int, ...], kind: Any) -> NDArray[Any]:
    """Values of every magnitude, zeros of both signs, infinities and NaN."""
    with np.errstate(over="ignore"):
        x = np.ldexp(rng.standard_normal(shape), rng.integers(-130, 127, shape)).astype(F32)
    special = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 1e-45, 3.4e38, -3.4e38], F32)
    pick = rng.random(shape) < 0.05
    x[pick] = rng.choice(special, int(pick.sum()))
    plain = rng.random(shape[:-1]) < 0.5
    x[plain] = rng.standard_normal((int(plain.sum()), shape[-1]))
    with np.errstate(over="ignore", invalid="ignore"):
        return x.astype(kind)


def hostile_lse(rng: np.random.Generator, shape: tuple[int, ...]) -> NDArray[Any]:
    """Near and far apart, empty of both kinds, NaN, zeros, and the ends of float32."""
    x = (np.exp2(rng.integers(-20, 8, shape)) * rng.standard_normal(shape)).astype(F32)
    special = np.array([np.inf, -np.inf, np.nan, 0.0, -0.0, 3e38, -3e38, 1e-45], F32)
    pick = rng.random(shape) < 0.3
    x[pick] = rng.choice(special, int(pick.sum()))
    return x


def case(seed: int, shape: tuple[int, int, int, int], kinds: tuple[Any, Any]) -> Any:
    rng = np.random.default_rng(seed)
    b, s, h, _ = shape
    outs = [hostile(rng, shape, kind) for kind in kinds]
    lse_a, lse_b = (hostile_lse(rng, (b, h, s)) for _ in range(2))
    same = rng.random(lse_b.shape) < 0.2
    lse_b[same] = lse_a[same]
    return outs[0], lse_a, outs[1], lse_b


def put(array: NDArray[Any]) -> TensorView:
    return to_device(np.ascontiguousarray(array)).view()


def check(got: Any, want: Any) -> None:
    for name, g, w in zip(("out", "lse"), got, want, strict=True):
        host = to_host(g.view() if isinstance(g, DeviceArray) else g)
        report = difference_report(name, host.view(w.dtype), w)
        assert report is None, report


@pytest.mark.parametrize("kinds", KINDS)
@pytest.mark.parametrize(
    "shape", [(1, 1, 1, 8), (3, 2, 5, 512), (2, 4, 128, 512), (7, 1, 16, 264), (1, 9, 3, 128)]
)
def test_every_byte(kinds: tuple[Any, Any, str | None], shape: tuple[int, int, int, int]) -> None:
    for seed in range(2):
        given = case(seed, shape, kinds[:2])
        on_gpu = [put(array) for array in given]
        for base in ("e", "2"):
            kind = None if kinds[2] is None else {"bfloat16": BF16, "float32": F32}[kinds[2]]
            want = reference(*given, out_dtype=kind, lse_base=base)
            check(api.merge_states(*on_gpu, out_dtype=kinds[2], lse_base=base), want)


def test_strides_and_in_place() -> None:
    """Rows, requests and lse apart; results that overwrite an input; without a batch dimension."""
    given = case(5, (3, 2, 8, 512), (BF16, BF16))
    want = reference(*given)
    wide = np.zeros((3, 4, 8, 640), BF16)
    wide[:, :2, :, :512] = given[0]
    whole = put(wide)
    shape, strides = (3, 2, 8, 512), whole.strides
    apart = TensorView(whole.ptr, shape, strides, "bfloat16", "cuda", 0, whole.owner)
    turned = put(np.ascontiguousarray(given[3].transpose(0, 2, 1)))
    b, s, h = turned.strides
    lse_b = TensorView(turned.ptr, (3, 8, 2), (b, h, s), "float32", "cuda", 0, turned.owner)
    check(api.merge_states(apart, put(given[1]), put(given[2]), lse_b), want)
    own = [put(array) for array in given]
    api.merge_states(*own, out=own[2], lse=own[3])
    check((own[2], own[3]), want)
    api.merge_states(apart, put(given[1]), put(given[2]), lse_b, out=apart, lse=lse_b)
    check((apart, lse_b), want)
    one = [put(array[0]) for array in given]
    check(api.merge_states(*one), [w[0] for w in want])


def test_many_rows_and_captured() -> None:
    given = case(6, (512, 1, 128, 64), (BF16, F32))
    want = reference(*given)
    on_gpu = [put(array) for array in given]
    out, lse = put(np.zeros_like(want[0])), put(np.zeros_like(want[1]))
    stream, graph = memory.Stream(0), Graph(0)
    with graph.capture(stream.handle):
        api.merge_states(*on_gpu, out=out, lse=lse, stream=stream, pdl=True)
    graph.launch(stream.handle)
    stream.synchronize()
    check((out, lse), want)


def test_host_arrays_through_the_gpu() -> None:
    given = case(7, (2, 2, 4, 16), (BF16, F32))
    out, lse = api.merge_states(*given, backend="cuda")
    want = reference(*given)
    assert difference_report("out", out, want[0]) is None
    assert difference_report("lse", lse, want[1]) is None


def test_rows_that_are_not_aligned_are_refused() -> None:
    given = case(8, (1, 1, 2, 16), (BF16, BF16))
    on_gpu = [put(array) for array in given]
    odd = put(np.zeros((1, 1, 2, 20), BF16))
    crooked = TensorView(odd.ptr + 2, (1, 1, 2, 16), odd.strides, "bfloat16", "cuda", 0, odd.owner)
    with pytest.raises(ValueError, match="out_b"):
        api.merge_states(on_gpu[0], on_gpu[1], crooked, on_gpu[3])


def test_shards_of_a_decode_are_the_whole() -> None:
    """Decode context parallelism: each rank decodes the pages that it holds; ranks without a page
    of a request give lse +inf. Near the undivided decode: each shard's out is rounded to bf16."""
    from decode_cases import DecodeSpec, build
    from decode_gpu import OnGpu

    case_ = build(DecodeSpec(3, 16, 1, (700, 64, 1, 0, 300), pattern="loud_tokens"))
    whole = OnGpu(case_)
    want_out, want_lse = whole.decode()
    shards = []
    for rank in range(2):
        pages = -(-case_.cache_seqlens // 64)
        mine = [np.arange(n)[rank::2] for n in pages]
        part = OnGpu(case_)
        table = np.full_like(case_.block_table, 2**31 - 1)
        lengths = np.zeros_like(case_.cache_seqlens)
        for row, columns in enumerate(mine):
            table[row, : len(columns)] = case_.block_table[row, columns]
            tokens = np.minimum(case_.cache_seqlens[row] - 64 * columns, 64)
            lengths[row] = tokens.sum()  # only the last page of a request is not full
        part.block_table, part.cache_seqlens = put(table), put(lengths)
        shards.append(part.decode())
    arrays = [put(x.view(BF16) if x.dtype == np.uint16 else x) for s in shards for x in s]
    out, lse = (to_host(x.view()) for x in api.merge_states(*arrays))
    got, want = out.astype(np.float64), want_out.view(BF16).astype(np.float64)
    assert np.linalg.norm(got - want) <= 2.0**-6 * np.linalg.norm(want)
    finite = np.isfinite(want_lse)
    assert (finite == np.isfinite(lse)).all() and (got[3] == 0).all() and np.isposinf(lse[3]).all()
    error = np.abs(lse - want_lse)[finite]
    assert (error <= 1e-6 * (1 + np.abs(want_lse[finite]))).all()


def test_torch_tensors() -> None:
    torch = pytest.importorskip("torch")
    given = case(9, (4, 1, 16, 512), (BF16, BF16))
    want = reference(*given)
    tensors = [torch.from_numpy(x.view(np.int16) if x.dtype == BF16 else x).cuda() for x in given]
    tensors = [t.view(torch.bfloat16) if t.dtype == torch.int16 else t for t in tensors]
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda.current_stream().wait_stream(torch.cuda.default_stream())
        out, lse = api.merge_states(*tensors)
        torch.cuda.current_stream().synchronize()
    assert out.dtype == torch.bfloat16
    bits = out.view(torch.int16).cpu().numpy().view(BF16)
    assert difference_report("out", bits, want[0]) is None
    assert difference_report("lse", lse.cpu().numpy(), want[1]) is None
