"""The rules, by family: 1 launch, 2 data, 3 wrapping, 4 the step, 5 metrics, 6 Lockstep loops."""

from lockstep.tools.check import rule
from lockstep.tools.check.rule import SYNTAX, UNKNOWN, Harm, Hit, Rule
from lockstep.tools.check.rules import (
    batches,
    checkpoints,
    data,
    divergence,
    launch,
    layouts,
    loops,
    metrics,
    microbatches,
    processes,
    sampling,
    scaling,
    step,
    wrapping,
)

#: All rules, by code.
RULES = dict(sorted(rule.RULES.items()))

__all__ = [
    "RULES",
    "SYNTAX",
    "UNKNOWN",
    "Harm",
    "Hit",
    "Rule",
    "batches",
    "checkpoints",
    "data",
    "divergence",
    "launch",
    "layouts",
    "loops",
    "metrics",
    "microbatches",
    "processes",
    "sampling",
    "scaling",
    "step",
    "wrapping",
]
