"""The articles' benchmark: their DeepLabV3 script beside `examples/voc.py`, on the same images.

Claim: `examples/voc.py` takes less time than the articles' script on 1, 2 and 4 ranks.

Measured: whole launches, from the command to its end, in turns: two epochs over images that
`examples/data.py voc` draws, with evaluation and a checkpoint per epoch; one thread per rank. With
fewer cores than ranks, ranks share cores in both.
"""

from __future__ import annotations

import sys
import tempfile
import time
from functools import partial
from pathlib import Path

from support import Claim, Report, in_turns, one_thread, options_parser, run_quietly, torchrun

HERE = Path(__file__).parent
EXAMPLES = HERE.parent / "examples"
LOCKSTEP, ARTICLE = "examples/voc.py", "the articles' script"


def seconds(command: list[str], directory: Path) -> float:
    """Return how long `command` takes."""
    began = time.perf_counter()
    run_quietly(command, cwd=directory, env=one_thread(), timeout=1800)
    return time.perf_counter() - began


def main() -> None:
    parser = options_parser(__doc__, pairs=3)
    parser.add_argument("--ranks", nargs="+", type=int, default=[1, 2, 4])
    parser.add_argument("--images", type=int, default=96)
    parser.add_argument("--backbone", default="mobilenet_v3_large")
    parser.add_argument(
        "--workers", type=int, default=1, help="loader processes of examples/voc.py"
    )
    options = parser.parse_args()
    report = Report("DeepLabV3 on VOC, whole launches", options.json)
    with tempfile.TemporaryDirectory() as place:
        directory = Path(place)
        draw = [sys.executable, str(EXAMPLES / "data.py"), "voc", place]
        run_quietly([*draw, "--images", str(options.images)])
        words = ["--data", place, "--backbone", options.backbone, "--epochs", "2", "--crop", "129"]
        for n in options.ranks:
            ours = [sys.executable, "-m", "lockstep", "run", "-n", str(n), "--threads", "1"]
            ours += ["--replicas", str(n)]  # a batch per rank and step, as in the articles' script
            ours += [str(EXAMPLES / "voc.py"), *words, "--workers", str(options.workers)]
            theirs = torchrun(n, HERE / "contestants" / "articles_voc.py", *words)
            commands = {LOCKSTEP: ours, ARTICLE: theirs}
            turns = {
                name: partial(seconds, command, directory) for name, command in commands.items()
            }
            rounds = in_turns(turns, options.pairs)
            claims = [Claim(ARTICLE, LOCKSTEP, 1.0, at_most=False)]
            heading = f"{options.backbone}, {n} rank{'s' * (n > 1)}"
            report.compare(heading, "s", rounds, reference=LOCKSTEP, claims=claims, digits=1)
    report.close()


if __name__ == "__main__":
    main()
