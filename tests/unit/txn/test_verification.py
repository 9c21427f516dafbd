"""Verification requests to other coordinators: batching, retries, and every result."""

from __future__ import annotations

import pytest

from fencepost.txn.commands import AddPartitions
from fencepost.txn.verification import (
    MAX_TRANSACTIONS_PER_REQUEST,
    VerificationRequest,
    VerificationResult,
    Verifications,
)

A, B = ("a", 0), ("b", 0)
COORDINATORS: dict[str, int | None] = {"t": 1, "u": 1, "v": 2, "homeless": None}


@pytest.fixture
def verifications() -> Verifications:
    return Verifications(lambda name: COORDINATORS.get(name, 1))


def add(name: str, epoch: int = 0) -> AddPartitions:
    return AddPartitions(name, 1000, epoch, (A, B), verify_only=True)


def next_requests(verifications: Verifications) -> dict[int, VerificationRequest]:
    return {request.broker_id: request for request in verifications.next_requests()}


def test_verifications_for_a_coordinator_share_one_request(
    verifications: Verifications,
) -> None:
    assert verifications.submit(1, add("t")) == []
    assert verifications.submit(2, add("u")) == []
    assert verifications.submit(3, add("v")) == []
    asked = next_requests(verifications)
    assert asked[1].transactions == (add("t"), add("u"))
    assert asked[2].transactions == (add("v"),)
    assert verifications.submit(4, add("t", 1)) == [], "the former is on its way"
    assert next_requests(verifications) == {}
    none = {A: "NONE", B: "NONE"}
    answers = verifications.on_answer(asked[1], "NONE", {"t": none, "u": {**none, B: "X"}})
    assert answers == [VerificationResult(1, {}), VerificationResult(2, {B: "X"})]
    assert next_requests(verifications)[1].transactions == (add("t", 1),)
    assert verifications.on_answer(asked[1], "NONE", {"t": none}) == [], "the answer comes twice"


@pytest.mark.parametrize(
    ("known", "epoch", "refused", "code"),
    [
        (3, 3, 1, "NETWORK_EXCEPTION"),
        (3, 4, 1, "INVALID_PRODUCER_EPOCH"),
        (3, 2, 2, "INVALID_PRODUCER_EPOCH"),
    ],
)
def test_only_the_verification_of_the_newest_epoch_of_an_id_waits(
    verifications: Verifications, known: int, epoch: int, refused: int, code: str
) -> None:
    verifications.submit(1, add("t", known))
    assert verifications.submit(2, add("t", epoch)) == [
        VerificationResult(refused, {A: code, B: code})
    ]
    (command,) = next_requests(verifications)[1].transactions
    assert command.producer_epoch == max(known, epoch)


def test_verification_without_coordinator_is_coordinator_not_available(
    verifications: Verifications,
) -> None:
    code = "COORDINATOR_NOT_AVAILABLE"
    assert verifications.submit(1, add("homeless")) == [VerificationResult(1, {A: code, B: code})]
    assert next_requests(verifications) == {}


@pytest.mark.parametrize(
    ("error", "told"),
    [
        ("CLUSTER_AUTHORIZATION_FAILED", "INVALID_TXN_STATE"),
        ("UNKNOWN_SERVER_ERROR", "UNKNOWN_SERVER_ERROR"),
    ],
)
def test_top_level_verification_error_applies_to_every_partition(
    verifications: Verifications, error: str, told: str
) -> None:
    verifications.submit(1, add("t"))
    verifications.submit(2, add("u"))
    answers = verifications.on_answer(next_requests(verifications)[1], error, {})
    assert answers == [VerificationResult(token, {A: told, B: told}) for token in (1, 2)]


def test_partition_missing_from_verification_response_is_not_verified(
    verifications: Verifications,
) -> None:
    verifications.submit(1, add("t"))
    verifications.submit(2, add("u"))
    lost = "NETWORK_EXCEPTION"
    answers = verifications.on_answer(next_requests(verifications)[1], "NONE", {"t": {A: "NONE"}})
    assert answers == [VerificationResult(1, {B: lost}), VerificationResult(2, {A: lost, B: lost})]


def test_verification_after_lost_connection_fails_with_network_exception(
    verifications: Verifications,
) -> None:
    verifications.submit(1, add("t"))
    asked = next_requests(verifications)[1]
    verifications.submit(2, add("u"))
    lost = dict.fromkeys((A, B), "NETWORK_EXCEPTION")
    assert verifications.on_failure(asked) == [VerificationResult(1, lost)]
    assert next_requests(verifications)[1].transactions == (add("u"),)


def test_verification_by_coordinator_without_support_passes(verifications: Verifications) -> None:
    verifications.submit(1, add("t"))
    assert verifications.not_supported(next_requests(verifications)[1]) == [
        VerificationResult(1, {})
    ]


def test_withdrawal_of_a_broker_fails_its_verifications(verifications: Verifications) -> None:
    verifications.submit(1, add("t"))
    asked = next_requests(verifications)[1]
    verifications.submit(2, add("u"))
    lost = dict.fromkeys((A, B), "NETWORK_EXCEPTION")
    assert verifications.withdraw(1) == [VerificationResult(1, lost), VerificationResult(2, lost)]
    assert verifications.on_answer(asked, "NONE", {"t": {A: "NONE", B: "NONE"}}) == []
    assert verifications.withdraw(1) == []


def test_verifications_above_limit_are_split_into_requests(verifications: Verifications) -> None:
    for token in range(MAX_TRANSACTIONS_PER_REQUEST + 1):
        verifications.submit(token, add(f"id-{token}"))
    first = next_requests(verifications)[1]
    assert len(first.transactions) == MAX_TRANSACTIONS_PER_REQUEST
    verifications.on_failure(first)
    assert len(next_requests(verifications)[1].transactions) == 1
