"""The generated parts of the README say what the code says."""

from __future__ import annotations

from pathlib import Path

import pytest

from fencepost.coordinator.tools.readme import api_table, between

README = Path(__file__).resolve().parents[3] / "README.md"


def test_the_api_table_is_up_to_date():
    page = README.read_text(encoding="utf-8")
    assert between(page, "apis", api_table()) == page, "run `make readme`"


def test_a_page_without_markers_is_refused():
    with pytest.raises(ValueError, match="apis:begin"):
        between("nothing here", "apis", "text")
