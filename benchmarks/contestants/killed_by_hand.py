"""DDP by hand with a checkpoint per epoch, as the articles restart under `torchrun --max-restarts`.

Every generation meets under names of its own. `init_process_group("gloo")` alone, as the articles have
it, finds the addresses of the dead in torchrun's store: most restarts then hang or fail.
"""

import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from contestants.killed import BATCH, FOREVER, begin, model_and_optimizer, training_set
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

CHECKPOINT = Path("checkpoint.pt")


def meet() -> None:
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    generation = os.environ["TORCHELASTIC_RESTART_COUNT"]
    store = dist.PrefixStore(generation, dist.TCPStore(host, port, is_master=False))
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)


def main() -> None:
    journal, wait = begin(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
    meet()
    data = training_set()
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=BATCH // dist.get_world_size(), sampler=sampler)
    module, optimizer = model_and_optimizer()
    first = 0
    if CHECKPOINT.exists():
        saved = torch.load(CHECKPOINT)
        module.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        first = saved["epoch"]
    model = DistributedDataParallel(module)

    for epoch in range(first, FOREVER):
        sampler.set_epoch(epoch)
        for batch, (images, labels) in enumerate(loader):
            wait()
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            journal.done(epoch * len(loader) + batch + 1)
        if dist.get_rank() == 0:
            state = {"model": module.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save({**state, "epoch": epoch + 1}, "draft.pt")
            Path("draft.pt").replace(CHECKPOINT)


if __name__ == "__main__":
    main()
