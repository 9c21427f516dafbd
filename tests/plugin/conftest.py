"""Restores the plugin's own fixtures, which the root conftest overrides by the same names."""

from __future__ import annotations

from fencepost.testing.plugin import kafka

__all__ = ["kafka"]
