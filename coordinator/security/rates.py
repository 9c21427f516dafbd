"""Rates over recent time, and throttle times that bring a rate back within its quota.

Times are milliseconds of a monotonic clock, passed in by the caller.
Source: ``SampledStat``, ``Rate``, ``TokenBucket``, ``QuotaUtils``; KIP-599 for the bucket.
"""

from __future__ import annotations

from typing import Final

from fencepost.logcore.values import dataclass

MAX_THROTTLE_MS: Final = 2**31 - 1
"""The maximum throttle time that a response can contain, 25 days."""


@dataclass(frozen=True, slots=True)
class RateWindow:
    """The time over which a rate is measured: ``samples`` of ``sample_ms`` each."""

    samples: int = 11
    sample_ms: int = 1000

    @property
    def full_ms(self) -> int:
        """The length of the whole window."""
        return self.samples * self.sample_ms

    @property
    def least_ms(self) -> int:
        """The minimum time over which a rate is computed, even for a new client."""
        return (self.samples - 1) * self.sample_ms


class Rate:
    """A rate per second over the samples of a window."""

    __slots__ = ("_current", "_samples", "window")

    def __init__(self, window: RateWindow) -> None:
        self.window = window
        # At most one sample more than the window has: the oldest sample may begin before the
        # window.
        self._samples: list[_Sample] = []
        self._current = 0

    def record(self, value: float, now_ms: int) -> None:
        """Add ``value``; a negative value undoes an earlier one."""
        samples = self._samples
        if not samples:
            samples.append(_Sample(now_ms))
        sample = samples[self._current]
        if now_ms - sample.begun_ms >= self.window.sample_ms:
            self._current = (self._current + 1) % (self.window.samples + 1)
            if self._current == len(samples):
                samples.append(_Sample(now_ms))
            else:
                samples[self._current].reset(now_ms)
            sample = samples[self._current]
        sample.value += value
        sample.last_ms = now_ms

    def per_second(self, now_ms: int) -> float:
        """Return the rate per second."""
        elapsed_ms = self.elapsed_ms(now_ms)
        return sum(sample.value for sample in self._samples) * 1000 / elapsed_ms

    def elapsed_ms(self, now_ms: int) -> int:
        """Return the time since the oldest sample, but at least :attr:`RateWindow.least_ms`."""
        window, oldest_ms = self.window, now_ms
        for sample in self._samples:
            if now_ms - sample.last_ms >= window.full_ms:
                sample.reset(now_ms)
            elif sample.begun_ms < oldest_ms:
                oldest_ms = sample.begun_ms
        elapsed_ms = now_ms - oldest_ms
        missing = window.samples - 1 - elapsed_ms // window.sample_ms
        return max(1, elapsed_ms + max(0, missing) * window.sample_ms)

    def throttle_ms(self, quota: float, now_ms: int) -> int:
        """Return the time until the rate falls to ``quota`` if nothing is recorded; may be 0."""
        rate = self.per_second(now_ms)
        if rate <= quota:
            return 0
        wait_ms = (rate - quota) / quota * self.elapsed_ms(now_ms)
        return int(min(wait_ms + 0.5, MAX_THROTTLE_MS))


class _Sample:
    """The amount recorded in one part of the window."""

    __slots__ = ("begun_ms", "last_ms", "value")

    def __init__(self, now_ms: int) -> None:
        self.reset(now_ms)

    def reset(self, now_ms: int) -> None:
        self.begun_ms = self.last_ms = now_ms
        self.value = 0.0


class TokenBucket:
    """A token bucket that, after an idle time, permits a burst of one whole window's quota.

    One request may overdraw the bucket; later requests then wait until the deficit is refilled.
    """

    __slots__ = ("_filled_ms", "_tokens", "window")

    def __init__(self, window: RateWindow) -> None:
        self.window = window
        self._tokens: float | None = None
        self._filled_ms = 0

    def tokens(self, quota: float, now_ms: int) -> float:
        """Refill the bucket, and return its tokens; negative if it is overdrawn."""
        burst = self.window.full_ms / 1000 * quota
        if self._tokens is None:
            self._tokens = burst
        else:
            self._tokens = min(burst, self._tokens + quota * (now_ms - self._filled_ms) / 1000)
        self._filled_ms = now_ms
        return self._tokens

    def take(self, count: float, quota: float, now_ms: int) -> None:
        """Take tokens, even more than the bucket holds."""
        self._tokens = self.tokens(quota, now_ms) - count

    def throttle_ms(self, quota: float, now_ms: int) -> int:
        """Return how long the bucket stays overdrawn; 0 if it is not overdrawn."""
        tokens = self.tokens(quota, now_ms)
        return 0 if tokens >= 0 else int(min(-tokens / quota * 1000 + 0.5, MAX_THROTTLE_MS))
