"""snapmla_rt: FP8 decoding for Multi-head Latent Attention on NVIDIA Hopper.

Importing this package imports no CUDA library; public names load what they need on first use.
Where a driver is installed, a thread starts that compiles the kernels if NVML shows a Hopper GPU.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

__version__ = "0.1.0"

_HERE = Path(__file__).resolve().parent
# In a checkout `reference` and `cuda_src` stand beside the package and are found there; in a wheel
# they are inside it. Both answer to snapmla_rt.reference and snapmla_rt.cuda_src.
if not (_HERE / "reference").is_dir() and (_HERE.parent / "reference" / "__init__.py").is_file():
    __path__.append(str(_HERE.parent))

# public name -> module that defines it (filled lazily: PEP 562)
_PUBLIC = {
    "DecodeConfig": "config",
    "SnapMLAError": "errors",
    "ArgumentError": "errors",
    "UnsupportedDeviceError": "errors",
    "CompileError": "errors",
    "CudaError": "errors",
    "OutOfBlocksError": "errors",
    "DecodePlan": "plan",
    "plan_decode": "api",
    "decode_workspace_size": "api",
    "mla_decode": "api",
    "bind_mla_decode": "api",
    "merge_states": "api",
}

__all__ = ["__version__", *_PUBLIC]


def __getattr__(name: str) -> Any:
    module = _PUBLIC.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{module}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(_PUBLIC))


from .jit.at_import import start as _start_jit  # noqa: E402  (needs __path__ as set above)

_start_jit()
