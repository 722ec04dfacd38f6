"""`Streams`: selection of the ranks' output streams that the terminal shows.

The flags `--redirects`, `--tee` and `--local-ranks-filter` make the selection. The log file of a rank
always receives its standard output and standard error.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lockstep.errors import UsageError

#: Bit 1 is standard output, bit 2 standard error; one value for all local ranks, or one for each.
Bits = int | Mapping[int, int]

_BOTH = 3
_HINT = "1 is standard output, 2 standard error, 3 both: --tee 3 shows all ranks, --tee 0:3,1:2 two"


@dataclass(frozen=True, slots=True, kw_only=True)
class Streams:
    """Selection of the ranks' output streams for the terminal; by default, rank 0's stdout and stderr.

    Values are those of torchrun: 1 is stdout, 2 stderr, 3 both; one for all local ranks, or one for each.

    Attributes:
        redirects: streams that go to the log file alone.
        tee: streams that go to the log file and, each line prefixed, to the terminal.
        only: local ranks whose streams are shown; `None` for all.
    """

    redirects: Bits | None = None
    tee: Bits | None = None
    only: frozenset[int] | None = None

    @property
    def is_default(self) -> bool:
        """Whether no option on the workers' output was given."""
        return self == Streams()

    @property
    def asks_for_files(self) -> bool:
        """Whether `redirects` or `tee` names a stream of any rank."""
        return any(
            any(bits.values()) if isinstance(bits, Mapping) else bits
            for bits in (self.redirects, self.tee)
        )

    def prefixes(self, rank: int, local_rank: int, name: str) -> tuple[str | None, str | None]:
        """Return the prefixes that a process's lines get on the terminal: for stdout, for stderr.

        `None` stands for a stream that is not shown. `rank` is negative for a parameter server. `name` is
        the name of the process in its prefixes.
        """

        def prefix(bit: int) -> str | None:
            if self.is_default:
                return "" if rank == 0 else None
            if rank < 0:  # no local rank means a server
                return f"[{name}] " if isinstance(self.tee, int) and self.tee & bit else None
            if self.only is not None and local_rank not in self.only:
                return None
            if _of(self.tee, local_rank) & bit:
                return f"[{name}] "
            return None if _of(self.redirects, local_rank) & bit else ""

        return prefix(1), prefix(2)


def parse_bits(flag: str, text: str) -> Bits:
    """Parse a value of `--tee` or `--redirects`: 0 to 3, or a list such as `0:3,1:2` by local rank.

    Raises:
        UsageError: if `text` has another form.
    """
    try:
        if ":" not in text:
            return _bits(text)
        pairs = [pair.split(":") for pair in text.split(",")]
        return {_number(local_rank): _bits(bits) for local_rank, bits in pairs}
    except ValueError:
        raise UsageError(
            f"{flag} is {text!r}; expected 0, 1, 2 or 3, or one of them for each local rank",
            hint=_HINT,
        ) from None


def parse_ranks_filter(text: str) -> frozenset[int] | None:
    """Parse a comma-separated list of local ranks; return `None` (all ranks) for an empty text.

    Raises:
        UsageError: if `text` is not a list of numbers.
    """
    try:
        return frozenset(map(_number, text.split(","))) if text else None
    except ValueError:
        raise UsageError(
            f"--local-ranks-filter is {text!r}; expected local ranks, such as 0,1,2"
        ) from None


def _number(text: str) -> int:
    if not text.isdecimal():
        raise ValueError(text)
    return int(text)


def _bits(text: str) -> int:
    bits = _number(text)
    if bits > _BOTH:
        raise ValueError(text)
    return bits


def _of(bits: Bits | None, local_rank: int) -> int:
    return (bits or 0) if not isinstance(bits, Mapping) else bits.get(local_rank, 0)
