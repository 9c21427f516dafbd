"""What pytest loads by the entry point ``fencepost``: fixtures of a broker for tests."""

from __future__ import annotations
