"""Hugging Face Accelerate, as its quick tour writes a loop."""

import torch.nn.functional as F
from accelerate import Accelerator
from contestants.workload import from_arguments
from torch.utils.data import DataLoader


def main() -> None:
    workload = from_arguments()
    accelerator = Accelerator(cpu=True)
    model = workload.model()
    optimizer = workload.optimizer(model)
    loader = DataLoader(workload.data(), batch_size=workload.batch, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    for _ in range(workload.epochs):
        with workload.turn():
            for inputs, labels in loader:
                optimizer.zero_grad()
                loss = F.cross_entropy(model(inputs), labels)
                accelerator.backward(loss)
                optimizer.step()

    accelerator.end_training()


if __name__ == "__main__":
    main()
