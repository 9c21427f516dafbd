"""The commands on a real terminal, with names and records of hostile clients."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from fencepost.cli import main
from fencepost.logcore.batch import LogRecord, encode_batch
from tests.support.cluster import GROUP, Cluster
from tests.support.daemon import Daemon
from tests.support.quick import only
from tests.support.raw import Answer
from tests.support.targets import SETTINGS
from tests.support.waits import until
from tests.wire.command_line import leaves

EVIL = "\x1b]0;pwn\x07\x1b[31m\x7f\x9b31m\u202e\u2066\u2028\U000e0041\r\nFAKE"
GROUP_ID, TXN, CLIENT, USER = (f"{stem}{EVIL}" for stem in ("grp", "tx", "cli", "usr"))
TOPIC = "t"
RULES = {
    "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
    "super.users": "User:ANONYMOUS",
}

RUN = """
import json, sys
from fencepost.cli import main
for number, arguments in enumerate(json.load(open(sys.argv[1]))):
    print(f"@@{number}", flush=True)
    try:
        main.main(arguments, prog_name="fencepost")
    except SystemExit as end:
        print(f"@={end.code}", flush=True)
"""
"""Runs many commands in one process, because a new process takes longer than most commands."""

OWN_STYLE = re.compile(r"\x1b\[[01]m")
"""The escape sequences of bold table headers."""

JSON = ("--format", "json")
NAMES_NOTHING = {
    ("completion",): "a script without names",
    ("console",): "an address",
    ("crash-sweep",): "points of its own broker",
    ("health",): "an id and a count",
    ("history", "schema"): "a text of its own",
    ("serve",): "the log, tests/unit/coordinator/config/test_logs.py",
}
"""Commands that show no names or texts that clients choose, with the reasons."""


@dataclass(frozen=True)
class Shown:
    """The output of a command on the terminal."""

    arguments: tuple[str, ...]
    status: int
    text: str


BOTH = ((), JSON)
RULE = ("--group", GROUP_ID, "--allow-principal", f"User:{USER}", "--operation", "Read")
READ = (TOPIC, "--isolation", "read_uncommitted")
FORMS = ("text", "table", "json", "raw", "base64", "%t %o %k %s %h\\n")
RUNS: Mapping[tuple[str, ...], Sequence[Sequence[str]]] = {
    ("acls", "add"): [RULE],
    ("acls", "list"): BOTH,
    ("acls", "remove"): [RULE],
    ("acls", "why"): [(f"User:{USER}", "Read", f"Group:{GROUP_ID}"), (EVIL, "Read", EVIL)],
    ("backup", "verify"): [(EVIL,)],
    ("clients", "telemetry"): [*BOTH, ("--client-id", EVIL)],
    ("cluster", "check-restart"): [(EVIL,)],
    ("cluster", "describe"): BOTH,
    ("cluster", "history"): BOTH,
    ("cluster", "info"): BOTH,
    ("cluster", "promote"): [(EVIL, "--controller", EVIL, "--output", EVIL)],
    ("cluster", "stand-alone"): [(EVIL,)],
    ("cluster", "unregister"): [(EVIL,)],
    ("configs", "get"): [("topic", EVIL, EVIL), ("group", GROUP_ID, EVIL)],
    ("configs", "list"): [("topic", EVIL), ("group", GROUP_ID)],
    ("configs", "set"): [("topic", TOPIC, f"{EVIL}={EVIL}"), ("topic", EVIL, "retention.ms=1")],
    ("configs", "unset"): [("topic", TOPIC, EVIL), ("topic", EVIL, "retention.ms")],
    ("consume",): [
        *((*READ, "--format", form) for form in FORMS),
        *(
            (f"__{name}", *form)
            for name in ("consumer_offsets", "transaction_state")
            for form in BOTH
        ),
        ("__fencepost_history",),
        (EVIL,),
    ],
    ("doctor",): [("--topic", TOPIC), ("--group", EVIL)],
    ("features", "describe"): BOTH,
    ("features", "set"): [(f"{EVIL}=1",)],
    ("groups", "blame"): [(GROUP_ID,), (EVIL,)],
    ("groups", "delete"): [(GROUP_ID,), (EVIL,)],
    ("groups", "delete-offsets"): [(GROUP_ID, "--topic", EVIL), (EVIL, "--topic", TOPIC)],
    ("groups", "describe"): [(GROUP_ID,), (GROUP_ID, *JSON), ("--all",), (EVIL,)],
    ("groups", "history"): [(GROUP_ID,), (GROUP_ID, *JSON), (EVIL,)],
    ("groups", "list"): BOTH,
    ("groups", "members"): [(GROUP_ID,), (GROUP_ID, *JSON)],
    ("groups", "offsets"): [(GROUP_ID,), (GROUP_ID, *JSON)],
    ("groups", "plan"): [(GROUP_ID,), (GROUP_ID, "--assignor", EVIL)],
    ("groups", "reset-offsets"): [(GROUP_ID, "--to-earliest"), (EVIL, "--to-earliest")],
    ("history", "export"): [
        ("--webhook", EVIL),
        *(("--webhook", "http://127.0.0.1:1", option, EVIL) for option in ("--scopes", "--kinds")),
    ],
    ("log", "rebuild-index"): [(EVIL,)],
    ("log", "truncate"): [(EVIL, "--to-offset", "0")],
    ("log", "verify"): [(EVIL,)],
    ("profile", "create"): [(EVIL, "--config", EVIL), (EVIL, "--from", EVIL)],
    ("profile", "delete"): [(EVIL,)],
    ("profile", "list"): BOTH,
    ("profile", "show"): [(EVIL,)],
    ("profile", "use"): [(EVIL,)],
    ("produce",): [(EVIL,), (TOPIC, "--key", EVIL, "--header", EVIL)],
    ("quotas", "list"): BOTH,
    ("quotas", "remove"): [("--user", USER, key) for key in ("producer_byte_rate", EVIL)],
    ("quotas", "set"): [("--user", USER, f"{key}=1") for key in ("producer_byte_rate", EVIL)],
    ("quotas", "why"): [("--user", USER), ("--user", USER, *JSON)],
    ("record",): [(name, "--out", f"{EVIL}.json") for name in (GROUP_ID, EVIL)],
    ("topics", "add-partitions"): [(EVIL, "--to", "2")],
    ("topics", "alter"): [(EVIL, "--config", f"{EVIL}={EVIL}"), (TOPIC, "--config", EVIL)],
    ("topics", "create"): [(EVIL,), ("x", "--config", f"{EVIL}=1")],
    ("topics", "delete"): [(EVIL,)],
    ("topics", "describe"): [(TOPIC,), (EVIL,)],
    ("topics", "elect"): [(EVIL,), (f"{EVIL}:0",)],
    ("topics", "history"): [(TOPIC,), (EVIL,)],
    ("topics", "list"): BOTH,
    ("topics", "reassign"): [(EVIL, "--to-brokers", "0"), ("--file", EVIL)],
    ("topics", "trim"): [(EVIL, "--to-offset", "1")],
    ("txns", "abort"): [(f"{EVIL}:0", "--start-offset", "0"), (EVIL, "--producer-id", "0")],
    ("txns", "blame"): [(TOPIC,), (TOPIC, *JSON), (EVIL,)],
    ("txns", "describe"): [(TXN,), (TXN, *JSON), (EVIL,)],
    ("txns", "find-hanging"): BOTH,
    ("txns", "history"): [(TXN,), (TXN, *JSON), (EVIL,)],
    ("txns", "list"): BOTH,
    ("txns", "producers"): [(TOPIC,), (TOPIC, *JSON)],
    ("txns", "resolve"): [
        *((TXN, *more) for more in ((), JSON, ("--producer-id", "0", "--epoch", "0"))),
        *((EVIL, *more) for more in ((), ("--producer-id", "0", "--epoch", "0"))),
        ("--from-checkpoint", EVIL),
    ],
    ("txns", "terminate"): [(TXN,), (EVIL,)],
    ("users", "add"): [(EVIL, "--password-file", EVIL)],
    ("users", "list"): BOTH,
    ("users", "passwd"): [(EVIL, "--password-file", EVIL)],
    ("users", "remove"): [(EVIL,)],
}
"""Commands that show a name or text that a client has chosen, with suitable arguments."""


def on_files(data: Path, tmp: Path) -> Mapping[tuple[str, ...], Sequence[Sequence[str]]]:
    """Return the commands that show clients' texts from the files of a broker."""
    log = str(data / f"{TOPIC}-0" / f"{0:020}.log")
    other = ("--data-dir", str(tmp / EVIL))
    return {
        ("backup", "create"): [(str(tmp / EVIL), "--data-dir", str(tmp / EVIL))],
        ("backup", "restore"): [(str(tmp / EVIL), "--data-dir", str(tmp / EVIL))],
        ("dump-log",): [(log, "--records"), (log, "--records", *JSON), (EVIL,)],
        ("log", "export"): [(EVIL, *other, "--to", str(tmp))],
        ("log", "reset-producer-ids"): [other],
        ("log", "import"): [(str(data / f"{TOPIC}-0"), *other, "--topic", EVIL)],
    }


def join(client: Cluster) -> None:
    """Join a member to :data:`GROUP_ID` with only hostile texts, and commit an offset."""
    client.coordinator(GROUP_ID, GROUP)
    member = ""

    def probe() -> Answer | None:
        nonlocal member
        answer = client.call(
            "join_group",
            5,
            group_id=GROUP_ID,
            session_timeout=60_000,
            rebalance_timeout=60_000,
            member_id=member,
            group_instance_id=f"inst{EVIL}",
            protocol_type="consumer",
            protocols=[{"name": f"range{EVIL}", "metadata": b""}],
        )
        member = answer["member_id"]
        return answer if answer["error_code"] == "none" else None

    joined = until(probe, "joined")
    here = {"group_id": GROUP_ID, "member_id": member, "group_instance_id": f"inst{EVIL}"}
    synced = client.call(
        "sync_group",
        3,
        **here,
        generation_id=joined["generation_id"],
        assignments=[{"member_id": member, "assignment": b""}],
    )
    assert synced["error_code"] == "none", synced
    client.call(
        "offset_commit",
        7,
        group_id=GROUP_ID,
        generation_id_or_member_epoch=joined["generation_id"],
        member_id=member,
        group_instance_id=f"inst{EVIL}",
        topics=[
            {
                "name": TOPIC,
                "partitions": [
                    {
                        "partition_index": 0,
                        "committed_offset": 1,
                        "committed_leader_epoch": -1,
                        "committed_metadata": f"md{EVIL}",
                    }
                ],
            }
        ],
    )


def transact(client: Cluster) -> None:
    """Leave a transaction of :data:`TXN` open, with records that have only hostile texts."""
    evil = EVIL.encode()
    producer_id, epoch = client.init_producer(TXN)
    added = client.call(
        "add_partitions_to_txn",
        3,
        v3_and_below_transactional_id=TXN,
        v3_and_below_producer_id=producer_id,
        v3_and_below_producer_epoch=epoch,
        v3_and_below_topics=[{"name": TOPIC, "partitions": [0]}],
    )
    assert added["results_by_topic_v3_and_below"], added
    headers = ((f"h{EVIL}", evil), (EVIL, None))
    now = time.time_ns() // 1_000_000
    records = [
        LogRecord(0, now, b"k" + evil, b"v" + evil, headers),
        LogRecord(1, now, None, b"\xff\xfe\x1b[2J" + evil, ()),
        LogRecord(2, now, evil, None, ()),
    ]
    data = encode_batch(
        records,
        producer_id=producer_id,
        producer_epoch=epoch,
        base_sequence=0,
        transactional=True,
    )
    assert client.produce(TOPIC, data, transactional_id=TXN)["error_code"] == "none"


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    data = tmp_path_factory.mktemp("terminal") / "data"
    daemon = Daemon(data, {**SETTINGS, **RULES}).start()
    with Cluster(daemon.bootstrap, client_id=CLIENT) as client:
        client.create_topic(TOPIC)
        join(client)
        transact(client)
        client.call(
            "alter_client_quotas",
            1,
            entries=[
                {
                    "entity": [{"entity_type": "user", "entity_name": USER}],
                    "ops": [{"key": "producer_byte_rate", "value": 1e9, "remove": False}],
                }
            ],
            validate_only=False,
        )
        client.call(
            "create_acls",
            2,
            creations=[
                {
                    "resource_type": 3,
                    "resource_name": GROUP_ID,
                    "resource_pattern_type": 3,
                    "principal": f"User:{USER}",
                    "host": "*",
                    "operation": 3,
                    "permission_type": 3,
                }
            ],
        )
        yield daemon
    daemon.stop()


def on_terminal(bootstrap: str, commands: Sequence[Sequence[str]], tmp: Path) -> list[Shown]:
    """Run ``commands`` with standard output and standard error on one pseudo-terminal."""
    told = tmp / "commands.json"
    told.write_text(json.dumps(commands))
    ours, theirs = pty.openpty()
    profiles = tmp / "profiles.toml"
    name = "".join(f"\\U{ord(character):08x}" for character in EVIL)
    profiles.write_text(f'["{name}"]\nbootstrap = "{name}"\n')
    environment = {
        **os.environ,
        "FENCEPOST_BOOTSTRAP": bootstrap,
        "FENCEPOST_PROFILES": str(profiles),
        "TERM": "xterm",
    }
    with subprocess.Popen(
        [sys.executable, "-c", RUN, str(told)],
        stdin=subprocess.DEVNULL,
        stdout=theirs,
        stderr=theirs,
        env=environment,
    ) as child:
        os.close(theirs)
        text = b""
        # On Linux, reading from a pseudo-terminal whose other side is closed raises OSError.
        with contextlib.suppress(OSError):
            while piece := os.read(ours, 65_536):
                text += piece
        assert child.wait() == 0, text[-2000:]
    os.close(ours)
    parts = re.split(rb"^@@\d+\r\n", text, flags=re.MULTILINE)[1:]
    shown = []
    for arguments, part in zip(commands, parts, strict=True):
        body, _, status = part.rpartition(b"@=")
        # The terminal driver writes a line feed as CR LF.
        plain = OWN_STYLE.sub("", body.decode().replace("\r\n", "\n"))
        shown.append(Shown(tuple(arguments), int(status), plain))
    return shown


def test_every_command_that_prints_names_is_tested(tmp_path: Path) -> None:
    tried = {*RUNS, *on_files(tmp_path, tmp_path)}
    assert tried | {*NAMES_NOTHING} == {*leaves(main)}
    assert not tried & {*NAMES_NOTHING}


def test_terminal_gets_no_control_character_of_a_client(broker: Daemon, tmp_path: Path) -> None:
    asked = {**RUNS, **on_files(broker.data_dir, tmp_path)}
    commands = [[*path, *arguments] for path, runs in asked.items() for arguments in runs]
    shown = on_terminal(broker.bootstrap, commands, tmp_path)
    for screen in shown:
        for line in screen.text.split("\n"):
            assert line.isprintable(), (screen.arguments, line)
            assert not line.startswith("FAKE"), screen
        assert "Traceback" not in screen.text, screen
    named = {screen.arguments[:2] for screen in shown if "0;pwn" in screen.text}
    # Most commands must show a hostile name, because otherwise the test would prove nothing.
    silent = {path for path in asked if not {name for name in named if name[: len(path)] == path}}
    assert silent <= {
        ("cluster", "describe"),
        ("cluster", "history"),
        ("cluster", "info"),
        ("features", "describe"),
        ("log", "reset-producer-ids"),
        ("topics", "list"),
        ("txns", "find-hanging"),
        ("txns", "producers"),
        ("users", "list"),
    }, silent


def test_group_history_fits_the_terminal_unless_asked_to_be_wide(
    broker: Daemon, tmp_path: Path
) -> None:
    command = ["groups", "history", GROUP_ID]
    usual, wide = on_terminal(broker.bootstrap, [command, [*command, "--wide"]], tmp_path)
    lines = usual.text.splitlines()
    assert lines
    assert max(map(len, lines)) <= 80
    heads = wide.text.splitlines()[0].split()
    assert heads[:4] == ["TIME", "WHAT", "CHANGE", "WHY"]
    assert max(map(len, wide.text.splitlines())) > 80


def test_json_of_every_listing_is_valid_on_a_terminal(broker: Daemon, tmp_path: Path) -> None:
    commands = [
        ["groups", "list", *JSON],
        ["groups", "members", GROUP_ID, *JSON],
        ["groups", "history", GROUP_ID, *JSON],
        ["txns", "list", *JSON],
        ["quotas", "list", *JSON],
    ]
    found = [
        json.loads(screen.text) for screen in on_terminal(broker.bootstrap, commands, tmp_path)
    ]
    assert [row["group"] for row in found[0]] == [GROUP_ID]
    assert [row["transactional_id"] for row in found[3]] == [TXN]
    assert CLIENT in {row["client"] for row in found[2]}


@pytest.mark.parametrize("form", only(("raw", "%s\\n", "text"), "text"))
def test_control_characters_reach_a_pipe_unchanged(broker: Daemon, form: str) -> None:
    done = subprocess.run(
        [
            *(sys.executable, "-m", "fencepost", "consume", TOPIC, "--format", form),
            *("--isolation", "read_uncommitted", "-n", "1", "--bootstrap", broker.bootstrap),
        ],
        capture_output=True,
        check=True,
    )
    assert done.stdout == b"v" + EVIL.encode() + b"\n"
