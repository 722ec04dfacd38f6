"""What checks say of what nodes have told: facts made up, judgements real."""

from __future__ import annotations

from typing import Any

import pytest

from lockstep.tools.doctor.arithmetic import EXACT
from lockstep.tools.doctor.check import NodeReports
from lockstep.tools.doctor.examine import CHECKS, Report
from lockstep.tools.doctor.links import tournament

MIB, GIB = 1 << 20, 1 << 30
LABELS = ("node 0 (a)", "node 1 (b)", "node 2 (c)")
BITS = {"lockstep": "1", "python": "3.11", "torch": "2.13.0", "numpy": "2.4.6"}
SHM = {"size": GIB, "free": GIB}
LIMITS = {"files": 4096, "locked": -1, "addresses": -1, "processes": -1, "rdma": True}
MEMORY = {"free": 8 * GIB, "total": 16 * GIB, "group": None}
CORES = {"machine": 8, "affinity": "0-7", "quota": None, "usable": 8}
SHARED = {"sees": True, "takes": False, "problem": ""}
STORAGE = {"place": "/runs", "free": GIB, "locks": "", "renames": ""}
GPU = {
    "name": "H100",
    "total": 80 * GIB,
    "free": 79 * GIB,
    "processes": [],
    "slowed": 0x1,
    "ecc": 0,
}
GPUS = {"gpus": [GPU, GPU], "nvml": True, "peers": [[False, True], [True, False]]}
CPU = {"cpu": {"kind": "K", "exact": EXACT, "twice": ["sha256:1", "sha256:1"]}}
OTHER = {"cpu": {**CPU["cpu"], "twice": ["sha256:2", "sha256:2"]}}
WRONG = {"cpu": {**CPU["cpu"], "exact": "sha256:0"}}
UNSTEADY = {"cpu": {**CPU["cpu"], "twice": ["sha256:1", "sha256:2"]}}
KIND = {"cpu": {**OTHER["cpu"], "kind": "L"}}


def versions(more: dict[str, str], **other: str) -> dict[str, Any]:
    return {"bits": {**BITS, **other}, "more": more}


def names(*addresses: str, own: str = "b") -> dict[str, Any]:
    return {"own": own, "addresses": {own: list(addresses)}}


def way(pair: tuple[int, int], mbit: float, **more: float) -> dict[str, Any]:
    return {"pair": list(pair), "mbit": mbit, **more}


def sums(**first: Any) -> dict[str, Any]:
    return {"gloo": [{"wrong": 0, "ms": 3.0, **first}, {"wrong": 0, "ms": 4.0}]}


#: Check, what each node told, and the level and a part of the text of each line.
CASES: list[tuple[str, list[Any], list[tuple[str, str]]]] = [
    ("versions", [versions({}), versions({})], [("ok", "lockstep 1, python 3.11, torch 2.13.0")]),
    (
        "versions",
        [versions({}), versions({}, torch="2.12")],
        [("failure", "(b) has torch 2.12, node 0")],
    ),
    (
        "versions",
        [versions({"NCCL": "2.20"}), versions({"NCCL": "2.21", "CUDA": "12.8"})],
        [("warning", "(b) has CUDA 12.8, node 0 (a) has none"), ("failure", "has NCCL 2.21")],
    ),
    ("shm", [SHM, SHM], [("ok", "/dev/shm: 1.0 GiB of 1.0 GiB are free")]),
    (
        "shm",
        [SHM, {**SHM, "free": 64 * MIB}],
        [("warning", "node 1 (b): /dev/shm is small"), ("ok", "(a)")],
    ),
    ("shm", [{**SHM, "problem": "no space left on device"}], [("failure", "1 MiB cannot be had")]),
    ("shm", [{"missing": True}], [("failure", "there is no /dev/shm")]),
    ("limits", [{**LIMITS, "files": -1}], [("ok", "may open any number of files")]),
    (
        "limits",
        [{**LIMITS, "files": 256}],
        [("warning", "may open 256 files; expected at least 1024")],
    ),
    ("limits", [{**LIMITS, "addresses": GIB}], [("warning", "may have 1.0 GiB of addresses")]),
    ("limits", [{**LIMITS, "locked": 8 * MIB}], [("warning", "may lock 8.0 MiB of memory")]),
    ("limits", [{**LIMITS, "processes": 99}], [("warning", "may have 99 processes and threads")]),
    ("memory", [MEMORY], [("ok", "8.0 GiB of 16.0 GiB are left")]),
    (
        "memory",
        [{**MEMORY, "group": GIB // 2}],
        [("warning", "512 MiB of 16.0 GiB are left by its control")],
    ),
    (
        "memory",
        [{**MEMORY, "free": 9 * MIB}],
        [("failure", "9.0 MiB of 16.0 GiB are left; expected")],
    ),
    ("cores", [CORES], [("ok", "8 usable; affinity 0-7 of 8 processors")]),
    (
        "cores",
        [{**CORES, "usable": 1, "quota": 1.5}],
        [("warning", "1 usable; affinity 0-7 of 8 processors, a")],
    ),
    ("storage", [STORAGE], [("ok", "/runs: locks, rename, 1.0 GiB free")]),
    (
        "storage",
        [{**STORAGE, "locks": "gives one lock (flock) twice"}],
        [("failure", "of /runs gives one lock")],
    ),
    ("storage", [{**STORAGE, "free": 99 * MIB}], [("warning", "99.0 MiB are free at /runs")]),
    ("names", [names("127.0.0.1")], [("ok", "b is 127.0.0.1")]),
    (
        "names",
        [names("10.0.0.1"), names("127.0.1.1")],
        [("warning", "b is 127.0.1.1: its own name"), ("ok", "10")],
    ),
    ("storage", [{"place": "/f", "problem": "is a file"}], [("failure", "/f is a file")]),
    ("shared", [SHARED] * 2, [("ok", "all nodes share the run directory")]),
    (
        "shared",
        [SHARED, {**SHARED, "sees": False, "problem": "No locks available"}],
        [("failure", "node 1 (b) cannot open and lock a file in the run directory: No locks")],
    ),
    (
        "shared",
        [{**SHARED, "sees": False, "problem": "Permission denied"}, {**SHARED, "sees": False}],
        [("failure", "node 0 (a) cannot open and lock a file")],
    ),
    (
        "shared",
        [SHARED, {**SHARED, "sees": False}, {**SHARED, "takes": True}],
        [("failure", "(c) takes a lock"), ("warning", "not shared: node 1 (b) does not see")],
    ),
    (
        "links",
        [[way((0, 1), 9000.0, ms=0.1)], [way((0, 1), 8000.0)]],
        [("ok", "(a) to node 1 (b): 8.0 Gbit/s")],
    ),
    (
        "links",
        [
            [way((0, 1), 9000.0, ms=0.1), way((0, 2), 9000.0, ms=9.0)],
            [way((0, 1), 9000.0), {"pair": [1, 2], "failure": "timed out"}],
            [way((0, 2), 95.0), way((1, 2), 900.0)],
        ],
        [
            ("failure", "node 1 (b) and node 2 (c) lost each other"),
            ("warning", "node 0 (a) to node 2 (c): 95 Mbit/s, the slowest; the median"),
            ("warning", "node 1 (b) to node 2 (c): 900 Mbit/s; the median of all is 9.0 Gbit/s"),
            ("warning", "node 0 (a) and node 2 (c): 9.0 ms there and back"),
        ],
    ),
    ("all-reduce", [sums()], [("ok", "gloo on 2 ranks: 1 MiB in 4 ms, all sums right")]),
    (
        "all-reduce",
        [sums(), sums(wrong=7)],
        [("failure", "gloo on 4 ranks: node 1 (b): 7 of 262144 sums")],
    ),
    (
        "all-reduce",
        [sums(), sums(problem="timed out")],
        [("failure", "gloo on 4 ranks: node 1 (b): timed out")],
    ),
    ("training", [CPU, CPU], [("ok", "sha256:1 on node 0 (a): cpu, node 1 (b): cpu (K)")]),
    (
        "training",
        [CPU, WRONG],
        [("failure", "(b): cpu computes wrong bits: ten exact"), ("ok", "(a): cpu (K)")],
    ),
    (
        "training",
        [CPU, UNSTEADY, CPU],
        [("failure", "(b): cpu computes other bits each time"), ("ok", "(c)")],
    ),
    (
        "training",
        [CPU, OTHER, CPU],
        [("failure", "(b): cpu computes other bits than the others: sha256:2")],
    ),
    ("training", [CPU, OTHER], [("failure", "one of them computes wrong bits")]),
    ("training", [CPU, KIND], [("warning", "unlike devices or versions compute other bits")]),
    (
        "gpus",
        [{"gpus": [], "none": "torch is built for processors only"}],
        [("skipped", "processors only")],
    ),
    (
        "gpus",
        [{"gpus": [], "unseen": 8}],
        [("failure", "nvidia-smi lists 8 GPUs, and torch sees none")],
    ),
    (
        "gpus",
        [GPUS],
        [("ok", "H100, 79.0 GiB of 80.0 GiB free; H100, 79.0 GiB of 80.0 GiB free; 1 pairs")],
    ),
    (
        "gpus",
        [
            {
                "gpus": [
                    {**GPU, "free": GIB, "processes": [77], "slowed": 0x41, "ecc": 2},
                    {**GPU, "name": "A100"},
                    {**GPU, "slowed": None},
                ],
                "nvml": True,
                "peers": [[False, True, False], [True, False, False], [False, False, False]],
            },
            {"gpus": [GPU], "nvml": False, "peers": [[False]]},
        ],
        [
            ("warning", "node 0 (a): GPU 0 (H100): 1.0 GiB of 80.0 GiB are free"),
            ("warning", "GPU 0 (H100): other processes compute on it: 77"),
            ("warning", "GPU 0 (H100): its clocks are lowered by heat"),
            ("failure", "GPU 0 (H100): 2 memory errors"),
            ("warning", "without a way to each other's memory: 0-2, 1-2"),
            ("skipped", "node 1 (b): throttling, ECC and processes are not looked at"),
            ("warning", "GPUs are of 2 kinds: A100, H100"),
            ("ok", "H100"),
        ],
    ),
]


@pytest.mark.parametrize(("name", "told", "expected"), CASES)
def test_judgement(name: str, told: list[Any], expected: list[tuple[str, str]]) -> None:
    seen = NodeReports(LABELS[: len(told)], tuple({name: one} for one in told))
    found = list(CHECKS[name].judge(seen))
    assert [one.level for one in found] == [level for level, _ in expected], found
    for one, (_, part) in zip(found, expected, strict=True):
        assert part in one.text
        assert one.advice or one.level in ("ok", "skipped"), "what to do is said"
    assert not list(CHECKS[name].judge(NodeReports(LABELS[:1], ({},)))) or name in (
        "clocks",
        "links",
    )


def test_every_check_has_a_case() -> None:
    """Network and clocks are judged in tests/nodes."""
    assert {name for name, _, _ in CASES} == set(CHECKS) - {"network", "clocks"}


@pytest.mark.parametrize("count", [2, 3, 4, 7, 8])
def test_all_pairs_meet_once_and_no_node_twice_a_round(count: int) -> None:
    rounds = tournament(count)
    pairs = [pair for one in rounds for pair in one]
    assert sorted(pairs) == [(a, b) for a in range(count) for b in range(a + 1, count)]
    assert all(len({node for pair in one for node in pair}) == 2 * len(one) for one in rounds)


def test_the_report_has_a_line_for_each_finding() -> None:
    seen = NodeReports(LABELS[:2], ({"shm": SHM}, {"shm": {"missing": True}}))
    found = tuple(("shm", one) for one in CHECKS["shm"].judge(seen))
    report = Report(seen=seen, findings=found, exit_code=1, seconds=2.0, speaks=True)
    assert list(report.lines) == [
        "failure  shm  node 1 (b): there is no /dev/shm. Do: mount a tmpfs there",
        "ok       shm  node 0 (a): /dev/shm: 1.0 GiB of 1.0 GiB are free",
        "2 node(s), 2.0 s: 1 ok, 0 skipped, 0 warning, 1 failure",
    ]
    assert report.as_json()["facts"] == {
        "node 0 (a)": {"shm": SHM},
        "node 1 (b)": {"shm": {"missing": True}},
    }
