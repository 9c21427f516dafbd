"""`docs/security-tests.md` names tests that exist."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache

import pytest

from tests.support.pages import ROOT

TEXT = (ROOT / "docs" / "security-tests.md").read_text(encoding="utf-8")

LETTERS: dict[str, str] = {}
"""Letter → file that the letter stands for; a later section may use a letter for another file."""


def named_tests() -> Iterator[tuple[str, str]]:
    for found in re.finditer(r"\b([A-Z]) = `(tests/[\w/.]+)`|`([\w/.]+)::(\w+)`", TEXT):
        letter, file, path, name = found.groups()
        if letter:
            LETTERS[letter] = file
        else:
            yield LETTERS.get(path, path), name


NAMED = list(named_tests())


@cache
def names_in(path: str) -> set[str]:
    return set(re.findall(r"^(?:async )?def (test_\w+)", (ROOT / path).read_text(), re.MULTILINE))


@pytest.mark.parametrize(("path", "name"), sorted(set(NAMED)))
def test_named_security_test_exists(path: str, name: str) -> None:
    assert name in names_in(path)


def test_security_page_names_tests_and_files() -> None:
    assert len(NAMED) > 50
    assert len(LETTERS) >= 6
