"""``fencepost txns``: list, describe, history."""

from __future__ import annotations

import time

import click

from coordinator.cli.history import history_options, show
from coordinator.cli.output import emit, format_option, shared_options
from coordinator.history_format import TRANSACTION


@click.group("txns")
def command() -> None:
    """Look into transactions."""


@command.command("list")
@click.option("--state", "states", multiple=True, help="Only this state, e.g. Ongoing; repeatable.")
@click.option("--producer-id", "producer_ids", multiple=True, type=int, help="Repeatable.")
@format_option
@shared_options
def list_txns(
    bootstrap: str,
    timeout: float,
    states: tuple[str, ...],
    producer_ids: tuple[int, ...],
    form: str,
) -> None:
    """List the transactional ids of all brokers and the state each is in."""
    from coordinator.cli.session import Session, check

    rows: list[dict[str, object]] = []
    with Session(bootstrap, timeout) as session:
        for answer in session.everywhere(
            "ListTransactions",
            lambda f: f.message(
                state_filters=states,
                producer_id_filters=producer_ids,
                duration_filter=-1,
                transactional_id_pattern=None,
            ),
        ):
            check(answer.error_code, "ListTransactions")
            if answer.unknown_state_filters:
                unknown = ", ".join(answer.unknown_state_filters)
                raise click.ClickException(f"no such transaction state: {unknown}")
            rows.extend(
                {
                    "transactional_id": row.transactional_id,
                    "producer_id": row.producer_id,
                    "state": row.transaction_state,
                }
                for row in answer.transaction_states
            )
    rows.sort(key=lambda row: str(row["transactional_id"]))
    emit(rows, ["transactional_id", "producer_id", "state"], form)


@command.command("describe")
@click.argument("transactional_id")
@format_option
@shared_options
def describe(bootstrap: str, timeout: float, transactional_id: str, form: str) -> None:
    """Show the transaction of TRANSACTIONAL_ID: its producer, since when, and its partitions."""
    from coordinator.cli.session import Session, check

    with Session(bootstrap, timeout) as session:
        state = session.client.call(
            "DescribeTransactions",
            to_transaction=transactional_id,
            transactional_ids=(transactional_id,),
        ).transaction_states[0]
        check(state.error_code, "DescribeTransactions", transactional_id)
    started = state.transaction_start_time
    row = {
        "transactional_id": state.transactional_id,
        "state": state.transaction_state,
        "producer_id": state.producer_id,
        "epoch": state.producer_epoch,
        "timeout_ms": int(state.transaction_timeout.total_seconds() * 1000),
        "started": started.isoformat() if started is not None else None,
        "open_seconds": round(time.time() - started.timestamp(), 1) if started else None,
        "partitions": [
            f"{topic.topic}:{index}" for topic in state.topics for index in topic.partitions
        ],
    }
    emit([row], list(row), form)


@command.command("history")
@click.argument("transactional_id")
@history_options
@format_option
@shared_options
def history(
    bootstrap: str, timeout: float, transactional_id: str, begin: str, form: str, *, follow: bool
) -> None:
    """Tell what happened to TRANSACTIONAL_ID, and why: claims, fences, aborts, time-outs.

    Ends that went as their producer asked are not told, except of prepared transactions.
    """
    show(bootstrap, timeout, TRANSACTION, transactional_id, begin, form, follow=follow)
