"""For tests of distributed code, ours and users': run a function on several ranks, and get all back."""

from lockstep.testing.ranks import RankError, RankTimeoutError, assert_same, run_ranks

__all__ = ["RankError", "RankTimeoutError", "assert_same", "run_ranks"]
