"""Registry of strategies and exchanges: those of Lockstep, and those of other packages.

A strategy distributes models, an exchange sums gradients. An entry says what its strategy or exchange needs
and promises; `wrap`, `build` and `check` name functions as `module:function`, which are imported where they
are used. So names are known without importing torch. Other packages publish an entry by an entry point in
the group `lockstep.strategies` or `lockstep.exchanges`, under the name that users will choose it by.

Classes of exactness. `exact`: the bits of the result do not depend on the layout. `close`: the same
mathematics, rounded in another order. `approximate`: other mathematics, to the same end.
"""

from __future__ import annotations

import importlib
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, Literal, TypeVar, cast

from lockstep.errors import UsageError, did_you_mean

Exactness = Literal["exact", "close", "approximate"]
#: A function, or where to import it from: `module:function`.
Function = str | Callable[..., Any]


@dataclass(frozen=True, eq=False, kw_only=True)
class ExchangeEntry:
    """An exchange: how gradients are summed.

    Attributes:
        name: what users choose it by; of an entry point, that one's name.
        build: function from an `ExchangeContext` to an `Exchange` (`lockstep.engine.exchange.base`).
        exactness: its class.
        is_exact: for an exchange of class `close`: takes a `Forest`, returns whether its sums have the bits
            of the tree there all the same.
        check: refuses where it cannot work: takes a `Forest`, and `one_host` and `device` by keyword.
        keywords: of `run.model` that are its own; they have no effect with other exchanges.
        strategy: the only strategy that takes it; `None` for each that takes exchanges of this class.
        no_loss_scale: why it cannot go with the loss scale of fp16, if so.
        compares_batches: whether it refuses gradients of different batches; where not, `ddp` does, on CPUs.
        at_servers: whether parameter servers sum gradients, and not ranks.
    """

    name: str = ""
    build: Function = ""
    exactness: Exactness = "exact"
    is_exact: Function = ""
    check: Function = ""
    keywords: tuple[str, ...] = ()
    strategy: str | None = None
    no_loss_scale: str = ""
    compares_batches: bool = False
    at_servers: bool = False


@dataclass(frozen=True, eq=False, kw_only=True)
class StrategyEntry:
    """A strategy: how a model is distributed over ranks.

    Attributes:
        name: what users choose it by; of an entry point, that one's name.
        wrap: function from the module, a `ModelContext` and the keywords of `run.model` to a `WrappedModel`
            (`lockstep.engine.strategies.wrapped_model`).
        fallback: the strategy that wraps in its place where there is nothing to distribute: on a rank
            without a process group, or, if it spreads models, where each rank has a whole one.
        exactness: its class, where the exchange adds nothing to it.
        check: checks the module and the keywords of `run.model`, also on one rank.
        exchanges: those that it goes with; `None` for all that ask for no strategy of their own.
        why: why it takes no others.
        one_rank: whether a run has one rank with it.
        needs_group: whether a single rank has a process group, too.
        meshed: whether it needs torch's mesh of the ranks.
        spreads: whether it distributes the parts of one model over several ranks.
        places: whether it puts these parts onto devices itself.
        averages: whether each rank updates its own parameters, which are averaged every some steps.
        has_servers: whether parameter servers beside the ranks are part of it.
        scatters: whether one rank computes on several devices.
        shards: whether each rank has, and saves, its own part of every parameter.
        cuts_batches: whether it may compute on a replica's samples in parts.
        no_loss_scale: why it cannot go with the loss scale of fp16, if so.
        keywords: of `run.model` that are its own; they have no effect with other strategies.
        ddp_keywords: keywords of DistributedDataParallel that it takes; `None` for all.
        slow_import: whether its module takes so long to import that a launcher does it beforehand.
    """

    name: str = ""
    wrap: Function = ""
    fallback: str = ""
    exactness: Exactness = "exact"
    check: Function = "lockstep.engine.strategies.checks:check_settings"
    exchanges: tuple[str, ...] | None = None
    why: str = ""
    one_rank: bool = False
    needs_group: bool = False
    meshed: bool = False
    spreads: bool = False
    places: bool = False
    averages: bool = False
    has_servers: bool = False
    scatters: bool = False
    shards: bool = False
    cuts_batches: bool = False
    no_loss_scale: str = ""
    keywords: tuple[str, ...] = ()
    ddp_keywords: tuple[str, ...] | None = None
    slow_import: bool = False


@dataclass(frozen=True, eq=False, kw_only=True)
class EnvironmentEntry:
    """A launcher that gives a process its rank by environment variables.

    Attributes:
        name: what users choose it by; of an entry point, that one's name.
        detect: function from environment variables to a `lockstep.World`, or to `None` where they are not
            this launcher's; imports no torch.
        starts_launchers: whether each process that it starts may be a `lockstep run`.
    """

    name: str = ""
    detect: Function = ""
    starts_launchers: bool = True


EntryT = TypeVar("EntryT", bound=ExchangeEntry | StrategyEntry)


class Registry(Generic[EntryT]):
    """The entries of one kind by their names.

    Args:
        what: the kind, as messages name it.
        group: of the entry points of other packages.
        entries: of Lockstep.
    """

    def __init__(self, what: str, group: str, entries: Sequence[EntryT]) -> None:
        self._what, self._group = what, group
        self._kind: type = type(entries[0])
        self._entries: dict[str, EntryT] = {entry.name: entry for entry in entries}
        self.own: tuple[str, ...] = tuple(self._entries)

    def names(self) -> tuple[str, ...]:
        """Return all names: those of Lockstep, then those of other packages."""
        from importlib import metadata

        published = {point.name for point in metadata.entry_points(group=self._group)}
        return (*self.own, *sorted(published - set(self.own)))

    def keywords(self) -> frozenset[str]:
        """Return the keywords of `run.model` of all entries; of other packages' those that are in use."""
        return frozenset(word for entry in self._entries.values() for word in entry.keywords)

    def require(self, name: Any, origin: str) -> None:
        """Refuse a name that no entry has.

        Args:
            name: what was given.
            origin: the flag, variable or argument that it was given by.

        Raises:
            UsageError: listing the names that there are.
        """
        if name not in self._entries and name not in self.names():
            raise UsageError(
                f"{origin} is {name!r}; expected one of {', '.join(self.names())}",
                hint=did_you_mean(str(name), self.names()),
            )

    def find(self, name: str) -> EntryT:
        """Return the entry of a name; an entry of another package is imported at the first call.

        Raises:
            UsageError: if there is none, if two packages publish it, or if it cannot be imported.
        """
        if name not in self._entries:
            self.require(name, self._what)
            self._entries[name] = self._load(name)
        return self._entries[name]

    def where(self, matches: Callable[[EntryT], object]) -> tuple[str, ...]:
        """Return the names of Lockstep's entries of which `matches` is true."""
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
        return cast("EntryT", replace(entry, name=name))


def resolve(function: Function) -> Callable[..., Any]:
    """Return a function of an entry, imported if need be."""
    if callable(function):
        return function
    module, _, name = function.partition(":")
    return cast("Callable[..., Any]", operator.attrgetter(name)(importlib.import_module(module)))


#: What `fsdp` passes on to torch's `fully_shard`.
OF_FULLY_SHARD = ("reshard_after_forward", "shard_placement_fn", "mp_policy", "offload_policy")
#: Exchanges between the ranks that hold the same part of a model.
_OF_COLUMNS = ("shared-memory", "tree", "native")
_NO_AGREEMENT = (
    "ranks that train by themselves do not agree on the steps that a loss scale leaves out"
)
#: Keywords of PyTorch's PowerSGDState.
_OF_POWERSGD = (
    *("matrix_approximation_rank", "start_powerSGD_iter", "min_compression_rate"),
    *("use_error_feedback", "warm_start", "orthogonalization_epsilon", "random_seed"),
    *("compression_stats_logging_frequency", "batch_tensors_with_same_shape"),
)

STRATEGIES = Registry(
    "strategy",
    "lockstep.strategies",
    [
        StrategyEntry(name="auto", wrap="lockstep.engine.strategies.ddp:wrap", fallback="single"),
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
        StrategyEntry(
            name="local-sgd",
            wrap="lockstep.engine.strategies.local_sgd.model:wrap_local_sgd",
            fallback="single",
            exactness="approximate",
            exchanges=("tree",),
            why="whose ranks average parameters in tree order",
            averages=True,
            no_loss_scale=_NO_AGREEMENT,
        ),
        StrategyEntry(
            name="diloco",
            wrap="lockstep.engine.strategies.local_sgd.model:wrap_diloco",
            fallback="single",
            exactness="approximate",
            exchanges=("tree",),
            why="whose ranks average parameters in tree order",
            averages=True,
            no_loss_scale=_NO_AGREEMENT,
        ),
    ],
)
#: The strategy that has parameter servers, by which their flags and messages name it.
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
        ExchangeEntry(name="tree", build="lockstep.engine.exchange.tree:build"),
        ExchangeEntry(
            name="native",
            build="lockstep.engine.exchange.native:build",
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
            name="bf16", build="lockstep.engine.exchange.compressed:build", exactness="approximate"
        ),
        ExchangeEntry(
            name="fp16", build="lockstep.engine.exchange.compressed:build", exactness="approximate"
        ),
        ExchangeEntry(
            name="powersgd",
            build="lockstep.engine.exchange.powersgd:build",
            exactness="approximate",
            keywords=_OF_POWERSGD,
            no_loss_scale="ranks add what they left out of one step to the next, and would keep the "
            "infinite gradients of an overflow for ever",
        ),
    ],
)


def choose_strategy(name: str, *, has_group: bool, is_spread: bool) -> StrategyEntry:
    """Return the strategy that wraps the models of a run.

    Args:
        name: of the strategy that the run asks for.
        has_group: whether its ranks have a process group.
        is_spread: whether its mesh distributes one model over several ranks.
    """
    entry = STRATEGIES.find(name)
    while entry.fallback and not (is_spread if entry.spreads else has_group):
        entry = STRATEGIES.find(entry.fallback)
    return entry
