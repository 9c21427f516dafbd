"""The generated parts of the documentation match the code."""

from __future__ import annotations

import pytest

from docs.generate import PARTS, ROOT, between, written


@pytest.mark.parametrize("name", PARTS)
def test_a_page_is_up_to_date(name: str) -> None:
    assert written(name) == (ROOT / name).read_text(encoding="utf-8"), "run `make readme`"


def test_a_page_without_markers_is_refused() -> None:
    with pytest.raises(ValueError, match="apis:begin"):
        between("nothing here", "apis", "text")
