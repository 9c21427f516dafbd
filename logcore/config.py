"""The settings of a log, from the topic's configuration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from crc32c import crc32c

from fencepost.logcore.batch import DEFAULT_MAX_OUTPUT_BYTES

MAX_INT64: Final = (1 << 63) - 1

CREATE_TIME: Final = "CreateTime"
LOG_APPEND_TIME: Final = "LogAppendTime"


@dataclass(frozen=True)
class LogConfig:
    """A partition's settings, named and defaulted as Kafka's topic configs (``LogConfig``).

    ``retention_bytes`` below 0 and ``retention_ms`` of −1 mean no limit. ``compression_type`` is
    ``producer`` (keep the producer's codec), ``uncompressed`` or a codec's name.
    """

    segment_bytes: int = 1 << 30
    segment_ms: int = 604_800_000
    segment_jitter_ms: int = 0
    segment_index_bytes: int = 10_485_760
    index_interval_bytes: int = 4096
    retention_ms: int = 604_800_000
    retention_bytes: int = -1
    cleanup_policy: frozenset[str] = frozenset({"delete"})
    max_message_bytes: int = 1_048_588
    max_decompressed_message_bytes: int = (1 << 31) - 9
    flush_messages: int = MAX_INT64
    flush_ms: int = MAX_INT64
    file_delete_delay_ms: int = 60_000
    message_timestamp_type: str = CREATE_TIME
    message_timestamp_before_max_ms: int = MAX_INT64
    message_timestamp_after_max_ms: int = 3_600_000
    compression_type: str = "producer"
    compression_gzip_level: int = -1
    compression_lz4_level: int = 9
    compression_zstd_level: int = 3
    delete_retention_ms: int = 86_400_000
    min_compaction_lag_ms: int = 0
    max_compaction_lag_ms: int = MAX_INT64
    min_cleanable_dirty_ratio: float = 0.5
    preallocate: bool = False

    @property
    def is_compacted(self) -> bool:
        """Whether the log is compacted, so that every record needs a key."""
        return "compact" in self.cleanup_policy

    @property
    def max_record_bytes(self) -> int | None:
        """``max_decompressed_message_bytes``; None if the limit of a whole batch is lower."""
        bound = self.max_decompressed_message_bytes
        return bound if bound < DEFAULT_MAX_OUTPUT_BYTES else None

    def roll_after_ms(self, name: str, base_offset: int) -> int:
        """Return ``segment_ms`` less a jitter per segment, so that segments roll at various times.

        A compacted log rolls within ``max_compaction_lag_ms``, because the active segment is never
        cleaned.
        """
        segment_ms = self.segment_ms
        if self.is_compacted and self.max_compaction_lag_ms > 0:
            segment_ms = min(segment_ms, self.max_compaction_lag_ms)
        jitter = min(self.segment_jitter_ms, segment_ms)
        if jitter <= 0:
            return segment_ms
        return segment_ms - crc32c(f"{name} {base_offset}".encode()) % jitter
