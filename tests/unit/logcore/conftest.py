"""Most tests here kill a log, or leave one open."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _always(killed_logs_are_closed: None) -> None:
    """Close what they leave."""
