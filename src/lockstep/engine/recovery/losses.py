"""`Losses`: those of a loop's last batch, which a script that is started again finds as they were."""

from __future__ import annotations

import torch

from lockstep.state.checkpoint.position import LoopEvent


class Losses:
    """Keeps losses whose gradients have been computed, or gives them the values that they had.

    With one replica a script may decide by them after the loop, the same on every layout. With several,
    ranks have losses of their own.
    """

    def __init__(self) -> None:
        self._known: list[float] = []

    def begins(self, loop: LoopEvent, *, again: bool) -> None:
        """An outermost loop begins; `again` if its last batch is computed again."""
        self._known = [float(loss) for loss in loop.losses] if again else []

    def saw(self, loss: torch.Tensor, loop: LoopEvent, *, is_on_the_way: bool) -> None:
        """Gradients of `loss` have been computed, in `loop`."""
        if not is_on_the_way:
            loop.losses.append(loss.detach())
        elif self._known:
            loss.detach().fill_(self._known.pop(0))
