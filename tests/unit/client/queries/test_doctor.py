"""The doctor's rules, with observations that a real client would take too long to cause."""

from __future__ import annotations

import re
import uuid
from pathlib import Path
from typing import Any

import pytest

from fencepost.client.queries.doctor import findings, stem_of
from fencepost.client.queries.exactly_once_rules import RULES
from fencepost.client.queries.pipelines import Observations
from fencepost.coordinator.history.entries import CLIENT, TRANSACTION, Entry, Observed

PAGE = Path(__file__).resolve().parents[4] / "docs" / "doctor.md"


def init(name: str, at_ms: int, client: str = "app") -> Entry:
    detail = {"former_producer_epoch": -1, "producer_epoch": 0, "cause": "InitProducerId"}
    return Entry(
        at_ms,
        TRANSACTION,
        name,
        "epoch-bumped",
        "s",
        client,
        "10.0.0.7",
        detail,
        "request InitProducerId",
    )


def observed(kind: Observed, client: str = "app", **detail: Any) -> Entry:
    return Entry(1, CLIENT, client, str(kind), "broker 1", client, "10.0.0.7", detail, "request X")


def rules(*entries: Entry) -> set[str]:
    return {finding.rule.name for finding in findings(Observations(entries), lambda _: ())}


def test_doctor_page_has_a_section_for_each_rule() -> None:
    sections = re.findall(r"^## ([a-z0-9-]+)\n\n\*(.+)\*$", PAGE.read_text(), re.MULTILINE)
    said = [(name, title.replace("`", "")) for name, title in sections]
    assert said == [(rule.name, rule.title) for rule in RULES]


@pytest.mark.parametrize(
    ("name", "stem"),
    [
        ("orders-6f1c52a0-8f4d-4a53-9a42-0d6f7b1c9e55", "orders-*"),
        ("orders-1764238800", "orders-*"),
        ("orders-8f14e45fceea", "orders-*"),
        ("orders-17", "orders-17"),
        ("deadbeef", "deadbeef"),
    ],
)
def test_stem_of_id_omits_parts_that_change_with_the_process(name: str, stem: str) -> None:
    assert stem_of(name) == stem


def test_transactional_ids_that_change_with_the_process_id_are_found() -> None:
    starts = [init(f"orders-{pid}", pid) for pid in (4117, 4380, 5120)]
    assert rules(*starts) == {"new-transactional-id"}


def test_flinks_counter_in_transactional_ids_is_no_finding() -> None:
    names = [f"sink-{task}-{number}" for number in range(1_000, 1_040) for task in range(2)]
    starts = [init(name, at, f"producer-{name}") for at, name in enumerate(names)]
    assert rules(*starts) == set()


def test_random_transactional_ids_of_several_clients_are_no_finding() -> None:
    assert rules(init(f"a-{uuid.uuid4()}", 1), init(f"b-{uuid.uuid4()}", 2)) == set()
    assert rules(init(str(uuid.uuid4()), 1, "a"), init(str(uuid.uuid4()), 2, "b")) == set()


def test_consumer_of_output_topic_with_producers_client_id_is_no_finding() -> None:
    produced = observed(Observed.PRODUCED, topic="out", transactional_id="id", acks=-1)
    committed = {"group": "g", "member": "m", "generation": 1, "beside_transactions": False}
    reader = observed(Observed.OFFSETS_COMMITTED, topic="out", **committed)
    assert rules(produced, reader) == set()
    reader = observed(Observed.OFFSETS_COMMITTED, topic="in", **committed)
    assert rules(produced, reader) == {"offsets-outside-transaction"}
    reader = observed(Observed.OFFSETS_COMMITTED, "other", topic="in", **committed)
    assert rules(produced, reader) == set()


def test_topic_read_with_both_isolation_levels_is_no_finding() -> None:
    added = observed(
        Observed.OFFSETS_ADDED_TO_TRANSACTION,
        topic="in",
        group="g",
        transactional_id="id",
        by_member=True,
    )
    joined = observed(Observed.GROUP_JOINED, group="g")
    dirty = observed(Observed.FETCHED, topic="in", isolation_level="read_uncommitted")
    clean = observed(Observed.FETCHED, topic="in", isolation_level="read_committed")
    assert rules(added, joined, dirty) == {"reads-uncommitted"}
    assert rules(added, joined, dirty, clean) == set()
