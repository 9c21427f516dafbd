from __future__ import annotations

import json
import sys
import unicodedata
from collections.abc import Sequence

import pytest

from fencepost.logcore.printable import json_printable, printable

ESCAPED = {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}
COMMON = range(0x3000)
"""The range of code points that ``make test`` checks completely."""
STEP = 61
"""The distance of checked code points above COMMON: a prime, so that their last digits differ."""
EVERY = range(sys.maxunicode + 1)
some_and_all = pytest.mark.parametrize(
    "codes",
    [
        pytest.param([*COMMON, *EVERY[COMMON.stop :: STEP]], id="some"),
        pytest.param(EVERY, id="all", marks=pytest.mark.slow),
    ],
)


@some_and_all
def test_every_code_point_is_shown_or_escaped(codes: Sequence[int]) -> None:
    for code in codes:
        char = chr(code)
        shown = printable(char)
        assert shown.isprintable()
        assert (shown == char) == char.isprintable()
        if unicodedata.category(char) in ESCAPED:
            assert shown.startswith("\\")
            assert shown.encode("ascii").decode("unicode_escape") == char


def test_printable_text_stays_as_it_is() -> None:
    for text in ("", "orders-1", "Zürich 東京 Ελλάδα עברית", "a\\nb"):
        assert printable(text) == text


@some_and_all
def test_printable_json_decodes_to_the_same_value(codes: Sequence[int]) -> None:
    text = "".join(map(chr, codes))
    shown = json_printable(json.dumps({text: [text]}, ensure_ascii=False))
    assert shown.isprintable()
    # Adjacent surrogates in the text decode to one character.
    assert json.loads(shown) == json.loads(json.dumps({text: [text]}))
