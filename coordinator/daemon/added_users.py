"""The users given on the command line (``--add-scram``)."""

from __future__ import annotations

from collections.abc import Sequence

import structlog

from fencepost.cluster.controller.scram import ScramCredentialUpsertion
from fencepost.coordinator.broker_services import Services
from fencepost.coordinator.daemon.errors import BrokerError
from fencepost.coordinator.security.added_users import AddedUserError, parse_added_user
from fencepost.coordinator.security.users import derive_keys
from fencepost.logcore.machine import DomainError

_log = structlog.get_logger(__name__)


def parse_added_users(texts: Sequence[str]) -> list[ScramCredentialUpsertion]:
    """Parse the values of ``--add-scram``. Raises BrokerError."""
    try:
        return [parse_added_user(text) for text in texts]
    except AddedUserError as error:
        raise BrokerError(f"a user to add (--add-scram): {error}") from None


async def add_users(services: Services, added: Sequence[ScramCredentialUpsertion]) -> None:
    """Add each credential, unless its user has one for the same mechanism. Raises BrokerError."""
    try:
        if services.zookeeper is None:
            active = services.active_controller
        else:
            active = services.zookeeper.own_access_decisions(None).active
        names = active.decide(lambda controller: controller.add_credentials(added, derive_keys))
        written = active.store.durable()
        if written is not None:
            await written
    except DomainError as error:
        raise BrokerError(f"a user to add (--add-scram): {error}") from error
    _log.info("users added", names=names)
