"""Fault injection for tests and `lockstep verify`: a rank kills or signals itself, or computes wrongly."""

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

#: Such as `kill@30,term@60` or `flip@30`.
VARIABLE = "LOCKSTEP_FAULTS"
_KINDS = ("kill", "term", "flip")
#: The bit of an element of 32 bits that is flipped: one in the middle of the fraction.
_BIT = 1 << 16


@dataclass
class Faults(PointListener):
    """Faults of this rank in this generation.

    Attributes:
        kill: step in whose backward pass it is killed; 0 for none.
        term: steps after which it is asked to end; where the state is not whole there, at the next point.
        flip: step from which on the first matrix product of a model has a wrong bit; 0 for none.
        step: the last step that is done.
    """

    kill: int = 0
    term: frozenset[int] = frozenset()
    flip: int = 0
    step: int = 0
    _sent: int = 0  # the step up to which signals have been sent

    @staticmethod
    def of(environ: Mapping[str, str], world: World) -> Faults | None:
        """Return this rank's faults; `None` without any.

        Each kill is the last rank's and happens once: the first in the first generation, the second in
        the next. Rank 0 is asked to end, in any generation that does the step. The last rank computes
        wrongly, in any generation.

        Raises:
            UsageError: if the variable makes no sense.
        """
        text = environ.get(VARIABLE, "")
        pairs = [_parse(word, text) for word in text.split(",") if word]
        kills = [step for kind, step in pairs if kind == "kill"]
        terms = frozenset(step for kind, step in pairs if kind == "term")
        is_last = world.rank == world.size - 1
        due = kills[world.generation] if is_last and world.generation < len(kills) else 0
        flips = [step for kind, step in pairs if kind == "flip"] if is_last else []
        faults = Faults(due, terms if world.is_main else frozenset(), min(flips, default=0))
        return faults if faults.kill or faults.term or faults.flip else None

    def damage(self, module: nn.Module) -> None:
        """Flip a bit of the first matrix product of `module` from step `flip` on."""
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
        """Continue after step number `step`: its faults have happened."""
        self.step = self._sent = step

    def before_backward(self) -> None:
        """Kill this process where the step has that fault."""
        if self.step + 1 == self.kill:
            os.kill(os.getpid(), signal.SIGKILL)

    def step_ends(self, step: int, microbatch: Microbatch) -> None:
        """Step number `step` is done."""
        self.step = step

    def at_point(self) -> None:
        """Send the signal of the steps that are done: a batch may have had several."""
        sent, self._sent = self._sent, self.step
        if any(sent < term <= self.step for term in self.term):
            os.kill(os.getpid(), signal.SIGTERM)


def _parse(word: str, text: str) -> tuple[str, int]:
    kind, _, step = word.partition("@")
    if kind not in _KINDS or not step.isdecimal() or int(step) < 1:
        raise UsageError(f"{VARIABLE} is {text!r}; expected words such as kill@30 or term@25")
    return kind, int(step)
