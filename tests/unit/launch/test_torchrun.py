"""torchrun's flags: all known, each means something, and what it means."""

from __future__ import annotations

import argparse
import contextlib
import re
from typing import Any

import pytest

from lockstep.cli import parse, run, torchrun, whole_parser
from lockstep.errors import UsageError
from lockstep.launch.flag_settings import FlagSettings
from lockstep.launch.nodes.config import Nodes
from lockstep.launch.spec import LaunchSpec
from lockstep.launch.streams import Streams, parse_bits
from lockstep.launch.torchrun import asked_of


def theirs() -> list[argparse.Action]:
    """torchrun's own flags."""
    from torch.distributed.run import get_args_parser

    known = [one for one in get_args_parser()._actions if one.option_strings]
    return [one for one in known if one.dest != "help"]


def read(*words: str, env: dict[str, str] | None = None) -> tuple[LaunchSpec, tuple[str, ...]]:
    """What `lockstep run` would launch, and what it would say."""
    options = parse(torchrun.with_environment(["run", *words, "x.py"], env or {}))
    asked = asked_of(vars(options))
    spec, notes = run.read(options, asked)
    return spec, (*asked.notes, *notes)


# All flags and variables of torchrun's own parser.

VALUES: dict[str, str] = {"nnodes": "2:3", "nproc_per_node": "7", "node_rank": "1", "tee": "2"}
VALUES |= {"master_port": "123", "max_restarts": "5", "redirects": "0:1", "numa_binding": "node"}


def words_of(action: argparse.Action, flag: str) -> list[str]:
    return [flag] if action.nargs == 0 else [f"{flag}={VALUES.get(action.dest, '8')}"]


@pytest.mark.parametrize("action", theirs(), ids=lambda one: one.dest)
def test_every_flag_of_torchrun_is_known_in_each_spelling(action: argparse.Action) -> None:
    plain = vars(whole_parser().parse_args(["run", "x.py"]))
    for flag in action.option_strings:
        options = vars(whole_parser().parse_args(["run", *words_of(action, flag), "x.py", "-a"]))
        assert (options["target"], options["args"]) == ("x.py", ["-a"]), flag
        assert options != {**plain, "args": ["-a"]}, f"{flag} says nothing"


@pytest.mark.parametrize("action", theirs(), ids=lambda one: one.dest)
def test_every_variable_of_torchrun_is_read(action: argparse.Action) -> None:
    from torch.distributed.argparse_util import check_env, env

    value = "1" if action.nargs == 0 else VALUES.get(action.dest, "8")
    flag = max(action.option_strings, key=len)
    expected = words_of(action, flag) if isinstance(action, env | check_env) else []
    found = torchrun.words({f"PET_{action.dest.upper()}": value})
    assert [word.replace("_", "-") for word in found] == [
        word.replace("_", "-") for word in expected
    ]
    assert torchrun.words({f"PET_{action.dest.upper()}": ""}) == []


def test_every_flag_of_torchrun_is_in_the_manual() -> None:
    from pathlib import Path

    text = (Path(__file__).parents[3] / "docs/manual/torchrun.md").read_text()
    for action in theirs():
        dashed = [flag for flag in action.option_strings if "_" not in flag and flag[:2] == "--"]
        assert all(f"`{flag}" in text or f" {flag}" in text for flag in dashed), dashed


# What they mean.

SAME: list[tuple[str, dict[str, Any]]] = [
    ("--nproc-per-node 4", {"n": 4}),
    ("--nproc_per_node=gpu", {"n": "gpu"}),
    ("--nproc-per 4 --nnode=1", {"n": 4, "nodes": Nodes(count=1)}),  # cut short, as torchrun allows
    ("--nproc-per-node auto --role trainer", {"n": "auto", "role": "trainer"}),
    ("--start-method spawn", {"start": "spawn"}),
    ("--start-method forkserver", {"start": "fork"}),
    ("--start-method spawn --start exec", {"start": "exec"}),
    ("-m", {"kind": "module"}),
    ("--module --run-path", {"kind": "module", "start": "fork"}),
    ("--no-python", {"kind": "program", "start": "exec"}),
    ("--no_python --run_path", {"kind": "script", "start": "fork"}),
    ("--numa-binding exclusive", {"settings": FlagSettings(bind="cores")}),
    ("--numa-binding node --bind none", {"settings": FlagSettings(bind="none")}),
    ("-t 3", {"streams": Streams(tee=3)}),
    ("--tee 0:3,1:1", {"streams": Streams(tee={0: 3, 1: 1})}),
    ("-r0:1", {"streams": Streams(redirects={0: 1})}),
    ("--local_ranks_filter=0,2", {"streams": Streams(only=frozenset({0, 2}))}),
]
ENDPOINTS: list[tuple[str, dict[str, Any]]] = [
    ("--standalone", {"count": 1, "alone": True}),
    ("--standalone --nnodes 1:4", {"count": 1, "alone": True}),
    (
        "--standalone --rdzv-endpoint a --rdzv-id 7 --node-rank 3",
        {"count": 1, "alone": True, "id": "7"},
    ),
    ("--nnodes 1:4 --rdzv-endpoint a", {"least": 1, "count": 4, "endpoint": "a"}),
    ("--rdzv-endpoint localhost:0", {"count": 1, "endpoint": "localhost:0"}),
    (
        "--rdzv-endpoint=127.0.0.1:29400 --rdzv-id x",
        {"count": 1, "endpoint": "127.0.0.1:29400", "id": "x"},
    ),
    ("--standalone --master-port 0", {"count": 1, "alone": True}),
    ("--rdzv-endpoint localhost:0 --master-port 0", {"count": 1, "endpoint": "localhost:0"}),
    (
        "--master-addr localhost --master-port 29501",
        {"count": 1, "main_address": "localhost", "main_port": 29501},
    ),
    (
        "--nnodes 2 --node-rank 1 --master-addr a --rdzv-backend static",
        {"count": 2, "rank": 1, "main_address": "a"},
    ),
    # Static nodes may meet at an endpoint, too.
    (
        "--nnodes 2 --node-rank 1 --rdzv-endpoint a:5",
        {"count": 2, "rank": 1, "main_address": "a", "main_port": 5},
    ),
    (
        "--nnodes 2 --rdzv-endpoint a --rdzv-conf join_timeout=60,last_call_timeout=5",
        {"count": 2, "endpoint": "a", "join_timeout": 60.0, "last_call": 5.0},
    ),
    (
        "--nnodes 2 --rdzv-endpoint a --rdzv-conf timeout=9 --join-timeout 3",
        {"count": 2, "endpoint": "a", "join_timeout": 3.0},
    ),
    (
        "--nnodes 2 --rdzv-endpoint a --local-addr 127.0.0.1",
        {"count": 2, "endpoint": "a", "interface": "lo"},
    ),
]


@pytest.mark.parametrize(
    ("line", "meant"), [*SAME, *((line, {"nodes": Nodes(**nodes)}) for line, nodes in ENDPOINTS)]
)
def test_what_is_launched(line: str, meant: dict[str, Any]) -> None:
    spec, notes = read(*line.split())
    assert {name: getattr(spec, name) for name in meant} == meant
    assert notes == ()


@pytest.mark.parametrize(
    ("line", "note"),
    [
        ("--monitor-interval 5", "--monitor-interval has no effect: the launcher learns at once"),
        ("--event-log-handler console", "--event-log-handler has no effect: run.json and events/"),
        ("--local-addr 127.0.0.1", "--local-addr has no effect: ranks of one node use"),
        ("--nnodes 2 --rdzv-endpoint a --master-port 5", "--master-port has no effect beside"),
        (
            "--nnodes 2 --rdzv-endpoint a --rdzv-backend c10d --node-rank 1",
            "--node-rank has no effect beside --rdzv-endpoint",
        ),
        (
            "--rdzv-conf read_timeout=60,is_host=1",
            "--rdzv-conf is_host, read_timeout has no effect",
        ),
    ],
)
def test_what_has_no_effect_is_said_once(line: str, note: str) -> None:
    _, notes = read(*line.split())
    assert len(notes) == 1
    assert notes[0].startswith(note)
    assert read("--event-log-handler", "null")[1] == ()


@pytest.mark.parametrize(
    ("line", "said", "hint"),
    [
        (
            "--rdzv-backend etcd",
            "--rdzv-backend is 'etcd'; expected c10d or static",
            "file:///SHARED",
        ),
        ("--rdzv-backend etcd-v2", "--rdzv-backend is 'etcd-v2'", "--rdzv-endpoint HOST"),
        ("--logs-specs mine", "no --logs-specs", "--log-dir, --redirects and --tee"),
        ("--duplicate-stdout-filters a,b", "no --duplicate-stdout-filters", "grep finds"),
        ("--duplicate_stderr_filters a", "no --duplicate-stderr-filters", "grep finds"),
        ("--virtual-local-rank", "no --virtual-local-rank", "LOCAL_RANK"),
        ("--standalone --nnodes 2", "--standalone and --nnodes 2 contradict", "leave one"),
        ("--standalone --nnodes 2:4", "--standalone and --nnodes 2 contradict", "leave one"),
        ("--start-method thread", "--start-method is 'thread'; expected spawn, fork", None),
        ("-m --no-python", "-m and --no-python contradict", None),
        ("--run-path --start exec", "--run-path and --start exec contradict", "leave --run-path"),
        ("--no-python --start fork", "a program is no Python", "leave out --start"),
        ("--rdzv-conf timeout", "--rdzv-conf is 'timeout'; expected KEY=VALUE", None),
        ("--rdzv-conf timeout=soon", "--rdzv-conf has timeout=soon; expected seconds", None),
        (
            "--rdzv-conf join_timout=5",
            "--rdzv-conf has 'join_timout'",
            "did you mean join_timeout?",
        ),
        ("--rdzv-conf store_type=file", "store_type=file", "--rdzv-endpoint file:///"),
        (
            "--nnodes 2 --rdzv-endpoint a --local-addr 192.0.2.1",
            "--local-addr is '192.0.2.1', no address of this machine; expected 127.0.0.1 (lo)",
            None,
        ),
        ("--nproc-per-node xpu", "-n is 'xpu'; expected a number of ranks", None),
        ("--signals-to-handle SIGKILL", "--signals-to-handle is 'SIGKILL'", "USR1"),
        ("--shutdown-timeout=-1", "--shutdown-timeout is -1.0; expected at least 0", None),
        ("--tee 4", "--tee is '4'; expected 0, 1, 2 or 3", "--tee 3 shows all ranks"),
        ("--tee 0:9", "--tee is '0:9'", None),
        ("--tee", "--tee is 'x.py'; expected 0, 1, 2 or 3", "--tee 3 shows all ranks"),
        ("-r 0:1:2", "--redirects is '0:1:2'", None),
        ("--local-ranks-filter a", "--local-ranks-filter is 'a'; expected local ranks", None),
        ("--master-port 65536", "--master-port is 65536; expected a port", None),
        ("--max-restarts some", "invalid int value: 'some'", None),
    ],
)
def test_what_is_refused(line: str, said: str, hint: str | None) -> None:
    with pytest.raises(UsageError) as caught:
        read(*line.split())
    assert said in caught.value.message
    assert hint is None or hint in (caught.value.hint or "")


@pytest.mark.parametrize(
    ("line", "said", "hint"),
    [
        (
            "run --nproces-per-node 2 x.py",
            "takes no --nproces-per-node",
            "did you mean --nproc-per-node?",
        ),
        ("run --replica 2 x.py", "takes no --replica", "did you mean --replicas?"),
        ("run --epochs 2 x.py", "takes no --epochs", "arguments of the script come after its name"),
        ("run --master x.py", "ambiguous option: --master", "lockstep run --help"),
        ("run --bind core x.py", "invalid choice: 'core'", "did you mean cores?"),
        ("rnu x.py", "invalid choice: 'rnu'", "did you mean run?"),
        (
            "verify x.py --epochs 1 --threads 1",
            "lockstep verify takes no --epochs 1",
            "arguments of the script come after --: lockstep verify x.py -- --epochs 1",
        ),
        ("verify --layout 1,2 x.py", "takes no --layout", "did you mean --layouts?"),
        ("submit --acount me x.py", "takes no --acount", "did you mean --account?"),
    ],
)
def test_near_misses_get_a_suggestion(line: str, said: str, hint: str) -> None:
    with pytest.raises(UsageError) as caught:
        whole_parser().parse_args(line.split(), argparse.Namespace(script_args=[]))
    assert said in caught.value.message
    assert hint in (caught.value.hint or "")


def test_flags_win_over_lockstep_over_pet() -> None:
    pet = {"PET_NPROC_PER_NODE": "3", "PET_MAX_RESTARTS": "2", "PET_NO_PYTHON": "0"}
    spec, _ = read(env=pet)
    assert (spec.n, spec.settings.get("max_restarts"), spec.kind) == (3, 2, "script")
    spec, _ = read("--nproc_per_node=5", "--max-restarts", "1", env=pet)
    assert (spec.n, spec.settings.get("max_restarts")) == (5, 1)
    ours = {**pet, "LOCKSTEP_MAX_RESTARTS": "9"}
    spec, _ = read(env=ours)
    assert spec.settings.value("max_restarts", ours) == 9
    assert torchrun.with_environment(["verify", "x.py"], pet) == ["verify", "x.py"]


def test_what_operators_of_kubernetes_set() -> None:
    spec, notes = read(
        env={
            "PET_RDZV_BACKEND": "c10d",
            "PET_RDZV_ENDPOINT": "job-worker-0:23456",
            "PET_RDZV_ID": "job",
            "PET_NNODES": "1:3",
            "PET_NPROC_PER_NODE": "2",
            "PET_MAX_RESTARTS": "10",
        }
    )
    assert spec.nodes == Nodes(least=1, count=3, endpoint="job-worker-0:23456", id="job")
    assert (spec.n, spec.settings.get("max_restarts"), notes) == (2, 10, ())
    spec, notes = read(
        env={
            "PET_NNODES": "2",
            "PET_NPROC_PER_NODE": "auto",
            "PET_NODE_RANK": "1",
            "PET_MASTER_ADDR": "job-node-0-0.job",
            "PET_MASTER_PORT": "29500",
        }
    )
    assert spec.nodes == Nodes(count=2, rank=1, main_address="job-node-0-0.job", main_port=29500)
    assert (spec.n, notes) == ("auto", ())


# The terminal.


@pytest.mark.parametrize(
    ("streams", "expected"),
    [
        (Streams(), [("", ""), (None, None)]),
        (Streams(tee=0), [("", ""), ("", "")]),
        (Streams(tee=3), [("[rank 4] ", "[rank 4] "), ("[rank 5] ", "[rank 5] ")]),
        (Streams(tee=1), [("[rank 4] ", ""), ("[rank 5] ", "")]),
        (Streams(redirects=3), [(None, None), (None, None)]),
        (Streams(redirects=3, tee={1: 2}), [(None, None), (None, "[rank 5] ")]),
        (Streams(redirects={0: 1}), [(None, ""), ("", "")]),
        (Streams(only=frozenset({1})), [(None, None), ("", "")]),
        (Streams(tee=3, only=frozenset({0})), [("[rank 4] ", "[rank 4] "), (None, None)]),
    ],
)
def test_what_the_terminal_shows(
    streams: Streams, expected: list[tuple[str | None, str | None]]
) -> None:
    ranks = (0, 1) if streams.is_default else (4, 5)
    shown = [streams.prefixes(rank, k, f"rank {rank}") for k, rank in enumerate(ranks)]
    assert shown == expected


def test_servers_are_shown_where_all_ranks_are() -> None:
    assert Streams(tee=3).prefixes(-1, 0, "server 0") == ("[server 0] ", "[server 0] ")
    for hidden in (Streams(), Streams(tee=0), Streams(tee={0: 3})):
        assert hidden.prefixes(-1, 0, "server 0") == (None, None)


def test_streams_are_spelled_as_torchrun_spells_them() -> None:
    from torch.distributed.elastic.multiprocessing import Std

    for text in ("0", "1", "2", "3", "0:1", "0:3,1:1,7:0", "4", "x", "", "1:", ":1", "0:1,", "0;1"):
        meant: Any = None
        with contextlib.suppress(ValueError, KeyError):
            meant = Std.from_str(text)
        if meant is None:
            with pytest.raises(UsageError, match=re.escape(f"--tee is {text!r}")):
                parse_bits("--tee", text)
        else:
            value = (
                {k: int(std) for k, std in meant.items()} if isinstance(meant, dict) else int(meant)
            )
            assert parse_bits("--tee", text) == value


def test_the_grace_of_a_shutdown(monkeypatch: pytest.MonkeyPatch) -> None:
    name, environ = "shutdown_timeout", {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "7"}
    assert read()[0].settings.value_or_default(name, {}) == 5.0
    assert read()[0].settings.value_or_default(name, environ) == 7.0
    given = read("--shutdown-timeout", "1.5")[0].settings
    assert given.value_or_default(name, environ) == 1.5


def test_signals_that_are_passed_on() -> None:
    import signal

    spec = read("--signals-to-handle", "SIGTERM,SIGINT,SIGUSR1,SIGUSR2")[0]
    assert spec.signals_passed_on == {signal.SIGUSR1, signal.SIGUSR2}
    assert spec.save_signals({"LOCKSTEP_PREEMPT_SIGNAL": "QUIT"}) == {
        *spec.signals_passed_on,
        signal.SIGQUIT,
    }
