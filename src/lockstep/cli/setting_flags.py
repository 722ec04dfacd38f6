"""Command-line flags made from the table of settings, for all commands that start runs."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from typing import Any

from lockstep.settings import TABLE, Setting, boolean, names


def add_group(group: argparse._ActionsContainer, named: str) -> None:
    """Add the flags of a group of settings, such as `training`, to a group of the parser.

    `named` is the name of the group of settings.
    """
    add(group, *(name for name, one in TABLE.items() if one.flag and one.flag[0] == named))


#: Names of the settings that have flags in every command that starts runs.
SHARED = (
    *("replicas", "threads", "devices"),
    *(name for name, one in TABLE.items() if one.flag and one.flag[0] == "training"),
)


def add(group: argparse._ActionsContainer, *chosen: str, **changed: Any) -> None:
    """Add the flags of the settings `chosen` to a group; `changed` overrides keywords of `add_argument`."""
    for name in chosen:
        group.add_argument(TABLE[name].option, **{**_keywords(TABLE[name]), **changed})


def _keywords(setting: Setting) -> dict[str, Any]:
    """Return the keywords of `add_argument` for a setting's flag, whose default is `None`."""
    assert setting.flag is not None
    choices = f"; one of {', '.join(setting.choices)}" if setting.choices else ""
    default = "" if setting.parse is boolean else f" (default: {setting.shown_default})"
    text = f"{setting.help}{choices}{default}".replace("`", "")
    known: dict[str, Any] = {"dest": setting.name, "default": None, "help": text}
    if setting.parse is boolean:
        both = argparse.BooleanOptionalAction if setting.negatable else "store_true"
        return known | {"action": both}
    metavar = setting.flag[1].partition(" ")[2] or None
    known |= {"metavar": metavar} if metavar else {"choices": setting.choices or None}
    if setting.parse is names:
        return known | {"action": "append"}
    return known | {"type": setting.parse}


def add_training(parser: argparse.ArgumentParser) -> None:
    """Add the flags of all training settings to `parser`, in an argument group `training`."""
    title = "training", "Each flag wins over the argument of lockstep.Run."
    add_group(parser.add_argument_group(*title), "training")


def given(options: argparse.Namespace, chosen: Iterable[str]) -> dict[str, Any]:
    """Return the values of those `chosen` settings whose flags were given."""
    found = {name: getattr(options, name) for name in chosen}
    several = {name: tuple(value) for name, value in found.items() if isinstance(value, list)}
    return {name: value for name, value in (found | several).items() if value is not None}


def words(options: argparse.Namespace, chosen: Iterable[str]) -> list[str]:
    """Return the flags that the user gave for settings in `chosen`, as words of a command line.

    The words are for another `lockstep` process, which gets the same settings by them.
    """
    found = []
    for name, value in given(options, chosen).items():
        option = TABLE[name].option
        if isinstance(value, bool):
            found.append(option if value else f"--no-{option.removeprefix('--')}")
        else:
            found += [option, str(value)]
    return found
