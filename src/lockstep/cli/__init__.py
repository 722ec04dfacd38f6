"""The command line `lockstep`: one file for each command, which parses flags and calls the library."""

from __future__ import annotations

import argparse
import atexit
import contextlib
import importlib
import os
import select
import signal
import sys
from collections.abc import Sequence
from types import FrameType
from typing import Any, NoReturn

from lockstep import unknown_variables as variables
from lockstep.cli import torchrun, verify
from lockstep.cli.parser import Parser
from lockstep.errors import LockstepError, UsageError
from lockstep.version import __version__

_EXAMPLES = {
    "lockstep run -n 2 train.py": "train on two ranks of this machine",
    "lockstep convert train.py": "show what a script for one device needs",
    "lockstep verify train.py --layouts 1,2": "prove that 1 and 2 ranks give the same weights",
}


#: Commands; each has a module of its name, with HELP, USAGE, EPILOG, EXAMPLES, `add_flags` and `handle`.
_VERBS = (
    *("run", "submit", "verify", "check", "convert", "doctor"),
    *("replay", "diff", "attest", "branch", "bench", "export", "report", "watch", "completion"),
)
#: Commands that start runs.
_STARTING = ("run", "submit", "verify", "bench", "replay", "diff", "attest", "branch")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv`, by default that of this process; return the exit code."""
    if argv is None:
        _end_as_exceptions_do()
    try:
        given = torchrun.with_environment(sys.argv[1:] if argv is None else argv, os.environ)
        options = parse(given)
        for line in variables.warnings(os.environ) if given[:1] and given[0] in _STARTING else ():
            print(line, file=sys.stderr)
        code: int = options.handler(options)
    except LockstepError as error:
        code = _print_error(error)
    except KeyboardInterrupt:
        print("lockstep: stopped by SIGINT", file=sys.stderr)
        code = 130
    except BrokenPipeError:
        poll = select.poll()
        poll.register(sys.stdout, 0)
        if not poll.poll(0):  # stdout is not closed: another pipe is broken
            raise
        code = 128 + signal.SIGPIPE
    finally:
        _flush()
    if argv is None and "torch" in sys.modules:
        _leave(code)
    return code


def parse(given: Sequence[str]) -> argparse.Namespace:
    """Parse the arguments after `lockstep`; attribute `handler` of the result is the command's function.

    Raises:
        UsageError: if the arguments are invalid.
    """
    name, words, script_args = given[0] if given else "", list(given), []
    parser = whole_parser(name if name in _STARTING else None)
    verb = parser.verbs.get(name)
    if verb is not None and verb.takes_script and "--" in words:
        # argparse gets only the words before `--`, so that it can parse options after SCRIPT.
        cut = words.index("--")
        words, script_args = words[:cut], words[cut + 1 :]
        verb.takes_script = False
    if name == "verify":
        words = verify.one_layout_each(words)
    return parser.parse_args(words, argparse.Namespace(script_args=script_args, words=given))


def _end_as_exceptions_do() -> None:
    """Make SIGTERM and SIGHUP raise `SystemExit`, so that commands stop their child processes."""

    def end(signum: int, _frame: FrameType | None) -> NoReturn:
        raise SystemExit(128 + signum)

    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) == signal.SIG_DFL:  # under nohup SIGHUP is ignored
            signal.signal(number, end)


def whole_parser(only: str | None = None) -> Parser:
    """Return the parser of `lockstep`, with a sub-parser for each command.

    If `only` names a command, only its sub-parser has flags, so that modules of other commands are not
    imported.
    """
    parser = Parser(
        prog="lockstep",
        description="Train PyTorch models on any number of devices, with the same result on each.",
        epilog="lockstep COMMAND --help shows the options of a command.",
        examples=_EXAMPLES,
    )
    parser.set_defaults(handler=lambda _: print(parser.format_help(), end="") or 0, parser=parser)
    parser.add_argument("--version", action="version", version=f"lockstep {__version__}")
    subparsers = parser.add_subparsers(metavar="COMMAND")
    for name in _VERBS:
        verb: Any = importlib.import_module(f"lockstep.cli.{name}")
        words = {"help": verb.HELP, "usage": f"lockstep {name} {verb.USAGE}", "epilog": verb.EPILOG}
        own = subparsers.add_parser(name, examples=verb.EXAMPLES, **words)
        own.set_defaults(handler=verb.handle)
        if only in (None, name):
            verb.add_flags(own)
    return parser


def _print_error(error: LockstepError) -> int:
    with contextlib.suppress(OSError):
        print(f"lockstep: error: {error.message}", file=sys.stderr)
        if error.hint:
            print(f"hint: {error.hint}", file=sys.stderr)
        if isinstance(error, UsageError) and (words := torchrun.words(os.environ)):
            print(
                f"note: PET_* variables of the environment say {' '.join(words)}", file=sys.stderr
            )
    return error.exit_code


def _flush() -> None:
    """Flush standard output; ignore an error if its reader has closed the pipe, as `head` does."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _leave(code: int) -> NoReturn:
    """Run the `atexit` functions and exit with `code`, without the teardown of modules.

    The teardown takes 0.3 s if torch is imported.
    """
    atexit._run_exitfuncs()
    _flush()
    os._exit(code)
