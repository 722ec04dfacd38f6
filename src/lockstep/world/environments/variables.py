"""Functions that read integers from environment variables, with an error that names the variable."""

from __future__ import annotations

from collections.abc import Mapping

from lockstep.errors import WorldError


def integer(environ: Mapping[str, str], name: str, default: int | None = None) -> int:
    """Return variable `name` in `environ` as an integer; `default` if the variable is not set.

    Raises:
        WorldError: if the variable is not set and has no default, or is not an integer.
    """
    text = environ.get(name)
    if text is None:
        if default is None:
            raise WorldError(
                f"{name} is not set, though its sister variables are",
                hint="let one launcher set all variables, or none",
            )
        return default
    try:
        return int(text)
    except ValueError:
        raise WorldError(f"{name} is {text!r}; expected an integer") from None


def master(environ: Mapping[str, str]) -> tuple[str | None, int | None]:
    """Return `MASTER_ADDR` and `MASTER_PORT`, each `None` where it is not set.

    Raises:
        WorldError: if `MASTER_PORT` is not a valid port.
    """
    port = integer(environ, "MASTER_PORT", default=0)
    if not 0 <= port < 1 << 16:
        raise WorldError(f"MASTER_PORT is {port}; expected a port between 1 and 65535")
    return environ.get("MASTER_ADDR") or None, port or None
