"""A training for Ray: `python ray_jobs.py train|kill|actors|refusals DIRECTORY`; without words, a script.

The words are given one after the other, and each prints a line: what came out, as JSON.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.data import TensorDataset

import lockstep


def train(config: dict[str, Any]) -> list[Any]:
    """Train for four epochs; return the digest, the environment, and the step that the run began at."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(0, 3, (96,), generator=generator)
    data = TensorDataset(torch.randn(96, 4, generator=generator), labels)
    with lockstep.Run("ray", replicas=2, threads=1, run_dir=config.get("run_dir")) as run:
        layers = [torch.nn.Linear(4, 8), torch.nn.Dropout(0.3), torch.nn.Linear(8, 3)]
        model = run.model(torch.nn.Sequential(*layers))
        optimizer = run.optimizer(torch.optim.AdamW(model.parameters(), lr=0.01))
        loader = run.loader(data, batch_size=16, shuffle=True)
        first = None
        for epoch in run.epochs(4):
            first = epoch if first is None else first
            for x, y in loader:
                loss = F.cross_entropy(model(x), y)
                run.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                if run.step == 15 and run.world.rank == 1 and "kill" in config:
                    _die_once(Path(config["kill"]))
            run.save()
            if "reports" in config:
                import ray.train

                ray.train.report({"epoch": epoch, "loss": float(loss)})
        return [run.digest(), run.world.environment, first]


def _die_once(mark: Path) -> None:
    """Kill this process, unless it has been done, once a checkpoint is written."""
    while not list(mark.parent.glob("**/checkpoints/*/.metadata")):
        time.sleep(0.05)
    if not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)


def with_trainer(place: Path, name: str, **config: Any) -> list[Any]:
    """Train by Ray Train on two nodes; return what the first worker returned, and what was reported."""
    from ray.train import FailureConfig, RunConfig, ScalingConfig, UserCallback
    from ray.train.torch import TorchTrainer

    class Reports(UserCallback):
        """Writes down what the first worker reports; Ray's own result has reports with a checkpoint."""

        def after_report(self, run_context: Any, metrics: Any, checkpoint: Any) -> None:
            with (place / f"{name}.jsonl").open("a") as file:
                file.write(json.dumps(metrics[0]) + "\n")

    trainer = TorchTrainer(
        train,
        train_loop_config={"reports": True, **config},
        scaling_config=ScalingConfig(num_workers=2, placement_strategy="SPREAD"),
        run_config=RunConfig(
            name=name,
            storage_path=str(place),
            failure_config=FailureConfig(max_failures=1),
            callbacks=[Reports()],
        ),
    )
    returned = trainer.fit().return_value
    reports = [json.loads(line) for line in (place / f"{name}.jsonl").read_text().splitlines()]
    return [returned, [report["epoch"] for report in reports]]


def with_actors(place: Path, environs: list[dict[str, str]], **options: Any) -> list[Any]:
    """Train in one actor on each node; return what they returned, or the error of the first."""
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    class Worker:
        def train(self, config: dict[str, Any]) -> list[Any]:
            return train(config)

    group = ray.util.placement_group([{"CPU": 1}] * 2, strategy="STRICT_SPREAD")
    actors = [
        ray.remote(Worker)
        .options(
            num_cpus=1,
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                group, placement_group_bundle_index=number
            ),
            runtime_env={"env_vars": environ},
        )
        .remote()
        for number, environ in enumerate(environs)
    ]
    try:
        return ray.get([actor.train.remote({"run_dir": place}) for actor in actors])
    except ray.exceptions.RayTaskError as error:
        return [str(error.cause)]
    finally:
        for actor in actors:
            ray.kill(actor)
        ray.util.remove_placement_group(group)


def say(found: Any) -> None:
    """Print a line of JSON."""
    sys.stdout.write(json.dumps(found) + "\n")
    sys.stdout.flush()


def main(words: list[str]) -> None:
    if not words:
        say(train({}))
        return
    import ray

    ray.init(address=os.environ["RAY_ADDRESS"], log_to_driver=False)
    place = Path(words[-1])
    for word in words[:-1]:
        match word:
            case "train":
                found = with_trainer(place, "train")
            case "kill":
                found = with_trainer(place, "kill", kill=str(place / "kill" / "killed"))
            case "actors":
                found = with_actors(place / "actors", [{}, {}])
            case "refusals":
                found = with_actors(place / "half", [{"RANK": "0"}])
                found += with_actors(place / "inherited", [{"LOCKSTEP_LAUNCHER": "1"}])
        say({word: found})


if __name__ == "__main__":
    main(sys.argv[1:])
