"""The loop with Lightning Fabric; `fabric run` starts it."""

import torch
import torch.nn.functional as F
from lightning_fabric import Fabric
from task import Net, load
from torch.utils.data import DataLoader

train_set, test_set = load()
fabric = Fabric()
fabric.launch()
fabric.seed_everything(0)
train = DataLoader(train_set, batch_size=64 // fabric.world_size, shuffle=True)
test = DataLoader(test_set, batch_size=256 // fabric.world_size)
train, test = fabric.setup_dataloaders(train, test)
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
model, optimizer = fabric.setup(model, optimizer)

for epoch in range(10):
    model.train()
    for images, labels in train:
        loss = F.cross_entropy(model(images), labels)
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()

    model.eval()
    counts = torch.zeros(2, device=fabric.device)
    with torch.no_grad():
        for x, y in test:
            right = model(x).argmax(1) == y
            counts += torch.stack([right.sum(), torch.tensor(len(y), device=fabric.device)])
    counts = fabric.all_reduce(counts, reduce_op="sum")
    fabric.print(f"epoch {epoch}: test accuracy {counts[0] / counts[1]:.2%}")
