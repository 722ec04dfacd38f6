"""The manual's page of commands: every flag of every verb, from the parsers of the command line.

`python -m tests.flags_page` writes it.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator

from lockstep import cli
from lockstep.cli.parser import Parser
from tests.ports import ROOT

PAGE = ROOT / "docs/manual/commands.md"
#: The guide of each verb.
_GUIDES = {
    "run": "launching.md",
    "branch": "replay.md#branch",
    "diff": "replay.md#diff",
    "attest": "replay.md#attest",
    "submit": "slurm.md#lockstep-submit",
    "export": "checkpoints.md#export",
    "completion": "install.md#complete-commands-in-the-shell",
}
#: Code in the text of the help: what stands in backticks already, flags, and layouts in quotes.
_CODE = re.compile(r"`[^`]+`|(?<![\w-])--?[a-zA-Z][\w-]*(=[\w=-]+)?|\"[^\"]+\"|\w+_\*")
_HEAD = """\
# Commands

Every flag of every command, as `lockstep COMMAND --help` prints it; `python -m tests.flags_page` writes
this page. Flags of [settings](settings.md) have an environment variable, too.

| command | what it does |
| --- | --- |
"""


def written() -> str:
    """Return the page."""
    parser = cli.whole_parser()
    seen: dict[tuple[str, ...], str] = {}
    sections = [line for name, verb in parser.verbs.items() for line in _verb(name, verb, seen)]
    return _HEAD + "\n".join([*_overview(parser), *sections])


def _overview(parser: Parser) -> Iterator[str]:
    subparsers = next(
        one for one in parser._actions if one.dest == argparse.SUPPRESS and one.choices
    )
    for verb in subparsers._get_subactions():
        yield f"| [`lockstep {verb.dest}`](#lockstep-{verb.dest}) | {verb.help} |"
    yield ""


def _verb(name: str, parser: Parser, seen: dict[tuple[str, ...], str]) -> Iterator[str]:
    """Yield the section of a verb; a group that an earlier verb has, too, is a link to it."""
    guide = _GUIDES.get(name, f"{name}.md")
    yield f"## lockstep {name}\n\n`{parser.usage}` ([guide]({guide}))\n"
    for group in parser._action_groups:
        rows = tuple(_rows(parser, group))
        if rows in seen:
            yield f"**{group.title}**: as in [`lockstep {seen[rows]}`](#lockstep-{seen[rows]}).\n"
        elif rows:
            about = [f"{_text(group.description)}\n"] if group.description else []
            yield from (
                f"**{group.title}**\n",
                *about,
                f"| {_kind(group)} | meaning |",
                "| --- | --- |",
                *rows,
                "",
            )
            seen[rows] = name
    yield f"{_text(parser.epilog or '').strip()}\n\n```bash"
    yield (
        "\n\n".join(f"# {what}\n{command}" for command, what in parser.examples.items()) + "\n```\n"
    )


def _rows(parser: Parser, group: argparse._ArgumentGroup) -> Iterator[str]:
    for action in group._group_actions:
        if action.help != argparse.SUPPRESS and not isinstance(action, argparse._HelpAction):
            told = _text(parser._get_formatter()._expand_help(action))
            yield f"| {_spelled(action)} | {told} |"


def _kind(group: argparse._ArgumentGroup) -> str:
    return "flag" if group._group_actions[0].option_strings else "argument"


def _text(told: str) -> str:
    return _CODE.sub(lambda found: found[0] if found[0][0] == "`" else f"`{found[0]}`", told)


def _spelled(action: argparse.Action) -> str:
    """Return how a flag is given: each spelling, and at the last one its value."""
    value = action.metavar or "{" + ",".join(map(str, action.choices or ())) + "}"
    takes_value = action.nargs != 0 and not isinstance(action, argparse.BooleanOptionalAction)
    if not action.option_strings:
        return f"`{value}`"
    *others, last = action.option_strings
    return ", ".join(f"`{one}`" for one in (*others, f"{last} {value}" if takes_value else last))


if __name__ == "__main__":
    PAGE.write_text(written())
