"""From the environment of a process to its world: the only place that reads worker identity."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping

from lockstep.errors import UsageError
from lockstep.world.environments import lockstep, single, torchrun
from lockstep.world.model import World

Detector = Callable[[Mapping[str, str]], World | None]

#: In order of precedence: the first that recognises its variables wins.
ENVIRONMENTS: dict[str, Detector] = {
    "lockstep": lockstep.detect,
    "torchrun": torchrun.detect,
    "single": single.detect,
}


def detect(environ: Mapping[str, str] | None = None) -> World:
    """Return the world that `environ` describes.

    `LOCKSTEP_ENVIRONMENT` names an environment and overrules the precedence.

    Args:
        environ: variables to read; the process's own by default.

    Raises:
        WorldError: if the variables of the environment contradict each other.
        UsageError: if `LOCKSTEP_ENVIRONMENT` names none, or one whose variables are absent.
    """
    environ = os.environ if environ is None else environ
    wanted = environ.get("LOCKSTEP_ENVIRONMENT")
    if wanted is not None:
        return _detect_wanted(wanted, environ)
    for detector in ENVIRONMENTS.values():
        world = detector(environ)
        if world is not None:
            return world
    raise AssertionError("the single environment always answers")


def _detect_wanted(wanted: str, environ: Mapping[str, str]) -> World:
    if wanted not in ENVIRONMENTS:
        raise UsageError(
            f"LOCKSTEP_ENVIRONMENT is {wanted!r}; expected one of {', '.join(ENVIRONMENTS)}",
            hint="unset LOCKSTEP_ENVIRONMENT to detect the environment",
        )
    world = ENVIRONMENTS[wanted](environ)
    if world is None:
        raise UsageError(
            f"LOCKSTEP_ENVIRONMENT is {wanted!r}, but the variables of {wanted} are not set",
            hint=f"start with {wanted}, or unset LOCKSTEP_ENVIRONMENT",
        )
    return world
