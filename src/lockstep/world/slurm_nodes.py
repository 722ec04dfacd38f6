"""Expand Slurm's node lists, and get addresses of nodes from Slurm."""

from __future__ import annotations

import re
import shutil
import subprocess

from lockstep.errors import WorldError

#: Maximum seconds of a call of `scontrol`, which usually takes milliseconds.
_SCONTROL_SECONDS = 5.0
#: Maximum length of a range of nodes; a longer one is a typing error.
_MOST_NODES = 1 << 16
#: Characters in a node list; the next four patterns match parts of it.
_LIST = re.compile(r"[A-Za-z0-9_.,\[\]-]+")
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
_TOP_LEVEL_COMMA = re.compile(r",(?![^\[\]]*\])")
_RANGE = re.compile(r"(\d{1,9})(?:-(\d{1,9}))?")
_FIRST_BRACKETS = re.compile(r"([^\[\]]*)\[([^\[\]]+)\](.*)")


def expand(node_list: str) -> tuple[str, ...]:
    """Return the names of the nodes in a list such as `n[1-2,7],m03`, in order.

    Raises:
        WorldError: if the list cannot be parsed.
    """
    try:
        return tuple(name for group in _groups(node_list) for name in _expand_group(group))
    except ValueError as error:
        raise WorldError(
            f"the node list {node_list!r} cannot be parsed: {error}; "
            "expected one such as 'n[1-2,7],m03'",
            hint="LOCKSTEP_SLURM=0 ignores Slurm's variables",
        ) from None


def address(host: str) -> str | None:
    """Return the address (`NodeAddr`) that Slurm's configuration has for node `host`.

    Returns `None` if Slurm does not know the node, or if the address is `host` itself.
    """
    program = shutil.which("scontrol")
    if program is None or not _NAME.fullmatch(host):
        return None
    try:
        done = subprocess.run(
            [program, "show", "node", host],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_SCONTROL_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    found = re.search(r"^\s*NodeAddr=(\S+)", done.stdout, re.MULTILINE)
    return found[1] if done.returncode == 0 and found and found[1] != host else None


def _groups(node_list: str) -> list[str]:
    """Split a node list at the commas outside of brackets."""
    if not _LIST.fullmatch(node_list):
        raise ValueError("names, ranges in brackets and commas are allowed")
    return _TOP_LEVEL_COMMA.split(node_list)


def _expand_group(group: str) -> list[str]:
    """Return the names that a name with bracketed ranges stands for, such as `r[1-2]n[1-3]`.

    The last range varies fastest.
    """
    brackets = _FIRST_BRACKETS.fullmatch(group)
    if brackets is None:
        if not group or "[" in group or "]" in group:
            raise ValueError(f"{group!r} is no name of a node")
        return [group]
    head, ranges, rest = brackets.groups()
    tails = _expand_group(rest) if rest else [""]
    numbers = [number for part in ranges.split(",") for number in _numbers(part)]
    return [head + number + tail for number in numbers for tail in tails]


def _numbers(part: str) -> list[str]:
    """Return the numbers in a range such as `08-11`, padded with zeros to the width of the first."""
    found = _RANGE.fullmatch(part)
    numbers = range(int(found[1]), int(found[2] or found[1]) + 1) if found else ()
    if not 0 < len(numbers) <= _MOST_NODES:
        raise ValueError(f"{part!r} is no range of nodes")
    width = len(part.partition("-")[0])
    return [str(number).zfill(width) for number in numbers]
