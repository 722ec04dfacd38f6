"""Training jobs for models that are sharded; each returns a digest, on every strategy the same."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from lockstep.errors import LockstepError
from tests.distributed.jobs import classes, conv_net, fit, quiet_run


def train_wrapped(wrap: list[Any], settings: dict[str, Any]) -> str:
    """The convolutional net of the other tests, cut into units as `wrap` says."""
    with quiet_run() as run:
        model = run.model(conv_net(), wrap=wrap, **settings)
        optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
        data = run.loader(classes(50, (1, 8, 8)), batch_size=16, shuffle=True)
        fit(run, model, data, optimizer)
        return run.digest()


class Tangled(nn.Module):
    """Blocks of which one is used twice and one is frozen, and an embedding that is the head, too."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.blocks = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8, bias=False), Block()])
        self.blocks[1].requires_grad_(False)
        self.partly = nn.Linear(8, 8)
        self.partly.bias.requires_grad_(False)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens).mean(1)
        for block in (*self.blocks, self.blocks[0], self.blocks[2]):
            x = torch.tanh(block(x))
        return self.head(self.partly(x))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(8), nn.Linear(8, 8)
        self.register_buffer("seen", torch.zeros(()), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.add_(x.detach().mean())
        return self.linear(self.norm(x)) + self.seen


def train_tangled() -> str:
    with quiet_run() as run:
        model = run.model(Tangled(), wrap=[Block, "blocks.0", "blocks.1", "partly"])
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizer = run.optimizer(torch.optim.AdamW(trained, lr=0.01, amsgrad=True))
        generator = torch.Generator().manual_seed(1)
        tokens = torch.randint(0, 11, (30, 5), generator=generator)
        data = run.loader(TensorDataset(tokens, tokens[:, 0]), batch_size=8, shuffle=True)
        fit(run, model, data, optimizer)
        return run.digest()


class Branches(nn.Module):
    """Computes with one of two branches, chosen by the data."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList([nn.Linear(6, 4), nn.Linear(6, 4)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.branches[int(x.sum() > 0)](x)


def train_branches(gather: str) -> str:
    with quiet_run() as run:
        model = run.model(Branches(), wrap=[nn.Linear], gather=gather)
        optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        fit(run, model, run.loader(classes(40, (6,)), batch_size=8, shuffle=True), optimizer)
        return run.digest()


class Crossed(nn.Module):
    """Goes through both layers, in an order that the data chooses."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 6)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = int(x.sum() > 0)
        return self.layers[1 - first](self.layers[first](x))


def train_crossed() -> str:
    with quiet_run() as run:
        model = run.model(Crossed(), wrap=[nn.Linear])
        optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        fit(run, model, run.loader(classes(40, (6,)), batch_size=8, shuffle=True), optimizer)
        return run.digest()


def average_weights() -> tuple[str, float]:
    """An average of weights that is cut as the model is, and the accuracy of both while training."""
    with quiet_run() as run:
        net = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 4))
        average = run.model(copy.deepcopy(net), wrap=[nn.Linear])
        model = run.model(net, wrap=[nn.Linear])
        optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        train = run.loader(classes(40, (6,)), batch_size=8, shuffle=True)
        test = run.loader(classes(21, (6,), seed=1), batch_size=10)
        with torch.inference_mode():  # before anything has been gathered
            right = run.mean(model(x).argmax(1) == y for x, y in test)
        for _ in run.epochs(2):
            for batch in run.batches(train):
                for x, y in batch:
                    run.backward(F.cross_entropy(model(x), y))
                    optimizer.step()
                    optimizer.zero_grad()
                with torch.no_grad():
                    for slow, fast in zip(average.parameters(), model.parameters(), strict=True):
                        slow.lerp_(fast, 0.1)
            with torch.no_grad():
                right += run.mean(average(x).argmax(1) == y for x, y in test)
        return run.digest(), right


def export_and_load(directory: str) -> tuple[str, str, bool]:
    """Weights that one model writes and another reads; what the file says."""
    path = Path(directory, "weights.pt")
    with quiet_run() as run:
        model = run.model(conv_net(), wrap=[nn.Linear])
        optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        data = run.loader(classes(50, (1, 8, 8)), batch_size=16, shuffle=True)
        fit(run, model, data, optimizer, 1)
        run.export(path)
        run.barrier()
        trained = run.digest()
    with quiet_run(seed=8) as run:
        model = run.model(conv_net(), wrap=[nn.Linear])
        run.load(path)
        plain = conv_net()
        plain.load_state_dict(torch.load(path, weights_only=True))
        with torch.no_grad():
            same = torch.equal(
                model.eval()(torch.ones(2, 1, 8, 8)), plain.eval()(torch.ones(2, 1, 8, 8))
            )
        return trained, run.digest(), same


def memory_of(directory: str, rank: int) -> dict[str, int]:
    """Train something of 4 x 1,048,576 parameters; return what this rank's record says of memory."""
    with quiet_run(run_dir=directory) as run:
        net = nn.Sequential(*[nn.Linear(1024, 1024, bias=False) for _ in range(4)])
        model = run.model(net)
        optimizer = run.optimizer(torch.optim.AdamW(model.parameters(), lr=0.01))
        for x, _ in run.loader(classes(8, (1024,)), batch_size=4):
            run.backward(model(x).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        rank = run.world.rank
    lines = Path(directory, f"events/rank-{rank}.jsonl").read_text().splitlines()
    return json.loads(lines[-1])


def misuse() -> dict[str, str]:
    """What a script may do wrong with a sharded model, and what it is told."""
    told = {}
    with quiet_run() as run:
        model = run.model(conv_net(), wrap=[nn.Linear])
        wrong = {
            "state": model.state_dict,
            "part": model[5].state_dict,
            "copy": lambda: copy.deepcopy(model),
            "digest": run.digest,
            "export": lambda: run.export("model.pt"),
        }
        for x, y in run.loader(classes(8, (1, 8, 8)), batch_size=8):
            for how, call in wrong.items():
                told[how] = said(call)
            x.requires_grad_()
            loss = F.cross_entropy(model(x), y)
            told["twice"] = said(partial(torch.autograd.grad, loss, x, create_graph=True))
            loss = F.cross_entropy(model(x), y)
            told["backward"] = said(loss.backward)
            break
    return told


def said(call: Callable[[], Any]) -> str:
    try:
        call()
    except LockstepError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def train_with_penalty() -> str:
    """The loss has a gradient with respect to the inputs in it, which is differentiated once more."""
    with quiet_run() as run:
        net = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 4))
        model = run.model(net, wrap=[nn.Linear], gather="batch")
        optimizer = run.optimizer(torch.optim.AdamW(model.parameters(), lr=0.01))
        for x, y in run.loader(classes(24, (6,)), batch_size=8):
            x.requires_grad_()
            out = model(x)
            (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
            run.backward(F.cross_entropy(out, y) + slope.square().mean())
            optimizer.step()
            optimizer.zero_grad()
        return run.digest()
