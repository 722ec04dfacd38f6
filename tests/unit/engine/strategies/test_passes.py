"""What forward passes must leave alone is refused with several replicas, on a single rank, too."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from lockstep.engine.strategies.checks import refuse_changing
from lockstep.errors import AuditError, ModelError


class Scaling(nn.Module):
    """Has its own weights on a sphere, by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.layer.weight /= self.layer.weight.norm()
        return self.layer(x)


class Remembering(nn.Module):
    """Has a buffer of what it saw, which it changes in one mode."""

    def __init__(self, what: str, training: bool) -> None:
        super().__init__()
        self.layer, self.what, self.when = nn.Linear(3, 1), what, training
        self.register_buffer("seen", torch.zeros(1, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x)
        if self.training is self.when:
            getattr(self, self.what)(y.detach())
        return y

    def grows(self, y: torch.Tensor) -> None:
        self.seen = torch.cat([self.seen, y])

    def appears(self, y: torch.Tensor) -> None:
        if not hasattr(self, "cache"):
            self.register_buffer("cache", y)

    def goes(self, _y: torch.Tensor) -> None:
        if hasattr(self, "seen"):
            del self.seen

    def counts(self, _y: torch.Tensor) -> None:
        self.seen += 1

    def replaces(self, y: torch.Tensor) -> None:
        self.seen = self.seen + y.mean()


def use(run, net: nn.Module, *, registered: bool = False) -> None:
    """Train on a few batches, and evaluate."""
    with run:
        model = run.register("net", net) if registered else run.model(net)
        data = run.loader(TensorDataset(torch.randn(8, 3)), batch_size=4)
        for _ in run.epochs(2):
            model.train()
            for (x,) in data:
                loss = model(x).mean()
                if not registered:
                    run.backward(loss)
                    model.zero_grad()
            model.eval()
            with torch.no_grad():
                for (x,) in data:
                    model(x)


def test_a_parameter_that_a_forward_pass_changes(make_run) -> None:
    with pytest.raises(AuditError, match=r"changed layer\.weight of Scaling besides by ") as caught:
        use(make_run(replicas=2), Scaling())
    assert "run.batches" in caught.value.hint
    use(make_run(replicas=1), Scaling())


@pytest.mark.parametrize(
    ("what", "seen"),
    [
        ("grows", r"the buffer seen of Remembering changed its shape from \(1, 1\) to \(3, 1\)"),
        ("appears", "Remembering got a buffer cache while"),
        ("goes", "Remembering lost 1 of its 1 buffers"),
    ],
)
def test_buffers_that_come_go_or_change_their_shapes(make_run, what: str, seen: str) -> None:
    with pytest.raises(ModelError, match=seen):
        use(make_run(replicas=2), Remembering(what, training=True))
    use(make_run(replicas=1), Remembering(what, training=True))


@pytest.mark.parametrize("registered", [False, True])
@pytest.mark.parametrize("what", ["counts", "replaces"])
def test_buffers_that_evaluation_changes(make_run, what: str, registered: bool) -> None:
    with pytest.raises(ModelError, match="Remembering in evaluation mode changed seen"):
        use(make_run(replicas=2), Remembering(what, training=False), registered=registered)
    use(make_run(replicas=2), Remembering(what, training=True), registered=registered)


@pytest.mark.parametrize(
    ("make", "seen"),
    [
        (lambda: nn.Embedding(9, 4, max_norm=1.0), "a Embedding, has max_norm=1.0"),
        (
            lambda: nn.Sequential(nn.EmbeddingBag(9, 4, max_norm=2.0)),
            "layer 0, a EmbeddingBag, has",
        ),
        (
            lambda: nn.Sequential(nn.Flatten(), nn.LazyLinear(4)),
            "layer 1, a LazyLinear, has parameters",
        ),
        (lambda: nn.LazyConv2d(4, 3), "without a shape yet; expected a model that has been called"),
    ],
)
def test_layers_that_are_refused_before_they_are_held(
    make_run, make: Callable[[], nn.Module], seen: str
) -> None:
    with pytest.raises(ModelError, match=seen), make_run(replicas=2) as run:
        run.model(make())


@pytest.mark.parametrize(
    "make", [lambda: nn.Embedding(9, 4, max_norm=1.0), lambda: nn.LazyLinear(4)]
)
def test_one_replica_may_have_them(make_run, make: Callable[[], nn.Module]) -> None:
    with make_run(replicas=1) as run:
        model = run.model(make())
        for (x,) in run.loader(TensorDataset(torch.zeros(8, 3, dtype=torch.int64)), batch_size=4):
            assert len(model(x if isinstance(model, nn.Embedding) else x.float())) == 4


def test_other_layers_are_not() -> None:
    called = nn.LazyLinear(4)
    called(torch.zeros(1, 3))
    others = [called, nn.Embedding(9, 4), nn.LSTM(3, 4), nn.BatchNorm1d(2)]
    refuse_changing(nn.Sequential(*others))
    with pytest.raises(ModelError, match="the layer 4, a LazyLinear"):
        refuse_changing(nn.Sequential(*others, nn.LazyLinear(4)))
