"""Random messages of any kio class, with values in the ranges of the field types."""

from __future__ import annotations

import datetime as dt
import random
import uuid
from typing import Any

from kio.schema.errors import ErrorCode

from fencepost.protocol.schema import FieldInfo, all_fields

ERRORS = list(ErrorCode)
INTEGERS = {
    "int8": (-(2**7), 2**7 - 1),
    "uint8": (0, 2**8 - 1),
    "int16": (-(2**15), 2**15 - 1),
    "uint16": (0, 2**16 - 1),
    "int32": (-(2**31), 2**31 - 1),
    "uint32": (0, 2**32 - 1),
    "int64": (-(2**63), 2**63 - 1),
    "uint64": (0, 2**64 - 1),
}
TEXTS = ["", "a", "topic-1", "ß€𝄞", "x" * 127, "y" * 128, "z" * 300]


def random_entity(cls: type, rng: random.Random, width: int = 3) -> Any:
    """Return an instance of ``cls``; 40 % of the tagged fields keep their default."""
    values = {}
    for field in all_fields(cls):
        if field.tag is not None and rng.random() < 0.4:
            # Omit half of these fields, to test kio's own default object as well.
            if rng.random() < 0.5 or field.default is None:
                continue
            values[field.name] = typed_default(field)
        elif field.is_array:
            count = rng.choice((0, 1, width))
            inner = max(1, width - 1)
            values[field.name] = tuple(random_value(field, rng, inner) for _ in range(count))
        else:
            values[field.name] = random_value(field, rng, width)
    return cls(**{**required(cls, values), **values})


def required(cls: type, given: dict[str, Any]) -> dict[str, Any]:
    """Return a value for each field that has no default and is missing in ``given``."""
    import dataclasses

    missing = {
        field.name
        for field in dataclasses.fields(cls)
        if field.default is dataclasses.MISSING and field.name not in given
    }
    return {field.name: typed_default(field) for field in all_fields(cls) if field.name in missing}


def typed_default(field: FieldInfo) -> Any:
    """Return the field's default; a number becomes kio's type for durations and error codes."""
    if field.is_array or field.struct is not None:
        return field.default
    if field.kafka_type in {"timedelta_i32", "timedelta_i64"} and isinstance(field.default, int):
        return dt.timedelta(milliseconds=field.default)
    if field.kafka_type == "error_code":
        return ErrorCode(field.default)
    return field.default


def random_value(field: FieldInfo, rng: random.Random, width: int) -> Any:
    """Return one value, or one element, of ``field``."""
    if field.nullable and field.tag is None and not field.is_array and rng.random() < 0.3:
        return None
    if field.struct is not None:
        return random_entity(field.struct, rng, width)
    return random_leaf(field, rng)


def random_leaf(field: FieldInfo, rng: random.Random) -> Any:
    """Return a value of the field's type, regardless of the field's meaning."""
    kind = field.kafka_type
    if kind in INTEGERS:
        low, high = INTEGERS[kind]
        return rng.choice((low, high, 0, 1, rng.randint(low, high)))
    if kind == "string":
        return rng.choice(TEXTS)
    if kind in {"bytes", "records"}:
        return rng.randbytes(rng.choice((0, 1, 100, 5000)))
    if kind == "bool":
        return rng.random() < 0.5
    if kind == "float64":
        return rng.uniform(-1e6, 1e6)
    if kind == "error_code":
        return rng.choice(ERRORS)
    if kind == "uuid":
        return rng.choice((None, uuid.UUID(int=rng.getrandbits(128) | 1)))
    if kind == "timedelta_i32":
        return dt.timedelta(milliseconds=rng.randint(-(2**31), 2**31 - 1))
    if kind == "timedelta_i64":
        return dt.timedelta(milliseconds=rng.randint(-(2**40), 2**40))
    if kind == "datetime_i64":
        return dt.datetime.fromtimestamp(rng.randrange(2**31), tz=dt.UTC)
    raise AssertionError(kind)
