"""Decoding and encoding of requests and responses, for brokers and clients."""

from __future__ import annotations

import gc
import struct
from collections.abc import Mapping
from functools import cache
from typing import Any, NamedTuple, cast

from kio.schema.errors import ErrorCode
from kio.serial.errors import SerialError

from fencepost.logcore.values import dataclass
from fencepost.protocol.api import APIS, ApiKey
from fencepost.protocol.errors import EncodeError, MalformedRequest, UnsupportedVersion
from fencepost.protocol.limits import (
    BIG_CHUNK_BYTES,
    MAX_REQUEST_OBJECTS,
    MAX_RESPONSE_OBJECTS,
    SMALL_FRAME_BYTES,
)
from fencepost.protocol.messages import response_factory
from fencepost.protocol.pieces import LONG_BYTES, read_in_steps, reader
from fencepost.protocol.precheck import (
    Cut,
    Frame,
    Walker,
    apply_cuts,
    check,
    check_in_steps,
    checked,
    read_uvarint,
    walker,
)
from fencepost.protocol.schema import (
    Entity,
    is_flexible,
    message_class,
    response_header_is_tagged,
)
from fencepost.protocol.steps import Steps, finish
from fencepost.protocol.writer import Chunk, InFile, compile_writer, total_size

_HEADER = struct.Struct(">hhih")
_LENGTH_AND_ID = struct.Struct(">ii")
_LENGTH_AND_REQUEST = struct.Struct(">ihhih")
_ID = struct.Struct(">i")
PARTS_PER_STEP = 256
"""The number of parts of a response that are written and joined in one step: a few tenths of
a millisecond."""

_NOT_READ = (SerialError, ArithmeticError, ValueError, TypeError)
"""Errors of the native reader. Arithmetic and value errors come from durations and dates beyond
Python's range."""

_NOT_WRITTEN = (struct.error, TypeError, AttributeError, ValueError)
"""Errors of the writer for a value of the wrong type."""

_TOO_MANY_HEADER_TAGS = 16
"""The maximum number of tagged fields in a request header; no version of Kafka defines any."""

ALL_VERSIONS: Mapping[int, tuple[int, int]] = {
    key: (api.min_version, api.stable_max) for key, api in APIS.items()
}


@dataclass(slots=True)
class Request:
    """A decoded request. ``body`` is an instance of kio's request class of that version."""

    api_key: int
    api_version: int
    correlation_id: int
    client_id: str | None
    body: Entity
    frame: bytes = b""
    """The whole frame, header and body, kept if the request may be forwarded."""


def decode_request(
    frame: Frame,
    versions: Mapping[int, tuple[int, int]] = ALL_VERSIONS,
    *,
    max_objects: int = MAX_REQUEST_OBJECTS,
) -> Request:
    """Decode a frame (without its length prefix) against the served ``versions`` by API key.

    Raises :class:`UnsupportedVersion` for an API or version not in ``versions``, and
    :class:`MalformedRequest` for everything else that is not a request within the limits. For
    arbitrary bytes it raises no other exception and makes no large allocation.
    """
    if len(frame) <= SMALL_FRAME_BYTES:
        frame = bytes(frame)  # indexing a memoryview costs twice as much as indexing bytes
    head = _head(frame, versions)
    kind = head.kind
    cuts = checked(kind.walk, frame, head.end, max_objects)
    return _request(head, _read(kind.cls, kind.read, frame, head.end, cuts))


def decode_request_in_steps(
    frame: Frame,
    versions: Mapping[int, tuple[int, int]] = ALL_VERSIONS,
    *,
    max_objects: int = MAX_REQUEST_OBJECTS,
    long_bytes: int = LONG_BYTES,
) -> Steps[Request]:
    """Decode a large frame as :func:`decode_request` does, in steps.

    The caller must not modify ``frame`` before the last step. Arrays of more than ``long_bytes``
    are decoded element by element.
    """
    head = _head(frame, versions)
    cls, pos = head.kind.cls, head.end
    walk = yield from check_in_steps(cls, frame, pos, max_objects, long_bytes)
    yield
    if walk.cuts:
        frame, pos = apply_cuts(frame, walk.cuts, pos, len(frame)), 0
        walk = yield from check_in_steps(cls, frame, pos, max_objects, long_bytes)
    try:
        return _request(head, (yield from read_in_steps(cls, _read_only(frame), pos, walk)))
    except _NOT_READ as error:
        raise MalformedRequest(f"not a {cls.__name__}: {error}") from error


class _Kind(NamedTuple):
    """The class, walker and reader for the requests of one version."""

    cls: type
    is_flexible: bool
    walk: Walker
    read: Any


@cache
def _kind(api_key: int, version: int) -> _Kind:
    cls = message_class(api_key, version, "request")
    return _Kind(cls, is_flexible(api_key, version), walker(cls), reader(cls))


class _Head(NamedTuple):
    """A request's header, its end position, and the class of the body."""

    api_key: int
    version: int
    correlation_id: int
    client_id: str | None
    kind: _Kind
    end: int


def _head(frame: Frame, versions: Mapping[int, tuple[int, int]]) -> _Head:
    try:
        api_key, version, correlation_id, size = _HEADER.unpack_from(frame)
    except struct.error as error:
        raise MalformedRequest("the frame is shorter than a request header") from error
    served = versions.get(api_key)
    if served is None or not served[0] <= version <= served[1]:
        try:
            client_id, _ = _client_id(frame, size)
        except MalformedRequest:
            client_id = None  # The header of an unknown version may differ.
        raise UnsupportedVersion(api_key, version, correlation_id, served, client_id)
    client_id, end = _client_id(frame, size)
    kind = _kind(api_key, version)
    if kind.is_flexible:
        end = _skip_header_tags(frame, end)
    return _Head(api_key, version, correlation_id, client_id, kind, end)


def _request(head: _Head, body: Entity) -> Request:
    return Request(head.api_key, head.version, head.correlation_id, head.client_id, body)


def _client_id(frame: Frame, size: int) -> tuple[str | None, int]:
    """Return the client id, an int16-length string in all versions, and the position after it."""
    start = _HEADER.size
    if size < 0:
        if size != -1:
            raise MalformedRequest("the client id has a negative length")
        return None, start
    if start + size > len(frame):
        raise MalformedRequest("the client id is longer than the frame")
    try:
        return str(frame[start : start + size], "utf-8"), start + size
    except UnicodeDecodeError as error:
        raise MalformedRequest("the client id is not UTF-8") from error


def _skip_header_tags(frame: Frame, pos: int) -> int:
    try:
        if not frame[pos]:
            return pos + 1
        count, pos = read_uvarint(frame, pos)
        if count > _TOO_MANY_HEADER_TAGS:
            raise MalformedRequest("the header has too many tagged fields")
        for _ in range(count):
            _tag, pos = read_uvarint(frame, pos)
            size, pos = read_uvarint(frame, pos)
            pos += size
    except IndexError as error:
        raise MalformedRequest("the header is longer than the frame") from error
    return pos


def prepare(api_key: int, version: int) -> Steps[None]:
    """Compile the classes of a version ahead of its first request and response."""
    message_class(api_key, version, "request")
    yield
    _kind(api_key, version)
    yield
    response = message_class(api_key, version, "response")
    yield
    compile_writer(response)


def _read(cls: type, read: Any, frame: Frame, pos: int, cuts: list[Cut]) -> Entity:
    """Decode a message that was checked."""
    if cuts:
        frame, pos = apply_cuts(frame, cuts, pos, len(frame)), 0
    if len(frame) <= SMALL_FRAME_BYTES:
        return _decoded(cls, read, frame, pos)
    collecting = gc.isenabled()
    # None of these new objects is garbage yet. The collector would traverse them repeatedly, which
    # takes several times as long as creating them.
    gc.disable()
    try:
        return _decoded(cls, read, frame, pos)
    finally:
        if collecting:
            gc.enable()


def _decoded(cls: type, read: Any, frame: Frame, pos: int) -> Entity:
    try:
        return read(_read_only(frame), pos)[0]
    except _NOT_READ as error:
        raise MalformedRequest(f"not a {cls.__name__}: {error}") from error


def _read_only(frame: Frame) -> Frame:
    """Return a read-only view of a frame: the native reader takes no writable buffer."""
    return frame if type(frame) is bytes else memoryview(frame).toreadonly()


def encode_response(
    api_key: int, version: int, correlation_id: int, entity: Entity
) -> list[Chunk | InFile]:
    """Encode a response frame; return its chunks, with the length prefix in the first.

    Large values (``records``) are chunks of their own, neither copied nor joined; such a value may
    be a range of a file, of which only the length is needed here. Raises :class:`EncodeError`.
    """
    encoded = encode_response_in_steps(api_key, version, correlation_id, entity)
    return encoded if isinstance(encoded, list) else finish(encoded)


def encode_response_in_steps(
    api_key: int, version: int, correlation_id: int, entity: Entity
) -> list[Chunk | InFile] | Steps[list[Chunk | InFile]]:
    """Encode a response as :func:`encode_response` does: at once, or in steps if it is long."""
    header = b"\0" if response_header_is_tagged(api_key, version) else b""
    written = _write(entity)
    if not isinstance(written, tuple):
        return _long_response(header, correlation_id, written)
    return _response(header, correlation_id, *written)


def _response(
    header: bytes, correlation_id: int, size: int, chunks: list[Chunk | InFile]
) -> list[Chunk | InFile]:
    return _framed(_LENGTH_AND_ID.pack(size + 4 + len(header), correlation_id) + header, chunks)


def _long_response(
    header: bytes, correlation_id: int, steps: Steps[Written]
) -> Steps[list[Chunk | InFile]]:
    return _response(header, correlation_id, *(yield from steps))


def encode_request(
    api_key: int, version: int, correlation_id: int, client_id: str | None, entity: Entity
) -> list[Chunk]:
    """Encode a request frame, as :func:`encode_response` encodes a response frame.

    No value may be a range of a file.
    """
    written = _write(entity)
    size, chunks = written if isinstance(written, tuple) else finish(written)
    name = b"" if client_id is None else client_id.encode()
    tags = b"\0" if is_flexible(api_key, version) else b""
    size += _HEADER.size + len(name) + len(tags)
    name_size = -1 if client_id is None else len(name)
    head = _LENGTH_AND_REQUEST.pack(size, api_key, version, correlation_id, name_size)
    return cast("list[Chunk]", _framed(head + name + tags, chunks))


Written = tuple[int, list[Chunk | InFile]]
"""The size of a message and its chunks."""


def _write(entity: Entity) -> Written | Steps[Written]:
    """Write a message at once, or in steps if it has many parts."""
    cls: type = type(entity)
    parts: list[Chunk | InFile] = []
    try:
        steps = compile_writer(cls)(entity, parts.append)
        for _ in steps or ():
            if len(parts) >= PARTS_PER_STEP:
                return _continue_writing(cls, cast("Steps[None]", steps), parts)
        return _last_chunks(parts)
    except _NOT_WRITTEN as error:
        raise EncodeError(f"cannot write a {cls.__name__}: {error}") from error


def _continue_writing(cls: type, steps: Steps[None], parts: list[Chunk | InFile]) -> Steps[Written]:
    """Continue writing a message after its first ``parts``."""
    size = total_size(parts)
    chunks = _joined(parts)
    parts.clear()
    yield
    try:
        for _ in steps:
            if len(parts) >= PARTS_PER_STEP:
                size += total_size(parts)
                chunks += _joined(parts)
                parts.clear()
                yield
        rest, more = _last_chunks(parts)
    except _NOT_WRITTEN as error:
        raise EncodeError(f"cannot write a {cls.__name__}: {error}") from error
    return size + rest, chunks + more


def _last_chunks(parts: list[Chunk | InFile]) -> Written:
    """Return the size and the chunks of the last parts."""
    rest = total_size(parts)
    try:
        if rest < SMALL_FRAME_BYTES:
            return rest, [b"".join(cast("list[Chunk]", parts))]
    except TypeError:
        pass  # One of the parts is a short range of a file, which cannot be joined.
    return rest, _joined(parts)


def _joined(parts: list[Chunk | InFile]) -> list[Chunk | InFile]:
    """Join adjacent small parts into fewer chunks."""
    chunks: list[Chunk | InFile] = []
    small: list[Chunk] = []
    for part in parts:
        if len(part) < BIG_CHUNK_BYTES and (type(part) is bytes or isinstance(part, Chunk)):
            small.append(part)
            continue
        if small:
            chunks.append(b"".join(small))
            small = []
        chunks.append(part)
    if small:
        chunks.append(b"".join(small))
    return chunks


def _framed(head: bytes, chunks: list[Chunk | InFile]) -> list[Chunk | InFile]:
    """Prepend ``head`` to the first chunk, or as a chunk of its own before a large value."""
    if chunks and type(chunks[0]) is bytes and len(chunks[0]) < BIG_CHUNK_BYTES:
        chunks[0] = head + chunks[0]
    else:
        chunks.insert(0, head)
    return chunks


def decode_response(
    api_key: int, version: int, frame: Frame, *, max_objects: int = MAX_RESPONSE_OBJECTS
) -> tuple[int, Entity]:
    """Return (correlation id, body) of a response frame. Raises :class:`MalformedRequest`."""
    try:
        correlation_id: int = _ID.unpack_from(frame)[0]
    except struct.error as error:
        raise MalformedRequest("the frame is shorter than a response header") from error
    pos = 4
    if response_header_is_tagged(api_key, version):
        pos = _skip_header_tags(frame, pos)
    cls = message_class(api_key, version, "response")
    cuts = check(cls, frame, pos, max_objects)
    return correlation_id, _read(cls, reader(cls), frame, pos, cuts)


def unsupported_api_versions(served: tuple[int, int], correlation_id: int) -> list[Chunk | InFile]:
    """Build the response to an unserved version of ApiVersions (KIP-511).

    The response has version 0 and contains the served versions of ApiVersions. Only ApiVersions has
    a response to an unsupported version, so that the client can retry with a lower version.
    """
    make = response_factory(ApiKey.API_VERSIONS, 0)
    low, high = served
    key = make.ApiVersion(api_key=ApiKey.API_VERSIONS, min_version=low, max_version=high)
    body = make.message(error_code=ErrorCode.unsupported_version, api_keys=(key,))
    return encode_response(ApiKey.API_VERSIONS, 0, correlation_id, body)
