"""Why a checkpoint is not on disk, as the user is told.

Does not import torch.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from pathlib import Path

from lockstep.errors import CheckpointError


def explained(error: BaseException) -> CheckpointError:
    """Return why something cannot be written, and what helps, as far as `error` says it."""
    if isinstance(error, CheckpointError):
        return error
    cause = next((one for one in _chain(error) if isinstance(one, OSError)), None)
    if cause is None:
        return CheckpointError(f"{type(error).__name__}: {error}")
    hint = "--run-dir names another place; earlier checkpoints are as they were"
    if cause.errno in (errno.ENOSPC, errno.EDQUOT):
        hint = "make room, or keep fewer (keep=, LOCKSTEP_KEEP); earlier ones are as they were"
    return CheckpointError(cause.strerror or str(cause), hint=hint)


def not_written(path: Path, reason: CheckpointError) -> CheckpointError:
    """Return the error for a checkpoint that is not on disk."""
    return CheckpointError(
        f"the checkpoint {path} cannot be written: {reason.message}", hint=reason.hint
    )


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
