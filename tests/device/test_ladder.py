"""Training on simulated devices has the CPU's digest: each strategy, eager and lazy, after kills."""

from __future__ import annotations

import json

import pytest

from tests.device.conftest import SCRIPT, digest_of

pytestmark = pytest.mark.forked

SIZES = ("1", "2", "4")
STRATEGIES = {
    "ddp": (),
    "tree": ("--exchange", "tree"),
    "fsdp": ("--strategy", "fsdp"),
    "ps": ("--strategy", "ps", "--servers", "1"),
    "pipeline": ("--strategy", "pipeline"),
}


#: Runs on one and two lazy devices are also part of those that are resumed and killed below.
#: `pipeline` on one holds the whole model.
FIRST = [(name, n, n == "4") for name in STRATEGIES for n in ("4", "2")]
FIRST += [("ddp", "1", True), ("ddp", "1", False)]
ALL = [(name, n, lazy) for name in STRATEGIES for n in SIZES for lazy in (True, False)]
SHRINK_GROW, OTHERS = ("2>1@9", "1>2@9"), ("4>2@9", "1>4@9")


@pytest.mark.ranks(4)
@pytest.mark.wide(beyond=len(FIRST))
@pytest.mark.parametrize(
    ("name", "ranks", "lazy"), FIRST + [case for case in ALL if case not in FIRST]
)
def test_the_digest_is_the_cpu_s(device, on_cpu, name: str, ranks: str, lazy: bool) -> None:
    assert digest_of(device("-n", ranks, *STRATEGIES[name], lazy=lazy)) == on_cpu


@pytest.mark.ranks(4)
@pytest.mark.wide(beyond=len(STRATEGIES))
@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.parametrize(("ranks", "lazy"), [("2", True), ("1", True), ("4", True), ("2", False)])
def test_the_digest_after_a_kill(device, on_cpu, name: str, ranks: str, lazy: bool) -> None:
    done = device("-n", ranks, *STRATEGIES[name], lazy=lazy, LOCKSTEP_FAULTS="kill@9")
    assert "restart 1" in done.err
    assert digest_of(done) == on_cpu


@pytest.mark.ranks(4)
@pytest.mark.wide(beyond=len(STRATEGIES))
@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.parametrize(
    ("layouts", "lazy"), [(SHRINK_GROW, True), (OTHERS, True), (SHRINK_GROW, False)]
)
def test_a_resume_with_other_sizes(device, on_cpu, name: str, layouts, lazy: bool) -> None:
    words = (*STRATEGIES[name], "--layouts", *layouts, "--json")
    done = device(*words, verb="verify", lazy=lazy)
    assert done.code == 0, done.out + done.err
    rows = json.loads(done.out)["layouts"]
    assert [row["layout"] for row in rows] == list(layouts)
    assert {row["digest"] for row in rows} == {f"sha256:{on_cpu}"}


@pytest.mark.ranks(2)
def test_workers_pin_memory(device, on_cpu) -> None:
    assert digest_of(device("-n", "2", WORKERS="2")) == on_cpu


@pytest.mark.ranks(2)
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_autocast_has_one_digest_on_devices(device, precision: str) -> None:
    """The CPU's own: PyTorch has other lists of operators for it than for accelerators."""
    runs = [("2", True), ("1", False)]
    found = {digest_of(device("-n", n, "--precision", precision, lazy=lazy)) for n, lazy in runs}
    assert len(found) == 1


def test_an_optimizer_that_is_made_before_the_model_is_placed(device, on_cpu) -> None:
    sgd = "torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)"
    late = f"    optimizer = run.optimizer({sgd})"
    early = f"    early = {sgd}\n    model = run.model(model)\n    optimizer = run.optimizer(early)"
    script = SCRIPT.replace("run.model(", "(").replace(late, early)
    assert "run.optimizer(early)" in script
    assert digest_of(device("-n", "1", script=script)) == on_cpu
