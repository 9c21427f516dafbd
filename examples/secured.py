"""A pipeline on a broker with TLS, logins and ACLs, with the minimal rights that it needs.

The broker's files and its operator's commands are those of any installation: a CA certificate, a
file of settings, users, ACLs. Without a right the pipeline fails with an error that names it, and
once it has the right, it continues where it was.
"""

from __future__ import annotations

import asyncio
import secrets
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

from aiokafka import TopicPartition

from examples.processes import Daemon
from fencepost.cli.profiles import read_settings
from fencepost.client.client import AuthenticationError
from fencepost.pipelines.exactly_once import ExactlyOnce, Options
from fencepost.pipelines.failures import NotAuthorizedError
from fencepost.pipelines.producers import read_committed
from fencepost.pipelines.records import Batch, Output
from fencepost.pipelines.security import PLAINTEXT, Security

RECORDS = 1_000
ADMIN, COPIER = "admin", "copier"
DAYS = "30"


def certificates(home: Path) -> None:
    """Write ``ca.pem``, which clients trust, and ``broker.pem``, the broker's key and chain."""
    key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")
    (home / "names").write_text("subjectAltName=DNS:localhost,IP:127.0.0.1\n")
    for command in (
        ("req", "-x509", *key, "-keyout", "ca.key", "-out", "ca.pem", "-subj", "/CN=ca"),
        ("req", *key, "-keyout", "broker.key", "-out", "broker.csr", "-subj", "/CN=broker"),
        *(
            "x509 -req -in broker.csr -CA ca.pem -CAkey ca.key -CAcreateserial -extfile names"
            f" -days {DAYS} -out broker.crt".split(),
        ),
    ):
        subprocess.run(["openssl", *command], cwd=home, check=True, capture_output=True)
    whole = home / "broker.pem"
    whole.touch(mode=0o600)
    whole.write_text((home / "broker.key").read_text() + (home / "broker.crt").read_text())


def broker_settings(home: Path, address: str) -> Path:
    """Write the broker's ``server.properties``: one listener, with authentication."""
    path = home / "server.properties"
    path.write_text(
        f"listeners=SASL_SSL://{address}\n"
        "sasl.enabled.mechanisms=SCRAM-SHA-512\n"
        "ssl.keystore.type=PEM\n"
        f"ssl.keystore.location={home}/broker.pem\n"
        "authorizer.class.name=org.apache.kafka.metadata.authorizer.StandardAuthorizer\n"
        f"super.users=User:{ADMIN}\n"
        "group.initial.rebalance.delay.ms=0\n"  # there is only one member
    )
    return path


def client_settings(home: Path, address: str, user: str) -> Path:
    """Write a client's file, which Kafka's tools accept too, with a new password of its own."""
    path = home / f"{user}.properties"
    path.touch(mode=0o600)
    path.write_text(
        f"bootstrap.servers={address}\n"
        "security.protocol=SASL_SSL\n"
        "sasl.mechanism=SCRAM-SHA-512\n"
        f"sasl.username={user}\n"
        f"sasl.password={secrets.token_urlsafe(18)}\n"
        f"ssl.truststore.location={home}/ca.pem\n"
    )
    return path


def security_of(path: Path) -> Security:
    """Return the TLS and login settings in a client's file."""
    return read_settings(path).security or PLAINTEXT


class SecuredDaemon(Daemon):
    """``fencepost serve`` with a file of settings and its first user."""

    def __init__(self, home: Path) -> None:
        super().__init__(home)
        certificates(home)
        self.admin = client_settings(home, self.bootstrap, ADMIN)
        users = home / "first-users"
        users.touch(mode=0o600)
        password = security_of(self.admin).password
        users.write_text(f"SCRAM-SHA-512=[name={ADMIN},password={password}]\n")
        self._command = (
            *(sys.executable, "-m", "fencepost", "serve", "--data-dir", str(home / "data")),
            *("--config-file", str(broker_settings(home, self.bootstrap))),
            *("--add-scram", f"@{users}"),
        )

    def operate(self, command: str, told: str = "") -> None:
        """Run an operator's command with this input."""
        print(f"$ fencepost {command}")
        where = ("--bootstrap", self.bootstrap, "--command-config", str(self.admin))
        subprocess.run(
            [sys.executable, "-m", "fencepost", *command.split(), *where],
            input=told,
            text=True,
            check=True,
            stdout=subprocess.DEVNULL,
        )


async def copy(bootstrap: str, security: Security) -> int:
    """Run the pipeline to the end of its input; return how many records it copied."""

    def same(batch: Batch) -> list[Output]:
        return [Output("copy", record.value) for record in batch]

    async with ExactlyOnce(
        bootstrap,
        group=COPIER,
        topics=["orders"],
        handler=same,
        transactional_id=COPIER,
        options=Options(security=security),
    ) as pipeline:
        await pipeline.run(to_end=True)
        return pipeline.metrics.records_in


async def example(home: Path) -> str | None:
    """Set everything up, run the pipeline without and with its rights, compare."""
    daemon = SecuredDaemon(home)
    with daemon.port:
        await daemon.start()
        try:
            return await story(daemon, home)
        finally:
            await daemon.stop()


async def story(daemon: SecuredDaemon, home: Path) -> str | None:
    orders = [f"order {number}" for number in range(RECORDS)]
    file = client_settings(home, daemon.bootstrap, COPIER)
    security = security_of(file)
    try:
        await copy(daemon.bootstrap, security)
    except AuthenticationError as error:
        print(f"  refused: {error}")
    else:
        return "somebody without a password has got in"
    for command, told in (
        ("topics create orders --partitions 1", ""),
        ("topics create copy --partitions 1", ""),
        ("produce orders", "\n".join(orders)),
        (f"users add {COPIER} --password-file -", f"{security.password}\n"),
        (f"acls add --allow-principal User:{COPIER} --operation Read --topic orders", ""),
        (f"acls add --allow-principal User:{COPIER} --operation Read --group {COPIER}", ""),
    ):
        await asyncio.to_thread(daemon.operate, command, told)
    refused = []
    for right in (f"--transactional-id {COPIER}", "--topic copy"):
        try:
            await copy(daemon.bootstrap, security)
        except NotAuthorizedError as error:
            print(f"  refused: {error}")
            refused.append(right)
        grant = f"acls add --allow-principal User:{COPIER} --operation Write {right}"
        await asyncio.to_thread(daemon.operate, grant)
    copied = await copy(daemon.bootstrap, security)
    print(f"  copied {copied} records")
    reading = read_committed(
        daemon.bootstrap, TopicPartition("copy", 0), security=security_of(daemon.admin)
    )
    found = Counter([record.value.decode() async for record in reading])
    if len(refused) != 2 or found != Counter(orders):
        return f"{found.total()} of {RECORDS} records, refused {refused}"
    return None


def main() -> int:
    """Run the example in a temporary folder."""
    if shutil.which("openssl") is None:
        print("needs the command openssl, which makes the certificates")
        return 1
    with tempfile.TemporaryDirectory(prefix="fencepost-example-") as home:
        complaint = asyncio.run(example(Path(home)))
    print(f"WRONG: {complaint}" if complaint else "checked: as it should be")
    return 1 if complaint else 0


if __name__ == "__main__":
    sys.exit(main())
