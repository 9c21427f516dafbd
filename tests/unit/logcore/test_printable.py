from __future__ import annotations

import json
import sys
import unicodedata

from fencepost.logcore.printable import json_printable, printable

ESCAPED = {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}


def test_every_code_point_is_shown_or_escaped() -> None:
    for code in range(sys.maxunicode + 1):
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


def test_json_keeps_its_meaning() -> None:
    text = "".join(map(chr, range(sys.maxunicode + 1)))
    shown = json_printable(json.dumps({text: [text]}, ensure_ascii=False))
    assert shown.isprintable()
    # Adjacent surrogates in the text are read as one character.
    assert json.loads(shown) == json.loads(json.dumps({text: [text]}))
