"""``fencepost doctor``: the rules of exactly-once that clients break."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import click

from fencepost.cli.output import EXIT_REFUSED, shared_options, utc
from fencepost.cli.printing import print_json, print_lines
from fencepost.cli.watch import watch, watch_option

if TYPE_CHECKING:
    from fencepost.client.queries.doctor import Diagnosis, Finding, Subject
    from fencepost.client.queries.session import ClusterSession

UNOBSERVED = (
    "the brokers have recorded no requests: they are Apache Kafka's, keep no history"
    " (fencepost.history.enable), or no client has used a transaction or a group;"
    " only settings were checked"
)


@click.command("doctor")
@click.option("--group", metavar="GROUP", help="Only the pipeline that reads as this group.")
@click.option("--transactional-id", metavar="ID", help="Only the pipeline that writes as this id.")
@click.option("--topic", metavar="TOPIC", help="Only findings about this topic.")
@click.option(
    "--since",
    "begin",
    default="-1d",
    show_default=True,
    metavar="WHERE",
    help="Requests since then: earliest, or a time: 02:13, -10m, yesterday.",
)
@click.option(
    "--strict", is_flag=True, help="Exit with status 1 for findings of the level `risk` too."
)
@click.option("--json", "as_json", is_flag=True, help="Print a JSON object for each finding.")
@watch_option
@shared_options
def command(
    session: ClusterSession,
    group: str | None,
    transactional_id: str | None,
    topic: str | None,
    begin: str,
    strict: bool,
    as_json: bool,
    every_s: float | None,
) -> None:
    """Tell which rule of exactly-once the cluster's clients break, with the request that shows it.

    The broker records what each client's requests show, once in ten minutes; docs/doctor.md has the
    rules. Exit status 0 if nothing is found, 1 if a finding has the level `breaks`. Findings of the
    level `risk` are printed, but change the exit status only with --strict.

    On Apache Kafka, which records no requests, only the rules about settings are checked.
    """
    from fencepost.client.queries.doctor import Subject, diagnosed
    from fencepost.client.queries.times import TimeError, milliseconds

    subject = Subject(group, transactional_id, topic)
    is_bad = False

    def draw() -> None:
        nonlocal is_bad
        try:
            # Parsed for each output, because a time such as -10m is relative to now.
            begin_ms = None if begin == "earliest" else milliseconds(begin)
        except TimeError as error:
            raise click.BadParameter(str(error), param_hint="--since") from error
        diagnosis = diagnosed(session, begin_ms, subject)
        if not diagnosis.findings:
            _require_known(session, subject)
        # First, because Ctrl-C may end the command as soon as the output is seen.
        is_bad = any(strict or finding.rule.level == "breaks" for finding in diagnosis.findings)
        _show(diagnosis, as_json=as_json)

    watch(draw, every_s)
    if is_bad:
        raise click.exceptions.Exit(EXIT_REFUSED)


def _require_known(session: ClusterSession, subject: Subject) -> None:
    """Raise an error for a name that does not exist, because no finding can be about it."""
    from fencepost.client.queries.group_view import existing
    from fencepost.client.queries.open_transactions import transaction

    if subject.group is not None:
        existing(session, subject.group)
    if subject.transactional_id is not None:
        transaction(session, subject.transactional_id)
    if subject.topic is not None:
        session.topics([subject.topic])


def _show(diagnosis: Diagnosis, *, as_json: bool) -> None:
    from fencepost.client.queries.doctor import finding_row

    for finding in diagnosis.findings:
        if as_json:
            time = None if finding.at_ms is None else utc(finding.at_ms)
            print_json({"time": time, **finding_row(finding)})
        else:
            print_lines(*_lines(finding), "")
    if not diagnosis.observes:
        print_lines(f"note: {UNOBSERVED}", err=True)
    if diagnosis.dropped:
        text = f"note: {diagnosis.dropped} observations were too many to be recorded"
        print_lines(text, err=True)
    if not diagnosis.findings:
        print_lines("nothing found", err=True)


def _lines(finding: Finding) -> list[str]:
    from fencepost.client.queries.doctor import PAGE

    rule = finding.rule
    lines = [f"{rule.name} ({rule.level}): {finding.what}"]
    if finding.request is not None:
        client = f"{finding.client_id or '(no client id)'}@{finding.host or '?'}"
        when = "" if finding.at_ms is None else f" at {utc(finding.at_ms)}"
        lines.append(f"  client   {client}")
        lines.append(f"  request  {finding.request}{when}: {_shown(finding.fields)}")
    else:
        lines.append(f"  setting  {_shown(finding.fields)}")
    return [
        *lines,
        f"  why      {rule.why}",
        f"  change   {rule.change}",
        f"  page     {PAGE}#{rule.name}",
    ]


def _shown(fields: Mapping[str, Any]) -> str:
    return ", ".join(
        f"{name}={', '.join(map(str, value)) if isinstance(value, list) else value}"
        for name, value in fields.items()
    )
