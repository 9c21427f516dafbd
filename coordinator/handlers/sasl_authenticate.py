"""SaslAuthenticate (36) on a connection that is authenticated or needs no authentication.

Source: ``KafkaApis.handleSaslAuthenticateRequest``.
"""

from __future__ import annotations

from kio.schema.errors import ErrorCode

from fencepost.coordinator.handlers import Context, handles
from fencepost.protocol import ApiKey, Entity

MESSAGE = "SaslAuthenticate request received after successful authentication"


@handles(ApiKey.SASL_AUTHENTICATE, versions=(0, 2), permission="NONE")
def run(ctx: Context) -> Entity:
    """Respond with ILLEGAL_SASL_STATE; keep the connection open."""
    return ctx.respond.error(ErrorCode.illegal_sasl_state, MESSAGE)
