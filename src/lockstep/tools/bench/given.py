"""Predict step times from numbers that the user gives: gradient size, compute time, network speeds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lockstep.errors import UsageError
from lockstep.tools.bench.comparing import FORMAT
from lockstep.tools.bench.projecting import Projection, on_traffic, parameters_of, row_of
from lockstep.tools.bench.projection import Batches, Cost, Link, Model, Parameters, buckets_of
from lockstep.tools.bench.traffic import Layout, ReduceAlgorithm
from lockstep.tools.quantities import seconds, size

#: Kind of a results file without a measurement.
_KIND = "arithmetic"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepAssumptions:
    """Gradient size and computing time of a step, given by the user to predict step times from."""

    gradients: float  # bytes of all gradients
    compute: float  # seconds of a step without the exchange, on any number of ranks
    wanted: Sequence[Layout]
    link: Link
    on_cpu: bool  # whether ranks are on CPUs, where the exchange `tree` sums within each host first

    def __post_init__(self) -> None:
        if not self.compute:
            raise UsageError(
                "--compute is 0; expected the time of a step without its exchange",
                hint="for example --compute 300ms",
            )
        for flag, value, is_needed in (
            ("--bandwidth", self.link.bandwidth, any(one.hosts > 1 for one in self.wanted)),
            (
                "--local-bandwidth",
                self.link.local_bandwidth,
                any(one.per_host > 1 for one in self.wanted),
            ),
        ):
            if is_needed and value is None:
                raise UsageError(
                    f"--project without SCRIPT and without {flag}; expected it, since nothing is measured",
                    hint=f"for example {flag} 100GB/s",
                )

    def content(self) -> dict[str, Any]:
        """Return the content of a results file, with the predicted step time on each of `wanted`."""
        way = ReduceAlgorithm.HOSTS if self.on_cpu else ReduceAlgorithm.FLAT
        cost = Cost("tree", self.gradients, buckets_of(self.gradients), way)
        batches = Batches(1, per_rank=True, replicas=None)
        model = Model(Parameters(overhead_seconds=self.compute), cost, batches).over(self.link)
        names = {"strategy": None, "exchange": None}
        rows = [names | row_of(model, layout, 1 / self.compute) for layout in self.wanted]
        done = Projection(
            rows=[row | {"samples_per_second": None} for row in rows],
            parameters=[names | parameters_of(model, self.link)],
            assumptions=[
                f"nothing was measured; gradients of {size(self.gradients)} are given",
                f"every rank computes for {seconds(self.compute)} in each step, as given",
                *on_traffic(model, self.link, self.wanted),
            ],
        )
        base = {"format": FORMAT, "kind": _KIND, "results": []}
        return {**base, "projection": done.rows, "model": done.model}
