from __future__ import annotations

from lockstep.state.record.curves import curves, split_generations, without_superseded
from lockstep.state.record.reading import Event


def start(time: float, step: int = 0) -> Event:
    return {"time": time, "kind": "start", "step": step}


def resume(time: float, step: int) -> Event:
    return {"time": time, "kind": "resume", "step": step, "source": "memory"}


def logs(time: float, *steps: int, replica: int | None = 0, **values: float) -> list[Event]:
    return [
        {
            "time": time + step / 100,
            "kind": "log",
            "epoch": 0,
            "step": step,
            "replica": replica,
            **values,
        }
        for step in steps
    ]


def steps(events: list[Event]) -> list[int]:
    return [event["step"] for event in events if event["kind"] == "log"]


def test_a_start_and_its_resume_are_one_beginning() -> None:
    events = [
        start(0),
        *logs(0, 1),
        start(9, 1),
        resume(9, 1),
        *logs(9, 2),
        start(20, 2),
    ]
    assert [
        (generation.step, generation.time, len(generation.events))
        for generation in split_generations(events)
    ] == [
        (0, 0, 2),
        (1, 9, 3),
        (2, 20, 1),
    ]


def test_each_step_has_the_value_that_was_computed_last() -> None:
    events = [start(0), *logs(0, 1, 2, 3, loss=9.0), start(5, 1), *logs(5, 2, 3, 4, loss=1.0)]
    assert curves({0: events}) == {"loss": {1: 9.0, 2: 1.0, 3: 1.0, 4: 1.0}}


def test_a_generation_from_further_back_supersedes_all_before_it() -> None:
    events = [start(0), *logs(0, 1, 2), start(5, 2), *logs(5, 3, 4), start(9, 1), *logs(9, 2)]
    assert steps(without_superseded({0: events})[0]) == [1, 2]


def test_ranks_that_a_later_generation_lacks() -> None:
    main = [start(0), *logs(0, 1, 2, 3), start(5, 1), *logs(5, 2, 3)]
    other = [start(0.4), *logs(0.4, 1, 2, 3)]
    kept = without_superseded({0: main, 1: other})
    assert (steps(kept[0]), steps(kept[1])) == ([1, 2, 3], [1])


def test_a_rank_that_comes_later_on_a_clock_that_is_behind() -> None:
    main = [start(0), *logs(0, 1, 2, 3), start(5, 1), *logs(5, 2, 3)]
    other = [start(4.2, 1), *logs(4.2, 2, 3)]
    assert steps(without_superseded({0: main, 1: other})[1]) == [2, 3]


def test_values_are_means_over_replicas() -> None:
    first = [start(0), *logs(0, 1, 2, replica=0, loss=1.0), *logs(0, 1, 2, replica=1, loss=2.0)]
    second = [start(0), *logs(0, 1, 2, replica=2, loss=6.0)]
    assert curves({0: first, 1: second}) == {"loss": {1: 3.0, 2: 3.0}}


def test_replicas_weigh_as_much_as_their_samples() -> None:
    first = [start(0), *logs(0, 1, replica=0, weight=0.75, loss=1.0)]
    second = [start(0), *logs(0, 1, replica=1, weight=0.25, loss=5.0)]
    stand_in = [start(0), *logs(0, 1, replica=2, weight=0.0, loss=99.0)]
    assert curves({0: first, 1: second, 2: stand_in}) == {"loss": {1: 2.0}}


def test_outside_of_a_loop_the_main_ranks_value_counts() -> None:
    ranks = {rank: [start(0), *logs(0, 3, replica=None, found=float(rank))] for rank in (0, 1)}
    assert curves(ranks) == {"found": {3: 0.0}}


def test_texts_are_no_curves() -> None:
    event = {
        "time": 0,
        "kind": "log",
        "epoch": 0,
        "step": 1,
        "replica": 0,
        "note": "x",
        "loss": None,
    }
    assert curves({0: [event]}) == {}


def test_no_ranks() -> None:
    assert without_superseded({}) == {}
