"""``fencepost quotas``: the quotas of users, clients and addresses."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import click

from fencepost.cli.changes import execute_option, show_only
from fencepost.cli.output import CommandGroup, emit, key_values, table_options
from fencepost.coordinator.config.key import nearest

if TYPE_CHECKING:
    from fencepost.client.queries.session import ClusterSession

R = TypeVar("R")

Names = dict[str, str | None]
"""The names of an entity by type; None stands for the default of the type."""

DEFAULT = "<default>"
COLUMNS = ("user", "client_id", "ip", "quota", "value")
CHANGE_COLUMNS = (*COLUMNS, "new")
WHY_COLUMNS = ("quota", "value", "of", "shared_by")
TYPES = {"user": "user", "client_id": "client-id", "ip": "ip"}
EXACT, DEFAULT_MATCH = 0, 1


def entity_options(function: Callable[..., R]) -> Callable[..., R]:
    """Add the options that name an entity; they become the argument ``entity``."""
    import functools

    @functools.wraps(function)
    def wrapped(**options: Any) -> R:
        entity: Names = {}
        for column, kind in TYPES.items():
            name, is_default = options.pop(column), options.pop(f"{column}_default")
            if name is not None and is_default:
                raise click.UsageError(f"--{kind} contradicts --{kind}-default")
            if name is not None or is_default:
                entity[kind] = name
        return function(entity=entity, **options)

    for column, kind in reversed(TYPES.items()):
        wrapped = click.option(
            f"--{kind}-default",
            f"{column}_default",
            is_flag=True,
            help=f"The default for each {kind} that has no quota of its own.",
        )(wrapped)
        wrapped = click.option(f"--{kind}", column, metavar="NAME")(wrapped)
    return wrapped


@click.group("quotas", cls=CommandGroup)
def command() -> None:
    """Show and change the quotas of users, clients and addresses.

    A quota is for a user, for a client id, for a user with a client id, or for an address, or it is
    the default for those without a quota of their own. Users and clients have producer_byte_rate
    and consumer_byte_rate (bytes per second), request_percentage (of a processor, on the event loop
    and in the threads that check batches; in Apache Kafka, of a thread), and
    controller_mutation_rate (partitions created or deleted per second); addresses have
    connection_creation_rate (connections per second). A client above its quota is answered at once;
    its next requests then have to wait.
    """


@command.command("list")
@entity_options
@table_options
def list_quotas(session: ClusterSession, entity: Names, form: str) -> None:
    """List all quotas, or only the quotas of the given users, clients and addresses."""
    rows = [row for described in describe_quotas(session, entity) for row in _rows(*described)]
    emit(rows, COLUMNS, form, "no quotas")


@command.command("set")
@entity_options
@click.argument("pairs", nargs=-1, required=True, metavar="QUOTA=VALUE...")
@execute_option
@table_options
def put(session: ClusterSession, entity: Names, pairs: tuple[str, ...], **how: Any) -> None:
    """Show what would change; with --execute, set each QUOTA."""
    values: dict[str, float | None] = {}
    for key, text in key_values(pairs, "QUOTA=VALUE"):
        try:
            values[key] = float(text)
        except ValueError:
            raise click.ClickException(f"the value of {key} is not a number: {text!r}") from None
    _change(session, entity, values, pairs, **how)


@command.command("remove")
@entity_options
@click.argument("keys", nargs=-1, required=True, metavar="QUOTA...")
@execute_option
@table_options
def remove(session: ClusterSession, entity: Names, keys: tuple[str, ...], **how: Any) -> None:
    """Show each QUOTA; with --execute, remove it."""
    _change(session, entity, dict.fromkeys(keys), keys, **how)


@command.command("why")
@click.option(
    "--user",
    default="ANONYMOUS",
    show_default=True,
    help="The name that the client logged in with.",
)
@click.option("--client-id", default="", help="The client id that the client sends.")
@table_options
def why(session: ClusterSession, user: str, client_id: str, form: str) -> None:
    """Show which quotas apply to a client: the most specific one of each kind.

    OF is the entity that has the quota. SHARED_BY says which clients share it: all of one `user`,
    all of one `client-id`, or `nobody` if the quota belongs to one user with one client id.
    """
    from fencepost.cluster.quota_entities import (
        ABSENT,
        CLIENT_KEYS,
        candidates,
        entity_of,
    )

    quotas = {frozenset(names.items()): values for names, values in describe_quotas(session, {})}
    rows = []
    for key in CLIENT_KEYS:
        for pair, (shared_user, shared_id) in candidates(user, client_id):
            values = quotas.get(entity_of(pair), {})
            if key not in values:
                continue
            shared = "user" if shared_id == ABSENT else "client-id"
            rows.append(
                {
                    "quota": key,
                    "value": _number(values[key]),
                    "of": _text(dict(entity_of(pair))),
                    "shared_by": shared if ABSENT in (shared_user, shared_id) else "nobody",
                }
            )
            break
        else:
            rows.append({"quota": key, "value": None, "of": None, "shared_by": None})
    emit(rows, WHY_COLUMNS, form)


def describe_quotas(session: ClusterSession, entity: Names) -> list[tuple[Names, dict[str, float]]]:
    """Return all entities that have the names in ``entity``, with their quotas. Raises ApiError."""

    def request(make: Any) -> Any:
        return make.message(
            components=[
                make.ComponentData(
                    entity_type=kind,
                    match_type=DEFAULT_MATCH if name is None else EXACT,
                    match=name,
                )
                for kind, name in entity.items()
            ],
            strict=False,
        )

    answer = session.client.call("DescribeClientQuotas", entity=request)
    entries = [
        (
            {part.entity_type: part.entity_name for part in entry.entity},
            {value.key: value.value for value in entry.values},
        )
        for entry in answer.entries or ()
    ]
    return sorted(entries, key=lambda entry: _text(entry[0]))


def _change(
    session: ClusterSession,
    entity: Names,
    new_values: dict[str, float | None],
    given: Sequence[str],
    *,
    form: str,
    execute: bool,
) -> None:
    """Change quotas, or validate the change only; then show old and new values."""
    from fencepost.client.queries.session import check

    if not entity:
        raise click.UsageError("name a user, client id or address: --user, --client-id, --ip")
    if len(new_values) < len(given):
        raise click.UsageError("one quota is named twice")
    _refuse_unknown(new_values)
    quotas = describe_quotas(session, {})
    before = next((values for names, values in quotas if names == entity), {})
    if not before and all(value is None for value in new_values.values()):
        close = nearest(_text(entity), (_text(names) for names, _ in quotas))
        raise click.ClickException(f"there is no quota of {_text(entity)}{close}")

    def request(make: Any) -> Any:
        named = [make.EntityData(entity_type=k, entity_name=name) for k, name in entity.items()]
        ops = [
            make.OpData(key=key, value=value or 0.0, remove=value is None)
            for key, value in new_values.items()
        ]
        entry = make.EntryData(entity=named, ops=ops)
        return make.message(entries=[entry], validate_only=not execute)

    answer = session.client.call(
        "AlterClientQuotas", to_node=session.controller, check=False, entity=request
    )
    for entry in answer.entries:
        check(entry.error_code, "AlterClientQuotas", _text(entity), entry.error_message)
    rows = _rows(entity, {key: before.get(key) for key in new_values})
    emit(
        [{**row, "new": _number(new_values[str(row["quota"])])} for row in rows],
        CHANGE_COLUMNS,
        form,
    )
    if not execute:
        show_only()


def _refuse_unknown(names: Iterable[str]) -> None:
    """Refuse the name of an unknown quota. Raises click.UsageError."""
    from fencepost.cluster.quota_entities import CLIENT_KEYS, CONNECTIONS

    for key in names:
        if key not in (allowed := (*CLIENT_KEYS, CONNECTIONS)):
            there = f"the quotas are {', '.join(allowed)}{nearest(key, allowed)}"
            raise click.UsageError(f"unknown quota {key}; {there}")


def _rows(entity: Names, values: dict[str, Any]) -> list[dict[str, object]]:
    names = {
        column: DEFAULT if kind in entity and entity[kind] is None else entity.get(kind)
        for column, kind in TYPES.items()
    }
    return [{**names, "quota": key, "value": _number(values[key])} for key in sorted(values)]


def _number(value: float | None) -> float | int | None:
    return int(value) if value is not None and value.is_integer() else value


def _text(entity: Names) -> str:
    return ", ".join(
        f"{kind} {DEFAULT if name is None else name}"
        for kind, name in sorted(entity.items(), reverse=True)
    )
