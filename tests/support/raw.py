"""Requests as plain data over a plain socket, without retries or caches.

``RawClient.call("join_group", 5, group_id="g", …)`` fills the other fields with the schema's
defaults, or with the zero of their types, and returns the response as dictionaries, lists and
numbers: errors by name (``"unknown_member_id"``), durations and timestamps in milliseconds, ids as
text.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
import functools
import importlib
import io
import itertools
import pkgutil
import socket
import ssl
import struct
import types
import typing
import uuid
from collections.abc import Mapping, Sequence
from typing import Any, Self

from kio.schema.errors import ErrorCode
from kio.schema.index import api_key_map
from kio.serial import entity_reader, entity_writer

from fencepost.protocol import overlay
from fencepost.protocol.api import KNOWN_APIS
from fencepost.protocol.schema import lenient_class

API_KEYS = {
    **{name: key for key, name in api_key_map.items()},
    **{api.module: int(api.key) for api in KNOWN_APIS.values()},
}
EPOCH = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)
Answer = dict[str, Any]


class ConnectionLostError(Exception):
    """The broker closed the connection instead of responding."""


@functools.cache
def _entity(api: str, version: int, kind: str) -> type:
    module = overlay.module_of(API_KEYS[api], version, kind)
    if module is None:
        module = importlib.import_module(f"kio.schema.{api}.v{version}.{kind}")
    wanted = f"{api.replace('_', '')}{kind}".lower()
    return next(value for name, value in vars(module).items() if name.lower() == wanted)


@functools.cache
def _hints(entity: type) -> dict[str, Any]:
    return typing.get_type_hints(entity)


def _is_nested(hint: Any) -> bool:
    return dataclasses.is_dataclass(hint) and isinstance(hint, type)


def _zero(hint: Any) -> Any:
    origin = typing.get_origin(hint)
    if origin in (types.UnionType, typing.Union):
        return None
    if origin is tuple:
        return ()
    if _is_nested(hint):
        return build(hint, {})
    if issubclass(hint, dt.timedelta):
        return dt.timedelta(0)
    for kind in (str, bytes, bool, int, float):
        if issubclass(hint, kind):
            return kind()
    if issubclass(hint, uuid.UUID):
        return uuid.UUID(int=0)
    raise TypeError(f"no zero for {hint}")


def _value(hint: Any, value: Any) -> Any:
    if value is None:
        return None
    origin = typing.get_origin(hint)
    if origin in (types.UnionType, typing.Union):
        return _value(
            next(arm for arm in typing.get_args(hint) if arm is not types.NoneType), value
        )
    if origin is tuple:
        return tuple(_value(typing.get_args(hint)[0], item) for item in value)
    if _is_nested(hint):
        return build(hint, value)
    if isinstance(hint, type) and issubclass(hint, dt.timedelta):
        return dt.timedelta(milliseconds=value)
    return value


def build(entity: type, values: Mapping[str, Any]) -> Any:
    """Build a schema entity from plain data; TypeError for an unknown field."""
    hints = _hints(entity)
    fields_by_name = {field.name: field for field in dataclasses.fields(entity)}
    if unknown := values.keys() - fields_by_name.keys():
        raise TypeError(f"{entity.__module__}.{entity.__name__} has no {sorted(unknown)}")
    filled = {}
    for name, field in fields_by_name.items():
        if name in values:
            filled[name] = _value(hints[name], values[name])
        elif field.default is dataclasses.MISSING:
            filled[name] = _zero(hints[name])
    return entity(**filled)


@functools.cache
def _fields_of_any_version(api: str) -> frozenset[str]:
    key = API_KEYS[api]
    modules = [
        overlay.module_of(*message)
        for message in overlay.messages()
        if message[::2] == (key, "request")
    ]
    if key in api_key_map:
        package = importlib.import_module(f"kio.schema.{api}")
        modules += [
            importlib.import_module(f"kio.schema.{api}.{version.name}.request")
            for version in pkgutil.iter_modules(package.__path__)
        ]
    names: set[str] = set()
    for module in modules:
        for value in vars(module).values():
            if dataclasses.is_dataclass(value):
                names.update(field.name for field in dataclasses.fields(value))
    return frozenset(names)


def _fitting(api: str, hint: Any, value: Any) -> Any:
    """Drop the fields that a version does not have; TypeError for a field of no version."""
    arms = [hint, *getattr(hint, "__args__", ())]
    arms += [inner for arm in arms for inner in getattr(arm, "__args__", ())]
    entity = next((a for a in arms if dataclasses.is_dataclass(a)), None)
    if entity is None or value is None:
        return value
    if isinstance(value, Mapping):
        if unknown := value.keys() - _fields_of_any_version(api):
            raise TypeError(f"{api} has no {sorted(unknown)} in any version")
        hints = _hints(entity)
        return {k: _fitting(api, hints[k], v) for k, v in value.items() if k in hints}
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [_fitting(api, entity, item) for item in value]
    return value


def fitted(api: str, version: int, body: Mapping[str, Any]) -> Any:
    """Return ``body`` without the fields that a version does not have.

    A field that no version has is a TypeError.
    """
    return _fitting(api, _entity(api, version, "request"), body)


def plain(value: Any) -> Any:
    """Turn a decoded entity into plain data."""
    if isinstance(value, ErrorCode):
        return value.name
    if dataclasses.is_dataclass(value):
        return {
            field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)
        }
    if isinstance(value, tuple):
        return [plain(item) for item in value]
    if isinstance(value, dt.timedelta):
        return round(value / dt.timedelta(milliseconds=1))
    if isinstance(value, dt.datetime):
        return round((value - EPOCH) / dt.timedelta(milliseconds=1))
    if isinstance(value, uuid.UUID):
        return str(value)
    return value


def encode(
    api: str, version: int, correlation_id: int, client_id: str, body: Mapping[str, Any]
) -> bytes:
    """Encode one request with its header, without the length prefix."""
    entity = build(_entity(api, version, "request"), body)
    header = build(
        type(entity).__header_schema__,
        {
            "request_api_key": API_KEYS[api],
            "request_api_version": version,
            "correlation_id": correlation_id,
            "client_id": client_id,
        },
    )
    out = io.BytesIO()
    entity_writer(type(header))(out, header)
    entity_writer(type(entity))(out, entity)
    return out.getvalue()


def decode(api: str, version: int, frame: bytes) -> tuple[int, Answer]:
    """Decode a response frame to (correlation id, response); it must have no further bytes."""
    entity = _entity(api, version, "response")
    header, used = entity_reader(entity.__header_schema__)(frame, 0)
    body, size = entity_reader(lenient_class(entity))(frame, used)
    assert used + size == len(frame), (
        f"{api} v{version}: {len(frame) - used - size} bytes left over"
    )
    return header.correlation_id, plain(body)


def decode_request(api: str, version: int, frame: bytes) -> Answer:
    """Decode a request frame with its header, for tests that simulate a broker."""
    entity = _entity(api, version, "request")
    _, used = entity_reader(entity.__header_schema__)(frame, 0)
    body, size = entity_reader(entity)(frame, used)
    assert used + size == len(frame), f"{api} v{version}: more than a request"
    request: Answer = plain(body)
    return request


def encode_answer(api: str, version: int, correlation_id: int, body: Mapping[str, Any]) -> bytes:
    """Encode one response with its header, without the length prefix."""
    entity = build(_entity(api, version, "response"), body)
    header = build(type(entity).__header_schema__, {"correlation_id": correlation_id})
    out = io.BytesIO()
    entity_writer(type(header))(out, header)
    entity_writer(type(entity))(out, entity)
    return out.getvalue()


class RawClient:
    """One connection."""

    def __init__(
        self,
        bootstrap: str,
        *,
        client_id: str = "raw",
        deadline_s: float = 20,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """``tls`` is the SSL context for the connection to ``localhost``, None for plaintext."""
        host, port = bootstrap.rsplit(":", 1)
        self.client_id = client_id
        self._correlation = itertools.count(1)
        self._waiting: list[tuple[str, int, int]] = []
        self._socket = socket.create_connection((host, int(port)), deadline_s)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if tls is not None:
            self._socket = tls.wrap_socket(self._socket, server_hostname="localhost")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._socket.close()

    @property
    def local_port(self) -> int:
        """The local port of the connection."""
        return int(self._socket.getsockname()[1])

    def send_bytes(self, data: bytes) -> None:
        """Send raw bytes, such as malformed requests."""
        self._socket.sendall(data)

    def send(self, api: str, version: int, **body: Any) -> None:
        """Send a request without waiting; :meth:`receive` returns its response."""
        correlation_id = next(self._correlation)
        frame = encode(api, version, correlation_id, self.client_id, body)
        self.send_bytes(struct.pack(">i", len(frame)) + frame)
        self._waiting.append((api, version, correlation_id))

    def receive(self) -> Answer:
        """Return the response to the oldest unanswered request."""
        frame = self.receive_frame()
        api, version, correlation_id = self._waiting.pop(0)
        echoed, answer = decode(api, version, frame)
        assert echoed == correlation_id, f"{api}: correlation {echoed}, not {correlation_id}"
        return answer

    def call(self, api: str, version: int, **body: Any) -> Answer:
        """Send a request and return its response; ConnectionLostError if the broker closes."""
        self.send(api, version, **body)
        return self.receive()

    def ask(self, api: str, version: int, body: Mapping[str, Any]) -> Answer:
        """Send a body of ``tests/support/requests.py``, without the fields of other versions."""
        return self.call(api, version, **fitted(api, version, body))

    def receive_frame(self) -> bytes:
        """Return one whole frame without its length prefix."""
        (size,) = struct.unpack(">i", self._exactly(4))
        return self._exactly(size)

    def _exactly(self, size: int) -> bytes:
        parts: list[bytes] = []
        while size:
            try:
                part = self._socket.recv(min(size, 1 << 20))
            except ConnectionResetError:
                part = b""
            if not part:
                raise ConnectionLostError
            parts.append(part)
            size -= len(part)
        return b"".join(parts)


ERROR_FIELDS = frozenset({"error_code", "partition_error_code"})
"""Fields that hold errors; AddPartitionsToTxn has a different name."""


def errors_in(answer: Any) -> list[str]:
    """Return every error name in a response, in order, including ``none``."""
    if isinstance(answer, Mapping):
        errors = [value for name, value in answer.items() if name in ERROR_FIELDS]
        return errors + [error for value in answer.values() for error in errors_in(value)]
    if isinstance(answer, Sequence) and not isinstance(answer, str | bytes):
        return [error for item in answer for error in errors_in(item)]
    return []
