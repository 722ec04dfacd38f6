"""An exponential moving average of the weights, updated after every global batch, used to evaluate."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import TensorDataset

import lockstep

with lockstep.Run("ema", seed=5, replicas=4) as run:
    x = torch.randn(96, 8)
    data = TensorDataset(x, (x[:, 0] * x[:, 1] > 0).long())
    train = run.loader(data, batch_size=16, shuffle=True)
    test = run.loader(data, batch_size=48)
    net = nn.Sequential(nn.Linear(8, 24), nn.BatchNorm1d(24), nn.ReLU(), nn.Linear(24, 2))
    ema = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
    model = run.model(net)
    run.register("ema", ema)
    optimizer = run.optimizer(torch.optim.Adam(model.parameters(), lr=0.01))
    for epoch in run.epochs(4):
        model.train()
        for batch in run.batches(train):
            for inputs, labels in batch:
                optimizer.zero_grad()
                run.backward(F.cross_entropy(model(inputs), labels))
                optimizer.step()
            ema.update_parameters(model)
        ema.eval()
        with torch.no_grad():
            accuracy = run.mean(ema(inputs).argmax(1) == labels for inputs, labels in test)
        run.print(f"epoch {epoch}: {accuracy:.3f}")
        run.save(best=accuracy)
