"""Kill -9 of bridge, MQTT broker and daemon loses and duplicates no message.

QoS 1 is exactly-once by message ids, QoS 2 by packet ids alone. Bridge and daemon are killed while
messages are in flight. Mosquitto saves its state only on request. The test requests a save before
each kill of Mosquitto, while the publisher waits, because no bridge can restore messages that
Mosquitto has acknowledged and then lost. With message ids the bridge continues after the save, so
that Mosquitto restarts with an older state.

``MQTT_MESSAGES`` and ``MQTT_STRIKES`` extend the test, ``MQTT_SEED`` varies it.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.mqtt.publisher import Message, Publisher, messages
from tests.support.cluster import READ_COMMITTED, Cluster
from tests.support.daemon import ROOT, Daemon
from tests.support.mosquitto import Mosquitto
from tests.support.processes import Child
from tests.support.waits import until

pytestmark = [pytest.mark.crash, pytest.mark.timeout(900)]

COUNT = int(os.environ.get("MQTT_MESSAGES", "1000"))
STRIKES = int(os.environ.get("MQTT_STRIKES", "3"))
SEED = int(os.environ.get("MQTT_SEED", "1883"))
TARGETS = ("weather", "flights")
BATCH = 250
CACHE = ROOT / ".cache" / "flights"
QUIET_S = 20.0
"""If no new message has arrived for this time, no message is in flight."""


class Bridge:
    """``python -m fencepost.pipelines.mqtt`` in a separate process."""

    def __init__(self, daemon: Daemon, broker: Mosquitto, qos: int, version: str) -> None:
        self._command = [
            *(sys.executable, "-m", "fencepost.pipelines.mqtt", "--bootstrap", daemon.bootstrap),
            *("--mqtt", f"127.0.0.1:{broker.port}", "--qos", str(qos), "--mqtt-version", version),
            *("--route", "weather/#=weather", "--route", "flights/+/+=flights"),
        ]
        self.child: Child | None = None

    def start(self) -> Bridge:
        self.child = Child(self._command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)})
        return self

    def kill(self) -> None:
        if self.child is not None:
            self.child.kill()

    def restart(self) -> None:
        self.kill()
        self.start()


class Rig:
    """All processes of one run."""

    def __init__(self, home: Path, qos: int, version: str, *, with_ids: bool) -> None:
        self._with_ids = with_ids
        self.daemon = Daemon(home / "data").start()
        with Cluster(self.daemon.bootstrap) as cluster:
            for topic in TARGETS:
                cluster.create_topic(topic, 2)
        self.broker = Mosquitto(home / "mqtt").start()
        self.bridge = Bridge(self.daemon, self.broker, qos, version).start()
        assert self.bridge.child is not None
        self.bridge.child.wait_for_line("bridge at work", deadline_s=60)
        self.publisher = Publisher(self.broker.port, qos, with_ids=with_ids)

    def publish(self, batch: list[Message], first: int) -> None:
        self.publisher.publish(batch, first)

    def publish_under(self, what: str, delay_s: float, batch: list[Message], first: int) -> None:
        """Publish a batch; ``delay_s`` later, kill and restart ``what``."""
        if what == "broker":
            self.publish(batch, first)
            self._strike_broker(delay_s)
            return
        errors: list[Exception] = []

        def strike() -> None:
            try:
                time.sleep(delay_s)  # varies the moment of the kill
                if what == "bridge":
                    self.bridge.restart()
                else:
                    self.daemon.kill()
                    self.daemon.start()
            except Exception as error:  # noqa: BLE001 - the main thread reports any error
                errors.append(error)

        striker = threading.Thread(target=strike)
        striker.start()
        try:
            self.publish(batch, first)
        finally:
            striker.join()
        assert not errors, errors

    def _strike_broker(self, delay_s: float) -> None:
        if not self._with_ids:
            self.bridge.kill()
        self.broker.save()
        if self._with_ids:
            time.sleep(delay_s)  # varies the moment of the kill
        self.broker.kill()
        self.broker.start()
        if not self._with_ids:
            self.bridge.start()

    def found(self) -> list[int]:
        with Cluster(self.daemon.bootstrap) as cluster:
            return [
                json.loads(value or b"")["id"]
                for topic in TARGETS
                for partition in range(2)
                for value in cluster.values(topic, partition=partition, isolation=READ_COMMITTED)
            ]

    def close(self) -> None:
        self.publisher.close()
        self.bridge.kill()
        self.broker.kill()
        self.daemon.kill()


def settled(rig: Rig, count: int) -> list[int]:
    """Return the messages once ``count`` have arrived, or none has arrived for ``QUIET_S``."""
    found: list[int] = []
    growth = (0, time.monotonic())

    def probe() -> bool:
        nonlocal growth
        found[:] = rig.found()
        if len(set(found)) > growth[0]:
            growth = (len(set(found)), time.monotonic())
        return len(set(found)) >= count or time.monotonic() - growth[1] > QUIET_S

    until(probe, f"{count} arrived, or silence", deadline_s=600, poll_s=0.5)
    return found


def missing(found: list[int], count: int) -> list[int]:
    return sorted(set(range(count)) - set(found))


def check(rig: Rig, count: int, told: str) -> None:
    """Fail if messages are lost, stuck or duplicated, but not if they are slow."""
    found = settled(rig, count)
    if late := missing(found, count):
        said = rig.bridge.child.tail(20) if rig.bridge.child else ""
        rig.bridge.restart()
        found = settled(rig, count)
        lost = missing(found, count)
        pytest.fail(
            f"{told}: {len(late)} missing after {QUIET_S} s of silence: {late[:5]} … {late[-5:]}; "
            f"after a new connection {len(late) - len(lost)} came (stuck), {len(lost)} did not "
            f"(lost): {lost[:5]}; bridge:\n{said}\nbroker:\n"
            f"{rig.broker.child.tail(30) if rig.broker.child else ''}"
        )
    doubled = {number: times for number, times in Counter(found).items() if times > 1}
    if doubled:
        numbers = sorted(doubled)
        pytest.fail(
            f"{told}: {len(doubled)} doubled: {numbers[:5]} … {numbers[-5:]}, bridge:\n"
            f"{rig.bridge.child.tail(20) if rig.bridge.child else ''}"
        )
    assert set(found) == set(range(count)), told


def batches(count: int) -> Iterator[list[Message]]:
    source = messages(CACHE, count)
    while batch := list(itertools.islice(source, BATCH)):
        yield batch


@pytest.mark.parametrize(
    ("qos", "version", "with_ids"),
    [
        pytest.param(1, "5", True, id="qos1-v5-message-id", marks=pytest.mark.slow),
        pytest.param(2, "3.1.1", False, id="qos2-v311-packet-id", marks=pytest.mark.slow),
        pytest.param(2, "5", True, id="qos2-v5-message-id", marks=pytest.mark.slow),
    ],
)
def test_kills_of_bridge_broker_and_daemon_lose_and_duplicate_no_message(
    tmp_path: Path, qos: int, version: str, with_ids: bool
) -> None:
    chance = random.Random(f"{SEED} {qos} {version}")
    strikes = list(itertools.islice(itertools.cycle(["bridge", "daemon", "broker"]), STRIKES))
    chance.shuffle(strikes)
    rounds = -(-COUNT // BATCH)
    when = dict(zip(chance.sample(range(rounds), len(strikes)), strikes, strict=True))
    rig = Rig(tmp_path, qos, version, with_ids=with_ids)
    with contextlib.closing(rig):
        sent = 0
        for number, batch in enumerate(batches(COUNT)):
            if number in when:
                rig.publish_under(when[number], chance.uniform(0, 0.3), batch, sent)
            else:
                rig.publish(batch, sent)
            sent += len(batch)
        assert sent == COUNT
        check(rig, COUNT, f"seed {SEED}, batches {dict(sorted(when.items()))}")
