"""Registry of strategies and exchanges, those of Lockstep and those of other packages.

A strategy distributes a model over ranks; an exchange is an algorithm that sums gradients over ranks. An
entry lists the requirements and properties of one of them; `wrap`, `build` and `check` name functions as
`module:function`, which are imported at their first use, so that the registry does not import torch.
Another package publishes an entry by an entry point in the group `lockstep.strategies` or
`lockstep.exchanges`, whose name is the name of the strategy or exchange.

Classes of exactness. `exact`: the bits of the result do not depend on the layout. `close`: the same
mathematics, rounded in a different order. `approximate`: other mathematics, to the same end.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, Literal, TypeVar, cast

from lockstep.errors import UsageError, did_you_mean

Exactness = Literal["exact", "close", "approximate"]
#: A function, or the text `module:function` by which it is imported.
Function = str | Callable[..., Any]


@dataclass(frozen=True, eq=False, kw_only=True)
class ExchangeEntry:
    """Registry entry of an exchange, an algorithm that sums gradients over ranks."""

    name: str = ""  # name for users; in another package, its entry point's
    build: Function = ""  # function from an `ExchangeContext` to an `Exchange`
    exactness: Exactness = "exact"  # class of exactness of the sums
    #: for class `close`: function from a `Forest` to whether the sums on that layout have the same bits
    #: as the reduction tree's
    is_exact: Function = ""
    #: function that raises an error where the exchange cannot work; takes a `Forest`, and `one_host`
    #: and `device` by keyword
    check: Function = ""
    keywords: tuple[str, ...] = ()  # keyword arguments of `run.model` for this exchange
    strategy: str | None = None  # the only strategy that may use it; `None` if all may
    no_loss_scale: str = ""  # reason why it cannot work with the loss scale of fp16
    #: whether the exchange raises an error if ranks sum gradients of different batches; otherwise `ddp`
    #: checks this, on CPUs
    compares_batches: bool = False
    at_servers: bool = False  # whether parameter servers sum the gradients instead of ranks


@dataclass(frozen=True, eq=False, kw_only=True)
class StrategyEntry:
    """Registry entry of a strategy, which distributes a model over ranks."""

    name: str = ""  # name for users; in another package, its entry point's
    #: function from the module, a `ModelContext` and the keywords of `run.model` to a `WrappedModel`
    #: (`lockstep.engine.strategies.wrapped_model`); without it, `fallback` replaces this strategy always
    wrap: Function = ""
    #: strategy that replaces this one where there is nothing to distribute: on a rank without a process
    #: group, or, if `spreads`, where each rank has a whole model
    fallback: str = ""
    exactness: Exactness = "exact"  # class of exactness with an exact exchange
    #: function that checks the module and the keywords of `run.model`, also on one rank
    check: Function = "lockstep.engine.strategies.checks:check_settings"
    exchanges: tuple[str, ...] | None = None  # usable exchanges; `None` for all
    why: str = ""  # reason why other exchanges do not work, for messages
    one_rank: bool = False  # whether a run with this strategy has only one rank
    needs_group: bool = False  # whether a single rank has a process group, too
    meshed: bool = False  # whether the strategy needs torch's `DeviceMesh` of the ranks
    spreads: bool = False  # whether the parts of one model are distributed over several ranks
    places: bool = False  # whether the strategy moves these parts to devices itself
    averages: bool = False  # whether ranks train independently and average parameters
    has_servers: bool = False  # whether the strategy uses parameter servers beside the ranks
    scatters: bool = False  # whether one rank computes on several devices
    shards: bool = False  # whether each rank has, and saves, its own part of every parameter
    cuts_batches: bool = False  # whether a replica's samples may be computed in several parts
    no_loss_scale: str = ""  # reason why it cannot work with the loss scale of fp16
    keywords: tuple[str, ...] = ()  # keyword arguments of `run.model` for this strategy
    ddp_keywords: tuple[str, ...] | None = None  # allowed keywords of DDP; `None` for all
    slow_import: bool = False  # whether launchers import its module before they fork


@dataclass(frozen=True, eq=False, kw_only=True)
class EnvironmentEntry:
    """Registry entry of a launcher (such as Slurm) whose environment variables give a process its rank."""

    name: str = ""  # name for users; in another package, its entry point's
    #: function from environment variables to a `lockstep.World`, or to `None` if this launcher did not
    #: set them; imports no torch
    detect: Function = ""
    starts_launchers: bool = True  # whether it may start `lockstep run` processes
    launchers: Function = ""  # as `detect`, for `lockstep run` processes, where these differ
    replaces_launchers: bool = False  # whether it starts a lost one again, for `--nnodes MIN:MAX`


EntryT = TypeVar("EntryT", bound=ExchangeEntry | StrategyEntry)


class Registry(Generic[EntryT]):
    """Mapping from names to entries, for all strategies or for all exchanges.

    `group`: the group of the entry points by which other packages publish entries.
    """

    def __init__(self, what: str, group: str, entries: Sequence[EntryT]) -> None:
        self._what, self._group = what, group
        self._kind: type = type(entries[0])
        self._entries: dict[str, EntryT] = {entry.name: entry for entry in entries}
        self.own: tuple[str, ...] = tuple(self._entries)

    def names(self) -> tuple[str, ...]:
        """Return the names of all entries: first those of Lockstep, then those of other packages."""
        from importlib import metadata

        published = {point.name for point in metadata.entry_points(group=self._group)}
        return (*self.own, *sorted(published - set(self.own)))

    def keywords(self) -> frozenset[str]:
        """Return the keyword arguments of `run.model` that entries list, as far as entries are imported."""
        return frozenset(word for entry in self._entries.values() for word in entry.keywords)

    def require(self, name: Any, origin: str) -> None:
        """Raise `UsageError` if no entry is called `name`; `origin`: the flag or argument that gave it."""
        if name not in self._entries and name not in self.names():
            raise UsageError(
                f"{origin} is {name!r}; expected one of {', '.join(self.names())}",
                hint=did_you_mean(str(name), self.names()),
            )

    def find(self, name: str) -> EntryT:
        """Return the entry with this name; an entry of another package is imported at the first call.

        Raises:
            UsageError: if no entry has the name, two packages publish it, or its import fails.
        """
        if name not in self._entries:
            self.require(name, self._what)
            self._entries[name] = self._load(name)
        return self._entries[name]

    def where(self, matches: Callable[[EntryT], object]) -> tuple[str, ...]:
        """Return the names of those of Lockstep's own entries for which `matches(entry)` is true."""
        return tuple(name for name in self.own if matches(self._entries[name]))

    def _load(self, name: str) -> EntryT:
        from importlib import metadata

        points = metadata.entry_points(group=self._group, name=name)
        packages = sorted({point.dist.name for point in points if point.dist is not None})
        if len(points) > 1:
            raise UsageError(
                f"{self._what} {name} is published {len(points)} times, by {' and '.join(packages)}; "
                "expected one package",
                hint="uninstall all but one of them",
            )
        (point,) = points
        source = f"the {self._what} {name} of {', '.join(packages)} ({point.value})"
        try:
            entry = point.load()
        except Exception as error:  # another package's, at its import
            raise UsageError(
                f"{source} cannot be imported: {type(error).__name__}: {error}"
            ) from error
        if not issubclass(type(entry), self._kind):
            raise UsageError(
                f"{source} is of type {type(entry).__name__}; expected a {self._kind.__qualname__} of "
                "lockstep.registry"
            )
        if isinstance(entry, StrategyEntry) and not (entry.wrap or entry.fallback):
            raise UsageError(f"{source} has neither wrap nor fallback; expected one of them")
        return cast("EntryT", replace(entry, name=name))


def resolve(function: Function) -> Callable[..., Any]:
    """Return a function of an entry: import it if the entry names it as `module:function`."""
    if callable(function):
        return function
    return cast("Callable[..., Any]", pkgutil.resolve_name(function))


#: Keywords of `run.model` that the strategy `fsdp` passes to torch's `fully_shard`.
OF_FULLY_SHARD = ("reshard_after_forward", "shard_placement_fn", "mp_policy", "offload_policy")
#: Exchanges between the ranks that hold the same part of a model.
_OF_COLUMNS = ("shared-memory", "tree", "native")
#: Keywords of PyTorch's PowerSGDState.
_OF_POWERSGD = (
    *("matrix_approximation_rank", "start_powerSGD_iter", "min_compression_rate"),
    *("use_error_feedback", "warm_start", "orthogonalization_epsilon", "random_seed"),
    *("compression_stats_logging_frequency", "batch_tensors_with_same_shape"),
)

_LOCAL_SGD = StrategyEntry(
    name="local-sgd",
    wrap="lockstep.engine.strategies.local_sgd.model:wrap_local_sgd",
    fallback="single",
    exactness="approximate",
    exchanges=("tree",),
    why="whose ranks average parameters in tree order",
    averages=True,
    no_loss_scale="ranks that train by themselves do not agree on the steps that a loss scale leaves out",
)
STRATEGIES = Registry(
    "strategy",
    "lockstep.strategies",
    [
        StrategyEntry(name="auto", fallback="ddp"),
        StrategyEntry(name="single", wrap="lockstep.engine.strategies.single:wrap", one_rank=True),
        StrategyEntry(name="ddp", wrap="lockstep.engine.strategies.ddp:wrap", fallback="single"),
        StrategyEntry(
            name="dp",
            wrap="lockstep.engine.strategies.dp:wrap",
            check="lockstep.engine.strategies.dp:check_settings",
            one_rank=True,
            scatters=True,
            ddp_keywords=("device_ids", "output_device", "dim"),
        ),
        StrategyEntry(
            name="ps",
            wrap="lockstep.engine.parameter_server.strategy:wrap",
            exchanges=("server",),
            why="whose gradients meet in the servers",
            needs_group=True,
            has_servers=True,
        ),
        StrategyEntry(
            name="fsdp",
            wrap="lockstep.engine.strategies.sharded.model:wrap",
            check="lockstep.engine.strategies.sharded.wrap_policy:check_sharding",
            exchanges=("tree",),
            why="where each rank takes its own part of the sums",
            needs_group=True,
            meshed=True,
            shards=True,
            keywords=("wrap", "gather", *OF_FULLY_SHARD),
            ddp_keywords=(),
            slow_import=True,
        ),
        StrategyEntry(
            name="pipeline",
            wrap="lockstep.engine.strategies.pipeline.model:wrap",
            fallback="ddp",
            exchanges=_OF_COLUMNS,
            why="whose ranks hold parts of one model",
            needs_group=True,
            meshed=True,
            spreads=True,
            places=True,
            cuts_batches=True,
            keywords=("chunks", "chunk_inputs", "split"),
            slow_import=True,
        ),
        StrategyEntry(
            name="tensor",
            wrap="lockstep.engine.strategies.tensor:wrap",
            fallback="ddp",
            exactness="close",
            exchanges=_OF_COLUMNS,
            why="whose ranks hold parts of one model",
            needs_group=True,
            meshed=True,
            spreads=True,
            keywords=("plan",),
            slow_import=True,
        ),
        _LOCAL_SGD,
        replace(
            _LOCAL_SGD,
            name="diloco",
            wrap="lockstep.engine.strategies.local_sgd.model:wrap_diloco",
        ),
    ],
)
#: Name of the strategy with parameter servers.
(WITH_SERVERS,) = STRATEGIES.where(lambda entry: entry.has_servers)

EXCHANGES = Registry(
    "exchange",
    "lockstep.exchanges",
    [
        ExchangeEntry(name="auto"),
        ExchangeEntry(
            name="shared-memory",
            build="lockstep.engine.exchange.shared_memory:build",
            check="lockstep.engine.exchange.shared_memory:check",
            compares_batches=True,
        ),
        ExchangeEntry(name="tree", build="lockstep.engine.exchange.hosts:build"),
        ExchangeEntry(
            name="native",
            build="lockstep.engine.exchange.native:NativeExchange",
            exactness="close",
            is_exact="lockstep.engine.exchange.native:NativeExchange.is_exact",
        ),
        ExchangeEntry(
            name="mpi",
            build="lockstep.engine.exchange.mpi:build",
            check="lockstep.engine.exchange.mpi:check",
        ),
        ExchangeEntry(name="server", strategy="ps", compares_batches=True, at_servers=True),
        ExchangeEntry(
            name="bf16",
            build="lockstep.engine.exchange.compressed:HalfExchange",
            exactness="approximate",
        ),
        ExchangeEntry(
            name="fp16",
            build="lockstep.engine.exchange.compressed:HalfExchange",
            exactness="approximate",
        ),
        ExchangeEntry(
            name="powersgd",
            build="lockstep.engine.exchange.powersgd:PowerSGDExchange",
            exactness="approximate",
            keywords=_OF_POWERSGD,
            no_loss_scale="ranks add what they left out of one step to the next, and would keep the "
            "infinite gradients of an overflow for ever",
        ),
    ],
)


def choose_strategy(name: str, *, has_group: bool, is_spread: bool) -> StrategyEntry:
    """Return the strategy that wraps the models of a run: the one named, or the one it falls back to.

    Args:
        name: name of the strategy in the run's settings.
        has_group: whether the ranks have a process group.
        is_spread: whether the mesh distributes one model over several ranks.
    """
    entry = STRATEGIES.find(name)
    while not entry.wrap or (entry.fallback and not (is_spread if entry.spreads else has_group)):
        entry = STRATEGIES.find(entry.fallback)
    return entry
