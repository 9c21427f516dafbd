"""``fencepost groups``: list, describe, history."""

from __future__ import annotations

import click

from coordinator.cli.history import history_options, show
from coordinator.cli.output import emit, format_option, shared_options
from coordinator.history_format import GROUP


@click.group("groups")
def command() -> None:
    """Look into consumer groups."""


@command.command("list")
@click.option("--state", "states", multiple=True, help="Only groups in this state; repeatable.")
@format_option
@shared_options
def list_groups(bootstrap: str, timeout: float, states: tuple[str, ...], form: str) -> None:
    """List the groups of all brokers."""
    from coordinator.cli.session import Session, check

    rows: list[dict[str, object]] = []
    with Session(bootstrap, timeout) as session:
        for answer in session.everywhere(
            "ListGroups", lambda f: f.message(states_filter=states, types_filter=())
        ):
            check(answer.error_code, "ListGroups")
            rows.extend(
                {
                    "group": group.group_id,
                    "state": getattr(group, "group_state", ""),
                    "type": getattr(group, "group_type", ""),
                    "protocol": group.protocol_type,
                }
                for group in answer.groups
            )
    rows.sort(key=lambda row: str(row["group"]))
    emit(rows, ["group", "state", "type", "protocol"], form)


@command.command("describe")
@click.argument("group")
@click.option("--members", is_flag=True, help="Show the members instead of the offsets.")
@format_option
@shared_options
def describe(bootstrap: str, timeout: float, group: str, form: str, *, members: bool) -> None:
    """Show how far GROUP is in each partition, or who its members are.

    LAG counts to the last stable offset: what a read_committed reader could still read.
    """
    from coordinator.cli.session import EARLIEST, LATEST, Session, check

    with Session(bootstrap, timeout) as session:
        answer = session.client.call(
            "DescribeGroups",
            to_group=group,
            groups=(group,),
            include_authorized_operations=False,
        ).groups[0]
        check(answer.error_code, "DescribeGroups", group, getattr(answer, "error_message", None))
        committed = session.committed(group)
        if answer.group_state == "Dead" and not committed:
            raise click.ClickException(f"there is no group {group!r}")
        if members:
            rows = [
                {
                    "member": member.member_id,
                    "instance": getattr(member, "group_instance_id", None),
                    "client": member.client_id,
                    "host": member.client_host,
                    "assigned": _assigned(member.member_assignment),
                }
                for member in answer.members
            ]
            emit(rows, ["member", "instance", "client", "host", "assigned"], form)
            return
        owners = {
            partition: member.member_id
            for member in answer.members
            for partition in _assigned(member.member_assignment)
        }
        partitions = [(row.topic, row.partition) for row in committed]
        first = session.offsets(partitions, EARLIEST)
        stable = session.offsets(partitions, LATEST, committed=True)
    rows = [
        {
            "topic": row.topic,
            "partition": row.partition,
            "committed": row.offset,
            "stable": stable[row.topic, row.partition],
            "lag": stable[row.topic, row.partition]
            - max(row.offset, first[row.topic, row.partition]),
            "member": owners.get(f"{row.topic}:{row.partition}"),
            "state": answer.group_state,
        }
        for row in committed
    ]
    if form == "table":
        click.echo(f"{group}: {answer.group_state}, {len(answer.members)} members")
    emit(rows, ["topic", "partition", "committed", "stable", "lag", "member"], form)


@command.command("history")
@click.argument("group")
@history_options
@format_option
@shared_options
def history(
    bootstrap: str, timeout: float, group: str, begin: str, form: str, *, follow: bool
) -> None:
    """Tell what happened to GROUP, and why: who came and went, each rebalance and its cause."""
    show(bootstrap, timeout, GROUP, group, begin, form, follow=follow)


def _assigned(blob: bytes) -> list[str]:
    """The partitions in a consumer-protocol assignment, as ``topic:index``; [] if it is none."""
    from coordinator.cli.session import assigned_partitions

    return [f"{topic}:{index}" for topic, index in assigned_partitions(blob)]
