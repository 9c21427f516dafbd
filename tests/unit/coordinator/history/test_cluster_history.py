"""The history of a cluster with a separate controller process, as its brokers report it."""

from __future__ import annotations

import contextlib
import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from fencepost.client.queries.session import ClusterSession
from fencepost.cluster.broker_changes import cluster_changes
from fencepost.cluster.image import BrokerRegistration, MetadataImage, TopicImage
from fencepost.console.history import HistoryCache
from fencepost.console.overview import overview_view
from fencepost.coordinator.history.entries import CLUSTER, Entry
from fencepost.coordinator.history.repeats import Repeats
from fencepost.testing import Cluster
from fencepost.testing.cluster import CONTROLLER_ID
from tests.support.quick import seeds
from tests.support.waits import until
from tests.wire.command_line import cli


def told(cluster: Cluster, *command: str) -> Any:
    # Run the command in a separate process, because its output must not contain brokers' log lines.
    asked = ("cluster", *command, "--format", "json")
    return json.loads(cli(cluster.bootstrap, *asked).stdout)


def test_killed_broker_is_reported_once_and_the_controller_is_named(tmp_path: Path) -> None:
    # Long enough that no other broker is fenced on a busy machine.
    config = {"broker.session.timeout.ms": 4_000}
    with Cluster(3, tmp_path, config) as cluster:
        cluster.topic("t", 1)
        cluster.kill(2)

        def fenced() -> bool:
            # Until the broker is fenced, the partitions that it leads cannot be read.
            with contextlib.suppress(AssertionError):
                return [
                    (row["subject"], row["why"])
                    for row in told(cluster, "history")
                    if row["what"] == "broker-fenced"
                ] == [("broker 2", "its session with the controller has ended")]
            return False

        until(fenced, "the fenced broker in the history")
        info = told(cluster, "info")
        assert info["controller"] == CONTROLLER_ID
        assert [row["controller"] for row in info["brokers"]] == [False, False]
        table = cli(cluster.bootstrap, "cluster", "info").stdout
        assert f", 2 brokers, controller {CONTROLLER_ID}, version " in table
        cluster.restart(2)

        def returned() -> bool:
            # The broker's first registration is reported only if another broker observed it.
            rows = told(cluster, "history", "--since", "-10m")
            last = [row["what"] for row in rows if row["subject"] == "broker 2"][-3:]
            return last == ["broker-fenced", "broker-registered", "broker-unfenced"]

        until(returned, "its return")
        with ClusterSession(cluster.bootstrap, 30) as session:
            history = HistoryCache()
            seen = overview_view(session, {}, history)
        assert seen["controller"] == CONTROLLER_ID
        fences = [row for row in seen["history"]["rows"] if row["what"] == "broker-fenced"]
        assert [row["subject"] for row in fences] == ["broker 2"]


# --- differences between two images ---

TOPIC = TopicImage("t", UUID(int=7), ())


def registration(broker_id: int = 1, epoch: int = 5, **how: bool) -> BrokerRegistration:
    usual = {"fenced": False, "in_controlled_shutdown": False, **how}
    return BrokerRegistration(
        broker_id, epoch, UUID(int=epoch), {}, {}, None, directories=(), **usual
    )


def image(*brokers: BrokerRegistration, **more: Any) -> MetadataImage:
    return MetadataImage(brokers={broker.broker_id: broker for broker in brokers}, **more)


@pytest.mark.parametrize(
    ("old", "new", "kinds"),
    [
        (image(), image(registration(fenced=True)), ["broker-registered"]),
        (image(), image(registration()), ["broker-registered", "broker-unfenced"]),
        (image(registration()), image(registration()), []),
        (image(registration()), image(registration(fenced=True)), ["broker-fenced"]),
        (image(registration(fenced=True)), image(registration()), ["broker-unfenced"]),
        (
            image(registration()),
            image(registration(in_controlled_shutdown=True)),
            ["broker-in-controlled-shutdown"],
        ),
        (
            image(registration()),
            image(registration(epoch=6)),
            ["broker-registered", "broker-unfenced"],
        ),
        (image(registration()), image(registration(epoch=6, fenced=True)), ["broker-registered"]),
        (image(registration()), image(), ["broker-unregistered"]),
        (image(features={"a": 1, "b": 1}), image(features={"a": 2, "b": 1}), ["feature-finalized"]),
        (image(topics={"t": TOPIC}, topics_by_id={UUID(int=7): TOPIC}), image(), ["topic-deleted"]),
        (image(), image(topics={"t": TOPIC}, topics_by_id={UUID(int=7): TOPIC}), []),
    ],
)
def test_change_between_metadata_images_is_reported_as_an_event(
    old: MetadataImage, new: MetadataImage, kinds: list[str]
) -> None:
    assert [change.kind for change in cluster_changes(old, new)] == kinds


def test_fencing_after_a_controlled_shutdown_has_the_shutdown_as_cause() -> None:
    leaving = registration(in_controlled_shutdown=True)
    (event,) = cluster_changes(image(leaving), image(replace(leaving, fenced=True)))
    assert event.detail["cause"] == "it has shut down"


@pytest.mark.parametrize("seed", seeds(200))
def test_history_reader_returns_each_change_once_despite_several_reporters(seed: int) -> None:
    draw = random.Random(seed)
    images, states = [image()], {1: registration(1), 2: registration(2), 3: registration(3)}
    for _ in range(40):
        state = states[draw.randint(1, 3)]
        if draw.random() < 0.2:
            state = registration(state.broker_id, state.epoch + 1, fenced=True)
        else:
            state = replace(state, fenced=not state.fenced)
        states[state.broker_id] = state
        images.append(image(*states.values()))
    wanted = [
        (event.subject, event.kind, event.detail["broker_epoch"])
        for at in range(1, len(images))
        for event in cluster_changes(images[at - 1], images[at])
    ]
    # One broker observes every change; the other brokers stop observing at some point, as if
    # killed.
    ends = [len(images), *(draw.randint(1, len(images)) for _ in range(2))]
    entries = []
    for observer, end in enumerate(ends):
        for at in range(1, end):
            delay = draw.random() * 0.5
            for event in cluster_changes(images[at - 1], images[at]):
                entry = Entry(0, CLUSTER, event.subject, event.kind, f"broker {observer}")
                entries.append((at + delay, observer, replace(entry, detail=event.detail)))
    entries.sort(key=lambda timed: timed[:2])
    repeats = Repeats()
    seen = [entry for _, _, entry in entries if repeats.is_new(entry)]
    assert [
        (change.subject, change.what, change.detail["broker_epoch"]) for change in seen
    ] == wanted
