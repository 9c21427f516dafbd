"""What the source and the sink refuse, in words that say what to do about it."""

from __future__ import annotations


class SparkPipelineError(Exception):
    """Base of everything that the source and the sink raise on purpose."""


class OptionError(SparkPipelineError, ValueError):
    """An option is unknown, missing, malformed or contradicts another."""


class DataLossError(SparkPipelineError):
    """Records that the query has to read are gone (``failOnDataLoss``)."""


class ProgressError(SparkPipelineError):
    """The sink's progress and Spark's checkpoint do not belong together; nothing was written."""


class SharedTransactionError(SparkPipelineError):
    """Something would write into a shared transaction that must not: it is refused."""


class AccessError(SparkPipelineError):
    """A login is refused, or a right is missing: no repetition helps before that is mended."""


class BrokerError(SparkPipelineError):
    """The broker refused a request, or could not be reached in time."""
