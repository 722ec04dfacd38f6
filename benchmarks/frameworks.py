"""Time of an update by Trainer, Accelerate and Lightning: plain, and through a run of Lockstep.

Claims: on 2 ranks an update through a run takes at most as long as by the plain framework.

Measured: `contestants/in_framework.py`, a GPT-2 with 4 layers of 128 and a global batch of 16 sequences of
64 tokens, one thread per rank. A run has 2 replicas, so that 1 rank computes two microbatches where the
plain framework computes one. Each turn is a fresh launch, by torchrun or by `lockstep run`; its figure is
the median of the updates of one epoch, on the slower rank. Contestants take turns.
"""

from __future__ import annotations

import functools
import re
import sys
import tempfile
from pathlib import Path

from support import Claim, Report, in_turns, one_thread, options_parser, run_quietly, torchrun

SCRIPT = Path(__file__).parent / "contestants" / "in_framework.py"
FRAMEWORKS = {
    "trainer": "transformers.Trainer",
    "accelerate": "Accelerate",
    "lightning": "Lightning",
}


def milliseconds(framework: str, way: str, ranks: int) -> float:
    """Return the milliseconds of an update in one launch."""
    words = framework, way, str(ranks)
    command = torchrun(ranks, SCRIPT, *words)
    if way == "lockstep":
        start = [sys.executable, "-m", "lockstep", "run", "-n", str(ranks)]
        command = [*start, str(SCRIPT), *words]
    with tempfile.TemporaryDirectory() as place:
        output = run_quietly(command, cwd=place, env=one_thread())
    return 1000 * max(map(float, re.findall(r"SECONDS (\d[\d.e-]*)", output)))


def main() -> None:
    parser = options_parser(__doc__, pairs=5)
    parser.add_argument("--frameworks", nargs="+", choices=FRAMEWORKS, default=list(FRAMEWORKS))
    parser.add_argument("--ranks", nargs="+", type=int, default=[1, 2])
    options = parser.parse_args()
    report = Report("An update by frameworks, plain and through a run", options.json)
    for framework in options.frameworks:
        for ranks in options.ranks:
            cases = {
                name: functools.partial(milliseconds, framework, way, ranks)
                for name, way in (("Lockstep", "lockstep"), ("plain", "plain"))
            }
            claims = [Claim("Lockstep", "plain", 1.0, at_most=True)] if ranks > 1 else []
            report.compare(
                f"{FRAMEWORKS[framework]}, {ranks} rank{'s' * (ranks > 1)}",
                "ms",
                in_turns(cases, options.pairs, warm_up=0),
                reference="plain",
                claims=claims,
                digits=1,
            )
    report.close()


if __name__ == "__main__":
    main()
