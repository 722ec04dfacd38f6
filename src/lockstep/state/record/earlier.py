"""Earlier runs of the same script: their digests are to be equal.

A run compares its digest with those that runs beside its directory recorded. So a result that depends on
the layout, on the process or on chance shows as soon as the script has run twice, whatever the cause.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path

from lockstep.errors import LockstepError
from lockstep.state.files import run_file
from lockstep.state.files.directory import short
from lockstep.state.files.run_file import Identity
from lockstep.state.record import stacks

#: Runs that are looked at, the newest first.
_RUNS = 50
#: Files of the user's that are hashed.
_FILES = 2000


def fingerprint(identity: Identity, settings: Iterable[str]) -> str:
    """Return a hash of the identity, settings of models, optimizers and data, and the user's modules."""
    digest = hashlib.sha256(json.dumps([asdict(identity), *settings], sort_keys=True).encode())
    files = {getattr(module, "__file__", None) for module in list(sys.modules.values())}
    own = sorted(file for file in files if isinstance(file, str) and stacks.is_users(file))
    for file in own[:_FILES]:
        with contextlib.suppress(OSError):  # it is gone
            digest.update(Path(file).read_bytes())
    return digest.hexdigest()


def other_digest(directory: Path, fingerprint: str, digest: str) -> str | None:
    """Return a warning of the newest run beside this one with the same fingerprint and another digest."""
    runs = sorted(directory.parent.glob(f"*/{run_file.NAME}"), reverse=True)
    for file in [file for file in runs if file.parent != directory][:_RUNS]:
        with contextlib.suppress(LockstepError):  # it cannot be read
            recorded = run_file.read(file.parent) or {}
            if recorded.get("fingerprint") != fingerprint or recorded.get("digest") == digest:
                continue
            ranks = recorded.get("generations", [{}])[-1].get("ranks", "?")
            where = "1 rank" if ranks == 1 else f"{ranks} ranks"
            return (
                f"lockstep: warning: {short(file.parent)} ({where}) ended with other weights "
                f"({recorded['digest'][:19]}…), of the same script, arguments, seed, data, model and "
                "optimizers. Unless a file or a variable that the script reads has changed, its result "
                "depends on the layout or on chance; hint: lockstep verify names the first difference"
            )
    return None


def changed_data(loader: str, recorded: Mapping[str, str], now: Mapping[str, str]) -> str:
    """Return a warning of a loader whose data is not what the run has recorded."""
    names = {*recorded, *now}
    what = ", ".join(sorted(name for name in names if recorded.get(name) != now.get(name)))
    return (
        f"lockstep: warning: loader {loader} has other data than this run had before ({what} differ): "
        "what a script draws before the run needs a seed of its own under python and torchrun"
    )
