"""Actor and critic as two models with one common loss and an optimizer each."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributions import Normal
from torch.utils.data import TensorDataset

import lockstep

with lockstep.Run("actor-critic", seed=3, replicas=3) as run:
    actor = run.model(nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 2)))
    critic = run.model(nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 1), nn.Flatten(0)))
    actor_opt = run.optimizer(torch.optim.Adam(actor.parameters(), lr=0.01))
    critic_opt = run.optimizer(torch.optim.Adam(critic.parameters(), lr=0.02))
    states = run.loader(TensorDataset(torch.randn(60, 3)), batch_size=12, shuffle=True)
    for _epoch in run.epochs(4):
        for (state,) in states:
            mean, log_std = actor(state).unbind(1)
            policy = Normal(mean, log_std.clamp(-2, 1).exp())
            action = policy.sample()
            reward = -((action - state.sum(1)) ** 2)
            value = critic(state)
            advantage = (reward - value).detach()
            loss = -(policy.log_prob(action) * advantage).mean() - 0.01 * policy.entropy().mean()
            loss = loss + F.mse_loss(value, reward)
            actor_opt.zero_grad()
            critic_opt.zero_grad()
            run.backward(loss)
            actor_opt.step()
            critic_opt.step()
