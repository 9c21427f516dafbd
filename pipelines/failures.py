"""Classification of failures: retry the batch, open a new producer, or stop.

KIP-1050 defines the classes. After a retriable or abortable error the transaction is aborted, a
fenced or unknown producer is replaced, and an error that no retry can fix ends the pipeline.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum

from aiokafka import errors as kafka
from kio.schema.errors import ErrorCode

from fencepost.client.access import missing_right
from fencepost.client.client import (
    ApiError,
    AuthenticationError,
    BrokerUnreachable,
    ConnectionLostError,
    SecurityError,
)


class PipelineError(Exception):
    """The pipeline has stopped; no record of the open transaction is visible."""


class HandlerError(PipelineError):
    """The handler raised an exception, which is the cause."""


class RecordRefusedError(PipelineError):
    """A record was refused, and no dead-letter topic is configured."""


class DataLostError(PipelineError):
    """Records between the group's offset and the log start offset were deleted unread."""


class MissingTopicError(PipelineError):
    """A topic that the pipeline reads or writes does not exist; the message names it."""


class StoppedError(PipelineError):
    """The pipeline was stopped before it had connected."""


class NotAuthorizedError(PipelineError):
    """The broker denies the pipeline an operation; the message names the right."""


class FencedTooOftenError(PipelineError):
    """Another producer keeps using this transactional id."""


class GaveUpError(PipelineError):
    """No transaction was committed within the policy's time limit."""


class MixedOutcomeError(PipelineError):
    """The database has committed a transaction that an administrator has aborted in Kafka.

    The rows are visible; the records and the offsets are not. The message says which came first.
    """


class RetryBatch(Exception):  # noqa: N818 - an instruction, as StopIteration is
    """Raised by a handler if the same batch may succeed later (another service is down)."""


class RebalancedError(Exception):
    """The partitions were revoked, and the transaction was aborted. This is not a failure."""


class PartnerUnavailableError(Exception):
    """The database of a two-phase commit cannot be reached."""


class PartnerFencedError(Exception):
    """Another worker has taken over the transactional id in the database."""


class InDoubtError(Exception):
    """The database may or may not have decided; only a claim of the transactional id can tell."""


class Action(Enum):
    """The reaction to a failure."""

    AGAIN = "abort, and try the same records again"
    REOPEN = "give the producer up, take a new epoch, read on from the committed offsets"
    STOP = "abort and raise"


_AGAIN_CODES = frozenset(
    {
        "illegal_generation",
        "unknown_member_id",
        "rebalance_in_progress",
        "stale_member_epoch",
        "transaction_abortable",
        "unstable_offset_commit",
    }
)
"""Error codes of a rebalance, and the ones for which Kafka requires only an abort."""

_REOPEN_CODES = frozenset(
    {
        "producer_fenced",
        "invalid_producer_epoch",
        "invalid_producer_id_mapping",
        "invalid_txn_state",
        "unknown_producer_id",
        "out_of_order_sequence_number",
        "concurrent_transactions",
    }
)

_STOP_ERRORS = (
    kafka.IllegalArgumentError,
    kafka.KafkaConfigurationError,
    kafka.TopicAuthorizationFailedError,
    kafka.GroupAuthorizationFailedError,
    kafka.ClusterAuthorizationFailedError,
    kafka.AuthenticationFailedError,
    kafka.TransactionalIdAuthorizationFailed,
    kafka.UnsupportedVersionError,
    kafka.IncompatibleBrokerVersion,
    kafka.MessageSizeTooLargeError,
    kafka.InvalidTopicError,
    kafka.InvalidTransactionTimeout,
    kafka.InvalidGroupIdError,
    kafka.InvalidSessionTimeoutError,
    kafka.InconsistentGroupProtocolError,
)
_FENCE_ERRORS = (kafka.ProducerFenced, kafka.InvalidProducerEpoch, PartnerFencedError)
_FENCE_CODES = frozenset({"producer_fenced", "invalid_producer_epoch"})


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield ``error`` and its chain of causes: aiokafka wraps the error that ends its sender."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__


def classify(error: BaseException) -> Action:
    """Return the reaction to ``error``."""
    actions = [_of_one(cause) for cause in causes(error)]
    for action in (Action.STOP, Action.AGAIN, Action.REOPEN):
        if action in actions:
            return action
    return Action.STOP


def _of_one(error: BaseException) -> Action | None:
    if isinstance(error, RebalancedError | RetryBatch):
        return Action.AGAIN
    if isinstance(error, PipelineError | AuthenticationError | SecurityError):
        return Action.STOP
    if isinstance(error, ApiError):
        name = error.code.name
        if name in _AGAIN_CODES:
            return Action.AGAIN
        return Action.REOPEN if name in _REOPEN_CODES or error.code.retriable else Action.STOP
    if isinstance(error, _STOP_ERRORS):
        return Action.STOP
    if isinstance(error, kafka.IllegalStateError):
        return Action.AGAIN  # a seek in a partition that was just revoked
    if isinstance(
        error,
        kafka.KafkaError
        | TimeoutError
        | OSError
        | BrokerUnreachable
        | ConnectionLostError
        | PartnerUnavailableError
        | PartnerFencedError
        | InDoubtError,
    ):
        return Action.REOPEN
    return None


_DENIED: Mapping[type[BaseException], tuple[ErrorCode, str]] = {
    kafka.TopicAuthorizationFailedError: (ErrorCode.topic_authorization_failed, "Produce"),
    kafka.GroupAuthorizationFailedError: (ErrorCode.group_authorization_failed, "JoinGroup"),
    kafka.TransactionalIdAuthorizationFailed: (
        ErrorCode.transactional_id_authorization_failed,
        "InitProducerId",
    ),
    kafka.ClusterAuthorizationFailedError: (
        ErrorCode.cluster_authorization_failed,
        "InitProducerId",
    ),
}
"""aiokafka's authorization errors, each with a request that needs the right."""


def explained(error: Exception, sources: Collection[str] = (), username: str = "") -> Exception:
    """Return ``error``, or an error that names the missing right and its user.

    Topics in ``sources`` are read; other topics are written.
    """
    who = f" to user {username!r}" if username else ""
    for cause in causes(error):
        if isinstance(cause, NotAuthorizedError):
            return cause
        if isinstance(cause, ApiError):
            missing = missing_right(cause.api, cause.code)
        elif type(cause) in _DENIED:
            code, api = _DENIED[type(cause)]
            name = ", ".join(str(part) for part in cause.args)
            is_read = code is ErrorCode.topic_authorization_failed and name in sources
            missing = missing_right("Fetch" if is_read else api, code, name)
        else:
            continue
        if missing:
            denied = NotAuthorizedError(f"{missing} is missing{who}: {cause}")
            denied.__cause__ = error
            return denied
    return error


def is_fence(error: BaseException) -> bool:
    """Return whether another producer with the same transactional id has taken over."""
    return any(
        isinstance(cause, _FENCE_ERRORS)
        or (isinstance(cause, ApiError) and cause.code.name in _FENCE_CODES)
        for cause in causes(error)
    )


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Limits of a pipeline's retries.

    The pipeline stops after ``give_up_ms`` without a committed transaction while there was work, or
    after more than ``max_fences`` fences within ``fence_window_ms``. A start waits ``start_ms`` for
    a broker.
    Pauses grow to ``max_backoff_ms``, or to ``max_login_backoff_ms`` if a login is refused.
    """

    backoff_ms: int = 50
    max_backoff_ms: int = 2_000
    max_login_backoff_ms: int = 30_000
    give_up_ms: int = 300_000
    max_fences: int = 5
    fence_window_ms: int = 60_000
    start_ms: int = 60_000


class Patience:
    """Counts consecutive failures. Reads no clock: ``now_ms`` is an argument."""

    def __init__(self, policy: RetryPolicy) -> None:
        self._policy = policy
        self._failures = 0
        self._since_ms = 0.0
        self._fences: list[float] = []

    def succeeded(self) -> None:
        """Reset the count: a transaction was committed, or there was nothing to do."""
        self._failures = 0

    def failed(self, error: BaseException, now_ms: float, *, is_login: bool = False) -> float:
        """Return the pause before the next attempt, in milliseconds.

        Raises :class:`GaveUpError` and :class:`FencedTooOftenError`.
        """
        policy = self._policy
        if not self._failures:
            self._since_ms = now_ms
        elif now_ms - self._since_ms >= policy.give_up_ms:
            raise GaveUpError(
                f"no progress for {policy.give_up_ms} ms, {self._failures} attempts: {error}"
            ) from error
        if is_fence(error):
            recent = now_ms - policy.fence_window_ms
            self._fences = [*(at for at in self._fences if at > recent), now_ms]
            if len(self._fences) > policy.max_fences:
                raise FencedTooOftenError(
                    f"fenced {len(self._fences)} times within {policy.fence_window_ms} ms: "
                    "does another process use the same transactional id?"
                ) from error
        self._failures += 1
        doubled = policy.backoff_ms * 2.0 ** min(self._failures - 1, 16)
        most = policy.max_login_backoff_ms if is_login else policy.max_backoff_ms
        return float(min(most, doubled))
