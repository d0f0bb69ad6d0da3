"""The manager, its storage and the reference kernels together: one cache, real outputs.

The table's unused entries are made absurd and unused memory is poison (NaN), so an output is
right only if every block id, length and copy is.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from snapmla_rt.reference.append_kv import append_kv
from snapmla_rt.reference.mla_decode import mla_decode
from snapmla_rt.reference.plan_decode import plan_decode
from snapmla_rt.reference.quantize_q import quantize_q

BLOCK = 64
HEADS = 4
SCALE = 576**-0.5


class Engine:
    """One layer whose latents depend on the token and its position only."""

    def __init__(self, kv: Any, layout: str) -> None:
        self.storage = kv.HostKVCacheStorage(24, layout)
        self.storage.poison_blocks(np.arange(24))
        self.manager = kv.KVCacheManager(24, debug=True, storage=self.storage)
        self.table = kv.BlockTable(4, 16, 64)

    def append(self, slots: np.ndarray, ids: Any, positions: Any) -> None:
        rows = [
            np.random.default_rng((int(i), int(p))).standard_normal(576, dtype=np.float32)
            for i, p in zip(ids, positions, strict=True)
        ]
        values = np.array(rows).reshape(-1, 576)
        append_kv(
            values[:, :512],
            values[:, 512:],
            self.storage.ckv_cache,
            self.storage.k_scale_cache,
            self.storage.k_rope_cache,
            slots,
        )

    def prefill(self, request: str, ids: np.ndarray, reuse: bool) -> int:
        hit = self.manager.get_computed_blocks(ids)
        start = hit.num_tokens if reuse else 0
        self.manager.allocate_slots(
            request, len(ids) - start, computed=hit if reuse else None, on_shortage="raise"
        )
        blocks = self.manager.block_ids(request)
        at = np.arange(start, len(ids))
        self.append(blocks[at // BLOCK].astype(np.int64) * BLOCK + at % BLOCK, ids[start:], at)
        self.manager.commit(request, ids[start:])
        return start

    def step(self, requests: list[str], tokens: list[int]) -> list[bytes]:
        """One decode step: a new token for each request; the output's bytes of each."""
        self.manager.update_table(self.table, requests)
        step = self.manager.allocate_step(self.table)
        self.storage.copy_blocks(step.copies)
        n = len(requests)
        seqlens = self.table.cache_seqlens[:n].copy()
        positions = seqlens - 1
        assert self.table.slot_mapping(positions).tolist() == step.slot_mapping.tolist()
        self.append(step.slot_mapping, tokens, positions)
        self.manager.commit_step(self.table, tokens)
        rows = self.table.block_table[:n].copy()
        used = np.arange(rows.shape[1]) * BLOCK < seqlens[:, None]
        rows[~used] = 2_147_480_000
        query = np.random.default_rng(9).standard_normal((1, 1, HEADS, 576), dtype=np.float32)
        q = quantize_q(np.repeat(query, n, axis=0))
        cache = (
            self.storage.ckv_cache,
            self.storage.k_scale_cache,
            self.storage.k_rope_cache,
        )
        plan = plan_decode(seqlens, HEADS, 1, batch_invariant=True)
        out, lse = mla_decode(*q, *cache, rows, seqlens, plan, SCALE)
        assert np.isfinite(np.asarray(lse)).all()
        return [np.asarray(out)[i].tobytes() + np.asarray(lse)[i].tobytes() for i in range(n)]


@pytest.mark.parametrize("layout", ["separate", "record"])
@pytest.mark.parametrize("n", [128, 150])  # the hit leaves a whole block to compute, or a part
def test_b118_a_hit_decodes_to_the_same_bytes_as_a_miss(kv: Any, layout: str, n: int) -> None:
    engine = Engine(kv, layout)
    ids = np.arange(n, dtype=np.int32)
    assert engine.prefill("miss", ids, reuse=False) == 0
    assert engine.prefill("hit", ids, reuse=True) == (n - 1) // BLOCK * BLOCK > 0
    for token in (500, 501):
        miss, hit = engine.step(["miss", "hit"], [token, token])
        assert miss == hit
    engine.manager.free("miss")  # its other blocks are poisoned now
    alone = engine.step(["hit"], [502])
    fresh = Engine(kv, layout)
    fresh.prefill("r", np.concatenate([ids, [500, 501]]).astype(np.int32), reuse=False)
    assert fresh.step(["r"], [502]) == alone


def test_forked_requests_decode_as_if_each_were_alone(kv: Any) -> None:
    engine = Engine(kv, "record")
    ids = np.arange(100, dtype=np.int32)
    engine.prefill("a", ids, reuse=False)
    engine.manager.fork("a", "b")
    both = engine.step(["a", "b"], [7, 8])
    again = engine.step(["a", "b"], [9, 9])
    for row, first in enumerate((7, 8)):
        alone = Engine(kv, "record")
        alone.prefill("r", ids, reuse=False)
        assert alone.step(["r"], [first]) == [both[row]]
        assert alone.step(["r"], [9]) == [again[row]]
    engine.manager.free("a")  # its own tail is poisoned; what "b" shares with it stays
    assert engine.step(["b"], [10]) == alone.step(["r"], [10])
