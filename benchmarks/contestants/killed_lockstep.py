"""Lockstep, as its README writes a loop: nothing in it speaks of failures."""

import os

import torch.nn.functional as F
from contestants.killed import BATCH, FOREVER, begin, optimizer_of, training_set
from digits import Net

import lockstep


def main() -> None:
    journal, wait = begin(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
    with lockstep.Run("killed", threads=1, progress=False) as run:
        model = run.model(Net())
        optimizer = run.optimizer(optimizer_of(model))
        train = run.loader(training_set(), batch_size=BATCH, shuffle=True)
        for _ in run.epochs(FOREVER):
            for images, labels in train:
                wait()
                loss = F.cross_entropy(model(images), labels)
                run.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                run.log(loss=loss)
                journal.done(run.step + 1)


if __name__ == "__main__":
    main()
