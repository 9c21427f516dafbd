from __future__ import annotations

from pathlib import Path

import txn
from txn import diagram

FOLDER = Path(txn.__file__).parent
README = (FOLDER / "README.md").read_text()


def test_pictures_are_those_of_the_tables() -> None:
    assert f"```mermaid\n{diagram.states()}\n```" in README
    assert f"\n\n{diagram.ends()}\n\n" in README


def test_every_module_is_named() -> None:
    for module in FOLDER.glob("*.py"):
        assert module.name == "__init__.py" or f"`{module.name}`" in README
