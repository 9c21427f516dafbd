"""Imports what a broker imports as it serves, so that forked ones need not."""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules

from fencepost.coordinator import handlers

for _module in iter_modules(handlers.__path__):
    import_module(f"fencepost.coordinator.handlers.{_module.name}")
