"""Functions for tests: run a function on several ranks, and compare results of several world sizes."""

from lockstep.testing.ranks import RankError, RankTimeoutError, assert_same, run_ranks

__all__ = ["RankError", "RankTimeoutError", "assert_same", "run_ranks"]
