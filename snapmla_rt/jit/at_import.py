"""What `import snapmla_rt` does about the kernels: nothing, or a thread that gets them ready.

Without a driver this costs one failed dlopen. It touches no CUDA context and calls no cuInit.
"""

from __future__ import annotations

import ctypes
import importlib
import os


def start() -> None:
    """Start the background compilation where a driver is installed and `$SNAPMLA_JIT` allows it.

    Raises ArgumentError for an unknown `$SNAPMLA_JIT`.
    """
    mode = os.environ.get("SNAPMLA_JIT") or "import"
    if mode in ("lazy", "off"):
        return
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        if mode == "import":
            return
    # Imported here, in the importing thread: a fork while another thread imports can hang a child.
    importlib.import_module("snapmla_rt.jit.loader").jit_mode()
    importlib.import_module("snapmla_rt.kernels").LOADER.start_background()
