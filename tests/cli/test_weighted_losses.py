"""Losses that are means over tokens: a sequence weighs what it holds, on every layout."""

from __future__ import annotations

import json

import pytest

pytestmark = pytest.mark.forked

SCRIPT = """
import copy, sys
import torch
import torch.nn.functional as F
from torch import nn
import lockstep

torch.manual_seed(0)
LENGTHS = [1, 9, 2, 14, 3, 3, 7, 1, 12, 5, 2, 2, 8, 1, 6]
DATA = [torch.randint(1, 11, (length + 1,)) for length in LENGTHS]

def collate(rows):
    return nn.utils.rnn.pad_sequence(rows, batch_first=True)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.body = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 11))
    def forward(self, x):
        return self.body(self.embed(x))

def loss_of(model, rows):
    targets = rows[:, 1:]
    logits = model(rows[:, :-1])
    tokens = (targets != 0).sum()
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=0), tokens

net = Net()
plain = copy.deepcopy(net)
with lockstep.Run("tokens", progress=False) as run:
    model = run.model(net)
    optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.5))
    loader = run.loader(DATA, batch_size=6, collate_fn=collate)

    def epoch():
        for rows in loader:
            loss, tokens = loss_of(model, rows)
            run.backward(loss, weight=tokens)
            optimizer.step()
            optimizer.zero_grad()
            yield loss.detach(), tokens

    for _ in run.epochs(3):
        mean = run.mean(epoch())
    run.export(sys.argv[1])

sgd = torch.optim.SGD(plain.parameters(), lr=0.5)
for number in range(3):
    total = tokens_in_all = 0.0
    for start in range(0, len(DATA), 6):
        loss, tokens = loss_of(plain, collate(DATA[start : start + 6]))
        sgd.zero_grad()
        loss.backward()
        sgd.step()
        total, tokens_in_all = total + loss.item() * tokens.item(), tokens_in_all + tokens.item()
assert abs(mean - total / tokens_in_all) < 1e-5, (mean, total / tokens_in_all)
for name, value in torch.load(sys.argv[1]).items() if run.is_main_process else ():
    torch.testing.assert_close(value, plain.state_dict()[name], rtol=1e-4, atol=1e-5)
"""


@pytest.mark.wide
@pytest.mark.ranks(3)
def test_tokens_weigh_the_same_on_every_layout(lockstep):
    script = lockstep.script(SCRIPT)
    words = ("--strategies", "ddp,ps,fsdp", "--json", "--replicas", "3")
    words = ("--layouts", "1", "3", "2,kill@5", *words, "--", "net.pt")
    done = lockstep("verify", script, *words, timeout=200)
    assert done.code == 0, done.err
    told = json.loads(done.out)
    assert told["same"]
    assert len({row["digest"] for row in told["layouts"]}) == 1


@pytest.mark.wide
@pytest.mark.ranks(2)
def test_tokens_weigh_the_same_in_a_pipeline(lockstep):
    script = lockstep.script(SCRIPT)
    words = ("--strategy", "pipeline", "--mesh", "1x2", "--replicas", "3", "--no-exact")
    done = lockstep("run", "-n", "2", *words, script, "net.pt")
    assert done.code == 0, done.err
