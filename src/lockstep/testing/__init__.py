"""Run a function on several ranks in a test, and compare layouts."""

from lockstep.testing.ranks import RankError, RankTimeoutError, assert_same, run_ranks

__all__ = ["RankError", "RankTimeoutError", "assert_same", "run_ranks"]
