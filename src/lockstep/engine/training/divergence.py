"""Comparisons between ranks: data of each loader, states before saving, digests at the end.

A script that draws a split or an order before its run, without a seed, gives each rank different data. In
the first loop over a loader, each rank compares its data with rank 0's; rank 0 does not wait for the other
ranks.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from lockstep.engine.training.checksums import Checksums
from lockstep.errors import DivergenceError, PeerError, listed
from lockstep.world.rendezvous.rank_rendezvous import RankRendezvous
from lockstep.world.waiting import await_any

#: Names of the values that are compared, in this order, with the message about a difference.
_WORDS = {
    "kind": "rank 0 has data of the kind {theirs}, rank {rank} of the kind {own}",
    "length": "rank 0 has {theirs} samples, rank {rank} has {own}",
    "indices": "the indices of the Subset on rank {rank} are not those on rank 0",
    "subset": "the indices of the subset on rank {rank} are not those on rank 0",
    "sampler": "the indices of the sampler on rank {rank} are not those on rank 0",
    "values": "the values of the dataset on rank {rank} are not those on rank 0",
    "order": "the sampler on rank {rank} draws a different order than on rank 0",
    "samples": "samples {shown} on rank {rank} are not those on rank 0",
}
_HINT = (
    "draw what makes the data (random_split, shuffle, permutation) inside `with lockstep.Run(…)`, or seed "
    "before: torch.manual_seed, numpy.random.seed, random.seed"
)
#: Maximal number of differences that a message names.
_SHOWN = 3
#: Seconds that a rank waits for rank 0 to begin the loop, too.
_SECONDS = 20.0
_OWN_GENERATOR = (
    "; a dataset that draws by a generator of its own is not set by the run's seed, and exact=False passes "
    "over these samples"
)


@dataclass(frozen=True, slots=True)
class SameData:
    """Compares the data of this rank's loaders with the data of rank 0, in each loader's first loop."""

    rendezvous: RankRendezvous
    exact: bool  # whether values of samples are compared, and not only indices and their order
    audits: bool  # whether samples that are fetched again must have the same values

    def compare(self, loader: int, own: dict[str, str]) -> None:
        """Compare checksums of this rank's data with rank 0's; rank 0 does not wait for the others.

        `loader`: number of the loader. `own`: this rank's checksums, by name.

        Raises:
            DivergenceError: if checksums differ, or if samples differ when they are fetched again.
            PeerError: if the key-value store is gone.
        """
        if self.exact and self.audits and own.get("again") != own.get("samples"):
            raise DivergenceError(
                f"loader {loader} ({own['kind']}): samples {own['shown']} have different values when the "
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
        # If rank 0 never begins the loop, it is in another call, which the next collective call reports.
        try:
            is_there = await_any(store, [["failed"], [key]], _SECONDS) == 1
        except RuntimeError as error:
            raise PeerError(f"the store is gone, and the rank that hosts it: {error}") from error
        theirs = json.loads(store.get(key)) if is_there else own
        name = differing(own, theirs, values=self.exact)
        if name is None:
            return
        values = {"own": own.get(name), "theirs": theirs.get(name), "shown": own.get("shown")}
        seen = _WORDS[name].format(rank=rank, **values)
        raise DivergenceError(
            f"loader {loader} ({own['kind']}): {seen}; expected the same data on all ranks",
            hint=_HINT + (_OWN_GENERATOR if name == "samples" else ""),
        )


def differing(
    own: Mapping[str, str], theirs: Mapping[str, str], *, values: bool = True
) -> str | None:
    """Return the name of the first checksum that differs between `own` and `theirs`, or `None`.

    With `values=False`, checksums of the samples' values are not compared.
    """
    names = [name for name in _WORDS if values or name not in ("values", "samples")]
    return next((name for name in names if own.get(name) != theirs.get(name)), None)


def check_same(
    rendezvous: RankRendezvous, own: str, parts: Callable[[], dict[str, str]], *, exact: bool
) -> None:
    """Wait until all ranks have ended their run, and compare the ranks' digests of the final state.

    `own` is this rank's digest. If digests differ, `parts` returns the digests of single models and other
    objects, which show where.

    Raises:
        DivergenceError: if `exact`, and the digest of a rank differs.
        PeerError: if a rank does not reach the end of its run.
    """
    found = json.loads(rendezvous.conclude("digest", own, _first_other, "the end"))
    if found is not None and exact:
        main, rank, digest = found
        ours, theirs = _exchanged(rendezvous, parts(), (0, rank), "the end")
        names = [n for n in {**ours, **theirs} if ours.get(n) != theirs.get(n)]
        raise DivergenceError(
            f"rank 0 ends with {main}, rank {rank} with {digest}: "
            f"{', '.join(names) or 'the objects'} differ; expected the same bits",
            hint="look for code that changes weights by itself on one rank; "
            "`lockstep verify` names the first step that differs",
        )


def _first_other(digests: list[str]) -> str:
    main = digests[0]
    other = next((rank for rank, digest in enumerate(digests) if digest != main), None)
    return json.dumps(None if other is None else [main, other, digests[other]])


def _exchanged(
    rendezvous: RankRendezvous, own: Any, ranks: tuple[int, int], what: str
) -> list[Any]:
    """Write `own` to the key-value store; return the two values that the `ranks` wrote.

    Every rank must make this call. `what`: phase of the run, for the message of a `PeerError`.
    """
    keys = [f"parts/{rank}" for rank in ranks]
    rendezvous.store.set(f"parts/{rendezvous.world.rank}", json.dumps(own))
    rendezvous.wait(keys, what)
    return [json.loads(rendezvous.store.get(key)) for key in keys]


def check_states(
    rendezvous: RankRendezvous,
    texts: Sequence[str],
    own: Checksums,
    steps: int,
    models: list[str],
) -> None:
    """Compare the states of all ranks before they are saved; all ranks make this call.

    `texts`: results of `Checksums.brief`, by rank. `own`: this rank's checksums. `steps`, the number of
    updates, and `models`, the class names of the run's models, are for the message.

    Raises:
        DivergenceError: if parts of the state that should be equal differ between two ranks.
    """
    whole, cut = [t.split(" ", 1)[0] for t in texts], [t.split(" ", 1)[1] for t in texts]
    first = [cut.index(next(c for c in cut if c.split()[1:] == d.split()[1:])) for d in cut]
    odd = [r for r in range(len(texts)) if whole[r] != whole[0] or cut[r] != cut[first[r]]]
    if not odd:
        return
    base = 0 if whole[odd[0]] != whole[0] else first[odd[0]]
    two = _exchanged(rendezvous, asdict(own), (base, odd[0]), "the comparison of states")
    names = Checksums(**two[0]).differing(Checksums(**two[1]))
    shown = listed([_shown(name, models) for name in names], _SHOWN)
    ranks = f"rank{'s' * (len(odd) > 1)} {', '.join(map(str, odd))}"
    raise DivergenceError(
        f"after step {steps} {ranks} and rank {base} hold other bits of {shown}; expected the same, "
        "since a restart would give all ranks those of one",
        hint="what a script computes from data to change weights must be the same on every rank: from a "
        "fixed batch of the dataset, or by run.mean; `lockstep verify` names the first step that differs",
    )


def _shown(name: str, models: list[str]) -> str:
    """Return a readable form of the name of a value: for `models.0.fc.bias` it is `fc.bias (Net)`.

    `models`: class names of the run's models.
    """
    kind, _, rest = name.partition(".")
    number, _, inner = rest.partition(".")
    if kind == "models":
        return f"{inner} ({models[int(number)]})"
    return f"{inner} of optimizer {number}" if kind == "optimizers" else rest
