"""``fencepost record``: the requests and causes of an incident, in a file for a test."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from fencepost.cli.output import counted, ended_by_sigterm, read_time, shared_options
from fencepost.cli.printing import print_lines

if TYPE_CHECKING:
    from fencepost.client.queries.session import ClusterSession

NO_HISTORY = (
    "the brokers keep no history: they are Apache Kafka's, or fencepost.history.enable is false"
)
WRITTEN_S = 0.2
"""How long the command waits for brokers to write the last entries; a write takes 50 ms."""


@click.command("record")
@click.argument("subjects", nargs=-1, required=True, metavar="GROUP|ID...")
@click.option(
    "--out",
    required=True,
    type=click.Path(dir_okay=False, path_type=Path),
    help="The file to write; an existing one is replaced.",
)
@click.option(
    "--since",
    "begin_ms",
    metavar="TIME",
    callback=read_time,
    help="Only later requests: a time such as 02:13, -10m or 2026-01-31T12:00 (UTC).",
)
@click.option("--until", "end_ms", metavar="TIME", callback=read_time, help="Only earlier ones.")
@click.option(
    "--follow",
    "-f",
    is_flag=True,
    help="Have the brokers record requests from now on, until Ctrl-C or --seconds, then write.",
)
@click.option("--seconds", type=click.FloatRange(min=0), help="With --follow: how long to record.")
@click.option(
    "--records",
    is_flag=True,
    help="Also write keys, values and headers of the produced and acquired records.",
)
@shared_options
def command(
    session: ClusterSession,
    subjects: Sequence[str],
    out: Path,
    begin_ms: int | None,
    end_ms: int | None,
    follow: bool,
    seconds: float | None,
    records: bool,
) -> None:
    """Record an incident of consumer groups, share groups or transactional ids for a test.

    The file has their requests, times, errors and causes, but without --records no keys, values and
    headers. `fencepost.testing.replay` plays it on a broker in a test; see docs/testing.md.

    The brokers must have recorded the requests: set `fencepost.history.requests.enable` on all
    brokers beforehand, or use --follow, which sets it for the time of the recording.
    """
    from fencepost.client.queries.entries import entries_of
    from fencepost.client.queries.incident import dump
    from fencepost.client.queries.recording import incident_of, with_records, with_scopes
    from fencepost.client.queries.where import BEGINNING, OffsetPosition
    from fencepost.coordinator.metadata.names import HISTORY_TOPIC

    if seconds is not None and not follow:
        raise click.UsageError("--seconds is for --follow")
    if follow and end_ms is not None:
        raise click.UsageError("--follow has no --until")
    if not follow:
        _require_known(session, subjects)
    _require_fencepost(session)
    if follow:
        started_ms = int(time.time() * 1000)
        begin_ms = started_ms if begin_ms is None else begin_ms
        with _recording(session):
            print_lines(f"recording {', '.join(subjects)}; Ctrl-C ends it", err=True)
            _wait(seconds)
    time.sleep(WRITTEN_S)
    if HISTORY_TOPIC not in session.client.metadata(refresh=True).topics:
        raise click.ClickException(NO_HISTORY)
    where = BEGINNING if begin_ms is None else OffsetPosition(time=begin_ms)
    entries = [
        entry
        for entry in entries_of(session, where, subjects=with_scopes(subjects))
        if (begin_ms is None or entry.at_ms >= begin_ms)
        and (end_ms is None or entry.at_ms < end_ms)
    ]
    incident = incident_of(session, entries, subjects)
    if records:
        incident = with_records(session, incident)
    out.write_text(dump(incident), encoding="utf-8")
    print_lines(
        f"{out}: {counted(len(incident.steps), 'request')},"
        f" {counted(len(incident.causes), 'cause')},"
        f" {(incident.end_ms - incident.start_ms) / 1000:.1f} s"
    )


def _require_fencepost(session: ClusterSession) -> None:
    """Raise an error unless the brokers can record requests."""
    from fencepost.client.queries.recording import SETTING
    from fencepost.client.queries.settings import describe_configs

    entries = describe_configs(session, [("broker", str(session.some_broker))])
    values = {entry.key: entry.value for entry in entries}
    if SETTING not in values or values.get("fencepost.history.enable") != "true":
        raise click.ClickException(NO_HISTORY)


@contextlib.contextmanager
def _recording(session: ClusterSession) -> Iterator[None]:
    """Enable the recording of requests on all brokers; afterwards restore the former setting."""
    from fencepost.client.queries.recording import SETTING
    from fencepost.client.queries.settings import EVERY_BROKER, alter, describe_configs

    everywhere = "broker", EVERY_BROKER
    before = next(
        (
            config.value
            for config in describe_configs(session, [everywhere])
            if config.key == SETTING
        ),
        None,
    )
    with ended_by_sigterm():
        alter(session, everywhere, {SETTING: "true"}, (), execute=True)
        try:
            yield
        finally:
            put = {} if before is None else {SETTING: before}
            alter(session, everywhere, put, () if put else (SETTING,), execute=True)


def _wait(seconds: float | None) -> None:
    """Return after ``seconds`` seconds, or at Ctrl-C."""
    with contextlib.suppress(KeyboardInterrupt):
        end = None if seconds is None else time.monotonic() + seconds
        while end is None or time.monotonic() < end:
            time.sleep(0.2 if end is None else max(0.0, min(0.2, end - time.monotonic())))


def _require_known(session: ClusterSession, subjects: Sequence[str]) -> None:
    """Raise an error for a name that is neither a group nor a transactional id."""
    from fencepost.client.queries.open_transactions import transactional_ids
    from fencepost.coordinator.config.key import nearest

    names = {str(row.group_id) for row in session.groups()} | set(transactional_ids(session))
    for subject in subjects:
        if subject not in names:
            hint = nearest(subject, names)
            raise click.ClickException(f"there is no group or transactional id {subject!r}{hint}")
