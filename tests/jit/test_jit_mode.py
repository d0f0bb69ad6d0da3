"""`$SNAPMLA_JIT` when the package is imported. Needs no CUDA package."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from snapmla_rt import kernels
from snapmla_rt.jit import at_import

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Grows by one whenever the background compilation starts; a driver seems to be there."""
    starts: list[str] = []
    monkeypatch.setattr(at_import, "_DRIVER_DEVICES", (os.devnull,))
    monkeypatch.setattr(kernels.LOADER, "start_background", lambda: starts.append("started"))
    return starts


def test_an_unknown_mode_warns_and_starts_nothing(
    started: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SNAPMLA_JIT", "foo")
    expected = r"SNAPMLA_JIT: expected one of \('import', 'lazy', 'off'\), got 'foo'"
    with pytest.warns(RuntimeWarning, match=expected):
        at_import.start()
    assert started == []


@pytest.mark.parametrize(("mode", "starts"), [("", 1), ("import", 1), ("lazy", 0), ("off", 0)])
def test_known_modes_do_not_warn(
    started: list[str], monkeypatch: pytest.MonkeyPatch, mode: str, starts: int
) -> None:
    monkeypatch.setenv("SNAPMLA_JIT", mode)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        at_import.start()
    assert len(started) == starts


def test_the_package_works_on_with_an_unknown_mode() -> None:
    """What needs no kernel does; the warning points at the line that imports the package."""
    code = (
        "import threading\n"
        "import snapmla_rt.kv_cache\n"
        "from snapmla_rt import DecodeConfig\n"
        "assert threading.active_count() == 1\n"
    )
    env = {**os.environ, "SNAPMLA_JIT": "foo", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "<string>:2: RuntimeWarning: SNAPMLA_JIT: expected one of" in done.stderr
