"""The memory in which append_kv's tokens claim their slots when there are many of them.

A few bytes a slot, on the device, kept from call to call: nothing is allocated by an append once
the workspace is large enough.
"""

from __future__ import annotations

import threading

from .config import APPEND_CLAIM_MAX
from .errors import CudaError

_COUNTER_BYTES = 256  # the two lie 128 bytes apart


class AppendWorkspace:
    """claims u32 [num_slots], deferred u32 [num_tokens][2] and two counters on one GPU.

    It serves appends that follow one another on one stream; two that run at the same time need
    one each. Made by append_kv for each stream where none is given.
    """

    def __init__(
        self, device_index: int, num_slots: int, num_tokens: int = APPEND_CLAIM_MAX
    ) -> None:
        from .driver.memory import LEGACY_STREAM, DeviceBuffer, fill, synchronize

        self.device_index = device_index
        self.num_slots = num_slots
        self.num_tokens = min(num_tokens, APPEND_CLAIM_MAX)
        self._counters = DeviceBuffer(_COUNTER_BYTES, device_index)
        self._claims = DeviceBuffer(4 * num_slots, device_index)
        self._deferred = DeviceBuffer(8 * self.num_tokens, device_index)
        self._lock = threading.Lock()
        self._next = 0
        # Claims may hold anything (zeros, so that initcheck sees nothing unwritten); the counters
        # start at zero and every launch leaves them there.
        fill(self._claims.ptr, 0, 4 * num_slots, device_index, LEGACY_STREAM)
        fill(self._counters.ptr, 0, _COUNTER_BYTES, device_index, LEGACY_STREAM)
        synchronize(LEGACY_STREAM, device_index)

    def claim(self, num_tokens: int) -> tuple[int, int, int, int]:
        """claims, counters, deferred (addresses) and claim_base for a launch of num_tokens."""
        with self._lock:
            base = self._next
            self._next = (base + num_tokens) % 2**32
        return self._claims.ptr, self._counters.ptr, self._deferred.ptr, base

    def fits(self, num_slots: int, num_tokens: int) -> bool:
        return num_slots <= self.num_slots and num_tokens <= self.num_tokens


_lock = threading.Lock()
_current: dict[tuple[int, int], AppendWorkspace] = {}
# Of the per-thread default stream, whose handle is the same in every thread but not the stream.
_of_thread = threading.local()
# A captured graph holds the addresses of the workspace it was captured with for as long as it is
# replayed, and nothing tells us when that ends.
_captured: list[AppendWorkspace] = []


def _workspaces(stream: int) -> dict[tuple[int, int], AppendWorkspace]:
    """Where the workspace of a stream is kept."""
    from .driver.launch import PER_THREAD_STREAM

    if stream != PER_THREAD_STREAM:
        return _current
    if not hasattr(_of_thread, "current"):
        _of_thread.current = {}
    own: dict[tuple[int, int], AppendWorkspace] = _of_thread.current
    return own


def stream_workspace(
    device_index: int, stream: int, num_slots: int, num_tokens: int
) -> AppendWorkspace:
    """The workspace of a stream, made larger where it is too small.

    Raises CudaError while the stream is being captured and has no workspace that is large enough.
    """
    from .driver.memory import is_capturing

    capturing = is_capturing(stream, device_index)
    with _lock:
        known = _workspaces(stream)
        own = known.get((device_index, stream))
        if own is None or not own.fits(num_slots, num_tokens):
            if capturing:
                raise CudaError(
                    f"append_kv of {num_tokens} tokens needs memory that cannot be allocated while "
                    "its stream is captured: call it once on that stream before, or pass workspace="
                )
            slots = max(num_slots, own.num_slots if own else 0)
            tokens = max(1 << (num_tokens - 1).bit_length(), own.num_tokens if own else 0)
            own = known[device_index, stream] = AppendWorkspace(device_index, slots, tokens)
        if capturing and own not in _captured:
            _captured.append(own)
    return own
