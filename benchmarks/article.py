"""A hand-written DeepLabV3 script beside `examples/voc.py`, on the same images.

Claim: `examples/voc.py` takes less time than the hand-written script on 1, 2 and 4 ranks.

Measured: whole launches, from the command to its end, in turns: two epochs over images that
`examples/data.py voc` draws, with evaluation and a checkpoint per epoch; one thread per rank. With
fewer cores than ranks, ranks share cores in both.

A DDP script on Gloo can hang after its last line (torch 2.13: the reducer destroys the process group with
Python's lock held, and joins a thread that waits for this lock). A launch that has not ended after
`--patience` seconds is killed, counted and repeated.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from functools import partial
from pathlib import Path

from support import Claim, Report, in_turns, one_thread, options_parser, run_quietly, torchrun

HERE = Path(__file__).parent
EXAMPLES = HERE.parent / "examples"
LOCKSTEP, ARTICLE = "examples/voc.py", "by hand"


#: Launches in a row that may hang.
_TRIES = 10


def seconds(
    name: str, command: list[str], directory: Path, patience: float, hung: Counter[str]
) -> float:
    """Return how long `command` takes; launches that hang are counted in `hung` by `name`.

    Raises:
        SystemExit: if it fails, or hangs ten times in a row.
    """
    for _ in range(_TRIES):
        began = time.perf_counter()
        launch = subprocess.Popen(
            command,
            cwd=directory,
            env=one_thread(),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        try:
            _, told = launch.communicate(timeout=patience)
        except subprocess.TimeoutExpired:
            hung[name] += 1
            _end(launch)
            continue
        if launch.returncode:
            raise SystemExit(f"{' '.join(command)} failed:\n{told.decode()[-4000:]}")
        return time.perf_counter() - began
    raise SystemExit(f"{' '.join(command)} hung in {_TRIES} launches")


def _end(launch: subprocess.Popen[bytes]) -> None:
    """End a launcher and its workers; torchrun kills workers that ignore SIGTERM after 30 s."""
    os.killpg(launch.pid, signal.SIGTERM)
    launch.communicate(timeout=60)


def main() -> None:
    parser = options_parser(__doc__, pairs=3)
    parser.add_argument("--ranks", nargs="+", type=int, default=[1, 2, 4])
    parser.add_argument("--images", type=int, default=96)
    parser.add_argument("--backbone", default="mobilenet_v3_large")
    # The hand-written script has none. With a rank on each core they take time from the ranks.
    parser.add_argument(
        "--workers", type=int, default=0, help="loader processes of examples/voc.py"
    )
    parser.add_argument(
        "--patience", type=float, default=180.0, help="seconds after which a launch has hung"
    )
    options = parser.parse_args()
    hung: Counter[str] = Counter()
    report = Report("DeepLabV3 on VOC, whole launches", options.json)
    with tempfile.TemporaryDirectory() as place:
        directory = Path(place)
        draw = [sys.executable, str(EXAMPLES / "data.py"), "voc", place]
        run_quietly([*draw, "--images", str(options.images)])
        words = ["--data", place, "--backbone", options.backbone, "--epochs", "2", "--crop", "129"]
        for n in options.ranks:
            ours = [sys.executable, "-m", "lockstep", "run", "-n", str(n), "--threads", "1"]
            ours += [
                "--replicas",
                str(n),
            ]  # a batch per rank and step, as in the hand-written script
            ours += [str(EXAMPLES / "voc.py"), *words, "--workers", str(options.workers)]
            theirs = torchrun(n, HERE / "contestants" / "articles_voc.py", *words)
            commands = {LOCKSTEP: ours, ARTICLE: theirs}
            turns = {
                name: partial(seconds, name, command, directory, options.patience, hung)
                for name, command in commands.items()
            }
            rounds = in_turns(turns, options.pairs)
            claims = [Claim(ARTICLE, LOCKSTEP, 1.0, at_most=False)]
            heading = f"{options.backbone}, {n} rank{'s' * (n > 1)}"
            report.compare(heading, "s", rounds, reference=LOCKSTEP, claims=claims, digits=1)
        for name, launches in hung.items():
            print(f"- {name}: {launches} launches hung and were repeated")
    report.close()


if __name__ == "__main__":
    main()
