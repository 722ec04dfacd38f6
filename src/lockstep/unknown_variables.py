"""Variables of the environment whose names begin with `LOCKSTEP_`: those that nothing reads are named."""

from __future__ import annotations

from collections.abc import Mapping

from lockstep.errors import did_you_mean
from lockstep.settings import TABLE

_PREFIX = "LOCKSTEP_"
#: Those that are no settings: of the rendezvous, of launchers, and those that launchers give their ranks.
_OTHERS = (
    *("ENVIRONMENT", "FAULTS", "INIT_METHOD", "INTERFACE", "JOIN_TIMEOUT", "PRELOAD", "PROCESSORS"),
    *(
        "SLURM",
        "CORES",
        "DEVICE",
        "LAUNCH",
        "LAUNCHER",
        "LAUNCHER_PID",
        "LOG_DIR",
        "MEMORY",
        "SERVER",
    ),
    *("RENDEZVOUS_FILE", "SERVER_ROOT", "SLOT", "STORE", "TOKEN", "VISIBLE_DEVICES"),
)
#: All variables that Lockstep reads.
KNOWN = frozenset(
    {one.variable for one in TABLE.values()} | {f"{_PREFIX}{name}" for name in _OTHERS}
)


def warnings(environ: Mapping[str, str]) -> list[str]:
    """Return a line for each variable with the prefix that Lockstep does not read."""
    unknown = sorted(name for name in environ if name.startswith(_PREFIX) and name not in KNOWN)
    return [
        f"lockstep: warning: {name} is set, and Lockstep has no variable of this name{_meant(name)}"
        for name in unknown
    ]


def _meant(name: str) -> str:
    # Without the prefix, by which all of them are alike.
    known = [one.removeprefix(_PREFIX) for one in KNOWN]
    hint = did_you_mean(name.removeprefix(_PREFIX), known, cutoff=0.7)
    return f"; {hint.replace('mean ', f'mean {_PREFIX}')}" if hint else ""
