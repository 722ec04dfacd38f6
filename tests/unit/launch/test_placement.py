"""Which GPU each rank gets, and which lists are refused before anything starts."""

from __future__ import annotations

from typing import Any

import pytest

from lockstep.errors import DeviceError, UsageError
from lockstep.launch.devices.gpus import read_listing
from lockstep.launch.devices.machine import Machine
from lockstep.launch.dry_run import lines, placement
from lockstep.launch.flag_settings import FlagSettings
from lockstep.launch.plan import count_ranks
from lockstep.launch.spec import LaunchSpec
from tests.unit.launch import listings, planning

MIG = "MIG-65b79fff-6d3c-5490-a288-b31ec705f310"


def machine(text: str, gpus: int | None = None) -> Machine:
    cards = read_listing(text).gpus
    return Machine(cores=64, gpus=len(cards) if gpus is None else gpus, cards=cards)


H100 = machine(listings.H100)
A100 = machine(listings.A100_WITH_MIG, gpus=1)
QUADROS = machine(listings.QUADROS)
PARTLY_SPLIT = machine(listings.H100_WITH_MIG, gpus=4)
ROCM = Machine(
    cores=8, gpus=4, problem="ids are read from nvidia-smi", visible_variable="HIP_VISIBLE_DEVICES"
)


def plan(
    devices: str | None,
    where: Machine = H100,
    environ: dict[str, str] | None = None,
    n: int | None = None,
    **generation: Any,
):
    spec = LaunchSpec(target="a.py", n=n, settings=FlagSettings(devices=devices))
    return planning.plan(spec, where, environ, **generation)


@pytest.mark.parametrize(
    ("devices", "environ", "indices"),
    [
        ("2,3", {}, [2, 3]),
        ("3, 2", {}, [3, 2]),
        ("7", {}, [7]),
        ("0,1", {"CUDA_VISIBLE_DEVICES": "6,4,5"}, [6, 4]),
        ("GPU-5534d557,GPU-27196ced-a067-4406-2159-46448710fc9c", {}, [7, 1]),
        ("GPU-5534D557,0", {}, [7, 0]),
        ("GPU-b71a1811", {"CUDA_VISIBLE_DEVICES": "5,4"}, [4]),
    ],
)
def test_a_list_chooses_gpus_and_counts_ranks(devices, environ, indices):
    workers = plan(devices, environ=environ).workers
    uuids = [H100.cards[index].uuid for index in indices]
    assert [worker.gpu.index for worker in workers] == indices
    assert [worker.device for worker in workers] == [f"cuda:{k}" for k in range(len(indices))]
    assert {worker.env["CUDA_VISIBLE_DEVICES"] for worker in workers} == {",".join(uuids)}
    assert [worker.env["LOCKSTEP_DEVICE"] for worker in workers] == [w.device for w in workers]
    assert {worker.env["LOCKSTEP_DEVICES"] for worker in workers} == {"gpu"}


def test_what_was_exported_is_read_where_no_flag_is():
    exported = {"LOCKSTEP_DEVICES": "4,5"}
    assert [w.gpu.index for w in plan(None, environ=exported).workers] == [4, 5]
    assert [w.gpu.index for w in plan("6", environ=exported).workers] == [6]
    assert [w.device for w in plan("cpu", environ=exported, n=2).workers] == ["cpu", "cpu"]


def test_mig_devices_are_shown_to_one_rank_each():
    other = "MIG-41b3359c-e721-56e5-8009-12e5797ed514"
    workers = plan(f"{MIG},{other}", A100).workers
    assert [worker.env["CUDA_VISIBLE_DEVICES"] for worker in workers] == [MIG, other]
    assert [worker.env["LOCKSTEP_VISIBLE_DEVICES"] for worker in workers] == [MIG, other]
    assert [worker.device for worker in workers] == ["cuda:0", "cuda:0"]
    assert [worker.gpu.label for worker in workers] == ["GPU 0 MIG 1", "GPU 0 MIG 0"]


def test_the_variable_may_name_mig_devices_by_index():
    environ = {"CUDA_VISIBLE_DEVICES": f"{MIG},MIG-41b3359c-e721-56e5-8009-12e5797ed514"}
    assert [w.gpu.uuid for w in plan("0", A100, environ).workers] == [MIG]


def test_a_second_launcher_of_a_node_counts_devices_from_its_own():
    (worker,) = plan("3", membership=planning.membership_of((2, 1), (0, 0), 1)).workers
    assert (worker.local_rank, worker.device, worker.gpu.index) == (2, "cuda:0", 3)


@pytest.mark.parametrize(
    ("devices", "where", "environ", "said"),
    [
        (
            "9",
            H100,
            {},
            "--devices: there is no GPU 9; expected one of GPU 0, GPU-c7a0294c, NVIDIA",
        ),
        ("GPU-1234", H100, {}, "--devices: there is no GPU-1234; expected one of GPU 0, GPU-c7a0"),
        (MIG, H100, {}, f"there is no {MIG}; expected one of GPU 0"),
        (MIG[:-2], A100, {}, f"there is no {MIG[:-2]}; expected one of GPU 0"),
        ("GPU-5", H100, {}, "GPU-5 fits 2 GPUs: GPU 6, GPU-590d9f08, NVIDIA H100 80GB HBM3; GPU 7"),
        (
            "3",
            H100,
            {"CUDA_VISIBLE_DEVICES": "0,1"},
            "GPU 3, GPU-7353c83a, NVIDIA H100 80GB HBM3 is hidden by CUDA_VISIBLE_DEVICES=0,1",
        ),
        (
            "GPU-7353",
            H100,
            {"CUDA_VISIBLE_DEVICES": "0,1"},
            "which leaves 0 = GPU 0, GPU-c7a0294c, NVIDIA H100 80GB HBM3; 1 = GPU 1",
        ),
        ("0", H100, {"CUDA_VISIBLE_DEVICES": ""}, "CUDA_VISIBLE_DEVICES=, which leaves none"),
        (MIG, A100, {"CUDA_VISIBLE_DEVICES": ""}, "GPU 0 MIG 1"),
        (
            "2,2",
            H100,
            {},
            "GPU 2, GPU-0d9ce0d5, NVIDIA H100 80GB HBM3 is named twice: as 2 and as 2",
        ),
        ("2,GPU-0d9c", H100, {}, "is named twice: as 2 and as GPU-0d9c"),
        ("0", A100, {}, "is split into MIG devices; expected one of them: GPU 0 MIG 0, MIG-41b3"),
        (f"0,{MIG}", A100, {}, f"{MIG} is a part of GPU 0, GPU-84fd49f2"),
        (f"{MIG},0", A100, {}, f"{MIG} is a part of GPU 0, GPU-84fd49f2"),
        ("0", QUADROS, {"CUDA_VISIBLE_DEVICES": "1,0"}, "that CUDA counts from the fastest GPU on"),
        ("4", ROCM, {}, "there is no GPU 4; torch sees 4"),
        ("GPU-12", ROCM, {}, "GPU-12 cannot be looked up: ids are read from nvidia-smi"),
    ],
)
def test_impossible_lists_are_refused(devices, where, environ, said):
    with pytest.raises(DeviceError) as caught:
        plan(devices, where, environ)
    assert said in str(caught.value)
    assert caught.value.exit_code == 2


def test_the_origin_of_a_list_is_named():
    with pytest.raises(DeviceError, match="LOCKSTEP_DEVICES: there is no GPU 9"):
        plan(None, environ={"LOCKSTEP_DEVICES": "9"})


def test_no_gpus_at_all_says_why():
    bare = Machine(cores=2, problem="torch 2.13.0+cpu is built for processors only")
    for devices in ("0", "gpu"):
        with pytest.raises(DeviceError, match=r"torch sees none .*: torch 2.13.0\+cpu is built"):
            plan(devices, bare)


@pytest.mark.parametrize(
    ("n", "devices", "said"),
    [
        (3, "2,3", "-n is 3 for 2 named GPU"),
        (1, "2,3", "-n is 1 for 2 named GPU"),
        ("cpu", "2,3", "-n cpu and --devices 2,3 contradict"),
        ("cpu", "gpu", "-n cpu and --devices gpu contradict"),
        ("gpu", "cpu", "-n gpu and --devices cpu contradict"),
    ],
)
def test_counts_that_contradict_a_list(n, devices, said):
    with pytest.raises(UsageError, match=said):
        count_ranks(
            LaunchSpec(target="a.py", n=n, settings=FlagSettings(devices=devices)), H100, {}
        )


@pytest.mark.parametrize("n", [None, 2, "gpu", "auto"])
def test_counts_that_agree_with_a_list(n):
    assert (
        count_ranks(LaunchSpec(target="a.py", n=n, settings=FlagSettings(devices="2,3")), H100, {})
        == 2
    )


def test_ranks_on_processors_are_told_so():
    (first, *_) = plan(None, n="cpu").workers
    assert (first.device, first.env["LOCKSTEP_DEVICES"]) == ("cpu", "cpu")


def test_words_leave_the_users_variable_and_know_the_order():
    workers = plan("gpu", environ={"CUDA_VISIBLE_DEVICES": "5,1"}, where=H100, n=2).workers
    assert [worker.gpu.index for worker in workers] == [5, 1]
    assert all("CUDA_VISIBLE_DEVICES" not in worker.env for worker in workers)


@pytest.mark.parametrize("where", [QUADROS, A100, PARTLY_SPLIT, Machine(cores=4, gpus=2)])
def test_where_the_order_is_not_known_nothing_is_claimed(where):
    assert [(w.device, w.gpu) for w in plan("gpu", where, n=1).workers] == [("cuda:0", None)]


def test_indices_of_several_models_are_nvidia_smis():
    assert [w.gpu.index for w in plan("1", QUADROS).workers] == [1]


def test_too_many_ranks_for_a_split_gpu():
    with pytest.raises(DeviceError, match="a process sees one MIG device; name one for each rank"):
        plan("gpu", A100, n=2)


def test_indices_alone_work_without_facts():
    workers = plan("1,0", ROCM, {"HIP_VISIBLE_DEVICES": "7,3"}).workers
    assert {worker.env["HIP_VISIBLE_DEVICES"] for worker in workers} == {"3,7"}
    assert all("CUDA_VISIBLE_DEVICES" not in worker.env for worker in workers)
    assert {w.env["HIP_VISIBLE_DEVICES"] for w in plan("3", ROCM).workers} == {"3"}


def test_the_mapping_is_shown():
    made = plan("2,3", membership=planning.membership_of((2, 2, 2), (0, 1, 2), 2))
    assert placement(made) == [
        "lockstep: rank 4: cuda:0 = GPU 2, GPU-0d9ce0d5, NVIDIA H100 80GB HBM3",
        "lockstep: rank 5: cuda:1 = GPU 3, GPU-7353c83a, NVIDIA H100 80GB HBM3",
    ]
    assert "rank 4 on cuda:0 = GPU 2, GPU-0d9ce0d5, NVIDIA H100 80GB HBM3" in lines(made)
    assert placement(plan("cpu")) == []
