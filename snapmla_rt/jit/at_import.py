"""What `import snapmla_rt` does about the kernels: nothing, or a thread that gets them ready.

Without a driver this costs two look-ups of a path. It touches no CUDA context, calls no cuInit and
does not load libcuda: a child of a fork must find it as a fresh process would.
"""

from __future__ import annotations

import importlib
import os

# Where the kernel's side of the driver shows: Linux, and Linux under Windows.
_DRIVER_DEVICES = ("/dev/nvidiactl", "/dev/dxg")


def start() -> None:
    """Start the background compilation where a driver is installed and `$SNAPMLA_JIT` allows it.

    Raises ArgumentError for an unknown `$SNAPMLA_JIT`.
    """
    mode = os.environ.get("SNAPMLA_JIT") or "import"
    if mode in ("lazy", "off"):
        return
    if mode == "import" and not any(map(os.path.exists, _DRIVER_DEVICES)):
        return
    # Imported here, in the importing thread: a fork while another thread imports can hang a child.
    importlib.import_module("snapmla_rt.jit.loader").jit_mode()
    importlib.import_module("snapmla_rt.kernels").LOADER.start_background()
