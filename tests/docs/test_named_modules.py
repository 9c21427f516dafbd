"""Modules, functions and constants named in READMEs and contributors' pages must exist."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from tests.support.pages import ROOT
from tests.test_tidy import EVERYTHING, PARTS

STEP = re.compile(r"`([a-z_]+(?:/[a-z_0-9]+)+\.py)`((?:,?\s+`[A-Za-z_][A-Za-z_0-9.]*`)*)")
"""A pattern of a module and the names that follow; the module must define these names."""
NAME = re.compile(r"`(.+?)`")
MAIN_MODULES = 3
PAGES = ("design.md", "extending.md", "glossary.md", "request-paths.md")
MODULES = [
    str(path.relative_to(ROOT)) for folder in EVERYTHING for path in (ROOT / folder).rglob("*.py")
]
READMES = [
    str(path.relative_to(ROOT))
    for folder in EVERYTHING
    for path in sorted((ROOT / folder).rglob("README.md"))
]


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


@pytest.mark.parametrize("room", PARTS)
def test_package_readme_begins_with_its_limits_and_main_modules(room: str) -> None:
    folder = ROOT / room
    lead = re.split(r"\n(?=\||```|## )", (folder / "README.md").read_text())[0]
    assert re.search(r"\bm(?:ust|ay) not\b", lead), "it does not say what the room may not know"
    _, mark, named = " ".join(lead.split()).partition("hree most important modules are ")
    assert mark, "it does not name the most important modules"
    modules = re.findall(r"`([a-z_/0-9]+\.py)`", named)[:3]
    assert len(modules) == MAIN_MODULES
    assert [name for name in modules if not (folder / name).is_file()] == []


@pytest.mark.parametrize("page", READMES)
def test_modules_named_in_a_readme_exist(page: str) -> None:
    """READMEs name modules of their folder or a subfolder, and tests by their file names."""
    folder = page.removesuffix("README.md")
    text = re.sub(r"```.*?```", "", (ROOT / page).read_text(), flags=re.DOTALL)
    known = [f"/{path}" for path in MODULES if path.startswith((folder, "tests/"))]
    missing = [
        name
        for name in sorted(set(re.findall(r"`([a-z_0-9/]+\.py)`", text)))
        if name not in MODULES and not any(path.endswith(f"/{name}") for path in known)
    ]
    assert not missing
