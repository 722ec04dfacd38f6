"""The run in one process: parity with plain PyTorch, guards, and what it hands out."""

from __future__ import annotations

import contextlib
import copy
import gc
import itertools
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    RandomSampler,
    Sampler,
    Subset,
    TensorDataset,
)

import lockstep
from lockstep.engine.data.randomness import set_key
from lockstep.engine.layout import keys
from lockstep.engine.layout.permutation import ShuffledOrder
from lockstep.engine.layout.replicas import share
from lockstep.engine.layout.tree import total
from lockstep.engine.training.digest import digest
from lockstep.errors import (
    AuditError,
    CheckpointError,
    LoaderError,
    ModelError,
    NonFiniteLossError,
    RunDirectoryError,
    StepError,
    UsageError,
)
from lockstep.state.record import events, steps

SEED, LENGTH, BATCH, EPOCHS = 5, 45, 8, 3


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.4))
        self.head = nn.Linear(16, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x))


class Noisy(Dataset):
    """Samples that draw at every look."""

    def __init__(self) -> None:
        self.x = torch.randn(LENGTH, 6, generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self.x[index] + 0.1 * torch.randn(6), index % 3


def plain_batches(epoch: int, loader: int = 0):
    """The batches of an epoch, made by hand from the same order and the same keys."""
    dataset = Noisy()
    order = ShuffledOrder(LENGTH, keys.derive(SEED, keys.ORDER, loader, epoch, 0))(
        0, LENGTH
    ).tolist()
    for step, start in enumerate(range(0, LENGTH, BATCH)):
        samples = []
        for index in order[start : start + BATCH]:
            set_key(keys.derive(SEED, keys.SAMPLE, loader, epoch, 0, index))
            samples.append(dataset[index])
        x, y = zip(*samples, strict=True)
        set_key(keys.derive(SEED, keys.FORWARD, loader, epoch, 0, step, 0, 0))
        yield step, torch.stack(x), torch.tensor(y)


@pytest.mark.parametrize("optimizer_of", [torch.optim.SGD, torch.optim.AdamW])
def test_one_replica_equals_a_plain_loop(make_run, optimizer_of) -> None:
    set_key(keys.derive(SEED, keys.INIT))
    net = Net()
    optimizer = optimizer_of(net.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
    losses = []
    for epoch in range(EPOCHS):
        for _, x, y in plain_batches(epoch):
            loss = F.cross_entropy(net(x), y)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(net.parameters(), 0.7)
            optimizer.step()
            scheduler.step()
            losses.append(loss.item())

    found = []
    with make_run(seed=SEED) as run:
        model = run.model(Net())
        optimizer = run.optimizer(optimizer_of(model.parameters(), lr=0.05))
        scheduler = run.scheduler(torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20))
        loader = run.loader(Noisy(), batch_size=BATCH, shuffle=True)
        for _ in run.epochs(EPOCHS):
            for x, y in loader:
                loss = F.cross_entropy(model(x), y)
                run.backward(loss)
                run.clip_grad_norm_(model, 0.7)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
                found.append(loss.item())
        assert run.digest() == digest([net.state_dict()])
    assert found == losses
    assert len(set(found)) == 18


@pytest.mark.parametrize("length", [12, 10, 3], ids=["even", "uneven", "stand-in"])
def test_gradients_of_replicas_are_weighed_and_summed_in_tree_order(make_run, length: int) -> None:
    inputs = torch.randn(length, 6) * 10.0 ** torch.arange(length).remainder(5).unsqueeze(1)
    with make_run(replicas=4) as run:
        model = run.model(nn.Linear(6, 3))
        for (x,) in run.loader(TensorDataset(inputs), batch_size=12):
            run.backward(model(x).square().mean())
        parts = [inputs[part.start : part.stop] for part in (share(length, 4, r) for r in range(4))]
        each = [
            torch.autograd.grad(
                model(x).square().mean(), model.weight, torch.tensor(len(x) / length)
            )[0]
            for x in parts
            if len(x)
        ]
        each += [torch.zeros_like(model.weight)] * (4 - len(each))
        assert torch.equal(model.weight.grad, total(each, torch.add))
        (whole,) = torch.autograd.grad(model(inputs).square().mean(), model.weight)
        torch.testing.assert_close(model.weight.grad, whole, rtol=1e-3, atol=1e-3)


def test_another_seed_gives_another_digest(make_run) -> None:
    digests = set()
    for seed in (0, 1):
        with make_run(seed=seed) as run:
            run.model(Net())
            digests.add(run.digest())
    assert len(digests) == 2


def gan() -> tuple[nn.Module, nn.Module]:
    generator = nn.Sequential(nn.Linear(2, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Linear(12, 6))
    return generator, nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 1))


def gan_losses(g: nn.Module, d: nn.Module, x: torch.Tensor) -> tuple[Any, Any]:
    def of_d() -> torch.Tensor:
        return F.softplus(-d(x)).mean() + F.softplus(d(g(torch.randn(len(x), 2)).detach())).mean()

    def of_g() -> torch.Tensor:
        return F.softplus(-d(g(torch.randn(len(x), 2)))).mean()

    return of_d, of_g


def train_gan(run: Any) -> str:
    with run:
        g, d = map(run.model, gan())
        of_g = run.optimizer(torch.optim.Adam(g.parameters(), lr=0.01))
        of_d = run.optimizer(torch.optim.Adam(d.parameters(), lr=0.01))
        loader = run.loader(Noisy(), batch_size=BATCH, shuffle=True)
        for _ in run.epochs(2):
            for batch in run.batches(loader):
                for turn, optimizer in enumerate((of_d, of_g)):
                    for x, _ in batch:
                        optimizer.zero_grad()
                        run.backward(gan_losses(g, d, x)[turn]())
                        optimizer.step()
        assert run.step == 2 * 2 * 6
        return run.digest()


def test_a_gan_equals_a_plain_alternating_loop(make_run) -> None:
    set_key(keys.derive(SEED, keys.INIT))
    g, d = gan()
    optimizers = [torch.optim.Adam(m.parameters(), lr=0.01) for m in (d, g)]
    for epoch in range(2):
        for step, x, _ in plain_batches(epoch):
            for turn, optimizer in enumerate(optimizers):
                set_key(keys.derive(SEED, keys.FORWARD, 0, epoch, 0, step, 0, turn))
                optimizer.zero_grad()
                gan_losses(g, d, x)[turn]().backward()
                optimizer.step()
    assert train_gan(make_run(seed=SEED)) == digest([g.state_dict(), d.state_dict()])


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_gan_through_a_process_group(make_run, request, replicas: int) -> None:
    alone = train_gan(make_run(seed=SEED, replicas=replicas))
    request.getfixturevalue("lone_group")
    assert train_gan(make_run(seed=SEED, replicas=replicas)) == alone


def test_two_updates_in_one_microbatch_are_refused_withseveral_replicas(make_run) -> None:
    with (  # noqa: PT012
        pytest.raises(StepError, match="used after optimizer") as caught,
        make_run(replicas=4) as run,
    ):
        g, d = map(run.model, gan())
        of_g = run.optimizer(torch.optim.SGD(g.parameters(), lr=0.1))
        of_d = run.optimizer(torch.optim.SGD(d.parameters(), lr=0.1))
        for x, _ in run.loader(Noisy(), batch_size=BATCH):
            with torch.no_grad():
                fake = g(torch.randn(len(x), 2))
            run.backward(F.softplus(d(fake)).mean() + F.softplus(-d(x)).mean())
            of_d.step()
            of_d.zero_grad()
            run.backward(F.softplus(-d(g(torch.randn(len(x), 2)))).mean())
            of_g.step()
    assert "run.batches" in caught.value.hint


def test_an_evaluation_inside_a_training_loop(make_run) -> None:
    """With one replica a rank may evaluate in the middle of a microbatch, and go on."""
    with make_run() as run:
        model = run.model(nn.Linear(6, 3))
        optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        test = run.loader(Noisy(), batch_size=15)
        for x, y in run.loader(Noisy(), batch_size=BATCH):
            with torch.no_grad():
                run.mean(F.cross_entropy(model(a), b) for a, b in test)
            run.backward(F.cross_entropy(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
        assert run.step == 6


def test_leaving_a_loop_inside_a_batch_keeps_replica_zeros_buffers(make_run) -> None:
    """On as many ranks as replicas, every rank would leave with its forward pass done."""
    with make_run(replicas=4) as run:
        model = run.model(nn.BatchNorm1d(2))
        twin = copy.deepcopy(model)
        loader = run.loader(TensorDataset(torch.randn(32, 2)), batch_size=16)
        seen = []
        for _ in range(2):
            for (x,) in loader:
                model(x)
                seen.append(x)
                break
        for x in seen:
            twin(x)
        run.digest()  # takes the state that all ranks agree on
        assert torch.equal(model.running_mean, twin.running_mean)
        assert model.num_batches_tracked == 2


def test_what_is_exported_after_leaving_a_loop_is_what_the_digest_says(make_run, tmp_path) -> None:
    with make_run(replicas=2) as run:
        model = run.model(nn.BatchNorm1d(2))
        for (x,) in run.loader(TensorDataset(torch.randn(32, 2)), batch_size=16):
            model(x)
            break
        run.export(tmp_path / "one.pt")
        assert digest([torch.load(tmp_path / "one.pt", weights_only=True)]) == run.digest()


def test_buffers_of_a_short_last_batch_without_gradients(make_run) -> None:
    """As when batch statistics are estimated anew: replica 0's count, stand-ins are not shown."""
    with make_run(replicas=4) as run, torch.no_grad():
        model = run.model(nn.BatchNorm1d(2))
        for (x,) in run.loader(TensorDataset(torch.randn(10, 2, 3)), batch_size=8):
            model(x)
        assert model.num_batches_tracked == 2


def test_an_exception_in_a_loop_starts_nothing_that_waits_for_others(
    make_run, lone_group, monkeypatch
) -> None:
    import torch.distributed as dist

    with pytest.raises(ZeroDivisionError), make_run(replicas=1) as run:  # noqa: PT012
        model = run.model(nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 1)))
        called = []
        for x, _ in run.loader(Noisy(), batch_size=BATCH):
            model(x)
            for name in ("broadcast", "all_reduce", "barrier"):
                monkeypatch.setattr(dist, name, lambda *_, name=name, **__: called.append(name))
            raise ZeroDivisionError
    assert called == []


# --- guards ----------------------------------------------------------------------------------------


def test_backward_needs_a_loop(make_run) -> None:
    with make_run() as run:
        model = run.model(nn.Linear(6, 1))
        with pytest.raises(StepError, match=r"run\.backward was called outside of a loop"):
            run.backward(model(torch.randn(2, 6)).mean())


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda model, x: model(x), r"the loss is \(8, 1\); expected a scalar"),
        (lambda _model, _x: 1.0, "the loss is float"),
        (lambda model, x: model(x).mean().detach(), "the loss needs no gradient"),
        (lambda _model, x: nn.Linear(6, 1)(x).mean(), "comes from no model of the run"),
    ],
)
def test_losses_that_are_none(make_run, loss, message: str) -> None:
    refused = pytest.raises(ModelError, match=message)
    with refused, make_run() as run:
        model = run.model(nn.Linear(6, 1))
        for x, _ in run.loader(Noisy(), batch_size=BATCH):
            run.backward(loss(model, x))


def test_a_loss_of_one_element(make_run) -> None:
    with make_run() as run:
        model = run.model(nn.Linear(6, 1))
        for x, _ in run.loader(Noisy(), batch_size=BATCH):
            run.backward(model(x).mean().reshape(1))
            assert model.weight.grad is not None
            break


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_loss_that_had_its_backward_pass(make_run, replicas: int) -> None:
    again = pytest.raises(StepError, match="a forward pass of Linear that had its backward pass")
    with again, make_run(replicas=replicas) as run:
        model = run.model(nn.Linear(6, 1))
        for x, _ in run.loader(Noisy(), batch_size=BATCH):
            loss = model(x).mean()
            run.backward(loss)
            run.backward(loss)


def test_a_loader_that_is_cycled(make_run) -> None:
    kept = pytest.raises(StepError, match=r"outside of a loop[^$]*itertools\.cycle does so once")
    with kept, make_run() as run:
        model = run.model(nn.Linear(6, 1))
        for x, _ in itertools.cycle(run.loader(Noisy(), batch_size=BATCH)):
            run.backward(model(x).mean())


@pytest.mark.parametrize(
    ("code", "finishes"), [(0, True), (None, True), (3, False), ("why", False)]
)
def test_a_script_that_exits_inside_of_the_run(make_run, capsys, code, finishes: bool) -> None:
    """Without a failure it is the script's end; with one the run is not finished, and the code stays."""
    with pytest.raises(SystemExit) as left, make_run(replicas=2) as run:  # noqa: PT012
        model = run.model(nn.Linear(6, 1))
        for x, _ in run.loader(Noisy(), batch_size=BATCH):
            model(x)
        sys.exit(code)
    assert left.value.code == code
    assert ("lockstep: finished steps=0" in capsys.readouterr().out) == finishes


def test_an_error_that_was_caught_comes_again_at_the_end(make_run) -> None:
    refused = pytest.raises(ModelError, match="the loss needs no gradient")
    with refused, make_run() as run:
        model = run.model(nn.Linear(6, 1))
        for x, _ in run.loader(Noisy(), batch_size=BATCH):
            with contextlib.suppress(ModelError):
                run.backward(model(x).mean().detach())
            break


def test_a_wrong_argument_that_was_caught_ends_nothing(make_run) -> None:
    with make_run() as run, pytest.raises(UsageError):
        run.epochs(-1)


def test_two_backward_passes_of_one_model(make_run) -> None:
    twice = pytest.raises(StepError, match="called twice for Linear")
    with twice, make_run(replicas=2) as run:
        model = run.model(nn.Linear(6, 1))
        for x, _ in run.loader(Noisy(), batch_size=BATCH):
            run.backward(model(x).mean())
            run.backward(model(x).mean())


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_loss_that_is_not_finite(make_run, value: float) -> None:
    stops = pytest.raises(
        NonFiniteLossError, match=f"the loss is {value} in epoch 0, batch 0, replica 0"
    )
    with stops, make_run(stop_on_nan=True, replicas=2) as run:
        model = run.model(nn.Linear(6, 1))
        for x, _ in run.loader(Noisy(), batch_size=BATCH):
            run.backward(model(x).mean() * value)
    with make_run() as run:
        model = run.model(nn.Linear(6, 1))
        for x, _ in run.loader(Noisy(), batch_size=BATCH):
            run.backward(model(x).mean() * value)
            break


@pytest.mark.parametrize("call", ["mean", "sum", "gather", "barrier", "main_process_first"])
def test_ranks_meet_between_microbatches_only(make_run, call: str) -> None:
    with make_run(replicas=2) as run:
        for _ in run.loader(Noisy(), batch_size=BATCH):
            with pytest.raises(StepError, match=f"run.{call} was called inside a microbatch"):  # noqa: PT012
                if call == "main_process_first":
                    with run.main_process_first():
                        pass
                elif call == "barrier":
                    run.barrier()
                else:
                    getattr(run, call)([])
            break


def test_models_that_are_refused(make_run) -> None:
    with make_run() as run:
        net = nn.Linear(1, 1)
        assert run.model(net) is net
        with pytest.raises(ModelError, match="belongs to the run already"):
            run.model(net)
        with pytest.raises(ModelError, match=r"run\.model was given a int"):
            run.model(5)
        with pytest.raises(ModelError, match="no setting nonsense"):
            run.model(nn.Linear(1, 1), nonsense=1)


def test_loaders_that_are_refused(make_run) -> None:
    with make_run() as run:
        with pytest.raises(LoaderError, match="batch_size is missing"):
            run.loader(Noisy())
        adopted = DataLoader(Noisy(), batch_size=4)
        for extra in ({"batch_size": 4}, {"shuffle": True}, {"sampler": [1]}):
            with pytest.raises(LoaderError, match="expected one of the two"):
                run.loader(adopted, **extra)
        assert len(run.loader(adopted)) == 12


@pytest.mark.parametrize(
    "extra", [{"drop_last": True}, {"collate_fn": list}, {"num_workers": 1}, {"prefetch_factor": 2}]
)
def test_no_setting_beside_a_dataloader_is_passed_over(make_run, extra: dict) -> None:
    with make_run() as run, pytest.raises(LoaderError):
        run.loader(DataLoader(Noisy(), batch_size=4), **extra)


def test_a_setting_that_loaders_do_not_have(make_run) -> None:
    with make_run() as run, pytest.raises((LoaderError, TypeError), match="shufle"):
        run.loader(Noisy(), batch_size=4, shufle=True)


def test_a_loader_has_the_dataset_and_the_sampler_that_it_was_made_of(make_run) -> None:
    data, sampler = Noisy(), RandomSampler(range(LENGTH))
    with make_run() as run:
        alone = run.loader(data, batch_size=BATCH)
        sampled = run.loader(data, batch_size=BATCH, sampler=sampler)
        batched = run.loader(data, batch_sampler=BatchSampler(sampler, BATCH, drop_last=False))
        assert (alone.dataset, alone.sampler) == (data, None)
        assert (sampled.dataset, sampled.sampler) == (data, sampler)
        assert batched.sampler.sampler is sampler


def test_pinned_memory_may_be_asked_for(make_run) -> None:
    with make_run() as run:
        loader = run.loader(list(range(4)), batch_size=4, num_workers=1, pin_memory=False)
        assert [x.tolist() for x in loader] == [[0, 1, 2, 3]]


class Curriculum(Noisy):
    """Samples that depend on the epoch, which the script sets."""

    epoch = 0

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        x, y = super().__getitem__(index)
        return x * (1 + self.epoch), y


def test_workers_see_what_the_script_sets_on_the_dataset_before_a_loop(make_run) -> None:
    def seen(**workers: Any) -> list[float]:
        dataset = Curriculum()
        with make_run() as run:
            loader = run.loader(dataset, batch_size=LENGTH, **workers)
            found = []
            for epoch in run.epochs(3):
                dataset.epoch = epoch
                found += [x.sum().item() for x, _ in loader]
        return found

    assert seen(num_workers=1) == seen()
    assert seen(num_workers=1, persistent_workers=True) != seen(), "asked for: a copy for good"


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"exchange": "ring"}, UsageError, "exchange is 'ring'"),
        ({"devices": "tpu"}, UsageError, "devices is 'tpu'"),
        ({"name": "a/b"}, UsageError, "the run's name"),
    ],
)
def test_runs_that_are_refused(make_run, settings, error, message) -> None:
    with pytest.raises(error, match=message), make_run(**settings):
        pass


def test_epochs_are_counted_from_zero(make_run) -> None:
    with make_run() as run:
        assert [(epoch, run.epoch) for epoch in run.epochs(3)] == [(0, 0), (1, 1), (2, 2)]
        assert list(run.epochs(0)) == []
        with pytest.raises(UsageError, match="-1 epochs"):
            run.epochs(-1)


# --- what it hands out -----------------------------------------------------------------------------


def test_who_and_where(make_run) -> None:
    with make_run(replicas=3) as run:
        assert (run.is_main_process, run.replicas, run.world.size, run.step) == (True, 3, 1, 0)
        assert (run.device.type, run.exchange, run.exactness) == ("cpu", "none", "exact")
        assert (run.directory / "run.json").is_file()
        assert torch.get_num_threads() == 1


def test_first_and_barrier_on_one_rank(make_run) -> None:
    with make_run() as run:
        ran = []
        for _ in range(2):
            with run.main_process_first():
                ran.append(1)
        run.barrier()
        assert ran == [1, 1]


def test_print_and_the_final_line(make_run, capsys) -> None:
    with make_run() as run:
        run.print("a", 1, None, sep="|")
        expected = run.digest()
    out = capsys.readouterr().out.splitlines()
    assert out[0] == "a|1|None"
    assert out[1].startswith("lockstep: finished steps=0 seconds=")
    assert out[1].endswith(f" digest={expected}")


def test_register(make_run) -> None:
    with make_run() as run:
        run.model(nn.Linear(1, 1))
        before = run.digest()
        net = nn.Linear(2, 2)
        assert run.register("average", net) is net
        after = run.digest()
        assert after != before
        net.weight.data += 1
        assert run.digest() != after
        with pytest.raises(ModelError, match="average is registered already"):
            run.register("average", nn.Linear(1, 1))
        with pytest.raises(ModelError, match=r"a list without state_dict\(\)"):
            run.register("list", [])


def test_a_run_is_entered_once_and_not_used_after_its_end(make_run) -> None:
    run = make_run()
    with run:
        model = run.model(nn.Linear(6, 1))
        with pytest.raises(StepError, match="the run test was entered before; expected one `with`"):
            run.__enter__()
    digest_at_the_end = run.digest()
    calls = {
        "model": lambda: run.model(nn.Linear(6, 1)),
        "loader": lambda: run.loader([1, 2], batch_size=1),
        "epochs": lambda: run.epochs(1),
        "backward": lambda: run.backward(model(torch.ones(2, 6)).sum()),
        "save": run.save,
    }
    for name, call in calls.items():
        with pytest.raises(
            StepError, match=rf"run\.{name} was called after the end of the run test"
        ):
            call()
    with pytest.raises(StepError, match="was entered before"), run:
        pass
    assert run.digest() == digest_at_the_end


class Stateful:
    """A registered object with the state that it is made with."""

    def __init__(self, state: Any) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


def test_a_state_that_cannot_be_hashed_is_refused_when_it_is_registered(make_run) -> None:
    with make_run() as run:
        state = Stateful({"seen": [1, Path("here")]})
        with pytest.raises(
            ModelError, match=r"the state history\.seen\.1 is a PosixPath"
        ) as caught:
            run.register("history", state)
        assert "state_dict()" in caught.value.hint
        net = type("Net", (nn.Linear,), {"get_extra_state": lambda self: {"when": slice(2)}})
        with pytest.raises(ModelError, match=r"the state Net\._extra_state\.when is a slice"):
            run.model(net(1, 1))


def test_every_bit_of_a_registered_array_is_part_of_the_digest(make_run) -> None:
    with make_run() as run:
        values = np.zeros(5000)
        run.register("values", Stateful({"values": values}))
        before = run.digest()
        values[2500] = 1.0
        assert run.digest() != before


def test_export_round_trip(make_run, tmp_path) -> None:
    with make_run() as run:
        model = run.model(Net())
        run.export(tmp_path / "one.pt")
        second = run.model(nn.Linear(2, 2))
        run.export(tmp_path / "two.pt", second)
        with pytest.raises(ModelError, match="the run holds 2 models"):
            run.export(tmp_path / "three.pt")
        with pytest.raises(ModelError, match="the run holds 2 models"):
            run.export(tmp_path / "three.pt", nn.Linear(1, 1))
        with pytest.raises(CheckpointError, match="cannot be written"):
            run.export(tmp_path / "missing" / "three.pt", model)
    twin = Net()
    twin.load_state_dict(torch.load(tmp_path / "one.pt", weights_only=True))
    assert digest([twin.state_dict()]) == digest([model.state_dict()])
    assert list(torch.load(tmp_path / "two.pt", weights_only=True)) == ["weight", "bias"]


def test_export_through_a_process_group_has_plain_names(make_run, lone_group, tmp_path) -> None:
    with make_run() as run:
        model = run.model(Net())
        run.export(tmp_path / "one.pt", model)
    exported = torch.load(tmp_path / "one.pt", weights_only=True)
    assert digest([exported]) == digest([model.state_dict()])


def test_export_of_a_state_that_is_no_tensor(make_run, tmp_path) -> None:
    class Extra(nn.Linear):
        def get_extra_state(self) -> Any:
            return {"version": 3}

        def set_extra_state(self, state: Any) -> None:
            self.version = state["version"]

    with make_run() as run:
        run.model(Extra(1, 1))
        run.export(tmp_path / "one.pt")
    twin = Extra(1, 1)
    twin.load_state_dict(torch.load(tmp_path / "one.pt", weights_only=True))
    assert twin.version == 3


def test_bf16(make_run) -> None:
    digests = set()
    for precision in ("fp32", "bf16"):
        with make_run(precision=precision, replicas=2) as run:
            model = run.model(nn.Linear(6, 3))
            optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
            for x, y in run.loader(Noisy(), batch_size=BATCH):
                logits = model(x)
                assert logits.dtype == torch.float32
                run.backward(F.cross_entropy(logits, y))
                optimizer.step()
                optimizer.zero_grad()
            assert model.weight.dtype == torch.float32
            digests.add(run.digest())
    assert len(digests) == 2


# --- how it ends -----------------------------------------------------------------------------------


def recorded(run: Any) -> dict[str, Any]:
    return json.loads((run.directory / "run.json").read_text())


def test_a_finished_run_is_recorded(make_run) -> None:
    with make_run(replicas=2) as run:
        assert recorded(run)["status"] == "running"
        run.model(nn.Linear(1, 1))
    record = recorded(run)
    assert record["status"] == "finished"
    assert record["digest"] == run.digest()
    assert record["steps"] == 0
    assert (record["identity"]["replicas"], record["identity"]["threads"]) == (2, 1)


def test_a_failed_run_is_recorded(make_run) -> None:
    with pytest.raises(ZeroDivisionError), make_run() as run:
        raise ZeroDivisionError("here")
    assert recorded(run)["status"] == "failed"
    assert recorded(run)["error"] == "ZeroDivisionError: here"


def test_a_run_whose_end_fails_is_recorded_and_closed(make_run) -> None:
    class Broken:
        asked = 0

        def state_dict(self) -> Any:
            self.asked += 1
            return {"x": 1 // (2 - self.asked)}  # not when it is registered

        def load_state_dict(self, state: Any) -> None: ...

    with pytest.raises(ZeroDivisionError), make_run() as run:
        run.register("broken", Broken())
    record = recorded(run)
    run._session.close(ZeroDivisionError())  # whatever is left open
    assert record["status"] == "failed"


def test_a_finished_directory_is_not_taken_again(make_run, tmp_path) -> None:
    with make_run(run_dir=tmp_path / "a") as run:
        pass
    assert run.directory == tmp_path / "a"
    from lockstep.engine.training import context

    context.taken_directories.discard(tmp_path / "a")  # as in another process
    with pytest.raises(RunDirectoryError, match="is finished"):
        make_run(run_dir=tmp_path / "a")


class Redrawing(Sampler[int]):
    """Draws half of the samples anew for each loop, and keeps them."""

    def __init__(self) -> None:
        self.indices = list(range(6))

    def __iter__(self) -> Iterator[int]:
        self.indices = torch.randperm(12)[:6].tolist()
        return iter(self.indices)

    def __len__(self) -> int:
        return 6


@pytest.mark.parametrize("kind", ["sampler", "subset"])
def test_indices_that_each_epoch_draws_anew(make_run, tmp_path, kind) -> None:
    from lockstep.engine.training import context

    seen: list[list[float]] = []

    def train(place: str, stop: int) -> None:
        context.taken_directories.discard(tmp_path / place)  # as in another process
        subset = Subset(TensorDataset(torch.arange(12.0)), range(6))
        made = (subset.dataset, Redrawing()) if kind == "sampler" else (subset, None)
        with make_run(run_dir=tmp_path / place, seed=1) as run:
            model = run.model(nn.Linear(2, 1))
            optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
            loader = run.loader(made[0], sampler=made[1], batch_size=2)
            for epoch in run.epochs(3):
                generator = torch.Generator().manual_seed(epoch)
                subset.indices = torch.randperm(12, generator=generator)[:6].tolist()
                for (x,) in loader:
                    run.backward(model(x).mean())
                    optimizer.step()
                    seen.append(x.tolist())
                    run.save()
                    if len(seen) == stop:
                        raise KeyboardInterrupt

    train("whole", 0)
    whole, seen[:] = seen[:], []
    with pytest.raises(KeyboardInterrupt):
        train("parts", 6)  # in the middle of epoch 1
    stopped = len(seen)
    train("parts", 0)
    assert seen[:stopped] == whole[:stopped]
    assert seen[-4:] == whole[-4:]


@pytest.mark.parametrize("replica", [0, 1, 2])
def test_a_continue_is_refused_with_what_leaves_a_microbatch_out(make_run, replica) -> None:
    skipped = pytest.raises(StepError, match="Linear had no backward pass for a replica")
    with skipped as caught, make_run(replicas=3, audit="off") as run:
        model = run.model(nn.Linear(1, 1))
        optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        for batch in run.batches(run.loader(TensorDataset(torch.ones(9, 1)), batch_size=6)):
            for number, (x,) in enumerate(batch):
                if batch.index == 1 and number == replica:
                    continue
                run.backward(model(x).mean())
                optimizer.step()
                optimizer.zero_grad()
    assert "weight=len(x) if torch.isfinite(loss) else 0" in str(caught.value.hint)


def over_tokens(run: lockstep.Run, rows: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Train twice on the tokens that `rows` says; of the second batch the loss is no number."""
    model = run.model(nn.Linear(1, 1))
    loader = run.loader(TensorDataset(torch.tensor([[0.0], [1.0]])), batch_size=2)
    for finite in (True, False):
        for (x,) in loader:
            tokens = rows(x[:, 0]).sum()
            summed = (model(x)[:, 0] * x[:, 0]).sum()
            if finite or tokens:
                run.backward(summed / tokens.clamp(min=1), weight=tokens)
            else:
                run.backward(0 * summed / tokens, weight=tokens)
        if finite or run.replicas > 1:
            assert [p.grad.item() for p in model.parameters()] == [1.0, 1.0]


def test_a_mean_over_nothing_counts_nothing(make_run) -> None:
    with make_run(replicas=2) as run:
        over_tokens(run, lambda x: x)


def test_a_batch_of_nothing_is_refused(make_run) -> None:
    refused = pytest.raises(StepError, match="weights of a global batch are all 0")
    with refused, make_run(replicas=1) as run:
        over_tokens(run, torch.zeros_like)


@pytest.mark.parametrize("settings", [{}, {"multi_avg_fn": get_ema_multi_avg_fn()}])
def test_an_average_is_updated_between_batches(make_run, settings) -> None:
    refused = pytest.raises(
        AuditError, match=r"changed .* of AveragedModel .* besides by optimizer\.step"
    )
    with refused, make_run(replicas=2) as run:
        model = run.model(nn.Linear(1, 1))
        average = AveragedModel(copy.deepcopy(model), **settings)
        run.register("average", average)
        loader = run.loader(TensorDataset(torch.ones(8, 1)), batch_size=4)
        for batch in run.batches(loader):
            for _ in batch:
                pass
            average.update_parameters(model)
        assert average.n_averaged == 2
        model.weight.data.add_(1)
        any(average.update_parameters(model) for _ in loader)


@pytest.mark.parametrize("replicas", [1, 3])
def test_the_number_of_the_global_batch(make_run, replicas) -> None:
    with make_run(replicas=replicas) as run:
        loader = run.loader(TensorDataset(torch.ones(11, 1)), batch_size=4)
        inner = run.loader(TensorDataset(torch.ones(6, 1)), batch_size=3)
        with pytest.raises(StepError, match=r"run\.batch_index was called outside of a loop"):
            run.batch_index  # noqa: B018 - asking is what is refused
        for _ in run.epochs(2):
            assert [run.batch_index for _ in loader] == sorted([0, 1, 2] * replicas)
        for count, batch in enumerate(run.batches(loader)):
            assert batch.index == run.batch_index == count
            for _ in range(2):
                assert {run.batch_index for _ in batch} == {count}
            run.sum(torch.ones(len(x)) for (x,) in inner if run.batch_index < 2)
            assert run.batch_index == count
        for _ in loader:
            break
        with pytest.raises(StepError, match="expected to be inside"):
            run.batch_index  # noqa: B018 - asking is what is refused


def test_a_model_that_is_registered_before_it_is_the_runs(make_run) -> None:
    with make_run(replicas=2) as run:
        net = nn.Linear(1, 1)
        run.register("net", net)
        model = run.model(net)
        optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        for (x,) in run.loader(TensorDataset(torch.ones(8, 1)), batch_size=4):
            run.backward(model(x).mean())
            optimizer.step()
            optimizer.zero_grad()
        assert run.step == 2


def test_steps_keep_no_tensors_until_records_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With thousands of them Python's garbage collector makes a full collection every few seconds."""
    for module in (events, steps):
        monkeypatch.setattr(module, "_FLUSH_SECONDS", 1e9)
    data, counts = TensorDataset(torch.randn(1200, 2), torch.randn(1200, 1)), []
    with lockstep.Run("kept", run_dir=tmp_path, progress=False) as run:
        model = run.model(nn.Linear(2, 1))
        optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.01))
        for x, y in run.loader(data, batch_size=4):
            loss = F.mse_loss(model(x), y)
            run.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            run.log(loss=loss)
            if run.step in (100, 300):
                counts.append(sum(type(one) is torch.Tensor for one in gc.get_objects()))
    first, last = counts
    assert last - first < 50


def test_losses_are_logged_beside_an_optimizer_without_learning_rates(tmp_path: Path) -> None:
    """Adafactor of transformers chooses its own: its groups have `lr=None`."""

    class WithoutRate(torch.optim.Optimizer):
        def __init__(self, parameters: Any) -> None:
            super().__init__([{"params": list(parameters), "lr": None}], {})

        def step(self, closure: Any = None) -> None:
            with torch.no_grad():
                for parameter in self.param_groups[0]["params"]:
                    parameter.sub_(0.1 * parameter.grad)

    data = TensorDataset(torch.randn(8, 2), torch.randn(8, 1))
    with lockstep.Run("rates", replicas=2, run_dir=tmp_path, progress=False) as run:
        model = run.model(nn.Linear(2, 1))
        optimizer = run.optimizer(WithoutRate(model.parameters()))
        for x, y in run.loader(data, batch_size=4):
            loss = F.mse_loss(model(x), y)
            run.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            run.log(loss=loss, shaped=loss.reshape(1))
    lines = (tmp_path / "events" / "rank-0.jsonl").read_text().splitlines()
    logged = [json.loads(line) for line in lines if '"kind": "log"' in line]
    assert len(logged) == 4
    assert all([own["loss"]] == own["shaped"] for own in logged)
