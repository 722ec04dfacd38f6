"""`FlagSettings`: settings given by command-line flags, with the environment as fallback."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lockstep.settings import TABLE, write


class FlagSettings(dict[str, Any]):
    """Dictionary of settings given by command-line flags, by name; `None` counts as not given.

    Raises:
        UsageError: for an invalid value.
    """

    def __init__(self, **values: Any) -> None:
        super().__init__({name: value for name, value in values.items() if value is not None})
        for name, value in self.items():
            TABLE[name].require(value, TABLE[name].option)

    def value(self, name: str, environ: Mapping[str, str]) -> Any:
        """Return a setting's value from its flag or environment variable; `None` if neither is given.

        Raises:
            UsageError: if the variable's value is invalid.
        """
        return self.get(name) if name in self else TABLE[name].read(environ)

    def value_or_default(self, name: str, environ: Mapping[str, str]) -> Any:
        """Return a setting's value from its flag, its environment variable, or the default.

        Raises:
            UsageError: if the variable's value is invalid.
        """
        value = self.value(name, environ)
        return TABLE[name].default if value is None else value

    def origin(self, name: str) -> str:
        """Return the name of the flag or environment variable that gives a setting's value."""
        return TABLE[name].option if name in self else TABLE[name].variable

    def variables(self) -> dict[str, str]:
        """Return environment variables that pass the settings from flags on to the ranks."""
        return {
            TABLE[name].variable: write(value)
            for name, value in self.items()
            if TABLE[name].forwarded
        }
