"""Write a model of a checkpoint to a plain `state_dict` file, without the training script."""

from __future__ import annotations

import contextlib
import re
from math import prod
from pathlib import Path

from lockstep.errors import CheckpointError, RunDirectoryError, UsageError
from lockstep.state.checkpoint import catalog, dcp
from lockstep.state.checkpoint.catalog import Key, ValidCheckpoint
from lockstep.state.checkpoint.retention import best_of
from lockstep.state.checkpoint.weights_only import check_suffix, write_weights
from lockstep.state.files import run_file

#: Name of the exported file in the run directory, if the user gives none.
DEFAULT = "model.pt"
#: Names of the tensors of the K-th model in a checkpoint.
_MODEL = re.compile(r"models\.(\d+)\.(.+)")


def export(
    run_dir: Path,
    output: Path | None = None,
    *,
    step: int | None = None,
    best: bool = False,
    model: int | None = None,
    force: bool = False,
) -> tuple[Path, ValidCheckpoint]:
    """Write the weights of a model in a checkpoint to a file; return the file's path and the checkpoint.

    The checkpoint is the newest of `step`, the best one if `best`, or else the newest of the run. `output`
    is by default `model.pt` in the run directory. `model` is the number of the model, which may be `None`
    if the run has one model. `force` overwrites an existing file.

    Raises:
        UsageError: if the requested checkpoint or model does not exist, or the file exists.
        CheckpointError: if the checkpoint cannot be read, or the file not be written.
    """
    target = output or run_dir / DEFAULT
    check_suffix(target)
    if target.exists() and not force:
        raise UsageError(f"{target} exists", hint="--force overwrites it, -o names another file")
    chosen = choose(run_dir, step=step, best=best)
    names = _names(chosen, model)
    tensors = dcp.stored(chosen.path, chosen.manifest)
    write_weights(target, {own: tensors[name].read() for name, own in names.items()})
    return target, chosen


def steps_of(run_dir: Path) -> int:
    """Return the number of steps that `run.json` has for a run; 0 if it has none or is damaged."""
    with contextlib.suppress(RunDirectoryError):
        steps = (run_file.read(run_dir) or {}).get("steps")
        return steps if isinstance(steps, int) else 0
    return 0


def choose(run_dir: Path, *, step: int | None = None, best: bool = False) -> ValidCheckpoint:
    """Verify and return a checkpoint of a run: the newest of `step`, the best, or the newest of all.

    Raises:
        UsageError: if the run or the checkpoint does not exist.
        CheckpointError: if the requested checkpoint is damaged, or every checkpoint is.
    """
    directory = run_dir / catalog.DIRECTORY
    there = catalog.paths(directory)
    if not there:
        if not (run_dir / "run.json").exists():
            raise UsageError(f"there is no run in {run_dir}; expected the directory of a run")
        raise UsageError(
            f"the run in {run_dir} has no checkpoint yet", hint="run.save() in its script makes one"
        )
    if best:
        path = _best(there)
        if path is None:
            raise UsageError(
                f"no checkpoint in {directory} says how good it is",
                hint="run.save(best=...) does; without --best, the newest one is taken",
            )
        return _chosen(there, path)
    if step is not None:
        newest_of_step = next((path for key, path in there.items() if key[0] == step), None)
        if newest_of_step is None:
            raise UsageError(
                f"there is no checkpoint of step {step}; expected one of {_steps(there)}"
            )
        return _chosen(there, newest_of_step)
    newest = catalog.Catalog(directory, None).newest()
    if newest is None:
        raise CheckpointError(f"no checkpoint in {directory} is what was written")
    return newest


def _best(there: dict[Key, Path]) -> Path | None:
    """Return the path in `there` of the checkpoint with the highest rating; `None` if none is rated.

    Checkpoints that cannot be read are skipped.
    """
    ratings: dict[Key, float | None] = {}
    for key, path in there.items():
        with contextlib.suppress(OSError, CheckpointError):
            ratings[key] = catalog.read_manifest(path).best
    best = best_of(ratings)
    return None if best is None else there[best]


def _steps(there: dict[Key, Path]) -> str:
    return ", ".join(map(str, sorted({step for step, _ in there})))


def _chosen(there: dict[Key, Path], path: Path) -> ValidCheckpoint:
    try:
        return catalog.look(path)
    except CheckpointError as error:
        raise CheckpointError(
            f"the checkpoint {path} cannot be used: {error.message}",
            hint=error.hint or f"--step takes another one, of {_steps(there)}",
        ) from error


def _names(chosen: ValidCheckpoint, model: int | None) -> dict[str, str]:
    """Map each tensor name of a model in the checkpoint `chosen` to its name in the `state_dict`.

    `model` is the number of the model; `None` stands for the only model of the checkpoint.

    Raises:
        UsageError: if there is no such model, or `model` is `None` and there are several.
    """
    models: dict[int, dict[str, str]] = {}
    for name in chosen.manifest.tensors:
        if match := _MODEL.fullmatch(name):
            models.setdefault(int(match[1]), {})[name] = match[2]
    numbers = ", ".join(map(str, sorted(models)))
    if not models:
        raise UsageError(f"the checkpoint {chosen.path} holds no model")
    if model is None and len(models) > 1:
        sizes = ", ".join(
            f"{number} ({sum(prod(chosen.manifest.tensors[name].shape) for name in names):,} values)"
            for number, names in sorted(models.items())
        )
        raise UsageError(
            f"the run has models {sizes}",
            hint="--model says which one, counted from 0 in the order of run.model",
        )
    wanted = min(models) if model is None else model
    if wanted not in models:
        raise UsageError(f"there is no model {wanted}; expected one of {numbers}")
    return models[wanted]
