"""Every error this package raises on purpose.

The message of an :class:`ArgumentError` always names the argument, what was expected and what came.
"""

from __future__ import annotations

# How a caller asks for the reference, as messages say it; the command line puts its option there.
USE_REFERENCE = "backend='reference'"


class SnapMLAError(Exception):
    """Base of all errors raised by this package."""


class ArgumentError(SnapMLAError, ValueError):
    """A caller's argument has the wrong shape, dtype, value or device."""

    def __init__(self, name: str, expected: str, got: object) -> None:
        super().__init__(f"{name}: expected {expected}, got {got}")
        self.name = name
        self.expected = expected
        self.got = got

    def __reduce__(self) -> tuple[type, tuple[str, str, object]]:
        return (type(self), (self.name, self.expected, self.got))


class UnsupportedDeviceError(SnapMLAError, RuntimeError):
    """No Hopper GPU, driver or NVRTC that can run the kernels; says what was found and needed."""


class CompileError(SnapMLAError, RuntimeError):
    """NVRTC refused a kernel, or the result breaks the kernel's stated limits."""


class CudaError(SnapMLAError, RuntimeError):
    """A CUDA driver call returned an error code (`code`, from the function named `call`)."""

    call: str = ""
    code: int = 0


class OutOfBlocksError(SnapMLAError, RuntimeError):
    """The KV-cache pool has too few free blocks for the request; nothing was changed."""
