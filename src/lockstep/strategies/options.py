"""Keyword arguments of `run.model` for each strategy, known without importing the strategy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from lockstep.errors import ExactnessError, ModelError
from lockstep.registry import STRATEGIES, StrategyEntry
from lockstep.strategies.checks import is_harmless, named_buffers_of_own


def split(settings: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what strategies take that spread a model, and the rest; one script serves all."""
    entries = map(STRATEGIES.find, STRATEGIES.where(lambda one: one.spreads))
    known = {name for entry in entries for name in entry.keywords}
    own = {name: value for name, value in settings.items() if name in known}
    return own, {name: value for name, value in settings.items() if name not in own}


def taken_by(
    strategy: str, settings: dict[str, Any], *, exact: bool, is_trained: bool = True
) -> dict[str, Any]:
    """Return `settings` without those that other strategies have: one script serves all.

    What another strategy would refuse stays, to be refused by this one, too.

    Args:
        strategy: the run's.
        settings: what `run.model` was given.
        exact: whether the run promises the same bits on every layout.
        is_trained: whether the model has trainable parameters: every rank holds all of one that has none.

    Raises:
        ExactnessError: with `exact`, for one that lets its strategy compute in other numbers than this one.
        ModelError: for buffers of each rank's own, where ranks hold parts of a model.
    """
    entry = STRATEGIES.find(strategy)
    if entry.spreads and is_trained and not exact:  # with it, no strategy takes this
        _refuse_own_buffers(strategy, settings)
    others = set(_of_others(entry))
    if exact and "mp_policy" in others and settings.get("mp_policy") is not None:
        raise ExactnessError(
            f"mp_policy with strategy={strategy}, which does not know it; with strategy=fsdp the bits "
            "would be others",
            hint="precision='bf16' computes in reduced precision with every strategy",
        )
    own = {name: value for name, value in settings.items() if name not in others}
    if entry.ddp_keywords is None:
        return own
    return {
        name: value
        for name, value in own.items()
        if name in entry.ddp_keywords or not is_harmless(name, own)
    }


def _of_others(entry: StrategyEntry) -> Iterator[str]:
    """Yield the keywords that are other strategies' own."""
    for other in map(STRATEGIES.find, STRATEGIES.own):
        yield from (name for name in other.keywords if name not in entry.keywords)


def _refuse_own_buffers(strategy: str, settings: dict[str, Any]) -> None:
    """On every layout, also where there is one rank: a script means the same everywhere."""
    name = named_buffers_of_own(settings)
    if name is not None:
        raise ModelError(
            f"{name}=False with strategy={strategy}, whose ranks hold parts of one model; expected buffers "
            "that all ranks share",
            hint=f"leave {name} out, or choose strategy='ddp': there each rank may keep its own",
        )
