"""How far the model of `lockstep bench` is off: fitted on 1, 2 and 3 ranks, compared with 4.

Claim: its step is within 15 % of the measured one.

Measured: every rank is on a host of its own, a network namespace of this machine, and what leaves a host
passes a token bucket (`tc … tbf`). Computing is a sleep in proportion to samples, so that each rank has a
processor of its own, however many cores there are; gradients are real and meet by the exchange `tree`.
Layouts take turns, a launch each. Steps are those that the run records, the first left out, as in
`lockstep bench`, whose own code reads them and fits the model. Needs root.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

from support import Report, in_turns, one_thread, options_parser

from lockstep.state.record.reading import Recorded
from lockstep.tools.bench.combinations import Combination
from lockstep.tools.bench.measuring import measure
from lockstep.tools.bench.projecting import project
from lockstep.tools.bench.projection import Link
from lockstep.tools.bench.results import Trial, add_speedups, row

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.hosts import Host, Hosts, missing

SCRIPT = Path(__file__).parent / "contestants" / "sleeping.py"
FITTED, PREDICTED = (1, 2, 3), 4
LIMIT = 0.15


def train(hosts: Hosts, made: list[Host], arguments: list[str]) -> Trial:
    """Train with one rank on each host; return what the run recorded."""
    count = len(made)
    with tempfile.TemporaryDirectory() as directory:
        run_dir, began = Path(directory) / "run", time.time()
        several = ("--nnodes", str(count), "--master-addr", made[0].name, "--exchange", "tree")
        started = [
            host.start(
                *(sys.executable, "-m", "lockstep", "run", "-n", "1", "--run-dir", str(run_dir)),
                *(() if count == 1 else (*several, "--node-rank", str(rank))),
                *(str(SCRIPT), *arguments),
                cwd=Path(directory),
                env=one_thread(),
            )
            for rank, host in enumerate(made)
        ]
        hosts.finish(started, timeout=300)
        recorded = Recorded.of(run_dir)
        measured = measure(recorded, began)
    assert measured is not None, "too few steps"
    return Trial(
        combination=Combination(count),
        exit_code=0,
        wall_seconds=time.time() - began,
        measured=measured,
        identity=recorded.run["identity"],
    )


def over(rate: str, hosts: Hosts, report: Report, pairs: int, arguments: list[str]) -> None:
    """Measure all layouts over links of one rate, and say how far the model is off."""
    trials: dict[int, list[Trial]] = {count: [] for count in (*FITTED, PREDICTED)}
    made = hosts.lan(PREDICTED)
    for host in made:
        host.slow(rate)

    def contest(count: int) -> float:
        trial = train(hosts, made[:count], arguments)
        assert trial.measured is not None
        trials[count].append(trial)
        print(f"{rate}, {count} ranks: {trial.measured}", file=sys.stderr, flush=True)
        return trial.measured.step_seconds

    cases = {str(count): lambda count=count: contest(count) for count in trials}
    in_turns(cases, pairs, warm_up=0)
    # As many cores as ranks: each sleeps on its own.
    rows = [row(Combination(count), some, None, PREDICTED) for count, some in trials.items()]
    add_speedups(rows)
    done = project([one for one in rows if one["ranks"] in FITTED], [PREDICTED], Link())
    (said,), measured = done.rows, rows[-1]
    error = said["step_seconds"] / measured["step_seconds"] - 1
    known = ("ranks", "step_seconds", "predicted_step_seconds")
    cells = [
        (str(n), "fitted", *times)
        for n, *times in ([one[k] for k in known] for one in done.residuals)
    ]
    cells.append((str(PREDICTED), "predicted", measured["step_seconds"], said["step_seconds"]))
    lines = [
        [ranks, what, f"{1000 * seen:.1f}", f"{1000 * model:.1f}", f"{model / seen - 1:+.1%}"]
        for ranks, what, seen, model in cells
    ]
    parts = ", ".join(f"{name} {done.parameters[0][name]:.3g}" for name in _PARAMETERS)
    holds = "holds" if abs(error) <= LIMIT else "does not hold"
    report.table(
        f"links of {rate} ({pairs} rounds, medians)",
        ["ranks", "", "step, ms", "model, ms", "error"],
        lines,
        notes=[
            parts,
            f"{PREDICTED} ranks: {error:+.1%}; claim: within {LIMIT:.0%}: {holds}",
            *(f"assumed: {line}" for line in done.assumptions),
        ],
    )


_PARAMETERS = (
    *("overhead_seconds", "compute_seconds_per_sample", "data_seconds_per_sample"),
    *("latency_seconds", "bandwidth_bytes_per_second", "shared_bytes"),
)


def main() -> None:
    parser = options_parser(__doc__, pairs=3)
    parser.add_argument(
        "--rates", default="100mbit,400mbit", help="of the links, in the words of tc"
    )
    parser.add_argument("--steps", default="30", help="of each launch")
    options = parser.parse_args()
    report = Report("Projection", options.json)
    if (reason := missing()) is not None:
        print(f"\nskipped: {reason}", flush=True)
        return
    for rate in options.rates.split(","):
        with Hosts() as hosts:
            over(rate, hosts, report, options.pairs, ["--steps", options.steps])
    report.close()


if __name__ == "__main__":
    main()
