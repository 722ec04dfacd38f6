"""Parse and format quantities with units, such as 25Gbit/s and 20us."""

from __future__ import annotations

import math
import re
from typing import Any

from lockstep.errors import UsageError

_NUMBER = r"(?P<number>\d+(\.\d+)?)\s*"
_BANDWIDTH = re.compile(_NUMBER + r"(?P<prefix>[kMGT]?)(?P<unit>bit|B)/s")
_SIZE = re.compile(_NUMBER + r"(?P<prefix>[kMGT]?)B")
_TIME = re.compile(_NUMBER + r"(?P<unit>ns|us|µs|ms|s)")
_PREFIXES = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
_SECONDS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0}


def parse_bandwidth(text: str, flag: str = "--bandwidth") -> float:
    """Convert a bandwidth such as `25Gbit/s` or `3GB/s` to bytes per second.

    Raises:
        UsageError: if `text`, the value of the option `flag`, is not a bandwidth.
    """
    found = _BANDWIDTH.fullmatch(text.strip())
    if found is None or not float(found["number"]):
        raise _unreadable(flag, text, "a positive number", "25Gbit/s, or 3GB/s")
    bits = 8 if found["unit"] == "bit" else 1
    return float(found["number"]) * _PREFIXES[found["prefix"]] / bits


def parse_size(text: str, flag: str) -> float:
    """Convert a size such as `14GB` to bytes.

    Raises:
        UsageError: if `text`, the value of the option `flag`, is not a size.
    """
    found = _SIZE.fullmatch(text.strip())
    if found is None or not float(found["number"]):
        raise _unreadable(flag, text, "a positive number", "14GB, or 350MB")
    return float(found["number"]) * _PREFIXES[found["prefix"]]


def parse_latency(text: str, flag: str = "--latency") -> float:
    """Convert a time such as `20us` to seconds.

    Raises:
        UsageError: if `text`, the value of the option `flag`, is not a time.
    """
    found = _TIME.fullmatch(text.strip())
    if found is None:
        raise _unreadable(flag, text, "a number", "20us, or 1.5ms")
    return float(found["number"]) * _SECONDS[found["unit"]]


def _unreadable(flag: str, text: str, expected: str, example: str) -> UsageError:
    return UsageError(
        f"{flag} is {text!r}; expected {expected} with a unit", hint=f"for example {flag} {example}"
    )


def seconds(value: float) -> str:
    """Format a time in seconds with three significant digits and a unit, such as `1.25 ms`."""
    units = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))
    factor, unit = next((one for one in units if value >= one[0]), (1e-9, "ns"))
    return f"{three(value / factor)} {unit}"


def size(value: float) -> str:
    """Format a number of bytes with three significant digits and a decimal unit, such as `1.25 MB`."""
    units = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"))
    factor, unit = next((one for one in units if value >= one[0]), (1.0, "B"))
    return f"{three(value / factor)} {unit}"


def three(value: float) -> str:
    """Format a number with at least three significant digits, such as `0.0123` or `1,234`."""
    if not value:
        return "0"
    digits = max(0, 2 - math.floor(math.log10(abs(value))))
    return f"{value:,.{digits}f}"


def binary_size(value: float) -> str:
    """Format a number of bytes with a binary unit, such as `1.5 GiB`."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if value < 1024 or unit == "GiB":
            break
        value /= 1024
    return f"{value:.0f} {unit}" if unit == "bytes" or value >= 100 else f"{value:.1f} {unit}"


def counted(number: int, what: str) -> str:
    """Format a number with the noun `what`, in the plural unless the number is 1: `1 rank`, `2 ranks`."""
    return f"{number} {what}{'' if number == 1 else 's'}"


def rounded(value: float | None) -> Any:
    """Return a number rounded to six significant digits; `None` for `None`, NaN and infinity."""
    return None if value is None or not math.isfinite(value) else float(f"{value:.6g}")
