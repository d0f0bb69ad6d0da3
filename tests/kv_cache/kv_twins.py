"""The two twins of snapmla_rt.kv_cache, each loaded from its files by explicit path.

A built `.so` beside a `.py` would win over it in an ordinary import, so neither twin is imported
by name: each becomes a package of its own whose modules are executed from the path given.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import types
from pathlib import Path
from typing import Any

import snapmla_rt.config
import snapmla_rt.environment
import snapmla_rt.errors

SOURCE = Path(snapmla_rt.config.__file__).parent / "kv_cache"
COMPILED = ("prefix_map", "block_pool", "request_blocks", "block_table", "manager")
# In the order in which they import each other.
MODULES = (
    "checks",
    "block_hash",
    "prefix_map",
    "block_pool",
    "request_blocks",
    "block_table",
    "results",
    "debug",
    "snapshot",
    "storage",
    "manager",
)


def load_twin(package: str, compiled_in: Path | None) -> types.SimpleNamespace:
    """All modules under `package`; those of COMPILED from the folder given, if one is."""
    top, inner = types.ModuleType(package), types.ModuleType(f"{package}.kv_cache")
    top.__path__ = []
    inner.__path__ = []
    sys.modules[package] = top
    sys.modules[f"{package}.kv_cache"] = inner
    sys.modules[f"{package}.errors"] = snapmla_rt.errors
    sys.modules[f"{package}.config"] = snapmla_rt.config
    sys.modules[f"{package}.environment"] = snapmla_rt.environment
    twin = types.SimpleNamespace(package=package, compiled=compiled_in is not None)
    for name in MODULES:
        path = SOURCE / f"{name}.py"
        if compiled_in is not None and name in COMPILED:
            path = compiled_in / f"{name}{sysconfig.get_config_var('EXT_SUFFIX')}"
        full = f"{package}.kv_cache.{name}"
        spec = importlib.util.spec_from_file_location(full, path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[full] = module
        spec.loader.exec_module(module)
        setattr(inner, name, module)
        setattr(twin, name, module)
    _name_classes(twin)
    return twin


def _name_classes(twin: Any) -> None:
    twin.BlockPool = twin.block_pool.BlockPool
    twin.BlockTable = twin.block_table.BlockTable
    twin.KVCacheManager = twin.manager.KVCacheManager
    twin.HostKVCacheStorage = twin.storage.HostKVCacheStorage


def why_not_compiled() -> str | None:
    """What a build lacks on this machine, or None."""
    compiler = (sysconfig.get_config_var("CC") or "cc").split()[0]
    if shutil.which(compiler) is None:
        return f"no C compiler ({compiler})"
    if not (Path(sysconfig.get_paths()["include"]) / "Python.h").is_file():
        return "no Python.h"
    if importlib.util.find_spec("Cython") is None:
        return "no Cython"
    if importlib.util.find_spec("setuptools") is None:
        return "no setuptools"
    return None


def build(package: str, cache: Path, flags: str) -> Path:
    """Folder with the five extension modules, built once per content of the sources."""
    import Cython

    sources = sorted([*SOURCE.glob("*.py"), *SOURCE.glob("*.pxd")])
    key = hashlib.sha256(f"{sys.version} {Cython.__version__} {flags} {package}".encode())
    for path in sources:
        key.update(path.name.encode() + b"\0" + path.read_bytes())
    final = cache / key.hexdigest()[:24]
    if final.is_dir():
        return final / package / "kv_cache"
    with tempfile.TemporaryDirectory(dir=cache) as scratch:
        inner = Path(scratch) / package / "kv_cache"
        inner.mkdir(parents=True)
        (inner.parent / "__init__.py").touch()
        for path in sources:
            shutil.copy(path, inner / path.name)
        files = [str(inner / f"{name}.py") for name in COMPILED]
        command = [sys.executable, "-m", "Cython.Build.Cythonize", "-i", "-q", "-j2", *files]
        env = {**os.environ, "CFLAGS": flags}
        done = subprocess.run(command, cwd=scratch, env=env, capture_output=True, text=True)
        # A compiler is there: a failure is a fault of the sources, not a reason to skip.
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
        shutil.rmtree(Path(scratch) / "build", ignore_errors=True)
        try:
            shutil.copytree(scratch, final)
        except FileExistsError:
            pass  # another worker was first
    return final / package / "kv_cache"
