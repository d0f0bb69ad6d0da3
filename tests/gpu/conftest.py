"""GPU tests run on a Hopper GPU and are skipped, with the reason, anywhere else."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest

from snapmla_rt.errors import CudaError, UnsupportedDeviceError

HERE = Path(__file__).resolve().parent


@functools.lru_cache(maxsize=1)
def why_not() -> str | None:
    """None where GPU 0 can run the kernels, else the reason."""
    from snapmla_rt.driver.device import require_hopper

    try:
        require_hopper(0)
    except (UnsupportedDeviceError, CudaError) as error:
        return str(error)
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            reason = why_not()
            if reason is not None:
                item.add_marker(pytest.mark.skip(reason=reason))
