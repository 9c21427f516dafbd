"""Secrets of a broker, a command or a client do not appear in logs, errors or responses."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from fencepost import Broker
from fencepost.cli import main
from fencepost.client.client import AuthenticationError, WireClient
from fencepost.client.security import SECRETS, Security
from fencepost.coordinator.config.key import ConfigError, ConfigType
from fencepost.coordinator.config.security_keys import SECURITY_KEYS
from tests.support.certificates import Authority
from tests.support.daemon import Daemon
from tests.support.targets import SETTINGS
from tests.wire.command_line import leaves

SECRET = "correct-horse-battery-staple"
NEW_SECRET = f"{SECRET}-2"
GONE = "127.0.0.1:1"

STAYS = frozenset({"serve", "crash-sweep", "console"})
"""Commands that do not end by themselves."""


def planted(home: Path) -> dict[str, str]:
    """Return environment variables with secrets."""
    settings = home / "client.properties"
    settings.touch(mode=0o600)
    settings.write_text(
        "security.protocol=SASL_PLAINTEXT\nsasl.mechanism=SCRAM-SHA-256\n"
        f"sasl.username=alice\nsasl.password={SECRET}\n"
    )
    profiles = home / "profiles.toml"
    profiles.touch(mode=0o600)
    profiles.write_text(f'[here]\nsecurity.protocol = "SSL"\nssl.key.password = "{SECRET}"\n')
    return {
        "FENCEPOST_BOOTSTRAP": GONE,
        "FENCEPOST_COMMAND_CONFIG": str(settings),
        "FENCEPOST_PROFILES": str(profiles),
        "FENCEPOST_PROFILE": "here",
        "FENCEPOST_CONSOLE_TOKEN": SECRET,
        "FENCEPOST_SET_SSL_KEY_PASSWORD": SECRET,
    }


def told_by(path: tuple[str, ...], home: Path, *runs: tuple[str, ...]) -> None:
    told = planted(home)
    for arguments in runs:
        done = CliRunner().invoke(main, [*path, *arguments], env=told, input=f"{SECRET}\n" * 2)
        assert SECRET not in done.output, (path, arguments, done.output)
        assert SECRET not in repr(done.exception), (path, arguments)


def test_no_command_shows_a_secret_argument_in_help_or_usage_error(tmp_path: Path) -> None:
    for path in leaves(main):
        told_by(path, tmp_path, ("--help",), ("--no-such-option",))


@pytest.mark.slow
@pytest.mark.parametrize(
    "path", sorted(leaf for leaf in leaves(main) if leaf[0] not in STAYS), ids=" ".join
)
def test_no_command_shows_a_secret_argument(path: tuple[str, ...], tmp_path: Path) -> None:
    soon = ("--timeout", "0.1")
    told_by(path, tmp_path, soon, ("a", *soon), ("a", "b", *soon))


@pytest.mark.parametrize(
    "text",
    [
        f"sasl.password={SECRET}",
        f"security.protocol={SECRET}",
        f"security.protocol=SASL_SSL\nsasl.mechanism=PLAIN\nsasl.jaas.config={SECRET}",
        f"security.protocol=SASL_SSL\nsasl.mechanism=PLAIN\nsasl.pasword={SECRET}",
        f"security.protocol=SSL\nssl.key.pass={SECRET}",
        f"security.protocol=SSL\nssl.keystore.key={SECRET}\nssl.keystore.certificate.chain=x",
        f"security.protocol=SSL\nssl.truststore.certificates={SECRET}",
        f"security.protocol=SASL_SSL\nsasl.mechanism=OAUTHBEARER\nsasl.jaas.config={SECRET};",
    ],
)
def test_unusable_client_settings_are_not_quoted(text: str, tmp_path: Path) -> None:
    path = tmp_path / "client.properties"
    path.touch(mode=0o600)
    path.write_text(text)
    arguments = ["topics", "list", "--command-config", str(path), "-b", GONE, "--timeout", "0.1"]
    done = CliRunner().invoke(main, arguments)
    assert done.exit_code in {1, 2, 3}
    if "security.protocol=" + SECRET not in text:
        assert SECRET not in done.output


def test_client_hides_every_config_of_type_password() -> None:
    passwords = {key.name for key in SECURITY_KEYS if key.type is ConfigType.PASSWORD}
    assert passwords <= SECRETS
    security = Security.of(
        {
            "security.protocol": "SASL_SSL",
            "sasl.mechanism": "PLAIN",
            "sasl.username": "alice",
            "sasl.password": SECRET,
            "ssl.key.password": SECRET,
            "ssl.keystore.key": f"-----BEGIN {SECRET}",
            "ssl.keystore.certificate.chain": f"-----BEGIN {SECRET}",
        }
    )
    assert SECRET not in f"{security!r} {security}"


@pytest.mark.parametrize(
    "pair",
    [
        "ssl.key.password={}",
        "ssl.key.pasword={}",
        "ssl.keystore.password={}",
        "ssl.keystore.key={}",
        "sasl.jaas.config={}",
        "listener.name.internal.ssl.key.password={}",
        "listener.name.internal.scram-sha-256.sasl.jaas.config={}",
        "listener.name.internal.ssl.key.pasword={}",
    ],
)
async def test_config_error_at_startup_shows_no_secret(pair: str, tmp_path: Path) -> None:
    key, _, value = pair.format(SECRET).partition("=")
    config = {
        "listeners": "INTERNAL://127.0.0.1:0",
        "listener.security.protocol.map": "INTERNAL:SASL_SSL",
        "sasl.enabled.mechanisms": "PLAIN",
        key: value,
    }
    with pytest.raises(ConfigError) as refused:
        await Broker(tmp_path, config=config).start()
    assert SECRET not in str(refused.value)


@pytest.mark.slow
def test_serve_with_misspelt_config_shows_no_secret(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "fencepost", "serve", "--data-dir", str(tmp_path / "data")]
    done = subprocess.run(
        [*command, "--config", f"ssl.key.pasword={SECRET}"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode != 0
    assert "did you mean ssl.key.password" in done.stderr
    assert SECRET not in done.stdout + done.stderr


@contextlib.contextmanager
def guarded(home: Path) -> Iterator[tuple[Daemon, Security]]:
    """Yield a broker that has a value for every secret setting, and the settings of a client."""
    authority = Authority(home / "certificates")
    identity = authority.server("broker", password=SECRET)
    users = home / "users"
    users.touch(mode=0o600)
    users.write_text(f"SCRAM-SHA-256=[name=admin,password={SECRET}]")
    scrapers = home / "scrapers"
    scrapers.touch(mode=0o600)
    scrapers.write_text(f"scraper:{SECRET}\n")
    file = home / "server.properties"
    file.touch(mode=0o600)
    settings = {
        **SETTINGS,
        "listeners": "SAFE://127.0.0.1:0",
        "listener.security.protocol.map": "SAFE:SASL_SSL",
        "sasl.enabled.mechanisms": "PLAIN,SCRAM-SHA-256",
        "listener.name.safe.ssl.keystore.location": str(identity.file),
        "listener.name.safe.ssl.key.password": SECRET,
        "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
        "super.users": "User:admin",
        "fencepost.metrics.listen": "127.0.0.1:0",
        "fencepost.metrics.users.file": str(scrapers),
    }
    file.write_text("".join(f"{key}={value}\n" for key, value in settings.items()))
    command = (sys.executable, "-m", "fencepost", "serve", "--config-file", str(file))
    more = ("--log-level", "TRACE", "--add-scram", f"@{users}")
    daemon = Daemon(home / "data", {"listeners": settings["listeners"]}, command=(*command, *more))
    daemon.start()
    try:
        yield (
            daemon,
            Security.of(
                {
                    "security.protocol": "SASL_SSL",
                    "sasl.mechanism": "SCRAM-SHA-256",
                    "sasl.username": "admin",
                    "sasl.password": SECRET,
                    "ssl.truststore.location": str(authority.truststore),
                }
            ),
        )
    finally:
        daemon.kill()


def as_admin(
    home: Path, security: Security, *arguments: str, may_fail: bool = False, **how: Any
) -> str:
    settings = home / "admin.properties"
    settings.touch(mode=0o600)
    settings.write_text(
        f"security.protocol={security.protocol}\nsasl.mechanism={security.mechanism}\n"
        f"sasl.username=admin\nsasl.password={SECRET}\n"
        f"ssl.truststore.location={security.tls.truststore}\n"
    )
    told = {"FENCEPOST_COMMAND_CONFIG": str(settings), **how.pop("env", {})}
    done = CliRunner().invoke(main, arguments, env=told, **how)
    assert may_fail or done.exit_code == 0, done.output
    assert SECRET not in done.output
    return done.output


@pytest.mark.slow
def test_broker_neither_logs_nor_stores_secrets(tmp_path: Path) -> None:
    with guarded(tmp_path) as (daemon, security):
        assert daemon.child is not None
        env = {"env": {"FENCEPOST_BOOTSTRAP": daemon.bootstrap}}
        for arguments in (
            ("configs", "list", "broker", "1"),
            ("topics", "create", "orders"),
            ("consume", "__fencepost_history"),
            ("consume", "__cluster_metadata"),
            ("configs", "set", "broker", "1", f"ssl.key.password={SECRET}"),
            ("configs", "set", "broker", "1", f"ssl.key.pasword={SECRET}"),
        ):
            as_admin(tmp_path, security, *arguments, may_fail=True, **env)
        shown = as_admin(tmp_path, security, "configs", "list", "broker", "1", **env)
        assert "authorizer.class.name" in shown
        more = {**env, "input": NEW_SECRET}
        added = ("users", "add", "bob", "--mechanism", "SCRAM-SHA-256", "--password-file", "-")
        as_admin(tmp_path, security, *added, **more)
        with WireClient(daemon.bootstrap, security=security) as client:
            answer = client.call(
                "DescribeConfigs",
                entity=lambda f: f.message(
                    resources=[
                        f.DescribeConfigsResource(
                            resource_type=4, resource_name="1", configuration_keys=None
                        )
                    ],
                    include_documentation=True,
                    include_synonyms=True,
                ),
            )
            rows = {row.name: row for row in answer.results[0].configs}
            assert SECRET not in repr(answer)
            for key in ("ssl.key.password", "sasl.jaas.config"):
                assert (rows[key].value, rows[key].is_sensitive) == (None, True)
        for mechanism in ("PLAIN", "SCRAM-SHA-256"):
            told = {
                "security.protocol": "SASL_SSL",
                "sasl.mechanism": mechanism,
                "sasl.username": "admin",
                "sasl.password": f"{SECRET}-wrong",
                "ssl.truststore.location": security.tls.truststore,
            }
            wrong = Security.of(told)
            with (
                WireClient(daemon.bootstrap, security=wrong) as client,
                pytest.raises(AuthenticationError) as refused,
            ):
                client.metadata()
            assert SECRET not in str(refused.value)
        lines = "\n".join(daemon.child.lines)
        (address,) = re.findall(r"https?://127\.0\.0\.1:\d+/metrics", lines)
        with pytest.raises(urllib.error.HTTPError):
            urllib.request.urlopen(address, timeout=30)
        command = Path(f"/proc/{daemon.child.pid}/cmdline").read_bytes()
        daemon.kill()
    everything = "\n".join(daemon.child.lines)
    assert SECRET not in everything
    assert "login failed" in everything
    assert SECRET.encode() not in command
    for path in (tmp_path / "data").rglob("*"):
        if path.is_file():
            assert SECRET.encode() not in path.read_bytes(), path
    # The log has keys that verify passwords, so other users of the machine must not read the log.
    assert (tmp_path / "data" / "__cluster_metadata-0").stat().st_mode & 0o077 == 0


@pytest.mark.slow
def test_files_of_a_failed_crash_sweep_contain_no_secret(tmp_path: Path) -> None:
    kept = tmp_path / "sweep"
    fencepost = f"{sys.executable} -m fencepost"
    done = subprocess.run(
        [
            *(sys.executable, "-m", "fencepost", "crash-sweep", "--format", "json"),
            *("--directory", str(kept), "--points", "2", "--verify", "false"),
            *("--config", f"ssl.key.password={SECRET}"),
            *("--", *f"{fencepost} topics create orders".split()),
        ],
        capture_output=True,
        text=True,
        timeout=170,
        check=False,
        env={**os.environ, "FENCEPOST_CONSOLE_TOKEN": SECRET},
    )
    assert done.returncode == 1, done.stderr
    assert SECRET not in done.stdout + done.stderr
    assert json.loads(done.stdout)["failures"]
    files = [path for path in kept.rglob("*") if path.is_file()]
    assert files
    for path in files:
        assert SECRET.encode() not in path.read_bytes(), path
