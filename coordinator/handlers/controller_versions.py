"""ApiVersions (18) on a controller's listener: the cluster id and node id are not compared.

Source: ``ControllerApis.handleApiVersionsRequest``.
"""

from __future__ import annotations

from fencepost.coordinator.handlers import Context, handles
from fencepost.coordinator.handlers.api_versions import versions_of
from fencepost.protocol import ApiKey, Entity


@handles(ApiKey.API_VERSIONS, versions=(0, 5), permission="NONE")
def run(ctx: Context) -> Entity:
    """Respond with the controller's versions and features."""
    return versions_of(ctx)
