"""Try the wheel that `make dist` has built: the environment with it is the argument."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import torch

DIGITS = Path(__file__).parents[1] / "examples/digits.py"


def main(environment: Path) -> None:
    """Run the wheel's command, and train on two ranks; an assertion says what is wrong."""
    (packages,) = environment.glob("lib/python*/site-packages")
    # A directory in a .pth file: its own .pth files, such as that of an editable Lockstep, are not read.
    (packages / "dependencies.pth").write_text(f"{Path(torch.__file__).parents[1]}\n")
    assert (packages / "lockstep/py.typed").exists(), "the wheel has no py.typed"
    place = "import lockstep; print(lockstep.__file__)"
    assert _output(environment, "python", "-c", place).startswith(str(packages)), "not the wheel's"
    assert "lockstep run" in _output(environment, "lockstep", "--help")
    arguments = ("run", "-n", "2", "--run-dir", "run", str(DIGITS), "--epochs", "1")
    digests = [
        line
        for line in _output(environment, "lockstep", *arguments).splitlines()
        if "digest=" in line
    ]
    assert len(digests) == 1, "a run ends with one line that has its digest"
    sys.stdout.write(f"the wheel trains: {digests[0]}\n")


def _output(environment: Path, command: str, *arguments: str) -> str:
    done = subprocess.run(
        [environment / "bin" / command, *arguments],
        cwd=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
