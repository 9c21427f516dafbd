"""``fencepost console``: the web console."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from fencepost.cli.output import shared_options

if TYPE_CHECKING:
    import ssl

    from fencepost.client.queries.session import ClusterSession


@click.command("console")
@click.option(
    "--listen",
    default="127.0.0.1:8080",
    show_default=True,
    metavar="HOST:PORT",
    help="Where browsers connect; port 0 takes a free one.",
)
@click.option(
    "--allow-writes", is_flag=True, help="Allow changes; without it, the console only reads."
)
@click.option(
    "--allow-host",
    "hosts",
    multiple=True,
    metavar="NAME",
    help="Another host name that browsers may use, as behind a proxy; repeatable.",
)
@click.option(
    "--token",
    envvar="FENCEPOST_CONSOLE_TOKEN",
    metavar="TEXT",
    help="The secret of browsers and scripts; a new one at each start if none is given. Other users"
    " of the machine can read a command line: FENCEPOST_CONSOLE_TOKEN is safer.",
)
@click.option(
    "--tls-cert",
    metavar="FILE",
    help="Serve HTTPS with this certificate and its chain, a PEM file.",
)
@click.option("--tls-key", metavar="FILE", help="Its private key, if it is not in the same file.")
@click.option(
    "--insecure",
    is_flag=True,
    help="Listen for other machines without encryption; eavesdroppers get the token.",
)
@click.option(
    "--undo-dir",
    default=".",
    show_default=True,
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="The directory for undo files of offset resets.",
)
@shared_options
def command(
    session: ClusterSession,
    listen: str,
    token: str | None,
    undo_dir: Path,
    hosts: tuple[str, ...],
    tls_cert: str | None,
    tls_key: str | None,
    *,
    allow_writes: bool,
    insecure: bool,
) -> None:
    """Show a cluster, Fencepost or Apache Kafka, in a browser until Ctrl-C.

    The first line of the output is `console URL`; the URL holds the token.
    """
    try:
        from fencepost.console.guard import is_loopback
        from fencepost.console.server import ConsoleSettings, run
    except ModuleNotFoundError as error:
        if error.name != "aiohttp":
            raise
        raise click.ClickException(
            "the console needs: pip install '.[console]' in a clone of Fencepost"
        ) from error
    from fencepost.coordinator.config.listeners import parse_address

    try:
        host, port = parse_address(listen)
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--listen") from error
    tls = _context(tls_cert, tls_key)
    if tls is None and not insecure and not is_loopback(host):
        raise click.UsageError(
            f"{listen} can be reached from other machines, and eavesdroppers would get the"
            " token: give --tls-cert, or --insecure behind a tunnel (ssh -L) or a proxy"
            " with TLS"
        )
    shown = f"[{host}]" if ":" in host else host
    try:
        run(
            ConsoleSettings(
                bootstrap=session.bootstrap,
                listen=f"{shown}:{port}",
                token=token or "",
                allow_writes=allow_writes,
                hosts=hosts,
                undo_dir=undo_dir,
                timeout_s=session.timeout_ms / 1000,
                security=session.security,
                tls=tls,
            )
        )
    except OSError as error:
        raise click.ClickException(f"{listen}: {error.strerror or error}") from error


def _context(certificate: str | None, key: str | None) -> ssl.SSLContext | None:
    """Return the TLS context of the console; None without a certificate. Raises UsageError."""
    if certificate is None:
        if key is not None:
            raise click.UsageError("--tls-key needs --tls-cert")
        return None
    from fencepost.protocol.server_tls import ServerTlsError, server_context

    try:
        return server_context(certificate, key)
    except ServerTlsError as error:
        raise click.UsageError(f"--tls-cert: {error}") from error
