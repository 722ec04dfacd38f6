"""The loop in Lockstep: started by python, lockstep run, torchrun, srun or mpiexec."""

import torch
import torch.nn.functional as F
from task import Net, load

import lockstep

train_set, test_set = load()
with lockstep.Run("digits", seed=0, replicas=4) as run:
    train = run.loader(train_set, batch_size=64, shuffle=True)
    test = run.loader(test_set, batch_size=256)
    model = run.model(Net())
    optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))

    for epoch in run.epochs(10):
        model.train()
        for images, labels in train:
            loss = F.cross_entropy(model(images), labels)
            run.backward(loss)
            optimizer.step()
            optimizer.zero_grad()

        model.eval()
        with torch.no_grad():
            accuracy = run.mean(model(x).argmax(1) == y for x, y in test)
        run.print(f"epoch {epoch}: test accuracy {accuracy:.2%}")
