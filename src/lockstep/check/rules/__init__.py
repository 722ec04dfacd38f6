"""The rules, by family: 1 launch, 2 data, 3 wrapping, 4 the step, 5 metrics, 6 Lockstep loops."""

from lockstep.check.rule import RULES, SYNTAX, UNKNOWN, Harm, Hit, Rule
from lockstep.check.rules import data, step

__all__ = ["RULES", "SYNTAX", "UNKNOWN", "Harm", "Hit", "Rule", "data", "step"]
