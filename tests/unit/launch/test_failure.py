"""Reports and verdicts, without processes."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from lockstep.errors import EarlyExitError, StepError, UsageError
from lockstep.launch.agent import failure
from lockstep.launch.agent.forkserver import Exit
from lockstep.launch.plan import WorkerPlan
from lockstep.state.record import error_report


@pytest.fixture
def workers(tmp_path: Path) -> list[WorkerPlan]:
    return [
        WorkerPlan(
            rank=rank,
            local_rank=rank,
            command=("python", "train.py"),
            env={},
            device="cpu",
            log=tmp_path / f"rank-{rank}.log",
            error_file=tmp_path / f"rank-{rank}.json",
        )
        for rank in range(3)
    ]


def raised(error: BaseException) -> BaseException:
    try:
        raise error  # noqa: TRY301 - the traceback is what it is raised for
    except BaseException as caught:
        return caught


def tell(worker: WorkerPlan, error: BaseException, time: float) -> None:
    told = error_report.describe(raised(error), worker.rank, str(Path(__file__).parent))
    error_report.write(error_report.Report(**{**vars_of(told), "time": time}), worker.error_file)


def vars_of(told: error_report.Report) -> dict[str, object]:
    return {name: getattr(told, name) for name in told.__dataclass_fields__}


def left(rank: int, code: int, time: float = 0.0) -> Exit:
    return Exit(rank=rank, pid=100 + rank, code=code, time=time)


def judge(workers: list[WorkerPlan], *exits: Exit, **settings: object) -> failure.Verdict:
    return failure.verdict(
        failure.collect(workers, {one.rank: one for one in exits}), 3, **settings
    )


def test_the_earliest_exception_is_the_cause(workers):
    tell(workers[2], ValueError("first"), 1.0)
    tell(workers[0], ValueError("second"), 2.0)
    verdict = judge(workers, left(0, 1), left(2, 1))
    assert verdict.name == "rank 2"
    assert "ValueError: first" in verdict.text


@pytest.mark.parametrize(
    "consequence",
    [
        EarlyExitError("rank 1 left the loop"),
        RuntimeError("[pair.cc:537] Read error [127.0.0.1]:1449: Connection reset by peer"),
        RuntimeError("Connection closed by peer [127.0.0.1]:9133."),
        RuntimeError(
            "[unbound_buffer.cc:78] Timed out waiting 1800000ms for recv operation to complete"
        ),
    ],
)
def test_a_cause_is_preferred_to_earlier_consequences(workers, consequence):
    tell(workers[0], consequence, 1.0)
    assert judge(workers, left(0, 1, 1.0), left(1, -9, 2.0)).name == "rank 1"
    tell(workers[2], KeyError("x"), 1.5)
    assert judge(workers, left(0, 1, 1.0), left(1, -9, 2.0)).name == "rank 2"


def test_a_runtime_error_of_the_script_is_no_consequence():
    assert not error_report.is_consequence(
        RuntimeError("mat1 and mat2 shapes cannot be multiplied")
    )
    assert not error_report.is_consequence(ValueError("connection closed by peer, says the user"))


def test_an_exec_worker_that_blames_its_peer_is_a_consequence(workers):
    workers[0].log.write_text("RuntimeError: Connection closed by peer [127.0.0.1]:1\n")
    workers[1].log.write_text("KeyError: 'x'\n")
    verdict = judge(workers, left(0, 1, 1.0), left(1, 1, 2.0))
    assert verdict.name == "rank 1"
    assert "  | KeyError: 'x'" in verdict.text


def test_a_worker_that_told_but_has_not_ended_counts(workers):
    tell(workers[1], ValueError("hangs at exit"), 1.0)
    assert judge(workers, left(0, -6, 2.0)).name == "rank 1"


def test_place_hint_and_exit_code(workers):
    tell(workers[0], UsageError("seen", hint="do this"), 1.0)
    verdict = judge(workers, left(0, 2))
    assert "UsageError: seen\n" in verdict.text
    assert "test_failure.py:" in verdict.text
    assert " in raised\n  hint: do this\n  log: " in verdict.text
    assert verdict.exit_code == 2
    assert "UsageError" in verdict.traceback


def test_other_lockstep_errors_exit_with_one(workers):
    tell(workers[0], StepError("seen"), 1.0)
    assert judge(workers, left(0, 1)).exit_code == 1


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (5, "exit code 5"),
        (-9, "signal 9 (SIGKILL): out of memory, or kill -9 by a user"),
        (-7, "signal 7 (SIGBUS): shared memory that is full"),
        (-11, "signal 11 (SIGSEGV)"),
        (-15, "signal 15 (SIGTERM)"),
        (-40, "signal 40 (unknown): no usual cause"),
    ],
)
def test_exits_without_exception(workers, code, said):
    workers[1].log.write_text("one\n\ntwo\n")
    verdict = judge(workers, left(1, code))
    assert said in verdict.text
    assert verdict.text.endswith(f"  | one\n  | two\n  log: {workers[1].log}")
    assert (verdict.exit_code, verdict.traceback) == (1, None)


def test_the_kernels_word_on_memory(workers):
    assert (
        "out of memory, says the kernel" in judge(workers, left(1, -9), killed_for_memory=True).text
    )
    assert "counted no kill for memory" in judge(workers, left(1, -9), killed_for_memory=False).text


def test_an_exception_while_the_kernel_killed_for_memory(workers):
    """A DataLoader's worker was killed, and the rank that it worked for tells of it."""
    tell(workers[0], RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed."), 1.0)
    text = judge(workers, left(0, 1), killed_for_memory=True).text
    assert "the kernel has killed a process of this control group for memory meanwhile" in text
    assert "the kernel has killed" not in judge(workers, left(0, 1), killed_for_memory=False).text


def test_the_short_form_is_one_line(workers):
    assert judge(workers, left(1, -9)).brief == "rank 1 was killed by signal 9 (SIGKILL)"
    out_of_memory = judge(workers, left(1, -9), killed_for_memory=True).brief
    assert out_of_memory == "rank 1 was killed by the kernel: out of memory"
    assert judge(workers, left(1, 5)).brief == "rank 1 ended with exit code 5"
    tell(workers[1], ValueError("one\ntwo"), 1.0)
    brief = judge(workers, left(1, 1)).brief
    assert brief.startswith("rank 1 failed: ValueError: one (")
    assert "test_failure.py:" in brief
    assert "\n" not in brief


def test_a_verdict_of_others_has_its_first_line_as_short_form():
    text = "lockstep: node 1 was lost: no sign\n  hint: x"
    one = failure.Verdict(text=text, exit_code=1, name=None, traceback=None)
    assert one.brief == "node 1 was lost: no sign"


def test_moments_are_no_clock_of_the_wall(workers):
    """A clock that is set back between two failures must not make the second one the cause."""
    told = error_report.describe(raised(ValueError("x")), 0, None)
    assert abs(told.time - time.monotonic()) < 60
    assert abs(failure.wall(told.time) - time.time()) < 60


def test_kills_count_from_one_failure_to_the_next(monkeypatch):
    counts = iter([3, 3, 4, 4, None])
    monkeypatch.setattr(failure, "oom_kills", lambda: next(counts))
    kills = failure.MemoryKills()
    assert [kills.grew() for _ in range(4)] == [False, True, False, None]


def test_a_report_that_cannot_be_written_is_dropped(workers, tmp_path):
    told = error_report.describe(ValueError("x"), 0, None)
    error_report.write(told, tmp_path / "missing" / "file.json")
    assert error_report.read(tmp_path / "missing" / "file.json") is None


def test_foreign_error_files_are_not_ours(workers):
    workers[0].error_file.write_text('{"message": {"message": "torch\'s own form"}}')
    assert error_report.read(workers[0].error_file) is None
    workers[0].error_file.write_text("half a fi")
    assert error_report.read(workers[0].error_file) is None


def test_last_lines_of_a_long_log(workers):
    workers[0].log.write_bytes(b"\xff\n" + b"".join(b"line %d\n" % k for k in range(100_000)))
    assert failure.last_lines(workers[0].log)[-1] == "line 99999"
    assert failure.last_lines(workers[1].log) == []
