"""Which checkpoints stay: the latest ones, and the best one.

Does not import torch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Mapping
from math import isnan
from pathlib import Path
from typing import Any

from lockstep.checkpoint import drafts, found, manifest
from lockstep.errors import CheckpointError


def superseded(good: Mapping[int, float | None], keep: int, newest: int) -> set[int]:
    """Return the steps whose checkpoints are no longer needed.

    Args:
        good: how good each whole checkpoint is, by step.
        keep: how many of the latest stay.
        newest: the step that was written just now: it stays in any case.
    """
    stay = {newest, *sorted(good)[-keep:]}
    rated = [(best, step) for step, best in good.items() if best is not None and not isnan(best)]
    if rated:
        stay.add(max(rated)[1])
    return set(good) - stay


def apply(
    directory: Path, identity: Mapping[str, Any], *, keep: int, newest: int, bad: Collection[int]
) -> None:
    """Remove what is no longer needed, once the checkpoint of step `newest` is on disk.

    Checkpoints of other runs and of newer formats are nobody's to remove, and damaged ones stand in for
    none of those that stay.

    Args:
        directory: where checkpoints are.
        identity: of the run.
        keep: how many of the latest stay.
        newest: the step that was written just now.
        bad: steps whose checkpoints were found damaged.
    """
    good: dict[int, float | None] = {}
    damaged: set[int] = set()
    for step, path in found.paths(directory).items():
        try:
            told = manifest.read(path)
            if told.differences(identity):
                continue
            for name in told.files:
                told.verify_size(path, name)
        except manifest.NewerFormatError:
            continue
        except manifest.DamagedError:
            damaged.add(step)
            continue
        except (OSError, CheckpointError):
            continue
        if step in bad:
            damaged.add(step)
        else:
            good[step] = told.best
    # A damaged one that lies ahead is replaced when the run gets there.
    older = {step for step in damaged if step < newest}
    for step in superseded(good, keep, newest) | older:
        remove(found.place(directory, step))


def remove(path: Path) -> None:
    """Remove a checkpoint: what is half removed has a name that nobody takes for a checkpoint."""
    aside = path.with_name(f".draft-removed-{path.name}")
    with contextlib.suppress(OSError):
        drafts.remove(aside)
        path.rename(aside)
    drafts.remove(aside)
