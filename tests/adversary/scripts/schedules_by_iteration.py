"""Rates, weight decay, a KL weight and a momentum by the number of the iteration, as DINO sets them."""

import copy
import math

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import lockstep

EPOCHS = 3
with lockstep.Run("schedules", seed=4, replicas=4) as run:
    x = torch.randn(98, 8)
    net = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.ReLU(), nn.Linear(16, 4))
    teacher = run.register("teacher", copy.deepcopy(net).requires_grad_(False))
    model = run.model(net)
    weights, biases = (
        [p for p in model.parameters() if (p.dim() > 1) == large] for large in (True, False)
    )
    optimizer = run.optimizer(torch.optim.AdamW([{"params": weights}, {"params": biases}], lr=0.01))
    # The last batch has fewer samples than there are replicas.
    train = run.loader(TensorDataset(x, x[:, :4].argmax(1)), batch_size=16, shuffle=True)
    waves = [0.5 + 0.5 * math.cos(i / 7) for i in range(EPOCHS * len(train))]

    @torch.no_grad()
    def follow(*_):
        momentum = 0.9 + 0.1 * waves[run.epoch * len(train) + run.batch_index]
        for slow, fast in zip(teacher.parameters(), model.parameters(), strict=True):
            slow.mul_(momentum).add_(fast, alpha=1 - momentum)

    optimizer.register_step_post_hook(follow)

    def learn(inputs, labels, wave):
        for number, group in enumerate(optimizer.param_groups):
            group["lr"] = 0.02 * wave
            if number == 0:
                group["weight_decay"] = 0.4 * wave
                group["betas"] = (0.9, 0.9 + 0.05 * wave)
        logits = model(inputs)
        target = teacher(inputs).softmax(1)
        run.backward(
            F.cross_entropy(logits, labels) + wave * F.kl_div(logits.log_softmax(1), target)
        )
        optimizer.step()
        optimizer.zero_grad()

    for epoch in run.epochs(EPOCHS):
        if epoch % 2 == 0:
            for inputs, labels in train:
                learn(inputs, labels, waves[epoch * len(train) + run.batch_index])
        else:
            for batch in run.batches(train):
                for inputs, labels in batch:
                    learn(inputs, labels, waves[epoch * len(train) + batch.index])
