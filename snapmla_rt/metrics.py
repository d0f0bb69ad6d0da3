"""How far an output is from float64 attention: the paper's three measures, and the worst cases."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike


@dataclass(frozen=True)
class ErrorSummary:
    """Errors of outputs [..., 512] and of their lse against float64.

    relative_l2: |out - ref| / |ref| over all elements; cosine_difference: 1 - cosine similarity;
    rmse: root of the mean square error; worst_element: largest |out - ref|, and worst_at where;
    lse_error: largest |lse - ref| in nats.
    """

    relative_l2: float
    cosine_difference: float
    rmse: float
    worst_element: float
    worst_at: tuple[int, ...]
    lse_error: float

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def error_summary(
    out: ArrayLike, reference: ArrayLike, lse: ArrayLike, reference_lse: ArrayLike
) -> ErrorSummary:
    """Compare outputs and lse, of any matching shapes, with their float64 references.

    Rows without a visible key (reference lse +inf) count as equal where lse is +inf too. A NaN on
    either side makes the measures NaN: it is never skipped.
    """
    got, want = np.asarray(out).astype(np.float64), np.asarray(reference, np.float64)
    error = got - want
    size, error_size = float(np.linalg.norm(want)), float(np.linalg.norm(error))
    return ErrorSummary(
        relative_l2=_ratio(error_size, size),
        cosine_difference=_cosine_difference(got, want),
        rmse=float(np.sqrt(np.mean(np.square(error)))) if error.size else 0.0,
        worst_element=float(np.abs(error).max(initial=0.0)),
        worst_at=_argmax(np.abs(error)),
        lse_error=_lse_error(np.asarray(lse, np.float64), np.asarray(reference_lse, np.float64)),
    )


def _ratio(error: float, size: float) -> float:
    if size == 0.0:
        return 0.0 if error == 0.0 else float("inf")
    return float(error / size)


def _cosine_difference(got: np.ndarray, want: np.ndarray) -> float:
    both = np.linalg.norm(got) * np.linalg.norm(want)
    if both == 0.0:
        return 0.0 if np.array_equal(got, want) else 1.0
    with np.errstate(invalid="ignore"):
        difference = 1.0 - float(np.vdot(got, want) / both)
    # The rounding of sums may put a cosine just above 1. Not max(): it would turn a NaN into 0.
    return 0.0 if difference < 0.0 else difference


def _argmax(x: np.ndarray) -> tuple[int, ...]:
    return tuple(int(i) for i in np.unravel_index(int(np.argmax(x)), x.shape)) if x.size else ()


def _lse_error(lse: np.ndarray, reference: np.ndarray) -> float:
    with np.errstate(invalid="ignore"):
        error = np.where(lse == reference, 0.0, np.abs(lse - reference))
    return float(error.max(initial=0.0))
