"""`lockstep bench`: what is measured, what a failing layout leaves, and what it refuses."""

from __future__ import annotations

import json
import signal
from typing import Any

import pytest

from tests.conftest import Lockstep

SCRIPT = """
import sys, torch, torch.nn.functional as F, lockstep
from torch import nn
from torch.utils.data import TensorDataset

with lockstep.Run("measured") as run:
    if sys.argv[1:] == ["--fails"] and run.world.size == 2:
        raise ZeroDivisionError("not on two")
    model = run.model(nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 2)))
    optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    train = run.loader(TensorDataset(torch.randn(320, 8), torch.arange(320) % 2), batch_size=16)
    for epoch in run.epochs(3):
        for x, y in train:
            run.backward(F.cross_entropy(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
"""
GRADIENTS = 4 * (8 * 64 + 64 + 64 * 2 + 2)


@pytest.fixture
def bench(lockstep: Lockstep) -> Lockstep:
    lockstep.script(SCRIPT)
    return lockstep


def written(bench: Lockstep) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((bench.directory / "out.json").read_text())
    return content


@pytest.mark.forked
def test_everything_at_once(bench: Lockstep) -> None:
    pytest.importorskip("plotly")
    outputs = ("--json", "out.json", "--html", "out.html", "--keep-runs", "kept")
    asked = ("--ranks", "1,2", "--repeat", "1", "--project", "4,8", "--compare", "voc2012-v100")
    done = bench("bench", "train.py", *asked, *outputs, timeout=120)
    assert done.code == 0, done.err
    content = written(bench)
    one, two = content["results"]
    assert (content["format"], content["kind"]) == (1, "result")
    assert content["script"]["name"] == "train.py"
    assert content["machine"]["cores"] >= 1
    assert [(row["ranks"], row["repeats"], row["verdict"]) for row in (one, two)] == [
        (1, 1, None),
        (2, 1, None),
    ]
    for row in (one, two):
        assert row["measured_by"] == "steps"
        assert row["steps"] == 59, "of 60 steps the first warms up"
        assert row["batch"] == 16
        assert row["samples_per_second"] == pytest.approx(16 / row["step_seconds"], rel=0.3)
        low, high = row["samples_per_second_range"]
        assert low <= row["samples_per_second"] <= high
        assert row["threads"] == max(1, content["machine"]["cores"] // 2), "alike on all layouts"
        assert len(row["host_bytes"]) == row["ranks"]
        assert row["host_imbalance"] >= 1
        assert row["start_seconds"] > 0
        assert row["restart_seconds"] > 0
        assert row["device_bytes"] is row["device_busy"] is None
    assert (one["speedup"], one["efficiency"], one["exchange_share"]) == (1, 1, 0)
    assert two["speedup"] == pytest.approx(
        two["samples_per_second"] / one["samples_per_second"], rel=1e-4
    )
    assert two["efficiency"] == pytest.approx(two["speedup"] / 2, rel=1e-4)
    assert 0 < two["exchange_share"] < 1
    assert one["sent_bytes_per_step"] is None
    assert GRADIENTS < two["sent_bytes_per_step"] < 2 * GRADIENTS
    assert two["gradient_bytes"] == GRADIENTS

    assert [row["ranks"] for row in content["projection"]] == [4, 8]
    assert all(row["speedup"] > 0 for row in content["projection"])
    assert len(content["model"]["residuals"]) == 2
    assert content["model"]["parameters"][0]["shared_bytes"] == GRADIENTS
    assert content["comparison"]["by"] == "speed-up"

    assert "speed-up" in done.out
    assert "projection: step = overhead" in done.out
    assert "assumed: fitted to 1, 2 ranks" in done.out
    assert "voc2012-v100 is a table of another program" in done.out
    assert "round 1 of 1: 2 ranks: " in done.err
    assert done.err.count("restart after a kill: ") == 2
    page = (bench.directory / "out.html").read_text()
    assert "Speed-up against ranks" in page
    assert 'src="http' not in page
    assert (bench.directory / "kept" / "2-ranks.1" / "run" / "run.json").exists()


@pytest.mark.forked
def test_a_layout_that_fails_does_not_take_the_others_with_it(bench: Lockstep) -> None:
    words = ("--repeat", "1", "--json", "out.json", "--no-restart", "--", "--fails")
    done = bench("bench", "train.py", *words)
    assert done.code == 1
    one, two = written(bench)["results"]
    assert one["verdict"] is None
    assert one["repeats"] == one["speedup"] == 1
    assert "ZeroDivisionError: not on two" in two["verdict"]
    assert (two["exit_code"], two["repeats"], two["speedup"]) == (1, 0, None)
    assert "failed on 2 ranks: lockstep: rank" in done.out
    assert "Traceback" not in done.err + done.out
    assert "2 ranks: failed, exit code 1" in done.err


@pytest.mark.wide(beyond=1)
@pytest.mark.parametrize("verb", [("bench", "--ranks", "1"), ("verify", "--layouts", "1,2")])
@pytest.mark.forked
def test_a_signal_ends_the_launch_too(lockstep: Lockstep, verb: tuple[str, ...]) -> None:
    script = lockstep.script(
        "import os, time, lockstep\nwith open('pid', 'w') as file:\n    file.write(str(os.getpid()))\n"
        "time.sleep(100)"
    )
    process = lockstep.start(verb[0], script, *verb[1:])
    (pid,) = lockstep.wait_for("pid")
    process.terminate()
    assert lockstep.finish(process).code == 128 + signal.SIGTERM
    assert lockstep.gone(int(pid))


@pytest.mark.wide
@pytest.mark.forked
def test_a_script_without_lockstep_is_measured_by_wall_time(lockstep: Lockstep) -> None:
    lockstep.script("import time; time.sleep(0.1)", "plain.py")
    words = ("--repeat", "1", "--json", "out.json", "--project", "8")
    done = lockstep("bench", "plain.py", *words)
    assert done.code == 0, done.err
    content = written(lockstep)
    assert [row["measured_by"] for row in content["results"]] == ["wall time"] * 2
    assert all(row["wall_seconds"] > 0.1 for row in content["results"])
    assert content["results"][0]["speedup"] == 1
    assert content["projection"] == []
    assert "measured by wall time: the script makes no lockstep.Run" in done.out
    assert "no projection of the script's own strategy: no steps were measured" in done.out
    refused = lockstep("bench", "plain.py", "--strategies", "ddp,fsdp")
    assert refused.code == 2
    assert "ddp was asked for, and the script makes no lockstep.Run" in refused.err


@pytest.mark.wide
@pytest.mark.forked
def test_a_run_of_one_step_is_too_short(bench: Lockstep) -> None:
    bench.script(
        SCRIPT.replace("epochs(3)", "epochs(1)").replace("batch_size=16", "batch_size=320")
    )
    done = bench("bench", "train.py", "--ranks", "1", "--repeat", "1")
    assert done.code == 1
    assert "the run has 1 steps, of which the first warms up" in done.out


@pytest.mark.forked
@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--ranks 0,2", "--ranks names '0'; expected integers of at least 1"),
        ("--ranks two", "--ranks names 'two'"),
        ("--repeat 0", "--repeat is 0; expected at least 1"),
        ("--exchanges tree,wire", "--exchanges names 'wire'; expected some of"),
        ("--strategies ddp,zero", "--strategies names 'zero'; expected some of"),
        (
            "--exchange tree --exchanges tree,native",
            "--exchange tree beside --exchanges tree,native",
        ),
        ("--bandwidth 25Gbit/s", "--bandwidth without --project"),
        (
            "--project 8 --bandwidth 25",
            "--bandwidth is '25'; expected a positive number with a unit",
        ),
        ("--project 8 --latency fast", "--latency is 'fast'"),
        ("--project 8x8", "--project names 8x8, 8 hosts; expected --bandwidth"),
        ("--project 8x", "--project names '8x'"),
        ("--local-latency 2us", "--local-latency without --project"),
        (
            "--project 8 --local-bandwidth 9",
            "--local-bandwidth is '9'; expected a positive number with a unit",
        ),
        ("--project 8 --gradients 3GB", "--gradients beside train.py"),
        ("--compare nothing.json", "--compare nothing.json: No such file or directory"),
        ("--compare train.py", "--compare train.py: it is no JSON"),
        (
            "--json missing/out.json",
            "--json missing/out.json: expected a file in a directory that exists",
        ),
        ("--keep-runs .", ". exists already"),
    ],
)
def test_usage(bench: Lockstep, words: str, said: str) -> None:
    done = bench("bench", *words.split(), "train.py")
    assert done.code == 2
    assert said in done.err
    assert "hint: " in done.err or "expected" in done.err
    assert "round" not in done.err, "nothing has run"


GIVEN = "--project 2x8,1x4 --gradients 14GB --compute 300ms"
SPEEDS = "--bandwidth 400Gbit/s --local-bandwidth 200GB/s"


def test_given_numbers_are_projected_without_a_script(lockstep: Lockstep) -> None:
    done = lockstep("bench", *f"{GIVEN} {SPEEDS} --json out.json".split())
    assert done.code == 0, done.err
    content = written(lockstep)
    assert (content["kind"], content["results"]) == ("arithmetic", [])
    one, two = content["projection"]
    assert [(row["ranks"], row["hosts"]) for row in (one, two)] == [(4, 1), (16, 2)]
    assert one["exchange_seconds"] == pytest.approx(1.5 * 14 / 200, rel=1e-5)
    # 14 GB within each host, then half of them out of it and half of the sums back.
    assert two["exchange_seconds"] == pytest.approx(14 / 50 + 1.75 * 14 / 200, rel=1e-5)
    assert two["ring_step_seconds"] == pytest.approx(0.3 + 1.875 * 14 / 50, rel=1e-5)
    assert two["step_seconds"] == two["hosts_step_seconds"] < two["flat_step_seconds"]
    assert "nothing was measured" in done.out
    on_gpus = lockstep("bench", *f"{GIVEN} {SPEEDS} --devices gpu --json out.json".split())
    assert on_gpus.code == 0, on_gpus.err
    row = written(lockstep)["projection"][1]
    assert row["step_seconds"] == row["flat_step_seconds"] == two["flat_step_seconds"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("", "no SCRIPT; expected one, or --project with --gradients and --compute"),
        ("--project 8 --compute 1s", "no SCRIPT"),
        (f"{GIVEN} --bandwidth 1GB/s", "--project without SCRIPT and without --local-bandwidth"),
        (f"{GIVEN} {SPEEDS} --compute 0s", "--compute is 0"),
        (f"{GIVEN} {SPEEDS} --gradients 14", "--gradients is '14'"),
        (f"{GIVEN} {SPEEDS} --strategies ddp,ps", "--strategies without SCRIPT"),
        (f"{GIVEN} {SPEEDS} --json no/out.json", "expected a file in a directory that exists"),
    ],
)
def test_usage_without_a_script(lockstep: Lockstep, words: str, said: str) -> None:
    done = lockstep("bench", *words.split())
    assert done.code == 2
    assert said in done.err
    assert "Traceback" not in done.err


def test_without_plotly_a_page_is_refused_before_anything_runs(bench: Lockstep) -> None:
    bench.script("raise ImportError('not here')", "shadow/plotly.py")
    shadow = {"PYTHONPATH": str(bench.directory / "shadow")}
    done = bench("bench", "train.py", "--html", "out.html", env=shadow)
    assert done.code == 2
    assert "charts need plotly" in done.err
    assert "hint: pip install 'torch-lockstep[report]'" in done.err
    assert "round" not in done.err


@pytest.mark.forked
def test_results_of_another_script_are_refused_before_anything_runs(bench: Lockstep) -> None:
    row = {"ranks": 1, "strategy": None, "exchange": None, "samples_per_second": 1.0}
    other = {"format": 1, "kind": "result", "machine": {}, "results": [row]}
    script = {"name": "other.py", "arguments": ["--epochs", "2"]}
    (bench.directory / "other.json").write_text(json.dumps({**other, "script": script}))
    done = bench("bench", "train.py", "--compare", "other.json")
    assert done.code == 2
    assert "name: 'train.py' here, 'other.py' there" in done.err
    assert "arguments: [] here, ['--epochs', '2'] there" in done.err
    assert "round" not in done.err
    (bench.directory / "new.json").write_text(json.dumps({**other, "script": script, "format": 9}))
    newer = bench("bench", "train.py", "--compare", "new.json")
    assert newer.code == 2
    assert "has format 9; this version reads up to 1" in newer.err
