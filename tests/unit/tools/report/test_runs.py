from __future__ import annotations

from pathlib import Path

import pytest

from lockstep.tools.report import timeline
from lockstep.tools.report.charts import (
    Clock,
    curve_charts,
    machine_charts,
    share_chart,
    speed_charts,
)
from lockstep.tools.report.runs import ReportedRun, labels, read
from lockstep.tools.report.sections import sections, title
from tests.recorded import Run


@pytest.fixture
def run(tmp_path: Path) -> ReportedRun:
    """A run with two kills."""
    return read([Run(tmp_path / "run", kills=[20, 40]).write()])[0]


def test_labels_tell_runs_apart() -> None:
    assert labels([Path("/runs/a/1"), Path("/runs/a/2")]) == ["1", "2"]
    assert labels([Path("/runs/a/1"), Path("/runs/b/1"), Path("/runs/b/2")]) == [
        "a/1",
        "b/1",
        "b/2",
    ]
    assert labels([Path("/x")]) == ["x"]


def test_a_directory_that_is_named_twice_is_shown_once(tmp_path: Path) -> None:
    directory = Run(tmp_path / "run").write()
    assert len(read([directory, directory])) == 1


def test_a_curve_has_one_value_per_step(run: ReportedRun) -> None:
    (loss, accuracy) = curve_charts([run])
    (line,) = loss.figure.data
    assert list(line.x) == list(range(1, 61))
    assert [round(line.y[k], 3) for k in (17, 19)] == [0.963, 1.886], (
        "of the first generation, of the second"
    )
    assert (accuracy.title, list(accuracy.figure.data[0].x)) == ("accuracy", [30, 60])


def test_the_warm_up_of_a_generation_is_left_out(run: ReportedRun) -> None:
    rate, step = speed_charts([run], Clock([run]))
    values = [y for y in rate.figure.data[0].y if y is not None]
    assert set(values) == {64.0}
    assert len(values) == 64 - 3, "60 steps, 4 of them twice, 3 generations"
    assert set(step.figure.data[0].y) == {900.0, None}


def test_what_the_time_of_a_rank_went_to(run: ReportedRun) -> None:
    chart = share_chart(run, "")
    assert chart is not None
    assert {bar.name: [round(x) for x in bar.x] for bar in chart.figure.data} == {
        "compute": [85, 75],
        "exchange": [10, 20],
        "data": [5, 5],
    }


def test_a_gpu_hides_its_exchange(tmp_path: Path) -> None:
    run = read([Run(tmp_path / "gpu", gpu=True, ranks=20).write()])[0]
    chart = share_chart(run, "")
    assert chart is not None
    assert [bar.name for bar in chart.figure.data] == ["compute and exchange", "data"]
    charts = machine_charts(run, Clock([run]), "")
    assert [chart.title.partition(" (")[0] for chart in charts] == [
        "Memory of the host",
        "Memory of the device",
        "Processor cores in use",
        "Utilisation of the device",
    ]
    assert [line.name for line in charts[0].figure.data] == ["highest", "median", "lowest"]
    (facts,) = sections([run])[0].parts
    assert facts.values["devices"] == "GPU 9"


def test_the_timeline_says_what_happened(run: ReportedRun) -> None:
    found = [(one.kind, one.row) for one in timeline.timeline_entries(run)]
    assert found.count(("start", "rank 1")) == 3
    assert found.count(("failure", "rank 1")) == 2
    assert found.count(("restart", "launcher")) == 2
    assert found.count(("checkpoint", "rank 0")) == 2
    assert found[-1] == ("end", "launcher")
    words = [row[1] for row in timeline.table(run, "").rows]
    assert words[:5] == [
        "rank 0 starts on n1",
        "rank 1 starts on n1",
        "rank 1 was killed by signal 9 (SIGKILL)",
        "restart 1",
        "rank 0 starts on n1, resumed after step 18 (memory)",
    ]


def test_a_long_life_has_a_short_table(tmp_path: Path) -> None:
    run = read([Run(tmp_path / "run", steps=800, kills=list(range(5, 800, 5))).write()])[0]
    rows = timeline.table(run, "").rows
    assert len(rows) == 201
    assert rows[-1][1].endswith(" more")


def test_runs_are_compared(tmp_path: Path) -> None:
    one = Run(tmp_path / "one").write()
    other = Run(tmp_path / "other", status="failed", identity={"seed": 1, "replicas": 2}).write()
    runs = read([one, other])
    text, table = sections(runs)[0].parts
    assert (
        text.text == "The identities differ in: seed, replicas. Only finished runs have a digest."
    )
    assert table.head == ["", "one", "other"]
    assert ["error", None, "ValueError: <b>bad</b> sample 17"] in table.rows
    assert title(runs) == "digits: 2 runs"
    (text, _) = sections(read([one, Run(tmp_path / "again").write()]))[0].parts
    assert text.text == "One identity. One digest."


def test_the_verdict_of_a_failed_run(tmp_path: Path) -> None:
    run = read([Run(tmp_path / "run", status="failed", kills=[20]).write()])[0]
    (facts,) = sections([run])[0].parts
    assert facts.values["verdict"] == "rank 1 was killed by signal 9 (SIGKILL)"
    assert facts.values["error"] == "ValueError: <b>bad</b> sample 17"


def test_times_have_a_unit_that_fits(tmp_path: Path) -> None:
    short, long = Run(tmp_path / "short").write(), Run(tmp_path / "long", steps=900).write()
    assert Clock(read([short])).unit == "s"
    assert Clock(read([short, long])).unit == "min"
