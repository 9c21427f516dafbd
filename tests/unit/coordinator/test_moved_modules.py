"""Importing a module by its former name gives the same module."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

from fencepost.coordinator.moved_modules import MOVED, present_name
from tests.support.kafka import ROOT


@pytest.mark.parametrize("former", MOVED)
def test_former_module_name_imports_present_module_with_a_warning(former: str) -> None:
    present = MOVED[former]
    folder = ROOT / Path(*present.split(".")[1:])
    names = sorted(path.stem for path in folder.glob("*.py") if path.stem != "__init__")
    assert names
    for name in names:
        wanted = importlib.import_module(f"{present}.{name}")
        spec = wanted.__spec__
        sys.modules.pop(f"{former}.{name}", None)
        with pytest.warns(DeprecationWarning, match=f"{former}.{name} is {present}.{name} now"):
            found = importlib.import_module(f"{former}.{name}")
        assert found is wanted
        assert wanted.__spec__ is spec


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_former_package_has_the_attributes_of_the_present_one() -> None:
    cli = importlib.import_module("fencepost.coordinator.cli")
    assert cli.main is importlib.import_module("fencepost.cli").main
    with pytest.raises(AttributeError):
        _ = cli.nothing


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_unknown_module_is_not_found() -> None:
    for name in ("fencepost.coordinator.wire.nothing", "fencepost.coordinator.nothing"):
        with pytest.raises(ModuleNotFoundError):
            importlib.import_module(name)


def test_present_name_is_none_for_similar_names() -> None:
    for name in ("fencepost.coordinator.network", "fencepost.coordinator.handlers", "fencepost"):
        assert present_name(name) is None
