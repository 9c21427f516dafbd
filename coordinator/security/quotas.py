"""Client quotas: the limits of users and clients, and their recent usage.

Usage is counted in budgets, one for each quota that applies to a client; several clients may share
a budget (``quota_entities.candidates``). Without a quota nothing is counted.

Source: ``ClientQuotaManager``, ``ClientRequestQuotaManager``, ``ControllerMutationQuotaManager``.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable
from typing import Final

from fencepost.cluster.quota_entities import (
    CLIENT_KEYS,
    FETCH,
    MUTATION,
    REQUEST,
    Entity,
    Pair,
    candidates,
    pair_of,
)
from fencepost.coordinator.config.broker_config import BrokerConfig
from fencepost.coordinator.errors import ThrottlingQuotaExceededError
from fencepost.coordinator.security.quota_table import QuotaTable
from fencepost.coordinator.security.rates import Rate, RateWindow, TokenBucket
from fencepost.logcore.clock import Clock
from fencepost.logcore.values import dataclass

MAX_BUDGETS: Final = 10_000
"""The maximum number of budgets of one kind of quota, about 2 KiB each. Beyond this number, clients
that are new to the broker share one budget per quota, so that invented names cannot exhaust memory.
"""

MAX_KEPT_CHARACTERS: Final = 128
"""The maximum number of characters of a name that a budget keeps. A longer name (the protocol
allows 32 KiB) is replaced by its beginning and a digest."""

EXPIRES_MS: Final = 3_600_000
"""The time after which an unused budget is dropped."""

MAX_DEBT_MS: Final = 30_000
"""The maximum throttle time, in milliseconds, for the processor time that threads have spent on a
request. Clients give up a request after this time (``request.timeout.ms``)."""

ALL_BYTES: Final = 2**31 - 1
"""The maximum size that a Fetch can request."""


class QuotaUsage:
    """The usage of one or more clients under one quota."""

    __slots__ = ("bucket", "limit", "rate", "shared_by", "throttled_ms", "throttles", "used_ms")

    def __init__(self, shared_by: Pair, window: RateWindow, *, is_bucket: bool) -> None:
        self.shared_by = shared_by
        """User and client id. The user is empty if all users share the budget, and the client id if
        all clients do."""
        self.rate = Rate(window)
        self.bucket = TokenBucket(window) if is_bucket else None
        self.limit = 0.0
        """The limit at the last use."""
        self.used_ms = 0
        self.throttles = 0
        """How often a client was throttled."""
        self.throttled_ms = 0
        """The sum of all throttle times."""

    def is_quiet(self, now_ms: int) -> bool:
        """Return whether the budget limits no client now, so that it may be dropped."""
        if self.bucket is not None:
            burst = self.bucket.window.full_ms / 1000 * self.limit
            return self.bucket.tokens(self.limit, now_ms) >= burst
        return now_ms - self.used_ms >= self.rate.window.full_ms

    def throttled(self, throttle_ms: int) -> None:
        """Count a throttle time; 0 is not counted."""
        if throttle_ms:
            self.throttles += 1
            self.throttled_ms += throttle_ms


@dataclass(frozen=True, slots=True)
class ClientQuota:
    """The quota that applies to a client, and the clients that share its budget."""

    entity: Pair
    shared_by: Pair
    limit: float


def bounded_name(name: str | None) -> str | None:
    """Return a name, or a bounded form with a digest if it is long."""
    if name is None or len(name) <= MAX_KEPT_CHARACTERS:
        return name
    digest = hashlib.blake2b(name.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
    return name[: MAX_KEPT_CHARACTERS - 33] + "…" + digest


class ClientQuotas:
    """The quotas of users and clients, in ``services.quotas``. Used only on the event loop."""

    def __init__(self, table: QuotaTable, config: BrokerConfig, clock: Clock) -> None:
        self.table = table
        self._clock = clock
        self.window = RateWindow(
            config.int("quota.window.num"), 1000 * config.int("quota.window.size.seconds")
        )
        self._controller_window = RateWindow(
            config.int("controller.quota.window.num"),
            1000 * config.int("controller.quota.window.size.seconds"),
        )
        self._limits: dict[str, dict[Pair, float]] = {key: {} for key in CLIENT_KEYS}
        self._cache: dict[str, dict[tuple[str, str], ClientQuota | None]] = {
            key: {} for key in CLIENT_KEYS
        }
        self.budgets: dict[str, OrderedDict[Pair, QuotaUsage]] = {
            key: OrderedDict()
            for key in CLIENT_KEYS  # longest unused first
        }
        self._listeners: list[Callable[[], None]] = []
        for entity, key, value in table:
            self._set(entity, key, value)
        table.listen(self._changed)

    # --- the quotas ---

    @property
    def limits_clients(self) -> bool:
        """Whether any user or client has a quota."""
        return any(self._limits.values())

    def limits(self, key: str) -> bool:
        """Return whether any user or client has a quota of that kind."""
        return bool(self._limits[key])

    def listen(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` after every change of a user's or client's quota."""
        self._listeners.append(callback)

    def _changed(self, entity: Entity, key: str, value: float | None) -> None:
        if self._set(entity, key, value):
            for listener in self._listeners:
                listener()

    def _set(self, entity: Entity, key: str, value: float | None) -> bool:
        limits = self._limits.get(key)
        if limits is None:
            return False
        if value is None:
            limits.pop(pair_of(entity), None)
        else:
            limits[pair_of(entity)] = value
        self._cache[key].clear()
        return True

    def quota_of(self, key: str, user: str, client_id: str) -> ClientQuota | None:
        """Return the quota of a kind that applies to a client; None if there is none."""
        cache, names = self._cache[key], (user, client_id)
        try:
            return cache[names]
        except KeyError:
            pass
        limits = self._limits[key]
        quota = next(
            (
                ClientQuota(
                    entity, (bounded_name(shared_by[0]), bounded_name(shared_by[1])), limits[entity]
                )
                for entity, shared_by in candidates(user, client_id)
                if entity in limits
            ),
            None,
        )
        if len(user) + len(client_id) <= 2 * MAX_KEPT_CHARACTERS:
            if len(cache) >= MAX_BUDGETS:
                cache.clear()
            cache[names] = quota
        return quota

    # --- usage ---

    def record_and_get_throttle_ms(
        self, key: str, user: str, client_id: str, amount: float, *, is_debt: bool = False
    ) -> int:
        """Count ``amount`` against a client's quota; return its throttle time in milliseconds.

        For event loop time, the throttle time is at most one sample of the window. ``is_debt``
        marks a request that has used processor time in threads; its throttle time is at most
        MAX_DEBT_MS.
        """
        budget = self.budget(key, user, client_id)
        if budget is None:
            return 0
        now_ms = self._clock.monotonic_ms()
        budget.rate.record(amount, now_ms)
        throttle_ms = budget.rate.throttle_ms(budget.limit, now_ms)
        if key != REQUEST:
            return throttle_ms
        return min(throttle_ms, MAX_DEBT_MS if is_debt else self.window.sample_ms)

    def is_unused(self, key: str, user: str, client_id: str) -> bool:
        """Return whether no client that shares the budget has used it in the window."""
        budget = self.budget(key, user, client_id)
        return budget is None or budget.rate.per_second(self._clock.monotonic_ms()) == 0

    def note(self, key: str, user: str, client_id: str, amount: float) -> None:
        """Count an amount without throttling; a negative amount undoes an earlier one."""
        budget = self.budget(key, user, client_id)
        if budget is not None:
            budget.rate.record(amount, self._clock.monotonic_ms())

    def throttled(self, key: str, user: str, client_id: str, throttle_ms: int) -> None:
        """Record the throttle time that this quota caused."""
        budget = self.budget(key, user, client_id)
        if budget is not None:
            budget.throttled(throttle_ms)

    def most_bytes(self, user: str, client_id: str) -> int:
        """Return how many bytes a Fetch may return without throttling after an idle window."""
        quota_of = self.quota_of(FETCH, user, client_id)
        if quota_of is None:
            return ALL_BYTES
        return int(min(ALL_BYTES, quota_of.limit * self.window.least_ms / 1000))

    def mutations(self, user: str, client_id: str, *, is_strict: bool) -> PartitionMutations | None:
        """Return the counter of a request's partition mutations; None if no quota applies."""
        budget = self.budget(MUTATION, user, client_id)
        return (
            None if budget is None else PartitionMutations(budget, self._clock, is_strict=is_strict)
        )

    def budget(self, key: str, user: str, client_id: str) -> QuotaUsage | None:
        """Return a client's budget; None if no quota applies."""
        quota_of = self.quota_of(key, user, client_id)
        if quota_of is None:
            return None
        budgets, now_ms = self.budgets[key], self._clock.monotonic_ms()
        budget = budgets.get(quota_of.shared_by)
        if budget is None:
            budget = self._new(key, quota_of, now_ms)
        else:
            budgets.move_to_end(quota_of.shared_by)
        budget.limit, budget.used_ms = quota_of.limit, now_ms
        return budget

    def _new(self, key: str, quota_of: ClientQuota, now_ms: int) -> QuotaUsage:
        budgets, shared_by = self.budgets[key], quota_of.shared_by
        self.forget(now_ms)
        if len(budgets) >= MAX_BUDGETS:
            oldest = next(iter(budgets.values()))
            if oldest.is_quiet(now_ms):
                del budgets[oldest.shared_by]
            else:
                # New clients share a budget, whose key is the quota's entity. The entity is a
                # default one, which no client is named after, or one of the few configured ones.
                shared_by = quota_of.entity
                if shared_by in budgets:
                    return budgets[shared_by]
        is_bucket = key == MUTATION
        window = self._controller_window if is_bucket else self.window
        budgets[shared_by] = budget = QuotaUsage(shared_by, window, is_bucket=is_bucket)
        return budget

    def forget(self, now_ms: int | None = None) -> None:
        """Drop budgets that have expired."""
        if now_ms is None:
            now_ms = self._clock.monotonic_ms()
        for budgets in self.budgets.values():
            while budgets:
                oldest = next(iter(budgets.values()))
                if now_ms - oldest.used_ms <= EXPIRES_MS:
                    break
                del budgets[oldest.shared_by]


class PartitionMutations:
    """Counts the partitions that one request creates or deletes.

    A strict request is rejected once the client's token bucket is overdrawn. Any other request
    creates or deletes all its partitions, and its client is throttled afterwards.
    """

    def __init__(self, budget: QuotaUsage, clock: Clock, *, is_strict: bool) -> None:
        self._budget, self._clock, self._is_strict = budget, clock, is_strict
        self._until_ms = 0

    @property
    def throttle_ms(self) -> int:
        """The current throttle time in milliseconds."""
        return max(0, self._until_ms - self._clock.monotonic_ms())

    def record(self, partitions: int) -> None:
        """Take partitions from the bucket, or take none and raise ThrottlingQuotaExceededError."""
        budget, now_ms = self._budget, self._clock.monotonic_ms()
        bucket = budget.bucket
        if bucket is None:
            raise TypeError("the budget is not one of partition mutations")
        if self._is_strict:
            wait_ms = bucket.throttle_ms(budget.limit, now_ms)
            if wait_ms:
                self._until_ms = now_ms + wait_ms
                raise ThrottlingQuotaExceededError("The throttling quota has been exceeded.")
        bucket.take(partitions, budget.limit, now_ms)
        budget.rate.record(partitions, now_ms)
        if not self._is_strict:
            self._until_ms = now_ms + bucket.throttle_ms(budget.limit, now_ms)
