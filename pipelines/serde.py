"""Conversion of keys and values between Python objects and bytes."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgpack


@dataclass(frozen=True, slots=True)
class Serde:
    """A pair of functions. None, the value of a tombstone, passes both unchanged."""

    name: str
    encode: Callable[[Any], bytes]
    decode: Callable[[bytes], Any]

    def dump(self, value: Any) -> bytes | None:
        """Return the bytes of ``value``. Raises the format's error for an unsupported value."""
        return None if value is None else self.encode(value)

    def load(self, data: bytes | None) -> Any:
        """Return the object. Raises ValueError (or a subclass) for malformed bytes."""
        return None if data is None else self.decode(data)


def _as_bytes(value: Any) -> bytes:
    if isinstance(value, str):
        return value.encode()
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value)
    raise TypeError(f"expected bytes or str, not {type(value).__name__}; or name a serde")


def _pack(value: Any) -> bytes:
    packed: bytes = msgpack.packb(value)
    return packed


def _unpack(data: bytes) -> Any:
    return msgpack.unpackb(data, strict_map_key=False)


def _to_json(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()


BYTES = Serde("bytes", _as_bytes, bytes)
TEXT = Serde("text", str.encode, lambda data: data.decode())
JSON = Serde("json", _to_json, json.loads)
MSGPACK = Serde("msgpack", _pack, _unpack)
