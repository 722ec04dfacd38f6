"""What a process learns of itself from each `mpiexec`. Nothing here imports torch or mpi4py."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.mpi.libraries import Mpi

pytestmark = pytest.mark.ranks(3)

WHO = """
import dataclasses, json, lockstep
print(json.dumps(dataclasses.asdict(lockstep.detect())) + "\\n", end="", flush=True)
"""


def worlds(mpi: Mpi, words: list[str], **variables: str) -> list[dict[str, Any]]:
    mpi.lockstep.script(WHO, "who.py")
    done = mpi.lockstep.finish(mpi.start_any(words, **variables), timeout=20)
    assert done.code == 0, done
    return read(done.out)


def read(out: str) -> list[dict[str, Any]]:
    return sorted(map(json.loads, out.splitlines()), key=lambda world: world["rank"])


def test_ranks_of_one_node(mpi: Mpi) -> None:
    found = worlds(mpi, mpi.words(3, "who.py"))
    assert [one["rank"] for one in found] == [0, 1, 2]
    assert {one["local_rank"] for one in found} == {0, 1, 2}  # Open MPI's order is its own
    for one in found:
        assert (one["size"], one["local_size"], one["node_count"]) == (3, 3, 1)
        assert (one["environment"], one["placed"], one["by_mpi"]) == (mpi.name, True, False)
        assert (one["address"], one["port"]) == ("127.0.0.1", None)
    (key,) = {one["key"] for one in found}
    assert key


@pytest.mark.wide(beyond=1)
def test_two_jobs_have_two_keys(mpi: Mpi) -> None:
    keys = [{one["key"] for one in worlds(mpi, mpi.words(2, "who.py"))} for _ in range(2)]
    assert [len(found) for found in keys] == [1, 1]
    assert keys[0] != keys[1]


@pytest.mark.wide(beyond=1)
def test_behind_a_shell_mpich_is_asked_and_open_mpi_names_its_job(mpi: Mpi) -> None:
    *options, python, _ = mpi.words(2, "who.py")
    found = worlds(mpi, [*options, "sh", "-c", f"{python} who.py; true"])
    assert {one["by_mpi"] for one in found} == {mpi.name == "mpich"}
    assert {one["key"] is None for one in found} == {mpi.name == "mpich"}


def test_a_process_manager_that_says_nothing_of_nodes(library: Any) -> None:
    mpi = library("mpich")
    forker = f"{mpi.mpiexec}.gforker"
    mpi.lockstep.script(WHO, "who.py")
    start = mpi.lockstep.start(
        *mpi.words(2, "who.py"), env=mpi.variables, program=(), executable=forker
    )
    found = read(mpi.lockstep.finish(start, timeout=20).out)
    assert {(one["rank"], one["placed"], one["by_mpi"]) for one in found} == {
        (0, False, True),
        (1, False, True),
    }
