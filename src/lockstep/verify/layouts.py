"""Which layouts a script is verified on."""

from __future__ import annotations

from dataclasses import dataclass

from lockstep.errors import UsageError


@dataclass(frozen=True, slots=True)
class Layout:
    """One layout.

    Attributes:
        name: as the user wrote it.
        ranks: number of ranks.
    """

    name: str
    ranks: int

    def __str__(self) -> str:
        return f"{self.ranks} rank{'s' if self.ranks > 1 else ''}"


def parse(text: str) -> list[Layout]:
    """Return the layouts in a list such as `1,2,4`.

    Raises:
        UsageError: if one of them is no number of ranks, or there are fewer than two.
    """
    layouts = [_parse_one(word.strip()) for word in text.split(",")]
    if len(layouts) < 2:
        raise UsageError(
            f"--layouts {text} names one layout; expected at least two to compare",
            hint="for example --layouts 1,2,4; a layout may be named twice",
        )
    return layouts


def _parse_one(word: str) -> Layout:
    if not word.isdecimal() or int(word) < 1:
        raise UsageError(
            f"the layout {word!r} is no number of ranks; expected an integer of at least 1",
            hint="for example --layouts 1,2,4",
        )
    return Layout(word, int(word))
