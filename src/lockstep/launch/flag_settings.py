"""`FlagSettings`: the settings that a launch has from flags."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lockstep.settings import TABLE, write


class FlagSettings(dict[str, Any]):
    """The settings that a launch has from flags, by their names; `None` counts as not given.

    Raises:
        UsageError: for a value that cannot work.
    """

    def __init__(self, **values: Any) -> None:
        super().__init__({name: value for name, value in values.items() if value is not None})
        for name, value in self.items():
            TABLE[name].require(value, TABLE[name].option)

    def value(self, name: str, environ: Mapping[str, str]) -> Any:
        """Return the value of the flag, or else of the variable; `None` where neither is given.

        Raises:
            UsageError: if the variable cannot be read, or its value cannot work.
        """
        return self.get(name) if name in self else TABLE[name].read(environ)

    def value_or_default(self, name: str, environ: Mapping[str, str]) -> Any:
        """Return the value of the flag, of the variable, or the default.

        Raises:
            UsageError: if the variable cannot be read, or its value cannot work.
        """
        value = self.value(name, environ)
        return TABLE[name].default if value is None else value

    def origin(self, name: str) -> str:
        """Return the flag or the variable that the value of a setting comes from."""
        return TABLE[name].option if name in self else TABLE[name].variable

    def variables(self) -> dict[str, str]:
        """Return the variables that forward the flags to ranks; others stay as in the user's shell."""
        return {
            TABLE[name].variable: write(value)
            for name, value in self.items()
            if TABLE[name].forwarded
        }
