"""The manual's page on the examples shows what changes from one device to Lockstep, as it is."""

from __future__ import annotations

from tests import ports


def test_the_diffs_are_those_of_the_files() -> None:
    page = ports.PAGE.read_text()
    assert ports.names(page) == ["cifar10", "imagenet", "voc", "language_model"]
    assert ports.written(page) == page, "python -m tests.ports writes the diffs anew"


def test_forms_for_one_device_do_not_know_lockstep() -> None:
    for name in ports.names(ports.PAGE.read_text()):
        text = (ports.ROOT / "examples" / f"plain_{name}.py").read_text()
        assert "lockstep" not in text
        assert "run." not in text
