"""Lockstep, as its README writes a loop; it logs the loss of every step, which the others don't."""

import argparse

import torch.nn.functional as F
from contestants.workload import from_arguments

import lockstep


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--exchange", default="auto")
    parser.add_argument("--inexact", action="store_true")
    parser.add_argument("--ddp", action="append", default=[], metavar="NAME=0|1")
    parser.add_argument("--run-dir", required=True)
    workload = from_arguments(parser)
    extra = workload.extra
    settings = {name: value == "1" for name, value in (word.split("=") for word in extra.ddp)}

    with lockstep.Run(
        "benchmark",
        exchange=extra.exchange,
        exact=not extra.inexact,
        threads=1,
        run_dir=extra.run_dir,
        progress=False,
    ) as run:
        model = run.model(workload.model(), **settings)
        optimizer = run.optimizer(workload.optimizer(model))
        train = run.loader(
            workload.data(), batch_size=workload.batch * workload.ranks, shuffle=True
        )

        for _ in run.epochs(workload.epochs):
            with workload.turn():
                for inputs, labels in train:
                    loss = F.cross_entropy(model(inputs), labels)
                    run.backward(loss)
                    optimizer.step()
                    optimizer.zero_grad()
                    run.log(loss=loss)


if __name__ == "__main__":
    main()
