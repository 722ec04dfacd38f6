"""Select rules by command-line flags and by `[tool.lockstep.check]` of the nearest pyproject.toml."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from lockstep.errors import UsageError
from lockstep.tools.check.rules import RULES, SYNTAX, UNKNOWN


@dataclass(frozen=True)
class Selection:
    """Selection of rules by codes (`LS201`) or beginnings of codes (`LS2`) in `select` and `ignore`.

    A rule that is off by default runs only if `select` has its whole code or `ALL`; without `select` all
    other rules run. Error messages name `origin` as the source of the codes.

    Raises:
        UsageError: if no rule has one of the codes.
    """

    select: tuple[str, ...] | None = None
    ignore: tuple[str, ...] = ()
    origin: str = "the flags"

    def __post_init__(self) -> None:
        known = [*RULES, SYNTAX, UNKNOWN]
        for code in (*(self.select or ()), *self.ignore):
            if code != "ALL" and not (code and any(other.startswith(code) for other in known)):
                raise UsageError(
                    f"{self.origin}: no rule has the code {code!r}; expected one like LS201, or LS2",
                    hint="lockstep check --list shows all rules",
                )

    def has(self, code: str) -> bool:
        """Return whether the rule with this code runs."""
        selected = self.select is None or _named(code, self.select)
        default = code not in RULES or (RULES[code].default and selected)
        by_code = bool({"ALL", code}.intersection(self.select or ()))
        return (default or by_code) and not _named(code, self.ignore)


def _named(code: str, words: Iterable[str]) -> bool:
    return any(word == "ALL" or code.startswith(word) for word in words)


def of_file(path: Path, flags: Selection) -> Selection:
    """Return the selection of rules for the file `path`: `flags` override the nearest pyproject.toml.

    Raises:
        UsageError: if a pyproject.toml cannot be read, or has an invalid setting.
    """
    written = _above(path.resolve().parent)
    select = written.select if flags.select is None else flags.select
    return Selection(select, flags.ignore or written.ignore, written.origin)


@cache
def _above(directory: Path) -> Selection:
    file = directory / "pyproject.toml"
    if file.is_file():
        return _read(file)
    return Selection() if directory.parent == directory else _above(directory.parent)


def _read(file: Path) -> Selection:
    try:
        table = tomllib.loads(file.read_text()).get("tool", {}).get("lockstep", {}).get("check", {})
    except (OSError, ValueError) as error:
        raise UsageError(f"{file} cannot be read: {error}") from None
    origin = f"{file}, [tool.lockstep.check]"
    for key, value in table.items():
        if key not in ("select", "ignore"):
            raise UsageError(f"{origin}: no setting {key}; expected select or ignore")
        if not (isinstance(value, list) and all(isinstance(code, str) for code in value)):
            raise UsageError(f"{origin}: {key} is {value!r}; expected a list of codes")
    select = tuple(table["select"]) if "select" in table else None
    return Selection(select, tuple(table.get("ignore", ())), origin)
