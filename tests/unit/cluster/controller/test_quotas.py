"""Client quotas as the controller changes them (``cluster/controller/quotas.py``).

Most scenarios come from Kafka's ClientQuotaControlManagerTest; others interleave requests.
"""

from __future__ import annotations

import math

import pytest

from fencepost.cluster.controller import quotas
from fencepost.cluster.controller.quotas import ClientQuotaAlteration
from fencepost.cluster.image import Entity
from fencepost.cluster.records import ClientQuotaRecord, EntityData
from fencepost.logcore.steps import finish
from tests.unit.cluster.controller import cluster_driver

PRODUCE, FETCH = "producer_byte_rate", "consumer_byte_rate"
ALICE = {"user": "alice"}
OF_ALICE = (("user", "alice"),)


def change(named: dict[str, str | None], **wanted: float | None) -> ClientQuotaAlteration:
    return ClientQuotaAlteration(named, [*wanted.items()])


class Cluster(cluster_driver.Cluster):
    def __init__(self, *alterations: ClientQuotaAlteration) -> None:
        super().__init__(())
        self.alter_quotas(*alterations)

    def alter_quotas(
        self, *alterations: ClientQuotaAlteration, refuse: str | None = None
    ) -> list[str | None]:
        count = sum(map(len, self.image.quotas.values()))
        errors = self.do(self.controller.alter_client_quotas(alterations, count, lambda _: refuse))
        return [None if error is None else str(error) for error in errors]

    def check(self, *asked: ClientQuotaAlteration) -> list[str | None]:
        checked = finish(self.controller.check_quotas(asked))
        return [None if error is None else str(error) for _, error in checked]

    @property
    def quotas(self) -> dict[Entity, dict[str, float]]:
        return {entity: dict(some) for entity, some in self.image.quotas.items()}


def test_entity_is_sorted_by_type_in_its_record() -> None:
    both = {"user": None, "client-id": "c"}
    outcome = Cluster().controller.alter_client_quotas(
        [change(both, producer_byte_rate=1.0)], 0, lambda _: None
    )
    assert outcome.records == (
        ClientQuotaRecord(
            (EntityData("client-id", "c"), EntityData("user", None)), PRODUCE, 1.0, remove=False
        ),
    )


def test_only_changed_quotas_are_written() -> None:
    cluster = Cluster(change(ALICE, producer_byte_rate=1.0))
    again = change(ALICE, producer_byte_rate=1.0, consumer_byte_rate=2.0, request_percentage=None)
    outcome = cluster.controller.alter_client_quotas([again], 1, lambda _: None)
    assert outcome.records == (
        ClientQuotaRecord((EntityData("user", "alice"),), FETCH, 2.0, remove=False),
    )


def test_deletion_of_a_quota_keeps_other_quotas_of_its_entity() -> None:
    cluster = Cluster(change(ALICE, producer_byte_rate=1.0, consumer_byte_rate=2.0))
    cluster.alter_quotas(change(ALICE, producer_byte_rate=None))
    assert cluster.quotas == {OF_ALICE: {FETCH: 2.0}}
    cluster.alter_quotas(change(ALICE, consumer_byte_rate=None))
    assert cluster.quotas == {}


@pytest.mark.parametrize(
    ("alteration", "why"),
    [
        (change({}, producer_byte_rate=1.0), "Invalid empty client quota entity"),
        (change({"user": ""}, producer_byte_rate=1.0), "Empty user not supported"),
        (change({"tenant": "a"}), "Unhandled client quota entity type: tenant"),
        (change({"ip": "::1"}, connection_creation_rate=1.0), None),
        (change({"ip": "localhost"}), "localhost is not a valid IP."),
        (change(ALICE, unheard_of=1.0), "Invalid configuration key unheard_of"),
        (change(ALICE, unheard_of=None), None),
        (change(ALICE, producer_byte_rate=0.0), f"Quota {PRODUCE} must be greater than 0"),
        (change(ALICE, producer_byte_rate=1.5), f"{PRODUCE} cannot be a fractional value."),
        (change(ALICE, request_percentage=1.5), None),
        (
            change(ALICE, request_percentage=math.inf),
            "Proposed value for request_percentage is too large.",
        ),
        (
            ClientQuotaAlteration(ALICE, [(PRODUCE, 1.0), (PRODUCE, None)]),
            f"Duplicate quota key {PRODUCE}",
        ),
    ],
)
def test_quota_check_returns_the_error_of_an_invalid_entity(
    alteration: ClientQuotaAlteration, why: str | None
) -> None:
    good = change({"user": "other"}, producer_byte_rate=1.0)
    assert Cluster().check(alteration, good) == [why, None]


def test_duplicate_entity_in_a_request_is_refused() -> None:
    asked = change(ALICE, producer_byte_rate=1.0), change(ALICE, consumer_byte_rate=1.0)
    assert Cluster().check(*asked, change({"user": "b"})) == ["Ignoring duplicate entity", None]


def test_entities_with_unknown_type_are_each_refused() -> None:
    many = dict.fromkeys(("user", "client-id", "ip", "tenant"), "x")
    assert (
        Cluster().check(change(many), change(many))
        == ["Unhandled client quota entity type: tenant"] * 2
    )


def test_request_with_too_many_changes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quotas, "MAX_CHANGES", 2)
    cluster = Cluster(change(ALICE, producer_byte_rate=1.0))
    two = change(ALICE, producer_byte_rate=1.0, consumer_byte_rate=1.0), change({"user": "b"})
    assert cluster.check(*two, change({"user": "c"}, producer_byte_rate=1.0)) == [None] * 3
    three = *two, change({"user": "c"}, producer_byte_rate=1.0, consumer_byte_rate=2.0)
    assert cluster.check(*three) == ["Unable to perform excessively large batch operation."] * 3


def test_entity_above_the_quota_limit_is_refused_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quotas, "MAX_QUOTAS", 2)
    cluster = Cluster(change(ALICE, producer_byte_rate=1.0))
    two = change({"user": "b"}, producer_byte_rate=1.0, consumer_byte_rate=1.0)
    one = change({"user": "c"}, producer_byte_rate=1.0)
    why = "the limit of 2 quotas (MAX_QUOTAS) is reached"
    assert cluster.alter_quotas(two, one, two) == [why, None, why]
    assert cluster.alter_quotas(change(ALICE, producer_byte_rate=2.0)) == [None]
    assert cluster.alter_quotas(change(ALICE, producer_byte_rate=None), two) == [None, why]
    assert cluster.alter_quotas(change({"user": "c"}, producer_byte_rate=None), two) == [None, None]
    assert cluster.quotas == {(("user", "b"),): {PRODUCE: 1.0, FETCH: 1.0}}


def test_entity_that_the_store_cannot_keep_is_refused() -> None:
    cluster = Cluster()
    alteration = change(ALICE, producer_byte_rate=1.0)
    assert cluster.alter_quotas(alteration, refuse="no name for a znode") == ["no name for a znode"]
    assert cluster.quotas == {}
    assert cluster.alter_quotas(change(ALICE, producer_byte_rate=None), refuse="no") == [None]
