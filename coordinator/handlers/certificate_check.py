"""Validation of changed certificate settings before they are stored.

Source: ``ConfigAdminManager.validateBrokerConfigChange`` (KAFKA-13609: INVALID_REQUEST),
``DynamicBrokerConfig.validate``, ``SslFactory.validateReconfiguration``.
"""

from __future__ import annotations

from typing import Any

from fencepost.cluster.acl import Operation
from fencepost.cluster.controller.configs import OpType
from fencepost.coordinator.config.broker_config import LISTENER_PREFIX, ConfigSource
from fencepost.coordinator.errors import InvalidRequestError
from fencepost.coordinator.handlers import Context
from fencepost.coordinator.handlers.resources import ConfigResourceType
from fencepost.coordinator.metadata.metadata import DEFAULT_SETTINGS
from fencepost.coordinator.runtime.turns import Work


def check_certificates(ctx: Context, resource: Any) -> Work[None]:
    """Load the certificates that a change of this broker's settings would configure.

    The check waits for file reads, so it is separate from the code that stores settings. Raises
    InvalidRequestError, and ConfigError for an unknown key.
    """
    check, config, name = ctx.broker.check_certificates, ctx.broker.config, resource.resource_name
    if name not in {DEFAULT_SETTINGS, str(ctx.broker.node_id)}:
        return  # another broker's files are on its own host
    about = [entry for entry in resource.configs if entry.name.startswith(LISTENER_PREFIX)]
    if check is None or resource.resource_type != ConfigResourceType.BROKER or not about:
        return
    if not ctx.may_on_cluster(Operation.ALTER_CONFIGS, audited=False):
        return  # the client must not see errors of file reads
    is_whole = not hasattr(about[0], "config_operation")
    before = ctx.broker.metadata.with_plain_passwords(name, ctx.metadata.settings(name))
    settings = {} if is_whole else dict(before)
    for entry in about:
        if is_whole or entry.config_operation == OpType.SET:
            settings[entry.name] = entry.value or ""
        else:
            settings.pop(entry.name, None)
    config.check_dynamic(settings, before)
    is_default = name == DEFAULT_SETTINGS
    source = ConfigSource.DYNAMIC_DEFAULT_BROKER if is_default else ConfigSource.DYNAMIC_BROKER
    checked = check(config.proposed(source, settings))
    yield checked
    refusal = checked.result()
    if refusal is not None:
        raise InvalidRequestError(str(refusal))
