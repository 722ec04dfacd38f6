"""Parse `LOCKSTEP_INIT_METHOD`, a variable with an `init_method` URL of `torch.distributed`.

The URL is `tcp://host:port`, `file:///shared/path` or `env://`, which `?rank=0&world_size=2` may follow:
https://docs.pytorch.org/docs/stable/distributed.html#initialization.
"""

from __future__ import annotations

from collections.abc import Mapping
from urllib.parse import SplitResult, parse_qs, urlsplit

from lockstep.errors import UsageError

VARIABLE = "LOCKSTEP_INIT_METHOD"
#: Variable with the path from a `file://` init method, for the other environments.
FILE = "LOCKSTEP_RENDEZVOUS_FILE"
#: Variable that a launcher sets if it starts all ranks, to the path of their `FileStore`.
STORE = "LOCKSTEP_STORE"

_HINT = "for example tcp://10.0.0.1:29500, file:///shared/rendezvous or env://"


def apply(environ: Mapping[str, str], url: str | None = None) -> Mapping[str, str]:
    """Return `environ` with the variables for rank and rendezvous that an init-method URL specifies.

    The URL is that of `LOCKSTEP_INIT_METHOD` in `environ`, or else `url`.

    Raises:
        UsageError: if the init method is invalid.
    """
    url = environ.get(VARIABLE) or url
    if not url:
        return environ
    try:
        parts = urlsplit(url, allow_fragments=False)  # '#' is a letter like others in a file's name
    except ValueError:
        parts = urlsplit("")
    if parts.scheme not in ("tcp", "file", "env"):
        raise UsageError(
            f"the init method is {url!r}; expected tcp://, file:// or env://", hint=_HINT
        )
    ranks = _ranks(parts, url)
    changed = {**environ, **ranks}
    if parts.scheme != "env":
        changed.update(_tcp(parts, url) if parts.scheme == "tcp" else _file(parts, url))
        changed.pop(STORE, None)
    if ranks and not changed.keys() >= {"RANK", "WORLD_SIZE"}:
        raise UsageError(
            f"the init method {url!r} gives one of rank and world_size; expected both or neither",
            hint=_HINT,
        )
    return changed


def has_address(environ: Mapping[str, str]) -> bool:
    """Return whether `LOCKSTEP_INIT_METHOD` in `environ` has a rendezvous address.

    An address is the host and port of a `tcp://` URL, or the path of a `file://` URL.
    """
    return not (environ.get(VARIABLE) or "env:").startswith("env:")


def _tcp(parts: SplitResult, url: str) -> dict[str, str]:
    try:
        port = parts.port
    except ValueError:
        port = None
    if not parts.hostname or not port:
        raise UsageError(f"the init method is {url!r}; expected a host and a port", hint=_HINT)
    return {
        "MASTER_ADDR": parts.hostname,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "False",
    }


def _file(parts: SplitResult, url: str) -> dict[str, str]:
    if parts.netloc or not parts.path.startswith("/") or parts.path.endswith("/"):
        raise UsageError(
            f"the init method is {url!r}; expected file:// and the absolute path of a file",
            hint=_HINT,
        )
    return {FILE: parts.path}


def _ranks(parts: SplitResult, url: str) -> dict[str, str]:
    names = {"rank": "RANK", "world_size": "WORLD_SIZE"}
    query = parse_qs(parts.query, keep_blank_values=True)
    unknown = query.keys() - names
    if unknown:
        raise UsageError(
            f"the init method {url!r} asks for {', '.join(sorted(unknown))}; "
            "expected rank and world_size"
        )
    return {names[name]: values[-1] for name, values in query.items()}
