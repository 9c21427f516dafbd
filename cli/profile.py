"""``fencepost profile``: the connection profiles of this user."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from fencepost.cli.changes import execute_option, show_only
from fencepost.cli.output import ReportingGroup, emit, format_option, key_values
from fencepost.cli.printing import print_lines
from fencepost.cli.profiles import (
    ProfileError,
    all_profiles,
    current_profile,
    delete_profile,
    file_settings,
    profile_settings,
    profiles_file,
    save_profile,
    use_profile,
)

COLUMNS = ("profile", "current", "bootstrap", "security_protocol", "sasl_mechanism")
HIDDEN = "(hidden)"
"""Shown in place of a secret."""


@click.group("profile", cls=ReportingGroup, errors=lambda: (ProfileError,))
def command() -> None:
    """Create, choose, show and delete connection profiles.

    A profile has the address of a cluster and the client's settings for encryption and login. The
    file is ~/.config/fencepost/profiles.toml, or the one in $FENCEPOST_PROFILES, with mode 0600.
    --profile NAME and $FENCEPOST_PROFILE choose a profile; `use` chooses the one for commands that
    name no address, no --command-config and no profile.
    """


@command.command("create")
@click.argument("name")
@click.option(
    "--bootstrap",
    "--bootstrap-server",
    "-b",
    "servers",
    metavar="HOST:PORT",
    help="The bootstrap brokers, separated by commas.",
)
@click.option("--timeout", type=click.FloatRange(min=0.1), metavar="SECONDS")
@click.option(
    "--config",
    "pairs",
    multiple=True,
    metavar="KEY=VALUE",
    help="A client's setting by Kafka's name, such as security.protocol=SASL_SSL; may be repeated.",
)
@click.option(
    "--secret",
    "secrets",
    multiple=True,
    metavar="KEY",
    help="A setting with a secret value, such as sasl.password. The command prompts for the value,"
    " or reads it from a line of standard input; may be repeated.",
)
@click.option(
    "--from",
    "source",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Take the connection settings in a client's file of Apache Kafka.",
)
@click.option("--replace", is_flag=True, help="Replace the profile if it exists.")
def create(
    name: str,
    servers: str | None,
    timeout: float | None,
    pairs: tuple[str, ...],
    secrets: tuple[str, ...],
    source: Path | None,
    replace: bool,
) -> None:
    """Create the profile NAME."""
    from fencepost.client.security import PREFIXES, SECRETS

    if name in all_profiles() and not replace:
        raise click.ClickException(f"the profile {name} exists; --replace replaces it")
    settings: dict[str, object] = {}
    if source is not None:
        from_settings_file = file_settings(source)
        if "bootstrap.servers" in from_settings_file:
            settings["bootstrap"] = from_settings_file["bootstrap.servers"]
        settings |= {
            key: value for key, value in from_settings_file.items() if key.startswith(PREFIXES)
        }
    if servers is not None:
        settings["bootstrap"] = servers
    if timeout is not None:
        settings["timeout"] = timeout
    for key, value in key_values(pairs, "--config"):
        if key in SECRETS:
            raise click.UsageError(
                f"other users of the machine can read command lines: use --secret {key}"
            )
        settings[key] = value
    for key in secrets:
        settings[key] = _secret(key)
    if not settings:
        raise click.UsageError("a profile needs settings: --bootstrap, --config or --from")
    save_profile(name, settings)
    print_lines(f"the profile {name} is in {profiles_file()}")


def _secret(key: str) -> str:
    if sys.stdin.isatty():
        return str(click.prompt(key, hide_input=True, err=True))
    line = sys.stdin.readline().rstrip("\r\n")
    if not line:
        raise click.ClickException(f"standard input has no line for {key}")
    return line


@command.command("use")
@click.argument("name")
def use(name: str) -> None:
    """Make NAME the profile of commands that name no address and no profile."""
    use_profile(name)
    print_lines(f"commands without an address use the profile {name}")


@command.command("list")
@format_option
def list_(form: str) -> None:
    """List the profiles."""
    current = current_profile()
    rows = [
        {
            "profile": name,
            "current": name == current,
            "bootstrap": settings.get("bootstrap"),
            "security_protocol": settings.get("security.protocol"),
            "sasl_mechanism": settings.get("sasl.mechanism"),
        }
        for name, settings in all_profiles().items()
    ]
    emit(rows, COLUMNS, form, empty=f"there is no profile in {profiles_file()}")


@command.command("show")
@click.argument("name", required=False)
@format_option
def show(name: str | None, form: str) -> None:
    """Show the settings of NAME, or of the current profile, without secrets."""
    chosen = name or current_profile()
    if chosen is None:
        raise click.ClickException("no profile is in use: name one")
    rows = [{"key": key, "value": value} for key, value in _shown(profile_settings(chosen))]
    emit(rows, ("key", "value"), form)


def _shown(settings: dict[str, object]) -> list[tuple[str, object]]:
    from fencepost.client.security import SECRETS

    return [(key, HIDDEN if key in SECRETS else value) for key, value in sorted(settings.items())]


@command.command("delete")
@click.argument("name")
@execute_option
def delete(name: str, *, execute: bool) -> None:
    """Show the settings of NAME; with --execute, delete the profile."""
    rows = [{"key": key, "value": value} for key, value in _shown(profile_settings(name))]
    emit(rows, ("key", "value"), "table")
    if not execute:
        show_only()
        return
    delete_profile(name)
    print_lines(f"the profile {name} is deleted")
