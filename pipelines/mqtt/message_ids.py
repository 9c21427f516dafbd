"""The ids that publishers give their messages, as texts that differ for different ids.

JSON distinguishes ``1``, ``"1"``, ``1.0`` and ``true``, and so does the text: a number keeps the
digits it was written with, and nothing is rounded or converted.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any


class _Number(str):
    """A JSON number (or ``NaN``, ``Infinity``) as it was written."""

    __slots__ = ()


class _Object(tuple[tuple[str, Any], ...]):
    """The members of a JSON object, including repeated names."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class OwnId:
    """The id of one message, within its MQTT topic."""

    text: str
    is_json: bool = False
    """Whether the text is JSON: the string ``"1"`` then has quotes, unlike a plain id."""
    former: str | None = None
    """The text by which earlier versions identified the same JSON; several ids may share it."""


def parsed(payload: bytes) -> Any:
    """Parse JSON without loss. Raises ValueError and RecursionError."""
    return json.loads(
        payload,
        object_pairs_hook=_Object,
        parse_int=_Number,
        parse_float=_Number,
        parse_constant=_Number,
    )


def json_id(payload: bytes, name: str) -> OwnId | None:
    """Return the field ``name`` of a JSON object; None for null, and without such a field."""
    try:
        document = parsed(payload)
        value = dict(document).get(name) if isinstance(document, _Object) else None
        return None if value is None else OwnId(canonical(value), True, _former(value))
    except (ValueError, RecursionError):
        return None


def canonical(value: Any) -> str:
    """Return ``value``, parsed by :func:`parsed`, as ASCII JSON with sorted members."""
    if isinstance(value, _Number):
        return str(value)
    if isinstance(value, _Object):
        members = sorted((json.dumps(name), canonical(item)) for name, item in value)
        return "{" + ",".join(f"{name}:{text}" for name, text in members) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(canonical, value)) + "]"
    return json.dumps(value)


def _former(value: Any) -> str | None:
    """Return ``str()`` of the result of ``json.loads``, which was the id in earlier versions."""
    try:
        return str(_converted(value))
    except ValueError:  # too many digits for Python to convert: such a message had no id
        return None


def _converted(value: Any) -> Any:
    if isinstance(value, _Number):
        return json.loads(value)
    if isinstance(value, _Object):
        return {name: _converted(item) for name, item in value}
    return [_converted(item) for item in value] if isinstance(value, list) else value
