"""The command `lockstep`, also as `python -m lockstep`."""

import os
import sys


def main() -> int:
    """Run the command line and return its exit code."""
    _fix_hash_seed()
    from lockstep.cli import main as run_command

    return run_command()


def _fix_hash_seed() -> None:
    """Start `lockstep run` again with `PYTHONHASHSEED=0`, unless the user has set it.

    Ranks are forked from this process. The order of a set of strings follows from the seed, and the result
    of a script that numbers words or classes by such a set follows from that order.
    """
    words = sys.argv[1:]
    is_command = sys.orig_argv[-len(words) :] == words  # and not called by another program
    if words[:1] == ["run"] and is_command and "PYTHONHASHSEED" not in os.environ:
        os.environ["PYTHONHASHSEED"] = "0"
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])  # noqa: S606 - this command


if __name__ == "__main__":
    sys.exit(main())
