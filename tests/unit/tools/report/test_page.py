"""The page as text; `tests/browser` opens it."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
from plotly.offline import get_plotlyjs

from lockstep.errors import OutputError, UsageError
from lockstep.tools.report import page

go = page.graph_objects()
FILE = Path(__file__)
NASTY = "</script><img src=x onerror=alert(1)>&amp;"


def figure() -> page.Chart:
    line = go.Scatter(
        x=[0, 1, 2], y=[1.0, float("nan"), 3.0], name=NASTY, hovertemplate="<b>%{y}</b>"
    )
    return page.Chart(go.Figure([line]), NASTY, NASTY)


def test_all_text_is_escaped() -> None:
    parts = [
        page.Paragraph(NASTY),
        page.ValueList({NASTY: NASTY}),
        page.Table([NASTY], [[NASTY]], NASTY),
    ]
    text = page.build(NASTY, [page.Section(NASTY, [*parts, figure()])])
    assert "<img" not in text.replace(get_plotlyjs(), "")
    assert text.count("<script") == text.count("</script>") == 3


def test_a_figure_keeps_its_values_and_loses_its_markup() -> None:
    content = json.loads(page._figure(figure().figure))
    line = content["data"][0]
    assert line["y"] == [1.0, None, 3.0]
    assert "<" not in line["name"]
    assert line["hovertemplate"] == "<b>%{y}</b>"
    assert "template" not in content["layout"]


def test_values_as_they_are_read() -> None:
    text = page._table(page.Table(["a"], [[1234567], [0.123456], [None], [True], ["1234567"]]))
    assert re.findall(r"<td[^>]*>([^<]*)</td>", text) == [
        "1,234,567",
        "0.1235",
        "\N{EN DASH}",
        "True",
        "1234567",
    ]


def test_a_page_names_no_address_to_load_from() -> None:
    text = page.build("t", [page.Section("s", [figure()])]).replace(get_plotlyjs(), "")
    assert "http" not in text.replace("http-equiv", "")
    assert "default-src 'none'" in text


def test_a_file_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "taken").mkdir()
    monkeypatch.chdir(tmp_path)
    for path in (
        tmp_path / "missing" / "page.html",
        tmp_path / "taken",
        FILE / "page.html",
        Path(),
    ):
        with pytest.raises(OutputError, match=re.escape(f"the page {path} cannot be written")):
            page.write(path, "t", [])
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]


def test_names_that_are_no_text(tmp_path: Path) -> None:
    page.write(tmp_path / "page.html", "run \udcff", [])
    assert "<h1>run ?</h1>" in (tmp_path / "page.html").read_text()


def test_without_plotly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "plotly", None)
    with pytest.raises(UsageError) as caught:
        page.graph_objects()
    assert caught.value.hint == "pip install 'torch-lockstep[report]'"
