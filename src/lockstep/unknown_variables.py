"""Warnings about environment variables that begin with `LOCKSTEP_` but that Lockstep does not read."""

from __future__ import annotations

from collections.abc import Mapping

from lockstep.errors import did_you_mean
from lockstep.settings import TABLE

_PREFIX = "LOCKSTEP_"
#: Variables that are no settings, without the prefix: of the rendezvous, of launchers and of their ranks.
_OTHERS = (
    *("ENVIRONMENT", "FAULTS", "INIT_METHOD", "INTERFACE", "JOIN_TIMEOUT", "PRELOAD", "PROCESSORS"),
    *(
        "REPLAY",
        "SLURM",
        "CORES",
        "DEVICE",
        "LAUNCH",
        "LAUNCHER",
        "LAUNCHER_PID",
        "LEFT_OUT",
        "LOG_DIR",
        "MEMORY",
    ),
    *("RENDEZVOUS_FILE", "SERVER", "SERVER_ROOT", "SLOT", "STORE", "TOKEN", "VISIBLE_DEVICES"),
)
#: Names of all variables that Lockstep reads.
KNOWN = frozenset(
    {one.variable for one in TABLE.values()} | {f"{_PREFIX}{name}" for name in _OTHERS}
)


def warnings(environ: Mapping[str, str]) -> list[str]:
    """Return one warning for each variable that begins with `LOCKSTEP_` and that Lockstep does not read."""
    known = [one.removeprefix(_PREFIX) for one in KNOWN]
    lines = []
    for name in sorted(name for name in environ if name.startswith(_PREFIX) and name not in KNOWN):
        # Compared without the prefix, which would make all names similar.
        hint = did_you_mean(name.removeprefix(_PREFIX), known, cutoff=0.7)
        meant = f"; {hint.replace('mean ', f'mean {_PREFIX}')}" if hint else ""
        lines.append(
            f"lockstep: warning: {name} is set, and Lockstep has no variable of this name{meant}"
        )
    return lines
