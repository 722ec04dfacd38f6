"""Run directories as a run leaves them, written by hand: for the verbs that read them."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

IDENTITY = {
    "name": "digits",
    "script": "digits.py",
    "arguments": ["--epochs", "2"],
    "seed": 0,
    "replicas": 4,
    "threads": 1,
    "precision": "fp32",
    "device": "cpu",
    "method": "exact",
    "versions": {"python": "3.11.7", "torch": "2.13.0+cpu", "lockstep": "0.1.0"},
}
BEGAN = 1_795_000_000.0


@dataclass
class Run:
    """A run of `ranks` ranks whose rank 1 was killed after the steps `kills`.

    Attributes:
        directory: where it is written.
        ranks: how many.
        steps: in all; a second each.
        kills: steps after which rank 1 dies; each restart goes on two steps earlier.
        status: as `run.json` says.
        identity: what differs from `IDENTITY`.
        gpu: whether ranks have a GPU.
    """

    directory: Path
    ranks: int = 2
    steps: int = 60
    kills: Sequence[int] = ()
    status: str = "finished"
    identity: dict[str, Any] = field(default_factory=dict)
    gpu: bool = False

    def write(self) -> Path:
        """Write it; return its directory."""
        (self.directory / "events").mkdir(parents=True)
        (self.directory / "logs").mkdir()
        for rank in range(self.ranks):
            _write(self.directory / "events" / f"rank-{rank}.jsonl", self._rank(rank))
            (self.directory / "logs" / f"rank-{rank}.log").write_text(f"rank {rank} is here\n")
        _write(self.directory / "events" / "launcher-0.jsonl", self._launcher())
        (self.directory / "run.json").write_text(json.dumps(self._content()))
        return self.directory

    def lives(self) -> list[tuple[float, int, int]]:
        """Return when each generation began, after which step, and its last step."""
        found, time, step = [], BEGAN, 0
        for last in [*self.kills, self.steps]:
            found.append((time, step, last))
            time, step = time + last - step + 3, last - 2
        return found

    def _content(self) -> dict[str, Any]:
        generations = [
            {"ranks": self.ranks, "nodes": 1, "environment": "lockstep", "time": time}
            | ({"step": step, "source": "memory"} if number else {})
            for number, (time, step, _) in enumerate(self.lives())
        ]
        content: dict[str, Any] = {"format": 1, "identity": IDENTITY | self.identity}
        content |= {"launch": "one", "status": self.status, "generations": generations}
        if self.status == "finished":
            content |= {"steps": self.steps, "seconds": 60.0, "digest": f"sha256:{'ab' * 32}"}
        if self.status == "failed":
            content["error"] = "ValueError: <b>bad</b> sample 17"
        return content

    def _rank(self, rank: int) -> Iterable[dict[str, Any]]:
        for number, (time, begin, last) in enumerate(self.lives()):
            yield self._start(rank, number, time, begin)
            if number:
                yield {"time": time, "kind": "resume", "step": begin, "source": "memory"}
            for step in range(begin + 1, last + 1):
                yield from self._step(rank, time + step - begin, step, number)
        if self.status == "finished":
            held = {"parameters": 2**20, "gradients": 2**20, "peak_host": 2**29}
            yield {"time": time + last - begin + 1, "kind": "memory", **held}

    def _start(self, rank: int, generation: int, time: float, step: int) -> dict[str, Any]:
        who = {"rank": rank, "ranks": self.ranks, "node": 0, "host": "n1", "pid": 100 + rank}
        device = {
            "device": "cuda" if self.gpu else "cpu",
            "device_name": "GPU 9" if self.gpu else None,
        }
        return {
            "time": time,
            "kind": "start",
            "generation": generation,
            **who,
            **device,
            "step": step,
        }

    def _step(self, rank: int, time: float, step: int, generation: int) -> Iterable[dict[str, Any]]:
        place = {"epoch": (step - 1) // 30, "step": step}
        for replica in range(2 * rank, 2 * rank + 2):
            # What is computed again must not be seen twice: here it would differ.
            loss = 2 * math.exp(-step / 20) + 0.1 * replica + generation
            yield {
                "time": time,
                "kind": "log",
                **place,
                "replica": replica,
                "weight": 0.25,
                "loss": loss,
            }
        if step % 30 == 0:
            yield {"time": time, "kind": "log", **place, "replica": None, "accuracy": step / 100}
            if rank == 0:
                best = {"name": f"step-{step}", "seconds": 0.21, "best": step / 100}
                yield {"time": time, "kind": "checkpoint", "step": step, **best}
        exchange = None if self.gpu else 0.1 + 0.1 * rank
        window = {
            "steps": 1,
            "samples": 64 - rank,
            "seconds": 1.0,
            "data": 0.05,
            "exchange": exchange,
        }
        yield {"time": time, "kind": "pace", **place, **window, "median": 0.9, "slowest": 1.1}
        device = (
            {"device": 2**30 + rank, "busy": 0.9} if self.gpu else {"device": None, "busy": None}
        )
        host = (400 + 50 * rank + step) * 2**20
        yield {"time": time, "kind": "machine", "step": step, "cpu": 0.98, "host": host, **device}

    def _launcher(self) -> Iterable[dict[str, Any]]:
        lives = self.lives()
        for number, (time, begin, last) in enumerate(lives[:-1]):
            died = time + last - begin + 0.5
            text = "rank 1 was killed by signal 9 (SIGKILL)"
            yield {
                "time": died,
                "kind": "failure",
                "generation": number,
                "name": "rank 1",
                "text": text,
            }
            yield {"time": died + 0.5, "kind": "restart", "generation": number + 1}
        if self.status != "running":
            time, begin, last = lives[-1]
            code = 0 if self.status == "finished" else 1
            yield {"time": time + last - begin + 2, "kind": "end", "exit_code": code}


def _write(path: Path, events: Iterable[dict[str, Any]]) -> None:
    path.write_text("".join(f"{json.dumps(event)}\n" for event in events))
