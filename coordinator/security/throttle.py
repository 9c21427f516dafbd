"""Counts one request against its client's quotas, and determines the throttle time.

The response is sent at once and contains the throttle time. The broker then stops reading from the
connection for that time.
Source: ``RequestHandlerHelper``, ``KafkaApis``; KIP-124, KIP-219.
"""

from __future__ import annotations

from collections.abc import Awaitable, Coroutine, Generator
from types import CoroutineType
from typing import Any, TypeVar

from fencepost.cluster.quota_entities import FETCH, MUTATION, PRODUCE, REQUEST
from fencepost.coordinator.runtime.turns import Work
from fencepost.coordinator.security.quotas import ClientQuotas, PartitionMutations
from fencepost.logcore.clock import monotonic_s
from fencepost.logcore.tracebacks import without_traceback

T = TypeVar("T")


class LoopTime:
    """The time that work occupies the event loop, without its waits."""

    __slots__ = ("_seconds", "_since")

    def __init__(self) -> None:
        self._seconds = 0.0
        self._since: float | None = None

    @property
    def seconds(self) -> float:
        """The time so far."""
        since = self._since
        return self._seconds + (0.0 if since is None else monotonic_s() - since)

    def timed(self, work: Generator[Any, Any, T]) -> Work[T]:
        """Run ``work`` and yield its futures; count the time of its steps, but not of its waits."""
        received: Any = None
        failure: BaseException | None = None
        while True:
            self._since = monotonic_s()
            try:
                wait = work.send(received) if failure is None else work.throw(failure)
            except StopIteration as end:
                result: T = end.value
                return result
            finally:
                self._seconds, self._since = self.seconds, None
                received = failure = None
            try:
                received = yield wait
            except GeneratorExit:
                work.close()
                raise
            except BaseException as error:  # noqa: BLE001 - re-raised in the work
                failure = without_traceback(error)

    def awaited(self, result: Awaitable[T]) -> Awaitable[T]:
        """Time a coroutine in the same way; any other awaitable takes no time on the loop."""
        return _Timed(self, result) if isinstance(result, CoroutineType) else result


class _Timed(Awaitable[T]):
    def __init__(self, time_of: LoopTime, coroutine: Awaitable[T]) -> None:
        self._time_of, self._coroutine = time_of, coroutine

    def __await__(self) -> Generator[Any, Any, T]:
        return self._time_of.timed(self._coroutine.__await__())


class RequestQuotas:
    """The quotas of one request; without ``counts_time``, its time on the loop is not counted."""

    __slots__ = (
        "_client_id",
        "_counted_s",
        "_counts_time",
        "_fetch_ms",
        "_has_debt",
        "_loop_time",
        "_mutations",
        "_quotas",
        "_throttle_ms",
        "_user",
    )

    def __init__(
        self,
        quotas: ClientQuotas,
        loop_time: LoopTime,
        user: str,
        client_id: str | None,
        *,
        counts_time: bool = True,
    ) -> None:
        self._quotas, self._loop_time = quotas, loop_time
        self._user, self._client_id = user, client_id or ""
        self._counts_time = counts_time
        self._counted_s = 0.0
        self._has_debt = False
        """Whether threads have worked for the request, so that its throttle time may be longer."""
        self._throttle_ms: int | None = None
        self._mutations: PartitionMutations | None = None
        self._fetch_ms = 0
        """The throttle time for the bytes of a ShareFetch."""

    # --- for handlers ---

    def for_envelope(self, user: str, client_id: str | None) -> RequestQuotas:
        """Return the quotas of the request in an Envelope, from a client of another broker.

        The other broker throttles the client. This broker counts the mutations of topics, but not
        the time on the event loop.
        """
        return RequestQuotas(self._quotas, self._loop_time, user, client_id, counts_time=False)

    def timed(self, work: Coroutine[Any, Any, T]) -> Awaitable[T]:
        """Return a coroutine whose time on the loop counts as time of the request."""
        return self._loop_time.awaited(work)

    def took_in_thread(self, seconds: float) -> None:
        """Count processor time of a thread that worked for the request, even if unanswered."""
        if self._counts_time and seconds:
            self._has_debt = True
            self._quotas.note(REQUEST, self._user, self._client_id, 100 * seconds)

    @property
    def most_bytes(self) -> int:
        """The maximum number of bytes of records that a Fetch may return."""
        return self._quotas.most_bytes(self._user, self._client_id)

    def may_fetch(self, size: int) -> bool:
        """Return whether a Fetch response may contain ``size`` bytes of records, or must be empty.

        A client that has fetched nothing for a whole window gets even a batch that is larger than
        the window's quota. Otherwise its consumer would wait forever, as with Apache Kafka.
        """
        was_quiet = self._quotas.is_unused(FETCH, self._user, self._client_id)
        time_ms = self._time_ms()
        bytes_ms = self._quotas.record_and_get_throttle_ms(FETCH, self._user, self._client_id, size)
        if not self._decide((REQUEST, time_ms), (FETCH, bytes_ms)) or (was_quiet and not time_ms):
            return True
        self._quotas.note(FETCH, self._user, self._client_id, -size)
        return False

    def may_begin_fetch(self) -> bool:
        """Return whether a ShareFetch may acquire records; otherwise the client is throttled."""
        self._fetch_ms = self._quotas.record_and_get_throttle_ms(
            FETCH, self._user, self._client_id, 0
        )
        return not self._fetch_ms

    def fetched(self, size: int) -> None:
        """Count the bytes of acquired records; the client is throttled after this response."""
        if size:
            self._fetch_ms = self._quotas.record_and_get_throttle_ms(
                FETCH, self._user, self._client_id, size
            )

    def take_partitions(self, count: int, *, is_strict: bool) -> None:
        """Count partitions that a request creates or deletes; may be called several times for it.

        Raises ThrottlingQuotaExceededError for a strict request that must wait.
        """
        if self._mutations is None:
            self._mutations = self._quotas.mutations(
                self._user, self._client_id, is_strict=is_strict
            )
        if self._mutations is not None:
            self._mutations.record(count)

    def discard_mutations(self) -> None:
        """Do not throttle the client for topics that were not created."""
        self._mutations = None

    # --- for the connection ---

    def decided(self, produced: int | None, *, is_answered: bool) -> int:
        """Count the request's usage before its response is sent; return the throttle time in ms.

        ``produced`` is the size of a Produce request in bytes. Without a response the time on the
        loop is not counted.
        """
        if self._throttle_ms is not None:
            return self._throttle_ms
        causes = [(REQUEST, self._time_ms(is_answered=is_answered))]
        if produced is not None:
            took_ms = self._quotas.record_and_get_throttle_ms(
                PRODUCE, self._user, self._client_id, produced
            )
            causes.append((PRODUCE, took_ms))
        if self._mutations is not None:
            causes.append((MUTATION, self._mutations.throttle_ms))
        causes.append((FETCH, self._fetch_ms))
        return self._decide(*causes)

    def sent(self) -> None:
        """Count the time of sending the response, for the client's next request."""
        if self._counts_time and self._counted_s:
            rest_s = self._loop_time.seconds - self._counted_s
            self._quotas.note(REQUEST, self._user, self._client_id, 100 * rest_s)

    def _time_ms(self, *, is_answered: bool = True) -> int:
        if not self._counts_time or not (is_answered or self._has_debt):
            return 0
        if is_answered:
            self._counted_s = self._loop_time.seconds
        percent = 100 * self._counted_s
        return self._quotas.record_and_get_throttle_ms(
            REQUEST, self._user, self._client_id, percent, is_debt=self._has_debt
        )

    def _decide(self, *causes: tuple[str, int]) -> int:
        key, throttle_ms = max(causes, key=lambda cause: cause[1])
        self._throttle_ms = throttle_ms
        if throttle_ms:
            self._quotas.throttled(key, self._user, self._client_id, throttle_ms)
        return throttle_ms
