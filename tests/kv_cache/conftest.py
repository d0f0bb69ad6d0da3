"""The fixture `kv`: the cache manager's modules, uncompiled and compiled, selected by path."""

from __future__ import annotations

from typing import Any

import kv_twins
import pytest


@pytest.fixture(scope="session")
def _uncompiled_twin() -> Any:
    return kv_twins.load_twin("snapmla_twin_py", None)


@pytest.fixture(scope="session")
def _compiled_twin(request: pytest.FixtureRequest) -> Any:
    reason = kv_twins.why_not_compiled()
    if reason is not None:
        pytest.skip(f"the compiled twin cannot be built here: {reason}")
    cache = request.config.cache.mkdir("kv_cache_twin")
    # -O1: half the time of -O2, and still the optimiser that would expose undefined behaviour.
    folder = kv_twins.build("snapmla_twin_c", cache, "-O1 -g0 -w")
    twin = kv_twins.load_twin("snapmla_twin_c", folder)
    assert twin.manager.__file__.endswith(".so") or twin.manager.__file__.endswith(".pyd")
    return twin


@pytest.fixture(scope="session", params=["uncompiled", "compiled"])
def kv(request: pytest.FixtureRequest) -> Any:
    """All of snapmla_rt.kv_cache as one namespace; every test that uses it runs on both twins."""
    return request.getfixturevalue(f"_{request.param}_twin")
