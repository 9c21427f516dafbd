"""The compiled writer produces the same bytes as kio's, for every API and version."""

from __future__ import annotations

import io
import random
from dataclasses import is_dataclass
from typing import Any

import pytest
from kio.serial import entity_reader, entity_writer

from fencepost.protocol.api import APIS, ApiKey
from fencepost.protocol.codec import (
    decode_request,
    decode_response,
    encode_request,
    encode_response,
)
from fencepost.protocol.errors import EncodeError
from fencepost.protocol.limits import BIG_CHUNK_BYTES, MAX_ERROR_TEXT_CHARACTERS
from fencepost.protocol.messages import request_factory, response_factory
from fencepost.protocol.precheck import check
from fencepost.protocol.schema import all_fields, is_known, message_class, module_of
from fencepost.protocol.writer import compile_writer, uvarint
from tests.fuzz.entities import random_entity

ROUNDS = 12


def ours(entity: Any) -> bytes:
    parts: list[Any] = []
    for _ in compile_writer(type(entity))(entity, parts.append) or ():
        pass
    return b"".join(parts)


def kios(entity: Any) -> bytes:
    buffer = io.BytesIO()
    entity_writer(type(entity))(buffer, entity)
    return buffer.getvalue()


@pytest.mark.parametrize("side", ["request", "response"])
@pytest.mark.parametrize("api", APIS.values(), ids=lambda api: api.name)
def test_writer_produces_kios_bytes_in_every_version(api: Any, side: Any) -> None:
    rng = random.Random(f"{api.key}{side}")
    for version in range(api.min_version, api.max_version + 1):
        cls = message_class(api.key, version, side)
        for _ in range(ROUNDS):
            entity = random_entity(cls, rng)
            data = ours(entity)
            assert data == kios(entity)
            assert check(cls, data, 0, 10_000) == []
            back, size = entity_reader(cls)(data, 0)
            assert size == len(data)
            assert ours(back) == data


@pytest.mark.parametrize("api", APIS.values(), ids=lambda api: api.name)
def test_default_messages_are_encoded_and_decoded_in_every_version(api: Any) -> None:
    for version in range(api.min_version, api.max_version + 1):
        request = request_factory(api.key, version).message()
        frame = b"".join(encode_request(api.key, version, 7, "me", request))
        assert int.from_bytes(frame[:4], "big") == len(frame) - 4
        decoded = decode_request(frame[4:], {api.key: (version, version)})
        assert (decoded.correlation_id, decoded.client_id) == (7, "me")
        response = response_factory(api.key, version).message()
        frame = b"".join(encode_response(api.key, version, 8, response))
        assert decode_response(api.key, version, frame[4:])[0] == 8


@pytest.mark.parametrize(
    ("value", "data"),
    [
        (0, b"\0"),
        (127, b"\x7f"),
        (128, b"\x80\x01"),
        (1023, b"\xff\x07"),
        (1024, b"\x80\x08"),
        (2**32 - 1, b"\xff\xff\xff\xff\x0f"),
    ],
)
def test_uvarint_is_encoded_in_groups_of_7_bits(value: int, data: bytes) -> None:
    assert uvarint(value) == data


def test_time_fields_accept_milliseconds_and_minus_one() -> None:
    make = response_factory(ApiKey.DESCRIBE_TRANSACTIONS, 0)
    state = make.TransactionState(transactional_id="t", transaction_start_time_ms=-1)
    response = make.message(throttle_time_ms=1500, transaction_states=[state])
    frame = b"".join(encode_response(ApiKey.DESCRIBE_TRANSACTIONS, 0, 1, response))
    assert b"\xff" * 8 in frame
    assert (1500).to_bytes(4, "big") in frame
    # kio's own reader refuses -1 in that field; Kafka sends it for an empty transaction.
    back = decode_response(ApiKey.DESCRIBE_TRANSACTIONS, 0, frame[4:])[1]
    assert back.transaction_states[0].transaction_start_time is None
    assert back.transaction_states[0].transactional_id == "t"
    assert b"".join(encode_response(ApiKey.DESCRIBE_TRANSACTIONS, 0, 1, back)) == frame


def test_large_records_are_neither_joined_nor_copied() -> None:
    records = bytes(BIG_CHUNK_BYTES)
    make = response_factory(ApiKey.FETCH, 11)
    partition = make.PartitionData(partition_index=0, records=records)
    topic = make.FetchableTopicResponse(topic="t", partitions=[partition, partition])
    chunks = encode_response(ApiKey.FETCH, 11, 1, make.message(responses=[topic]))
    assert sum(chunk is records for chunk in chunks) == 2
    assert int.from_bytes(chunks[0][:4], "big") == sum(map(len, chunks)) - 4


def test_response_with_small_records_is_one_chunk() -> None:
    make = response_factory(ApiKey.FETCH, 11)
    partition = make.PartitionData(partition_index=0, records=memoryview(b"abc"))
    topic = make.FetchableTopicResponse(topic="t", partitions=[partition])
    assert len(encode_response(ApiKey.FETCH, 11, 1, make.message(responses=[topic]))) == 1


def test_value_out_of_range_is_an_encode_error() -> None:
    make = response_factory(ApiKey.HEARTBEAT, 4)
    for entity in (make.message(error_code=2**15), make.message(throttle_time_ms="soon")):
        with pytest.raises(EncodeError, match="HeartbeatResponse"):
            encode_response(ApiKey.HEARTBEAT, 4, 1, entity)
    old = request_factory(ApiKey.HEARTBEAT, 0)
    with pytest.raises(EncodeError):
        encode_request(ApiKey.HEARTBEAT, 0, 1, None, old.message(group_id="g" * 2**15))


@pytest.mark.parametrize(
    ("api", "structure"),
    [
        (ApiKey.DESCRIBE_CONFIGS, "DescribeConfigsResult"),
        (ApiKey.PRODUCE, "BatchIndexAndErrorMessage"),
        (ApiKey.CREATE_TOPICS, "CreatableTopicResult"),
    ],
)
def test_error_message_above_the_limit_is_truncated(api: ApiKey, structure: str) -> None:
    """Names in an error message may be as long as any string; text beyond the limit is cut off."""
    for version in range(APIS[api].min_version, APIS[api].max_version + 1):
        make = response_factory(api, version)
        field = "batch_index_error_message" if api is ApiKey.PRODUCE else "error_message"
        for length in (MAX_ERROR_TEXT_CHARACTERS, MAX_ERROR_TEXT_CHARACTERS + 1, 2**15):
            built = getattr(make, structure)(**{field: "ß" * length})
            if built is not None:
                text = getattr(built, field)
                whole = length == MAX_ERROR_TEXT_CHARACTERS
                assert text == ("ß" * length if whole else "ß" * 999 + "…")
    refused = response_factory(ApiKey.CONSUMER_GROUP_HEARTBEAT, 1).error(42, "g" * 2**15)
    assert len(refused.error_message) == MAX_ERROR_TEXT_CHARACTERS


class TestFactory:
    def test_fields_of_other_versions_are_dropped(self) -> None:
        for version in (3, 7, 8, 10, 13):
            make = response_factory(ApiKey.PRODUCE, version)
            partition = make.PartitionProduceResponse(
                index=1, error_code=3, log_append_time_ms=-1, error_message="why"
            )
            assert hasattr(partition, "error_message") is (version >= 8)
            assert partition.index == 1

    def test_structure_of_other_versions_is_none(self) -> None:
        assert response_factory(ApiKey.PRODUCE, 9).NodeEndpoint(node_id=1) is None
        assert response_factory(ApiKey.PRODUCE, 10).NodeEndpoint(node_id=1).node_id == 1

    def test_misspelt_field_or_structure_raises(self) -> None:
        make = response_factory(ApiKey.PRODUCE, 9)
        with pytest.raises(TypeError, match="no version of PartitionProduceResponse"):
            make.PartitionProduceResponse(indx=1)
        with pytest.raises(AttributeError, match="NodeEndpont"):
            _ = make.NodeEndpont

    @pytest.mark.parametrize("api", [ApiKey.METADATA, ApiKey.PRODUCE, ApiKey.FETCH])
    def test_names_of_every_version_are_known(self, api: ApiKey) -> None:
        known = APIS[api]
        for version in range(known.min_version, known.max_version + 1):
            module = module_of(api, version, "response")
            for cls in vars(module).values():
                if is_dataclass(cls) and cls.__module__ == module.__name__:
                    names = [info.name for info in all_fields(cls)]
                    assert is_known(api, "response", cls.__name__)
                    assert all(is_known(api, "response", cls.__name__, name) for name in names)
                    assert not is_known(api, "response", cls.__name__, f"{names[0]}_")
                    assert not is_known(api, "response", cls.__name__[:-1], names[0])

    def test_error_sets_the_top_level_error_code_if_there_is_one(self) -> None:
        assert response_factory(ApiKey.HEARTBEAT, 4).error(27).error_code == 27
        assert response_factory(ApiKey.FIND_COORDINATOR, 2).error(15, "no").error_message == "no"
        assert response_factory(ApiKey.PRODUCE, 9).error(27) is None
