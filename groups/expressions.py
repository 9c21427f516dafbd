"""The regular expressions of a consumer group: when to match them, and the effect of the result.

Matching runs in slices, so that no expression and no number of topics delays other groups: a timer
continues the matching that a heartbeat has not completed. Until then a new expression matches no
topic, and an older one keeps its topics.

Source: Kafka's ``GroupMetadataManager`` (maybeUpdateRegularExpressions and the methods that it
calls).
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
"""The pause between two slices, so that other groups get at least half of the time."""
EPOCH_BYTES: Final = 512
"""The size of everything in a batch except an expression's record and the group's id: the batch
header, and the record of the group epoch."""
SHOWN_CHARS: Final = 100
"""The maximum number of characters of an expression that events and reasons show."""


def refresh_regexes(
    shard: Shard, decision: DecisionBuilder, draft: GroupDraft, reasons: list[str]
) -> None:
    """Begin to match new expressions, and forget unused ones.

    If the topics have changed, all expressions are matched again. Reasons to bump the group epoch
    are added to ``reasons``.
    """
    used = draft.subscriptions.expressions
    # A loaded group may exceed the limit; only a member that adds an expression is refused.
    if len(used) > len(draft.group.subscriptions.expressions):
        shard.require("the group", len(used), "max_group_regexes")
    for regex in draft.regexes.keys() - used:
        del draft.regexes[regex]
        decision.append(cr.tombstone(Kind.REGULAR_EXPRESSION, draft.group.group_id, regex))
    if draft.scan is None:
        _start_scan(shard, decision, draft)
        # Half a batch: the heartbeat needs room for other records.
        _continue_scan(shard, decision, draft, reasons, shard.max_batch_bytes() // 2)


def regex_timer_fired(shard: Shard, decision: DecisionBuilder, group: ConsumerGroup) -> None:
    """Continue the matching; the target follows at the next heartbeat of any member."""
    if not group.members:
        return
    draft = GroupDraft.of(group, shard.environment(group.group_id).topics)
    reasons: list[str] = []
    if draft.scan is None:
        _start_scan(shard, decision, draft)
    _continue_scan(shard, decision, draft, reasons, _most_bytes(shard, group.group_id))
    if decision.records:
        bump_epoch(decision, draft, reasons)
    draft.save_soft_state()


def _start_scan(shard: Shard, decision: DecisionBuilder, draft: GroupDraft) -> None:
    """Begin to match new expressions, or all of them if the topics or their visibility changed."""
    used = draft.subscriptions.expressions
    checked_ms = draft.regexes_checked_ms
    if checked_ms is None:
        resolved_ms = (resolved.timestamp_ms for resolved in draft.regexes.values())
        checked_ms = max(resolved_ms, default=decision.now_ms)
    visibility = draft.visibility
    version = draft.topics.version, 0 if visibility is None else visibility.version
    is_stale = draft.regexes_version != version
    # A wall clock may go back; then the last time lies in the future.
    is_early = 0 <= decision.now_ms - checked_ms < shard.limits.min_regex_refresh_interval_ms
    matched = draft.regexes.keys() | draft.refused_regexes.keys()
    due = used if is_stale and not is_early else used - matched
    if due:
        may_see = None if visibility is None else visibility.may_see
        draft.scan = RegexScan(due, draft.topics.topics, draft.topics.version, may_see)
    if due and due == used:
        draft.regexes_version = version
        draft.regexes_checked_ms = decision.now_ms


def _most_bytes(shard: Shard, group_id: str) -> int:
    """Return the maximum size of an expression's record. Each such record gets its own batch."""
    return shard.max_batch_bytes() - EPOCH_BYTES - len(group_id.encode())


def _continue_scan(
    shard: Shard, decision: DecisionBuilder, draft: GroupDraft, reasons: list[str], room: int
) -> None:
    """Match for one slice; append the records of finished expressions, up to ``room`` bytes."""
    scan = draft.scan
    if scan is None:
        return
    is_done = scan.advance(shard.limits.max_regex_steps_per_turn)
    most_bytes = _most_bytes(shard, draft.group.group_id)
    while scan.matches:
        regex, matches = next(iter(scan.matches.items()))
        value = cr.RegularExpressionValue(matches, scan.version, decision.now_ms)
        record = cr.regular_expression(draft.group.group_id, regex, value)
        size = len(record.key) + len(record.value or b"")
        if room < size <= most_bytes:
            is_done = False
            break
        del scan.matches[regex]
        if size > most_bytes:
            scan.refused[regex] = "its topics do not fit a record"
        elif _update_topics(decision, draft, regex, value, reasons):
            decision.append(record)
            room -= size
    _report_refused(decision, draft, scan)
    if is_done:
        draft.scan = None
        _start_scan(shard, decision, draft)  # expressions that were added meanwhile
    group = draft.group
    # A timer would need the group's ``visibility``, but a group that this decision creates has not
    # stored it yet. For such a group the next heartbeat starts the matching again.
    is_remembered = draft.visibility is None or shard.groups.get(group.group_id) is group
    if draft.scan is not None and is_remembered:
        decision.arm(group.timer("regex"), PAUSE_MS)


def _update_topics(
    decision: DecisionBuilder,
    draft: GroupDraft,
    regex: str,
    value: cr.RegularExpressionValue,
    reasons: list[str],
) -> bool:
    """Set the topics of an expression; return whether that changes anything."""
    old = draft.regexes.get(regex)
    draft.refused_regexes.pop(regex, None)
    if regex not in draft.subscriptions.expressions or (
        old is not None and old.topics == value.topics
    ):
        return False
    draft.regexes[regex] = value
    # Have ``bump_epoch`` compute the hash of the subscribed topics again.
    draft.checked_version = None
    shown = regex[:SHOWN_CHARS]
    decision.event(
        EventKind.REGEX_RESOLVED, draft.group.group_id, regex=shown, topics=len(value.topics)
    )
    if value.topics != (() if old is None else old.topics):
        reasons.append(f"topics matching {shown!r} changed")
    return True


def _report_refused(decision: DecisionBuilder, draft: GroupDraft, scan: RegexScan) -> None:
    """Keep the topics of an unusable expression, and report it once.

    A member that subscribes with an unusable expression is refused. However, the log of another
    broker may contain such an expression. An error here would lock out all members of the group,
    even members that subscribe by topic name.
    """
    for regex, reason in scan.refused.items():
        if draft.refused_regexes.get(regex) != reason:
            draft.refused_regexes[regex] = reason
            shown = regex[:SHOWN_CHARS]
            decision.event(
                EventKind.REGEX_REFUSED, draft.group.group_id, regex=shown, reason=reason
            )
    scan.refused.clear()
