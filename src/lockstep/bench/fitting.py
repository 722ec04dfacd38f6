"""Least squares with parameters that cannot be negative: few of them, so all choices are tried."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]

#: By how much a fit with one parameter more has to be better, as a share of the squared targets.
_WORTH = 1e-9


def fit(columns: Mapping[str, Sequence[float]], targets: Sequence[float]) -> dict[str, float]:
    """Return what each column is to be multiplied by so that their sum comes closest to `targets`.

    A parameter that would be negative, or that the rows cannot tell from others, is 0: of two choices
    that are as close the one with fewer parameters is taken, and then the one of the earlier columns.

    Args:
        columns: by the name of the parameter, one value per row.
        targets: one per row. Rows that are to count alike are divided by what they are to count for.
    """
    names, wanted = list(columns), np.asarray(targets, dtype=np.float64)
    best: dict[str, float] = {}
    least = float(wanted @ wanted)
    worth = _WORTH * least
    for count in range(1, len(names) + 1):
        for chosen in itertools.combinations(names, count):
            found = _solve([columns[name] for name in chosen], wanted)
            if found is not None and found[1] < least - worth:
                best, least = dict(zip(chosen, found[0], strict=True)), found[1]
    return {name: best.get(name, 0.0) for name in names}


def _solve(columns: Sequence[Sequence[float]], wanted: Array) -> tuple[list[float], float] | None:
    """Return a solution without negative parameters, and its squared error."""
    matrix = np.asarray(columns, dtype=np.float64).T
    # Columns may be bytes or seconds: scaled alike, their rank can be told.
    scale = np.abs(matrix).max(axis=0, initial=0.0)
    if not scale.all():
        return None
    solution, _, rank, _ = np.linalg.lstsq(matrix / scale, wanted, rcond=1e-9)
    if rank < len(columns) or (solution < 0).any():
        return None
    error = matrix / scale @ solution - wanted
    return (solution / scale).tolist(), float(error @ error)
