"""A progress bar for long work: one line on stderr, only where a person watches a terminal."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import TextIO

_WIDTH = 28
_MIN_INTERVAL = 0.1  # seconds between two redraws
_PATIENCE = 0.5  # work shorter than this shows nothing


class Progress:
    """Context manager around `total` units of work; silent unless `stream` is a terminal."""

    def __init__(self, label: str, total: int, stream: TextIO | None = None) -> None:
        self._label, self._total = label, max(total, 1)
        self._stream = sys.stderr if stream is None else stream
        self._live = self._stream.isatty()
        self._done = 0
        self._start = time.monotonic()
        self._drawn = 0.0

    def __enter__(self) -> Progress:
        return self

    def advance(self, units: int = 1) -> None:
        """Count finished units and redraw now and then."""
        self._done += units
        now = time.monotonic()
        if not self._live or now - self._start < _PATIENCE or now - self._drawn < _MIN_INTERVAL:
            return
        self._drawn = now
        share = min(self._done / self._total, 1.0)
        left = (now - self._start) * (1 - share) / share if share else 0.0
        bar = "#" * round(share * _WIDTH)
        line = f"\r{self._label} [{bar:.<{_WIDTH}}] {self._done}/{self._total}, {left:.0f} s left "
        self._stream.write(line)
        self._stream.flush()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._drawn:
            self._stream.write("\r\x1b[K")  # leave the line as it was
            self._stream.flush()
