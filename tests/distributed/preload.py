"""What ranks of these tests need, imported and read once in the process that they are forked from."""

import pytest

from tests.distributed import jobs, low_precision, on_digits, sharded, spread

# Last: what has been imported by then is kept from the collectors of ranks.
import lockstep.testing.preload  # isort: skip

__all__ = ["jobs", "lockstep", "low_precision", "pytest", "sharded", "spread"]

on_digits.data()
