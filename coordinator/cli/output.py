"""What every command shares: the options, tables or JSON, and errors as exit codes."""

from __future__ import annotations

import contextlib
import datetime as dt
import functools
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, ParamSpec, TypeVar

import click
from click.core import ParameterSource

from fencepost.coordinator.cli.printing import HintedError, say, say_json, say_table
from fencepost.logcore.printable import printable

if TYPE_CHECKING:
    from fencepost.coordinator.cli.profiles import Profile
    from fencepost.coordinator.cli.queries.session import Session

P = ParamSpec("P")
R = TypeVar("R")

Row = Mapping[str, object]

EXIT_REFUSED = 1
EXIT_USAGE = 2
EXIT_UNREACHABLE = 3
EXIT_PARTIAL = 4

EXIT_CODES = {
    0: "done",
    EXIT_REFUSED: "the broker refused, what was named does not exist, or something is wrong",
    EXIT_USAGE: "the command line, a profile or a time on it can not be understood",
    EXIT_UNREACHABLE: "no broker could be reached, or none answered in time",
    EXIT_PARTIAL: "a part was done: `produce` has written some of the records and not others",
}
"""What every command's exit status means; ``fencepost --help`` prints it."""

DEFAULT_BOOTSTRAP = "127.0.0.1:9092"
NO_BROKER_HINT = "hint: `fencepost serve` starts one there; --bootstrap names another"
"""What is added when there is none where one is looked for without being told."""

DEFAULT_TIMEOUT_S = 10.0


class CommandGroup(click.Group):
    """A group whose help has the whole first sentence of each command, not its beginning."""

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the commands."""
        found = [(name, self.get_command(ctx, name)) for name in self.list_commands(ctx)]
        with formatter.section("Commands"):
            formatter.write_dl([(name, one.get_short_help_str(500)) for name, one in found if one])


class Unreachable(HintedError):  # noqa: N818 - reads better at `except`
    """No broker answered."""

    exit_code = EXIT_UNREACHABLE


def read_time(_ctx: click.Context, _param: click.Parameter, text: str | None) -> int | None:
    """Read an option that is a time: in milliseconds since 1970, None if it was not given."""
    from fencepost.coordinator.cli.queries.times import TimeError, milliseconds

    try:
        return None if text is None else milliseconds(text)
    except TimeError as error:
        raise click.BadParameter(str(error)) from error


@contextlib.contextmanager
def ended_by_sigterm() -> Iterator[None]:
    """SIGTERM ends what is within as Ctrl-C does: a group is left, a transaction aborted."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def shared_options(function: Callable[..., R]) -> Callable[..., R]:
    """Add ``--bootstrap``, ``--profile`` and so on: the function gets a session with it.

    The client's errors become exit codes.
    """

    @click.option(
        "--bootstrap",
        "-b",
        envvar="FENCEPOST_BOOTSTRAP",
        show_default=DEFAULT_BOOTSTRAP,
        show_envvar=True,
        metavar="HOST:PORT",
        help="A broker to begin with; several are separated by commas.",
    )
    @click.option(
        "--profile",
        envvar="FENCEPOST_PROFILE",
        show_envvar=True,
        metavar="NAME",
        help="Take what is not said otherwise from this part of the profiles' file.",
    )
    @click.option(
        "--command-config",
        envvar="FENCEPOST_COMMAND_CONFIG",
        show_envvar=True,
        metavar="FILE",
        help="Settings of a client by Kafka's names, as properties or TOML: how to encrypt and who"
        " logs in.",
    )
    @click.option(
        "--timeout",
        show_default=str(DEFAULT_TIMEOUT_S),
        metavar="SECONDS",
        type=click.FloatRange(min=0.1),
        help="Give up after so long.",
    )
    @functools.wraps(function)
    def wrapped(
        bootstrap: str | None,
        profile: str | None,
        command_config: str | None,
        timeout: float | None,
        **options: object,
    ) -> R:
        # First: it keeps what no command uses out of the start.
        import fencepost.coordinator.cli.queries.session  # noqa: F401
        from fencepost.coordinator.wire.client.client import BrokerUnreachable
        from fencepost.coordinator.wire.errors import WireError

        files = _told(command_config, profile, bootstrap)
        servers = bootstrap or next((one.bootstrap for one in files if one.bootstrap), None)
        session = _session(servers, timeout, files)
        try:
            with session:
                return function(session, **options)
        except BrokerUnreachable as error:
            hints = () if servers else (NO_BROKER_HINT,)
            raise Unreachable(str(error), *hints) from error
        except (WireError, ValueError) as error:
            raise click.ClickException(str(error)) from error
        except BrokenPipeError:
            raise  # who read the output has had enough: click ends quietly
        except OSError as error:  # a file, or what the output goes to
            raise click.ClickException(str(error)) from error

    return wrapped


def _session(servers: str | None, timeout: float | None, files: Sequence[Profile]) -> Session:
    """A session as the command line says, and where it is silent the first of ``files``."""
    from fencepost.coordinator.cli.queries.session import Session
    from fencepost.coordinator.wire.client.security import PLAINTEXT, SecurityError

    seconds = timeout or next((one.timeout_s for one in files if one.timeout_s), DEFAULT_TIMEOUT_S)
    security = next((one.security for one in files if one.security), PLAINTEXT)
    for warning in security.warnings():
        say(f"warning: {warning}", err=True)
    try:
        return Session(servers or DEFAULT_BOOTSTRAP, seconds, security=security)
    except SecurityError as error:
        raise click.UsageError(str(error)) from error
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--bootstrap") from error


def _told(command_config: str | None, profile: str | None, servers: str | None) -> list[Profile]:
    """What the file of settings and the profile say, as far as they were named."""
    if command_config is None and profile is None:
        return []
    from pathlib import Path

    from fencepost.coordinator.cli.profiles import (
        ProfileError,
        profiles_file,
        read_profile,
        read_settings,
    )

    found, files = [], []
    try:
        if command_config is not None:
            files.append(Path(command_config))
            found.append(read_settings(files[-1]))
        if profile is not None:
            files.append(profiles_file())
            found.append(read_profile(profile))
            _tell_of_environment(found[-1].bootstrap, servers)
    except ProfileError as error:
        raise click.UsageError(str(error)) from error
    for file, told in zip(files, found, strict=True):
        if told.is_open:
            say(f"warning: others can read {file}, which holds a secret: chmod 600", err=True)
    return found


def _tell_of_environment(profile: str | None, servers: str | None) -> None:
    """Say so if the environment names another cluster than the profile that was asked for."""
    sources = click.get_current_context().get_parameter_source
    if (
        profile not in {None, servers}
        and sources("profile") is ParameterSource.COMMANDLINE
        and sources("bootstrap") is ParameterSource.ENVIRONMENT
    ):
        say(f"note: $FENCEPOST_BOOTSTRAP is {servers}, which goes before --profile", err=True)


def format_option(function: Callable[P, R]) -> Callable[P, R]:
    """Add ``--format table|json``."""
    return click.option(
        "--format",
        "form",
        type=click.Choice(["table", "json"]),
        default="table",
        show_default=True,
        help="An aligned table, or one JSON array.",
    )(function)


def table_options(function: Callable[..., R]) -> Callable[..., R]:
    """Add ``--format`` and all of :func:`shared_options`."""
    return format_option(shared_options(function))


def key_values(pairs: Sequence[str], option: str) -> list[tuple[str, str]]:
    """The KEY=VALUE ``pairs`` that ``option`` was given, in order; click.BadParameter else."""
    found = []
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals:
            raise click.BadParameter(f"{pair!r} is not KEY=VALUE", param_hint=option)
        found.append((key, value))
    return found


def spelled(names: Sequence[str], known: Sequence[str], what: str) -> list[str]:
    """``names`` as Kafka spells them, whatever their case. click.UsageError for an unknown."""
    spelling = {one.lower(): one for one in known}
    for name in names:
        if name.lower() not in spelling:
            raise click.UsageError(f"no such {what}: {name}; there are {', '.join(known)}")
    return [spelling[name.lower()] for name in names]


def counted(count: int, noun: str) -> str:
    """``count`` of what a regular ``noun`` in the singular names: 1 record, 2 records."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def emit(rows: Sequence[Row], columns: Sequence[str], form: str) -> None:
    """Print ``rows``: the ``columns`` as a table, or everything in them as JSON."""
    if form == "json":
        say_json([dict(row) for row in rows])
        return
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for column in columns:
        numeric = all(isinstance(row.get(column), int) for row in rows) and bool(rows)
        table.add_column(column.upper(), justify="right" if numeric else "left", no_wrap=True)
    for row in rows:
        table.add_row(*(Text(text_of(row.get(column))) for column in columns))
    say_table(table)


def utc(timestamp_ms: int) -> str:
    """A time of the wire as text."""
    try:
        when = dt.datetime.fromtimestamp(timestamp_ms / 1000, dt.UTC)
    except (ValueError, OverflowError, OSError):
        return f"@{timestamp_ms}"  # microseconds, mostly, of a client that took them for ms
    return when.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def moment(timestamp_ms: int | None) -> str | None:
    """A time of the wire as text, or None where there is none."""
    return None if timestamp_ms is None or timestamp_ms < 0 else utc(timestamp_ms)


def text_of(value: object) -> str:
    """Return the text of one cell, escaped: nothing is a dash."""
    if value is None or value == "":
        return "-"
    if isinstance(value, (list, tuple)):
        value = ",".join(str(item) for item in value) or "-"
    return printable(str(value))
