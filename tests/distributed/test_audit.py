"""The audit: what a pass of the loop's body leaves behind is refused by name, and nothing else is."""

from __future__ import annotations

import copy
import itertools
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import Dataset, IterableDataset

from lockstep.testing import RankError, assert_same, run_ranks
from tests.distributed.jobs import classes, quiet_run

pytestmark = pytest.mark.ranks(3)

#: Called with the model, the optimizer, the loss of a pass and what the script keeps; returns a loss.
Body = Callable[[nn.Module, Optimizer, torch.Tensor, dict[str, Any]], torch.Tensor]


def net() -> nn.Module:
    return nn.Sequential(
        nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Dropout(0.4), nn.ReLU(), nn.Linear(16, 4)
    )


def train(body: Body, after: Body | None = None, epochs: int = 2, **settings: Any) -> str:
    """Train on batches of 18 samples, and one of 12; `body` is called before the backward pass."""
    with quiet_run(**settings) as run:
        model = run.model(net())
        optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
        loader = run.loader(classes(48, (6,)), batch_size=18, shuffle=True)
        kept: dict[str, Any] = {"run": run, "count": 0, "twin": copy.deepcopy(model)}
        for _ in run.epochs(epochs):
            for x, y in loader:
                loss = body(model, optimizer, F.cross_entropy(model(x), y), kept)
                run.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                if after is not None:
                    after(model, optimizer, loss, kept)
    return run.digest()


def plainly(_m: nn.Module, _o: Optimizer, loss: torch.Tensor, _k: dict[str, Any]) -> torch.Tensor:
    return loss


def counting(
    _m: nn.Module, _o: Optimizer, loss: torch.Tensor, kept: dict[str, Any]
) -> torch.Tensor:
    kept["count"] += 1
    return loss * (1 + kept["count"] / 1000)


def warming(_m: nn.Module, o: Optimizer, loss: torch.Tensor, kept: dict[str, Any]) -> torch.Tensor:
    kept["count"] += 1
    for group in o.param_groups:
        group["weight_decay"] = 0.001 * kept["count"]  # no gradient shows it
    return loss


def clamping(m: nn.Module, _o: Optimizer, loss: torch.Tensor, _k: dict[str, Any]) -> torch.Tensor:
    for parameter in m.parameters():
        parameter.data.clamp_(-0.05, 0.05)
    return loss


def following(
    m: nn.Module, _o: Optimizer, loss: torch.Tensor, kept: dict[str, Any]
) -> torch.Tensor:
    if "teacher" not in kept:
        kept["teacher"] = kept["run"].register("teacher", kept["twin"])
    for own, other in zip(kept["teacher"].parameters(), m.parameters(), strict=True):
        own.data.mul_(0.9).add_(other.data, alpha=0.1)
    return loss


def summing(_m: nn.Module, _o: Optimizer, loss: torch.Tensor, _k: dict[str, Any]) -> torch.Tensor:
    if dist.is_initialized():
        dist.all_reduce(loss.detach().clone())
    return loss


def logging(_m: nn.Module, _o: Optimizer, loss: torch.Tensor, kept: dict[str, Any]) -> torch.Tensor:
    """Keep what no later pass computes with."""
    kept.setdefault("losses", []).append(loss.item())
    kept["run"].log(loss=loss)
    kept["run"].print("seen", kept["run"].step)
    return loss


@pytest.mark.parametrize("body", [plainly, logging])
def test_an_audit_changes_no_bit(body: Body) -> None:
    """On 1, 2 and 3 ranks with 4 replicas: a rank hosts 4, 2, or 2 and 1 of them."""
    audited = assert_same(train, [1, 2, 3], body, replicas=4)
    environ = {"LOCKSTEP_REPLICAS": "4", "LOCKSTEP_AUDIT": "off"}
    assert run_ranks(train, 2, body, environ=environ) == [audited] * 2


@pytest.mark.parametrize(
    ("body", "after", "words"),
    [
        (counting, None, r"replica \d in step 2.*the loss was .* and .* in its own"),
        (clamping, None, r"changed 0.weight of Sequential.*besides by optimizer.step"),
        (plainly, clamping, r"changed 0.weight of Sequential"),
        (plainly, following, r"changed 0.weight of Sequential \(registered object 0\), "),
    ],
)
@pytest.mark.parametrize("ranks", [1, 2])
def test_what_a_pass_leaves_behind_is_refused(
    body: Body, after: Body | None, words: str, ranks: int
) -> None:
    with pytest.raises(RankError, match=f"(?s)AuditError: .*{words}.*--audit off"):
        run_ranks(train, ranks, body, after, environ={"LOCKSTEP_REPLICAS": "4"})


def test_settings_that_each_pass_changes_are_refused_where_a_rank_hosts_one_replica() -> None:
    """With several, they are compared within a global batch."""
    with pytest.raises(RankError, match=r"AuditError: .*the settings of optimizers differ"):
        run_ranks(train, 2, warming, environ={"LOCKSTEP_REPLICAS": "2"})
    with pytest.raises(RankError, match="StepError: weight_decay of group 0 of SGD changed"):
        run_ranks(train, 1, warming, environ={"LOCKSTEP_REPLICAS": "2"})


def test_collective_calls_in_the_body_are_refused_and_do_not_hang() -> None:
    """Three replicas on two ranks: one makes two passes for each of the other's."""
    with pytest.raises(RankError, match=r"AuditError: .* made 1 collective call"):
        run_ranks(train, 2, summing, environ={"LOCKSTEP_REPLICAS": "2"})


@pytest.mark.parametrize("environ", [{"LOCKSTEP_AUDIT": "off"}, {"LOCKSTEP_EXACT": "0"}])
def test_it_can_be_switched_off(environ: dict[str, str]) -> None:
    run_ranks(train, 1, counting, environ={"LOCKSTEP_REPLICAS": "2", **environ})


def test_a_single_replica_has_none() -> None:
    """A pass is a step there, on every layout."""
    run_ranks(train, 1, counting, environ={"LOCKSTEP_REPLICAS": "1"})


def late(_m: nn.Module, _o: Optimizer, loss: torch.Tensor, kept: dict[str, Any]) -> torch.Tensor:
    """Compute with the count from step 10 on."""
    kept["count"] += 1
    return loss * (1 + kept["count"]) if kept["run"].step >= 10 else loss


def test_what_matters_later_is_found_at_the_next_audit() -> None:
    """Of two epochs of 3 steps none comes to it; of eight one does, at step 16 of 24."""
    run_ranks(train, 2, late, environ={"LOCKSTEP_REPLICAS": "2"})
    with pytest.raises(RankError, match=r"AuditError: replica 1 in step 16"):
        run_ranks(train, 2, late, None, 8, environ={"LOCKSTEP_REPLICAS": "2"})
    first = {"LOCKSTEP_REPLICAS": "2", "LOCKSTEP_AUDIT": "first"}
    with pytest.raises(RankError, match=r"AuditError"):
        run_ranks(train, 2, late, None, 8, environ={**first, "LOCKSTEP_AUDIT": "12"})


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_rank_that_computes_wrongly_is_named(ranks: int) -> None:
    environ = {"LOCKSTEP_REPLICAS": "4", "LOCKSTEP_FAULTS": "flip@3"}
    words = "AuditError: .*rank 1"
    if ranks > 2:
        words = "WrongRankError: rank 2 .* than the other ranks.*confirmed up to step 2"
    with pytest.raises(RankError, match=rf"(?s){words}"):
        run_ranks(train, ranks, plainly, environ=environ)


def one_batch(audit: str) -> None:
    """Each epoch is one batch, so that the first loop has no second one."""
    with quiet_run(replicas=2, audit=audit) as run:
        model = run.model(nn.Linear(6, 4))
        optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        loader = run.loader(classes(8, (6,)), batch_size=8)
        count = 0
        for _ in run.epochs(3):
            for x, y in loader:
                count += 1
                run.backward(F.cross_entropy(model(x), y) * count)
                optimizer.step()
                optimizer.zero_grad()


@pytest.mark.parametrize("audit", ["first", "512"])
def test_loops_of_one_batch(audit: str) -> None:
    with pytest.raises(RankError, match="AuditError: replica 1 in step 2"):
        run_ranks(one_batch, 1, audit)


# --- loops of other forms -----------------------------------------------------------------------------


def peeking() -> str:
    """Look at the first batch alone, pass through data in training mode, and train."""
    with quiet_run() as run:
        model = run.model(nn.Linear(6, 4))
        optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        loaders = [run.loader(classes(24, (6,), seed), batch_size=8) for seed in range(2)]
        for _ in range(2):
            x, _y = next(iter(loaders[0]))
            assert torch.equal(x, classes(24, (6,))[: len(x)][0] if run.world.is_main else x)
        for epoch in run.epochs(3):
            seen = 0
            for x, y in loaders[epoch % 2]:
                F.cross_entropy(model(x), y)
                seen += len(x)
            if run.world.size == 1:
                assert seen == 24, "each sample once where no backward pass is run"
            for x, y in loaders[0]:
                run.backward(F.cross_entropy(model(x), y))
                optimizer.step()
                optimizer.zero_grad()
    return run.digest()


def test_loops_that_do_not_train_see_each_sample_once() -> None:
    assert_same(peeking, [1, 2], replicas=2)


def several_passes() -> str:
    """A discriminator and a generator; a state for each microbatch of a pass."""
    with quiet_run() as run:
        model, other = run.model(net()), run.model(nn.Linear(4, 6))
        ours = run.optimizer(torch.optim.Adam(model.parameters()))
        theirs = run.optimizer(torch.optim.Adam(other.parameters()))
        loader = run.loader(classes(24, (6,)), batch_size=8)
        for _ in run.epochs(2):
            for batch in run.batches(loader):
                states: dict[int, torch.Tensor] = {}
                for turn in range(3):
                    for number, (x, y) in enumerate(batch):
                        hidden = model(x + states.get(number, 0.0))
                        states[number] = other(hidden.detach()).detach()
                        optimizer, loss = ours, F.cross_entropy(hidden, y)
                        if turn == 1:
                            optimizer, loss = theirs, F.mse_loss(other(hidden.detach()), x)
                        run.backward(loss)
                        optimizer.step()
                        optimizer.zero_grad()
    return run.digest()


def test_several_passes_over_a_batch() -> None:
    assert_same(several_passes, [1, 2], replicas=4)


def with_strategy(strategy: str, body: Body) -> str:
    with quiet_run(strategy=strategy) as run:
        model = run.model(nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 4)))
        optimizer = run.optimizer(torch.optim.Adam(model.parameters(), lr=0.01))
        loader = run.loader(classes(24, (6,)), batch_size=8, shuffle=True)
        kept: dict[str, Any] = {"run": run, "count": 0}
        for x, y in itertools.chain.from_iterable(loader for _ in run.epochs(2)):
            run.backward(body(model, optimizer, F.cross_entropy(model(x), y), kept))
            optimizer.step()
            optimizer.zero_grad()
        return run.digest()


@pytest.mark.parametrize("strategy", ["fsdp", "pipeline"])
def test_every_strategy(strategy: str) -> None:
    environ = {"LOCKSTEP_REPLICAS": "2"}
    audited = run_ranks(with_strategy, 2, strategy, plainly, environ=environ)
    off = {**environ, "LOCKSTEP_AUDIT": "off"}
    assert run_ranks(with_strategy, 2, strategy, plainly, environ=off) == audited
    with pytest.raises(RankError, match="AuditError: replica"):
        run_ranks(with_strategy, 2, strategy, counting, environ=environ)


# --- data that changes ----------------------------------------------------------------------------------


class Noisy(Dataset[Any]):
    """Adds noise in place: to the values that are kept."""

    def __init__(self) -> None:
        self.values = torch.zeros(24, 6)

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> Any:
        row = self.values[index]
        row += 0.1 * torch.randn(6)
        return row, index % 4


def on_noise(workers: int) -> None:
    with quiet_run() as run:
        loader = run.loader(Noisy(), batch_size=8, num_workers=workers)
        list(loader)


@pytest.mark.parametrize(("ranks", "workers"), [(1, 0), (1, 1), (2, 0)])
def test_a_dataset_that_changes_its_samples_is_refused(ranks: int, workers: int) -> None:
    words = r"loader 0 \(Noisy\): samples .* have different values when the dataset is asked for them again"
    with pytest.raises(RankError, match=words):
        run_ranks(on_noise, ranks, workers, environ={"LOCKSTEP_REPLICAS": "2"})


class Rows(IterableDataset[Any]):
    """A stream with one sample that depends on the rank: a value, or a name that does not matter."""

    def __init__(self, odd: int, kind: str) -> None:
        self.own = int(os.environ["RANK"]) == odd
        self.kind = kind

    def __iter__(self) -> Iterator[Any]:
        generator = torch.Generator().manual_seed(7)
        for number in range(48):
            x = torch.rand(6, generator=generator)
            if self.kind == "value" and self.own and number >= 12:
                x = -x
            yield x, number % 4, f"rank-{os.environ['RANK']}" if self.kind == "name" else "row"


def on_rows(odd: int, kind: str) -> str:
    with quiet_run(replicas=6) as run:
        model = run.model(nn.Linear(6, 4))
        optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        for x, y, _name in run.loader(Rows(odd, kind), batch_size=12):
            run.backward(F.cross_entropy(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
    return run.digest()


@pytest.mark.parametrize(("ranks", "odd"), [(2, 1), (3, 1), (3, 2)])
def test_other_samples_on_one_rank_are_no_wrong_processor(ranks: int, odd: int) -> None:
    words = (
        r"(?s)AuditError: replica \d in step 2, computed by rank \d and by its own rank \d: the loader "
        r"gave the two passes different samples, and the loss was .*sort lists of files"
    )
    with pytest.raises(RankError, match=words):
        run_ranks(on_rows, ranks, odd, "value")


def test_parts_of_samples_without_effect_may_differ() -> None:
    digests = run_ranks(on_rows, 3, 1, "name")
    assert len(set(digests)) == 1


# --- faults of the audit itself, and bodies that cannot be run again ---------------------------------


class Odd:
    """An object of the script's whose methods raise."""

    def __eq__(self, _other: object) -> bool:
        raise RuntimeError("no comparison")

    __hash__ = None  # type: ignore[assignment]

    def __len__(self) -> int:
        raise RuntimeError("no length")


class Broken:
    """A registered object whose state cannot be taken while the loop is under way."""

    def __init__(self) -> None:
        self.is_busy = False

    def state_dict(self) -> dict[str, int]:
        if self.is_busy:
            raise OSError("gone")
        return {}

    def load_state_dict(self, state: dict[str, int]) -> None: ...


def odd_objects() -> str:
    with quiet_run(replicas=2) as run:
        model = run.model(nn.Linear(6, 4))
        optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        loader = run.loader(classes(24, (6,)), batch_size=8)
        broken = run.register("broken", Broken())
        cycle: list[Any] = [Odd()]
        cycle.append(cycle)
        huge = list(range(200_000))
        for x, y in loader:
            run.backward(F.cross_entropy(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
            cycle.append(huge)
            broken.is_busy = True
        broken.is_busy = False
    return run.digest()


def test_objects_that_raise_end_no_run() -> None:
    (digest,) = run_ranks(odd_objects, 1)
    assert digest.startswith("sha256:")


def consuming(items: list[int]) -> None:
    with quiet_run(replicas=2) as run:
        model = run.model(nn.Linear(6, 4))
        optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        for x, y in run.loader(classes(24, (6,)), batch_size=8):
            items.pop()
            run.backward(F.cross_entropy(model(x), y))
            optimizer.step()
            optimizer.zero_grad()


def consume_two() -> None:
    consuming(list(range(2)))


def test_a_body_that_cannot_be_run_again_is_told_of_the_audit() -> None:
    with pytest.raises(RankError, match=r"(?s)IndexError.*extra pass of the audit.*--audit off"):
        run_ranks(consume_two, 1)
