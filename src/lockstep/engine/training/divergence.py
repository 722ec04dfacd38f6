"""Divergence checks over ranks: data of each loader in its first loop, states that are kept, the end.

A script that draws a split or an order before its run, without a seed, gives each rank another one. Each
rank compares itself with rank 0, which does not wait.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch.distributed as dist

from lockstep.engine.data.sources import CompareData
from lockstep.engine.exchange.scatter import gather_texts
from lockstep.engine.training.checksums import Checksums
from lockstep.errors import DivergenceError, PeerError
from lockstep.world.rendezvous.rank_rendezvous import RankRendezvous
from lockstep.world.waiting import await_any

#: What is compared, in this order, and how a difference is said.
_WORDS = {
    "kind": "rank 0 has data of the kind {theirs}, rank {rank} of the kind {own}",
    "length": "rank 0 has {theirs} samples, rank {rank} has {own}",
    "indices": "the indices of the Subset on rank {rank} are not those on rank 0",
    "subset": "the indices of the subset on rank {rank} are not those on rank 0",
    "sampler": "the indices of the sampler on rank {rank} are not those on rank 0",
    "values": "the values of the dataset on rank {rank} are not those on rank 0",
    "order": "the sampler on rank {rank} draws another order than on rank 0",
    "samples": "samples {shown} on rank {rank} are not those on rank 0",
}
_HINT = (
    "draw what makes the data (random_split, shuffle, permutation) inside `with lockstep.Run(…)`, or seed "
    "before: torch.manual_seed, numpy.random.seed, random.seed"
)
#: Bytes in which a rank says what it holds, and how many names a message has.
_ROOM, _SHOWN = 256, 3
#: How long a rank waits for rank 0 to come to the loop, too.
_SECONDS = 20.0
_OWN_GENERATOR = (
    "; a dataset that draws by a generator of its own is not set by the run's seed, and exact=False passes "
    "over these samples"
)


@dataclass(frozen=True, slots=True)
class SameData:
    """Compares the data of loaders with the data of rank 0.

    Attributes:
        rendezvous: rendezvous of the ranks.
        exact: whether values count, and not only what they are chosen by.
        replicas: number of replicas in all.
        audits: whether samples must be the same when they are fetched again.
    """

    rendezvous: RankRendezvous
    exact: bool
    replicas: int
    audits: bool

    def check_of(self, loader: int) -> CompareData | None:
        """Return what compares the data of loader number `loader`; `None` for a single replica."""
        return partial(self._compare, loader) if self.replicas > 1 else None

    def _compare(self, loader: int, own: dict[str, str]) -> None:
        """Compare what this rank holds; rank 0 says what it holds, and continues.

        Raises:
            DivergenceError: if it is something else than on rank 0, or when it is fetched again.
            PeerError: if the store is gone.
        """
        if self.exact and self.audits and own.get("again") != own.get("samples"):
            raise DivergenceError(
                f"loader {loader} ({own['kind']}): samples {own['shown']} have other values when the "
                "dataset is asked for them again; expected the same ones, since the layout decides how "
                "often a rank fetches a sample",
                hint="copy before changing in place (x = x.clone()); draw with torch, numpy.random or "
                "random, which the run seeds for each sample; keep no counts or random values in the "
                "dataset; --audit off switches this check off",
            )
        if self.rendezvous.world.size == 1:
            return
        key, store, rank = f"data/{loader}", self.rendezvous.store, self.rendezvous.world.rank
        if rank == 0:
            store.set(key, json.dumps(own))
            return
        # Where rank 0 is in another call, that is what has to be told: whatever comes next does.
        try:
            is_there = await_any(store, [["failed"], [key]], _SECONDS) == 1
        except RuntimeError as error:
            raise PeerError(f"the store is gone, and the rank that hosts it: {error}") from error
        if is_there:
            self._check(loader, own, json.loads(store.get(key)))

    def _check(self, loader: int, own: Mapping[str, str], theirs: Mapping[str, str]) -> None:
        name = differing(own, theirs, values=self.exact)
        if name is None:
            return
        seen = _WORDS[name].format(
            own=own.get(name),
            theirs=theirs.get(name),
            rank=self.rendezvous.world.rank,
            shown=own.get("shown"),
        )
        raise DivergenceError(
            f"loader {loader} ({own['kind']}): {seen}; expected the same data on all ranks",
            hint=_HINT + (_OWN_GENERATOR if name == "samples" else ""),
        )


def differing(
    own: Mapping[str, str], theirs: Mapping[str, str], *, values: bool = True
) -> str | None:
    """Return the name of the first thing that differs; of values only where they count."""
    names = [name for name in _WORDS if values or name not in ("values", "samples")]
    return next((name for name in names if own.get(name) != theirs.get(name)), None)


def check_same(
    rendezvous: RankRendezvous, own: str, parts: Callable[[], dict[str, str]], *, exact: bool
) -> None:
    """Wait until all ranks have come to their end, and compare what they end with.

    Args:
        rendezvous: rendezvous of the ranks.
        own: digest of this rank.
        parts: returns digests of models and registered objects, by name; asked for where ranks differ.
        exact: whether digests have to be the same.

    Raises:
        DivergenceError: if a rank holds other bits.
        PeerError: if a rank does not come to its end.
    """
    found = json.loads(rendezvous.conclude("digest", own, _first_other, "the end"))
    if found is not None and exact:
        main, rank, digest = found
        raise DivergenceError(
            f"rank 0 ends with {main}, rank {rank} with {digest}: "
            f"{_differing(rendezvous, parts(), rank)} differ; expected the same bits",
            hint="look for code that changes weights by itself on one rank; "
            "`lockstep verify` names the first step that differs",
        )


def _first_other(digests: list[str]) -> str:
    main = digests[0]
    other = next((rank for rank, digest in enumerate(digests) if digest != main), None)
    return json.dumps(None if other is None else [main, other, digests[other]])


def _differing(rendezvous: RankRendezvous, own: dict[str, str], other: int) -> str:
    """Return the names of what rank 0 and another rank hold that is not the same."""
    one, two = _exchanged(rendezvous, own, (0, other), "the end")
    return ", ".join(n for n in {**one, **two} if one.get(n) != two.get(n)) or "the objects"


def _exchanged(
    rendezvous: RankRendezvous, own: Any, ranks: tuple[int, int], what: str
) -> list[Any]:
    """Return what two ranks have to say; all ranks call this together, before they end."""
    keys = [f"parts/{rank}" for rank in ranks]
    rendezvous.store.set(f"parts/{rendezvous.world.rank}", json.dumps(own))
    rendezvous.wait(keys, what)
    return [json.loads(rendezvous.store.get(key)) for key in keys]


def check_states(
    rendezvous: RankRendezvous,
    group: dist.ProcessGroup,
    own: Checksums,
    steps: int,
    models: list[str],
) -> None:
    """Compare what ranks hold, before it is kept; all of them call this together.

    Args:
        rendezvous: rendezvous of the ranks.
        group: their process group.
        own: of this rank.
        steps: updates until here.
        models: the classes of the run's models, for the message.

    Raises:
        DivergenceError: if a rank holds other bits than another one that should hold the same.
    """
    texts = [told.decode() for told in gather_texts(own.brief().encode(), _ROOM, group)]
    whole, cut = [t.split(" ", 1)[0] for t in texts], [t.split(" ", 1)[1] for t in texts]
    first = [cut.index(next(c for c in cut if c.split()[1:] == one.split()[1:])) for one in cut]
    odd = [r for r in range(len(texts)) if whole[r] != whole[0] or cut[r] != cut[first[r]]]
    if not odd:
        return
    base = 0 if whole[odd[0]] != whole[0] else first[odd[0]]
    told = _exchanged(rendezvous, asdict(own), (base, odd[0]), "the comparison of states")
    names = Checksums(**told[0]).differing(Checksums(**told[1]))
    shown = ", ".join(_shown(name, models) for name in names[:_SHOWN])
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    ranks = f"rank{'s' * (len(odd) > 1)} {', '.join(map(str, odd))}"
    raise DivergenceError(
        f"after step {steps} {ranks} and rank {base} hold other bits of {shown}{more}; expected the same, "
        "since a restart would give all ranks those of one",
        hint="what a script computes from data to change weights must be the same on every rank: from a "
        "fixed batch of the dataset, or by run.mean; `lockstep verify` names the first step that differs",
    )


def _shown(name: str, models: list[str]) -> str:
    """Return the name of a part of the state as the script knows it."""
    kind, _, rest = name.partition(".")
    number, _, inner = rest.partition(".")
    if kind == "models":
        return f"{inner} ({models[int(number)]})"
    return (
        f"{inner} of optimizer {number}" if kind == "optimizers" else rest or "registered objects"
    )
