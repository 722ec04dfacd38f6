"""Check the network between nodes: host names, interfaces, connections in both directions, clocks."""

from __future__ import annotations

from collections.abc import Iterator

from lockstep.errors import UnreachableError, UsageError
from lockstep.tools.doctor.check import (
    Facts,
    Finding,
    NodeReports,
    Options,
    check,
    listed,
    one_line,
)
from lockstep.tools.doctor.node_rendezvous import NodeGroup
from lockstep.world import host
from lockstep.world.network import addresses_of, interfaces, is_loopback
from lockstep.world.rendezvous.connectivity_check import CLOCK_TOLERANCE, check_connectivity


def _look_names(asked: Options) -> Facts:
    names = dict.fromkeys((host.name(), *filter(None, (asked.address,))))
    found = {}
    for name in names:
        try:
            found[name] = list(addresses_of(name))
        except UnreachableError:
            found[name] = []
    return {"own": host.name(), "addresses": found}


@check("names", look=_look_names)
def names(seen: NodeReports) -> Iterator[Finding]:
    """Yield findings on host names that resolve only to loopback addresses, or to none.

    Other nodes cannot reach this node under such a name.
    """
    fine = []
    for label, facts in seen.of("names"):
        for name, addresses in facts["addresses"].items():
            text = (
                f"{seen.on(label)}{name} is {', '.join(addresses) or 'not known to the resolver'}"
            )
            if (seen.alone and not seen.missed) or not all(map(is_loopback, addresses)):
                if name == facts["own"]:
                    fine.append(text)
                continue
            which = "its own name" if name == facts["own"] else "the host of the rendezvous"
            advice = "give it the address of the network in /etc/hosts: Gloo, NCCL and torchrun may use it"
            yield Finding("warning", f"{text}: {which} leads to no other node", advice)
    if fine:
        yield Finding("ok", "; ".join(fine))


def _connect(rendezvous: NodeGroup, _: NodeReports, __: Options) -> Facts:
    """Connect all nodes to each other; return the address at which each node was reached.

    If a node cannot be reached, the error message is returned. The facts also have this node's interfaces,
    and warnings about clocks.
    """
    own = [str(one) for one in interfaces() if not one.loopback]
    facts: dict[str, Facts] = {"interfaces": own, "clocks": []}
    if not rendezvous.several_hosts:
        return facts | {"alone": True}
    try:
        rendezvous.reach = check_connectivity(
            rendezvous.part("network"),
            index=rendezvous.index,
            labels=rendezvous.labels,
            interface=rendezvous.interface,
            patience=10,
            warn=facts["clocks"].append,
        )
    except UsageError as error:
        return facts | {"problem": one_line(error.message), "hint": error.hint}
    return facts | {"reach": [str(one) for one in rendezvous.reach]}


@check("network", together=_connect, seconds=40)
def network(seen: NodeReports) -> Iterator[Finding]:
    """Yield findings on pairs of nodes of which one cannot connect to the other."""
    answers = seen.of("network")
    if not answers:
        return
    facts = answers[0][1]
    if "problem" in facts:
        yield Finding("failure", facts["problem"], facts["hint"] or "")
    elif "reach" in facts:
        places = zip(seen.labels, facts["reach"], strict=True)
        text = ", ".join(f"{label} at {place}" for label, place in places)
        yield Finding("ok", f"{text}; each connects to each other")
    else:
        each = [(label, ", ".join(one["interfaces"]) or "no interface") for label, one in answers]
        why = "the other nodes did not come" if seen.missed else "one host"
        yield Finding("ok", f"{listed(each, seen)}; {why}, nothing to connect to")


@check("clocks")
def clocks(seen: NodeReports) -> Iterator[Finding]:
    """Yield findings on nodes whose clock differs from that of node 0."""
    answers = [facts for _, facts in seen.of("network")]
    for text in answers[0]["clocks"] if answers else ():
        yield Finding("warning", text, "set it: timedatectl set-ntp true, or chronyc makestep")
    why = ""
    if seen.missed:
        why = "not compared: the other nodes did not come"
    elif answers and "alone" in answers[0]:
        why = "one host has one clock"
    elif not answers and not any("network" in one["problems"] for one in seen.reports):
        why = "not compared: a node was lost before"
    elif not answers or ("problem" in answers[0] and not answers[0]["clocks"]):
        why = "not compared: the network check failed"
    if why:
        yield Finding("skipped", why)
    elif not answers[0]["clocks"]:
        yield Finding("ok", f"within {CLOCK_TOLERANCE:g} s of that of {seen.labels[0]}")
