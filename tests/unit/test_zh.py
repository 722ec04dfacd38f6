"""Each English page of the manual has a Chinese one: of the same form, and of its newest text."""

from __future__ import annotations

import re
from itertools import zip_longest
from pathlib import PurePath

import pytest

from tests import zh

_HAN = "[\u4e00-\u9fff]"
_NO_SPACE = re.compile(rf"{_HAN}[A-Za-z0-9`]|[A-Za-z0-9`%]{_HAN}")


def test_each_page_has_a_translation() -> None:
    there = zh.DOCS / "zh"
    assert sorted([*zh.names(), *zh.outlines()]) == sorted(
        str(file.relative_to(there).with_suffix("")) for file in there.rglob("*.md")
    )


@pytest.mark.parametrize("name", zh.outlines())
def test_an_outline_names_each_part_of_the_english_page(name: str) -> None:
    headings = [heading for heading, _ in zh.sections(zh.english(name))]
    rules = [heading for heading in headings if heading.startswith("LS")]
    parts = re.findall(r"(?m)^## .*$", zh.prose(zh.english(name)))
    rows = re.findall(r"(?m)^\| \[", zh.page(name).read_text())
    assert len(rows) == len(parts) + len(rules), "a row links to each part, and to each rule"


@pytest.mark.parametrize("name", zh.names())
def test_the_english_page_is_that_which_was_translated(name: str) -> None:
    assert not zh.stale(name), f"{name}: translate what changed, then python -m tests.zh {name}"


@pytest.mark.parametrize("name", zh.names())
def test_pairs_have_one_form(name: str) -> None:
    english, chinese = zh.english(name), zh.page(name).read_text()
    for one, other in zip_longest(zh.blocks(english), zh.blocks(chinese)):
        assert one == other, f"a code block differs: python -m tests.zh {name} copies them"
    assert _form(chinese) == _form(english)


@pytest.mark.parametrize("name", zh.names())
def test_sections_of_a_pair_say_the_same(name: str) -> None:
    """Code, links and numbers are the same in every language, so a hash that was renewed hides nothing."""
    english, chinese = zh.sections(zh.english(name)), zh.sections(zh.page(name).read_text())
    for (heading, text), (_, translation) in zip(english, chinese, strict=True):
        assert zh.differences(text, translation) == [], f"{name}: {heading}"


def test_a_changed_number_link_or_code_is_seen() -> None:
    english = "It takes 1,200 ms and two ranks: [more](../a.md#b) of `run.save`, 9.45 million."
    chinese = "需要 1200 ms 和 2 个 rank。`run.save` 的[更多内容](../../manual/a.md#丙)、945 万。"
    assert zh.differences(english, chinese) == []
    for old, new in (
        ("1200", "120"),
        ("/a.md", "/c.md"),
        ("save", "load"),
        ("945", "94"),
        ("需要", "需要 7"),
    ):
        assert zh.differences(english, chinese.replace(old, new)), (old, new)


@pytest.mark.parametrize("name", zh.names())
def test_spaces_stand_between_chinese_and_latin(name: str) -> None:
    text = re.sub(r"\]\([^)]*\)", "]", zh.prose(zh.page(name).read_text()))
    text = re.sub(r"(`+)[^`\n]*\1", "`", text)
    assert [found[0] for found in _NO_SPACE.finditer(text)] == []


def test_a_change_of_the_english_page_is_seen() -> None:
    text = "# Title\n\nText.\n\n```python\na = 1\n```\n"
    chinese = zh.noted("# 标题\n\n正文。\n\n```python\nold\n```\n", text)
    assert zh.blocks(chinese) == zh.blocks(text)
    assert zh.fingerprint(text) in chinese
    assert zh.fingerprint(text) == zh.fingerprint(text.replace("a = 1", "a = 2"))
    assert zh.fingerprint(text) != zh.fingerprint(text.replace("Text", "Other text"))


def _form(text: str) -> dict[str, list[str]]:
    """Return what a page and its translation have in common beside code blocks."""
    text = zh.prose(text)
    return {
        "headings": re.findall(r"(?m)^#+(?= )", text),
        "figures": [PurePath(image).name for image in re.findall(r"!\[[^\]]*\]\(([^)]+)\)", text)],
        "cells": [str(row.count("|")) for row in re.findall(r"(?m)^\|.*$", text)],
    }
