"""Training on simulated devices has the CPU's digest: each strategy, eager and lazy, after kills."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("train.py").read_text()
SIZES = ("1", "2", "4")
STRATEGIES = {
    "ddp": (),
    "tree": ("--exchange", "tree"),
    "fsdp": ("--strategy", "fsdp"),
    "ps": ("--strategy", "ps", "--servers", "1"),
    "pipeline": ("--strategy", "pipeline"),
}


def digest_of(done) -> str:
    assert done.code == 0, done.out + done.err
    (found,) = re.findall(r"digest=sha256:(\w+)", done.out)
    return found


@pytest.fixture
def device(lockstep, simulated):
    """Run the script on simulated devices; what it returns is called with words and more variables."""

    def run(*words: str, lazy: bool = True, verb: str = "run", **more: str):
        environ = {"PYTHONPATH": simulated, "SIM_LAZY": str(int(lazy)), "EXPECTED": "sim", **more}
        place = lockstep.script(SCRIPT)
        words = (*words, place) if verb == "run" else (place, *words)
        return lockstep(verb, *words, env=environ, timeout=200)

    return run


@pytest.fixture
def on_cpu(lockstep) -> str:
    """Return the digest of the script on the CPU, whatever accelerator there is."""
    words = ("run", "-n", "1", "--devices", "cpu", lockstep.script(SCRIPT))
    return digest_of(lockstep(*words, env={"EXPECTED": "cpu"}))


@pytest.mark.ranks(4)
@pytest.mark.parametrize("lazy", [False, True], ids=["eager", "lazy"])
@pytest.mark.parametrize(
    ("name", "ranks"), [("ddp", n) for n in SIZES] + [(name, "2") for name in list(STRATEGIES)[1:]]
)
def test_the_digest_is_the_cpu_s(device, on_cpu, name: str, ranks: str, lazy: bool) -> None:
    assert digest_of(device("-n", ranks, *STRATEGIES[name], lazy=lazy)) == on_cpu


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", STRATEGIES)
def test_the_digest_after_a_kill(device, on_cpu, name: str) -> None:
    done = device("-n", "2", *STRATEGIES[name], LOCKSTEP_FAULTS="kill@9")
    assert "restart 1" in done.err
    assert digest_of(done) == on_cpu


@pytest.mark.ranks(2)
def test_a_resume_with_other_sizes(device, on_cpu) -> None:
    done = device("--layouts", "2>1@9", "1>2@9", "--json", verb="verify")
    assert done.code == 0, done.out + done.err
    assert {row["digest"] for row in json.loads(done.out)["layouts"]} == {f"sha256:{on_cpu}"}


@pytest.mark.ranks(2)
def test_workers_pin_memory(device, on_cpu) -> None:
    assert digest_of(device("-n", "2", WORKERS="2")) == on_cpu


@pytest.mark.ranks(2)
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_autocast_has_one_digest_on_devices(device, precision: str) -> None:
    """The CPU's own: PyTorch has other lists of operators for it than for accelerators."""
    runs = [("1", True), ("2", True), ("2", False)]
    found = {digest_of(device("-n", n, "--precision", precision, lazy=lazy)) for n, lazy in runs}
    assert len(found) == 1


@pytest.mark.ranks(2)
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


@pytest.mark.ranks(2)
def test_memory_that_is_not_enough(device) -> None:
    done = device("-n", "2", SIM_MEMORY="30000")
    assert done.code == 1
    assert "sim out of memory" in done.err, done.err
