"""Training of a small GPT-2 by a framework, plain or through a run: prints the seconds of an update.

in_framework.py trainer|accelerate|lightning plain|lockstep RANKS
"""

from __future__ import annotations

import itertools
import statistics
import sys
import time
from typing import Any

import support
import torch
from torch.utils.data import DataLoader, Dataset

support.import_torchvision()  # before transformers and torchmetrics import it

from transformers import (  # noqa: E402
    GPT2Config,
    GPT2LMHeadModel,
    TrainerCallback,
    TrainingArguments,
)

STEPS, WARM_UP = 40, 8
GLOBAL_BATCH, TOKENS = 16, 64
#: Replicas of a run: as many as the most ranks that are measured, so that 1 rank computes both.
REPLICAS = 2


class Text(Dataset[dict[str, torch.Tensor]]):
    """Made sequences."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self._ids = torch.randint(500, (STEPS * GLOBAL_BATCH, TOKENS), generator=generator)

    def __len__(self) -> int:
        return len(self._ids)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self._ids[index], "labels": self._ids[index]}


class Clock:
    """Times of updates."""

    def __init__(self) -> None:
        self._times: list[float] = []

    def tick(self) -> None:
        """Record that an update has been done."""
        self._times.append(time.perf_counter())

    def median(self) -> float:
        """Return the median seconds of an update after the first ones."""
        times = self._times[WARM_UP:]
        return statistics.median(b - a for a, b in itertools.pairwise(times))


def network() -> GPT2LMHeadModel:
    """Return a GPT-2 with 4 layers."""
    torch.manual_seed(0)
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=500, n_positions=TOKENS, n_embd=128, n_layer=4, n_head=4)
    )


def with_trainer(clock: Clock, ranks: int, *, ours: bool) -> None:
    """Train by `transformers.Trainer`."""
    if ours:
        from lockstep.integrations.transformers import Trainer
    else:
        from transformers import Trainer  # type: ignore[assignment]

    class Ticking(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
            clock.tick()

    arguments = TrainingArguments(
        "out",
        use_cpu=True,
        per_device_train_batch_size=GLOBAL_BATCH // (REPLICAS if ours else ranks),
        num_train_epochs=1,
        report_to=[],
        disable_tqdm=True,
        save_strategy="no",
        logging_steps=10,
    )
    more: dict[str, Any] = {"replicas": REPLICAS} if ours else {}
    trainer = Trainer(
        model=network(), args=arguments, train_dataset=Text(), callbacks=[Ticking()], **more
    )
    trainer.train()


def with_accelerate(clock: Clock, ranks: int, *, ours: bool) -> None:
    """Train by a loop with Accelerate."""
    if ours:
        from lockstep.integrations.accelerate import Accelerator
    else:
        from accelerate import Accelerator  # type: ignore[assignment]

    more: dict[str, Any] = {"replicas": REPLICAS} if ours else {}
    accelerator = Accelerator(cpu=True, **more)
    model = network()
    size = GLOBAL_BATCH // (REPLICAS if ours else ranks)
    model, optimizer, data = accelerator.prepare(
        model,
        torch.optim.AdamW(model.parameters(), lr=1e-4),
        DataLoader(Text(), batch_size=size, shuffle=True),
    )
    model.train()
    for batch in data:
        accelerator.backward(model(**batch).loss)
        optimizer.step()
        optimizer.zero_grad()
        if accelerator.sync_gradients:
            clock.tick()


def with_lightning(clock: Clock, ranks: int, *, ours: bool) -> None:
    """Train by Lightning's `Trainer`."""
    import lightning as L

    class Module(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = network()

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.net(**batch).loss

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-4)

    class Ticking(L.Callback):
        def on_train_batch_end(self, *_: Any) -> None:
            clock.tick()

    settings: dict[str, Any] = {"devices": ranks, "strategy": "ddp" if ranks > 1 else "auto"}
    if ours:
        from lockstep.integrations.lightning import LockstepStrategy

        settings = {"strategy": LockstepStrategy(replicas=REPLICAS)}
    trainer = L.Trainer(
        accelerator="cpu",
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[Ticking()],
        **settings,
    )
    size = GLOBAL_BATCH if ours else GLOBAL_BATCH // ranks
    trainer.fit(Module(), DataLoader(Text(), batch_size=size, shuffle=True))


def main() -> None:
    framework, way, ranks = sys.argv[1:]
    torch.set_num_threads(1)
    clock = Clock()
    train = {"trainer": with_trainer, "accelerate": with_accelerate, "lightning": with_lightning}
    train[framework](clock, int(ranks), ours=way == "lockstep")
    print(f"SECONDS {clock.median()}\n", end="", flush=True)


if __name__ == "__main__":
    main()
