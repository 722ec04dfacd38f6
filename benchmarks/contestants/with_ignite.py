"""PyTorch-Ignite, with its distributed helpers and its supervised trainer."""

import ignite.distributed as idist
import torch.nn.functional as F
from contestants.workload import from_arguments
from ignite.engine import create_supervised_trainer


def main() -> None:
    workload = from_arguments()
    if workload.ranks > 1:
        idist.initialize("gloo")
    model = idist.auto_model(workload.model())
    optimizer = idist.auto_optim(workload.optimizer(model))
    loader = idist.auto_dataloader(
        workload.data(), batch_size=workload.batch * workload.ranks, shuffle=True
    )
    trainer = create_supervised_trainer(model, optimizer, F.cross_entropy)

    for _ in range(workload.epochs):
        with workload.turn():
            trainer.run(loader, max_epochs=1)

    if workload.ranks > 1:
        idist.finalize()


if __name__ == "__main__":
    main()
