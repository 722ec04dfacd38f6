"""Choice of simulated devices, and devices that cannot train: one error before the first step."""

from __future__ import annotations

import re

import pytest

from tests.device.conftest import SCRIPT, digest_of

pytestmark = [pytest.mark.forked, pytest.mark.ranks(2)]


@pytest.mark.parametrize(
    ("words", "environ", "said"),
    [
        (("-n", "2", "--devices", "1,3"), {}, None),
        (("-n", "2"), {"SIM_VISIBLE_DEVICES": "2,0"}, None),
        (("-n", "1"), {"SIM_VISIBLE_DEVICES": "3"}, None),
        (("-n", "2", "--devices", "gpu"), {"SIM_VISIBLE_DEVICES": "2"}, "1 GPU"),
        (("-n", "2", "--devices", "1,7"), {}, "there is no GPU 7; torch sees 4"),
        (("-n", "2", "--devices", "1,1"), {}, "is named twice"),
    ],
)
def test_which_devices(device, on_cpu, words, environ, said: str | None) -> None:
    done = device(*words, **environ)
    if said is None:
        assert digest_of(done) == on_cpu
    else:
        assert done.code != 0
        assert said in done.err, done.err
        assert "Traceback" not in done.err


def test_memory_that_is_not_enough(device) -> None:
    done = device("-n", "2", "--max-restarts", "0", SIM_MEMORY="61440")
    assert done.code == 1
    verdict = r"rank \d of 2 failed on .*: OutOfMemoryError: sim out of memory"
    assert len(re.findall(verdict, done.err)) == 1, done.err
    use = r"step 1: at most [\d.]+ KiB allocated and [\d.]+ KiB reserved; the device has 60.0 KiB"
    assert re.search(r"rank \d on sim:\d, " + use, done.err), done.err
    assert "hint: a smaller batch_size" in done.err


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        (
            {"SIM_BROKEN": "1"},
            "sim:1 (sim) was found, and its first kernel failed: sim error: device 1",
        ),
        (
            {"SIM_SEEDS": "0"},
            "cannot be seeded: sim error: the generator has no seed; expected manual",
        ),
        ({"LOCKSTEP_DEVICES": "1,7"}, "there is no GPU 7; torch sees 4"),
    ],
    ids=["broken", "without seeds", "absent"],
)
def test_devices_that_cannot_train(device, environ, said: str) -> None:
    refused(device("-n", "2", **environ), said)


def refused(done, said: str) -> None:
    assert done.code == 2, done.err
    assert said in done.err, done.err
    assert "Traceback" not in done.err


LACKING = """
import torch.distributed
torch.distributed.Backend.default_device_backend_map.pop("sim")
"""


def test_a_device_without_a_collective_backend(device) -> None:
    refused(device("-n", "2", script=LACKING + SCRIPT), "has no collective backend for it")


#: As where Slurm gives each task a device of its own, and all the same one.
SHARED = """
import os
os.environ["SIM_VISIBLE_DEVICES"] = "2"
"""


@pytest.mark.parametrize(
    ("ids", "said"),
    [("1", "are both on GPU"), ("0", "simccl refuses sim:0: simccl error: Duplicate device")],
    ids=["with ids", "without ids"],
)
def test_ranks_that_were_given_one_device(device, ids: str, said: str) -> None:
    refused(device("-n", "2", script=SHARED + SCRIPT, SIM_IDS=ids), said)


def test_doctor_names_the_devices(lockstep, simulated) -> None:
    done = lockstep("doctor", env={"PYTHONPATH": simulated, "SIM_DEVICES": "2"}, timeout=200)
    said = "2 of sim as sim, backend simccl, visible by SIM_VISIBLE_DEVICES: Simulated accelerator"
    assert said in done.out, done.out + done.err
