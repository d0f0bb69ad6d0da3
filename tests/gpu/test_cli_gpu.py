"""`snapmla decode` on the kernels: the same bytes as on the reference."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from compare import difference_report

from snapmla_rt.cli import main


@pytest.mark.parametrize("block_n", ["64", "128"])
def test_the_main_job_gives_the_reference_s_bytes(tmp_path: Path, block_n: str) -> None:
    outputs = {}
    for backend in ("cuda", "reference"):
        path = tmp_path / f"{backend}.npz"
        arguments = ["--tokens", "700", "--heads", "20", "--steps", "3", "--seq-len-q", "2"]
        code = main(
            ["decode", *arguments, "--block-n", block_n, "--backend", backend, "--out", str(path)]
        )
        assert code == 0, backend
        outputs[backend] = dict(np.load(path))
    assert outputs["cuda"].keys() == outputs["reference"].keys()
    for name, array in outputs["reference"].items():
        report = difference_report(name, outputs["cuda"][name], array)
        assert report is None, report
