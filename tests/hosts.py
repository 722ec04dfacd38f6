"""Hosts on one machine: network namespaces, with host names and cables of their own.

    a, b = hosts.lan(2)                     # "a" and "b", plugged into one switch at eth0
    b.dead_end("eth1", "10.9.0.2/24")       # an interface that leads nowhere
    process = b.start(sys.executable, "script.py")

Everything goes with the `with` block: processes, namespaces, names; what a killed run of the tests
left behind, with the next one.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import pytest

from tests.conftest import Done, template_of
from tests.namespaces import NAMES
from tests.template import Forked, Template

_PREFIX = "lockstep-tests"
_IP = shutil.which("ip") or "ip"
_TC = shutil.which("tc") or "tc"
_NFT = shutil.which("nft") or "nft"
#: Gives the command a host name of its own, and hides directories that this host does not share.
_ENTER = """
echo "$1" >/proc/sys/kernel/hostname
if [ -n "$2" ]; then mount -t tmpfs none "$2"; fi
shift 2; exec "$@"
"""


def missing() -> str | None:
    """Return what this machine lacks for hosts, or `None`."""
    if os.geteuid() != 0:
        return "needs root, to make network namespaces"
    for program in ("ip", "tc", "unshare"):
        if shutil.which(program) is None:
            return f"needs network namespaces: {program} is not installed"
    probe = _namespace("probe")
    made = subprocess.run([_IP, "netns", "add", probe], capture_output=True, text=True, check=False)
    _remove(probe)
    return f"needs network namespaces: {made.stderr.strip()}" if made.returncode else None


def wait_until(condition: Callable[[], bool], what: str, seconds: float = 60) -> None:
    """Wait until something holds."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


@dataclass
class Host:
    """A namespace with a host name.

    Attributes:
        name: of the host; the others know it once it is plugged in.
        namespace: the system's name of it.
        address: where it was plugged in first.
        template: the process that modules of Python are forked from, if any.
    """

    name: str
    namespace: str
    address: str = ""
    template: Template | None = None
    _started: list[subprocess.Popen[str]] = field(default_factory=list)

    def ip(self, *words: str) -> str:
        """Run `ip` on this host; return its output."""
        return _ip("-n", self.namespace, *words)

    def raise_up(self, interface: str, address: str) -> None:
        """Give an interface an address, and wait until it runs: the kernel tells within a second."""
        self.ip("address", "add", address, "dev", interface)
        self.ip("link", "set", interface, "up")
        for _ in range(200):
            if " state UP " in self.ip("-o", "link", "show", "dev", interface):
                return
            time.sleep(0.02)
        pytest.fail(f"{interface} of {self.name} does not come up")

    def dead_end(self, interface: str, address: str) -> None:
        """Add an interface that is up, has an address, and leads nowhere: nobody answers behind it."""
        other = f"x{secrets.token_hex(4)}"
        self.ip("link", "add", interface, "type", "veth", "peer", "name", other)
        self.ip("link", "set", other, "up")
        self.raise_up(interface, address)

    def bridge(self, interface: str, address: str) -> None:
        """Add a bridge with an address and nothing plugged in, as Docker makes one on every host."""
        self.ip("link", "add", interface, "type", "bridge")
        self.ip("address", "add", address, "dev", interface)
        self.ip("link", "set", interface, "up")

    def slow(self, rate: str, interface: str = "eth0") -> None:
        """Let what leaves an interface leave no faster than `rate`, such as `100mbit`; needs `tc`."""
        bucket = ("tbf", "rate", rate, "burst", "64kb", "latency", "50ms")
        program = (_TC, "qdisc", "add", "dev", interface, "root", *bucket)
        _ip("netns", "exec", self.namespace, *program)

    def lose(self, percent: int) -> None:
        """Drop this share of the packets that arrive, at random; needs `nft` of nftables."""
        for words in (
            "add table inet loss",
            "add chain inet loss input { type filter hook input priority 0; }",
            f"add rule inet loss input numgen random mod 100 < {percent} counter drop",
        ):
            _ip("netns", "exec", self.namespace, _NFT, words)

    def lost(self) -> int:
        """Return how many packets `lose` has dropped."""
        text = _ip("netns", "exec", self.namespace, _NFT, "list ruleset")
        return int(re.findall(r"counter packets (\d+)", text)[0])

    def sent(self, interface: str = "eth0") -> int:
        """Return how many bytes have left an interface."""
        text = self.ip("-s", "-j", "link", "show", "dev", interface)
        return int(json.loads(text)[0]["stats64"]["tx"]["bytes"])

    def start(
        self,
        *command: str,
        env: dict[str, str] | None = None,
        cwd: Path | None = None,
        hidden: Path | None = None,
    ) -> subprocess.Popen[str]:
        """Start a command on this host, in a session of its own.

        Args:
            command: program and arguments.
            env: variables besides those of this process.
            cwd: where it runs.
            hidden: a directory that this host does not share with the others: it sees an empty one.
        """
        environ, place = {**os.environ, **(env or {})}, str(hidden or "")
        process: subprocess.Popen[str]
        if self.template is not None and command[:2] == (sys.executable, "-m"):
            _, _, module, *words = command
            host = (self.namespace, self.name, place)
            process = Forked(
                self.template, words, cwd or Path.cwd(), environ, module=module, host=host
            )
        else:
            enter = ("unshare", "--uts", "sh", "-ec", _ENTER, "sh", self.name, place)
            process = subprocess.Popen(
                [_IP, "netns", "exec", self.namespace, *enter, *command],
                cwd=cwd,
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
        self._started.append(process)
        return process

    def close(self) -> None:
        """Kill what still runs here, and remove the namespace."""
        for process in self._started:  # it may be on its way into the namespace still
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
        _remove(self.namespace)
        for process in self._started:
            process.communicate(timeout=10)


class Switch:
    """A switch: hosts that are plugged into it reach each other."""

    def __init__(self, hosts: Hosts) -> None:
        self._hosts = hosts
        self._inside = hosts.host(f"switch{secrets.token_hex(2)}")
        self._inside.ip("link", "add", "lan", "type", "bridge")
        self._inside.ip("link", "set", "lan", "up")

    def plug(self, host: Host, address: str, interface: str = "eth0") -> None:
        """Connect an interface of `host`, new, with an address such as `10.0.0.1/24`."""
        port = self._port(host)
        peer = ("type", "veth", "peer", "name", port, "netns", self._inside.namespace)
        host.ip("link", "add", interface, *peer)
        self._inside.ip("link", "set", port, "master", "lan", "up")
        host.raise_up(interface, address)
        host.address = host.address or address.partition("/")[0]
        self._hosts.tell_names()

    def part(self, one: Host, other: Host) -> None:
        """Let nothing through between two hosts; each still reaches the rest."""
        for host in (one, other):
            kind = ("type", "bridge_slave")
            self._inside.ip("link", "set", self._port(host), *kind, "isolated", "on")

    def cut(self, host: Host) -> None:
        """Pull a host's cable."""
        self._inside.ip("link", "set", self._port(host), "down")

    def unplug(self, host: Host) -> None:
        """Remove a host's cable, so that another host of this name can be plugged in."""
        self._inside.ip("link", "del", self._port(host))

    def mend(self, host: Host) -> None:
        """Put it back."""
        self._inside.ip("link", "set", self._port(host), "up")

    @staticmethod
    def _port(host: Host) -> str:
        return f"to-{host.name}"[:15]


class Hosts:
    """Makes hosts, and removes them at the end of a `with` block.

    Args:
        template: the process that modules of Python are forked from, if any.
    """

    def __init__(self, template: Template | None = None) -> None:
        self._template = template
        self._made: dict[str, Host] = {}
        self._subnets = itertools.count(70)

    def __enter__(self) -> Self:
        _sweep()
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.ExitStack() as stack:  # all of them, also if one does not close
            for host in self._made.values():
                stack.callback(host.close)

    def host(self, name: str) -> Host:
        """Make a host with a loopback interface and nothing else."""
        made = Host(name, _namespace(name), template=self._template)
        self._made[name] = made
        _ip("netns", "add", made.namespace)
        made.ip("link", "set", "lo", "up")
        return made

    def switch(self) -> Switch:
        """Make a switch."""
        return Switch(self)

    def lan(self, count: int) -> list[Host]:
        """Make hosts `a`, `b`, … that reach each other at `eth0`."""
        switch = self.switch()
        made = [self.host(name) for name in "abcdefgh"[:count]]
        self.plug_all(switch, made)
        return made

    def plug_all(self, switch: Switch, hosts: list[Host], interface: str = "eth0") -> None:
        """Plug hosts into a switch, in a subnet of their own."""
        subnet = next(self._subnets)
        for number, host in enumerate(hosts, 1):
            switch.plug(host, f"10.{subnet}.0.{number}/24", interface)

    def tell_names(self) -> None:
        """Let all hosts know the names of all that have an address."""
        known = [host for host in self._made.values() if host.address]
        lines = ["127.0.0.1 localhost", *(f"{host.address} {host.name}" for host in known)]
        for host in known:
            directory = NAMES / host.namespace
            directory.mkdir(parents=True, exist_ok=True)
            (directory / "hosts").write_text("\n".join(lines) + "\n")

    def finish(
        self, processes: list[subprocess.Popen[str]], timeout: float = 60, *, code: int | None = 0
    ) -> list[Done]:
        """Wait for the end of all processes; `code` is the exit code they must have."""
        done = []
        for process in processes:
            try:
                out, err = process.communicate(timeout=timeout)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                out, err = process.communicate(timeout=10)
                pytest.fail(f"no end after {timeout} s\n--- out\n{out}\n--- err\n{err}")
            done.append(Done(process.returncode, out, err))
        assert all(code in (None, one.code) for one in done), done
        return done


def require() -> None:
    """Skip a test where hosts cannot be made."""
    reason = missing()
    if reason is not None:
        pytest.skip(reason)


@pytest.fixture
def hosts(request: pytest.FixtureRequest) -> Iterator[Hosts]:
    """Makes hosts, whose commands come from a template in tests marked `forked`; skips where it cannot."""
    require()
    with Hosts(template_of(request)) as made:
        yield made


def _namespace(name: str) -> str:
    return f"{_PREFIX}-{os.getpid()}-{secrets.token_hex(3)}-{name}"


def _ip(*words: str) -> str:
    done = subprocess.run([_IP, *words], capture_output=True, text=True, timeout=20, check=False)
    assert done.returncode == 0, f"ip {' '.join(words)}: {done.stderr}"
    return done.stdout


def _sweep() -> None:
    """Remove the namespaces of test runs that were killed."""
    listed = subprocess.run([_IP, "netns"], capture_output=True, text=True, check=False).stdout
    for name in (line.split()[0] for line in listed.splitlines() if line.strip()):
        owner = name.removeprefix(f"{_PREFIX}-").partition("-")[0]
        if name.startswith(_PREFIX) and not Path(f"/proc/{owner}").exists():
            _remove(name)


def _remove(namespace: str) -> None:
    """Remove a namespace, and kill what runs in it: nobody else can be in one with this name."""
    inside = subprocess.run(
        [_IP, "netns", "pids", namespace], capture_output=True, text=True, check=False
    )
    for pid in inside.stdout.split():
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)
    subprocess.run([_IP, "netns", "del", namespace], capture_output=True, check=False)
    shutil.rmtree(NAMES / namespace, ignore_errors=True)
    with contextlib.suppress(OSError):  # another run may have names there
        NAMES.rmdir()
