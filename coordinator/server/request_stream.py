"""One client's requests and responses as bytes, independently of sockets.

A stream converts received bytes into requests, and responses into bytes to write. The result does
not depend on how the bytes are split. The caller takes the next request only after the response to
the previous one, because the next bytes overwrite the memory from which a large request is decoded.

Large requests and responses are decoded and encoded in steps. The heartbeats of a member differ
only in the correlation id, so a repeated heartbeat is not decoded again. A response that its
handler caches and returns again is encoded once.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from typing import Final, cast

from fencepost.protocol.api import ApiKey
from fencepost.protocol.codec import (
    Request,
    decode_request,
    decode_request_in_steps,
    encode_response_in_steps,
    unsupported_api_versions,
)
from fencepost.protocol.errors import UnsupportedVersion
from fencepost.protocol.frames import FrameBuffer
from fencepost.protocol.limits import BIG_CHUNK_BYTES, LARGE_FRAME_BYTES, ConnectionLimits
from fencepost.protocol.schema import Entity
from fencepost.protocol.steps import Steps
from fencepost.protocol.writer import Chunk, InFile

WRITE_BYTES: Final = 262_144
"""The size of the parts in which a response is passed to the transport. The transport copies the
bytes that the socket does not take into its buffer, and moves them to the front of the buffer after
every send. With parts of several megabytes, that would cost more than sending them."""

_REPEATED: Final = frozenset({ApiKey.HEARTBEAT, ApiKey.CONSUMER_GROUP_HEARTBEAT})
"""APIs whose requests a client repeats unchanged. Each key fits into one byte."""

_SHORT_BYTES: Final = 512
"""The maximum size of a cached request or response; each connection may cache one of each."""

_ID: Final = struct.Struct(">i")
_ID_START, _ID_END = 4, 8
"""Start and end of the correlation id, in a request frame without its length prefix and in a
response frame with its length prefix."""


class RequestStream:
    """Requests in, responses out, in the same order.

    Receive into ``frames.writable()`` and call ``frames.received``. Then call :meth:`next_request`
    and :meth:`answer` alternately, until no request is left, and write ``unsent`` part by part
    (:meth:`next_piece`).
    """

    __slots__ = (
        "_answered",
        "_beat",
        "_kept_apis",
        "_limits",
        "_versions",
        "frames",
        "size_bytes",
        "unsent",
        "unsent_bytes",
    )

    def __init__(
        self,
        versions: Mapping[int, tuple[int, int]],
        limits: ConnectionLimits,
        kept_apis: Collection[int] = (),
    ) -> None:
        """Keep the frames of requests to the APIs in ``kept_apis``."""
        self._versions, self._limits, self._kept_apis = versions, limits, kept_apis
        self.frames = FrameBuffer(limits.max_request_bytes)
        """The receive buffer."""
        self.size_bytes = 0
        """The size of the last request, without its length prefix."""
        self.unsent: deque[Chunk | InFile] = deque()
        """Responses that are not written yet."""
        self.unsent_bytes = 0
        """The size of the unsent data in memory."""
        self._beat: tuple[bytes, Request] | None = None
        """The last heartbeat: its frame without the correlation id, and the decoded request."""
        self._answered: tuple[Entity, bytes] | None = None
        """The last short response, and its frame."""

    def next_request(self) -> Request | Steps[Request | None] | None:
        """Return the next request, or None if bytes are missing.

        For a large request, return the steps that decode it. The steps return None for an
        ApiVersions of an unsupported version, to which they have already responded. Raises
        MalformedRequest and UnsupportedVersion, as do the steps; the stream must not be used
        afterwards.
        """
        frame = self.frames.next_frame()
        if frame is None:
            return None
        self.size_bytes = len(frame)
        if self._kept_apis and int.from_bytes(frame[:2]) in self._kept_apis:
            return self._with_frame(bytes(frame))
        if self.size_bytes > LARGE_FRAME_BYTES:
            return self._decoded(frame)
        try:
            if _ID_END < self.size_bytes <= _SHORT_BYTES and frame[1] in _REPEATED:
                return self._heartbeat(bytes(frame))
            return decode_request(
                frame, self._versions, max_objects=self._limits.max_request_objects
            )
        except UnsupportedVersion as error:
            steps = self._answer_unsupported_version(error)
            if steps is None:
                raise
            return steps

    def _heartbeat(self, frame: bytes) -> Request:
        """Decode a request that may equal the previous one."""
        said, beat = frame[:_ID_START] + frame[_ID_END:], self._beat
        if beat is None or beat[0] != said:
            request = decode_request(
                frame, self._versions, max_objects=self._limits.max_request_objects
            )
            self._beat = said, request
            return request
        versions = beat[1]
        number: int = _ID.unpack_from(frame, _ID_START)[0]
        return Request(
            versions.api_key, versions.api_version, number, versions.client_id, versions.body
        )

    def _with_frame(self, frame: bytes) -> Steps[Request | None]:
        request = yield from self._decoded(memoryview(frame))
        if request is not None:
            request.frame = frame
        return request

    def _decoded(self, frame: memoryview) -> Steps[Request | None]:
        try:
            return (
                yield from decode_request_in_steps(
                    frame, self._versions, max_objects=self._limits.max_request_objects
                )
            )
        except UnsupportedVersion as error:
            steps = self._answer_unsupported_version(error)
            if steps is None:
                raise
            yield from steps
            return None

    def _answer_unsupported_version(self, error: UnsupportedVersion) -> Steps[None] | None:
        """Respond to an unsupported version of ApiVersions; return None for any other API."""
        served = self._versions.get(error.api_key)
        if error.api_key != ApiKey.API_VERSIONS or served is None:
            return None
        return self._put_in_turn(unsupported_api_versions(served, error.correlation_id))

    def _put_in_turn(self, chunks: Sequence[Chunk | InFile]) -> Steps[None]:
        self.put(chunks)
        yield

    def answer(self, request: Request, entity: Entity) -> Steps[None] | None:
        """Encode the response to the last request: at once, or in steps. Raises EncodeError."""
        answered = self._answered
        if answered is not None and answered[0] is entity:
            frame = answered[1]
            number = _ID.pack(request.correlation_id)
            self.put((frame[:_ID_START] + number + frame[_ID_END:],))
            return None
        chunks = encode_response_in_steps(
            request.api_key, request.api_version, request.correlation_id, entity
        )
        if not isinstance(chunks, list):
            return self._put_in_steps(chunks)
        self.put(chunks)
        first = chunks[0]
        if type(first) is bytes and len(chunks) == 1 and len(first) <= _SHORT_BYTES:
            self._answered = entity, first
        return None

    def _put_in_steps(self, steps: Steps[list[Chunk | InFile]]) -> Steps[None]:
        self.put((yield from steps))

    def put(self, chunks: Sequence[Chunk | InFile]) -> None:
        """Append a frame to the unsent data."""
        self.unsent += chunks
        for chunk in chunks:
            if type(chunk) is bytes or isinstance(chunk, Chunk):
                self.unsent_bytes += len(chunk)

    @property
    def is_in_file(self) -> bool:
        """Whether the next data is in a file, and large enough that ``sendfile`` beats a copy."""
        first = self.unsent[0]
        return (
            type(first) is not bytes
            and len(first) >= BIG_CHUNK_BYTES
            and not isinstance(first, Chunk)
        )

    def send_range(self, target: int) -> int:
        """Have the kernel send a part of the data in a file; return the number of bytes sent.

        Raises OSError like ``InFile.send``.
        """
        first = cast("InFile", self.unsent[0])
        sent = first.send(WRITE_BYTES, target)
        if not first:
            self.unsent.popleft()
        return sent

    def next_piece(self, most: int = WRITE_BYTES) -> Chunk:
        """Take the next part of the unsent data: from one large chunk, or from several small ones.

        Raises OSError if the part is in a file that cannot be read. The response's length was
        already sent, so the connection cannot be used afterwards.
        """
        unsent = self.unsent
        first = unsent[0]
        if len(unsent) == 1 and type(first) is bytes and len(first) <= WRITE_BYTES:
            unsent.clear()
            self.unsent_bytes = 0
            return first
        parts: list[Chunk] = []
        room = most
        while unsent and room:
            chunk = unsent[0]
            if parts and len(chunk) >= BIG_CHUNK_BYTES:
                break
            count = min(len(chunk), room)
            if isinstance(chunk, Chunk):
                self.unsent_bytes -= count
                view = memoryview(chunk)
                parts.append(view[:count])
                unsent[0] = view[count:]
            else:
                parts.append(chunk.read(count))
            if not unsent[0]:
                unsent.popleft()
            room -= count
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def drop_unsent(self) -> None:
        """Drop the unsent data after the connection is lost."""
        self.unsent.clear()
        self.unsent_bytes = 0
