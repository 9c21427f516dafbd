"""The Sphinx configuration of the documentation site, which ``make docs`` builds.

The pages are plain Markdown whose links work in the repository. The source directory of the site is
therefore the repository itself: the same links lead to the same pages, including the READMEs of the
folders. Two things change while a page is read: a link to a folder becomes a link to its README,
and the lists of ``docs/index.md`` become the menu.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sphinx.application import Sphinx

ROOT = Path(__file__).resolve().parents[1]

project = "Fencepost"
author = "the Fencepost authors"
version = release = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]

extensions = ["myst_parser"]
source_suffix = {".md": "markdown"}
root_doc = "docs/index"
include_patterns = ["*.md", "docs/**.md", "*/README.md", "coordinator/*/README.md"]
include_patterns += ["groups/*/README.md", "tests/*/README.md"]
exclude_patterns = [".*", "build", "dist", "fencepost", "*.egg-info", "**/__pycache__"]
myst_enable_extensions = ["deflist"]
myst_heading_anchors = 4
smartquotes = False  # two dashes begin an option
# State diagrams, and blocks in languages without a lexer, are shown without highlighting.
suppress_warnings = ["misc.highlighting_failure"]

html_theme = "furo"
html_title = f"Fencepost {version}"
html_favicon = "../console/static/icon.svg"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_copyright = False
html_extra_path = ["static/index.html"]
html_theme_options = {
    "light_css_variables": {"color-brand-primary": "#0f766e", "color-brand-content": "#0f766e"},
    "dark_css_variables": {"color-brand-primary": "#5eead4", "color-brand-content": "#5eead4"},
}

_LINK = re.compile(r"(?<!!)\[([^\]]*)\]\(([^)\s]+)\)")
_SECTION = re.compile(r"^## (.+)$", re.MULTILINE)


def _to_a_page(page: Path, match: re.Match[str]) -> str:
    """Return a link for the site: a folder links to its README, a source file is only named."""
    text, target = match.groups()
    path, hash_sign, anchor = target.partition("#")
    if "://" in target or not path or path.endswith(".md"):
        return match[0]
    found = (page.parent / path).resolve()
    if (found / "README.md").exists():
        return f"[{text}]({path.rstrip('/')}/README.md{hash_sign}{anchor})"
    return text if text.startswith("`") else f"`{text}`"


def _menu(text: str) -> str:
    """Return ``text`` with hidden tables of contents made of its lists."""
    parts = _SECTION.split(text)
    menus = []
    for caption, body in zip(parts[1::2], parts[2::2], strict=True):
        entries = [
            f"{name} </{(Path('docs') / target).as_posix()}>"
            for name, target in _LINK.findall(body)
            if "#" not in target
        ]
        entries = [entry.replace("docs/../", "").replace(".md>", ">") for entry in entries]
        told = "\n".join(entries)
        menus.append(f"```{{toctree}}\n:hidden:\n:caption: {caption}\n\n{told}\n```")
    return "\n\n".join([text, *menus])


def _read(app: Sphinx, name: str, source: list[str]) -> None:
    page = Path(app.srcdir) / f"{name}.md"
    text = source[0]
    if name == root_doc:
        text = _menu(text)
    elif name.endswith("README") or "/" not in name:
        text = f"---\norphan: true\n---\n\n{text}"
    fences = re.split(r"(^```.*?^```$)", text, flags=re.MULTILINE | re.DOTALL)
    source[0] = "".join(
        part if number % 2 else _LINK.sub(lambda match: _to_a_page(page, match), part)
        for number, part in enumerate(fences)
    )


def setup(app: Sphinx) -> None:
    """Register :func:`_read`, which changes pages while Sphinx reads them."""
    app.connect("source-read", _read)
