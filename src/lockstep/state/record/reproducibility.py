"""Compare a run's digest (a hash of the final weights) with those of earlier runs of the same script.

Earlier runs are those in sibling directories of the run's directory. A different digest shows that the
result depends on the number of ranks, on the process or on chance.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path

from lockstep.errors import LockstepError
from lockstep.state.files import run_file
from lockstep.state.files.directory import short
from lockstep.state.files.run_file import Identity
from lockstep.state.record.provenance import user_files

#: Number of earlier runs that are read, the newest first.
_RUNS = 50


def fingerprint(identity: Identity, settings: Iterable[str]) -> str:
    """Return `A.B`: `A` is a hash of identity and source files, `B` a hash of `settings`.

    `identity` has script, arguments, seed and versions. `settings` are texts that describe models,
    optimizers and data.
    """
    source = hashlib.sha256(json.dumps(asdict(identity), sort_keys=True).encode())
    for file in user_files():
        with contextlib.suppress(OSError):  # the file is gone
            source.update(Path(file).read_bytes())
    return f"{source.hexdigest()}.{hashlib.sha256(json.dumps([*settings]).encode()).hexdigest()}"


def other_digest(directory: Path, fingerprint: str, digest: str, ranks: int) -> str | None:
    """Return a warning if an earlier run of the same script has another digest; otherwise `None`.

    Args:
        directory: the run directory; earlier runs are searched in the directories beside it.
        fingerprint: result of the function `fingerprint`. Its first part, a hash of identity and
            source files, must be equal in the earlier run. If the second part differs, the earlier
            run counts only if it had another number of ranks: a learning rate that the script
            multiplies by the number of ranks makes the result depend on the layout.
        digest: digest of the run.
        ranks: number of ranks of the run.
    """
    source = fingerprint.partition(".")[0]
    runs = sorted(directory.parent.glob(f"*/{run_file.NAME}"), reverse=True)
    for file in [file for file in runs if file.parent != directory][:_RUNS]:
        with contextlib.suppress(LockstepError):  # the file is damaged
            recorded = run_file.read(file.parent) or {}
            known = str(recorded.get("fingerprint"))
            if known.partition(".")[0] != source or recorded.get("digest") == digest:
                continue
            others = recorded.get("generations", [{}])[-1].get("ranks", ranks)
            is_same = known == fingerprint
            if not is_same and others == ranks:
                continue
            settings = (
                "data, model and optimizers" if is_same else "with different settings or data"
            )
            return (
                f"lockstep: warning: {short(file.parent)} ({others} rank{'s' * (others != 1)}) ended with "
                f"different weights ({recorded['digest'][:19]}…), of the same script, arguments, seed, "
                f"{settings}. Unless a file or a variable that the script reads has changed, its result "
                "depends on the layout or on chance; hint: lockstep verify names the first difference"
            )
    return None


def changed_data(loader: str, recorded: Mapping[str, str], now: Mapping[str, str]) -> str:
    """Return the text of a warning: a loader's data has changed since an earlier start of the run.

    `loader` is the loader's number. `recorded` and `now` describe the data at that start and now, and
    differ: by name, for instance its length and a checksum of its values.
    """
    names = {*recorded, *now}
    what = ", ".join(sorted(name for name in names if recorded.get(name) != now.get(name)))
    return (
        f"lockstep: warning: loader {loader} has different data than this run had before ({what} differ): "
        "what a script draws before the run needs a seed of its own under python and torchrun"
    )
