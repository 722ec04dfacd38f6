"""What `--layouts` means."""

from __future__ import annotations

import pytest

from lockstep.cli.parser import split
from lockstep.cli.verify import one_layout_each
from lockstep.errors import UsageError
from lockstep.launch.command import choose_strategies
from lockstep.tools.verify.layouts import Layout, RandomKills, Stage, parse
from lockstep.tools.verify.running import directory_name


def only(word: str) -> Layout:
    """Return the second of two layouts; the first is `1`."""
    return parse(["1", word])[1]


def test_numbers_in_one_word_or_in_several() -> None:
    assert parse(["1,2, 4"]) == parse(["1", "2", "4"]) == parse(["1,2", "4"])
    assert [layout.ranks for layout in parse(["1,2,4"])] == [1, 2, 4]
    assert [str(layout) for layout in parse(["1,2"])] == ["1 rank", "2 ranks"]
    assert not any(layout.is_disturbed for layout in parse(["1,2"]))


@pytest.mark.parametrize(
    ("word", "stages"),
    [
        ("2,kill@30", [Stage(2, (30,))]),
        ("2,kill@30,kill@31", [Stage(2, (30, 31))]),
        ("2,kill@31,kill@30", [Stage(2, (30, 31))]),
        ("2,term@25", [Stage(2, (), 25), Stage(2)]),
        ("4>2@30>3@60", [Stage(4, (), 30), Stage(2, (), 60), Stage(3)]),
        ("4>2@30,kill@40", [Stage(4, (), 30), Stage(2, (40,))]),
        # A rank is killed in a step, and the run preempted after one.
        ("4>2@30,kill@30,kill@31", [Stage(4, (30,), 30), Stage(2, (31,))]),
        (
            "4>2@30,term@10,term@40",
            [Stage(4, (), 10), Stage(4, (), 30), Stage(2, (), 40), Stage(2)],
        ),
    ],
)
def test_faults_cut_a_layout_into_launches(word: str, stages: list[Stage]) -> None:
    layout = only(word)
    assert layout.stages == tuple(stages)
    assert (layout.name, str(layout), layout.is_disturbed) == (word, f"layout {word}", True)


def test_what_the_ranks_of_a_launch_are_told() -> None:
    assert Stage(2, (3, 4), 9).faults == ("kill@3", "kill@4", "term@9")
    assert Stage(2).faults == ()


def test_a_fault_belongs_to_the_layout_before_it() -> None:
    layouts = parse(["1,2,kill@3,4,term@5,kill@6"])
    assert [layout.name for layout in layouts] == ["1", "2,kill@3", "4,term@5,kill@6"]


def test_the_largest_number_of_ranks_counts() -> None:
    assert only("2>8@3>4@5").ranks == 8


def test_a_storm_is_one_more_layout_on_the_most_ranks() -> None:
    layouts = parse(["2>4@3"], RandomKills(200, 1))
    assert layouts[1] == Layout("4,kills=200", (Stage(4),), RandomKills(200, 1))
    assert layouts[1].is_disturbed


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["2"], "--layouts 2 names one layout; expected at least two"),
        (["1,"], "the layout '' is no number of ranks"),
        (["1,0"], "the layout '0' is no number"),
        (["1,-2"], "the layout '-2' is no number"),
        (["1,kill"], "the layout 'kill' is no number"),
        (["1,2>x@3"], "'x@3' in the layout '2>x@3' is no change of ranks; expected RANKS@STEP"),
        (["1,2>3"], "'3' in the layout '2>3' is no change of ranks"),
        (["1,>3@4"], "the layout '' in '>3@4' is no number"),
        (["1,2>0@4"], "the layout '0' in '2>0@4' is no number"),
        (["1,4>2@30>3@30"], "the steps of the layout '4>2@30>3@30' do not rise"),
        (["1,4>2@30>3@20"], "do not rise"),
        (["1,2,kill@0"], "'kill@0' names step 0; expected 1 or a later one"),
        (["1,2>3@0"], "'2>3@0' names step 0"),
        (["1,2,term@5,term@5"], "'2,term@5,term@5' is to be preempted twice after step 5"),
        (["1,4>2@30,term@30"], "is to be preempted twice after step 30"),
        (["1", "kill@3,2"], "kill@3 comes before any layout in 'kill@3,2'"),
    ],
)
def test_layouts_that_are_none(words: list[str], said: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse(words)
    assert said in str(caught.value)


def test_directories_have_names_that_a_shell_takes() -> None:
    assert directory_name(2, only("4>2@30,kill@40")) == "2-4-2-30-kill-40"
    assert directory_name(0, only("2")) == "0-2"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--layouts 1,2 train.py", "--layouts 1,2 train.py"),
        ("train.py --layouts 1 2", "train.py --layouts 1 --layouts 2"),
        (
            "--layouts 1 4>2@3 2,kill@3 train.py --json",
            "--layouts 1 --layouts 4>2@3 --layouts 2,kill@3 train.py --json",
        ),
        ("--layouts 1 --layouts 2 3 x", "--layouts 1 --layouts 2 --layouts 3 x"),
        ("--layouts 1 2 --threads 2 3.py", "--layouts 1 --layouts 2 --threads 2 3.py"),
        ("--layouts x 2 3d.py", "--layouts x --layouts 2 3d.py"),
        ("--layouts", "--layouts"),
        ("--layouts=1,2 3", "--layouts=1,2 3"),
    ],
)
def test_several_words_of_layouts_leave_the_script_alone(words: str, expected: str) -> None:
    found, script_args = split(["verify", *words.split(), "--", "--layouts", "1", "2"])
    assert one_layout_each(found) == ["verify", *expected.split()]
    assert script_args == ["--layouts", "1", "2"]


def test_other_verbs_keep_their_words() -> None:
    assert split(["run", "train.py", "--layouts", "1", "2", "--", "x"])[0] == [
        "run",
        "train.py",
        "--layouts",
        "1",
        "2",
        "--",
        "x",
    ]


def test_each_layout_with_each_strategy() -> None:
    layouts = parse(["1,2"], strategies=["ddp", "fsdp"])
    assert [(layout.name, layout.strategy) for layout in layouts] == [
        ("1", "ddp"),
        ("2", "ddp"),
        ("1", "fsdp"),
        ("2", "fsdp"),
    ]
    assert str(layouts[3]) == "2 ranks with fsdp"
    assert directory_name(3, layouts[3]) == "3-2-fsdp"


def test_one_layout_with_two_strategies_can_be_compared() -> None:
    assert len(parse(["2"], strategies=["ddp", "fsdp"])) == 2


def test_strategies_that_are_none() -> None:
    assert choose_strategies(None, "ddp, fsdp", ()) == ["ddp", "fsdp"]
    with pytest.raises(
        UsageError, match="--strategies names 'zero'; expected some of auto, single"
    ):
        choose_strategies(None, "ddp,zero", ())
