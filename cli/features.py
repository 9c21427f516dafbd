"""``fencepost features``: the finalized levels of features, and their changes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from fencepost.cli.changes import execute_option, show_only
from fencepost.cli.output import CommandGroup, emit, table_options
from fencepost.cli.printing import print_lines
from fencepost.coordinator.config.key import nearest

if TYPE_CHECKING:
    from fencepost.client.queries.session import ClusterSession

UPDATE_FEATURES = 57
COLUMNS = ["feature", "finalized", "lowest", "highest", "epoch"]


@click.group("features", cls=CommandGroup)
def command() -> None:
    """Show, raise and lower the finalized levels of features."""


@command.command("describe")
@table_options
def describe(session: ClusterSession, form: str) -> None:
    """Show the level of each feature and the levels that the broker supports.

    A feature whose level is 0 is off. EPOCH counts the changes of levels.
    """
    from fencepost.client.queries.features import feature_levels

    emit(feature_levels(session), COLUMNS, form, "no features")


@command.command("set")
@click.argument("levels", metavar="FEATURE=LEVEL...", nargs=-1, required=True)
@click.option("--downgrade", is_flag=True, help="Allow levels below the current ones.")
@click.option("--unsafe", is_flag=True, help="Allow lower levels even if metadata may be lost.")
@execute_option
@table_options
def setlevels(
    session: ClusterSession,
    levels: tuple[str, ...],
    form: str,
    *,
    downgrade: bool,
    unsafe: bool,
    execute: bool,
) -> None:
    """Check whether each FEATURE can have its LEVEL; with --execute, change all of them or none.

    Open transactions end by the rules they began with: a producer follows a new level of
    transaction.version from its next transaction on.
    """
    from fencepost.client.queries import features

    new_levels = dict(_level(text) for text in levels)
    if len(new_levels) < len(levels):
        raise click.BadParameter("one feature is named twice", param_hint="FEATURE=LEVEL")
    if session.client.versions().get(UPDATE_FEATURES, (0, -1))[1] < 1:
        raise click.ClickException("this broker does not support safe and unsafe downgrades")
    now = features.finalized_levels(session)
    for name in new_levels:
        if name not in now:
            raise click.ClickException(f"there is no feature {name!r}{nearest(name, now)}")
    lower = features.UPGRADE
    if unsafe or downgrade:
        lower = features.UNSAFE_DOWNGRADE if unsafe else features.SAFE_DOWNGRADE
    features.update_features(session, new_levels, now, lower, validate_only=not execute)
    rows = [
        row if execute else {**row, "finalized": new_levels[str(row["feature"])]}
        for row in features.feature_levels(session)
        if row["feature"] in new_levels
    ]
    if not execute and form == "table":
        print_lines("would be:")
    emit(rows, COLUMNS, form)
    if not execute:
        show_only()


def _level(text: str) -> tuple[str, int]:
    """Parse FEATURE=LEVEL, such as ``transaction.version=2``."""
    name, equals, level = text.partition("=")
    if not name or not equals or not level.isdecimal() or len(level) > 5:
        raise click.BadParameter(
            f"{text!r} is not FEATURE=LEVEL with a level from 0 on", param_hint="FEATURE=LEVEL"
        )
    return name, int(level)
