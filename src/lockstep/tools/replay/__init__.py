"""Replay, compare, branch and attest recorded runs: `lockstep replay`, `diff` and others."""
