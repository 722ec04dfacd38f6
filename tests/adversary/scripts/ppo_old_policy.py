"""PPO: the policy of the epoch's start is a registered copy, and the ratio to it is clipped."""

import copy

import torch
from torch import nn
from torch.distributions import Categorical
from torch.utils.data import TensorDataset

import lockstep

with lockstep.Run("ppo", seed=35, replicas=3) as run:
    net = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 3))
    old = run.register("old", copy.deepcopy(net))
    policy = run.model(net)
    optimizer = run.optimizer(torch.optim.Adam(policy.parameters(), lr=0.03))
    x = torch.randn(60, 4)
    train = run.loader(TensorDataset(x, x.argmax(1) % 3), batch_size=12, shuffle=True)
    for _epoch in run.epochs(4):
        old.load_state_dict(policy.state_dict())
        for state, best in train:
            with torch.no_grad():
                before = Categorical(logits=old(state))
                action = before.sample()
            advantage = (action == best).float() - 0.3
            ratio = (
                Categorical(logits=policy(state)).log_prob(action) - before.log_prob(action)
            ).exp()
            clipped = ratio.clamp(0.8, 1.2)
            loss = -torch.minimum(ratio * advantage, clipped * advantage).mean()
            optimizer.zero_grad()
            run.backward(loss)
            optimizer.step()
