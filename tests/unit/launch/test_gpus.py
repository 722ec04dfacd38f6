"""What nvidia-smi tells, and what CUDA_VISIBLE_DEVICES leaves of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from lockstep.launch.devices import gpus
from lockstep.launch.devices.gpus import Gpu, list_gpus, read_listing, visible
from tests.unit.launch import listings


def everything(text: str) -> tuple[Gpu, ...]:
    listing = read_listing(text)
    assert listing.problem is None
    return listing.gpus


def test_whole_gpus():
    found = everything(listings.H100)
    assert [gpu.index for gpu in found] == list(range(8))
    assert found[2] == Gpu(
        index=2,
        label="GPU 2",
        uuid="GPU-0d9ce0d5-22a0-fdf7-c891-f26e86f907b6",
        name="NVIDIA H100 80GB HBM3",
    )
    assert str(found[2]) == "GPU 2, GPU-0d9ce0d5, NVIDIA H100 80GB HBM3"


@pytest.mark.parametrize(
    ("text", "labels", "last"),
    [
        (
            listings.A100_WITH_MIG,
            ["GPU 0", "GPU 0 MIG 0", "GPU 0 MIG 1", "GPU 0 MIG 2"],
            "MIG-c6e2bae8-46d4-5a7e-9a68-c6cf1f680ba0, MIG 2g.10gb of NVIDIA A100-PCIE-40GB",
        ),
        (
            listings.A100_IN_2021,
            ["GPU 0", "GPU 0 MIG 0", "GPU 0 MIG 1"],
            "MIG-GPU-9de3d0e8-33f5-10dc-0c79-2c88a7ab0a23/3/0, MIG 2g.10gb of A100-PCIE-40GB",
        ),
        (
            listings.A100_IN_2020,
            ["GPU 0", "GPU 0 MIG 0"],
            "MIG-GPU-b8ea3855-276c-c9cb-b366-c6fa655957c5/1/0, MIG of Graphics Device",
        ),
    ],
    ids=["2022", "2021", "2020"],
)
def test_mig_devices(text, labels, last):
    found = everything(text)
    assert [gpu.label for gpu in found] == labels
    assert all(gpu.parent == found[0].uuid for gpu in found[1:])
    assert str(found[-1]) == f"{labels[-1]}, {last}"


def test_a_form_of_later_years_is_not_guessed_at():
    listing = read_listing(listings.H100 + "Device 8 = NVIDIA Z1 [UUID GPU-1234]\n")
    assert listing.gpus == ()
    assert listing.problem == (
        "nvidia-smi -L told what Lockstep cannot read: Device 8 = NVIDIA Z1 [UUID GPU-1234]"
    )


def test_a_gpu_that_is_lost_keeps_its_number_from_the_others():
    lines = listings.H100.splitlines()[:3]
    lines[1] = "Unable to determine the device handle for GPU1: 0000:34:00.0: Unknown Error"
    found = everything("\n".join(lines))
    assert [gpu.label for gpu in found] == ["GPU 0", "GPU 2"]
    assert visible(found, {"CUDA_VISIBLE_DEVICES": "2"}).gpus == (found[1],)


@pytest.mark.parametrize(
    ("text", "environ", "labels"),
    [
        (listings.H100, {}, [0, 1, 2, 3, 4, 5, 6, 7]),
        (listings.H100, {"CUDA_VISIBLE_DEVICES": "5,1"}, [5, 1]),
        (listings.H100, {"CUDA_VISIBLE_DEVICES": " 5 , 1 "}, [5, 1]),
        (listings.H100, {"CUDA_VISIBLE_DEVICES": ""}, []),
        (listings.H100, {"CUDA_VISIBLE_DEVICES": "NoDevFiles"}, []),
        (listings.H100, {"CUDA_VISIBLE_DEVICES": "0,2,-1,1"}, [0, 2]),
        (listings.H100, {"CUDA_VISIBLE_DEVICES": "0,9,1"}, [0]),
        (listings.H100, {"CUDA_VISIBLE_DEVICES": "3,3"}, []),
        (listings.H100, {"CUDA_VISIBLE_DEVICES": "GPU-27196ced,GPU-c7a0"}, [1, 0]),
        (listings.H100, {"CUDA_VISIBLE_DEVICES": "GPU-5,GPU-c7a0"}, []),
        (listings.H100, {"CUDA_VISIBLE_DEVICES": "GPU-27196ced,5"}, [1]),
        (listings.H100, {"CUDA_VISIBLE_DEVICES": "5,GPU-27196ced"}, [5]),
    ],
)
def test_visible(text, environ, labels):
    assert [gpu.index for gpu in visible(everything(text), environ).gpus] == labels


def test_visible_mig_devices():
    found = everything(listings.A100_WITH_MIG)
    name = "MIG-65b79fff-6d3c-5490-a288-b31ec705f310"
    assert visible(found, {"CUDA_VISIBLE_DEVICES": name}).gpus == (found[2],)
    assert visible(found, {"CUDA_VISIBLE_DEVICES": name[:-3]}).gpus == ()
    assert visible(found, {}).gpus == (found[0],)


@pytest.mark.parametrize(
    ("text", "environ", "ordered"),
    [
        (listings.H100, {"CUDA_VISIBLE_DEVICES": "5,1"}, True),
        (listings.QUADROS, {}, False),
        (listings.QUADROS, {"CUDA_VISIBLE_DEVICES": "1,0"}, False),
        (
            listings.QUADROS,
            {"CUDA_VISIBLE_DEVICES": "1,0", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"},
            True,
        ),
        (listings.QUADROS, {"CUDA_VISIBLE_DEVICES": "GPU-1029c3f5,GPU-25049053"}, True),
    ],
)
def test_the_order_is_known_where_cudas_is_nvidia_smis(text, environ, ordered):
    assert visible(everything(text), environ).ordered is ordered


def tool(directory: Path, text: str) -> str:
    path = directory / "nvidia-smi"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def test_the_tool_is_asked(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    (tmp_path / "listing").write_text(listings.H100)
    tool(tmp_path, f'test "$*" = -L && cat {tmp_path}/listing')
    assert list_gpus() == read_listing(listings.H100)


@pytest.mark.parametrize(
    ("script", "problem"),
    [
        (
            "echo 'Failed to initialize NVML: Driver/library version mismatch'; exit 18",
            "nvidia-smi -L failed: Failed to initialize NVML: Driver/library version mismatch",
        ),
        ("exit 9", "nvidia-smi -L failed: exit code 9"),
        ("exec sleep 60", "nvidia-smi -L did not answer within 0.5 s"),
    ],
)
def test_a_tool_that_fails_is_a_fact_not_an_error(tmp_path, monkeypatch, script, problem):
    monkeypatch.setattr(gpus, "_TIMEOUT", 0.5)
    assert list_gpus(tool(tmp_path, script)).problem == problem


def test_a_tool_that_cannot_run(tmp_path):
    (tmp_path / "nvidia-smi").write_text("no program")
    assert list_gpus(str(tmp_path / "nvidia-smi")).problem == (
        "nvidia-smi -L cannot be run: Permission denied"
    )


def test_no_tool(monkeypatch):
    monkeypatch.setenv("PATH", "/nonexistent")
    assert list_gpus().problem == "there is no nvidia-smi"
