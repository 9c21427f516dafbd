"""Files with client settings, as properties and as TOML, and profiles in them."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from click.testing import CliRunner

from fencepost.cli import main
from fencepost.cli.profiles import ProfileError, read_profile, read_settings

SECRET = "hunter2"

PROPERTIES = f"""
# as Kafka's tools take it
bootstrap.servers=127.0.0.1:1
default.api.timeout.ms=200
acks=all
security.protocol=SASL_SSL
sasl.mechanism=SCRAM-SHA-512
sasl.jaas.config=org.apache.kafka.common.security.scram.ScramLoginModule required \\
  username="alice" password="{SECRET}";
ssl.truststore.location=ca.pem
ssl.endpoint.identification.algorithm=
"""

TOML = f"""
security.protocol = "SASL_SSL"
sasl.mechanism = "SCRAM-SHA-512"
sasl.username = "alice"
sasl.password = "{SECRET}"
ssl.truststore.location = "ca.pem"
ssl.endpoint.identification.algorithm = ""
ssl.enabled.protocols = ["TLSv1.2", "TLSv1.3"]
enable.ssl.certificate.verification = true
"""


@pytest.fixture(autouse=True)
def nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("FENCEPOST_")]:
        monkeypatch.delenv(name)


def write(path: Path, text: str, mode: int = 0o600) -> Path:
    path.touch(mode=mode)
    path.chmod(mode)
    path.write_text(text)
    return path


def test_properties_toml_and_profile_give_the_same_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = read_settings(write(tmp_path / "client.properties", PROPERTIES))
    toml = read_settings(write(tmp_path / "client.toml", TOML))
    named = f'[safe]\nbootstrap = "127.0.0.1:1"\ntimeout = 0.2\n{TOML}'
    monkeypatch.setenv("FENCEPOST_PROFILES", str(write(tmp_path / "profiles.toml", named)))
    profile = read_profile("safe")
    assert file == profile
    assert (toml.security, toml.bootstrap) == (file.security, None)
    assert file.security is not None
    assert (file.security.username, file.security.password) == ("alice", SECRET)
    assert (file.bootstrap, file.timeout_s, file.is_open) == ("127.0.0.1:1", 0.2, False)


@pytest.mark.parametrize(
    ("name", "text", "complaint"),
    [
        ("a.properties", "security.protocol=SASL_SSL", "GSSAPI"),
        ("a.properties", f"sasl.password={SECRET}", "security.protocol: it is not set"),
        ("a.properties", "security.protocol=\\u12", "neither TOML nor"),
        ("a.properties", "default.api.timeout.ms=soon", "number of milliseconds"),
        ("a.toml", f'ssl.key = "{SECRET}', "neither TOML nor"),
        ("a.toml", f'ssl.key = "{SECRET}"\nsecurity.protocol = "SSL"', "ssl.key: unknown client"),
        ("a.toml", 'security.protocol = ["SSL", 1]', "security.protocol: expected text"),
    ],
)
def test_invalid_settings_file_is_refused_without_showing_secrets(
    tmp_path: Path, name: str, text: str, complaint: str
) -> None:
    path = write(tmp_path / name, text)
    with pytest.raises(ProfileError, match=complaint) as refused:
        read_settings(path)
    assert str(path) in str(refused.value)
    assert SECRET not in str(refused.value)


def test_missing_or_too_large_settings_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match="cannot be read: No such file"):
        read_settings(tmp_path / "none")
    with pytest.raises(ProfileError, match="more than 1048576 bytes"):
        read_settings(write(tmp_path / "large", "a" * (1 << 20) + "b"))
    assert read_settings(write(tmp_path / "full", "#" * (1 << 20))).security is None


@pytest.mark.parametrize(
    ("mode", "text", "is_told"),
    [
        (0o600, PROPERTIES, False),
        (0o640, PROPERTIES, True),
        (0o604, PROPERTIES, True),
        (0o644, "security.protocol=SSL", False),
    ],
)
def test_settings_file_with_secret_that_others_can_read_gives_warning(
    tmp_path: Path, mode: int, text: str, *, is_told: bool
) -> None:
    path = write(tmp_path / "client.properties", text, mode)
    path.write_text(text.replace("ssl.truststore.location=ca.pem\n", ""))
    told = ("topics", "list", "--command-config", str(path), "--timeout", "0.2")
    done = CliRunner().invoke(main, (*told, "--bootstrap", "127.0.0.1:1"))
    assert done.exit_code == 3, done.output
    assert (f"others can read {path}" in done.stderr) == is_told
    assert ("algorithm is empty" in done.stderr) == ("algorithm" in text)
    assert SECRET not in done.output


# --- the commands ---------------------------------------------------------------------------------


@pytest.fixture
def profiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "own" / "profiles.toml"
    monkeypatch.setenv("FENCEPOST_PROFILES", str(path))
    return path


def run(*words: str, status: int = 0, stdin: str = "") -> str:
    done = CliRunner().invoke(main, ["profile", *words], input=stdin)
    assert done.exit_code == status, done.output
    assert SECRET not in done.output
    return done.output


def create(name: str, *words: str) -> None:
    login = ("sasl.mechanism=PLAIN", "security.protocol=SASL_SSL", "sasl.username=alice")
    options = [word for pair in login for word in ("--config", pair)]
    run("create", name, *options, "--secret", "sasl.password", *words, stdin=f"{SECRET}\n")


def test_created_profile_is_read_back_and_hides_its_secret(profiles: Path) -> None:
    create("staging", "-b", "k:9092", "--timeout", "2.5")
    found = read_profile("staging")
    assert (found.bootstrap, found.timeout_s, found.is_open) == ("k:9092", 2.5, False)
    assert found.security is not None
    assert profiles.stat().st_mode & 0o777 == 0o600
    assert profiles.parent.stat().st_mode & 0o777 == 0o700
    shown = json.loads(run("show", "staging", "--json"))
    assert {"key": "sasl.password", "value": "(hidden)"} in shown
    assert {"key": "sasl.username", "value": "alice"} in shown
    assert "alice" not in run("list")


def test_profile_from_kafkas_properties_file_has_its_settings(
    profiles: Path, tmp_path: Path
) -> None:
    file = write(tmp_path / "client.properties", PROPERTIES)
    run("create", "kafka", "--from", str(file))
    assert read_profile("kafka").security == read_settings(file).security
    assert read_profile("kafka").bootstrap == "127.0.0.1:1"


def test_current_profile_applies_unless_the_command_overrides_it(profiles: Path) -> None:
    run("create", "dead", "-b", "127.0.0.1:1", "--timeout", "0.2")
    run("create", "other", "-b", "127.0.0.1:2", "--timeout", "0.2")
    assert "no profile is in use" in run("show", status=1)
    for name, port in (("dead", 1), ("other", 2)):
        run("use", name)
        done = CliRunner().invoke(main, ["topics", "list"])
        assert (done.exit_code, f"127.0.0.1:{port}:" in done.output) == (3, True)
    assert [row["current"] for row in json.loads(run("list", "--json"))] == [False, True]
    for words in (["--profile", "dead"], ["--bootstrap", "127.0.0.1:1", "--timeout", "0.2"]):
        done = CliRunner().invoke(main, ["topics", "list", *words])
        assert "127.0.0.1:1:" in done.output
    run("delete", "other", "--execute")
    assert "no profile is in use" in run("show", status=1)


def test_profile_changes_keep_the_rest_of_the_file(profiles: Path) -> None:
    profiles.parent.mkdir()
    write(
        profiles,
        "# mine\n[a]  # first\nbootstrap = 'a:1'\n\n[b]\nssl.protocol = 'TLSv1.3'\n",
        0o644,
    )
    run("create", "c", "-b", "c:1")
    run("use", "b")
    assert profiles.read_text().startswith('current = "b"\n# mine\n[a]  # first\n')
    assert profiles.stat().st_mode & 0o777 == 0o600
    run("create", "b", "-b", "b:1", status=1)
    run("create", "b", "-b", "b:1", "--replace")
    assert "nothing was changed" in run("delete", "a")
    run("delete", "a", "--execute")
    assert [row["profile"] for row in json.loads(run("list", "--json"))] == ["b", "c"]
    assert read_profile("b").bootstrap == "b:1"


@pytest.mark.parametrize(
    ("words", "status", "reason"),
    [
        (("create", "x"), 2, "a profile needs settings"),
        (("create", "x y", "-b", "a:1"), 1, "cannot name a profile"),
        (("create", "current", "-b", "a:1"), 1, "cannot name a profile"),
        (("create", "x", "--config", "acks=all"), 1, "unknown key acks"),
        (("create", "x", "--config", "sasl.password=x"), 2, "use --secret sasl.password"),
        (("create", "x", "--secret", "sasl.password"), 1, "standard input has no line"),
        (("create", "x", "--config", "security.protocol=TLS"), 1, "security.protocol"),
        (("use", "nope"), 1, "has no profile 'nope'"),
        (("delete", "nope", "--execute"), 1, "has no profile 'nope'"),
    ],
)
def test_invalid_profile_is_refused_and_nothing_is_written(
    profiles: Path, words: tuple[str, ...], status: int, reason: str
) -> None:
    run("create", "a", "-b", "a:1")
    before = profiles.read_text()
    assert reason in run(*words, status=status)
    assert profiles.read_text() == before
    assert [path.name for path in profiles.parent.iterdir()] == [profiles.name]


def test_profiles_file_with_inline_table_is_not_changed(profiles: Path) -> None:
    profiles.parent.mkdir()
    text = "a = {bootstrap = 'a:1'}\n"
    write(profiles, text)
    assert "edit it" in run("delete", "a", "--execute", status=1)
    assert profiles.read_text() == text
