"""Slurm's node lists: expansion, and addresses that Slurm knows."""

from __future__ import annotations

import re
import shutil
import subprocess

from lockstep.errors import WorldError

#: scontrol retries for a minute where its configuration has gone; an answer takes milliseconds.
_SCONTROL_SECONDS = 5.0
#: More than any cluster has: a longer range is a garbled one.
_MOST_NODES = 1 << 16
#: What Slurm writes lists with. ClusterShell knows more: groups, unions, wildcards, steps.
_LIST = re.compile(r"[A-Za-z0-9_.,\[\]-]+")
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
_TOP_LEVEL_COMMA = re.compile(r",(?![^\[\]]*\])")
_RANGE = re.compile(r"(\d{1,9})(?:-(\d{1,9}))?")
_FIRST_BRACKETS = re.compile(r"([^\[\]]*\[)([^\[\]]+)\](.*)")


def expand(node_list: str) -> tuple[str, ...]:
    """Return the names that a list such as `n[1-2,7],m03` stands for, in its order.

    Raises:
        WorldError: if it cannot be parsed.
    """
    from ClusterShell.NodeSet import NodeSetException

    try:
        return tuple(name for group in _groups(node_list) for name in _expand_group(group))
    except (NodeSetException, ValueError) as error:
        raise WorldError(
            f"the node list {node_list!r} cannot be parsed: {error}; "
            "expected one such as 'n[1-2,7],m03'",
            hint="LOCKSTEP_SLURM=0 ignores Slurm's variables",
        ) from None


def address(host: str) -> str | None:
    """Return the address under which Slurm reaches node `host`, `None` if it knows none but the name."""
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
    """Return the parts of a list between commas that are in no brackets."""
    if not _LIST.fullmatch(node_list):
        raise ValueError("names, ranges in brackets and commas are allowed")
    groups = _TOP_LEVEL_COMMA.split(node_list)
    if "" in groups:
        raise ValueError("a name is empty")
    return groups


def _expand_group(group: str) -> list[str]:
    """Expand one name with any number of brackets, the first of which counts slowest."""
    brackets = _FIRST_BRACKETS.fullmatch(group)
    if brackets is None:
        return _names(group)
    head, ranges, rest = brackets.groups()
    # ClusterShell sorts what is in brackets; Slurm doesn't.
    heads = [name for part in ranges.split(",") for name in _names(f"{head}{_checked(part)}]")]
    tails = _expand_group(rest) if rest else [""]
    return [name + tail for name in heads for tail in tails]


def _checked(part: str) -> str:
    """Return a range as it is, unless it is none, or longer than any machine."""
    found = _RANGE.fullmatch(part)
    if found is None or int(found[2] or found[1]) - int(found[1]) > _MOST_NODES:
        raise ValueError(f"{part!r} is no range of nodes")
    return part


def _names(text: str) -> list[str]:
    from ClusterShell.NodeSet import RESOLVER_NOGROUP, NodeSet

    return list(NodeSet(text, resolver=RESOLVER_NOGROUP))
