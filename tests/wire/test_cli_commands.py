"""Rules for all commands, checked by a walk of the command tree, so new commands are tested too.

The broker has a topic, a group, a transactional id, a user, a quota and an ACL. Each listing has a
JSON form, the connection options may precede or follow a command, and a misspelt name causes an
error with the nearest name and a nonzero status.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

from fencepost.cli import main
from fencepost.coordinator.security.authorizer import STANDARD
from fencepost.testing import Kafka
from tests.support import requests
from tests.support.cluster import Cluster
from tests.support.own_broker import own_broker
from tests.support.waits import until
from tests.wire.command_line import cli, leaves

SETTINGS = {"authorizer.class.name": STANDARD, "super.users": "User:ANONYMOUS"}


def at(path: tuple[str, ...]) -> click.Command:
    found: click.Command = main
    for name in path:
        assert isinstance(found, click.Group)
        below = found.get_command(click.Context(found), name)
        assert below is not None
        found = below
    return found


ALL = [" ".join(path) for path in leaves(main)]

OFFLINE = {
    "backup create", "backup restore", "backup verify", "cluster promote", "cluster stand-alone",
    "completion", "crash-sweep", "dump-log", "history schema",
    "log export", "log import", "log rebuild-index", "log reset-producer-ids", "log truncate",
    "log verify", "profile create", "profile delete", "profile list", "profile show",
    "profile use", "serve",
}  # fmt: skip
"""Commands that send no request to a broker."""

LISTINGS = {
    "acls list": "",
    "clients telemetry": "",
    "cluster describe": "",
    "cluster history": "",
    "cluster info": "",
    "configs get": "topic orders retention.ms",
    "configs list": "topic orders",
    "consume": "orders",
    "features describe": "",
    "groups blame": "packing",
    "groups describe": "shipping",
    "groups history": "shipping",
    "groups list": "",
    "groups members": "shipping",
    "groups offsets": "shipping",
    "quotas list": "",
    "quotas why": "",
    "topics describe": "orders",
    "topics history": "orders",
    "topics list": "",
    "txns blame": "orders",
    "txns describe": "billing",
    "txns find-hanging": "",
    "txns history": "billing",
    "txns list": "",
    "txns producers": "orders",
    "users list": "",
}
"""Listing commands, with arguments that name existing resources."""

MISSPELT = {
    "acls add": "--topic orders --allow-principal User:a --operation Reed -> READ",
    "acls list": "--topic orders --bootsrap x -> --bootstrap",
    "acls remove": "--topic orders --operation Reed -> READ",
    "acls why": "User:a Reed topic:orders -> READ",
    "cluster check-restart": "99 -> 1",
    "cluster unregister": "99 -> 1",
    "configs get": "topic orders retention.mss -> retention.ms",
    "configs list": "topic ordrs -> orders",
    "configs set": "topic orders retention.mss=1 -> retention.ms",
    "configs unset": "broker 1 log.retention.mss -> log.retention.ms",
    "consume": "ordrs -> orders",
    "doctor": "--topic ordrs -> orders",
    "features set": "transaction.verson=2 -> transaction.version",
    "groups blame": "pakking -> packing",
    "groups delete": "shiping -> shipping",
    "groups delete-offsets": "shipping --topic ordrs -> orders",
    "groups describe": "shiping -> shipping",
    "groups history": "shiping -> shipping",
    "groups list": "--state Stabel -> Stable",
    "groups members": "shiping -> shipping",
    "groups offsets": "shiping -> shipping",
    "groups plan": "shiping -> shipping",
    "groups reset-offsets": "shipping --topic ordrs --to-earliest -> orders",
    "history export": "--webhook http://127.0.0.1:1 --scopes transacton -> transaction",
    "produce": "ordrs -> orders",
    "record": "biling --out incident.json -> billing",
    "quotas remove": "--user alice producer_byte_rat -> producer_byte_rate",
    "quotas set": "--user alice producer_byte_rat=1 -> producer_byte_rate",
    "topics add-partitions": "ordrs --to 3 -> orders",
    "topics alter": "ordrs retention.ms=1h -> orders",
    "topics create": "new --config retention.mss=1h -> retention.ms",
    "topics delete": "ordrs -> orders",
    "topics describe": "ordrs -> orders",
    "topics elect": "ordrs -> orders",
    "topics history": "ordrs -> orders",
    "topics reassign": "ordrs --replication-factor 1 -> orders",
    "topics trim": "ordrs --to-latest -> orders",
    "txns abort": "ordrs:0 --start-offset 0 -> orders",
    "txns blame": "ordrs -> orders",
    "txns describe": "biling -> billing",
    "txns find-hanging": "--topic ordrs -> orders",
    "txns history": "biling -> billing",
    "txns list": "--state Emty -> Empty",
    "txns producers": "ordrs -> orders",
    "txns resolve": "biling -> billing",
    "txns terminate": "biling -> billing",
    "users list": "alise -> alice",
    "users passwd": "alise -> alice",
    "users remove": "alise -> alice",
}
"""Command → arguments with a misspelt name, and the nearest name, which the error must contain."""

NAMELESS = {
    "clients telemetry", "cluster describe", "cluster history", "cluster info", "console",
    "features describe", "health", "quotas list", "quotas why", "topics list",
    "users add",
}  # fmt: skip
"""Commands whose arguments need not name an existing resource."""

MORE = {
    "quotas remove": "--user alise producer_byte_rate -> alice",
    "topics alter": "orders retention.mss=1h -> retention.ms",
    "topics reassign": "orders --to-brokers 1,99 -> 1",
    "acls why": "User:a READ tpic:orders -> topic",
    "configs set": "broker 99 log.retention.ms=1 -> 1",
}


@pytest.fixture(scope="module")
def broker(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    with own_broker(request, tmp_path_factory.mktemp("named"), SETTINGS) as started:
        with Cluster(started.bootstrap) as cluster:
            cluster.create_topic("orders")
            cluster.produce("orders", [b"a", b"b"])
            cluster.init_producer("billing")
            alter = requests.alter_share_group_offsets("packing", "orders", {0: 0})

            def is_altered() -> bool:
                cluster.call("find_coordinator", 6, key_type=0, coordinator_keys=["packing"])
                answer = cluster.call("alter_share_group_offsets", 0, **alter)
                return bool(answer["error_code"] == "none")

            until(is_altered, "a share group")
        password = tmp_path_factory.mktemp("password") / "password"
        password.write_text("secret\n")
        for line in (
            "groups reset-offsets shipping --topic orders --to-earliest --execute --undo "
            + str(password.with_name("undo.csv")),
            f"users add alice --password-file {password}",
            "quotas set --user alice producer_byte_rate=1000000 --execute",
            "acls add --allow-principal User:alice --operation read --topic orders",
        ):
            cli(started.bootstrap, *line.split())
        until(lambda: json_of(started.bootstrap, "acls list"), "the rule")
        yield started.bootstrap


def json_of(bootstrap: str, line: str) -> object:
    return json.loads(cli(bootstrap, *line.split(), "--json").stdout)


def run(line: str) -> Result:
    """Run a command without environment variables, by its command line alone."""
    env = {"FENCEPOST_BOOTSTRAP": None, "FENCEPOST_PROFILE": None}
    done = CliRunner().invoke(main, line.split(), env=env)
    assert "Traceback" not in done.output
    assert done.exception is None or isinstance(done.exception, SystemExit), line
    return done


def test_every_command_is_in_the_tables_of_these_tests() -> None:
    asking = set(ALL) - OFFLINE
    assert {" ".join(path) for path in leaves(main) if "bootstrap" in names(path)} == asking
    assert MISSPELT.keys() | NAMELESS == asking
    assert not MISSPELT.keys() & NAMELESS
    shown = {line for line in asking if line.split()[-1] in SHOW}
    assert shown <= LISTINGS.keys() <= asking


SHOW = {"describe", "get", "history", "info", "list", "members", "offsets", "producers", "blame"}
"""The last words of the names of listing commands."""


def names(path: tuple[str, ...]) -> set[str | None]:
    return {parameter.name for parameter in at(path).params}


@pytest.mark.parametrize("line", LISTINGS)
def test_every_listing_accepts_bootstrap_anywhere_and_prints_json(broker: str, line: str) -> None:
    group, _, rest = line.partition(" ")
    more = f"{rest} {LISTINGS[line]}"
    whole = f"{line} {LISTINGS[line]}"
    told = [
        run(f"--bootstrap {broker} {whole}"),
        run(f"--bootstrap-server {broker} {whole}"),
        run(f"-b nowhere:1 {whole} --bootstrap {broker}"),
        run(f"{whole} --bootstrap-server {broker} --timeout 20s"),
    ]
    if rest:
        told.append(run(f"-b nowhere:1 {group} --bootstrap-server {broker} {more}"))
    assert {result.exit_code for result in told} == {0}, [result.output for result in told]
    as_json = ["--format json"] if line == "consume" else ["--format json", "--json"]
    for option in as_json:
        shown = run(f"{whole} {option} -b {broker}")
        assert (shown.exit_code, shown.stderr) == (0, "")
        for text in shown.stdout.splitlines():
            assert isinstance(json.loads(text), (list, dict))
        assert shown.stdout


@pytest.mark.parametrize(
    "line", [*(f"{key} {value}" for key, value in MISSPELT.items()), *(
        f"{key} {value}" for key, value in MORE.items()
    )]
)  # fmt: skip
def test_misspelt_name_gets_the_nearest_existing_name(broker: str, line: str) -> None:
    asked, _, near = line.partition(" -> ")
    done = run(f"--bootstrap {broker} {asked}")
    assert done.exit_code in {1, 2}
    assert near in done.stderr.partition("Error: ")[2]
    assert not done.stdout


@pytest.mark.parametrize(
    ("line", "near"),
    [
        ("topics lst", "list"),
        ("groups descibe x", "describe"),
        ("groups reset x", "reset-offsets"),
        ("topcs list", "topics"),
        ("acls wy", "why"),
    ],
)
def test_misspelt_subcommand_gets_the_nearest_command(line: str, near: str) -> None:
    done = run(line)
    assert done.exit_code == 2
    assert f"did you mean {near}?" in done.stderr


@pytest.mark.parametrize("line", ["", "topics", "log"])
def test_command_group_without_subcommand_prints_its_help(line: str) -> None:
    done = run(line)
    assert done.output == run(f"{line} --help").stdout
    assert "\n\nCommands:\n  " in done.output


@pytest.mark.parametrize("line", sorted(OFFLINE))
def test_offline_command_refuses_a_preceding_bootstrap_option(line: str) -> None:
    done = run(f"--bootstrap 127.0.0.1:1 {line} x")
    assert (done.exit_code, "does not connect to a broker" in done.stderr) == (2, True)


@pytest.mark.parametrize("line", sorted(set(ALL) - OFFLINE - {"console"}))
def test_no_command_without_a_broker_ends_in_a_traceback(line: str) -> None:
    asked = MISSPELT.get(line, "").partition(" -> ")[0]
    done = run(f"-b 127.0.0.1:1 --timeout 200ms {line} {asked}")
    assert done.exit_code in {2, 3}
    assert "Error: " in done.stderr


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("topics list", "no topics; --internal shows the coordinators' own"),
        ("groups list", "no groups"),
        ("txns list", "no transactional ids"),
        ("users list", "no users"),
        ("quotas list", "no quotas"),
        ("cluster history", "no entries"),
    ],
)
def test_empty_listing_prints_header_and_notes_that_it_is_empty(
    request: pytest.FixtureRequest, empty: str, line: str, says: str
) -> None:
    table = cli(empty, *line.split(), "--timeout", "30s")
    assert table.stderr == f"{says}\n"
    assert len(table.stdout.splitlines()) == 1
    shown = cli(empty, *line.split(), "--json")
    assert (json.loads(shown.stdout), shown.stderr) == ([], "")


@pytest.fixture(scope="module")
def empty(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    with own_broker(request, tmp_path_factory.mktemp("empty")) as started:
        yield started.bootstrap


@pytest.mark.parametrize(
    ("line", "near"),
    [
        ("configs list group shiping", "shipping"),
        ("acls why User:root READ topic:ordrs", "orders"),
        ("acls why User:root READ group:shiping", "shipping"),
    ],
)
def test_misspelt_name_of_optional_resource_gets_a_note(broker: str, line: str, near: str) -> None:
    done = run(f"-b {broker} {line}")
    assert f"did you mean {near}?" in done.stderr.partition("note: ")[2]
    assert done.stdout


def test_consume_of_an_empty_topic_notes_no_records(broker: str) -> None:
    with Cluster(broker) as cluster:
        cluster.create_topic("silent")
    done = cli(broker, "consume", "silent")
    assert (done.stdout, done.stderr) == ("", "silent: no records\n")
    assert cli(broker, "consume", "orders").stderr == ""


def test_acls_why_exit_status_distinguishes_allowed_denied_and_error(
    broker: str, empty: str
) -> None:
    assert "allowed" in cli(broker, "acls", "why", "alice", "READ", "topic:orders").stdout
    denied = cli(broker, "acls", "why", "alice", "WRITE", "topic:orders", status=1)
    assert "denied" in denied.stdout
    cli(empty, "acls", "why", "alice", "READ", "topic:orders", status=5)
    cli(broker, "acls", "why", "alice", "READ", "topic", status=2)
    gone = ("--bootstrap", "127.0.0.1:1", "--timeout", "1")
    cli("", "acls", "why", "alice", "READ", "topic:orders", *gone, status=3)


def test_acls_why_needs_no_right_on_the_named_resource(tmp_path: Path) -> None:
    rules = ["alice DESCRIBE cluster", "bob READ group:shipping"]
    with Kafka(users={"alice": "secret", "bob": "secret"}, acls=rules) as kafka:
        settings = kafka.client_config("alice", "java").items()
        (tmp_path / "alice.properties").write_text("".join(f"{k}={v}\n" for k, v in settings))
        done = cli(
            kafka.bootstrap, "acls", "why", "bob", "READ", "group:shipping",
            "--command-config", str(tmp_path / "alice.properties"),
        )  # fmt: skip
    assert "allowed" in done.stdout


@pytest.mark.parametrize(
    ("written", "value"),
    [("500ms", "500"), ("90s", "90000"), ("1h", "3600000"), ("7d", "604800000"), ("42", "42")],
)
def test_durations_are_settings_and_their_values_in_effect_are_shown(
    broker: str, written: str, value: str
) -> None:
    for line in (f"topics alter orders retention.ms={written}",
                 f"topics alter orders --config retention.ms={written}",
                 f"configs set topic orders retention.ms={written}"):  # fmt: skip
        done = cli(broker, *line.split(), "--execute", "--json")
        (row,) = json.loads(done.stdout)
        assert (row["new"], row["new_source"]) == (value, "topic")
        cli(broker, "topics", "alter", "orders", "--unset", "retention.ms", "--execute")


@pytest.mark.parametrize(
    ("pair", "why"),
    [
        ("log.retention.hours=90m", "90m is not a whole number of hours"),
        ("log.retention.ms=1.5h", "1.5h is not a duration such as 500ms, 90s, 1h30m, 7d"),
        ("log.retention.ms=7x", "7x is not a duration"),
    ],
)
def test_invalid_duration_in_configs_set_is_refused(broker: str, pair: str, why: str) -> None:
    done = cli(broker, "configs", "set", "broker", "all", pair, status=2)
    assert why in done.stderr


def test_configs_set_shows_the_effective_value_of_an_overridden_config(broker: str) -> None:
    weak = cli(
        broker, "configs", "set", "broker", "1", "log.retention.ms=1d", "--execute", "--json"
    )
    assert json.loads(weak.stdout)[0]["new"] == "86400000"
    for scope in ("1", "all"):
        cli(broker, "configs", "unset", "broker", scope, "log.retention.ms", "--execute")


def test_several_groups_are_deleted_at_once_and_leave_no_file(
    broker: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("one", "two"):
        line = f"groups reset-offsets {name} --topic orders --to-earliest --execute --undo {name}"
        cli(broker, *line.split())
    shown = cli(broker, "groups", "delete", "one", "two", "--json")
    assert [row["group"] for row in json.loads(shown.stdout)] == ["one", "two"]
    cli(broker, *["groups", "delete", "one", "tow", "--execute"], status=1)
    assert {"one", "two"} <= groups(broker)
    cli(broker, *["groups", "delete", "one", "two", "--undo", "x", "--execute"], status=2)
    done = cli(broker, *["groups", "delete", "one", "two", "--execute"])
    assert done.stderr == "deleted one\ndeleted two\n"
    assert not {"one", "two"} & groups(broker)
    assert {path.name for path in tmp_path.iterdir()} == {"one", "two"}


def groups(bootstrap: str) -> set[str]:
    listed = json_of(bootstrap, "groups list")
    assert isinstance(listed, list)
    return {row["group"] for row in listed}
