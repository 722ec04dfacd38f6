"""`StepMetrics`: metrics of torchmetrics that `training_step` updates, summed over a global batch."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torchmetrics import Metric, MetricCollection
from torchmetrics.metric import CompositionalMetric
from torchmetrics.utilities import dim_zero_sum
from torchmetrics.wrappers import ClasswiseWrapper
from torchmetrics.wrappers.abstract import WrapperMetric

from lockstep.errors import StepError

#: What tells the state of a metric besides its sums: attributes that `torchmetrics.Metric` sets.
_MORE = ("_update_count", "_forward_cache", "_computed")


class StepMetrics:
    """Metrics of torchmetrics in a module; sums the updates of each microbatch over the replicas.

    Raises:
        StepError: if `training_step` updates a metric whose states are not sums over samples, or
            computes the value of a metric.
    """

    def __init__(self, module: Any) -> None:
        self._module = module
        self._own = threading.local()  # replicas may run in threads
        for part in module.modules():
            if isinstance(part, MetricCollection):
                # Groups, which spare updates, are found by states that happen to be equal on a rank.
                part._enable_compute_groups, part._groups_checked, part._groups = False, False, {}
        for metric in self.named().values():  # no warning says that a crash loses these
            metric._kept_by_run = (*_MORE, *metric._defaults)

    def named(self) -> dict[str, Metric]:
        """Return the torchmetrics metrics among the module's submodules, by name."""
        return {n: part for n, part in self._module.named_modules() if isinstance(part, Metric)}

    @contextmanager
    def isolated(self) -> Iterator[None]:
        """Return a context in which metrics begin empty; at its end restore their earlier states.

        The states that metrics have reached inside are kept for `taken`. In manual optimization, where
        microbatches overlap, metrics are not reset, and an update of a metric inside is an error.
        """
        metrics = self.named()
        before = {name: _state_of(metric) for name, metric in metrics.items()}
        is_automatic = self._module.automatic_optimization
        for metric in metrics.values() if is_automatic else ():
            _set(metric, _empty(metric), (0, None, None))
        yield
        counts = {name: 0 if is_automatic else more[0] for name, (_, more) in before.items()}
        updated = {
            name: _state_of(metric)
            for name, metric in metrics.items()
            if metric._update_count != counts[name]
        }
        for name, metric in metrics.items() if is_automatic else ():
            _set(metric, *before[name])
        for name, metric in metrics.items():  # a wrapper first, and then the metrics in it
            if any(f"{one}.".startswith(f"{name}.") for one in updated):
                _require_sums(name, metric)
        for name, (_, (_, _, computed)) in updated.items():
            if not is_automatic:
                raise _refusal(name, metrics[name], "updated", "expected automatic optimization")
            if computed is not None:
                raise _refusal(name, metrics[name], "computed", "it would see one microbatch")
        self._own.updated = updated

    def taken(self, rows: int) -> dict[str, Any]:
        """Return the values that the last microbatch has added to the metrics' states, for `run.sum`.

        `rows`: number of samples in the microbatch; with 0 samples all values are zeros.
        """
        taken: dict[str, Any] = {}
        for name, (states, (_, cache, _)) in self._own.updated.items():
            taken[f"updates {name}"] = int(rows > 0)
            taken[f"forwards {name}"] = int(rows > 0 and cache is not None)
            for state, value in states.items():
                own = value.detach() if rows else torch.zeros_like(value)
                taken[f"state {name} {state}"] = own
        return taken

    def apply(self, sums: dict[str, Any]) -> None:
        """Update the metrics by a global batch; `sums` are sums over replicas of the results of `taken`."""
        for name, metric in self.named().items():
            if not sums.get(f"updates {name}"):
                continue
            states, (count, _, _) = _state_of(metric)
            batch = {
                state: sums[f"state {name} {state}"].to(value) for state, value in states.items()
            }
            of_batch = None
            if sums[f"forwards {name}"]:
                _set(metric, batch, (1, None, None))
                of_batch = metric.compute()
            total = {state: value + batch[state] for state, value in states.items()}
            _set(metric, total, (count + 1, of_batch, None))

    def check_logged(self, name: str, metric: Metric) -> None:
        """Raise `StepError` if `metric`, passed to `self.log`, has a state that is no sum, or has no state.

        `name`: name of the metric in the message.
        """
        _require_sums(name, metric)
        if not metric._defaults:
            raise _refusal(name, metric, "logged", "it has no sums of its own")

    def state_dict(self) -> dict[str, Any]:
        """Return the states of the metrics that have been updated since their last reset."""
        return {
            name: _state_of(metric)
            for name, metric in self.named().items()
            if metric._update_count and metric._defaults
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Set each metric to its state in `state`, a result of `state_dict`; reset metrics without one."""
        for name, metric in self.named().items():
            _set(metric, *state.get(name, (_empty(metric), (0, None, None))))


def _state_of(metric: Metric) -> tuple[dict[str, Any], tuple[Any, ...]]:
    states = {name: getattr(metric, name) for name in metric._defaults}
    return states, tuple(getattr(metric, name) for name in _MORE)


def _set(metric: Metric, states: dict[str, Any], more: tuple[Any, ...]) -> None:
    for name, value in (*states.items(), *zip(_MORE, more, strict=True)):
        setattr(metric, name, value)


def _empty(metric: Metric) -> dict[str, Any]:
    return {
        name: default.clone().to(metric.device) if isinstance(default, torch.Tensor) else []
        for name, default in metric._defaults.items()
    }


def _require_sums(name: str, metric: Metric) -> None:
    if isinstance(metric, CompositionalMetric) or (
        isinstance(metric, WrapperMetric) and not isinstance(metric, ClasswiseWrapper)
    ):
        raise _refusal(name, metric, "updated", "it wraps metrics, whose sums are not its own")
    for state, default in metric._defaults.items():
        if metric._reductions[state] not in (dim_zero_sum, torch.sum) or isinstance(default, list):
            raise _refusal(name, metric, "updated", f"its state {state!r} is no sum over samples")


def _refusal(name: str, metric: Metric, verb: str, reason: str) -> StepError:
    return StepError(
        f"{name}, a {type(metric).__name__} of torchmetrics, was {verb} in training_step; {reason}",
        hint="pass the metric to self.log, or log a tensor, such as torchmetrics.functional.accuracy(…): "
        "the mean over the global batch is logged; curves are sums with thresholds=…; all metrics "
        "work in validation_step and test_step",
    )
