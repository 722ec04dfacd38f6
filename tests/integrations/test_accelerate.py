"""`Accelerator` of accelerate through a run: a script with another import, on every layout."""

from __future__ import annotations

from collections.abc import Iterator

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


IN_LOOP = """
import torch
from torch.utils.data import DataLoader
from lockstep.integrations.accelerate import Accelerator
accelerator = Accelerator(cpu=True, replicas=4)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = torch.arange(128.0).view(32, 4) / 128
model, optimizer, train = accelerator.prepare(model, optimizer, DataLoader(data, batch_size=2))
for number, x in enumerate(train):
    accelerator.backward(model(x).square().mean())
    optimizer.step()
    optimizer.zero_grad()
    if number == 1:
        accelerator.save_state("second")
after = {name: value.clone() for name, value in model.state_dict().items()}
accelerator.load_state("second")
assert not torch.equal(after["weight"], model.weight)
accelerator.set_trigger()
accelerator.print("trigger", accelerator.check_trigger())
for x in train:
    accelerator.check_trigger()
"""


def test_a_state_asked_for_before_an_update_is_saved_after_it_and_triggers_are_refused(
    lockstep: Lockstep,
) -> None:
    """A trigger in a loop depends on what one rank has seen."""
    done = lockstep.python(lockstep.script(IN_LOOP), env=ENV)
    assert "trigger True" in done.out
    assert (lockstep.directory / "second/model.safetensors").exists()
    assert done.code == 1
    assert "check_trigger in a loop over a loader" in done.err
    assert "Traceback" not in done.err


def test_a_batch_sampler_that_fills_one_list_again_and_again() -> None:
    pytest.importorskip("accelerate", reason="needs accelerate, of the extra `accelerate`")
    from lockstep.integrations.loaders import _JoinedBatchSampler

    class Reusing:
        def __len__(self) -> int:
            return 3

        def __iter__(self) -> Iterator[list[int]]:
            batch: list[int] = []
            for first in (0, 2, 4):
                batch[:] = first, first + 1
                yield batch

    assert list(_JoinedBatchSampler(Reusing(), 2)) == [[0, 1, 2, 3], [4, 5]]


def test_a_torch_for_cuda_without_a_gpu_computes_on_the_cpu(lockstep: Lockstep) -> None:
    script = """
import torch
torch.accelerator.current_accelerator = lambda *_: torch.device("cuda")
torch.accelerator.device_count = lambda: 0
from lockstep.integrations.accelerate import Accelerator
print("RESULT", Accelerator().device)
"""
    done = lockstep("run", "-n", "2", lockstep.script(script), env=ENV)
    assert done.code == 0, done.err
    assert "RESULT cpu" in done.out
    assert "exact, 2 replicas on 2 ranks" in done.err
    assert "replicas is not set, so that 2 ranks mean 2 replicas" in done.err
