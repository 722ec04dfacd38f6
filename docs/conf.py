"""The site, as Sphinx builds it: `make docs` writes it to build/site."""

from __future__ import annotations

import gettext
import re
from collections.abc import Callable, Iterator
from functools import partial
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
#: The link to the home page in the other language: the header of the site has it.
_LANGUAGE = re.compile(r"(?m)^\[(?:中文|English)\]\(.*\)\n")
#: The folder of the Chinese pages; each has the name of the English page that it translates.
CHINESE = "zh/"
#: The page of searches from Chinese pages. Links of results are relative to the folder at the top.
CHINESE_SEARCH = "search-zh"
#: The page whose tables have a search field of their own.
ERRORS = "manual/errors"
#: What Sphinx and the theme say in English on Chinese pages.
WORDS = {
    "Breadcrumb": "当前位置",
    "Collapse Sidebar": "收起侧栏",
    "Color mode": "颜色模式",
    "Expand Sidebar": "展开侧栏",
    "Home": "首页",
    "On this page": "本页目录",
    "Search the docs ...": "搜索文档……",
    "Section Navigation": "本部分页面",
    "System Settings": "跟随系统",
    "Version": "版本",
    "next": "下一页",
    "previous": "上一页",
}
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

highlight_language = "none"  # code without a language is no Python
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
html_static_path = [
    "site.css",
    "logo.svg",
    "filter.js",
    "switcher.js",
    str(Path(sphinx.__file__).parent / "locale/zh_CN/LC_MESSAGES/sphinx.js"),
]
html_favicon = "logo.svg"
html_search_scorer = str(ROOT / "docs/scorer.js")
html_css_files = ["site.css"]
html_copy_source = False
html_show_sourcelink = False
html_show_copyright = False
html_sidebars = {"index": [], "zh/index": [], "changelog": [], "contributing": []}
html_theme_options = {
    "logo": {"text": html_title, "image_light": "logo.svg", "image_dark": "logo.svg"},
    "navbar_align": "left",
    "navbar_persistent": ["search-button-field", "language"],
    "navbar_end": ["versions", "theme-switcher"],
    "navigation_with_keys": False,
    "footer_start": [],
    "footer_end": [],
    "show_toc_level": 2,
    "pygments_light_style": "a11y-high-contrast-light",
    "pygments_dark_style": "a11y-high-contrast-dark",
}


def _add_text(app: Sphinx, page: str, source: list[str]) -> None:
    """Put the text of a file at the top of the repository into its page; let links to it lead there.

    What the page itself has stands before the first heading of that text.
    """
    if page in TOP:
        file = ROOT / TOP[page]
        app.env.note_dependency(str(file))
        head, *sections = _LINK.sub(_seen_from_docs, file.read_text()).split("\n## ")
        source[0] = "\n## ".join([f"{head}\n{source[0]}", *sections])
    if page in ("index", f"{CHINESE}index"):
        source[0] = _LANGUAGE.sub("", source[0], count=1)
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


class _Words(gettext.NullTranslations):
    """Translates by a table, and what it lacks by the next catalogue."""

    def gettext(self, message: str) -> str:
        return WORDS.get(message) or super().gettext(message)


IN_CHINESE = _Words()
IN_CHINESE.add_fallback(_translations(Path(pydata_sphinx_theme.__file__).parent, "zh"))
IN_CHINESE.add_fallback(_translations(Path(sphinx.__file__).parent, "zh_CN"))


def _set_language(
    app: Sphinx, page: str, template: str, context: dict[str, Any], doctree: object
) -> None:
    """Give a page its language, and a link to the other one."""
    is_chinese = page.startswith(CHINESE) or page == CHINESE_SEARCH
    other = page.removeprefix(CHINESE) if is_chinese else f"{CHINESE}{page}"
    home = "index" if is_chinese else f"{CHINESE}index"
    context["language"] = "zh-CN" if is_chinese else "en"
    context["counterpart"] = other if other in app.env.found_docs else home
    context["counterpart_language"] = "en" if is_chinese else "zh-CN"
    context["counterpart_name"] = "English" if is_chinese else "中文"
    if page == ERRORS:
        app.add_js_file("filter.js")
    if is_chinese:
        app.add_js_file("sphinx.js")  # the words of the search in the browser
        context["root_doc"] = f"{CHINESE}index"
        context["parents"] = context.get("parents", [])[1:]
        context["theme_search_bar_text"] = WORDS["Search the docs ..."]
        context["pathto"] = partial(_in_chinese, context["pathto"])
    for side, neighbour in zip(("prev", "next"), _relations(app, page)[1:], strict=True):
        if neighbour and neighbour.startswith(CHINESE) != is_chinese:
            context[side] = None
    words = IN_CHINESE if is_chinese else gettext.NullTranslations()
    app.builder.templates.environment.install_gettext_translations(words)


def _set_navigation(
    app: Sphinx, page: str, template: str, context: dict[str, Any], doctree: object
) -> None:
    """Let the header and the sidebar of a page list pages of its language."""
    context["generate_header_nav_html"] = partial(_header, app, page, context)
    if context["language"] != "en":
        for name in ("suppress_sidebar_toctree", "generate_toctree_html"):
            context[name] = partial(context[name], startdepth=2)


def _in_chinese(pathto: Callable[..., str], page: str, *args: Any, **kwargs: Any) -> str:
    return pathto(CHINESE_SEARCH if page == "search" else page, *args, **kwargs)


def _header(app: Sphinx, page: str, context: dict[str, Any], **_: object) -> str:
    """Return the header's links: the parts that the home page of this language lists."""
    above = set(_ancestors(app, page))
    return "".join(
        f'<li class="nav-item{" current active" if part in above else ""}">'
        f'<a class="nav-link nav-internal" href="{context["pathto"](part)}">'
        f"{app.env.titles[part].astext()}</a></li>"
        for part in app.env.toctree_includes[context["root_doc"]]
        if not part.endswith("index")
    )


def _ancestors(app: Sphinx, page: str | None) -> Iterator[str]:
    """Yield a page, the page whose contents list it, and so on."""
    while page:
        yield page
        page = _relations(app, page)[0]


def _relations(app: Sphinx, page: str) -> list[str | None]:
    """Return the parent of a page, the page before it and the page after it."""
    return app.builder.relations.get(page, [None] * 3)


def _chinese_search(app: Sphinx) -> Iterator[tuple[str, dict[str, Any], str]]:
    yield CHINESE_SEARCH, {}, "search-zh.html"


def setup(app: Sphinx) -> None:
    """Connect what Sphinx is to call."""
    app.add_search_language(Search)
    app.connect("source-read", _add_text)
    app.connect("html-collect-pages", _chinese_search)
    app.connect("html-page-context", _set_language)
    app.connect(
        "html-page-context", _set_navigation, priority=900
    )  # after the theme has set its own
