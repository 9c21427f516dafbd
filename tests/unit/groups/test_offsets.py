"""OffsetCommit, TxnOffsetCommit, OffsetFetch, OffsetDelete and expiration, case by case."""

from __future__ import annotations

import pytest

from fencepost.groups import offsets, records
from fencepost.groups.commands import (
    DeleteGroup,
    DeleteOffsets,
    ExpireOffsets,
    FetchOffsets,
    FetchTopic,
    OffsetToCommit,
    TopicsDeleted,
    TxnCommitOffsets,
)
from fencepost.groups.errors import (
    FencedInstanceIdError,
    GroupIdNotFoundError,
    GroupSubscribedToTopicError,
    IllegalGenerationError,
    InvalidGroupIdError,
    NonEmptyGroupError,
    OffsetMetadataTooLargeError,
    RebalanceInProgressError,
    UnknownMemberIdError,
    UnstableOffsetCommitError,
)
from fencepost.groups.limits import GroupLimits
from fencepost.logcore.machine import ProducerStamp
from tests.unit.groups.group_driver import (
    NOW,
    RETENTION,
    SESSION,
    Driver,
    Entry,
    G,
    completing,
    empty,
    initial,
    preparing,
    stable,
    subscription,
)

ID_A, ID_B = b"A" * 16, b"B" * 16
P = 77
PLAIN = pytest.param(None, id="plain")
IN_TXN = pytest.param(P, id="txn")


def offset_records(driver: Driver) -> list[records.OffsetCommitValue | None]:
    found = []
    for entry in driver.log:
        decoded = records.decode(entry.record) if entry.record else None
        if decoded and isinstance(decoded[0], records.OffsetCommitKey):
            found.append(decoded[1])
    return found


# --- members allowed to commit --------------------------------------------------------------------


@pytest.mark.parametrize("producer", [PLAIN, IN_TXN])
def test_commit_without_member_creates_a_simple_group(producer):
    driver = Driver()
    driver.commit(producer=producer)
    assert driver.state() == "Empty"
    assert driver.group().protocol_type is None
    assert len(driver.log) == 1
    driver.reload()
    assert driver.state() == "Empty"


@pytest.mark.parametrize("newer", [False, True])
@pytest.mark.parametrize("producer", [PLAIN, IN_TXN])
def test_commit_with_generation_in_an_unknown_group_is_refused(producer, newer):
    driver = Driver()
    with pytest.raises(GroupIdNotFoundError if newer else IllegalGenerationError):
        driver.commit(generation=0, member_id="m", producer=producer, knows_member_epochs=newer)
    assert not driver.groups


def test_empty_group_id_is_accepted_only_for_plain_commits():
    driver = Driver()
    driver.commit(group_id="")
    assert driver.fetch(group_id="").offset == 5
    with pytest.raises(InvalidGroupIdError):
        driver.commit(group_id="", producer=P)


@pytest.mark.parametrize("producer", [PLAIN, IN_TXN])
def test_empty_group_accepts_commits_without_generation(producer):
    driver = empty()
    driver.commit(producer=producer)
    driver.commit(member_id="whoever", producer=producer)
    assert [record.offset for record in offset_records(driver)] == [5, 5]


@pytest.mark.parametrize("producer", [PLAIN, IN_TXN])
def test_empty_group_refuses_commits_with_generation(producer):
    driver = empty()
    with pytest.raises(UnknownMemberIdError):
        driver.commit(generation=2, member_id="c-1", producer=producer)
    assert offset_records(driver) == []


@pytest.mark.parametrize("build", [initial, completing, stable, preparing])
def test_group_with_members_accepts_only_transactional_commits_without_member(build):
    driver, *_ = build()
    with pytest.raises(UnknownMemberIdError):
        driver.commit()
    assert offset_records(driver) == []
    driver.commit(producer=P)
    assert [record.offset for record in offset_records(driver)] == [5]


@pytest.mark.parametrize("producer", [PLAIN, IN_TXN])
@pytest.mark.parametrize("build", [completing, stable, preparing])
@pytest.mark.parametrize(
    ("generation", "who", "instance", "error"),
    [
        (1, "stranger", None, UnknownMemberIdError),
        (1, "", None, UnknownMemberIdError),
        (-1, "stranger", None, UnknownMemberIdError),
        (1, 0, "i9", UnknownMemberIdError),
        (1, 0, "i1", FencedInstanceIdError),
        (-1, "", "i1", FencedInstanceIdError),
        (0, 0, None, IllegalGenerationError),
        (2, 0, None, IllegalGenerationError),
        (-1, 0, None, IllegalGenerationError),
    ],
)
def test_commit_with_wrong_member_or_generation_is_refused_in_every_state(
    producer, build, generation, who, instance, error
):
    driver, ids, *_ = build(2, static=["i1"])
    member_id = ids[who] if isinstance(who, int) else who
    before = len(driver.log)
    with pytest.raises(error):
        driver.commit(
            generation=generation, member_id=member_id, instance=instance, producer=producer
        )
    assert len(driver.log) == before


@pytest.mark.parametrize("build", [stable, preparing])
def test_commit_of_a_member_resets_its_session_timeout(build):
    driver, ids, *_ = build(2)
    for _ in range(3):
        driver.advance(SESSION - 1)
        driver.commit(generation=1, member_id=ids[1])
    assert ids[1] in driver.group().members
    assert driver.fetch().offset == 5


def test_transactional_commit_does_not_reset_the_session_timeout():
    driver, ids = stable(2)
    driver.advance(SESSION - 1)
    driver.commit(generation=1, member_id=ids[1], producer=P)
    driver.advance(1)
    assert ids[1] not in driver.group().members


def test_completing_rebalance_refuses_plain_but_not_transactional_commits():
    driver, ids = completing(2)
    with pytest.raises(RebalanceInProgressError):
        driver.commit(generation=1, member_id=ids[0])
    driver.commit(generation=1, member_id=ids[0], producer=P)


def test_generation_is_checked_before_the_completing_rebalance_state():
    driver, ids = completing(2)
    with pytest.raises(IllegalGenerationError):
        driver.commit(generation=0, member_id=ids[0])


def test_static_member_commits_with_its_instance_id():
    driver, ids = stable(1, static=["i1"])
    driver.commit(generation=1, member_id=ids[1], instance="i1")


# --- committed offsets ----------------------------------------------------------------------------


def test_committed_offset_is_fetched_with_leader_epoch_and_metadata():
    driver = Driver()
    item = OffsetToCommit("t", 3, 42, 7, "näh", ID_A)
    driver.ask(TxnCommitOffsets(G, -1, "", None, (item,), ProducerStamp(P, 0)))
    driver.marker(P, commit=True)
    fetched = driver.fetch("t", 3)
    assert (fetched.offset, fetched.leader_epoch, fetched.metadata) == (42, 7, "näh")
    driver.reload()
    assert driver.fetch("t", 3) == fetched


def test_offset_record_holds_leader_epoch_metadata_and_commit_time():
    driver = Driver()
    driver.commit(("t", 0, 5))
    assert offset_records(driver) == [records.OffsetCommitValue(5, -1, "", NOW)]


@pytest.mark.parametrize("retention", [0, 1_000, 2**63 - 1])
def test_retention_time_sets_the_expire_timestamp(retention):
    driver = Driver()
    driver.commit(retention_time_ms=retention)
    (value,) = offset_records(driver)
    assert value is not None
    assert value.expire_timestamp_ms == min(NOW + retention, 2**63 - 1)
    record = driver.log[-1].record
    assert record is not None
    assert record.value is not None
    assert record.value[:2] == b"\x00\x01"


@pytest.mark.parametrize("producer", [PLAIN, IN_TXN])
@pytest.mark.parametrize(
    ("text", "fits"),
    [
        ("x" * 4_096, True),
        ("x" * 4_097, False),
        ("ü" * 4_096, True),
        ("\U0001f600" * 2_048, True),
        ("\U0001f600" * 2_048 + "x", False),
    ],
)
def test_metadata_is_limited_in_utf16_units(producer, text, fits):
    driver = Driver()
    items = (OffsetToCommit("t", 0, 1, metadata=text), OffsetToCommit("t", 1, 2))
    if producer is None:
        result = driver.commit(("t", 0, 1, -1, text), ("t", 1, 2))  # type: ignore[arg-type]
    else:
        result = driver.ask(TxnCommitOffsets(G, -1, "", None, items, ProducerStamp(P, 0)))
        driver.marker(P, commit=True)
    errors = [error for *_, error in result.partitions]
    assert errors[1] is None
    assert (errors[0] is None) == fits
    if not fits:
        assert isinstance(errors[0], OffsetMetadataTooLargeError)
    assert driver.fetch("t", 0).offset == (1 if fits else -1)
    assert driver.fetch("t", 1).offset == 2


def test_metadata_too_long_for_a_record_is_refused_under_any_limit():
    driver = Driver(GroupLimits(max_offset_metadata_bytes=100_000))
    for length, error in ((32_767, None), (32_768, OffsetMetadataTooLargeError)):
        result = driver.commit(("t", 0, 1, -1, "x" * length))  # type: ignore[arg-type]
        answer = result.partitions[0][2]
        assert answer is None if error is None else isinstance(answer, error)


def test_last_of_two_offsets_of_a_partition_in_one_commit_wins():
    driver = Driver()
    result = driver.commit(("t", 0, 9), ("t", 0, 4))
    assert len(result.partitions) == 2
    assert driver.fetch().offset == 4


def test_commit_without_offsets_writes_nothing():
    driver = Driver()
    result = driver.ask(TxnCommitOffsets(G, -1, "", None, (), ProducerStamp(P, 0)))
    assert result.partitions == ()
    assert not driver.log


# --- fetching ------------------------------------------------------------------------------------


@pytest.mark.parametrize("require_stable", [False, True])
def test_fetch_from_an_unknown_group_returns_no_offsets_and_no_error(require_stable):
    driver = Driver()
    asked = (FetchTopic("t", (0, 1)), FetchTopic("u", ()))
    result = driver.ask(FetchOffsets("nope", asked, require_stable))
    assert [(topic, len(found)) for topic, found in result.topics] == [("t", 2), ("u", 0)]
    for fetched in result.topics[0][1]:
        assert (fetched.offset, fetched.leader_epoch, fetched.metadata) == (-1, -1, "")
        assert fetched.error is None
    assert driver.ask(FetchOffsets("nope", None, require_stable)).topics == ()
    assert not driver.groups


def test_fetch_of_all_offsets_is_sorted_by_topic_and_partition():
    driver = Driver()
    driver.commit(("u", 1, 1), ("t", 2, 2), ("t", 0, 3))
    result = driver.ask(FetchOffsets(G, None))
    assert [(topic, [f.partition for f in found]) for topic, found in result.topics] == [
        ("t", [0, 2]),
        ("u", [1]),
    ]


@pytest.mark.slow
def test_fetch_of_many_offsets_returns_their_values_at_the_request():
    driver = Driver()
    first = offsets.MAX_OFFSETS_PER_TURN - 1
    driver.commit(*(("t", index, 7) for index in range(offsets.MAX_OFFSETS_PER_TURN + 1)))
    driver.commit(("t", first, 9), producer=P)
    asked = (FetchTopic("t", tuple(range(offsets.MAX_OFFSETS_PER_TURN + 1))),)
    few = driver.ask(FetchOffsets(G, (FetchTopic("t", asked[0].partitions[1:]),), True)).topics
    many = [driver.ask(FetchOffsets(G, topics, True)).topics for topics in (asked, None)]
    assert isinstance(few, tuple)
    driver.commit(("t", 0, 8))
    driver.marker(P, commit=True)
    for rows in many:
        ((topic, found),) = [(topic, tuple(found)) for topic, found in rows]
        assert (topic, len(found), found[0].offset) == ("t", offsets.MAX_OFFSETS_PER_TURN + 1, 7)
        assert [offset[:4] for offset in found[1:]] == [offset[:4] for offset in few[0][1]]
        assert [offset.partition for offset in found if offset.error is not None] == [first]


def test_fetch_from_a_classic_group_ignores_member_and_epoch():
    driver, _ = stable(1)
    asked = (FetchTopic("t", (0,)),)
    result = driver.ask(FetchOffsets(G, asked, member_id="stranger", member_epoch=99))
    assert result.topics[0][1][0].error is None


@pytest.mark.parametrize(
    ("stored", "asked", "found"),
    [
        (ID_A, ID_A, True),
        (ID_A, ID_B, False),
        (ID_A, None, True),
        (None, ID_A, True),
        (bytes(16), ID_A, True),
    ],
)
def test_offset_of_a_topic_with_another_id_is_not_fetched(stored, asked, found):
    driver = Driver()
    driver.commit(("t", 0, 5, -1, "", stored))  # type: ignore[arg-type]
    result = driver.ask(FetchOffsets(G, (FetchTopic("t", (0,), asked),)))
    assert result.topics[0][1][0].offset == (5 if found else -1)


# --- transactions --------------------------------------------------------------------------------


def test_pending_offset_is_unstable_to_fetches_that_require_stable():
    driver = Driver()
    driver.commit(("t", 0, 1))
    driver.commit(("t", 0, 9), ("t", 1, 9), producer=P)
    assert driver.fetch().offset == 1
    assert driver.fetch("t", 1).offset == -1
    for index in (0, 1):
        unstable = driver.fetch("t", index, stable=True)
        assert isinstance(unstable.error, UnstableOffsetCommitError)
        assert (unstable.offset, unstable.leader_epoch, unstable.metadata) == (-1, -1, "")
    assert driver.fetch("t", 2, stable=True).error is None
    everything = driver.ask(FetchOffsets(G, None, require_stable=True)).topics
    assert [(topic, len(found)) for topic, found in everything] == [("t", 1)]
    assert isinstance(everything[0][1][0].error, UnstableOffsetCommitError)
    driver.reload()
    assert driver.fetch(stable=True).error is not None


@pytest.mark.parametrize("commit", [True, False])
def test_first_marker_of_a_transaction_commits_or_aborts_its_offsets(commit):
    driver = Driver()
    driver.commit(("t", 0, 1))
    driver.commit(("t", 0, 9), ("t", 1, 9), producer=P)
    driver.marker(P, commit=commit)
    assert driver.fetch(stable=True).offset == (9 if commit else 1)
    assert driver.fetch("t", 1, stable=True).offset == (9 if commit else -1)
    driver.marker(P, commit=not commit)
    assert driver.fetch(stable=True).offset == (9 if commit else 1)
    driver.reload()
    assert driver.fetch(stable=True).offset == (9 if commit else 1)


@pytest.mark.parametrize("commit", [True, False])
def test_later_plain_commit_wins_over_the_transaction(commit):
    driver = Driver()
    driver.commit(("t", 0, 9), producer=P)
    driver.commit(("t", 0, 3))
    driver.marker(P, commit=commit)
    assert driver.fetch(stable=True).offset == 3


def test_later_of_two_transactional_commits_wins_in_any_order_of_markers():
    driver = Driver()
    driver.commit(("t", 0, 1), producer=1)
    driver.commit(("t", 0, 2), producer=2)
    driver.marker(2, commit=True)
    assert isinstance(driver.fetch(stable=True).error, UnstableOffsetCommitError)
    driver.marker(1, commit=True)
    assert driver.fetch(stable=True).offset == 2


def test_transaction_may_commit_twice_and_to_several_groups():
    driver = Driver()
    driver.commit(("t", 0, 1), producer=P)
    driver.commit(("t", 0, 2), producer=P)
    driver.commit(("t", 0, 7), producer=P, group_id="h")
    driver.marker(P, commit=True)
    assert driver.fetch(stable=True).offset == 2
    assert driver.fetch(stable=True, group_id="h").offset == 7


def test_marker_of_another_producer_is_ignored():
    driver = Driver()
    driver.commit(("t", 0, 1), producer=P)
    driver.marker(P + 1, commit=True)
    assert driver.fetch(stable=True).error is not None


def test_offset_records_of_a_transaction_carry_its_producer():
    driver = Driver()
    driver.commit(("t", 0, 1), producer=P)
    driver.commit(("t", 0, 1))
    assert [entry.stamp for entry in driver.log] == [ProducerStamp(P, 0), None]


@pytest.mark.parametrize("commit", [True, False])
def test_offset_deletion_removes_the_pending_offset(commit):
    driver = Driver()
    driver.commit(("t", 0, 1), ("t", 1, 1), producer=P)
    driver.ask(DeleteOffsets(G, (("t", (0,)),)))
    assert driver.fetch(stable=True).error is None
    assert driver.fetch("t", 1, stable=True).error is not None
    driver.marker(P, commit=commit)
    assert driver.fetch(stable=True).offset == -1
    assert driver.fetch("t", 1, stable=True).offset == (1 if commit else -1)


# --- OffsetDelete --------------------------------------------------------------------------------


def test_offset_deletion_with_empty_or_unknown_group_id_is_refused():
    with pytest.raises(InvalidGroupIdError):
        Driver().ask(DeleteOffsets("", (("t", (0,)),)))
    with pytest.raises(GroupIdNotFoundError):
        Driver().ask(DeleteOffsets("nope", (("t", (0,)),)))


@pytest.mark.parametrize("build", [initial, completing, stable, preparing])
def test_offset_deletion_of_subscribed_topics_is_refused(build):
    driver, *_ = build()
    driver.commit(("t", 0, 1), ("u", 0, 1), producer=P)
    driver.marker(P, commit=True)
    result = driver.ask(DeleteOffsets(G, (("t", (0, 5)), ("u", (0, 5)))))
    errors = [(topic, index, error is None) for topic, index, error in result.partitions]
    # Before the first generation the members' subscriptions are unknown.
    knows = build is not initial
    assert errors == [("t", 0, False), ("t", 5, False), ("u", 0, knows), ("u", 5, knows)]
    assert isinstance(result.partitions[0][2], GroupSubscribedToTopicError)
    assert driver.fetch("u").offset == (-1 if knows else 1)
    assert driver.fetch("t").offset == 1


@pytest.mark.parametrize("metadata", [b"", b"\x00", b"\xff\xff\x00\x00\x00\x00", b"\x00\x00\x7f"])
def test_undecodable_subscription_counts_as_subscribed_to_every_topic(metadata):
    driver = Driver()
    driver.join(version=3, protocols=(("range", metadata),))
    driver.finish_initial_delay()
    driver.sync_all()
    result = driver.ask(DeleteOffsets(G, (("u", (0,)),)))
    assert isinstance(result.partitions[0][2], GroupSubscribedToTopicError)


def test_offset_deletion_in_a_group_of_another_type_requires_it_to_be_empty():
    driver = Driver()
    driver.join(version=3, protocol_type="connect")
    with pytest.raises(NonEmptyGroupError):
        driver.ask(DeleteOffsets(G, (("t", (0,)),)))
    driver.leave("c-1")
    driver.finish_initial_delay()
    assert driver.ask(DeleteOffsets(G, (("t", (0,)),))).partitions == (("t", 0, None),)


@pytest.mark.parametrize("build", [empty, Driver])
def test_offset_deletion_writes_tombstones_only_for_existing_offsets(build):
    driver = build()
    driver.commit(("t", 0, 1))
    driver.commit(("t", 1, 1), producer=P)
    before = len(driver.log)
    driver.ask(DeleteOffsets(G, (("t", (0, 1, 2, 0)), ("u", (0,)))))
    assert len(driver.log) == before + 2
    assert driver.fetch().offset == -1
    assert driver.state() == "Empty"


# --- deleted topics -------------------------------------------------------------------------------


def test_offsets_are_deleted_with_their_topic():
    driver, ids = stable(1)
    driver.commit(("t", 0, 1), ("u", 0, 1), generation=1, member_id=ids[0])
    driver.commit(("t", 1, 1), group_id="h")
    driver.commit(("t", 2, 1), producer=P, group_id="h")
    result = driver.ask(TopicsDeleted((("t", None), ("x", ID_A))))
    assert (result.offsets, result.more) == (3, False)
    assert driver.fetch().offset == -1
    assert driver.fetch("u").offset == 1
    assert driver.fetch("t", 2, stable=True, group_id="h").error is None
    assert driver.state() == "Stable"


@pytest.mark.parametrize(
    ("stored", "deleted", "gone"),
    [
        (ID_A, ID_A, True),
        (ID_A, ID_B, False),
        (ID_A, None, True),
        (None, ID_A, True),
        (bytes(16), ID_A, True),
    ],
)
def test_topic_deletion_keeps_offsets_of_another_topic_id(stored, deleted, gone):
    driver = Driver()
    driver.commit(("t", 0, 5, -1, "", stored))  # type: ignore[arg-type]
    driver.ask(TopicsDeleted((("t", deleted),)))
    assert driver.fetch().offset == (-1 if gone else 5)


def test_topic_deletion_of_many_offsets_runs_in_passes():
    driver = Driver(GroupLimits(max_looks_per_pass=3))
    for group_id in ("g", "h"):
        driver.commit(*(("t", index, 1) for index in range(4)), group_id=group_id)
    results = []
    while True:
        results.append(driver.ask(TopicsDeleted((("t", None),))))
        if not results[-1].more:
            break
    assert [result.offsets for result in results] == [3, 3, 2]
    assert driver.ask(FetchOffsets("h", None)).topics == ()


@pytest.mark.parametrize("command", [TopicsDeleted((("t", ID_B),)), ExpireOffsets()])
def test_pass_examines_a_bounded_number_of_offsets_that_stay(monkeypatch, command):
    driver, looked_at = Driver(GroupLimits(max_looks_per_pass=3)), []
    driver.commit(*(("t", index, 1, -1, "", ID_A) for index in range(40)))
    for name in ("_entries", "_is_expired"):
        look = getattr(offsets, name)
        monkeypatch.setattr(
            offsets, name, lambda *of, look=look: (looked_at.append(of[-1]), look(*of))[1]
        )
    passes = 1
    while driver.ask(command).more:
        assert len(looked_at) == passes * 3
        passes += 1
    assert looked_at == [("t", index) for index in range(40)]


@pytest.mark.parametrize("command", [TopicsDeleted((("u", None),)), ExpireOffsets()])
def test_pass_respects_changes_since_the_previous_pass(command):
    driver = Driver(GroupLimits(max_looks_per_pass=1))
    driver.commit(("u", 0, 1), ("u", 1, 1), ("u", 2, 1), retention_time_ms=0)
    for group_id in ("h", "i"):
        driver.commit(("u", 0, 1), retention_time_ms=0, group_id=group_id)
    assert driver.ask(command).offsets == 1
    driver.commit(("t", 0, 7))
    driver.ask(DeleteOffsets(G, (("u", (1,)),)))
    driver.ask(DeleteGroup("h"))
    forgotten = 0
    while (result := driver.ask(command)).more:
        forgotten += result.offsets
    assert forgotten == 2
    assert driver.fetch().offset == 7
    assert driver.fetch("u", 2).offset == driver.fetch("u", group_id="i").offset == -1
    assert "h" not in driver.groups


# --- expiry --------------------------------------------------------------------------------------


def expire(driver: Driver) -> tuple[int, int]:
    result = driver.ask(ExpireOffsets())
    assert not result.more
    return result.offsets, result.groups


def test_offsets_of_a_simple_group_expire_by_commit_time():
    driver = Driver()
    driver.commit(("t", 0, 1))
    driver.advance(1_000)
    driver.commit(("t", 1, 1))
    driver.advance(RETENTION - 1_001)
    assert expire(driver) == (0, 0)
    driver.advance(1)
    assert expire(driver) == (1, 0)
    assert driver.fetch("t", 1).offset == 1
    driver.advance(1_000)
    assert expire(driver) == (1, 1)
    assert driver.state() == "Dead"
    assert expire(driver) == (0, 0)


def test_offsets_of_an_empty_group_expire_by_the_time_it_became_empty():
    driver = Driver()
    driver.join(version=3, session_timeout_ms=1_800_000)
    driver.finish_initial_delay()
    driver.sync_all()
    driver.commit(("t", 0, 1), generation=1, member_id="c-1")
    for _ in range(RETENTION // 1_000_000):
        driver.advance(1_000_000)
        driver.heartbeat("c-1")
    driver.leave("c-1")
    driver.commit(("u", 0, 1))
    driver.advance(RETENTION - 1)
    assert expire(driver) == (0, 0)
    driver.advance(1)
    assert expire(driver) == (2, 1)


def test_offsets_of_a_group_without_state_timestamp_expire_by_commit_time():
    value = records.GroupMetadataValue("consumer", 4, None, None, -1, ())
    driver = Driver(log=[Entry(0, records.group_metadata(G, value), None)])
    driver.advance(RETENTION)
    driver.commit(("t", 0, 1))
    assert expire(driver) == (0, 0)
    driver.advance(RETENTION)
    assert expire(driver) == (1, 1)


def patient(build_topics: bytes, **fields: object) -> Driver:
    """Return a Stable group whose member needs no heartbeats during a test."""
    driver = Driver(GroupLimits(max_session_timeout_ms=RETENTION * 3))
    driver.join(
        version=3,
        protocols=(("range", build_topics),),
        session_timeout_ms=RETENTION * 3,
        **fields,
    )
    driver.finish_initial_delay()
    driver.sync_all()
    driver.commit(("t", 0, 1), ("u", 0, 1), generation=1, member_id="c-1")
    return driver


def test_stable_group_keeps_offsets_of_subscribed_topics():
    driver = patient(subscription("t"))
    driver.advance(RETENTION)
    assert expire(driver) == (1, 0)
    assert driver.fetch("t").offset == 1
    assert driver.fetch("u").offset == -1
    assert driver.state() == "Stable"


@pytest.mark.parametrize(
    ("metadata", "fields"),
    [(b"?", {}), (subscription("t"), {"protocol_type": "connect"})],
)
def test_stable_group_with_unknown_subscription_keeps_all_offsets(metadata, fields):
    driver = patient(metadata, **fields)
    driver.advance(RETENTION)
    assert expire(driver) == (0, 0)


@pytest.mark.parametrize("state", ["PreparingRebalance", "CompletingRebalance"])
def test_rebalancing_group_keeps_all_offsets(state):
    driver = patient(subscription("t"))
    driver.advance(RETENTION)
    if state == "PreparingRebalance":
        driver.join(version=3)
    else:
        driver.join("c-1", session_timeout_ms=RETENTION * 3)
    assert driver.state() == state
    assert expire(driver) == (0, 0)


def test_explicit_expire_timestamp_overrides_the_offset_retention():
    driver = Driver()
    driver.commit(("t", 0, 1), retention_time_ms=100)
    driver.commit(("t", 1, 1), retention_time_ms=RETENTION * 2)
    driver.advance(99)
    assert expire(driver) == (0, 0)
    driver.advance(1)
    assert expire(driver) == (1, 0)
    driver.advance(RETENTION)
    assert expire(driver) == (0, 0)
    driver.advance(RETENTION)
    assert expire(driver) == (1, 1)


def test_pending_offset_keeps_the_committed_offset_and_the_group():
    driver = Driver()
    driver.commit(("t", 0, 1), ("t", 1, 1))
    driver.commit(("t", 0, 2), producer=P)
    driver.advance(RETENTION)
    assert expire(driver) == (1, 0)
    assert driver.fetch().offset == 1
    driver.marker(P, commit=False)
    assert expire(driver) == (1, 1)


def test_pending_offsets_alone_keep_a_group_from_expiring():
    driver = Driver()
    driver.commit(("t", 0, 2), producer=P)
    driver.advance(RETENTION)
    assert expire(driver) == (0, 0)
    assert driver.state() == "Empty"


def test_empty_group_without_offsets_is_deleted_at_once():
    driver = empty()
    assert expire(driver) == (0, 1)
    assert driver.log[-1].record is not None
    assert driver.log[-1].record.value is None
    assert driver.event("group-deleted")


def test_group_with_a_pending_member_is_not_deleted_by_expiration():
    driver = Driver()
    driver.join()
    assert expire(driver) == (0, 0)
    assert driver.parked(driver.join("c-1"))


@pytest.mark.parametrize("build", [initial, completing, stable, preparing])
def test_group_with_members_is_not_deleted_by_expiration(build):
    driver, *_ = build()
    assert expire(driver) == (0, 0)


def test_expiration_of_many_offsets_runs_in_passes():
    driver = Driver(GroupLimits(max_looks_per_pass=3))
    driver.commit(*(("t", index, 1) for index in range(7)))
    for group_id in ("h", "i"):
        driver.commit(("t", 0, 1), group_id=group_id)
    driver.advance(RETENTION)
    results = []
    while not results or results[-1].more:
        before = len(driver.log)
        results.append(driver.ask(ExpireOffsets()))
        assert len(driver.log) - before <= 3
    assert sum(result.offsets for result in results) == 9
    assert sum(result.groups for result in results) == 3
    assert not driver.groups
