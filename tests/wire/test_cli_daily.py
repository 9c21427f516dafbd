"""Common features of all commands: times, profiles, exit statuses, shell completion."""

from __future__ import annotations

import json
import os
import shlex
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from fencepost.cli import COMMANDS, output
from fencepost.cli.output import EXIT_CODES
from fencepost.testing import replay
from tests.support.cluster import unique
from tests.support.processes import Child
from tests.support.waits import until
from tests.wire.clients import confluent_producer
from tests.wire.command_line import cli

GONE = "127.0.0.1:1"
MAIN = (
    sys.executable,
    "-c",
    "from fencepost.cli import main; main(prog_name='fencepost')",
)


@pytest.fixture
def topic(cluster):
    return cluster.create_topic(unique("daily"), 2)


SAMPLE = (
    ("topics", "list"),
    ("topics", "describe", "t"),
    ("groups", "list"),
    ("groups", "describe", "g"),
    ("groups", "reset-offsets", "g", "--all-topics", "--to-earliest"),
    ("txns", "list"),
    ("txns", "blame", "t"),
    ("txns", "history", "t"),
    ("features", "describe"),
    ("produce", "t"),
    ("consume", "t"),
)
"""A command of each kind."""


@pytest.mark.parametrize("arguments", SAMPLE, ids=" ".join)
def test_unreachable_broker_is_one_line_and_status_3(arguments):
    done = cli(GONE, *arguments, "--timeout", "0.2", stdin="x\n", status=3)
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith("Error: 127.0.0.1:1: ")


def test_unreachable_default_broker_gets_a_hint_how_to_start_one(monkeypatch, tmp_path):
    monkeypatch.setattr(output, "DEFAULT_BOOTSTRAP", GONE)
    hint = "\nhint: `fencepost serve` starts one there; --bootstrap names another\n"
    asked = ("topics", "list", "--timeout", "0.2")
    nothing = {"FENCEPOST_BOOTSTRAP": None}
    assert cli(GONE, *asked, status=3, **nothing).stderr.endswith(hint)
    assert "hint" not in cli(GONE, *asked, "--bootstrap", GONE, status=3, **nothing).stderr
    profiles = tmp_path / "profiles.toml"
    profiles.write_text(f'[here]\nbootstrap = "{GONE}"\n')
    named = {**nothing, "FENCEPOST_PROFILES": str(profiles), "FENCEPOST_PROFILE": "here"}
    assert "hint" not in cli(GONE, *asked, status=3, **named).stderr


@pytest.mark.parametrize("arguments", [("topics", "list"), ("consume", "t"), ("groups", "list")])
def test_unresponsive_broker_is_one_line_and_status_3(arguments):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        done = cli(address, *arguments, "--timeout", "0.3", status=3)
    assert done.stderr.startswith(f"Error: {address}: ")
    assert done.stderr.count("\n") == 1


def test_consume_ends_quietly_when_its_reader_closes_the_pipe(bootstrap, cluster, topic):
    for _ in range(20):
        cluster.produce(topic, [b"x" * 100_000] * 4)
    line = f"{shlex.join(MAIN)} consume {topic} -b {bootstrap} | head -c 10"
    done = subprocess.run(
        ["bash", "-c", line], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.stdout, done.stderr) == ("x" * 10, "")


def test_profile_list_ends_quietly_when_its_reader_closes_the_pipe(tmp_path):
    path = tmp_path / "profiles.toml"
    path.write_text("".join(f'[p{number}]\nbootstrap = "h:9092"\n' for number in range(5_000)))
    line = f"{shlex.join(MAIN)} profile list --json | true"
    env = {**os.environ, "FENCEPOST_PROFILES": str(path)}
    done = subprocess.run(
        ["bash", "-c", line], capture_output=True, text=True, timeout=60, check=False, env=env
    )
    assert (done.stdout, done.stderr) == ("", "")


@pytest.mark.parametrize(
    "arguments",
    [
        ("topics", "describe", "T"),
        ("txns", "blame", "T"),
        ("txns", "producers", "T"),
        ("txns", "describe", "T"),
        ("txns", "history", "T"),
        ("groups", "history", "T"),
        ("groups", "offsets", "T"),
        ("groups", "reset-offsets", "T", "--topic", "T", "--to-earliest"),
        ("groups", "describe", "T"),
        ("groups", "delete", "T"),
        ("produce", "T"),
        ("consume", "T"),
    ],
    ids=" ".join,
)
def test_nonexistent_name_is_one_line_and_status_1(bootstrap, arguments):
    name = unique("none")
    named = [name if argument == "T" else argument for argument in arguments]
    done = cli(bootstrap, *named, stdin="x\n", status=1)
    assert done.stdout == ""
    assert done.stderr.startswith("Error: ")
    assert done.stderr.count("\n") == 1
    assert name in done.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ("consume", "t", "--from", "soon"),
        ("consume", "t", "--until", "soon"),
        ("groups", "history", "g", "--since", "soon"),
        ("groups", "history", "g", "--until", "soon"),
        ("txns", "history", "t", "--from", "soon"),
    ],
    ids=" ".join,
)
def test_invalid_time_is_status_2_and_shows_valid_forms(bootstrap, arguments):
    done = cli(bootstrap, *arguments, status=2)
    assert "'soon' is no" in done.stderr
    assert "a time is 02:13, -10m" in done.stderr
    assert "isoformat" not in done.stderr


@pytest.mark.parametrize("verb", [("reset-offsets", "--to-earliest"), ("delete-offsets",)])
def test_all_topics_of_a_mistyped_group_are_an_error(bootstrap, verb):
    command, *options = verb
    asked = ("groups", command, unique("none"), "--all-topics", *options)
    assert "does not exist, or has no" in cli(bootstrap, *asked, status=1).stderr


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (
            ("txns", "list", "--state", "open"),
            "unknown transaction state open; the names are Empty, O",
        ),
        (("groups", "list", "--state", "idle"), "unknown group state idle; the names are"),
        (("groups", "list", "--type", "new"), "unknown group type new; the names are"),
    ],
    ids=str,
)
def test_unknown_state_filter_is_refused_with_the_known_ones(bootstrap, arguments, told):
    assert told in cli(bootstrap, *arguments, status=2).stderr
    name = {"open": "ongoing", "idle": "EMPTY", "new": "Classic"}[arguments[-1]]
    cli(bootstrap, *arguments[:-1], name)


def test_history_range_accepts_times_of_every_form(bootstrap, topic, target):
    name = unique("timed")
    cli(bootstrap, "produce", topic, "--transactional-id", name, stdin="a\n")

    def told(*options: str) -> list[dict[str, object]]:
        done = cli(bootstrap, "txns", "history", name, *options, "--format", "json")
        return json.loads(done.stdout)

    # Apache Kafka keeps no history.
    everything = until(told, "history") if target.name == "fencepost" else []
    for since in ("-10m", "yesterday", "2020-01-01", "@1577836800000", "1577836800000"):
        assert told("--since", since) == everything
    for end in ("yesterday 00:00", "-1h", "2020-01-01T00:00+01:00"):
        assert told("--until", end) == []
    for since in ("2999-01-01", "latest"):
        assert told("--since", since) == []


def test_record_without_requests_names_the_reason(bootstrap, topic, target, tmp_path):
    name = unique("recorded")
    cli(bootstrap, "produce", topic, "--transactional-id", name, stdin="a\n")
    told = cli(bootstrap, "record", name, "--out", str(tmp_path / "incident.json"), status=1)
    if target.name == "fencepost":
        assert "set fencepost.history.requests.enable=true before the incident" in told.stderr
    else:
        assert "the brokers keep no history: they are Apache Kafka's" in told.stderr
    assert not list(tmp_path.iterdir())


def test_record_follows_and_restores_the_setting(bootstrap, topic, target, tmp_path):
    out = tmp_path / "incident.json"
    name = unique("recorded")
    words = ("record", name, "--out", str(out), "--follow", "--seconds", "0")
    if target.name != "fencepost":
        assert "the brokers keep no history" in cli(bootstrap, *words, status=1).stderr
        return
    assert "has no requests of" in cli(bootstrap, *words, status=1).stderr
    follower = Child([sys.executable, "-m", "fencepost", *words[:-2], "-b", bootstrap])
    try:
        follower.wait_for_line("recording", deadline_s=60)
        cli(bootstrap, "produce", topic, "--transactional-id", name, stdin="a\n")
        os.kill(follower.pid, signal.SIGINT)
        follower.wait_for_line(r"incident\.json: \d+ requests?, \d+ cause", deadline_s=60)
    finally:
        follower.kill()
    assert replay(out).failures == []
    key = "fencepost.history.requests.enable"
    shown = cli(bootstrap, "configs", "get", "broker", "1", key, "--format", "json").stdout
    assert json.loads(shown)[0]["value"] == "false"


def test_blame_names_the_client_of_a_transaction_without_a_group(bootstrap, topic, target):
    name = unique("lonely")
    with confluent_producer(bootstrap, transactional_id=name, client_id="the-job") as producer:
        producer.init_transactions(60)
        producer.begin_transaction()
        producer.produce(topic, b"open", partition=1)
        producer.flush(60)
        asked = ("txns", "blame", f"{topic}:1", "--format", "json")
        # The history is written in the background; Apache Kafka keeps none.
        client = ["the-job@127.0.0.1"] if target.name == "fencepost" else []
        row = until(
            lambda: next(
                (
                    row
                    for row in json.loads(cli(bootstrap, *asked).stdout)
                    if row["client"] == client
                ),
                None,
            ),
            "the client's name",
        )
        producer.abort_transaction(60)
    assert row["transactional_id"] == name


# --- profiles ---


@pytest.fixture
def profiles(tmp_path, bootstrap):
    file = tmp_path / "profiles.toml"
    file.write_text(
        f'[here]\nbootstrap = "{bootstrap}"\n'
        f'[gone]\nbootstrap = "{GONE}"\ntimeout = 0.5\nsecurity.protocol = "PLAINTEXT"\n'
        "[nothing]\n"
    )
    return str(file)


@pytest.mark.parametrize(
    ("options", "env", "status"),
    [
        # The order of precedence: option, environment, profile, default.
        (("--profile", "here"), {}, 0),
        (("--profile", "gone"), {}, 3),
        ((), {"FENCEPOST_PROFILE": "gone"}, 3),
        (("--profile", "here"), {"FENCEPOST_PROFILE": "gone"}, 0),
        (("--profile", "gone"), {"FENCEPOST_BOOTSTRAP": "HERE"}, 0),
        (("--profile", "here"), {"FENCEPOST_BOOTSTRAP": GONE}, 3),
        (("--profile", "here", "--bootstrap", GONE), {}, 3),
        (("--profile", "gone", "--bootstrap", "HERE"), {"FENCEPOST_BOOTSTRAP": GONE}, 0),
        (("--profile", "nothing", "--bootstrap", "HERE"), {}, 0),
    ],
)
def test_bootstrap_option_precedes_environment_and_profile(
    bootstrap, profiles, options, env, status
):
    told = [bootstrap if option == "HERE" else option for option in options]
    given = {key: bootstrap if value == "HERE" else value for key, value in env.items()}
    given = {"FENCEPOST_BOOTSTRAP": None, "FENCEPOST_PROFILES": profiles, **given}
    done = cli(bootstrap, "topics", "list", *told, status=status, **given)
    is_crossed = given["FENCEPOST_BOOTSTRAP"] is not None and "--bootstrap" not in options
    assert ("takes precedence over --profile" in done.stderr) == (is_crossed and options != ())


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[a]\nbootstrp = 'x:1'", "unknown key bootstrp; the keys are bootstrap, timeout"),
        ("[a]\nsasl.mechanism = 'PLAIN'", "security.protocol: it is not set"),
        ("[a]\nsecurity.protocol = 'TLS'", "security.protocol: it must be one of PLAINTEXT, SSL"),
        ("[a]\nsasl.mechansim = 'PLAIN'", "did you mean sasl.mechanism?"),
        ("[a]\nsasl.password = 2020-01-01", "sasl.password must be a string"),
        ("[a]\nbootstrap = 9092", "bootstrap must be a string"),
        ("[a]\ntimeout = 0", "timeout must be a number"),
        ("[a]\ntimeout = true", "timeout must be a number"),
        ("[a]\nbootstrap = 'x:y'", "not host:port: 'x:y'"),
        ("[b]\n[c]\n", "no profile 'a'; the profiles are b, c"),
        ("[a", "is not valid TOML"),
        (None, "cannot be read"),
    ],
)
def test_unusable_profile_is_status_2_and_named(tmp_path, text, says):
    file = tmp_path / "profiles.toml"
    if text is not None:
        file.write_text(text)
    told = {"FENCEPOST_BOOTSTRAP": None, "FENCEPOST_PROFILES": str(file)}
    done = cli("", "topics", "list", "--profile", "a", status=2, **told)
    assert says in done.stderr
    if "x:y" not in says:
        assert str(file) in done.stderr


def test_profiles_are_found_in_the_users_config_directory(tmp_path, bootstrap):
    for env, base in (("XDG_CONFIG_HOME", tmp_path / "xdg"), ("HOME", tmp_path / "home/.config")):
        file = base / "fencepost" / "profiles.toml"
        file.parent.mkdir(parents=True)
        file.write_text(f'[here]\nbootstrap = "{bootstrap}"\n')
        told = {"FENCEPOST_BOOTSTRAP": None, "FENCEPOST_PROFILES": None, "XDG_CONFIG_HOME": None}
        told[env] = str(tmp_path / env.replace("XDG_CONFIG_HOME", "xdg").replace("HOME", "home"))
        cli("", "topics", "list", "--profile", "here", **told)


# --- help, version, shells ---


def test_help_lists_exit_statuses_and_every_command():
    told = " ".join(cli("", "--help").stdout.split())
    for code, text in EXIT_CODES.items():
        assert f"{code} {text}" in told
    for name, text in COMMANDS.items():
        assert f"{name} {text}" in told
        assert "\\b" not in cli("", name, "--help").stdout
    assert cli("", "--version").stdout.startswith("fencepost, version ")


def completions(words: str, cwd: Path) -> list[str]:
    """Return bash's completions after ``words``, by running the completion script."""
    program = cwd / "fencepost"
    program.write_text(f'#!/bin/sh\nexec {shlex.join(MAIN)} "$@"\n')
    program.chmod(0o755)
    script = (
        'eval "$(fencepost completion bash)" || exit 9\n'
        f"COMP_WORDS=({words} '') COMP_CWORD={len(words.split())}\n"
        '_fencepost_completion fencepost; printf "%s\\n" "${COMPREPLY[@]}"'
    )
    env = {**os.environ, "PATH": f"{cwd}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", "-c", script], capture_output=True, text=True, timeout=60, check=False, env=env
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_bash_completes_commands_and_options(tmp_path):
    assert completions("fencepost", tmp_path) == sorted(COMMANDS)
    assert "reset-offsets" in completions("fencepost groups", tmp_path)
    assert "read_committed" in completions("fencepost consume t --isolation", tmp_path)


@pytest.mark.parametrize(("shell", "says"), [("zsh", "#compdef fencepost"), ("fish", "complete ")])
def test_completion_prints_a_script_for_each_supported_shell(shell, says):
    assert says in cli("", "completion", shell).stdout
    cli("", "completion", "tcsh", status=2)
