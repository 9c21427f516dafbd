"""The plugin's own fixtures in place of the root's fixtures of the same names."""

from __future__ import annotations

from fencepost.testing.plugin import kafka

__all__ = ["kafka"]
