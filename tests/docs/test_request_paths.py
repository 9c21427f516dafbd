"""The modules and functions that the pages for contributors name exist."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from tests.support.pages import ROOT

STEP = re.compile(r"`([a-z_]+(?:/[a-z_0-9]+)+\.py)`(?:\s+`([A-Za-z_.]+)`)?")
PAGES = ("request-paths.md", "glossary.md")


@cache
def definitions(path: Path) -> frozenset[str]:
    """Return the functions and classes of a module, methods as ``Class.method``."""
    names = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            names |= {
                f"{node.name}.{part.name}"
                for part in node.body
                if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef)
            }
    return frozenset(names)


@pytest.mark.parametrize("page", PAGES)
def test_named_modules_and_functions_exist(page: str) -> None:
    steps = STEP.findall((ROOT / "docs" / page).read_text())
    assert len(steps) > 25
    missing = [
        (module, name)
        for module, name in steps
        if not (ROOT / module).is_file() or (name and name not in definitions(ROOT / module))
    ]
    assert not missing
