"""For tests of distributed code, ours and users': run a function on several ranks, and get all back."""

from lockstep.testing.layouts import assert_same
from lockstep.testing.ranks import RankError, RankTimeoutError, run_ranks

__all__ = ["RankError", "RankTimeoutError", "assert_same", "run_ranks"]
