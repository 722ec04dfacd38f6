"""Following events: one value for each step, of all replicas, when all ranks are through with it."""

import json
from pathlib import Path

from lockstep.state.record.following import Follower


class Rank:
    def __init__(self, run: Path, rank: int) -> None:
        (run / "events").mkdir(exist_ok=True)
        self.path = run / f"events/rank-{rank}.jsonl"
        self.rank = rank

    def write(self, kind: str, step: int, **fields: object) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps({"time": 0, "kind": kind, "step": step, **fields}) + "\n")

    def loss(self, step: int, loss: float, weight: float = 0.5) -> None:
        self.write("log", step, replica=self.rank, weight=weight, loss=loss)


def test_a_step_waits_for_all_ranks(tmp_path: Path) -> None:
    first, second = Rank(tmp_path, 0), Rank(tmp_path, 1)
    for rank in (first, second):
        rank.write("start", 0)
        rank.loss(1, 1.0 + rank.rank)
    follower = Follower(tmp_path, 2, 0, {})
    assert follower.read() == []
    first.write("pace", 1)
    assert follower.read() == []
    second.loss(2, 3.0)  # it is through with step 1
    assert follower.read() == [(1, {"loss": 1.5})]
    assert follower.read(ended=True) == [(2, {"loss": 3.0})]


def test_values_have_their_weights_and_stand_ins_none(tmp_path: Path) -> None:
    ranks = [Rank(tmp_path, number) for number in range(3)]
    for rank, weight in zip(ranks, (0.75, 0.25, 0.0), strict=True):
        rank.loss(1, 4.0 * rank.rank, weight)
    assert Follower(tmp_path, 3, 0, {}).read(ended=True) == [(1, {"loss": 1.0})]


def test_outside_of_loops_the_main_rank_counts(tmp_path: Path) -> None:
    for number in range(2):
        Rank(tmp_path, number).write("log", 1, replica=None, accuracy=0.5 + number, name="text")
    assert Follower(tmp_path, 2, 0, {}).read(ended=True) == [(1, {"accuracy": 0.5})]


def test_a_later_generation_gives_out_what_is_new(tmp_path: Path) -> None:
    first, second = Rank(tmp_path, 0), Rank(tmp_path, 1)
    for rank in (first, second):
        rank.write("start", 0)
        for step in (1, 2, 3):
            rank.loss(step, float(step))
    follower = Follower(tmp_path, 2, 0, {})
    assert [step for step, _ in follower.read()] == [1, 2]
    state = json.loads(json.dumps(follower.state()))
    # The ranks were killed after step 3, and one of the two goes on after step 2.
    first.write("start", 2)
    first.loss(3, 3.0, 0.5)
    first.loss(3, 5.0, 0.5)
    assert Follower(tmp_path, 1, 2, state).read(ended=True) == [(3, {"loss": 4.0})]


def test_what_a_killed_generation_has_logged_is_not_lost(tmp_path: Path) -> None:
    rank = Rank(tmp_path, 0)
    rank.write("start", 0)
    rank.loss(1, 1.0)
    rank.loss(2, 2.0)
    state = Follower(tmp_path, 1, 0, {}).state()  # read, and not given out
    rank.write("start", 2)
    assert Follower(tmp_path, 1, 2, state).read() == [(1, {"loss": 1.0}), (2, {"loss": 2.0})]


def test_ranks_on_other_disks_are_counted(tmp_path: Path) -> None:
    rank = Rank(tmp_path, 0)
    rank.loss(1, 1.0)
    rank.write("pace", 1)
    follower = Follower(tmp_path, 4, 0, {})
    assert follower.read() == [(1, {"loss": 1.0})]
    assert follower.unseen == 3
