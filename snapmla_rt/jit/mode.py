"""`$SNAPMLA_JIT`: when kernels are compiled. Light: importing the package asks for it."""

from __future__ import annotations

import os

from ..errors import ArgumentError

JIT_VARIABLE = "SNAPMLA_JIT"
JIT_MODES = ("import", "lazy", "off")


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
