"""Every step of mla_decode against float64, from the values the step before it gave.

The bounds are those of the operations (decode_tools); a step that used a wrong operand, scale,
token or order of exponents is off by far more. Then the whole, with the bound that follows.
"""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import pytest
from compare import assert_same_bytes
from decode_tools import (
    BF16_REL,
    E4M3,
    EXP2_REL,
    FTZ,
    LN2,
    LOG2_ABS,
    U24,
    Cached,
    cached,
    chain_bound,
    decode,
    decode_splits,
    dequantised,
    examples,
    request_operands,
    score_bound,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from strategies import DecodeCase, decode_cases, slots_of

from snapmla_rt.config import LOGIT_MAX, RAISE_THRESHOLD, DecodeConfig
from snapmla_rt.reference.attention_fp64 import attention_fp64, e4m3_table, round_to_e4m3
from snapmla_rt.reference.mla_combine import natural_lse
from snapmla_rt.reference.mla_decode import row_limits
from snapmla_rt.reference.numerics import bf16_from_f32, fma, log2_soft, rcp_rn
from snapmla_rt.reference.tensor_core import pv_chain, qk_chain

F64 = NDArray[np.float64]
LOG2E = 1.0 / LN2
LOG2_448 = float(np.log2(448.0))


class Request:
    """One request of a traced, unsplit decode, padded to whole blocks, with what fp64 knows."""

    def __init__(self, c: Cached, case: dict[str, Any], traces: Any, req: int) -> None:
        self.blocks = traces[req, 0]
        self.block_n = case["block_n"]
        self.q8, self.q16, self.q_scale, k8, k16, ks = request_operands(c, req)
        padded = len(self.blocks) * self.block_n
        self.k8, self.k16, self.ks = (
            np.concatenate([x, np.zeros((padded - len(x), *x.shape[1:]))]) for x in (k8, k16, ks)
        )
        _, seq_len_q, heads = c.query[2].shape
        config = DecodeConfig(heads, seq_len_q, 1.0, case["causal"])
        limit = row_limits(config, len(ks))
        self.visible = np.arange(padded) < limit[:, None]
        slots = slots_of(c.block_table[req], len(ks))
        codes, rope = (x.reshape(-1, x.shape[2])[slots] for x in (c.paged[0], c.paged[2]))
        self.k_codes = np.zeros((padded, 512), np.uint8)
        self.k_rope = np.zeros((padded, 64), np.uint16)
        self.k_codes[: len(ks)], self.k_rope[: len(ks)] = codes.view("u1"), rope.view("u2")
        self.factor = case["softmax_scale"] * LOG2E

    def spans(self) -> list[tuple[slice, dict[str, Any]]]:
        n = self.block_n
        return [(slice(k * n, (k + 1) * n), block) for k, block in enumerate(self.blocks)]


def trace_of(case: DecodeCase, block_n: int) -> tuple[Cached, Any, Any, list[Request]]:
    c = cached(case.q, case.kv)
    how = {"block_n": block_n, "causal": case.causal, "softmax_scale": case.softmax_scale}
    out, lse, traces = decode(c, trace=True, num_splits=1, **how)
    requests = [Request(c, how, traces, req) for req in range(len(case.kv)) if len(case.kv[req])]
    return c, out, lse, requests


small_cases = decode_cases(max_heads=2, max_seq_len_q=8, max_length=193, max_magnitude=1e3)


@given(case=small_cases, block_n=st.sampled_from([64, 128]))
@settings(max_examples=examples(40))
def test_every_step_is_within_its_own_rounding(case: DecodeCase, block_n: int) -> None:
    _, _, _, requests = trace_of(case, block_n)
    for request in requests:
        reference = np.full(len(request.q8), -np.inf)
        row_sum = np.zeros((len(request.q8), 4))
        output = np.zeros((len(request.q8), 512))
        for span, block in request.spans():
            check_scores(request, span, block)
            check_weights(request, span, block)
            reference = check_reference(block, reference)
            check_promotion(request, span, block, row_sum, output)
            row_sum, output = block["L"].astype(np.float64), block["O"].astype(np.float64)


def check_scores(request: Request, span: slice, block: dict[str, Any]) -> None:
    """[S2], [S3], [S4]."""
    exact, bound = score_bound(request.q8, request.q16, request.k8[span], request.k16[span])
    s = block["S"].astype(np.float64)
    assert (np.abs(s - exact) <= bound).all(), "S"
    seen, u = request.visible[:, span], block["u"].astype(np.float64)
    assert np.isneginf(u[~seen]).all() and np.isfinite(u[seen]).all()
    with np.errstate(divide="ignore", invalid="ignore"):
        log2_scale = np.log2(request.ks[span])
        product = s * request.ks[span] * (request.q_scale * request.factor)[:, None]
        want = np.clip(product + log2_scale, -LOGIT_MAX, LOGIT_MAX)
    # c rounds twice (its factor and the product) and S * ks once; lk has log2_soft's error
    with np.errstate(invalid="ignore"):
        slack = 3.1 * U24 * np.abs(product) + U24 * (np.abs(log2_scale) + np.abs(want)) + LOG2_ABS
        slack = slack + 2.0**-120  # products that leave the normal range
        assert (np.abs(u - want) <= slack)[seen].all(), "u"
    top = np.where(seen, block["u"], np.float32(-np.inf)).max(axis=1)
    np.testing.assert_array_equal(block["M"], top)
    n, some = block["n"].astype(np.float64), seen.any(axis=1)
    assert (n[~some] == 0).all()
    # rounded up, by less than one unit of n; log2(448) is itself rounded down
    above = n[some] - (top[some].astype(np.float64) - LOG2_448)
    assert (above >= 0).all() and (above <= 2.0**-20 + 2.0**-23 * np.abs(n[some])).all(), "n"


def check_weights(request: Request, span: slice, block: dict[str, Any]) -> None:
    """[S5] and l of [S7]."""
    n, e = block["n"].astype(np.float64), block["e"].astype(np.float64)
    below = block["u"].astype(np.float64) - n[:, None]
    with np.errstate(invalid="ignore"):
        slack = EXP2_REL + np.where(np.isfinite(below), LN2 * U24 * np.abs(below), 0.0)
        # 1.01: where |below| is large, 2^x has curved within the rounding of x
        exact = np.exp2(below)
        assert (np.abs(e - exact) <= exact * np.minimum(1.01 * slack, 1.0) + FTZ).all(), "e"
    assert (e <= 448 * (1 + EXP2_REL)).all()
    table = e4m3_table()
    np.testing.assert_array_equal(table[block["P"]], round_to_e4m3(e))
    inverse = np.divide(1.0, request.ks[span], where=request.ks[span] > 0, out=np.zeros(len(e[0])))
    for lane in range(4):
        tokens = np.flatnonzero(np.arange(len(inverse)) % 8 // 2 == lane)
        want = e[:, tokens] @ inverse[tokens]
        # rk rounds once, and each of the lane's tokens adds one fma
        slack = (len(tokens) + 1.1) * U24 * want + len(tokens) * 2.0**-149
        assert (np.abs(block["l"][:, lane] - want) <= slack).all(), "l"


def check_reference(block: dict[str, Any], before: F64) -> F64:
    """[S6]: R rises only by more than the threshold, and then to M."""
    top, after = block["M"].astype(np.float64), block["R"].astype(np.float64)
    assert (after >= before).all()
    with np.errstate(invalid="ignore"):
        raised = after > before
        assert (after[raised] == top[raised]).all()
        assert (top[raised] > before[raised] + RAISE_THRESHOLD * (1 - 2 * U24)).all()
        kept = ~raised & np.isfinite(top)
        assert (top[kept] <= before[kept] + RAISE_THRESHOLD + U24 * np.abs(before[kept]) * 2).all()
        r, t = block["r"].astype(np.float64), block["t"].astype(np.float64)
        assert (r[~raised] == 1).all()
        step = before[raised] - after[raised]
        close(r[raised], step, "r")
        seen = np.isfinite(top)
        assert (t[~seen] == 0).all()
        close(t[seen], block["n"].astype(np.float64)[seen] - after[seen], "t")
    # so a block's largest weight is promoted by at most 2^8
    assert (t <= 2.0**RAISE_THRESHOLD / 448 * (1 + 1e-5) + (np.abs(block["n"]) > 2**20)).all()
    return after


def close(got: F64, exponent: F64, name: str) -> None:
    """got = 2^exponent by a rounded exponent and MUFU."""
    exact = np.exp2(exponent)
    bounded = np.where(np.isfinite(exponent), np.abs(exponent), 0.0)
    slack = EXP2_REL + 1.01 * LN2 * U24 * bounded
    assert (np.abs(got - exact) <= exact * np.minimum(slack, 1.0) + FTZ).all(), name


def check_promotion(
    request: Request, span: slice, block: dict[str, Any], row_sum: F64, output: F64
) -> None:
    """[S7], [S8] from L and O before the block."""
    r, t = (block[name].astype(np.float64)[:, None] for name in "rt")
    p, values = e4m3_table()[block["P"]], request.k8[span]
    exact = p @ values
    bound, _ = chain_bound(E4M3, p, np.ascontiguousarray(values.T))
    assert (np.abs(block["T"] - exact) <= bound).all(), "T"
    for name, add, old in (("L", block["l"], row_sum), ("O", block["T"], output)):
        want = add.astype(np.float64) * t + old * r
        # O * r rounds once (or falls below the normal range), the fma once
        slack = U24 * (np.abs(old * r) + np.abs(want)) + 2.0**-148
        assert (np.abs(block[name] - want) <= slack * 1.001).all(), name


@given(case=small_cases, block_n=st.sampled_from([64, 128]))
@settings(max_examples=examples(40))
def test_the_whole_is_within_the_sum_of_the_parts(case: DecodeCase, block_n: int) -> None:
    """out and lse against attention in float64 on the dequantised inputs.

    Logits: u is off by at most `off` (log2 units, from the trace, itself bounded above), so no
    weight by more than a factor e^(2 off ln 2). P: half a unit of e4m3, 2^-4 of a weight or, small
    ones, 2^-10 where the block's largest is 448. T: the chain's bound. fp32: a few roundings.
    """
    c, out, lse, requests = trace_of(case, block_n)
    q, kv, _ = dequantised(c)
    exact, exact_lse = attention_fp64(q, kv, case.softmax_scale, case.causal)
    alive = [req for req in range(len(kv)) if len(kv[req])]
    for req in set(range(len(kv))) - set(alive):
        assert (out[req].view(np.uint16) == 0).all() and (lse[req] == np.inf).all()
    for req, request in zip(alive, requests, strict=True):
        rows = len(request.q8)
        got = out[req].astype(np.float64).reshape(rows, 512)
        want, want_lse = exact[req].reshape(rows, 512), exact_lse[req].T.reshape(rows)
        bound, off = whole_bound(request, kv[req][:, :512])
        assert np.isfinite(got).all()
        assert (np.abs(got - want) <= bound + BF16_REL * np.abs(want) + 2.0**-133).all()
        got_lse = lse[req].T.reshape(rows)
        some = request.visible.any(axis=1)
        assert (got_lse[~some] == np.inf).all() and (got[~some] == 0).all()
        slack = off * LN2 + 1e-5 + 4 * U24 * np.abs(want_lse)
        assert (np.abs(got_lse[some] - want_lse[some]) <= slack[some]).all()


def whole_bound(request: Request, values: F64) -> tuple[F64, F64]:
    """(bound of out without its rounding to bf16 [rows, 512], logit error in log2 units [rows])."""
    seen = request.visible[:, : len(values)]
    u = np.concatenate([b["u"] for b in request.blocks], axis=1)[:, : len(values)].astype(float)
    scores = request.q8 @ request.k8.T + request.q16 @ request.k16.T
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        log2_scale = np.log2(request.ks)[: len(values)]
        x = (scores * request.ks * (request.q_scale * request.factor)[:, None])[:, : len(values)]
        off = np.where(seen, np.abs(u - (x + log2_scale)), 0.0).max(axis=1, initial=0.0)
        top = np.max(np.where(seen, u - log2_scale, -np.inf), axis=1, keepdims=True)
        weight = np.where(seen, np.exp2(u - log2_scale - top), 0.0)
        total = weight.sum(axis=1, keepdims=True)
        weight = weight / np.where(total > 0, total, 1.0)
        bound = weight @ np.abs(values) * np.expm1(2.02 * LN2 * off)[:, None]
        spread = np.zeros_like(bound)
        table = e4m3_table()
        for span, block in request.spans():
            part = slice(span.start, min(span.stop, len(values)))
            scale = np.exp2(block["n"].astype(float)[:, None] - top) / np.where(total > 0, total, 1)
            half_step = 2.0**-10 * scale / request.ks[part]
            p_off = np.maximum(weight[:, part] * 2.0**-4, np.where(seen[:, part], half_step, 0.0))
            spread += p_off @ np.abs(values[part])
            p, codes = table[block["P"]], request.k8[span]
            t_off, _ = chain_bound(E4M3, p, np.ascontiguousarray(codes.T))
            spread += np.where(seen[:, part].any(axis=1)[:, None], t_off * scale, 0.0)
        steps = 6 * len(request.blocks) + 40
        bound += 1.01 * spread + steps * 2 * U24 * (weight @ np.abs(values))
    return np.where(np.isnan(bound), np.inf, bound), off


@given(case=small_cases, block_n=st.sampled_from([64, 128]))
@settings(max_examples=examples(20))
def test_the_trace_is_what_was_computed(case: DecodeCase, block_n: int) -> None:
    """S and T from the trace's operands, and O, L, out and lse from its pieces, bit for bit."""
    c, out, lse, requests = trace_of(case, block_n)
    splits = decode_splits(c, case.softmax_scale, causal=case.causal, block_n=block_n, num_splits=1)
    alive = [req for req in range(len(case.kv)) if len(case.kv[req])]
    for req, request in zip(alive, requests, strict=True):
        rows = len(request.q8)
        q_codes, q_rope = (c.query[i][req].reshape(rows, -1) for i in (0, 1))
        o, row_sum = np.zeros((rows, 512), np.float32), np.zeros((rows, 4), np.float32)
        for span, block in request.spans():
            k_codes, k_rope = request.k_codes[span], request.k_rope[span]
            s = qk_chain(q_codes, q_rope, k_codes, k_rope).view(np.float32)
            assert_same_bytes("S", s, np.ascontiguousarray(block["S"]))
            t_sum = pv_chain(block["P"], k_codes).view(np.float32)
            assert_same_bytes("T", t_sum, block["T"])
            o = fma(t_sum, np.broadcast_to(block["t"][:, None], o.shape), o * block["r"][:, None])
            row_sum = fma(
                block["l"],
                np.broadcast_to(block["t"][:, None], (rows, 4)),
                row_sum * block["r"][:, None],
            )
            assert_same_bytes("O", o, block["O"])
            assert_same_bytes("L", row_sum, block["L"])
        total = (row_sum[:, 0] + row_sum[:, 1]) + (row_sum[:, 2] + row_sum[:, 3])
        reference = request.blocks[-1]["R"]
        with np.errstate(all="ignore"):
            final = np.where(total[:, None] == 0, np.float32(0), o * rcp_rn(total)[:, None])
            lse2 = np.where(total == 0, np.float32(-np.inf), reference + log2_soft(total))
        limit = np.uint32(0x7F7F0000).view(np.float32)
        final = np.clip(final, -limit, limit)
        assert_same_bytes("o_accum", splits.o_accum[req], final)
        assert_same_bytes("lse_accum", splits.lse_accum[req], lse2)
        got = out[req].reshape(rows, 512).view(np.uint16)
        assert_same_bytes("out", got, bf16_from_f32(final))
        assert_same_bytes("lse", lse[req].T.reshape(rows), natural_lse(lse2))


@pytest.mark.parametrize("block_n", [64, 128])
def test_splits_of_a_request_are_traced_apart(block_n: int) -> None:
    rng = np.random.default_rng(0)
    q = rng.standard_normal((2, 1, 2, 576)).astype(np.float32)
    c = cached(q, [rng.standard_normal((n, 576)).astype(np.float32) for n in (300, 0)])
    _, _, traces = decode(c, trace=True, num_splits=2, block_n=block_n)
    assert {key: len(blocks) for key, blocks in traces.items()} == (
        {(0, 0): 3, (0, 1): 2, (1, 0): 0} if block_n == 64 else {(0, 0): 2, (0, 1): 1, (1, 0): 0}
    )
    names = {"S", "u", "M", "n", "e", "P", "R", "r", "t", "l", "L", "T", "O"}
    assert all(set(block) == names for blocks in traces.values() for block in blocks)


# SHA-256 of out and lse of a fixed problem. The reference is the specification: whoever changes a
# byte of it changes every kernel too, and must mean to.
GOLDEN = {
    (64, 1): "bd6a87e28bd41a5e",
    (64, 3): "11adb08f196ae538",
    (128, 1): "1d6c9fc69695db8a",
    (128, 3): "b2af6b954d3db60f",
}


@pytest.mark.parametrize(("block_n", "num_splits"), GOLDEN)
def test_the_bytes_are_the_specification(block_n: int, num_splits: int) -> None:
    """Inputs by integer arithmetic alone, so that no library's random stream matters."""

    def values(count: int, seed: int) -> NDArray[np.float32]:
        x = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        for shift in (30, 27):  # a mixed counter: spread evenly over (-4, 4), exact in float32
            x = (x ^ (x >> np.uint64(shift))) * np.uint64(0xBF58476D1CE4E5B9 + 2 * seed)
        return ((x >> np.uint64(48)).astype(np.float32) - np.float32(32768)) / np.float32(8192)

    q = values(2 * 2 * 3 * 576, 1).reshape(2, 2, 3, 576)
    q[0] /= np.float32(4)  # flat rows; those of request 1 are sharp
    kv = values(411 * 576, 2).reshape(411, 576)
    kv *= np.exp2(np.arange(411) // 64 % 3).astype(np.float32)[:, None]  # references rise
    kv[::7] *= np.float32(2.0**-9)
    c = cached(q, [kv[:250], kv[250:]])
    out, lse = decode(c, 0.07216878364870322, block_n=block_n, num_splits=num_splits)
    digest = hashlib.sha256(out.view(np.uint16).tobytes() + lse.tobytes()).hexdigest()[:16]
    assert digest == GOLDEN[block_n, num_splits]
