"""Fault injection for tests and `lockstep verify`: a rank kills or signals itself, or flips a bit."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

from lockstep.engine.data.microbatch import Microbatch
from lockstep.engine.training.listeners import PointListener
from lockstep.errors import UsageError
from lockstep.world.model import World

#: Environment variable with the faults to inject, such as `kill@30,term@60`, `flip@30` or `flip:1@30`.
VARIABLE = "LOCKSTEP_FAULTS"
_KINDS = ("kill", "term", "flip")
#: Environment variable with the ranks that the launcher has left out since their first start.
LEFT_OUT = "LOCKSTEP_LEFT_OUT"
#: The bit of a 32-bit float that is flipped, in the middle of its fraction.
_BIT = 1 << 16


@dataclass
class Faults(PointListener):
    """Faults that this rank injects into itself for tests: it kills or signals itself, or flips a bit."""

    kill: int = 0  # step in whose backward pass the process kills itself; 0 for none
    term: frozenset[int] = frozenset()  # steps after which it sends itself SIGTERM
    flip: int = 0  # step from which on a model's first matrix product has a wrong bit
    step: int = 0  # the last step that is done
    _sent: int = 0  # the last step whose signals have been sent

    @staticmethod
    def of(environ: Mapping[str, str], world: World) -> Faults | None:
        """Return the faults that `LOCKSTEP_FAULTS` sets for this rank; `None` if it sets none.

        `kill@STEP` kills the last rank. If the variable has several kills, the first one applies before any
        restart, the second one after the first restart, and so on. `term@STEP` sends SIGTERM to rank 0.
        `flip:RANK@STEP` flips a bit on that rank, and `flip@STEP` on the last rank, also after a restart.
        RANK is the rank at the first start, even if the launcher has left out ranks since then.

        Raises:
            UsageError: if the variable cannot be parsed.
        """
        text = environ.get(VARIABLE, "")
        parsed = [_parse(word, text) for word in text.split(",") if word]
        kills = [step for kind, _, step in parsed if kind == "kill"]
        terms = frozenset(step for kind, _, step in parsed if kind == "term")
        is_last = world.rank == world.size - 1
        due = kills[world.generation] if is_last and world.generation < len(kills) else 0
        left_out = [int(rank) for rank in environ.get(LEFT_OUT, "").split(",") if rank]
        first = range(world.size + len(left_out))  # the ranks of the first start
        own = [rank for rank in first if rank not in left_out][world.rank]
        flips = [
            step
            for kind, rank, step in parsed
            if kind == "flip" and rank in (own, own - len(first))
        ]
        faults = Faults(due, terms if world.is_main else frozenset(), min(flips, default=0))
        return faults if faults.kill or faults.term or faults.flip else None

    def damage(self, module: nn.Module) -> None:
        """Register a forward hook on a layer of `module`, which flips a bit of the layer's output.

        The layer is the first `Linear` or `Conv2d`. The hook acts from the step on that a `flip` fault
        names. Without such a fault or such a layer, nothing is registered.
        """
        products = (part for part in module.modules() if isinstance(part, nn.Linear | nn.Conv2d))
        first = next(products, None)
        if not self.flip or first is None:
            return

        def flip(_module: nn.Module, _inputs: object, output: torch.Tensor) -> torch.Tensor:
            if self.step + 1 < self.flip:
                return output
            wrong = output.detach().clone()
            wrong.view(-1)[:1].view(torch.int32).bitwise_xor_(_BIT)
            return output + (wrong - output.detach())

        first.register_forward_hook(flip)

    def resume(self, step: int) -> None:
        """Set the number of finished steps to `step`, after a resume.

        Faults of these steps are not injected again.
        """
        self.step = self._sent = step

    def before_backward(self) -> None:
        """Kill this process by SIGKILL if a fault `kill@STEP` names the current step."""
        if self.step + 1 == self.kill:
            os.kill(os.getpid(), signal.SIGKILL)

    def step_ends(self, step: int, microbatch: Microbatch) -> None:
        """Store `step` as the number of the last step that is done; `microbatch` is not used."""
        self.step = step

    def at_point(self) -> None:
        """Send SIGTERM to this process if a `term` fault names a step since the previous call."""
        sent, self._sent = self._sent, self.step
        if any(sent < term <= self.step for term in self.term):
            os.kill(os.getpid(), signal.SIGTERM)


def _parse(word: str, text: str) -> tuple[str, int, int]:
    """Parse a fault such as `kill@30` or `flip:1@30`; return its kind, rank and step.

    The rank is -1 if `word` names none. `text`: the whole variable, for the message of the error.

    Raises:
        UsageError: if `word` is no fault.
    """
    kind, _, step = word.partition("@")
    name, _, rank = kind.partition(":")
    is_of_rank = name == "flip" and rank.isdecimal()
    if (kind not in _KINDS and not is_of_rank) or not step.isdecimal() or int(step) < 1:
        raise UsageError(
            f"{VARIABLE} is {text!r}; expected words such as kill@30, term@25 or flip:1@30"
        )
    return name, int(rank) if is_of_rank else -1, int(step)
