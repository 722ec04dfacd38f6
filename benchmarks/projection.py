"""How far the model of `lockstep bench` is off: fitted on 1 to 8 ranks, compared with 6, 12 and 16.

Claim: each predicted step is within 15 % of the measured one.

Measured: hosts are network namespaces of this machine, with one or several ranks each. What leaves a host
passes a token bucket (`tc … tbf`). Computing is a sleep in proportion to samples, so that each rank has a
processor of its own, however many cores there are. Gradients are real and meet by the exchange `tree`, on
one host in shared memory. The exchange itself does share the cores of this machine. Layouts take turns, a
launch each. Steps are those that the run records, the first left out, as in `lockstep bench`, whose own
code reads them and fits the model. Needs root.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from support import Report, in_turns, one_thread, options_parser

from lockstep.state.record.reading import RunRecords
from lockstep.tools.bench.combinations import Combination
from lockstep.tools.bench.measuring import measure
from lockstep.tools.bench.projecting import project
from lockstep.tools.bench.projection import Link
from lockstep.tools.bench.results import Trial, add_speedups, row
from lockstep.tools.bench.traffic import Layout

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.hosts import Host, Hosts, missing

SCRIPT = Path(__file__).parent / "contestants" / "sleeping.py"
#: Layouts, hosts x ranks of each.
FITTED = [Layout(1, 1), Layout(1, 2), Layout(1, 4), Layout(2, 1)]
FITTED += [Layout(2, 2), Layout(2, 4), Layout(4, 1), Layout(8, 1)]
PREDICTED = [Layout(3, 2), Layout(2, 6), Layout(4, 3), Layout(8, 2)]
LIMIT = 0.15


def train(hosts: Hosts, made: list[Host], each: int, arguments: list[str]) -> Trial:
    """Train with `each` ranks on each host; return what the run recorded."""
    count = len(made)
    with tempfile.TemporaryDirectory() as directory:
        run_dir, began = Path(directory) / "run", time.time()
        several = ("--nnodes", str(count), "--master-addr", made[0].name, "--exchange", "tree")
        run = (sys.executable, "-m", "lockstep", "run", "-n", str(each), "--run-dir", str(run_dir))
        started = [
            host.start(
                *run,
                *(() if count == 1 else (*several, "--node-rank", str(rank))),
                *(str(SCRIPT), *arguments),
                cwd=Path(directory),
                env=one_thread(),
            )
            for rank, host in enumerate(made)
        ]
        hosts.finish(started, timeout=300)
        recorded = RunRecords.of(run_dir)
        measured = measure(recorded, began)
    assert measured is not None, "too few steps"
    return Trial(
        combination=Combination(count * each),
        exit_code=0,
        wall_seconds=time.time() - began,
        measured=measured,
        identity=recorded.run["identity"],
    )


def measure_all(
    rate: str, pairs: int, arguments: list[str], train: Callable[..., Trial] = train
) -> dict[Layout, list[Trial]]:
    """Measure all layouts over links of one rate, in turns."""
    trials: dict[Layout, list[Trial]] = {layout: [] for layout in (*FITTED, *PREDICTED)}
    with Hosts() as hosts:
        made = hosts.lan(max(layout.hosts for layout in trials))
        for host in made:
            host.slow(rate)

        def contest(layout: Layout) -> float:
            trial = train(hosts, made[: layout.hosts], layout.per_host, arguments)
            assert trial.measured is not None
            trials[layout].append(trial)
            print(f"{rate}, {layout}: {trial.measured}", file=sys.stderr, flush=True)
            return trial.measured.step_seconds

        cases = {str(layout): lambda layout=layout: contest(layout) for layout in trials}
        in_turns(cases, pairs, warm_up=0)
    return trials


def compare(rate: str, trials: dict[Layout, list[Trial]], report: Report) -> None:
    """Fit the model to some of the layouts, and say how far it is off on the others."""
    # As many cores as ranks: each sleeps on its own.
    rows = {
        layout: row(Combination(layout.ranks), some, None, layout.ranks) | {"hosts": layout.hosts}
        for layout, some in trials.items()
    }
    add_speedups([*rows.values()])
    done = project([rows[layout] for layout in FITTED], PREDICTED, Link())
    known = {layout: done.residuals[i]["predicted_step_seconds"] for i, layout in enumerate(FITTED)}
    said = known | {layout: done.rows[i]["step_seconds"] for i, layout in enumerate(PREDICTED)}
    lines, worst = [], 0.0
    for layout, model in said.items():
        seen, (low, high) = rows[layout]["step_seconds"], rows[layout]["step_seconds_range"]
        error = model / seen - 1
        is_fitted = layout in FITTED
        worst = max(worst, 0.0 if is_fitted else abs(error))
        cells = [f"{1000 * seen:.1f}", f"{1000 * low:.1f} to {1000 * high:.1f}"]
        cells += [f"{1000 * model:.1f}", f"{error:+.1%}"]
        name = f"{layout.hosts} x {layout.per_host}"
        lines.append([name, "fitted" if is_fitted else "predicted", *cells])
    parts = ", ".join(f"{name} {done.parameters[0][name]:.3g}" for name in _PARAMETERS)
    verdict = "holds" if worst <= LIMIT else "does not hold"
    rounds = len(trials[FITTED[0]])
    report.table(
        f"links of {rate} ({rounds} rounds, medians)",
        ["hosts x ranks", "", "step, ms", "min to max", "model, ms", "error"],
        lines,
        notes=[
            parts,
            f"largest error {worst:.1%}; claim: within {LIMIT:.0%}: {verdict}",
            *(f"assumed: {line}" for line in done.assumptions),
        ],
    )


_PARAMETERS = (
    *("overhead_seconds", "compute_seconds_per_sample", "data_seconds_per_sample"),
    *("latency_seconds", "seconds_per_byte", "local_latency_seconds", "local_seconds_per_byte"),
    "shared_bytes",
)


def main() -> None:
    parser = options_parser(__doc__, pairs=3)
    parser.add_argument(
        "--rates", default="50mbit,200mbit", help="of the links, in the words of tc"
    )
    parser.add_argument("--steps", default="15", help="of each launch")
    options = parser.parse_args()
    report = Report("Projection", options.json)
    if (reason := missing()) is not None:
        print(f"\nskipped: {reason}", flush=True)
        return
    for rate in options.rates.split(","):
        compare(rate, measure_all(rate, options.pairs, ["--steps", options.steps]), report)
    report.close()


if __name__ == "__main__":
    main()
