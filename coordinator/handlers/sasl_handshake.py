"""SaslHandshake (17) where nobody has to log in, or somebody has: ILLEGAL_SASL_STATE.

The one that begins a login is ``coordinator/net/authentication.py``'s.

Source: ``KafkaApis.handleSaslHandshakeRequest``.
"""

from __future__ import annotations

from kio.schema.errors import ErrorCode

from fencepost.coordinator.handlers import Context, handles
from fencepost.coordinator.wire import ApiKey, Entity


@handles(ApiKey.SASL_HANDSHAKE, versions=(0, 1), permission="NONE")
def run(ctx: Context) -> Entity:
    """Refuse; the connection stays."""
    return ctx.respond.message(error_code=ErrorCode.illegal_sasl_state, mechanisms=())
