"""``fencepost configs``: the settings of topics, brokers, groups and client metrics."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import click

from fencepost.cli.changes import execute_option, show_only
from fencepost.cli.output import (
    CommandGroup,
    emit,
    key_values,
    note_unknown_group,
    table_options,
)

if TYPE_CHECKING:
    from fencepost.client.queries.session import ClusterSession
    from fencepost.client.queries.settings import ConfigEntry, Resource

R = TypeVar("R")

COLUMNS = ("key", "value", "source")
CHANGE_COLUMNS = ("key", "value", "source", "new")
DONE_COLUMNS = (*CHANGE_COLUMNS, "new_source")
SEEN_WITHIN_S = 1.0
ALL_BROKERS = "all"
SECRET = "(hidden)"  # noqa: S105 - what stands in its place


def resource_arguments(function: Callable[..., R]) -> Callable[..., R]:
    """Add the arguments KIND and NAME."""
    function = click.argument("name", metavar="NAME")(function)
    kinds = click.Choice(["topic", "broker", "group", "client-metrics"])
    return click.argument("kind", type=kinds)(function)


@click.group("configs", cls=CommandGroup)
def command() -> None:
    """Show, set and unset the settings of a topic, a broker, a group or client metrics.

    A resource is named by its kind and name: `topic orders`, `broker 1`, `group app`; `broker all`
    stands for the dynamic defaults of all brokers. `client-metrics NAME` is a subscription to the
    metrics of clients, which `fencepost clients telemetry` shows. SOURCE says where a value comes
    from: `topic`, `group` and `client metrics` are settings of that resource, `broker` and
    `cluster` are dynamic settings, `file` is a setting that the broker was started with.
    """


@command.command("list")
@resource_arguments
@click.option("--changed", is_flag=True, help="Only settings that differ from their defaults.")
@table_options
def list_settings(
    session: ClusterSession, kind: str, name: str, form: str, *, changed: bool
) -> None:
    """List all settings."""
    from fencepost.client.queries.settings import describe_configs

    entries = describe_configs(session, [_resource(session, kind, name)])
    _show([entry for entry in entries if not changed or entry.source != "default"], form)


@command.command("get")
@resource_arguments
@click.argument("keys", nargs=-1, required=True, metavar="KEY...")
@table_options
def get(session: ClusterSession, kind: str, name: str, keys: tuple[str, ...], form: str) -> None:
    """Show each KEY with its value and source."""
    from fencepost.client.queries.settings import describe_configs

    resource = _resource(session, kind, name)
    _refuse_unknown(session, resource, keys)
    _show([config for config in describe_configs(session, [resource]) if config.key in keys], form)


@command.command("set")
@resource_arguments
@click.argument("pairs", nargs=-1, required=True, metavar="KEY=VALUE...")
@execute_option
@table_options
def put(session: ClusterSession, kind: str, name: str, pairs: tuple[str, ...], **how: Any) -> None:
    """Show what would change; with --execute, set each KEY and show the values in effect.

    Times may be durations: `fencepost configs set topic orders retention.ms=7d`.
    """
    settings = dict(key_values(pairs, "KEY=VALUE"))
    change(session, _resource(session, kind, name), settings, (), **how)


@command.command("unset")
@resource_arguments
@click.argument("keys", nargs=-1, required=True, metavar="KEY...")
@execute_option
@table_options
def unset(session: ClusterSession, kind: str, name: str, keys: tuple[str, ...], **how: Any) -> None:
    """Show each KEY; with --execute, remove its setting and show the values in effect."""
    change(session, _resource(session, kind, name), {}, keys, **how)


def _resource(session: ClusterSession, kind: str, name: str) -> Resource:
    """Return the resource that the arguments name. Raises ApiError or ClickException."""
    from fencepost.client.queries.settings import EVERY_BROKER
    from fencepost.coordinator.config.key import nearest

    if kind == "topic":
        session.topics([name])
    if kind == "group":
        note_unknown_group(session, name)
    if kind != "broker":
        return kind, name
    if name == ALL_BROKERS:
        return kind, EVERY_BROKER
    brokers = [str(node) for node in sorted(session.client.metadata().brokers)]
    if name not in brokers:
        raise click.ClickException(
            f"there is no broker {name!r}: give {', '.join(brokers)}, or {ALL_BROKERS}"
            f"{nearest(name, [*brokers, ALL_BROKERS])}"
        )
    return kind, name


def change(
    session: ClusterSession,
    resource: Resource,
    settings: Mapping[str, str],
    keys: Sequence[str],
    *,
    form: str,
    execute: bool,
) -> None:
    """Change settings, or validate the change only; then show old and new values.

    After a change the new values are those in effect, as the broker describes them. An unknown key
    is refused with the most similar name. Raises click.ClickException, ApiError.
    """
    from fencepost.client.queries.settings import alter, describe_configs

    named = [*settings, *keys]
    if len(set(named)) < len(named):
        raise click.UsageError("one setting is named twice")
    _refuse_unknown(session, resource, named)
    before = {config.key: config for config in describe_configs(session, [resource])}
    alter(session, resource, settings, keys, execute=execute)
    after = _in_effect(session, resource, settings) if execute else {}
    rows = [
        {
            "key": key,
            "value": _value(before.get(key)),
            "source": before[key].source if key in before else None,
            "new": _value(after.get(key))
            if execute
            else _mask_secret(settings[key], before.get(key))
            if key in settings
            else None,
            "new_source": after[key].source if key in after else None,
        }
        for key in named
    ]
    emit(rows, DONE_COLUMNS if execute else CHANGE_COLUMNS, form)
    if not execute:
        show_only()


def _in_effect(
    session: ClusterSession, resource: Resource, settings: Mapping[str, str]
) -> dict[str, ConfigEntry]:
    """Return the settings in effect, as soon as they include ``settings``.

    After :data:`SEEN_WITHIN_S` they are returned even without ``settings``. In a cluster the broker
    may lag behind the controller, and a setting of higher precedence may override the changed one.
    """
    from fencepost.client.queries.settings import describe_configs

    deadline = time.monotonic() + SEEN_WITHIN_S
    while True:
        entries = {config.key: config for config in describe_configs(session, [resource])}
        is_seen = all(
            key in entries and (entries[key].is_secret or entries[key].value == value.strip())
            for key, value in settings.items()
        )
        if is_seen or time.monotonic() > deadline:
            return entries
        time.sleep(0.05)


def _refuse_unknown(session: ClusterSession, resource: Resource, keys: Sequence[str]) -> None:
    from fencepost.client.queries.settings import known_keys
    from fencepost.coordinator.config.key import nearest

    allowed = known_keys(session, resource)
    for key in keys:
        if key not in allowed:
            kind, name = resource
            where = f"{kind} {name}" if name else "a broker"
            raise click.ClickException(f"{where} has no setting {key!r}{nearest(key, allowed)}")


def _show(settings: Sequence[ConfigEntry], form: str) -> None:
    rows = [
        {
            "key": setting.key,
            "value": _value(setting),
            "source": setting.source,
            "read_only": setting.is_read_only,
        }
        for setting in settings
    ]
    emit(rows, COLUMNS, form, "no settings")


def _mask_secret(text: str, setting: ConfigEntry | None) -> str:
    return SECRET if setting is not None and setting.is_secret else text


def _value(setting: ConfigEntry | None) -> str | None:
    if setting is None:
        return None
    return SECRET if setting.is_secret else setting.value
