"""tools/report.py: the committed page is what the committed data gives; some is measured again."""

from __future__ import annotations

import hashlib
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tools"))

import report  # noqa: E402


@pytest.fixture(scope="module")
def measured() -> Any:
    return json.loads(report.MEASURED.read_text())


def test_the_page_is_written_from_the_committed_data(measured: Any) -> None:
    assert report.REPORT.read_text() == report.report(measured)


def test_every_picture_of_the_page_is_there() -> None:
    names = re.findall(r"\]\((numerics/[^)]+)\)", report.REPORT.read_text())
    assert len(names) >= 7
    for name in names:
        assert (report.RESULTS / name).stat().st_size > 5000


def test_sweeps_of_the_order_measure_again(measured: Any) -> None:
    from order_scenes import scene

    sweep = measured["order"]["sweep"]
    for name, made in (
        ("log2 ratio", {"log2_ratio": -4}),
        ("log2 ratio, block 1 silent", {"log2_ratio": 12, "silent": True}),
        ("gap", {"gap": 100}),
    ):
        x = made.get("log2_ratio", made.get("gap"))
        (point,) = [p for p in sweep[name] if p["x"] == x]
        s = scene(**made)  # type: ignore[arg-type]
        for scheme in report.SCHEMES:
            error = report.scheme_error(s, scheme)
            if point[scheme] is None:
                assert error == float("inf")
            else:
                assert error == pytest.approx(point[scheme], rel=1e-6)


def test_one_layer_of_the_papers_distribution_measures_again(measured: Any) -> None:
    from snapmla_rt.audit.measure import LayerAudit, Sampling, audit_layer

    # half of the rows of the committed one: the same layer, so nearly the same figures
    layer = report.paper_layers()[2]
    found = audit_layer(layer, Sampling(rows=32, exact_rows=8))
    kept = LayerAudit.from_dict(measured["paper"][2])
    assert found.latent == kept.latent and found.rope == kept.rope
    for name, config in found.configs.items():
        assert config.saturated == kept.configs[name].saturated
        assert config.underflow == kept.configs[name].underflow
        assert config.cache_only == pytest.approx(kept.configs[name].cache_only, rel=0.3)


@pytest.mark.skipif(not report.EVALUATION.is_file(), reason="no GPU run of the small model yet")
def test_the_evaluation_belongs_to_the_capture() -> None:
    data = json.loads(report.EVALUATION.read_text())
    assert hashlib.sha256(report.CAPTURE.read_bytes()).hexdigest() == data["capture_sha256"]
    arms = data["evaluation"]["arms"]
    assert set(arms) == {"bf16", *report.CONFIGS}
    assert data["evaluation"]["generated_tokens"] == 2000
    bf16, own = arms["bf16"], arms["snapmla"]
    assert bf16["kl_from_bf16"] == 0 and bf16["greedy"]["agreement_along_bf16_text"] == 1
    assert 1 < bf16["perplexity"] < 6  # a model of text, byte by byte: 256 knows nothing
    assert 0 < own["kl_from_bf16"] < 0.01 and own["top1_agreement"] > 0.98
