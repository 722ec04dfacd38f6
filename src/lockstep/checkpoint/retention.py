"""Which checkpoints stay: the latest ones, and the best one.

Does not import torch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Mapping
from math import isnan
from pathlib import Path
from typing import Any

from lockstep.checkpoint import catalog, manifest, temporary_directory
from lockstep.checkpoint.catalog import Key
from lockstep.errors import CheckpointError


def superseded(good: Mapping[Key, float | None], keep: int, newest: Key) -> set[Key]:
    """Return which checkpoints are no longer needed.

    Args:
        good: how good each whole checkpoint is.
        keep: how many of the latest stay.
        newest: the one that was written just now: it stays in any case.
    """
    stay = {newest, *sorted(good)[-keep:]}
    rated = [(best, key) for key, best in good.items() if best is not None and not isnan(best)]
    if rated:
        stay.add(max(rated)[1])
    return set(good) - stay


def apply(
    directory: Path, identity: Mapping[str, Any], *, keep: int, newest: Key, bad: Collection[Key]
) -> None:
    """Remove what is no longer needed, once the checkpoint `newest` is on disk.

    Checkpoints of other runs and of newer formats are nobody's to remove, and damaged ones stand in for
    none of those that stay.

    Args:
        directory: where checkpoints are.
        identity: of the run.
        keep: how many of the latest stay.
        newest: the one that was written just now.
        bad: those that were found damaged.
    """
    good: dict[Key, float | None] = {}
    damaged: set[Key] = set()
    for key, path in catalog.paths(directory).items():
        try:
            told = manifest.read(path)
            if told.differences(identity):
                continue
            for name in told.files:
                told.verify_size(path, name)
        except manifest.NewerFormatError:
            continue
        except manifest.DamagedError:
            damaged.add(key)
            continue
        except (OSError, CheckpointError):
            continue
        if key in bad:
            damaged.add(key)
        else:
            good[key] = told.best
    # A damaged one that lies ahead is replaced when the run gets there.
    older = {key for key in damaged if key < newest}
    for key in superseded(good, keep, newest) | older:
        remove(catalog.place(directory, key))


def remove(path: Path) -> None:
    """Remove a checkpoint: what is half removed has a name that nobody takes for a checkpoint."""
    aside = path.with_name(f".draft-removed-{path.name}")
    with contextlib.suppress(OSError):
        temporary_directory.remove(aside)
        path.rename(aside)
    temporary_directory.remove(aside)
