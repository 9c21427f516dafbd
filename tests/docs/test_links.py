"""The links of all pages lead to existing targets."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from tests.support.pages import ROOT, Link, Page, shown

HIDDEN = re.compile(r"(^|/)(\.|build/|dist/|node_modules/|[^/]*\.egg-info/)")

ALL = sorted(
    path
    for path in ROOT.rglob("*.md")
    if not HIDDEN.search(str(path.relative_to(ROOT)))
    and not path.relative_to(ROOT).as_posix().startswith("fencepost/")
)
"""All pages, without the paths through the symbolic links in ``fencepost/``."""


@cache
def anchors(path: Path) -> set[str]:
    return Page(path).anchors


def complaint(link: Link, root: Path) -> str | None:
    """Return the problem with a link, or None; other hosts are not contacted."""
    parts = urlsplit(link.target)
    if parts.scheme in {"http", "https"}:
        return None if parts.hostname and "." in parts.hostname else "names no host"
    if parts.scheme == "mailto":
        return None
    if parts.scheme or parts.netloc:
        return "is no link to a page"
    path = (link.page.parent / unquote(parts.path)).resolve() if parts.path else link.page
    if not path.is_relative_to(root):
        return "leads out of the project"
    if not path.exists():
        return "leads to nothing"
    if parts.fragment and parts.fragment not in anchors(path):
        return f"names no heading of it; there are {', '.join(sorted(anchors(path)))}"
    return None


@pytest.mark.parametrize("path", ALL, ids=shown)
def test_links_lead_to_existing_targets(path: Path) -> None:
    wrong = [f"{link} {why}" for link in Page(path).links if (why := complaint(link, ROOT))]
    assert wrong == []


@pytest.mark.parametrize(
    "target", ["gone.md", "#gone", "page.md#gone", "../../x.md", "https://", "ftp://a.b/c", "//h/p"]
)
def test_broken_link_is_found(target: str, tmp_path: Path) -> None:
    path = tmp_path / "page.md"
    path.write_text(f"# A `heading`, of 2 words\n\n[one]({target}) [two](#a-heading-of-2-words)\n")
    first, second = Page(path).links
    assert complaint(first, tmp_path)
    assert complaint(second, tmp_path) is None
