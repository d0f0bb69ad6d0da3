"""CUDA graphs: capture what is enqueued on a stream, replay it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from . import check
from .check import bindings, call
from .device import device_context


class Graph:
    """Work captured from a stream of GPU `device_index`; empty until `capture` has filled it."""

    def __init__(self, device_index: int) -> None:
        self.device_index = device_index
        self._executable: Any = None

    @contextlib.contextmanager
    def capture(self, stream: int) -> Iterator[None]:
        """Capture everything enqueued on `stream` in the block (not the legacy stream).

        Thread-local mode: other threads' calls neither join nor break the capture. An error in the
        block ends the capture and is passed on.
        """
        mode = bindings().CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
        with device_context(self.device_index):
            call("cuStreamBeginCapture", stream, mode)
            try:
                yield
            except BaseException:
                with contextlib.suppress(Exception):
                    call("cuGraphDestroy", call("cuStreamEndCapture", stream))
                raise
            graph = call("cuStreamEndCapture", stream)
            try:
                self.close()
                self._executable = call("cuGraphInstantiate", graph, 0)
            finally:
                call("cuGraphDestroy", graph)

    def launch(self, stream: int) -> None:
        """Enqueue a replay."""
        with device_context(self.device_index):
            call("cuGraphLaunch", self._executable, stream)

    def close(self) -> None:
        """Free the graph."""
        executable, self._executable = self._executable, None
        if executable is not None and not check.forked_after_use:
            with device_context(self.device_index):
                call("cuGraphExecDestroy", executable)

    def __del__(self) -> None:
        with contextlib.suppress(Exception):
            self.close()
