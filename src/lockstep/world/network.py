"""The network interfaces of this host, and the addresses of other hosts.

A name is asked of the system's resolver first. Clusters without one often carry the address in the
name (`SH-IDC1-10-5-36-65` is 10.5.36.65), or Slurm knows it.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import os
import re
import socket
import threading
from collections.abc import Sequence
from dataclasses import dataclass

from lockstep.errors import UnreachableError, UsageError, WorldError

#: Without a network, the resolver may take half a minute to say that there is none.
_RESOLVER_SECONDS = 3.0
_CARRIED = re.compile(r"(?:^|\D)(\d{1,3})[-_](\d{1,3})[-_](\d{1,3})[-_](\d{1,3})$")
#: Any port will do where a socket only asks the routing table.
_NO_PORT = 9
LOOPBACK = "127.0.0.1"
#: Gloo's, NCCL's and TensorPipe's: each would otherwise choose by the host's name, or what looks good.
INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME")
_UNREACHED = {
    errno.EINVAL: "no route",  # what a blackhole in the routing table gives
    errno.ENETUNREACH: "no route (network is unreachable)",
    errno.EHOSTUNREACH: "no answer from the host, or no route to it",
    errno.EACCES: "forbidden by a route or a firewall here",
    errno.EPERM: "forbidden by a firewall here",
}


@dataclass(frozen=True, slots=True)
class Interface:
    """An interface of this host that is up, and one of its addresses: IPv4, or IPv6 of global scope."""

    name: str
    address: str
    loopback: bool


def interfaces() -> tuple[Interface, ...]:
    """Return the interfaces that are up, in the system's order, IPv4 addresses of each first."""
    import psutil

    states = psutil.net_if_stats()
    found = []
    for name, addresses in psutil.net_if_addrs().items():
        for family in (socket.AF_INET, socket.AF_INET6):
            for text in [entry.address for entry in addresses if entry.family == family]:
                address = ipaddress.ip_address(text)
                if name in states and states[name].isup and not address.is_link_local:
                    found.append(Interface(name, text, address.is_loopback))
    return tuple(found)


def named(name: str) -> Interface:
    """Return the interface called `name`, with the address that Gloo and NCCL take: its first.

    Raises:
        UsageError: if there is none of that name which is up and has an address.
    """
    first: dict[str, Interface] = {}
    for interface in interfaces():
        first.setdefault(interface.name, interface)
    if name in first:
        return first[name]
    there = (
        ", ".join(f"{interface.name} ({interface.address})" for interface in first.values())
        or "none"
    )
    exists = any(name == known for _, known in socket.if_nameindex())
    why = "is down or has no address" if exists else "does not exist"
    raise UsageError(
        f"the interface {name!r} {why} on {socket.gethostname()}; expected one of: {there}",
        hint="--interface NAME or LOCKSTEP_INTERFACE; without it, the interface is found by trying",
    )


def interface_towards(address: str, among: Sequence[Interface] | None = None) -> Interface | None:
    """Return the interface by which packets leave for `address`, an IP address; no packet is sent.

    `None` where there is no route, or where it starts at an address that is not `among` the interfaces.
    """
    known = interfaces() if among is None else among
    family = socket.AF_INET6 if ipaddress.ip_address(address).version == 6 else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as asking:
        try:
            asking.connect((address, _NO_PORT))
        except OSError:
            return None
        source = asking.getsockname()[0]
    return next((interface for interface in known if interface.address == source), None)


def addresses_of(host: str) -> tuple[str, ...]:
    """Return the addresses of `host`: a literal, or those of the first source that knows the name.

    The sources: the system's resolver, bounded to a few seconds; an address that the name carries; Slurm.

    Raises:
        UnreachableError: if none of them knows the name; the message has the answer of each.
    """
    with contextlib.suppress(ValueError):
        return (str(ipaddress.ip_address(host.removeprefix("[").removesuffix("]"))),)
    answer = _resolve(host)
    if isinstance(answer, tuple):
        return answer
    carried = carried_address(host)
    if carried is not None:
        return (carried,)
    from lockstep.world import slurm_nodes

    known = slurm_nodes.address(host)
    if known is not None:
        answer = (known,) if _is_literal(known) else _resolve(known)
    if isinstance(answer, tuple):
        return answer
    raise UnreachableError(
        f"the host name {host!r} has no address: the resolver {answer}; "
        "the name carries none; Slurm does not know it",
        hint="give the address itself, or add the name to /etc/hosts",
    )


def carried_address(host: str) -> str | None:
    """Return the IPv4 address that a host name ends with, if it does: `ip-10-0-3-7` is 10.0.3.7."""
    found = _CARRIED.search(host.partition(".")[0])
    text = ".".join(str(int(part)) for part in found.groups()) if found else ""
    if not _is_literal(text):
        return None
    address = ipaddress.ip_address(text)
    unusable = address.is_loopback or address.is_multicast or address.is_unspecified
    return None if unusable or address.is_reserved else text


def _is_literal(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def _resolve(host: str) -> tuple[str, ...] | str:
    """Return the addresses that the resolver knows, or why there are none."""
    answers: list[tuple[str, ...] | str] = []

    def ask() -> None:
        try:
            found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            why = error.strerror if isinstance(error, OSError) else None
            answers.append(f"said {(why or str(error))!r}")
            return
        addresses = dict.fromkeys(str(entry[4][0]) for entry in found)
        known = tuple(address for address in addresses if "%" not in address)
        answers.append(known or "knows no address of it")

    # A thread, since the call cannot be broken off; as a daemon it does not keep the process.
    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(_RESOLVER_SECONDS)
    return answers[0] if answers else f"did not answer within {_RESOLVER_SECONDS:g} s"


def listen(port: int, *, loopback: bool) -> socket.socket:
    """Return a socket that listens at `port`, of this host alone or of all its interfaces.

    Raises:
        WorldError: if no file descriptor is left for it.
    """
    try:
        if loopback:
            return socket.create_server((LOOPBACK, port), backlog=1024)
        if socket.has_dualstack_ipv6():
            return socket.create_server(
                ("", port), family=socket.AF_INET6, backlog=1024, dualstack_ipv6=True
            )
        return socket.create_server(("", port), backlog=1024)
    except OSError as error:
        if error.errno not in (errno.EMFILE, errno.ENFILE):
            raise
        raise WorldError(
            f"this host cannot listen for the others: {reason(error)}",
            hint="raise the limit of open files: ulimit -n",
        ) from error


def listens_locally(address: str | None) -> bool:
    """Return whether clients of `address` find what listens on this host's 127.0.0.1 alone."""
    return address in ("localhost", LOOPBACK)


def is_loopback(address: str | None) -> bool:
    """Return whether an address or a host's name means this host alone."""
    address = address or ""
    return address == "localhost" or (
        _is_literal(address) and ipaddress.ip_address(address).is_loopback
    )


def reason(error: OSError) -> str:
    """Return why a call of the system failed, in its words."""
    if isinstance(error, TimeoutError):
        return "timed out"
    return (error.strerror or str(error)).lower()


def why_unreached(error: OSError) -> str:
    """Return why a host was not reached, in words."""
    code = error.errno or 0
    return _UNREACHED.get(code) or (os.strerror(code).lower() if code else reason(error))
