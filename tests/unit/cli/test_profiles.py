"""Files with client settings, as properties and as TOML, and profiles in them."""

from __future__ import annotations

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


def test_all_three_mean_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
def test_what_can_not_be_used(tmp_path: Path, name: str, text: str, complaint: str) -> None:
    path = write(tmp_path / name, text)
    with pytest.raises(ProfileError, match=complaint) as refused:
        read_settings(path)
    assert str(path) in str(refused.value)
    assert SECRET not in str(refused.value)


def test_files_that_are_too_large_or_not_there(tmp_path: Path) -> None:
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
def test_a_secret_that_others_can_read_is_told(
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
