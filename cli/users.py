"""``fencepost users``: users that log in with a password (SCRAM)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from fencepost.cli.changes import execute_option, show_only
from fencepost.cli.output import CommandGroup, emit, shared_options, table_options
from fencepost.cli.printing import print_lines

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from fencepost.client.queries.session import ClusterSession

COLUMNS = ["user", "mechanism", "iterations"]
MECHANISMS = {"SCRAM-SHA-256": 1, "SCRAM-SHA-512": 2}
MIN_ITERATIONS, MAX_ITERATIONS = 4_096, 16_384
MAX_PASSWORD_BYTES = 1_024
SALT_BYTES = 20

NOT_FOUND = 91
"""RESOURCE_NOT_FOUND: a user without credentials."""


@click.group("users", cls=CommandGroup)
def command() -> None:
    """List, add and remove users with passwords (SCRAM), and change passwords.

    A broker keeps no password, only a salted hash for each user and mechanism. A change applies to
    later logins: open connections stay until they log in again.
    """


def mechanism_option(text: str) -> Callable[[Any], Any]:
    """Add ``--mechanism``, which may be repeated."""
    return click.option(
        "--mechanism",
        "mechanisms",
        multiple=True,
        type=click.Choice(list(MECHANISMS), case_sensitive=False),
        help=f"{text} May be repeated.",
    )


def password_options(function: Any) -> Any:
    """Add the options for the source of a new password and the number of iterations."""
    function = click.option(
        "--password-file",
        type=click.File("rb"),
        metavar="FILE",
        help="Read the password from the first line of FILE (- is standard input); no prompt.",
    )(function)
    return click.option(
        "--iterations",
        type=click.IntRange(MIN_ITERATIONS, MAX_ITERATIONS),
        default=MIN_ITERATIONS,
        show_default=True,
        help="Rounds of hashing. More of them slow down guessing, and also each login.",
    )(function)


@command.command("list")
@click.argument("users", nargs=-1, metavar="[USER]...")
@table_options
def list_users(session: ClusterSession, users: tuple[str, ...], form: str) -> None:
    """List USERS, or all users, with their mechanisms."""
    rows = credentials(session, users)
    if rows or not users:
        emit([row for name in sorted(rows) for row in rows[name]], COLUMNS, form, "no users")
    if missing := [name for name in users if name not in rows]:
        raise _unknown(session, missing)


@command.command("add")
@click.argument("user")
@mechanism_option("The mechanism of the login; else SCRAM-SHA-512.")
@password_options
@shared_options
def add(
    session: ClusterSession,
    user: str,
    mechanisms: tuple[str, ...],
    iterations: int,
    password_file: Any,
) -> None:
    """Add USER with a password, which is never taken from the command line.

    A user with a password for that mechanism is refused: `passwd` changes it.
    """
    chosen = mechanisms or ("SCRAM-SHA-512",)
    existing = {str(row["mechanism"]) for row in credentials(session, [user]).get(user, [])}
    if both := sorted(existing & set(chosen)):
        raise click.ClickException(f"{user} has a password for {', '.join(both)}: use passwd")
    _set(session, user, chosen, iterations, _password(password_file))
    print_lines(f"added {user}: {', '.join(chosen)}")


@command.command("passwd")
@click.argument("user")
@mechanism_option("The mechanism whose password is changed; else all of the user's.")
@password_options
@shared_options
def passwd(
    session: ClusterSession,
    user: str,
    mechanisms: tuple[str, ...],
    iterations: int,
    password_file: Any,
) -> None:
    """Change the password of USER."""
    chosen = _user_mechanisms(session, user, mechanisms)
    _set(session, user, chosen, iterations, _password(password_file))
    print_lines(f"changed {user}: {', '.join(chosen)}")


@command.command("remove")
@click.argument("user")
@mechanism_option("The mechanism that is removed; else all of the user's.")
@execute_option
@shared_options
def remove(
    session: ClusterSession, user: str, mechanisms: tuple[str, ...], *, execute: bool
) -> None:
    """Show the mechanisms of USER; with --execute, remove them."""
    chosen = _user_mechanisms(session, user, mechanisms)
    if not execute:
        print_lines(f"would remove {user}: {', '.join(chosen)}")
        show_only()
        return
    for name in chosen:
        _alter(session, user, name)
    print_lines(f"removed {user}: {', '.join(chosen)}")


def credentials(
    session: ClusterSession, users: Sequence[str]
) -> dict[str, list[dict[str, object]]]:
    """Return the rows of each of ``users`` with credentials, or of all users. Raises ApiError."""
    from fencepost.client.queries.session import check

    answer = session.client.call(
        "DescribeUserScramCredentials",
        entity=lambda f: f.message(users=[f.UserName(name=name) for name in users] or None),
    )
    names = {number: name for name, number in MECHANISMS.items()}
    rows: dict[str, list[dict[str, object]]] = {}
    for result in answer.results:
        if result.error_code == NOT_FOUND:
            continue
        api = "DescribeUserScramCredentials"
        check(result.error_code, api, result.user, result.error_message)
        rows[result.user] = [
            {
                "user": result.user,
                "mechanism": names.get(row.mechanism, str(row.mechanism)),
                "iterations": row.iterations,
            }
            for row in result.credential_infos
        ]
    return rows


def _user_mechanisms(session: ClusterSession, user: str, mechanisms: Sequence[str]) -> list[str]:
    """Return the user's mechanisms, or check those given. Raises click.ClickException."""
    has = [str(row["mechanism"]) for row in credentials(session, [user]).get(user, [])]
    if not has:
        raise _unknown(session, [user])
    if missing := [name for name in mechanisms if name not in has]:
        raise click.ClickException(f"{user} has no password for {', '.join(missing)}")
    return [name for name in has if not mechanisms or name in mechanisms]


def _unknown(session: ClusterSession, names: Sequence[str]) -> click.ClickException:
    """Return the error about users that do not exist."""
    from fencepost.coordinator.config.key import nearest

    close = nearest(names[0], credentials(session, ()))
    return click.ClickException(f"there is no user {', '.join(names)}{close}")


def _password(file: Any) -> str:
    if file is None:
        password = click.prompt("Password", hide_input=True, confirmation_prompt=True, err=True)
    else:
        raw = file.read(MAX_PASSWORD_BYTES + 2)
        try:
            password = raw.partition(b"\n")[0].removesuffix(b"\r").decode()
        except UnicodeDecodeError:
            raise click.ClickException("the password is not UTF-8") from None
    if not password:
        raise click.ClickException("the password is empty")
    if len(password.encode()) > MAX_PASSWORD_BYTES:
        raise click.ClickException(f"the password has more than {MAX_PASSWORD_BYTES} bytes")
    return str(password)


def _set(
    session: ClusterSession, user: str, mechanisms: Sequence[str], iterations: int, password: str
) -> None:
    if not user.isascii():
        raise click.ClickException("the name of a user who logs in by SCRAM must be ASCII")
    for name in mechanisms:
        _alter(session, user, name, (iterations, password))


def _alter(
    session: ClusterSession, user: str, mechanism: str, credential: tuple[int, str] | None = None
) -> None:
    """Set or remove one credential: each mechanism needs a request of its own."""
    import secrets

    from fencepost.client.queries.session import check
    from fencepost.protocol.scram import SCRAM_MECHANISMS, salted_password

    number, salt = MECHANISMS[mechanism], secrets.token_bytes(SALT_BYTES)

    def request(make: Any) -> Any:
        if credential is None:
            gone = make.ScramCredentialDeletion(name=user, mechanism=number)
            return make.message(deletions=[gone], upsertions=[])
        iterations, password = credential
        hashed = salted_password(SCRAM_MECHANISMS[mechanism], password, salt, iterations)
        new = make.ScramCredentialUpsertion(
            name=user, mechanism=number, iterations=iterations, salt=salt, salted_password=hashed
        )
        return make.message(deletions=[], upsertions=[new])

    answer = session.client.call(
        "AlterUserScramCredentials", to_node=session.controller, check=False, entity=request
    )
    for result in answer.results:
        check(result.error_code, "AlterUserScramCredentials", user, result.error_message)
