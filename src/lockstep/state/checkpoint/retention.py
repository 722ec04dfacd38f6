"""Remove old checkpoints: which ones stay beside the newest."""

from __future__ import annotations

from collections.abc import Mapping
from math import isnan

from lockstep.errors import CheckpointError
from lockstep.state.checkpoint.catalog import (
    Catalog,
    DamagedError,
    Key,
    Manifest,
    NewerFormatError,
    paths,
    place,
    read_manifest,
    remove,
)


def remove_old(
    catalog: Catalog, keep: int, newest: Key, anchors: int = 0, limit: float = 0.0
) -> None:
    """Remove checkpoints of the run, except the `keep` latest, the best, anchors, and `newest`.

    The anchors are the first checkpoint of every `anchors` steps; this spacing is doubled until all anchors
    together have at most `limit` bytes. The last checkpoint that an audit confirms stays, and so do
    checkpoints of newer formats. A damaged checkpoint is removed if it is older than `newest`.

    Raises:
        CheckpointError: if the directory cannot be read.
    """
    catalog.damaged.discard(newest)
    good, damaged = _own(catalog)
    stay = {newest, *sorted(good)[-keep:]}
    if (best := best_of({key: one.best for key, one in good.items()})) is not None:
        stay.add(best)
    confirmed = catalog.confirmed()
    stay |= {*sorted(key for key in good if confirmed is not None and key[0] <= confirmed)[-1:]}
    if anchors:
        stay |= _anchors(good, anchors, limit)
    # A damaged one that lies ahead is replaced when the run gets there.
    older = {key for key in damaged if key < newest}
    for key in (good.keys() - stay) | older:
        remove(place(catalog.directory, key))


def best_of(ratings: Mapping[Key, float | None]) -> Key | None:
    """Return the key with the highest rating, the newest of equal ones; `None` if none is rated.

    NaN counts as no rating.
    """
    rated = {key: best for key, best in ratings.items() if best is not None and not isnan(best)}
    return max(rated, key=lambda key: (rated[key], key), default=None)


def _own(catalog: Catalog) -> tuple[dict[Key, Manifest], set[Key]]:
    """Return this run's manifests by key, and the keys of checkpoints with missing or cut files."""
    good: dict[Key, Manifest] = {}
    damaged: set[Key] = set()
    for key, path in paths(catalog.directory).items():
        try:
            content = read_manifest(path)
            if content.differences(catalog.identity):
                continue
            for name in content.files:
                content.verify_size(path, name)
        except NewerFormatError:
            continue
        except DamagedError:
            damaged.add(key)
            continue
        except (OSError, CheckpointError):
            continue
        if key in catalog.damaged:
            damaged.add(key)
        else:
            good[key] = content
    return good, damaged


def _anchors(good: Mapping[Key, Manifest], every: int, limit: float) -> set[Key]:
    """Return the keys of the checkpoints in `good` to keep as anchors: the first per `every` steps.

    If these have more than `limit` bytes together, `every` is doubled until they fit or one is left.
    """
    while True:
        first: dict[int, Key] = {}
        for key in sorted(good):
            if window := key[0] // every:
                first.setdefault(window, key)
        size = sum(file.bytes for key in first.values() for file in good[key].files.values())
        if len(first) < 2 or size <= limit:
            return set(first.values())
        every *= 2
