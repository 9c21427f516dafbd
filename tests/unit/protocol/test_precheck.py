"""The native decoder gets no frame that could make it allocate more than the limits."""

from __future__ import annotations

import gc
import random
import struct
import sys
import tracemalloc
from itertools import pairwise
from typing import Any

import pytest

from fencepost.protocol.api import APIS, ApiKey
from fencepost.protocol.codec import decode_request, decode_request_in_steps, encode_request
from fencepost.protocol.errors import MalformedRequest, UnsupportedVersion
from fencepost.protocol.limits import MAX_STRING_BYTES, UNKNOWN_TAG_OBJECTS
from fencepost.protocol.messages import request_factory
from fencepost.protocol.pieces import free_in_steps
from fencepost.protocol.precheck import apply_cuts, check, read_uvarint
from fencepost.protocol.schema import fields_of, is_flexible, message_class
from fencepost.protocol.steps import finish
from fencepost.protocol.writer import compile_writer, uvarint
from tests.fuzz.entities import random_entity, random_value


def header(key: int, version: int) -> bytes:
    tags = b"\0" if is_flexible(key, version) else b""
    return struct.pack(">hhih", key, version, 1, -1) + tags


@pytest.mark.parametrize("count", [b"\xff\xff\xff\xff\x07", b"\xff\xff\xff\xff\x0f", b"\x03"])
def test_compact_array_count_beyond_the_frame_is_refused(count: bytes) -> None:
    # kio's reader reserves memory for the announced count and aborts the process on failure.
    with pytest.raises(MalformedRequest, match="elements in"):
        decode_request(header(ApiKey.METADATA, 12) + count)


@pytest.mark.parametrize("count", [2**31 - 1, 2**20, 1])
def test_int32_array_count_beyond_the_frame_is_refused(count: int) -> None:
    with pytest.raises(MalformedRequest, match="elements in"):
        decode_request(header(ApiKey.METADATA, 1) + struct.pack(">i", count))


def delete_groups(count: int) -> bytes:
    return header(ApiKey.DELETE_GROUPS, 2) + uvarint(count + 1) + b"\x01" * count + b"\0"


def test_array_above_the_object_limit_is_refused() -> None:
    assert len(decode_request(delete_groups(1000), max_objects=1000).body.groups_names) == 1000
    with pytest.raises(MalformedRequest, match="too many elements"):
        decode_request(delete_groups(1001), max_objects=1000)


def test_nested_arrays_share_one_object_limit() -> None:
    make = request_factory(ApiKey.FETCH, 11)
    topics = [
        make.FetchTopic(topic="t", partitions=[make.FetchPartition(partition=n) for n in range(9)])
        for _ in range(10)
    ]
    frame = b"".join(encode_request(ApiKey.FETCH, 11, 1, None, make.message(topics=topics)))[4:]
    assert len(decode_request(frame, max_objects=100).body.topics) == 10
    with pytest.raises(MalformedRequest, match="too many elements"):
        decode_request(frame, max_objects=99)


def test_unknown_tags_count_towards_the_object_limit() -> None:
    def heartbeat(tags: int) -> bytes:
        section = b"".join(uvarint(100 + n) + b"\0" for n in range(tags))
        body = b"\x02g" + struct.pack(">i", 1) + b"\x02m" + b"\0" + uvarint(tags) + section
        return header(ApiKey.HEARTBEAT, 4) + body

    most = 50 * UNKNOWN_TAG_OBJECTS
    assert decode_request(heartbeat(50), max_objects=most).body.group_id == "g"
    with pytest.raises(MalformedRequest, match="too many elements"):
        decode_request(heartbeat(51), max_objects=most)


def test_peak_memory_per_object_of_the_worst_frame_is_bounded() -> None:
    # Partitions of an OffsetCommit are expensive: 26 bytes on the wire, five values each.
    budget = 20_000
    make = request_factory(ApiKey.OFFSET_COMMIT, 8)
    part = make.OffsetCommitRequestPartition(committed_offset=2**40, committed_leader_epoch=2**20)
    topic = make.OffsetCommitRequestTopic(name="t", partitions=[part] * (budget - 1))
    frame = b"".join(encode_request(8, 8, 1, None, make.message(topics=[topic])))[4:]
    decode_request(frame, max_objects=budget)
    tracemalloc.start()
    try:
        decode_request(frame, max_objects=budget)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak / budget < 400  # so 100,000 objects need less than 40 MB


def test_refused_frame_allocates_almost_no_memory() -> None:
    frame = delete_groups(5_000_000)
    tracemalloc.start()
    try:
        with pytest.raises(MalformedRequest):
            decode_request(frame)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 64 * 1024


@pytest.mark.parametrize("api", APIS.values(), ids=lambda api: api.name)
def test_unknown_tags_are_skipped(api: Any) -> None:
    rng = random.Random(api.key)
    for version in range(api.min_version, api.max_version + 1):
        cls = message_class(api.key, version, "request")
        info = fields_of(cls)
        if not info.flexible:
            continue
        entity = cls(
            **{
                field.name: random_value(field, rng, 2) if not field.is_array else ()
                for field in info.plain
            }
        )
        frame = b"".join(encode_request(api.key, version, 3, "c", entity))[4:]
        longer = frame[:-1] + uvarint(1) + uvarint(9000) + uvarint(5) + rng.randbytes(5)
        served = {api.key: (version, version)}
        assert decode_request(longer, served).body == decode_request(frame, served).body


def test_unknown_tags_inside_and_beside_known_ones_are_skipped() -> None:
    make = request_factory(ApiKey.FETCH, 15)
    partition = make.FetchPartition(partition=4, partition_max_bytes=77)
    topic = make.FetchTopic(partitions=[partition])
    entity = make.message(
        cluster_id="abc", replica_state=make.ReplicaState(replica_id=5), topics=[topic]
    )
    cls = type(entity)
    parts: list[Any] = []
    for _ in compile_writer(type(entity))(entity, parts.append) or ():
        pass
    data = b"".join(parts)
    # Tags: 0 cluster id ("abc"), 1 replica state (int32, int64, tags). Insert unknown tags
    # everywhere.
    state = struct.pack(">iq", 5, -1)
    plain_section = b"\x02" + b"\x00\x04\x04abc" + b"\x01\x0d" + state + b"\x00"
    assert data.endswith(plain_section)
    stranger = b"\x63\x02zz"
    section = b"\x04" + b"\x00\x04\x04abc" + b"\x01\x11" + state + b"\x01" + stranger
    section += stranger + b"\x64\x00"
    noisy = data[: -len(plain_section)] + section
    inner = struct.pack(">i", 77) + b"\x00"
    noisy = noisy.replace(inner, struct.pack(">i", 77) + b"\x01" + stranger)
    cuts = check(cls, noisy, 0, 100)
    assert apply_cuts(noisy, cuts, 0, len(noisy)) == data
    start = header(ApiKey.FETCH, 15)
    assert decode_request(start + noisy).body == decode_request(start + data).body
    in_steps = finish(decode_request_in_steps(start + noisy, long_bytes=0))
    assert in_steps == decode_request(start + data)


@pytest.mark.parametrize("api", APIS.values(), ids=lambda api: api.name)
def test_long_arrays_decoded_in_steps_give_the_same_request(api: Any) -> None:
    rng = random.Random(api.key)
    for version in range(api.min_version, api.max_version + 1):
        served = {api.key: (version, version)}
        for long_bytes in (0, 0, 10, 100):
            entity = random_entity(message_class(api.key, version, "request"), rng, 6)
            frame = bytearray(b"".join(encode_request(api.key, version, 3, "c", entity))[4:])
            steps = decode_request_in_steps(frame, served, long_bytes=long_bytes)
            assert finish(steps) == decode_request(frame, served)


def test_decoding_step_allocates_and_frees_few_objects() -> None:
    make = request_factory(ApiKey.FETCH, 12)
    count = 1_000
    wide = [make.FetchPartition(partition=number) for number in range(count)]
    asked = [make.FetchTopic(topic=f"t{number}", partitions=wide[:1]) for number in range(count)]
    asked.append(make.FetchTopic(topic="wide", partitions=wide))
    frame = b"".join(encode_request(ApiKey.FETCH, 12, 1, None, make.message(topics=asked)))[4:]
    del make, wide, asked
    finish(decode_request_in_steps(frame))  # compiles the walker
    gc.collect()  # garbage of other tests must not be collected during a step
    blocks, request = [sys.getallocatedblocks()], None
    steps = decode_request_in_steps(frame)
    while request is None:
        try:
            next(steps)
        except StopIteration as stop:
            request = stop.value
        blocks.append(sys.getallocatedblocks())
    held = [request.body]
    del request
    blocks.extend(sys.getallocatedblocks() for _ in free_in_steps(held))
    changes = [abs(after - before) for before, after in pairwise(blocks)]
    assert sum(changes) > 2 * 4 * count
    assert max(changes) < 1_000


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "header"),
        (struct.pack(">hhi", 12, 4, 1), "header"),
        (struct.pack(">hhih", 12, 4, 1, -2), "negative"),
        (struct.pack(">hhih", 12, 4, 1, 5) + b"abc", "longer"),
        (struct.pack(">hhih", 12, 4, 1, 2) + b"\xff\xfe\0", "UTF-8"),
        (struct.pack(">hhih", 12, 4, 1, -1), "longer"),
        (struct.pack(">hhih", 12, 4, 1, -1) + b"\x80\x01", "too many"),
        (struct.pack(">hhih", 12, 4, 1, -1) + b"\xff\xff\xff\xff\x7f", "32 bits"),
        (header(12, 4), "longer than its frame"),
        (header(12, 4) + b"\x20g", "longer than its frame"),
        (header(12, 0) + b"\xff\xfe", "negative"),
        (header(12, 0) + b"\x00\x01\xff" + b"\0" * 6, "not a HeartbeatRequest"),
        (header(12, 0) + b"\xff\xff" + b"\0" * 6, "not a HeartbeatRequest"),
    ],
)
def test_malformed_request_is_refused_with_a_reason(data: bytes, why: str) -> None:
    with pytest.raises(MalformedRequest, match=why):
        decode_request(data)


def test_string_above_the_length_limit_is_refused() -> None:
    def heartbeat(size: int) -> bytes:
        return (
            header(ApiKey.HEARTBEAT, 4)
            + (uvarint(size + 1) + b"g" * size)
            + struct.pack(">i", 1)
            + (b"\x02m" + b"\0\0")
        )

    assert len(decode_request(heartbeat(MAX_STRING_BYTES)).body.group_id) == MAX_STRING_BYTES
    with pytest.raises(MalformedRequest, match="at most 32767"):
        decode_request(heartbeat(MAX_STRING_BYTES + 1))


def test_header_tags_are_skipped() -> None:
    body = b"\x02g" + struct.pack(">i", 1) + b"\x02m" + b"\0\0"
    frame = struct.pack(">hhih", 12, 4, 9, -1) + b"\x01\x05\x03abc" + body
    assert decode_request(frame).body.member_id == "m"


@pytest.mark.parametrize(("key", "version"), [(0, 2), (0, 14), (4, 0), (999, 0), (-1, -1), (22, 6)])
def test_unsupported_version_error_has_api_key_version_and_correlation_id(
    key: int, version: int
) -> None:
    with pytest.raises(UnsupportedVersion) as caught:
        decode_request(struct.pack(">hhih", key, version, 77, -1))
    assert (caught.value.api_key, caught.value.version) == (key, version)
    assert caught.value.correlation_id == 77


def test_request_is_decoded_from_every_kind_of_buffer() -> None:
    frame = delete_groups(9)
    big = header(0, 9) + b"\0\0\x01\0\0\0\0\x02\x02t\x02\0\0\0\0" + uvarint(9001) + bytes(9003)
    for data in (frame, big):
        forms = (data, bytearray(data), memoryview(data), memoryview(bytearray(data)))
        bodies = [decode_request(form).body for form in forms]
        assert all(body == bodies[0] for body in bodies)


def test_uvarint_beyond_32_bits_is_refused() -> None:
    assert read_uvarint(b"\xff\xff\xff\xff\x0f", 0) == (2**32 - 1, 5)
    for data in (b"\xff\xff\xff\xff\x1f", b"\xff\xff\xff\xff\xff\x01"):
        with pytest.raises(MalformedRequest):
            read_uvarint(data, 0)
    with pytest.raises(IndexError):
        read_uvarint(b"\xff", 0)
