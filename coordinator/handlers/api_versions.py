"""ApiVersions (18): list the served API versions and the finalized features (KIP-511, KIP-584).

Version 5 lets a client name the cluster and the node that it means to reach (KIP-1242). If another
node answers at the address, the client must find the cluster again from its bootstrap servers.

Source: ``KafkaApis.handleApiVersionsRequest``, ``ApiVersionsRequest.isValid``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Final

from kio.schema.errors import ErrorCode

from fencepost.coordinator.handlers import Context, handles
from fencepost.protocol.api import ApiKey
from fencepost.protocol.messages import ResponseFactory
from fencepost.protocol.schema import Entity

SOFTWARE = re.compile(r"[a-zA-Z0-9](?:[a-zA-Z0-9.-]*[a-zA-Z0-9])?")
"""The valid names and versions of client software (``ApiVersionsRequest.isValid``)."""

FIRST_VERSION_WITH_SOFTWARE = 3
FIRST_VERSION_WITH_ZERO_MINIMUM = 4
FIRST_VERSION_WITH_NODE = 5
NO_NODE = -1

MAX_KEPT_LISTS: Final = 16
"""The maximum number of cached lists of APIs. There is one list for each version of the response;
in a cluster, the lists change when the active controller changes."""


@handles(ApiKey.API_VERSIONS, versions=(0, 5), permission="NONE")
def run(ctx: Context) -> Entity:
    """Respond as :func:`versions_of`, unless the client means another cluster or node."""
    answer = versions_of(ctx)
    cluster_id = getattr(ctx.body, "cluster_id", None)
    if cluster_id is None or answer.error_code:
        return answer
    if (cluster_id, ctx.body.node_id) != (ctx.broker.cluster_id, ctx.broker.node_id):
        return ctx.respond.error(ErrorCode.rebootstrap_required)
    return answer


def versions_of(ctx: Context) -> Entity:
    """Respond with the registry's versions and the broker's features.

    A node id and a cluster id are only valid together.

    ``ctx.broker.features`` maps a feature's name to (lowest, highest supported, finalized level). A
    supported feature whose lowest level is 0 is left out below version 4, because older clients
    fail on a level of 0. A finalized level of 0 means that the feature is off; as in Kafka, such a
    feature is left out.
    """
    if ctx.version >= FIRST_VERSION_WITH_NODE and (
        (ctx.body.cluster_id is None) != (ctx.body.node_id == NO_NODE)
    ):
        return ctx.respond.error(ErrorCode.invalid_request)
    if ctx.version >= FIRST_VERSION_WITH_SOFTWARE:
        name, version = ctx.body.client_software_name, ctx.body.client_software_version
        if not (SOFTWARE.fullmatch(name) and SOFTWARE.fullmatch(version)):
            return ctx.respond.error(ErrorCode.invalid_request)
        ctx.connection.client_software = name, version
    make = ctx.respond
    features: Mapping[str, tuple[int, int, int]] = ctx.broker.features
    return make.message(
        error_code=ErrorCode.none,
        api_keys=_api_keys(make, tuple(ctx.registry.advertised())),
        supported_features=[
            make.SupportedFeatureKey(name=name, min_version=low, max_version=high)
            for name, (low, high, _) in sorted(features.items())
            if low > 0 or ctx.version >= FIRST_VERSION_WITH_ZERO_MINIMUM
        ],
        finalized_features_epoch=ctx.broker.features_epoch,
        finalized_features=[
            make.FinalizedFeatureKey(name=name, max_version_level=level, min_version_level=level)
            for name, (_, _, level) in sorted(features.items())
            if level > 0
        ],
    )


@lru_cache(maxsize=MAX_KEPT_LISTS)
def _api_keys(
    make: ResponseFactory, versions: tuple[tuple[int, int, int], ...]
) -> tuple[Entity, ...]:
    """Build and cache the list of APIs; all clients get the same list."""
    return tuple(
        make.ApiVersion(api_key=key, min_version=low, max_version=high)
        for key, low, high in versions
    )
