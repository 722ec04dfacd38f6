"""The digits of `digits.py` by Ray Train: `python examples/ray_train.py` on a machine of a Ray cluster.

The weights are those of `lockstep run -n 2 examples/digits.py`. A worker that is lost is replaced, and the
run goes on from its newest checkpoint.
"""

import argparse
from pathlib import Path
from typing import Any

import ray
import ray.train
import torch
import torch.nn.functional as F
from digits import Net, load
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

import lockstep


def train_loop_per_worker(config: dict[str, Any]) -> tuple[float, str]:
    accuracy = 0.0
    with lockstep.Run("digits", seed=0, replicas=4) as run:
        train_set, test_set = load()
        model = run.model(Net())
        optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9))
        train = run.loader(train_set, batch_size=64, shuffle=True)
        test = run.loader(test_set, batch_size=256)

        for epoch in run.epochs(config["epochs"]):
            model.train()
            for images, labels in train:
                loss = F.cross_entropy(model(images), labels)
                run.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                run.log(loss=loss)

            model.eval()
            with torch.no_grad():
                accuracy = float(run.mean(model(x).argmax(1) == y for x, y in test))
            run.save()
            ray.train.report({"epoch": epoch, "accuracy": accuracy})  # on all workers
        return accuracy, run.digest()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--gpu", action="store_true", help="a GPU for each worker")
    parser.add_argument("--storage", type=Path, required=True, help="directory that nodes share")
    parser.add_argument("--name", default="digits", help="the run's, in the storage")
    options = parser.parse_args()

    # Workers on other machines import digits.py, too.
    ray.init(runtime_env={"working_dir": str(Path(__file__).parent)})
    trainer = TorchTrainer(
        train_loop_per_worker,
        train_loop_config={"epochs": options.epochs},
        scaling_config=ScalingConfig(num_workers=options.workers, use_gpu=options.gpu),
        run_config=RunConfig(
            name=options.name,
            storage_path=str(options.storage.resolve()),
            failure_config=FailureConfig(max_failures=3),
        ),
    )
    accuracy, digest = trainer.fit().return_value
    print(f"test accuracy {accuracy:.2%}, digest {digest}")


if __name__ == "__main__":
    main()
