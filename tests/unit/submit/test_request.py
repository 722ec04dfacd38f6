"""What can be asked of Slurm, and what cannot."""

from __future__ import annotations

from typing import Any

import pytest

from lockstep.errors import UsageError
from lockstep.submit.request import JobRequest


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
        ({"options": ("qos=high",)}, "--sbatch is 'qos=high'; expected an option of sbatch"),
        ({"options": ("",)}, "--sbatch is ''"),
        ({"options": ("--array=1-3",)}, "--sbatch=--array=1-3 cannot be combined"),
        ({"options": ("-a1-3",)}, "--sbatch=-a1-3 cannot"),
        ({"options": ("-o", "--qos=high")}, "--sbatch=-o cannot"),
        ({"options": ("--output=x",)}, "hint: --run-dir DIR"),
        ({"options": ("--wrap=ls",)}, "hint: name a script of Python"),
    ],
)
def test_what_cannot_work(changes, said):
    with pytest.raises(UsageError) as caught:
        request(**changes)
    assert said in str(caught.value)
