"""SaslHandshake (17) on a connection that is authenticated or needs no authentication.

``coordinator/server/authentication.py`` handles the SaslHandshake that begins authentication.

Source: ``KafkaApis.handleSaslHandshakeRequest``.
"""

from __future__ import annotations

from kio.schema.errors import ErrorCode

from fencepost.coordinator.handlers import Context, handles
from fencepost.protocol import ApiKey, Entity


@handles(ApiKey.SASL_HANDSHAKE, versions=(0, 1), permission="NONE")
def run(ctx: Context) -> Entity:
    """Respond with ILLEGAL_SASL_STATE; keep the connection open."""
    return ctx.respond.message(error_code=ErrorCode.illegal_sasl_state, mechanisms=())
