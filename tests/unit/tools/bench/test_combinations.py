"""What a script is measured on, and quantities as people write them."""

from __future__ import annotations

import pytest

from lockstep.errors import UsageError
from lockstep.launch.devices.gpus import Gpu
from lockstep.tools.bench.combinations import Combination, check_gpus, combine, parse_counts
from lockstep.tools.quantities import (
    binary_size,
    counted,
    parse_bandwidth,
    parse_latency,
    seconds,
    size,
    three,
)


def test_every_combination_once() -> None:
    found = combine([1, 2], ["ddp", "fsdp"], [None])
    assert list(map(str, found)) == [
        "1 rank with ddp",
        "2 ranks with ddp",
        "1 rank with fsdp",
        "2 ranks with fsdp",
    ]


def test_on_one_rank_the_exchanges_are_all_the_same() -> None:
    found = combine([1, 2], [None], ["tree", "native"])
    assert found == [Combination(1), Combination(2, None, "tree"), Combination(2, None, "native")]
    assert str(found[1]) == "2 ranks over tree"


def test_numbers_of_ranks() -> None:
    assert parse_counts("--ranks", "4, 1,2,2") == [1, 2, 4]
    for word in ("", "1,", "-1", "0", "1.5"):
        with pytest.raises(UsageError, match="expected integers of at least 1"):
            parse_counts("--ranks", word)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("25Gbit/s", 3.125e9),
        ("100 Mbit/s", 12.5e6),
        ("3GB/s", 3e9),
        ("1.5kB/s", 1500),
        ("8bit/s", 1),
    ],
)
def test_bandwidths(text: str, expected: float) -> None:
    assert parse_bandwidth(text) == expected


@pytest.mark.parametrize(
    "text", ["25", "25Gbit", "0Gbit/s", "-1GB/s", "fast", "1e9B/s", "25gbit/s"]
)
def test_no_bandwidths(text: str) -> None:
    with pytest.raises(UsageError, match="--bandwidth is"):
        parse_bandwidth(text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [("20us", 2e-5), ("20 µs", 2e-5), ("1.5ms", 1.5e-3), ("0s", 0), ("5ns", 5e-9)],
)
def test_latencies(text: str, expected: float) -> None:
    assert parse_latency(text) == pytest.approx(expected)


@pytest.mark.parametrize("text", ["20", "us", "-1ms", "1h"])
def test_no_latencies(text: str) -> None:
    with pytest.raises(UsageError, match="--latency is"):
        parse_latency(text)


def test_numbers_are_shown_with_three_digits() -> None:
    assert [three(value) for value in (0, 0.01234, 1.234, 12.34, 123.4, 12345.6)] == [
        *("0", "0.0123", "1.23", "12.3", "123", "12,346"),
    ]
    assert [seconds(value) for value in (61.0, 0.5, 1e-5, 2e-8)] == [
        "61.0 s",
        "500 ms",
        "10.0 µs",
        "20.0 ns",
    ]
    assert [size(value) for value in (2e12, 4.5e9, 117e3, 8)] == [
        "2.00 TB",
        "4.50 GB",
        "117 kB",
        "8.00 B",
    ]
    assert [binary_size(value) for value in (512, 2048, 150 * 2**20, 3 * 2**29)] == [
        *("512 bytes", "2.0 KiB", "150 MiB", "1.5 GiB"),
    ]
    assert [counted(number, "rank") for number in (0, 1, 2)] == ["0 ranks", "1 rank", "2 ranks"]


def test_dp_is_one_rank_with_several_gpus() -> None:
    gpus = [Gpu(index=k, label=f"GPU {k}", uuid=f"GPU-{k}") for k in range(3)]
    two = Combination(2, "dp")
    assert two.processes == 1
    assert two.environ(gpus) == {"CUDA_VISIBLE_DEVICES": "GPU-0,GPU-1"}
    assert str(two) == "2 GPUs of one rank with dp"
    assert Combination(1, "dp").environ(gpus) == Combination(2, "ddp").environ(gpus) == {}
    check_gpus([two, Combination(4, "ddp")], gpus)
    with pytest.raises(UsageError, match="strategy dp on 4 GPUs: 3 can be used here"):
        check_gpus([two, Combination(4, "dp")], gpus)
