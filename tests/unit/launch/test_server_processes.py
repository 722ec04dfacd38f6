"""Servers in a plan: processes that are no ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lockstep.errors import UsageError
from lockstep.launch import dry_run
from lockstep.launch.agent import failure
from lockstep.launch.agent.failure import Failure
from lockstep.launch.agent.forkserver import Exit
from lockstep.launch.agent.server_processes import count
from lockstep.launch.flag_settings import FlagSettings
from lockstep.launch.plan import Plan
from lockstep.launch.spec import LaunchSpec
from lockstep.world import detect
from tests.unit.launch import planning


def spec(**method: Any) -> LaunchSpec:
    return LaunchSpec(target="train.py", n=2, settings=FlagSettings(**method))


def plan(servers: int, environ: dict[str, str] | None = None, **generation: Any) -> Plan:
    return planning.plan(spec(strategy="ps", servers=servers), environ=environ, **generation)


def test_servers_are_none_of_the_ranks() -> None:
    made = plan(3)
    assert [worker.rank for worker in made.workers] == [0, 1]
    assert made.size == 2
    assert [server.name for server in made.servers] == ["server 0", "server 1", "server 2"]
    assert [server.rank for server in made.servers] == [-1, -2, -3]
    for server in made.servers:
        assert "RANK" not in server.env, "nobody shall take it for a rank"
        assert server.command[-2:] == ("-m", "lockstep.engine.parameter_server"), (
            "never the user's script"
        )
    logs = {one.log for one in (*made.workers, *made.servers)}
    files = {one.error_file for one in (*made.workers, *made.servers)}
    assert (len(logs), len(files)) == (5, 5)


def test_servers_know_the_launch_and_see_no_gpu() -> None:
    made = plan(2, port=4567, membership=planning.membership_of((2, 2), (0, 1), 0))
    for index, server in enumerate(made.servers):
        assert server.env["LOCKSTEP_SERVER"] == str(index)
        assert server.env["CUDA_VISIBLE_DEVICES"] == ""
        for name in ("MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS", "LOCKSTEP_SERVERS"):
            assert server.env[name] == made.workers[0].env[name]
        assert server.env["LOCKSTEP_SERVER_ROOT"] == str(Path.cwd()), "where train.py is"
    assert "LOCKSTEP_SERVER" not in made.workers[0].env


def test_the_first_rank_s_launcher_has_all_of_them() -> None:
    first, second = (planning.membership_of((2, 2), (0, 1), index) for index in (0, 1))
    assert len(plan(2, membership=first).servers) == 2
    assert plan(2, membership=second).servers == ()


def test_a_rank_that_is_alone_meets_its_servers_in_the_launchers_store() -> None:
    lone = LaunchSpec(target="train.py", n=1, settings=FlagSettings(strategy="ps", servers=1))
    (worker,) = planning.plan(lone).workers
    assert detect({**worker.env, "MASTER_PORT": "4567"}).agent_store
    plain = LaunchSpec(target="train.py", n=1)
    (worker,) = planning.plan(plain).workers
    assert not detect({**worker.env, "MASTER_PORT": "4567"}).agent_store


def test_no_servers_where_none_are_asked_for() -> None:
    assert planning.plan(spec()).servers == ()


@pytest.mark.parametrize(
    ("method", "environ", "expected"),
    [
        ({"strategy": "ps", "servers": 2}, {}, 2),
        ({"servers": 2}, {}, 2),
        ({}, {"LOCKSTEP_SERVERS": "3"}, 3),
        ({"servers": 1, "strategy": "ps"}, {"LOCKSTEP_SERVERS": "3"}, 1),
        ({}, {"LOCKSTEP_SERVERS": "3", "LOCKSTEP_STRATEGY": "ps"}, 3),
        ({}, {}, 0),
    ],
)
def test_how_many(method: dict[str, Any], environ: dict[str, str], expected: int) -> None:
    assert count(spec(**method), environ) == expected


@pytest.mark.parametrize(
    ("method", "environ"),
    [
        ({"strategy": "ps"}, {}),
        ({"strategy": "ps", "servers": 0}, {"LOCKSTEP_SERVERS": "2"}),
        ({"strategy": "ddp", "servers": 2}, {}),
        ({"strategy": "ddp"}, {"LOCKSTEP_SERVERS": "2"}),
        ({}, {"LOCKSTEP_STRATEGY": "ps"}),
        ({}, {"LOCKSTEP_SERVERS": "-2"}),
        ({"servers": 65}, {}),
    ],
)
def test_what_cannot_be(method: dict[str, Any], environ: dict[str, str]) -> None:
    with pytest.raises(UsageError):
        count(spec(**method), environ)


def test_the_flags_are_variables() -> None:
    variables = FlagSettings(servers=2, staleness=0).variables()
    assert (variables["LOCKSTEP_SERVERS"], variables["LOCKSTEP_STALENESS"]) == ("2", "0")
    for name in ("servers", "staleness"):
        with pytest.raises(UsageError, match=f"--{name} is -1; expected at least 0"):
            FlagSettings(**{name: -1})


def test_a_dry_run_shows_them() -> None:
    lines = dry_run.lines(plan(2))
    assert "server 1 on cpu" in lines
    assert "  log: runs/a/logs/server-1.log" in lines


def test_a_verdict_names_the_server() -> None:
    made = plan(2)
    killed = Exit(rank=-2, pid=7, code=-9, time=1.0)
    found = failure.collect((*made.workers, *made.servers), {-2: killed})
    verdict = failure.verdict(found, made.size)
    assert verdict.text.startswith("lockstep: server 1 failed on ")
    assert verdict.brief == "server 1 was killed by signal 9 (SIGKILL)"
    assert "log: runs/a/logs/server-1.log" in verdict.text


def test_the_traceback_of_a_server_is_said_to_be_its_own() -> None:
    from lockstep.launch.functions import failed
    from lockstep.state.record.error_report import Report

    made = plan(2)
    told = Report(rank=-2, exception="ValueError", message="bad", traceback="Traceback: bad")
    broken = Failure(worker=made.servers[1], time=1.0, report=told, exit=None)
    verdict = failure.verdict([broken], made.size)
    assert verdict.name == "server 1"
    assert failed(verdict).__notes__ == ["\non server 1:\nTraceback: bad"]


def test_a_verdict_over_nobody_names_nobody() -> None:
    from lockstep.launch.functions import failed
    from lockstep.launch.nodes.coordinator import lost_verdict

    verdict = lost_verdict("node 1", "its launcher has ended")
    assert verdict.name is None
    assert failed(verdict).__dict__.get("__notes__") is None


def test_a_server_that_died_is_the_cause_of_what_workers_felt() -> None:
    from lockstep.state.record.error_report import Report

    made = plan(1)
    felt = Report(rank=0, exception="PeerError", message="server 0 is gone", consequence=True)
    failures = [
        Failure(worker=made.workers[0], time=1.0, report=felt, exit=None),
        Failure(
            worker=made.servers[0],
            time=2.0,
            report=None,
            exit=Exit(rank=-1, pid=7, code=-9, time=2.0),
        ),
    ]
    assert failure.first(failures).worker.name == "server 0"
