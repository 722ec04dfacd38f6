"""Network interfaces of this host, addresses of other hosts, and listening sockets.

Host names are looked up in DNS first. On clusters without DNS, the name often contains the address
(`SH-IDC1-10-5-36-65` is 10.5.36.65), or Slurm's configuration has the address.
"""

from __future__ import annotations

import errno
import ipaddress
import os
import re
import resource
import socket
import sys
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from lockstep.errors import UnreachableError, UsageError, WorldError

#: Maximum seconds of a DNS lookup, which can take half a minute without a network.
_RESOLVER_SECONDS = 3.0
_CARRIED = re.compile(r"(?:^|\D)(\d{1,3})[-_](\d{1,3})[-_](\d{1,3})[-_](\d{1,3})$")
#: Port for a UDP socket that sends nothing, and only queries the routing table.
_NO_PORT = 9
LOOPBACK = "127.0.0.1"
#: Number of open files of a launcher besides connections.
_OWN_FILES = 256
#: Environment variables that set the network interface of Gloo, NCCL and TensorPipe.
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
    """A network interface of a host that is up, with one of its addresses (IPv4 or global IPv6)."""

    name: str
    address: str

    @property
    def loopback(self) -> bool:
        """Whether the address is a loopback address, which only processes of the same host reach."""
        return is_loopback(self.address)

    def __str__(self) -> str:
        """Return name and address as text."""
        return f"{self.name} {self.address}"


def interfaces() -> tuple[Interface, ...]:
    """Return an `Interface` for each address of the interfaces that are up, except link-local ones.

    Interfaces are in the system's order, each with its IPv4 addresses before its IPv6 addresses.
    """
    import psutil

    states = psutil.net_if_stats()
    found = []
    for name, addresses in psutil.net_if_addrs().items():
        for family in (socket.AF_INET, socket.AF_INET6):
            for text in [entry.address for entry in addresses if entry.family == family]:
                is_local = ipaddress.ip_address(text).is_link_local
                if name in states and states[name].isup and not is_local:
                    found.append(Interface(name, text))
    return tuple(found)


def first_addresses(found: Iterable[Interface]) -> list[Interface]:
    """Return each interface of `found` once, with its first address, which Gloo and NCCL use."""
    first: dict[str, Interface] = {}
    for interface in found:
        first.setdefault(interface.name, interface)
    return list(first.values())


def named(name: str) -> Interface:
    """Return the interface `name` with its first address.

    Raises:
        UsageError: if the interface does not exist, is down or has no address.
    """
    there = first_addresses(interfaces())
    for interface in there:
        if interface.name == name:
            return interface
    names = ", ".join(f"{one.name} ({one.address})" for one in there) or "none"
    exists = any(name == known for _, known in socket.if_nameindex())
    why = "is down or has no address" if exists else "does not exist"
    raise UsageError(
        f"the interface {name!r} {why} on {socket.gethostname()}; expected one of: {names}",
        hint="--interface NAME or LOCKSTEP_INTERFACE; without it, the interface is found by trying",
    )


def interface_towards(address: str, among: Sequence[Interface] | None = None) -> Interface | None:
    """Return the interface on the route to an IP address, without sending a packet.

    Returns `None` if there is no route, or if the interface is not in `among`, by default all interfaces
    that are up.
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
    """Return the IP addresses of `host`, a name or an address.

    The address of a name is sought in DNS (for a few seconds at most), then in the name itself, then in
    Slurm's configuration.

    Raises:
        UnreachableError: if the name has no address; the message has the three results.
    """
    literal = _literal(host.removeprefix("[").removesuffix("]"))
    if literal is not None:
        return (str(literal),)
    answer = _resolve(host)
    if isinstance(answer, tuple):
        return answer
    carried = carried_address(host)
    if carried is not None:
        return (carried,)
    from lockstep.world import slurm_nodes

    known = slurm_nodes.address(host)
    if known is not None:
        answer = (known,) if _literal(known) else _resolve(known)
    if isinstance(answer, tuple):
        return answer
    raise UnreachableError(
        f"the host name {host!r} has no address: the resolver {answer}; "
        "the name carries none; Slurm does not know it",
        hint="give the address itself, or add the name to /etc/hosts",
    )


def carried_address(host: str) -> str | None:
    """Return the IPv4 address at the end of a host name, as in `ip-10-0-3-7`; `None` if there is none."""
    found = _CARRIED.search(host.partition(".")[0])
    text = ".".join(str(int(part)) for part in found.groups()) if found else ""
    address = _literal(text)
    if address is None or address.is_loopback or address.is_multicast or address.is_unspecified:
        return None
    return None if address.is_reserved else text


def _literal(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """Return the IP address that `text` is; `None` for the name of a host."""
    try:
        return ipaddress.ip_address(text)
    except ValueError:
        return None


def _resolve(host: str) -> tuple[str, ...] | str:
    """Return the addresses of a host name from DNS, or a text that says why there are none."""
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

    # In a daemon thread, since the call cannot be interrupted.
    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(_RESOLVER_SECONDS)
    return answers[0] if answers else f"did not answer within {_RESOLVER_SECONDS:g} s"


def listen(port: int, *, loopback: bool) -> socket.socket:
    """Return a socket that listens at `port`, on the loopback interface or on all interfaces.

    Raises:
        OSError: if the port is not free.
        WorldError: if the limit of open files is reached.
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


def require_files(connections: int, more: int) -> None:
    """Raise this process's limit of open files for `connections` sockets, and if possible `more`.

    Raises:
        WorldError: if the host does not allow as many files as `connections` need.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = sys.maxsize if hard == resource.RLIM_INFINITY else hard
    if allowed < connections + _OWN_FILES:
        raise WorldError(
            f"this host allows {hard} open files for a process; {connections} other launchers need "
            f"{connections + _OWN_FILES}",
            hint="raise the hard limit of open files (ulimit -Hn) on the host of launcher 0",
        )
    wanted = min(allowed, connections + more + _OWN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def listens_locally(address: str | None) -> bool:
    """Return whether clients of `address` connect to 127.0.0.1, so that a server can listen there only."""
    return address in ("localhost", LOOPBACK)


def is_loopback(address: str | None) -> bool:
    """Return whether an address or host name is a loopback address."""
    literal = _literal(address or "")
    return address == "localhost" or (literal is not None and literal.is_loopback)


def is_here(address: str) -> bool:
    """Return whether an address or host name belongs to this host.

    Raises:
        UnreachableError: if a host name has no address.
    """
    if is_loopback(address) or address == socket.gethostname():
        return True
    own = {interface.address for interface in interfaces()}
    # Some systems let a host's own name mean an address of the loopback interface.
    return any(found in own or is_loopback(found) for found in addresses_of(address))


def reason(error: OSError) -> str:
    """Return the system's message for an `OSError`, in lower case."""
    if isinstance(error, TimeoutError):
        return "timed out"
    return (error.strerror or str(error)).lower()


def why_unreached(error: OSError) -> str:
    """Return a message that says why a connection to a host failed."""
    code = error.errno or 0
    return _UNREACHED.get(code) or (os.strerror(code).lower() if code else reason(error))
