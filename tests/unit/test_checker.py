"""The checker finds each planted anomaly, and nothing in the same operations without it."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.checker import Kind, check
from tests.support.history import (
    Assigned,
    Begin,
    CommitOffset,
    End,
    Fence,
    FetchOffset,
    Isolation,
    Operation,
    Outcome,
    Read,
    Replayed,
    Send,
    Watermarks,
    dump,
    load,
    load_all,
)

OK, FAILED, UNKNOWN = Outcome.OK, Outcome.FAILED, Outcome.UNKNOWN
P, Q = ("t", 0), ("t", 1)
SOURCE = ("source", 0)


def send(at: float, value: str, offset: int | None, outcome: Outcome = OK, **more: Any) -> Send:
    fields = {"process": "writer", "partition": P, **more}
    return Send(begin=at, end=at + 0.5, value=value, offset=offset, outcome=outcome, **fields)


def commit(at: float, txn: str, outcome: Outcome = OK, **more: Any) -> End:
    fields = {"process": "writer", **more}
    return End(begin=at, end=at + 0.5, txn=txn, commit=True, outcome=outcome, **fields)


def abort(at: float, txn: str, outcome: Outcome = OK) -> End:
    return End(process="writer", begin=at, end=at + 0.5, txn=txn, commit=False, outcome=outcome)


def read(at: float, position: int, values: str, end: int | None = None, **more: Any) -> Read:
    """Return a read with ``values`` like ``"0:a 1:b"``."""
    pairs = tuple((int(o), v) for o, _, v in (text.partition(":") for text in values.split()))
    upto = end if end is not None else max([position, *(offset + 1 for offset, _ in pairs)])
    fields = {
        "process": "reader",
        "partition": P,
        "isolation": Isolation.READ_COMMITTED,
        **more,
    }
    return Read(begin=at, end=at + 0.5, position=position, next=upto, values=pairs, **fields)


def final(at: float, values: str, end: int, **more: Any) -> Read:
    return read(at, 0, values, end, final=True, process="judge", **more)


def offset(at: float, value: int, outcome: Outcome = OK, **more: Any) -> CommitOffset:
    fields = {"process": "member", "group": "g", "partition": SOURCE, **more}
    return CommitOffset(begin=at, end=at + 0.5, offset=value, outcome=outcome, **fields)


def ask(at: float, value: int, **more: Any) -> FetchOffset:
    return FetchOffset(
        process="member", begin=at, end=at + 0.5, group="g", partition=SOURCE, offset=value, **more
    )


def fence(at: float, epoch: int, subject: str = "tid") -> Fence:
    return Fence(process="newer", begin=at, end=at + 0.5, subject=subject, epoch=epoch)


def assigned(at: float, member: str, epoch: int, *partitions: tuple[str, int]) -> Assigned:
    return Assigned(
        process=member, begin=at, end=at + 0.5, group="g", epoch=epoch, partitions=partitions
    )


def marks(stable: int, end: int, *, last: bool) -> Watermarks:
    return Watermarks(
        process="judge", begin=90, end=91, partition=P, stable=stable, end_offset=end, final=last
    )


def replayed(at: float, offset: int, digest: str, machine: str = "txn-0") -> Replayed:
    return Replayed(
        process="judge", begin=at, end=at, machine=machine, offset=offset, digest=digest
    )


TXN = [
    Begin(process="writer", begin=0, end=0, txn="x"),
    send(1, "a", 0, txn="x"),
    send(2, "b", 0, txn="x", partition=Q),
]
"""A transaction over two partitions; a test adds the operation that determines its outcome."""

PAIRS: list[tuple[Kind, str, list[Operation], list[Operation]]] = [
    (
        Kind.LOST,
        "a reader passed an acknowledged value",
        [send(1, "a", 0), send(2, "b", 1), read(3, 0, "0:a 1:b")],
        [send(1, "a", 0), send(2, "b", 1), read(3, 0, "1:b")],
    ),
    (
        Kind.LOST,
        "an unknown send may be missing, an acknowledged one may not",
        [send(1, "a", None, UNKNOWN), send(2, "b", 0), read(3, 0, "0:b")],
        [send(1, "a", 0), send(2, "b", 1), read(3, 0, "", 2)],
    ),
    (
        Kind.LOST,
        "a whole committed transaction",
        [*TXN, commit(3, "x"), read(4, 0, "0:a", 2), read(5, 0, "0:b", 2, partition=Q)],
        [*TXN, commit(3, "x"), read(4, 0, "", 2), read(5, 0, "", 2, partition=Q)],
    ),
    (
        Kind.UNSEEN,
        "the final read stops short of an acknowledged value",
        [send(1, "a", 0), send(2, "b", 1), final(3, "0:a 1:b", 2)],
        [send(1, "a", 0), send(2, "b", 1), final(3, "0:a", 1)],
    ),
    (
        Kind.UNSEEN,
        "an acknowledgement without an offset counts too",
        [send(1, "a", None), final(3, "0:a", 1)],
        [send(1, "a", None), final(3, "", 0)],
    ),
    (
        Kind.DUPLICATE,
        "one value at two offsets",
        [send(1, "a", 0), read(2, 0, "0:a"), read(3, 0, "0:a", process="other")],
        [send(1, "a", 0), read(2, 0, "0:a 1:a")],
    ),
    (
        Kind.DUPLICATE,
        "the repetition of an aborted transaction, and of a committed one",
        [*TXN, abort(3, "x"), send(4, "a", 3, txn="y"), commit(5, "y"), final(6, "3:a", 5)],
        [
            *TXN[:2],
            commit(3, "x"),
            send(4, "a", 3, txn="y"),
            commit(5, "y"),
            final(6, "0:a 3:a", 5),
        ],
    ),
    (
        Kind.ABORTED_READ,
        "read uncommitted may see it, read committed may not",
        [*TXN, abort(3, "x"), read(4, 0, "0:a", isolation=Isolation.READ_UNCOMMITTED)],
        [*TXN, abort(3, "x"), read(4, 0, "0:a")],
    ),
    (
        Kind.ABORTED_READ,
        "a commit of unknown outcome proves nothing, none at all proves the abort",
        [*TXN, commit(3, "x", UNKNOWN), read(4, 0, "", 2)],
        [*TXN, abort(3, "x", UNKNOWN), read(4, 0, "0:a")],
    ),
    (
        Kind.ABORTED_READ,
        "a refused commit",
        [*TXN, commit(3, "x", FAILED), read(4, 0, "", 2)],
        [*TXN, commit(3, "x", FAILED), read(4, 0, "0:a", 2)],
    ),
    (
        Kind.ABORTED_READ,
        "a refused send is seen by nobody",
        [send(1, "a", None, FAILED), read(2, 0, "", 0, isolation=Isolation.READ_UNCOMMITTED)],
        [send(1, "a", None, FAILED), read(2, 0, "0:a", isolation=Isolation.READ_UNCOMMITTED)],
    ),
    (
        Kind.ABORTED_READ,
        "a consumed offset of an aborted transaction",
        [*TXN, offset(2, 5, txn="x"), abort(3, "x"), ask(4, -1)],
        [*TXN, offset(2, 5, txn="x"), abort(3, "x"), ask(4, 5)],
    ),
    (
        Kind.PRECOMMITTED_READ,
        "before the commit was asked for",
        [*TXN, read(2, 0, "", 0), commit(3, "x"), read(3.1, 0, "0:a", moved=True)],
        [*TXN, read(2, 0, "0:a"), commit(3, "x")],
    ),
    (
        Kind.PRECOMMITTED_READ,
        "its own value, by the transaction itself",
        [*TXN, read(4, 0, "0:a", txn="y"), commit(3, "x")],
        [*TXN, read(4, 0, "0:a", txn="x"), commit(3, "x")],
    ),
    (
        Kind.TORN,
        "one partition has it and the other does not",
        [*TXN, commit(3, "x"), final(4, "0:a", 2), final(5, "0:b", 2, partition=Q)],
        [*TXN, commit(3, "x"), final(4, "0:a", 2), final(5, "", 2, partition=Q)],
    ),
    (
        Kind.TORN,
        "one visible value proves that an unknown commit happened",
        [*TXN, commit(3, "x", UNKNOWN), final(4, "", 2), final(5, "", 2, partition=Q)],
        [*TXN, commit(3, "x", UNKNOWN), final(4, "0:a", 2), final(5, "", 2, partition=Q)],
    ),
    (
        Kind.TORN,
        "the values without the offset they were made from",
        [
            *TXN[:2],
            offset(2, 5, txn="x"),
            commit(3, "x"),
            final(6, "0:a", 2),
            ask(7, 5, final=True),
        ],
        [
            *TXN[:2],
            offset(1, 3),
            offset(2, 5, txn="x"),
            commit(3, "x", UNKNOWN),
            final(6, "0:a", 2),
            ask(7, 3, final=True),
        ],
    ),
    (
        Kind.TORN,
        "the offset without the values",
        [
            *TXN[:2],
            offset(1, 3),
            offset(2, 5, txn="x"),
            commit(3, "x", UNKNOWN),
            final(6, "", 2),
            ask(7, 3, final=True),
        ],
        [
            *TXN[:2],
            offset(1, 3),
            offset(2, 5, txn="x"),
            commit(3, "x", UNKNOWN),
            final(6, "", 2),
            ask(7, 5, final=True),
        ],
    ),
    (
        Kind.ZOMBIE,
        "a write of a fenced epoch is acknowledged",
        [fence(1, 1), send(2, "a", None, FAILED, subject="tid", epoch=0), final(9, "", 0)],
        [fence(1, 1), send(2, "a", 0, subject="tid", epoch=0), final(9, "0:a", 1)],
    ),
    (
        Kind.ZOMBIE,
        "a write of a fenced epoch times out and is there",
        [fence(1, 1), send(0, "a", None, UNKNOWN, subject="tid", epoch=0), final(9, "0:a", 1)],
        [fence(1, 1), send(2, "a", None, UNKNOWN, subject="tid", epoch=0), final(9, "0:a", 1)],
    ),
    (
        Kind.ZOMBIE,
        "a commit of a fenced epoch ends the transaction",
        [*TXN, fence(3, 1), commit(4, "x", FAILED, subject="tid", epoch=0)],
        [*TXN, fence(3, 1), commit(4, "x", subject="tid", epoch=0)],
    ),
    (
        Kind.ZOMBIE,
        "an offset commit of an old generation",
        [
            fence(1, 2, "g"),
            offset(2, 5, FAILED, subject="g", epoch=1),
            offset(3, 5, subject="g", epoch=2),
        ],
        [fence(1, 2, "g"), offset(2, 5, subject="g", epoch=1)],
    ),
    (
        Kind.OFFSET_REGRESSION,
        "back to an older commit",
        [offset(1, 5), offset(2, 7), ask(3, 7)],
        [offset(1, 5), offset(2, 7), ask(3, 5)],
    ),
    (
        Kind.OFFSET_REGRESSION,
        "a commit of unknown outcome may show, an acknowledged one must",
        [offset(1, 5), offset(2, 7, UNKNOWN), ask(3, 5)],
        [offset(1, 5), ask(3, -1)],
    ),
    (
        Kind.OFFSET_REGRESSION,
        "a transaction's offset counts from its commit on",
        [offset(1, 3), offset(2, 5, txn="x"), ask(2.6, 3), commit(3, "x"), ask(4, 5)],
        [offset(1, 3), offset(2, 5, txn="x"), ask(2.6, 3), commit(3, "x"), ask(4, 3)],
    ),
    (
        Kind.OFFSET_REGRESSION,
        "going back on purpose is allowed",
        [offset(1, 5), offset(2, 3), ask(3, 3)],
        [offset(1, 5), offset(2, 3), ask(3, 5)],
    ),
    (
        Kind.LSO_STALL,
        "an open transaction is one when all is over",
        [marks(3, 5, last=False), marks(5, 5, last=True)],
        [marks(3, 5, last=True)],
    ),
    (
        Kind.INCONSISTENT_OFFSETS,
        "two readers, two truths",
        [send(1, "a", 0), send(2, "b", 1), read(3, 0, "0:a 1:b")],
        [
            send(1, "a", None, UNKNOWN),
            send(2, "b", None, UNKNOWN),
            read(3, 0, "0:a"),
            read(3, 0, "0:b", process="other"),
        ],
    ),
    (
        Kind.INCONSISTENT_OFFSETS,
        "acknowledged at an offset where another value is read",
        [send(1, "a", 0), send(2, "b", 1), read(3, 0, "0:a 1:b")],
        [send(1, "a", 0), send(2, "b", None, UNKNOWN), read(3, 0, "0:b 1:a")],
    ),
    (
        Kind.DOUBLE_OWNER,
        "at one epoch",
        [assigned(1, "m1", 1, P), assigned(1, "m2", 1, Q), assigned(2, "m2", 2, P, Q)],
        [assigned(1, "m1", 1, P), assigned(1, "m2", 1, P, Q)],
    ),
    (
        Kind.REPLAY_DIVERGENCE,
        "after a reload",
        [replayed(1, 7, "a"), replayed(2, 7, "a"), replayed(3, 8, "b"), replayed(3, 7, "c", "g")],
        [replayed(1, 7, "a"), replayed(2, 7, "b")],
    ),
    (
        Kind.NONMONOTONIC_READ,
        "back between polls",
        [send(1, "a", 0), read(2, 0, "0:a"), read(3, 0, "0:a", moved=True)],
        [send(1, "a", 0), read(2, 0, "0:a"), read(3, 0, "0:a")],
    ),
    (
        Kind.NONMONOTONIC_READ,
        "back within a poll",
        [send(1, "a", 0), send(2, "b", 1), read(3, 0, "0:a 1:b")],
        [send(1, "a", 0), send(2, "b", 1), read(3, 0, "1:b 0:a")],
    ),
    (
        Kind.SKIPPED_READ,
        "within a poll, though another reader saw it",
        [send(1, "a", 0), send(2, "b", 1), read(3, 0, "0:a 1:b"), final(4, "0:a 1:b", 2)],
        [send(1, "a", 0), send(2, "b", 1), read(3, 0, "1:b"), final(4, "0:a 1:b", 2)],
    ),
    (
        Kind.SKIPPED_READ,
        "between polls",
        [
            *(send(n, value, n) for n, value in enumerate("abc")),
            final(4, "0:a 1:b 2:c", 3),
            read(5, 0, "0:a"),
            read(6, 2, "2:c", moved=True),
        ],
        [
            *(send(n, value, n) for n, value in enumerate("abc")),
            final(4, "0:a 1:b 2:c", 3),
            read(5, 0, "0:a"),
            read(6, 2, "2:c"),
        ],
    ),
    (
        Kind.NONMONOTONIC_SEND,
        "later with the smaller offset",
        [send(1, "a", 5), send(2, "b", 6)],
        [send(1, "a", 6), send(2, "b", 5)],
    ),
    (
        Kind.CIRCULAR,
        "two transactions that each saw the other",
        [
            send(1, "a", 0, txn="x"),
            send(1, "b", 0, txn="y", partition=Q, process="w2"),
            commit(2, "x"),
            read(2, 0, "0:a", txn="y"),
            commit(3, "y"),
        ],
        [
            send(1, "a", 0, txn="x"),
            send(1, "b", 0, txn="y", partition=Q, process="w2"),
            commit(2, "x"),
            commit(2, "y"),
            read(2, 0, "0:a", txn="y"),
            read(2, 0, "0:b", txn="x", partition=Q),
        ],
    ),
]
"""Class of the anomaly, description, operations without the anomaly, operations with it."""

CASES = [pytest.param(*pair, id=f"{pair[0]}: {pair[1]}") for pair in PAIRS]


@pytest.mark.parametrize(("kind", "_what", "clean", "_planted"), CASES)
def test_clean_history_has_no_anomaly(
    kind: Kind, _what: str, clean: list[Operation], _planted: list[Operation]
) -> None:
    assert check(clean) == []


@pytest.mark.parametrize(("kind", "_what", "_clean", "planted"), CASES)
def test_planted_anomaly_is_the_only_kind_found(
    kind: Kind, _what: str, _clean: list[Operation], planted: list[Operation]
) -> None:
    assert {anomaly.kind for anomaly in check(planted)} == {kind}


@pytest.mark.parametrize(("kind", "_what", "_clean", "planted"), CASES)
def test_result_does_not_depend_on_the_order_of_operations(
    kind: Kind, _what: str, _clean: list[Operation], planted: list[Operation]
) -> None:
    assert check(planted[::-1]) == check(planted)


def test_every_kind_of_anomaly_is_planted() -> None:
    assert {kind for kind, *_ in PAIRS} == set(Kind)


def test_empty_history_has_no_anomaly() -> None:
    assert check([]) == []


def test_histories_are_read_back_without_a_torn_last_line(tmp_path) -> None:
    operations = [
        *TXN,
        commit(3, "x"),
        final(4, "0:a", 2),
        offset(5, 1, UNKNOWN),
        ask(6, 1),
        fence(7, 1),
        assigned(8, "m", 1, P, Q),
        marks(2, 2, last=True),
        replayed(99, 7, "a"),
    ]
    assert [load(dump(operation)) for operation in operations] == operations
    file = tmp_path / "history.jsonl"
    file.write_text("".join(dump(operation) + "\n" for operation in operations) + '{"kind": "Se')
    assert load_all([file]) == operations
