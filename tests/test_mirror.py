"""Kernel and reference carry the same step tags.

A tag such as [S4] names one step of a stage. The reference module whose docstring lists a family of
tags, one a line, is the home of that family; the kernel's head lists the same ones. A tag that
stands on one side only fails here: a step was added, dropped or renamed without its mirror.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
STAGES = ("quantize_q", "append_kv", "fetch_dequant", "plan_decode", "mla_decode", "mla_combine")
# Whatever else stands on both sides, such as a launch that does the work of two stages.
OTHERS = tuple(
    path.stem
    for path in sorted((ROOT / "cuda_src").glob("*.cu"))
    if path.stem not in STAGES and (ROOT / f"reference/{path.stem}.py").is_file()
)
TAG = re.compile(r"\[([A-Z])(\d+)\]")
DEFINITION = re.compile(r"^[\s/*#]*\[([A-Z]\d+)\] ", re.MULTILINE)
INCLUDE = re.compile(r'^\s*#\s*include\s+"([^"]+)"', re.MULTILINE)
IMPORT = re.compile(r"^from \.(\w+) import", re.MULTILINE)
# Arithmetic of the hardware itself: the tensor core has no CUDA source to mirror.
HARDWARE_MODULES = ("tensor_core", "numerics")


def tags(text: str, family: str | None = None) -> set[str]:
    """Tags in a text, of one family or of all."""
    return {letter + n for letter, n in TAG.findall(text) if family in (None, letter)}


def cuda_text(root: Path, stage: str) -> str:
    """The stage's .cu with its folder and every header of ours that it reaches."""
    cuda = root / "cuda_src"
    pending = [cuda / f"{stage}.cu", *sorted((cuda / stage).glob("**/*.cuh"))]
    seen: dict[Path, str] = {}
    while pending:
        path = pending.pop()
        if path in seen or not path.is_file():
            continue
        seen[path] = path.read_text()
        for name in INCLUDE.findall(seen[path]):
            pending += [cuda / name, path.parent / name]
    return "\n".join(seen.values())


def reference_text(root: Path, stage: str) -> str:
    """The stage's module; for one that is only a sequence of other stages, those as well."""
    text = (root / "reference" / f"{stage}.py").read_text()
    if tags(text):
        return text
    parts = [part for part in IMPORT.findall(text) if part in STAGES]
    return "\n".join([text, *((root / "reference" / f"{part}.py").read_text() for part in parts)])


def homes(root: Path) -> dict[str, str]:
    """Family letter -> the reference module that lists it."""
    found: dict[str, str] = {}
    for path in sorted((root / "reference").glob("*.py")):
        for tag in DEFINITION.findall(path.read_text().split('"""')[1]):
            other = found.setdefault(tag[0], path.stem)
            assert other == path.stem, f"[{tag}] is listed in {other}.py and in {path.stem}.py"
    return found


def one_sided(reference: str, kernel: str, family: str) -> set[str]:
    """Tags of `family` that only one of the two texts carries."""
    return tags(reference, family) ^ tags(kernel, family)


def test_every_stage_lists_its_steps(repo_root: Path) -> None:
    """Each stage's module, or one it imports steps from, is the home of a family."""
    home_of = homes(repo_root)
    for stage in STAGES:
        text = (repo_root / "reference" / f"{stage}.py").read_text()
        families = {tag[0] for tag in tags(text)}
        assert families, f"reference/{stage}.py carries no step tag"
        assert families <= set(home_of), f"reference/{stage}.py: no home for {families}"


@pytest.mark.parametrize("stage", [*STAGES, *OTHERS])
def test_kernel_and_reference_carry_the_same_tags(repo_root: Path, stage: str) -> None:
    if not (repo_root / "cuda_src" / f"{stage}.cu").is_file():
        pytest.skip(f"cuda_src/{stage}.cu does not exist yet")
    home_of = homes(repo_root)
    reference = reference_text(repo_root, stage)
    assert tags(reference), f"reference/{stage}.py carries no step tag and joins no stages"
    kernel = cuda_text(repo_root, stage)
    for family in sorted({tag[0] for tag in tags(reference)}):
        home = home_of[family]
        if home in HARDWARE_MODULES:
            continue
        if stage in STAGES and home in STAGES and home != stage:
            continue  # a mention of another stage's step; checked below and under that stage
        listed = (repo_root / "reference" / f"{home}.py").read_text()
        missing = one_sided(listed, kernel, family)
        assert not missing, (
            f"{stage}: on one side only: {sorted(missing)} (reference/{home}.py has "
            f"{sorted(tags(listed, family))}, the kernel {sorted(tags(kernel, family))})"
        )


def test_no_tag_is_mentioned_that_no_home_lists(repo_root: Path) -> None:
    """A reader who follows a tag, on either side, finds its line."""
    listed = {
        tag
        for home in homes(repo_root).values()
        for tag in DEFINITION.findall((repo_root / "reference" / f"{home}.py").read_text())
    }
    files = [*(repo_root / "reference").glob("*.py"), *(repo_root / "cuda_src").rglob("*.cu*")]
    for path in files:
        unknown = tags(path.read_text()) - listed
        assert not unknown, f"{path.relative_to(repo_root)} mentions {sorted(unknown)}"


@pytest.mark.parametrize("stage", STAGES)
def test_listed_steps_are_marked_where_they_happen(repo_root: Path, stage: str) -> None:
    """A tag that stands in the list at the top only says nothing about the code below."""
    home_of = homes(repo_root)
    sides = {f"reference/{stage}.py": (repo_root / "reference" / f"{stage}.py").read_text()}
    kernel = repo_root / "cuda_src" / f"{stage}.cu"
    if kernel.is_file():
        sides[f"cuda_src/{stage}.cu"] = cuda_text(repo_root, stage)
    for name, text in sides.items():
        for tag in sorted(tags(text)):
            if home_of[tag[0]] == stage:
                assert text.count(f"[{tag}]") >= 2, f"{name}: [{tag}] stands in the list only"


def test_the_check_itself_sees_a_difference() -> None:
    reference = "[S1] a\n[S2] b\n x = 1  # [S2]"
    assert one_sided(reference, "// [S1] a\n// [S2] b", "S") == set()
    assert one_sided(reference, "// [S1] a\n// [S3] b", "S") == {"S2", "S3"}
    assert tags("v[0] m[N] arr[I4x] [S10] [s1]") == {"S10"}
    assert DEFINITION.findall("  [S1] x\n// [S2] y\n and [S3] z\n[S4]..[S5]") == ["S1", "S2"]
