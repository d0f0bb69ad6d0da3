"""The public calls: check the arguments, one launch each.

append_kv, quantize_q, prepare and fetch_dequant move data (`api_data.py`, `api_fetch.py`);
plan_decode, once a step, and mla_decode, once a layer, decode (`api_plan.py`, `api_decode.py`);
merge_states merges two partial results (`api_merge.py`).
"""

from __future__ import annotations

from .api_data import AppendWorkspace, append_kv, prepare, quantize_q, quantize_q_parts
from .api_decode import (
    BoundDecode,
    bind_mla_decode,
    decode_workspace_size,
    mla_decode,
    plan_decode,
)
from .api_fetch import fetch_dequant, fetch_dequant_ranges
from .api_merge import merge_states

__all__ = [
    "AppendWorkspace",
    "BoundDecode",
    "append_kv",
    "bind_mla_decode",
    "decode_workspace_size",
    "fetch_dequant",
    "fetch_dequant_ranges",
    "merge_states",
    "mla_decode",
    "plan_decode",
    "prepare",
    "quantize_q",
    "quantize_q_parts",
]
