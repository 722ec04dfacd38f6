"""Init methods: the variables that each form stands for, and forms that are none."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.errors import UsageError
from lockstep.world.environments import init_method
from lockstep.world.environments.init_method import FILE, VARIABLE

CLIENT_OF_NOBODY = {"TORCHELASTIC_USE_AGENT_STORE": "False"}


def at(host: str, port: int) -> dict[str, str]:
    return {"MASTER_ADDR": host, "MASTER_PORT": str(port), **CLIENT_OF_NOBODY}


@pytest.mark.parametrize(
    ("url", "variables"),
    [
        ("env://", {}),
        ("tcp://10.0.0.1:29500", at("10.0.0.1", 29500)),
        ("tcp://node7.cluster:1", at("node7.cluster", 1)),
        ("tcp://[::1]:29500", at("::1", 29500)),
        ("tcp://[fe80::1%eth0]:29500", at("fe80::1%eth0", 29500)),
        ("tcp://node7:29500/", at("node7", 29500)),
        ("TCP://node7:29500", at("node7", 29500)),
        ("file:///shared/rendezvous", {FILE: "/shared/rendezvous"}),
        ("file:/shared/rendezvous", {FILE: "/shared/rendezvous"}),
        ("file:///shared/run #2", {FILE: "/shared/run #2"}),
        ("file:///shared/a%20b", {FILE: "/shared/a%20b"}),  # as torch reads it
        (
            "tcp://node7:29500?rank=1&world_size=4",
            {**at("node7", 29500), "RANK": "1", "WORLD_SIZE": "4"},
        ),
        (
            "tcp://node7:29500/?world_size=4&rank=1",
            {**at("node7", 29500), "RANK": "1", "WORLD_SIZE": "4"},
        ),
        ("file:///a/b?rank=0&world_size=2", {FILE: "/a/b", "RANK": "0", "WORLD_SIZE": "2"}),
        ("env://?rank=0&world_size=2", {"RANK": "0", "WORLD_SIZE": "2"}),
    ],
)
def test_forms(url: str, variables: dict[str, str]) -> None:
    assert init_method.apply({}, url) == variables
    assert init_method.apply({VARIABLE: url}) == {VARIABLE: url, **variables}


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("10.0.0.1:29500", "expected tcp://, file:// or env://"),
        ("node7:29500", "expected tcp://, file:// or env://"),
        ("http://node7:29500", "expected tcp://, file:// or env://"),
        ("mpi://", "expected tcp://, file:// or env://"),
        ("/shared/rendezvous", "expected tcp://, file:// or env://"),
        ("tcp", "expected tcp://, file:// or env://"),
        ("://", "expected tcp://, file:// or env://"),
        (" ", "expected tcp://, file:// or env://"),
        ("tcp://[::1", "expected tcp://, file:// or env://"),
        ("tcp://[zz]:1", "expected"),
        ("tcp://", "expected a host and a port"),
        ("tcp://node7", "expected a host and a port"),
        ("tcp://node7:", "expected a host and a port"),
        ("tcp://node7:0", "expected a host and a port"),
        ("tcp://node7:65536", "expected a host and a port"),
        ("tcp://node7:-1", "expected a host and a port"),
        ("tcp://node7:http", "expected a host and a port"),
        ("tcp://:29500", "expected a host and a port"),
        ("tcp://::1:29500", "expected a host and a port"),
        ("file://", "the absolute path of a file"),
        ("file:///", "the absolute path of a file"),
        ("file:///shared/", "the absolute path of a file"),
        ("file://shared/rendezvous", "the absolute path of a file"),
        ("file:rendezvous", "the absolute path of a file"),
        ("file://./rendezvous", "the absolute path of a file"),
        ("tcp://node7:1?rank=0", "expected both or neither"),
        ("tcp://node7:1?world_size=2", "expected both or neither"),
        ("tcp://node7:1?rank=0&timeout=3", "asks for timeout; expected rank and world_size"),
        ("tcp://node7:1?RANK=0&world-size=3", "asks for RANK, world-size"),
    ],
)
def test_bad_forms_are_named(url: str, said: str) -> None:
    for environ, given_url in (({}, url), ({VARIABLE: url}, None)):
        with pytest.raises(UsageError) as caught:
            init_method.apply(environ, given_url)
        assert said in caught.value.message
        assert repr(url) in caught.value.message


@given(st.text())
def test_any_text_is_an_init_method_or_a_usage_error(text: str) -> None:
    for prefix in ("", "tcp://", "file://", "tcp://host:1?", "tcp://["):
        try:
            found = init_method.apply({}, prefix + text)
        except UsageError:
            continue
        assert found.keys() <= {
            "MASTER_ADDR",
            "MASTER_PORT",
            "TORCHELASTIC_USE_AGENT_STORE",
            "RANK",
            "WORLD_SIZE",
            FILE,
        }


def test_half_of_a_query_may_come_from_the_environment() -> None:
    found = init_method.apply({"WORLD_SIZE": "4"}, "tcp://node7:1?rank=3")
    assert (found["RANK"], found["WORLD_SIZE"]) == ("3", "4")


def test_the_query_wins_over_the_environment() -> None:
    environ = {"RANK": "7", "WORLD_SIZE": "9", "MASTER_ADDR": "old", "MASTER_PORT": "1"}
    found = init_method.apply(environ, "tcp://new:2?rank=0&world_size=2")
    assert found == {**at("new", 2), "RANK": "0", "WORLD_SIZE": "2"}
    assert environ["RANK"] == "7", "the environment itself stays"


def test_a_blank_number_is_not_overlooked() -> None:
    assert init_method.apply({}, "tcp://h:1?rank=&world_size=2")["RANK"] == ""
