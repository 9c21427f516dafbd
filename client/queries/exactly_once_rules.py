"""The rules of exactly-once that ``fencepost doctor`` checks, as data.

``docs/doctor.md`` has a section for each rule under its name; a test compares both.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final

from fencepost.logcore.values import dataclass


class Level(StrEnum):
    """The consequence of a finding."""

    BREAKS = "breaks"
    """Records can be lost, duplicated or read although their transaction was aborted."""
    RISK = "risk"
    """Exactly-once holds except after one named failure; not every client can avoid the risk."""


@dataclass(frozen=True, slots=True)
class Rule:
    """A rule that a pipeline can break."""

    name: str
    title: str
    """The rule, as a statement that holds for a healthy pipeline."""
    why: str
    """The consequence of breaking it, in one sentence."""
    change: str
    """The change that fixes it, in one sentence."""
    level: Level = Level.BREAKS
    on_apache_kafka: bool = False
    """Whether the rule can be checked from the cluster's configuration, on any broker."""


NEW_TRANSACTIONAL_ID: Final = Rule(
    "new-transactional-id",
    "A producer keeps its transactional id over restarts.",
    "Nothing fences the former process, and its open transaction holds back readers until it"
    " times out.",
    "Derive transactional.id from something that survives a restart, such as the number of the"
    " instance.",
)
OFFSETS_OUTSIDE_TRANSACTION: Final = Rule(
    "offsets-outside-transaction",
    "The offsets of the input are committed in the transaction of the output.",
    "A failure between the two commits processes records twice or not at all.",
    "Disable auto-commit, call no commit of the consumer, and send the offsets to the transaction.",
)
OFFSETS_WITHOUT_MEMBER: Final = Rule(
    "offsets-without-member",
    "TxnOffsetCommit carries the member id and the generation of the group's member.",
    "After a rebalance the former owner of a partition can still commit its offsets and output.",
    "Pass the consumer's group metadata, not only the group id, to the call that sends offsets to"
    " the transaction.",
)
READS_UNCOMMITTED: Final = Rule(
    "reads-uncommitted",
    "The input is read with isolation level read_committed.",
    "Records of aborted transactions are processed, and their output is committed.",
    "Set isolation.level=read_committed in the consumer.",
)
TRANSACTION_VERSION_1: Final = Rule(
    "transaction-version-1",
    "The producer uses transaction version 2, which gives each transaction an epoch of its own.",
    "An EndTxn request that arrives late can end the producer's next transaction.",
    "Use a client that supports transaction version 2 (Java 4.0 or later), and raise the feature"
    " transaction.version to 2.",
    level=Level.RISK,
    on_apache_kafka=True,
)
TIMEOUT_ABOVE_MAXIMUM: Final = Rule(
    "timeout-above-maximum",
    "transaction.timeout.ms does not exceed the broker's transaction.max.timeout.ms.",
    "The broker refuses the producer, which cannot begin a transaction.",
    "Lower transaction.timeout.ms in the producer, or raise transaction.max.timeout.ms in the"
    " broker.",
)
TIMEOUT_TOO_SHORT: Final = Rule(
    "timeout-too-short",
    "A transaction is processed within its transaction.timeout.ms.",
    "The broker aborts the transaction of a living producer, which is then fenced.",
    "Raise transaction.timeout.ms above the longest processing time, or process smaller batches.",
)
TIMEOUT_NEARLY_REACHED: Final = Rule(
    "timeout-nearly-reached",
    "No transaction takes more than 80 % of its transaction.timeout.ms.",
    "A slower day aborts the transaction and fences its producer.",
    "Raise transaction.timeout.ms well above the longest processing time, or process smaller"
    " batches.",
    level=Level.RISK,
)
PLAIN_PRODUCER: Final = Rule(
    "plain-producer",
    "A topic that is written in transactions has no other producer.",
    "Records written outside of transactions stay when the transaction aborts, and are written"
    " again on the next attempt.",
    "Write all records of the topic with the transactional producer.",
)
AUTO_COMMIT: Final = Rule(
    "auto-commit",
    "The offsets of the input are not committed by auto-commit.",
    "Auto-commit commits the positions of an earlier poll, whatever was processed or aborted since:"
    " after a failure, records are processed twice or not at all.",
    "Set enable.auto.commit=false in the consumer, and send the offsets to the transaction.",
)
TIMED_COMMIT: Final = Rule(
    "timed-commit",
    "No timer commits the offsets of the input.",
    "Auto-commit makes such requests, and so does a client that commits what it has processed on a"
    " timer of its own; only the latter knows what was processed.",
    "If the consumer has enable.auto.commit=true, set it to false; send the offsets to the"
    " transaction.",
    level=Level.RISK,
)
ACKS_1: Final = Rule(
    "acks-1",
    "The producers of the pipeline's topics wait for all in-sync replicas.",
    "Records that were acknowledged are lost when the leader fails.",
    "Set acks=all in the producer.",
)
UNCLEAN_ELECTION: Final = Rule(
    "unclean-election",
    "Only in-sync replicas of the pipeline's topics can become leaders.",
    "An unclean election loses committed records and markers of transactions.",
    "Set unclean.leader.election.enable=false for the topic.",
    on_apache_kafka=True,
)

RULES: Final = (
    NEW_TRANSACTIONAL_ID,
    OFFSETS_OUTSIDE_TRANSACTION,
    OFFSETS_WITHOUT_MEMBER,
    READS_UNCOMMITTED,
    TRANSACTION_VERSION_1,
    TIMEOUT_ABOVE_MAXIMUM,
    TIMEOUT_TOO_SHORT,
    TIMEOUT_NEARLY_REACHED,
    PLAIN_PRODUCER,
    AUTO_COMMIT,
    TIMED_COMMIT,
    ACKS_1,
    UNCLEAN_ELECTION,
)
"""All rules, in the order in which findings are listed."""
