"""The asynchronous server: updates of whole batches, and how far workers may be ahead of them (A3)."""

from __future__ import annotations

import collections
import copy
import functools
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from lockstep.engine.exchange.base import Forest
from lockstep.engine.parameter_server.client import Clients
from lockstep.engine.parameter_server.messages import Kind
from lockstep.engine.parameter_server.strategy import RemoteModel
from lockstep.errors import MismatchError, ModelError, PeerError, StepError
from tests.unit.contexts import model_context
from tests.unit.engine.parameter_server.conftest import Service, workers

_LOCK = threading.Lock()
Make = Callable[[list[nn.Parameter]], Optimizer]


@functools.cache
def _net() -> nn.Module:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Conv2d(1, 3, 3), nn.Flatten(), nn.Linear(48, 7), nn.Linear(7, 2))
    return module.to(memory_format=torch.channels_last)


def net() -> nn.Module:
    """Return a new model with the same weights; the generator that makes them is all threads' own."""
    with _LOCK:
        return copy.deepcopy(_net())


def gradients(module: nn.Module, step: int, replica: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + replica)
    return [
        torch.empty_like(p).copy_(torch.randn(p.shape, generator=generator))
        for p in module.parameters()
    ]


class Worker:
    """A worker with a model of its own."""

    def __init__(self, clients: Clients, forest: Forest, make: Make, staleness: int = 0) -> None:
        self.module = net()
        self.optimizer = make(list(self.module.parameters()))
        block, group = range(forest.rank, forest.rank + 1), object()
        # The group is none that a model without buffers uses.
        where = model_context(forest.size, block=block, group=group, forest=forest)
        self.model = RemoteModel(self.module, where, clients, staleness)
        self.model.add_optimizer(self.optimizer)
        (self.remote,) = self.model._remotes
        self.rank = forest.rank

    def step(self, number: int, own: list[torch.Tensor | None] | None = None, **more: Any) -> None:
        own = gradients(self.module, number, self.rank) if own is None else own
        self.model._gradients_of = lambda _: [own]  # type: ignore[method-assign]
        self.model._place = more.get("place", number)
        self.optimizer.step()

    @property
    def values(self) -> list[torch.Tensor]:
        return [p.detach().clone() for p in self.module.parameters()]


def alone(make: Make, steps: int, replicas: int = 1) -> tuple[nn.Module, Optimizer]:
    """Return what one process comes to."""
    module = net()
    optimizer = make(list(module.parameters()))
    for step in range(1, steps + 1):
        one_more(module, optimizer, step, replicas)
    return module, optimizer


def one_more(module: nn.Module, optimizer: Optimizer, step: int, replicas: int = 1) -> None:
    """Make one more step of one process."""
    parts = [gradients(module, step, replica) for replica in range(replicas)]
    for parameter, *own in zip(module.parameters(), *parts, strict=True):
        parameter.grad = own[0] if replicas == 1 else own[0] + own[1]
    optimizer.step()


def same(values: list[torch.Tensor], module: nn.Module) -> bool:
    return all(torch.equal(a, b) for a, b in zip(values, module.parameters(), strict=True))


def sgd(parameters: list[nn.Parameter]) -> Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.01)


def adamw(parameters: list[nn.Parameter]) -> Optimizer:
    groups = [
        {"params": parameters[:3], "lr": 0.01},
        {"params": parameters[3:], "betas": (0.8, 0.9)},
    ]
    return torch.optim.AdamW(groups)


MAKERS: list[Make] = [
    sgd,
    adamw,
    lambda p: torch.optim.Adam(p, amsgrad=True),
    torch.optim.Adagrad,
    lambda p: torch.optim.RMSprop(p, momentum=0.5),
    torch.optim.NAdam,
]


@pytest.mark.parametrize("servers", [1, 3, 20])
@pytest.mark.parametrize("make", MAKERS)
def test_no_staleness_is_what_one_process_does(
    serve: Callable[[int], Service], make: Make, servers: int
) -> None:
    worker = Worker(serve(servers).join(0, 1, 1), Forest.of(1, 1, 0), make)
    for step in (1, 2, 3):
        worker.step(step)
    module, optimizer = alone(make, 3)
    assert same(worker.values, module)
    found, expected = worker.remote.state(), optimizer.state_dict()
    assert found["param_groups"] == expected["param_groups"]
    assert list(found["state"]) == list(expected["state"])
    for place, state in expected["state"].items():
        for name, value in state.items():
            assert torch.equal(torch.as_tensor(found["state"][place][name]), torch.as_tensor(value))
    assert not worker.optimizer.state, "it is the servers' now"


def test_gradients_of_all_workers_make_an_update(serve: Callable[[int], Service]) -> None:
    service = serve(2)

    def train(rank: int) -> list[torch.Tensor]:
        worker = Worker(service.join(rank, 2, 2), Forest.of(2, 2, rank), sgd)
        for step in (1, 2, 3):
            worker.step(step)
        return worker.values

    module, _ = alone(sgd, 3, replicas=2)
    for values in workers(2, train):
        assert same(values, module)


def test_learning_rates_reach_the_servers(serve: Callable[[int], Service]) -> None:
    worker = Worker(serve(2).join(0, 1, 1), Forest.of(1, 1, 0), sgd)
    before = worker.values
    worker.optimizer.param_groups[0].update(lr=0.0)
    worker.step(1)
    assert all(torch.equal(a, b) for a, b in zip(before, worker.values, strict=True))


# --- staleness --------------------------------------------------------------------------------------


def pair(service: Service, staleness: int) -> tuple[Worker, Worker]:
    both = [
        Worker(service.join(rank, 2, 2), Forest.of(2, 2, rank), sgd, staleness) for rank in range(2)
    ]
    return both[0], both[1]


@pytest.mark.parametrize("staleness", [1, 2, 4])
def test_a_worker_may_be_so_many_updates_ahead_and_no_more(
    serve: Callable[[int], Service], staleness: int
) -> None:
    fast, slow = pair(serve(1), staleness)
    start = fast.values
    for step in range(1, staleness + 1):
        fast.step(step)
        assert all(torch.equal(a, b) for a, b in zip(start, fast.values, strict=True))
    for client in (shard.client for shard in fast.remote._shards):
        client._socket.settimeout(0.3)
    with pytest.raises(PeerError) as waited:
        fast.step(staleness + 1)
    assert isinstance(waited.value.__cause__, TimeoutError), "it waits for the other worker"
    slow.step(1)
    module, _ = alone(sgd, 1, replicas=2)
    for shard in fast.remote._shards:
        shard.client._socket.settimeout(20)
    fast.model.versions.add(
        fast.remote.parameters, fast.remote.receive()
    )  # what it waited for comes with the other worker's gradients
    fast.model.versions.show_oldest()
    assert same(fast.values, module)


@pytest.mark.parametrize("staleness", [0, 1, 2, 4])
def test_each_step_sees_one_version_whoever_was_late(
    serve: Callable[[int], Service], staleness: int
) -> None:
    """Not the newest: one worker finds all updates done, the other none of those it may lack."""
    fast, slow = pair(serve(2), staleness)
    for worker in (fast, slow) if staleness else ():
        for step in range(1, staleness + 1):
            worker.step(step)
            assert same(worker.values, net()), "though the servers have made some updates"

    def train(rank: int) -> list[list[torch.Tensor]]:
        worker, seen = (fast, slow)[rank], []
        for step in range(staleness + 1, staleness + 5):
            worker.step(step)
            seen.append(worker.values)
        return seen

    for seen in workers(2, train):
        for updates, values in enumerate(seen, 1):
            assert same(values, alone(sgd, updates, replicas=2)[0])


def test_catching_up_waits_for_all_that_was_sent(serve: Callable[[int], Service]) -> None:
    service = serve(2)

    def train(rank: int) -> list[torch.Tensor]:
        worker = Worker(service.join(rank, 2, 2), Forest.of(2, 2, rank), sgd, staleness=5)
        for step in range(1, 9):
            worker.step(step)
        late = worker.values
        worker.model.show_newest()
        newest = worker.values
        worker.model.versions.show_oldest()
        assert all(torch.equal(a, b) for a, b in zip(late, worker.values, strict=True))
        assert same(list(worker.model.state().values()), alone(sgd, 8, replicas=2)[0])
        return newest

    first, second = workers(2, train)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    # Gradients here don't depend on parameters, so that the result is that of one process.
    module, _ = alone(sgd, 8, replicas=2)
    assert same(first, module)


def test_memory_of_versions_is_used_again(serve: Callable[[int], Service]) -> None:
    worker = Worker(serve(1).join(0, 1, 1), Forest.of(1, 1, 0), sgd, staleness=2)
    for step in range(1, 10):
        worker.step(step)
        if step % 4 == 0:
            worker.model.show_newest()
    (shard,) = worker.remote._shards
    (free,) = worker.remote._pool._free.values()
    assert len(shard.taken) + len(free) <= 4
    worker.model.show_newest()
    assert same(worker.values, alone(sgd, 9)[0])


def test_two_optimizers_of_one_model(serve: Callable[[int], Service]) -> None:
    """Versions of one come while those of the other are waited for."""
    worker = Worker(serve(1).join(0, 1, 1), Forest.of(1, 1, 0), lambda p: sgd(p[:3]), staleness=1)
    rest = sgd(list(worker.module.parameters())[3:])
    worker.model.add_optimizer(rest)
    for step in range(1, 6):
        own = gradients(worker.module, step)
        worker.step(step, own[:3])
        if step % 2:
            worker.model._gradients_of = lambda _, own=own: [own[3:]]  # type: ignore[method-assign]
            rest.step()
    worker.model.show_newest()
    module = net()
    parts = list(module.parameters())
    both = sgd(parts[:3]), sgd(parts[3:])
    for step in range(1, 6):
        for parameter, gradient in zip(parts, gradients(module, step), strict=True):
            parameter.grad = gradient
        for optimizer in both[: 1 + step % 2]:
            optimizer.step()
    assert same(worker.values, module)


# --- beginning anew -----------------------------------------------------------------------------------


def test_state_goes_to_the_servers_and_back(serve: Callable[[int], Service]) -> None:
    module, optimizer = alone(adamw, 2)
    saved = copy.deepcopy((module.state_dict(), optimizer.state_dict()))
    worker = Worker(serve(3).join(0, 1, 1), Forest.of(1, 1, 0), adamw)
    worker.module.load_state_dict(saved[0])
    worker.optimizer.load_state_dict(saved[1])
    worker.step(3)
    expected, _ = alone(adamw, 3)
    assert same(worker.values, expected)


def test_values_loaded_later_replace_those_of_the_servers(serve: Callable[[int], Service]) -> None:
    service = serve(2)
    module, optimizer = alone(sgd, 1, replicas=2)

    def train(rank: int) -> list[torch.Tensor]:
        worker = Worker(service.join(rank, 2, 2), Forest.of(2, 2, rank), sgd)
        for step in (7, 8, 9):
            worker.step(step)
        worker.model.load(module.state_dict())
        worker.optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        worker.step(2)
        return worker.values

    expected, _ = alone(sgd, 2, replicas=2)
    for values in workers(2, train):
        assert same(values, expected)


def test_a_script_that_loads_a_state_reaches_the_servers(serve: Callable[[int], Service]) -> None:
    service = serve(2)
    _, saved = alone(sgd, 1, replicas=2)

    def train(rank: int) -> list[torch.Tensor]:
        clients = service.join(rank, 2, 2)
        worker = Worker(clients, Forest.of(2, 2, rank), sgd, staleness=3 * rank)
        for step in (1, 2):
            worker.step(step)
        worker.optimizer.load_state_dict(copy.deepcopy(saved.state_dict()))
        worker.step(3)
        worker.model.show_newest()
        return worker.values

    module, optimizer = alone(sgd, 2, replicas=2)
    optimizer.load_state_dict(copy.deepcopy(saved.state_dict()))
    one_more(module, optimizer, 3, replicas=2)
    for values in workers(2, train):
        assert same(values, module)


def test_an_optimizer_keeps_its_memory_when_parameters_are_loaded(
    serve: Callable[[int], Service],
) -> None:
    worker = Worker(serve(2).join(0, 1, 1), Forest.of(1, 1, 0), adamw)
    for step in (1, 2):
        worker.step(step)
    worker.model.load(net().state_dict())
    module, optimizer = alone(adamw, 2)
    module.load_state_dict(net().state_dict())
    found, expected = worker.remote.state(), optimizer.state_dict()
    assert str(found) == str(expected), "it is here until the next step"
    one_more(module, optimizer, 3)
    worker.step(3)
    assert same(worker.values, module)


# --- what servers would not learn of ------------------------------------------------------------------


def _pre(worker: Worker) -> None:
    worker.optimizer.register_step_pre_hook(lambda *_: None)


def _post(worker: Worker) -> None:
    worker.optimizer.register_step_post_hook(lambda *_: None)


def _fill(worker: Worker) -> None:
    worker.optimizer.state[worker.remote.parameters[0]]["momentum_buffer"] = torch.zeros(1)


def _replace(worker: Worker) -> None:
    worker.optimizer.state = collections.defaultdict(dict)


def _clear(worker: Worker) -> None:
    worker.optimizer.state.clear()


def _grow(worker: Worker) -> None:
    worker.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_pre, "SGD has hooks around its steps"),
        (_post, "SGD has hooks around its steps"),
        (_fill, "the script has changed the state of an optimizer itself"),
        (_replace, "the script has changed the state of an optimizer itself"),
        (_clear, "the script has changed the state of an optimizer itself"),
        (_grow, "SGD has 7 parameters, of which not all are those 6"),
    ],
)
def test_what_a_script_does_to_an_optimizer(
    serve: Callable[[int], Service], change: Callable[[Worker], None], message: str
) -> None:
    worker = Worker(serve(1).join(0, 1, 1), Forest.of(1, 1, 0), sgd)
    worker.step(1)
    assert not worker.optimizer.state[worker.remote.parameters[0]], "who looks changes nothing"
    worker.step(2)
    copy.deepcopy(worker.optimizer)
    with pytest.raises(StepError, match=message) as refused:  # noqa: PT012 - one of the two refuses
        change(worker)
        worker.step(3)
    assert refused.value.hint


class Counting(torch.optim.SGD):
    """An optimizer that keeps a number in its parameter groups."""

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        self.param_groups[0]["count"] = self.param_groups[0].get("count", 0) + 1


# --- gradients that are missing, and what cannot be ---------------------------------------------------


def test_parameters_that_nobody_used_are_left_alone(serve: Callable[[int], Service]) -> None:
    worker = Worker(serve(1).join(0, 1, 1), Forest.of(1, 1, 0), adamw)
    before, own = worker.values, gradients(worker.module, 1)
    worker.step(1, [own[0], None, *own[2:]])
    unchanged = [torch.equal(a, b) for a, b in zip(before, worker.values, strict=True)]
    assert unchanged == [False, True, *[False] * 4], "no weight decay either"


def test_parameters_that_one_worker_used(serve: Callable[[int], Service]) -> None:
    service = serve(1)

    def train(rank: int) -> list[torch.Tensor]:
        worker = Worker(service.join(rank, 2, 2), Forest.of(2, 2, rank), sgd)
        own = gradients(worker.module, 1)
        worker.step(1, own if rank else [None, *own[1:]])
        return worker.values

    module = net()
    (first, *others), own = list(module.parameters()), gradients(module, 1)
    first.grad = own[0]
    for parameter, gradient in zip(others, own[1:], strict=True):
        parameter.grad = gradient + gradient
    sgd(list(module.parameters())).step()
    assert all(same(values, module) for values in workers(2, train))


@pytest.mark.parametrize(
    ("difference", "message"),
    [
        ({"place": 4}, "rank 1 computes gradients of another batch than rank 0"),
        ({"lr": 0.5}, "the optimizer has different settings on rank 1 than on rank 0"),
    ],
)
def test_workers_that_differ(
    serve: Callable[[int], Service], difference: dict[str, float], message: str
) -> None:
    service = serve(1)

    def train(rank: int) -> None:
        worker = Worker(service.join(rank, 2, 2), Forest.of(2, 2, rank), sgd)
        if rank and "lr" in difference:
            worker.optimizer.param_groups[0]["lr"] = difference["lr"]
        with pytest.raises(MismatchError, match=message):
            worker.step(1, place=difference.get("place", 1) if rank else 1)

    workers(2, train)


class Failing(torch.optim.SGD):
    """An optimizer that cannot step."""

    def step(self, closure: Any = None) -> None:
        raise ZeroDivisionError("no luck")


class Needy(Optimizer):
    """An optimizer whose constructor wants what is no default of its."""

    def __init__(self, params: Any, secret: int) -> None:
        super().__init__(params, {})


def hooked(parameters: list[nn.Parameter]) -> Optimizer:
    made = sgd(parameters)
    made.register_step_post_hook(lambda *_: None)
    return made


@pytest.mark.parametrize(
    ("make", "words", "kind", "message"),
    [
        (hooked, {}, StepError, "hooks around its steps"),
        (
            lambda p: Counting([{"params": p, "count": 0}], lr=0.1),
            {},
            ModelError,
            "a step of Counting changes count of its parameter",
        ),
        (lambda p: Failing(p, lr=0.1), {}, ModelError, "in a server: ZeroDivisionError: no luck"),
        (
            lambda p: Needy(p, 3),
            {},
            ModelError,
            "cannot make the optimizer Needy from its defaults",
        ),
        (
            sgd,
            {"module": "no.such.module", "name": "Mine"},
            ModelError,
            "a server cannot import the optimizer Mine from no.such.module",
        ),
        (sgd, {"name": "NoSuch"}, ModelError, "a server cannot import the optimizer NoSuch"),
        (
            sgd,
            {"module": "os", "name": "system", "root": "/"},
            ModelError,
            "os.system is no torch.optim.Optimizer",
        ),
    ],
)
def test_an_optimizer_that_servers_cannot_have(
    serve: Callable[[int], Service],
    make: Make,
    words: dict[str, str],
    kind: type[Exception],
    message: str,
) -> None:
    clients = serve(1).join(0, 1, 1)
    with pytest.raises(kind, match=message):  # noqa: PT012 - where the worker sees it, or the server
        worker = Worker(clients, Forest.of(1, 1, 0), make)
        worker.remote._words |= words
        worker.step(1)
    assert "/" not in sys.path, "nothing that a worker says is searched for modules"


def test_a_step_without_gradients(serve: Callable[[int], Service]) -> None:
    worker = Worker(serve(1).join(0, 1, 1), Forest.of(1, 1, 0), sgd)
    worker.model._gradients_of = lambda _: []  # type: ignore[method-assign]
    with pytest.raises(StepError, match="stepped without gradients"):
        worker.optimizer.step()


def test_a_worker_that_dies_ends_the_others_update(serve: Callable[[int], Service]) -> None:
    service = serve(2)
    stays, dies = pair(service, 0)
    for shard in dies.remote._shards:
        shard.client._socket.close()
    with pytest.raises(PeerError, match="rank 1 is gone"):
        stays.step(1)


def test_what_no_worker_asks_for(serve: Callable[[int], Service]) -> None:
    service = serve(1)
    client = service.join(0, 1, 1).all[0]
    client.send(Kind.WELCOME)
    with pytest.raises(PeerError, match="server 0 is gone"):
        client.receive(Kind.SUM)
