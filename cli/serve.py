"""``fencepost serve``: the daemon."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

import click

SETTING = "FENCEPOST_SET_"
"""Prefix of environment variables that are settings."""

USERS = "FENCEPOST_ADD_SCRAM"
"""The variable with users to add, one per line."""

# As in coordinator/config/logs.py, which the command line must not import at startup.
LEVELS = ("FATAL", "ERROR", "WARN", "INFO", "DEBUG", "TRACE")
FORMATS = ("auto", "text", "json")


@click.command("serve")
@click.option(
    "--data-dir",
    envvar="FENCEPOST_DATA_DIR",
    type=click.Path(file_okay=False, path_type=Path),
    help="The directory for all data, created if missing; by default the one in log.dirs.",
)
@click.option(
    "--listen",
    envvar="FENCEPOST_LISTEN",
    show_default="listeners of the configuration, or 127.0.0.1:9092",
    metavar="HOST:PORT",
    help="Where clients connect; port 0 takes a free one.",
)
@click.option(
    "--insecure",
    is_flag=True,
    help="Let other machines connect without a login (fencepost.insecure).",
)
@click.option(
    "--config",
    "pairs",
    multiple=True,
    metavar="KEY=VALUE",
    help="A setting by Kafka's name, such as log.retention.ms=7d; may be repeated.",
)
@click.option(
    "--config-file",
    envvar="FENCEPOST_CONFIG_FILE",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Settings in TOML or as in Apache Kafka's server.properties; --config wins.",
)
@click.option(
    "--add-scram",
    multiple=True,
    metavar="USER|@FILE",
    help="Add a user, as SCRAM-SHA-512=[name=admin,password=...], unless the name exists; may be"
    " repeated. Other users of the machine can read command lines, so prefer @FILE or the variable"
    f" {USERS}, with one user per line.",
)
@click.option(
    "--log-level",
    default="INFO",
    show_default=True,
    envvar="FENCEPOST_LOG_LEVEL",
    type=click.Choice(LEVELS, case_sensitive=False),
    help="Log events of this level and above; kafka-configs can change it at run time.",
)
@click.option(
    "--log-format",
    default="auto",
    show_default=True,
    envvar="FENCEPOST_LOG_FORMAT",
    type=click.Choice(FORMATS),
    help="Log lines as text or JSON; auto is text on a terminal.",
)
@click.option(
    "--test-hooks",
    metavar="HOST:PORT",
    help="For tests: serve a movable clock and faults over HTTP, on loopback only.",
)
@click.option(
    "--metrics",
    metavar="[HOST:]PORT",
    help="Serve /metrics, /healthz and /readyz over HTTP, on loopback unless HOST is given.",
)
@click.option(
    "--metrics-compat",
    metavar="NAMES",
    help="Serve the metrics also under the names of these exporters: kafka-exporter, kminion, jmx"
    " (separated by commas).",
)
def command(
    data_dir: Path | None,
    listen: str | None,
    insecure: bool,
    pairs: tuple[str, ...],
    config_file: Path | None,
    add_scram: tuple[str, ...],
    log_level: str,
    log_format: str,
    test_hooks: str | None,
    metrics: str | None,
    metrics_compat: str | None,
) -> None:
    """Run the broker until SIGTERM or Ctrl-C.

    Once it listens, it prints one line, `listening HOST:PORT`. Logs go to standard error. On SIGHUP
    it reads --config-file again and applies the settings that can change at run time.

    The variable FENCEPOST_SET_LOG_RETENTION_HOURS=24 stands for --config log.retention.hours=24.
    """
    from fencepost.coordinator.daemon.process import serve

    hooks = None
    if test_hooks is not None:
        # The daemon's only reference to the test hooks.
        from fencepost.testing.hooks import HookServer

        try:
            hooks = HookServer(test_hooks)
        except ValueError as error:
            raise click.BadParameter(str(error), param_hint="--test-hooks") from error
    for key, value in (("listen", metrics), ("compat", metrics_compat)):
        if value is not None:
            pairs = (*pairs, f"fencepost.metrics.{key}={value}")
    if insecure:
        pairs = (*pairs, "fencepost.insecure=true")
    status = serve(
        data_dir,
        listen=listen,
        pairs=(*settings_in_environment(os.environ), *pairs),
        config_file=config_file,
        add_scram=_users_to_add(os.environ.pop(USERS, ""), add_scram),
        log_level=log_level.upper(),
        log_format=log_format,
        hooks=hooks,
    )
    sys.exit(status)


def _users_to_add(in_environment: str, given: tuple[str, ...]) -> list[str]:
    """Return the users, one per item. Raises click.BadParameter for an unreadable file."""
    users = in_environment.splitlines()
    for argument in given:
        if not argument.startswith("@"):
            users.append(argument)
            continue
        try:
            users += Path(argument[1:]).read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "not UTF-8 text"
            raise click.BadParameter(
                f"{argument[1:]}: {reason}", param_hint="--add-scram"
            ) from error
    return [line for line in map(str.strip, users) if line and not line.startswith("#")]


def settings_in_environment(environment: Mapping[str, str]) -> list[str]:
    """Return KEY=VALUE for each variable that begins with :data:`SETTING`.

    An underscore stands for a dot, as Kafka's keys have no underscores.
    """
    return [
        f"{name.removeprefix(SETTING).lower().replace('_', '.')}={value}"
        for name, value in sorted(environment.items())
        if name.startswith(SETTING)
    ]
