"""`Given`: the settings that were given by flags."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from lockstep.settings import TABLE, write


class Given(Mapping[str, Any]):
    """The settings that a launch was given by flags, by their names; `None` counts as not given.

    Raises:
        UsageError: for a value that cannot work.
    """

    def __init__(self, **values: Any) -> None:
        self._values = {name: value for name, value in values.items() if value is not None}
        for name, value in self._values.items():
            TABLE[name].require(value, TABLE[name].option)

    def __getitem__(self, name: str) -> Any:
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __repr__(self) -> str:
        return f"Given({', '.join(f'{name}={value!r}' for name, value in self.items())})"

    def value(self, name: str, environ: Mapping[str, str]) -> Any:
        """Return what the flag says, or else the variable; `None` where neither does.

        Raises:
            UsageError: if the variable cannot be read, or its value not work.
        """
        return self.get(name) if name in self else TABLE[name].read(environ)

    def origin(self, name: str) -> str:
        """Return what the value of a setting comes from: the flag, or the variable."""
        return TABLE[name].option if name in self else TABLE[name].variable

    def variables(self) -> dict[str, str]:
        """Return the variables by which ranks are told; others keep what the user's shell says."""
        return {
            TABLE[name].variable: write(value)
            for name, value in self.items()
            if TABLE[name].forwarded
        }
