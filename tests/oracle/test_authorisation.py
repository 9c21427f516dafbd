"""The authorization matrix: both brokers get the same requests from clients with the same rules.

Clients send the same frames to both brokers, and whole responses are compared. authorisation.py
makes the cases of each request of ``authorised_*.py``; deliberate.py lists the intended
differences.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import pytest

from fencepost.protocol.api import APIS, TELEMETRY_APIS
from tests.oracle import (
    authorised_admin,
    authorised_data,
    authorised_groups,
    authorised_shares,
)
from tests.oracle.authorisation import Request, cases_of, drawn_cases, here_and_absent
from tests.oracle.authorised_brokers import GUARDED, Broker, Difference, Pair, pair_of_brokers
from tests.oracle.authorised_scenes import SCENES, addresses
from tests.oracle.deliberate import ANY_FORM, KINDS, RIGHTS, Kind, kind_of

pytestmark = [pytest.mark.oracle, pytest.mark.timeout(900)]

REQUESTS: Final[Sequence[Request]] = (
    *authorised_data.REQUESTS,
    *authorised_groups.REQUESTS,
    *authorised_shares.REQUESTS,
    *authorised_admin.REQUESTS,
)
LEAST: Final = 1500
SEEDS: Final = (1, 2, 3)
DRAWN: Final = 300
"""Number of random cases of a seed."""

OPEN: Final = {**GUARDED, "allow.everyone.if.no.acl.found": "true"}
OPEN_STEP: Final = 5
"""With OPEN, every fifth case runs, because OPEN changes only the authorizer's default."""

OPEN_APIS: Final = {
    *("create_acls", "create_topics", "delete_topics", "describe_cluster", "describe_groups"),
    *("fetch", "init_producer_id", "list_groups", "metadata", "offset_fetch", "produce"),
}
LEAST_PAIRS: Final = 100
MOST_SHOWN: Final = 30
NUMBER: Final = itertools.count()


def by_api() -> Mapping[str, list[Request]]:
    found: dict[str, list[Request]] = {}
    for request in REQUESTS:
        found.setdefault(request.api, []).append(request)
    return found


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """Yield both brokers for all tests of the module; print how many cases were compared."""
    with pair_of_brokers(tmp_path_factory.mktemp("brokers")) as both:
        yield both
    told = ", ".join(f"{api} {count}" for api, count in sorted(both.compared.items()))
    print(f"\n{both.compared.total()} cases of {len(both.compared)} APIs compared: {told}")
    for kind, count in both.meant.most_common():
        print(f"{count:5}  {kind}")


def unmeant(found: Sequence[Difference], meant: Counter[Kind]) -> list[str]:
    """Return the differences of no listed kind; count the other differences in ``meant``."""
    strange = []
    for difference in found:
        kind = kind_of(difference, (*RIGHTS, *KINDS))
        if kind is None:
            strange.append(str(difference))
        else:
            meant[kind] += 1
    return strange


@pytest.mark.parametrize("api", by_api())
def test_responses_with_and_without_each_right_are_the_same(api: str, pair: Pair) -> None:
    """Requests with each subset of the rights, for existing and missing resources."""
    for request in by_api()[api]:
        strange = unmeant(list(pair.differences(cases_of(request, NUMBER))), pair.meant)
        assert not strange, f"{len(strange)} differences:\n" + "\n".join(strange[:MOST_SHOWN])


@pytest.mark.parametrize("scene", SCENES, ids=lambda scene: scene.__name__)
def test_responses_under_changing_rights_are_the_same(
    scene: Callable[[Broker], Iterator[tuple[str, Any]]], pair: Pair
) -> None:
    """Rights that change while clients are connected, and unusual rules."""
    ours, theirs = pair.at_once(lambda broker: list(scene(broker)))
    assert ours == theirs


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "seed" in metafunc.fixturenames:
        asked = metafunc.config.getoption("--seed")
        metafunc.parametrize("seed", SEEDS if asked is None else [asked])


def test_random_rules_and_requests_get_the_same_responses(
    seed: int, pair: Pair, request: pytest.FixtureRequest
) -> None:
    """Random rules, and random requests of clients to which the rules may or may not apply."""
    count = request.config.getoption("--requests") or DRAWN
    drawn = drawn_cases(REQUESTS, seed, count)
    strange = unmeant(list(pair.differences(drawn)), pair.meant)
    assert not strange, f"{len(strange)} differences of seed {seed}:\n" + "\n".join(
        strange[:MOST_SHOWN]
    )


def test_resource_without_acl_is_open_if_the_broker_allows_it(tmp_path: Path) -> None:
    """With allow.everyone.if.no.acl.found, a resource is open until a rule names it."""
    with pair_of_brokers(tmp_path, OPEN) as pair:
        chosen = [request for request in REQUESTS if request.api in OPEN_APIS]
        cases = [case for request in chosen for case in cases_of(request, NUMBER)][::OPEN_STEP]
        cases += drawn_cases(REQUESTS, SEEDS[0], DRAWN)
        strange = unmeant(list(pair.differences(cases)), pair.meant)
        print(f"\n{pair.compared.total()} cases with allow.everyone.if.no.acl.found compared")
    assert not strange, f"{len(strange)} differences:\n" + "\n".join(strange[:MOST_SHOWN])


def test_refusal_is_the_same_for_existing_and_missing_resources(pair: Pair) -> None:
    """Both responses are the same, unless Kafka's response reveals a topic id."""
    pairs = [two for request in REQUESTS for two in here_and_absent(request, NUMBER)]
    assert len(pairs) >= LEAST_PAIRS
    ours, theirs = pair.telling(pairs)
    assert set(ours) <= set(theirs), sorted(set(ours) - set(theirs))


def test_acl_host_matches_an_address_in_any_form(pair: Pair) -> None:
    """In Apache Kafka, a host that is not in Java's form of the address matches no client."""
    ours, theirs = pair.at_once(lambda broker: list(addresses(broker, ("::ffff:127.0.0.1",))))
    refused = ["none", "topic_authorization_failed"]
    assert [told for _, told in ours] == [["none", "none"], refused], ANY_FORM
    assert [told for _, told in theirs] == [refused, ["none", "none"]], ANY_FORM


def test_each_right_of_a_request_changes_its_response(pair: Pair) -> None:
    """Apache Kafka's response changes if any one of the rights is missing."""
    idle = []
    for request in REQUESTS:
        if not request.is_idle:
            idle += [str(case) for case in pair.idle_rights(request, NUMBER)]
    assert not idle, idle


def test_every_api_and_version_has_authorization_cases() -> None:
    # Other tests cover logins. Client telemetry needs no rights, and by default neither broker
    # serves it: tests/wire/test_client_telemetry.py compares both.
    others = {"sasl_handshake", "sasl_authenticate"} | {APIS[key].module for key in TELEMETRY_APIS}
    ends = {api.module: {api.min_version, api.stable_max} for api in APIS.values()}
    assert ends.keys() - others == by_api().keys()
    for api, requests in by_api().items():
        missing = ends[api] - {version for request in requests for version in request.versions}
        assert not missing, f"{api}: no cases of versions {missing}"
    cases = sum(1 for request in REQUESTS for _ in cases_of(request, itertools.count()))
    assert cases >= LEAST, cases
