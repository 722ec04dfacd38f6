"""DCGAN: generator and discriminator with BatchNorm, two updates per batch, DCGAN's own initialisation."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import lockstep


def weights_init(m):
    if isinstance(m, (nn.Conv2d, nn.ConvTranspose2d)):
        nn.init.normal_(m.weight, 0.0, 0.02)
    elif isinstance(m, nn.BatchNorm2d):
        nn.init.normal_(m.weight, 1.0, 0.02)
        nn.init.zeros_(m.bias)


def generator():
    return nn.Sequential(
        nn.ConvTranspose2d(8, 8, 4), nn.BatchNorm2d(8), nn.ReLU(True),
        nn.ConvTranspose2d(8, 1, 4, 2, 1), nn.Tanh(),
    )  # fmt: skip


def discriminator():
    return nn.Sequential(
        nn.Conv2d(1, 8, 4, 2, 1), nn.BatchNorm2d(8), nn.LeakyReLU(0.2),
        nn.Conv2d(8, 1, 4), nn.Flatten(0),
    )  # fmt: skip


with lockstep.Run("dcgan", seed=999, replicas=3) as run:
    train = run.loader(TensorDataset(torch.rand(48, 1, 8, 8) * 2 - 1), batch_size=12, shuffle=True)
    net_g = run.model(generator().apply(weights_init))
    net_d = run.model(discriminator().apply(weights_init))
    opt_g = run.optimizer(torch.optim.Adam(net_g.parameters(), lr=2e-3, betas=(0.5, 0.999)))
    opt_d = run.optimizer(torch.optim.Adam(net_d.parameters(), lr=2e-3, betas=(0.5, 0.999)))
    for _epoch in run.epochs(3):
        for batch in run.batches(train):
            for (real,) in batch:
                fake = net_g(torch.randn(len(real), 8, 1, 1)).detach()
                opt_d.zero_grad()
                loss_d = F.softplus(-net_d(real)).mean() + F.softplus(net_d(fake)).mean()
                run.backward(loss_d)
                opt_d.step()
            for (real,) in batch:
                opt_g.zero_grad()
                loss_g = F.softplus(-net_d(net_g(torch.randn(len(real), 8, 1, 1)))).mean()
                run.backward(loss_g)
                opt_g.step()
