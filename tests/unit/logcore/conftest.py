"""Close the logs that tests kill or leave open."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _always(killed_logs_are_closed: None) -> None:
    """Close logs after every test."""
