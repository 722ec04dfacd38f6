"""The choice of interfaces, and the words where there is none: from reports alone."""

from __future__ import annotations

import json

import pytest

from lockstep.world.network import Interface
from lockstep.world.reachability import (
    Attempt,
    Card,
    Reach,
    choose,
    offers,
    problem,
    shown,
)

LO = Interface("lo", "127.0.0.1", loopback=True)
LABELS = ["node 0 (a)", "node 1 (b)", "node 2 (c)", "node 3 (d)"]


def eth(number: int, name: str = "eth0", net: int = 0) -> Interface:
    return Interface(name, f"10.{net}.0.{number}", loopback=False)


def card(number: int, *more: Interface) -> Card:
    return Card(f"token {number}", 4000 + number, (*more, eth(number)))


def reach(member: int, offer: int = 0, source: str = "eth0 10.0.0.1") -> Attempt:
    return Attempt(member, offer, source, "")


def miss(member: int, offer: int = 0, failure: str = "timed out", source: str = "eth0") -> Attempt:
    return Attempt(member, offer, source, failure)


def test_what_a_host_offers() -> None:
    docker, second = eth(7, "docker0"), Interface("eth0", "fd00::1", loopback=False)
    assert offers([LO, docker, eth(1), second]) == (eth(1), docker, LO)
    many = [eth(number, f"veth{number}") for number in range(40)]
    assert len(offers([LO, *many, eth(1)])) == 8
    assert offers([*many, eth(1)])[0] == eth(1)


def test_the_first_interface_that_all_reach() -> None:
    cards = [card(0), card(1, eth(1, "ib0", net=9)), card(2)]
    reports = [[miss(1, 0), reach(1, 1), reach(2)], [reach(0), reach(2)], [reach(0), *both()]]
    assert choose(cards, reports) == (
        Reach("eth0", "10.0.0.0"),
        Reach("eth0", "10.0.0.1"),
        Reach("eth0", "10.0.0.2"),
    )


def both() -> list[Attempt]:
    return [reach(1, 0), reach(1, 1)]


def test_the_interface_that_leads_to_the_others_is_preferred() -> None:
    cards = [card(0), card(1, eth(1, "ib0", net=9))]
    leaving = shown(eth(1))
    chosen = choose(cards, [both(), [reach(0, source=leaving)]])
    assert chosen is not None
    assert chosen[1] == Reach("eth0", "10.0.0.1")


def test_loopback_only_where_nothing_else_is_common() -> None:
    alone = Card("t", 1, (LO,))
    assert choose([alone, alone], [[reach(1)], [reach(0)]]) == (Reach("lo", "127.0.0.1"),) * 2
    two = Card("t", 1, (eth(1), LO))
    chosen = choose([two, two], [both(), [reach(0, 0), reach(0, 1, source=shown(LO))]])
    assert chosen == (Reach("eth0", "10.0.0.1"),) * 2


def test_one_member_has_nobody_to_reach() -> None:
    assert choose([Card("t", 1, (eth(1), LO))], [[]]) == (Reach("eth0", "10.0.0.1"),)


def test_a_pair_without_a_way() -> None:
    cards = [card(0), card(1), card(2)]
    reports = [[reach(1), reach(2)], [reach(0), miss(2)], [reach(0), miss(1, source="")]]
    assert choose(cards, reports) is None
    assert problem(cards, reports, LABELS).splitlines() == [
        "node 1 (b) and node 2 (c) cannot reach each other:",
        "  node 1 (b) from eth0 to eth0 10.0.0.2 port 4002: timed out",
        "  node 2 (c) from no interface to eth0 10.0.0.1 port 4001: timed out",
    ]


def test_one_way_is_said_to_be_one() -> None:
    cards = [card(0), card(1, LO)]
    reports = [[miss(1, 0, "connection refused"), miss(1, 1)], [reach(0)]]
    assert problem(cards, reports, LABELS).splitlines() == [
        "node 0 (a) cannot reach node 1 (b), though node 1 (b) reaches node 0 (a):",
        "  node 0 (a) from eth0 to eth0 10.0.0.1 port 4001: timed out",
    ]


def test_who_is_in_all_pairs_is_named() -> None:
    cards = [card(0), card(1), card(2), card(3)]
    reports = [[miss(2)], [miss(2)], [miss(0), miss(1), miss(3)], [miss(2)]]
    text = problem(cards, reports, LABELS)
    assert text.splitlines()[-1] == "all of these pairs have node 2 (c) in common"


def test_many_pairs_are_not_all_told() -> None:
    labels = [f"node {number}" for number in range(12)]
    cards = [card(number) for number in range(12)]
    reports = [[miss(other) for other in range(12) if other != one] for one in range(12)]
    lines = problem(cards, reports, labels).splitlines()
    assert lines[-1] == "and 60 more pairs"
    assert len(lines) == 6 * 3 + 1


def test_no_interface_in_common() -> None:
    cards = [card(0), card(1), Card("t", 4002, (eth(2, "eth0"), eth(2, "eth1", net=1)))]
    reports = [[reach(1), reach(2, 0), miss(2, 1)], [reach(0), miss(2, 0), reach(2, 1)]]
    reports.append([reach(0), reach(1)])
    assert choose(cards, reports) is None
    assert problem(cards, reports, LABELS).splitlines() == [
        "no interface of node 2 (c) is reached by all others; expected one that is:",
        "  node 0 (a) reaches eth0 10.0.0.2",
        "  node 1 (b) reaches eth1 10.1.0.2",
    ]


def test_cards_and_attempts_travel_as_json() -> None:
    sent = card(1, LO)
    assert Card.parse(json.loads(json.dumps(sent.plain()))) == sent
    attempt = miss(0)
    assert Attempt.parse(json.loads(json.dumps(attempt.plain())), [sent]) == attempt


@pytest.mark.parametrize(
    "told",
    [
        None,
        [],
        "card",
        {},
        {"token": "t", "port": 0, "offers": []},
        {"token": "t", "port": "80", "offers": []},
        {"token": "t" * 1000, "port": 80, "offers": []},
        {"token": "t", "port": 80, "offers": [["eth0", "10.0.0.1", False]] * 9},
        {"token": "t", "port": 80, "offers": [["eth0", 7, False]]},
        {"token": "t", "port": 80, "offers": [["eth0" * 99, "10.0.0.1", False]]},
    ],
)
def test_what_is_no_card(told: object) -> None:
    with pytest.raises(ValueError, match="no "):
        Card.parse(told)


@pytest.mark.parametrize(
    "told", [None, 3, [0, 5, "", ""], [9, 0, "", ""], [0, 0, "", None], [0, 0]]
)
def test_what_is_no_attempt(told: object) -> None:
    with pytest.raises(ValueError, match="no attempt"):
        Attempt.parse(told, [card(0)])
