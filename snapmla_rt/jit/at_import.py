"""What `import snapmla_rt` does about the kernels: nothing, or a thread that gets them ready.

Without a driver this costs two look-ups of a path. It touches no CUDA context, calls no cuInit and
does not load libcuda: a child of a fork must find it as a fresh process would.
"""

from __future__ import annotations

import importlib
import os
import sys
import warnings

from ..environment import jit_mode
from ..errors import ArgumentError

# Where the kernel's side of the driver shows: Linux, and Linux under Windows.
_DRIVER_DEVICES = ("/dev/nvidiactl", "/dev/dxg")


def start() -> None:
    """Start the background compilation where a driver is installed and `$SNAPMLA_JIT` allows it.

    An unknown `$SNAPMLA_JIT` is a RuntimeWarning and starts nothing: the package has parts that
    need no kernel, so the error waits for the first use of one.
    """
    try:
        mode = jit_mode()
    except ArgumentError as error:
        if not _is_our_command():
            # 3: the line that imports the package
            warnings.warn(f"{error}; no kernel can be used", RuntimeWarning, stacklevel=3)
        return
    if mode == "import" and any(map(os.path.exists, _DRIVER_DEVICES)):
        # Imported here, in the importing thread: a fork while another imports can hang a child.
        importlib.import_module("snapmla_rt.kernels").LOADER.start_background()


def _is_our_command() -> bool:
    """Whether this is `snapmla ...` or `python -m snapmla_rt ...`, which answer in a line of their
    own: a warning before it would say the same twice."""
    program = sys.argv[0] if getattr(sys, "argv", None) else ""
    if program == "-m":  # Python's stand-in until it has found the module
        return "snapmla_rt" in sys.orig_argv
    return os.path.splitext(os.path.basename(program))[0] == "snapmla"
