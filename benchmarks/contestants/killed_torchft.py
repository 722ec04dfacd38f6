"""One replica group of torchft, written after its own example of DDP; `torchft_groups.py` starts it."""

import os
from datetime import timedelta

import torch.nn.functional as F
from contestants.killed import BATCH, FOREVER, begin, model_and_optimizer, training_set
from torch.distributed import TCPStore
from torch.utils.data import DataLoader
from torchft import (
    DistributedDataParallel,
    DistributedSampler,
    Manager,
    Optimizer,
    ProcessGroupGloo,
)


def main() -> None:
    group, groups = int(os.environ["REPLICA_GROUP_ID"]), int(os.environ["NUM_REPLICA_GROUPS"])
    journal, wait = begin(group, groups)
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    module, plain = model_and_optimizer()

    def state_dict() -> dict[str, object]:
        return {"model": module.state_dict(), "optimizer": plain.state_dict()}

    def load_state_dict(saved: dict[str, dict[str, object]]) -> None:
        module.load_state_dict(saved["model"])
        plain.load_state_dict(saved["optimizer"])

    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=5)),
        min_replica_size=1,
        load_state_dict=load_state_dict,
        state_dict=state_dict,
        replica_id=f"group_{group}",
        timeout=timedelta(seconds=10),
        rank=0,
        world_size=1,
        store_addr="localhost",
        store_port=store.port,
        hostname="localhost",
    )
    model = DistributedDataParallel(manager, module)
    optimizer = Optimizer(manager, plain)
    data = training_set()
    sampler = DistributedSampler(
        data, replica_rank=group, num_replica_groups=groups, group_rank=0, num_replicas=1
    )
    loader = DataLoader(data, batch_size=BATCH // groups, sampler=sampler)

    for epoch in range(FOREVER):
        sampler.set_epoch(epoch)
        for images, labels in loader:
            before = manager.current_step()
            optimizer.zero_grad()  # asks for a quorum
            wait()
            F.cross_entropy(model(images), labels).backward()
            optimizer.step()  # commits, or drops the batch
            if manager.current_step() > before:
                journal.done(manager.current_step(), manager.num_participants())


if __name__ == "__main__":
    main()
