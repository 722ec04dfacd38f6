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
        sync_every: steps between two meetings of exchanges that meet seldom.
        exact: whether what makes the result depend on the layout is refused.
        servers: number of parameter servers, of strategy `ps`.
        staleness: by how many updates a worker's parameters may be behind there; `None` for none, and
            workers that update by themselves.

    Raises:
        UsageError: for a name that nothing has.
    """

    strategy: str | None = None
    exchange: str | None = None
    precision: str | None = None
    mesh: str | None = None
    sync_every: int | None = None
    exact: bool | None = None
    servers: int | None = None
    staleness: int | None = None

    def __post_init__(self) -> None:
        _check_choice("--strategy", self.strategy, STRATEGIES)
        _check_choice("--exchange", self.exchange, EXCHANGES)
        _check_choice("--precision", self.precision, PRECISIONS)
        if self.mesh is not None:
            parse(self.mesh, "--mesh")
        if self.sync_every is not None and self.sync_every < 1:
            raise UsageError(f"--sync-every is {self.sync_every}; expected at least 1")
        _check_least("--servers", self.servers)
        _check_least("--staleness", self.staleness)

    def variables(self) -> dict[str, object]:
        """Return the workers' variables; `None` keeps what the user's shell says."""
        return {
            "LOCKSTEP_STRATEGY": self.strategy,
            "LOCKSTEP_EXCHANGE": self.exchange,
            "LOCKSTEP_PRECISION": self.precision,
            "LOCKSTEP_MESH": self.mesh,
            "LOCKSTEP_SYNC_EVERY": self.sync_every,
            "LOCKSTEP_EXACT": None if self.exact is None else int(self.exact),
            "LOCKSTEP_SERVERS": self.servers,
            "LOCKSTEP_STALENESS": self.staleness,
        }


def _check_choice(flag: str, value: str | None, choices: tuple[str, ...]) -> None:
    if value is not None and value not in choices:
        raise UsageError(f"{flag} is {value!r}; expected one of {', '.join(choices)}")


def _check_least(flag: str, value: int | None) -> None:
    if value is not None and value < 0:
        raise UsageError(f"{flag} is {value}; expected at least 0")
