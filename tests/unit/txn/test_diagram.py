from __future__ import annotations

import re
from pathlib import Path

from fencepost import txn
from fencepost.txn import diagram

FOLDER = Path(txn.__file__).parent
README = (FOLDER / "README.md").read_text()


def test_readme_diagrams_match_the_state_tables() -> None:
    assert f"```mermaid\n{diagram.states()}\n```" in README
    assert f"\n\n{diagram.ends()}\n\n" in README


def test_readme_names_every_module() -> None:
    for module in FOLDER.glob("*.py"):
        assert module.name == "__init__.py" or f"`{module.name}`" in README


def test_tests_named_in_readme_exist() -> None:
    named = set(re.findall(r"`(test_\w+)`", README))
    tests = Path(__file__).resolve().parents[2]
    there = {
        name
        for file in tests.rglob("test_*.py")
        for name in re.findall(r"^(?:async )?def (test_\w+)", file.read_text(), re.MULTILINE)
    }
    assert len(named) > 20
    assert named <= there, named - there
