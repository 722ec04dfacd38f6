"""Rules of `lockstep check`, in families by the first digit of their code.

The families are 1 launch, 2 data, 3 wrapping, 4 step, 5 metrics, 6 Lockstep loops.
"""

import importlib
import pkgutil

from lockstep.tools.check import rule
from lockstep.tools.check.rule import SYNTAX, UNKNOWN, Harm, Rule, Violation

for _module in pkgutil.iter_modules(__path__, f"{__name__}."):
    importlib.import_module(_module.name)

#: All rules, by code.
RULES = dict(sorted(rule.RULES.items()))

__all__ = ["RULES", "SYNTAX", "UNKNOWN", "Harm", "Rule", "Violation"]
