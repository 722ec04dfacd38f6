"""`Accelerator` of accelerate through a run: a script with another import, on every layout."""

from __future__ import annotations

import pytest

from tests.conftest import Lockstep
from tests.integrations.scripts import ENV, LAYOUTS, verified

SCRIPT = """
import json
import torch
from accelerate.utils import set_seed
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from lockstep.integrations.accelerate import Accelerator

def main():
    accelerator = Accelerator(cpu=True, replicas=2, gradient_accumulation_steps=2)
    set_seed(7)
    images, digits = load_digits(return_X_y=True)
    images, digits = torch.tensor(images[:600], dtype=torch.float32) / 16, torch.tensor(digits[:600])
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    train = DataLoader(TensorDataset(images[:500], digits[:500]), batch_size=16, shuffle=True)
    test = DataLoader(TensorDataset(images[500:], digits[500:]), batch_size=32)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=1e-2, total_steps=2 * len(train) // accelerator.gradient_accumulation_steps)
    model, optimizer, train, test, scheduler = accelerator.prepare(model, optimizer, train, test, scheduler)
    curve = []
    for epoch in range(2):
        model.train()
        for images, digits in train:
            with accelerator.accumulate(model):
                loss = nn.functional.cross_entropy(model(images), digits)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        model.eval()
        right = count = 0
        for images, digits in test:
            with torch.no_grad():
                predictions = model(images).argmax(-1)
            predictions, references = accelerator.gather_for_metrics((predictions, digits))
            right += int((predictions == references).sum())
            count += len(references)
        accelerator.print("RESULT", json.dumps([epoch, right, count, optimizer.param_groups[0]["lr"]]))
        accelerator.save_state("state")
    accelerator.wait_for_everyone()
    with accelerator.main_process_first():
        pass
    accelerator.end_training()

main()
"""


def test_a_script_is_the_same_on_every_layout(lockstep: Lockstep) -> None:
    results = verified(lockstep, SCRIPT)
    assert results == [results[0]] * len(LAYOUTS)
    epoch, right, count, rate = (float(part) for part in results[0].strip("[]").split(","))
    assert (epoch, count) == (1, 100)
    assert right > 40
    assert rate < 1e-4  # the schedule has come to its end, as with as many processes as replicas


def test_a_state_is_written_once_in_accelerates_own_layout(lockstep: Lockstep) -> None:
    done = lockstep("run", "-n", "2", lockstep.script(SCRIPT), env=ENV)
    assert done.code == 0, done.err
    names = {file.name for file in (lockstep.directory / "state").iterdir()}
    assert names == {"model.safetensors", "optimizer.bin", "scheduler.bin", "random_states_0.pkl"}


@pytest.mark.parametrize(
    ("made", "named"),
    [
        ("dataloader_config=DataLoaderConfiguration(dispatch_batches=True)", "dispatch_batches"),
        ("dynamo_backend='eager'", "dynamo_backend"),
        ("gradient_accumulation_steps=2", "gradient_accumulation_steps=2 without replicas"),
    ],
)
def test_settings_that_cannot_be_exact_are_refused_by_name(
    lockstep: Lockstep, made: str, named: str
) -> None:
    script = f"""
from accelerate.utils import DataLoaderConfiguration
from lockstep.integrations.accelerate import Accelerator
Accelerator(cpu=True, {made})
"""
    done = lockstep.python(lockstep.script(script), env=ENV)
    assert done.code == 1
    assert named in done.err
    assert "hint:" in done.err
    assert "Traceback" not in done.err
