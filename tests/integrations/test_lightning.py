"""`LockstepStrategy` for Lightning's Trainer and Fabric: one digest and equal logs on every layout."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import Lockstep
from tests.integrations.scripts import ENV, LAYOUTS, ROOT, result_of, verified
from tests.template import Template

COMMON = """
from tests import vision
import json, sys
import lightning as L
import torch
from lightning.pytorch.callbacks import Callback, EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from lockstep.integrations.lightning import LockstepStrategy

L.seed_everything(3)
images, digits = load_digits(return_X_y=True)
images, digits = torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(digits)
test = DataLoader(TensorDataset(images[500:600], digits[500:600]), batch_size=32)

def data(size=235, batch_size=32):
    return DataLoader(TensorDataset(images[:size], digits[:size]), batch_size=batch_size, shuffle=True)

def network():
    return nn.Sequential(nn.Linear(64, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 10))

class Digits(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = network()
    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = nn.functional.cross_entropy(self.net(x), y)
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log_dict({"high": x.sum(1).max(), "low": x.sum(1).min()}, reduce_fx="max")
        return {"loss": loss, "right": 1.0}
    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val_loss", nn.functional.cross_entropy(self.net(x), y))
    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "val_loss"}}

class History(Callback):
    def __init__(self):
        self.rows = []
    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        rate = trainer.optimizers[0].param_groups[0]["lr"]
        values = {name: float(value) for name, value in trainer.callback_metrics.items()}
        self.rows.append([trainer.global_step, batch_idx, rate, values])
    def on_train_epoch_end(self, trainer, module):
        self.rows.append({name: float(value) for name, value in trainer.callback_metrics.items()})
    def state_dict(self):
        return {"rows": self.rows}
    def load_state_dict(self, state):
        self.rows = state["rows"]

history = History()
def trained(**settings):
    settings = {"max_epochs": 2, "accelerator": "cpu", "enable_progress_bar": False, "enable_model_summary": False,
        "logger": False, "enable_checkpointing": False, "strategy": LockstepStrategy(replicas=4), **settings}
    return L.Trainer(**{**settings, "callbacks": [history, *settings.get("callbacks", [])]})

def results(trainer, *more):
    if trainer.is_global_zero:
        print("RESULT", json.dumps([history.rows, *more]))
"""


@pytest.fixture(scope="session")
def lightning() -> Iterator[Template]:
    """The process that commands are forked from: it has imported Lightning."""
    pytest.importorskip("lightning_utilities", reason="needs lightning, of the extra `lightning`")
    process = Template("examples.cpu_torchvision", "lightning.pytorch", "sklearn.datasets")
    yield process
    process.close()


@pytest.fixture
def lockstep(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, lightning: Template
) -> Iterator[Lockstep]:
    """The command `lockstep`, run in a temporary directory."""
    command = Lockstep(tmp_path, lightning, tmp_path_factory.mktemp("t"))
    yield command
    command.close()


EVERYTHING = (
    COMMON
    + """
best = ModelCheckpoint(monitor="val_loss", save_top_k=2, save_last=True)
trainer = trained(callbacks=[best, EarlyStopping("val_loss", patience=9)], val_check_interval=4,
    accumulate_grad_batches=2, gradient_clip_val=0.5, log_every_n_steps=1, logger=CSVLogger("logs"), enable_checkpointing=True)
model = Digits()
trainer.fit(model, data(), test)
evaluated = trainer.validate(model, test, ckpt_path="best", verbose=False)
results(trainer, evaluated, best.best_model_path.rpartition("/")[2], len(best.best_k_models))
"""
)


def test_everything_that_a_trainer_does_is_the_same_on_every_layout(lockstep: Lockstep) -> None:
    """Accumulation, clipping, a plateau scheduler, validation in the epoch, callbacks, checkpoints."""
    found = verified(lockstep, EVERYTHING)
    assert found == [found[0]] * len(LAYOUTS)
    rows, _, best, kept = json.loads(found[0])
    steps = [row[0] for row in rows if isinstance(row, list)]
    assert steps == [0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7, 8]
    assert kept == 2
    assert best.startswith("epoch=1")
    files = sorted(
        file.name for file in lockstep.directory.glob("logs/lightning_logs/version_0/checkpoints/*")
    )
    assert len(files) == 3  # two of the best, and the last: each is written once


MANUAL = (
    COMMON
    + """
class Gan(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.generator = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 64))
        self.judge = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 1))
    def training_step(self, batch, batch_idx):
        real, _ = batch
        ofg, ofj = self.optimizers()
        rate, _ = self.lr_schedulers()
        fake = self.generator(torch.randn(len(real), 8))
        entropy = nn.functional.binary_cross_entropy_with_logits
        self.toggle_optimizer(ofj)
        loss = entropy(self.judge(real), torch.ones(len(real), 1)) + entropy(self.judge(fake.detach()), torch.zeros(len(real), 1))
        ofj.zero_grad()
        self.manual_backward(loss)
        self.clip_gradients(ofj, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
        ofj.step()
        self.untoggle_optimizer(ofj)
        self.toggle_optimizer(ofg)
        tricked = entropy(self.judge(self.generator(torch.randn(len(real), 8))), torch.ones(len(real), 1))
        ofg.zero_grad()
        self.manual_backward(tricked)
        ofg.step()
        rate.step()
        self.untoggle_optimizer(ofg)
        self.log_dict({"judge": loss, "generator": tricked}, on_step=True, on_epoch=True)
    def configure_optimizers(self):
        pair = [torch.optim.Adam(self.generator.parameters(), 1e-3), torch.optim.SGD(self.judge.parameters(), 0.1, momentum=0.9)]
        return pair, [torch.optim.lr_scheduler.StepLR(one, 3) for one in pair]

trainer = trained()
trainer.fit(Gan(), data(150))
results(trainer)
"""
)


def test_manual_optimization_with_two_optimizers_is_the_same_on_every_layout(
    lockstep: Lockstep,
) -> None:
    found = verified(lockstep, MANUAL)
    assert found == [found[0]] * len(LAYOUTS)
    rows = json.loads(found[0])[0]
    assert [row[0] for row in rows if isinstance(row, list)] == list(range(2, 21, 2))
    assert rows[0][2] == 1e-3 and rows[3][2] == pytest.approx(1e-4)  # noqa: PT018


MIXED = (
    COMMON
    + """
import time
from pathlib import Path
from lightning.pytorch.plugins.io import AsyncCheckpointIO, TorchCheckpointIO

class Slow(TorchCheckpointIO):
    def save_checkpoint(self, *words, **settings):
        time.sleep(1)
        super().save_checkpoint(*words, **settings)

is_initialized = []

class Augmented(torch.utils.data.Dataset):
    def __len__(self):
        return 150
    def __getitem__(self, index):
        assert is_initialized, "worker_init_fn was not called"
        return images[index] + torch.rand(64) / 9, digits[index]

trainer = trained(max_epochs=1, precision="bf16-mixed", gradient_clip_val=0.05, enable_checkpointing=True,
    plugins=[AsyncCheckpointIO(Slow())], callbacks=[ModelCheckpoint("out", save_last=True)])
trainer.fit(Digits(), DataLoader(Augmented(), 32, shuffle=True, num_workers=1, worker_init_fn=is_initialized.append), test)
assert Path("out/last.ckpt").exists()  # on each rank, as soon as fit has returned
results(trainer)
"""
)


def test_mixed_precision_with_clipping_workers_and_slow_checkpoints(lockstep: Lockstep) -> None:
    found = verified(lockstep, MIXED, "1", "2")
    assert found[0] == found[1]


FABRIC = (
    COMMON
    + """
fabric = L.Fabric(accelerator="cpu", strategy=LockstepStrategy(replicas=4))
fabric.launch()
net = network()
model, optimizer = fabric.setup(net, torch.optim.AdamW(net.parameters(), lr=1e-2))
train, test = fabric.setup_dataloaders(data(), test)
assert len(train.dataset) == 235
for epoch in range(2):
    model.train()
    for x, y in train:
        loss = nn.functional.cross_entropy(model(x), y)
        fabric.backward(loss)
        fabric.clip_gradients(model, optimizer, max_norm=0.5)
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    with torch.no_grad():
        right = sum(int((model(x).argmax(1) == y).sum()) for x, y in test)
    fabric.save("fabric.ckpt", {"model": model, "optimizer": optimizer, "epoch": epoch})
    fabric.print("RESULT", json.dumps([epoch, right]))
"""
)


def test_a_fabric_loop_is_the_same_on_every_layout(lockstep: Lockstep) -> None:
    found = verified(lockstep, FABRIC)
    assert found == [found[0]] * len(LAYOUTS)
    epoch, right = json.loads(found[0])
    assert (epoch, right > 50) == (1, True)
    assert (lockstep.directory / "fabric.ckpt").exists()


def test_a_fabric_that_is_not_launched_opens_its_run_when_it_needs_it(lockstep: Lockstep) -> None:
    """As scripts for `fabric run` are written, which launches them."""
    script = FABRIC.replace("fabric.launch()\n", "")
    assert script != FABRIC
    found = verified(lockstep, script, "1", "2")
    assert found[0] == found[1]


def test_a_checkpoint_is_lightnings_own_and_training_resumes_from_it(lockstep: Lockstep) -> None:
    """On two ranks to a checkpoint in the middle of epoch 1, and from there on one: as without a stop."""
    script = lockstep.script(
        COMMON
        + """
trainer = trained(callbacks=[ModelCheckpoint("out", every_n_train_steps=5, save_top_k=-1)], enable_checkpointing=True)
model = Digits()
trainer.fit(model, data(), test, ckpt_path=sys.argv[1] if len(sys.argv) > 1 else None, weights_only=True)
results(trainer, [float(p.double().sum()) for p in model.parameters()])
"""
    )
    whole = lockstep("run", "-n", "2", script, env=ENV)
    assert whole.code == 0, whole.err
    names = sorted(file.name for file in (lockstep.directory / "out").iterdir())
    assert names == ["epoch=0-step=5.ckpt", "epoch=1-step=10.ckpt", "epoch=1-step=15.ckpt"]
    rest = lockstep("run", "-n", "1", script, "out/epoch=1-step=10.ckpt", env=ENV)
    assert rest.code == 0, rest.err
    rows, weights = json.loads(result_of(whole.out))
    again, same = json.loads(result_of(rest.out))
    assert same == weights
    assert len(again) == len(rows)
    for own, other in zip(
        again, rows, strict=True
    ):  # a checkpoint has no means of the epoch so far
        if isinstance(own, list):
            assert own[:3] == other[:3]
            assert own[3]["loss_step"] == other[3]["loss_step"]


REFUSED = {
    "devices=2": "trained(devices=2)",
    "num_nodes=3": "trained(num_nodes=3)",
    "sync_batchnorm": "trained(sync_batchnorm=True).fit(Digits(), data())",
    "overfit_batches": "trained(overfit_batches=2).fit(Digits(), data())",
    "reload_dataloaders_every_n_epochs": "trained(reload_dataloaders_every_n_epochs=1).fit(Digits(), data())",
    "Timer": "trained(max_time={'hours': 1}).fit(Digits(), data())",
    "LBFGS": "trained().fit(WithLBFGS(), data())",
    "several train DataLoaders": "trained().fit(Digits(), [data(), data()])",
    "without a length": "trained().fit(Digits(), DataLoader(Endless()))",
    "16-mixed": "trained(plugins=[MixedPrecision('16-mixed', 'cpu')]).fit(Digits(), data())",
}


def test_options_that_cannot_be_exact_are_refused_by_name(lockstep: Lockstep) -> None:
    script = lockstep.script(
        COMMON
        + f"""
from lightning.pytorch.plugins import MixedPrecision
from lockstep.errors import LockstepError

class WithLBFGS(Digits):
    def configure_optimizers(self):
        return torch.optim.LBFGS(self.parameters())

class Endless(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(TensorDataset(images, digits))

for option, tried in {REFUSED!r}.items():
    try:
        eval(tried)
    except LockstepError as error:
        assert option in error.message and error.hint, (option, error)
        print("refused", option)
trained(devices=3)
"""
    )
    done = lockstep.python(script, env=ENV)
    refused = [
        line.partition(" ")[2] for line in done.out.splitlines() if line.startswith("refused")
    ]
    assert refused == list(REFUSED), done.err
    assert done.code == 1
    assert "devices=3 was given; there are 1" in done.err
    assert "hint:" in done.err
    assert "Traceback" not in done.err
    assert "changes with each microbatch" not in done.err  # what the fit logs


METRICS = (
    COMMON
    + """
from torchmetrics import MeanMetric, MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassAUROC, MulticlassF1Score, MulticlassPrecision

class WithMetrics(Digits):
    def __init__(self):
        super().__init__()
        self.right = MulticlassAccuracy(10, average="micro")
        self.more = MetricCollection({"f1": MulticlassF1Score(10), "precision": MulticlassPrecision(10),
            "area": MulticlassAUROC(10, thresholds=5)}, prefix="train_")
        self.average = MeanMetric()
        self.val = MulticlassAccuracy(10)
    def training_step(self, batch, batch_idx):
        x, y = batch
        out = self.net(x)
        self.log("hits", (out.argmax(1) == y).sum().float(), reduce_fx="sum", on_step=True, on_epoch=True)
        self.right(out, y)
        self.log("right", self.right, on_step=True, on_epoch=True)
        self.more.update(out.softmax(1), y)
        self.log_dict(self.more, on_step=False, on_epoch=True)
        if batch_idx % 2:
            self.average.update(x.sum(1))
        return super().training_step(batch, batch_idx)
    def validation_step(self, batch, batch_idx):
        self.val(self.net(batch[0]), batch[1])
        self.log("val_right", self.val)
        super().validation_step(batch, batch_idx)
    def on_train_epoch_end(self):
        self.log("average", self.average.compute())
        self.average.reset()

trainer = trained(val_check_interval=4, log_every_n_steps=1)
trainer.fit(WithMetrics(), data(), test)
results(trainer)
"""
)


def test_metrics_of_training_step_see_the_global_batch_on_every_layout(lockstep: Lockstep) -> None:
    """235 samples in batches of 32 over four replicas: the last one has 11, after crashes, too."""
    found = verified(lockstep, METRICS)
    assert found == [found[0]] * len(LAYOUTS)
    (rows,) = json.loads(found[0])
    epochs = [row for row in rows if isinstance(row, dict)]
    assert [row["right_epoch"] * 235 for row in epochs] == pytest.approx(
        [row["hits_epoch"] for row in epochs]
    )
    batches = [row[3] for row in rows if isinstance(row, list)]
    sizes = [32, 32, 32, 32, 32, 32, 32, 11] * 2
    assert [row["right_step"] * size for row, size in zip(batches, sizes, strict=True)] == (
        pytest.approx([row["hits_step"] for row in batches])
    )
    assert {"train_f1", "train_precision", "train_area", "average", "val_right"} <= set(epochs[1])
    assert epochs[1]["train_f1"] != pytest.approx(epochs[1]["train_precision"])


STEPS = (
    COMMON
    + """
from torchmetrics import MinMaxMetric
from torchmetrics.classification import MulticlassAccuracy, MulticlassAUROC

class WithCurve(Digits):
    def __init__(self):
        super().__init__()
        self.metric = MulticlassAUROC(10)
    def training_step(self, batch, batch_idx):
        self.metric(self.net(batch[0]).softmax(1), batch[1])
        return super().training_step(batch, batch_idx)

class WithWrapper(WithCurve):
    def __init__(self):
        super().__init__()
        self.metric = MinMaxMetric(MulticlassAccuracy(10))

class WithComputed(WithCurve):
    def __init__(self):
        super().__init__()
        self.metric = MulticlassAccuracy(10)
    def training_step(self, batch, batch_idx):
        self.metric.update(self.net(batch[0]), batch[1])
        self.log("so far", self.metric.compute())
        return Digits.training_step(self, batch, batch_idx)

class WithManual(WithComputed):
    automatic_optimization = False
    def training_step(self, batch, batch_idx):
        self.metric(self.net(batch[0]), batch[1])
        self.manual_backward(self.net(batch[0]).sum())

class WithOutputs(Digits):
    def training_step(self, batch, batch_idx):
        return {**super().training_step(batch, batch_idx), "shapes": batch[0]}

class WithSomeLogs(Digits):
    def training_step(self, batch, batch_idx):
        if batch[1].sum() > 36:
            self.log("dark", 1.0)
        return super().training_step(batch, batch_idx)

trained(max_epochs=1).fit(eval(sys.argv[1])(), data())
"""
)


@pytest.mark.parametrize(
    ("module", "named"),
    [
        (
            "WithCurve",
            "metric, a MulticlassAUROC of torchmetrics, was updated in training_step; its",
        ),
        (
            "WithWrapper",
            "metric, a MinMaxMetric of torchmetrics, was updated in training_step; it wr",
        ),
        (
            "WithComputed",
            "metric, a MulticlassAccuracy of torchmetrics, was computed in training_ste",
        ),
        ("WithManual", "was updated in training_step; expected automatic optimization"),
        ("WithOutputs", "training_step returned 'shapes', a tensor of shape (8, 64)"),
        ("WithSomeLogs", "self.log('dark') was called for"),
    ],
)
def test_what_depends_on_a_ranks_samples_ends_the_run(
    lockstep: Lockstep, module: str, named: str
) -> None:
    done = lockstep.python(lockstep.script(STEPS), module, env=ENV)
    assert done.code == 1
    assert named in done.err, done.err
    assert "hint:" in done.err
    assert "Traceback" not in done.err
    assert "changes with each microbatch" not in done.err  # what the fit logs


def test_the_example_reaches_its_accuracy(lockstep: Lockstep) -> None:
    done = lockstep("run", "-n", "2", str(ROOT / "examples/lightning_digits.py"), env=ENV)
    assert done.code == 0, done.err
    line = next(line for line in done.out.splitlines() if line.endswith("test digits are right"))
    assert float(line.split()[-7].removeprefix("│")) > 0.85
    assert "lockstep: warning" not in done.err
