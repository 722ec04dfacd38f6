"""The plain PyTorch loop before anyone thinks of a second process: DataLoader, model, optimizer."""

import torch.nn.functional as F
from contestants.workload import from_arguments
from torch.utils.data import DataLoader


def main() -> None:
    workload = from_arguments()
    loader = DataLoader(workload.data(), batch_size=workload.batch, shuffle=True)
    model = workload.model()
    optimizer = workload.optimizer(model)

    for _ in range(workload.epochs):
        with workload.turn():
            for inputs, labels in loader:
                optimizer.zero_grad()
                loss = F.cross_entropy(model(inputs), labels)
                loss.backward()
                optimizer.step()


if __name__ == "__main__":
    main()
