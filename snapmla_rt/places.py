"""Places that commands write to: whether they can be written, and that no input is among them."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterable

from .errors import ArgumentError


def why_not_writable(folder: str | os.PathLike[str]) -> str | None:
    """Why no file can be made in `folder`, or in what is there of its path; None where one can.

    Tried, not asked: access(2) tells root yes about places, such as /proc, where every attempt
    fails. What the attempt makes is gone when this returns.
    """
    place = os.path.abspath(folder)
    try:
        with contextlib.suppress(FileNotFoundError):  # other reasons hold for the parents, too
            os.stat(place)
        # lexists: a link that leads nowhere is in the way of a folder of its name
        while not os.path.lexists(place) and place != os.path.dirname(place):
            place = os.path.dirname(place)
        with tempfile.NamedTemporaryFile(dir=place, prefix=".snapmla-") as file:
            file.write(b"x")  # a full disk refuses this first
            file.flush()
    except OSError as error:
        return error.strerror or str(error)
    return None


def same_file(one: str | os.PathLike[str], other: str | os.PathLike[str]) -> bool:
    """Whether both paths lead to one file, through links too; no where one leads nowhere."""
    try:
        return os.path.samefile(one, other)
    except OSError:
        return False


def refuse_inputs(
    option: str, target: str | os.PathLike[str], inputs: Iterable[str | os.PathLike[str]]
) -> None:
    """Raise ArgumentError where writing `target` would overwrite one of the inputs."""
    for given in inputs:
        if same_file(target, given):
            got = f"{os.fspath(target)!r}, the same file as the input {os.fspath(given)!r}"
            raise ArgumentError(option, "a file that is no input", got)
