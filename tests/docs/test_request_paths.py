"""The modules, functions, classes and constants that the pages for contributors name exist."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from tests.support.pages import ROOT

STEP = re.compile(r"`([a-z_]+(?:/[a-z_0-9]+)+\.py)`((?:,?\s+`[A-Za-z_][A-Za-z_0-9.]*`)*)")
"""A module, and the names after it that it defines."""
NAME = re.compile(r"`(.+?)`")
PAGES = ("extending.md", "glossary.md", "request-paths.md")


@cache
def definitions(path: Path) -> frozenset[str]:
    """Return the functions, classes and constants of a module, methods as ``Class.method``."""
    names = set()
    for node in ast.parse(path.read_text()).body:
        match node:
            case ast.ClassDef() | ast.FunctionDef() | ast.AsyncFunctionDef():
                names.add(node.name)
            case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)):
                names.add(name)
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
    missing = [module for module, _ in steps if not (ROOT / module).is_file()]
    assert not missing
    undefined = [
        (module, name)
        for module, names in steps
        for name in NAME.findall(names)
        if name not in definitions(ROOT / module)
    ]
    assert not undefined


def test_names_after_a_module_are_found() -> None:
    text = "Change `a/b.py` `One`,\n`two_3` and `c/d.py`, or `e/f.py` `G.h`: `other`."
    found = [(module, NAME.findall(names)) for module, names in STEP.findall(text)]
    assert found == [("a/b.py", ["One", "two_3"]), ("c/d.py", []), ("e/f.py", ["G.h"])]
