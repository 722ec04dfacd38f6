"""`lockstep completion`: print the completion script for a shell."""

from __future__ import annotations

import argparse

from lockstep.cli.parser import Parser
from lockstep.settings import TABLE

HELP = "print the completion script for bash, zsh or fish"
USAGE = "SHELL"
EPILOG = """\
The script lists the verbs, flags and values of this version: a shell that reads it starts no Python to
complete a word. Exit codes: 0 printed, 2 usage.
"""
EXAMPLES = {
    'eval "$(lockstep completion bash)"': "in ~/.bashrc",
    'eval "$(lockstep completion zsh)"': "in ~/.zshrc, after compinit",
    "lockstep completion fish | source": "in ~/.config/fish/config.fish",
}
#: Placeholders in the help whose value is a file, or a directory.
_FILES = ("SCRIPT", "ARG", "FILE", "OUT", "PATH")
_DIRECTORIES = ("DIR", "RUN_DIR")


def add_flags(parser: Parser) -> None:
    """Add the flags of `lockstep completion` to its parser."""
    parser.add_argument(
        "shell", choices=("bash", "zsh", "fish"), metavar="SHELL", help="bash, zsh or fish"
    )


def handle(options: argparse.Namespace) -> int:
    """Print the completion script for a shell; return the exit code."""
    import shtab

    whole: Parser = options.parser
    for action in (one for parser in (whole, *whole.verbs.values()) for one in parser._actions):
        if action.metavar in (*_FILES, *_DIRECTORIES):
            kind = shtab.DIRECTORY if action.metavar in _DIRECTORIES else shtab.FILE
            action.complete = kind  # type: ignore[attr-defined]
        elif action.dest in TABLE and not action.choices:
            action.choices = TABLE[action.dest].choices or None
    # A closed pipe shows only when its buffer, of 128 KiB since Python 3.14, is written.
    print(shtab.complete(whole, shell=options.shell), flush=True)
    return 0
