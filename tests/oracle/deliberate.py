"""The intended differences between Fencepost's and Kafka's responses; other differences fail.

An entry that no longer matches a difference fails its trace as well, so that the list stays true.
The differences that random requests find are listed at the end, by kind.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import EllipsisType
from typing import Any, Protocol

from tests.oracle.authorisation import NOBODYS


@dataclass(frozen=True, slots=True)
class Deviation:
    """An intended difference: both values as the comparison prints them, and the reason."""

    trace: str
    ours: str
    theirs: str
    why: str


UNREADABLE = (
    "Apache Kafka lets these records in, and consumers of them stay at their offset: lengths inside"
    " a compressed batch and offset deltas of an uncompressed one are not compared there, and what"
    " stands behind the first gzip member or snappy stream librdkafka never reads"
)
UNFORESEEN = "what does not inflate escapes Apache Kafka's validation as an unexpected exception"

KEPT_STATE = "settings under which the coordinators' topics lose state are refused"

LOWERED = (
    "no record of transaction.version 0 can say that the client speaks version 2: Apache Kafka"
    " fails amid the write and leaves the id pending; here the record is one of version 1"
)
OVERTAKEN = (
    "a request that waits for others and is overtaken by its member's next is told"
    " REBALANCE_IN_PROGRESS; Apache Kafka forgets it, and its connection waits in vain"
)
FORGIVEN = (
    "a consumer may come with its previous epoch, the answer with the new one having been lost, as"
    " long as the new one stands; with Apache Kafka until it is next told to give something up"
)
FORGOTTEN = (
    "a JoinGroup that is refused changes nothing; Apache Kafka forgets the empty group of consumers"
    " that it was for, and with it the group's epoch, until it is loaded again"
)
SOONER = (
    "a classic member is told to rejoin as soon as its group has changed; Apache Kafka lets it be"
    " until a consumer's heartbeat has computed the next target"
)
STRANGERS = (
    "whoever joins a group of consumers under an id that it neither knows nor gave out, and says it"
    " owns partitions, was removed while it rebalanced: Apache Kafka lets it read on from where it"
    " was, and commit, over what others have read and committed since"
)

CHANGES_NOTHING = (
    "whoever has not the epoch of an open transaction claims nothing; Apache Kafka aborts the"
    " transaction first, and takes the epoch that this brings about for the current one"
)
CONFIRMED = (
    "one epoch behind the end of a transaction of version 1 is a producer that was fenced: to take"
    " its EndTxn for a retry would confirm to it a commit that was another's"
)
OUTRANKED = (
    "where a marker by hand outranks those of the coordinator, the transaction ends all the same;"
    " with Apache Kafka it stays prepared until the coordinator is loaded again"
)
LARGEST = (
    "the largest timestamp is that of a record that can be read; Apache Kafka also tells of one"
    " below the log start, or none"
)
AFTER_ALL = (
    "a share group that begins at a time after every record's begins at the end of the log; with"
    " Apache Kafka its fetches fail until a later record comes, and leave out what came before"
)
NOBODY = "a batch of a transaction but of no producer would be seen even if that aborts"
NO_LEVEL = "an isolation level that there is not escapes Apache Kafka as an unexpected exception"

NO_AUTHORIZER = "a broker without an authorizer refuses what it is asked of ACLs, known or not"

NO_NAMES = (
    "a quota is for an address: whom it is for may not hang on a server of names at each start"
)
NAMED_TWICE = (
    "an entity that is named twice is answered that nothing was changed, and nothing is; Apache"
    " Kafka makes the first change"
)
LARGE_BATCH = (
    "a batch that is larger than what a consumer may take in a whole window comes once it was quiet"
    " for one, and makes it wait; with Apache Kafka it never comes"
)

DELIBERATE = (
    Deviation("quotas_that_are_kept_otherwise", '"invalid_request"', '"none"', NO_NAMES),
    Deviation("quotas_that_are_kept_otherwise", "0", "1", NAMED_TWICE),
    Deviation("a_batch_above_the_quota_of_a_window", "1", "0", LARGE_BATCH),
    Deviation(
        "rights",
        '{"error_code": "security_disabled", "resources": []}',
        '"connection closed"',
        NO_AUTHORIZER,
    ),
    Deviation("settings_of_state_topics", '"invalid_config"', '"none"', KEPT_STATE),
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
    *(
        Deviation("a_batch_of_nobody", ours, theirs, NOBODY)
        for ours, theirs in (
            ('"invalid_producer_id_mapping"', '"none"'),
            ("-1", "0"),
            ("-1", "1"),
        )
    ),
    *(
        Deviation(trace, '"invalid_request"', '"unknown_server_error"', NO_LEVEL)
        for trace in ("fetching", "leader_epochs")
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
    Deviation("asking_again_while_one_waits", '"rebalance_in_progress"', '"no answer"', OVERTAKEN),
    Deviation("classic_members_that_say_what_they_own", '"unknown_member_id"', '"none"', STRANGERS),
    Deviation("an_empty_group_that_nobody_could_join", "4", "2", FORGOTTEN),
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
    *(
        Deviation("claiming_with_an_identity", ours, theirs, CHANGES_NOTHING)
        for ours, theirs in (
            ('"producer_fenced"', '"none"'),
            ("-1", '"producer 45"'),
            ("-1", "3"),
            ('"Ongoing"', '"Empty"'),
            ("1", "3"),
            ('"Ongoing"', '"CompleteAbort"'),
            ("1", "2"),
        )
    ),
    Deviation(
        "what_a_committed_reader_is_told",
        "[]",
        "[0]",
        "where no batch fits in there are no aborted transactions either",
    ),
    *(
        Deviation("start_offsets_of_share_groups", ours, theirs, AFTER_ALL)
        for ours, theirs in (
            ('"none"', '"offset_not_available"'),
            ("""[[3, 3, 0, -1, ["b'later'"]]]""", "[]"),
            ('[{"first_offset": 3, "last_offset": 3, "delivery_count": 1}]', "[]"),
        )
    ),
    *(Deviation("the_largest_time_of_what_is_left", ours, "0", LARGEST) for ours in ("2", "-1")),
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


# --- lives led on both brokers -------------------------------------------------------------------

Anything = EllipsisType


@dataclass(frozen=True, slots=True, eq=False)
class Kind:
    """A kind of difference that random requests may find (test_lives.py)."""

    api: str | Anything
    where: str | Anything
    """The leaf of the response, without the indexes of its rows."""
    ours: str | int | list[str] | Anything | None
    theirs: str | int | Anything | None
    """The value of Apache Kafka; ``...`` stands for any value."""
    why: str
    when: Callable[[Mapping[str, Any]], bool] = lambda _: True
    """A condition on the request."""
    parts: bool = False
    """Whether the brokers' states differ afterwards, so that the comparison must end."""

    def __str__(self) -> str:
        api, where, ours, theirs = (
            "…" if field is ... else field
            for field in (self.api, self.where, self.ours, self.theirs)
        )
        return f"{api} {where}: {ours} instead of {theirs}: {self.why}"


REFUSED_JOIN = "a JoinGroup that is refused creates no group; with Apache Kafka an empty one stays"
ELIGIBLE = "eligible leader replicas (KIP-966) make min.insync.replicas a dynamic default there"
DELETED_ID = (
    "nobody has the id of a deleted topic, in a session as well; Apache Kafka's session goes on"
    " with its name. Clients ask for metadata either way"
)
BY_ORDER = (
    "which members of a share group get one partition more is by the order of their ids; with"
    " Apache Kafka by that of a hash table"
)
BY_IDS = "who is given what goes by ids of members and topics, and those are random"
ONCE = (
    "what one request names twice is described once: the answer could be a thousand times its size"
)
NAMELESS = (
    "an unknown topic id in a share session is refused in its row; with an authorizer, Apache Kafka"
    " looks for rights on a topic without a name, and an exception escapes"
)
ROW = ".topics[].partitions[].error_code"
FETCHED = ".responses[].partitions[].error_code"


def _of_no_level(request: Mapping[str, Any]) -> bool:
    return request.get("isolation_level") not in (0, 1)


def _of_nobody(request: Mapping[str, Any]) -> bool:
    return any(
        "of nobody" in record
        for topic in request["topic_data"]
        for part in topic["partition_data"]
        for record in part["records"] or ()
    )


def _of_the_largest(request: Mapping[str, Any]) -> bool:
    return any(
        part["timestamp"] == -3 for topic in request["topics"] for part in topic["partitions"]
    )


def _names_twice(request: Mapping[str, Any]) -> bool:
    lists = ("resources", "topics", "transactional_ids", "groups", "group_ids")
    rows = next((request[field] for field in lists if request.get(field)), None)
    told = ("resource_type", "resource_name", "name")
    names = [
        row if isinstance(row, str) else tuple(row.get(part) for part in told) for row in rows or ()
    ]
    return len(set(names)) < len(names)


def _of_a_broker(request: Mapping[str, Any]) -> bool:
    return any(
        resource["resource_type"] == 8
        or (
            resource["resource_type"] == 4
            and not (resource["resource_name"] and resource["configuration_keys"])
        )
        for resource in request["resources"]
    )


def _under_an_epoch(request: Mapping[str, Any]) -> bool:
    return int(request.get("generation_id_or_member_epoch", -1)) >= 0


def _names_an_unknown_id(request: Mapping[str, Any]) -> bool:
    return any(topic["topic_id"] == NOBODYS for topic in request["topics"])


def _continues(request: Mapping[str, Any]) -> bool:
    return request.get("producer_id", -1) != -1


KINDS = (
    Kind("join_group", ".member_id", ..., "", "a refused JoinGroup tells the id that was asked"),
    Kind("list_groups", ".groups", ..., ..., REFUSED_JOIN),
    Kind("describe_groups", ".groups[].error_code", "group_id_not_found", "none", REFUSED_JOIN),
    Kind("describe_groups", ".groups[].group_state", "Dead", "Empty", REFUSED_JOIN),
    Kind("delete_groups", ".results[].error_code", "group_id_not_found", "none", REFUSED_JOIN),
    Kind(
        "alter_share_group_offsets",
        ".responses[].topic_id",
        None,
        ...,
        "the id of a topic that the client may not read is not told",
    ),
    *(
        Kind(api, where, ..., ..., NAMELESS, _names_an_unknown_id)
        for api in ("share_fetch", "share_acknowledge")
        for where in (".acquisition_lock_timeout", ".responses")
    ),
    Kind("create_topics", ".topics[].configs[].config_source", 5, 3, ELIGIBLE),
    Kind("describe_configs", ".results[].configs[].config_source", 5, 3, ELIGIBLE),
    Kind("describe_configs", ".results[].configs[].synonyms", ..., ..., ELIGIBLE),
    Kind(
        "describe_configs",
        ".results[].configs",
        ...,
        ...,
        "which settings and loggers a broker has: of all that Apache Kafka has, those that mean"
        " something here",
        when=_of_a_broker,
    ),
    *(
        Kind(
            api,
            ".responses[].error_code",
            "invalid_config",
            "none",
            "nothing would read a broker's setting of a name that it does not know; Apache Kafka"
            " keeps it for its plugins",
            lambda request: any(
                resource["resource_type"] == 4
                and any(config["name"] == "no.such.setting" for config in resource["configs"])
                for resource in request["resources"]
            ),
            parts=True,
        )
        for api in ("alter_configs", "incremental_alter_configs")
    ),
    Kind(
        "create_partitions",
        ".results[].error_code",
        "invalid_topic_exception",
        ...,
        "the coordinators' topics do not grow, whatever else is wrong: where a group or a"
        " transaction is goes by their number of partitions",
        lambda request: any(topic["name"].startswith("__") for topic in request["topics"]),
        parts=True,
    ),
    Kind(
        "add_partitions_to_txn",
        ".results_by_transaction[].topic_results[].results_by_partition[].partition_error_code",
        "topic_authorization_failed",
        ...,
        "anybody may send what brokers ask each other, so no transaction takes in by it what the"
        " coordinators alone write, whatever else is wrong with it; Apache Kafka adds it",
        parts=True,
    ),
    *(
        Kind(
            "describe_configs",
            f".results[].configs[].{source}",
            5,
            4,
            "Apache Kafka's node.id stands in its file, for want of a default",
        )
        for source in ("config_source", "synonyms[].source")
    ),
    *(
        Kind(
            "describe_configs",
            f".results[].{leaf}",
            ...,
            ...,
            "a kind of resource that there is not is refused by itself; Apache Kafka refuses with"
            " it all that is asked beside",
            lambda request: any(
                resource["resource_type"] not in (2, 4, 8, 16, 32)
                for resource in request["resources"]
            ),
        )
        for leaf in ("error_code", "configs")
    ),
    Kind(
        "produce",
        ".responses[].partition_responses[].error_code",
        "invalid_producer_id_mapping",
        ...,
        NOBODY,
        when=_of_nobody,
        parts=True,
    ),
    Kind("list_offsets", ..., ..., ..., NO_LEVEL, when=_of_no_level),
    *(
        Kind("list_offsets", f".topics[].partitions[].{leaf}", ..., ..., LARGEST, _of_the_largest)
        for leaf in ("offset", "timestamp", "leader_epoch")
    ),
    Kind(
        "describe_topic_partitions",
        ...,
        ...,
        ...,
        "a topic without a name is refused by itself; Apache Kafka fails on it unexpectedly, unless"
        " there is a cursor",
        lambda request: any(not topic["name"] for topic in request["topics"]),
    ),
    *(
        Kind("fetch", where, ..., ..., NO_LEVEL, when=_of_no_level)
        for where in (FETCHED, ".error_code", ".responses")
    ),
    *(
        Kind("fetch", FETCHED, "unknown_topic_id", theirs, DELETED_ID)
        for theirs in ("unknown_topic_or_partition", "inconsistent_topic_id")
    ),
    Kind(
        "share_fetch",
        ".responses[].partitions[].error_code",
        "unknown_topic_id",
        "unknown_topic_or_partition",
        DELETED_ID,
    ),
    *(
        Kind(api, where, ..., ..., ONCE, when=_names_twice)
        for api, where in (
            ("consumer_group_describe", ".groups"),
            ("describe_configs", ".results"),
            ("describe_groups", ".groups"),
            ("describe_producers", ".topics[].partitions"),
            ("describe_transactions", ".transaction_states"),
        )
    ),
    Kind(
        "write_txn_markers",
        "",
        ...,
        None,
        "a marker that names a partition twice, or the last of several that finds none of its"
        " partitions: Apache Kafka never answers",
        parts=True,
    ),
    Kind(
        "write_txn_markers",
        ".markers[].topics[].partitions[].error_code",
        "unknown_topic_or_partition",
        ...,
        "anybody may send markers, so none goes to what the transaction coordinator alone writes",
        when=lambda request: any(
            topic["name"] == "__transaction_state"
            for marker in request["markers"]
            for topic in marker["topics"]
        ),
    ),
    Kind(
        "write_txn_markers",
        ...,
        ...,
        ...,
        "a marker without a producer is refused; Apache Kafka fails on it unexpectedly, if at all",
        when=lambda request: any(
            marker["producer_id"] == -1 or marker["producer_epoch"] < 0
            for marker in request["markers"]
        ),
        parts=True,
    ),
    *(
        Kind("init_producer_id", where, ours, ..., CHANGES_NOTHING, _continues, parts=True)
        for where, ours in ((".error_code", "producer_fenced"), (" leaves open", ...))
    ),
    Kind("end_txn", ".error_code", "producer_fenced", "none", CONFIRMED, parts=True),
    Kind(..., ..., ..., "concurrent_transactions", OUTRANKED, parts=True),
    *(
        Kind(
            api,
            ".transaction_states[].transaction_state",
            f"Complete{outcome}",
            f"Prepare{outcome}",
            OUTRANKED,
            parts=True,
        )
        for api in ("describe_transactions", "list_transactions")
        for outcome in ("Commit", "Abort")
    ),
    Kind(
        "consumer_group_heartbeat",
        ".member_epoch",
        ...,
        2,
        FORGOTTEN,
        when=lambda request: request["member_epoch"] == 0,
        parts=True,
    ),
    Kind(
        "consumer_group_heartbeat",
        ".error_code",
        "none",
        "fenced_member_epoch",
        FORGIVEN,
        when=lambda request: request["member_epoch"] > 0,
        parts=True,
    ),
    *(
        Kind(api, where, ours, "group_id_not_found", FORGOTTEN, parts=True)
        for api, where, ours in (
            ("consumer_group_heartbeat", ".error_code", "unknown_member_id"),
            ("consumer_group_describe", ".groups[].error_code", "none"),
        )
    ),
    *(
        Kind(api, ".error_code", "rebalance_in_progress", "none", SOONER, parts=True)
        for api in ("heartbeat", "sync_group")
    ),
    *(
        Kind(api, "", ..., None, OVERTAKEN, when=lambda request: request["member_id"], parts=True)
        for api in ("join_group", "sync_group")
    ),
    Kind(
        "join_group",
        ".error_code",
        "unknown_member_id",
        "none",
        STRANGERS,
        when=lambda request: request["member_id"],
        parts=True,
    ),
    *(
        Kind(api, f"{at}.topic_partitions{rest}", ..., ..., BY_IDS, parts=True)
        for api, at in (
            ("consumer_group_heartbeat", ".assignment"),
            ("consumer_group_describe", ".groups[].members[].assignment"),
            ("consumer_group_describe", ".groups[].members[].target_assignment"),
        )
        for rest in ("", "[].partitions", "[].topic_id", "[].topic_name")
    ),
    *(
        Kind(
            "offset_commit",
            ROW,
            *said,
            f"under an old epoch: {BY_IDS}",
            _under_an_epoch,
            parts=True,
        )
        for error in ("stale_member_epoch", "illegal_generation")
        for said in ((error, "none"), ("none", error))
    ),
    *(
        Kind(api, f"{at}.topic_partitions{rest}", ..., ..., BY_ORDER)
        for api, at in (
            ("share_group_heartbeat", ".assignment"),
            ("share_group_describe", ".groups[].members[].assignment"),
        )
        for rest in ("", "[].partitions", "[].topic_id", "[].topic_name")
    ),
    *(
        Kind("share_group_heartbeat", ".assignment", *said, BY_ORDER)
        for said in ((..., None), (None, ...))
    ),
    Kind("sync_group", ".assignment", ..., ..., f"in a group of consumers: {BY_IDS}", parts=True),
    *(
        Kind("consumer_group_heartbeat", ".assignment", *said, BY_IDS, parts=True)
        for said in ((..., None), (None, ...))
    ),
    Kind(
        "join_group",
        ".leader",
        ...,
        ...,
        "when a leader leaves the eldest member leads; with Apache Kafka the first of a hash table",
        parts=True,
    ),
    Kind(
        ...,
        ...,
        ...,
        "unknown_server_error",
        "an exception escapes in Apache Kafka that it does not foresee",
        parts=True,
    ),
)

NOT_DRAWN = (
    "aborted transactions where no record is read: Apache Kafka tells of them, or in another form",
    (
        "Produce in a transaction to the coordinators' topics: refused at once here, Apache Kafka"
        " takes the partition into the transaction before it refuses, so its markers go there"
    ),
    "Fetch of the all-zero topic id: Apache Kafka's sessions fail on it, now and then",
    "a JoinGroup whose metadata can't be read: Apache Kafka does not answer it",
    (
        "as many members for one server-side assignor as for another: Apache Kafka 4.4 compares the"
        " order of two hash tables, and may raise the group epoch at every heartbeat"
    ),
    (
        "a share group's records that are released without a wait for the result (in a ShareFetch,"
        " or by the end of a session): whether the next fetch acquires them depends on the time"
    ),
    "share offsets of a partition that there is not: Apache Kafka looks for it for 29 s",
    (
        "what depends on the time (expressions of consumers, long polls), on limits of our own"
        " (long ids), or concerns all lives on a broker (UpdateFeatures, the coordinators' topics)"
    ),
)
"""Known differences that the random requests of a comparison avoid."""


# --- authorization --------------------------------------------------------------------------------

ANY_FORM = (
    "a rule's address may be written in any form, ::ffff:127.0.0.1 for 127.0.0.1; with Apache Kafka"
    " one that Java would write otherwise is about nobody, and so a refusal in vain"
)

RIGHTS = (
    Kind(
        "create_topics",
        ".topics[].topic_id",
        None,
        ...,
        "a topic that is only validated has no id; Apache Kafka makes one up",
        when=lambda request: bool(request["validate_only"]),
    ),
    Kind(
        "list_partition_reassignments",
        ".topics",
        [],
        ...,
        "a refusal has no rows; Apache Kafka's names all that was asked for, with no replicas",
    ),
)
"""Kinds of difference in the authorisation matrix (test_authorisation.py)."""


# --- classification of differences ---------------------------------------------------------------


class Found(Protocol):
    """A leaf of a response in which the brokers differ."""

    @property
    def api(self) -> str: ...

    @property
    def where(self) -> str: ...

    @property
    def ours(self) -> Any: ...

    @property
    def theirs(self) -> Any: ...

    @property
    def request(self) -> Any: ...


def kind_of(found: Found, kinds: Iterable[Kind] = KINDS) -> Kind | None:
    """Return the listed kind of a difference, None if no kind matches."""
    where = re.sub(r"\[\d+\]", "[]", found.where)
    for kind in kinds:
        listed = kind.api, kind.where, kind.ours, kind.theirs
        told = found.api, where, found.ours, found.theirs
        if all(
            expected in (..., seen) for expected, seen in zip(listed, told, strict=True)
        ) and kind.when(found.request):
            return kind
    return None
