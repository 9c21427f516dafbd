"""The plugin's own fixtures, where the root has others of their names."""

from __future__ import annotations

from fencepost.testing.plugin import kafka

__all__ = ["kafka"]
