"""Who the launchers of a launch are: flags, the environment, and what contradicts itself."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.errors import UsageError, WorldError
from lockstep.launch.nodes.config import Nodes, RendezvousConfig, parse_count, rendezvous_config
from tests.unit.world import slurm_environments as recorded

WORK = ("train.py", "--lr", "0.1")

#: mpiexec of MPICH and of Open MPI: task 2 of 3 on one node, and task 1 of 2 on two.
MPICH = {"PMI_RANK": "2", "PMI_SIZE": "3", "MPI_LOCALRANKID": "2", "MPI_LOCALNRANKS": "3"}
OPENMPI = {
    "OMPI_COMM_WORLD_RANK": "2",
    "OMPI_COMM_WORLD_SIZE": "3",
    "OMPI_COMM_WORLD_LOCAL_RANK": "2",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "3",
    "PMIX_NAMESPACE": "prterun-n1-77@1",
}
OPENMPI_TWO_NODES = {
    **OPENMPI,
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "1",
}


def find(environ: Mapping[str, str] | None = None, **nodes: Any) -> RendezvousConfig | None:
    return rendezvous_config(Nodes(**nodes), WORK, environ or {})


def found(environ: Mapping[str, str] | None = None, **nodes: Any) -> RendezvousConfig:
    one = find(environ, **nodes)
    assert one is not None
    return one


# Alone.


@pytest.mark.parametrize(
    "nodes",
    [
        {},
        {"count": 1},
        {"rank": 0},
        {"count": 1, "rank": 0},
        {"count": 1, "rank": 0, "main_address": "node0", "main_port": 29500},
        {"count": 1, "endpoint": "localhost:0"},  # as torchrun's manual has it for one node
        {"count": 1, "endpoint": "file:///shared"},
        {"main_port": 29500},
        {"id": "x", "interface": "eth0", "join_timeout": 3.0},
    ],
    ids=repr,
)
def test_one_launcher_meets_nobody(nodes: dict[str, Any]) -> None:
    assert find(**nodes) is None


# By flags.


@pytest.mark.parametrize("port", [None, 29500])
@pytest.mark.parametrize("rank", [0, 1, 2])
def test_numbered_launchers(rank: int, port: int | None) -> None:
    one = found(count=3, rank=rank, main_address="node0", main_port=port)
    assert (one.count, one.index, one.address, one.port) == (3, rank, "node0", port)
    assert one.directory is None
    assert not one.shares_output


@pytest.mark.parametrize(
    ("endpoint", "address", "port"),
    [
        ("node0", "node0", None),
        ("node0:29500", "node0", 29500),
        ("10.0.0.1:29500", "10.0.0.1", 29500),
        ("SH-IDC1-10-5-36-65:1", "sh-idc1-10-5-36-65", 1),
        ("node_0:1", "node_0", 1),
        ("[::1]", "::1", None),
        ("[::1]:29500", "::1", 29500),
        ("[fe80::1%eth0]:29500", "fe80::1%eth0", 29500),
        ("node0:", "node0", None),
    ],
)
def test_endpoints_at_hosts(endpoint: str, address: str, port: int | None) -> None:
    one = found(count=2, endpoint=endpoint)
    assert (one.address, one.port, one.index, one.directory) == (address, port, None, None)


@pytest.mark.parametrize(
    ("endpoint", "directory"),
    [
        ("file:///shared/rendezvous", "/shared/rendezvous"),
        ("file:/shared/rendezvous", "/shared/rendezvous"),
        ("file:///shared/rendezvous/", "/shared/rendezvous"),
        ("/shared/rendezvous", "/shared/rendezvous"),
        ("/shared/a b", "/shared/a b"),
    ],
)
def test_endpoints_in_directories(endpoint: str, directory: str) -> None:
    one = found(count=2, endpoint=endpoint)
    assert (one.directory, one.address, one.port) == (Path(directory), None, None)


@pytest.mark.parametrize(
    "endpoint",
    [
        "",
        ":29500",
        "[::1",
        "node0:0",
        "node0:65536",
        "node0:http",
        "tcp://node0:29500",
        "./shared",
        "file://",
        "file://shared/rendezvous",
        "file://[",
    ],
)
def test_bad_endpoints_are_named(endpoint: str) -> None:
    with pytest.raises(UsageError) as caught:
        find(count=2, endpoint=endpoint)
    assert f"--rdzv-endpoint is {endpoint!r}; expected HOST, HOST:PORT" in caught.value.message


@given(st.text())
def test_any_text_is_an_endpoint_or_a_usage_error(text: str) -> None:
    for prefix in ("", "file:", "[", "host:"):
        try:
            one = found(count=2, endpoint=prefix + text)
        except UsageError:
            continue
        assert one.address or one.directory


def test_launches_have_names() -> None:
    def name(work: tuple[str, ...] = WORK, count: int = 2, **nodes: Any) -> str:
        one = rendezvous_config(Nodes(count=count, endpoint="node0", **nodes), work, {})
        assert one is not None
        return one.name

    assert name() == name()
    assert name(id="a") == name(("other.py",), id="a")
    names = [name(), name(("other.py",)), name(count=3), name(id="a"), name(id="b"), name(id="a/b")]
    assert len(set(names)) == len(names)
    assert name(("a b",)) != name(("a", "b"))
    assert name(("a\udcff",)), "bytes that are no text, as the system gives them"


# What contradicts itself.


@pytest.mark.parametrize(
    ("nodes", "said"),
    [
        ({"count": 0}, "--nnodes is 0; expected at least 1"),
        ({"count": 2, "least": 3}, "--nnodes is 3:2; expected MIN:MAX with 1 <= MIN <= MAX"),
        ({"count": 2, "least": 0}, "--nnodes is 0:2; expected MIN:MAX"),
        ({"last_call": 0.0}, "--last-call is 0.0; expected more than 0"),
        ({"count": 2, "least": 1}, "--nnodes is 1:2, but no rendezvous address is given"),
        ({"count": 2, "rank": 2}, "--node-rank is 2 with --nnodes 2; expected 0 to 1"),
        ({"count": 2, "rank": -1}, "--node-rank is -1 with --nnodes 2"),
        ({"rank": 1}, "--node-rank is 1 with --nnodes 1; expected 0 to 0"),
        ({"main_port": 0}, "--master-port is 0; expected a port from 1"),
        ({"main_port": 65536}, "--master-port is 65536"),
        ({"join_timeout": 0.0}, "--join-timeout is 0.0; expected more than 0"),
        ({"join_timeout": float("nan")}, "--join-timeout is nan"),
        ({"join_timeout": float("inf")}, "--join-timeout is inf"),
        ({"count": 2, "rank": 0, "main_address": ""}, "--master-addr is empty"),
        ({"count": 2, "endpoint": "h", "rank": 0}, "contradict each other"),
        ({"count": 2, "endpoint": "h", "main_address": "h"}, "contradict each other"),
        ({"count": 2, "endpoint": "h", "main_port": 1}, "contradict each other"),
        ({"endpoint": "h"}, "--rdzv-endpoint or --master-addr without --nnodes"),
        ({"main_address": "h"}, "--rdzv-endpoint or --master-addr without --nnodes"),
        ({"count": 2, "main_address": "h"}, "--master-addr without --node-rank"),
        ({"count": 2}, "--nnodes is 2, but no rendezvous address is given"),
    ],
)
def test_flags_that_cannot_work(nodes: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError) as caught:
        find(**nodes)
    assert said in caught.value.message


@pytest.mark.parametrize(
    ("text", "counts"),
    [("1", (None, 1)), ("16", (None, 16)), ("0", (None, 0)), ("1:2", (1, 2)), ("3:3", (3, 3))],
)
def test_counts(text: str, counts: tuple[int | None, int]) -> None:
    assert parse_count(text) == counts


@pytest.mark.parametrize(
    "text", ["", "two", "-1", "1.5", " 1", "²", "0x2", ":", "1:", ":2", "1:2:3", "1:two", "1: 2"]
)
def test_counts_that_are_none(text: str) -> None:
    with pytest.raises(UsageError, match="expected a number of nodes, or MIN:MAX"):
        parse_count(text)


def test_nodes_that_may_come_and_go() -> None:
    one = rendezvous_config(Nodes(least=1, count=3, endpoint="node0"), WORK, {})
    assert one is not None
    assert (one.least, one.count) == (1, 3)
    numbered = rendezvous_config(Nodes(least=1, count=3, rank=2, main_address="node0"), WORK, {})
    assert numbered is not None
    assert (numbered.least, numbered.index) == (1, 2)
    fixed = rendezvous_config(Nodes(count=3, endpoint="node0"), WORK, {})
    assert fixed is not None
    assert fixed.name != one.name == numbered.name


def test_tasks_of_a_scheduler_do_not_come_and_go() -> None:
    with pytest.raises(UsageError, match="slurm started 4 launchers, and ends all launchers"):
        find(recorded.STEP_RANK_2, least=1, count=4)


# By the environment.


def test_tasks_of_a_slurm_step_find_each_other() -> None:
    one = found(recorded.STEP_RANK_2)
    assert (one.count, one.index, one.address, one.port) == (4, 2, "n1", None)
    assert one.source == "slurm"
    assert one.shares_output
    assert one.name == found(recorded.STEP_RANK_2, count=4).name
    assert one.name != found({**recorded.STEP_RANK_2, "SLURM_JOB_ID": "8"}).name


@pytest.mark.parametrize(
    ("environ", "source"),
    [(MPICH, "mpich"), (OPENMPI, "openmpi")],
    ids=["mpich", "openmpi"],
)
def test_tasks_of_mpiexec_find_each_other(environ: dict[str, str], source: str) -> None:
    environ = {**environ, "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}
    one = found(environ)
    assert (one.count, one.index, one.source) == (3, 2, source)
    assert (one.address, one.port) == ("10.0.0.1", 29500)


def test_tasks_on_one_node_need_no_address() -> None:
    one = found(OPENMPI)
    assert (one.address, one.port, one.count) == ("127.0.0.1", None, 3)
    other = found({**OPENMPI, "PMIX_NAMESPACE": "prterun-n1-78@1"})
    assert one.name != other.name


def test_tasks_on_several_nodes_that_nobody_says_where() -> None:
    with pytest.raises(UsageError, match="doesn't say where the first one is") as caught:
        find(OPENMPI_TWO_NODES)
    assert "--rdzv-endpoint" in (caught.value.hint or "")
    place = {"MASTER_ADDR": "n1", "MASTER_PORT": "29500"}
    assert found({**OPENMPI_TWO_NODES, **place}).address == "n1"


@pytest.mark.parametrize(
    "environ",
    [
        recorded.BATCH_SCRIPT,
        recorded.SALLOC_SHELL,
        recorded.PTY_SHELL,
        {**recorded.STEP_RANK_2, "LOCKSTEP_SLURM": "0"},
        {**recorded.STEP_RANK_2, "LOCKSTEP_LAUNCHER": "0.1", "RANK": "0", "WORLD_SIZE": "1"},
        {**recorded.STEP_RANK_2, "RANK": "0", "WORLD_SIZE": "1"},
        {**MPICH, "PMI_RANK": "0", "PMI_SIZE": "1", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "1"},
    ],
    ids=["batch", "salloc", "pty", "slurm off", "in a worker", "in torchrun", "mpiexec -n 1"],
)
def test_an_environment_of_one_launcher(environ: dict[str, str]) -> None:
    assert find(environ) is None


def test_flags_win_over_the_environment() -> None:
    by_endpoint = found(recorded.STEP_RANK_2, count=2, endpoint="node9")
    assert (by_endpoint.count, by_endpoint.index, by_endpoint.address) == (2, None, "node9")
    numbered = found(recorded.STEP_RANK_2, count=2, rank=1, main_address="node9")
    assert (numbered.count, numbered.index, numbered.address) == (2, 1, "node9")


@pytest.mark.parametrize(
    ("nodes", "said"),
    [
        ({"count": 1}, "--nnodes is 1, but slurm started 4 launchers"),
        ({"count": 2}, "--nnodes is 2, but slurm started 4 launchers"),
        ({"count": 4, "rank": 1}, "--node-rank is 1, but slurm started this launcher as number 2"),
    ],
)
def test_flags_that_contradict_the_environment(nodes: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError) as caught:
        find(recorded.STEP_RANK_2, **nodes)
    assert said in caught.value.message
    assert find(recorded.STEP_RANK_2, count=4, rank=2) == find(recorded.STEP_RANK_2)


def test_an_environment_that_contradicts_itself_is_named() -> None:
    with pytest.raises(WorldError, match="OMPI_COMM_WORLD_SIZE is not set"):
        find({"OMPI_COMM_WORLD_RANK": "0"})
