"""The intended differences in the output of Apache Kafka's tools; other differences fail.

An entry that no longer matches a difference fails its scene as well, so that the list stays true.
docs/compatibility-tools.md lists these differences for users.
"""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Otherwise:
    """The differences of a scene that match ``pattern`` are intended, for this reason."""

    scene: str
    pattern: str
    why: str


ONE_REPLICA = "because eligible leader replicas (KIP-966) make it a dynamic setting"
NO_STREAMS_GROUPS = "streams groups are neither served nor advertised"
NO_TOKENS = "delegation tokens are not served; Apache Kafka refuses them on such a listener as well"
UNKNOWN_KEY = "a broker setting that nothing reads is refused by name"
ONE_LISTENER = "because the broker's only listener also serves the controller's requests"
LEVELS = "the features that Fencepost has: `metadata.version` from 30 on, and static voters"
SHORT_INDEX = "index files grow with their entries, whereas Apache Kafka preallocates them"

_API_VERSIONS = r"(BrokerApiVersionsCommand |ClusterTool api-versions .*)"
_GROUP_DESCRIPTION = r"--describe --group nowhere --(offsets|members|state): "

OTHERWISE = (
    Otherwise("topics", r"TopicCommand --describe .*: [-+] Topic: .* Configs: ", ONE_REPLICA),
    Otherwise(
        "configs", r".*--entity-type brokers( --entity-default)?: - min\.insync", ONE_REPLICA
    ),
    Otherwise("configs", r".*--entity-default --add-config a\.b=1: ", UNKNOWN_KEY),
    Otherwise("configs", r".*: - a\.b=null ", UNKNOWN_KEY),
    Otherwise("metadata_quorum", r".*: [-+] CurrentVoters: .*(PLAINTEXT|CONTROLLER)", ONE_LISTENER),
    Otherwise("streams_groups", rf"StreamsGroupCommand {_GROUP_DESCRIPTION}", NO_STREAMS_GROUPS),
    Otherwise("delegation_tokens", r".*Unsupported(Version|ByAuthentication)Exc", NO_TOKENS),
    Otherwise("all_features", r"FeatureCommand describe: [-+] Feature: ", LEVELS),
    Otherwise("all_features", r".*upgrade --release-version 4.4-IV2 --dry-run: ", LEVELS),
    Otherwise("all_features", r".*downgrade --metadata 4.0-IV3 .*: [-+] Can not downgrade", LEVELS),
    Otherwise("all_features", r".*upgrade --feature kraft.version=1 --dry-run: ", LEVELS),
    Otherwise("dump_log", r".*--index-sanity-check: ", SHORT_INDEX),
    *(
        Otherwise("api_versions", rf"{_API_VERSIONS}: [-+] ({name})\(\d+\): ", why)
        for name, why in (
            (r"StreamsGroup\w+", NO_STREAMS_GROUPS),
            (r"\w+DelegationToken", NO_TOKENS),
            (r"(Add|Remove|Update)RaftVoter", "the voters are static"),
        )
    ),
)


def unintended(scene: str, found: list[str]) -> list[str]:
    """Return the differences that are not listed, and a complaint for each unused entry."""
    listed = [entry for entry in OTHERWISE if entry.scene == scene]
    left = [
        difference
        for difference in found
        if not any(re.match(x.pattern, difference) for x in listed)
    ]
    unused = [x for x in listed if not any(re.match(x.pattern, difference) for difference in found)]
    return left + [
        f"deliberate, but not to be seen: {entry.pattern} ({entry.why})" for entry in unused
    ]
