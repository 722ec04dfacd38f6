"""The loop of the articles: DistributedSampler, DataLoader, DistributedDataParallel, optimizer."""

import torch.distributed as dist
import torch.nn.functional as F
from contestants.workload import from_arguments
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler


def main() -> None:
    workload = from_arguments()
    dist.init_process_group("gloo")
    data = workload.data()
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=workload.batch, sampler=sampler)
    model = DistributedDataParallel(workload.model())
    optimizer = workload.optimizer(model)

    for epoch in range(workload.epochs):
        sampler.set_epoch(epoch)
        with workload.turn():
            for inputs, labels in loader:
                optimizer.zero_grad()
                loss = F.cross_entropy(model(inputs), labels)
                loss.backward()
                optimizer.step()

    dist.destroy_process_group()


if __name__ == "__main__":
    main()
