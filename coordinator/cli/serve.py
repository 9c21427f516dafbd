"""``fencepost serve``: the daemon."""

from __future__ import annotations

import sys
from pathlib import Path

import click


@click.command("serve")
@click.option(
    "--data-dir",
    required=True,
    type=click.Path(file_okay=False, path_type=Path),
    help="Where everything is kept; created if it is not there.",
)
@click.option(
    "--listen",
    default="127.0.0.1:9092",
    show_default=True,
    metavar="HOST:PORT",
    help="Where clients connect; port 0 takes a free one.",
)
@click.option(
    "--config",
    "pairs",
    multiple=True,
    metavar="KEY=VALUE",
    help="A setting by Kafka's name, for example log.retention.hours=24; may be repeated.",
)
@click.option(
    "--config-file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="A TOML file with settings; --config wins over it.",
)
def command(data_dir: Path, listen: str, pairs: tuple[str, ...], config_file: Path | None) -> None:
    """Run the broker until SIGTERM or Ctrl-C.

    As soon as it serves it prints one line, `listening HOST:PORT`. Logs go to standard error.
    """
    from fencepost.coordinator.daemon.process import serve

    sys.exit(serve(data_dir, listen=listen, pairs=pairs, config_file=config_file))
