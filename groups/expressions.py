"""The regular expressions of a consumer group: when they are matched, and what becomes of it.

Matching goes in slices, so that no expression and no number of topics holds up other groups: what
one heartbeat does not get to is gone on with by a timer. Until then an expression that is new
stands for no topic, and an older one for those that it stood for before.

Source: Kafka's ``GroupMetadataManager`` (maybeUpdateRegularExpressions and what follows from it).
"""

from __future__ import annotations

from typing import Final

from fencepost.groups import consumer_records as cr
from fencepost.groups.consumer_group import ConsumerGroup
from fencepost.groups.consumer_records import ConsumerRecordType as Kind
from fencepost.groups.consumer_target import GroupDraft, bump_epoch
from fencepost.groups.events import EventKind
from fencepost.groups.regex import RegexScan
from fencepost.groups.shard import Shard
from fencepost.logcore.machine import DecisionBuilder

PAUSE_MS: Final = 5
"""Between two slices, so that one group's expressions leave half of the time to others."""
EPOCH_BYTES: Final = 512
"""What a batch has besides the record of an expression, and besides its group's id in that: its
head and the group's epoch."""
SHOWN_CHARS: Final = 100
"""Characters of an expression in events and reasons."""


def refresh_regexes(
    shard: Shard, decision: DecisionBuilder, draft: GroupDraft, reasons: list[str]
) -> None:
    """Resolve expressions that are new, forget those nobody uses, and follow the topics' changes.

    Why the epoch must be bumped, if it must, is added to ``reasons``.
    """
    used = draft.subscriptions.expressions
    # A log may bring more: only a member that adds one is refused.
    if len(used) > len(draft.group.subscriptions.expressions):
        shard.require("the group", len(used), "max_group_regexes")
    for regex in draft.regexes.keys() - used:
        del draft.regexes[regex]
        decision.append(cr.tombstone(Kind.REGULAR_EXPRESSION, draft.group.group_id, regex))
    if draft.scan is None:
        _begin(shard, decision, draft)
        # Half a batch: a heartbeat has records of its own.
        _go_on(shard, decision, draft, reasons, shard.max_batch_bytes() // 2)


def regex_timer_fired(shard: Shard, decision: DecisionBuilder, group: ConsumerGroup) -> None:
    """Go on with what no heartbeat got to; the target follows at the next heartbeat of anybody."""
    if not group.members:
        return
    draft = GroupDraft.of(group, shard.environment(group.group_id).topics)
    reasons: list[str] = []
    if draft.scan is None:
        _begin(shard, decision, draft)
    _go_on(shard, decision, draft, reasons, _most_bytes(shard, group.group_id))
    if decision.records:
        bump_epoch(decision, draft, reasons)
    draft.remember()


def _begin(shard: Shard, decision: DecisionBuilder, draft: GroupDraft) -> None:
    """Begin to match what is new, or everything if the topics have changed, or who sees them."""
    used = draft.subscriptions.expressions
    checked_ms = draft.regexes_checked_ms
    if checked_ms is None:
        resolved_ms = (resolved.timestamp_ms for resolved in draft.regexes.values())
        checked_ms = max(resolved_ms, default=decision.now_ms)
    sight = draft.sight
    version = draft.topics.version, 0 if sight is None else sight.version
    is_stale = draft.regexes_version != version
    # A wall clock may go back; then the last time looks as if it were still to come.
    is_early = 0 <= decision.now_ms - checked_ms < shard.limits.min_regex_refresh_interval_ms
    known = draft.regexes.keys() | draft.refused_regexes.keys()
    due = used if is_stale and not is_early else used - known
    if due:
        may_see = None if sight is None else sight.may_see
        draft.scan = RegexScan(due, draft.topics.topics, draft.topics.version, may_see)
    if due and due == used:
        draft.regexes_version = version
        draft.regexes_checked_ms = decision.now_ms


def _most_bytes(shard: Shard, group_id: str) -> int:
    """Return how large the record of an expression may be, which a turn of its own writes."""
    return shard.max_batch_bytes() - EPOCH_BYTES - len(group_id.encode())


def _go_on(
    shard: Shard, decision: DecisionBuilder, draft: GroupDraft, reasons: list[str], room: int
) -> None:
    """Match for a slice, and write down what is done as far as there is ``room``, in bytes."""
    scan = draft.scan
    if scan is None:
        return
    is_done = scan.go_on(shard.limits.max_regex_steps_per_turn)
    most_bytes = _most_bytes(shard, draft.group.group_id)
    while scan.found:
        regex, found = next(iter(scan.found.items()))
        value = cr.RegularExpressionValue(found, scan.version, decision.now_ms)
        record = cr.regular_expression(draft.group.group_id, regex, value)
        size = len(record.key) + len(record.value or b"")
        if room < size <= most_bytes:
            is_done = False
            break
        del scan.found[regex]
        if size > most_bytes:
            scan.refused[regex] = "its topics do not fit a record"
        elif _take(decision, draft, regex, value, reasons):
            decision.append(record)
            room -= size
    _refuse(decision, draft, scan)
    if is_done:
        draft.scan = None
        _begin(shard, decision, draft)  # what came up meanwhile
    group = draft.group
    # A group that comes to be by this decision will not remember for whom the timer would go on.
    is_remembered = draft.sight is None or shard.groups.get(group.group_id) is group
    if draft.scan is not None and is_remembered:
        decision.arm(group.timer("regex"), PAUSE_MS)


def _take(
    decision: DecisionBuilder,
    draft: GroupDraft,
    regex: str,
    value: cr.RegularExpressionValue,
    reasons: list[str],
) -> bool:
    """Let an expression stand for its topics; say whether that changes anything."""
    old = draft.regexes.get(regex)
    draft.refused_regexes.pop(regex, None)
    if regex not in draft.subscriptions.expressions or (
        old is not None and old.topics == value.topics
    ):
        return False
    draft.regexes[regex] = value
    # Whether that adds a topic to the subscribed ones, their hash says.
    draft.checked_version = None
    shown = regex[:SHOWN_CHARS]
    decision.event(
        EventKind.REGEX_RESOLVED, draft.group.group_id, regex=shown, topics=len(value.topics)
    )
    if value.topics != (() if old is None else old.topics):
        reasons.append(f"topics matching {shown!r} changed")
    return True


def _refuse(decision: DecisionBuilder, draft: GroupDraft, scan: RegexScan) -> None:
    """Leave an expression that can't be used its topics, and say so once.

    Who subscribes by one is refused; but a log of another broker may bring it, and all members of
    that group would be locked out, those as well that subscribe by name.
    """
    for regex, reason in scan.refused.items():
        if draft.refused_regexes.get(regex) != reason:
            draft.refused_regexes[regex] = reason
            shown = regex[:SHOWN_CHARS]
            decision.event(
                EventKind.REGEX_REFUSED, draft.group.group_id, regex=shown, reason=reason
            )
    scan.refused.clear()
