"""The disk cache: whatever is on disk, a right payload comes back, with one warning at most."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from snapmla_rt.errors import SnapMLAError
from snapmla_rt.jit import disk_cache
from snapmla_rt.jit.disk_cache import DiskCache, default_cache_dir, frame, make_key, unframe

ROOT = Path(__file__).resolve().parents[2]
KEY = make_key("test")
PAYLOAD = bytes(range(256)) * 20


@pytest.fixture(autouse=True)
def fresh_warnings() -> Iterator[None]:
    disk_cache._warned.clear()
    yield
    disk_cache._warned.clear()


class Builder:
    """Counts how often it had to build."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self) -> bytes:
        self.calls += 1
        return PAYLOAD


def get(cache: DiskCache, expected_builds: int, expected_warnings: int = 0) -> None:
    """Ask twice; the payload is right, and builds and warnings are as many as expected."""
    build = Builder()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert cache.get_or_build(KEY, build) == PAYLOAD
        assert cache.get_or_build(KEY, build) == PAYLOAD
    messages = [str(item.message) for item in caught]
    assert build.calls == expected_builds, messages
    assert len(messages) == expected_warnings, messages
    if expected_warnings:
        assert caught[0].category is RuntimeWarning and "SNAPMLA_CACHE_DIR" in messages[0]


def entry(folder: Path) -> Path:
    return folder / f"{KEY}.cubin"


def test_built_once_and_left_tidy(tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "cache"
    get(DiskCache(folder), expected_builds=1)
    get(DiskCache(folder), expected_builds=0)
    assert sorted(path.suffix for path in folder.iterdir()) == [".cubin", ".lock"]


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda data: b"",
    "one byte": lambda data: data[:1],
    "header only": lambda data: data[:40],
    "truncated by one": lambda data: data[:-1],
    "truncated by half": lambda data: data[: len(data) // 2],
    "longer": lambda data: data + b"\0",
    "first byte flipped": lambda data: bytes([data[0] ^ 1]) + data[1:],
    "digest flipped": lambda data: data[:20] + bytes([data[20] ^ 128]) + data[21:],
    "last byte flipped": lambda data: data[:-1] + bytes([data[-1] ^ 1]),
    "middle byte flipped": lambda data: data[:3000] + bytes([data[3000] ^ 4]) + data[3001:],
    "zeros": lambda data: bytes(len(data)),
    "another key's entry": lambda data: frame(make_key("another"), PAYLOAD),
    "another format": lambda data: data.replace(b"SNAPMLA\x01", b"SNAPMLA\x00"),
    "text": lambda data: b"<html>not found</html>",
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_entries_are_made_anew(tmp_path: Path, damage: str) -> None:
    cache = DiskCache(tmp_path)
    cache.get_or_build(KEY, Builder())
    whole = entry(tmp_path).read_bytes()
    entry(tmp_path).write_bytes(DAMAGE[damage](whole))
    get(cache, expected_builds=1, expected_warnings=1)
    assert entry(tmp_path).read_bytes() == whole


@given(st.binary(max_size=200), st.data())
def test_any_change_of_an_entry_shows(payload: bytes, data: st.DataObject) -> None:
    whole = frame(KEY, payload)
    assert unframe(KEY, whole) == payload
    assert unframe(make_key("other"), whole) is None
    at = data.draw(st.integers(0, len(whole) - 1))
    flip = data.draw(st.integers(1, 255))
    assert unframe(KEY, whole[:at] + bytes([whole[at] ^ flip]) + whole[at + 1 :]) is None
    assert unframe(KEY, whole[:at]) is None


def test_a_folder_in_the_entry_s_place(tmp_path: Path) -> None:
    """Can be neither read nor replaced: built in memory each time, one warning."""
    entry(tmp_path).mkdir()
    (entry(tmp_path) / "file").write_text("x")
    get(DiskCache(tmp_path), expected_builds=2, expected_warnings=1)
    assert not list(tmp_path.glob("*.tmp"))


def test_a_file_in_the_directory_s_place(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    get(DiskCache(tmp_path / "file"), expected_builds=2, expected_warnings=1)
    get(DiskCache(tmp_path / "file" / "deeper"), expected_builds=2, expected_warnings=0)


def in_child(work: Callable[[], None]) -> None:
    """Run in a forked child, whose limits and user may change; fails with its traceback."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            work()
            code = 0
        except BaseException:
            import traceback

            os.write(writer, traceback.format_exc()[-3000:].encode())
        finally:
            os._exit(code)
    os.close(writer)
    text = b""
    while chunk := os.read(reader, 4096):
        text += chunk
    os.close(reader)
    assert os.waitpid(child, 0)[1] == 0, text.decode()


def as_nobody(folder: Path) -> None:
    """Give up root, for which no file is unreadable; the way to `folder` is opened first."""
    if os.geteuid() == 0:
        for parent in [folder, *folder.parents][:-1]:
            if parent.stat().st_mode & 0o005 != 0o005 and parent != folder:
                parent.chmod(parent.stat().st_mode | 0o005)
        os.setgid(65534)
        os.setuid(65534)


def test_read_only_directory(tmp_path: Path) -> None:
    """Mode 0555 for a plain user: nothing stored, one warning; what is there is still used."""
    folder = tmp_path / "cache"
    folder.mkdir()
    folder.chmod(0o555)

    def work() -> None:
        as_nobody(folder)
        get(DiskCache(folder), expected_builds=2, expected_warnings=1)

    in_child(work)
    folder.chmod(0o755)
    DiskCache(folder).get_or_build(KEY, Builder())
    folder.chmod(0o555)

    def shipped() -> None:
        as_nobody(folder)
        get(DiskCache(folder), expected_builds=0, expected_warnings=0)

    in_child(shipped)


def test_unreadable_entry(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    DiskCache(folder).get_or_build(KEY, Builder())
    entry(folder).chmod(0)
    folder.chmod(0o777)
    for path in folder.glob("*.lock"):
        path.chmod(0o666)

    def work() -> None:
        as_nobody(folder)
        get(DiskCache(folder), expected_builds=1, expected_warnings=1)

    in_child(work)


def test_full_disk(tmp_path: Path) -> None:
    """A write that stops half way (a file-size limit stands in): in memory, nothing left over."""

    def work() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
        get(DiskCache(tmp_path), expected_builds=2, expected_warnings=1)

    in_child(work)
    assert [path.suffix for path in tmp_path.iterdir()] == [".lock"]


def test_rename_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on network file systems: the bytes just built are used."""

    def refuse(*args: object) -> None:
        raise FileNotFoundError(2, "no such file")

    monkeypatch.setattr(disk_cache.os, "replace", refuse)
    get(DiskCache(tmp_path), expected_builds=2, expected_warnings=1)


def test_no_locks_on_this_file_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr(disk_cache.fcntl, "flock", refuse)
    get(DiskCache(tmp_path), expected_builds=1)


def test_must_write_says_so(tmp_path: Path) -> None:
    """`precompile` may not succeed without having stored anything."""
    (tmp_path / "file").write_text("x")
    with pytest.raises(SnapMLAError, match="kernel cache"):
        DiskCache(tmp_path / "file", must_write=True).get_or_build(KEY, Builder())


def test_failing_build_leaves_nothing(tmp_path: Path) -> None:
    def fail() -> bytes:
        raise ValueError("no")

    cache = DiskCache(tmp_path)
    with pytest.raises(ValueError, match="no"):
        cache.get_or_build(KEY, fail)
    assert [path.suffix for path in tmp_path.iterdir()] == [".lock"]
    get(cache, expected_builds=1)


def test_directory_is_asked_at_each_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = DiskCache()
    for name in ("one", "two"):
        monkeypatch.setenv("SNAPMLA_CACHE_DIR", str(tmp_path / name))
        get(cache, expected_builds=1)
        assert entry(tmp_path / name).is_file()
    monkeypatch.delenv("SNAPMLA_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert default_cache_dir() == tmp_path / "xdg" / "snapmla_rt"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")  # the XDG rules say: ignore it
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert default_cache_dir() == tmp_path / "home" / ".cache" / "snapmla_rt"


def test_no_home(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SNAPMLA_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(disk_cache.os.path, "expanduser", lambda path: path)
    assert default_cache_dir() is None
    get(DiskCache(), expected_builds=2, expected_warnings=1)


@pytest.mark.parametrize("home", ["/nonexistent/home", "/proc/nowhere", "/dev/null"])
def test_unusable_home(monkeypatch: pytest.MonkeyPatch, home: str) -> None:
    for name in ("SNAPMLA_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)

    def work() -> None:
        if os.geteuid() == 0:
            os.setgid(65534)
            os.setuid(65534)
        os.environ["HOME"] = home
        get(DiskCache(), expected_builds=2, expected_warnings=1)

    in_child(work)


def test_threads_build_once(tmp_path: Path) -> None:
    build, results = Builder(), []
    start = threading.Barrier(32)

    def slow() -> bytes:
        time.sleep(0.05)
        return build()

    def work() -> None:
        start.wait()
        results.append(DiskCache(tmp_path).get_or_build(KEY, slow))

    threads = [threading.Thread(target=work) for _ in range(32)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [PAYLOAD] * 32 and build.calls == 1


def test_kill_while_building_frees_the_lock(tmp_path: Path) -> None:
    """kill -9 in the middle of a build and of a write: the next process starts at once."""
    script = (
        "import sys, time; from pathlib import Path\n"
        "from snapmla_rt.jit.disk_cache import DiskCache, make_key\n"
        "folder = Path(sys.argv[1])\n"
        "def build():\n"
        "    (folder / f'{make_key(\"test\")}.1.a.tmp').write_bytes(b'half')\n"
        "    print('building', flush=True)\n"
        "    time.sleep(60)\n"
        "DiskCache(folder).get_or_build(make_key('test'), build)\n"
    )
    env = dict(os.environ, PYTHONPATH=str(ROOT), SNAPMLA_JIT="lazy")
    command = [sys.executable, "-c", script, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=env) as process:
        assert process.stdout is not None and process.stdout.readline() == b"building\n"
        process.send_signal(signal.SIGKILL)
        process.wait()
    start = time.perf_counter()
    get(DiskCache(tmp_path), expected_builds=1)
    assert time.perf_counter() - start < 5
    assert not list(tmp_path.glob("*.tmp")), "leftovers are cleared"


def test_keys_do_not_run_together() -> None:
    """Parts are told apart by length, and each counts."""
    keys = {make_key("ab", "c"), make_key("a", "bc"), make_key("abc"), make_key("abc", "")}
    assert len(keys) == 4
