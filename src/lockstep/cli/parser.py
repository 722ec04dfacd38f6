"""`Parser`: an `argparse` parser with Lockstep's errors, spelling suggestions and examples."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from lockstep.errors import UsageError, did_you_mean

_CHOICE = re.compile(r"invalid choice: '(?P<word>.*)' \(choose from (?P<choices>.*)\)")

#: Function that returns a hint for an error, from the parsed options and the arguments that are unknown.
Advice = Callable[[argparse.Namespace, Sequence[str]], str]


#: Flags of other launchers for the number of ranks, with Lockstep's flag.
RANKS = dict.fromkeys(("--ranks", "--np", "--nproc", "--nprocs", "--num-processes"), "-n")


def of_script(words: Sequence[str]) -> tuple[str, ...]:
    """Return the script's arguments: `words`, which follow SCRIPT, without a leading `--`."""
    return tuple(words[1:] if words[:1] == ["--"] else words)


class Parser(argparse.ArgumentParser):
    """An argument parser that accepts underscores in flags, and raises `UsageError` instead of exiting.

    Args:
        examples: example commands with a description, shown at the end of the help.
        given: arguments of `argparse.ArgumentParser`.

    Attributes:
        advice: function that returns a hint about unknown arguments, besides a spelling suggestion.
        synonyms: maps flags of other programs to this parser's equivalent flags.
        takes_script: whether unknown arguments at the end of the command line are the script's, or all
            arguments after `--`.
        abbreviated: destinations of the flags that may be abbreviated, as in torchrun.
    """

    def __init__(self, *, examples: Mapping[str, str] | None = None, **given: Any) -> None:
        super().__init__(**{**given, "allow_abbrev": True})  # `_get_option_tuples` decides
        self.examples = examples or {}
        self.advice: Advice | None = None
        self.synonyms: dict[str, str] = {}
        self.takes_script = False
        self.abbreviated: set[str] = set()

    @property
    def verbs(self) -> Mapping[str, Parser]:
        """Sub-parsers of the commands, such as `run`, by name."""
        found = [one for one in self._actions if isinstance(one, argparse._SubParsersAction)]
        return found[0].choices if found else {}

    def format_help(self) -> str:
        """Return the help text, with the examples at its end."""
        lines = [f"  # {what}\n  {command}\n" for command, what in self.examples.items()]
        return super().format_help() + "\nexamples:\n" * bool(lines) + "".join(lines)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse `args`; return the options and an empty list.

        For a command that takes a script, unknown arguments at the end become the option `script_args`.
        Other unknown arguments raise a `UsageError`.
        """
        options, left = super().parse_known_args(args, namespace)
        if left and self._are_of_script(args, left):
            options.script_args = left
        elif left:
            advice = None if self.advice is None else self.advice(options, left)
            hints = filter(None, (self._meant(left[0]), advice))
            raise UsageError(
                f"{self.prog} takes no {' '.join(left)}",
                hint=" Otherwise: ".join(hints) or self._see,
            )
        return options, []

    def error(self, message: str) -> NoReturn:
        """Raise `UsageError` in place of an exit, with a spelling suggestion as hint."""
        found = _CHOICE.search(message)
        choices = re.findall(r"[\w-]+", found["choices"]) if found else []
        hint = did_you_mean(found["word"], choices, cutoff=0.5) if found else None
        if found and hint is None and found["word"].endswith(".py"):
            hint = f"did you mean {self.prog} run {found['word']}?"
        raise UsageError(message, hint=hint or self._see)

    def add_script(self, *, optional: bool = False) -> None:
        """Add the positional arguments SCRIPT and ARG; ARG takes all words after SCRIPT."""
        what, nargs = "the script to run, or with -m a module", "?" if optional else None
        self.add_argument("target", metavar="SCRIPT", nargs=nargs, help=what)
        rest = self.add_argument(
            "args", metavar="ARG", nargs=argparse.REMAINDER, help="arguments for it"
        )
        rest.required = False  # argparse would name it where SCRIPT is missing

    def _are_of_script(self, words: Sequence[str], left: Sequence[str]) -> bool:
        """Return whether the unknown arguments `left`, at the end of `words`, are meant for the script."""
        known = [*self.synonyms, *self._option_string_actions]
        likely = left[0].startswith("-") and did_you_mean(left[0], known, cutoff=0.7)
        ends = list(words[-len(left) :]) == list(left)
        return self.takes_script and ends and not likely

    @property
    def _see(self) -> str:
        return f"see {self.prog} --help"

    def _meant(self, word: str) -> str | None:
        flag = word.partition("=")[0].replace("_", "-")
        if flag in self.synonyms:
            return f"did you mean {self.synonyms[flag]}?"
        known = [one for one in self._option_string_actions if one.startswith("--")]
        return did_you_mean(flag, known, cutoff=0.7)

    def _get_option_tuples(self, option_string: str) -> Any:
        """Return the flags that `option_string` may mean.

        A flag may be written with underscores for dashes, and some flags may be abbreviated.
        """
        if not option_string.startswith("--"):
            return super()._get_option_tuples(option_string)
        flag, equals, value = option_string.partition("=")
        flag = flag.replace("_", "-")
        found = super()._get_option_tuples(flag + equals + value)
        whole = [one for one in found if flag in one[0].option_strings]
        return whole or [one for one in found if one[0].dest in self.abbreviated]
