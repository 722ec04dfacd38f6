"""The site, as Sphinx builds it: `make docs` writes it to build/site."""

from __future__ import annotations

import re
from pathlib import Path

from sphinx.application import Sphinx

from lockstep.version import __version__

ROOT = Path(__file__).parents[1]
#: Pages whose text stands at the top of the repository.
TOP = {"index": "README.md", "changelog": "CHANGELOG.md", "contributing": "CONTRIBUTING.md"}
_LINK = re.compile(r"(?<=\]\()(?![a-z]+:|#)[^)\s]+")

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

html_theme = "pydata_sphinx_theme"
html_title = f"Lockstep {release}"
html_static_path = ["site.css"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sourcelink = False
html_show_copyright = False
html_sidebars = {"index": [], "changelog": [], "contributing": []}
html_theme_options = {
    "logo": {"text": html_title},
    "navbar_align": "left",
    "navbar_end": ["theme-switcher"],
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


def setup(app: Sphinx) -> None:
    """Connect what Sphinx is to call."""
    app.connect("source-read", _add_text)
