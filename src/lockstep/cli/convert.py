"""`lockstep convert`: convert a script for one device, or a DDP script, to a Lockstep script."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.cli.parser import Parser
from lockstep.errors import OutputError, UsageError

if TYPE_CHECKING:
    from lockstep.tools.convert.script import ConvertedScript

HELP = "turn a script for one device, or a DDP script, into a Lockstep script"
USAGE = "[-o OUT] SCRIPT"
EPILOG = """\
Questions that are left to you are comments `# lockstep: question: …` in the script, and listed at the
end. Exit codes: 0 converted; 1 converted, with questions left, or OUT cannot be written; 2 usage, or not
converted.
"""
EXAMPLES = {
    "lockstep convert train.py": "show what would change",
    "lockstep convert train.py -o train_ls.py": "write the converted script",
    "lockstep verify train_ls.py --layouts 1,2,3": "prove that it gives the same weights on every layout",
}


def add_flags(parser: Parser) -> None:
    """Add the flags of `lockstep convert` to its parser."""
    parser.add_argument("script", type=Path, metavar="SCRIPT", help="the script to convert")
    parser.add_argument(
        "-o",
        "--output",
        metavar="OUT",
        help="write the converted script to OUT, - for standard output (default: show a diff)",
    )
    parser.add_argument("--force", action="store_true", help="overwrite OUT, which may be SCRIPT")


def handle(options: argparse.Namespace) -> int:
    """Convert a script to Lockstep; print a diff, or write the result; return the exit code.

    The exit code is 1 if the conversion leaves questions to the user.
    """
    out = None if options.output in (None, "-") else Path(options.output)
    if out is not None and out.exists() and not options.force:
        raise UsageError(f"{out} exists", hint="--force overwrites it; without -o a diff is shown")
    from lockstep.tools.check import fix
    from lockstep.tools.convert.script import convert

    made = convert(options.script)
    if out is not None:
        _write(out, made)
    elif options.output == "-":
        print(made.text, end="")
    else:
        sys.stdout.write(fix.diff(options.script, made.module.text, made.text))
    _print_questions(options.script, options.output, made)
    return int(bool(made.questions))


def _write(out: Path, made: ConvertedScript) -> None:
    from lockstep.tools.check import fix

    try:
        if out.exists():
            fix.overwrite(out, made.text, made.module.encoding)
        else:
            out.write_bytes(made.text.encode(made.module.encoding))
    except OSError as error:
        raise OutputError(f"{out} cannot be written: {error.strerror}") from None


def _print_questions(script: Path, output: str | None, made: ConvertedScript) -> None:
    """Print the notes and open questions of the conversion `made` on standard error.

    `script` is the original file, `output` the argument of `-o`, or `None`. Unless a file was written,
    questions have line numbers of `script`.
    """
    is_file = output not in (None, "-")
    for note in made.notes:
        print(f"note: {note}", file=sys.stderr)
    for question in made.questions:
        place = f"{output}:{question.after}" if is_file else f"{script}:{question.before}"
        print(f"{place}: question: {question.text}", file=sys.stderr)
    count = len(made.questions)
    left = f"{count} question{'s' * (count != 1)} left" if count else "no questions left"
    effect = "would change (-o OUT writes them)" if output is None else "changed"
    print(f"lockstep: {script}: {made.changed} lines {effect}, {left}", file=sys.stderr)
