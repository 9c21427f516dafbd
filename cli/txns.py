"""``fencepost txns``: list, describe, resolve, abort and terminate transactions."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from fencepost.cli.changes import execute_option
from fencepost.cli.history_view import history_options, show
from fencepost.cli.options import duration
from fencepost.cli.output import (
    CommandGroup,
    emit,
    moment,
    shared_options,
    spelled,
    table_options,
)
from fencepost.cli.printing import print_lines
from fencepost.cli.txn_resolve import TWO_PHASE_ABORT, resolve_txn
from fencepost.coordinator.history.entries import TRANSACTION

if TYPE_CHECKING:
    from fencepost.client.queries.blame import Blame
    from fencepost.client.queries.claims import ProducerEpochClaim
    from fencepost.client.queries.open_transactions import Producer, Transaction
    from fencepost.client.queries.session import ClusterSession
    from fencepost.client.requests import Partition

DEFAULT_MAX_TIMEOUT_MINUTES = 15.0
"""Kafka's default of ``transaction.max.timeout.ms``: a coordinator aborts older transactions."""

MAX_DURATION_MS = 1 << 53
"""The maximum duration in a filter: far above any transaction's age, and exact as a float."""

LIST_TRANSACTIONS = 66

TRANSACTION_STATES = (
    *("Empty", "Ongoing", "PrepareCommit", "PrepareAbort", "CompleteCommit", "CompleteAbort"),
    *("Dead", "PrepareEpochFence"),
)
"""Kafka's ``TransactionState``, by the names that filters accept."""

ORDINARY_ENDS = (
    "the history leaves out commits that a producer requested (fencepost.history.commits);"
    " fencepost_transactions_ended_total counts them"
)

PRODUCER_COLUMNS = [
    "topic",
    "partition",
    "producer_id",
    "epoch",
    "coordinator_epoch",
    "last_sequence",
    "last_write",
    "start_offset",
]


@click.group("txns", cls=CommandGroup)
def command() -> None:
    """Inspect transactions, and end those that hang."""


command.add_command(resolve_txn)


@command.command("list")
@click.option("--state", "states", multiple=True, help="Only this state, e.g. Ongoing; repeatable.")
@click.option("--producer-id", "producer_ids", multiple=True, type=int, help="Repeatable.")
@click.option(
    "--duration-filter",
    "duration_ms",
    callback=duration("ms", 0, MAX_DURATION_MS),
    metavar="MS",
    help="Only transactions that have been open for longer; also 90s or 1h.",
)
@click.option(
    "--id-pattern", metavar="REGEX", help="Only transactional ids that match it entirely."
)
@table_options
def list_txns(
    session: ClusterSession,
    states: tuple[str, ...],
    producer_ids: tuple[int, ...],
    duration_ms: float | None,
    id_pattern: str | None,
    form: str,
) -> None:
    """List the transactional ids of all brokers, each with its state.

    The brokers apply the filters; --id-pattern has the syntax of RE2.
    """
    from kio.schema.errors import ErrorCode

    from fencepost.client.client import ApiError

    states = tuple(spelled(states, TRANSACTION_STATES, "transaction state"))
    _check_filters(session, duration_ms, id_pattern)
    try:
        answers = session.call_all_brokers(
            "ListTransactions",
            state_filters=states,
            producer_id_filters=producer_ids,
            duration_filter=-1 if duration_ms is None else int(duration_ms),
            transactional_id_pattern=id_pattern,
        )
    except ApiError as error:
        if error.code is not ErrorCode.invalid_regular_expression:
            raise
        why = f"--id-pattern: {id_pattern!r} is not a regular expression that the broker takes"
        raise click.ClickException(f"{why} ({error})") from error
    rows: list[dict[str, object]] = [
        {
            "transactional_id": row.transactional_id,
            "producer_id": row.producer_id,
            "state": row.transaction_state,
        }
        for answer in answers
        for row in answer.transaction_states
    ]
    rows.sort(key=lambda row: str(row["transactional_id"]))
    emit(rows, ["transactional_id", "producer_id", "state"], form, "no transactional ids")


def _check_filters(
    session: ClusterSession, duration_ms: float | None, id_pattern: str | None
) -> None:
    """Refuse a filter that an older broker would silently ignore."""
    newest = session.client.versions()[LIST_TRANSACTIONS][1]
    for needed, value, option in (
        (1, duration_ms, "--duration-filter"),
        (2, id_pattern, "--id-pattern"),
    ):
        if value is not None and newest < needed:
            raise click.ClickException(f"this broker does not support {option}")


@command.command("describe")
@click.argument("transactional_id")
@table_options
def describe(session: ClusterSession, transactional_id: str, form: str) -> None:
    """Show the transaction of TRANSACTIONAL_ID: its producer, its start, and its partitions.

    OPEN_SECONDS is empty once the transaction is complete: the protocol does not report when it
    ended.
    """
    from fencepost.client.queries.group_view import texts
    from fencepost.client.queries.open_transactions import UNFINISHED, transaction

    state = transaction(session, transactional_id)
    open_ms = None
    if state.started_ms is not None and state.state in UNFINISHED:
        open_ms = max(0, time.time_ns() // 1_000_000 - state.started_ms)
    row = {
        "transactional_id": state.transactional_id,
        "state": state.state,
        "producer_id": state.producer_id,
        "epoch": state.epoch,
        "timeout_ms": state.timeout_ms,
        "started": moment(state.started_ms),
        "open_seconds": None if open_ms is None else round(open_ms / 1000, 1),
        "partitions": texts(state.partitions),
    }
    emit([row], list(row), form)


@command.command("producers")
@click.argument("where", metavar="TOPIC[:P]")
@click.option("--open", "only_open", is_flag=True, help="Only producers with an open transaction.")
@table_options
def show_producers(session: ClusterSession, where: str, form: str, *, only_open: bool) -> None:
    """Show the idempotent producers of TOPIC, and the offsets where open transactions begin.

    The partition leaders answer, not the transaction coordinators.
    """
    from fencepost.client.queries.open_transactions import partitions_of, producers

    producer_rows = producers(session, partitions_of(session, [where]))
    rows = [_producer_row(row) for row in producer_rows if row.is_open or not only_open]
    emit(rows, PRODUCER_COLUMNS, form, "no producers")


def _producer_row(row: Producer) -> dict[str, object]:
    return {
        "topic": row.topic,
        "partition": row.partition,
        "producer_id": row.producer_id,
        "epoch": row.epoch,
        "coordinator_epoch": row.coordinator_epoch,
        "last_sequence": row.last_sequence,
        "last_write": moment(row.last_timestamp_ms),
        "start_offset": row.start_offset if row.is_open else None,
    }


@command.command("find-hanging")
@click.option(
    "--topic", "topics", multiple=True, metavar="TOPIC[:P]", help="Only this partition; repeatable."
)
@click.option(
    "--max-transaction-timeout",
    "max_minutes",
    callback=duration("m", 0),
    default=DEFAULT_MAX_TIMEOUT_MINUTES,
    show_default=True,
    metavar="MINUTES",
    help="Only transactions whose last record is older; also 90s or 1h.",
)
@table_options
def find_hanging(
    session: ClusterSession, topics: tuple[str, ...], max_minutes: float, form: str
) -> None:
    """Find transactions that are open on a partition and that no coordinator will ever end.

    Exit status 1 if there are any. `abort` ends them. A transaction that its coordinator knows does
    not hang, however old it is: `list --duration-filter` finds it, `terminate` ends it. SINCE is
    the time of the first record. CLIENT names the members of the groups whose offsets the producer
    holds back, or else the client that claimed the producer id. The latter, and transactional ids
    that have expired, come from the broker's own history, which Apache Kafka does not keep.
    """
    from fencepost.client.queries import open_transactions as tools
    from fencepost.client.queries.blame import clients_of
    from fencepost.client.queries.claims import claims_of, holder

    hanging = tools.hanging(
        session,
        tools.partitions_of(session, topics),
        older_than_ms=int(max_minutes * 60_000),
        now_ms=time.time_ns() // 1_000_000,
    )
    ids = {row.producer_id for row, _, _ in hanging}
    (clients, hidden), claims = clients_of(session, ids), claims_of(session, ids)
    rows = [
        {
            **_producer_row(producer),
            "since": moment(tools.began(session, producer)),
            **_owner(
                transaction,
                clients.get(producer.producer_id, ()),
                holder(claims.get(producer.producer_id, ()), producer.epoch),
            ),
            "reason": reason,
        }
        for producer, transaction, reason in hanging
    ]
    if rows or form == "json":
        columns = ["since", "transactional_id", "client", "claimed", "reason"]
        emit(rows, [*PRODUCER_COLUMNS, *columns], form)
    else:
        print_lines("no transaction hangs")
    _note_hidden(hidden)
    if rows:
        raise SystemExit(1)


def _note_hidden(groups: Sequence[str]) -> None:
    """Say which groups could not be examined."""
    if groups:
        print_lines(f"note: groups that you may not describe: {', '.join(groups)}", err=True)


def _owner(
    transaction: Transaction | None, members: tuple[str, ...], claim: ProducerEpochClaim | None
) -> dict[str, object]:
    """Return the owner of a producer, from its coordinator first, then from the history."""
    owner = transaction or claim
    claimant = claim.client if claim is not None else None
    return {
        "transactional_id": owner.transactional_id if owner is not None else None,
        "client": list(members) or ([] if claimant is None else [claimant]),
        "claimed": moment(claim.at_ms) if claim is not None else None,
    }


@command.command("abort")
@click.argument("where", metavar="TOPIC:P")
@click.option(
    "--start-offset", type=click.IntRange(min=0), help="The first offset of the transaction."
)
@click.option(
    "--producer-id", type=click.IntRange(min=0), help="The producer id of the transaction."
)
@execute_option
@click.option(
    "--force",
    is_flag=True,
    help=(
        "Abort it even if its coordinator will end it: its records in other partitions may"
        " then be committed."
    ),
)
@shared_options
def abort_txn(
    session: ClusterSession,
    where: str,
    start_offset: int | None,
    producer_id: int | None,
    *,
    execute: bool,
    force: bool,
) -> None:
    """Write the abort marker of a hanging transaction to one partition.

    The transaction is named by --start-offset or by --producer-id, as `find-hanging` shows them.
    """
    from fencepost.client.queries import open_transactions as tools

    topic, index = tools.partition_argument(where)
    if index is None:
        raise click.BadParameter("name one partition, as TOPIC:P", param_hint="TOPIC:P")
    if start_offset is None and producer_id is None:
        raise click.UsageError("give --start-offset or --producer-id")
    (place,) = tools.partitions_of(session, [where])
    producer = _find_open(session, place, start_offset, producer_id)
    transaction = tools.transactions_of(session, [producer.producer_id]).get(producer.producer_id)
    reason = tools.why_hanging(producer, transaction)
    what = (
        f"the transaction of producer {producer.producer_id} epoch {producer.epoch}"
        f" in {topic}:{index} from offset {producer.start_offset}"
    )
    if reason is None and transaction is not None and not force:
        raise click.ClickException(
            f"{what} does not hang: {transaction.transactional_id} is {transaction.state}"
            " and its coordinator will end it (`txns terminate` makes it do so now, --force"
            " aborts it in this partition only)"
        )
    if not execute:
        print_lines(f"would abort {what} ({reason or 'forced'}); --execute aborts it")
        return
    tools.abort(session, producer)
    print_lines(f"aborted {what} ({reason or 'forced'})")


@command.command("terminate")
@click.argument("transactional_id")
@execute_option
@click.option(
    "--force", is_flag=True, help="Also abort the Kafka part of a two-phase commit (KIP-939)."
)
@shared_options
def terminate_txn(
    session: ClusterSession, transactional_id: str, *, execute: bool, force: bool
) -> None:
    """Fence the producer of TRANSACTIONAL_ID and abort the transaction it has open.

    For a producer that is dead, or must be stopped: its coordinator ends the transaction in all
    its partitions, as at the producer's next start or when its timeout expires. A producer that is
    alive is fenced. `history` shows the client that terminated it.
    """
    from kio.schema.errors import ErrorCode

    from fencepost.client.client import ApiError
    from fencepost.client.queries import open_transactions as tools
    from fencepost.protocol.errors import WireError

    state = tools.transaction(session, transactional_id)
    if state.state not in tools.UNFINISHED:
        print_lines(f"{transactional_id} has no open transaction; its state is {state.state}")
        return
    if state.state != tools.ONGOING:
        raise click.ClickException(_decided(state))
    places = ", ".join(f"{topic}:{index}" for topic, index in sorted(state.partitions))
    what = (
        f"the transaction of {transactional_id}, open since {moment(state.started_ms)}"
        f" in {places}, and fence producer {state.producer_id} epoch {state.epoch}"
    )
    if tools.is_two_phase(state) and not force:
        raise click.ClickException(f"did not abort {what}: {TWO_PHASE_ABORT}")
    if not execute:
        print_lines(f"would abort {what}; --execute aborts it")
        return
    try:
        fence = tools.terminate(session, state)
    except WireError as error:
        if isinstance(error, ApiError) and error.code != ErrorCode.concurrent_transactions:
            raise
        # The response may be late because a partition does not accept the marker.
        left = tools.transaction(session, transactional_id)
        if left.state in tools.UNFINISHED - {tools.ONGOING}:
            raise click.ClickException(_decided(left)) from error
        raise
    print_lines(f"aborted {what}: it is producer {fence[0]} epoch {fence[1]} now")


def _decided(transaction: Transaction) -> str:
    return (
        f"{transaction.transactional_id} is {transaction.state}: its outcome is decided, but not"
        " written in all its partitions yet"
    )


def _find_open(
    session: ClusterSession, place: Partition, start_offset: int | None, producer_id: int | None
) -> Producer:
    """Return the matching open transaction in ``place``. Raises click.ClickException."""
    from fencepost.client.queries.open_transactions import producers

    for row in producers(session, [place]):
        if (
            row.is_open
            and start_offset in {None, row.start_offset}
            and producer_id in {None, row.producer_id}
        ):
            return row
    raise click.ClickException(f"no such transaction is open in {place[0]}:{place[1]}")


@command.command("blame")
@click.argument("where", metavar="TOPIC[:P]")
@table_options
def show_blame(session: ClusterSession, where: str, form: str) -> None:
    """Show the open transactions that hold back read_committed consumers of TOPIC.

    For each partition: the last stable offset (STABLE), the end, the oldest open transaction, and
    the groups behind it with their lag, `unknown` for one that owns the partition and has not
    committed; a `!` marks a group that has read all stable records. CLIENT names the members of the
    group whose offsets the transaction carries, or else the client that claimed the transactional
    id, from the broker's history (Apache Kafka keeps none).
    """
    from fencepost.client.queries.blame import blame
    from fencepost.client.queries.claims import claims_of, holder
    from fencepost.client.queries.open_transactions import partitions_of

    blames = blame(session, partitions_of(session, [where]))
    pins = {row.pin.producer_id: row.pin.epoch for row in blames if row.pin is not None}
    claims = claims_of(session, pins)
    holders = {
        transactional_id: holder(claims.get(transactional_id, ()), epoch)
        for transactional_id, epoch in pins.items()
    }
    rows = [
        _blame_row(row, holders.get(row.pin.producer_id) if row.pin else None, form)
        for row in blames
    ]
    columns = ["partition", "stable", "end", "behind", "transactional_id", "state", "producer_id"]
    emit(rows, [*columns, "epoch", "since", "client", "groups", "hanging"], form)
    _note_hidden(sorted({group for row in blames for group in row.hidden_groups}))


def _blame_row(row: Blame, claim: ProducerEpochClaim | None, form: str) -> dict[str, object]:
    from dataclasses import asdict

    owner = _owner(row.transaction, row.clients, claim)
    pin, transaction = row.pin, row.transaction
    since = transaction.started_ms if transaction is not None else None
    return {
        "topic": row.topic,
        "partition": row.partition,
        "stable": row.stable,
        "end": row.end,
        "behind": row.end - row.stable,
        "open": row.open_count,
        "transactional_id": owner["transactional_id"],
        "state": transaction.state if transaction else None,
        "producer_id": pin.producer_id if pin else None,
        "epoch": pin.epoch if pin else None,
        # The start of a hanging transaction is not known; it is at or before its last write.
        "since": moment(since if since is not None else pin.last_timestamp_ms if pin else None),
        "client": owner["client"],
        "groups": [asdict(group) for group in row.waiting]
        if form == "json"
        else [
            f"{group.group}:{'unknown' if group.lag is None else group.lag}{'!' * group.stuck}"
            for group in row.waiting
        ],
        "hanging": row.hanging,
        "hidden_groups": list(row.hidden_groups),
    }


@command.command("history")
@click.argument("transactional_id")
@history_options
def history(session: ClusterSession, transactional_id: str, **options: Any) -> None:
    """Tell what happened to TRANSACTIONAL_ID, and why: claims, fences, aborts, time-outs.

    The history has all aborts, but only two kinds of commits: by `resolve`, and of prepared
    transactions that a new producer has kept. With fencepost.history.commits=true it has all.
    """
    show(session, TRANSACTION, transactional_id, **options)
    if options["form"] == "table":
        print_lines(f"note: {ORDINARY_ENDS}", err=True)
