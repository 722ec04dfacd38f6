"""Strategies `local-sgd` and `diloco`: ranks train independently between averages of their parameters."""
