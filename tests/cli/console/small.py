import torch

import lockstep

with lockstep.Run("small", seed=0, replicas=4) as run:
    points = torch.randn(64, 16, generator=torch.Generator().manual_seed(0))
    data = torch.utils.data.TensorDataset(points, (points[:, 0] > 0).long())
    train = run.loader(data, batch_size=16, shuffle=True)
    layers = torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 2)
    model = run.model(torch.nn.Sequential(*layers))
    optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in run.epochs(2):
        for x, y in train:
            run.backward(torch.nn.functional.cross_entropy(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
