"""Training jobs with models that several ranks hold together."""

from __future__ import annotations

import copy
import random
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel

import lockstep
from lockstep.engine.recovery.preemption import Preempted
from lockstep.state.checkpoint.parts import whole
from tests.distributed.jobs import classes, conv_net, quiet_run


class Drawing(nn.Module):
    """Draws from all three generators, in training and in evaluation."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (
            x
            + torch.randn(len(x), 1, device=x.device)
            + float(np.random.rand())
            + random.gauss(0, 1)
        )


class Skipping(nn.Module):
    """Every layer's output is used by the last one; a part is unused, and a buffer is not saved.

    Tensors that are no buffers are made in the pass, and written to, or are the module's.
    """

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.norm, self.dropout = nn.BatchNorm1d(6), nn.Dropout(0.2)
        self.head = nn.Linear(6, 4)
        self.never = nn.Linear(6, 4)
        self.register_buffer("shift", torch.full((6,), 0.5), persistent=False)
        self.weights, self.scale = torch.linspace(0.5, 1, 6), 0.75

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        first, second, third, fourth = self.layers
        a = first(x) * self.weights
        ramp = torch.zeros(6)
        ramp += a[0] * self.scale
        b = self.dropout(F.relu(second(a)))
        c = self.norm(third(b + a)) + self.shift + ramp * torch.arange(6)
        return {"logits": self.head(fourth(c) + a), "hidden": (a, c)}


def stages_of(kind: str) -> Any:
    """Return a model, by name."""
    if kind == "list":
        return [
            nn.Linear(6, 8),
            nn.Sequential(nn.ReLU(inplace=True), Drawing(), nn.Dropout(0.3)),
            nn.Sequential(nn.BatchNorm1d(8), nn.Linear(8, 4)),
        ]
    return Skipping() if kind == "skipping" else nn.Sequential(nn.Flatten(), *conv_net())


def train(kind: str, **settings: Any) -> tuple[str, list[str]]:
    """Train and evaluate; 41 samples in batches of 8: the last has one, and replicas without any."""
    with quiet_run(**settings) as run:
        model = run.model(stages_of(kind))
        optimizer = run.optimizer(torch.optim.AdamW(model.parameters(), lr=0.05))
        data = run.loader(classes(48, (6,)), batch_size=16, shuffle=True)
        rest = run.loader(classes(41, (6,)), batch_size=8)
        seen = []
        for _ in run.epochs(2):
            model.train()
            for x, y in data:
                output = model(x)
                logits = output["logits"] if isinstance(output, dict) else output
                noise = torch.rand(()) * 1e-2  # drawn after the model has drawn
                extra = output["hidden"][1].square().mean() if isinstance(output, dict) else 0.0
                run.backward(F.cross_entropy(logits, y) * (1 + noise) + 0.1 * extra)
                run.clip_grad_norm_(model, 1.0)
                optimizer.step()
                optimizer.zero_grad()
            model.eval()
            with torch.no_grad():
                outputs = ((model(x), y) for x, y in rest)
                logits = ((o["logits"] if isinstance(o, dict) else o, y) for o, y in outputs)
                seen.append(run.mean(F.cross_entropy(o, y) for o, y in logits).hex())
            with torch.inference_mode():
                rows = run.gather(
                    o["logits"] if isinstance(o, dict) else o for o in (model(x) for x, _ in rest)
                )
                seen.append(rows.double().sum().item().hex())
        return run.digest(), seen


def train_chunks(chunks: int | None, middle: str = "") -> tuple[str, str, float, list[float]]:
    """Train with a batch in several parts; return digest, class, the last loss and all weights."""
    with quiet_run(exact=False) as run:
        between = {"norm": nn.BatchNorm1d(16), "draws": Drawing(), "drops": nn.Dropout(0.5)}
        parts = [nn.Linear(6, 16), between.get(middle, nn.ReLU()), nn.Linear(16, 4)]
        model = run.model(parts, chunks=chunks) if chunks else run.model(parts)
        optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        loss = torch.zeros(())
        for _ in run.epochs(2):
            for x, y in run.loader(classes(44, (6,)), batch_size=10, shuffle=True):
                loss = F.cross_entropy(model(x), y)
                run.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
        state = run._session.models.find(None).state()
        weights = [value.double().sum().item() for value in state.values()]
        return run.digest(), run.exactness, loss.item(), weights


class Masked(nn.Module):
    """Mixes the tokens of each sample by a mask that may be as long as the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return self.second(mask @ F.relu(self.first(mask @ x))).mean(1)


def train_masked(chunk_inputs: list[str] | None = None) -> list[float]:
    """Train with 4 tokens in 4 samples, and a mask that gradients are asked of; return all weights."""
    with quiet_run(exact=False) as run:
        model = run.model(Masked(), chunks=2, chunk_inputs=chunk_inputs)
        optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        mask = torch.ones(4, 4).tril().requires_grad_()
        for x, y in run.loader(classes(24, (4, 6)), batch_size=4, shuffle=True):
            run.backward(F.cross_entropy(model(x, mask), y))
            optimizer.step()
            optimizer.zero_grad()
        state = run._session.models.find(None).state()
        assert mask.grad is not None
        values = [*state.values(), mask.grad]
        return [element for value in values for element in value.flatten().tolist()]


def train_both_ways() -> str:
    """One loss through two models, the second of which gives the first its gradients."""
    with quiet_run() as run:
        encoder = run.model([nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6)])
        head = run.model([nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)])
        optimizers = [
            run.optimizer(torch.optim.SGD(m.parameters(), lr=0.1)) for m in (encoder, head)
        ]
        for x, y in run.loader(classes(32, (6,)), batch_size=8, shuffle=True):
            loss = F.cross_entropy(head(encoder(x)), y) + encoder(x).square().mean()
            run.backward(loss)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        return run.digest()


def train_below_a_critic() -> str:
    """A loss through a model that every rank has whole, and that has nothing to train."""
    with quiet_run() as run:
        critic = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        for parameter in critic.parameters():
            parameter.requires_grad_(False)
        critic = run.model(critic)
        model = run.model([nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)])
        optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        for x, y in run.loader(classes(32, (6,)), batch_size=8, shuffle=True):
            run.backward(F.cross_entropy(critic(model(x)), y))
            optimizer.step()
            optimizer.zero_grad()
        return run.digest()


def call_with(value: Any) -> None:
    with quiet_run() as run:
        model = run.model([nn.Linear(6, 4), nn.Linear(4, 4)])
        model(value)


def go_on(directory: str, strategy: str, mesh: str | None, slow: float = 0.0) -> str:
    """Train in a directory, from whatever is there; return the digest, or `preempted`.

    Slow enough, ranks that only have the store agree before the end.
    """
    settings = {"run_dir": Path(directory), "strategy": strategy, "mesh": mesh, "threads": 1}
    try:
        with lockstep.Run("spread", progress=False, **settings) as run:
            model = run.model(Skipping())
            optimizer = run.optimizer(torch.optim.AdamW(model.parameters(), lr=0.01))
            data = run.loader(classes(48, (6,)), batch_size=16, shuffle=True)
            for _ in run.epochs(40):
                for x, y in data:
                    time.sleep(slow)
                    run.backward(F.cross_entropy(model(x)["logits"], y))
                    optimizer.step()
                    optimizer.zero_grad()
        return run.digest()
    except Preempted:
        return "preempted"


def held() -> tuple[int, int, list[str]]:
    """Return how many elements this rank holds, of how many; what is said to who takes them for all."""
    with quiet_run() as run:
        model = run.model(stages_of("list"))
        own = sum(p.numel() for p in model.parameters() if not p.is_meta)
        whole = sum(p.numel() for p in model.parameters())
        said = []
        for act in (model.state_dict, lambda: copy.deepcopy(model)):
            try:
                act()
            except lockstep.LockstepError as error:
                said.append(str(error))
        return own, whole, said


def exported() -> bool:
    """Export, and load what another process would: on every rank the weights are the exported ones."""
    with quiet_run() as run, tempfile.TemporaryDirectory() as own:
        model = run.model(Skipping())
        place = [own]
        if run.world.size > 1:
            torch.distributed.broadcast_object_list(place, src=0)
        path = Path(place[0], "weights.pt")
        before = run.digest()
        run.export(path)
        run.barrier()
        optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        for x, y in run.loader(classes(16, (6,)), batch_size=8):
            run.backward(F.cross_entropy(model(x)["logits"], y))
            optimizer.step()
            optimizer.zero_grad()
        assert run.digest() != before
        run.load(path)
        run.barrier()
        plain = Skipping()
        plain.load_state_dict(torch.load(path, weights_only=True))
        run.barrier()  # the directory is rank 0's, and goes with it
        return run.digest() == before


def backward_twice() -> None:
    with quiet_run() as run:
        model = run.model([nn.Linear(6, 4), nn.Linear(4, 4)])
        for x, y in run.loader(classes(8, (6,)), batch_size=8):
            loss = F.cross_entropy(model(x), y)
            loss.backward(retain_graph=True)
            run.backward(loss)


# --- corners ---------------------------------------------------------------------------------------


def train_against_itself() -> str:
    """Gradients of an input by torch.autograd.grad, which leave those of parameters alone (FGSM)."""
    with quiet_run() as run:
        model = run.model(
            nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 4))
        )
        optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        for x, y in run.loader(classes(24, (6,)), batch_size=8, shuffle=True):
            x.requires_grad_(True)
            (away,) = torch.autograd.grad(F.cross_entropy(model(x), y), x)
            attacked = (x + 0.1 * away.sign()).detach()
            run.backward(F.cross_entropy(model(attacked), y))
            optimizer.step()
            optimizer.zero_grad()
        return run.digest()


def train_partly(frozen: list[int]) -> str:
    """Fine-tuning: parts are frozen before run.model."""
    with quiet_run() as run:
        parts = [nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 4)]
        for place in frozen:
            parts[place].requires_grad_(False)
        model = run.model(parts)
        optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
        for x, y in run.loader(classes(24, (6,)), batch_size=8, shuffle=True):
            run.backward(F.cross_entropy(model(x), y))
            run.clip_grad_norm_(model, 1.0)
            optimizer.step()
            optimizer.zero_grad()
        return run.digest()


def train_average() -> str:
    """An average of weights: a copy from before run.model, which is given to the run, too."""
    with quiet_run() as run:
        net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
        average = run.model(copy.deepcopy(net))
        model = run.model(net)
        optimizer = run.optimizer(torch.optim.Adagrad(model.parameters(), lr=0.1))
        for batch in run.batches(run.loader(classes(24, (6,)), batch_size=8, shuffle=True)):
            for x, y in batch:
                run.backward(F.cross_entropy(model(x), y))
                optimizer.step()
                optimizer.zero_grad()
            with torch.no_grad():
                for mean, own in zip(average.parameters(), model.parameters(), strict=True):
                    mean.lerp_(own, 0.3)
        run.save()
        return run.digest()


def train_in_corners() -> list[Any]:
    """All of these."""
    frozen = ([0], [1], [0, 1], [2])
    return [
        *(train_partly(list(places)) for places in frozen),
        train_against_itself(),
        train_average(),
    ]


def call_alone(where: str) -> None:
    """The main rank calls the model once more than the others."""
    with quiet_run() as run:
        model = run.model([nn.Linear(6, 4), nn.Linear(4, 4)])
        extra = torch.ones(8, 6)
        if run.is_main_process and where == "before":
            model(extra)
        for x, y in run.loader(classes(16, (6,)), batch_size=8):
            if run.is_main_process and where == "inside":
                model(x)
            if where == "noise":
                x.add_(run.world.rank)
            run.backward(F.cross_entropy(model(x), y))


def differentiate_twice() -> None:
    with quiet_run() as run:
        model = run.model([nn.Linear(6, 4), nn.Linear(4, 4)])
        for x, _ in run.loader(classes(8, (6,)), batch_size=8):
            x.requires_grad_(True)
            torch.autograd.grad(model(x).square().sum(), x, create_graph=True)


def hold(model: str, settings: dict[str, Any], **run_settings: Any) -> None:
    """Only give the run a model."""
    with quiet_run(**run_settings) as run:
        run.model(stages_of(model), **settings)


# --- tensor ----------------------------------------------------------------------------------------


class Mlp(nn.Module):
    """Parameters that are cut, and some that are not."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(12)
        self.wide, self.narrow = nn.Linear(12, width), nn.Linear(width, 4)
        self.count: torch.Tensor
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.count += 1
        return self.narrow(F.gelu(self.wide(self.norm(x))))


def plan() -> dict[str, ParallelStyle]:
    return {"wide": ColwiseParallel(), "narrow": RowwiseParallel()}


def train_tensor(directory: str | None = None, slow: float = 0.0) -> tuple[str, str, list[float]]:
    """Train with a plan; return digest, class and all weights, or `preempted`."""
    more = {} if directory is None else {"run_dir": Path(directory)}
    try:
        with quiet_run(exact=False, **more) as run:
            model = run.model(Mlp(), plan=plan())
            optimizer = run.optimizer(torch.optim.AdamW(model.parameters(), lr=0.002))
            data = run.loader(classes(44, (12,)), batch_size=12, shuffle=True)
            for _ in run.epochs(8):
                for x, y in data:
                    time.sleep(slow)
                    run.backward(F.cross_entropy(model(x), y))
                    run.clip_grad_norm_(model, 0.5)
                    optimizer.step()
                    optimizer.zero_grad()
            state = run._session.models.find(None).state()
            weights = [v for value in state.values() for v in whole(value).reshape(-1).tolist()]
            return run.digest(), run.exactness, weights
    except Preempted:
        return "preempted", "", []


class Functional(Mlp):
    """Draws for activations that are cut, where no part shows it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.narrow(F.dropout(F.gelu(self.wide(self.norm(x))), 0.5, self.training))


def classes_of_tensors() -> list[str]:
    """Return the class of a run whose model draws by a part, and of one that draws by itself."""
    found = []
    with quiet_run(exact=False) as run:
        dropping = nn.ModuleDict({"drop": nn.Dropout(0.5), "wide": nn.Linear(2, 2)})
        run.model(dropping, plan={"wide": ColwiseParallel()})
        found.append(run.exactness)
    with quiet_run(exact=False) as run:
        model = run.model(Functional(), plan=plan())
        found.append(run.exactness)
        model.eval()(torch.ones(2, 12))
        found.append(run.exactness)
        model.train()(torch.ones(2, 12))
        found.append(run.exactness)
    return found


class Precise(torch.optim.Optimizer):
    """Sums gradients in a type that is not the parameters'."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            total = torch.zeros_like(parameter, dtype=torch.float64)
            self.state[parameter].setdefault("total", total).add_(parameter.grad)


def load_precise() -> list[tuple[str, bool]]:
    """Return what an optimizer's state is after it has been loaded: its types, and whether it is cut."""
    with quiet_run(exact=False) as run:
        model = run.model(Mlp(), plan=plan())
        optimizer = run.optimizer(Precise(model.parameters()))
        for x, y in run.loader(classes(8, (12,)), batch_size=8):
            run.backward(F.cross_entropy(model(x), y))
            optimizer.step()
        held = run._session.models.find(None)
        before = held.optimizer_state(optimizer)
        run._session.state.load(run._session.state.capture(), whole=True)
        after = held.optimizer_state(optimizer)
        assert all(
            torch.equal(before["state"][n]["total"], after["state"][n]["total"])
            for n in before["state"]
        )
        totals = {n: optimizer.state[p]["total"] for n, p in model.named_parameters()}
        return [(n, isinstance(t, DTensor) and t.dtype == torch.float64) for n, t in totals.items()]


def hold_tensor(plan: Any, width: int = 32, **settings: Any) -> None:
    """Only give the run a model and a plan."""
    with quiet_run(**{"exact": False, **settings}) as run:
        run.model(Mlp(width), **({} if plan is None else {"plan": plan}))


def look_at_mesh() -> tuple[Any, ...]:
    with quiet_run() as run:
        mesh = run.mesh
        return mesh.mesh_dim_names, tuple(mesh.shape), mesh.get_coordinate()
