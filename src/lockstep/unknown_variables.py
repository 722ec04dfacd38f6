"""Warnings about variables whose names begin with `LOCKSTEP_` and that nothing reads."""

from __future__ import annotations

from collections.abc import Mapping

from lockstep.errors import did_you_mean
from lockstep.settings import TABLE

_PREFIX = "LOCKSTEP_"
#: Those that are no settings: of the rendezvous, of launchers, and those that launchers give their ranks.
_OTHERS = (
    *("ENVIRONMENT", "FAULTS", "INIT_METHOD", "INTERFACE", "JOIN_TIMEOUT", "PRELOAD", "PROCESSORS"),
    *("SLURM", "CORES", "DEVICE", "LAUNCH", "LAUNCHER", "LAUNCHER_PID", "LOG_DIR", "MEMORY"),
    *("RENDEZVOUS_FILE", "SERVER", "SERVER_ROOT", "SLOT", "STORE", "TOKEN", "VISIBLE_DEVICES"),
)
#: All variables that Lockstep reads.
KNOWN = frozenset(
    {one.variable for one in TABLE.values()} | {f"{_PREFIX}{name}" for name in _OTHERS}
)


def warnings(environ: Mapping[str, str]) -> list[str]:
    """Return a line for each variable with the prefix that Lockstep does not read."""
    known = [one.removeprefix(_PREFIX) for one in KNOWN]
    lines = []
    for name in sorted(name for name in environ if name.startswith(_PREFIX) and name not in KNOWN):
        # Without the prefix, by which all of them are alike.
        hint = did_you_mean(name.removeprefix(_PREFIX), known, cutoff=0.7)
        meant = f"; {hint.replace('mean ', f'mean {_PREFIX}')}" if hint else ""
        lines.append(
            f"lockstep: warning: {name} is set, and Lockstep has no variable of this name{meant}"
        )
    return lines
