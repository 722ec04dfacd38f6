"""The order of sets of strings is the same in each launch, unless the user chooses a seed."""

from __future__ import annotations

import re

import pytest

SCRIPT = """
import torch
import torch.nn.functional as F
import lockstep

words = "the cat sat on the mat and the dog lay by the door of the old red barn".split()
numbers = {word: number for number, word in enumerate(set(words))}
x = torch.tensor([numbers[word] for word in words])
with lockstep.Run("words", replicas=2, progress=False) as run:
    model = run.model(torch.nn.Sequential(torch.nn.Embedding(len(numbers), 4), torch.nn.Linear(4, 2)))
    optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.5))
    for epoch in run.epochs(2):
        for rows, classes in run.loader(torch.utils.data.TensorDataset(x, x % 2), batch_size=4):
            run.backward(F.cross_entropy(model(rows), classes))
            optimizer.step()
            optimizer.zero_grad()
"""


@pytest.mark.ranks(2)
def test_a_vocabulary_from_a_set(lockstep):
    place = lockstep.script(SCRIPT)
    launches = [
        lockstep("run", "-n", "1", place),
        lockstep("run", "-n", "2", "--start", "spawn", place),
        lockstep("run", "-n", "1", place, env={"PYTHONHASHSEED": "1"}),
    ]
    assert [done.code for done in launches] == [0] * 3, [done.err for done in launches]
    digests = [re.findall(r"digest=sha256:(\w+)", done.out)[-1] for done in launches]
    assert digests[1] == digests[0]
    assert digests[2] != digests[0]
