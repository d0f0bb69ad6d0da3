"""The public calls: check the arguments, one launch each.

append_kv, quantize_q, prepare and fetch_dequant move data (`api_data.py`, `api_fetch.py`).
"""

from __future__ import annotations

from .api_data import AppendWorkspace, append_kv, prepare, quantize_q, quantize_q_parts
from .api_fetch import fetch_dequant, fetch_dequant_ranges

__all__ = [
    "AppendWorkspace",
    "append_kv",
    "fetch_dequant",
    "fetch_dequant_ranges",
    "prepare",
    "quantize_q",
    "quantize_q_parts",
]
