"""What can be asked of Slurm, and what cannot."""

from __future__ import annotations

from typing import Any

import pytest

from lockstep.errors import UsageError
from lockstep.tools.submit.request import JobRequest


def request(**changes: Any) -> JobRequest:
    return JobRequest(**{"name": "train", "command": ("train.py",), **changes})


@pytest.mark.parametrize(
    ("changes", "ranks", "cpus"),
    [
        ({}, 1, 1),
        ({"ranks": 4}, 4, 4),
        ({"ranks": 4, "cpus_per_rank": 8}, 4, 32),
        ({"gpus_per_node": "4"}, 4, 4),
        ({"gpus_per_node": "nvidia:a100:2", "cpus_per_rank": 3}, 2, 6),
        ({"gpus_per_node": "4", "ranks": "gpu"}, 4, 4),
        ({"gpus_per_node": "4", "ranks": 2}, 2, 2),
        ({"ranks": "cpu"}, None, None),
        ({"ranks": "gpu"}, None, None),
        ({"ranks": "cpu", "gpus_per_node": "4"}, None, None),
    ],
)
def test_ranks_and_cores_of_a_node(changes, ranks, cpus):
    asked = request(**changes)
    assert (asked.ranks_per_node, asked.cpus_per_node) == (ranks, cpus)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"nodes": 0}, "--nodes is 0; expected at least 1"),
        ({"cpus_per_rank": 0}, "--cpus-per-task is 0"),
        ({"cpus_per_rank": 2, "ranks": "cpu"}, "--cpus-per-task with -n cpu"),
        ({"gpus_per_node": "0"}, "--gpus-per-node is '0'"),
        ({"gpus_per_node": "many"}, "--gpus-per-node is 'many'"),
        ({"gpus_per_node": "4\n#SBATCH --wrap"}, "--gpus-per-node is '4\\n"),
        ({"name": "a\n#SBATCH --uid=0"}, "is not printable"),
        ({"options": ("--comment=a\nb",)}, "is not printable"),
        ({"save_before": 0}, "--save-before is 0; expected 1 to 65535 seconds"),
        ({"save_before": 70000}, "--save-before is 70000"),
        (
            {"save_before": 60, "time_limit": "1"},
            "--save-before is 60 s with --time 1; expected less",
        ),
        ({"time_limit": "1\n"}, "is not printable"),
    ],
)
def test_what_cannot_work(changes, said):
    with pytest.raises(UsageError) as caught:
        request(**changes)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("limit", "seconds"),
    [
        (None, 90),
        ("30", 90),
        ("5", 75),
        ("2", 30),
        ("1:20", 20),
        ("0:02", 1),
        ("0:01:00", 15),
        ("1-0", 90),
        ("0-0:4", 60),
        ("0-0:0:40", 10),
        ("soon", 90),
        ("1:2:3:4", 90),
        ("UNLIMITED", 90),
        ("0", 90),  # none
    ],
)
def test_seconds_in_which_a_run_can_save_itself(limit, seconds):
    assert request(time_limit=limit).seconds_to_save == seconds
    assert request(time_limit="2", save_before=110).seconds_to_save == 110
