"""A verified cache of compiled kernels on disk, safe for many processes and for kill -9.

An entry is one file: magic, sha256 of everything after it, key, payload. It is checked at every
reading, because the driver loads a cubin with a flipped byte without a word. A writer holds an
flock on the key (freed by the kernel when a process dies), writes a temporary file, syncs it and
renames it over the entry, so a reader sees a whole entry or none. Whatever goes wrong with the
place itself costs one warning and the saving of time, never the result.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import threading
import uuid
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

try:
    import fcntl
except ImportError:  # pragma: no cover - no flock on this system: compile without waiting
    fcntl = None  # type: ignore[assignment]

from ..errors import SnapMLAError

FORMAT_VERSION = 1
CACHE_DIR_VARIABLE = "SNAPMLA_CACHE_DIR"
_MAGIC = b"SNAPMLA\x01"
_DIGEST_BYTES = 32
_MAX_ENTRY_BYTES = 1 << 28
_warned = threading.Event()


def default_cache_dir() -> Path | None:
    """`$SNAPMLA_CACHE_DIR`, else `$XDG_CACHE_HOME/snapmla_rt`, else `~/.cache/snapmla_rt`.

    Read at every use. None where there is no home directory.
    """
    chosen = os.environ.get(CACHE_DIR_VARIABLE)
    if chosen:
        return Path(chosen)
    base = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(base):
        return Path(base) / "snapmla_rt"
    home = os.path.expanduser("~")
    return Path(home) / ".cache" / "snapmla_rt" if os.path.isabs(home) else None


def make_key(*parts: str) -> str:
    """sha256 over the format version and every part, each with its length, as 64 hex digits."""
    digest = hashlib.sha256(f"snapmla cache {FORMAT_VERSION}\n".encode())
    for part in parts:
        data = part.encode()
        digest.update(f"{len(data)}\n".encode())
        digest.update(data)
    return digest.hexdigest()


def _warn_once(reason: str) -> None:
    if not _warned.is_set():
        _warned.set()
        warnings.warn(
            f"snapmla_rt kernel cache: {reason}; set {CACHE_DIR_VARIABLE} to a writable folder",
            RuntimeWarning,
            stacklevel=3,
        )


def frame(key: str, payload: bytes) -> bytes:
    """The bytes of an entry: magic, sha256(key + payload), key, payload."""
    body = key.encode() + payload
    return _MAGIC + hashlib.sha256(body).digest() + body


def unframe(key: str, data: bytes) -> bytes | None:
    """The payload of an entry, or None where it is not a whole entry of this key."""
    start = len(_MAGIC) + _DIGEST_BYTES
    body = data[start:]
    whole = data.startswith(_MAGIC) and hashlib.sha256(body).digest() == data[len(_MAGIC) : start]
    name = key.encode()
    return body[len(name) :] if whole and body.startswith(name) else None


class DiskCache:
    """Entries under `directory` (default: `default_cache_dir()`, asked anew at each use).

    must_write: raise SnapMLAError instead of going on in memory when an entry cannot be stored
    (for filling a cache on purpose).
    """

    def __init__(self, directory: str | Path | None = None, must_write: bool = False) -> None:
        self._directory = Path(directory) if directory else None
        self._must_write = must_write

    @property
    def directory(self) -> Path | None:
        return self._directory or default_cache_dir()

    def get_or_build(self, key: str, build: Callable[[], bytes]) -> bytes:
        """The payload for `key`; `build()` makes it where there is no good entry.

        Of many processes asking at once one builds and the others wait for it. What `build`
        raises is passed on and leaves nothing behind.
        """
        directory = self.directory
        if directory is None:
            self._trouble("no home directory")
            return build()
        payload = self._read(directory, key)
        if payload is not None:
            return payload
        with self._locked(directory, key) as usable:
            if not usable:
                return build()
            payload = self._read(directory, key)
            if payload is None:
                payload = build()
                self._write(directory, key, payload)
            return payload

    def _trouble(self, reason: str) -> None:
        if self._must_write:
            raise SnapMLAError(f"kernel cache: {reason}")
        _warn_once(reason)

    def _read(self, directory: Path, key: str) -> bytes | None:
        path = directory / f"{key}.cubin"
        try:
            with open(path, "rb") as file:
                data = file.read(_MAX_ENTRY_BYTES)
        except OSError as error:
            absent = error.errno in (errno.ENOENT, errno.ENOTDIR)
            if not absent:
                _warn_once(f"cannot read {path}: {error.strerror}")
            return None
        payload = unframe(key, data)
        if payload is None:
            _warn_once(f"{path} is damaged and is made anew")
        return payload

    @contextlib.contextmanager
    def _locked(self, directory: Path, key: str) -> Iterator[bool]:
        """Hold the key's lock; yields False where the directory cannot be used at all."""
        try:
            directory.mkdir(mode=0o755, parents=True, exist_ok=True)
            handle = os.open(directory / f"{key}.lock", os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            self._trouble(f"cannot use {directory}: {error.strerror}")
            yield False
            return
        try:
            with contextlib.suppress(OSError):  # a file system without locks: two may compile
                if fcntl is not None:
                    fcntl.flock(handle, fcntl.LOCK_EX)
            yield True
        finally:
            os.close(handle)

    def _write(self, directory: Path, key: str, payload: bytes) -> None:
        """Store an entry. Called with the key's lock held, so other temporaries are leftovers."""
        temporary = directory / f"{key}.{os.getpid()}.{uuid.uuid4().hex}.tmp"
        try:
            for leftover in directory.glob(f"{key}.*.tmp"):
                leftover.unlink(missing_ok=True)
            with open(temporary, "xb") as file:
                file.write(frame(key, payload))
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, directory / f"{key}.cubin")
        except OSError as error:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
            self._trouble(f"cannot write to {directory}: {error.strerror}")
