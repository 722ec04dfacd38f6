"""Stochastic weight averaging as PyTorch documents it: AveragedModel, SWALR, update_bn at the end."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.swa_utils import SWALR, AveragedModel, update_bn
from torch.utils.data import TensorDataset

import lockstep

SWA_START = 2

with lockstep.Run("swa", seed=4, replicas=4) as run:
    data = TensorDataset(torch.randn(96, 8) * 3 + 1, torch.randint(0, 3, (96,)))
    loader = run.loader(data, batch_size=16, shuffle=True)
    net = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))
    swa_model = AveragedModel(net)
    model = run.model(net)
    run.register("swa", swa_model)
    optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    scheduler = run.scheduler(torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=4))
    swa_scheduler = run.scheduler(SWALR(optimizer, swa_lr=0.05, anneal_epochs=1))
    for epoch in run.epochs(5):
        for x, y in loader:
            optimizer.zero_grad()
            run.backward(F.cross_entropy(model(x), y))
            optimizer.step()
        if epoch >= SWA_START:
            swa_model.update_parameters(model)
            swa_scheduler.step()
        else:
            scheduler.step()
    update_bn(loader, swa_model)
