"""The package as a whole: what it needs, what may import what, and where things live.

Sizes (function 60 lines, file 600) are a guide: what exceeds them is reported as a warning, and
only twice the guide fails.
"""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE_FOLDERS = {"snapmla_rt": "snapmla_rt", "reference": "snapmla_rt.reference"}

# --- source files as modules ----------------------------------------------------------------------


def python_files() -> dict[str, Path]:
    """Dotted name -> file of every module of the package."""
    found = {}
    for folder, package in PACKAGE_FOLDERS.items():
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            name = ".".join([package, *(part for part in parts if part != "__init__")])
            found[name] = path
    return found


MODULES = python_files()
# Modules that are an extra: imported only where its package is known to be there.
EXTRA_ONLY = {"snapmla_rt.audit.plots": "matplotlib"}


def imports_of(name: str, *, top_level_only: bool = False) -> set[str]:
    """Absolute names of the modules that a module imports (relative imports resolved)."""
    path = MODULES[name]
    package = name if path.stem == "__init__" else name.rpartition(".")[0]
    tree = ast.parse(path.read_text())
    nodes = _outside_functions(tree) if top_level_only else ast.walk(tree)
    found: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = package.split(".")
                parents = parts[: len(parts) - node.level + 1]
                base = ".".join([*parents, base] if base else parents)
            found.add(base)
            found |= {f"{base}.{alias.name}" for alias in node.names if base in MODULES}
    return found


def _outside_functions(tree: ast.AST) -> Iterator[ast.AST]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        yield node
        yield from _outside_functions(node)


def within(name: str, *packages: str) -> bool:
    return any(name == p or name.startswith(p + ".") for p in packages)


def ours(*names: str) -> tuple[str, ...]:
    return tuple(f"snapmla_rt.{name}" for name in names)


# --- needs ----------------------------------------------------------------------------------------

# Runs in a child: everything but the standard library, numpy and ml_dtypes is refused, and an
# editable installation of this very package does not help out.
_ONLY_BASE = """
import importlib.abc, sys
sys.meta_path[:] = [f for f in sys.meta_path if "__editable__" not in getattr(f, "__module__", "")]
ALLOWED = set(sys.stdlib_module_names) | {"numpy", "ml_dtypes", "snapmla_rt"}
class Refuse(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] not in ALLOWED:
            raise ImportError(f"refused: {name}")
sys.meta_path.insert(0, Refuse())
"""


@pytest.fixture(scope="session")
def bare_checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sources alone: no compiled core, nothing installed."""
    folder = tmp_path_factory.mktemp("checkout")
    for name in ("snapmla_rt", "reference", "cuda_src"):
        ignored = shutil.ignore_patterns("*.so", "*.pyd", "*.c", "__pycache__")
        shutil.copytree(ROOT / name, folder / name, ignore=ignored)
    return folder


def run_bare(checkout: Path, code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(checkout), "PYTHONDONTWRITEBYTECODE": "1", **environment}
    return subprocess.run(
        [sys.executable, "-c", _ONLY_BASE + code],
        cwd=checkout,
        env=env,
        capture_output=True,
        text=True,
    )


def test_every_module_imports_with_numpy_and_ml_dtypes_only(bare_checkout: Path) -> None:
    names = [name for name in MODULES if not name.endswith("__main__") and name not in EXTRA_ONLY]
    assert len(names) > 20
    code = f"import importlib\nfor name in {names!r}:\n    importlib.import_module(name)\n"
    done = run_bare(bare_checkout, code + "import snapmla_rt\nprint(snapmla_rt.__file__)")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(bare_checkout / "snapmla_rt" / "__init__.py")


@pytest.mark.parametrize(("name", "package"), sorted(EXTRA_ONLY.items()))
def test_modules_of_an_extra_need_nothing_but_its_package(
    bare_checkout: Path, name: str, package: str
) -> None:
    done = run_bare(bare_checkout, f"import {name}")
    assert done.returncode != 0
    assert done.stderr.strip().splitlines()[-1] == f"ImportError: refused: {package}"


def test_the_main_job_runs_from_a_bare_checkout(bare_checkout: Path) -> None:
    argv = ["decode", "--tokens", "130", "--heads", "2", "--steps", "1", "--backend", "reference"]
    code = f"from snapmla_rt.cli import main\nraise SystemExit(main({argv!r}))"
    done = run_bare(bare_checkout, code)
    assert done.returncode == 0, done.stderr
    assert "uncompiled (pure NumPy) core" in done.stdout and "relative L2" in done.stdout


def test_importing_touches_no_cuda_and_writes_no_file(bare_checkout: Path, tmp_path: Path) -> None:
    code = """
import snapmla_rt, snapmla_rt.cli, snapmla_rt.kv_cache
bad = [m for m in sys.modules if m.split('.')[0] == 'cuda' or m.startswith('snapmla_rt.reference')]
assert not bad, bad
"""
    home = {"HOME": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    before = sorted(path for path in bare_checkout.rglob("*"))
    done = run_bare(bare_checkout, code, **home)
    assert done.returncode == 0, done.stderr
    assert list(tmp_path.iterdir()) == []
    assert sorted(path for path in bare_checkout.rglob("*")) == before


def test_every_public_name_resolves() -> None:
    import snapmla_rt

    for name in snapmla_rt.__all__:
        assert getattr(snapmla_rt, name) is not None
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = snapmla_rt.no_such_name


# --- boundaries -----------------------------------------------------------------------------------


def test_the_cpu_part_imports_no_cuda_package() -> None:
    cpu = [
        name
        for name in MODULES
        if within(name, *ours("kv_cache", "plan", "config", "errors", "reference"))
        and name != "snapmla_rt.kv_cache.storage"
    ]
    assert len(cpu) >= 10
    for name in cpu:
        bad = [m for m in imports_of(name) if within(m, "cuda", *ours("driver", "jit", "api"))]
        assert not bad, f"{name} imports {bad}"


def _code_strings(tree: ast.AST) -> Iterator[str]:
    """String constants of a module that are no docstring."""
    docstrings = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            if id(node) not in docstrings:
                yield node.value


def test_cuda_packages_are_named_only_in_driver_and_jit() -> None:
    pattern = re.compile(r"\bcuda\.(core|bindings)\b")
    for name, path in MODULES.items():
        if within(name, *ours("driver", "jit")):
            continue
        bad = [m for m in imports_of(name) if within(m, "cuda")]
        bad += [s for s in _code_strings(ast.parse(path.read_text())) if pattern.search(s)]
        assert not bad, f"{name} names {bad}"


FORBIDDEN = {
    # who -> what it must not know
    **{
        part: ours("api", "plan", "kv_cache", "compat", "cli", "reference")
        for part in ours("jit", "driver")
    },
    **{
        part: ours("api", "jit", "driver", "compat", "cli", "reference")
        for part in ours("plan", "config", "errors")
    },
    "snapmla_rt.kv_cache": ours("api", "jit", "compat", "cli"),
    "snapmla_rt.reference": ours("api", "jit", "driver", "compat", "cli", "tensor"),
    "snapmla_rt.api": ours("compat", "cli"),
}


def test_imports_follow_the_layers() -> None:
    for name in MODULES:
        for part, forbidden in FORBIDDEN.items():
            if within(name, part):
                bad = [m for m in imports_of(name) if within(m, *forbidden)]
                assert not bad, f"{name} imports {bad}"
        if name != "snapmla_rt.__main__" and not within(name, *ours("cli", "compat")):
            bad = [m for m in imports_of(name) if within(m, *ours("cli", "compat"))]
            assert not bad, f"{name} imports {bad}"


def test_the_runtime_loads_the_reference_only_when_it_is_chosen() -> None:
    for name in MODULES:
        if within(name, "snapmla_rt.reference"):
            continue
        # The audit measures with the reference: all of it but its entry in the command line.
        if within(name, "snapmla_rt.audit") and name != "snapmla_rt.audit.command":
            continue
        top = imports_of(name, top_level_only=True)
        bad = [m for m in top if within(m, "snapmla_rt.reference")]
        assert not bad, f"{name} imports {bad} at its top level"


WRITERS = (
    *("snapmla_rt.jit.disk_cache", "snapmla_rt.cli", "snapmla_rt.audit.command"),
    "snapmla_rt.places",  # tries whether a file can be made, and removes it
)
_WRITING_CALLS = {
    *("write_text", "write_bytes", "mkdir", "makedirs", "savez", "savez_compressed", "tofile"),
    *("mkstemp", "mkdtemp", "NamedTemporaryFile", "TemporaryFile", "touch", "rename", "rmtree"),
}


def _writes(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        called = ast.unparse(node.func)
        if called.rpartition(".")[2] in _WRITING_CALLS or called in ("os.open", "np.save"):
            yield ast.unparse(node)
        if called in ("open", "io.open") or called.endswith(".open"):
            mode = [*node.args[1:2], *(k.value for k in node.keywords)]
            if any(isinstance(m, ast.Constant) and set(str(m.value)) & set("wax+") for m in mode):
                yield ast.unparse(node)


def test_only_the_disk_cache_and_the_cli_write_files() -> None:
    for name, path in MODULES.items():
        found = list(_writes(ast.parse(path.read_text())))
        if name not in WRITERS:
            assert not found, f"{name} writes files: {found}"
    cli = ast.parse(MODULES["snapmla_rt.cli"].read_text())
    assert list(_writes(cli)), "the search does not see the writes that are there"


# --- CUDA sources ---------------------------------------------------------------------------------


def cuda_files(pattern: str = "**/*.cu*") -> list[Path]:
    return sorted((ROOT / "cuda_src").glob(pattern))


def without_comments(text: str) -> str:
    return re.sub(r"/\*.*?\*/|//[^\n]*", "", text, flags=re.DOTALL)


def includes(path: Path) -> list[str]:
    found = re.findall(r"^\s*#\s*include\s+(\S+)", path.read_text(), re.MULTILINE)
    return [name.strip() for name in found]


def test_asm_appears_in_ptx_only() -> None:
    for path in cuda_files():
        has_asm = re.search(r"\basm\b|\b__asm__\b", without_comments(path.read_text()))
        if path.parent.name != "ptx":
            assert not has_asm, f"{path.relative_to(ROOT)} holds asm"


def test_includes_follow_the_layers() -> None:
    for path in cuda_files():
        here = path.relative_to(ROOT)
        for name in includes(path):
            assert name.startswith('"'), f"{here} includes a toolkit header {name}"
            target = name.strip('"')
            assert not target.endswith(".cu"), f"{here} includes {target}"
            assert not re.search("cutlass|cute/", target, re.IGNORECASE), f"{here}: {target}"
            if path.parent.name == "ptx":
                assert target.startswith("ptx/"), f"{here} includes {target}: ptx stands alone"
            if path.parent.name == "common":
                rendered = target == "snapmla_config.h" or target.endswith("_params.h")
                assert rendered or target.startswith(("ptx/", "common/")), f"{here}: {target}"


# --- one home -------------------------------------------------------------------------------------

# Numbers that fix the layout; the oracle states them again on purpose, being independent.
_LAYOUT_NUMBERS = {576, 448, 644, 1152, 41216}
_MAY_STATE_THEM = ("snapmla_rt.config", "snapmla_rt.reference.attention_fp64")


def test_layout_numbers_have_one_home() -> None:
    for name, path in MODULES.items():
        if name in _MAY_STATE_THEM:
            continue
        stated = [
            node.lineno
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.Constant)
            and type(node.value) in (int, float)
            and node.value in _LAYOUT_NUMBERS
        ]
        assert not stated, f"{name} states a layout number in lines {stated}: import it from config"
    for path in cuda_files():
        found = re.findall(r"(?<![\w.])(?:576|448|41216|644)(?:\.0?f)?(?![\w.])",
                           re.sub(r'"[^"]*"', "", without_comments(path.read_text())))  # fmt: skip
        assert not found, f"{path.relative_to(ROOT)} states {found}: use the rendered header"


def _assigned_constants(path: Path) -> set[str]:
    tree = ast.parse(path.read_text())
    return {
        target.id
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant | ast.BinOp)
        for target in node.targets
        if isinstance(target, ast.Name) and target.id.isupper()
    }


def test_no_module_defines_a_constant_of_config_again() -> None:
    config = _assigned_constants(ROOT / "snapmla_rt" / "config.py")
    assert "BLOCK_SIZE" in config
    for name, path in MODULES.items():
        if name not in _MAY_STATE_THEM:
            again = _assigned_constants(path) & config
            assert not again, f"{name} defines {sorted(again)} that config.py has"


# --- sizes ----------------------------------------------------------------------------------------

GUIDE_FILE, GUIDE_FUNCTION = 600, 60


def test_sizes_are_reported_and_nothing_is_egregious() -> None:
    long: list[str] = []
    sources = [*MODULES.values(), *cuda_files()]
    sources += [*(ROOT / "tests").rglob("*.py"), *(ROOT / "tools").rglob("*.py")]
    for path in sources:
        here = path.relative_to(ROOT)
        text = path.read_text()
        lines = text.count("\n")
        if lines > GUIDE_FILE:
            long.append(f"{here}: {lines} lines")
        assert lines <= 2 * GUIDE_FILE, f"{here} has {lines} lines"
        if path.suffix != ".py":
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef):
                size = (node.end_lineno or node.lineno) - node.lineno + 1
                if size > GUIDE_FUNCTION:
                    long.append(f"{here}: {node.name} has {size} lines")
                assert size <= 2 * GUIDE_FUNCTION, f"{here}: {node.name} has {size} lines"
    if long:
        warnings.warn("over the guide sizes: " + "; ".join(long), stacklevel=1)


# --- packaging ------------------------------------------------------------------------------------


def _pyproject() -> dict:
    try:
        import tomllib
    except ImportError:  # Python 3.10, where pytest itself brings tomli
        import tomli as tomllib  # type: ignore[no-redef]
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_pyproject_names_every_package_and_source() -> None:
    """A folder that pyproject forgets works in a checkout and is missing from the wheel."""
    setuptools = _pyproject()["tool"]["setuptools"]
    folders = {"snapmla_rt.cuda_src": ROOT / "cuda_src"}
    for name, path in MODULES.items():
        if path.stem == "__init__":
            folders[name] = path.parent
    assert sorted(setuptools["packages"]) == sorted(folders)
    for extension in setuptools["ext-modules"]:
        assert extension["optional"] is True, f"{extension['name']} would need a C compiler"
        for source in [*extension["sources"], *extension.get("depends", [])]:
            assert (ROOT / source).is_file(), f"{extension['name']}: no {source}"
    for path in (ROOT / "snapmla_rt").rglob("*.pxd"):
        named = str(path.relative_to(ROOT).with_suffix(".py"))
        built = [s for e in setuptools["ext-modules"] for s in e["sources"]]
        assert named in built, f"{named} has a .pxd and is not built"


def test_every_data_file_ships() -> None:
    """Each file of the shipped folders is Python, or matches a package-data pattern."""
    data = _pyproject()["tool"]["setuptools"]["package-data"]
    roots = {"snapmla_rt": "snapmla_rt", "snapmla_rt.reference": "reference"}
    roots["snapmla_rt.cuda_src"] = "cuda_src"
    ignored = {".py", ".so", ".pyd", ".c", ".pyc", ".html"}
    for package, folder in roots.items():
        shipped = {p for pattern in data[package] for p in (ROOT / folder).glob(pattern)}
        for path in (ROOT / folder).rglob("*"):
            if path.is_file() and path.suffix not in ignored and "__pycache__" not in path.parts:
                assert path in shipped, f"{path.relative_to(ROOT)} is in no package-data pattern"


def _tracked() -> list[Path]:
    if shutil.which("git") is None:
        pytest.skip("git is not installed")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode != 0:
        pytest.skip("not a git checkout")
    return [ROOT / name for name in listed.stdout.split("\0") if name]


def test_no_path_of_one_machine_in_the_project() -> None:
    pattern = re.compile(rb"/(?:root|home|Users)/\w|/work/")
    this_file = Path(__file__).resolve()
    for path in _tracked():
        if path.is_file() and path != this_file:
            found = pattern.search(path.read_bytes())
            assert not found, f"{path.relative_to(ROOT)} holds {found.group()!r}"


def test_the_readme_lists_the_environment_variables_that_exist() -> None:
    """Names are constants called ..._VARIABLE; the doctor shows all of them too."""
    named = re.compile(r'^\w+_VARIABLE = "(SNAPMLA_\w+)"', re.MULTILINE)
    used = {name for path in MODULES.values() for name in named.findall(path.read_text())}
    table = re.findall(r"^\| `(SNAPMLA_\w+)` \|", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert sorted(table) == sorted(used) and len(used) >= 3
    from snapmla_rt.doctor import VARIABLES

    assert set(VARIABLES) == used
    for name, path in MODULES.items():
        read = re.findall(r"environ(?:\.get\(|\[)['\"](SNAPMLA_\w+)", path.read_text())
        assert set(read) <= used, f"{name} reads {read}"
