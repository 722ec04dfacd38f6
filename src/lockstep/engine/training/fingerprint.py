"""Identity of a run: its script, and all settings that the result depends on."""

from __future__ import annotations

from typing import Any

import torch

from lockstep.settings import TABLE, Settings
from lockstep.state.files.run_file import Identity, script_and_arguments, versions
from lockstep.version import __version__


def describe(settings: Settings, *, replicas: int, threads: int, device: str) -> Identity:
    """Return the identity of a run: everything that its result depends on.

    This includes the script, settings, and versions of packages.
    """
    script, arguments = script_and_arguments()
    return Identity(
        name=settings.name,
        script=script,
        arguments=arguments,
        seed=settings.seed,
        replicas=replicas,
        threads=threads,
        precision=settings.precision,
        method=_method(settings),
        device=device,
        versions=versions(torch.__version__, __version__),
    )


def reproduced(settings: Settings, *, replicas: int, threads: int) -> dict[str, Any]:
    """Return the settings, by name, with which another run computes the same result.

    The values can be written as JSON.
    """
    names = ["seed", "precision", "exact", "hash_every"]
    names += [one.name for one in TABLE.values() if one.changes_result and one.name != "exchange"]
    values = {name: getattr(settings, name) for name in names} | {
        "replicas": replicas,
        "threads": threads,
    }
    return {name: value for name, value in values.items() if value is not None}


def _method(settings: Settings) -> str:
    """Return the settings that change the result, as text; `exact` if all layouts give the same bits."""
    if settings.exact:  # with a staleness the bits are the same everywhere, but others
        return f"exact, staleness={settings.staleness}" if settings.staleness else "exact"
    named = {one.name: getattr(settings, one.name) for one in TABLE.values() if one.changes_result}
    return ", ".join(f"{name}={value}" for name, value in named.items() if value is not None)
