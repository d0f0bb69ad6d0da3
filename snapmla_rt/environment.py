"""What `$SNAPMLA_JIT` and `$SNAPMLA_DEBUG` ask for. Light: importing the package reads it."""

from __future__ import annotations

import os

from .errors import ArgumentError

JIT_VARIABLE = "SNAPMLA_JIT"
JIT_MODES = ("import", "lazy", "off")
DEBUG_VARIABLE = "SNAPMLA_DEBUG"


def jit_mode() -> str:
    """`$SNAPMLA_JIT`, read at every use. Raises ArgumentError for an unknown value.

    "import" (default): importing the package on a Hopper machine starts compiling in the
    background. "lazy": each kernel is compiled at its first use. "off": nothing is compiled here,
    kernels come from a cache filled by `snapmla precompile`.
    """
    mode = os.environ.get(JIT_VARIABLE) or "import"
    if mode not in JIT_MODES:
        raise ArgumentError(JIT_VARIABLE, f"one of {JIT_MODES}", repr(mode))
    return mode


def debug_wanted() -> bool:
    """Whether `$SNAPMLA_DEBUG` is set to something other than 0."""
    return os.environ.get(DEBUG_VARIABLE, "") not in ("", "0")
