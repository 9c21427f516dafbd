"""aiokafka's options for encryption and logins, and the handling of refusals."""

from __future__ import annotations

import asyncio
import logging
import ssl

import pytest
from aiokafka import errors as kafka
from aiokafka.protocol.admin import SaslAuthenticateRequest_v1
from kio.schema.errors import ErrorCode

from fencepost.client.access import missing_right
from fencepost.client.client import (
    ApiError,
    AuthenticationError,
    SecurityError,
)
from fencepost.client.security import PLAINTEXT, Security
from fencepost.pipelines.failures import Action, Patience, RetryPolicy, classify, explained
from fencepost.pipelines.security import aiokafka_options

SECRET = "hunter2"


def scram(**more: str) -> Security:
    return Security.of(
        {
            "security.protocol": "SASL_SSL",
            "sasl.mechanism": "SCRAM-SHA-256",
            "sasl.username": "alice",
            "sasl.password": SECRET,
            **more,
        }
    )


def test_plaintext_needs_no_aiokafka_options() -> None:
    assert aiokafka_options(PLAINTEXT) == {}


def test_scram_over_tls_is_translated_into_aiokafka_options() -> None:
    options = aiokafka_options(scram())
    context = options.pop("ssl_context")
    assert isinstance(context, ssl.SSLContext)
    assert context.check_hostname
    assert options == {
        "security_protocol": "SASL_SSL",
        "sasl_mechanism": "SCRAM-SHA-256",
        "sasl_plain_username": "alice",
        "sasl_plain_password": SECRET,
    }


def test_oauthbearer_login_is_translated_into_a_token_provider() -> None:
    security = Security.of(
        {
            "security.protocol": "SASL_PLAINTEXT",
            "sasl.mechanism": "OAUTHBEARER",
            "sasl.jaas.config": "org.apache.kafka.common.security.oauthbearer."
            'OAuthBearerLoginModule required unsecuredLoginStringClaim_sub="alice";',
        }
    )
    options = aiokafka_options(security)
    provider = options["sasl_oauth_token_provider"]
    assert asyncio.run(provider.token()).count(".") == 2
    assert provider.extensions() == {}
    assert "sasl_plain_password" not in options


def test_login_requests_are_not_in_aiokafkas_log(caplog: pytest.LogCaptureFixture) -> None:
    aiokafka_options(scram())
    log = logging.getLogger("aiokafka.conn")
    with caplog.at_level(logging.DEBUG, "aiokafka.conn"):
        log.debug("Request %d: %s", 1, SaslAuthenticateRequest_v1(SECRET.encode()))
        log.debug("Request %d: %s", 2, "another")
    assert caplog.messages == ["Request 2: another"]


@pytest.mark.parametrize(
    "error",
    [AuthenticationError("no"), SecurityError("no"), kafka.TopicAuthorizationFailedError("t")],
)
def test_authentication_and_authorization_errors_are_not_retried(error: Exception) -> None:
    assert classify(error) is Action.STOP


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (kafka.TopicAuthorizationFailedError("in"), "the right READ on the topic 'in' is missing"),
        (kafka.TopicAuthorizationFailedError("out"), "the right WRITE on the topic 'out'"),
        (kafka.GroupAuthorizationFailedError("g"), "the right READ on the group 'g'"),
        (kafka.TransactionalIdAuthorizationFailed("x"), "WRITE on the transactional id 'x'"),
        (ApiError(30, "FindCoordinator"), "the right READ on the group is missing"),
        (ApiError(29, "TxnOffsetCommit"), "the right READ on the topic is missing"),
        (ApiError(31, "CreateTopics"), "a right on the cluster is missing"),
    ],
)
def test_authorization_error_names_the_missing_right(error: Exception, told: str) -> None:
    wrapped = kafka.KafkaError("the sender is dead")
    wrapped.__cause__ = error
    for failure in (error, wrapped):
        found = explained(failure, ["in"], "alice")
        assert told in str(found)
        assert "to user 'alice'" in str(found)


def test_other_errors_name_no_missing_right() -> None:
    for error in (ApiError(22, "TxnOffsetCommit"), kafka.ProducerFenced()):
        assert explained(error) is error
    assert missing_right("Produce", ErrorCode.not_leader_or_follower) == ""


def test_login_backoff_has_a_higher_limit_than_other_backoffs() -> None:
    policy = RetryPolicy(backoff_ms=50, max_backoff_ms=200, max_login_backoff_ms=1_000)
    refused, lost = Patience(policy), Patience(policy)
    error = AuthenticationError("no")
    assert [refused.failed(error, now, is_login=True) for now in range(7)] == [
        *(50, 100, 200, 400, 800),
        *(1_000, 1_000),
    ]
    assert [lost.failed(OSError(), now) for now in range(4)] == [50, 100, 200, 200]
