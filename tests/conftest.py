"""What every test shares: Hypothesis profiles and where the checkout is.

`strategies`, `poison` and `compare` beside this file are plain modules: pytest puts this folder on
the path, so any test says `from strategies import ...`.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:  # plain `pytest` in a bare checkout; `python -m pytest` has it
    sys.path.insert(0, str(ROOT))

# No deadline: the reference is slow on purpose where no compiled core is built. CI is derandomised
# so that a red run says something about the change under test; `thorough` is for a long search.
_COMMON = settings(
    deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)
settings.register_profile("default", _COMMON, max_examples=50)
settings.register_profile("ci", _COMMON, max_examples=50, derandomize=True, print_blob=True)
settings.register_profile("thorough", _COMMON, max_examples=2000)
settings.load_profile(
    os.environ.get("HYPOTHESIS_PROFILE", "ci" if os.environ.get("CI") else "default")
)


@pytest.fixture(scope="session")
def repo_root() -> Path:
    """The checkout, for tests that read the project's own files."""
    return ROOT
