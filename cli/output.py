"""The common parts of all commands: options, output as table or JSON, and exit statuses."""

from __future__ import annotations

import contextlib
import datetime as dt
import functools
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import click
from click.core import ParameterSource

from fencepost.cli.options import (
    DEFAULT_BOOTSTRAP,
    DEFAULT_TIMEOUT_S,
    ConnectionGroup,
    connection_options,
    option_before_command,
)
from fencepost.cli.printing import HintedError, print_json, print_lines, print_table
from fencepost.coordinator.config.durations import setting_value
from fencepost.coordinator.config.key import nearest
from fencepost.logcore.printable import printable

if TYPE_CHECKING:
    from fencepost.cli.profiles import Profile
    from fencepost.client.queries.session import ClusterSession

P = ParamSpec("P")
R = TypeVar("R")

Row = Mapping[str, object]

EXIT_REFUSED = 1
EXIT_USAGE = 2
EXIT_UNREACHABLE = 3
EXIT_PARTIAL = 4
EXIT_UNDECIDED = 5

EXIT_CODES = {
    0: "done",
    EXIT_REFUSED: (
        "the broker refused, a name does not exist, `acls why` says `denied`, `doctor` has found a"
        " breach, or `cluster check-restart` advises against it"
    ),
    EXIT_USAGE: "the command line, a profile or a time on it cannot be understood",
    EXIT_UNREACHABLE: "no broker could be reached, or none answered in time",
    EXIT_PARTIAL: "`produce` has written some of the records and not others",
    EXIT_UNDECIDED: (
        "`acls why` could not find out: the broker refused the question; `txns resolve` has no"
        " proof for a verdict"
    ),
}
"""The meanings of the exit statuses; ``fencepost --help`` prints them."""

NO_BROKER_HINT = "hint: `fencepost serve` starts one there; --bootstrap names another"
"""The hint for an error if no broker answers at the default address."""


EMPTY = "nothing to show"
"""Written to standard error for a table without rows, unless the command passes another text."""


class CommandGroup(ConnectionGroup):
    """A group whose help shows the whole first sentence of each command."""

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the commands."""
        commands = [(name, self.get_command(ctx, name)) for name in self.list_commands(ctx)]
        with formatter.section("Commands"):
            formatter.write_dl(
                [(name, command.get_short_help_str(500)) for name, command in commands if command]
            )


class ReportingGroup(CommandGroup):
    """A command group that shows the errors of its commands without a traceback.

    ``errors`` imports and returns their classes.
    """

    def __init__(
        self, *args: Any, errors: Callable[[], tuple[type[Exception], ...]], **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self._errors = errors

    def invoke(self, ctx: click.Context) -> object:
        """Invoke the command."""
        with reported(*self._errors()):
            return super().invoke(ctx)


class Unreachable(HintedError):  # noqa: N818 - reads better at `except`
    """No broker could be reached."""

    exit_code = EXIT_UNREACHABLE


def read_time(_ctx: click.Context, _param: click.Parameter, text: str | None) -> int | None:
    """Parse an option that is a time: milliseconds since 1970; None if it was not given."""
    from fencepost.client.queries.times import TimeError, milliseconds

    try:
        return None if text is None else milliseconds(text)
    except TimeError as error:
        raise click.BadParameter(str(error)) from error


@contextlib.contextmanager
def ended_by_sigterm() -> Iterator[None]:
    """Have SIGTERM interrupt the block as Ctrl-C does.

    The command then leaves its group, or aborts its transaction, before it exits.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def shared_options(function: Callable[..., R]) -> Callable[..., R]:
    """Add the connection options, and pass the function a session made from them.

    The client's errors become exit statuses.
    """

    @connection_options
    @functools.wraps(function)
    def wrapped(
        bootstrap: str | None,
        profile: str | None,
        command_config: str | None,
        timeout: float | None,
        **options: object,
    ) -> R:
        # Import this first: it keeps later imports from loading modules that no command uses.
        import fencepost.client.queries.session  # noqa: F401
        from fencepost.client.client import BrokerUnreachable
        from fencepost.protocol.errors import WireError

        bootstrap, profile, command_config, timeout = (
            option_before_command(name, value)
            for name, value in (
                ("bootstrap", bootstrap),
                ("profile", profile),
                ("command_config", command_config),
                ("timeout", timeout),
            )
        )
        if bootstrap is None and command_config is None and profile is None:
            profile = _profile_in_use()
        files = _read_option_files(command_config, profile, bootstrap)
        servers = bootstrap or next((file.bootstrap for file in files if file.bootstrap), None)
        session = _session(servers, timeout, files)
        with reported(WireError, ValueError):
            try:
                with session:
                    return function(session, **options)
            except BrokerUnreachable as error:
                hints = () if servers else (NO_BROKER_HINT,)
                raise Unreachable(str(error), *hints) from error

    return wrapped


@contextlib.contextmanager
def reported(*errors: type[Exception]) -> Iterator[None]:
    """Turn ``errors`` and OSErrors into errors that click shows without a traceback."""
    caught: tuple[type[Exception], ...] = (OSError, *errors)
    try:
        yield
    except BrokenPipeError:
        raise  # the reader of the output has closed the pipe: click exits quietly
    except caught as error:
        raise click.ClickException(str(error)) from error


def _session(
    servers: str | None, timeout: float | None, files: Sequence[Profile]
) -> ClusterSession:
    """Return a session; a missing option comes from the first of ``files`` that sets it."""
    from fencepost.client.queries.session import ClusterSession
    from fencepost.client.security import PLAINTEXT, SecurityError

    seconds = timeout or next(
        (file.timeout_s for file in files if file.timeout_s), DEFAULT_TIMEOUT_S
    )
    security = next((file.security for file in files if file.security), PLAINTEXT)
    for warning in security.warnings():
        print_lines(f"warning: {warning}", err=True)
    try:
        return ClusterSession(servers or DEFAULT_BOOTSTRAP, seconds, security=security)
    except SecurityError as error:
        raise click.UsageError(str(error)) from error
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--bootstrap") from error


def _profile_in_use() -> str | None:
    from fencepost.cli.profiles import ProfileError, current_profile

    try:
        return current_profile()
    except ProfileError as error:
        raise click.UsageError(str(error)) from error


def _read_option_files(
    command_config: str | None, profile: str | None, servers: str | None
) -> list[Profile]:
    """Read the settings file and the profile, if they were named."""
    if command_config is None and profile is None:
        return []
    from pathlib import Path

    from fencepost.cli.profiles import (
        ProfileError,
        profiles_file,
        read_profile,
        read_settings,
    )

    options, files = [], []
    try:
        if command_config is not None:
            files.append(Path(command_config))
            options.append(read_settings(files[-1]))
        if profile is not None:
            files.append(profiles_file())
            options.append(read_profile(profile))
            _note_overridden_profile(options[-1].bootstrap, servers)
    except ProfileError as error:
        raise click.UsageError(str(error)) from error
    for file, settings in zip(files, options, strict=True):
        if settings.is_open:
            print_lines(
                f"warning: others can read {file}, which holds a secret: chmod 600", err=True
            )
    return options


def _note_overridden_profile(profile: str | None, servers: str | None) -> None:
    """Print a note if the environment names another cluster than the chosen profile."""
    sources = click.get_current_context().get_parameter_source
    if (
        profile not in {None, servers}
        and sources("profile") is ParameterSource.COMMANDLINE
        and sources("bootstrap") is ParameterSource.ENVIRONMENT
    ):
        print_lines(
            f"note: $FENCEPOST_BOOTSTRAP is {servers}, which takes precedence over --profile",
            err=True,
        )


def format_option(function: Callable[P, R]) -> Callable[P, R]:
    """Add ``--format table|json``, and ``--json`` for the latter."""
    function = click.option("--json", "form", flag_value="json", help="As --format json.")(function)
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
    """Parse the KEY=VALUE ``pairs`` of ``option``, in order. Raises click.BadParameter.

    A duration is converted to the unit that the key names: ``retention.ms=7d``.
    """
    parsed = []
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals:
            raise click.BadParameter(f"{pair!r} is not KEY=VALUE", param_hint=option)
        try:
            parsed.append((key, setting_value(key, value)))
        except ValueError as error:
            raise click.BadParameter(f"{key}: {error}", param_hint=option) from error
    return parsed


def spelled(names: Sequence[str], allowed: Sequence[str], what: str) -> list[str]:
    """Return ``names`` in Kafka's spelling; their case is ignored. Raises click.UsageError."""
    spelling = {value.lower(): value for value in allowed}
    for name in names:
        if name.lower() not in spelling:
            there = f"the names are {', '.join(allowed)}{nearest(name, allowed)}"
            raise click.UsageError(f"unknown {what} {name}; {there}")
    return [spelling[name.lower()] for name in names]


def counted(count: int, noun: str) -> str:
    """Return a count with a regular noun, given in the singular: 1 record, 2 records."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def emit(rows: Sequence[Row], columns: Sequence[str], form: str, empty: str = EMPTY) -> None:
    """Print ``rows``: the ``columns`` as a table, or all fields as JSON.

    Without rows the table is only its header, and ``empty`` is written to standard error.
    """
    if form == "json":
        print_json([dict(row) for row in rows])
        return
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for column in columns:
        numeric = all(isinstance(row.get(column), int) for row in rows) and bool(rows)
        table.add_column(column.upper(), justify="right" if numeric else "left", no_wrap=True)
    for row in rows:
        table.add_row(*(Text(text_of(row.get(column))) for column in columns))
    print_table(table)
    if not rows:
        print_lines(empty, err=True)


def note_unknown_topic(session: ClusterSession, name: str) -> None:
    """Print a note if there is no topic ``name``: the command accepts topics that do not exist yet.

    Nothing is printed for a user who may not describe the topic.
    """
    _note_unknown(lambda: session.topics([name]))


def note_unknown_group(session: ClusterSession, name: str) -> None:
    """Print a note if there is no group ``name``, like :func:`note_unknown_topic`."""
    from fencepost.client.queries.group_view import existing

    _note_unknown(lambda: existing(session, name))


def _note_unknown(look: Callable[[], object]) -> None:
    from fencepost.client.client import ApiError
    from fencepost.client.queries.unknown import UnknownNameError

    try:
        look()
    except UnknownNameError as error:
        print_lines(f"note: {error}", err=True)
    except ApiError:
        pass


def utc(timestamp_ms: int) -> str:
    """Return a timestamp of the protocol as text."""
    try:
        when = dt.datetime.fromtimestamp(timestamp_ms / 1000, dt.UTC)
    except (ValueError, OverflowError, OSError):
        return f"@{timestamp_ms}"  # mostly microseconds, from a client that took them for ms
    return when.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def moment(timestamp_ms: int | None) -> str | None:
    """Return a timestamp of the protocol as text; None if it is missing."""
    return None if timestamp_ms is None or timestamp_ms < 0 else utc(timestamp_ms)


def text_of(value: object) -> str:
    """Return the text of one cell, escaped; a missing value is a dash."""
    if value is None or value == "":
        return "-"
    if isinstance(value, (list, tuple)):
        value = ",".join(str(item) for item in value) or "-"
    return printable(str(value))
