"""Verification of transactions whose coordinator is another broker.

Source: ``AddPartitionsToTxnManager``; ``txn/verification.py`` decides what to ask and when.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Final

import structlog
from kio.schema.errors import ErrorCode

from fencepost.cluster.image import MetadataImage
from fencepost.coordinator.errors import UnknownTopicOrPartitionError
from fencepost.coordinator.metadata.publication import Subscriber
from fencepost.coordinator.replication.peers import Peers, Purpose
from fencepost.coordinator.runtime.background import log_failure, spawn
from fencepost.coordinator.runtime.errors import (
    CoordinatorLoadInProgressError,
    CoordinatorNotAvailableError,
    NotCoordinatorError,
    VerificationLostError,
)
from fencepost.coordinator.storage.storage import Storage
from fencepost.logcore.errors import InvalidProducerEpochError, InvalidTxnStateError
from fencepost.logcore.machine import DomainError
from fencepost.protocol import ApiKey
from fencepost.protocol.errors import UnsupportedVersion, WireError
from fencepost.protocol.messages import RequestFactory
from fencepost.protocol.schema import Entity
from fencepost.txn.commands import AddPartitions, TopicPartition, by_topic
from fencepost.txn.errors import (
    ConcurrentTransactionsError,
    InvalidProducerIdMappingError,
    ProducerFencedError,
    TooManyPartitionsError,
    TransactionAbortableError,
)
from fencepost.txn.verification import (
    CoordinatorOf,
    VerificationRequest,
    VerificationResult,
    Verifications,
)

FIRST_BATCHED_VERSION: Final = 4

ERRORS: Mapping[str, type[DomainError]] = MappingProxyType(
    {
        "PRODUCER_FENCED": ProducerFencedError,
        "INVALID_PRODUCER_EPOCH": InvalidProducerEpochError,
        "INVALID_PRODUCER_ID_MAPPING": InvalidProducerIdMappingError,
        "INVALID_TXN_STATE": InvalidTxnStateError,
        "TRANSACTION_ABORTABLE": TransactionAbortableError,
        "CONCURRENT_TRANSACTIONS": ConcurrentTransactionsError,
        "COORDINATOR_LOAD_IN_PROGRESS": CoordinatorLoadInProgressError,
        "NOT_COORDINATOR": NotCoordinatorError,
        "NETWORK_EXCEPTION": VerificationLostError,
        "UNKNOWN_TOPIC_OR_PARTITION": UnknownTopicOrPartitionError,
        "POLICY_VIOLATION": TooManyPartitionsError,
    }
)
"""The exceptions that stand for a coordinator's errors; for any other error,
CoordinatorNotAvailableError."""

Refused = Mapping[TopicPartition, DomainError]
"""The partitions that are not in the transaction, each with its error."""

_log = structlog.get_logger(__name__)


class RemoteVerifier:
    """Sends AddPartitionsToTxn to other brokers, with one request in flight to each.

    Only the event loop may use it.
    """

    def __init__(self, storage: Storage, peers: Peers, coordinator_of: CoordinatorOf) -> None:
        self._peers, self._node_id = peers, storage.node_id
        self.questions = Verifications(coordinator_of)
        self._tokens = itertools.count()
        self._waiting: dict[int, asyncio.Future[Refused]] = {}
        self._asking: set[asyncio.Task[None]] = set()
        storage.metadata.subscribe(Subscriber.VERIFICATION, self._published)

    def ask(self, command: AddPartitions) -> asyncio.Future[Refused]:
        """Verify a transaction's partitions, or add them; the future returns the rejected ones."""
        future: asyncio.Future[Refused] = asyncio.get_running_loop().create_future()
        token = next(self._tokens)
        self._waiting[token] = future
        self._resolve(self.questions.submit(token, command))
        self._send()
        return future

    def close(self) -> None:
        """Cancel all requests and their futures."""
        for task in self._asking:
            task.cancel()
        for future in self._waiting.values():
            future.cancel()
        self._waiting.clear()

    def _published(self, old: MetadataImage, image: MetadataImage) -> None:
        """Fail verifications that wait for an unregistered, fenced or restarted broker."""
        for broker_id, broker in old.brokers.items():
            now = image.brokers.get(broker_id)
            if now is not broker and (now is None or now.fenced or now.epoch != broker.epoch):
                self._peers.hang_up(broker_id, Purpose.ADD_PARTITIONS)
                self._resolve(self.questions.withdraw(broker_id))

    def _send(self) -> None:
        for ask in self.questions.next_requests():
            task = spawn(self._exchange(ask), f"transactions to broker {ask.broker_id}")
            self._asking.add(task)
            task.add_done_callback(self._asking.discard)

    async def _exchange(self, ask: VerificationRequest) -> None:
        peer = self._peers.channel(ask.broker_id, Purpose.ADD_PARTITIONS)
        try:
            answer = await peer.newest(
                ApiKey.ADD_PARTITIONS_TO_TXN, lambda make: _request(make, ask.transactions)
            )
        except UnsupportedVersion:
            _log.warning("transactions not verified: the coordinator is old", broker=ask.broker_id)
            self._resolve(self.questions.not_supported(ask))
        except WireError as error:
            _log.info("transactions not verified", broker=ask.broker_id, cause=str(error))
            self._resolve(self.questions.on_failure(ask))
        except Exception as error:  # noqa: BLE001 - producers wait for an answer
            log_failure("verify transactions", error, broker=ask.broker_id)
            self._resolve(self.questions.on_failure(ask))
        else:
            self._resolve(self.questions.on_answer(ask, _name(answer.error_code), _results(answer)))
        self._send()

    def _resolve(self, answers: Iterable[VerificationResult]) -> None:
        for answer in answers:
            future = self._waiting.pop(answer.token, None)
            if future is not None and not future.done():  # cancelled if the client disconnected
                future.set_result(
                    {partition: _error(code) for partition, code in answer.errors.items()}
                )


def _error(code: str) -> DomainError:
    return ERRORS.get(code, CoordinatorNotAvailableError)(
        f"the transaction coordinator says {code}"
    )


def _request(make: RequestFactory, transactions: Iterable[AddPartitions]) -> Entity:
    if make.version < FIRST_BATCHED_VERSION:
        raise UnsupportedVersion(ApiKey.ADD_PARTITIONS_TO_TXN, FIRST_BATCHED_VERSION)
    return make.AddPartitionsToTxnRequest(
        transactions=tuple(
            make.AddPartitionsToTxnTransaction(
                transactional_id=transaction.transactional_id,
                producer_id=transaction.producer_id,
                producer_epoch=transaction.producer_epoch,
                verify_only=transaction.verify_only,
                topics=tuple(
                    make.AddPartitionsToTxnTopic(name=name, partitions=tuple(indexes))
                    for name, indexes in by_topic(transaction.partitions).items()
                ),
            )
            for transaction in transactions
        )
    )


def _results(answer: Entity) -> dict[str, dict[TopicPartition, str]]:
    return {
        transaction.transactional_id: {
            (topic.name, part.partition_index): _name(part.partition_error_code)
            for topic in transaction.topic_results
            for part in topic.results_by_partition
        }
        for transaction in answer.results_by_transaction
    }


def _name(code: ErrorCode) -> str:
    return code.name.upper()
