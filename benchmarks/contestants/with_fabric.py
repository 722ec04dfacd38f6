"""Lightning Fabric, as its documentation writes a loop."""

import torch.nn.functional as F
from contestants.workload import from_arguments
from lightning_fabric import Fabric
from torch.utils.data import DataLoader


def main() -> None:
    workload = from_arguments()
    fabric = Fabric(accelerator="cpu", devices=workload.ranks)
    fabric.launch()
    plain = workload.model()
    model, optimizer = fabric.setup(plain, workload.optimizer(plain))
    loader = fabric.setup_dataloaders(
        DataLoader(workload.data(), batch_size=workload.batch, shuffle=True)
    )

    for _ in range(workload.epochs):
        with workload.turn():
            for inputs, labels in loader:
                optimizer.zero_grad()
                loss = F.cross_entropy(model(inputs), labels)
                fabric.backward(loss)
                optimizer.step()


if __name__ == "__main__":
    main()
