"""Entry point of the command `lockstep` and of `python -m lockstep`."""

import os
import sys


def main() -> int:
    """Run the command line and return its exit code."""
    _fix_hash_seed()
    from lockstep.cli import main as run_command

    return run_command()


def _fix_hash_seed() -> None:
    """Execute `lockstep run` again with `PYTHONHASHSEED=0`, unless the user has set this variable.

    Ranks are forked from this process. The hash seed decides the order of a set of strings, and so the
    result of a script that numbers words or classes by such a set.
    """
    words = sys.argv[1:]
    is_command = sys.orig_argv[-len(words) :] == words  # not a program that calls `main`
    if words[:1] == ["run"] and is_command and "PYTHONHASHSEED" not in os.environ:
        os.environ["PYTHONHASHSEED"] = "0"
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])  # noqa: S606 - this command


if __name__ == "__main__":
    sys.exit(main())
