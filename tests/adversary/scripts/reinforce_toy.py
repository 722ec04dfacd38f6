"""REINFORCE on a toy walk: each sample is where an episode starts, actions are sampled in the loop."""

import torch
from torch import nn
from torch.distributions import Categorical
from torch.utils.data import TensorDataset

import lockstep


def play(policy, starts, length=6):
    position = starts.clone()
    log_probs, rewards = [], []
    for _ in range(length):
        observation = torch.stack([position, position.abs()], 1)
        distribution = Categorical(logits=policy(observation))
        action = distribution.sample()
        position = position + action.float() * 2 - 1 + 0.1 * torch.randn_like(position)
        log_probs.append(distribution.log_prob(action))
        rewards.append(-position.abs())
    return torch.stack(log_probs), torch.stack(rewards)


with lockstep.Run("reinforce", seed=4, replicas=4) as run:
    policy = run.model(nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 2)))
    optimizer = run.optimizer(torch.optim.Adam(policy.parameters(), lr=0.02))
    episodes = run.loader(TensorDataset(torch.linspace(-3, 3, 48)), batch_size=12, shuffle=True)

    def train_epoch():
        for (starts,) in episodes:
            log_probs, rewards = play(policy, starts)
            returns = rewards.flip(0).cumsum(0).flip(0)
            returns = (returns - returns.mean()) / (returns.std() + 1e-6)
            optimizer.zero_grad()
            run.backward(-(log_probs * returns).sum(0).mean())
            optimizer.step()
            yield rewards.sum(0)

    for epoch in run.epochs(5):
        run.print(f"epoch {epoch}: mean return {run.mean(train_epoch()):.3f}")
