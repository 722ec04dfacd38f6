"""Make an HTML page of titled sections with text, tables and plotly figures.

The page loads nothing from the network. All text is escaped, also in figures: only `hovertemplate` and
`texttemplate` may contain markup. A figure takes the colours of text, grid and background from the page,
light or dark.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from html import escape
from importlib import resources
from pathlib import Path
from typing import Any

from lockstep.errors import OutputError, UsageError
from lockstep.state.files.atomic_file import atomic_write

#: Colours of traces, in order; all can be distinguished from each other, on white and on black.
COLOURS = (
    "#3b82f6", "#e8710a", "#12a150", "#c44fd0", "#0d9aa5", "#e5484d", "#b08800", "#7c6cf0",
)  # fmt: skip

_NUMBER = ' class="number"'
#: A number in words, such as `1,024`, `12.5%` or `3.2 ms`.
_QUANTITY = re.compile(r"[-+]?\d[\d.,]*(%| ?[^\W\d]{1,3}(/s)?)?")
#: Keys of a figure whose strings may contain plotly's markup.
_TEMPLATES = {"hovertemplate", "texttemplate"}
#: Content security policy that forbids the page to load anything.
_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"
)


@dataclass(frozen=True, slots=True)
class Paragraph:
    """A paragraph of the page."""

    text: str


@dataclass(frozen=True, slots=True)
class ValueList:
    """A list of (name, value) pairs on the page, one below the other."""

    values: Mapping[str, object]


@dataclass(frozen=True, slots=True)
class Table:
    """A table of the page; numbers are aligned to the right, and `None` is shown as a dash."""

    head: Sequence[str]  # names of the columns
    rows: Sequence[Sequence[object]]
    caption: str = ""


@dataclass(frozen=True, slots=True)
class Chart:
    """A chart of the page: a plotly figure with a title above it."""

    figure: Any  # a `plotly.graph_objects.Figure`
    title: str
    note: str = ""  # shown below the title
    height: int = 320  # pixels
    wide: bool = False  # whether it takes the whole width of the page
    log: bool = False  # whether a switch makes the y axis logarithmic


Part = Paragraph | ValueList | Table | Chart


@dataclass(frozen=True, slots=True)
class Section:
    """A section of the page: a title, and below it paragraphs, tables or charts."""

    title: str
    parts: Sequence[Part]


def graph_objects() -> Any:
    """Import and return `plotly.graph_objects`.

    Raises:
        UsageError: if plotly is not installed.
    """
    try:
        from plotly import graph_objects as objects
    except ImportError as error:
        raise UsageError(
            f"charts need plotly, which cannot be imported: {error}",
            hint="pip install 'torch-lockstep[report]'",
        ) from None
    return objects


def write(path: Path, title: str, sections: Sequence[Section]) -> None:
    """Write a page of `sections` to `path`, atomically; an existing file is replaced.

    Raises:
        OutputError: if the file cannot be written.
        UsageError: if plotly is not installed.
    """
    text = build(title, sections)
    try:
        atomic_write(path, text.encode(errors="replace"))
    except OSError as error:
        raise OutputError(
            f"the page {path} cannot be written: {error.strerror}",
            hint="expected a file in a directory that exists and can be written",
        ) from None


def build(title: str, sections: Sequence[Section]) -> str:
    """Return the HTML of a page with a title and sections.

    Raises:
        UsageError: if plotly is not installed.
    """
    graph_objects()
    from plotly.offline import get_plotlyjs

    body = "\n".join(
        f'<section>\n<h2>{escape(section.title)}</h2>\n<div class="parts">\n'
        + "\n".join(map(_part, section.parts))
        + "\n</div>\n</section>"
        for section in sections
    )
    own = _own("page.js").replace("COLOURWAY", json.dumps(COLOURS))
    script = f"<script>{get_plotlyjs()}</script>\n<script>{own}</script>"
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f'<link rel="icon" href="data:,">\n<title>{escape(title)}</title>\n'
        f"<style>{_own('page.css')}</style>\n</head>\n<body>\n"
        f"<h1>{escape(title)}</h1>\n{body}\n{script}\n</body>\n</html>\n"
    )


def _part(part: Part) -> str:
    match part:
        case Paragraph(text):
            return f'<p class="wide">{escape(text)}</p>'
        case ValueList(values):
            rows = (f"<dt>{escape(k)}</dt><dd>{escape(_shown(v))}</dd>" for k, v in values.items())
            return f'<dl class="wide">{"".join(rows)}</dl>'
        case Table():
            return _table(part)
        case Chart():
            return _chart(part)


def _table(table: Table) -> str:
    head = ""
    for k, name in enumerate(table.head):
        column = [row[k] for row in table.rows if row[k] not in (None, "")]
        kind = _NUMBER if column and all(map(_is_number, column)) else ""
        head += f'<th scope="col"{kind}>{escape(name)}</th>'
    rows = "\n".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in table.rows)
    caption = f"<caption>{escape(table.caption)}</caption>" if table.caption else ""
    return (
        f'<div class="table wide"><table>{caption}<thead><tr>{head}</tr></thead>\n'
        f"<tbody>\n{rows}\n</tbody></table></div>"
    )


def _is_number(value: object) -> bool:
    if isinstance(value, str):
        return _QUANTITY.fullmatch(value) is not None
    return isinstance(value, int | float) and not isinstance(value, bool)


def _cell(value: object) -> str:
    kind = _NUMBER if _is_number(value) or value is None else ""
    return f"<td{kind}>{escape(_shown(value))}</td>"


def _shown(value: object) -> str:
    if isinstance(value, float):
        return f"{value:,.4g}"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return "\N{EN DASH}" if value is None else str(value)


def _chart(chart: Chart) -> str:
    note = f"<p>{escape(chart.note)}</p>" if chart.note else ""
    switch = '<label><input type="checkbox"> log scale</label>' if chart.log else ""
    return (
        f"<figure{' class=wide' if chart.wide else ''}>"
        f"<figcaption>{switch}<h3>{escape(chart.title)}</h3>{note}</figcaption>"
        f'<div class="chart" role="img" aria-label="{escape(chart.title)}" '
        f'style="height:{chart.height}px"></div>'
        f'<script type="application/json">{_figure(chart.figure)}</script></figure>'
    )


def _figure(figure: Any) -> str:
    """Return a plotly figure as JSON to put inside a `<script>` element; every `<` is escaped."""
    content = json.loads(figure.to_json())
    # Plotly's template takes 7 kB in each figure; the page has one for all figures.
    content["layout"].pop("template", None)
    return json.dumps(_escaped(content), separators=(",", ":")).replace("<", "\\u003c")


def _escaped(value: Any, key: str = "") -> Any:
    """Return a JSON value with `&`, `<` and `>` escaped in all texts, since plotly reads markup in them.

    `key` is the key of `value` in a dict. Templates, which may contain markup, are not changed.
    """
    if isinstance(value, dict):
        return {name: _escaped(one, name) for name, one in value.items()}
    if isinstance(value, list):
        return [_escaped(one, key) for one in value]
    if isinstance(value, str) and key not in _TEMPLATES:
        return escape(value, quote=False)
    return value


@cache
def _own(name: str) -> str:
    return resources.files("lockstep.tools.report").joinpath(name).read_text(encoding="utf-8")
