"""Where Fencepost answers otherwise on purpose. Everything else that differs is a failure.

An entry that no longer matches anything fails its trace as well, so that the list stays true.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Deviation:
    """``ours`` instead of ``theirs``, as the comparison prints them, and the reason."""

    trace: str
    ours: str
    theirs: str
    why: str


OLD_FLAG = "version 0 has a flag for it, which Apache Kafka's controller does not look at"

UNREADABLE = (
    "Apache Kafka lets these records in, and consumers of them stay at their offset: lengths inside"
    " a compressed batch and offset deltas of an uncompressed one are not compared there, and what"
    " stands behind the first gzip member or snappy stream librdkafka never reads"
)
UNFORESEEN = "what does not inflate escapes Apache Kafka's validation as an unexpected exception"

NOBODY_LEFT = "a group without members has nothing to assign, so its target is up to date"
LOWERED = (
    "no record of transaction.version 0 can say that the client speaks version 2: Apache Kafka"
    " fails amid the write and leaves the id pending; here the record is one of version 1"
)
MOVED = "a log that moves costs each consumer group an epoch: our hash of its topics is another"

DELIBERATE = (
    Deviation("records_that_lie", '"invalid_record"', '"none"', UNREADABLE),
    *(Deviation("records_that_lie", "-1", str(offset), UNREADABLE) for offset in range(5)),
    Deviation("records_that_lie", "0", "5", UNREADABLE),
    Deviation("offset_deltas_that_lie", '"invalid_record"', '"none"', UNREADABLE),
    Deviation("offset_deltas_that_lie", '"invalid_record"', '"unknown_server_error"', UNFORESEEN),
    *(Deviation("offset_deltas_that_lie", "-1", str(offset), UNREADABLE) for offset in (0, 2)),
    Deviation("offset_deltas_that_lie", "0", "4", UNREADABLE),
    Deviation(
        "records_that_do_not_inflate", '"invalid_record"', '"unknown_server_error"', UNFORESEEN
    ),
    Deviation(
        "times_out_of_bounds",
        "100",
        "150",
        "an answer lists a hundred records of a batch: all of them could be sixty times its size",
    ),
    Deviation(
        "names_as_long_as_a_string_may_be",
        '"invalid_topic_exception"',
        '"unknown_server_error"',
        "the text about such a name is no string that can be sent; here it is cut",
    ),
    *(
        Deviation(
            "fetching_less_than_a_batch",
            "71",
            theirs,
            "what fits of the next batch is left out: no client can read it, each asks again",
        )
        for theirs in ("72", "141")
    ),
    Deviation(
        "offsets_in_transactions",
        '[{"name": "txn-offsets", "partitions": [{"partition_index": 9, "error_code":'
        ' "unknown_topic_or_partition"}]}, {"name": "txn-offsets", "partitions":'
        ' [{"partition_index": 0, "error_code": "offset_metadata_too_large"}]}]',
        '[{"name": "txn-offsets", "partitions": [{"partition_index": 0, "error_code":'
        ' "offset_metadata_too_large"}, {"partition_index": 9, "error_code":'
        ' "unknown_topic_or_partition"}]}]',
        "a topic that is named twice is answered twice, in the request's order",
    ),
    Deviation(
        "refused_batches",
        '"unsupported_compression_type"',
        '"unknown_server_error"',
        "an unknown codec escapes Apache Kafka's validation as an unexpected exception",
    ),
    Deviation(
        "changing_settings",
        '"invalid_request"',
        '"unknown_server_error"',
        "so does an unknown operation of IncrementalAlterConfigs",
    ),
    Deviation(
        "describing_settings",
        '[["min.insync.replicas", "1", 5]]',
        '[["min.insync.replicas", "1", 3], ["min.insync.replicas", "1", 5]]',
        "eligible leader replicas (KIP-966) make it a dynamic default; there is one replica here",
    ),
    Deviation("describing_settings", "5", "3", "the same, told as the setting's source"),
    Deviation(
        "changing_settings",
        '[["min.insync.replicas", "1", 5]]',
        '[["min.insync.replicas", "1", 3], ["min.insync.replicas", "1", 5]]',
        "the same",
    ),
    Deviation("changing_settings", "5", "3", "the same"),
    Deviation("creating_topics", "5", "3", "the same again"),
    Deviation("joining_and_leaving", "6", "4", NOBODY_LEFT),
    Deviation("static_consumers", "5", "3", NOBODY_LEFT),
    Deviation(
        "offsets_of_consumers",
        '"unknown_member_id"',
        '"unknown_server_error"',
        "OffsetFetch with an epoch and no member id escapes as an unexpected exception",
    ),
    Deviation(
        "classic_members_of_a_consumer_group",
        '"member 1"',
        '""',
        "a refused JoinGroup tells the member id that was asked, in every kind of group",
    ),
    Deviation(
        "lengths_that_lie",
        '"connection closed"',
        '"an answer"',
        "a client id that is not UTF-8 and an array of length -2 are malformed, not nearly right",
    ),
    Deviation(
        "markers_by_hand",
        '"invalid_request"',
        '"unknown_server_error"',
        "so does a marker without a producer",
    ),
    Deviation("lowering_by_version_0", '"none"', '"invalid_update_version"', OLD_FLAG),
    Deviation(
        "lowering_by_version_0",
        '[{"feature": "transaction.version", "error_code": "none"}]',
        "[]",
        OLD_FLAG,
    ),
    *(
        Deviation(trace, str(epoch + 1), str(epoch), MOVED)
        for trace, epoch in (
            ("consumers_go_on_with_what_they_have", 3),
            ("a_static_consumer_takes_its_place_again", 3),
            ("an_expression_still_holds", 2),
            ("members_of_both_kinds_come_back", 3),
            ("silent_members_are_removed", 3),
            ("silent_members_are_removed", 4),
        )
    ),
    *(
        Deviation("level_0_under_ids_of_level_2", ours, theirs, LOWERED)
        for ours, theirs in (
            ('"none"', '"unsupported_version"'),
            ('"none"', '"concurrent_transactions"'),
            *((f'"producer {number}"', "-1") for number in (1, 4, 5)),
            *((str(number), "-1") for number in range(5)),
            ("false", "true"),
        )
    ),
)
