"""The paged KV-cache manager: block pool, prefix cache, block tables, storage. No CUDA import.

Names load their module on first use, so importing one part does not import the others.
"""

from __future__ import annotations

import importlib
from typing import Any

_PUBLIC = {
    "BlockPool": "block_pool",
    "BlockTable": "block_table",
    "HostKVCacheStorage": "storage",
    "KVCacheLayout": "storage",
    "KVCacheManager": "manager",
    "KVCacheStorage": "storage",
    "PrefixHit": "results",
    "SlotAllocation": "results",
    "StepAllocation": "results",
}

__all__ = sorted(_PUBLIC)


def __getattr__(name: str) -> Any:
    module = _PUBLIC.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{module}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(_PUBLIC))
