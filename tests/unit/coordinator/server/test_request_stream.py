"""The request stream gives the same requests and responses for any fragmentation."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest

from fencepost.coordinator.server.request_stream import WRITE_BYTES, RequestStream
from fencepost.protocol.api import ApiKey
from fencepost.protocol.codec import Request, encode_request, encode_response
from fencepost.protocol.errors import MalformedRequest, UnsupportedVersion, WireError
from fencepost.protocol.limits import LARGE_FRAME_BYTES, ConnectionLimits
from fencepost.protocol.messages import request_factory, response_factory
from fencepost.protocol.steps import finish
from fencepost.protocol.writer import Chunk

LIMITS = ConnectionLimits(max_request_bytes=100_000)
SERVED = {
    ApiKey.PRODUCE: (3, 9),
    ApiKey.FETCH: (4, 11),
    ApiKey.HEARTBEAT: (0, 4),
    ApiKey.API_VERSIONS: (0, 4),
}

Seen = tuple[int, int, int, str | None, Any]
Told = tuple[list[Seen], bytes, type[WireError] | None]
"""The stream's requests, the bytes to write, and the error that ended the stream."""


def request(key: ApiKey, version: int, number: int, **fields: Any) -> bytes:
    body = request_factory(key, version).message(**fields)
    return b"".join(encode_request(key, version, number, "client", body))


def produce(number: int, size: int) -> bytes:
    make = request_factory(ApiKey.PRODUCE, 9)
    part = make.PartitionProduceData(index=0, records=bytes(size))
    topic = make.TopicProduceData(name="t", partition_data=[part])
    return request(ApiKey.PRODUCE, 9, number, acks=-1, timeout_ms=1, topic_data=[topic])


def heartbeat(number: int) -> bytes:
    return request(ApiKey.HEARTBEAT, 4, number, group_id="g", member_id="m")


UNSERVED = struct.pack(">ihhih", 10, ApiKey.API_VERSIONS, 99, 3, -1)
"""ApiVersions in a future version: the only unsupported version that gets a response."""

SMALL = b"".join((heartbeat(1), produce(2, 300), UNSERVED, heartbeat(4), produce(5, 0)))
LARGE = b"".join((heartbeat(1), produce(2, LARGE_FRAME_BYTES + 1), UNSERVED, heartbeat(4)))

BROKEN = {
    "a negative size": (b"\xff\xff\xff\xff", MalformedRequest),
    "a size over the limit": (struct.pack(">i", LIMITS.max_request_bytes + 1), MalformedRequest),
    "an empty frame": (bytes(4), MalformedRequest),
    "an unserved version": (struct.pack(">ihhih", 10, 12, 5, 1, -1), UnsupportedVersion),
    "an unknown API": (struct.pack(">ihhih", 10, 999, 0, 1, -1), UnsupportedVersion),
    "no message": (struct.pack(">ihhih", 10, 12, 4, 1, -1), MalformedRequest),
}


def answer_to(received: Request) -> Any:
    """Return a response whose size depends on the request, so that responses differ."""
    make = response_factory(received.api_key, received.api_version)
    if received.api_key == ApiKey.HEARTBEAT:
        return make.message(throttle_time_ms=received.correlation_id)
    records = received.body.topic_data[0].partition_data[0].records
    part = make.PartitionProduceResponse(index=0, base_offset=len(records))
    topic = make.TopicProduceResponse(name="t", partition_responses=[part])
    return make.message(responses=[topic])


def feed(stream: RequestStream, piece: bytes) -> Iterator[None]:
    """Feed data, and yield whenever the stream's buffer is full."""
    while piece:
        room = stream.frames.writable()
        count = min(len(room), len(piece))
        room[:count] = piece[:count]
        room.release()
        stream.frames.received(count)
        piece = piece[count:]
        yield


def written(stream: RequestStream) -> list[Chunk]:
    pieces = []
    while stream.unsent:
        pieces.append(stream.next_piece())
    assert stream.unsent_bytes == 0
    return pieces


def answered(stream: RequestStream, received: Request, answer: Any) -> None:
    steps = stream.answer(received, answer)
    if steps is not None:
        finish(steps)


def served(pieces: Iterable[bytes]) -> Told:
    stream = RequestStream(SERVED, LIMITS)
    seen: list[Seen] = []
    out = b""
    try:
        for piece in pieces:
            for _ in feed(stream, piece):
                while (coming := stream.next_request()) is not None:
                    received = coming if isinstance(coming, Request) else finish(coming)
                    if received is not None:
                        seen.append(
                            (
                                *(received.api_key, received.api_version, received.correlation_id),
                                received.client_id,
                                received.body,
                            )
                        )
                        answered(stream, received, answer_to(received))
                    out += b"".join(written(stream))
    except WireError as error:
        return seen, out, type(error)
    return seen, out, None


def split(data: bytes, at: int) -> list[bytes]:
    return [data[:at], data[at:]]


def singly(data: bytes) -> list[bytes]:
    return [data[at : at + 1] for at in range(len(data))]


def test_requests_and_responses_keep_their_order() -> None:
    seen, out, end = served([SMALL])
    assert [number for _, _, number, _, _ in seen] == [1, 2, 4, 5]
    assert [client for _, _, _, client, _ in seen] == ["client"] * 4
    assert end is None
    numbers = []
    while out:
        size, number = struct.unpack_from(">ii", out)
        numbers.append(number)
        out = out[size + 4 :]
    assert numbers == [1, 2, 3, 4, 5]


def test_requests_are_equal_for_every_split_and_in_single_bytes() -> None:
    whole = served([SMALL])
    assert served(singly(SMALL)) == whole
    for at in range(len(SMALL)):
        assert served(split(SMALL, at)) == whole, at


def test_large_request_is_equal_in_single_bytes_and_at_splits_near_its_ends() -> None:
    whole = served([LARGE])
    assert [number for _, _, number, _, _ in whole[0]] == [1, 2, 4]
    assert served(singly(LARGE)) == whole
    first, last = len(heartbeat(1)), len(LARGE) - len(UNSERVED) - len(heartbeat(4))
    for edge in (first, LARGE_FRAME_BYTES, last):
        for at in range(edge - 20, edge + 20):
            assert served(split(LARGE, at)) == whole, at


@pytest.mark.parametrize("kind", BROKEN)
def test_malformed_request_ends_stream_after_previous_responses(kind: str) -> None:
    bad, error = BROKEN[kind]
    data = heartbeat(1) + bad + heartbeat(2)
    seen, out, end = served([data])
    assert ([number for _, _, number, _, _ in seen], end) == ([1], error)
    assert out == served([heartbeat(1)])[1]
    assert served(singly(data)) == (seen, out, end)
    for at in range(len(data)):
        assert served(split(data, at)) == (seen, out, end), at


def test_large_frame_of_unsupported_version_is_answered_only_for_api_versions() -> None:
    padding = bytes(LARGE_FRAME_BYTES)
    size = len(padding) + 10
    versions = struct.pack(">ihhih", size, ApiKey.API_VERSIONS, 99, 3, -1) + padding
    assert served([versions])[1:] == served([UNSERVED])[1:]
    other = struct.pack(">ihhih", size, ApiKey.HEARTBEAT, 99, 3, -1) + padding
    assert served([other]) == ([], b"", UnsupportedVersion)


class InSomeFile:
    """A stand-in for a file range, whose records are read only while the stream writes."""

    def __init__(self, data: bytes) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data)

    def read(self, count: int) -> bytes:
        taken, self.data = self.data[:count], self.data[count:]
        return taken


@pytest.mark.parametrize("size", [0, WRITE_BYTES, 3 * WRITE_BYTES + 1])
@pytest.mark.parametrize("in_file", [False, True])
def test_responses_are_written_in_pieces_and_count_only_bytes_in_memory(
    size: int, in_file: bool
) -> None:
    stream = RequestStream(SERVED, LIMITS)
    for _ in feed(stream, request(ApiKey.FETCH, 11, 1, max_bytes=size)):
        received = stream.next_request()
    assert isinstance(received, Request)
    records = bytes(range(256)) * (size // 256) + bytes(size % 256)
    make = response_factory(ApiKey.FETCH, 11)

    def entity(value: Any) -> Any:
        part = make.PartitionData(partition_index=0, records=value)
        return make.message(responses=[make.FetchableTopicResponse(topic="t", partitions=[part])])

    whole = b"".join(encode_response(ApiKey.FETCH, 11, 1, entity(records)))  # type: ignore[arg-type]
    answered(stream, received, entity(InSomeFile(records) if in_file and size else records))
    assert stream.unsent_bytes == len(whole) - (size if in_file else 0)
    pieces = written(stream)
    assert b"".join(pieces) == whole
    assert max(len(piece) for piece in pieces) <= WRITE_BYTES


@pytest.mark.parametrize("partitions", [1, 2, 700, 701, 1_400])
def test_response_with_many_short_file_ranges_is_written_whole(partitions: int) -> None:
    """The stream copies a limited number of short ranges; further ranges stay in their files."""
    stream = RequestStream(SERVED, LIMITS)
    for _ in feed(stream, request(ApiKey.FETCH, 11, 1)):
        received = stream.next_request()
    assert isinstance(received, Request)
    make = response_factory(ApiKey.FETCH, 11)

    def entity(value: Callable[[], Any]) -> Any:
        parts = [
            make.PartitionData(partition_index=at, records=value()) for at in range(partitions)
        ]
        return make.message(responses=[make.FetchableTopicResponse(topic="t", partitions=parts)])

    whole = b"".join(encode_response(ApiKey.FETCH, 11, 1, entity(lambda: b"abc")))  # type: ignore[arg-type]
    answered(stream, received, entity(lambda: InSomeFile(b"abc")))
    assert b"".join(written(stream)) == whole


def test_drop_unsent_discards_responses() -> None:
    stream = RequestStream(SERVED, LIMITS)
    for _ in feed(stream, heartbeat(1)):
        received = stream.next_request()
    assert isinstance(received, Request)
    answered(stream, received, answer_to(received))
    stream.drop_unsent()
    assert (list(stream.unsent), stream.unsent_bytes) == ([], 0)


def beats(*members: str) -> bytes:
    return b"".join(
        request(ApiKey.HEARTBEAT, 4, number, group_id="g", member_id=member)
        for number, member in enumerate(members)
    )


def test_only_identical_consecutive_heartbeats_share_a_parsed_body() -> None:
    members = ["m", "m", "n", "n", "m", "\N{BLACK STAR}", "m" * 600, "m" * 600, "m"]
    seen, out, end = served([beats(*members)])
    assert end is None
    assert [number for _, _, number, _, _ in seen] == list(range(len(members)))
    assert [body.member_id for *_, body in seen] == members
    assert {client for _, _, _, client, _ in seen} == {"client"}
    assert seen[0][4] is seen[1][4]
    assert seen[1][4] is not seen[4][4]
    assert served(singly(beats(*members))) == (seen, out, end)


def test_heartbeat_of_another_version_is_not_reused() -> None:
    older = request(ApiKey.HEARTBEAT, 3, 1, group_id="g", member_id="m")
    seen, _, end = served([heartbeat(0), older, heartbeat(2)])
    assert ([version for _, version, *_ in seen], end) == ([4, 3, 4], None)
    assert type(seen[0][4]) is not type(seen[1][4])


def test_repeated_response_differs_only_in_correlation_id() -> None:
    stream = RequestStream(SERVED, LIMITS)
    make = response_factory(ApiKey.HEARTBEAT, 4)
    one, other, equal = (make.message(throttle_time_ms=each) for each in (1, 2, 1))
    told, expected = [], []
    for number, entity in enumerate([one, one, equal, other, one, one]):
        for _ in feed(stream, heartbeat(number - 2)):
            asked = stream.next_request()
        assert isinstance(asked, Request)
        answered(stream, asked, entity)
        assert stream.unsent_bytes == sum(map(len, stream.unsent))  # type: ignore[arg-type]
        told.append(b"".join(written(stream)))
        expected.append(b"".join(encode_response(ApiKey.HEARTBEAT, 4, number - 2, entity)))  # type: ignore[arg-type]
    assert told == expected
