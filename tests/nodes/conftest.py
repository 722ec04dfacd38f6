"""Fixtures of the tests on several hosts."""

from __future__ import annotations

from tests.hosts import hosts

__all__ = ["hosts"]
