"""``fencepost features``: the finalized levels of features, and their changes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from fencepost.cli.changes import execute_option, show_only
from fencepost.cli.output import CommandGroup, emit, table_options
from fencepost.cli.printing import say
from fencepost.coordinator.config.key import nearest

if TYPE_CHECKING:
    from fencepost.client.queries.session import ClusterSession

UPDATE_FEATURES = 57
COLUMNS = ["feature", "finalized", "lowest", "highest", "epoch"]

UPGRADE, SAFE_DOWNGRADE, UNSAFE_DOWNGRADE = 1, 2, 3
"""``UpgradeType`` of UpdateFeatures from version 1 on."""


@click.group("features", cls=CommandGroup)
def command() -> None:
    """Show, raise and lower the finalized levels of features."""


@command.command("describe")
@table_options
def describe(session: ClusterSession, form: str) -> None:
    """Show the level of each feature and the levels that the broker supports.

    A feature whose level is 0 is off. EPOCH counts the changes of levels.
    """
    rows = feature_levels(session)
    emit(rows, COLUMNS, form, "no features")


def feature_levels(session: ClusterSession) -> list[dict[str, object]]:
    """Return each supported feature with its finalized level and its range of levels."""
    answer = session.client.call(
        "ApiVersions", client_software_name="fencepost", client_software_version="0"
    )
    finalized = {one.name: one.max_version_level for one in answer.finalized_features}
    return [
        {
            "feature": one.name,
            "finalized": finalized.get(one.name, 0),
            "lowest": one.min_version,
            "highest": one.max_version,
            "epoch": answer.finalized_features_epoch,
        }
        for one in sorted(answer.supported_features, key=lambda one: str(one.name))
    ]


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
    from fencepost.client.queries.session import check

    wanted = dict(_level(text) for text in levels)
    if len(wanted) < len(levels):
        raise click.BadParameter("one feature is named twice", param_hint="FEATURE=LEVEL")
    if session.client.versions().get(UPDATE_FEATURES, (0, -1))[1] < 1:
        raise click.ClickException("this broker does not support safe and unsafe downgrades")
    now = {str(row["feature"]): int(str(row["finalized"])) for row in feature_levels(session)}
    for name in wanted:
        if name not in now:
            raise click.ClickException(f"there is no feature {name!r}{nearest(name, now)}")
    lower = UNSAFE_DOWNGRADE if unsafe else SAFE_DOWNGRADE if downgrade else UPGRADE
    answer = session.client.call(
        "UpdateFeatures",
        to_node=session.controller,
        check=False,
        entity=lambda f: f.message(
            timeout=session.timeout_ms,
            feature_updates=[
                f.FeatureUpdateKey(
                    feature=name,
                    max_version_level=level,
                    upgrade_type=lower if level < now.get(name, 0) else UPGRADE,
                )
                for name, level in wanted.items()
            ],
            validate_only=not execute,
        ),
    )
    check(answer.error_code, "UpdateFeatures", None, answer.error_message)
    rows = [
        row if execute else {**row, "finalized": wanted[str(row["feature"])]}
        for row in feature_levels(session)
        if row["feature"] in wanted
    ]
    if not execute and form == "table":
        say("would be:")
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
