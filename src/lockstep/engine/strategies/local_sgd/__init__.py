"""Strategies `local-sgd` and `diloco`: ranks train independently, and average parameters now and then."""
