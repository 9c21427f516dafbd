"""The plugin's own fixtures, instead of the root conftest's fixtures of the same names."""

from __future__ import annotations

from fencepost.testing.plugin import kafka

__all__ = ["kafka"]
