"""Re-exports the types of :mod:`fencepost.logcore.steps`, which runs long work in steps."""

from __future__ import annotations

from fencepost.logcore.steps import Steps as Steps  # noqa: PLC0414 - part of this module's interface
from fencepost.logcore.steps import finish as finish  # noqa: PLC0414 - the same
