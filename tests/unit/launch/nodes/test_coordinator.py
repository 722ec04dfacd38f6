"""What launcher 0 decides: no threads, no clocks, no network."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.launch.agent.failure import Decision, FailureReport, Kind, Verdict
from lockstep.launch.nodes.coordinator import (
    LOST_SECONDS,
    Coordinator,
    beat_seconds,
    lost_verdict,
)
from lockstep.launch.nodes.membership import Membership
from lockstep.launch.nodes.messages import Answer, LauncherReport
from lockstep.launch.nodes.reports import Reports
from lockstep.world.rendezvous.decode import decode


def membership(count: int) -> Membership:
    return Membership(
        index=0,
        ranks=(1,) * count,
        nodes=tuple(range(count)),
        names=tuple(f"node {k} (host{k})" for k in range(count)),
        address="127.0.0.1",
        interface=None,
    )


def make(
    count: int = 3, *, least: int | None = None, again: str | None = None, generation: int = 0
) -> Coordinator:
    """Make a coordinator that has heard all launchers at time 0."""
    coordinator = Coordinator(
        membership(count), 0.0, policy=lambda _: again, least=least, generation=generation
    )
    for index in range(count):
        say(coordinator, index, generation=generation)
    return coordinator


def say(coordinator: Coordinator, index: int, now: float = 0.0, **news: Any) -> Answer:
    return coordinator.receive(LauncherReport(**{"index": index, "generation": 0, **news}), now)


def verdict(rank: int) -> Verdict:
    return Verdict(
        text=f"rank {rank} failed", exit_code=1, name=f"rank {rank}", traceback="Traceback …"
    )


def told(rank: int, *, when: float = 1.0, consequence: bool = False) -> FailureReport:
    return FailureReport(verdict=verdict(rank), consequence=consequence, time=when)


def kind(coordinator: Coordinator) -> str | None:
    return None if coordinator.decision is None else coordinator.decision.kind


def end(rank: int) -> Decision:
    return Decision(kind="end", verdict=verdict(rank))


@given(st.lists(st.tuples(st.booleans(), st.floats(0, 9)), min_size=1))
def test_causes_come_before_consequences_and_early_before_late(
    given_told: list[tuple[bool, float]],
) -> None:
    all_told = [told(0, when=when, consequence=one) for one, when in given_told]
    first = min(all_told, key=lambda one: one.order)
    assert not first.consequence or all(one.consequence for one in all_told)
    assert all(one.time >= first.time for one in all_told if one.consequence == first.consequence)


def test_what_is_said_survives_json() -> None:
    odd = Verdict(
        text="é\n\udcff\0 '\"", exit_code=137, name="rank 3", traceback=None, kind=Kind.HANG
    )
    said = LauncherReport(
        index=2, generation=5, failure=FailureReport(verdict=odd, consequence=True, time=1.5)
    )
    assert decode(LauncherReport, json.loads(json.dumps(asdict(said)))) == said
    answer = Answer(decision=Decision(kind="round", text="x", verdict=odd, staying=(0, 2)), port=7)
    assert decode(Answer, json.loads(json.dumps(asdict(answer)))) == answer


# The end.


def test_all_are_done_when_each_is() -> None:
    coordinator = make()
    assert say(coordinator, 0, done=True).decision is None
    assert say(coordinator, 2, done=True).decision is None
    assert say(coordinator, 1, done=True).decision == Decision(kind="done")
    assert say(coordinator, 0, done=True).decision == Decision(kind="done")


@pytest.mark.parametrize("index", [0, 1, 2])
def test_a_cause_ends_a_launch_at_once(index: int) -> None:
    coordinator = make()
    assert say(coordinator, index, failure=told(7)).decision == end(7)
    assert say(coordinator, 1 - index % 2).decision == end(7)


def test_the_cause_of_consequences_is_waited_for() -> None:
    coordinator = make()
    assert say(coordinator, 0, 1.0, failure=told(0, consequence=True)).decision is None
    assert say(coordinator, 2, 1.5, failure=told(2, consequence=True, when=0.5)).decision is None
    assert say(coordinator, 1, 2.0, failure=told(1, when=9.0)).decision == end(1)


def test_consequences_of_all_need_no_wait() -> None:
    coordinator = make()
    for index in range(3):
        say(coordinator, index, failure=told(index, consequence=True, when=9.0 - index))
    assert coordinator.decision == end(2)


def test_a_cause_that_never_comes_is_not_waited_for() -> None:
    coordinator = make()
    say(coordinator, 1, 1.0, failure=told(1, consequence=True))
    for now in (1.5, 2.5, 3.5):
        say(coordinator, 2, now)
        say(coordinator, 1, now, failure=told(1, consequence=True))
    assert coordinator.decision == end(1)


def test_a_launcher_that_is_silent_may_be_the_cause() -> None:
    coordinator = make(2)
    for now in range(1, 15):
        say(coordinator, 0, float(now), failure=told(0, consequence=True))
        assert coordinator.decision is None
    say(coordinator, 0, 15.5, failure=told(0, consequence=True))
    assert coordinator.decision is not None
    assert coordinator.decision.verdict == lost_verdict(
        "node 1 (host1)", "no sign of its launcher for 15 s"
    )
    assert coordinator.decision.verdict.kind is Kind.LOST


# Lost launchers.


def test_one_that_falls_silent_is_lost() -> None:
    coordinator = make()
    for now in (5.0, 10.0, 15.5):
        say(coordinator, 1, now)
        coordinator.look(now)
    assert coordinator.decision is not None
    assert coordinator.decision.kind == "end"
    assert coordinator.decision.verdict is not None
    assert "node 2 (host2) was lost: no sign" in coordinator.decision.verdict.text


def test_one_that_hangs_up_has_a_moment_to_call_again() -> None:
    coordinator = make()
    coordinator.disconnect(1, 1.0)
    coordinator.look(3.0)
    say(coordinator, 1, 3.1)
    coordinator.look(6.0)
    assert kind(coordinator) is None
    coordinator.disconnect(1, 7.0)
    coordinator.look(9.6)
    assert coordinator.decision is not None
    assert "its launcher has ended" in str(coordinator.decision.verdict)


def test_launcher_0_is_never_silent_to_itself() -> None:
    coordinator = make(1, least=1)
    coordinator.look(1000.0)
    assert coordinator.decision is None


def test_an_elastic_launch_goes_on_without_the_lost() -> None:
    coordinator = make(4, least=1)
    for index in (0, 1, 3):
        say(coordinator, index, 14.0)
    coordinator.disconnect(3, 14.0)
    for index in (0, 1):
        say(coordinator, index, 15.5)
    assert coordinator.decision is not None
    assert (coordinator.decision.kind, coordinator.decision.staying) == ("round", (0, 1, 3))
    coordinator = make(4, least=1)
    coordinator.disconnect(3, 1.0)
    say(coordinator, 1, 2.0)
    say(coordinator, 2, 2.0)
    coordinator.look(4.0)
    assert coordinator.decision is not None
    assert coordinator.decision.staying == (0, 1, 2), "the others were silent for a moment only"
    assert coordinator.decision.text.startswith("node 3 (host3) was lost")


def test_one_that_cannot_reach_launcher_0_is_lost_at_once() -> None:
    coordinator = make(least=1)
    coordinator.note([-1, 0, 1], [], 2.0)
    assert coordinator.decision is not None
    assert (coordinator.decision.kind, coordinator.decision.staying) == ("round", (0, 2))


# Restarts.


def test_a_failure_that_may_pass_starts_all_again() -> None:
    coordinator = make(again="rank 1 was killed; restart 1")
    restart = Decision(kind="restart", text="rank 1 was killed; restart 1")
    assert say(coordinator, 1, failure=told(1)).decision == restart
    assert say(coordinator, 1, generation=1).decision is None, "it is ahead of launcher 0"
    assert say(coordinator, 0).decision == restart
    coordinator.enter(1)
    say(coordinator, 0, generation=1)
    assert say(coordinator, 2).decision == restart, "it is late"
    assert not coordinator.all_entered
    assert say(coordinator, 2, generation=1) == Answer(generation=1)
    assert coordinator.all_entered, "now all are"
    coordinator.open(77)
    assert say(coordinator, 1, generation=1) == Answer(generation=1, port=77)
    assert say(coordinator, 2, done=True) == Answer(decision=restart), (
        "what is of an earlier generation"
    )


def test_a_launcher_that_is_lost_on_the_way_to_the_next_generation() -> None:
    coordinator = make(2, again="again")
    say(coordinator, 0, failure=told(0))
    coordinator.enter(1)
    say(coordinator, 0, generation=1)
    coordinator.look(15.5)
    assert kind(coordinator) == "end"
    coordinator.enter(2)
    assert kind(coordinator) == "end", "the last decision stays"


# Rounds.


def test_one_that_leaves_is_not_waited_for() -> None:
    coordinator = make(least=1)
    decision = say(coordinator, 0, leaves="stopped by SIGTERM on node 0").decision
    expected = Decision(kind="round", text="stopped by SIGTERM on node 0", staying=(1, 2))
    assert decision == say(coordinator, 2).decision == expected
    assert not coordinator.all_have_heard
    say(coordinator, 2, heard=True)
    assert not coordinator.all_have_heard
    say(coordinator, 1, heard=True)
    assert coordinator.all_have_heard


def test_one_that_leaves_and_could_save() -> None:
    coordinator = make(3, least=2)
    assert say(coordinator, 1, 1.0, leaves="b", saves=True).decision is None, "others may leave too"
    assert say(coordinator, 2, 2.0).decision == Decision(kind="round", text="b", staying=(0, 2))


def test_all_leave_and_save_first() -> None:
    coordinator = make(3, least=2)
    for index, now in ((1, 1.0), (2, 1.2)):
        assert say(coordinator, index, now, leaves="x", saves=True) == Answer()
    assert say(coordinator, 0, 2.0) == Answer(saves=True), "ranks of all save together"
    for index in (0, 1):
        assert say(coordinator, index, 2.1, leaves="x", saves=True, done=True) == Answer(saves=True)
    done = Decision(kind="done")
    assert say(coordinator, 2, 2.2, leaves="x", saves=True, done=True).decision == done


def test_one_that_comes_begins_a_round() -> None:
    coordinator = make(least=1)
    coordinator.note([], [], 0.1)
    assert kind(coordinator) is None
    coordinator.note([], ["c"], 0.2)
    assert coordinator.decision == Decision(kind="round", text="c comes", staying=(0, 1, 2))


def test_nobody_is_let_in_at_the_end() -> None:
    coordinator = make(2, least=1)
    say(coordinator, 1, done=True)
    coordinator.note([], ["c", "d"], 0.2)
    assert coordinator.decision is None
    assert say(coordinator, 0, done=True).decision == Decision(kind="done")


def test_a_round_that_was_overtaken_is_over() -> None:
    coordinator = make(least=1)
    coordinator.supersede()
    assert say(coordinator, 1).decision == Decision(
        kind="round", text="a newer round has begun without this node"
    )


# Many launchers.


@pytest.mark.parametrize(
    ("count", "seconds"), [(2, 0.25), (250, 0.25), (251, 0.251), (3000, 3.0), (3001, 3.0)]
)
def test_many_launchers_report_less_often(count: int, seconds: float) -> None:
    assert beat_seconds(count) == seconds
    assert 5 * seconds <= LOST_SECONDS


@pytest.mark.parametrize(("count", "silent"), [(300, 217), (1000, 999)])
def test_one_of_many_that_falls_silent_is_named(count: int, silent: int) -> None:
    coordinator, beat = make(count, least=1), beat_seconds(count)
    beats = int(LOST_SECONDS / beat)
    for number in range(1, beats + 2):
        assert kind(coordinator) is None, f"{number} of {beats} intervals have passed"
        for index in range(count):
            if index != silent:
                say(coordinator, index, number * beat)
    assert coordinator.decision is not None
    assert f"node {silent} (host{silent}) was lost: no sign" in coordinator.decision.text
    assert coordinator.decision.staying == tuple(k for k in range(count) if k != silent)


def test_consequences_wait_for_an_interval_of_many_launchers() -> None:
    """Of 1,000 launchers, which report once a second, none is silent after 1.9 seconds."""
    coordinator = make(1000)
    consequence = told(1, consequence=True)
    say(coordinator, 1, 0.0, failure=consequence)
    for index in range(2, 1000):
        say(coordinator, index, 0.3)
    say(coordinator, 1, 2.1, failure=consequence)
    assert coordinator.decision == end(1)
    coordinator = make(1000)
    say(coordinator, 1, 0.0, failure=consequence)
    say(coordinator, 1, 2.1, failure=consequence)
    assert coordinator.decision is None, "the others may be the cause"


def report_of(data: st.DataObject) -> LauncherReport:
    failure = data.draw(st.sampled_from([None, told(1), told(2, consequence=True)]))
    return LauncherReport(
        index=data.draw(st.integers(0, 3)),
        generation=data.draw(st.integers(0, 2)),
        done=data.draw(st.booleans()),
        failure=failure,
        leaves=data.draw(st.sampled_from(["", "stopped"])),
    )


@given(st.data())
def test_counts_are_those_of_the_last_reports(data: st.DataObject) -> None:
    reports, generation = Reports(4, 0), 0
    last = {index: LauncherReport(index=index, generation=-1) for index in range(4)}
    for _ in range(data.draw(st.integers(1, 12))):
        if data.draw(st.integers(0, 3)) == 0:
            generation = data.draw(st.integers(0, 2))
            reports.begin(generation)
        else:
            one = report_of(data)
            last[one.index] = one
            reports.store(one)
    here = {k for k, one in last.items() if one.generation == generation}
    failed = {k: failure for k in here if (failure := last[k].failure) is not None}
    assert reports.here == here
    assert reports.done == {k for k in here if last[k].done}
    assert reports.failures() == [failed[k] for k in sorted(failed)]
    assert reports.causes == {k for k, failure in failed.items() if not failure.consequence}
    assert reports.leaving == {k for k, one in last.items() if one.leaves}
