"""Lines of ``fencepost produce``: splitting, joining, and their meaning as records."""

from __future__ import annotations

import contextlib
import io
import json
import os
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fencepost.cli.record_input import (
    BATCH_BYTES,
    BATCH_LINES,
    MAX_LINE_BYTES,
    RECORD_BYTES,
    BadLineError,
    JsonLines,
    Line,
    TextLines,
    chunks,
)
from fencepost.client.partitioner import placed


@given(st.lists(st.binary(max_size=20).filter(lambda line: b"\n" not in line), max_size=30))
def test_every_line_is_read_once_with_its_number(lines):
    file = io.BytesIO(b"\n".join(lines))
    wanted = file.getvalue().split(b"\n")
    if wanted[-1] == b"":
        wanted.pop()
    found = [line for chunk in chunks(file) for line in chunk]
    assert found == [(number, line.rstrip(b"\r")) for number, line in enumerate(wanted, 1)]


def test_chunk_of_lines_is_bounded_in_lines_and_bytes():
    sizes = [len(chunk) for chunk in chunks(io.BytesIO(b"x\n" * (2 * BATCH_LINES + 1)))]
    assert sizes == [BATCH_LINES, BATCH_LINES, 1]
    fitting = BATCH_BYTES // 4 - RECORD_BYTES - 9
    file = io.BytesIO((b"x" * fitting + b"\n") * 9)
    assert [len(chunk) for chunk in chunks(file, overhead=9)] == [4, 4, 1]
    file = io.BytesIO((b"x" * (fitting + 1) + b"\n") * 9)
    assert [len(chunk) for chunk in chunks(file, overhead=9)] == [3, 3, 3]


def test_line_above_the_size_limit_is_refused_and_not_buffered_whole():
    text = TextLines(None, None, None, ())
    data = b"a\n" + b"x" * (MAX_LINE_BYTES + 1) + b"\n" + b"y" * (5 * MAX_LINE_BYTES) + b"\nb\n"
    found = {number: line for chunk in chunks(io.BytesIO(data)) for number, line in chunk}
    assert sorted(found) == [1, 2, 3, 4]
    assert max(map(len, found.values())) <= MAX_LINE_BYTES + (64 << 10)
    for number in (2, 3):
        with pytest.raises(BadLineError, match=f"more than {MAX_LINE_BYTES} bytes"):
            text.record(number, found[number])
    assert text.record(4, found[4]).value == b"b"
    assert text.record(1, b"x" * MAX_LINE_BYTES).value == b"x" * MAX_LINE_BYTES


def test_complete_lines_are_passed_on_while_the_input_pauses():
    reading, writing = os.pipe()
    seen: list[list[tuple[int, bytes]]] = []
    arrived = threading.Semaphore(0)

    def read() -> None:
        with open(reading, "rb") as file:  # noqa: PTH123 - a descriptor, not a path
            for chunk in chunks(file):
                seen.append(chunk)
                arrived.release()

    reader = threading.Thread(target=read)
    reader.start()
    for text in (b"a\nb\n", b"c\nhalf", b" a line\n"):
        os.write(writing, text)
        assert arrived.acquire(timeout=60)
    os.close(writing)
    reader.join(60)
    assert seen == [[(1, b"a"), (2, b"b")], [(3, b"c")], [(4, b"half a line")]]


def text(**how) -> TextLines:
    return TextLines(how.get("separator"), how.get("key"), how.get("null"), ())


@pytest.mark.parametrize(
    ("how", "line", "key", "value"),
    [
        ({}, b"v", None, b"v"),
        ({}, b"", None, b""),
        ({"separator": b"="}, b"k=v=w", b"k", b"v=w"),
        ({"separator": b"="}, b"k=", b"k", None),
        ({"separator": b"=", "null": b"NULL"}, b"k=NULL", b"k", None),
        ({"separator": b"=", "null": b"NULL"}, b"k=", b"k", b""),
        ({"separator": b"=", "null": b"NULL"}, b"NULL=v", None, b"v"),
        ({"key": b"k"}, b"v", b"k", b"v"),
        ({"key": b"k"}, b"", b"k", None),
        ({"null": b"NULL"}, b"NULL", None, None),
    ],
)
def test_text_line_is_split_into_key_and_value(how, line, key, value):
    assert text(**how).record(7, line) == Line(7, key, value)


@pytest.mark.parametrize(
    ("row", "wanted"),
    [
        ({"value": "v"}, Line(7, None, b"v")),
        ({"key": "k", "value": None}, Line(7, b"k", None)),
        ({"key": "", "value": ""}, Line(7, b"", b"")),
        ({"value": {"a": [1, "ü"]}}, Line(7, None, '{"a":[1,"ü"]}'.encode())),
        ({"key": 5, "value": True}, Line(7, b"5", b"true")),
        ({"key_base64": "/w==", "value_base64": "AAE="}, Line(7, b"\xff", b"\0\1")),
        ({"value": "\\xff", "value_base64": "/w=="}, Line(7, None, b"\xff")),
        ({"value": "v", "value_base64": None}, Line(7, None, None)),
        ({"value": "", "headers": {"a": "1"}}, Line(7, None, b"", (("a", b"1"),))),
        (
            {"value": "", "headers": [["a", "1"], ["a", None]]},
            Line(7, None, b"", (("a", b"1"), ("a", None))),
        ),
        (
            {"value": "", "headers": [["a", "?"]], "headers_base64": [["a", "/w=="]]},
            Line(7, None, b"", (("a", b"\xff"),)),
        ),
        ({"value": "", "partition": 3}, Line(7, None, b"", (), 3)),
        ({"value": "", "timestamp": 5}, Line(7, None, b"", (), None, 5)),
        ({"value": "", "timestamp": "1970-01-01T00:00:05Z"}, Line(7, None, b"", (), None, 5000)),
        ({"value": "", "topic": "t", "offset": 3, "decoded": {}}, Line(7, None, b"")),
    ],
)
def test_json_line_is_read_as_a_record(row, wanted):
    assert JsonLines(()).record(7, json.dumps(row).encode()) == wanted


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("{", "is not valid JSON: Expecting property name"),
        ("[]", "is not a JSON object"),
        ("{}", "has no value; null makes a tombstone"),
        ('{"key": "k"}', "has no value"),
        ('{"value": 1, "kye": 2}', "unknown field 'kye'; the fields are decoded, headers"),
        ('{"value_base64": "x"}', "value_base64 is not valid base64"),
        ('{"value_base64": 5}', "value_base64 is not valid base64"),
        ('{"value": "\\ud800"}', "a lone surrogate"),
        ('{"value": 1, "partition": -1}', "partition is not a number from 0"),
        ('{"value": 1, "partition": true}', "partition is not a number"),
        ('{"value": 1, "timestamp": "soon"}', "'soon' is not a time"),
        ('{"value": 1, "timestamp": 1.5}', "timestamp is not a number"),
        ('{"value": 1, "headers": 5}', "neither an object nor a list"),
        ('{"value": 1, "headers": [5]}', "not a pair"),
        ('{"value": 1, "headers": {"a": 5}}', "the value of 'a' is not a string"),
        ("[" * 100_000, "is not valid JSON"),
        ("1" * 5_000, "is not valid JSON"),
    ],
)
def test_invalid_json_line_is_refused_with_a_reason(line, why):
    with pytest.raises(BadLineError) as caught:
        JsonLines(()).record(7, line.encode())
    assert why in str(caught.value)


@given(st.binary(max_size=60))
def test_random_line_is_a_record_or_is_refused(line):
    for means in (JsonLines(()), text(separator=b":")):
        with contextlib.suppress(BadLineError):
            assert means.record(1, line).number == 1


def test_lines_without_key_share_one_random_partition():
    lines = [Line(number, None, b"v") for number in range(10)]
    seen = set()
    for _ in range(200):
        (target,) = placed(lines, None, [0, 1, 2])
        seen.add(target)
    assert seen == {0, 1, 2}
    named = [Line(1, None, b"", (), 2), Line(2, b"k", b"", (), 1)]
    assert placed(named, None, [0, 1, 2]) == {2: named[:1], 1: named[1:]}
    assert placed(named, 0, [0, 1, 2]) == {0: named}
