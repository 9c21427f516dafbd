"""The generated parts of the documentation match the code."""

from __future__ import annotations

import pytest

import fencepost
import fencepost.pipelines
import fencepost.testing
from docs.classes import NOT_DESCRIBED, PUBLIC, named_classes
from docs.generate import FILES, PARTS, ROOT, between, written


@pytest.mark.parametrize("name", [*PARTS, *FILES])
def test_generated_page_is_up_to_date(name: str) -> None:
    assert written(name) == (ROOT / name).read_text(encoding="utf-8"), "run `make readme`"


def test_reference_describes_each_class_named_in_signatures() -> None:
    described = {name for _, _, names in PUBLIC for name in names}
    named = dict(map(reversed, named_classes()))
    assert named.keys() - described - NOT_DESCRIBED.keys() == set()
    assert {"Fired", "GroupView", "SeenRequest"} <= named.keys()  # from methods and fields, too


def test_reference_describes_each_exported_name() -> None:
    described = {name for _, _, names in PUBLIC for name in names}
    exported = {*fencepost.__all__, *fencepost.testing.__all__, *fencepost.pipelines.__all__}
    assert exported - described == set()


def test_page_without_markers_is_refused() -> None:
    with pytest.raises(ValueError, match="apis:begin"):
        between("nothing here", "apis", "text")
