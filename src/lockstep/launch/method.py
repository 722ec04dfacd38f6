"""How a run trains, as the flags of a launch say it: every rank reads it from its environment."""

from __future__ import annotations

from dataclasses import dataclass

from lockstep.errors import UsageError
from lockstep.layout.classes import EXCHANGES, PRECISIONS, STRATEGIES
from lockstep.layout.mesh import parse


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """What the user asks for; `None` leaves the variable of the environment, and then the script.

    Attributes:
        strategy: how models are held.
        exchange: how gradients meet.
        precision: of forward passes.
        mesh: how many models, and over how many ranks each: `DATAxMODEL`.
        exact: whether what makes the result depend on the layout is refused.

    Raises:
        UsageError: for a name that nothing has.
    """

    strategy: str | None = None
    exchange: str | None = None
    precision: str | None = None
    mesh: str | None = None
    exact: bool | None = None

    def __post_init__(self) -> None:
        _check_choice("--strategy", self.strategy, STRATEGIES)
        _check_choice("--exchange", self.exchange, EXCHANGES)
        _check_choice("--precision", self.precision, PRECISIONS)
        if self.mesh is not None:
            parse(self.mesh, "--mesh")

    def variables(self) -> dict[str, object]:
        """Return the workers' variables; `None` keeps what the user's shell says."""
        return {
            "LOCKSTEP_STRATEGY": self.strategy,
            "LOCKSTEP_EXCHANGE": self.exchange,
            "LOCKSTEP_PRECISION": self.precision,
            "LOCKSTEP_MESH": self.mesh,
            "LOCKSTEP_EXACT": None if self.exact is None else int(self.exact),
        }


def _check_choice(flag: str, value: str | None, choices: tuple[str, ...]) -> None:
    if value is not None and value not in choices:
        raise UsageError(f"{flag} is {value!r}; expected one of {', '.join(choices)}")
