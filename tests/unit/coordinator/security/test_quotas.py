"""Rates, token buckets and budgets on a manual clock: shared quotas and throttle times.

The scenarios come from Kafka's ``RateTest``, ``TokenBucketTest``, ``ClientQuotaManagerTest``,
``ClientRequestQuotaManagerTest`` and ``ControllerMutationQuotaManagerTest``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import pytest

from fencepost.cluster.quota_entities import (
    FETCH,
    MUTATION,
    PRODUCE,
    REQUEST,
    Pair,
    entity_of,
)
from fencepost.cluster.records import ClientQuotaRecord, EntityData
from fencepost.coordinator.config.broker_config import BrokerConfig
from fencepost.coordinator.config.key import counts_of_addresses, plain_address
from fencepost.coordinator.errors import ThrottlingQuotaExceededError
from fencepost.coordinator.metadata.log import MetadataLog
from fencepost.coordinator.security import quotas
from fencepost.coordinator.security.quota_table import QuotaTable
from fencepost.coordinator.security.quotas import EXPIRES_MS, ClientQuotas
from fencepost.coordinator.security.rates import MAX_THROTTLE_MS, Rate, RateWindow, TokenBucket
from tests.support.clock import ManualClock
from tests.unit.coordinator.services.coordinators import storage

WINDOW = RateWindow()


# --- rates ---------------------------------------------------------------------------------------


def test_rate_is_measured_over_ten_to_eleven_windows():
    rate = Rate(WINDOW)
    rate.record(100, 0)
    assert rate.elapsed_ms(0) == 10_000
    assert rate.per_second(0) == 10
    assert rate.elapsed_ms(999) == 10_999
    assert rate.elapsed_ms(1000) == 10_000
    assert rate.elapsed_ms(10_500) == 10_500
    # Samples that are eleven windows old no longer count, and the rate is that of a new client.
    assert rate.per_second(10_999) > 0
    assert (rate.per_second(11_000), rate.elapsed_ms(11_000)) == (0, 10_000)


def test_oldest_rate_sample_may_have_begun_before_the_window():
    rate = Rate(WINDOW)
    rate.record(10, 0)
    rate.record(10, 900)
    for second in range(1, 12):
        rate.record(10, 1000 * second)
    # The first sample's last record was 10.1 s ago; the sample began 11 s ago.
    assert rate.elapsed_ms(11_000) == 11_000
    assert rate.per_second(11_000) == pytest.approx(130 / 11)
    assert rate.per_second(11_900) == pytest.approx(110 / 10.9)


def test_negative_record_cancels_recorded_amount_in_rate():
    rate = Rate(WINDOW)
    rate.record(5000, 10)
    rate.record(-5000, 10)
    assert rate.per_second(10) == 0
    assert rate.throttle_ms(1, 10) == 0


def test_throttle_time_after_spike_brings_rate_back_to_quota():
    """ClientQuotaManagerTest.testQuotaViolation: 6300 bytes in 10.5 s, with 500 bytes/s allowed."""
    rate, now_ms = Rate(WINDOW), 0
    for _ in range(10):
        rate.record(400, now_ms)
        assert rate.throttle_ms(500, now_ms) == 0
        now_ms += 1000
    now_ms += 500
    rate.record(2300, now_ms)
    assert rate.throttle_ms(500, now_ms) == 2100
    now_ms += 2100
    for _ in range(10):
        rate.record(400, now_ms)
        now_ms += 1000
    assert rate.throttle_ms(500, now_ms) == 0


def test_throttle_time_is_capped_at_its_largest_wire_value():
    rate = Rate(WINDOW)
    rate.record(1e12, 0)
    assert rate.throttle_ms(1, 0) == MAX_THROTTLE_MS
    assert rate.throttle_ms(5e-324, 0) == MAX_THROTTLE_MS


def test_token_bucket_starts_full_may_be_overdrawn_and_refills():
    """TokenBucketTest, with a rate of 5 per second and a burst of 50."""
    bucket = TokenBucket(RateWindow(10, 1000))
    assert bucket.tokens(5, 123_456) == 50
    bucket.take(60, 5, 123_456)
    assert bucket.tokens(5, 123_456) == -10
    assert bucket.throttle_ms(5, 123_456) == 2000
    assert bucket.throttle_ms(5, 125_455) == 1
    assert bucket.throttle_ms(5, 125_456) == 0
    assert bucket.tokens(5, 999_999) == 50
    # If the quota is lowered, the burst is lower at once.
    assert bucket.tokens(1, 999_999) == 10


# --- budgets -------------------------------------------------------------------------------------


def change(metadata: MetadataLog, pair: Pair, wanted: Mapping[str, float | None]) -> None:
    """Change quotas in the metadata, as the controller does."""
    named = tuple(
        EntityData(*component)
        for component in sorted(entity_of(pair), key=lambda component: component[0])
    )
    metadata.append(
        [
            ClientQuotaRecord(named, key, value or 0.0, remove=value is None)
            for key, value in wanted.items()
        ]
    )


class Clients:
    """The quotas of a broker, and clients that use their quotas."""

    def __init__(self, metadata: MetadataLog, clock: ManualClock) -> None:
        self.quotas = quotas = ClientQuotas(QuotaTable(metadata), BrokerConfig(), clock)
        self.clock, self._metadata = clock, metadata
        self.wakes = 0
        quotas.listen(self._changed)

    def _changed(self) -> None:
        self.wakes += 1

    def set(
        self,
        user: str | None,
        client_id: str | None,
        value: float | None,
        key: str = PRODUCE,
    ) -> None:
        """Set a quota; ``""`` stands for no name, None for the default entity."""
        change(self._metadata, (user, client_id), {key: value})

    def limit(self, user: str, client_id: str, key: str = PRODUCE) -> float | None:
        quota_of = self.quotas.quota_of(key, user, client_id)
        return None if quota_of is None else quota_of.limit

    def waits(self, user: str, client_id: str, amount: float, key: str = PRODUCE) -> bool:
        return self.quotas.record_and_get_throttle_ms(key, user, client_id, amount) > 0


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(1_700_000_000_000)


@pytest.fixture
def clients(tmp_path, clock) -> Iterator[Clients]:
    on_disk = storage(tmp_path, clock=clock)
    yield Clients(on_disk.metadata, clock)
    on_disk.logs.close()


def test_client_without_quota_has_no_budget(clients):
    assert not clients.quotas.limits_clients
    assert not clients.waits("alice", "c", 1e18)
    assert not clients.quotas.budgets[PRODUCE]


@pytest.mark.parametrize(
    "entities",
    [
        {("", "p1"): 2000, ("", "p2"): 4000, ("", None): 500},
        {("p1", ""): 2000, ("p2", ""): 4000, (None, ""): 500},
        {("p1", "p1"): 2000, ("p2", "p2"): 4000, (None, None): 500},
        {("p1", ""): 2000, ("p2", ""): 4000, ("", None): 500},
        {("p1", "p1"): 2000, ("p2", "p2"): 4000, ("", None): 500},
    ],
)
def test_quota_of_each_entity_level_applies_and_can_be_changed(clients, entities):
    """ClientQuotaManagerTest.test…QuotaParsing."""
    assert clients.limit("p1", "p1") is None
    for pair, limit in entities.items():
        clients.set(*pair, limit)
    assert clients.limit("p1", "p1") == 2000
    assert clients.limit("p2", "p2") == 4000
    assert clients.limit("any", "any") == 500
    assert clients.waits("p1", "p1", 2500 * 10)
    first = next(iter(entities))
    clients.set(*first, 3000)
    assert clients.limit("p1", "p1") == 3000
    assert not clients.waits("p1", "p1", 0)
    clients.set(*first, 500)
    assert clients.waits("p1", "p1", 0)
    clients.set(*first, None)
    assert clients.limit("p1", "p1") == 500
    clients.set(*first, 4000)
    assert clients.limit("p1", "p1") == 4000
    assert not clients.waits("p1", "p1", 1000 * 10)


@pytest.mark.parametrize("entity", [(None, ""), ("alice", ""), ("alice", "c1"), ("", None)])
def test_quota_applies_until_it_is_removed(clients, entity):
    """ClientQuotaManagerTest.testSetAndRemove…Quota."""
    assert not clients.waits("alice", "c1", 1000)
    clients.set(*entity, 10)
    assert clients.quotas.limits_clients
    assert clients.waits("alice", "c1", 1000)
    clients.set(*entity, None)
    assert not clients.quotas.limits_clients
    assert not clients.waits("alice", "c1", 1000)
    assert clients.wakes == 2


def test_most_specific_quota_takes_precedence(clients):
    """ClientQuotaManagerTest.testQuotaConfigPrecedence; each amount is a rate over ten seconds."""

    def check(user: str, client_id: str, limit: float, amount: float, *, waits: bool) -> None:
        assert clients.limit(user, client_id) == limit
        assert clients.waits(user, client_id, amount * 10) is waits, (user, client_id)

    for pair, limit in (
        ((None, ""), 1000),
        (("", None), 2000),
        ((None, None), 3000),
        (("A", ""), 4000),
        (("A", "1"), 5000),
        (("B", ""), 6000),
        (("B", "1"), 7000),
        (("B", None), 8000),
        (("C", ""), 10_000),
        (("", "1"), 9000),
    ):
        clients.set(*pair, limit)
    check("A", "1", 5000, 4500, waits=False)
    check("A", "2", 4000, 4500, waits=True)
    check("A", "3", 4000, 0, waits=True)  # shared with the other clients of the user
    check("A", "1", 5000, 0, waits=False)  # the quota of client id 1
    check("B", "1", 7000, 8000, waits=True)
    check("B", "2", 8000, 7000, waits=False)  # a default applies to each client id separately
    check("B", "3", 8000, 7000, waits=False)
    check("D", "1", 3000, 3500, waits=True)
    check("D", "2", 3000, 2500, waits=False)
    check("E", "1", 3000, 2500, waits=False)
    clients.set(None, None, None)
    check("D", "1", 1000, 0, waits=False)  # the same for clients that have not used the quota
    check("E", "4", 1000, 1500, waits=True)
    check("F", "4", 1000, 800, waits=False)
    check("F", "5", 1000, 800, waits=True)
    clients.set(None, "", None)
    check("F", "4", 2000, 0, waits=False)
    check("F", "5", 2000, 0, waits=False)
    check("F", "5", 2000, 2500, waits=True)
    check("G", "5", 2000, 0, waits=True)  # all users share a client id's quota
    clients.set("A", "", 8000)
    clients.set("A", "1", 10_000)
    check("A", "2", 8000, 0, waits=False)
    check("A", "2", 8000, 4500, waits=True)
    check("A", "1", 10_000, 0, waits=False)
    check("A", "1", 10_000, 6000, waits=True)
    clients.set("A", "1", None)
    check("A", "6", 8000, 0, waits=True)
    clients.set("A", "6", 11_000)
    check("A", "6", 11_000, 8500, waits=False)
    clients.set("A", None, 12_000)
    clients.set("A", "6", None)
    check("A", "6", 12_000, 4000, waits=True)  # earlier use still counts


def test_named_user_quota_takes_precedence_over_default_user_and_client(clients):
    clients.set(None, "c", 10)
    clients.set(None, None, 20)
    clients.set("alice", "", 30)
    assert [clients.limit(user, "c") for user in ("alice", "bob")] == [30, 10]
    assert clients.limit("bob", "other") == 20


def test_client_without_id_has_no_client_id_quota(clients):
    for pair in (("", None), ("alice", None), (None, None)):
        clients.set(*pair, 10)
    assert clients.limit("alice", "") is None
    clients.set(None, "", 20)
    assert clients.limit("alice", "") == 20


def test_client_id_with_special_characters_has_its_own_budget(clients):
    """ClientQuotaManagerTest.testClientIdNotSanitized."""
    clients.set("", None, 500)
    assert not clients.waits("ANONYMOUS", "client@#$%", 100)
    assert list(clients.quotas.budgets[PRODUCE]) == [("", "client@#$%")]


def test_fetch_size_is_limited_to_the_quota_of_all_but_one_windows(clients, tmp_path):
    """ClientQuotaManagerTest.testGetMaxValueInQuotaWindow…"""
    assert clients.quotas.most_bytes("alice", "c") == 2**31 - 1
    clients.set("alice", "", 500, FETCH)
    assert clients.quotas.most_bytes("alice", "c") == 5000
    other = BrokerConfig({"quota.window.num": "4", "quota.window.size.seconds": "3"})
    found = ClientQuotas(clients.quotas.table, other, clients.clock)
    assert found.most_bytes("alice", "c") == 500 * 3 * 3
    clients.set("alice", "", 2**62, FETCH)
    assert clients.quotas.most_bytes("alice", "c") == 2**31 - 1


def test_request_throttle_time_is_capped_at_one_sample(clients):
    """ClientRequestQuotaManagerTest.testRequestPercentageQuotaViolation."""
    clients.set("", None, 1, REQUEST)
    assert clients.quotas.record_and_get_throttle_ms(REQUEST, "alice", "c", 5) == 0
    clients.clock.advance(500)
    assert clients.quotas.record_and_get_throttle_ms(REQUEST, "alice", "c", 5.8) > 0
    assert clients.quotas.record_and_get_throttle_ms(REQUEST, "alice", "c", 500) == 1000


def test_controller_mutation_above_quota_is_refused_or_throttled(clients):
    """ControllerMutationQuotaManagerTest, with a rate of 10 per second and a burst of 110."""
    assert clients.quotas.mutations("alice", "c", is_strict=True) is None
    clients.set("alice", "", 10, MUTATION)
    strict = clients.quotas.mutations("alice", "c", is_strict=True)
    assert strict is not None
    strict.record(100)
    strict.record(40)
    assert strict.throttle_ms == 0
    with pytest.raises(ThrottlingQuotaExceededError):
        strict.record(1)
    assert strict.throttle_ms == 3000
    clients.clock.advance(1000)
    assert strict.throttle_ms == 2000
    lenient = clients.quotas.mutations("alice", "other", is_strict=False)
    assert lenient is not None
    lenient.record(10)
    assert lenient.throttle_ms == 3000
    clients.clock.advance(3000)
    assert lenient.throttle_ms == 0
    again = clients.quotas.mutations("alice", "c", is_strict=True)
    assert again is not None
    again.record(1)
    assert again.throttle_ms == 0


def test_unused_budget_expires_after_an_hour(clients):
    """ClientQuotaManagerTest.testExpire…Sensors."""
    clients.set("", None, 500)
    clients.waits("alice", "c1", 100)
    clients.clock.advance(EXPIRES_MS - 1000)
    clients.waits("alice", "c2", 100)
    assert list(clients.quotas.budgets[PRODUCE]) == [("", "c1"), ("", "c2")]
    clients.clock.advance(1001)
    clients.quotas.forget()
    assert list(clients.quotas.budgets[PRODUCE]) == [("", "c2")]
    assert clients.waits("alice", "c1", 10_000)


@pytest.mark.parametrize("key", [PRODUCE, MUTATION])
def test_number_of_budgets_is_limited(clients, monkeypatch, key):
    monkeypatch.setattr(quotas, "MAX_BUDGETS", 3)
    clients.set("", None, 10, key)
    budgets = clients.quotas.budgets[key]

    def take(client_id: str, amount: float) -> None:
        if key == MUTATION:
            changes = clients.quotas.mutations("alice", client_id, is_strict=False)
            assert changes is not None
            changes.record(int(amount))
        else:
            clients.quotas.record_and_get_throttle_ms(key, "alice", client_id, amount)

    for number in range(3):
        take(f"c{number}", 200)
    # All budgets are in use, so further clients share a budget.
    for number in range(3, 10):
        take(f"c{number}", 200)
    assert len(budgets) == 4
    assert list(budgets)[-1] == ("", None)
    assert len(clients.quotas._cache[key]) <= 3
    # An unused budget is evicted for a new client.
    clients.clock.advance(60_000)
    take("late", 1)
    assert ("", "late") in budgets
    assert ("", "c0") not in budgets


def test_budget_of_long_client_id_is_stored_under_a_short_name(clients):
    clients.set("", None, 500)
    long, other = "x" * 30_000, "x" * 29_999 + "y"
    clients.set("", long, 1000)
    assert clients.limit("alice", long) == 1000
    assert clients.limit("alice", other) == 500
    assert clients.waits("alice", long, 11_000)
    assert not clients.waits("alice", other, 4000)
    budgets = clients.quotas.budgets[PRODUCE]
    assert len(budgets) == 2
    assert max(len(name or "") for names in budgets for name in names) <= 128
    assert not clients.quotas._cache[PRODUCE]
    # Names up to the maximum length are kept.
    clients.waits("alice", "z" * 128, 1)
    assert ("", "z" * 128) in budgets


def test_quotas_survive_restart(tmp_path, clock):
    first = storage(tmp_path, clock=clock)
    table = QuotaTable(first.metadata)
    change(first.metadata, ("alice", None), {PRODUCE: 10.0, FETCH: 20.0})
    change(first.metadata, (None, ""), {REQUEST: 12.5})
    change(first.metadata, ("alice", None), {PRODUCE: None})
    first.logs.close()
    second = storage(tmp_path, clock=clock)
    assert QuotaTable(second.metadata).entities == table.entities
    found = ClientQuotas(QuotaTable(second.metadata), BrokerConfig(), clock)
    quota_of = found.quota_of(FETCH, "alice", "c")
    assert quota_of is not None
    assert quota_of.limit == 20
    assert found.limits_clients
    second.logs.close()


def test_table_counts_the_quotas_of_all_entities(clients):
    table = clients.quotas.table
    clients.set("a", "", 1)
    clients.set("a", "", 1, FETCH)
    clients.set("b", "", 1)
    clients.set("b", "", 2)
    clients.set("a", "", None, FETCH)
    assert table.count == 2
    clients.set("c", "", 1)
    assert table.count == len(list(table)) == 3


@pytest.mark.parametrize(
    ("text", "plain"),
    [
        ("10.0.0.1", "10.0.0.1"),
        ("::ffff:10.0.0.1", "10.0.0.1"),
        ("0:0:0:0:0:0:0:1", "::1"),
    ],
)
def test_ip_address_is_normalized_to_one_form(text, plain):
    assert plain_address(text) == plain
    assert counts_of_addresses(f"{text}:7, 1.2.3.4:0") == {plain: 7, "1.2.3.4": 0}


def test_host_name_is_not_resolved_in_address_settings():
    for text in ("kafka.example", "not an address", ""):
        with pytest.raises(ValueError, match="not an IP address"):
            plain_address(text)
    assert counts_of_addresses("localhost:3") == {"127.0.0.1": 3, "::1": 3}
    for text in ("kafka.example:1", "1.2.3.4", "1.2.3.4:-1", ":5", "1.2.3.4:x"):
        with pytest.raises(ValueError, match=r"HOST:COUNT|not an IP address"):
            counts_of_addresses(text)
