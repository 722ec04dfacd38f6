"""The loop with DistributedDataParallel; torchrun starts it."""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from task import Net, load
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

train_set, test_set = load()
dist.init_process_group()
rank, size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
gpu = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
device = gpu if torch.cuda.is_available() else torch.device("cpu")
sampler = DistributedSampler(train_set)
train = DataLoader(train_set, batch_size=64 // size, sampler=sampler)
test = DataLoader(test_set, batch_size=256)
model = DistributedDataParallel(Net().to(device))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

for epoch in range(10):
    sampler.set_epoch(epoch)
    model.train()
    for images, labels in train:
        images, labels = images.to(device), labels.to(device)
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    model.eval()
    with torch.no_grad():
        right = [model.module(x.to(device)).argmax(1).cpu() == y for x, y in test]
    if rank == 0:
        print(f"epoch {epoch}: test accuracy {torch.cat(right).float().mean():.2%}")

dist.destroy_process_group()
