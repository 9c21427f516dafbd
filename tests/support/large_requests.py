"""Large requests to any API; most are refused for their names, numbers or payload."""

from __future__ import annotations

import contextlib
import datetime as dt
import random
from collections import Counter
from typing import Any

from fencepost.protocol.api import APIS
from fencepost.protocol.codec import decode_response, encode_request
from fencepost.protocol.limits import MAX_STRING_BYTES
from fencepost.protocol.schema import FieldInfo, all_fields, is_flexible, message_class
from fencepost.protocol.writer import uvarint
from tests.fuzz.entities import INTEGERS, random_leaf, required
from tests.support.raw import ConnectionLostError, RawClient, errors_in, plain

CLOSED = "closed"
"""Counted in place of an error when the broker closes the connection instead of responding."""

KNOWN = "known"
"""The name of a topic, group or transactional id that may exist."""

_UNKNOWN_TAG = 9_999
_LONG = "z" * MAX_STRING_BYTES
_NAMES = ("", KNOWN, KNOWN, "unknown")
_WAITS_MS = (-1, 0, 500)
"""Timeouts of requests. They are short because the broker accepts some of the requests."""


def send_large(
    bootstrap: str, api_key: int, count: int, size: int, rng: random.Random
) -> Counter[str]:
    """Send requests of all versions of an API one by one; return the errors of the responses."""
    api, answers = APIS[api_key], Counter[str]()
    with contextlib.ExitStack() as stack:
        client: RawClient | None = None
        for number in range(count):
            if client is None:
                client = stack.enter_context(RawClient(bootstrap))
            version = api.min_version + number % (api.max_version - api.min_version + 1)
            client.send_bytes(large_request(api_key, version, size, rng))
            try:
                answer = decode_response(api_key, version, client.receive_frame())[1]
            except ConnectionLostError:
                client = None
                answers[CLOSED] += 1
            else:
                answers.update(set(errors_in(plain(answer))) - {"none"} or {"none"})
    return answers


def large_request(api_key: int, version: int, size: int, rng: random.Random) -> bytes:
    """Return a frame with its length, of about ``size`` bytes.

    One random field of bytes or strings fills most of the frame. If the request has no such field,
    an unknown tagged field fills the frame. A version without tagged fields then has a smaller
    frame.
    """
    entity = _entity(message_class(api_key, version, "request"), rng, size)
    frame = b"".join(bytes(chunk) for chunk in encode_request(api_key, version, 1, "large", entity))
    room = size - len(frame)
    if is_flexible(api_key, version) and room > 0:
        tag = uvarint(1) + uvarint(_UNKNOWN_TAG) + uvarint(room) + bytes(room)
        frame = frame[4:-1] + tag
        frame = len(frame).to_bytes(4) + frame
    return frame


def _entity(cls: type, rng: random.Random, size: int) -> Any:
    fields = [field for field in all_fields(cls) if field.tag is None]
    wide = [field.name for field in fields if _is_wide(field)]
    chosen = rng.choice(wide) if wide else ""
    values = {
        field.name: _value(field, rng, size if field.name == chosen else 0) for field in fields
    }
    if "acks" in values:  # with acks=0 there would be no response
        values["acks"] = values["acks"] or 1
    if "max_wait" in values:
        values["max_wait"] = dt.timedelta(0)
    return cls(**{**required(cls, values), **values})


def _is_wide(field: FieldInfo) -> bool:
    if field.struct is not None:
        return any(_is_wide(inner) for inner in all_fields(field.struct) if inner.tag is None)
    return field.kafka_type in {"bytes", "records", "string"}


def _value(field: FieldInfo, rng: random.Random, size: int) -> Any:
    if not field.is_array:
        return _element(field, rng, size)
    count = rng.choice((0, 1, 2))
    if size:
        # Either one large element, or many elements with strings of the maximum length.
        count = rng.choice((1, max(1, size // MAX_STRING_BYTES)))
    return tuple(_element(field, rng, size // max(1, count)) for _ in range(count))


def _element(field: FieldInfo, rng: random.Random, size: int) -> Any:
    if field.struct is not None:
        return _entity(field.struct, rng, size)
    kind = field.kafka_type
    if kind == "string":
        return _LONG[:size] if size else rng.choice(_NAMES)
    if kind in {"bytes", "records"}:
        return rng.randbytes(size)
    if kind in {"timedelta_i32", "timedelta_i64"}:
        return dt.timedelta(milliseconds=rng.choice(_WAITS_MS))
    if kind in INTEGERS and rng.random() < 0.5:
        return 0
    return random_leaf(field, rng)
