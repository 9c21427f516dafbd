"""The ids that publishers give their messages, as text that no two different ids share.

JSON tells ``1``, ``"1"``, ``1.0`` and ``true`` apart, and so does the text: a number keeps the
digits that it came with, and nothing is rounded or converted.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any


class _Number(str):
    """A JSON number (or ``NaN``, ``Infinity``) as it was written."""

    __slots__ = ()


class _Object(tuple[tuple[str, Any], ...]):
    """The members of a JSON object, also those whose name comes twice."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class OwnId:
    """The id of one message, within its MQTT topic."""

    text: str
    is_json: bool = False
    """The text is JSON: the string ``"1"`` keeps its quotes, which a plain id has not."""
    former: str | None = None
    """The text that earlier versions made of the same JSON; several ids may share it."""


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
    """Return the field ``name`` of a JSON object; None for null and for what has no such field."""
    try:
        document = parsed(payload)
        found = dict(document).get(name) if isinstance(document, _Object) else None
        return None if found is None else OwnId(canonical(found), True, _former(found))
    except (ValueError, RecursionError):
        return None


def canonical(value: Any) -> str:
    """JSON of ``value``, which :func:`parsed` or the caller made: members sorted, ASCII alone."""
    if isinstance(value, _Number):
        return str(value)
    if isinstance(value, _Object):
        members = sorted((json.dumps(name), canonical(one)) for name, one in value)
        return "{" + ",".join(f"{name}:{one}" for name, one in members) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(canonical, value)) + "]"
    return json.dumps(value)


def _former(value: Any) -> str | None:
    """The ``str()`` of what ``json.loads`` gives, which earlier versions took for the id."""
    try:
        return str(_converted(value))
    except ValueError:  # a number of more digits than Python converts: such a message had no id
        return None


def _converted(value: Any) -> Any:
    if isinstance(value, _Number):
        return json.loads(value)
    if isinstance(value, _Object):
        return {name: _converted(one) for name, one in value}
    return [_converted(one) for one in value] if isinstance(value, list) else value
