"""Close the logs that most of these tests kill or leave open."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _always(killed_logs_are_closed: None) -> None:
    """Close these logs after every test."""
