"""The command line with a broker that requires TLS and authentication."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from fencepost.cli import main
from tests.support.cluster import unique
from tests.support.secured import USERS, Secured, quoted
from tests.support.waits import until
from tests.wire.command_line import cli

SCRAM = "org.apache.kafka.common.security.scram.ScramLoginModule"
PASSWORD = "hunter2"


@pytest.fixture
def settings(secured: Secured, tmp_path: Path) -> Path:
    """Return a settings file in the format of Kafka's own tools."""
    login = f"{SCRAM} required username=alice password={quoted(USERS['alice'])};"
    lines = {
        "bootstrap.servers": secured.listeners["SAFE"],
        "security.protocol": "SASL_SSL",
        "sasl.mechanism": "SCRAM-SHA-512",
        "sasl.jaas.config": login.replace("\\", "\\\\"),
        "ssl.truststore.type": "PEM",
        "ssl.truststore.location": str(secured.authority.truststore),
    }
    path = tmp_path / "client.properties"
    path.touch(mode=0o600)
    path.write_text("".join(f"{key}={value}\n" for key, value in lines.items()))
    return path


def run(settings: Path, *arguments: str, **more: Any) -> Any:
    told = {"FENCEPOST_BOOTSTRAP": None, "FENCEPOST_COMMAND_CONFIG": str(settings)}
    done = cli("", *arguments, **{**told, **more})
    for secret in (*USERS.values(), PASSWORD):
        if len(secret) > 6:
            assert secret not in done.output
    return done


def test_every_kind_of_command_logs_in(settings: Path) -> None:
    topic = unique("safe")
    run(settings, "topics", "create", topic, "--partitions", "2")
    run(settings, "produce", topic, stdin="one\ntwo\n")
    read = run(
        settings, "consume", topic, "--from", "earliest", "--limit", "2", "--format", "%s\\n"
    )
    assert sorted(read.stdout.split()) == ["one", "two"]
    group = unique("group")
    run(settings, "consume", topic, "--group", group, "--limit", "2")
    for arguments in (
        ("topics", "describe", topic),
        ("groups", "describe", group),
        ("groups", "reset-offsets", group, "--all-topics", "--to-earliest"),
        ("txns", "list"),
        ("features", "describe"),
        ("configs", "list", "topic", topic),
        ("cluster", "info"),
        ("health",),
    ):
        assert run(settings, *arguments).stdout


def test_profile_and_command_config_give_the_same_login(
    secured: Secured, settings: Path, tmp_path: Path
) -> None:
    profiles = tmp_path / "profiles.toml"
    profiles.touch(mode=0o600)
    profiles.write_text(
        f"""
        [safe]
        bootstrap = "{secured.listeners["SAFE"]}"
        security.protocol = "SASL_SSL"
        sasl.mechanism = "PLAIN"
        sasl.username = "bob"
        sasl.password = "{USERS["bob"]}"
        ssl.truststore.location = "{secured.authority.truststore}"
        """
    )
    nothing = {"FENCEPOST_BOOTSTRAP": None}
    named = {**nothing, "FENCEPOST_PROFILES": str(profiles), "FENCEPOST_PROFILE": "safe"}
    one = cli("", "topics", "list", **named)
    other = cli("", "topics", "list", "--command-config", str(settings), **nothing)
    assert one.stdout == other.stdout
    # The settings file overrides the profile, so the user is the one in the settings file.
    settings.write_text(settings.read_text().replace("username=alice", "username=nobody"))
    told = cli("", "cluster", "info", "--command-config", str(settings), status=1, **named)
    assert "'nobody' cannot log in" in told.stderr


def test_users_are_added_changed_and_removed(secured: Secured, settings: Path) -> None:
    name = unique("carol").replace(".", "-")
    both = ("--mechanism", "SCRAM-SHA-256", "--mechanism", "scram-sha-512")
    run(settings, "users", "add", name, *both, "--password-file", "-", stdin=f"{PASSWORD}\n")

    def listed() -> list[tuple[Any, ...]]:
        rows = json.loads(run(settings, "users", "list", "--format", "json").stdout)
        return [tuple(row.values()) for row in rows]

    mine = {(name, "SCRAM-SHA-256", 4096), (name, "SCRAM-SHA-512", 4096)}
    until(lambda: mine <= set(listed()) or None, "both are listed")
    assert {"alice", "bob", name} <= {row[0] for row in listed()}
    done = run(settings, "users", "add", name, "--password-file", "-", stdin="x", status=1)
    assert "use passwd" in done.stderr

    def logs_in(password: str, mechanism: str) -> bool:
        text = settings.read_text().replace("SCRAM-SHA-512", mechanism)
        mine = settings.with_name("carol.properties")
        mine.touch(mode=0o600)
        login = text.index("sasl.jaas.config")
        kept = text[:login] + text[text.index("\n", login) + 1 :]
        mine.write_text(f"{kept}sasl.username={name}\nsasl.password={password}\n")
        told = {"FENCEPOST_BOOTSTRAP": None, "FENCEPOST_COMMAND_CONFIG": str(mine)}
        return CliRunner().invoke(main, ["topics", "list"], env=told).exit_code == 0

    def comes_to(wanted: bool, password: str, mechanism: str) -> None:
        """Wait until logins succeed or fail as ``wanted``, that is, the broker has the change."""
        until(lambda: logs_in(password, mechanism) == wanted or None, f"{mechanism}: {wanted}")

    comes_to(True, PASSWORD, "SCRAM-SHA-512")
    assert not logs_in("another", "SCRAM-SHA-512")
    # The command asks for the password twice on the terminal.
    run(settings, "users", "passwd", name, "--mechanism", "SCRAM-SHA-512", stdin="new\nnew\n")
    comes_to(True, "new", "SCRAM-SHA-512")
    assert logs_in(PASSWORD, "SCRAM-SHA-256")
    shown = run(settings, "users", "remove", name, "--mechanism", "SCRAM-SHA-512")
    assert "would remove" in shown.stdout
    assert logs_in("new", "SCRAM-SHA-512")
    run(settings, "users", "remove", name, "--execute")
    comes_to(False, "new", "SCRAM-SHA-512")
    comes_to(False, PASSWORD, "SCRAM-SHA-256")
    for arguments in (("list", name), ("remove", name, "--execute"), ("passwd", name)):
        done = run(settings, "users", *arguments, status=1, stdin="x\nx\n")
        assert f"there is no user {name}" in done.stderr


@pytest.mark.parametrize(
    ("stdin", "complaint"),
    [
        ("\n", "the password is empty"),
        (b"\xff\n", "not UTF-8"),
        ("x" * 1025, "more than 1024 bytes"),
    ],
)
def test_invalid_password_is_refused_and_adds_no_user(
    settings: Path, stdin: Any, complaint: str
) -> None:
    done = run(settings, "users", "add", "dave", "--password-file", "-", stdin=stdin, status=1)
    assert complaint in done.stderr
    assert "dave" not in run(settings, "users", "list").stdout


def test_user_name_outside_of_ascii_is_refused(settings: Path) -> None:
    done = run(settings, "users", "add", "zoë", "--password-file", "-", stdin="x", status=1)
    assert "ASCII" in done.stderr
