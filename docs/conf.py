"""The site, as Sphinx builds it: `make docs` writes it to build/site."""

from __future__ import annotations

import gettext
import re
from pathlib import Path
from typing import Any

import pydata_sphinx_theme
import sphinx
from sphinx.application import Sphinx
from sphinx.search.en import SearchEnglish

from lockstep.version import __version__

ROOT = Path(__file__).parents[1]
#: Pages whose text stands at the top of the repository.
TOP = {"index": "README.md", "changelog": "CHANGELOG.md", "contributing": "CONTRIBUTING.md"}
_LINK = re.compile(r"(?<=\]\()(?![a-z]+:|#)[^)\s]+")
#: The folder of the Chinese pages; each has the name of the English page that it translates.
CHINESE = "zh/"
_HAN = r"\u4e00-\u9fff"

project = "Lockstep"
author = "The Lockstep developers"
project_copyright = author
version = release = __version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
myst_heading_anchors = 4
suppress_warnings = [
    "misc.highlighting_failure",  # code blocks show left-out parts as …
    "toc.empty_glob",  # a group of pages may be empty
]

default_role = "code"  # docstrings have single backticks
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 80
toc_object_entries_show_parents = "hide"

html_search_language = "en-zh"
templates_path = ["templates"]
html_theme = "pydata_sphinx_theme"
html_title = f"Lockstep {release}"
html_static_path = ["site.css"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sourcelink = False
html_show_copyright = False
html_sidebars = {"index": [], "zh/index": [], "changelog": [], "contributing": []}
html_theme_options = {
    # The version stands in the title: the theme's switcher fetches its list, which browsers refuse on file://.
    "logo": {"text": html_title},
    "navbar_align": "left",
    "navbar_end": ["theme-switcher"],
    "article_header_end": ["language"],
    "navigation_with_keys": False,
    "footer_start": [],
    "footer_end": [],
    "show_toc_level": 2,
    "pygments_light_style": "a11y-high-contrast-light",
    "pygments_dark_style": "a11y-high-contrast-dark",
}


def _add_text(app: Sphinx, page: str, source: list[str]) -> None:
    """Put the text of a file at the top of the repository into its page; let links to it lead there."""
    if page in TOP:
        file = ROOT / TOP[page]
        app.env.note_dependency(str(file))
        source[0] = f"{file.read_text()}\n{source[0]}"
        source[0] = _LINK.sub(_seen_from_docs, source[0])
    for top, text in TOP.items():
        source[0] = re.sub(rf"(?<=\]\()(\.\./)+{text}", f"/{top}.md", source[0])


def _seen_from_docs(link: re.Match[str]) -> str:
    """Return the target of a link, from a file at the top of the repository, as seen from docs/."""
    return link[0].removeprefix("docs/") if link[0].startswith("docs/") else f"../{link[0]}"


class Search(SearchEnglish):
    """Searches for English words by their stems, and for Chinese ones by pairs of characters.

    Chinese has no spaces between words. A query is split like the text, in the browser.
    """

    lang = "en-zh"
    js_splitter_code = """
var splitQuery = (query) =>
  (query.match(/[HAN]+|(?:(?![HAN])[\\p{Letter}\\p{Number}_])+/gu) || []).flatMap((word) =>
    /^[HAN]{3}/.test(word) ? [...word.slice(1)].map((end, place) => word[place] + end) : [word]);
""".replace("HAN", _HAN)

    def split(self, input: str) -> list[str]:  # noqa: A002 (the base class names it so)
        """Return the words of a text, and of each run of Chinese characters the pairs."""
        words = re.findall(rf"[{_HAN}]+|[^\W{_HAN}]+", input)
        return [part for word in words for part in _pairs(word)]


def _pairs(word: str) -> list[str]:
    if len(word) < 3 or not re.match(f"[{_HAN}]", word):
        return [word]
    return [word[place : place + 2] for place in range(len(word) - 1)]


def _translations(folder: Path, language: str) -> gettext.NullTranslations:
    return gettext.translation("sphinx", folder / "locale", [language])


IN_CHINESE = _translations(Path(pydata_sphinx_theme.__file__).parent, "zh")
IN_CHINESE.add_fallback(_translations(Path(sphinx.__file__).parent, "zh_CN"))


def _set_language(
    app: Sphinx, page: str, template: str, context: dict[str, Any], doctree: object
) -> None:
    """Give a page its language, and a link to the same page in the other one."""
    is_chinese = page.startswith(CHINESE)
    other = page.removeprefix(CHINESE) if is_chinese else f"{CHINESE}{page}"
    context["language"] = "zh-CN" if is_chinese else "en"
    has_link = page in ("index", f"{CHINESE}index") or other not in app.env.found_docs
    context["counterpart"] = None if has_link else other
    context["counterpart_language"] = "en" if is_chinese else "zh-CN"
    context["counterpart_name"] = "English" if is_chinese else "中文"
    words = IN_CHINESE if is_chinese else gettext.NullTranslations()
    app.builder.templates.environment.install_gettext_translations(words)


def setup(app: Sphinx) -> None:
    """Connect what Sphinx is to call."""
    app.add_search_language(Search)
    app.connect("source-read", _add_text)
    app.connect("html-page-context", _set_language)
