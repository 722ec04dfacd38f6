"""What a script carries from step to step stays over a crash, or is named before and after one."""

from __future__ import annotations

import json
import re

import pytest

pytestmark = pytest.mark.forked

HEAD = """
import torch
import torch.nn.functional as F
from torch import nn
from collections import deque
import lockstep

torch.manual_seed(0)
X, Y = torch.randn(48, 4), torch.randint(0, 3, (48,))
DATA = torch.utils.data.TensorDataset(X, Y)

class Sam(torch.optim.Optimizer):
    def __init__(self, params, **settings):
        super().__init__(params, settings)
        self.base_optimizer = torch.optim.SGD(self.param_groups, momentum=0.9, **settings)
        self.param_groups = self.base_optimizer.param_groups
        self.t = 0
    def step(self, closure=None):
        self.t += 1
        for group in self.param_groups:
            group["lr"] = 0.3 * min(1, self.t / 8)
        self.base_optimizer.step()

def main():
    with lockstep.Run("carried", replicas=2, progress=False) as run:
        model = run.model(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)))
        optimizer = run.optimizer(Sam(model.parameters(), lr=0.3))
        train = run.loader(DATA, batch_size=12, shuffle=True)
        STATE
        for epoch in run.epochs(3):
            for batch in run.batches(train):
                for x, y in batch:
                    loss = RATIO * F.cross_entropy(model(x), y)
                    run.backward(loss)
                    optimizer.step()
                    optimizer.zero_grad()
                RECENT.append(run.step)
                RATIO *= 0.9 + 0.01 * len(RECENT)

if __name__ == "__main__":
    main()
"""
KEPT = HEAD.replace("STATE", "state = run.state(ratio=1.0, recent=deque(maxlen=3))")
KEPT = KEPT.replace("RATIO", "state.ratio").replace("RECENT", "state.recent")
LOST = HEAD.replace("STATE", "ratio, recent = 1.0, deque(maxlen=3)")
LOST = LOST.replace("RATIO", "ratio").replace("RECENT", "recent")


LOGGED = """
import csv
import torch
from torch.utils.data import TensorDataset
import lockstep

def main():
    with lockstep.Run("logged", replicas=2) as run:
        train = run.loader(TensorDataset(torch.randn(48, 4)), batch_size=12)
        model = run.model(torch.nn.Linear(4, 1))
        optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        file = open("log.csv", "a")
        rows = csv.writer(file)
        for epoch in run.epochs(6):
            for batch in run.batches(train):
                for (x,) in batch:
                    run.backward(model(x).mean())
                    optimizer.step()
                    optimizer.zero_grad()
                rows.writerow([epoch * len(train) + batch.index])
            run.save()
            run.print("epoch", epoch)

main()
"""


@pytest.mark.ranks(2)
def test_a_log_file_and_the_number_of_an_epoch_are_no_state(lockstep):
    script = lockstep.script(LOGGED)
    words = ("run", "-n", "2", "--run-dir", "r", script)
    first = lockstep(*words, env={"LOCKSTEP_FAULTS": "term@18"})
    assert first.code == 75, first.err
    second = lockstep(*words)
    assert second.code == 0, second.err
    assert "resuming after step" in second.err
    assert "warning" not in first.err + second.err


BEST = """
import torch
from torch.utils.data import TensorDataset
import lockstep

def main():
    with lockstep.Run("best", replicas=2, progress=False) as run:
        train = run.loader(TensorDataset(torch.randn(24, 4)), batch_size=12)
        model = run.model(torch.nn.Linear(4, 1))
        optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        state = run.state(best=1e9)
        for epoch in run.epochs(6):
            for (x,) in train:
                run.backward(model(x).mean())
                optimizer.step()
                optimizer.zero_grad()
            result = run.mean(model(x).mean() for (x,) in train)
            if result < state.best:
                state.best = result
                run.save(best=result)
                run.print(f"saved {result:.4f}")

main()
"""


@pytest.mark.ranks(2)
def test_a_result_that_is_shown_after_a_save_in_an_epoch_is_no_state(lockstep):
    done = lockstep("run", "-n", "2", lockstep.script(BEST))
    assert (done.code, done.out.count("saved")) == (0, 6), done.err
    assert "warning" not in done.err


STEP_VALUES = """
import torch
from torch.utils.data import TensorDataset
import lockstep

with lockstep.Run("values", replicas=4, progress=False) as run:
    model = run.model(torch.nn.Linear(4, 1))
    optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    scheduler = run.scheduler(torch.optim.lr_scheduler.StepLR(optimizer, 3))
    for epoch in run.epochs(4):
        for batch in run.batches(run.loader(TensorDataset(torch.randn(32, 4)), batch_size=16)):
            for (x,) in batch:
                loss = model(x).mean()
                run.backward(loss)
                norm = run.clip_grad_norm_(model, 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
                run.log(loss=loss, INSIDE)
            run.log(OUTSIDE)
"""


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("inside", "named"),
    [
        ("norm=norm", "`norm`"),
        ("norm=norm.item()", "`norm`"),
        ("lr=scheduler.get_last_lr()[0]", "`lr`"),
        ("other=0.1, large=10**400, turn=torch.tensor(1j)", None),
    ],
)
def test_values_of_a_step_that_are_logged_in_microbatches_are_named(lockstep, inside, named):
    """Once, however many steps they are logged in; not if they are logged between batches."""
    script = STEP_VALUES.replace("INSIDE", inside).replace(
        "OUTSIDE", "rate=optimizer.param_groups[0]['lr']"
    )
    done = lockstep("run", "-n", "2", lockstep.script(script))
    assert done.code == 0, done.err
    assert re.findall(r"run\.log got (\S+) inside microbatches", done.err) == [named] * bool(named)


@pytest.mark.ranks(2)
def test_what_the_run_keeps_is_the_same_after_a_crash(lockstep):
    """The optimizer inside, its count, and variables of `run.state`; no warning comes."""
    words = ("1", "2", "2,kill@7", "1,term@3,term@9")
    done = lockstep("verify", lockstep.script(KEPT), "--layouts", *words, "--json", timeout=150)
    assert done.code == 0, done.out + done.err
    assert {row["steps"] for row in json.loads(done.out)["layouts"]} == {12}
    assert "is not kept over a crash" not in done.err


@pytest.mark.ranks(2)
def test_variables_that_a_crash_loses_are_named_before_and_after(lockstep):
    place = lockstep.script(LOST)
    whole = lockstep("run", "-n", "2", place)
    killed = lockstep("run", "-n", "2", place, env={"LOCKSTEP_FAULTS": "kill@7"})
    assert (whole.code, killed.code) == (0, 0), whole.err + killed.err
    warned = (
        r"`recent` \(train\.py:\d+\), `ratio` \(train\.py:\d+\) change in the loop and are not kept"
    )
    for done in (whole, killed):
        assert len(re.findall(warned, done.err)) == 1, done.err
        assert "hint: state = run.state(recent=[], ratio=1.0)" in done.err
    lost = r"`ratio` \(train\.py:\d+\) was 0\.[0-9]+, and is [0-9.]+ now; the result may differ"
    assert re.search(lost, killed.err), killed.err
    digests = [re.findall(r"digest=\S+", done.err + done.out) for done in (whole, killed)]
    assert digests[0] != digests[1]


WALK = """
import itertools
import torch
import torch.nn.functional as F
from torch import nn
import lockstep
import settings_of_mine
from settings_of_mine import decay, scaled

torch.manual_seed(0)
X, Y = torch.randn(48, 4), torch.randint(0, 3, (48,))

class Noisy(torch.utils.data.Dataset):
    def __init__(self):
        self.sigma, self.fetched, self.cache = 0.5, 0, {}
    def __len__(self):
        return 48
    def __getitem__(self, i):
        self.fetched += 1
        self.cache[i] = X[i]
        return self.cache[i] + (self.sigma if self.fetched < 900 else 0) * torch.randn(4), Y[i]

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.drop, self.last = nn.Linear(4, 8), nn.Dropout(0.1), nn.Linear(8, 3)
    def forward(self, x):
        return self.last(self.drop(self.first(x).relu()))

def soft(logits, y):
    return F.cross_entropy(logits, y, label_smoothing=0.2)

with lockstep.Run("walk", replicas=2, progress=False) as run:
    model = run.model(Net())
    optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    train = run.loader(Noisy(), batch_size=24, shuffle=True)
    numbers, criterion, shown = itertools.count(), soft, 0.0
    sums, weight = torch.zeros(3), 1.0
    for epoch in run.epochs(6):
        number = next(numbers)
        for x, y in train:
            loss = scaled(criterion(model(x), y)) * settings_of_mine.rate * weight * 0.9 ** number
            sums[y] += loss.item()
            shown += loss.item()
            optimizer.zero_grad()
            run.backward(loss)
            optimizer.step()
        print("loss", shown / len(train))
        shown = 0.0
        EPOCH
        weight = 1 / (1 + float(sums.max()))
        sums = torch.zeros(3)
"""
CHANGED = """settings_of_mine.rate *= 0.9
        decay()
        train.dataset.sigma *= 0.9
        model.drop.p = 0.2
        criterion = F.cross_entropy"""
OWN_SETTINGS = """
rate = scale = 1.0

def scaled(loss):
    return loss * scale

def decay():
    global scale
    scale *= 0.9
"""
#: What the loop reaches, and a word of what is said of it.
REACHED = {
    "settings_of_mine.rate": "in the loop",
    "settings_of_mine.scale": "in the loop",
    "train.dataset.sigma": "in the loop",
    "train.dataset.fetched": "with the samples that this rank fetches",
    "Net.drop.p": "in the loop",
    "criterion": "in the loop",
    "numbers": "in the loop",
    "sums": "with each microbatch, of those of this rank only",
}


@pytest.mark.ranks(1)
def test_what_the_loop_reaches_is_named_before_and_after_a_crash(lockstep):
    lockstep.script(OWN_SETTINGS, "settings_of_mine.py")
    place = lockstep.script(WALK.replace("EPOCH", CHANGED))
    done = lockstep("run", "-n", "1", place, env={"LOCKSTEP_FAULTS": "kill@6"})
    assert done.code == 0, done.err
    warnings = [line for line in done.err.splitlines() if "warning" in line]
    for name, cause in REACHED.items():
        named = [line for line in warnings if f"`{name}`" in line]
        assert cause in named[0], name
    assert not re.search("`shown`|`train.dataset.cache`|`F`|`x`|`loss`", done.err)
    lost = [line for line in warnings if "not what they were when the state was saved" in line]
    assert "`settings_of_mine.rate`" in lost[0]


@pytest.mark.ranks(1)
def test_what_an_epoch_sets_anew_and_what_is_only_shown_is_not_named(lockstep):
    lockstep.script(OWN_SETTINGS, "settings_of_mine.py")
    text = WALK.replace("self.fetched += 1", "pass").replace("EPOCH", "pass")
    text = text.replace("number = next(numbers)", "number = 0; model.drop.p = 0.1 + 0.1 * epoch")
    text = text.replace("sums[y] += loss.item()", "pass")
    done = lockstep("run", "-n", "1", lockstep.script(text))
    assert done.code == 0, done.err
    assert "warning" not in done.err


LAYER = """
import time
import torch
import torch.nn.functional as F
from torch import nn
import lockstep

torch.manual_seed(0)
DATA = torch.utils.data.TensorDataset(torch.randn(48, 4), torch.randint(0, 3, (48,)))

def apply_schedule(model, epoch):  # what it changes belongs to torch's own layer
    for module in model.modules():
        if isinstance(module, nn.Dropout) and DECAYS:
            module.p *= 0.5

with lockstep.Run("layer", replicas=2) as run:
    model = run.model(nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 3)))
    optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.3))
    train = run.loader(DATA, batch_size=12, shuffle=True)
    for epoch in run.epochs(6):
        for x, y in train:
            run.backward(F.cross_entropy(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
            time.sleep(0.1)  # a snapshot is taken in most steps, on a busy machine, too
        if epoch < 5:
            apply_schedule(model, epoch)
"""


@pytest.mark.ranks(2)
@pytest.mark.parametrize("decays", [True, False])
def test_a_batch_that_is_computed_again_has_the_loss_from_before_the_crash(lockstep, decays):
    """Found by the losses alone; a run whose state is whole is left in peace."""
    place = lockstep.script(LAYER.replace("DECAYS", str(decays)))
    for _ in range(5):  # when a snapshot is taken depends on the machine's speed
        done = lockstep("run", "-n", "2", place, env={"LOCKSTEP_FAULTS": "kill@18"})
        assert done.code == 0, done.err
        if (
            4
            < int(re.findall(r"resuming after step (\d+)", f"{done.err} resuming after step 0")[0])
            < 17
        ):
            break
    else:
        pytest.fail("no run resumed after the first epoch and before the kill")
    found = re.findall(
        r"was computed before the crash with the loss (\S+), and now has (\S+):", done.err
    )
    assert bool(found) == decays, done.err
    assert all(before != now for before, now in found)


TWICE = """
import os
import signal
import torch
from torch.utils.data import TensorDataset
import lockstep

restarted = os.path.exists("killed")
for number in range(2):
    with lockstep.Run("twice", replicas=2, progress=False) as run:
        train = run.loader(TensorDataset(torch.randn(48, 4) + number), batch_size=12)
        model = run.model(torch.nn.Linear(4, 1))
        optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        for epoch in run.epochs(3):
            for (x,) in train:
                run.backward(model(x).square().mean() * (1 + DIFFERS * restarted * number))
                optimizer.step()
                optimizer.zero_grad()
            if number == 1 and epoch == 1 and run.world.rank == 0 and not os.path.exists("killed"):
                open("killed", "w").close()
                os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.ranks(2)
@pytest.mark.parametrize("differs", [0, 1])
def test_losses_of_a_later_run_are_compared_with_its_own(lockstep, differs):
    done = lockstep("run", "-n", "2", lockstep.script(TWICE.replace("DIFFERS", str(differs))))
    assert done.code == 0, done.err
    assert "restart 1" in done.err
    assert ("computed before the crash" in done.err) == differs, done.err


SCHEDULED = """
import torch
from torch.utils.data import TensorDataset
import lockstep

with lockstep.Run("scheduled", replicas=2) as run:
    train = run.loader(TensorDataset(torch.randn(24, 4)), batch_size=12)
    model = run.model(torch.nn.Linear(4, 1))
    optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    scheduler = GIVEN(torch.optim.lr_scheduler.KIND)
    for epoch in run.epochs(2):
        for (x,) in train:
            run.backward(model(x).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        run.save()
"""


@pytest.mark.parametrize("kind", ["StepLR(optimizer, 1)", "ReduceLROnPlateau(optimizer)"])
@pytest.mark.parametrize("given", ["run.scheduler", ""])
def test_a_scheduler_that_was_not_given_to_the_run(lockstep, kind, given):
    script = SCHEDULED.replace("KIND", kind).replace("GIVEN", given)
    done = lockstep("run", "-n", "1", lockstep.script(script))
    assert done.code == 0, done.err
    warning = "a learning rate scheduler of SGD is not part of what is saved"
    assert (warning in done.err) == (not given), done.err
