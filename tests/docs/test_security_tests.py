"""`docs/security-tests.md` names tests that exist."""

from __future__ import annotations

import re
from functools import cache

import pytest

from tests.support.pages import ROOT

TEXT = (ROOT / "docs" / "security-tests.md").read_text(encoding="utf-8")
NAMED = re.findall(r"`([\w/.]+)::(\w+)`", TEXT)
LETTERS = dict(re.findall(r"\b([A-Z]) = `(tests/[\w/.]+)`", TEXT))
"""Files that the page names by a letter."""


@cache
def names_in(path: str) -> set[str]:
    return set(re.findall(r"^(?:async )?def (test_\w+)", (ROOT / path).read_text(), re.MULTILINE))


@pytest.mark.parametrize(("path", "name"), sorted(set(NAMED)))
def test_a_test_that_is_named_exists(path: str, name: str) -> None:
    assert name in names_in(LETTERS.get(path, path))


def test_there_are_some() -> None:
    assert len(NAMED) > 50
    assert len(LETTERS) >= 6
