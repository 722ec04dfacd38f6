"""WGAN-GP: a penalty on gradients, spectral norm in the generator, two updates of the critic."""

import torch
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm
from torch.utils.data import TensorDataset

import lockstep


def penalty(critic, real, fake):
    mix = torch.rand(len(real), 1)
    between = (mix * real + (1 - mix) * fake).requires_grad_()
    (gradient,) = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
    return ((gradient.norm(dim=1) - 1) ** 2).mean()


with lockstep.Run("wgan", seed=9, replicas=3) as run:
    train = run.loader(TensorDataset(torch.randn(48, 2) + 2), batch_size=12, shuffle=True)
    generator = run.model(
        nn.Sequential(spectral_norm(nn.Linear(4, 16)), nn.ReLU(), nn.Linear(16, 2))
    )
    critic = run.model(nn.Sequential(nn.Linear(2, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1)))
    g_opt = run.optimizer(torch.optim.Adam(generator.parameters(), lr=0.01, betas=(0.0, 0.9)))
    c_opt = run.optimizer(torch.optim.Adam(critic.parameters(), lr=0.01, betas=(0.0, 0.9)))
    for _epoch in run.epochs(3):
        for batch in run.batches(train):
            for _ in range(2):
                for (real,) in batch:
                    fake = generator(torch.randn(len(real), 4)).detach()
                    loss = critic(fake).mean() - critic(real).mean()
                    c_opt.zero_grad()
                    run.backward(loss + 10 * penalty(critic, real, fake))
                    c_opt.step()
            for (real,) in batch:
                g_opt.zero_grad()
                run.backward(-critic(generator(torch.randn(len(real), 4))).mean())
                g_opt.step()
