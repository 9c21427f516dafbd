"""``fencepost txns resolve``: whether a transaction that a checkpoint names was committed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import click

from fencepost.cli.changes import execute_option, show_only
from fencepost.cli.output import (
    EXIT_REFUSED,
    EXIT_UNDECIDED,
    emit,
    moment,
    read_time,
    table_options,
)
from fencepost.cli.printing import print_lines
from fencepost.txn.epochs import FENCE_EPOCH

if TYPE_CHECKING:
    from fencepost.client.queries.blame import Blame
    from fencepost.client.queries.evidence import StateRecord
    from fencepost.client.queries.resolution import Resolution
    from fencepost.client.queries.resolve import Answer, Question
    from fencepost.client.queries.session import ClusterSession
    from fencepost.pipelines.spark.checkpoint import PlannedBatch

COLUMNS = ("transactional_id", "producer_id", "epoch", "verdict", "proof", "since", "action")
MAX_SHOWN_RECORDS = 20
"""The maximum number of records of ``__transaction_state`` shown as evidence: the latest ones."""

UNSEALED = (
    "refused: Spark's checkpoint does not say that all rows were written; restart the query, which"
    " skips a committed batch and repeats any other"
)

TWO_PHASE_ABORT = (
    "it is part of a two-phase commit, and its database may have decided to commit: ask the"
    " application to end it (pipelines.two_phase.resolve); --force aborts it in Kafka only"
)


class Named(NamedTuple):
    """The transactions that a command line or a checkpoint names."""

    questions: tuple[Question, ...]
    checkpoints: tuple[int | None, ...]
    spark: PlannedBatch | None = None


@click.command("resolve")
@click.argument("transactional_id", required=False)
@click.option("--producer-id", type=click.IntRange(min=0), help="As the checkpoint names it.")
@click.option("--epoch", type=click.IntRange(0, FENCE_EPOCH), help="The producer epoch, likewise.")
@click.option(
    "--from-checkpoint",
    "checkpoint",
    type=click.Path(exists=True, path_type=Path),
    help=(
        "All transactions of a checkpoint: a folder or _metadata file of Apache Flink, or the"
        " checkpoint folder of a Spark query that writes with format('fencepost')."
    ),
)
@click.option(
    "--topic",
    "topics",
    multiple=True,
    metavar="TOPIC[:P]",
    help="Also search this topic for end markers; needed once the id has expired; repeatable.",
)
@click.option(
    "--since",
    "since_ms",
    metavar="TIME",
    callback=read_time,
    help="Search partitions from this time instead of from their beginning: 02:13, -2h, yesterday.",
)
@click.option("--commit", is_flag=True, help="Commit the transactions that are open.")
@click.option("--abort", is_flag=True, help="Abort the transactions that are open.")
@click.option(
    "--force",
    is_flag=True,
    help=(
        "Act even if nothing proves that the open transaction is the one that is named, or abort"
        " the Kafka part of a two-phase commit."
    ),
)
@execute_option
@table_options
def resolve_txn(
    session: ClusterSession,
    transactional_id: str | None,
    producer_id: int | None,
    epoch: int | None,
    checkpoint: Path | None,
    topics: tuple[str, ...],
    since_ms: int | None,
    form: str,
    *,
    commit: bool,
    abort: bool,
    force: bool,
    execute: bool,
) -> None:
    """Tell whether a transaction was committed or aborted, or is still open, with the evidence.

    The transaction is the one that a checkpoint names by TRANSACTIONAL_ID, producer id and epoch;
    without producer id and epoch, it is the last transaction of the id. The evidence are the
    records of __transaction_state, and the end markers behind the transaction's batches, which also
    outlive the transactional id.

    --commit and --abort end an open transaction with EndTxn under the named identity; no
    InitProducerId fences a producer. `history` shows the decision. If one of the transactions
    cannot be ended as requested, none is ended.

    Exit status 0 if the verdicts are proven, 5 if one is not, 1 if --commit or --abort is refused.
    """
    from fencepost.client.queries.open_transactions import partitions_of, transaction
    from fencepost.client.queries.resolve import resolve_all

    if commit and abort:
        raise click.UsageError("--commit contradicts --abort")
    if execute and not (commit or abort):
        raise click.UsageError("--execute needs --commit or --abort")
    named = _parse_names(transactional_id, producer_id, epoch, checkpoint)
    places = partitions_of(session, topics) if topics else []
    answers = resolve_all(session, named.questions, places, since_ms)
    if named.spark is not None:
        answers = [_of_batch(session, answers[0], named.spark)]
    elif transactional_id is not None and all(answer.is_unknown for answer in answers):
        transaction(session, transactional_id)  # raises the error with the nearest name
    actions = [
        _action(answer.resolution, commit=commit, force=force, is_spark=named.spark is not None)
        if commit or abort
        else None
        for answer in answers
    ]
    is_refused = any(action is not None and action.startswith("refused") for action in actions)
    if execute and not is_refused:
        done = [
            _end_transaction(session, *pair, commit=commit)
            for pair in zip(answers, actions, strict=True)
        ]
        actions = [text for text, _ in done]
        is_refused = not all(fine for _, fine in done)
    rows = [
        _row(answer, action, checkpoint_id)
        for answer, action, checkpoint_id in zip(answers, actions, named.checkpoints, strict=True)
    ]
    emit(rows, COLUMNS, form, "the checkpoint names no transaction of the Kafka sink")
    if form == "table":
        for row in rows:
            _explain(row)
    if (commit or abort) and not execute:
        show_only()
    if is_refused:
        raise SystemExit(EXIT_REFUSED)
    if not all(answer.resolution.is_proof for answer in answers):
        raise SystemExit(EXIT_UNDECIDED)


def _parse_names(
    name: str | None,
    producer_id: int | None,
    epoch: int | None,
    checkpoint: Path | None,
) -> Named:
    from fencepost.cli.flink_checkpoint import CheckpointError, read_flink_checkpoint
    from fencepost.client.queries.resolve import Question
    from fencepost.pipelines.spark.progress import default_transactional_id
    from fencepost.txn.epochs import ProducerIdentity

    if (producer_id is None) != (epoch is None):
        raise click.UsageError("--producer-id and --epoch belong together")
    if checkpoint is None:
        if name is None:
            raise click.UsageError("give a TRANSACTIONAL_ID or --from-checkpoint")
        identity = None
        if producer_id is not None and epoch is not None:
            identity = ProducerIdentity(producer_id, epoch)
        return Named((Question(name, identity),), (None,))
    if producer_id is not None:
        raise click.UsageError("--from-checkpoint has producer ids and epochs of its own")
    if (checkpoint / "offsets").is_dir():
        planned = _planned(checkpoint)
        question = Question(name or default_transactional_id(planned.query_id))
        return Named((question,), (None,), planned)
    try:
        committables = read_flink_checkpoint(checkpoint)
    except CheckpointError as error:
        raise click.ClickException(str(error)) from error
    chosen = [
        committable for committable in committables if name in {None, committable.transactional_id}
    ]
    if committables and not chosen:
        raise click.ClickException(f"{checkpoint} names no transaction of {name!r}")
    return Named(
        tuple(
            Question(
                checkpoint.transactional_id,
                ProducerIdentity(checkpoint.producer_id, checkpoint.epoch),
            )
            for checkpoint in chosen
        ),
        tuple(checkpoint.checkpoint_id for checkpoint in chosen),
    )


def _planned(folder: Path) -> PlannedBatch:
    """Return the last planned batch of a Spark query."""
    from fencepost.pipelines.spark.checkpoint import read_checkpoint
    from fencepost.pipelines.spark.errors import ProgressError

    try:
        planned = read_checkpoint(str(folder))
    except ProgressError as error:
        raise click.ClickException(str(error)) from error
    if planned is None:
        raise click.ClickException(f"{folder} is not the checkpoint of a Spark query")
    return planned


def _of_batch(session: ClusterSession, answer: Answer, planned: PlannedBatch) -> Answer:
    """Judge the last planned batch of a Spark query by the progress that its sink commits."""
    from fencepost.client.queries.resolution import Verdict
    from fencepost.pipelines.spark.errors import ProgressError
    from fencepost.pipelines.spark.progress import BatchState, Progress, batch_state, group_of

    resolution = answer.resolution
    name = resolution.evidence.transactional_id
    group = group_of(name)
    batch = Progress(planned.batch_id, planned.query_id, planned.digest)
    try:
        offsets = list(session.committed(group).values())
        done = Progress.from_text(offsets[0].metadata, group) if offsets else None
        state = batch_state(batch, done, name)
    except ProgressError as error:
        return _replace_verdict(answer, Verdict.NO_EVIDENCE, str(error), proof=False)
    number = f"batch {batch.batch_id}"
    if state is not BatchState.NEXT:
        why = f"group {group} has the progress of {number}, which its transaction committed"
        return _replace_verdict(answer, Verdict.COMMITTED, why, proof=state is BatchState.DONE)
    current = resolution.evidence.current
    if resolution.verdict is Verdict.OPEN:
        return _replace_verdict(
            answer, Verdict.OPEN, f"an attempt at {number} has it open", proof=True
        )
    if current is not None and current.state == "PrepareCommit":
        return answer
    why = f"group {group} does not have the progress of {number}, and no transaction is open"
    verdict = Verdict.ABORTED if resolution.verdict is Verdict.ABORTED else Verdict.NOT_BEGUN
    # Progress expires as offsets do; a missing one does not prove that nothing was committed.
    return _replace_verdict(answer, verdict, why, proof=done is not None)


def _replace_verdict(answer: Answer, verdict: str, why: str, *, proof: bool) -> Answer:
    from fencepost.client.queries.resolution import Verdict

    resolution = answer.resolution
    because = (why, *(resolution.because if verdict == resolution.verdict else ()))
    judged = replace(resolution, verdict=Verdict(verdict), because=because, is_proof=proof)
    return answer._replace(resolution=judged)


def _action(resolution: Resolution, *, commit: bool, force: bool, is_spark: bool) -> str:
    """Return what --commit or --abort would do, or why it is refused."""
    from fencepost.client.queries.open_transactions import is_two_phase
    from fencepost.client.queries.resolution import Verdict

    word, verdict = ("commit", Verdict.COMMITTED) if commit else ("abort", Verdict.ABORTED)
    if resolution.verdict is verdict:
        return f"already {verdict}"
    if commit and is_spark:
        return UNSEALED
    if resolution.verdict is Verdict.HANGING:
        return "refused: its coordinator does not know it; `fencepost txns abort` aborts it"
    if resolution.verdict is not Verdict.OPEN:
        return f"refused: it is not open ({resolution.verdict}): EndTxn would get an error"
    if resolution.ends_as is None:
        return "refused: EndTxn would get PRODUCER_FENCED, because a successor has kept it"
    if not resolution.is_proof and not force:
        return f"refused: {resolution.because[-1]}; --force does it nevertheless"
    if not commit and not force and is_two_phase(resolution.evidence.current):
        return f"refused: {TWO_PHASE_ABORT}"
    identity = f"producer {resolution.ends_as.producer_id} epoch {resolution.ends_as.epoch}"
    return f"would {word} it as {identity}; --execute does it"


def _end_transaction(
    session: ClusterSession, answer: Answer, action: str | None, *, commit: bool
) -> tuple[str | None, bool]:
    """Do what ``action`` says; return what was done, and whether it succeeded."""
    from kio.schema.errors import ErrorCode

    from fencepost.client.client import ApiError
    from fencepost.client.queries.resolve import end_transaction
    from fencepost.protocol.errors import WireError

    if action is None or action.startswith("already"):
        return action, True
    try:
        end_transaction(session, answer.resolution, commit=commit)
    except ApiError as error:
        if error.code is ErrorCode.transactional_id_authorization_failed:
            return f"refused: {error}: it needs WRITE on the transactional id", False
        return f"refused: {error}; it may have ended meanwhile: resolve it again", False
    except WireError as error:
        return f"no answer: {error}; it may be done: resolve it again", False
    return "committed" if commit else "aborted", True


def _row(answer: Answer, action: str | None, checkpoint_id: int | None) -> dict[str, object]:
    resolution = answer.resolution
    evidence, identity = resolution.evidence, resolution.identity
    since, timeout_ms = _open_since(resolution)
    return {
        "transactional_id": evidence.transactional_id,
        "producer_id": identity.producer_id if identity is not None else None,
        "epoch": identity.epoch if identity is not None else None,
        "checkpoint": checkpoint_id,
        "verdict": str(resolution.verdict),
        "proof": resolution.is_proof,
        "because": list(resolution.because),
        "transaction_version": resolution.version,
        "since": moment(since),
        "timeout_ms": timeout_ms,
        "ended_by": _ended_by(resolution, since, timeout_ms),
        "waiting": [_waiting(row) for row in answer.waiting],
        "records": [
            _record(record, evidence.log.partition)
            for record in evidence.log.records[-MAX_SHOWN_RECORDS:]
        ],
        "markers": [
            {
                "topic": end_marker.place[0],
                "partition": end_marker.place[1],
                "offset": end_marker.offset,
                "outcome": "commit" if end_marker.commit else "abort",
                "producer_epoch": end_marker.producer_epoch,
                "coordinator_epoch": end_marker.coordinator_epoch,
                "time": moment(end_marker.timestamp_ms),
                "first_offset": end_marker.first_offset,
            }
            for end_marker in evidence.end_markers
        ],
        "searched": [f"{topic}:{index}" for topic, index in evidence.searched],
        "history": [
            {
                "time": moment(entry.at_ms),
                "what": entry.what,
                "why": entry.why,
                "client": entry.client_id,
                "host": entry.client_host,
            }
            for entry in answer.history
        ],
        "action": action,
    }


def _open_since(resolution: Resolution) -> tuple[int | None, int | None]:
    from fencepost.client.queries.resolution import Verdict

    current = resolution.evidence.current
    if resolution.verdict is not Verdict.OPEN or current is None:
        return None, None
    return current.started_ms, current.timeout_ms


def _ended_by(resolution: Resolution, since: int | None, timeout_ms: int | None) -> list[str]:
    """Return two sentences: which request commits an open transaction, and which one aborts it."""
    from fencepost.client.queries.open_transactions import is_two_phase

    if since is None or timeout_ms is None:
        return []
    name, owner = resolution.evidence.transactional_id, resolution.ends_as
    who = "the successor that has kept it"
    if owner is not None:
        who = f"producer {owner.producer_id} epoch {owner.epoch}"
    timeout = f"its timeout, at {moment(since + timeout_ms)}, or"
    if is_two_phase(resolution.evidence.current):
        timeout = "no timeout (two-phase commit), but"
    claim = f"InitProducerId of {name}, as by a start without the checkpoint or `txns terminate`"
    return [
        f"commits: EndTxn of {who}, as by a restart from the checkpoint, or --commit --execute",
        f"aborts: {timeout} {claim}, or --abort --execute",
    ]


def _waiting(row: Blame) -> dict[str, object]:
    return {
        "topic": row.topic,
        "partition": row.partition,
        "stable": row.stable,
        "end": row.end,
        "producer_id": row.pin.producer_id if row.pin is not None else None,
        "groups": [group.group for group in row.waiting],
    }


def _record(record: StateRecord, partition: int) -> dict[str, object]:
    txn = record.txn
    return {
        "partition": partition,
        "offset": record.offset,
        "time": moment(record.timestamp_ms),
        "state": "tombstone" if txn is None else txn.state.kafka_name,
        "producer_id": None if txn is None else txn.producer_id,
        "epoch": None if txn is None else txn.producer_epoch,
        "transaction_version": None if txn is None else txn.client_transaction_version,
    }


def _explain(row: dict[str, object]) -> None:
    """Print the reasons and the evidence of a verdict."""
    lines = [f"{row['transactional_id']}: {row['verdict']}", *_texts(row["because"])]
    lines += _texts(row["ended_by"])
    for partition in _rows(row["waiting"]):
        groups = ", ".join(_texts(partition["groups"])) or "no group"
        lines.append(
            f"waiting: {partition['topic']}:{partition['partition']}"
            f" at the last stable offset {partition['stable']} of {partition['end']}: {groups}"
        )
    for record in _rows(row["records"]):
        identity = (
            f" {record['producer_id']}:{record['epoch']}" if record["epoch"] is not None else ""
        )
        lines.append(
            f"__transaction_state-{record['partition']} offset {record['offset']}:"
            f" {record['state']}{identity}"
        )
    for marker in _rows(row["markers"]):
        behind = marker["first_offset"]
        what = "no batch left" if behind is None else f"batches from offset {behind}"
        lines.append(
            f"{marker['topic']}:{marker['partition']} offset {marker['offset']}:"
            f" {marker['outcome']} marker, producer epoch {marker['producer_epoch']},"
            f" coordinator epoch {marker['coordinator_epoch']}; {what}"
        )
    for event in _rows(row["history"]):
        lines.append(
            f"history: {event['time']} {event['what']}: {event['why']} ({event['client']})"
        )
    print_lines("", lines[0], *(f"  {line}" for line in lines[1:]))


def _texts(value: object) -> list[str]:
    return [str(item) for item in value] if isinstance(value, Sequence) else []


def _rows(value: object) -> list[dict[str, object]]:
    return list(value) if isinstance(value, list) else []
